"""Checkpoints: readable by Hugging Face, whole or refused, and a resumed run that equals an uninterrupted one."""

from __future__ import annotations

import json
import math
import re
import resource
import shutil
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors import safe_open

from tandem.common.errors import CheckpointError
from tandem.config import Config
from tandem.refit.layout import Box
from tandem.trainer.backends.dtensor import DTensorBackend
from tandem.trainer.files import checkpoints
from tandem.trainer.files.box_files import BoxFiles, BoxPart
from tests.harness.trainers.checkpoint_harness import no_pickle
from tests.harness.trainers.trainer_harness import (
    ARCHITECTURES,
    FAMILIES,
    OTHER_ATTENTION,
    STATEFUL,
    digest_of,
    make_batch,
    make_config,
    make_model,
    run_ranks,
    train_on,
    train_while_saving,
)

pytestmark = pytest.mark.usefixtures("rank_server")

SCHEDULER = [
    {"name": "torch.optim.lr_scheduler.LinearLR", "kwargs": {"start_factor": 0.1, "total_iters": 3}},
    {"name": "torch.optim.lr_scheduler.ExponentialLR", "kwargs": {"gamma": 0.9}},
    {"milestones": [3]},
]


def train_and_save(
    rank: int, config: Config, seeds: Sequence[int], checkpoint: Path | None, folder: Path | None
) -> tuple[list[dict[str, float]], int, int]:
    """Train from a checkpoint (or the start) on the batches of these seeds, and save; return metrics, digest, bytes."""
    backend = DTensorBackend(config, checkpoint=checkpoint)
    metrics = [train_on(backend, make_batch(16, seed=seed), config).metrics for seed in seeds]
    num_bytes = backend.save(folder).num_bytes.result() if folder is not None else 0
    return metrics, digest_of(backend), num_bytes


