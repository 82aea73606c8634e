"""Weights go through a real S3 server as through a folder, and what fails there is waited for or written again."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import s3fs

from tandem.refit.adapters.catalogue import make_shape
from tandem.refit.adapters.dtensor import DTensor
from tandem.refit.adapters.vllm import Vllm
from tandem.refit.store import published
from tests.harness.ports import free_port
from tests.harness.runs import hosts_harness
from tests.harness.runs.by_hand import assert_same_results, in_folder, refits_of, undisturbed_run
from tests.harness.runs.held_runs import ENVIRONMENT, HELD, await_hold, go_on, hold
from tests.harness.runs.hosts_harness import CONFIG, on_two_hosts
from tests.harness.runs.running import merged, wait_until
from tests.harness.stores import StoreRefit, await_fact

other_host = hosts_harness.other_host

MODEL = make_shape(
    {
        "model_type": "qwen3",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 50,
        "tie_word_embeddings": False,
    },
    "bfloat16",
)
BUCKET = "weights"
URL = f"s3://{BUCKET}/runs"


class S3Server:
    """A server in a process of its own, which keeps its objects in memory."""

    def __init__(self, port: int, log: Path) -> None:
        self.port, self._log = port, log
        self.process = self._start()

    @property
    def files(self) -> s3fs.S3FileSystem:
        return s3fs.S3FileSystem(skip_instance_cache=True, use_listings_cache=False)

    def pause(self) -> None:
        """Have it answer nothing; connections stay open."""
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def lose_everything(self) -> None:
        """Kill it, and start another in its place, which has nothing."""
        self.close()
        self.process = self._start()

    def close(self) -> None:
        self.go_on()
        self.process.kill()
        self.process.wait(60)

    def _start(self) -> subprocess.Popen[bytes]:
        words = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]
        with self._log.open("ab") as log:
            process = subprocess.Popen(words, stdout=log, stderr=log)
        wait_until(self._answers, self._log.read_text, died=lambda: process.poll() is not None)
        self.files.mkdir(BUCKET)
        return process

    def _answers(self) -> bool:
        with contextlib.suppress(OSError):
            return bool(urllib.request.urlopen(f"http://127.0.0.1:{self.port}/", timeout=60).status == 200)
        return False


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    port = free_port()
    settings = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        # The server and its client import what no other test does.
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    started = S3Server(port, tmp_path / "moto.log")
    try:
        yield started
    finally:
        started.close()


@pytest.fixture
def refit(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[StoreRefit]:
    """Return two trainers and an engine of two workers, which hold version 0."""
    monkeypatch.setattr(published, "CHUNK_BYTES", 1 << 12)
    started = StoreRefit(URL, MODEL, DTensor(shard=2), Vllm(tp=2))
    try:
        started.publish(0)
        started.take(0)
        started.await_written()
        yield started
    finally:
        started.close()


def test_versions_arrive_and_nothing_is_left_behind(refit: StoreRefit, server: S3Server) -> None:
    for version in range(1, 10):
        refit.train(0.03)
        refit.publish(version)
        refit.take(version)
        assert not refit.verdict().differing
        refit.await_written()
    assert any("as differences" in line for line in refit.said)
    refit.close()
    assert server.files.find(BUCKET) == []


def delete(server: S3Server, path: str) -> None:
    server.files.rm_file(path)


def truncate(server: S3Server, path: str) -> None:
    contents = server.files.cat_file(path)
    server.files.pipe_file(path, contents[: len(contents) // 2])


@pytest.mark.parametrize("harm", [delete, truncate])
@pytest.mark.parametrize("kind", ["parts", "versions"])
def test_an_object_that_is_lost_or_torn_is_written_again(
    refit: StoreRefit, server: S3Server, kind: str, harm: Callable[[S3Server, str], None]
) -> None:
    for mirror in refit.mirrors.values():
        mirror.close()
    before = {*server.files.find(BUCKET)}
    refit.train(0.03)
    refit.publish(1)
    refit.await_written()
    harmed = [path for path in server.files.find(BUCKET) if path not in before and f"/{kind}/" in path]
    assert harmed
    for path in harmed:
        harm(server, path)
    for name in [*refit.engines]:
        refit.start_engine(name)
    refit.take(1)
    assert not refit.verdict().differing
    assert any("is asked for" in line for line in refit.said)


def test_a_server_that_does_not_answer_is_waited_for(refit: StoreRefit, server: S3Server) -> None:
    server.pause()
    refit.train(0.03)
    refit.publish(1)
    for mirror in refit.mirrors.values():
        mirror.want(1)
    await_fact(lambda: any("tried again" in line for line in refit.said), lambda: refit.said)
    server.go_on()
    refit.take(1)
    assert not refit.verdict().differing


def test_a_server_that_is_gone_and_comes_back_with_nothing_gets_all_of_it_again(
    refit: StoreRefit, server: S3Server
) -> None:
    server.close()
    refit.train(0.03)
    refit.publish(1)
    await_fact(lambda: any("tried again" in line for line in refit.said), lambda: refit.said)
    server.lose_everything()
    refit.take(1)
    assert not refit.verdict().differing
    refit.start_engine("rollout-0")  # what it needs was lost
    refit.take(1, "rollout-0")
    assert not refit.verdict().differing


def test_a_run_through_s3_is_the_run_without(server: S3Server, other_host: tuple[str, ...], tmp_path: Path) -> None:
    """Beside it the server stops answering for some seconds, and a part of each trainer is deleted."""
    config: dict[str, Any] = merged(CONFIG, {**ENVIRONMENT, "cluster": {"trainers": 2}})
    for name in ("alone", "stored"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "held.py").write_text(HELD)
    alone = undisturbed_run(tmp_path / "alone", config)
    hold(33, tmp_path / "stored")
    over = merged(config, {"refit": {"store": URL}})
    with in_folder(tmp_path / "stored"), on_two_hosts(over, other_host) as (run, engines, _):
        await_hold(run, "step 2/")
        for path in server.files.find(BUCKET):
            if "/parts/" in path:
                server.files.rm_file(path)
        server.pause()
        go_on()
        log = Path("run/logs/trainer-0.log")
        wait_until(lambda: "tried again" in log.read_text(), log.read_text)
        server.go_on()
        assert run.wait() == 0, run.output()
        assert [engine.wait() for engine in engines] == [0]
        assert_same_results("run", alone)
        assert len(refits_of()) > 10
    assert server.files.find(BUCKET) == []
