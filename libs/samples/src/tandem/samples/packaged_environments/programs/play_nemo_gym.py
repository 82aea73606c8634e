"""The program that tries NeMo Gym's servers (0.4), lists its agents' rows, and plays episodes by them.

It runs on the interpreter that has the package. ``play_nemo_gym.py list SETTINGS ANSWER NUM [AGENTS]`` starts the
servers once and writes rows to a file; ``play_nemo_gym.py play SETTINGS`` reads a line of JSON for each episode, as any
agent that stays (``docs/agents.md``). An episode is one request ``/run`` to the agent of its row, as in NeMo-RL. The
agent asks NeMo Gym's own model server, and that asks the proxy here, which knows the endpoint of each episode by a mark
in the row's metadata.

Whatever is lost with a server is played again: once one is gone, or hangs, this process kills itself, and another takes
its place.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO
from urllib.parse import urlsplit

NOT_INSTALLED = 69
_START_S = 300.0
"""Longest time that the servers may take to start; each imports for some seconds of a core."""
_LOOK_S = 1.0
_HEALTH_S = 10.0
"""Longest time for an answer of a server that is looked at ..."""
_HANGS_S = 60.0
"""... and how long it may give none before it counts as hanging."""
_END_S = 10.0
"""How long servers that are told to end may take."""
_POLICY = "policy_model"
_JUDGE = "policy_model_as_judge"
_MARK = "tandem_episode"
_MODELS, _AGENTS, _RESOURCES = "responses_api_models", "responses_api_agents", "resources_servers"
_MODEL_CONFIG = "responses_api_models/vllm_model/configs/vllm_model_for_training.yaml"
_OF_TRAINING = ("temperature", "top_p", "model", "seed", "stream", "store")
"""Parameters of rows that are the run's to decide."""
_OF_GYM = ("metadata", "model", "store", "user")
"""Fields of a judge's request that say nothing of what to answer."""
_OVER = 410
"""Status of a request to an episode that has ended."""
_SPLITS = {"train": ("train", "example"), "validation": ("validation",)}
"""Types of an agent's data sets, by what they are for; the first that has rows counts."""
_ALMOST = re.compile(r"Almost-Server Detected: '([^']*)'.*?\n  - (.*?)\n\n", re.DOTALL)
"""NeMo Gym's words on settings that are nearly a server's; its error has the whole configuration instead."""
_PIECE, _KEPT = 1 << 16, 2000
"""Characters of what a server prints that are read at once, and of a line that are kept: the last ones."""
_PDEATHSIG = 1
_PORT_TAKEN = "address already in use"
_STARTS = 3
"""Attempts to start the servers while they are tried."""


class GymRefused(Exception):
    """The error of settings or of a server that cannot be played, in one line."""


class GymKilled(GymRefused):
    """The error of a server that was killed from outside before it answered, or whose port another program took."""


def import_gym() -> Any:
    """Import NeMo Gym's configuration; end the program if the package is missing."""
    try:
        import aiohttp  # noqa: F401
        from nemo_gym import global_config
    except ModuleNotFoundError as error:
        print("nemo-gym" if (error.name or "").startswith("nemo_gym") else error.name)
        raise SystemExit(NOT_INSTALLED) from None
    return global_config


