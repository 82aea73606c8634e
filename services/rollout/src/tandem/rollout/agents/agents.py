"""Episodes of agents, played beside generation.

Two threads meet here. The engine's thread begins episodes, has tokens made (`work`) and collects the episodes that have
ended (`poll`). The other thread runs an event loop with everything else: HTTP, the agents' programs, their deadlines.
An episode waits for room (``max_concurrency``). Then it waits, until its deadline, for its agent to post a reward or to
end. Requests wait for the engine; they are refused where the engine drops them. Neither thread waits for the other,
except at the beginning and the end of everything.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import queue
import time
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tandem.common.errors import HelperLost
from tandem.common.messages import Generate, PromptGroup
from tandem.common.values import encode_json
from tandem.config import Config
from tandem.launch.service import ServiceContext
from tandem.rollout.agents.episodes import Episode, over
from tandem.rollout.agents.players import ENDED_WITH_ANOTHER, EpisodePlayer, make_player
from tandem.rollout.agents.programs import ProgramChanged, ProgramLauncher
from tandem.rollout.agents.session import EpisodeSession
from tandem.rollout.conversation import SampleConversation
from tandem.rollout.engine import Engine, EngineCompletion
from tandem.rollout.environments import Score, outcomes
from tandem.rollout.generating import UNSCORED, Finished, RunningGeneration, RunningGenerations
from tandem.rollout.media import keep_stored
from tandem.rollout.openai_api import app, driver, refusals
from tandem.rollout.openai_api.server import HttpServer, listen
from tandem.rollout.parts import RolloutParts
from tandem.samples.routed_experts import RoutedExperts
from tandem.samples.tokenizer import Tokenizer

_WAIT_S = 0.005
"""Seconds to wait for a request while there is nothing to generate."""
_GRACE_S = 5.0
"""Seconds that a program has to end by itself once it has posted its reward."""
_PREFIX = "/sessions/{secret}"
_CLOSE_S = 10.0
_LOOKS, _LOOK_S = 4, 10.0
"""Looks for programs that are stopped within an episode's time, and the longest time between two looks."""


class PlayedEpisode(NamedTuple):
    """An episode that has ended."""

    number: int
    session: EpisodeSession
    score: Score | outcomes.UnscoredResponse


