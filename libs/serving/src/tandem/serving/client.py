"""A client of servers with OpenAI's API, and of live runs that answer with their own rollouts."""

from __future__ import annotations

import contextlib
import http.client
import random
import ssl
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgspec

from tandem.common.errors import ConfigError, ServiceError, nearest
from tandem.observe.run_folder.checkpoints import config_of
from tandem.observe.run_folder.journal import read_journal
from tandem.observe.run_folder.live import read_engine_servers

_WORD_S = 600.0
"""Longest silence of a server."""
_EVENT = b"data: "
_END = b"[DONE]"
_SWITCH = "policy.generation.expose_http_server"


class AnswerPiece(NamedTuple):
    """A piece of an answer."""

    text: str
    is_reasoning: bool
    """Whether it belongs to the reasoning before the answer."""


class ChatServer:
    """A server's address, and its access token."""

    def __init__(self, url: str, token: str | None) -> None:
        """Parse `url`, with or without a final ``/v1``. Raises `ConfigError` if it is invalid."""
        parts = urlsplit(url if "//" in url else f"http://{url}")
        try:
            has_port = parts.port is not None
        except ValueError as error:
            raise ConfigError(f"--url {url}: {error}") from error
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"--url {url}: expected an address such as http://127.0.0.1:8000")
        self.url = url
        self.versions: tuple[int, ...] = ()
        """Versions of the weights that generated the last answer, if weights change."""
        self._parts = parts
        self._port = parts.port if has_port else None
        self._path = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json"}
        if token is not None:
            self._headers["Authorization"] = f"Bearer {token}"

    def choose_model(self, name: str | None) -> str:
        """Return the model of this name, or the first one served. Raises `ServiceError` and `ConfigError`."""
        with self._request("GET", "/v1/models") as response:
            listed = _decode(response.read())
        names = [str(card.get("id")) for card in listed.get("data", []) if isinstance(card, dict)]
        if not names:
            raise ServiceError(self.url, "listing its models", "there are none")
        if name is not None and name not in names:
            raise ConfigError(f"--model {name}: {self.url} serves {', '.join(names)}{nearest(name, names)}")
        return name or names[0]

    def stream(self, messages: Sequence[Mapping[str, Any]], **settings: Any) -> Generator[AnswerPiece, None, None]:
        """Yield the pieces of an answer as they arrive. Raises `ServiceError`."""
        versions: set[int] = set()
        body = msgspec.json.encode({"messages": messages, "stream": True, **settings})
        with self._request("POST", "/v1/chat/completions", body) as response:
            for line in response:
                if not line.startswith(_EVENT):
                    continue
                data = line.removeprefix(_EVENT).strip()
                if data == _END:
                    return
                event = _decode(data)
                if "error" in event:
                    raise ServiceError(self.url, "answering", _message(event))
                versions.update(event.get("weight_versions", ()))
                self.versions = tuple(sorted(versions))
                for choice in event.get("choices", []):
                    delta = choice.get("delta", {})
                    if reasoning := delta.get("reasoning_content"):
                        yield AnswerPiece(str(reasoning), is_reasoning=True)
                    if text := delta.get("content"):
                        yield AnswerPiece(str(text), is_reasoning=False)
        raise ServiceError(self.url, "answering", "the connection was closed before the answer ended")

    @contextlib.contextmanager
    def _request(self, method: str, path: str, body: bytes | None = None) -> Iterator[http.client.HTTPResponse]:
        host = str(self._parts.hostname)
        connection = (
            http.client.HTTPSConnection(host, self._port, timeout=_WORD_S, context=ssl.create_default_context())
            if self._parts.scheme == "https"
            else http.client.HTTPConnection(host, self._port, timeout=_WORD_S)
        )
        doing = f"answering {method} {self._path}{path}"
        try:
            connection.request(method, self._path + path, body, self._headers)
            response = connection.getresponse()
            if response.status != http.client.OK:
                raise ServiceError(self.url, doing, _message(_decode(response.read())) or f"status {response.status}")
            yield response
        except (OSError, http.client.HTTPException) as error:
            raise ServiceError(self.url, doing, str(error) or type(error).__name__) from error
        finally:
            connection.close()


def _decode(data: bytes) -> dict[str, Any]:
    try:
        return msgspec.json.decode(data, type=dict[str, Any])
    except msgspec.MsgspecError:
        return {}


def _message(answer: Mapping[str, Any]) -> str:
    error = answer.get("error")
    return str(error.get("message", error)) if isinstance(error, dict) else str(error or "")


def answers_itself(run: Path) -> bool:
    """Return whether the run in a folder is live and its rollouts answer; print a note if they only could.

    Raises the errors of `read_journal`.
    """
    servers = read_engine_servers(run)
    if servers is None:
        return False
    if servers:
        return True
    with read_journal(run) as journal:
        config = config_of(journal)
    if config.generates and config.policy.generation.takes_external_requests:
        return True  # the servers are starting
    statement = f"the run in {run} is live, but its newest checkpoint is served"
    advice = f"; {_SWITCH}=true lets the rollouts of a run answer themselves" if config.generates else ""
    print(f"note: {statement}{advice}", flush=True)
    return False


class LiveRun:
    """The rollouts of a run as servers of a conversation: each question goes to one of them."""

    def __init__(self, run: Path) -> None:
        self.run = run

    def server(self) -> ChatServer:
        """Return a rollout that answers. Raises `ServiceError` if there is none."""
        servers = read_engine_servers(self.run)
        if not servers:
            reason = "the run has ended" if servers is None else "none of its rollouts answers now: ask again later"
            raise ServiceError(str(self.run), "answering", reason)
        server = random.choice([*servers.values()])
        return ChatServer(server.url, server.token or None)
