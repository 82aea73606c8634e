"""The compiled sums of digests are those of torch, and nothing fails where they cannot be compiled."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from digest_harness import random_tensor
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.refit.digests import compiled_sums, kernels
from tandem.refit.digests.compiled_sums import WordDigits
from tandem.refit.digests.kernels import Span

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no compiler is here")


def sums_of(words_RC: torch.Tensor, multipliers_C: np.ndarray) -> torch.Tensor:
    library = compiled_sums.load()
    assert library is not None
    return kernels.sum_rows(library, words_RC, WordDigits(multipliers_C, words_RC.element_size()))


@settings(max_examples=100, deadline=None)
@given(
    num_rows=st.integers(1, 9),
    num_columns=st.one_of(st.integers(1, 70), st.sampled_from([255, 256, 257, 511, 512, 513, 1024, 3000])),
    item_size=st.sampled_from([1, 2, 4]),
    margins=st.tuples(st.integers(0, 5), st.integers(0, 5)),
    step=st.integers(1, 3),
)
def test_compiled_sums_are_those_of_torch(
    num_rows: int, num_columns: int, item_size: int, margins: tuple[int, int], step: int
) -> None:
    """Rows that lie apart, and begin anywhere, and columns that are sampled."""
    before, after = margins
    around_RC = random_tensor((num_rows, before + num_columns + after), INTEGERS[item_size])
    words_RC = around_RC[:, before : before + num_columns]
    columns: tuple[Span, ...] = ((1, 3, num_columns, step),)
    (sum_words,) = kernels._compiled_sums()
    assert torch.equal(sum_words(words_RC, columns), kernels._wide_sums(words_RC, columns))


@pytest.mark.parametrize("item_size", [1, 2, 4])
@pytest.mark.parametrize("word_byte", [-128, 127, 0, -1])
@pytest.mark.parametrize("digits", [0x8080808080808080, 0x8181818181818181, 0x7F7F7F7F7F7F7F7F, 2**63, 2**64 - 1, 1])
def test_the_largest_sums_do_not_overflow(item_size: int, word_byte: int, digits: int) -> None:
    """A block of the same words and multipliers, and another element."""
    num_columns = 4 * 512 // item_size + 1
    words_RC = torch.full((2, num_columns * item_size), word_byte, dtype=torch.int8).view(INTEGERS[item_size])
    multipliers_C = np.full(num_columns, digits, np.uint64).view(np.int64)
    element = sum(word_byte * 256**j for j in range(item_size))
    expected = (element * digits * num_columns + 2**63) % 2**64 - 2**63
    assert sums_of(words_RC, multipliers_C).tolist() == [expected] * 2


@settings(max_examples=60, deadline=None)
@given(number=st.integers(-(2**63), 2**63 - 1))
def test_every_multiplier_survives_its_digits(number: int) -> None:
    words_RC = torch.tensor([[1]], dtype=torch.int32)
    assert sums_of(words_RC, np.array([number], np.int64)).item() == number


_DIGESTS = """
import sys
import torch
from tandem.refit.digests import kernels
from tandem.refit.digests.task import digest_box
from tandem.refit.layout import whole

sys.pycache_prefix = sys.argv[1]
raw = torch.randint(0, 256, (40, 4096), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
for dtype in (torch.float32, torch.bfloat16, torch.int8):
    values = raw.view(dtype)
    print(digest_box("weight", tuple(values.shape), whole(values.shape), values))
print(kernels._compiled_sums() != [])
"""


def run_digests(cached: Path, **environment: str) -> list[str]:
    """Return the digests of a process with these variables, and whether its kernel is compiled."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", _DIGESTS, str(cached)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    return done.stdout.split()


def test_digests_are_the_same_with_wide_instructions_and_without_a_compiler(tmp_path: Path) -> None:
    *digests, is_compiled = run_digests(tmp_path, CC="no-such-compiler")
    assert is_compiled == "False"
    for capability in ("default", "avx2"):
        assert run_digests(tmp_path, ATEN_CPU_CAPABILITY=capability) == [*digests, "True"]


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty folder for compiled files."""
    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path / "cached"))
    return tmp_path / "cached"


def is_right(library: ctypes.CDLL | None) -> bool:
    """Return whether a library adds up, as it was loaded by a process that had none."""
    assert library is not None
    words_RC = random_tensor((4, 600), torch.int16)
    multipliers_C = np.arange(1, 1201, 2) * 0x123456789ABCD
    expected_R = (words_RC.long() ^ 0x80).sub(0x80) @ torch.from_numpy(multipliers_C)
    return torch.equal(kernels.sum_rows(library, words_RC, WordDigits(multipliers_C, 2)), expected_R)


def test_it_is_compiled_once(cached: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compile_file = compiled_sums._compile
    commands: list[tuple[str, ...]] = []
    monkeypatch.setattr(
        compiled_sums, "_compile", lambda command, path: [commands.append(command), compile_file(command, path)]
    )
    for _ in range(3):
        assert is_right(compiled_sums.load.__wrapped__())
    assert len(commands) == 1
    assert len([*cached.rglob("row_sums-*.so")]) == 1


def test_a_library_that_cannot_be_kept_is_of_one_process(
    cached: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached.touch()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert is_right(compiled_sums.load.__wrapped__())
    assert [*tmp_path.iterdir()] == [cached]


def test_a_damaged_library_is_not_used(cached: Path) -> None:
    compiled_sums.load.__wrapped__()
    (library,) = cached.rglob("row_sums-*.so")
    library.unlink()  # the process has it in its memory
    library.write_bytes(b"nothing")
    assert is_right(compiled_sums.load.__wrapped__())


def test_a_compiler_that_fails_leaves_it_to_torch(
    cached: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text("#!/bin/sh\necho 'unknown option' >&2\nexit 1\n")
    compiler.chmod(0o700)
    monkeypatch.setenv("CC", str(compiler))
    assert compiled_sums.load.__wrapped__() is None
    assert not [*cached.rglob("row_sums-*")]