class RolloutAgents:
    """The episodes of one rollout process."""

    def __init__(
        self,
        config: Config,
        engine: Engine,
        tokenizer: Tokenizer,
        host: str,
        step: Callable[[], list[EngineCompletion]] | None = None,
    ) -> None:
        """Begin to listen, on `host` if a server elsewhere plays. `step` is as in `EngineDriver`."""
        assert config.agent is not None, "or nobody plays"
        self._config = config
        self._settings = config.agent
        self._tokenizer = tokenizer
        self._media = keep_stored(config, tokenizer)
        self._faults = outcomes.FaultPolicy(config)
        self._driver = driver.EngineDriver(engine, step=step)
        self._ended: queue.SimpleQueue[tuple[Episode, Score | outcomes.Failure] | Exception] = queue.SimpleQueue()
        self._wanted: set[int] = set()
        """Numbers of the episodes that the service still waits for."""
        # Before any thread starts.
        self._launcher = ProgramLauncher() if self._settings.url is None else None
        self._player = make_player(self._settings, self._launcher)
        self._open: dict[str, Episode] = {}
        """Episodes in play, by their secrets. This and the fields below belong to the event loop."""
        self._playing: dict[int, asyncio.Task[None]] = {}
        self._room = asyncio.Semaphore(self._settings.max_concurrency)
        self._looking: asyncio.Task[None] | None = None
        self._stopped_at = -math.inf
        """When a program, or the process that starts them, was last seen to be stopped by a signal."""
        timeout_s = self._settings.timeout_s
        paths = [
            *app.api_routes(self._find, deadline_s=timeout_s, prefix=_PREFIX),
            *app.api_routes(lambda request: self._find(request).judge, deadline_s=timeout_s, prefix=f"{_PREFIX}/judge"),
            Route(_PREFIX, self._describe, methods=["GET"]),
            Route(f"{_PREFIX}/reward", self._take_reward, methods=["POST"]),
            Route(f"{_PREFIX}/error", self._take_error, methods=["POST"]),
        ]
        self._server = HttpServer(Starlette(routes=paths), listen(host if self._settings.url else "127.0.0.1", 0))
        self._loop = self._server.loop

    # --- called by the thread that drives the engine -----------------------------------------------------------------

    def begin(self, number: int, group: PromptGroup, sample: int, command: Generate) -> None:
        """Have an episode played as soon as there is room."""
        self._wanted.add(number)
        self._loop.call_soon_threadsafe(self._start, number, group, sample, command)

    def work(self) -> bool:
        """Have one token made for each request, or wait a moment for a request; return whether there was any."""
        if not self._driver.num_unfinished:
            self._driver.wait(_WAIT_S)
        has_requests = self._driver.num_unfinished > 0
        self._driver.work()
        return has_requests

    def poll(self) -> list[PlayedEpisode]:
        """Return the episodes that have ended, in the order in which they ended.

        Raises `RewardError` if a failure of an agent ends the run, and whatever kept this process from playing an
        episode.
        """
        played = []
        while not self._ended.empty():
            ended = self._ended.get()
            if isinstance(ended, Exception):
                raise ended
            episode, outcome = ended
            if episode.number in self._wanted:
                self._wanted.discard(episode.number)
                session = episode.session
                if isinstance(outcome, outcomes.Failure):
                    messages = [message for exchange in session.exchanges[-1:] for message in exchange.messages]
                    judged: Score | outcomes.UnscoredResponse = self._faults.judged(
                        session.group.problem, messages, outcome
                    )
                else:
                    judged = outcome
                    self._faults.succeeded()
                played.append(PlayedEpisode(episode.number, session, judged))
        return played

    def forget(self, numbers: Iterable[int]) -> None:
        """Abandon episodes and end their programs."""
        numbers = {*numbers} & self._wanted
        self._wanted -= numbers
        self._loop.call_soon_threadsafe(self._cancel, numbers)
        if not self._wanted:
            self.abandon_requests("the episode was given up because the policy's weights change")

    def abandon_requests(self, reason: str = "this episode is over") -> None:
        """Take all requests out of the engine, which is needed for something else now."""
        self._driver.drop(reason)

    def close(self) -> None:
        """End all episodes and their programs."""
        self._wanted.clear()
        self._driver.close("the rollout ends")
        with contextlib.suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(_CLOSE_S)
        self._server.close()
        if self._launcher is not None:
            self._launcher.close()

    # --- the event loop ----------------------------------------------------------------------------------------------

    def _start(self, number: int, group: PromptGroup, sample: int, command: Generate) -> None:
        def begin() -> Episode:
            return Episode(number, group, sample, command, self._config, self._driver, self._tokenizer, self._media)

        if self._looking is None and self._launcher is not None:
            self._looking = asyncio.create_task(self._look(self._launcher))
        self._playing[number] = task = asyncio.create_task(self._play(begin))
        task.add_done_callback(lambda _: self._playing.pop(number, None))

    def _cancel(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            if (task := self._playing.get(number)) is not None:
                task.cancel()

    async def _play(self, begin: Callable[[], Episode]) -> None:
        """Have an episode played; start it over if its program was killed from outside.

        The last time it plays apart: if its program is killed then as well, no other episode is lost with it.
        """
        try:
            async with self._room:
                num_kills = 0
                while num_kills < outcomes.MOST_RETRIES:
                    loss = await self._play_now(begin(), self._player)
                    if loss is None:
                        return
                    num_kills += loss is not ENDED_WITH_ANOTHER
                async with self._player.apart() as player:
                    await self._play_now(begin(), player, is_last=True)
        except Exception as error:  # our own failure, not an agent's
            self._ended.put(error)

    async def _play_now(
        self, episode: Episode, player: EpisodePlayer, *, is_last: bool = False
    ) -> outcomes.Failure | None:
        """Have an episode played; return its loss, if it is to be played again, as it never is where it `is_last`."""
        began = time.monotonic()
        self._open[episode.secret] = episode
        playing = asyncio.create_task(player.play(episode, episode.described(self._server.url)))
        try:
            timeout_s = self._settings.timeout_s
            await asyncio.wait({playing, episode.told}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            episode.is_over = True
            outcome = self._outcome(episode, playing)
            if isinstance(outcome, outcomes.Failure) and outcome.timed_out and self._was_stopped_since(began):
                outcome = outcomes.Failure(f"its program was stopped from outside, and {outcome.what}", was_killed=True)
            if isinstance(outcome, outcomes.Failure) and outcome.was_killed and not is_last:
                return outcome
            self._ended.put((episode, outcome))
            if episode.told.done():
                await asyncio.wait({playing}, timeout=_GRACE_S)
            return None
        finally:
            episode.is_over = True
            del self._open[episode.secret]
            playing.cancel()
            await asyncio.gather(playing, return_exceptions=True)

    def _outcome(self, episode: Episode, playing: asyncio.Task[Score | outcomes.Failure]) -> Score | outcomes.Failure:
        if episode.told.done():
            return episode.told.result()
        if not playing.done():
            return outcomes.timed_out(self._settings.timeout_s)
        error = playing.exception()
        if isinstance(error, OSError | HelperLost | ProgramChanged):  # no program could be started
            raise error
        return playing.result() if error is None else outcomes.failure_of(error, "")

    def _was_stopped_since(self, began: float) -> bool:
        """Tell whether programs could not play, so that they are not slow; have another launcher if need be."""
        if self._launcher is None:
            return False
        if self._launcher.is_any_stopped():
            self._stopped_at = time.monotonic()
        self._launcher.replace_stopped()
        return self._stopped_at >= began

    async def _look(self, launcher: ProgramLauncher) -> None:
        """Note when programs are stopped: episodes that take long because of that are played again."""
        while True:
            await asyncio.sleep(min(_LOOK_S, self._settings.timeout_s / _LOOKS))
            if self._playing and launcher.is_any_stopped():
                self._stopped_at = time.monotonic()

    async def _end(self) -> None:
        tasks = [*self._playing.values(), *([] if self._looking is None else [self._looking])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._player.close()

    def _find(self, request: Request) -> Episode:
        episode = self._open.get(request.path_params["secret"])
        if episode is None or episode.is_over:
            raise over()
        return episode

    async def _describe(self, request: Request) -> Response:
        try:
            return _json(self._find(request).described(self._server.url))
        except refusals.OpenAIRefused as error:
            return refusals.as_response(error)

    async def _take_reward(self, request: Request) -> Response:
        try:
            episode = self._find(request)
            score = episode.reward(await refusals.read_body(request))
        except refusals.OpenAIRefused as error:
            return refusals.as_response(error)
        return _json(score)

    async def _take_error(self, request: Request) -> Response:
        try:
            episode = self._find(request)
            episode.fail(await refusals.read_body(request))
        except refusals.OpenAIRefused as error:
            return refusals.as_response(error)
        return _json({})


def _json(answer: object) -> Response:
    return Response(encode_json(answer), media_type="application/json")


class AgentGenerations(RunningGenerations):
    """The `Generate` commands whose samples the agents of a rollout play."""

    def __init__(
        self, context: ServiceContext, parts: RolloutParts, experts: RoutedExperts | None, agents: RolloutAgents
    ) -> None:
        """Begin without commands, as any `RunningGenerations`; `agents` play."""
        super().__init__(context, parts, experts)
        self._agents = agents

    def _request(self, number: int, conversation: SampleConversation, command: Generate) -> None:
        self._agents.begin(number, conversation.group, conversation.sample, command)

    def _forget(self, numbers: Collection[int]) -> None:
        self._agents.forget(numbers)

    def _converse(self) -> None:
        """Make one token for each request of an agent; take the episodes that have ended."""
        started = time.perf_counter()
        phase = "generation" if self._agents.work() else "rewards"
        if self._parts.external_requests is not None and not self._parts.sample_engine.num_unfinished:
            self._parts.external_requests.work()
        for generation in self.generations.values():
            generation.seconds[phase] += time.perf_counter() - started
        finished: Finished = {}
        for number, session, result in self._agents.poll():
            score, unscored = (result, None) if isinstance(result, Score) else (UNSCORED, result)
            sample, arrays = session.finish(score, self._parts.engine.version or 0, unscored)
            self._generation_of[number].num_tokens += sample.response_length
            self._end(finished, number, sample, arrays)
        self._send(finished)

    def _finish(self, generation: RunningGeneration) -> None:
        if len(self.generations) == 1:
            self._agents.abandon_requests()
        super()._finish(generation)
