"""Manifests: digests are those of the bytes in files, and readers that share a checkpoint miss nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tandem.common.errors import DamagedCheckpoint
from tandem.samples import manifest
from tandem.trainer.files.box_files import digests_of
from tests.harness.trainers.damage import digests_in, first_tensor, flip_bit

TENSORS = {
    "matrix": torch.randn(300, 7),
    "half": torch.randn(5, 3).bfloat16(),
    "flags": torch.tensor([True, False]),
    "count": torch.tensor(3.0),
    "numbers": torch.arange(2**19),  # more than is read at once
    "nothing": torch.zeros(0, 4),
}


def write() -> dict[str, manifest.FileRecord]:
    files = {}
    for name, part in (("a.safetensors", dict(list(TENSORS.items())[:3])), ("b.safetensors", TENSORS)):
        save_file(part, name)
        files[name] = manifest.describe(Path(name), digests_of(part))
    return files


def test_digests_taken_in_memory_are_those_of_the_file() -> None:
    files = write()
    for name, record in files.items():
        assert record.tensors == digests_in(Path(name))
        assert record.size == Path(name).stat().st_size
    manifest.check_files(Path(), files)
    manifest.check_tensors(Path(), files)


@pytest.mark.parametrize("num_readers", [1, 2, 3, 20])
@pytest.mark.parametrize("tensor", [name for name in TENSORS if name != "nothing"])
def test_a_flipped_bit_is_found_by_exactly_one_of_those_that_share(tensor: str, num_readers: int) -> None:
    files = write()
    _, start, stop = first_tensor(Path("b.safetensors"), tensor)
    for at in (start, stop - 1):
        flip_bit(Path("b.safetensors"), at, bit=7)
        errors = []
        for reader in range(num_readers):
            try:
                manifest.check_tensors(Path(), files, reader=reader, num_readers=num_readers)
            except DamagedCheckpoint as error:
                errors.append(str(error))
        assert errors == [f"b.safetensors is damaged: {tensor} is not what was written"]
        flip_bit(Path("b.safetensors"), at, bit=7)
    manifest.check_tensors(Path(), files)


def test_a_file_that_becomes_shorter_while_it_is_read_is_damaged() -> None:
    files = write()
    content = Path("b.safetensors").read_bytes()
    manifest.check_files(Path(), files)
    Path("b.safetensors").write_bytes(content[:-5000])
    with pytest.raises(DamagedCheckpoint, match=r"b\.safetensors is damaged: "):
        manifest.check_tensors(Path(), files)
