"""Output that nobody reads, or that finds no room: its writer continues."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import sys
from tandem.common import outputs
with outputs.outlast_readers():
    print("first", flush=True)
    sys.stdin.readline()
    for _ in range(10_000):
        print("more", flush=True)
        print("more", file=sys.stderr)
    open("end", "w").write("reached")
"""


def test_a_writer_outlasts_the_reader_of_its_output(tmp_path: Path) -> None:
    words = [sys.executable, "-c", PROGRAM]
    with subprocess.Popen(
        words, cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == b"first\n"
        process.stdout.close()
        process.stdin.close()
        assert process.wait() == 0
    assert (tmp_path / "end").read_text() == "reached"


def test_a_writer_continues_where_its_output_finds_no_room(tmp_path: Path) -> None:
    with Path("/dev/full").open("wb") as full:
        words = [sys.executable, "-c", PROGRAM]
        result = subprocess.run(words, cwd=tmp_path, stdin=subprocess.DEVNULL, stdout=full, stderr=full, check=False)
    assert result.returncode == 0
    assert (tmp_path / "end").read_text() == "reached"
