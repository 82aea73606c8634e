"""Three ways to play an agent: a program for each episode, a program that stays, or a server.

A player returns what the agent reports as it ends. Most agents post the reward earlier: then the player is cancelled,
and its end is not waited for.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext, suppress
from typing import Any, Protocol
from urllib.parse import urlsplit

import h11
import msgspec

from tandem.common.distribution import search_path
from tandem.common.errors import RewardError
from tandem.common.user_code import line
from tandem.common.values import encode_json
from tandem.config.schema import EnvironmentConfig
from tandem.rollout.agents.episodes import MODEL, Episode, read_reward
from tandem.rollout.agents.programs import ProgramExit, ProgramLauncher, memory_file, run
from tandem.rollout.environments import Score
from tandem.rollout.environments.outcomes import KILLED_FROM_OUTSIDE, Failure

_LONGEST_ANSWER = 1 << 20
ENDED_WITH_ANOTHER = Failure("its program was ended because another episode took too long", was_killed=True)
"""The outcome of an episode whose program was ended here, and not because of it."""


class EpisodePlayer(Protocol):
    """A way to have episodes played."""

    async def play(self, episode: Episode, described: Mapping[str, Any]) -> Score | Failure:
        """Have an episode played; return what the agent reports at its end, for an agent that posted no reward."""
        ...

    def apart(self) -> AbstractAsyncContextManager[EpisodePlayer]:
        """Wait for a player that plays nothing else meanwhile: of an episode that may be why others were lost."""
        ...

    async def close(self) -> None:
        """End whatever stays between episodes."""
        ...


def make_player(settings: EnvironmentConfig, launcher: ProgramLauncher | None) -> EpisodePlayer:
    """Return the player that the configuration asks for."""
    if settings.url is not None:
        return ByServer(settings.url)
    assert launcher is not None, "made where there is no server"
    if settings.packaged is not None:
        from tandem.samples.packaged_environments.tasks import play_command

        return ByStayingPrograms(play_command(settings.packaged), settings.num_workers, launcher)
    assert settings.command is not None, "a program, or a server"
    if settings.persistent:
        return ByStayingPrograms(settings.command, settings.num_workers, launcher)
    return ByPrograms(settings.command, launcher)


class ByPrograms:
    """A program for each episode, which reads what to play from its standard input."""

    def __init__(self, command: tuple[str, ...], launcher: ProgramLauncher) -> None:
        self._command = command
        self._launcher = launcher

    async def play(self, episode: Episode, described: Mapping[str, Any]) -> Score | Failure:
        """Start the program and wait for its end."""
        with memory_file(encode_json(described) + b"\n") as stdin:
            ended = await run(self._launcher, self._command, _variables(described), stdin)
        if ended.code != 0:
            return _failure(episode, ended)
        last = ended.output.rstrip().rpartition("\n")[2]
        if not last.startswith("{"):
            return episode.unrewarded("its program ended", ended.errors)
        try:
            return read_reward(last.encode(), episode.session.roles)
        except RewardError as error:
            return Failure(line(f"the last line of its program's output: {error}"), ended.errors)

    def apart(self) -> AbstractAsyncContextManager[EpisodePlayer]:
        """Return this one: each episode has its own program."""
        return nullcontext(self)

    async def close(self) -> None:
        """Do nothing: nothing stays between episodes."""


class ByStayingPrograms:
    """Programs that stay, read one line an episode, and may play several episodes at once."""

    def __init__(self, command: tuple[str, ...], num_programs: int, launcher: ProgramLauncher) -> None:
        self._command = command
        self._launcher = launcher
        self._programs: list[_Staying | None] = [None] * num_programs
        self._turn, self._num_apart = asyncio.Lock(), 0
        """The turn to play apart, and how many episodes do or wait for it."""
        self._player_apart: ByStayingPrograms | None = None

    async def play(self, episode: Episode, described: Mapping[str, Any]) -> Score | Failure:
        """Send the episode to the program with the fewest, and wait for that program's end."""
        place = min(range(len(self._programs)), key=lambda place: self._load(place))
        program = self._programs[place]
        if program is None or program.running.done():
            program = self._programs[place] = _Staying(self._launcher, self._command)
        began = time.monotonic()
        program.num_episodes += 1
        try:
            program.send(encode_json(described) + b"\n")
            # Once it has told the reward, nothing of it is to be waited for: the program stays.
            endings: set[asyncio.Future[Any]] = {program.running, episode.told}
            await asyncio.wait(endings, return_when=asyncio.FIRST_COMPLETED)
            if episode.told.done():
                return episode.told.result()
            if program.running.cancelled():
                return ENDED_WITH_ANOTHER
            return _failure(episode, program.running.result())
        finally:
            program.num_episodes -= 1
            if episode.told.done():
                program.last_told = time.monotonic()
            elif program.last_told < began:  # it took too long, and has finished no other episode meanwhile
                program.end()

    @asynccontextmanager
    async def apart(self) -> AsyncIterator[EpisodePlayer]:
        """Wait for a program that plays nothing else; it ends once no episode waits for it."""
        self._num_apart += 1
        try:
            async with self._turn:
                if self._player_apart is None:
                    self._player_apart = ByStayingPrograms(self._command, 1, self._launcher)
                yield self._player_apart
        finally:
            self._num_apart -= 1
            if not self._num_apart and self._player_apart is not None:
                await self._player_apart.close()

    async def close(self) -> None:
        """End the programs."""
        programs = [program for program in self._programs if program is not None]
        for program in programs:
            program.end()
        await asyncio.gather(*(program.running for program in programs), return_exceptions=True)

    def _load(self, place: int) -> int:
        program = self._programs[place]
        return 0 if program is None or program.running.done() else program.num_episodes


