"""The Hugging Face Hub: names of repositories, their commits, and the folders of this node's cache.

A model is a folder, or a name on the Hub: ``org/name``, or ``org/name@revision``. The coordinator resolves a name
once, to a commit. In memory, a configuration names the commit's folder in this node's cache
(`tandem.config.model_names`). In its written form, in the journal and on the wire, it names ``org/name@commit``. So
every reader of a model reads a folder, a resumed run uses the same commit, and each node fetches into its own cache
(`fetch`).

Importing this module imports none of the Hub's libraries.
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from tandem.common.errors import ModelError

Kind = Literal["model", "dataset"]

_SERVER_ERRORS = 500
"""First HTTP status that blames the server: the cache may still have what was asked for."""
_COMMIT = re.compile(r"[0-9a-f]{40}")
_REFERENCE = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*(?:/[\w.-]*[\w-])?)(?:@(?P<revision>[^@\s]+))?")
_SNAPSHOT = re.compile(r"(?P<kind>model|dataset)s--(?P<repo>.+)/snapshots/(?P<commit>[0-9a-f]{40})")
_DESCRIPTION = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken", "additional_chat_templates/*.jinja")
"""Small files that describe a model and its tokenizer."""
_WEIGHTS = "*.safetensors"
"""Weights in other formats are not fetched: they would be unpickled."""
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
"""The file of all weights, or the one that says which files have them: what Transformers looks for."""
_CONSOLIDATED = "consolidated*"
"""A second copy of the weights, in their authors' format."""
_UNFINISHED = re.compile(r"(?P<blob>.+)\.[0-9a-f]{8}\.incomplete")
QUIET_S = 60.0
"""Age of an unfinished file from which nothing writes to it: a download fails after seconds without a byte."""
_LINE_S = 30.0
"""Interval of progress lines while fetching, where no terminal shows a bar."""
_TIMEOUT_S = 5.0
_NAME_S = 10.0
"""Deadline of the first answer, in which looking up the name of the Hub's machine has none of its own."""
_ANSWER_S = 60.0
"""Deadline of the answer to what a repository holds, with the library's own attempts."""
T = TypeVar("T")


class HubReference(msgspec.Struct, frozen=True):
    """A name on the Hub."""

    repo: str
    revision: str | None = None
    """Branch, tag or commit; None for the default branch."""

    def __str__(self) -> str:
        return self.repo if self.revision is None else f"{self.repo}@{self.revision}"

    @property
    def is_pinned(self) -> bool:
        """Whether the revision is a commit."""
        return self.revision is not None and _COMMIT.fullmatch(self.revision) is not None


class RepositorySnapshot(msgspec.Struct, frozen=True):
    """A commit of a repository."""

    repo: str
    commit: str
    sizes: dict[str, int] | None
    """Bytes by file; None if only the cache was read."""
    note: str = ""
    """Note for the user about how the commit was found."""
    why_cached: str = ""
    """Reason that only the cache was read."""


def parse_reference(name: str) -> HubReference | None:
    """Return the name on the Hub that a text can be; None for one that can only be a path."""
    match = _REFERENCE.fullmatch(name)
    return None if match is None else HubReference(match["repo"], match["revision"])


def list_cached_names(kind: Kind = "model") -> list[str]:
    """Return the repositories that this node's cache has anything of."""
    from huggingface_hub import constants

    begin = f"{kind}s--"
    folders = Path(constants.HF_HUB_CACHE).glob(f"{begin}*")
    return sorted(path.name.removeprefix(begin).replace("--", "/") for path in folders)


def call_within(seconds: float, function: Callable[[], T]) -> T:
    """Return what a function does that asks the network. Raise `TimeoutError` if it has not answered by then."""
    answers: list[T] = []
    errors: list[BaseException] = []

    def ask() -> None:
        try:
            answers.append(function())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=ask, name="asking the Hub", daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not answers:
        raise TimeoutError(f"no answer within {seconds:g} s")
    return answers[0]


def find_folder(reference: HubReference, kind: Kind = "model") -> Path:
    """Return the folder of a commit in this node's cache, whether it exists or not."""
    from huggingface_hub import constants

    name = "--".join([f"{kind}s", *reference.repo.split("/")])
    return Path(constants.HF_HUB_CACHE) / name / "snapshots" / str(reference.revision)


def find_cached_name(folder: str) -> HubReference | None:
    """Return the commit of a folder in this node's cache; None for any other folder."""
    if "/snapshots/" not in folder:
        return None
    from huggingface_hub import constants

    with contextlib.suppress(ValueError):
        inside = Path(folder).relative_to(constants.HF_HUB_CACHE)
        if (match := _SNAPSHOT.fullmatch(inside.as_posix())) is not None:
            return HubReference(match["repo"].replace("--", "/"), match["commit"])
    return None


