"""Tasks of a packaged environment, which a program lists, and the command that plays them.

The programs, `PROGRAMS`, are files that import nothing of Tandem's, so that they may run on another interpreter, where
the package is installed apart.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from tandem.common.distribution import install_command, search_path
from tandem.common.errors import ConfigError
from tandem.common.messages import Problem
from tandem.common.texts import read_last_lines, shorten
from tandem.common.values import make_plain_object
from tandem.config import Config
from tandem.config.schema import environments

PROGRAMS: dict[type[environments.PackagedConfig], tuple[str, str]] = {
    environments.VerifiersConfig: (environments.VERIFIERS, "play_verifiers.py"),
    environments.OpenEnvConfig: (environments.OPENENV, "play_openenv.py"),
    environments.NemoGymConfig: (environments.NEMO_GYM, "play_nemo_gym.py"),
    environments.HarborConfig: (environments.HARBOR, "play_harbor.py"),
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


def play_command(settings: environments.PackagedConfig) -> tuple[str, ...]:
    """Return the command of the program that plays episodes, line by line."""
    return (*_begin_command(settings), "play", msgspec.json.encode(settings).decode())


def list_tasks(config: Config) -> tuple[list[Problem], list[Problem] | None]:
    """Return the problems to train on, and those to validate on if the environment has them apart.

    Raises `ConfigError` if the package is not installed, is of another release, or refuses its settings.
    """
    data = config.data
    num = (data.num_train or 0) + (data.num_validation or 0) if data.num_train is not None else _MOST_ENDLESS
    key, tasks = _list(config, str(num))
    if not tasks.train:
        raise ConfigError(f"{key}: the environment has no tasks with these settings")
    apart = None if tasks.validation is None else [_make_problem(task, "validation-") for task in tasks.validation]
    return [_make_problem(task, "") for task in tasks.train], apart


def try_agents(config: Config, problems: Iterable[Problem]) -> None:
    """Start the servers of NeMo Gym once, which are to play rows from files. Raises `ConfigError` as `list_tasks`."""
    rows = (problem.metadata["row"] for problem in problems)
    agents = {str((row.get("agent_ref") or {}).get("name") or "") for row in rows}
    _list(config, "0", msgspec.json.encode(sorted(agents)).decode())


def _list(config: Config, *words: str) -> tuple[str, ListedTasks]:
    """Have the program try a packaged environment; return the key of its settings, and the tasks."""
    name = str(config.data.environment)
    settings = config.env[name].packaged
    assert settings is not None, "a rule of the configuration"
    kind, _ = PROGRAMS[type(settings)]
    key = f"env.{name}" if name == kind else f"env.{name}.{kind}"
    with tempfile.TemporaryDirectory() as folder:
        answer, output = Path(folder, "tasks.json"), Path(folder, "output.txt")
        command = [*_begin_command(settings), "list", msgspec.json.encode(settings).decode(), str(answer), *words]
        code = _run(command, output, key)
        if code == NOT_INSTALLED:
            package = (read_last_lines(output, 1) or [kind])[-1]
            remedy = install_command(kind)
            if isinstance(settings, environments.NemoGymConfig | environments.HarborConfig):
                title = kind.replace("_", "-")
                remedy = f"install {title} apart, on Python 3.12 or later, and name its interpreter: {key}.python"
            raise ConfigError(f"{key}: the package {package} is not installed; {remedy}")
        if not answer.exists():
            last = (read_last_lines(output, 1) or ["nothing"])[-1]
            raise ConfigError(f"{key}: the program that lists tasks ended (exit code {code}); its last line: {last}")
        tasks = msgspec.json.decode(answer.read_bytes(), type=ListedTasks)
    if tasks.error:
        raise ConfigError(f"{key}: {shorten(tasks.error)}")
    return key, tasks


def _begin_command(settings: environments.PackagedConfig) -> tuple[str, str]:
    _, file = PROGRAMS[type(settings)]
    # OpenEnv's program starts a server on that interpreter, and plays on this one.
    python = None if isinstance(settings, environments.OpenEnvConfig) else settings.python
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
