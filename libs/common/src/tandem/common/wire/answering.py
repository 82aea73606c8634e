"""A thread that answers requests at a socket of its own: what `CallerConnections` call."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from tandem.common.curve import AdmittedKeys, new_key_pair
from tandem.common.errors import WireError
from tandem.common.wire.frames import Frames, MessageCodec
from tandem.common.wire.hub import Hub

_POLL_S = 0.2


class AnsweringThread:
    """A ROUTER socket and its thread. It waits only for the next request, for short intervals."""

    def __init__(
        self,
        host: str,
        admitted: AdmittedKeys,
        requests: Any,
        answer: Callable[[Any], Frames | None],
        *,
        name: str,
        max_bytes: int,
    ) -> None:
        """Listen on a port of `host`, and answer until it is closed.

        Args:
            host: host or address to listen on.
            admitted: keys of the clients to accept.
            requests: the message, or the union of messages, that they send. What is none has no answer: a real process
                has a deadline, and asks again.
            answer: returns the answer to a request, or None where it has none. It is called in the thread.
            name: name of the thread.
            max_bytes: size limit of a request.
        """
        self._codec: MessageCodec[Any] = MessageCodec(requests)
        self._answer = answer
        self._hub = Hub(f"tcp://{host}:*", new_key_pair(), admitted, max_bytes=max_bytes)
        self.at = self._hub.at
        """Its listener."""
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Answer no more, and close the socket."""
        self._is_closed.set()
        self._thread.join()

    def _serve(self) -> None:
        while not self._is_closed.is_set():
            for peer, frames in self._hub.receive(_POLL_S):
                try:
                    request = self._codec.decode(frames).message
                except WireError:
                    continue
                if (reply := self._answer(request)) is not None:
                    self._hub.send(peer, reply)
        self._hub.close()
