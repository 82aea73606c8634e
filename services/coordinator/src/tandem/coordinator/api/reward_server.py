"""The reward functions of this program, served to rollout engines through a socket.

The engines' end is `tandem.rollout.environments.program`.

One thread (`ProgramRewardServer._serve`) alone uses the socket. It consumes `ScoreResponses` and the results of calls.
It produces `ResponsesScored` as scores arrive, and `StillScoring` every second while an engine waits. It waits for
nothing else, and ends when the server is closed. Functions run in the threads of a pool, ``async def`` functions on one
event loop that all calls share. No thread can be killed: if its call takes too long, it is left alone, and another
takes its place.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import queue
import sys
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Sequence
from types import CodeType
from typing import Any

import msgspec

from tandem.common import messages
from tandem.common.curve import AdmittedKeys, new_key_pair
from tandem.common.errors import RewardError, WireError
from tandem.common.messages import ResponsesScored, ResponseToScore, ScoredResponse, ScoreResponses, StillScoring
from tandem.common.user_code import line, locate_raise, sayable
from tandem.common.wire import Hub, HubPeer, MessageCodec, encode
from tandem.config import Config
from tandem.config.checks.data import PYTHON_REWARDS
from tandem.coordinator.api.configuration import SOLVED_AT, row_keys
from tandem.coordinator.api.rewards import RewardFunction, total

_MAX_REQUEST_BYTES = 1 << 28
_IDLE_S, _BUSY_S = 0.2, 0.005
_SIGN_OF_LIFE_S = 1.0
_SAY_SO_S = 1.0
"""Extra seconds for cancelling a coroutine after its deadline, before its event loop is given up."""
_LONGEST_TRACE = 20_000


class _Item(msgspec.Struct, eq=False):
    """A response, and the values that functions have returned for it so far."""

    peer: HubPeer
    response: ResponseToScore
    values: list[float | None]
    missing: int
    """Number of functions that have not answered yet."""
    is_done: bool = False


class _Call(msgspec.Struct, eq=False):
    """A call of a function, for one response or for several."""

    place: int
    """Index of the function."""
    items: list[_Item]
    started: float | None = None
    is_given_up: bool = False

    @property
    def is_wanted(self) -> bool:
        """Whether its result is still needed."""
        return not self.is_given_up and not all(item.is_done for item in self.items)


class ProgramRewardServer:
    """A server that scores responses with functions of this process."""

    def __init__(self, functions: Sequence[RewardFunction], config: Config) -> None:
        """Listen on the coordinator's host. Raise `ConfigError` if that fails."""
        settings, address = config.env[PYTHON_REWARDS], config.cluster.address
        self._functions = functions
        self._timeout_s = settings.timeout_s
        self._solved_at: float = settings.kwargs[SOLVED_AT]
        self._keys = row_keys(config)
        self._codec: MessageCodec[ScoreResponses] = MessageCodec(messages.ToRewardServer)
        key_pair, callers = new_key_pair(), new_key_pair()
        self._hub = Hub(
            f"{address.rpartition(':')[0]}:*", key_pair, AdmittedKeys([callers.public]), max_bytes=_MAX_REQUEST_BYTES
        )
        port = int(self._hub.address.rpartition(":")[2])
        self.at = messages.RewardServer(port=port, public_key=key_pair.public, callers=callers)
        """Address and keys for the engines."""
        self._waiting: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._came: queue.SimpleQueue[tuple[_Call, list[float | None] | BaseException]] = queue.SimpleQueue()
        self._running: dict[_Call, threading.Thread | None] = {}
        """Calls that have begun; a coroutine has no thread of its own."""
        self._threads: set[threading.Thread] = set()
        self._loop = _EventLoop() if any(function.is_async for function in functions) else None
        self._items: set[_Item] = set()
        """Responses that are not answered yet."""
        self._shown: set[str] = set()
        self._is_closed = threading.Event()
        for _ in range(settings.num_workers):
            self._start_thread()
        self._thread = threading.Thread(target=self._serve, name="rewards", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop answering; a function that hangs is left to the end of the process."""
        self._is_closed.set()
        self._thread.join()
        for _ in self._threads:
            self._waiting.put(None)
        if self._loop is not None:
            self._loop.close()

    # --- the thread that has the socket ------------------------------------------------------------------------------

    def _serve(self) -> None:
        said_at = time.monotonic()
        while not self._is_closed.is_set():
            for peer, frames in self._hub.receive(_BUSY_S if self._items else _IDLE_S):
                try:
                    request = self._codec.decode(frames).message
                except WireError:
                    continue  # malformed: an engine's own request has a deadline
                self._begin(peer, request.responses)
            answers: dict[HubPeer, list[ScoredResponse]] = defaultdict(list)
            while not self._came.empty():
                self._take(*self._came.get(), answers)
            self._give_up_the_slow(answers)
            for peer, scored in answers.items():
                self._hub.send(peer, encode(ResponsesScored(scored=tuple(scored))))
            if (now := time.monotonic()) - said_at > _SIGN_OF_LIFE_S:
                said_at = now
                for peer in {item.peer for item in self._items}:
                    self._hub.send(peer, encode(StillScoring()))
        self._hub.close()

    def _begin(self, peer: HubPeer, responses: Sequence[ResponseToScore]) -> None:
        """Queue all calls for some responses."""
        count = len(self._functions)
        items = [_Item(peer, response, [None] * count, count) for response in responses]
        self._items.update(items)
        for place, function in enumerate(self._functions):
            for call in [_Call(place, items)] if function.takes_batches else [_Call(place, [item]) for item in items]:
                if function.is_async:
                    assert self._loop is not None
                    call.started = time.monotonic()
                    self._running[call] = None
                    self._loop.begin(self._await_call(call))
                else:
                    self._waiting.put(call)

    def _take(
        self, call: _Call, outcome: list[float | None] | BaseException, answers: dict[HubPeer, list[ScoredResponse]]
    ) -> None:
        """Take the result of a call, and answer the responses that have a result from every function."""
        self._running.pop(call, None)
        if call.is_given_up:
            return
        if isinstance(outcome, BaseException):
            self._fail(call, self._failure(call, outcome), answers)
            return
        for item, value in zip(call.items, outcome, strict=True):
            item.values[call.place] = value
            item.missing -= 1
            if item.missing == 0 and not item.is_done:
                self._answer(item, self._score_item(item), answers)

    def _give_up_the_slow(self, answers: dict[HubPeer, list[ScoredResponse]]) -> None:
        now = time.monotonic()
        for call, thread in [*self._running.items()]:
            patience_s = self._timeout_s if thread is not None else self._timeout_s + _SAY_SO_S
            if call.started is None or now - call.started < patience_s:
                continue
            call.is_given_up = True
            del self._running[call]
            if thread is not None:
                self._threads.discard(thread)
                self._start_thread()
            elif self._loop is not None and self._loop.is_stuck():
                self._loop = _EventLoop()  # a coroutine keeps all others from running
            self._fail(call, self._too_slow(call), answers)

    def _fail(self, call: _Call, failure: ScoredResponse, answers: dict[HubPeer, list[ScoredResponse]]) -> None:
        for item in call.items:
            if not item.is_done:
                self._answer(item, msgspec.structs.replace(failure, number=item.response.number), answers)

    def _answer(self, item: _Item, scored: ScoredResponse, answers: dict[HubPeer, list[ScoredResponse]]) -> None:
        item.is_done = True
        self._items.discard(item)
        answers[item.peer].append(scored)

    def _score_item(self, item: _Item) -> ScoredResponse:
        number, first = item.response.number, item.values[0]
        try:
            reward = total(self._functions, item.values)
        except RewardError as error:
            return ScoredResponse(number=number, failure=str(error))
        named = zip((function.name for function in self._functions), item.values, strict=True)
        return ScoredResponse(
            number=number,
            reward=reward,
            correct=first is not None and first >= self._solved_at,
            components={name: value for name, value in named if value is not None},
        )

    def _too_slow(self, call: _Call) -> ScoredResponse:
        name = self._functions[call.place].name
        return ScoredResponse(number=0, failure=f"took longer than {self._timeout_s:g} s in {name}", timed_out=True)

    def _failure(self, call: _Call, error: BaseException) -> ScoredResponse:
        """Describe the error that a function raised; print it the first time."""
        function = self._functions[call.place]
        if isinstance(error, TimeoutError) and function.is_async and self._is_late(call):
            return self._too_slow(call)
        if isinstance(error, RewardError):
            return ScoredResponse(number=0, failure=line(f"{function.name}: {error}"))
        reason = line(
            f"{function.name}: {_describe_error(error)}{locate_raise(error.__traceback__, _folder_of(function.call))}"
        )
        trace = sayable("".join(traceback.format_exception(error))[-_LONGEST_TRACE:])
        if function.name not in self._shown:
            self._shown.add(function.name)
            print(f"reward function {function.name} raised (shown once):\n{trace}", end="", file=sys.stderr, flush=True)
        return ScoredResponse(number=0, failure=reason, traceback=trace)

    def _is_late(self, call: _Call) -> bool:
        return call.started is not None and time.monotonic() - call.started >= self._timeout_s

    # --- the threads that call functions -----------------------------------------------------------------------------

    def _start_thread(self) -> None:
        thread = threading.Thread(target=self._work, name="reward-function", daemon=True)
        self._threads.add(thread)
        thread.start()

    def _work(self) -> None:
        me = threading.current_thread()
        while (call := self._waiting.get()) is not None:
            if not call.is_wanted:
                continue
            call.started = time.monotonic()
            self._running[call] = me
            try:
                outcome: list[float | None] | BaseException = self._values(call, self._call(call))
            except BaseException as error:  # sys.exit(), for example
                outcome = error
            self._came.put((call, outcome))
            if call.is_given_up:
                return

    def _call(self, call: _Call) -> Any:
        function = self._functions[call.place]
        return function.call(**function.arguments([item.response for item in call.items], self._keys))

    def _values(self, call: _Call, returned: Any) -> list[float | None]:
        return self._functions[call.place].values(returned, len(call.items))

    async def _await_call(self, call: _Call) -> None:
        try:
            returned = await asyncio.wait_for(self._call(call), self._timeout_s)
            outcome: list[float | None] | BaseException = self._values(call, returned)
        except BaseException as error:
            outcome = error
        self._came.put((call, outcome))


class _EventLoop:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="reward-coroutines", daemon=True)
        self._thread.start()

    def begin(self, coroutine: Any) -> None:
        """Schedule a coroutine on the loop."""
        asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def is_stuck(self) -> bool:
        """Return whether the loop runs nothing that it is given; takes a moment."""
        turn = threading.Event()
        self._loop.call_soon_threadsafe(turn.set)
        return not turn.wait(0.2)

    def close(self) -> None:
        """End the loop; one that is stuck is left to the end of the process."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_SAY_SO_S)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()


def _folder_of(function: Callable[..., Any]) -> str:
    """Return the folder of the file that defines a function or its class; empty if unknown."""
    inner = inspect.unwrap(function)
    code = getattr(inner, "__code__", None) or getattr(getattr(type(inner), "__call__", None), "__code__", None)  # noqa: B004
    return os.path.dirname(os.path.abspath(code.co_filename)) if isinstance(code, CodeType) else ""


def _describe_error(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # the class may be anyone's
        return type(error).__name__
