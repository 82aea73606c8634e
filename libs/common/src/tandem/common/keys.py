"""The keys of a run, with which its processes and its coordinator authenticate each other.

A run has a key pair for its coordinator and a *joining* pair, which services started by hand read from a key file.
Every process has a pair of its own. A launched process is given one. A process started by hand makes one and
registers it with the joining pair, which has no other use. So a lost process is shut out by its own key, and no
other process with it. If services wait for a new coordinator after the old one is lost, the registered keys are
saved so that the new one admits them.

Keys are Curve25519 keys in ZeroMQ's text form (Z85). Only the owner can read files with secret keys.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shlex
import stat
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from tandem.common.errors import ConfigError, RunFolderError
from tandem.common.files import irregular, replace_file

FOLDER = "keys"
"""Folder of the key files, within the run folder."""
COORDINATOR_FILE, PROCESSES_FILE, ADMITTED_FILE = "coordinator.json", "members.json", "admitted.json"

Key = Annotated[str, Meta(min_length=40, max_length=40)]
"""A key as text."""
_Kept = TypeVar("_Kept")
_MOST_BYTES = 4096
_MOST_BYTES_OF_ADMITTED = 1 << 24


class KeyPair(msgspec.Struct, frozen=True):
    """A public key and the secret one that proves it."""

    public: Key
    secret: Key

    def __repr__(self) -> str:
        return f"KeyPair({self.public!r})"


class ProcessKeys(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The keys that a process needs to join a run and to authenticate its coordinator."""

    coordinator: Key
    """The coordinator's public key."""
    own: KeyPair
    is_joining: bool
    """Whether `own` is the joining pair, which other processes hold too."""


class RunKeys(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The key pairs of a run, as the coordinator holds them."""

    coordinator: KeyPair
    joining: KeyPair

    def for_processes(self) -> ProcessKeys:
        """Return the contents of the key file for services."""
        return ProcessKeys(coordinator=self.coordinator.public, own=self.joining, is_joining=True)


class AdmittedProcesses(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The processes that a coordinator has admitted, saved for the coordinator that resumes its run."""

    address: str
    """Address where the coordinator listens, and where services look for the next one."""
    processes: dict[str, Key] = msgspec.field(name="members")
    """Public keys by process name."""
    departed: tuple[str, ...] = ()
    """Processes that have left and were not replaced."""


def encode(keys: ProcessKeys | RunKeys | AdmittedProcesses) -> bytes:
    """Return keys in the format of a key file."""
    return msgspec.json.format(msgspec.json.encode(keys)) + b"\n"


def decode_process_keys(text: bytes) -> ProcessKeys:
    """Return the keys that the launching coordinator has passed through `encode`."""
    return msgspec.json.decode(text, type=ProcessKeys)


def derive_key(keys: RunKeys, purpose: str) -> bytes:
    """Return a secret of the run for one purpose; it tells nothing of the keys, nor of those for other purposes."""
    return hashlib.blake2b(purpose.encode(), key=keys.coordinator.secret.encode(), digest_size=32).digest()


def find_key_file(run: Path) -> Path:
    """Return the key file of a run, for services that are started by hand."""
    return run.absolute() / FOLDER / PROCESSES_FILE


def read_key_file(path: Path) -> ProcessKeys:
    """Return the keys in a file that the user named. Raises `ConfigError` if other users can read or write it."""
    return _read(path, ProcessKeys, "key file of a run's services")


def read_run_keys(run: Path) -> RunKeys | None:
    """Return the keys of a run, None if it has none yet. Raises `ConfigError` like `read_key_file`."""
    path = run.absolute() / FOLDER / COORDINATOR_FILE
    return _read(path, RunKeys, "key file of a coordinator") if path.exists() else None


def write_run_keys(run: Path, keys: RunKeys) -> Path:
    """Write the keys of a run unless they exist; return the path of the key file for services."""
    folder = run.absolute() / FOLDER
    try:
        folder.mkdir(parents=True, mode=0o700, exist_ok=True)
        _write(folder / COORDINATOR_FILE, encode(keys))
        _write(folder / PROCESSES_FILE, encode(keys.for_processes()))
    except OSError as error:
        raise ConfigError(f"cannot write the run's keys to {folder}: {error.strerror}") from error
    return folder / PROCESSES_FILE


def read_admitted(run: Path) -> AdmittedProcesses | None:
    """Return the processes that the run's lost coordinator had admitted; None if it ended by itself.

    Raises `ConfigError` like `read_key_file`.
    """
    path = run.absolute() / FOLDER / ADMITTED_FILE
    file_kind = "list of a run's processes"
    return _read(path, AdmittedProcesses, file_kind, _MOST_BYTES_OF_ADMITTED) if path.exists() else None


def write_admitted(run: Path, admitted: AdmittedProcesses) -> None:
    """Write atomically which processes the coordinator has admitted. Raises `RunFolderError`."""
    path = run.absolute() / FOLDER / ADMITTED_FILE
    try:
        replace_file(path, encode(admitted), is_private=True, is_synced=True)
    except OSError as error:
        raise RunFolderError(f"cannot write the list of the run's processes to {path}: {error.strerror}") from error


def forget_admitted(run: Path) -> None:
    """Remove the list of admitted processes, so that the next coordinator expects none."""
    with contextlib.suppress(OSError):
        (run.absolute() / FOLDER / ADMITTED_FILE).unlink(missing_ok=True)


def _write(path: Path, text: bytes) -> None:
    """Write a file atomically that only its owner can read; keep one that exists."""
    if not path.exists():
        replace_file(path, text, is_private=True, is_synced=True)


def _read(path: Path, kind: type[_Kept], file_kind: str, most_bytes: int = _MOST_BYTES) -> _Kept:
    try:
        if odd := irregular(path):
            raise ConfigError(f"{path} is {odd}, not a {file_kind}")
        with path.open("rb") as file:
            refuse_others(path, os.fstat(file.fileno()))
            text = file.read(most_bytes)
    except OSError as error:
        raise ConfigError(f"cannot read the {file_kind} {path}: {error.strerror}") from error
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not a {file_kind}: {error}") from error


def refuse_others(path: Path, status: os.stat_result) -> None:
    """Raise `ConfigError` for a file that belongs to another user, or that other users can read or write."""
    mode = stat.S_IMODE(status.st_mode)
    if status.st_uid not in (os.geteuid(), 0):
        raise ConfigError(f"{path} belongs to user {status.st_uid}, not to the current user ({os.geteuid()})")
    if mode & 0o077:
        raise ConfigError(
            f"{path} can be read or changed by others (mode {mode:04o}): chmod 600 {shlex.quote(str(path))}"
        )
