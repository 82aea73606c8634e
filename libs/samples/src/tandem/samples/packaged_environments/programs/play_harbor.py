"""The program that lists Harbor's tasks (0.25) in a folder, and plays them in sandboxes.

It runs on the interpreter that has the package. ``play_harbor.py list SETTINGS ANSWER NUM`` tries all tasks and writes
them to a file; ``play_harbor.py play SETTINGS`` reads a line of JSON for each episode, as any agent that stays
(``docs/agents.md``). An episode is a trial of Harbor's: its agent, its verifier, and `harbor_sandbox` where they run
commands. The agent itself runs here, and asks the endpoint of the episode.

A sandbox that is ended from outside ends this process, and another takes its place: its episodes are played again.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import signal
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

RELEASE = (0, 25)
NOT_INSTALLED = 69
_SANDBOX = "harbor_sandbox:SandboxEnvironment"
_NEEDED = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "PYTHONPATH", "OMP_NUM_THREADS")
"""Variables of the run that this program has. Tasks' own files may name any that it has."""
_OWN = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "HARBOR_TELEMETRY": "0", "OPENAI_API_KEY": "none"}
_LOST = "SandboxLost"
_TERMINUS = "terminus-2"


class HarborRefused(Exception):
    """The error of settings or tasks that cannot be played, in one line."""


def import_harbor() -> Any:
    """Import the package's trials; end the program if it is missing. Raises `HarborRefused` for another release."""
    try:
        release = metadata.version("harbor")
    except metadata.PackageNotFoundError:
        print("harbor")
        raise SystemExit(NOT_INSTALLED) from None
    if tuple(map(int, release.split(".")[:2])) != RELEASE:
        expected = ".".join(map(str, RELEASE))
        raise HarborRefused(f"harbor {release} is installed, but {expected} is what can be played here")
    from harbor.trial import trial

    logging.getLogger("harbor").setLevel(logging.ERROR)
    return trial


def keep_variables(settings: dict[str, Any]) -> None:
    """Keep no variables of the run but those that are needed, or named."""
    values = {name: os.environ[name] for name in (*_NEEDED, *settings["variables"]) if name in os.environ}
    os.environ.clear()
    os.environ.update(_OWN | values)


def find_tasks(folder: str, key: str) -> dict[str, Path]:
    """Return the folders of tasks, by their paths below a folder, or the one that is a task itself."""
    place = Path(folder)
    if not place.is_dir():
        raise HarborRefused(f"{key}: there is no folder {folder}")
    paths = sorted(path.parent for path in place.rglob("task.toml"))
    if not paths:
        raise HarborRefused(f"{key}: no folder below {folder} has a task.toml")
    return {str(path.relative_to(place)) if path != place else path.resolve().name: path for path in paths}


def make_trial_config(settings: dict[str, Any], path: Path, trials: Path, base_url: str) -> Any:
    """Return Harbor's configuration of a trial."""
    from harbor.agents.factory import AgentFactory
    from harbor.models.trial.config import AgentConfig, EnvironmentConfig, TaskConfig, TrialConfig

    agent = AgentConfig(name=settings["agent"], model_name="openai/policy", kwargs=dict(settings["kwargs"]))
    if agent.name == _TERMINUS:
        agent.kwargs.setdefault("record_terminal_session", False)  # no one looks at it, and it would be installed
    kind = AgentFactory.get_agent_class_from_config(agent)
    if kind.MODEL_CONNECTION is not None and kind.capabilities.base_url:
        agent.base_url = base_url
    else:
        agent.kwargs["api_base"] = base_url
    return TrialConfig(
        task=TaskConfig(path=path),
        trials_dir=trials,
        timeout_multiplier=settings["timeout_multiplier"],
        agent=agent,
        environment=EnvironmentConfig(import_path=_SANDBOX, kwargs={"settings": settings}),
    )


