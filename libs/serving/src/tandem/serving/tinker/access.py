"""Access to the front end: API keys, a file with their SHA-256 by owner, and TLS by certificate files."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import re
import secrets
import ssl
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from tandem.common.errors import ConfigError
from tandem.common.files import irregular, replace_file
from tandem.common.keys import refuse_others

PREFIX = "tml-"
"""Begin of every key, which the SDK asks for."""
DEFAULT_FILE = Path("tinker_keys.json")
_MOST_BYTES = 1 << 20
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class TlsCertificate(msgspec.Struct, frozen=True):
    """A certificate, and its private key."""

    certificate: Path
    key: Path


def read_tls(certificate: Path | None, key: Path | None) -> TlsCertificate | None:
    """Return the certificate for HTTPS; None for HTTP. Raises `ConfigError`."""
    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        raise ConfigError("--tls-cert and --tls-key: give both, or neither")
    for option, path in (("--tls-cert", certificate), ("--tls-key", key)):
        if not path.exists():
            raise ConfigError(f"{option} {path}: there is no such file")
        if (kind := irregular(path)) is not None:
            raise ConfigError(f"{option} {path}: it is {kind}, not a file")
    refuse_others(key, os.stat(key))
    try:
        # A password would be asked for on the console, again and again: none is taken.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password="")
    except OSError as error:  # among them those of ssl
        reason = error.reason if isinstance(error, ssl.SSLError) and error.reason else error.strerror
        raise ConfigError(
            f"--tls-cert {certificate} --tls-key {key}: cannot use them ({reason}): they must be a certificate and its "
            "private key, as PEM, the key without a password"
        ) from error
    return TlsCertificate(certificate, key)


class _Kept(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of a key file."""

    keys: dict[str, Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]]


class ApiKeys:
    """The keys that are admitted, none of which is kept itself: those of the file as it is now."""

    def __init__(self, path: Path, hashed: dict[str, str]) -> None:
        self._path = path
        self._hashed = hashed
        self._state: tuple[int, int, int] | None = None

    def owner_of(self, key: str) -> str | None:
        """Return the owner of a key; None if it is none of these."""
        self._read_again()
        digest = hashlib.sha256(key.encode("utf-8", "replace")).hexdigest()
        owners = [name for name, hashed in self._hashed.items() if hmac.compare_digest(hashed, digest)]
        return owners[0] if owners else None

    def _read_again(self) -> None:
        """Read the file if it has changed. One that cannot be read changes nothing."""
        state = _state_of(self._path)
        if state in (None, self._state):
            return
        self._state = state
        with contextlib.suppress(ConfigError):
            key_file = _read(self._path)
            if key_file is not None:
                self._hashed = key_file.keys


def read_keys(path: Path) -> ApiKeys:
    """Read a key file. Raises `ConfigError` if there is none, or if others can read it."""
    key_file = _read(path)
    if key_file is None or not key_file.keys:
        raise ConfigError(f"--keys {path}: there is no key yet; make one: coordinator tinker keys NAME --keys {path}")
    return ApiKeys(path, key_file.keys)


def add_key(path: Path, name: str) -> str:
    """Make a key for `name`, in the place of one that it may have; return it. Raises `ConfigError`."""
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{name!r}: a key's name has letters, digits, '.', '_' and '-', at most 64")
    key_file = _read(path)
    key = PREFIX + secrets.token_urlsafe(32)
    keys = {**({} if key_file is None else key_file.keys), name: hashlib.sha256(key.encode()).hexdigest()}
    text = msgspec.json.format(msgspec.json.encode(_Kept(keys))) + b"\n"
    try:
        replace_file(path, text, is_private=True, is_synced=True)
    except OSError as error:
        raise ConfigError(f"--keys {path}: cannot write it: {error.strerror}") from error
    return key


def _state_of(path: Path) -> tuple[int, int, int] | None:
    """Return what changes with a file's content; None if there is none."""
    try:
        state = path.stat()
    except OSError:
        return None
    return state.st_ino, state.st_mtime_ns, state.st_size


def _read(path: Path) -> _Kept | None:
    if not path.exists():
        return None
    if (kind := irregular(path)) is not None:
        raise ConfigError(f"--keys {path}: it is {kind}, not a file")
    try:
        with path.open("rb") as file:
            refuse_others(path, os.fstat(file.fileno()))
            return msgspec.json.decode(file.read(_MOST_BYTES), type=_Kept)
    except OSError as error:
        raise ConfigError(f"--keys {path}: cannot read it: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"--keys {path}: it is no file of keys: {error}") from error