def find_ports(num: int) -> list[int]:
    """Return free ports on loopback, each another."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(num)]
        for listener in sockets:
            listener.bind(("127.0.0.1", 0))
        return [int(listener.getsockname()[1]) for listener in sockets]


def read_config(settings: dict[str, Any], policy_port: int, judge_port: int) -> Any:
    """Return NeMo Gym's whole configuration, with the policy and all servers on loopback. Raises `GymRefused`."""
    global_config = import_gym()
    from omegaconf import DictConfig, open_dict
    from omegaconf.errors import OmegaConfBaseException

    gym_settings: dict[str, Any] = json.loads(json.dumps(settings["config"]))
    paths = list(gym_settings.get("config_paths") or [])
    if _POLICY not in gym_settings and not any(str(path).startswith(f"{_MODELS}/") for path in paths):
        paths.append(_MODEL_CONFIG)
    policy: dict[str, Any] = {
        "config_paths": paths,
        "policy_base_url": f"http://127.0.0.1:{policy_port}/v1",
        "policy_api_key": "none",
        "policy_model_name": "policy",
        "default_host": "127.0.0.1",
        "head_server": {"host": "127.0.0.1", "port": 0},
    }
    initial_settings: dict[Any, Any] = gym_settings | policy
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            config = global_config.GlobalConfigDictParser().parse(
                global_config.GlobalConfigDictParserConfig(
                    initial_global_config_dict=DictConfig(initial_settings), skip_load_from_cli=True
                )
            )
    except (Exception, SystemExit) as error:  # the package's own refusals have many types
        if faults := _ALMOST.findall(printed.getvalue()):
            raise GymRefused("; ".join(f"{name}: {' '.join(fault.split())}" for name, fault in faults)) from error
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        kind = "" if not isinstance(error, OmegaConfBaseException) else f"{type(error).__name__}: "
        raise GymRefused(kind + " ".join(lines) or type(error).__name__) from error
    with open_dict(config):
        config[_JUDGE] = {_MODELS: {"proxy": {"host": "127.0.0.1", "port": judge_port}}}
        servers = list(list_servers(config))
        refuse_local_models(servers)
        config.head_server.port, *ports = find_ports(1 + len(servers))
        for (_, kind, _, server), port in zip(servers, ports, strict=True):
            server["host"], server["port"] = "127.0.0.1", port
            for value in server.values() if kind == _RESOURCES else ():
                if isinstance(value, DictConfig) and (value.get("type"), value.get("name")) == (_MODELS, _POLICY):
                    value["name"] = _JUDGE  # what a judge says is not trained on
    return config


def list_servers(config: Any) -> Iterator[tuple[str, str, str, Any]]:
    """Yield the servers to start: the name of each, its kind, its folder's name, and its settings."""
    from omegaconf import DictConfig

    for name, entry in config.items():
        for kind in (_MODELS, _RESOURCES, _AGENTS):
            group = entry.get(kind) if isinstance(entry, DictConfig) else None
            for folder, server in group.items() if isinstance(group, DictConfig) else ():
                if isinstance(server, DictConfig) and server.get("entrypoint") is not None:
                    yield str(name), kind, str(folder), server


def refuse_local_models(servers: list[tuple[str, str, str, Any]]) -> None:
    """Raise `GymRefused` for a model that NeMo Gym would serve on GPUs: the run has them."""
    for name, kind, folder, server in servers:
        if kind == _MODELS and "vllm_serve_kwargs" in server:
            raise GymRefused(
                f"{name}: NeMo Gym would serve it on GPUs ({folder}), which the run has: serve it elsewhere, "
                f"and make {name} a vllm_model or openai_model with its address"
            )


def list_models_elsewhere(config: Any) -> list[tuple[str, str]]:
    """Return each model that is asked besides the policy: the name of its server, and an address of the model."""
    models = []
    for name, kind, _, server in list_servers(config):
        for key, value in server.items() if kind == _MODELS else ():
            if str(key).endswith("base_url") and value is not None:
                urls = [value] if isinstance(value, str) else value
                models += [(name, str(url)) for url in urls if url != config.policy_base_url]
    return models


def list_agents(config: Any) -> dict[str, Any]:
    """Return the settings of the agents, by name."""
    return {name: server for name, kind, _, server in list_servers(config) if kind == _AGENTS}


def choose_agent(settings: dict[str, Any], config: Any) -> str | None:
    """Return the agent of rows that name none; None where several could be. Raises `GymRefused`."""
    agents = list_agents(config)
    if not agents:
        raise GymRefused("config_paths: no agent is configured (responses_api_agents)")
    if settings["agent"] is not None and settings["agent"] not in agents:
        raise GymRefused(f"agent: {settings['agent']!r} is not configured: there is {', '.join(sorted(agents))}")
    if settings["agent"] is not None:
        return str(settings["agent"])
    return next(iter(agents)) if len(agents) == 1 else None


