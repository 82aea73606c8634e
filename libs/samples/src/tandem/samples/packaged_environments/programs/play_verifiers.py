"""The program that lists the tasks of an environment of verifiers (0.4), and plays its episodes.

``play_verifiers.py list SETTINGS ANSWER NUM`` writes tasks to a file; ``play_verifiers.py play SETTINGS`` reads a line
of JSON for each episode, as any agent that stays (``docs/agents.md``). It imports nothing of Tandem's, so that it may
run where verifiers is installed apart. The environment plays as it does under ``vf-eval``: its own roles, harnesses,
tools and judges, against the endpoint of the episode.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from importlib import metadata
from typing import Any
from urllib.parse import urlsplit

RELEASE = (0, 4)
NOT_INSTALLED = 69
CHAT = "tandem-chat"
"""Id of the harness `tandem_chat`, which stands for verifiers' ``null``: that of roles for which neither the taskset
nor the configuration names one."""
_WATCH_S = 0.5
"""Seconds between two looks at tool servers that all episodes share."""
_HOSTED = "pinference.ai"
_UNREACHED = ("APIConnectionError", "APITimeoutError")
"""Errors of the client of judges that say nothing of where it has asked."""
_POLICY = "policy"
"""Model of a judge that is the policy itself, where no ``base_url`` is set."""


class SettingsRefused(Exception):
    """The error of settings that cannot be played, in one line."""


def import_verifiers() -> Any:
    """Import the package; end the program if it is missing. Raises `SettingsRefused` for another release."""
    try:
        release = metadata.version("verifiers")
    except metadata.PackageNotFoundError:
        print("verifiers")
        raise SystemExit(NOT_INSTALLED) from None
    if tuple(map(int, release.split(".")[:2])) != RELEASE:
        expected = ".".join(map(str, RELEASE))
        raise SettingsRefused(f"verifiers {release} is installed, but {expected} is what can be played here")
    import verifiers.v1

    return verifiers.v1


def make_config(settings: dict[str, Any], args: dict[str, Any]) -> Any:
    """Return verifiers' configuration of the environment. Raises `SettingsRefused`."""
    from pydantic import ValidationError

    vf = import_verifiers()
    if (folder := os.path.dirname(__file__)) not in sys.path:
        sys.path.append(folder)  # of the harness `CHAT`
    from verifiers.v1.runtimes import PrimeConfig
    from verifiers.v1.utils import loaders

    try:
        described = {**settings["env"], "taskset": {**settings["env"].get("taskset", {}), **args, "id": settings["id"]}}
        kind = loaders.env_config_type(settings["id"], described.get("id", ""))
        has_default = loaders.default_harness_id(settings["id"]) != "bash"
        for name, field in kind.model_fields.items():
            if not isinstance(field.default, vf.AgentConfig):
                continue
            role = described[name] = dict(described.get(name) or {})
            declared = None if field.default.harness is None else field.default.harness.id
            harness = (role.get("harness") or {}).get("id", declared)
            if harness == "null" or (harness is None and not has_default):
                role["harness"] = {**(role.get("harness") or {}), "id": CHAT}
            if "runtime" not in role and isinstance(field.default.runtime, PrimeConfig):
                role["runtime"] = {"type": "subprocess"}
        config = loaders.resolve_env_config(described)
    except ValidationError as error:
        first = error.errors()[0]
        raise SettingsRefused(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error
    except Exception as error:  # the package is anyone's
        raise SettingsRefused(f"{type(error).__name__}: {error}".splitlines()[0]) from error
    check(vf, config)
    return config


def check(vf: Any, config: Any) -> None:
    """Raise `SettingsRefused` for what cannot be trained on, or must not run on this machine."""
    from verifiers.v1.configs.judge import JudgeConfig
    from verifiers.v1.utils.loaders import load_harness

    roles = {name: value for name, value in config if isinstance(value, vf.AgentConfig)}
    of_policy = [name for name, role in roles.items() if role.client is None]
    if len(of_policy) != 1:
        played = ", ".join(of_policy) or "none"
        raise SettingsRefused(
            f"the policy plays one role, but {played} of {', '.join(roles)} have no client of their own: set "
            "env.ROLE.client for the others"
        )
    for name, harness_config in config.agent_harnesses().items():
        if load_harness(harness_config).EXECUTES_CODE and roles[name].runtime.type == "subprocess":
            raise SettingsRefused(
                f"the harness {harness_config.id!r} of {name} executes what the policy writes on this machine: set "
                f"env.{name}.runtime to a container, or env.{name}.harness to {{id: null}}"
            )
    for path, judge in _walk(config, JudgeConfig, ""):
        if _is_hosted(judge) and judge.model != _POLICY and not os.environ.get(judge.api_key_var):
            raise SettingsRefused(
                f"{path} is a judge without base_url: set base_url and model of an endpoint that judges (and "
                f"api_key_var), {judge.api_key_var}, or model: {_POLICY} for the policy itself"
            )


def _is_hosted(judge: Any) -> bool:
    """Tell whether a judge is at the service that verifiers asks by itself."""
    return (urlsplit(judge.base_url).hostname or "").endswith(_HOSTED)


def _walk(node: Any, kind: type, path: str) -> Any:
    """Yield the parts of a configuration that are of a kind, each with its path."""
    if isinstance(node, kind):
        yield path, node
    elif hasattr(type(node), "model_fields"):
        for name, value in node:
            yield from _walk(value, kind, f"{path}.{name}" if path else name)
    elif isinstance(node, list | tuple):
        for index, value in enumerate(node):
            yield from _walk(value, kind, f"{path}[{index}]")


def list_tasks(settings: dict[str, Any], num: int) -> dict[str, Any]:
    """Return the tasks to train on and, if they are apart, those to validate on."""
    validation_args = settings["validation_args"]
    tasks = {"train": _describe_tasks(settings, settings["args"], num)}
    if validation_args is not None:
        tasks["validation"] = _describe_tasks(settings, {**settings["args"], **validation_args}, num)
    return tasks


def _describe_tasks(settings: dict[str, Any], args: dict[str, Any], num: int) -> list[dict[str, Any]]:
    from verifiers.v1.utils.loaders import load_environment

    config = make_config(settings, args)
    try:
        taskset = load_environment(config).taskset
        tasks = list(taskset if taskset.bounded else taskset.take(num))
    except Exception as error:  # the package is anyone's
        raise SettingsRefused(f"{type(error).__name__}: {error}".splitlines()[0]) from error
    described = []
    for task in tasks:
        data = task.data.model_dump(mode="json")
        described.append(
            {
                "name": task.data.id or task.data.name or f"{settings['id']}-{task.data.idx}",
                "question": task.data.prompt_text or task.data.name or f"{settings['id']}-{task.data.idx}",
                "answer": data.get("answer", ""),
                "metadata": {"task": data},
            }
        )
    return described


class VerifiersPlayer:
    """Plays episodes of an environment, as many at once as there are."""

    def __init__(self, settings: dict[str, Any], posting: Any) -> None:
        """Load the environment; rewards go through `posting`, a client of HTTP."""
        from verifiers.v1.utils.loaders import load_environment

        self._vf = import_verifiers()
        self._correct_from = settings["correct_from"]
        self._env = load_environment(make_config(settings, settings["args"]))
        self._task_class = type(self._env.taskset).task_type()
        self._posting = posting

    async def play_all(self) -> None:
        """Play an episode for each line of the standard input, to its end."""
        async with self._env.serving(), asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(self._watch_servers())
            async with asyncio.TaskGroup() as playing:
                while line := await asyncio.to_thread(sys.stdin.readline):
                    playing.create_task(self._play(json.loads(line)))
            watching.cancel()

    async def _watch_servers(self) -> None:
        """Kill this process once a tool server that all episodes share is gone: another takes its place."""
        servers = self._env._shared_tools.values()
        places = [urlsplit(server.url) for server in servers if server.local and not server.external]
        while places:
            await asyncio.sleep(_WATCH_S)
            for place in places:
                try:
                    _, writer = await asyncio.open_connection(place.hostname, place.port)
                    writer.close()
                except OSError:
                    print(f"the tool server at {place.netloc} is gone: starting anew", file=sys.stderr, flush=True)
                    os.kill(os.getpid(), signal.SIGKILL)

    async def _play(self, order: dict[str, Any]) -> None:
        """Play one episode, and post its reward, or what went wrong."""
        vf = self._vf
        try:
            data = self._task_class.data_type().model_validate(order["problem"]["metadata"]["task"])
            config = self._name_judges(order)
            task = self._task_class(data, config)
            # The address has the secret of the episode; no key is needed.
            client = vf.EvalClientConfig(base_url=order["base_url"], api_key_var="TANDEM_NO_KEY")
            episode = await self._env.run_episode(task, vf.ModelContext(model=order["model"], client=client))
            reward = self._describe_reward(episode, config)
        except Exception as error:  # the package is anyone's
            await self._post(order, "error", f"{type(error).__name__}: {error}")
            return
        await (self._post(order, "error", reward) if isinstance(reward, str) else self._post(order, "reward", reward))

    def _name_judges(self, order: dict[str, Any]) -> Any:
        """Return the settings of tasks, with the address at which the policy judges in this episode."""
        from verifiers.v1.configs.judge import JudgeConfig

        config = self._env.config.taskset.task.model_copy(deep=True)
        for _, judge in _walk(config, JudgeConfig, ""):
            if judge.model == _POLICY and _is_hosted(judge):
                judge.base_url, judge.api_key_var = order["judge_base_url"], "TANDEM_NO_KEY"
        return config

    def _describe_judges(self, error: Any, config: Any) -> str:
        """Return where the judges are, for an error of scoring that is one of a connection; else nothing."""
        from verifiers.v1.configs.judge import JudgeConfig

        if error.type != "TaskError" or not any(name in error.message for name in _UNREACHED):
            return ""
        places = dict.fromkeys(judge.base_url for _, judge in _walk(config, JudgeConfig, ""))
        return f" (judge: {' or '.join(places)})" if places else ""

    def _describe_reward(self, episode: Any, judges: Any) -> dict[str, Any] | str:
        """Return the reward of the policy's part, or why there is none; `judges` are the settings with judges."""
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        if not episode.ok:
            last = errors[-1] if errors else None
            if last is None:
                return "the episode failed"
            return f"{last.type}: {last.message}" + self._describe_judges(last, judges)
        trained = [trace for trace in episode.traces if trace.agent.trainable]
        if len(trained) != 1:
            return f"the episode has {len(trained)} runs of the policy to train on, where one has a reward"
        (trace,) = trained
        parts = {name: reward.value for name, reward in trace.rewards.items() if reward is not None}
        metrics = {name: float(value) for name, value in trace.metrics.items() if value is not None}
        return {
            "reward": trace.reward,
            "correct": trace.reward >= self._correct_from,
            "components": {**metrics, **parts},
        }

    async def _post(self, order: dict[str, Any], place: str, body: dict[str, Any] | str) -> None:
        content = body if isinstance(body, str) else json.dumps(body)
        answer = await self._posting.post(f"{order['session_url']}/{place}", content=content)
        if place == "reward" and answer.status_code == 422:
            await self._post(order, "error", answer.text)


async def play(settings: dict[str, Any]) -> None:
    """Play all that there is to play."""
    import httpx

    async with httpx.AsyncClient(timeout=60, limits=httpx.Limits(max_connections=None)) as posting:
        await VerifiersPlayer(settings, posting).play_all()


def main() -> None:
    """List tasks, or play episodes, as the arguments say."""
    sys.path.insert(0, os.getcwd())
    # Tool servers are programs of their own, in other folders.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH")]))
    command, settings = sys.argv[1], json.loads(sys.argv[2])
    if command == "play":
        asyncio.run(play(settings))
        return
    try:
        import_verifiers()
        tasks: dict[str, Any] = list_tasks(settings, int(sys.argv[4]))
    except SettingsRefused as error:
        tasks = {"error": str(error)}
    with open(sys.argv[3], "w", encoding="utf-8") as file:
        json.dump(tasks, file)


if __name__ == "__main__":
    main()
