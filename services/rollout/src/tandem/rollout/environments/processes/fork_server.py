"""The fork server of environments: it imports their class, and forks the workers that call it.

rollout -- guardian -- fork server -- guardian -- worker (one guardian and one worker for `num_workers`)

A worker may do whatever the environment's code does: compute in C for ever, crash, start processes. Closing its
guardian's lifeline kills it and everything it has started; another is forked in milliseconds. The fork server is a new
interpreter, because the rollout process has threads. It has no threads itself, and no torch unless the environment
imports it.

A reward model's worker scores waiting calls together, one batch in one pass: the oldest with others of its shape. It
waits for calls; between two passes it only checks for more.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec
from setproctitle import setproctitle

from tandem.common import kept_inputs
from tandem.common.descriptors import wait_to_read
from tandem.common.errors import DataError, TandemError
from tandem.common.process_lifetime import fork_guarded
from tandem.common.user_code import line
from tandem.config import Config, config_from_json
from tandem.rollout.environments.environment import BatchEnvironment, is_async, is_multi_turn
from tandem.rollout.environments.making import make_environment, make_reward_model, runs_in
from tandem.rollout.environments.outcomes import Failure, Outcome, ScoringCall, failure_of, outcome_of, step_of
from tandem.rollout.environments.printing import bounded, say_left_out
from tandem.rollout.environments.processes import channel

_TOGETHER_S = 0.002
"""How long to wait for further calls while there is nothing else to do."""


_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
"""Settings that give libraries one thread in each worker: workers are many, and threads would not survive the fork."""

_begin = msgspec.msgpack.Decoder(channel.WorkerStart)


def main(orders_fd: int, lifeline_fd: int, owner: int) -> None:
    """Run as the guardian, as its child that forks, or as a worker forked by that child, to the end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the rollout process decides when they end
    setproctitle("rollout: forks reward workers")  # first: it finds the process's original command line by
    os.environ.update({**_ONE_THREAD, **os.environ})  # the variables' place in memory, which this line changes
    fork_guarded(lifeline_fd, owner)
    kept_inputs.install()
    commands = socket.socket(fileno=orders_fd)
    os.set_inheritable(orders_fd, False)
    if (settings := channel.receive(commands)) is None:
        return
    config = config_from_json(settings)
    try:
        commands.sendall(channel.packed(channel.ClassImported(runs_in=runs_in(config))))
    except Exception as error:  # a built-in environment may lack a package
        description = str(error) if isinstance(error, TandemError) else f"{type(error).__name__}: {error}"
        commands.sendall(channel.packed(channel.ClassImported(error=line(description))))
    calls = _fork_workers(commands)
    if calls is not None:
        with contextlib.suppress(ConnectionError):  # the rollout process has ended
            _work(calls, config)
        say_left_out()


def _fork_workers(commands: socket.socket) -> socket.socket | None:
    """Fork on each command; return in each worker with its calls, and at the end with none."""
    server = os.getpid()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no guardian needs to be collected
    gc.freeze()  # or garbage collection would make each worker copy what was imported
    for stream in (sys.stdout, sys.stderr):  # or each worker would write the buffer again
        stream.flush()
    while True:
        word, descriptors, *_ = socket.recv_fds(commands, 1, 2)
        if not word:
            return None
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            commands.close()
            calls, lifeline = descriptors
            fork_guarded(lifeline, server)
            os.setsid()  # a worker that kills its own process group must not kill the run
            os.set_inheritable(calls, False)
            return socket.socket(fileno=calls)
        for descriptor in descriptors:
            os.close(descriptor)