class GymServers:
    """The servers of a configuration, which are started here, and the head server in this process."""

    def __init__(self, config: Any, variables: dict[str, str], *, shows: bool) -> None:
        """With `shows`, what the servers print goes to the standard error."""
        self._config, self._variables, self._shows = config, variables, shows
        self._processes: dict[str, subprocess.Popen[str]] = {}
        self._last_lines: dict[str, deque[str]] = {}
        self._reading: dict[str, threading.Thread] = {}
        self._http: Any = None
        self._addresses = {name: f"http://{server.host}:{server.port}" for name, _, _, server in list_servers(config)}

    def address_of(self, name: str) -> str:
        """Return where a server is."""
        return self._addresses[name]

    async def start(self) -> None:
        """Start all servers, and wait until each answers. Raises `GymRefused`."""
        import aiohttp
        from omegaconf import OmegaConf

        yaml = OmegaConf.to_yaml(self._config)
        os.environ["NEMO_GYM_CONFIG_DICT"] = yaml
        from nemo_gym.server_utils import HeadServer

        HeadServer.run_webserver()
        self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_HEALTH_S))
        for name, kind, folder, server in list_servers(self._config):
            self._processes[name] = self._start_one(name, kind, folder, str(server.entrypoint))
        deadline = time.monotonic() + _START_S
        waiting = set(self._processes)
        while waiting:
            self._refuse_ended()
            if time.monotonic() > deadline:
                raise GymRefused(f"{sorted(waiting)[0]} does not answer after {_START_S:g} s")
            waiting -= {name for name in sorted(waiting) if await self._answers(name)}
            await asyncio.sleep(0.2)

    def _start_one(self, name: str, kind: str, folder: str, entrypoint: str) -> subprocess.Popen[str]:
        from nemo_gym import PARENT_DIR

        local = Path.cwd() / kind / folder
        place = local if (local / entrypoint).exists() else PARENT_DIR / kind / folder
        if not (place / entrypoint).exists():
            raise GymRefused(f"{name}: there is no {kind}/{folder}/{entrypoint} here or in the package")
        program = [self._python_of(kind, folder, place), entrypoint]
        if self._config.get("ray_head_node_address") is None:
            program.insert(1, str(Path(__file__).with_name("serve_nemo_gym.py")))
        path = os.pathsep.join(filter(None, [str(place), os.environ.get("PYTHONPATH")]))
        variables = {**os.environ, **self._variables, "PYTHONPATH": path, "NEMO_GYM_CONFIG_PATH": name}
        try:
            process = subprocess.Popen(
                program,
                cwd=place,
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                preexec_fn=_end_with_parent,
            )
        except OSError as error:
            raise GymRefused(f"{name}: cannot run {program[0]!r}: {error.strerror}") from error
        lines = self._last_lines[name] = deque(maxlen=20)
        self._reading[name] = threading.Thread(target=self._read, args=(process.stdout, lines), daemon=True)
        self._reading[name].start()
        return process

    def _python_of(self, kind: str, folder: str, place: Path) -> str:
        """Return a server's interpreter: that of the environment that NeMo Gym has made for it, or this one."""
        gym_python = Path(str(self._config.get("uv_venv_dir") or "."), kind, folder, ".venv/bin/python")
        beside = place / ".venv/bin/python"
        return str(next((path.absolute() for path in (gym_python, beside) if path.exists()), sys.executable))

    def _read(self, output: TextIO, lines: deque[str]) -> None:
        """Keep the last lines of what a server prints. A line may have no end, and is not held whole."""
        is_new = True
        while piece := output.readline(_PIECE):
            if self._shows:
                sys.stderr.write(piece)
                sys.stderr.flush()
            if is_new and not piece.strip():
                continue
            if is_new:
                lines.append("")
            lines[-1] = (lines[-1] + piece)[-_KEPT:]
            is_new = piece.endswith("\n")

    def _refuse_ended(self) -> None:
        """Raise `GymRefused` if a server has ended."""
        for name, process in self._processes.items():
            if process.poll() is not None:
                self._reading[name].join(_END_S)  # until its last line has been read
                lines = [line.strip() for line in [*self._last_lines[name]]] or [f"exit code {process.returncode}"]
                last = next((line for line in reversed(lines) if "error" in line.lower()), lines[-1])
                is_chance = process.returncode < 0 or _PORT_TAKEN in last.lower()
                kind = GymKilled if is_chance else GymRefused
                raise kind(f"the server {name} ended: {last}")

    async def _answers(self, name: str) -> bool:
        """Tell whether a server answers anything."""
        import aiohttp

        try:
            async with self._http.get(self._addresses[name]):
                return True
        except (aiohttp.ClientError, TimeoutError):
            return False

    @property
    def are_running(self) -> bool:
        """Whether none has ended."""
        return all(process.poll() is None for process in self._processes.values())

    async def watch(self) -> None:
        """Kill this process once a server is gone or hangs; what it plays is played again then."""
        well_at = dict.fromkeys(self._processes, time.monotonic())
        while True:
            await asyncio.sleep(_LOOK_S)
            answers = await asyncio.gather(*map(self._answers, self._processes))
            well_at |= {name: time.monotonic() for name, is_well in zip(well_at, answers, strict=True) if is_well}
            if not self.are_running or time.monotonic() - min(well_at.values()) > _HANGS_S:
                give_up("a server of NeMo Gym is gone or hangs")

    async def watch_models(self) -> None:
        """Say where a model is that nothing can connect to, once each time: NeMo Gym asks it on and on, in silence."""
        gone: set[tuple[str, str]] = set()
        while models := list_models_elsewhere(self._config):
            reached = await asyncio.gather(*(accepts(url) for _, url in models))
            unreached = {model for model, is_there in zip(models, reached, strict=True) if not is_there}
            for name, url in sorted(unreached - gone):
                print(f"no answer from {name} at {url}: what asks it waits", file=sys.stderr, flush=True)
            gone = unreached
            await asyncio.sleep(_HEALTH_S)

    async def close(self) -> None:
        """End the servers, those that have begun Ray with it."""
        if self._http is not None:
            await self._http.close()
        for process in self._processes.values():
            process.terminate()
        deadline = time.monotonic() + _END_S
        while time.monotonic() < deadline and any(process.poll() is None for process in self._processes.values()):
            await asyncio.sleep(0.05)
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.wait()