def show_reference(name: str) -> str:
    """Return a model's name as people know it: a commit in the cache by its name on the Hub."""
    reference = find_cached_name(name)
    return name if reference is None else f"{reference.repo}@{str(reference.revision)[:8]}"


def resolve(reference: HubReference, kind: Kind = "model") -> RepositorySnapshot:
    """Ask the Hub for the commit of a revision, or only the cache if the Hub is off limits, unreachable or broken.

    Raises:
        ModelError: there is no such repository or revision, or the Hub cannot be reached and the cache has none.
    """
    from huggingface_hub import constants

    if constants.is_offline_mode():
        return _find_in_cache(reference, kind, "HF_HUB_OFFLINE is set")
    if reason := explain_unreachable():
        return _find_in_cache(reference, kind, reason)
    from huggingface_hub import HfApi

    try:
        with convert_errors(reference, kind):
            ask = functools.partial(HfApi().repo_info, reference.repo, repo_type=kind, revision=reference.revision)
            info: Any = call_within(_ANSWER_S, lambda: ask(files_metadata=True, timeout=30.0))
    except ModelError as error:
        status = getattr(getattr(error.__cause__, "response", None), "status_code", 0)
        if status < _SERVER_ERRORS:
            raise
        return _find_in_cache(reference, kind, f"{constants.ENDPOINT} answers with error {status}")
    sizes = {str(file.rfilename): int(file.size or 0) for file in info.siblings or ()}
    _remember(reference, kind, str(info.sha))
    return RepositorySnapshot(reference.repo, str(info.sha), sizes)


def fetch_whole(name: str, say: Callable[[str], None]) -> Path:
    """Return a model's folder: the folder `name`, or else one fetched from the Hub. Raises `ModelError`."""
    reference = None if Path(name).exists() else find_cached_name(name) or parse_reference(name)
    if reference is None:
        return Path(name)
    if not (reference.is_pinned and is_whole(find_folder(reference))):
        snapshot = resolve(reference)
        fetch(snapshot, say)
        reference = HubReference(snapshot.repo, snapshot.commit)
    return find_folder(reference)


def fetch_described(name: str) -> Path:
    """Return a folder with a model's configuration and tokenizer: the one of that name, or what the Hub has of it.

    Raises `ModelError`.
    """
    reference = None if Path(name).exists() else parse_reference(name)
    if reference is None:
        return Path(name)
    snapshot = resolve(reference)
    fetch_description(snapshot)
    return find_folder(HubReference(snapshot.repo, snapshot.commit))


def fetch_description(snapshot: RepositorySnapshot) -> None:
    """Fetch a model's configuration and tokenizer. Raises `ModelError`."""
    _download(snapshot, list(_DESCRIPTION), shows_bar=False)


def fetch(snapshot: RepositorySnapshot, say: Callable[[str], None]) -> None:
    """Fetch a model's description and its safetensors weights, unless the cache has them.

    Complete files survive an interrupted attempt. A broken connection resumes where it broke, but the unfinished
    file of a killed process starts again, under another name; what the killed one left is removed. If several
    processes fetch the same file, one does and the others wait. Raises `ModelError`.
    """
    reference = HubReference(snapshot.repo, snapshot.commit)
    folder = find_folder(reference)
    remove_unfinished(reference)
    if is_whole(folder):
        return
    if snapshot.sizes is None:
        snapshot = resolve(reference)
    missing_files = find_missing(snapshot)
    num_bytes = sum(missing_files.values())
    say(f"fetching {snapshot.repo} at {snapshot.commit[:8]}: {show_size(num_bytes)} in {len(missing_files)} files")
    fetch_description(snapshot)  # first: its index of the weights tells all of them from some of them
    shows_bar = sys.stderr.isatty()
    with contextlib.nullcontext() if shows_bar else _tell_progress(snapshot, num_bytes, say):
        _download(snapshot, select_needed(snapshot.sizes or {}), shows_bar=shows_bar)
    remove_unfinished(reference)  # of a process that was killed just before this one began
    if not is_whole(folder):
        raise ModelError(f"{snapshot.repo!r}: what was fetched is not whole: {folder} lacks weights")


