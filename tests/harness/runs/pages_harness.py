"""What pages quote of a terminal: commands, and what they are said to print."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
DOCS = ROOT / "docs"


def quoted(page: str) -> list[tuple[list[str], list[str]]]:
    """Return each command of a page's console blocks, as words, and the lines that it is said to print."""
    found: list[tuple[list[str], list[str]]] = []
    for block in re.findall(r"```console\n(.*?)```", page, re.DOTALL):
        for line in block.splitlines():
            if line.startswith("$ "):
                found.append((shlex.split(line.removeprefix("$ "), comments=True), []))
            else:
                found[-1][1].append(line)
    return found


def code_of(page: str, language: str) -> list[str]:
    """Return a page's blocks of a language."""
    return re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL)
