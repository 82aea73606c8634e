"""Runs with a flooded port: it answers its own clients meanwhile, the run ends well, and nothing stays open."""

from __future__ import annotations

import contextlib
import json
import shutil
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest

from tandem.common.web import HEADERS_S
from tests.harness.floods import Address, Flood, flooded
from tests.harness.ports import free_port
from tests.harness.runs.agent_run_harness import OVER
from tests.harness.runs.held_runs import await_hold, go_on, hold
from tests.harness.runs.running import (
    BIN,
    HOLDS,
    TIMEOUT_S,
    Command,
    merged,
    process_of,
    steps_of,
    wait_until,
    write_config,
)

LIMIT = 1024
"""Descriptors of each process, as many as Linux gives by default: fewer than a flood has connections."""
STEPS = 60
FLOODED_STEPS = 3
CLIENT_S = 60.0
MOST_RETRIES = 5
SLACK = 8
"""Descriptors that a process may have more than before: what it opens for itself from time to time."""
HOLD = Path("hold")
"""While there is this folder, nothing is scored."""
RUN: dict[str, Any] = {
    "grpo": {"max_num_steps": STEPS, "val_period": STEPS},
    "checkpointing": {"save_period": STEPS},
    "cluster": {"deadlines": {"generate_s": TIMEOUT_S}},
}
ENV: dict[str, Any] = {"env": {"digits": {"class": "digits.Digits", "timeout_s": TIMEOUT_S}}}


def at(url: str) -> Address:
    """Return where a URL's server listens."""
    parts = urlsplit(url)
    assert parts.hostname is not None
    assert parts.port is not None
    return parts.hostname, parts.port


def ask(url: str, body: dict[str, Any] | None = None) -> bytes:
    """Ask as clients of OpenAI's API do, which try again where a connection is ended.

    Strangers at the client's own address may make many connections before its request is there.
    """
    content = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, content, {"Content-Type": "application/json"})
    for _ in range(MOST_RETRIES):
        with contextlib.suppress(ConnectionError):
            return _asked(request)
    return _asked(request)


def _asked(request: urllib.request.Request) -> bytes:
    try:
        with urllib.request.urlopen(request, timeout=CLIENT_S) as answer:
            return bytes(answer.read())
    except urllib.error.URLError as error:
        if isinstance(error.reason, ConnectionError):
            raise error.reason from error
        raise


@contextlib.contextmanager
def running(config: Path, num_scores: int = 16) -> Iterator[Command]:
    """Run with few descriptors, until it has done two steps, and waits. A step has so many scores."""
    for step in (2, 2 + FLOODED_STEPS):
        hold(step * num_scores + 1)
    program = shutil.which("prlimit")
    if program is None:
        pytest.skip("prlimit is not installed")
    with Command(program, f"--nofile={LIMIT}:{LIMIT}", BIN / "coordinator", "up", config) as run:
        await_hold(run, "step 2/")
        yield run


def num_steps() -> int:
    """Return how many steps are done."""
    return len(steps_of())


@contextlib.contextmanager
def asking(client: Callable[[], None]) -> Iterator[Callable[[], int]]:
    """Have a client ask again and again; each time it must be answered. Yield what counts its answers."""
    num_answers, ends = 0, threading.Event()

    def ask_again() -> None:
        nonlocal num_answers
        while not ends.is_set():
            client()
            num_answers += 1

    def count() -> int:
        if answered.done():
            answered.result()
        return num_answers

    with ThreadPoolExecutor(1) as pool:
        answered = pool.submit(ask_again)
        try:
            yield count
        finally:
            ends.set()
        answered.result()