def remove_unfinished(reference: HubReference, kind: Kind = "model") -> None:
    """Remove the unfinished files that killed processes have left of a repository in the cache.

    The Hub's library writes to a file with a random name, which nothing finds again once the process is killed. A
    process that still writes holds the lock of its file, and has written to it lately.
    """
    from filelock import FileLock, Timeout
    from huggingface_hub import constants

    repository = find_folder(HubReference(reference.repo, "x"), kind).parent.parent
    locks = Path(constants.HF_HUB_CACHE) / ".locks" / repository.name
    for path in repository.glob("blobs/*.incomplete"):
        match = _UNFINISHED.fullmatch(path.name)
        with contextlib.suppress(OSError, Timeout, NotImplementedError):
            if match is not None and time.time() - path.stat().st_mtime >= QUIET_S:
                with FileLock(locks / f"{match['blob']}.lock", timeout=0):
                    path.unlink(missing_ok=True)


def find_missing(snapshot: RepositorySnapshot) -> dict[str, int]:
    """Return the files that the cache lacks of a model that is not whole, with their bytes.

    Raises:
        ModelError: only the cache could be asked, the model has no weights that are read, or the disk no room for them.

    """
    folder = find_folder(HubReference(snapshot.repo, snapshot.commit))
    sizes = snapshot.sizes
    if sizes is None:
        raise ModelError(
            f"{snapshot.repo!r}: the cache of the Hub has not all weights ({folder}), and {snapshot.why_cached}"
        )
    needed_files = select_needed(sizes)
    weights = [name for name in needed_files if fnmatch.fnmatch(name, _WEIGHTS)]
    if not weights:
        other_formats = ", ".join(sorted(name for name in sizes if name.endswith((".bin", ".pt", ".pth", ".gguf"))))
        raise ModelError(
            f"{snapshot.repo!r} has no *.safetensors, and weights in other formats are not read"
            f"{f' (it has {other_formats})' if other_formats else ''}"
        )
    if _INDEX not in needed_files and _SINGLE not in weights:
        raise ModelError(f"{snapshot.repo!r} has neither {_SINGLE} nor {_INDEX} (it has {', '.join(weights)})")
    missing_files = {name: sizes[name] for name in needed_files if not (folder / name).is_file()}
    _refuse_full_disk(snapshot.repo, folder, sum(missing_files.values()))
    return missing_files


def select_needed(sizes: dict[str, int]) -> list[str]:
    """Return the files of a repository to fetch: no weights in other formats, and no duplicates."""
    weights = [name for name in sizes if "/" not in name and fnmatch.fnmatch(name, _WEIGHTS)]
    if any(not fnmatch.fnmatch(name, _CONSOLIDATED) for name in weights):
        weights = [name for name in weights if not fnmatch.fnmatch(name, _CONSOLIDATED)]
    described = [
        name
        for name in sizes
        if any(fnmatch.fnmatch(name, pattern) and name.count("/") == pattern.count("/") for pattern in _DESCRIPTION)
    ]
    return sorted({*weights, *described})


def is_whole(folder: Path) -> bool:
    """Tell whether a folder of the cache has all of a model's weights."""
    if not (folder / "config.json").is_file():
        return False
    index = folder / _INDEX
    if not index.is_file():
        return (folder / _SINGLE).is_file()
    try:
        files = set(msgspec.json.decode(index.read_bytes(), type=dict[str, Any])["weight_map"].values())
    except (OSError, msgspec.MsgspecError, KeyError, AttributeError, TypeError):
        return False
    return all((folder / str(name)).is_file() for name in files)


def is_to_come(folder: Path) -> bool:
    """Tell whether a folder is of a commit whose weights are not fetched yet, or not all of them."""
    return find_cached_name(str(folder)) is not None and not is_whole(folder)


def _remember(reference: HubReference, kind: Kind, commit: str) -> None:
    """Record the current commit of a branch or tag in the cache, like the Hub's library, for use without the Hub."""
    if reference.is_pinned:
        return
    path = find_folder(HubReference(reference.repo, "x"), kind).parent.parent / "refs" / (reference.revision or "main")
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(commit)


def _find_in_cache(reference: HubReference, kind: Kind, reason: str) -> RepositorySnapshot:
    """Return the commit of a revision in the cache."""
    folder = find_folder(HubReference(reference.repo, "x"), kind).parent.parent
    commit = reference.revision or "main"
    if not reference.is_pinned:
        with contextlib.suppress(OSError):
            commit = (folder / "refs" / commit).read_text().strip()
    if _COMMIT.fullmatch(commit) is None or not (folder / "snapshots" / commit).is_dir():
        raise ModelError(f"{str(reference)!r} is not in the cache of the Hub ({folder}), and {reason}")
    note = "" if reference.is_pinned else f"{reference} is taken from the cache, at {commit[:8]}: {reason}"
    return RepositorySnapshot(reference.repo, commit, None, note, reason)


