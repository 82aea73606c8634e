"""What strangers and web sites ask of a web server: refused on one line, and nobody waits for who never ends asking."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from argparse import ArgumentParser
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast
from urllib.parse import urlsplit

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tandem.common import web
from tandem.common.descriptors import wait_to_read
from tandem.common.errors import ConfigError
from tandem.rollout.openai_api.app import make_app, only_with
from tandem.rollout.openai_api.refusals import OpenAIRefused, as_response, read_body
from tandem.rollout.openai_api.server import HttpServer, listen
from tandem.serving.access_token import VARIABLE, add_token, token_of
from tests.harness.runs.running import wait_until
from tests.harness.web_servers import SERVERS, WAIT_S, Address, ask, web_server
from tests.unit.page_harness import client, make_run

if TYPE_CHECKING:
    from tandem.rollout.openai_api.generator import ServedModel

LIMIT = 200


async def _echo(request: Request) -> Response:
    try:
        return Response(await read_body(request))
    except OpenAIRefused as error:
        return as_response(error)


def echo() -> Starlette:
    return Starlette(routes=[Route("/", _echo, methods=["GET", "POST"])])


@contextlib.contextmanager
def served(*, asks_for_token: bool = False) -> Iterator[Address]:
    with HttpServer(echo(), listen("127.0.0.1", 0), asks_for_token=asks_for_token) as server:
        parts = urlsplit(server.url)
        assert parts.hostname is not None
        assert parts.port is not None
        yield parts.hostname, parts.port


JSON = {"content-type": "application/json"}
REFUSED = [
    ({**JSON, "host": "evil.example:8000"}, 403),
    ({**JSON, "host": ""}, 403),
    ({**JSON, "host": "[::1"}, 403),
    ({**JSON, "origin": "https://evil.example"}, 403),
    ({**JSON, "origin": "null"}, 403),
    ({"content-type": "text/plain"}, 415),
    ({"content-type": "application/x-www-form-urlencoded"}, 415),
    ({"content-type": "multipart/form-data; boundary=1"}, 415),
]
ALLOWED: list[dict[str, str]] = [
    JSON,
    {},
    {"content-type": "Application/JSON; charset=utf-8", "host": "localhost", "origin": "http://localhost:3000"},
    {**JSON, "host": "[::1]:80"},
]


def test_a_server_on_loopback_without_a_token_answers_no_web_site() -> None:
    with served() as at:
        for headers, status in REFUSED:
            assert ask(at, headers) == status, headers
        for headers in ALLOWED:
            assert ask(at, headers) == 200, headers
    with served(asks_for_token=True) as at:
        assert {ask(at, headers) for headers, _ in REFUSED} == {200}, "a token is enough: behind a proxy, for instance"


def test_a_wrong_token_waits_for_its_answer_and_holds_no_one_else_up(monkeypatch: pytest.MonkeyPatch) -> None:
    model = cast("ServedModel", SimpleNamespace(name="a", aliases=(), created=0, max_length=8))
    with HttpServer(
        make_app(only_with("right", model), deadline_s=60), listen("127.0.0.1", 0), asks_for_token=True
    ) as server:
        parts = urlsplit(server.url)

        def begin(token: str) -> http.client.HTTPConnection:
            connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=WAIT_S)
            connection.request("GET", "/v1/models", headers={"Authorization": f"Bearer {token}"})
            return connection

        monkeypatch.setattr(web, "WRONG_KEY_S", 3600.0)
        wrong = [begin(f"wrong-{number}") for number in range(20)]
        for _ in range(20):
            with contextlib.closing(begin("right")) as right:
                assert right.getresponse().status == 200
        assert not any(wait_to_read(each.sock, 0.0) for each in wrong), "none of the others is answered"
        for each in wrong:
            each.close()
        monkeypatch.setattr(web, "WRONG_KEY_S", 0.0)
        with contextlib.closing(begin("wrong")) as connection:
            assert connection.getresponse().status == 401


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"POST / HT",
        b"POST / HTTP/1.1\r\nHost: localhost\r\nX-Slow: ",
        b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\nGET",
    ],
)
def test_headers_that_do_not_come_to_an_end_end_the_connection(said: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "HEADERS_S", 0.3)
    with served() as at, socket.create_connection(at, timeout=WAIT_S) as connection:
        connection.sendall(said)
        heard = b""
        with contextlib.suppress(ConnectionResetError):
            while came := connection.recv(1 << 16):
                heard += came
    assert heard.count(b"HTTP/1.1 ") == said.count(b"\r\n\r\n")


def test_an_answer_over_a_kept_connection_is_sent_at_once() -> None:
    with HttpServer(echo(), listen("127.0.0.1", 0)) as server:
        parts = urlsplit(server.url)
        asking = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=WAIT_S)
        with contextlib.closing(asking):
            asking.request("GET", "/")
            assert asking.getresponse().read() == b""
            (connection,) = server._server.server_state.connections
            assert isinstance(connection, web.TimedHttpProtocol)
            its = connection.transport.get_extra_info("socket")
            assert its.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY), "Nagle's algorithm is off"


def test_a_request_whose_headers_are_there_may_take_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "HEADERS_S", 0.2)
    with served() as at, socket.create_connection(at, timeout=WAIT_S) as connection:
        for _ in range(2):
            connection.sendall(b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{")
            time.sleep(0.5)
            connection.sendall(b"}")
            heard = b""
            while not heard.endswith(b"{}"):
                heard += connection.recv(1 << 16)
            assert heard.startswith(b"HTTP/1.1 200")


def test_a_body_that_breaks_off_is_no_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    app = make_app(lambda _: cast("ServedModel", None), deadline_s=WAIT_S)
    for each in (echo(), app):
        with HttpServer(each, listen("127.0.0.1", 0)) as server:
            parts = urlsplit(server.url)
            for path in (b"/", b"/v1/chat/completions"):
                with socket.create_connection((parts.hostname, parts.port), timeout=WAIT_S) as connection:
                    connection.sendall(b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{" % path)
    assert "Traceback" not in "".join(capfd.readouterr())


@pytest.mark.parametrize("limit", [LIMIT, 4096])
@pytest.mark.parametrize("kind", SERVERS)
def test_idle_connections_do_not_keep_others_out(kind: str, limit: int) -> None:
    held: list[socket.socket] = []
    with web_server(kind, limit) as server:
        try:
            for _ in range(2 * LIMIT):
                held.append(each := socket.socket())
                each.setblocking(False)
                each.connect_ex(server.at)
            assert server.ask() == 200
        finally:
            for each in held:
                each.close()


def test_a_request_that_has_come_is_answered_however_many_connections_come_after_it() -> None:
    answers: list[int] = []
    with web_server("page", 4096) as server, contextlib.ExitStack() as held:
        os.kill(server.process.pid, signal.SIGSTOP)  # as on a busy machine, it accepts none of them until all are there

        def connect(count: int) -> None:
            for _ in range(count):
                held.enter_context(each := socket.socket()).setblocking(False)
                each.connect_ex(server.at)

        connect(10)
        client = threading.Thread(target=lambda: answers.append(server.ask()))
        client.start()
        wait_until(lambda: _num_unread(server.at) > 0, lambda: "the request to be there")
        connect(230)
        os.kill(server.process.pid, signal.SIGCONT)
        client.join(WAIT_S)
    assert answers == [200]


_INTERRUPTED = """
import asyncio, os, signal, socket, sys
from pathlib import Path
from tandem.observe.page.server import serve
from tandem.observe.run_folder.journal_writer import Journal
from tandem.serving.proxy import serve_run