def config_for_resume(model: Path, train_micro_batch_size: int = 2, **dtensor_cfg: Any) -> Config:
    """Everything that has state: a schedule, a reference model, several optimizer steps a batch."""
    return make_config(
        model,
        loss={"reference_policy_kl_penalty": 0.1},
        train_global_batch_size=8,
        train_micro_batch_size=train_micro_batch_size,
        scheduler=SCHEDULER,
        trainers=math.prod(size for key, size in dtensor_cfg.items() if key.endswith("_size")),
        dtensor_cfg=dtensor_cfg,
    )


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, whole: the policy's and the optimizer's."""
    return tensors_in(folder / "policy") | optimizer_in(folder / "optimizer")


def tensors_in(policy: Path) -> dict[str, torch.Tensor]:
    with safe_open(policy / "model.safetensors", "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def optimizer_in(folder: Path) -> dict[str, torch.Tensor]:
    files, tensors = BoxFiles(folder), {}
    for name, shape in files.shapes.items():
        tensors[name] = torch.empty(shape)
        files.read(name, shape, Box((0,) * len(shape), shape), tensors[name])
    return tensors


@pytest.mark.parametrize(
    ("saved_on", "loaded_on", "architecture"),
    # On three ranks, one has no part of the tensors of four experts.
    [(2, 1, "qwen3"), (1, 2, "qwen3"), (3, 2, "qwen3"), (3, 2, "qwen3_moe"), (2, 3, "qwen3_moe")],
)
def test_any_number_of_ranks_restores_every_bit(
    saved_on: int, loaded_on: int, architecture: str, tmp_path: Path
) -> None:
    config = config_for_resume(make_model(tmp_path / "model", architecture))
    assert_restored((saved_on, config), (loaded_on, config), tmp_path)


TP2 = {"tensor_parallel_size": 2}
CP2 = {"context_parallel_size": 2}
EP2 = {"expert_parallel_size": 2}
HSDP = {"dp_replicate_size": 2}


@pytest.mark.parametrize(
    ("saved_on", "saved_with", "loaded_on", "loaded_with", "architecture"),
    [
        (4, TP2, 1, {}, "qwen3"),
        (3, {}, 4, TP2 | {"sequence_parallel": True}, "qwen3_moe"),
        (4, TP2 | CP2, 6, TP2, "qwen2"),
        (2, EP2, 1, {}, "qwen3_moe"),
        (3, {}, 4, EP2 | HSDP, "qwen3_moe"),
        (6, EP2, 4, TP2 | EP2, "glm4_moe"),
    ],
)
def test_other_parallel_sizes_restore_every_bit(
    saved_on: int,
    saved_with: dict[str, Any],
    loaded_on: int,
    loaded_with: dict[str, Any],
    architecture: str,
    tmp_path: Path,
) -> None:
    folder = make_model(tmp_path / "model", architecture)
    configs = [config_for_resume(folder, **settings) for settings in (saved_with, loaded_with)]
    assert_restored((saved_on, configs[0]), (loaded_on, configs[1]), tmp_path)


def assert_restored(saved: tuple[int, Config], loaded: tuple[int, Config], tmp_path: Path) -> None:
    """Save on some ranks, load on others when they are built and when they have trained, and save again."""
    run_ranks(saved[0], train_and_save, saved[1], [0, 1], None, tmp_path / "first")
    run_ranks(loaded[0], load_and_save_twice, loaded[1], tmp_path / "first", tmp_path / "second", tmp_path / "third")
    first, second, third = (tensors_of(tmp_path / name) for name in ("first", "second", "third"))
    assert any("exp_avg_sq" in name for name in first)
    assert first["state.model.norm.weight.step"].item() == 4
    counts = [checkpoints.read_counts(tmp_path / name) for name in ("first", "second", "third")]
    assert counts[2][:2] == (4, 2)
    assert counts[0] == counts[1] == counts[2]
    assert first.keys() == second.keys() == third.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name
        assert torch.equal(tensor, third[name]), name


def load_and_save_twice(rank: int, config: Config, source: Path, built: Path, trained: Path) -> None:
    """Save what a backend is built from, and what it loads again when it has trained."""
    backend = DTensorBackend(config, checkpoint=source)
    backend.save(built).num_bytes.result()
    train_on(backend, make_batch(seed=9), config)
    backend.load(source)
    backend.save(trained).num_bytes.result()


SEEDS = (0, 1, 2, 3)
Uninterrupted = Callable[[int], tuple[Config, list[Any]]]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, rank_server: None) -> Uninterrupted:
    """Return what carries out the whole run on so many ranks, once: its configuration, and what each rank returns."""

    @cache
    def carried_out(world_size: int) -> tuple[Config, list[Any]]:
        settings = TP2 | CP2 if world_size == 4 else {}
        model = make_model(tmp_path_factory.mktemp("uninterrupted") / "model")
        config = config_for_resume(model, train_micro_batch_size=4 if world_size == 4 else 2, **settings)
        return config, run_ranks(world_size, train_and_save, config, seeds_of(world_size), None, None)

    return carried_out


def seeds_of(world_size: int) -> list[int]:
    """Return the batches of a run: those that share tensors and sequences take eight times as long for each."""
    return [*SEEDS[:2]] if world_size == 4 else [*SEEDS]


@pytest.mark.parametrize(
    ("world_size", "num_before"), [*((ranks, before) for ranks in (1, 2) for before in (0, 1, 2)), (4, 1)]
)
def test_a_resumed_run_equals_an_uninterrupted_one(
    world_size: int, num_before: int, uninterrupted: Uninterrupted, tmp_path: Path
) -> None:
    """Four ranks share tensors and sequences."""
    config, whole = uninterrupted(world_size)
    seeds = seeds_of(world_size)
    saving = run_ranks(world_size, save_aside, config, seeds, num_before, tmp_path / "saved")
    after = run_ranks(world_size, train_and_save, config, seeds[num_before:], tmp_path / "saved", None)
    for rank in range(world_size):
        assert saving[rank] == whole[rank][:2], "to save changes nothing"
        assert after[rank][0] == whole[rank][0][num_before:], "metrics, to the last bit"
        assert after[rank][1] == whole[rank][1], "weights, to the last bit"


def save_aside(
    rank: int, config: Config, seeds: Sequence[int], num_before: int, folder: Path
) -> tuple[list[dict[str, float]], int]:
    backend = DTensorBackend(config, checkpoint=None)
    metrics = train_while_saving(backend, config, seeds, num_before, folder)
    return metrics, digest_of(backend)


def test_without_memory_for_copies_training_waits_and_the_checkpoint_is_the_same(tmp_path: Path) -> None:
    config = config_for_resume(make_model(tmp_path / "model", "qwen3_moe"))
    for why in run_ranks(2, save_both_ways, config, tmp_path):
        assert re.fullmatch(
            r"a copy takes 0\.0 GB of a host's memory, where 0\.0 GB are free, and .* only if 2 fit", why
        )
    aside, at_once = tensors_of(tmp_path / "aside"), tensors_of(tmp_path / "at_once")
    assert aside.keys() == at_once.keys()
    for name, tensor in aside.items():
        assert torch.equal(tensor, at_once[name]), name


def save_both_ways(rank: int, config: Config, folder: Path) -> str:
    backend = DTensorBackend(config, checkpoint=None)
    train_on(backend, make_batch(16), config)
    aside = backend.save(folder / "aside")
    assert aside.why_waited == ""
    assert aside.num_bytes.result() > 0
    if rank == 1:  # one host of many would be enough
        leave_no_memory()
    at_once = backend.save(folder / "at_once")
    assert at_once.num_bytes.done()
    assert at_once.num_bytes.result() == aside.num_bytes.result()
    return at_once.why_waited


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, *FAMILIES, *STATEFUL, *OTHER_ATTENTION])
def test_hugging_face_loads_the_policy(architecture: str, tmp_path: Path) -> None:
    config = make_config(make_model(tmp_path / "model", architecture))
    token_ids_BT = torch.arange(3, 19)[None]
    said = run_ranks(2, train_save_and_say, config, tmp_path / "saved", token_ids_BT.tolist())
    num_bytes = sum(size for size, _ in said)
    files = [path for path in (tmp_path / "saved").rglob("*") if path.is_file()]
    assert num_bytes == sum(path.stat().st_size for path in files)

    policy = tmp_path / "saved" / "policy"
    with (
        safe_open(policy / "model.safetensors", "pt") as saved,
        safe_open(tmp_path / "model" / "model.safetensors", "pt") as original,
    ):
        assert set(saved.keys()) == set(original.keys()), "names as every Hugging Face tool knows them"
        assert {str(saved.get_tensor(name).dtype) for name in saved.keys()} == {"torch.float32"}  # noqa: SIM118
    assert transformers.AutoConfig.from_pretrained(policy).architectures == [
        type(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")).__name__
    ]
    assert (
        transformers.AutoTokenizer.from_pretrained(policy)("1+1=")["input_ids"]
        == transformers.AutoTokenizer.from_pretrained(tmp_path / "model")("1+1=")["input_ids"]
    )

    loaded = transformers.AutoModelForCausalLM.from_pretrained(policy)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the ranks: a sum over experts depends on how many threads share it
    with torch.no_grad():
        logits_BTV = loaded(input_ids=token_ids_BT).logits
    torch.set_num_threads(num_threads)
    for _, trainers_BTV in said:
        # To the bit, but where the trainer's attention takes the place of one that makes a matrix of all scores.
        tolerance = 0.0 if architecture in ARCHITECTURES else 1e-5
        torch.testing.assert_close(torch.tensor(trainers_BTV), logits_BTV, rtol=0, atol=tolerance)


def train_save_and_say(rank: int, config: Config, folder: Path, token_ids_BT: list[list[int]]) -> tuple[int, Any]:
    """Return how many bytes were saved, and the logits of another backend that is built from them."""
    _, _, num_bytes = train_and_save(rank, config, [0], None, folder)
    dist.barrier()
    backend = DTensorBackend(config, checkpoint=folder)
    with torch.no_grad():
        model = backend._held["policy", 0].model
        return num_bytes, model(input_ids=torch.tensor(token_ids_BT), use_cache=False).logits.tolist()


def test_a_policy_larger_than_a_file_is_several_and_an_index(tmp_path: Path) -> None:
    config = make_config(make_model(tmp_path / "model", "qwen3_moe"))
    sizes = run_ranks(2, save_in_small_files, config, tmp_path)
    policy = tmp_path / "small" / "policy"
    names = sorted(path.name for path in policy.glob("*.safetensors"))
    assert len(names) > 3
    assert names[0] == f"model-00001-of-{len(names):05d}.safetensors"
    assert all((policy / name).stat().st_size < 2 * SMALL_FILE for name in names)
    files = [path for path in (tmp_path / "small").rglob("*") if path.is_file()]
    assert sum(sizes) == sum(path.stat().st_size for path in files)
    index = json.loads((policy / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == set(names)
    from_small = transformers.AutoModelForCausalLM.from_pretrained(policy).state_dict()
    from_one = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "one" / "policy").state_dict()
    assert from_small.keys() == from_one.keys()
    for name, tensor in from_one.items():
        assert torch.equal(tensor, from_small[name]), name
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors_in(tmp_path / "one" / "policy").values())

    assert len(list((tmp_path / "small" / "optimizer").iterdir())) > 4
    small, one = (optimizer_in(tmp_path / name / "optimizer") for name in ("small", "one"))
    assert small.keys() == one.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, small[name]), name


SMALL_FILE = 30_000
"""Room for the embedding and for two of four experts, not for a layer."""


def save_in_small_files(rank: int, config: Config, folder: Path) -> int:
    backend = DTensorBackend(config, checkpoint=None)
    train_on(backend, make_batch(), config)
    backend.save(folder / "one").num_bytes.result()
    small = checkpoints.save(folder / "small", backend._states(), config, max_file_bytes=SMALL_FILE)
    return small.num_bytes.result()


def test_nothing_is_pickled(tmp_path: Path) -> None:
    config = config_for_resume(make_model(tmp_path / "model"))
    run_ranks(2, save_and_load_without_pickle, config, tmp_path / "saved")
    kinds = {path.suffix for path in (tmp_path / "saved").rglob("*") if path.is_file()}
    assert kinds == {".safetensors", ".json", ".jinja"}


def save_and_load_without_pickle(rank: int, config: Config, folder: Path) -> None:
    backend = DTensorBackend(config, checkpoint=None)
    train_on(backend, make_batch(16), config)
    with no_pickle():
        backend.save(folder).num_bytes.result()
        dist.barrier()
        backend.load(folder)
        DTensorBackend(config, checkpoint=folder)


# Rank 0 fails in config.json, of 1 kB, or in the weights, of 67 kB; rank 1 in its optimizer state, of 66 kB.
@pytest.mark.parametrize(
    ("failing_rank", "most_bytes", "has_room_for_copies"),
    [(0, 100, True), (0, 3000, True), (0, 3000, False), (1, 10_000, True)],
)
def test_a_full_disk_on_one_rank_is_its_error_and_training_goes_on(
    failing_rank: int, most_bytes: int, has_room_for_copies: bool, tmp_path: Path
) -> None:
    config = make_config(make_model(tmp_path / "model"))
    given = failing_rank, most_bytes, has_room_for_copies
    errors = run_ranks(2, save_without_room, config, tmp_path, *given, deadline_s=60)
    part = "policy" if failing_rank == 0 else "optimizer"
    assert errors[1 - failing_rank] is None
    assert f"cannot write {tmp_path / 'full' / part}: " in errors[failing_rank]
    assert "File too large" in errors[failing_rank]
    assert "\n" not in errors[failing_rank]


def save_without_room(
    rank: int, config: Config, folder: Path, failing_rank: int, most_bytes: int, has_room_for_copies: bool
) -> str | None:
    """Fail to save, because the files of one rank may not grow larger; then train and save on."""
    if not has_room_for_copies:
        leave_no_memory()
    backend = DTensorBackend(config, checkpoint=None)
    train_on(backend, make_batch(), config)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == failing_rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, limits[1]))
    error = backend.save(folder / "full").num_bytes.exception()
    assert error is None or isinstance(error, CheckpointError)
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    train_on(backend, make_batch(), config)
    backend.save(folder / "roomy").num_bytes.result()
    dist.barrier()
    DTensorBackend(config, checkpoint=folder / "roomy")
    return None if error is None else str(error)


def leave_no_memory() -> None:
    """Have this process believe that its host has hardly any memory left."""
    checkpoints.available_bytes = lambda: 1000


def test_a_full_disk_is_the_reason_wherever_in_the_file_it_is_met(tmp_path: Path) -> None:
    """Between two tensors, or within one."""
    (errors,) = run_ranks(1, write_without_room, tmp_path, deadline_s=60)
    for limit, error in errors.items():
        assert error.startswith(f"cannot write {tmp_path / str(limit) / 'optimizer'}: ")
        assert "File too large" in error


def write_without_room(rank: int, folder: Path) -> dict[int, str]:
    """Fail to write tensors of 12 kB and of 32 bytes with room for this many bytes; return the errors."""
    tensors = [torch.zeros(8 if i % 2 else 3000) for i in range(8)]
    parts = [BoxPart(f"{i}", tensor.shape, Box((0,), tensor.shape), tensor) for i, tensor in enumerate(tensors)]
    copy = checkpoints._Copy("policy", None, [], parts, 1)
    errors = {}
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    for limit in range(500, 40_000, 4000):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
        with pytest.raises(CheckpointError) as raised:
            checkpoints._write_optimizer(folder / str(limit), copy, checkpoints.MAX_FILE_BYTES)
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        errors[limit] = str(raised.value)
    return errors


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    config = make_config(make_model(tmp_path / "model"))
    errors = run_ranks(2, save_error, config, tmp_path / "taken")
    assert errors[0] == f"cannot write {tmp_path / 'taken' / 'policy'}: Not a directory"
    assert errors[1] == f"cannot write {tmp_path / 'taken' / 'optimizer'}: Not a directory"


def test_a_tokenizer_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "saved" / "policy" / "tokenizer.json").mkdir(parents=True)
    config = make_config(make_model(tmp_path / "model"))
    errors = run_ranks(2, save_error, config, tmp_path / "saved")
    assert f"cannot write {tmp_path / 'saved' / 'policy'}: Is a directory" in errors[0]
    assert errors[1] is None


def save_error(rank: int, config: Config, folder: Path) -> str | None:
    error = DTensorBackend(config, checkpoint=None).save(folder).num_bytes.exception()
    assert error is None or isinstance(error, CheckpointError)
    return None if error is None else str(error)


@pytest.fixture(scope="module")
def whole_checkpoint(tmp_path_factory: pytest.TempPathFactory, rank_server: None) -> tuple[Config, Path]:
    """Return a configuration and a checkpoint that two ranks wrote by it, to be copied and damaged."""
    folder = tmp_path_factory.mktemp("whole")
    config = make_config(make_model(folder / "model"))
    run_ranks(2, train_and_save, config, [0], None, folder / "saved")
    return config, folder / "saved"


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        ("no optimizer", "cannot read {}: it has no optimizer.json"),
        ("old format", "cannot read {}: it has no optimizer.json: an earlier version of Tandem wrote it"),
        ("only counts", "cannot read {}: it has no boxes-.*: it is not whole"),
        ("first file gone", "cannot read {}: state.* is in none of its files: one is missing"),
        # What is left of the weights looks like smaller weights.
        ("last file gone", "cannot read {}: a file is missing"),
        ("cut short", "cannot read {}: .*incomplete"),
        ("another model", "is a checkpoint of another model: "),
    ],
)
def test_a_damaged_checkpoint_is_refused(
    damage: str, complaint: str, whole_checkpoint: tuple[Config, Path], tmp_path: Path
) -> None:
    config, whole = whole_checkpoint
    shutil.copytree(whole, tmp_path / "saved")
    optimizer = tmp_path / "saved" / "optimizer"
    files = sorted(optimizer.glob("boxes-*"))
    match damage:
        case "no optimizer":
            optimizer.rename(tmp_path / "gone")
        case "old format":
            (optimizer / "optimizer.json").rename(optimizer / "shard-00001-model-00001-of-00001.safetensors")
        case "only counts":
            for path in files:
                path.unlink()
        case "first file gone":
            files[0].unlink()
        case "last file gone":
            files[-1].unlink()
        case "cut short":
            files[-1].write_bytes(files[-1].read_bytes()[:-1000])
        case "another model":
            other = make_config(make_model(tmp_path / "other", "llama"))
            run_ranks(1, train_and_save, other, [0], None, tmp_path / "other_saved")
    source = tmp_path / ("other_saved" if damage == "another model" else "saved")
    for error in run_ranks(2, load_error, config, source, deadline_s=60):
        assert "\n" not in error
        assert str(source) in error
        assert re.search(complaint.format(re.escape(str(optimizer))), error), error


def load_error(rank: int, config: Config, folder: Path) -> str:
    backend = DTensorBackend(config, checkpoint=None)
    with pytest.raises(CheckpointError) as raised:
        backend.load(folder)
    return str(raised.value)


def test_the_step_of_a_checkpoint_is_in_its_name(tmp_path: Path) -> None:
    (tmp_path / "step_12").mkdir()
    (tmp_path / "latest").symlink_to("step_12")
    assert checkpoints.step_of(tmp_path / "step_12") == 12
    assert checkpoints.step_of(tmp_path / "latest") == 12
    for name in ("step_x", "step_", ".writing_step_3", "policy"):
        with pytest.raises(CheckpointError, match="is no checkpoint of Tandem"):
            checkpoints.step_of(tmp_path / name)