class _Staying:
    """A program that stays between episodes."""

    def __init__(self, launcher: ProgramLauncher, command: tuple[str, ...]) -> None:
        theirs, self._stdin = os.pipe()
        os.set_blocking(self._stdin, False)
        self._waiting = bytearray()
        self.running = asyncio.create_task(self._run(launcher, command, theirs))
        self.num_episodes = 0
        self.last_told = time.monotonic()
        """When one of its episodes last had its reward."""

    def send(self, text: bytes) -> None:
        """Write this to the program's standard input."""
        self._waiting += text
        self._write()

    def end(self) -> None:
        """End the program."""
        self.running.cancel()

    def _write(self) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_writer(self._stdin)
        try:
            while self._waiting:
                del self._waiting[: os.write(self._stdin, self._waiting)]
        except BlockingIOError:
            loop.add_writer(self._stdin, self._write)
        except BrokenPipeError:  # its end is noticed elsewhere
            self._waiting.clear()

    async def _run(self, launcher: ProgramLauncher, command: tuple[str, ...], theirs: int) -> ProgramExit:
        try:
            ended = await run(launcher, command, _make_variables(), theirs, logs=True)
            if self.num_episodes:
                program = "the program that plays episodes has ended"
                print(f"{program} ({ended.ending}), with {self.num_episodes} in play", flush=True)
            return ended
        finally:
            asyncio.get_running_loop().remove_writer(self._stdin)
            os.close(self._stdin)
            os.close(theirs)


class ByServer:
    """A server that is asked by an HTTP POST, and may answer with the reward."""

    def __init__(self, url: str) -> None:
        self._url = url

    async def play(self, episode: Episode, described: Mapping[str, Any]) -> Score | Failure:
        """Ask the server; if its answer has no reward, it goes on playing."""
        try:
            status, body = await _post(self._url, encode_json(described))
        except (OSError, h11.ProtocolError, EOFError) as error:
            return Failure(line(f"cannot ask {self._url}: {error or type(error).__name__}"))
        if not 200 <= status < 300:
            return Failure(line(f"{self._url} answered {status}: {body.decode(errors='replace')}"))
        if b'"reward' in body:
            try:
                return read_reward(body, episode.session.roles)
            except RewardError as error:
                return Failure(line(f"the answer of {self._url}: {error}"))
        await episode.told
        return episode.unrewarded("it ended")

    def apart(self) -> AbstractAsyncContextManager[EpisodePlayer]:
        """Return this one: what its server plays at once is for the server to decide."""
        return nullcontext(self)

    async def close(self) -> None:
        """Do nothing: nothing stays between episodes."""


def _make_variables() -> dict[str, str]:
    """Return this process's environment variables, with `python` being this process's interpreter."""
    return {**os.environ, "PATH": search_path()}


def _variables(described: Mapping[str, Any]) -> dict[str, str]:
    """Return the environment variables of a program that plays one episode: those that OpenAI's clients read."""
    return {
        **_make_variables(),
        "OPENAI_BASE_URL": described["base_url"],
        "OPENAI_API_KEY": described["api_key"],
        "OPENAI_MODEL": MODEL,
        "TANDEM_SESSION_URL": described["session_url"],
    }


def _failure(episode: Episode, ended: ProgramExit) -> Failure:
    last = ended.errors.rstrip().rpartition("\n")[2]
    failure = episode.unrewarded(f"its program ended ({ended.ending}{': ' if last else ''}{last})", ended.errors)
    # The exit code is unknown if the launcher was killed, and its programs with it.
    was_killed = ended.code is None or ended.ending in KILLED_FROM_OUTSIDE
    return msgspec.structs.replace(failure, was_killed=was_killed)


async def _post(url: str, body: bytes) -> tuple[int, bytes]:
    """Post JSON to a server; return the status and the body of its answer."""
    parts = urlsplit(url)
    is_encrypted = parts.scheme == "https"
    port = parts.port or (443 if is_encrypted else 80)
    reader, writer = await asyncio.open_connection(parts.hostname, port, ssl=is_encrypted or None)
    connection = h11.Connection(h11.CLIENT)
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    headers = [
        ("Host", parts.netloc.rpartition("@")[2]),
        ("Content-Type", "application/json"),
        ("Content-Length", str(len(body))),
        ("Connection", "close"),
    ]
    request = h11.Request(method="POST", target=target, headers=headers)
    status, answer = 0, b""
    try:
        for part in (request, h11.Data(data=body), h11.EndOfMessage()):
            writer.write(connection.send(part) or b"")
        await writer.drain()
        while True:
            event = connection.next_event()
            if event is h11.NEED_DATA:
                connection.receive_data(await reader.read(1 << 16))
            elif isinstance(event, h11.Response):
                status = event.status_code
            elif isinstance(event, h11.Data):
                answer = (answer + event.data)[:_LONGEST_ANSWER]
            elif isinstance(event, (h11.EndOfMessage, h11.ConnectionClosed)):
                return status, answer
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()