async def accepts(url: str) -> bool:
    """Tell whether something accepts connections at an address."""
    place = urlsplit(url)
    port = place.port or (443 if place.scheme == "https" else 80)
    try:
        async with asyncio.timeout(_HEALTH_S):
            _, writer = await asyncio.open_connection(place.hostname, port)
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True


def give_up(reason: str) -> None:
    """Kill this process."""
    print(f"{reason}: starting anew", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def _end_with_parent() -> None:
    """Have the kernel kill this process once its parent ends."""
    ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


class PolicyProxy:
    """The one endpoint that NeMo Gym's model server knows; it hands each request to the endpoint of its episode."""

    def __init__(self) -> None:
        self._orders: dict[str, dict[str, Any]] = {}
        """Episodes in play, by their marks."""
        self._runners: list[Any] = []
        self._http: Any = None

    async def listen(self, port: int, judge_port: int) -> None:
        """Begin to answer, on loopback."""
        import aiohttp
        from aiohttp import web

        self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(), connector=aiohttp.TCPConnector(limit=0))
        for at, handler in ((port, self._answer), (judge_port, self._answer_judge)):
            application = web.Application(client_max_size=1 << 28)
            application.router.add_route("*", "/{path:.*}", handler)
            runner = web.AppRunner(application, access_log=None)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", at).start()
            self._runners.append(runner)

    def begin(self, order: dict[str, Any]) -> str:
        """Begin an episode; return its mark."""
        mark = str(order["api_key"])
        self._orders[mark] = order
        return mark

    def end(self, mark: str) -> None:
        """End an episode: nothing more is answered."""
        self._orders.pop(mark, None)

    async def close(self) -> None:
        """Stop listening."""
        for runner in self._runners:
            await runner.cleanup()
        if self._http is not None:
            await self._http.close()

    async def _answer(self, request: Any) -> Any:
        """Answer a request of the model server."""
        import aiohttp
        from aiohttp import web

        body = await request.json() if request.can_read_body else {}
        mark = body.pop(_MARK, None)
        if mark is None and len(self._orders) == 1:  # an agent that leaves out the metadata
            (mark,) = self._orders
        order = self._orders.get(str(mark))
        if order is None:
            reason = "the episode is over" if mark is not None else "the agent leaves out the metadata of its row"
            return web.json_response({"error": {"message": f"{reason}: whose request is this?"}}, status=403)
        body.pop("metadata", None)
        url = f"{order['session_url']}{request.path}"
        content = json.dumps({**body, "model": order["model"]}) if request.method == "POST" else None
        headers = {"Content-Type": "application/json"}
        try:
            async with self._http.request(request.method, url, data=content, headers=headers) as answer:
                text = await answer.read()
                # The model server asks again for ever where it is told of a server's trouble.
                status = answer.status if answer.status < 429 else 403
                return web.Response(body=text, status=status, content_type="application/json")
        except aiohttp.ClientError as error:
            return web.json_response({"error": {"message": f"{type(error).__name__}: {error}"}}, status=403)

    async def _answer_judge(self, request: Any) -> Any:
        """Have the policy judge, in any episode in play: nothing of it is trained on there, nor kept."""
        import aiohttp
        from aiohttp import web

        body = await request.json() if request.can_read_body else {}
        fields = {name: value for name, value in body.items() if value is not None and name not in _OF_GYM}
        reason = "no episode is in play, and policy_model judges within one"
        for order in list(self._orders.values()):
            url = f"{order['judge_base_url'].removesuffix('/v1')}{request.path}"
            try:
                async with self._http.request(request.method, url, json=fields or None) as answer:
                    if answer.status == _OVER:
                        continue
                    status = answer.status if answer.status < 429 else 403
                    return web.Response(body=await answer.read(), status=status, content_type="application/json")
            except aiohttp.ClientError as error:
                reason = f"{type(error).__name__}: {error}"
        return web.json_response({"error": {"message": reason}}, status=403)


