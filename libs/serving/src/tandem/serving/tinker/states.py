"""Saved states: what ``save_weights`` writes, a folder each, which clients publish and download.

They lie beside the run folder, so that they outlive it: ``FOLDER/MODEL/NAME``. A folder without a record, or with the
suffix of an unfinished one, is none. Weights to be downloaded (``save_weights_external``) are states of their own, in
``FOLDER/external``, of which only the model's files are kept.

A download is a link for each file, which needs no key: a secret of this server has signed it, and it holds for an hour.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import hmac
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

import msgspec

from tandem.common.files import replace_file
from tandem.serving.tinker import requests
from tandem.serving.tinker.requests import TinkerRefused

_RECORD = "tinker.json"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_MODEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")
_PATH = re.compile(r"tinker://([^/]+)/([a-z_]+)/([^/]+)")
_EXTERNAL = "external"
_MODEL_FILES = "policy"
_SHORTEST_TTL_S, _LONGEST_TTL_S = 3600, 10 * 366 * 86400

Kind = Literal["weights", "external_weights"]
LINKS = "files"
"""Path of the links."""
_LINK_S = 3600.0
_TYPES = {"weights": "training", "external_weights": "external"}


class StateRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The record of a state."""

    owner: str
    model_id: str
    name: str
    base_model: str
    lora_rank: int | None
    created_at: str
    num_bytes: int
    user_metadata: dict[str, str] | None = None
    expires_at: str | None = None
    """Time after which it is deleted; None for never."""
    kind: Kind = "weights"
    is_public: bool = False
    """Whether all keys may load or download it."""

    @property
    def checkpoint_id(self) -> str:
        """The part of its path after the model."""
        return f"{self.kind}/{self.name}"

    @property
    def path(self) -> str:
        """The path that clients know it by."""
        return f"tinker://{self.model_id}/{self.checkpoint_id}"


class StateFolder:
    """All saved states of a kind."""

    def __init__(self, folder: Path, kind: Kind = "weights") -> None:
        self._folder = folder
        self.kind: Kind = kind

    def external(self) -> StateFolder:
        """Return the weights to be downloaded."""
        return StateFolder(self._folder / _EXTERNAL, "external_weights")

    def folder_for(self, model_id: str, name: str) -> Path:
        """Return the folder of a new state. Raises `TinkerRefused` for a name that makes no folder."""
        if not _NAME.fullmatch(name) or name.endswith(".unfinished"):
            raise TinkerRefused(f"path: {name[:100]!r} must be letters, digits, '.', '_' and '-', at most 128")
        folder = self._folder / model_id
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        leftovers = [folder / f"{name}.unfinished"]
        if not (folder / name / _RECORD).exists():  # a server was killed before it was written
            leftovers.append(folder / name)
        for leftover in leftovers:
            if leftover.exists():
                shutil.rmtree(leftover)
        return folder / name

    def write(self, record: StateRecord) -> None:
        """Note a state whose files are written: from now on it is one."""
        replace_file(self._folder / record.model_id / record.name / _RECORD, msgspec.json.encode(record))

    def find(self, path: str, owner: str) -> tuple[StateRecord, Path]:
        """Return the state that a client names, its own or a published one. Raises `TinkerRefused`."""
        match = _PATH.fullmatch(path)
        if match is None or match[2] != self.kind:
            hint = "sampler weights are held by engines only; load what save_weights has saved"
            reason = hint if "/sampler_weights/" in path else f"it must be tinker://MODEL/{self.kind}/NAME"
            raise TinkerRefused(f"{path[:200]!r}: {reason}")
        state = self._read(match[1], match[3])
        if state is None or not (state[0].owner == owner or state[0].is_public):
            raise TinkerRefused(f"there are no saved weights {path[:200]!r}", 404)
        return state

    def find_own(self, path: str, owner: str) -> tuple[StateRecord, Path]:
        """Return the state of its owner. Raises `TinkerRefused`."""
        state = self.find(path, owner)
        if state[0].owner != owner:
            raise TinkerRefused(f"{path[:200]!r}: only the key that has saved it can change it", 403)
        return state

    def strip(self, model_id: str, name: str) -> int:
        """Delete all but the files of the model, of a state without a record; return their bytes. Raises `OSError`."""
        folder = self._folder / model_id / name
        for entry in folder.iterdir():
            if entry.name != _MODEL_FILES:
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        return sum(file.stat().st_size for file in self.files(folder).values())

    @staticmethod
    def files(folder: Path) -> dict[str, Path]:
        """Return the files of the model in a state, by name."""
        root = folder / _MODEL_FILES
        return {str(path.relative_to(root)): path for path in sorted(root.rglob("*")) if path.is_file()}

    def file(self, model_id: str, name: str, file: str) -> Path | None:
        """Return a file of the model in a state of any owner; None if there is none."""
        state = self._read(model_id, name)
        return None if state is None else self.files(state[1]).get(file)

    def of(self, owner: str, model_id: str | None = None) -> list[StateRecord]:
        """Return the states of an owner, of one model or of all, the newest first."""
        records = [record for record in self._all() if record.owner == owner and model_id in (None, record.model_id)]
        return sorted(records, key=lambda record: record.created_at, reverse=True)

    def delete(self, path: str, owner: str) -> None:
        """Delete a state. Raises `TinkerRefused`."""
        _, folder = self.find_own(path, owner)
        self._remove(folder)

    def _all(self) -> Iterator[StateRecord]:
        for file in self._folder.glob(f"*/*/{_RECORD}"):
            state = self._read(file.parent.parent.name, file.parent.name)
            if state is not None:
                yield state[0]

    def _read(self, model_id: str, name: str) -> tuple[StateRecord, Path] | None:
        if not _MODEL.fullmatch(model_id) or not _NAME.fullmatch(name) or name.endswith(".unfinished"):
            return None
        folder = self._folder / model_id / name
        with contextlib.suppress(OSError, ValueError):  # msgspec's errors are among them
            record = msgspec.json.decode((folder / _RECORD).read_bytes(), type=StateRecord)
            if record.expires_at is None or record.expires_at > now():
                return record, folder
            self._remove(folder)
        return None

    @staticmethod
    def _remove(folder: Path) -> None:
        gone = folder.with_name(f"{folder.name}.unfinished")
        folder.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)


