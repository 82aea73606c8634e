"""Forked services: what they are given, whose children they are, and what is left when one of the family is killed."""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import psutil
import pytest

from tandem.common.descriptors import wait_to_read
from tandem.common.errors import DeadlineExceeded, ServiceLost
from tandem.launch import fork_server as module
from tandem.launch.child import ForkedChild
from tandem.launch.fork_server import ServiceForkServer

PATIENCE_S = 120.0
SERVICE = """
import json, os, sys, time, weakref
imported_in = os.getpid()

def main(arguments):
    match arguments[0]:
        case "tell":
            here = {"folder": os.getcwd(), "parent": os.getppid(), "imported_here": imported_in == os.getpid()}
            here |= {"arguments": arguments, "argv": sys.argv, "mark": os.environ.get("MARK"), "path": sys.path[0]}
            print(json.dumps(here))
        case "keys":
            with open(int(arguments[-1]), "rb") as file:
                text = file.read().decode()
                paths = ["/proc/self/fd/" + name for name in os.listdir("/proc/self/fd")]
                held = {path: os.readlink(path) for path in paths if os.path.lexists(path)}
                print(json.dumps([arguments[:-1], text, held]), flush=True)
            time.sleep(60)  # its environment is looked at
        case "release":
            weakref.finalize(weakref, print, "its own")
        case "fail":
            raise ValueError("on purpose")
        case "leave":
            sys.exit(7)
        case "wait":
            print("waiting", flush=True)
            time.sleep(60)
    return 3
"""

OWNER = """
import os, time
from tandem.common.curve import new_key_pair
from tandem.common.keys import ProcessKeys, encode
from tandem.launch.fork_server import ServiceForkServer

fork_server = ServiceForkServer(lambda: None, 20.0)
keys = encode(ProcessKeys(coordinator=new_key_pair().public, own=new_key_pair(), is_joining=False))
arguments = ["--coordinator", "tcp://127.0.0.1:1", "--launched-by", str(os.getpid())]
fork_server.start("tandem.refit.cli", arguments, open(os.devnull, "wb"), keys=keys)
print("ready", flush=True)
time.sleep(60)
"""
"""Has a service that looks for its coordinator."""