class GymPlayer:
    """Plays episodes by the agents."""

    def __init__(self, settings: dict[str, Any], config: Any, servers: GymServers, proxy: PolicyProxy) -> None:
        import aiohttp

        self._settings, self._servers, self._proxy = settings, servers, proxy
        self._agent = choose_agent(settings, config)
        self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(), connector=aiohttp.TCPConnector(limit=0))

    async def play_all(self) -> None:
        """Play an episode for each line of the standard input, to its end."""
        async with asyncio.TaskGroup() as tasks:
            watching = [tasks.create_task(watch()) for watch in (self._servers.watch, self._servers.watch_models)]
            async with asyncio.TaskGroup() as playing:
                while line := await asyncio.to_thread(sys.stdin.readline):
                    playing.create_task(self._play(json.loads(line)))
            for task in watching:
                task.cancel()
        await self._http.close()

    async def _play(self, order: dict[str, Any]) -> None:
        """Play one episode, and post its reward, or what went wrong."""
        mark = self._proxy.begin(order)
        try:
            result = await self._run(order["problem"]["metadata"]["row"], mark)
            body = read_reward(result, self._settings["correct_from"])
        except Exception as error:  # the environment is anyone's
            if not self._servers.are_running:
                give_up("a server of NeMo Gym is gone")
            await self._post(order, "error", str(error) or type(error).__name__)
        else:
            await self._post(order, "reward", json.dumps(body))
        finally:
            self._proxy.end(mark)

    async def _run(self, row: dict[str, Any], mark: str) -> Any:
        """Have the agent of a row play it; return its result."""
        agent = str((row.get("agent_ref") or {}).get("name") or self._agent)
        async with self._http.post(f"{self._servers.address_of(agent)}/run", json=mark_row(row, mark)) as answer:
            text = await answer.text()
            if answer.status != 200:
                raise GymRefused(f"the agent {agent} answered {answer.status}: {text[:2000]}")
            return json.loads(text)

    async def _post(self, order: dict[str, Any], place: str, content: str) -> None:
        url, headers = f"{order['session_url']}/{place}", {"Content-Type": "application/json"}
        async with self._http.post(url, data=content.encode(), headers=headers) as answer:
            if place == "reward" and answer.status == 422:
                await self._post(order, "error", await answer.text())


def mark_row(row: dict[str, Any], mark: str) -> dict[str, Any]:
    """Return a row as its agent is sent it: sampled as training is, and marked with its episode."""
    parameters = {name: value for name, value in row["responses_create_params"].items() if name not in _OF_TRAINING}
    metadata = dict(parameters.get("metadata") or {})
    extra = json.loads(metadata.get("extra_body") or "{}")
    extra = {name: value for name, value in extra.items() if name not in _OF_TRAINING}
    parameters["metadata"] = {**metadata, "extra_body": json.dumps({**extra, _MARK: mark})}
    return {**row, "responses_create_params": parameters}


