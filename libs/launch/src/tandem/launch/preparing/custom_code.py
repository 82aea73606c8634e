"""The import of custom classes and functions that services will need, and its problems.

``python -m tandem.launch.preparing.custom_code CONFIG.json ANSWER.json KIND...``: custom code may do anything, so
it runs in a process of its own (`ModuleProcess`), and files carry order and answer.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import pkgutil
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Self

import msgspec

from tandem.common import kept_inputs, process_lifetime, texts
from tandem.common.errors import ConfigError, nearest
from tandem.config import Config, config_from_json, config_to_json
from tandem.launch.child import KILLED_S
from tandem.launch.nodes import launched_processes

_MAIN = """
import runpy, sys
from tandem.common.process_lifetime import fork_guarded
fork_guarded(int(sys.argv[1]), int(sys.argv[2]))
sys.argv = sys.argv[3:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


class ModuleProcess:
    """A process that runs ``python -m MODULE ORDER ANSWER WORDS...``, behind a guardian.

    At the end of the context it is killed with all that it has started, daemons included; and so it is with this
    process.
    """

    def __init__(self, module: str, order: bytes, folder: Path, *words: str) -> None:
        """Start it; its files are in `folder`."""
        self.answer = folder / "answer"
        """File that it writes; a process that ends early may have written none, or a part."""
        self._output = folder / "output.txt"
        order_file = folder / "order"
        order_file.write_bytes(order)
        self._lifeline, far = socket.socketpair()
        # -B: a check leaves no compiled files beside the user's.
        command = [sys.executable, "-B", "-c", _MAIN, str(far.fileno()), str(os.getpid())]
        with far, self._output.open("wb") as output:
            self._guardian = subprocess.Popen(
                [*command, module, str(order_file), str(self.answer), *words],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                pass_fds=[far.fileno()],
                env=process_lifetime.name_this_process(),
            )

    def wait(self, deadline_s: float) -> None:
        """Wait until it has ended. Raises `subprocess.TimeoutExpired`."""
        self._guardian.wait(deadline_s)

    @property
    def ending(self) -> str:
        """The exit code of a process that has ended, and the last line that it printed."""
        last = (texts.read_last_lines(self._output, 1) or ["nothing"])[-1]
        # What its guardian says of it; of one that ends otherwise than by itself, the guardian's own code.
        code = self._lifeline.recv(16).decode() or self._guardian.returncode
        return f"ended the process (exit code {code}); its last line: {last}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._lifeline.close()
        try:
            self._guardian.wait(KILLED_S)
        except subprocess.TimeoutExpired:
            self._guardian.kill()
            self._guardian.wait()


_LOSS = "loss_fn.class"
_METHODS = {"step": ("problem", "conversation"), "score": ("problem", "response")}
"""Methods of an environment of the user's, and what they are called with; the first that there is is called."""


def has_own_code(config: Config, kind: str) -> bool:
    """Return whether a service of this kind imports custom code, apart from torch."""
    return next(_list_named(config, kind), None) is not None


def _list_named(config: Config, kind: str) -> Iterator[tuple[str, str]]:
    """Yield the keys and dotted paths of a service's imports; torch's own were read from its source."""
    return ((key, path) for key, path in _list_all_named(config, kind) if not path.startswith("torch."))


def _list_all_named(config: Config, kind: str) -> Iterator[tuple[str, str]]:
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


def find_problems(config: Config, kind: str) -> Iterator[str]:
    """Yield a line for each path that cannot be imported, or has the wrong kind of object."""
    for key, path in _list_named(config, kind):
        if key == _LOSS:
            yield from _find_loss_problems(config)
            continue
        module_name, _, name = path.rpartition(".")
        try:
            module = importlib.import_module(module_name)
        except Exception as error:  # the module is the user's
            message = str(error) if isinstance(error, ImportError) else f"{type(error).__name__}: {error}"
            yield f"{key}: cannot import {path!r}: {message}{_find_nearest_module(module_name, error)}"
            continue
        if not hasattr(module, name):
            yield f"{key}: cannot import {path!r}: {module_name} has no {name!r}{nearest(name, vars(module))}"
        elif key.startswith("env."):
            yield from _find_environment_problems(config, key, path, getattr(module, name))


def _find_nearest_module(name: str, error: Exception) -> str:
    """Return a hint at a module with a similar name if there is none of this name."""
    if not isinstance(error, ModuleNotFoundError) or error.name != name:
        return ""
    return nearest(name, (module.name for module in pkgutil.iter_modules()))


def _find_loss_problems(config: Config) -> Iterator[str]:
    """Try out a loss with the trainer's code."""
    try:
        importlib.import_module("tandem.trainer.losses.custom").try_out(config)
    except ConfigError as error:
        yield str(error)


def _find_environment_problems(config: Config, key: str, path: str, factory: Any) -> Iterator[str]:
    entry = key.removesuffix(".class")
    settings = config.env[entry.removeprefix("env.")]
    arguments = dict(settings.kwargs) | ({"cfg": settings.cfg} if settings.cfg else {})
    if not callable(factory):
        yield f"{key}: {path} is not a class"
        return
    try:
        inspect.signature(factory).bind(**arguments)
    except TypeError as error:
        yield f"{entry}: TypeError: {error}"
    except ValueError:  # a class written in C has no signature
        pass
    if inspect.isclass(factory):
        yield from _find_method_problems(key, path, factory)


def _find_method_problems(key: str, path: str, environment: type) -> Iterator[str]:
    """Yield a line if an environment has none of its methods, or the one that is called takes other arguments."""
    name = next((name for name in _METHODS if callable(getattr(environment, name, None))), None)
    if name is None:
        yield f"{key}: {path} has no method score(problem, response) and none step(problem, conversation)"
        return
    method = inspect.getattr_static(environment, name)
    num_bound = 0 if isinstance(method, staticmethod) else 1
    try:
        signature = inspect.signature(getattr(method, "__func__", method))
    except (TypeError, ValueError):  # written in C, or an object that is called
        return
    try:
        signature.bind(*[None] * num_bound, *_METHODS[name])
    except TypeError as error:
        yield f"{key}: {path}.{name} is called with ({', '.join(_METHODS[name])}): {error}"


class ImportOutcome(msgspec.Struct, frozen=True):
    """The outcome of an import of custom code."""

    problems: list[str]
    modules: dict[str, str]
    """Absolute paths of the user's own modules that were imported, by name."""


def find_custom_modules(config: Config, kinds: Iterable[str]) -> dict[str, str]:
    """Return the imported modules that lie beside those that the configuration names, as none of a package does."""
    named = [path.rpartition(".")[0] for kind in kinds for _, path in _list_named(config, kind)]
    files = {
        name: os.path.abspath(file)
        for name, module in [*sys.modules.items()]
        if name != "__main__" and (file := getattr(module, "__file__", None)) and file.endswith(".py")
    }
    installed = {os.path.abspath(path) for key, path in sysconfig.get_paths().items() if key.endswith("lib")}
    folders = {
        Path(files[name]).parents[name.count(".") + (Path(files[name]).name == "__init__.py")]
        for name in named
        if name in files and not name.startswith("tandem.")
    }
    return {
        name: file
        for name, file in files.items()
        if any(Path(file).is_relative_to(folder) for folder in folders)
        and not any(Path(file).is_relative_to(folder) for folder in installed)
    }


@contextlib.contextmanager
def import_apart(config: Config, scratch: Path, deadline_s: float) -> Iterator[Callable[[], dict[str, str]]]:
    """Import custom code in another process.

    Yield a function that waits for its end, and returns the user's own modules, or raises the problems.
    """
    kinds = [kind for kind, count in launched_processes(config).items() if count and has_own_code(config, kind)]
    if not kinds:
        yield dict
        return
    with ModuleProcess("tandem.launch.preparing.custom_code", config_to_json(config), scratch, *kinds) as process:

        def conclude() -> dict[str, str]:
            try:
                process.wait(deadline_s)
            except subprocess.TimeoutExpired:
                raise ConfigError(
                    f"importing the classes that the configuration names takes over {deadline_s:g} s "
                    "(cluster.deadlines.join_s)"
                ) from None
            if not process.answer.exists():
                raise ConfigError(f"importing the classes that the configuration names {process.ending}")
            imports = msgspec.json.decode(process.answer.read_bytes(), type=ImportOutcome)
            if imports.problems:
                raise ConfigError(*imports.problems)
            return imports.modules

        yield conclude


if __name__ == "__main__":
    kept_inputs.install()
    config, kinds = config_from_json(Path(sys.argv[1]).read_bytes()), sys.argv[3:]
    lines = [line for kind in kinds for line in find_problems(config, kind)]
    Path(sys.argv[2]).write_bytes(msgspec.json.encode(ImportOutcome(lines, find_custom_modules(config, kinds))))