def _download(snapshot: RepositorySnapshot, files: list[str], *, shows_bar: bool) -> None:
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.utils.tqdm import disable_progress_bars, enable_progress_bars

    if not shows_bar:
        disable_progress_bars()
    try:
        with convert_errors(HubReference(snapshot.repo, snapshot.commit), "model"):
            snapshot_download(
                snapshot.repo,
                revision=snapshot.commit,
                allow_patterns=files,
                local_files_only=bool(constants.is_offline_mode()),
            )
    finally:
        if not shows_bar:
            enable_progress_bars()


@contextlib.contextmanager
def _tell_progress(snapshot: RepositorySnapshot, num_bytes: int, say: Callable[[str], None]) -> Iterator[None]:
    """Report progress from time to time."""
    blobs = find_folder(HubReference(snapshot.repo, snapshot.commit)).parent.parent / "blobs"
    is_done = threading.Event()

    def tell() -> None:
        while not is_done.wait(_LINE_S):
            with contextlib.suppress(OSError):
                num_fetched = sum(path.stat().st_size for path in blobs.iterdir())
                say(f"fetching {snapshot.repo}: {show_size(min(num_fetched, num_bytes))} of {show_size(num_bytes)}")

    thread = threading.Thread(target=tell, name="fetching", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_done.set()
        thread.join()


@contextlib.contextmanager
def convert_errors(reference: HubReference, kind: Kind, doing: str = "fetching it from") -> Iterator[None]:
    """Convert errors of the Hub's libraries to a `ModelError` of one line; `doing` goes before the Hub's address."""
    from huggingface_hub import constants, errors

    kind_name = "data set" if kind == "dataset" else "model"
    endpoint = constants.ENDPOINT
    try:
        yield
    except errors.GatedRepoError as error:
        raise ModelError(
            f"{reference.repo!r} is gated: accept its terms at {endpoint}/{reference.repo}, and set HF_TOKEN to a "
            "token of the account that did"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ModelError(
            f"there is no {kind_name} {reference.repo!r} on {endpoint}, or it is private and HF_TOKEN is not a token "
            "that may read it"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ModelError(f"{reference.repo!r} has no branch, tag or commit {reference.revision!r}") from error
    except OSError as error:  # a full disk, or a refused, lost or slow connection
        raise ModelError(f"{reference}: {doing} {endpoint} failed: {_summarize(error)}") from error
    except Exception as error:  # the underlying libraries raise errors of their own
        raise ModelError(f"{reference}: {endpoint} answered with an error: {_summarize(error)}") from error


def _summarize(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}{f': {error.filename}' if error.filename else ''}"
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def _refuse_full_disk(repo: str, folder: Path, num_bytes: int) -> None:
    existing_folder = next(parent for parent in folder.parents if parent.is_dir())
    free = shutil.disk_usage(existing_folder).free
    if num_bytes > free:
        raise ModelError(
            f"{repo!r} needs {show_size(num_bytes)}, but {existing_folder} has only {show_size(free)} free "
            "(set HF_HOME to another folder)"
        )


def show_size(num_bytes: int) -> str:
    """Return a number of bytes in a readable unit."""
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.2f} MB"


def is_offline() -> bool:
    """Tell whether the user has forbidden access to the Hub (``HF_HUB_OFFLINE``)."""
    from huggingface_hub import constants

    return bool(constants.is_offline_mode())


def explain_unreachable() -> str:
    """Return why the Hub, or the mirror in ``HF_ENDPOINT``, cannot be reached; empty if it answers.

    Also empty if the user has forbidden access (``HF_HUB_OFFLINE``), which the library reports itself.
    """
    import http.client  # on use, as all of these: every process of a run imports this module
    import ssl
    import urllib.error
    import urllib.request

    from huggingface_hub import constants

    if constants.is_offline_mode():
        return ""
    try:
        request = urllib.request.Request(constants.ENDPOINT, method="HEAD")
        call_within(_NAME_S, lambda: urllib.request.urlopen(request, timeout=_TIMEOUT_S).close())
    except urllib.error.HTTPError as error:
        error.close()  # even an error is an answer
    except urllib.error.URLError as error:
        if isinstance(error.reason, ssl.SSLError):
            return ""  # the Hub is there; the library may know certificates that Python does not
        reason = error.reason.strerror if isinstance(error.reason, OSError) else error.reason
        return f"{constants.ENDPOINT} cannot be reached ({reason or error.reason})"
    except (OSError, http.client.HTTPException) as error:
        return f"{constants.ENDPOINT} cannot be reached ({error})"
    except ValueError:
        return f"HF_ENDPOINT is {constants.ENDPOINT!r}, not an address that begins with https:// or http://"
    return ""


@contextlib.contextmanager
def use_only_the_cache() -> Iterator[None]:
    """Make the data set libraries use only earlier downloads."""
    import datasets
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = before