async def try_task(settings: dict[str, Any], path: Path, trials: Path) -> Any:
    """Return a trial of a task that is not begun. Raises `HarborRefused` if it cannot be played here."""
    trial = import_harbor()
    from harbor.agents.installed.base import BaseInstalledAgent
    from harbor.utils.env import resolve_env_vars
    from harbor_dockerfile import ROOT_USERS
    from pydantic import ValidationError

    try:
        tried = await trial.Trial.create(make_trial_config(settings, path, trials, "http://127.0.0.1:1/v1"))
    except ValidationError as error:
        first = error.errors()[0]
        raise HarborRefused(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error
    except Exception as error:  # the package's own refusals have many types
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise HarborRefused(f"{path}: {' '.join(lines) or type(error).__name__}") from error
    config = tried.task.config
    try:
        for step in (config, *(config.steps or [])):
            resolve_env_vars(step.verifier.env)
    except ValueError as error:
        raise HarborRefused(f"{path}: {error}; is it one of variables?") from error
    if isinstance(tried.agent, BaseInstalledAgent) and not settings["network"]:
        raise HarborRefused(
            f"agent: {settings['agent']} runs in the sandbox, and asks the policy from there: that needs network: true"
        )
    users = [part.user for step in (config, *(config.steps or [])) for part in (step.agent, step.verifier)]
    if strangers := [user for user in users if user not in ROOT_USERS]:
        raise HarborRefused(f"{path}: it names the user {strangers[0]}, and a sandbox has no other than root")
    if not settings["network"] and config.environment.mcp_servers:
        raise HarborRefused(f"{path}: it has MCP servers, which its sandbox would not reach")
    return tried


async def list_tasks(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the tasks to train on and, if they are apart, those to validate on, once a sandbox was begun."""
    import_harbor()
    with tempfile.TemporaryDirectory() as trials:
        last: list[Any] = []

        async def describe(key: str) -> list[dict[str, Any]]:
            described = []
            for name, path in find_tasks(settings[key], f"{key}").items():
                last[:] = [await try_task(settings, path, Path(trials))]
                question = last[0].task.instruction or name
                described.append({"name": name, "question": question, "answer": "", "metadata": {"task": str(path)}})
            return described

        tasks = {"train": await describe("tasks")}
        if settings["validation_tasks"] is not None:
            tasks["validation"] = await describe("validation_tasks")
        await try_sandbox(last[0].agent_environment)
    return tasks


async def try_sandbox(environment: Any) -> None:
    """Begin a sandbox, and run a command there. Raises `HarborRefused` if that fails."""
    from enclosed import SandboxLost, SandboxRefused

    try:
        await environment.start(force_build=False)
        result = await environment.exec("echo $((1 + 1))")
    except (SandboxRefused, SandboxLost, OSError) as error:
        raise HarborRefused(" ".join(str(error).split())) from error
    finally:
        await environment.stop(delete=True)
    if result.stdout != "2\n":
        raise HarborRefused(f"a sandbox has no shell that works: {(result.stderr or '').strip()}")


class HarborPlayer:
    """Plays trials, as many at once as there are."""

    def __init__(self, settings: dict[str, Any], trials: Path) -> None:
        """Import what plays; folders of trials are made in `trials`, and removed."""
        self._settings = settings
        self._trials = trials
        self._trial = import_harbor()

    async def play_all(self) -> None:
        """Play an episode for each line of the standard input, to its end."""
        async with asyncio.TaskGroup() as playing:
            while line := await asyncio.to_thread(sys.stdin.readline):
                playing.create_task(self._play(json.loads(line)))

    async def _play(self, order: dict[str, Any]) -> None:
        """Play one episode, and post its reward, or what went wrong."""
        place, body = "error", ""
        try:
            path = Path(order["problem"]["metadata"]["task"])
            config = make_trial_config(self._settings, path, self._trials, order["base_url"])
            trial = await self._trial.Trial.create(config)
            try:
                result = await trial.run()
            finally:
                await asyncio.to_thread(shutil.rmtree, trial.paths.trial_dir, ignore_errors=True)
            errors = [error for error in (result.exception_info, *_list_exceptions(result)) if error is not None]
            if trial.agent_environment.is_lost or any(error.exception_type == _LOST for error in errors):
                print("a sandbox was ended from outside: starting anew", file=sys.stderr, flush=True)
                shutil.rmtree(self._trials, ignore_errors=True)
                os.kill(os.getpid(), signal.SIGKILL)
            place, body = self._describe(result, errors)
        except Exception as error:  # the package and its agents are anyone's
            body = f"{type(error).__name__}: {error}"
        status, text = await asyncio.to_thread(post, f"{order['session_url']}/{place}", body)
        if place == "reward" and status >= 400:
            await asyncio.to_thread(post, f"{order['session_url']}/error", text)

    def _describe(self, result: Any, errors: list[Any]) -> tuple[str, str]:
        """Return where to post what: the reward, or why there is none."""
        if not result.reward_valid:
            if errors:
                return "error", f"{errors[0].exception_type}: {errors[0].exception_message}"
            return "error", "the verifier gave no reward"
        rewards = result.verifier_result.rewards
        name = self._settings["reward"]
        if name not in rewards:
            return "error", f"the verifier gave no {name!r}, but {', '.join(rewards)}"
        value = float(rewards[name])
        components = {key: float(part) for key, part in rewards.items() if key != name}
        return "reward", json.dumps(
            {"reward": value, "correct": value >= self._settings["correct_from"], "components": components}
        )


def _list_exceptions(result: Any) -> Iterator[Any]:
    for step in result.step_results or []:
        yield step.exception_info


def post(url: str, body: str) -> tuple[int, str]:
    """Post a text; return the answer's status and text."""
    request = urllib.request.Request(url, body.encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def main() -> None:
    """List tasks, or play episodes, as the arguments say."""
    sys.path.insert(0, os.getcwd())
    command, settings = sys.argv[1], json.loads(sys.argv[2])
    keep_variables(settings)
    if command == "play":
        with tempfile.TemporaryDirectory() as trials:
            asyncio.run(HarborPlayer(settings, Path(trials)).play_all())
        return
    try:
        tasks: dict[str, Any] = asyncio.run(list_tasks(settings))
    except HarborRefused as error:
        tasks = {"error": str(error)}
    with open(sys.argv[3], "w", encoding="utf-8") as file:
        json.dump(tasks, file)


if __name__ == "__main__":
    main()
