"""The program that lists episodes of an environment of OpenEnv (0.10), and plays them at its server.

``play_openenv.py list SETTINGS ANSWER NUM`` tries the server and writes problems to a file; ``play_openenv.py play
SETTINGS`` reads a line of JSON for each episode, as any agent that stays (``docs/agents.md``). An episode is a session
of the server's web socket: ``reset``, a ``step`` for each answer of the policy, ``close``. A server of an installed
package is started here, on the interpreter that has it, and one of an image in a container.

Whatever is lost with a server is played again: once it is gone, or hangs, this process kills itself, and another takes
its place. A session that ends while its server lives costs its own episode alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import IO, Any

RELEASE = (0, 10)
NOT_INSTALLED = 69
_START_S = 180.0
"""Longest time that a server may take to start; importing OpenEnv takes ten seconds of a core."""
_LOOK_S = 1.0
_CLOSED_S = 10.0
"""Longest time that a container may take to end."""
_HEALTH_S = 5.0
"""Longest time for an answer about a server's health ..."""
_HANGS_S = 30.0
"""... and how long it may give none before it counts as hanging."""
_CAPACITY = "CAPACITY_REACHED"
_ROOM_S = 0.2
"""Seconds between two attempts to open a session at a server that has no room."""
_PORT_TAKEN = ("address already in use", "port is already allocated")
_KILLED = 137
"""Exit code of a container whose server was killed."""
_STARTS = 3
"""Attempts to start a server whose port another program takes meanwhile."""
_PDEATHSIG = 1
_KEPT = 2000
"""Bytes kept of what a server prints: the last ones."""
_HIDDEN = ("done", "reward", "metadata")
JSON, TOOLS = "json", "tools"


class OpenEnvRefused(Exception):
    """The error of settings or of a server that cannot be played, in one line."""


class ServerKilled(OpenEnvRefused):
    """The error of a server that was killed from outside before it answered."""


class PortTaken(OpenEnvRefused):
    """The error of a server whose port another program has taken before it."""


class EnvironmentFault(Exception):
    """The error of an environment or its session, which costs an episode."""


class EnvironmentFull(Exception):
    """The answer of a server that has no room for another session."""


def import_clients() -> tuple[Any, Any]:
    """Import the clients of web sockets and of HTTP; end the program if they are missing."""
    try:
        import httpx
        import websockets.asyncio.client
    except ModuleNotFoundError as error:
        print(error.name)
        raise SystemExit(NOT_INSTALLED) from None
    return websockets.asyncio.client, httpx


