"""Tasks of a packaged environment, which a program lists, and the command that plays them.

The programs, `PROGRAMS`, are files that import nothing of Tandem's, so that they may run on another interpreter, where
the package is installed apart.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from tandem.common.distribution import install_command
from tandem.common.errors import ConfigError
from tandem.common.messages import Problem
from tandem.common.programs import search_path
from tandem.common.texts import read_last_lines, shorten
from tandem.common.values.json_values import make_plain_object
from tandem.config import Config
from tandem.config.schema.packaged import OPENENV, VERIFIERS, OpenEnvConfig, PackagedConfig, VerifiersConfig

PROGRAMS: dict[type[PackagedConfig], tuple[str, str]] = {
    VerifiersConfig: (VERIFIERS, "play_verifiers.py"),
    OpenEnvConfig: (OPENENV, "play_openenv.py"),
}
"""The key of each kind of packaged environment, and the program that plays it."""
NOT_INSTALLED = 69
"""Exit code of a program whose package is not installed."""
_LISTING_S = 600.0
"""Longest time that listing tasks may take: a taskset may download its data."""
_MOST_ENDLESS = 10_256
"""Tasks to take of a taskset without end, where the configuration names no number."""


class ListedTask(msgspec.Struct, frozen=True):
    """A task as the program lists it."""

    name: str
    question: str
    answer: Any
    metadata: dict[str, Any]


class ListedTasks(msgspec.Struct, frozen=True):
    """The answer of a program that lists tasks."""

    train: list[ListedTask] = []
    validation: list[ListedTask] | None = None
    error: str = ""
    """Why there are none."""


def play_command(settings: PackagedConfig) -> tuple[str, ...]:
    """Return the command of the program that plays episodes, line by line."""
    return (*_begin_command(settings), "play", msgspec.json.encode(settings).decode())


def list_tasks(config: Config) -> tuple[list[Problem], list[Problem] | None]:
    """Return the problems to train on, and those to validate on if the environment has them apart.

    Raises `ConfigError` if the package is not installed, is of another release, or refuses its settings.
    """
    name = str(config.data.environment)
    settings = config.env[name].packaged
    assert settings is not None, "a rule of the configuration"
    data = config.data
    num = (data.num_train or 0) + (data.num_validation or 0) if data.num_train is not None else _MOST_ENDLESS
    kind, _ = PROGRAMS[type(settings)]
    key = f"env.{name}.{kind}"
    with tempfile.TemporaryDirectory() as folder:
        answer, output = Path(folder, "tasks.json"), Path(folder, "output.txt")
        words = ["list", msgspec.json.encode(settings).decode(), str(answer), str(num)]
        code = _run([*_begin_command(settings), *words], output, key)
        if code == NOT_INSTALLED:
            package = (read_last_lines(output, 1) or [kind])[-1]
            raise ConfigError(f"{key}: the package {package} is not installed; {install_command(kind)}")
        if not answer.exists():
            last = (read_last_lines(output, 1) or ["nothing"])[-1]
            raise ConfigError(f"{key}: the program that lists tasks ended (exit code {code}); its last line: {last}")
        tasks = msgspec.json.decode(answer.read_bytes(), type=ListedTasks)
    if tasks.error:
        raise ConfigError(f"{key}: {shorten(tasks.error)}")
    if not tasks.train:
        raise ConfigError(f"{key}: the environment has no tasks with these settings")
    apart = None if tasks.validation is None else [_make_problem(task, "validation-") for task in tasks.validation]
    return [_make_problem(task, "") for task in tasks.train], apart


def _begin_command(settings: PackagedConfig) -> tuple[str, str]:
    _, file = PROGRAMS[type(settings)]
    # OpenEnv's program starts a server on that interpreter, and plays on this one.
    python = settings.python if isinstance(settings, VerifiersConfig) else None
    return python or sys.executable, str(Path(__file__).with_name("programs") / file)


def _run(command: list[str], output: Path, key: str) -> int:
    """Run a program that lists tasks; return its exit code."""
    environment = {**os.environ, "PATH": search_path()}
    try:
        with output.open("wb") as file:
            ended = subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=environment, timeout=_LISTING_S
            )
    except OSError as error:
        raise ConfigError(f"{key}.python: cannot run {command[0]!r}: {error.strerror}") from error
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{key}: listing its tasks takes over {_LISTING_S:g} s") from None
    return ended.returncode


def _make_problem(task: ListedTask, prefix: str) -> Problem:
    return Problem(
        problem_id=f"{prefix}{task.name}",
        question=task.question,
        answer=make_plain_object({"answer": task.answer})["answer"],
        metadata=make_plain_object(task.metadata),
    )