signal.signal(signal.SIGINT, signal.default_int_handler)  # tests in the background of a script ignore it
made = asyncio.SelectorEventLoop._make_self_pipe

def make(loop):
    os.kill(os.getpid(), signal.SIGINT)
    return made(loop)

asyncio.SelectorEventLoop._make_self_pipe = make
run = Path("run")
with Journal.create(run, b"{}", "grpo"), socket.create_server(("127.0.0.1", 0)) as listener:
    serve([run], listener) if sys.argv[1] == "page" else serve_run(run, listener, None)
"""


@pytest.mark.parametrize("kind", ["page", "proxy"])
def test_an_interrupt_while_the_event_loop_is_made_ends_the_server_well(kind: str, tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", _INTERRUPTED, kind],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.stderr.endswith("KeyboardInterrupt\n"), ended.stderr
    assert "Exception ignored" not in ended.stderr


def _num_unread(at: Address) -> int:
    """Return the bytes that wait to be read on connections to an address of this machine."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    is_here = f":{at[1]:04X}"
    return sum(int(row[4].partition(":")[2], 16) for row in rows if row[1].endswith(is_here) and row[3] == "01")


def test_the_right_token_leads_to_no_other_host(tmp_path: Path) -> None:
    make_run(tmp_path / "run").close()
    page = client(tmp_path / "run", token="right")
    for path in ("//evil.example/", "/\\evil.example/", "/%5Cevil.example", "///evil.example/%2F", "/a%0d%0ab"):
        answer = page.get(f"http://127.0.0.1{path}?token=right&a=b", follow_redirects=False)
        assert answer.status_code == 303
        where = answer.headers["location"]
        assert where.startswith("/"), where
        assert urlsplit(where).netloc == "", where
        assert not where.startswith(("//", "/\\")), where


def test_a_token_may_come_from_a_file_or_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parser = ArgumentParser()
    add_token(parser, "a token")
    file = tmp_path / "token"
    file.write_text("from a file\n")
    file.chmod(0o600)
    monkeypatch.delenv(VARIABLE, raising=False)
    assert token_of(parser.parse_args([])) is None
    monkeypatch.setenv(VARIABLE, "of the environment")
    assert token_of(parser.parse_args([])) == "of the environment"
    assert token_of(parser.parse_args(["--token-file", str(file)])) == "from a file"
    assert token_of(parser.parse_args(["--token", "by flag"])) == "by flag"
    file.chmod(0o644)
    with pytest.raises(ConfigError, match="can be read or changed by others"):
        token_of(parser.parse_args(["--token-file", str(file)]))
    os.mkfifo(tmp_path / "pipe")
    for words, why in (
        (["--token", " "], "the token is empty"),
        (["--token-file", str(tmp_path / "none")], "cannot read it: No such file"),
        (["--token-file", str(tmp_path / "pipe")], "it is a FIFO, not a file"),
        (["--token", "a\x1bb"], "one printable line"),
    ):
        with pytest.raises(ConfigError, match=why):
            token_of(parser.parse_args(words))