@pytest.fixture(autouse=True)
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Write a module that can be a service to a folder that only `PYTHONPATH` names; return its name."""
    folder = tmp_path / "modules" / "family"
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    (folder / "member.py").write_text(SERVICE)
    monkeypatch.setenv("PYTHONPATH", str(folder.parent), prepend=os.pathsep)
    return "family.member"


@pytest.fixture
def fork_server() -> Iterator[ServiceForkServer]:
    with ServiceForkServer(lambda: None, PATIENCE_S) as made:
        yield made


def born(fork_server: ServiceForkServer, *words: str) -> tuple[ForkedChild, Path]:
    log = Path(f"{words[0]}.log")
    with log.open("wb") as out:
        return fork_server.start("family.member", words, out), log


def told(fork_server: ServiceForkServer) -> dict[str, object]:
    child, log = born(fork_server, "tell", "a b")
    assert child.wait(PATIENCE_S) == 3
    found: dict[str, object] = json.loads(log.read_text())
    return found


def test_a_child_is_given_what_a_command_would_be(
    fork_server: ServiceForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MARK", "set after the fork_server was made")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert told(fork_server) == {
        "folder": str(tmp_path / "elsewhere"),
        "arguments": ["tell", "a b"],
        "argv": ["member", "tell", "a b"],
        "mark": "set after the fork_server was made",
        "parent": os.getpid(),
        "path": str(tmp_path / "modules"),
        "imported_here": True,
    }


def test_keys_come_by_a_descriptor_and_by_nothing_else(fork_server: ServiceForkServer) -> None:
    for text in ("the keys of one", "those of another"):
        with Path("keys.log").open("wb") as out:
            child = fork_server.start("family.member", ["keys"], out, keys=text.encode())
        while not (said := Path("keys.log").read_text()).endswith("\n"):
            assert child.poll() is None
            time.sleep(0.01)
        assert text not in Path(f"/proc/{child.pid}/environ").read_text(errors="replace")
        child.kill()
        child.wait(PATIENCE_S)
        words, found, held = json.loads(said)
        assert words == ["keys", "--key-fd"]
        assert found == text
        assert len(held) <= 5, f"three streams, and the keys: {held}"


def test_what_was_imported_before_is_not_imported_again(tmp_path: Path) -> None:
    def preload() -> None:
        sys.path.append(str(tmp_path / "modules"))
        importlib.import_module("family.member")
        raise ImportError("what is missing is for the service to report")

    with ServiceForkServer(preload, PATIENCE_S) as made:
        assert told(made)["imported_here"] is False


def test_it_releases_what_it_has_made_and_nothing_that_was_imported_before() -> None:
    def preload() -> None:
        weakref.finalize(weakref, lambda: print("imported", flush=True))

    with ServiceForkServer(preload, PATIENCE_S) as made:
        child, out = born(made, "release")
        assert child.wait(PATIENCE_S) == 3
    assert out.read_text() == "its own\n"


def test_an_import_that_begins_to_use_a_gpu_is_undone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_GPU_MEMORY", str(tmp_path / "gpu"))

    def preload() -> None:
        sys.path.append(str(tmp_path / "modules"))
        importlib.import_module("family.member")
        os.open(tmp_path / "gpu", os.O_RDWR | os.O_CREAT)

    with ServiceForkServer(preload, PATIENCE_S) as made:
        assert told(made)["imported_here"] is True


@pytest.mark.parametrize(("word", "code", "says"), [("fail", 1, "ValueError: on purpose"), ("leave", 7, "")])
def test_how_it_ends_is_known(fork_server: ServiceForkServer, word: str, code: int, says: str) -> None:
    child, log = born(fork_server, word)
    assert child.wait(PATIENCE_S) == code
    assert says in log.read_text()


def test_a_module_that_is_not_there_is_named_in_the_log(fork_server: ServiceForkServer) -> None:
    with Path("log").open("wb") as out:
        child = fork_server.start("family.stranger", [], out)
    assert child.wait(PATIENCE_S) == 1
    assert "No module named 'family.stranger'" in Path("log").read_text()


def test_a_child_that_is_killed_tells_by_what(fork_server: ServiceForkServer) -> None:
    child, log = born(fork_server, "wait")
    while not log.read_text():
        time.sleep(0.01)
    assert child.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        child.wait(0.02)
    child.kill()
    assert child.wait(PATIENCE_S) == -signal.SIGKILL
    child.send_signal(signal.SIGTERM)  # does nothing to whoever has its number now


def test_who_does_not_heed_signals_goes_on_from_its_first_moment_on_and_so_does_what_forks() -> None:
    before = set(psutil.Process().children())
    with ServiceForkServer(lambda: None, PATIENCE_S) as fork_server:
        (forking,) = set(psutil.Process().children()) - before
        for number, heeds_signals in product((signal.SIGINT, signal.SIGTERM, signal.SIGHUP), (True, False)):
            told(fork_server)  # so that it is there
            forking.send_signal(number)
            with Path("wait.log").open("wb") as out:
                child = fork_server.start("family.member", ["wait"], out, heeds_signals=heeds_signals)
            while heeds_signals and not Path("wait.log").read_text():
                time.sleep(0.01)
            child.send_signal(number)
            if heeds_signals:
                assert child.wait(PATIENCE_S) == (1 if number == signal.SIGINT else -number)
            else:
                with pytest.raises(subprocess.TimeoutExpired):
                    child.wait(0.3)
                child.kill()
                assert child.wait(PATIENCE_S) == -signal.SIGKILL
        assert forking.is_running()


def test_children_live_on_and_others_are_born_after_the_server_was_killed() -> None:
    before = set(psutil.Process().children())
    with ServiceForkServer(lambda: None, PATIENCE_S) as fork_server:
        (forking,) = set(psutil.Process().children()) - before
        child, _ = born(fork_server, "wait")
        forking.kill()
        assert told(fork_server)["parent"] == os.getpid()
        assert child.poll() is None
        child.kill()
        child.wait(PATIENCE_S)


def test_others_are_born_after_the_server_was_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who was there before, and hangs, is waited for no longer than a fork takes, and ended."""
    monkeypatch.setattr(module, "_FORK_S", 0.5)
    before = set(psutil.Process().children())
    with ServiceForkServer(lambda: None, PATIENCE_S) as fork_server:
        (forking,) = set(psutil.Process().children()) - before
        told(fork_server)
        forking.suspend()
        assert told(fork_server)["parent"] == os.getpid()
        assert not forking.is_running()


