"""The process that starts programs of agents: each fork becomes a guardian and a program.

rollout -- guardian -- launcher -- guardian -- program (one guardian and one program for each that runs)

Closing a guardian's lifeline ends its program and everything the program has started, daemons included. All programs
end with the rollout process, however it ends. The launcher is a new interpreter, because the rollout process has
threads.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys

import msgspec
from setproctitle import setproctitle

from tandem.common.process_lifetime import copy_names, fork_guarded

NUM_DESCRIPTORS = 5
"""Descriptors sent with each command: the lifeline, three standard streams, and the file with the `AgentProgram`."""
EXIT_NOT_STARTED = 127


class AgentProgram(msgspec.Struct, frozen=True):
    """The program to run."""

    command: tuple[str, ...]
    environment: dict[str, str]


_programs = msgspec.msgpack.Decoder(AgentProgram)


def main(orders_fd: int, lifeline_fd: int, owner: int) -> None:
    """Run as the guardian, as its child that forks, or as a program, to the end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the rollout process decides when they end
    setproctitle("rollout: starts agents")
    fork_guarded(lifeline_fd, owner)
    orders = socket.socket(fileno=orders_fd)
    os.set_inheritable(orders_fd, False)
    launcher = os.getpid()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no guardian needs to be collected
    gc.freeze()
    while True:
        word, descriptors, *_ = socket.recv_fds(orders, 1, NUM_DESCRIPTORS)
        if not word:
            return
        if os.fork() == 0:
            orders.close()
            _become(descriptors, launcher)
        for descriptor in descriptors:
            os.close(descriptor)


def _become(descriptors: list[int], launcher: int) -> None:
    """Become the guardian of a program, or the program itself."""
    lifeline, *streams, order = descriptors
    fork_guarded(lifeline, launcher)
    os.setsid()  # a program that kills its own process group must not kill the run
    program = _programs.decode(os.pread(order, os.fstat(order).st_size, 0))
    for number, descriptor in enumerate(streams):
        os.dup2(descriptor, number)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        os.execvpe(program.command[0], program.command, program.environment | copy_names())
    except OSError as error:
        print(f"{program.command[0]}: {error.strerror}", file=sys.stderr, flush=True)
    os._exit(EXIT_NOT_STARTED)
