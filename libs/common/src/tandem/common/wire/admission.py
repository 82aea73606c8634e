"""The admission of a process by its coordinator: it says hello until it has an answer."""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from tandem.common.errors import ConfigError, NotAdmitted, TandemError
from tandem.common.messages import Heartbeat, Hello, KeyAccepted, Refused, ServiceKind, Shutdown, Welcome
from tandem.common.wire.frames import Frames, MessageCodec, encode

Answer = TypeVar("Answer", Welcome, KeyAccepted)

_AT_ONCE_S = 1.0
_FAILURES, _FAILING_S = 5, 2.0
"""Failed handshakes, and their duration, after which to give up; an ending coordinator breaks off some as well."""


class KeyRefused(TandemError):
    """The coordinator does not accept a key."""


class AdmissionRequests:
    """The requests of one process to its coordinator, all before one deadline."""

    def __init__(
        self,
        coordinator: str,
        service: ServiceKind,
        keys_of: str,
        timeout_s: float,
        is_waiting: Callable[[], None] | None,
    ) -> None:
        """Begin to count the time; `is_waiting` is called if the first request is not answered at once."""
        self._coordinator, self._service, self._keys_of = coordinator, service, keys_of
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._is_waiting = is_waiting

    def register(self, dealer: zmq.Socket[bytes], hello: Hello, public_key: str) -> None:
        """Register a key with the coordinator, at a socket that proves the one for joining."""
        self.ask(dealer, msgspec.structs.replace(hello, registers=public_key), KeyAccepted)

    def ask(self, dealer: zmq.Socket[bytes], hello: Hello, answer_type: type[Answer]) -> Answer:
        """Connect, say hello and return the answer."""
        is_waiting, self._is_waiting = self._is_waiting, None
        admission: MessageCodec[Any] = MessageCodec(answer_type | Refused | Heartbeat | Shutdown)
        with contextlib.closing(_Handshake(dealer, self._coordinator, self._keys_of, encode(hello))) as handshake:
            try:
                dealer.connect(self._coordinator)
            except zmq.ZMQError as error:
                raise ConfigError(f"--coordinator {self._coordinator!r}: {error.strerror}") from error
            say_so_at = time.monotonic() + _AT_ONCE_S
            while (now := time.monotonic()) < self._deadline:
                if is_waiting is not None and now >= say_so_at:
                    is_waiting()
                    is_waiting = None
                until = self._deadline if is_waiting is None else min(self._deadline, say_so_at)
                if not handshake.poll(until - now):
                    continue
                match admission.decode(dealer.recv_multipart()).message:
                    case Refused(reason=reason) | Shutdown(reason=reason) as refusal:
                        is_for_good = isinstance(refusal, Refused) and refusal.is_for_good
                        raise (TandemError if is_for_good else NotAdmitted)(
                            f"the coordinator at {self._coordinator} refused this {self._service}: {reason}"
                        )
                    case Heartbeat():
                        continue
                    case answer:
                        assert isinstance(answer, answer_type)
                        return answer
        raise NotAdmitted(
            f"{self._service} could not join: no answer from {self._coordinator} within {self._timeout_s:g} s; is a "
            "coordinator running there?"
        )


_watchers = itertools.count()


class _Handshake:
    """A watcher of a connecting socket, which says hello over each new connection.

    It gives up as soon as no answer can come. libzmq retries after any failure except a refused key. The coordinator
    that received a hello may be gone before it answers, and be replaced by another.
    """

    def __init__(self, dealer: zmq.Socket[bytes], address: str, keys_of: str, hello: Frames) -> None:
        self._hello = hello
        self._dealer = dealer
        self._address = address
        self._keys_of = keys_of
        self._failures: list[float] = []
        self._monitor = dealer.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED
            | zmq.EVENT_HANDSHAKE_FAILED_AUTH
            | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
            | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
            # By default, the address has the socket's number, and the watcher before may still have that.
            f"inproc://handshake-{next(_watchers)}",
        )
        self._poller = zmq.Poller()
        for socket in (dealer, self._monitor):
            self._poller.register(socket, zmq.POLLIN)

    def poll(self, timeout_s: float) -> bool:
        """Wait for a message or a connection event; return whether there is a message.

        Raises `TandemError` once it is known that no message will come.
        """
        ready = dict(self._poller.poll(math.ceil(timeout_s * 1000)))
        if self._monitor in ready:
            self._take(recv_monitor_message(self._monitor)["event"])
        return self._dealer in ready

    def close(self) -> None:
        """Stop watching."""
        self._dealer.disable_monitor()
        self._monitor.close()

    def _take(self, event: int) -> None:
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._failures.clear()
            self._dealer.send_multipart(self._hello)
        elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            raise KeyRefused(f"the coordinator at {self._address} does not accept the key of {self._keys_of}")
        else:
            self._failures.append(time.monotonic())
            if len(self._failures) >= _FAILURES and self._failures[-1] - self._failures[0] > _FAILING_S:
                raise TandemError(
                    f"the process that listens at {self._address} does not prove the coordinator's key that "
                    f"{self._keys_of} has: it belongs to another run, or is something else"
                )
