"""Checkpoints converted for Megatron-Core: once, whole or not at all, whoever starts at once or dies half way."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem.common.errors import ModelError
from tandem.refit.adapters.catalogue import read_shape
from tandem.refit.layout import Box, whole
from tandem.trainer.backends.megatron import converted
from tandem.trainer.backends.megatron.converted import ConvertedFolder, convert_once
from tests.harness.trainers.megatron_harness import MODELS, make_checkpoint, tensors_in
from tests.harness.trainers.trainer_harness import CONTEXT, make_config, run_ranks

pytestmark = pytest.mark.usefixtures("rank_server")

PATIENCE_S = 60.0


@pytest.fixture(autouse=True)
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NRL_MEGATRON_CHECKPOINT_DIR", str(tmp_path / "converted"))
    return tmp_path / "converted"


def convert(folder: Path, deadline_s: float = PATIENCE_S, order: str = "") -> Path:
    return convert_once("org/tiny", folder, read_shape(folder), deadline_s, order)


@pytest.mark.parametrize("model", MODELS)
def test_any_box_of_any_tensor_is_found_in_what_megatron_has(model: str, tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "checkpoint", model)
    found, random = ConvertedFolder(convert(checkpoint), read_shape(checkpoint)), np.random.default_rng(0)
    for name, tensor in tensors_in(checkpoint).items():
        assert torch.equal(found.read(name, tensor.shape, whole(tensor.shape)), tensor), name
        for _ in range(3):
            ends = [sorted(random.integers(0, n + 1, 2).tolist()) for n in tensor.shape]
            box = Box(tuple(a for a, _ in ends), tuple(b - a for a, b in ends))
            if box.num_elements:
                assert torch.equal(found.read(name, tensor.shape, box), tensor[box.region]), (name, box)


def test_names_and_order_of_rows_are_those_of_megatron(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "checkpoint", "llama")
    found, tensors = tensors_in(convert(checkpoint)), tensors_in(checkpoint)
    layer = "model.layers.1.self_attn."
    q, k, v = (tensors[f"{layer}{part}_proj.weight"].unflatten(0, (2, -1)) for part in "qkv")
    assert torch.equal(
        found["decoder.layers.1.self_attention.linear_qkv.weight"], torch.cat([q, k, v], 1).flatten(0, 1)
    )
    embedding = found["embedding.word_embeddings.weight"]
    assert torch.equal(embedding[:26], tensors["model.embed_tokens.weight"])
    assert embedding.shape == (128, 32)
    assert not embedding[26:].any()


def test_a_checkpoint_is_converted_again_only_if_it_changed_or_by_order(tmp_path: Path, base: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "checkpoint", "llama")
    first = convert(checkpoint)
    assert first.parent == base
    assert first.name.startswith("org--tiny-")
    made = first.stat().st_ino
    (file,) = checkpoint.glob("*.safetensors")
    os.utime(file)
    assert convert(checkpoint) == first
    assert first.stat().st_ino == made

    assert convert(checkpoint, order="one") == first
    by_order = first.stat().st_ino
    assert by_order != made
    assert convert(checkpoint, order="one") == convert(checkpoint) == first
    assert first.stat().st_ino == by_order

    tensors = load_file(file)
    tensors["model.norm.weight"][0] += 1
    save_file(tensors, file, metadata={"format": "pt"})
    assert convert(checkpoint) != first
    assert sorted(path.suffix for path in base.iterdir()) == ["", "", ".lock", ".lock"]


def test_where_converted_checkpoints_are(monkeypatch: pytest.MonkeyPatch, base: Path) -> None:
    assert converted.base_folder() == base
    monkeypatch.delenv("NRL_MEGATRON_CHECKPOINT_DIR")
    monkeypatch.setenv("HF_HOME", "/hub")
    assert converted.base_folder() == Path("/hub/nemo_rl")
    monkeypatch.delenv("HF_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert converted.base_folder() == Path("/home/me/.cache/huggingface/nemo_rl")


def test_of_several_that_start_at_once_one_converts(tmp_path: Path, base: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "checkpoint", "qwen3_moe")
    found = run_ranks(3, convert_at_once, checkpoint, base)
    assert len(set(found)) == 1


def convert_at_once(rank: int, checkpoint: Path, base: Path) -> int:
    os.environ["NRL_MEGATRON_CHECKPOINT_DIR"] = str(base)
    torch.distributed.barrier()
    inode = convert(checkpoint).stat().st_ino
    torch.distributed.barrier()
    return inode


def test_a_run_reconverts_once_for_all_its_ranks(tmp_path: Path, base: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "checkpoint", "llama")
    former = convert_once(str(checkpoint), checkpoint, read_shape(checkpoint), PATIENCE_S).stat().st_ino
    config = make_config(checkpoint, megatron_cfg={"force_reconvert_from_hf": True})
    found = run_ranks(2, open_as_rank, config, base)
    assert len({inode for inode, _ in found} | {former}) == 2
    for _, values in found:
        assert (values == tensors_in(checkpoint)["model.norm.weight"].numpy()).all()


def open_as_rank(rank: int, config: Any, base: Path) -> tuple[int, Any]:
    os.environ["NRL_MEGATRON_CHECKPOINT_DIR"] = str(base)
    values = converted.open_tensors(config.policy.model_name, config).read("model.norm.weight", (32,), whole((32,)))
    torch.distributed.barrier()
    (target,) = (path for path in base.iterdir() if path.is_dir())
    return target.stat().st_ino, values.numpy()


def stall_half_way(checkpoint: Path, base: Path, began: Any) -> None:
    """Convert, but never get further than the first file."""
    os.environ["NRL_MEGATRON_CHECKPOINT_DIR"] = str(base)

    def stall(*args: Any, **kwargs: Any) -> None:
        save_file(*args, **kwargs)
        began.set()
        time.sleep(PATIENCE_S)

    converted._FILE_BYTES = 1000
    converted.save_file = stall
    convert(checkpoint)


@contextmanager
def one_who_stalls(checkpoint: Path, base: Path) -> Iterator[Callable[[], None]]:
    """Yield what kills a process that stands half way through a conversion."""
    began = CONTEXT.Event()
    process = CONTEXT.Process(target=stall_half_way, args=(checkpoint, base, began))
    process.start()
    try:
        assert began.wait(PATIENCE_S)
        yield lambda: (process.kill(), process.join())[-1]
    finally:
        process.kill()
        process.join()
        process.close()


def test_what_a_dead_process_leaves_half_done_holds_nobody_up(tmp_path: Path, base: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "checkpoint", "llama")
    with one_who_stalls(checkpoint, base) as kill:
        kill()
    assert [path for path in base.iterdir() if ".tmp-" in path.name]
    target = convert(checkpoint, deadline_s=5)
    assert json.loads((target / "converted.json").read_text())["source"] == str(checkpoint)
    assert not [path for path in base.iterdir() if ".tmp-" in path.name]
    ConvertedFolder(target, read_shape(checkpoint))


def test_whoever_waits_in_vain_says_for_whom(tmp_path: Path, base: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "checkpoint", "llama")
    with one_who_stalls(checkpoint, base), pytest.raises(ModelError, match=r"waited 0 s for process \d+ on .*\.lock"):
        convert(checkpoint, deadline_s=0.3)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = make_checkpoint(tmp_path / "checkpoint", "llama")
    (tmp_path / "file").touch()
    monkeypatch.setenv("NRL_MEGATRON_CHECKPOINT_DIR", str(tmp_path / "file" / "below"))
    with pytest.raises(ModelError, match=r"cannot be converted to .*file/below.*: Not a directory"):
        convert(checkpoint)
