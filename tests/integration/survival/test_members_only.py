"""A live run among strangers: its sockets, its processes, its wire and its key files."""

from __future__ import annotations

import contextlib
import re
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tandem.common.keys import find_key_file, read_run_keys, write_run_keys
from tandem.common.messages import PROTOCOL_VERSION, FetchSamples, Hello, Listener
from tandem.common.wire import encode
from tandem.launch.admission import new_run_keys
from tests.harness.runs.by_hand import in_folder
from tests.harness.runs.running import Command, coordinator, joins, processes_of, titled, typed, write_config
from tests.harness.strangers import KINDS, Stranger, Tap

ENDLESS: dict[str, Any] = {
    "grpo": {"max_num_steps": 100_000, "val_period": 0},
    "cluster": {"launch": {"trainers": 1, "refit": True}},
    "checkpointing": {"enabled": False},
}
MARK = "a word that no message but the configuration has"


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Command, str, Tap, Path]]:
    """A run that goes on; its engine is started by hand, and what crosses its link is kept."""
    with in_folder(tmp_path_factory.mktemp("live")), contextlib.ExitStack() as stack:
        folder = Path.cwd()
        over = ENDLESS | {"logger": {"wandb": {"name": MARK}}}
        run = stack.enter_context(Command("coordinator", "up", write_config(over)))
        address = run.wait_for(r"listens on (tcp://\S+)")[1]
        said = run.wait_for(r"to be started by hand: (rollout --coordinator \S+ --key-file (\S+))")
        assert said[1].split() == ["rollout", *joins(address)]
        tap = Tap(int(address.rpartition(":")[2]))
        stack.callback(tap.close)
        rollout = stack.enter_context(Command("rollout", *joins(tap.address)))
        run.wait_for("step 2/")
        yield run, address, tap, folder
        run.signal(signal.SIGINT)
        assert run.wait() == 130, run.output()
        assert rollout.wait() == 0, rollout.output()


def processes(run: Command) -> list[psutil.Process]:
    return [psutil.Process(run.process.pid), *run.children()]


def test_no_process_shows_a_key(live: tuple[Command, str, Tap, Path]) -> None:
    run, address, _, folder = live
    keys = read_run_keys(folder / "run")
    assert keys is not None
    secrets = [keys.coordinator.secret, keys.joining.secret, keys.joining.public, "launch-id"]
    for process in processes(run):
        with contextlib.suppress(psutil.NoSuchProcess):
            shown = " ".join([*process.cmdline(), *(f"{k}={v}" for k, v in process.environ().items())])
            assert [secret for secret in secrets if secret in shown] == []
    for kind in ("trainer", "refit"):
        (process,) = processes_of(run, kind)
        title = " ".join(process.cmdline()).strip()
        assert title.startswith(f"{kind} --coordinator tcp://127.0.0.1:"), title
        whole = f"{kind} --coordinator {address} --launched-by {run.process.pid} --key-fd "
        assert whole.startswith(title) or re.fullmatch(rf"{re.escape(whole)}\d+", title), title


def test_all_that_listens_is_on_loopback_and_answers_no_stranger(live: tuple[Command, str, Tap, Path]) -> None:
    run, address, _, folder = live
    keys = read_run_keys(folder / "run")
    assert keys is not None
    ours = psutil.Process().children(recursive=True)
    rollouts = titled(ours, "rollout --coordinator")
    assert len(rollouts) == 1
    found = {
        connection.laddr
        for process in (*processes(run), *rollouts)
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }
    assert {at.ip for at in found} == {"127.0.0.1"}
    ports = {at.port for at in found}
    assert int(address.rpartition(":")[2]) in ports
    assert len(ports) >= 2, "the coordinator and the samples, at least"
    hello = Hello(protocol_version=PROTOCOL_VERSION, service="rollout", host="here", pid=1)
    with contextlib.ExitStack() as stack:
        those = []
        for port in ports:
            for kind in KINDS:
                at = Listener(address=f"tcp://127.0.0.1:{port}", public_key=keys.coordinator.public)
                those.append(stranger := Stranger(kind, at))
                stack.callback(stranger.close)
                stranger.say(encode(hello))
                stranger.say(encode(FetchSamples(run_id="run", request_id=1, keys=((1, 0, 0, 0),))))
        with in_folder(folder):
            step = int(re.findall(r"step (\d+)/", run.output())[-1])
            run.wait_for(rf"step {step + 5}/")
        assert not any(stranger.heard() for stranger in those)


def test_a_plain_socket_is_told_nothing_but_the_greeting(live: tuple[Command, str, Tap, Path]) -> None:
    _, address, _, _ = live
    with socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2]))) as plain:
        plain.settimeout(20.0)
        plain.sendall(b"GET / HTTP/1.0\r\n\r\n" * 100)
        came = b""
        with contextlib.suppress(OSError):
            while more := plain.recv(4096):
                came += more
    assert len(came) <= 64, "ZMTP's greeting: a signature, its version, the mechanism"


def test_the_wire_carries_no_configuration_that_can_be_read(live: tuple[Command, str, Tap, Path]) -> None:
    _, _, tap, folder = live
    seen = bytes(tap.bytes_)
    assert len(seen) > 10_000, "the configuration, prompts and answers came this way"
    assert b"CURVE" in seen
    (configuration,) = folder.glob("run/config.yaml")
    assert MARK in configuration.read_text()
    for words in (MARK, "digits.Digits", "sums.jsonl", "Welcome", "SamplesFinished", "Heartbeat"):
        assert words.encode() not in seen, words


@pytest.mark.parametrize("what", ["another run's", "readable", "missing"])
def test_a_key_file_that_will_not_do_is_one_line_within_seconds(
    live: tuple[Command, str, Tap, Path], what: str
) -> None:
    _, address, _, folder = live
    own = find_key_file(folder / "run")
    match what:
        case "another run's":
            path = write_run_keys(Path("other"), new_run_keys())
            whose = f"does not prove the coordinator's key that {path} has"
            wanted = f"refit: the process that listens at {address} {whose}"
        case "readable":
            path = Path("readable.json").absolute()
            path.write_bytes(own.read_bytes())
            path.chmod(0o644)
            wanted = f"refit: {path} can be read or changed by others (mode 0644): chmod 600 {path}"
        case _:
            path = Path("missing.json").absolute()
            wanted = f"refit: cannot read the key file of a run's services {path}: No such file or directory"
    with Command("refit", "--coordinator", address, "--key-file", path) as refused:
        assert refused.wait() == 1
    (line,) = (line for line in refused.output().splitlines() if "waiting for" not in line)
    assert line.startswith(wanted), line


def test_without_a_key_file_nothing_begins() -> None:
    ended = typed("rollout", "--coordinator", "tcp://127.0.0.1:9")
    assert ended.returncode == 2
    assert "one of the arguments --key-file" in ended.stderr
    assert "--key-fd" not in typed("rollout", "--help").stdout


def test_keys_made_before_the_run_are_the_runs_also_after_a_restart() -> None:
    config = write_config({"grpo": {"max_num_steps": 1}, "checkpointing": {"enabled": False}})
    made = coordinator("keys", config)
    assert made.returncode == 0, made.stderr
    path = Path(made.stdout.strip())
    before = path.read_bytes()
    assert coordinator("keys", config).stdout == made.stdout
    for how in ([], ["--restart"]):
        ended = coordinator("up", config, *how)
        assert ended.returncode == 0, ended.stderr
        assert path.read_bytes() == before