class OpenEnvServer:
    """The server of an environment: one that is started here, or one elsewhere."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._settings = settings
        self._process: subprocess.Popen[bytes] | None = None
        self._reading: threading.Thread | None = None
        self._printed = b""
        self._source = settings["package"] or settings["image"]
        self.url = str(settings["url"] or "").rstrip("/")
        _, httpx = import_clients()
        self._http = httpx.AsyncClient(timeout=_HEALTH_S, trust_env=settings["url"] is not None)

    async def start(self, *, is_tried: bool = False) -> None:
        """Start it unless it runs elsewhere, and wait until it answers; what it prints goes to the standard error.

        Raises `OpenEnvRefused`. A server that `is_tried` prints nothing, is refused at once where none is at the URL,
        and where its interpreter has another release of OpenEnv.
        """
        for num_left in reversed(range(_STARTS)):
            if self._settings["url"] is None:
                self._launch(is_tried=is_tried)
            try:
                await self._wait(is_tried=is_tried)
            except PortTaken:
                if not num_left:
                    raise
            else:
                break

    def _launch(self, *, is_tried: bool) -> None:
        port = find_port()
        self.url = f"http://127.0.0.1:{port}"
        words, variables = self._compose_command(port, is_tried=is_tried)
        try:
            self._process = process = subprocess.Popen(
                words,
                stdin=subprocess.PIPE if self._settings["image"] is not None else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=variables,
                preexec_fn=_end_with_parent,
            )
        except OSError as error:
            raise OpenEnvRefused(f"python: cannot run {words[0]!r}: {error.strerror}") from error
        self._reading = threading.Thread(target=self._read, args=(process.stdout, not is_tried), daemon=True)
        self._reading.start()

    def _compose_command(self, port: int, *, is_tried: bool) -> tuple[list[str], dict[str, str]]:
        """Return the command that starts it at a port, and its environment variables."""
        settings = self._settings
        if settings["image"] is not None:
            import containers  # lies next to this program

            try:
                words = containers.compose_command(settings["image"], port, list(settings["variables"]))
            except containers.ImageRefused as error:
                raise OpenEnvRefused(str(error)) from error
            return words, {**os.environ, **settings["variables"]}
        python = settings["python"] or sys.executable
        path = os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH")]))
        variables = {**os.environ, "PYTHONPATH": path, **settings["variables"]}
        if is_tried:
            refuse_release(python, variables)
        words = [python, "-m", "uvicorn", settings["package"], "--host", "127.0.0.1", "--port", str(port)]
        return [*words, "--log-level", "warning"], variables  # or each episode has lines of its own

    def _read(self, output: IO[bytes], shows: bool) -> None:
        with output:
            while printed := os.read(output.fileno(), 1 << 16):
                self._printed = (self._printed + printed)[-_KEPT:]
                if shows:
                    sys.stderr.write(printed.decode(errors="replace"))
                    sys.stderr.flush()

    async def _wait(self, *, is_tried: bool) -> None:
        """Wait until it answers. One at a URL may be started anew elsewhere meanwhile."""
        deadline = time.monotonic() + _START_S
        while not await self.is_healthy():
            if self._process is not None and self._process.poll() is not None:
                last = self._last_line()
                code, printed = self._process.returncode, self._printed.decode(errors="replace").lower()
                kind = ServerKilled if code < 0 or code == _KILLED else OpenEnvRefused
                if any(text in printed for text in _PORT_TAKEN):
                    kind = PortTaken
                raise kind(f"the server of {self._source} ended: {last}")
            if self._process is None and (is_tried or time.monotonic() > deadline):
                raise OpenEnvRefused(f"no server answers at {self.url}")
            if time.monotonic() > deadline:
                raise OpenEnvRefused(f"the server of {self._source} does not answer after {_START_S:g} s")
            await asyncio.sleep(_ROOM_S)

    async def is_healthy(self) -> bool:
        """Tell whether the server answers that it is well."""
        _, httpx = import_clients()
        try:
            answer = await self._http.get(f"{self.url}/health")
            return bool(answer.status_code == 200 and answer.json().get("status") == "healthy")
        except (httpx.HTTPError, ValueError, AttributeError):
            return False

    async def ask_schema(self) -> dict[str, Any]:
        """Return the JSON schema of an action. Raises `OpenEnvRefused` for a server of another kind."""
        _, httpx = import_clients()
        try:
            schema = (await self._http.get(f"{self.url}/schema")).json()["action"]
            return {"properties": dict(schema.get("properties", {})), "required": list(schema.get("required", []))}
        except (httpx.HTTPError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise OpenEnvRefused(
                f"the server at {self.url} describes no actions at /schema: it is not of OpenEnv 0.10"
            ) from error

    async def watch(self) -> None:
        """Kill this process once the server is gone or hangs; what it plays is played again then."""
        well_at = time.monotonic()
        while self._process is not None:
            await asyncio.sleep(_LOOK_S)
            if await self.is_healthy():
                well_at = time.monotonic()
            if self._process.poll() is not None or time.monotonic() - well_at > _HANGS_S:
                self.give_up()

    def give_up(self) -> None:
        """Kill this process."""
        print(f"the server at {self.url} is gone or hangs: starting anew", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

    async def close(self) -> None:
        """End a server that was started here."""
        await self._http.aclose()
        if self._process is not None:
            if self._process.stdin is not None:
                self._process.stdin.close()  # which ends the container
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(_CLOSED_S)
            self._process.kill()
            self._process.wait()
            if self._reading is not None:
                self._reading.join(_LOOK_S)

    def _last_line(self) -> str:
        if self._reading is not None:
            self._reading.join(_LOOK_S)
        lines = self._printed.decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"exit code {self._process.returncode if self._process else None}"


def _end_with_parent() -> None:
    """Have the kernel kill this process once its parent ends."""
    ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def find_port() -> int:
    """Return a free port on loopback."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def refuse_release(python: str, variables: dict[str, str]) -> None:
    """Raise `OpenEnvRefused` if the interpreter of a server has another release; nothing where it has none."""
    code = "from importlib import metadata; print(metadata.version('openenv'))"
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):  # its start will say so
        ended = subprocess.run([python, "-c", code], env=variables, capture_output=True, text=True, timeout=_START_S)
        release = ended.stdout.strip()
        if release and tuple(release.split(".")[:2]) != tuple(map(str, RELEASE)):
            expected = ".".join(map(str, RELEASE))
            raise OpenEnvRefused(f"openenv {release} is installed, but {expected} is what can be played here")


