"""Key files: whose they must be, and what is said of those that will not do."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
import zmq

from tandem.common.errors import ConfigError, TandemError
from tandem.common.keys import find_key_file, read_key_file, read_run_keys, write_run_keys
from tandem.launch.admission import new_run_keys
from tests.harness.members import RUN


def test_keys_are_written_for_their_owner_alone_and_read_back(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        path = write_run_keys(tmp_path / "run", RUN)
    finally:
        os.umask(before)
    assert path == find_key_file(tmp_path / "run")
    assert read_run_keys(tmp_path / "run") == RUN
    members = read_key_file(path)
    assert members == RUN.for_processes()
    assert RUN.coordinator.secret not in path.read_text(), "services do not have what the coordinator proves itself by"
    folder = path.parent
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {name: stat.S_IMODE((folder / name).stat().st_mode) for name in sorted(os.listdir(folder))} == {
        "coordinator.json": 0o600,
        "members.json": 0o600,
    }


def test_without_curve_there_is_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmq, "has", lambda capability: capability != "curve")
    with pytest.raises(TandemError, match=r"^libzmq \S+ was built without CURVE.*: install pyzmq from its wheel$"):
        new_run_keys()


def test_the_wheels_libzmq_has_curve() -> None:
    assert zmq.has("curve")


def test_keys_that_are_there_stay(tmp_path: Path) -> None:
    path = write_run_keys(tmp_path, RUN)
    written = path.read_bytes()
    write_run_keys(tmp_path, RUN.__class__(coordinator=RUN.joining, joining=RUN.coordinator))
    assert path.read_bytes() == written


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o666])
def test_a_file_that_others_can_read_or_change_is_refused(tmp_path: Path, mode: int) -> None:
    path = write_run_keys(tmp_path, RUN)
    for file in (path, path.with_name("coordinator.json")):
        file.chmod(mode)
    told = rf"members.json can be read or changed by others \(mode {mode:04o}\): chmod 600 {path}$"
    with pytest.raises(ConfigError, match=told):
        read_key_file(path)
    with pytest.raises(ConfigError, match=r"coordinator.json can be read or changed by others"):
        read_run_keys(tmp_path)


def test_a_file_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_run_keys(tmp_path, RUN)
    owner = path.stat().st_uid or 4711
    if os.geteuid() == 0:
        os.chown(path, owner, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(ConfigError, match=rf"members.json belongs to user {owner}, not to the current user"):
        read_key_file(path)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (b"", "is not a key file of a run's services: "),
        (b"\xff", "is not a key file of a run's services: "),
        (b'{"coordinator": "short"}', "is not a key file of a run's services: "),
        (None, "cannot read the key file of a run's services .*: No such file or directory"),
        ("a FIFO", "is a FIFO, not a key file of a run's services"),
    ],
    ids=["empty", "no text", "another", "missing", "a FIFO"],
)
def test_what_is_no_key_file_is_one_line(tmp_path: Path, text: bytes | str | None, what: str) -> None:
    path = tmp_path / "members.json"
    if isinstance(text, bytes):
        path.touch(mode=0o600)
        path.write_bytes(text)
    elif text is not None:
        os.mkfifo(path, 0o600)
    with pytest.raises(ConfigError, match=what) as refused:
        read_key_file(path)
    assert "\n" not in str(refused.value)


def test_the_other_file_of_a_run_is_not_the_one_for_services(tmp_path: Path) -> None:
    write_run_keys(tmp_path, RUN)
    with pytest.raises(ConfigError, match=r"coordinator.json is not a key file of a run's services: ") as refused:
        read_key_file(tmp_path / "keys" / "coordinator.json")
    assert RUN.coordinator.secret not in str(refused.value)
