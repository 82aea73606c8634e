"""The fork server of environments: it imports their class, and forks the workers that call it.

    rollout -- guardian -- fork server -- guardian -- worker        (one guardian and one worker for `num_workers`)

A worker may do whatever the environment's code does: compute in C for ever, crash, start processes. It is killed by
closing its guardian's lifeline, with all that it has started; another is forked in milliseconds. The fork server is a
new interpreter, because the rollout process has threads; it has none, and no torch unless the environment imports it.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import gc
import inspect
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
from setproctitle import setproctitle

from tandem.common.config import Config, config_from_json
from tandem.common.errors import TandemError
from tandem.common.process_lifetime import fork_guarded
from tandem.common.returned import line
from tandem.rollout.environments.channel import Answer, Begin, Imported, Reader, Ready, packed, receive
from tandem.rollout.environments.environment import converses, is_async, step_of
from tandem.rollout.environments.making import make_environment, runs_in
from tandem.rollout.environments.outcomes import Call, Outcome, failure_of, outcome_of, timed_out

_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
"""Libraries compute with one thread in each worker: they are many, and threads would not survive the fork."""
_begin = msgspec.msgpack.Decoder(Begin)
_calls = msgspec.msgpack.Decoder(Call)


def main(orders_fd: int, lifeline_fd: int, owner: int) -> None:
    """Be the guardian, its child that forks, or a worker that this has forked, to its end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the rollout process decides when they end
    os.environ.update({**_ONE_THREAD, **os.environ})
    setproctitle("rollout: forks reward workers")
    fork_guarded(lifeline_fd, owner)
    orders = socket.socket(fileno=orders_fd)
    os.set_inheritable(orders_fd, False)
    if (settings := receive(orders)) is None:
        return
    config = config_from_json(settings)
    try:
        orders.sendall(packed(Imported(runs_in=runs_in(config))))
    except Exception as error:  # what is built in may lack a package
        what = str(error) if isinstance(error, TandemError) else f"{type(error).__name__}: {error}"
        orders.sendall(packed(Imported(error=line(what))))
    calls = _fork_workers(orders)
    if calls is not None:
        with contextlib.suppress(ConnectionError):  # the rollout process has ended
            _work(calls, config)


def _fork_workers(orders: socket.socket) -> socket.socket | None:
    """Fork as often as is ordered; return in each worker, with its calls, and at the end, with none."""
    server = os.getpid()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody needs to collect guardians
    gc.freeze()  # or looking for garbage would make each worker copy what was imported
    for stream in (sys.stdout, sys.stderr):  # or each worker would write it again
        stream.flush()
    while True:
        word, descriptors, *_ = socket.recv_fds(orders, 1, 2)
        if not word:
            return None
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            orders.close()
            calls, lifeline = descriptors
            fork_guarded(lifeline, server)
            os.setsid()  # who kills its own process group shall not kill the run
            os.set_inheritable(calls, False)
            return socket.socket(fileno=calls)
        for descriptor in descriptors:
            os.close(descriptor)


def _work(calls: socket.socket, config: Config) -> None:
    """Make the environment and answer calls, until the other end is closed."""
    setproctitle(f"rollout: scores with {config.data.environment}")
    faulthandler.register(signal.SIGUSR1)  # its guardian asks where it is stuck; written in C, whoever has the GIL
    with contextlib.suppress(OSError):  # if memory runs out, this is what may be done without
        Path("/proc/self/oom_score_adj").write_text("1000")
    if (told := receive(calls)) is None:
        return
    try:
        environment = make_environment(config, _begin.decode(told).engine)
    except TandemError as error:
        calls.sendall(packed(Ready(error=line(str(error)))))
        return
    calls.sendall(packed(Ready(converses=converses(environment), is_async=is_async(environment))))
    settings = config.env[str(config.data.environment)]
    module = (settings.class_path or "").rpartition(".")[0]
    if is_async(environment):
        asyncio.run(_answer_at_once(calls, _Async(environment, module, settings.longest_call_s)))
    else:
        step, may_answer = step_of(environment), converses(environment)
        _answer_in_turn(calls, lambda call: outcome_of(call, step, converses=may_answer, module=module))


def _answer_in_turn(calls: socket.socket, answer: Callable[[Call], Outcome]) -> None:
    worker, reader = os.getpid(), Reader()
    while data := calls.recv(1 << 18):
        for message in reader.messages(data):
            call = _calls.decode(message)
            outcome = answer(call)
            if os.getpid() != worker:  # the environment has forked, and has not ended its child
                os._exit(0)
            calls.sendall(packed(Answer(call.number, outcome)))


class _Async:
    """Calls coroutines, each of which has a deadline."""

    def __init__(self, environment: object, module: str, timeout_s: float) -> None:
        self._step = step_of(environment)  # type: ignore[arg-type]
        self._converses = converses(environment)  # type: ignore[arg-type]
        self._module = module
        self._timeout_s = timeout_s

    async def answer(self, call: Call) -> Outcome:
        """Return what comes of a call, or that it took too long; then it is cancelled, and not waited for."""
        task = asyncio.create_task(self._call(call))
        done, _ = await asyncio.wait({task}, timeout=self._timeout_s)
        if done:
            return task.result()
        task.cancel()
        return timed_out(self._timeout_s)

    async def _call(self, call: Call) -> Outcome:
        result: object = None
        try:
            result = self._step(call.problem, call.conversation)
            if inspect.isawaitable(result):
                result = await result
        except BaseException as error:
            return failure_of(error, self._module)
        return outcome_of(call, lambda *_: result, converses=self._converses, module=self._module)


async def _answer_at_once(calls: socket.socket, environment: _Async) -> None:
    loop, reader, speaks = asyncio.get_running_loop(), Reader(), asyncio.Lock()
    tasks: set[asyncio.Task[None]] = set()
    calls.setblocking(False)

    async def answer(call: Call) -> None:
        outcome = await environment.answer(call)
        async with speaks:
            await loop.sock_sendall(calls, packed(Answer(call.number, outcome)))

    while data := await loop.sock_recv(calls, 1 << 18):
        for message in reader.messages(data):
            task = asyncio.create_task(answer(_calls.decode(message)))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
