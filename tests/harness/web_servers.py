"""Each web server of ours in a process of its own, which may have few descriptors; and clients that never finish."""

from __future__ import annotations

import contextlib
import http.client
import subprocess
import tempfile
from collections.abc import Iterator
from urllib.parse import urlsplit

from tests.harness.descriptors import limited

WAIT_S = 120.0
END_S = 120.0
"""Longest time of a server's end: the interpreter of one that has imported torch takes a second of a core for it, for
which it waits on a machine with much else to do."""
Address = tuple[str, int]

ENGINE = """
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from tandem.rollout.openai_api.refusals import read_body
from tandem.rollout.openai_api.refusals import OpenAIRefused, as_response
from tandem.rollout.openai_api.server import HttpServer, listen

async def answer(request: Request) -> Response:
    try:
        return Response(await read_body(request))
    except OpenAIRefused as error:
        return as_response(error)

app = Starlette(routes=[Route("/", answer, methods=["GET", "POST"])])
with HttpServer(app, listen("127.0.0.1", 0)) as server:
    print(server.url, flush=True)
    sys.stdin.read()
"""
PROMETHEUS = """
from tandem.config.schema import PrometheusConfig
from tandem.observe.exporters.prometheus import MetricsExporter

exporter = MetricsExporter(PrometheusConfig(port=0), not_up=())
print(exporter.url, flush=True)
sys.stdin.read()
exporter.close()
"""
PAGE = """
from tandem.observe.page.server import serve
from tandem.observe.run_folder.journal_writer import Journal

with Journal.create(Path("run"), b"{}", "grpo"):
    ends_with_input()
    serve([Path("run")], listening())
"""
PROXY = """
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route
from tandem.common.messages import EngineServer
from tandem.observe.run_folder.live import EngineServersFile
from tandem.observe.run_folder.journal_writer import Journal
from tandem.rollout.openai_api.server import HttpServer, listen
from tandem.serving.proxy import serve_run

app = Starlette(routes=[Route("/", lambda _: Response(b"{}"), methods=["GET", "POST"])])
with Journal.create(Path("run"), b"{}", "grpo"), HttpServer(app, listen("127.0.0.1", 0)) as server:
    EngineServersFile(Path("run")).open("rollout-0", EngineServer(url=server.url, token=""))
    ends_with_input()
    serve_run(Path("run"), listening(), None)
"""
SERVERS = {"engine": ENGINE, "proxy": PROXY, "page": PAGE, "prometheus": PROMETHEUS}
"""Programs that print where they listen, and end with their input."""
_PRELUDE = """
import os, signal, socket, sys, threading
from pathlib import Path

def ends_with_input():
    threading.Thread(target=lambda: sys.stdin.read() or os.kill(os.getpid(), signal.SIGTERM), daemon=True).start()

def listening():
    made = socket.create_server(("127.0.0.1", 0))
    print(f"http://127.0.0.1:{made.getsockname()[1]}", flush=True)
    return made
"""


class Server:
    """A server that runs."""

    def __init__(self, process: subprocess.Popen[str], at: Address) -> None:
        self.process = process
        self.at = at

    def ask(self, headers: dict[str, str] | None = None, body: bytes | None = None) -> int:
        """Ask as a client does; return the status of the answer."""
        return ask(self.at, headers or {}, body)


def ask(at: Address, headers: dict[str, str], body: bytes | None = b"{}", path: str = "/") -> int:
    """Make a request to a server; return the status of its answer."""
    connection = http.client.HTTPConnection(*at, timeout=WAIT_S)
    with contextlib.closing(connection):
        connection.request("GET" if body is None else "POST", path, body, headers)
        return connection.getresponse().status


@contextlib.contextmanager
def web_server(kind: str, limit: int = 1024) -> Iterator[Server]:
    """Run a server with so many descriptors; it must end well, and without a traceback."""
    with (
        tempfile.TemporaryDirectory() as folder,
        subprocess.Popen(
            limited(limit, _PRELUDE + SERVERS[kind]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=folder,
        ) as process,
    ):
        try:
            assert process.stdout is not None
            parts = urlsplit(process.stdout.readline().strip())
            assert parts.hostname is not None, process.communicate("", timeout=END_S)[1]
            yield Server(process, (parts.hostname, parts.port or 0))
            _, errors = process.communicate("", timeout=END_S)
            assert process.returncode == 0, errors
            assert "Traceback" not in errors, errors
        finally:
            process.kill()
