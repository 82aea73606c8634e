"""Saved states as clients manage them: published, downloaded, and with another time to live.

A download is a link for each file, which needs no key: a secret of this server has signed it, and it holds for an hour.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec

from tandem.serving.tinker import requests
from tandem.serving.tinker.requests import TinkerRefused
from tandem.serving.tinker.states import StateFolder, StateRecord, check_ttl, now

LINKS = "files"
"""Path of the links."""
_LINK_S = 3600.0
_TYPES = {"weights": "training", "external_weights": "external"}


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