class EnvironmentSession:
    """A session at a server: one environment, for one episode."""

    def __init__(self, socket: Any, timeout_s: float) -> None:
        self._socket, self._timeout_s = socket, timeout_s

    async def reset(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Begin the episode; return its first result. Raises `EnvironmentFault` and `EnvironmentFull`."""
        return await self._ask("reset", arguments)

    async def step(self, action: dict[str, Any]) -> dict[str, Any]:
        """Carry out an action; return its result. Raises `EnvironmentFault`."""
        return await self._ask("step", action)

    async def _ask(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        import websockets.exceptions

        try:
            async with asyncio.timeout(self._timeout_s):
                with contextlib.suppress(websockets.exceptions.ConnectionClosed):  # a refusal may have come before
                    await self._socket.send(json.dumps({"type": kind, "data": data}))
                answer = json.loads(await self._socket.recv())
        except TimeoutError:
            raise TimeoutError(f"{kind} took longer than {self._timeout_s:g} s") from None
        except websockets.exceptions.ConnectionClosed as error:
            raise ConnectionError(f"the session ended during {kind}: {error}") from error
        except ValueError as error:
            raise EnvironmentFault(f"the answer to {kind} is no JSON: {error}") from error
        result = answer.get("data") if isinstance(answer, dict) else None
        if isinstance(result, dict) and answer.get("type") == "error":
            if result.get("code") == _CAPACITY:
                raise EnvironmentFull
            raise EnvironmentFault(f"{kind}: {result.get('message')} ({result.get('code')})")
        if not isinstance(result, dict) or not isinstance(result.get("observation"), dict):
            raise EnvironmentFault(f"the answer to {kind} has no observation: it is not of OpenEnv 0.10")
        return result


class OpenEnvPlayer:
    """Plays episodes of an environment, as many at once as its server takes."""

    def __init__(self, settings: dict[str, Any], server: OpenEnvServer, form: str) -> None:
        """`form` is what answers become, as `choose_form` has chosen it."""
        self._settings, self._server, self._form = settings, server, form
        self._sockets, httpx = import_clients()
        self._http = httpx.AsyncClient(timeout=None, limits=httpx.Limits(max_connections=None), trust_env=False)

    async def play_all(self) -> None:
        """Play an episode for each line of the standard input, to its end."""
        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(self._server.watch())
            async with asyncio.TaskGroup() as playing:
                while line := await asyncio.to_thread(sys.stdin.readline):
                    playing.create_task(self._play(json.loads(line)))
            watching.cancel()

    async def _play(self, order: dict[str, Any]) -> None:
        """Play one episode, and post its reward, or what went wrong."""
        try:
            while True:
                with contextlib.suppress(EnvironmentFull):
                    reward = await self._play_session(order)
                    break
                await asyncio.sleep(_ROOM_S)
        except OSError as error:
            if not await self._server.is_healthy():
                self._server.give_up()
            await self._post(order, "error", str(error))
        except Exception as error:  # the environment is anyone's
            await self._post(order, "error", str(error) or type(error).__name__)
        else:
            correct = reward >= self._settings["correct_from"]
            await self._post(order, "reward", json.dumps({"reward": reward, "correct": correct}))

    async def _play_session(self, order: dict[str, Any]) -> float:
        """Play one episode; return the sum of its rewards. Raises `EnvironmentFault` and `EnvironmentFull`."""
        async with self._session() as session:
            result = await session.reset(order["problem"]["metadata"]["reset"])
            tools = await list_tools(session) if self._form == TOOLS else []
            system = self._settings["system_prompt"]
            messages: list[dict[str, Any]] = [] if system is None else [{"role": "system", "content": system}]
            messages.append({"role": "user", "content": self._show(result["observation"])})
            total = 0.0
            for _ in range(self._settings["max_turns"]):
                reply = await self._ask_policy(order, messages, tools)
                if reply is None:
                    break
                messages.append(reply)
                if self._form == TOOLS and not reply.get("tool_calls"):
                    break
                reward, is_over = await self._answer(session, reply, messages)
                total += reward
                if is_over:
                    break
            return total

    @contextlib.asynccontextmanager
    async def _session(self) -> AsyncIterator[EnvironmentSession]:
        timeout_s = self._settings["step_timeout_s"]
        address = f"ws{self._server.url.removeprefix('http')}/ws"
        try:
            socket = await self._sockets.connect(
                address, open_timeout=timeout_s, max_size=1 << 26, ping_interval=None, close_timeout=1
            )
        except Exception as error:
            raise ConnectionError(f"cannot open {address}: {error}") from error
        try:
            yield EnvironmentSession(socket, timeout_s)
            with contextlib.suppress(Exception):  # it may be closed
                await socket.send(json.dumps({"type": "close"}))
        finally:
            await socket.close()

    async def _answer(
        self, session: EnvironmentSession, reply: dict[str, Any], messages: list[dict[str, Any]]
    ) -> tuple[float, bool]:
        """Carry out a reply, and add the environment's messages; return the reward, and whether that was the end."""
        if self._form != TOOLS:
            text = reply.get("content") or ""
            action = {self._form: text} if self._form != JSON else read_object(text)
            if action is None:
                messages.append({"role": "user", "content": "error: the answer is not a JSON object"})
                return 0.0, False
            result = await session.step(action)
            messages.append({"role": "user", "content": self._show(result["observation"])})
            return _read_reward(result), bool(result.get("done"))
        total, is_over = 0.0, False
        for call in reply["tool_calls"]:
            arguments = read_object(call["function"]["arguments"])
            message = {"role": "tool", "tool_call_id": call["id"], "content": "error: the arguments are no JSON object"}
            if arguments is not None and not is_over:
                name = call["function"]["name"]
                result = await session.step({"type": "call_tool", "tool_name": name, "arguments": arguments})
                message["content"] = show_tool_result(result["observation"])
                total += _read_reward(result)
                is_over = bool(result.get("done"))
            messages.append(message)
        return total, is_over

    async def _ask_policy(
        self, order: dict[str, Any], messages: list[dict[str, Any]], tools: list[dict[str, Any]]
    ) -> dict[str, Any] | None:
        """Return the policy's reply; None if the conversation leaves no room for one."""
        body = {"model": order["model"], "messages": messages, **({"tools": tools} if tools else {})}
        answer = await self._http.post(f"{order['base_url']}/chat/completions", json=body)
        if answer.status_code == 400 and "context_length_exceeded" in answer.text:
            return None
        if answer.status_code != 200:
            raise EnvironmentFault(f"the policy's endpoint answered {answer.status_code}: {answer.text}")
        return dict(answer.json()["choices"][0]["message"])

    def _show(self, observation: dict[str, Any]) -> str:
        """Return an observation as the policy is shown it."""
        field = self._settings["observation"]
        if field is not None:
            if field not in observation:
                fields = ", ".join(observation)
                raise EnvironmentFault(f"an observation has no field {field!r} (openenv.observation): it has {fields}")
            value = observation[field]
        else:
            value = {name: value for name, value in observation.items() if name not in _HIDDEN}
            if len(value) == 1:
                (value,) = value.values()
        return value if isinstance(value, str) else json.dumps(value)

    async def _post(self, order: dict[str, Any], place: str, content: str) -> None:
        answer = await self._http.post(f"{order['session_url']}/{place}", content=content)
        if place == "reward" and answer.status_code == 422:
            await self._post(order, "error", answer.text)


def _read_reward(result: dict[str, Any]) -> float:
    reward = result.get("reward")
    if reward is not None and not isinstance(reward, bool | int | float):
        raise EnvironmentFault(f"the reward is {reward!r}, not a number")
    return float(reward or 0.0)


def read_object(text: str) -> dict[str, Any] | None:
    """Return the JSON object that a text is; None if it is something else."""
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


async def list_tools(session: EnvironmentSession) -> list[dict[str, Any]]:
    """Return the tools of an environment as OpenAI's API has them. Raises `EnvironmentFault`."""
    result = await session.step({"type": "list_tools"})
    return [
        {
            "type": "function",
            "function": {
                "name": tool["name"],
                "description": tool.get("description") or "",
                "parameters": tool.get("input_schema") or tool.get("inputSchema") or {"type": "object"},
            },
        }
        for tool in result["observation"].get("tools", [])
    ]


def show_tool_result(observation: dict[str, Any]) -> str:
    """Return the result of a call as the policy is shown it: its text, where it is one."""
    if observation.get("error"):
        return f"error: {json.dumps(observation['error'])}"
    value = observation.get("result", observation)
    if isinstance(value, dict) and isinstance(value.get("content"), list):
        texts = [part["text"] for part in value["content"] if part.get("type") == "text"]
        value = value["data"] if value.get("data") is not None else "\n".join(texts)
    return value if isinstance(value, str) else json.dumps(value)


def choose_form(settings: dict[str, Any], schema: dict[str, Any]) -> str:
    """Return what answers become: `TOOLS`, `JSON`, or a field of the action. Raises `OpenEnvRefused`."""
    form, fields = settings["action"], [name for name in schema["properties"] if name != "metadata"]
    if form is None:
        if "tool_name" in fields or fields == ["type"]:
            return TOOLS
        required = [name for name in schema["required"] if name != "metadata"]
        is_text = len(required) == 1 and schema["properties"][required[0]].get("type") == "string"
        return required[0] if is_text else JSON
    if form not in (JSON, TOOLS, *fields):
        raise OpenEnvRefused(f"action: {form!r} is not json, tools or a field of an action ({', '.join(fields)})")
    return str(form)


async def list_problems(settings: dict[str, Any], num: int) -> list[dict[str, Any]]:
    """Try the server; return the problems. Raises `OpenEnvRefused`."""
    server = OpenEnvServer(settings)
    try:
        await server.start(is_tried=True)
        choose_form(settings, await server.ask_schema())
    finally:
        await server.close()
    resets = settings["resets"] or [{"seed": seed} for seed in range(num)]
    name = settings["package"] or settings["image"] or settings["url"]
    return [
        {
            "name": f"{name}-{index}",
            "question": f"{name}: reset {json.dumps({**settings['reset'], **reset})}",
            "answer": "",
            "metadata": {"reset": {**settings["reset"], **reset}},
        }
        for index, reset in enumerate(resets)
    ]


async def play(settings: dict[str, Any]) -> None:
    """Play all that there is to play."""
    server = OpenEnvServer(settings)
    try:
        try:
            await server.start()
        except ServerKilled:
            server.give_up()
        form = choose_form(settings, await server.ask_schema())
        await OpenEnvPlayer(settings, server, form).play_all()
    finally:
        await server.close()


def main() -> None:
    """List problems, or play episodes, as the arguments say."""
    import_clients()
    command, settings = sys.argv[1], json.loads(sys.argv[2])
    if command == "play":
        asyncio.run(play(settings))
        return
    answer = Path(sys.argv[3])
    try:
        tasks: dict[str, Any] = {"train": asyncio.run(list_problems(settings, int(sys.argv[4])))}
    except OpenEnvRefused as error:
        tasks = {"error": str(error)}
    answer.write_text(json.dumps(tasks), encoding="utf-8")


if __name__ == "__main__":
    main()
