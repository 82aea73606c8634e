"""Harms to the files of a run: edits of what it reads, and a small disk that fills up under what it writes."""

from __future__ import annotations

import contextlib
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.runs.running import DIGITS

PROMPT = "= {}"
"""The prompt file of runs whose inputs are edited."""
_EDITED: dict[str, tuple[str, ...]] = {
    "config.yaml": ("grpo: {num_prompts_per_step: 3}\n", "grpo: [half an edi"),
    "sums.jsonl": ('{"input": "1 + 1", "output": "3"}\n', '{"inp'),
    "prompt.txt": ("9 9 {}", "no place for a prompt"),
    "digits.py": (DIGITS.replace("0.5 * share", "1.0 - share"), "raise RuntimeError('half an edit')\n"),
}
"""What the files that a run reads are overwritten with."""


def edit_an_input(dice: random.Random) -> None:
    """Overwrite or delete one of the files that a run in the working directory reads."""
    name = dice.choice([*_EDITED])
    text = dice.choice([None, *_EDITED[name]])
    if text is None:
        Path(name).unlink(missing_ok=True)
    else:
        Path(name).write_text(text)


class SmallDisk:
    """A small file system of its own."""

    def __init__(self, folder: Path) -> None:
        self._filler = folder / "filler"

    def fill(self) -> None:
        """Fill it to its last byte."""
        with self._filler.open("ab", buffering=0) as file:
            for size in (1 << 20, 1 << 12, 1):
                with contextlib.suppress(OSError):
                    while file.write(bytes(size)) == size:
                        pass

    def free(self) -> None:
        """Free what fills it."""
        self._filler.unlink(missing_ok=True)


@contextlib.contextmanager
def small_disk(folder: Path, num_mib: int = 32) -> Iterator[SmallDisk]:
    """Mount a small disk on a new folder; skip the test, with the reason, where that cannot be done."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={num_mib}m", "tmpfs", str(folder)]
    try:
        mounted = subprocess.run(command, capture_output=True, text=True, check=False)
        why = mounted.stderr.strip() if mounted.returncode else ""
    except FileNotFoundError:
        why = "there is no mount"
    if why:
        pytest.skip(f"a small disk needs root and its own mount: {why}")
    try:
        yield SmallDisk(folder)
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
