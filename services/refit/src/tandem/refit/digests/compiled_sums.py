"""The inner sums of a digest by `row_sums.c`, compiled once by the machine's own compiler.

A row's elements are read as 16-bit words, and each multiplier as six digits of 8 and 16 bits, so that compilers make
16-bit dot products of it, which every processor has. Where there is no compiler, `load` returns None, and torch's
kernels do the same work at a quarter of the speed.

The library lies beside the compiled Python files (``__pycache__``, or where ``PYTHONPYCACHEPREFIX`` says). If that
cannot be written, each process compiles its own in a temporary folder, in about 0.2 s.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

SOURCE = Path(__file__).with_name("row_sums.c")
_FLAGS = ("-O3", "-fwrapv", "-shared", "-fPIC")
_TIMEOUT_S = 60.0

_SHIFTS = (0, 8, 16, 24, 32, 48)
"""The place of each digit in a multiplier."""
_FLIPPED = 0x80
"""The bit that `row_sums.c` flips in each 16-bit word, which adds as much: the top one of its lower byte."""


class WordDigits:
    """The digits of the multipliers of a row's columns, as `row_sums.c` reads them."""

    def __init__(self, multipliers_C: NDArray[np.int64], item_size: int) -> None:
        """Take the multipliers of C elements of so many bytes each."""
        multipliers_CW = multipliers_C.view(np.uint64)[:, None] << np.arange(0, 8 * item_size, 16, dtype=np.uint64)
        multipliers_K = multipliers_CW.reshape(-1)
        self._digits_DK = np.empty((len(_SHIFTS), len(multipliers_K)), np.int16)
        left_K = multipliers_K.copy()
        for digit, (shift, next_shift) in enumerate(zip(_SHIFTS, (*_SHIFTS[1:], 64), strict=True)):
            num_bits = next_shift - shift
            is_short = num_bits == 8
            lowest_K = -(-left_K).astype(np.int8).astype(np.int16) if is_short else left_K.astype(np.int16)
            self._digits_DK[digit] = lowest_K
            left_K = (left_K - lowest_K.astype(np.uint64)) >> np.uint64(num_bits)
        flipped = 0 if item_size == 1 else _FLIPPED
        excess = int((multipliers_K * np.uint64(flipped)).sum())
        self.arguments = len(multipliers_K), self._digits_DK.ctypes.data, excess
        """The number of words of a row, the address of their digits, and what flipped bits add to a row's sum."""


@functools.cache
def load() -> ctypes.CDLL | None:
    """Return the library, compiled if no earlier process has done it; None if no compiler is here, or it fails.

    `sum_rows_of_bytes` and `sum_rows_of_halves` add up rows of signed integers of 1, or of 2 or 4 bytes, times the
    columns' multipliers, to an int64 sum of each row, modulo 2**64.
    """
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        return None
    command = (compiler, *_FLAGS, *_choose_instructions())
    parts = (SOURCE.read_text(), sysconfig.get_platform(), *platform.libc_ver(), *command)
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    path = Path(importlib.util.cache_from_source(str(SOURCE))).with_name(f"{SOURCE.stem}-{key}.so")
    try:
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            _compile(command, path)
        return _declare(ctypes.CDLL(str(path)))
    except (OSError, subprocess.SubprocessError):
        return _load_own(command)


def _load_own(command: tuple[str, ...]) -> ctypes.CDLL | None:
    """Compile a library for this process alone: its file is gone once it is loaded."""
    try:
        with tempfile.TemporaryDirectory(prefix="tandem-digests-") as folder:
            path = Path(folder) / "row_sums.so"
            _compile(command, path)
            return _declare(ctypes.CDLL(str(path)))
    except (OSError, subprocess.SubprocessError):
        return None


def _choose_instructions() -> tuple[str, ...]:
    """Return the flags for the instructions that torch's kernels use here too.

    None for AVX-512: with AVX2 the sums take as long as reading the memory.
    """
    return ("-mavx2",) if torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512") else ()


def _compile(command: tuple[str, ...], path: Path) -> None:
    """Compile to a file that appears whole, since other processes may do the same."""
    part = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        subprocess.run(
            [*command, "-o", str(part), str(SOURCE)], check=True, capture_output=True, timeout=_TIMEOUT_S, text=True
        )
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _declare(library: ctypes.CDLL) -> ctypes.CDLL:
    """Declare the types of the functions' arguments."""
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    for function in (library.sum_rows_of_bytes, library.sum_rows_of_halves):
        function.argtypes = [pointer, ctypes.c_ssize_t, size, size, pointer, ctypes.c_uint64, pointer]
        function.restype = None
    return library
