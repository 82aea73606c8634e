"""A model sent to the Hugging Face Hub: all of its files in one commit, or none of them.

Importing this module imports none of the Hub's libraries.
"""

from __future__ import annotations

import contextlib
import fnmatch
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from tandem.common.errors import ModelError
from tandem.config.models import hub

_WEIGHTS = ("*.safetensors", "*.safetensors.index.json")
_REFUSED = (401, 403)
"""HTTP statuses that blame the token."""


class PushedCommit(msgspec.Struct, frozen=True, kw_only=True):
    """A commit that a push has made."""

    repo: str
    revision: str
    """Branch."""
    commit: str
    url: str
    num_files: int
    num_bytes: int


def parse_reference_for_push(name: str) -> hub.HubReference:
    """Return the repository and the branch that a name on the Hub means. Raises `ModelError`."""
    reference = hub.parse_reference(name)
    if reference is None or "/" not in reference.repo:
        raise ModelError(f"{name!r} is no name of a repository: expected OWNER/NAME or OWNER/NAME@BRANCH")
    if reference.is_pinned:
        raise ModelError(f"{name!r} names a commit: a push makes a new one, on a branch")
    return reference


def refuse_offline(name: str) -> None:
    """Raise `ModelError` if nothing can be pushed from here, as far as that is known without asking for anything."""
    from huggingface_hub import constants, get_token

    if constants.is_offline_mode():
        raise ModelError(f"{name} was not pushed: HF_HUB_OFFLINE is set")
    if reason := hub.explain_unreachable():
        raise ModelError(f"{name} was not pushed: {reason}")
    if get_token() is None:
        raise ModelError(f"{name} was not pushed: there is no token; set HF_TOKEN to one that may write to it")


def push_model(
    folder: Path, reference: hub.HubReference, message: str, *, is_private: bool, say: Callable[[str], None]
) -> PushedCommit:
    """Make a commit with the files of a model's folder; the repository and the branch are made if they do not exist.

    Weights of an earlier push that this one does not replace are removed by the same commit. Raises `ModelError`.
    """
    files = {path.name: path for path in sorted(folder.iterdir()) if path.is_file() and not path.name.startswith(".")}
    num_bytes = sum(path.stat().st_size for path in files.values())
    branch = reference.revision or "main"
    say(f"pushing {len(files)} files, {hub.show_size(num_bytes)}, to {reference.repo}@{branch}")
    try:
        with hub.convert_errors(reference, "model", "pushing it to"), _bars_on_terminals():
            commit = _commit(files, reference, message, is_private)
    except ModelError as error:
        if getattr(getattr(error.__cause__, "response", None), "status_code", 0) in _REFUSED:
            raise ModelError(f"{reference} was not pushed: HF_TOKEN is not a token that may write to it") from error
        raise
    return PushedCommit(
        repo=reference.repo,
        revision=branch,
        commit=commit.oid,
        url=commit.commit_url,
        num_files=len(files),
        num_bytes=num_bytes,
    )


def _commit(files: Mapping[str, Path], reference: hub.HubReference, message: str, is_private: bool) -> Any:
    """Make the commit, and the repository and branch before it; return the library's description of it."""
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    api, branch = HfApi(), reference.revision or "main"
    api.create_repo(reference.repo, private=is_private or None, exist_ok=True)
    if reference.revision is not None:
        api.create_branch(reference.repo, branch=branch, exist_ok=True)
    siblings = api.model_info(reference.repo, revision=branch).siblings or ()
    remote_names = [sibling.rfilename for sibling in siblings if sibling.rfilename not in files]
    stale = [name for name in remote_names if any(fnmatch.fnmatch(name, pattern) for pattern in _WEIGHTS)]
    operations: list[CommitOperationAdd | CommitOperationDelete] = [
        *(CommitOperationAdd(name, path) for name, path in files.items()),
        *(CommitOperationDelete(name, is_folder=False) for name in stale),
    ]
    return api.create_commit(reference.repo, operations, commit_message=message, revision=branch)


@contextlib.contextmanager
def _bars_on_terminals() -> Iterator[None]:
    """Show the progress bars of the Hub's library on a terminal only."""
    from huggingface_hub.utils.tqdm import disable_progress_bars, enable_progress_bars

    if sys.stderr.isatty():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()
