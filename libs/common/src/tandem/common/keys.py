"""The keys of a run: by them its members prove that they are, and its coordinator that it is theirs.

A run has a key pair of its coordinator, and a *joining* pair, which services that are started by hand take from a key
file. Every member has a pair of its own: one that the coordinator launches is given it, one that was started by hand
makes it and has it admitted by means of the joining pair, which serves for nothing else. So a member that is lost is
shut out by its key, and no other with it. Where services wait for another coordinator when theirs is lost, the keys of
those that were admitted are kept, so that the next one hears them.

Keys are Curve25519's, in ZeroMQ's text form (Z85). Files that hold secret ones are their owner's alone.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import stat
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from tandem.common.errors import ConfigError
from tandem.common.regular_files import irregular

FOLDER = "keys"
"""Within the run folder."""
COORDINATOR_FILE, MEMBERS_FILE, ADMITTED_FILE = "coordinator.json", "members.json", "admitted.json"

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


class MemberKeys(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a process needs to be heard by a coordinator, and to know it."""

    coordinator: Key
    """Its public key."""
    own: KeyPair
    is_joining: bool
    """Whether `own` is the joining pair, which others have as well."""


class RunKeys(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the coordinator has."""

    coordinator: KeyPair
    joining: KeyPair

    def for_members(self) -> MemberKeys:
        """Return what the key file for services holds."""
        return MemberKeys(coordinator=self.coordinator.public, own=self.joining, is_joining=True)


class AdmittedMembers(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Whom a coordinator has admitted, for another that goes on with its run when it is lost."""

    address: str
    """Where it listens, and they look for the other one."""
    members: dict[str, Key]
    """Public keys by the names of their owners."""
    departed: tuple[str, ...] = ()
    """Those that have left, and in whose place there is none."""


def encode(keys: MemberKeys | RunKeys | AdmittedMembers) -> bytes:
    """Return keys as a file holds them."""
    return msgspec.json.format(msgspec.json.encode(keys)) + b"\n"


def decode_member_keys(text: bytes) -> MemberKeys:
    """Return what `encode` was given, by the coordinator that has launched this process."""
    return msgspec.json.decode(text, type=MemberKeys)


def key_file(run: Path) -> Path:
    """Return the key file of a run, for services that are started by hand."""
    return run.absolute() / FOLDER / MEMBERS_FILE


def read_key_file(path: Path) -> MemberKeys:
    """Return the keys in a file that was named by hand. Raises `ConfigError` if others may have read or changed it."""
    return _read(path, MemberKeys, "key file of a run's services")


def read_run_keys(run: Path) -> RunKeys | None:
    """Return the keys that a run has, None if it has none yet. Raises `ConfigError`, as `read_key_file` does."""
    path = run.absolute() / FOLDER / COORDINATOR_FILE
    return _read(path, RunKeys, "key file of a coordinator") if path.exists() else None


def write_run_keys(run: Path, keys: RunKeys) -> Path:
    """Write the keys of a run, unless they are there; return the path of those for services."""
    folder = run.absolute() / FOLDER
    try:
        folder.mkdir(parents=True, mode=0o700, exist_ok=True)
        _write(folder / COORDINATOR_FILE, encode(keys))
        _write(folder / MEMBERS_FILE, encode(keys.for_members()))
    except OSError as error:
        raise ConfigError(f"cannot write the run's keys to {folder}: {error.strerror}") from error
    return folder / MEMBERS_FILE


def read_admitted(run: Path) -> AdmittedMembers | None:
    """Return whom the last coordinator of a run had admitted when it was lost, None if it ended by itself.

    Raises `ConfigError`, as `read_key_file` does.
    """
    path = run.absolute() / FOLDER / ADMITTED_FILE
    what = "list of a run's members"
    return _read(path, AdmittedMembers, what, _MOST_BYTES_OF_ADMITTED) if path.exists() else None


def write_admitted(run: Path, admitted: AdmittedMembers) -> None:
    """Write whom a coordinator has admitted, whole or not at all."""
    path = run.absolute() / FOLDER / ADMITTED_FILE
    try:
        _replace(path, encode(admitted))
    except OSError as error:
        raise ConfigError(f"cannot write the list of the run's members to {path}: {error.strerror}") from error


def forget_admitted(run: Path) -> None:
    """Have the next coordinator of a run expect nobody."""
    with contextlib.suppress(OSError):
        (run.absolute() / FOLDER / ADMITTED_FILE).unlink(missing_ok=True)


def _write(path: Path, text: bytes) -> None:
    """Write a file that nobody else may read, whole or not at all; one that is there stays."""
    if not path.exists():
        _replace(path, text)


def _replace(path: Path, text: bytes) -> None:
    written = path.with_name(f".{path.name}.{os.getpid()}")
    written.unlink(missing_ok=True)
    descriptor = os.open(written, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(text)
        file.flush()
        os.fsync(descriptor)
    written.replace(path)


def _read(path: Path, kind: type[_Kept], what: str, most_bytes: int = _MOST_BYTES) -> _Kept:
    try:
        if odd := irregular(path):
            raise ConfigError(f"{path} is {odd}, and no {what}")
        with path.open("rb") as file:
            refuse_others(path, os.fstat(file.fileno()))
            text = file.read(most_bytes)
    except OSError as error:
        raise ConfigError(f"cannot read the {what} {path}: {error.strerror}") from error
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is no {what}: {error}") from error


def refuse_others(path: Path, status: os.stat_result) -> None:
    """Raise `ConfigError` for a file that anyone but its owner can read or write, and for another user's."""
    mode = stat.S_IMODE(status.st_mode)
    if status.st_uid not in (os.geteuid(), 0):
        raise ConfigError(f"{path} belongs to user {status.st_uid}, and not to the one who uses it ({os.geteuid()})")
    if mode & 0o077:
        raise ConfigError(
            f"{path} can be read or changed by others (mode {mode:04o}): chmod 600 {shlex.quote(str(path))}"
        )
