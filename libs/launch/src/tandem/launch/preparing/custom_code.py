"""The import of custom classes and functions that services will need, and its problems.

``python -m tandem.launch.preparing.custom_code CONFIG.json ANSWER.json KIND...``: custom code may do anything, so
it runs in a process of its own.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from tandem.common.errors import ConfigError, nearest
from tandem.common.texts import last_lines
from tandem.config import Config, config_from_json, config_to_json
from tandem.launch.expected import launched_processes

_LOSS = "loss_fn.class"


def has_own_code(config: Config, kind: str) -> bool:
    """Return whether a service of this kind imports custom code, apart from torch."""
    return next(_named(config, kind), None) is not None


def _named(config: Config, kind: str) -> Iterator[tuple[str, str]]:
    """Yield the keys and dotted paths of a service's imports; torch's own were read from its source."""
    return ((key, path) for key, path in _all_named(config, kind) if not path.startswith("torch."))


def _all_named(config: Config, kind: str) -> Iterator[tuple[str, str]]:
    policy = config.policy
    match kind:
        case "rollout":
            for name, environment in config.env.items():
                if environment.class_path is not None and name in config.environments:
                    yield f"env.{name}.class", environment.class_path
        case "trainer":
            if config.loss_fn.class_path is not None:
                yield _LOSS, config.loss_fn.class_path
            if policy.megatron_cfg.enabled:
                return
            if policy.optimizer is not None:
                yield "policy.optimizer.name", policy.optimizer.name
            for index, entry in enumerate(policy.scheduler):
                if entry.name is not None:
                    yield f"policy.scheduler[{index}].name", entry.name
            if policy.dtensor_cfg.custom_parallel_plan is not None:
                yield "policy.dtensor_cfg.custom_parallel_plan", policy.dtensor_cfg.custom_parallel_plan


def problems(config: Config, kind: str) -> Iterator[str]:
    """Yield a line for each path that cannot be imported, or has the wrong kind of object."""
    for key, path in _named(config, kind):
        if key == _LOSS:
            yield from _loss_problems(config)
            continue
        module_name, _, name = path.rpartition(".")
        try:
            module = importlib.import_module(module_name)
        except Exception as error:  # the module is the user's
            said = str(error) if isinstance(error, ImportError) else f"{type(error).__name__}: {error}"
            yield f"{key}: cannot import {path!r}: {said}"
            continue
        if not hasattr(module, name):
            yield f"{key}: cannot import {path!r}: {module_name} has no {name!r}{nearest(name, vars(module))}"
        elif key.startswith("env."):
            yield from _environment_problems(config, key, path, getattr(module, name))


def _loss_problems(config: Config) -> Iterator[str]:
    """Try out a loss with the trainer's code."""
    try:
        importlib.import_module("tandem.trainer.losses.custom").try_out(config)
    except ConfigError as error:
        yield str(error)


def _environment_problems(config: Config, key: str, path: str, made: Any) -> Iterator[str]:
    entry = key.removesuffix(".class")
    settings = config.env[entry.removeprefix("env.")]
    arguments = dict(settings.kwargs) | ({"cfg": settings.cfg} if settings.cfg else {})
    if not callable(made):
        yield f"{key}: {path} is not a class"
        return
    try:
        inspect.signature(made).bind(**arguments)
    except TypeError as error:
        yield f"{entry}: TypeError: {error}"
    except ValueError:  # a class written in C has no signature
        pass
    if inspect.isclass(made) and not any(callable(getattr(made, method, None)) for method in ("score", "step")):
        yield f"{key}: {path} has no method score(problem, response) and none step(problem, conversation)"


@contextlib.contextmanager
def imported_apart(config: Config, scratch: Path, deadline_s: float) -> Iterator[Callable[[], None]]:
    """Import custom code in another process; yield a function that waits for its end and raises its problems."""
    kinds = [kind for kind, count in launched_processes(config).items() if count and has_own_code(config, kind)]
    if not kinds:
        yield lambda: None
        return
    order, answer, output = scratch / "order.json", scratch / "answer.json", scratch / "output.txt"
    order.write_bytes(config_to_json(config))
    # -B: a check leaves no compiled files beside the user's.
    command = [sys.executable, "-B", "-m", "tandem.launch.preparing.custom_code", str(order), str(answer), *kinds]
    with output.open("wb") as out:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True)

    def complain() -> None:
        try:
            process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            raise ConfigError(
                f"importing the classes that the configuration names takes over {deadline_s:g} s "
                "(cluster.deadlines.join_s)"
            ) from None
        if not answer.exists():
            last = (last_lines(output, 1) or ["nothing"])[-1]
            raise ConfigError(
                f"importing the classes that the configuration names ended the process (exit code "
                f"{process.returncode}); its last line: {last}"
            )
        found = msgspec.json.decode(answer.read_bytes(), type=list[str])
        if found:
            raise ConfigError(*found)

    try:
        yield complain
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        process.wait()


if __name__ == "__main__":
    config = config_from_json(Path(sys.argv[1]).read_bytes())
    found = [line for kind in sys.argv[3:] for line in problems(config, kind)]
    Path(sys.argv[2]).write_bytes(msgspec.json.encode(found))