def read_reward(result: Any, correct_from: float) -> dict[str, Any]:
    """Return the reward of an agent's result as it is posted. Raises `GymRefused`."""
    reward = result.get("reward") if isinstance(result, dict) else None
    if not isinstance(reward, bool | int | float):
        raise GymRefused(f"the agent's result has no reward: {str(result)[:200]}")
    parts = result.get("reward_components")
    components = {name: float(value) for name, value in parts.items()} if isinstance(parts, dict) else {}
    return {"reward": float(reward), "correct": float(reward) >= correct_from, "components": components}


def list_rows(settings: dict[str, Any], config: Any, num: int) -> dict[str, Any]:
    """Return the rows of the agents' own data sets. Raises `GymRefused`."""
    sides: dict[str, Any] = {}
    agents = list_agents(config)
    agent_names = [settings["agent"]] if settings["agent"] is not None else sorted(agents)
    for side, types in _SPLITS.items():
        for kind in types:
            rows = [row for name in agent_names for row in _read_rows(name, agents[name], kind)]
            if rows:
                sides[side] = rows[:num]
                break
    if not sides.get("train"):
        raise GymRefused(
            f"no file of {' or '.join(agent_names)} is there (datasets of its configuration): give data.train.data_path"
        )
    return sides


def _read_rows(agent: str, server: Any, kind: str) -> Iterator[dict[str, Any]]:
    from nemo_gym import _resolve_under_cwd_or_install

    for data_set in server.get("datasets") or ():
        path = _resolve_under_cwd_or_install(str(data_set.get("jsonl_fpath")))
        if data_set.get("type") != kind or not path.exists():
            continue
        with path.open(encoding="utf-8") as lines:
            for place, line in enumerate(lines, 1):
                row = {"agent_ref": {"type": _AGENTS, "name": agent}, **json.loads(line)}
                items = row["responses_create_params"]["input"]
                contents = [items] if isinstance(items, str) else [item.get("content") for item in items]
                question = "\n".join(
                    content if isinstance(content, str) else json.dumps(content) for content in contents
                )
                name = f"{path.parent.parent.name}/{path.name}:{place}"
                yield {"name": name, "question": question, "answer": "", "metadata": {"row": row}}


async def try_servers(settings: dict[str, Any], named: list[str], num: int) -> dict[str, Any]:
    """Start the servers once; return the rows of the agents, unless rows elsewhere name agents. Raises `GymRefused`."""
    config = read_config(settings, *find_ports(2))
    default, agents = choose_agent(settings, config), list_agents(config)
    for name in named:
        if not name and default is None:
            raise GymRefused(f"agent: rows have no agent_ref, and there is {', '.join(sorted(agents))}")
        if name and name not in agents:
            raise GymRefused(f"a row is for the agent {name!r}, which is not configured: there is {', '.join(agents)}")
    tasks: dict[str, Any] = {} if named else list_rows(settings, config, num)
    for num_left in reversed(range(_STARTS)):
        servers = GymServers(config, settings["variables"], shows=False)
        try:
            await servers.start()
        except GymKilled:
            if not num_left:
                raise
            config = read_config(settings, *find_ports(2))
        else:
            break
        finally:
            await servers.close()
    return tasks


async def play(settings: dict[str, Any]) -> None:
    """Play all that there is to play."""
    ports = find_ports(2)
    config = read_config(settings, *ports)
    proxy = PolicyProxy()
    await proxy.listen(*ports)
    servers = GymServers(config, settings["variables"], shows=True)
    try:
        try:
            await servers.start()
        except GymKilled:
            give_up("a server of NeMo Gym was killed")
        await GymPlayer(settings, config, servers, proxy).play_all()
    finally:
        await servers.close()
        await proxy.close()


def main() -> None:
    """Try the servers and list rows, or play episodes, as the arguments say."""
    command, settings = sys.argv[1], json.loads(sys.argv[2])
    import_gym()
    if command == "play":
        with contextlib.redirect_stdout(sys.stderr):
            asyncio.run(play(settings))
        return
    named = json.loads(sys.argv[5]) if len(sys.argv) > 5 else []
    try:
        tasks = asyncio.run(try_servers(settings, named, int(sys.argv[4])))
    except GymRefused as error:
        tasks = {"error": str(error)}
    Path(sys.argv[3]).write_text(json.dumps(tasks), encoding="utf-8")


if __name__ == "__main__":
    main()