def assert_survives(run: Command, kind: str, where: Address, client: Callable[[], None]) -> None:
    """Flood a port of a process for some steps, with a client that asks meanwhile, and see the run to its end."""

    def wait(condition: Callable[[], bool], what: str) -> None:
        wait_until(condition, lambda: f"{what}\n{run.output()}", died=lambda: run.process.poll() is not None)

    process = psutil.Process(run.process.pid) if kind == "coordinator" else process_of(run, kind)
    before = process.num_fds()
    with flooded(where) as flood, asking(client) as num_answers:
        began = time.monotonic()  # it waits for longer than a server does for headers
        wait(lambda: time.monotonic() > began + HEADERS_S + 2 and flood.rounds > 2, "headers to be given up")
        wait(lambda: num_answers() > 2, "answers to clients")
        assert_held_off(flood)
        assert process.num_fds() < before + LIMIT // 2, "an address has a quarter of the descriptors"
        goal, num = num_steps() + FLOODED_STEPS, num_answers()
        go_on()
        wait(lambda: num_steps() >= goal and HOLD.exists(), f"step {goal}")
        wait(lambda: num_answers() > num, "more answers to clients")
    wait(lambda: process.num_fds() <= before + SLACK, f"{process.num_fds()} descriptors to become {before}")
    client()
    go_on()
    assert run.wait() == 0, run.output()
    assert steps_of()[-1].step == STEPS
    assert " is lost" not in run.output()
    assert "Traceback" not in "".join(log.read_text() for log in Path("run/logs").glob("*.log"))


def assert_held_off(flood: Flood) -> None:
    """See that some were cut off: the process has fewer descriptors than they want."""
    assert flood.num_cut_off > 0
    assert flood.num_made > LIMIT


def test_a_rollout_that_answers_anybody_is_flooded() -> None:
    config = write_config(merged(merged(RUN, ENV), {"policy": {"generation": {"expose_http_server": True}}}))
    with running(config) as run:
        url = run.wait_for(r"rollout-0 answers OpenAI's API at (http://127.0.0.1:\d+)/v1")[1]

        def client() -> None:
            answer = json.loads(ask(f"{url}/v1/completions", {"model": "policy", "prompt": "1 + ", "max_tokens": 2}))
            assert answer["choices"], answer

        assert_survives(run, "rollout", at(url), client)


def test_the_metrics_of_a_run_are_flooded() -> None:
    pytest.importorskip("prometheus_client")
    port = free_port()
    config = write_config(merged(merged(RUN, ENV), {"logger": {"prometheus": {"port": port}}}))
    with running(config) as run:

        def client() -> None:
            assert b"\ntandem_step " in ask(f"http://127.0.0.1:{port}/metrics")

        assert_survives(run, "coordinator", ("127.0.0.1", port), client)


_HELD: dict[str, Any] = {}
exec(HOLDS, _HELD)


class Players(ThreadingHTTPServer):
    """A server elsewhere that plays episodes, and notes where they are played."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Player)
        self.sessions: list[str] = []


class _Player(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        command = json.loads(self.rfile.read(int(self.headers["content-length"])))
        players = self.server
        assert isinstance(players, Players)
        players.sessions.append(command["session_url"])
        question = [{"role": "user", "content": command["problem"]["question"]}]
        answer = json.loads(ask(f"{command['base_url']}/chat/completions", {"model": "policy", "messages": question}))
        text = answer["choices"][0]["message"]["content"]
        _HELD["wait_while_held"]()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"reward": sum(map(str.isdigit, text)) / (len(text) + 1)}).encode())

    def log_message(self, *args: Any) -> None:
        pass


def test_the_port_at_which_agents_elsewhere_ask_is_flooded() -> None:
    with Players() as players:
        thread = threading.Thread(target=players.serve_forever)
        thread.start()
        try:
            url = f"http://127.0.0.1:{players.server_port}/play"
            env = {"agent": {"url": url, "timeout_s": TIMEOUT_S}}
            config = write_config(merged(merged(OVER, RUN), {"grpo": {"val_period": 0}, "env": env}))
            with running(config, num_scores=8) as run:
                where = at(players.sessions[0])

                def client() -> None:
                    """Look at an episode, which may have ended meanwhile."""
                    try:
                        assert json.loads(ask(players.sessions[-1]))
                    except urllib.error.HTTPError as error:
                        if error.code != HTTPStatus.GONE:
                            raise

                assert_survives(run, "rollout", where, client)
        finally:
            players.shutdown()
            thread.join()