def _work(calls: socket.socket, config: Config) -> None:
    """Make the environment and answer calls, until the other end is closed."""
    setproctitle(f"rollout: scores with {config.data.environment}")
    faulthandler.register(signal.SIGUSR1)  # the guardian asks where it is stuck; written in C, so it needs no GIL
    with contextlib.suppress(OSError):  # if memory runs out, do without this
        Path("/proc/self/oom_score_adj").write_text("1000")
    calls.sendall(channel.packed(channel.WorkerForked(os.getpid(), os.getppid())))
    if (order := channel.receive(calls)) is None:
        return
    settings = config.env[str(config.data.environment)]
    if settings.is_reward_model:
        _work_in_batches(calls, config)
        return
    try:
        with bounded():
            environment = make_environment(config, _begin.decode(order).engine)
    except TandemError as error:
        calls.sendall(channel.packed(channel.WorkerReady(error=line(str(error)))))
        return
    ready = channel.WorkerReady(is_multi_turn=is_multi_turn(environment), is_async=is_async(environment))
    calls.sendall(channel.packed(ready))
    module = (settings.class_path or "").rpartition(".")[0]
    if is_async(environment):
        coroutines = importlib.import_module(
            "tandem.rollout.environments.processes.coroutines"
        )  # asyncio takes a while
        coroutines.answer_at_once(calls, environment, module, settings.longest_call_s)
    else:
        step, may_answer = step_of(environment), is_multi_turn(environment)
        _answer_in_turn(calls, partial(outcome_of, step=step, is_multi_turn=may_answer, module=module))


def _work_in_batches(calls: socket.socket, config: Config) -> None:
    """Load the reward model and score calls, until the other end is closed."""
    try:
        reward_model = make_reward_model(config)
    except TandemError as error:
        calls.sendall(channel.packed(channel.WorkerReady(error=line(str(error)))))
        return
    calls.sendall(channel.packed(channel.WorkerReady(batch_size=reward_model.batch_size)))
    _answer_in_batches(calls, reward_model)


class _Waiting(NamedTuple):
    """A call that waits to be scored."""

    call: ScoringCall
    token_ids: Sequence[int]
    shape: int


def _answer_in_batches(calls: socket.socket, environment: BatchEnvironment) -> None:
    """Answer calls as they come, until the other end is closed."""
    reader, waiting = channel.MessageReader(), list[_Waiting]()
    while _take(calls, reader, environment, waiting):
        shape = waiting[0].shape
        batch = [pending for pending in waiting if pending.shape == shape][: environment.batch_size]
        batch_numbers = {pending.call.number for pending in batch}
        waiting = [pending for pending in waiting if pending.call.number not in batch_numbers]
        outcomes = _outcomes(environment, batch)
        for pending, outcome in zip(batch, outcomes, strict=True):
            calls.sendall(channel.packed(channel.CallOutcome(pending.call.number, outcome)))


def _take(
    calls: socket.socket, reader: channel.MessageReader, environment: BatchEnvironment, waiting: list[_Waiting]
) -> bool:
    """Add new calls to the waiting ones; wait if there are none. Return False if the other end is closed."""
    patience = 0.0 if waiting else None
    while not waiting or wait_to_read(calls, patience):
        if not (data := calls.recv(1 << 18)):
            return False
        for message in reader.messages(data):
            call = channel.call_decoder.decode(message)
            try:
                token_ids = environment.encode(call.problem, call.conversation)
                waiting.append(_Waiting(call, token_ids, environment.shape_of(len(token_ids))))
            except DataError as error:  # the response's fault
                calls.sendall(channel.packed(channel.CallOutcome(call.number, Failure(line(str(error))))))
            except Exception as error:
                calls.sendall(channel.packed(channel.CallOutcome(call.number, failure_of(error, ""))))
        if patience is None:
            patience = _TOGETHER_S
    return True


def _outcomes(environment: BatchEnvironment, batch: Sequence[_Waiting]) -> list[Outcome]:
    try:
        scores = environment.score_together([each.token_ids for each in batch])
    except Exception as error:  # for example out of memory
        return [failure_of(error, "") for _ in batch]
    return [
        outcome_of(each.call, lambda *_, score=score: score, is_multi_turn=False, module="")
        for each, score in zip(batch, scores, strict=True)
    ]


def _answer_in_turn(calls: socket.socket, answer: Callable[[ScoringCall], Outcome]) -> None:
    worker, reader = os.getpid(), channel.MessageReader()
    while data := calls.recv(1 << 18):
        for message in reader.messages(data):
            call = channel.call_decoder.decode(message)
            outcome = answer(call)
            if os.getpid() != worker:  # the environment has forked without ending its child
                os._exit(0)
            calls.sendall(channel.packed(channel.CallOutcome(call.number, outcome)))