def test_a_server_that_is_stopped_while_it_imports_is_replaced() -> None:
    before = set(psutil.Process().children())
    with ServiceForkServer(lambda: None, 4.0) as fork_server:
        (forking,) = set(psutil.Process().children()) - before
        forking.suspend()
        assert told(fork_server)["parent"] == os.getpid()
        assert not forking.is_running()


def test_a_process_that_was_forked_late_is_not_started_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(psutil.Process().children())
    with ServiceForkServer(lambda: None, PATIENCE_S) as fork_server:
        (forking,) = set(psutil.Process().children()) - before
        told(fork_server)
        monkeypatch.setattr(module, "_FORK_S", 0.2)
        forking.suspend()

        def fork_late() -> None:
            time.sleep(0.3)
            forking.resume()
            assert wait_to_read(fork_server._orders, PATIENCE_S)

        with fork_server.call_meanwhile(fork_late):
            child, log = born(fork_server, "wait")
        while "waiting" not in log.read_text():
            assert child.poll() is None
            time.sleep(0.01)
        assert not forking.is_running(), "it may be late again"
        monkeypatch.setattr(module, "_FORK_S", PATIENCE_S)
        assert told(fork_server)["parent"] == os.getpid()
        assert log.read_text() == "waiting\n", "once"
        child.kill()
        child.wait(PATIENCE_S)


def test_something_else_is_done_while_it_imports(tmp_path: Path) -> None:
    """As the coordinator tells its services that it is there. The import ends once that has been done four times."""
    enough, times = tmp_path / "enough", list[float]()

    def preload() -> None:
        while not enough.exists():
            time.sleep(0.01)

    def call() -> None:
        times.append(time.monotonic())
        if len(times) > 3:
            enough.touch()

    with ServiceForkServer(preload, PATIENCE_S) as fork_server, fork_server.call_meanwhile(call):
        told(fork_server)
    assert len(times) > 3


def test_an_import_that_does_not_end_is_named() -> None:
    with ServiceForkServer(lambda: time.sleep(60), 0.3) as made, pytest.raises(DeadlineExceeded) as caught:
        born(made, "tell")
    assert re.search(r"while importing modules: it did not fork family.member within 0.3 s", str(caught.value))


def test_an_import_has_longer_while_processors_work_for_it() -> None:
    def work(seconds: float) -> None:
        started = time.monotonic()
        while time.monotonic() < started + seconds:
            pass

    with ServiceForkServer(lambda: work(4.5), 3.0) as made:  # more than a processor may stand still
        assert told(made)["parent"] == os.getpid()
    started = time.monotonic()
    with ServiceForkServer(lambda: work(600.0), 0.2) as made, pytest.raises(DeadlineExceeded):
        born(made, "tell")
    assert time.monotonic() - started < 60


def test_an_import_that_kills_is_named() -> None:
    def preload() -> None:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGSEGV)

    with ServiceForkServer(preload, PATIENCE_S) as made, pytest.raises(ServiceLost) as caught:
        born(made, "tell")
    assert "while starting family.member: it ended repeatedly, last with code -11" in str(caught.value)


def test_nothing_holds_what_its_owner_held() -> None:
    read, write = os.pipe()
    with ServiceForkServer(lambda: None, PATIENCE_S) as made:
        child, _ = born(made, "wait")
        os.close(write)
        assert os.read(read, 1) == b""  # which waits for as long as someone could write
        child.kill()
        child.wait(PATIENCE_S)
    os.close(read)


def test_nothing_survives_an_owner_that_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"ready\n"
        family = psutil.Process(owner.pid).children(recursive=True)
        assert len(family) in (2, 3)  # the one that was between them may not be collected yet
        owner.kill()
        assert psutil.wait_procs(family, PATIENCE_S)[1] == []