def check_ttl(seconds: int | None) -> None:
    """Raise `TinkerRefused` for a time to live that is too short or too long."""
    if seconds is not None and not _SHORTEST_TTL_S <= seconds <= _LONGEST_TTL_S:
        raise TinkerRefused(f"ttl_seconds: {seconds}, must be from {_SHORTEST_TTL_S} to {_LONGEST_TTL_S}")


def now(after_s: float = 0.0) -> str:
    """Return the time, or one to come, as clients read it."""
    return (datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=after_s)).isoformat(
        timespec="microseconds"
    )


class SavedStates:
    """All saved states, as clients manage them. Methods raise `TinkerRefused`."""

    def __init__(self, states: StateFolder) -> None:
        self._kinds = {each.kind: each for each in (states, states.external())}
        self.external = self._kinds["external_weights"]
        """Weights to be downloaded."""
        self._secret = secrets.token_bytes(32)

    def of(self, owner: str, model_id: str | None) -> list[dict[str, Any]]:
        """List the states of an owner, of one model or of all, each kind the newest first."""
        return [_describe_state(record) for states in self._kinds.values() for record in states.of(owner, model_id)]

    def find(self, path: str, owner: str) -> StateRecord:
        """Return what is known of a state of any kind."""
        kind = path.removeprefix("tinker://").partition("/")[2]
        return self._states(kind).find(path, owner)[0]

    def delete(self, owner: str, model_id: str, checkpoint_id: str) -> None:
        """Delete a state."""
        self._states(checkpoint_id).delete(f"tinker://{model_id}/{checkpoint_id}", owner)

    def publish(self, owner: str, model_id: str, checkpoint_id: str, *, is_public: bool) -> None:
        """Let all keys load or download a state, or no other key any more."""
        self._change(owner, model_id, checkpoint_id, is_public=is_public)

    def set_ttl(self, owner: str, model_id: str, checkpoint_id: str, body: requests.SetTtl) -> None:
        """Delete a state after some time, or never."""
        check_ttl(body.ttl_seconds)
        expires_at = None if body.ttl_seconds is None else now(body.ttl_seconds)
        self._change(owner, model_id, checkpoint_id, expires_at=expires_at)

    def links(self, owner: str, model_id: str, checkpoint_id: str, base_url: str) -> dict[str, Any]:
        """Return a link for each file of weights to be downloaded."""
        record, folder = self.external.find(f"tinker://{model_id}/{checkpoint_id}", owner)
        expires = int(time.time() + _LINK_S)
        urls = {}
        for file in StateFolder.files(folder):
            path = "/".join((record.model_id, record.name, file))
            signed = f"expires={expires}&signature={self._signature(path, str(expires))}"
            urls[file] = f"{base_url}{LINKS}/{quote(path)}?{signed}"
        return {"urls": urls, "expires": now(expires - time.time())}

    def find_linked(self, model_id: str, name: str, file: str, expires: str, signature: str) -> Path:
        """Return the file of a link."""
        expected = self._signature(f"{model_id}/{name}/{file}", expires)
        if not hmac.compare_digest(expected.encode(), signature.encode("utf-8", "replace")):
            raise TinkerRefused("this link is not one of this server, or was made before it was started again", 403)
        if not time.time() <= int(expires):  # as it was signed
            raise TinkerRefused("this link has expired: ask for another", 403)
        file_path = self.external.file(model_id, name, file)
        if file_path is None:
            raise TinkerRefused("these weights have been deleted", 404)
        return file_path

    def _signature(self, path: str, expires: str) -> str:
        return hmac.new(self._secret, f"{path}\n{expires}".encode("utf-8", "replace"), hashlib.sha256).hexdigest()

    def _states(self, checkpoint_id: str) -> StateFolder:
        # What is neither is refused as a state that does not exist.
        return self._kinds["external_weights" if checkpoint_id.startswith("external_weights/") else "weights"]

    def _change(self, owner: str, model_id: str, checkpoint_id: str, **fields: Any) -> None:
        states = self._states(checkpoint_id)
        record, _ = states.find_own(f"tinker://{model_id}/{checkpoint_id}", owner)
        try:
            states.write(msgspec.structs.replace(record, **fields))
        except OSError as error:
            raise TinkerRefused(f"cannot write the state's record: {error.strerror}", 500) from error


def _describe_state(record: StateRecord) -> dict[str, Any]:
    return {
        "checkpoint_id": record.checkpoint_id,
        "checkpoint_type": _TYPES[record.kind],
        "time": record.created_at,
        "tinker_path": record.path,
        "size_bytes": record.num_bytes,
        "public": record.is_public,
        "user_metadata": record.user_metadata,
        "expires_at": record.expires_at,
    }
