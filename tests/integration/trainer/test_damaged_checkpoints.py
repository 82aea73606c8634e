"""Checkpoints that something happened to: the loaders notice, name file and tensor, and the run says what to type."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tandem.common.errors import CheckpointError, ModelError
from tandem.config import Config
from tandem.observe.run_folder.checkpoints import CheckpointFolder, CheckpointRecord
from tandem.trainer.backends import make_backend
from tandem.trainer.backends.megatron import converted
from tests.harness.runs.by_hand import assert_same_results, refits_of, undisturbed_run
from tests.harness.runs.running import coordinator, merged, steps_of, write_config
from tests.harness.trainers.damage import flip_in_tensor, forge, replace, zero_page
from tests.harness.trainers.megatron_harness import config_for, make_checkpoint
from tests.harness.trainers.trainer_harness import make_batch, make_config, make_model, run_ranks, train_on

pytestmark = pytest.mark.usefixtures("rank_server")

BACKENDS = ("dtensor", "megatron")


def config_of(backend: str, folder: Path) -> Config:
    if backend == "dtensor":
        return make_config(make_model(folder / "model"))
    return config_for(make_checkpoint(folder / "model", "qwen3"), 2, {})


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Config, Path]]:
    """Return the configuration and the folder of checkpoints of a run of a backend, after two steps and after three."""
    made: dict[str, tuple[Config, Path]] = {}

    def make(backend: str) -> tuple[Config, Path]:
        if backend not in made:
            folder = tmp_path_factory.mktemp(backend)
            config = config_of(backend, folder)
            checkpoints = CheckpointFolder(folder / "checkpoints", keep_top_k=None, higher_is_better=True)
            checkpoints.prepare()
            run_ranks(2, train_and_save, config, checkpoints.temporary_pattern, folder / "converted")
            for number in (2, 3):
                record = CheckpointRecord(step=number, version=number, metric_name="", metric=None, config_json="{}")
                checkpoints.publish(record)
            made[backend] = config, folder / "checkpoints"
        return made[backend]

    return make


def train_and_save(rank: int, config: Config, pattern: str, base: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NRL_MEGATRON_CHECKPOINT_DIR", str(base))
        backend = make_backend(config, checkpoint=None)
    for number in (1, 2, 3):
        train_on(backend, make_batch(8, seed=number), config)
        if number > 1:
            backend.save(Path(pattern.format(step=number))).num_bytes.result()


def boxes(folder: Path, index: int = 0) -> Path:
    return sorted((folder / "optimizer").glob("boxes-*"))[index]


MODEL = "policy/model.safetensors"
Inflict = Callable[[Path], str]
"""Damages a checkpoint; returns what the error must say, as a regular expression that begins with the file."""


def changed(path: str, old: str, new: str) -> Inflict:
    def inflict(folder: Path) -> str:
        text = (folder / path).read_text()
        assert old in text
        (folder / path).write_text(re.sub(rf"{old}(\W*)\d", rf"{old}\g<1>{new}", text, count=1))
        assert (folder / path).read_text() != text
        return f"{path} is damaged: "

    return inflict


def policy_of_another_step(folder: Path) -> str:
    replace(folder / "policy", folder.with_name("other") / "policy")
    return f"{MODEL} is damaged: .* is not what was written"


def tensor(damage: Callable[[Path, str], str], path: Callable[[Path], Path], part: str) -> Inflict:
    def inflict(folder: Path) -> str:
        name = damage(path(folder), part)
        assert part in name
        return rf"{path(folder).relative_to(folder)} is damaged: {re.escape(name)} is not what was written"

    return inflict


DAMAGES: dict[str, Inflict] = {
    "a bit of the policy": tensor(flip_in_tensor, lambda folder: folder / MODEL, "layers.1.mlp.up_proj"),
    "a bit of a norm": tensor(flip_in_tensor, lambda folder: folder / MODEL, "norm"),
    "a page of the policy": tensor(zero_page, lambda folder: folder / MODEL, "q_proj"),
    "a bit of the optimizer": tensor(flip_in_tensor, boxes, "exp_avg"),
    "a bit of another rank's part": tensor(flip_in_tensor, lambda folder: boxes(folder, -1), "exp_avg_sq"),
    "a page of the optimizer": tensor(zero_page, boxes, "exp_avg_sq"),
    "another count": changed("optimizer/optimizer.json", "num_optimizer_steps", "7"),
    "another rope_theta": changed("policy/config.json", "rope_theta", "5"),
    "the policy of another step": policy_of_another_step,
}


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_damage_is_noticed_by_whoever_loads(
    backend: str, saved: Callable[[str], tuple[Config, Path]], tmp_path: Path
) -> None:
    config, checkpoints = saved(backend)
    shutil.copytree(checkpoints / "step_2", tmp_path / "other")
    folders, complaints = [], []
    for number, inflict in enumerate(DAMAGES.values()):
        folders.append(tmp_path / str(number))
        shutil.copytree(checkpoints / "step_3", folders[-1])
        complaints.append(f"{folders[-1]}/{inflict(folders[-1])}")
    shutil.copytree(checkpoints / "step_3", tmp_path / "whole")
    for errors in run_ranks(2, errors_of, config, [*folders, tmp_path / "whole"]):
        *found, none = errors
        assert none == ""
        for damage, error, complaint in zip(DAMAGES, found, complaints, strict=True):
            assert re.fullmatch(rf"(rank \d )?{complaint}.*", error), (damage, error)


def errors_of(rank: int, config: Config, folders: Sequence[Path]) -> list[str]:
    """Return what each checkpoint is refused with, empty where it is not."""
    found = []
    for folder in folders:
        try:
            make_backend(config, checkpoint=folder).close()
            found.append("")
        except CheckpointError as error:
            found.append(str(error))
            leave_groups(config)
    return found


def leave_groups(config: Config) -> None:
    """Do what a process does by ending, after its backend could not be made."""
    if config.policy.megatron_cfg.enabled:
        from megatron.core import parallel_state

        parallel_state.destroy_model_parallel()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_checkpoint_that_a_later_run_begins_with_is_read_with_its_manifest(
    backend: str, saved: Callable[[str], tuple[Config, Path]], tmp_path: Path
) -> None:
    config, checkpoints = saved(backend)
    shutil.copytree(checkpoints / "step_3", tmp_path / "step_3")
    name = flip_in_tensor(tmp_path / "step_3" / MODEL, "down_proj")
    (tmp_path / "latest").symlink_to("step_3")
    for error in run_ranks(2, model_error, config, tmp_path / "latest" / "policy", tmp_path / "converted"):
        assert re.search(rf"{tmp_path}/step_3/{MODEL} is damaged: {re.escape(name)} is not what was written", error)


def model_error(rank: int, config: Config, model: Path, base: Path) -> str:
    policy = msgspec.structs.replace(config.policy, model_name=str(model))
    config = msgspec.structs.replace(config, policy=policy)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NRL_MEGATRON_CHECKPOINT_DIR", str(base))
        with pytest.raises((CheckpointError, ModelError)) as raised:
            make_backend(config, checkpoint=None)
    return str(raised.value)


def test_a_converted_checkpoint_that_was_damaged_is_named_and_made_again_once_deleted(tmp_path: Path) -> None:
    config = config_of("megatron", tmp_path)
    (first, again) = run_ranks(1, converted_errors, config, tmp_path / "converted")[0]
    target = re.escape(str(tmp_path / "converted"))
    assert re.fullmatch(
        rf"({target}/\S+)/parameters-00000.safetensors is damaged: \S*linear_fc2\S* is not what was written; "
        r"delete \1, and \S+ is converted again",
        first,
    ), first
    assert again == ""


def converted_errors(rank: int, config: Config, base: Path) -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NRL_MEGATRON_CHECKPOINT_DIR", str(base))
        converted.open_tensors(config.policy.model_name, config)
        (path,) = base.glob("*/parameters-*")
        flip_in_tensor(path, "linear_fc2")
        with pytest.raises(ModelError) as raised:
            converted.open_tensors(config.policy.model_name, config)
        shutil.rmtree(path.parent)
        converted.open_tensors(config.policy.model_name, config)
        (path.parent / "converted.json").write_text("{")  # as good as none
        converted.open_tensors(config.policy.model_name, config)
    return [str(raised.value), ""]


# --- whole runs ------------------------------------------------------------------------------------------------------

SIX: dict[str, Any] = {"grpo": {"max_num_steps": 6, "val_period": 0}, "checkpointing": {"metric_name": "reward"}}
FOUR = merged(SIX, {"grpo": {"max_num_steps": 4}})


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run of six steps."""
    return undisturbed_run(tmp_path_factory.mktemp("undisturbed"), SIX)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the same run, ended after four."""
    return undisturbed_run(tmp_path_factory.mktemp("four"), FOUR)


def refusal(config: Path, *how: str) -> str:
    """Resume; return the one line that it is refused with."""
    ended = coordinator("up", config, "--resume", *how)
    assert ended.returncode == 1, ended.stdout
    (line,) = ended.stderr.splitlines()
    return line


def resumable(four: Path) -> tuple[Path, Path]:
    """Return the configuration of six steps and the newest checkpoint of a copy of the run of four."""
    shutil.copytree(four, "run", symlinks=True)
    return write_config(SIX), Path("run/checkpoints/step_4")


def test_a_flipped_bit_is_one_line_and_what_it_says_to_type_works(four: Path, undisturbed: Path) -> None:
    config, checkpoint = resumable(four)
    name = flip_in_tensor(checkpoint / MODEL, "layers.0.mlp")
    words = f"coordinator up {config} --resume --from 2"
    line = refusal(config)
    assert line == (
        f"error: {checkpoint.absolute() / MODEL} is damaged: {name} is not what was written; "
        f"the newest that is whole is that of step 2: {words}"
    )
    assert "these have: 2, 4" in refusal(config, "--from", "3")
    ended = coordinator(*words.split()[1:])
    assert ended.returncode == 0, ended.stderr
    assert "resuming at step 3" in ended.stdout
    assert_same_results("run", undisturbed)
    assert {path.name for path in checkpoint.parent.glob("*step_*")} == {
        "step_2",
        "step_4",
        "step_6",
        "superseded_step_4.1",
    }


def test_a_supervised_run_goes_back_by_itself(four: Path, undisturbed: Path) -> None:
    config, checkpoint = resumable(four)
    flip_in_tensor(checkpoint / MODEL, "layers.0.mlp")
    ended = coordinator("up", config, "--supervise", "--resume")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    told = "its newest checkpoint is damaged; it is started again, from the checkpoint of step 2"
    assert f"the coordinator was ended: {told}" in ended.stdout
    assert_same_results("run", undisturbed)


def test_a_step_of_another_run_is_refused_before_anything_starts(four: Path, undisturbed: Path) -> None:
    config, checkpoint = resumable(four)
    replace(checkpoint, undisturbed / "checkpoints" / "step_4")
    line = refusal(config)
    assert "step_4 is damaged: what lies there is of the run " in line
    assert line.endswith(f"coordinator up {config} --resume --from 2")


def test_weights_that_only_the_journal_knows_to_be_others_are_refused(four: Path) -> None:
    """Policy and manifest agree; but that is not what the run had trained."""
    config, checkpoint = resumable(four)
    (digest,) = {record.digest for record in refits_of(four) if record.version == 4}
    replace(checkpoint / "policy", checkpoint.with_name("step_2") / "policy")
    forge(checkpoint)
    line = refusal(config)
    assert re.search(rf"step_4 is damaged: its weights have .* those of version 4 had {digest:016x}", line), line
    assert line.endswith(f"coordinator up {config} --resume --from 2")
    assert len(steps_of()) == 4, "nothing was trained on them"
