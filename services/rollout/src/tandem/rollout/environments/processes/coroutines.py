"""An asynchronous environment in a worker process: many calls at once, each with a deadline."""

from __future__ import annotations

import asyncio
import inspect
import socket

from tandem.rollout.environments.environment import is_multi_turn
from tandem.rollout.environments.outcomes import Outcome, ScoringCall, failure_of, outcome_of, step_of, timed_out
from tandem.rollout.environments.printing import bounded
from tandem.rollout.environments.processes.channel import CallOutcome, MessageReader, call_decoder, packed


def answer_at_once(calls: socket.socket, environment: object, module: str, timeout_s: float) -> None:
    """Answer calls as they come, until the other end is closed; `module` is the user's, for tracebacks."""
    asyncio.run(_answer(calls, _Async(environment, module, timeout_s)))


class _Async:
    """A caller of coroutines, each with a deadline."""

    def __init__(self, environment: object, module: str, timeout_s: float) -> None:
        self._step = step_of(environment)  # type: ignore[arg-type]
        self._is_multi_turn = is_multi_turn(environment)  # type: ignore[arg-type]
        self._module = module
        self._timeout_s = timeout_s

    async def answer(self, call: ScoringCall) -> Outcome:
        """Return the outcome of a call, or a time-out; a call that takes too long is cancelled, and not waited for."""
        task = asyncio.create_task(self._call(call))
        finished, _ = await asyncio.wait({task}, timeout=self._timeout_s)
        if finished:
            return task.result()
        task.cancel()
        return timed_out(self._timeout_s)

    async def _call(self, call: ScoringCall) -> Outcome:
        result: object = None
        try:
            with bounded(call.step):
                result = self._step(call.problem, call.conversation)
                if inspect.isawaitable(result):
                    result = await result
        except BaseException as error:
            return failure_of(error, self._module)
        return outcome_of(call, lambda *_: result, is_multi_turn=self._is_multi_turn, module=self._module)


async def _answer(calls: socket.socket, environment: _Async) -> None:
    loop, reader, speaks = asyncio.get_running_loop(), MessageReader(), asyncio.Lock()
    tasks: set[asyncio.Task[None]] = set()
    calls.setblocking(False)

    async def answer(call: ScoringCall) -> None:
        outcome = await environment.answer(call)
        async with speaks:
            await loop.sock_sendall(calls, packed(CallOutcome(call.number, outcome)))

    while data := await loop.sock_recv(calls, 1 << 18):
        for message in reader.messages(data):
            task = asyncio.create_task(answer(call_decoder.decode(message)))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
