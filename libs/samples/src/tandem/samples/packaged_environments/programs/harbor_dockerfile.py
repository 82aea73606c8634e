"""Instructions of a task's Dockerfile that can be followed without building an image."""

from __future__ import annotations

import glob
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

_NO_EFFECT = ("CMD", "ENTRYPOINT", "EXPOSE", "LABEL", "MAINTAINER", "STOPSIGNAL")
"""Instructions without effect, since Harbor runs its own commands."""
_TEXT = re.compile(r"<<-?[\"']?(\w+)[\"']?")
_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")
ROOT_USERS = (None, "root", "0", 0)


class TaskRefused(Exception):
    """The error of a task that cannot be run here, in one line."""


class CopyInstruction(NamedTuple):
    """A ``COPY``."""

    sources: list[Path]
    target: str
    is_into_folder: bool
    """Whether the target is the folder to put a source in, rather than what a single one becomes."""
    mode: int | None


class TaskDockerfile:
    """A Dockerfile, followed as far as that is possible."""

    def __init__(self, folder: Path, *, runs_are_done: bool, copies_are_done: bool) -> None:
        """Read the Dockerfile of a folder. Raises `TaskRefused` for instructions that only a build can follow.

        Args:
            folder: the folder of the build.
            runs_are_done: whether a prepared root file system has what ``RUN`` makes.
            copies_are_done: whether it has what ``COPY`` makes.

        """
        self.workdir = "/"
        self.env: dict[str, str] = {}
        self.copies: list[CopyInstruction] = []
        self._arguments: dict[str, str] = {}
        self._folder = folder
        self._runs_are_done, self._copies_are_done = runs_are_done, copies_are_done
        if (folder / ".dockerignore").exists() and not copies_are_done:
            raise TaskRefused("its environment has a .dockerignore, which is not read")
        instructions = list(read_instructions((folder / "Dockerfile").read_text(encoding="utf-8")))
        stages = sum(name == "FROM" for name, _ in instructions)
        if stages != 1 and not (stages and runs_are_done and copies_are_done):
            raise TaskRefused(f"its Dockerfile has {stages} stages, and only one can be followed without a build")
        for name, value in instructions:
            self._follow(name, value)

    def _follow(self, name: str, value: str) -> None:
        """Follow one instruction."""
        if name == "FROM":
            self.workdir, self.env = "/", {}
        elif name == "ARG":
            key, _, text = value.partition("=")
            self._arguments[key.strip()] = self._expand(" ".join(shlex.split(text)))
        elif name == "ENV":
            words = shlex.split(value)
            if words and "=" not in words[0]:
                words = [f"{words[0]}={' '.join(words[1:])}"]
            self.env |= {key: self._expand(text) for key, _, text in (word.partition("=") for word in words)}
        elif name == "WORKDIR":
            self.workdir = str(PurePosixPath(self.workdir) / self._expand(value))
        elif name == "COPY" and not self._copies_are_done:
            self._copy(value)
        elif name == "RUN" and not self._runs_are_done:
            raise TaskRefused(
                f"its Dockerfile has RUN {value.split()[0]}, which needs an image: name a prepared root file system "
                "(root)"
            )
        elif name not in (*_NO_EFFECT, "COPY", "RUN") and (name, value) not in (
            ("USER", "root"),
            ("USER", "0"),
            ("HEALTHCHECK", "NONE"),
        ):
            raise TaskRefused(f"its Dockerfile has {name} {value}, which is not followed without a build")

    def _copy(self, value: str) -> None:
        """Note what a ``COPY`` copies."""
        words = json.loads(value) if value.startswith("[") else shlex.split(value)
        mode: int | None = None
        while words and words[0].startswith("--"):
            flag, _, text = words.pop(0).partition("=")
            if flag == "--chmod" and re.fullmatch("[0-7]+", text):
                mode = int(text, 8)
            elif flag not in ("--chown", "--link"):
                raise TaskRefused(f"its Dockerfile has COPY {flag}={text}, which is not followed without a build")
        if "<<" in value:
            raise TaskRefused("its Dockerfile has COPY with a text of its own, which is not followed without a build")
        *names, target = map(self._expand, words)
        sources: list[Path] = []
        for name in names:
            matches = [Path(match) for match in sorted(glob.glob(str(self._folder / name.lstrip("/"))))]
            outside = [match for match in matches if not match.resolve().is_relative_to(self._folder.resolve())]
            if outside or not matches:
                raise TaskRefused(f"its Dockerfile copies {name}, which its environment does not have")
            sources += matches
        is_into_folder = target.endswith(("/", "/.")) or target == "." or len(sources) > 1
        self.copies.append(CopyInstruction(sources, str(PurePosixPath(self.workdir) / target), is_into_folder, mode))

    def _expand(self, text: str) -> str:
        """Put the values of variables in their places."""
        values = self._arguments | self.env
        return _VARIABLE.sub(lambda match: values.get(match[1] or match[2], ""), text)


def read_instructions(text: str) -> Iterator[tuple[str, str]]:
    """Yield the instructions of a Dockerfile, each with what it says; texts that follow one are left out."""
    lines = iter(text.splitlines())
    words: list[str] = []
    for line in lines:
        part = line.strip()
        if not part or part.startswith("#"):
            continue
        words.append(part.removesuffix("\\").strip())
        if part.endswith("\\"):
            continue
        name, _, value = " ".join(words).partition(" ")
        words.clear()
        for mark in _TEXT.findall(value):
            while next(lines, mark).strip() != mark:
                pass
        yield name.upper(), value.strip()
