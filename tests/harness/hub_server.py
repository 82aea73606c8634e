"""A Hugging Face Hub on loopback, which the real ``huggingface_hub`` and ``datasets`` talk to.

Repositories have commits, branches and files; a repository may be private or gated, and a connection may break in the
middle of a file. Weights are answered as the Hub answers them: by a redirection to where large files lie.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlparse

TOKEN = "hf_a_token_that_may"
_LARGE = ".safetensors"
_REPO = r"(?P<repo>[^/]+/[^/]+)"


class Repository:
    """One repository: files by commit, and branches."""

    def __init__(self, files: dict[str, bytes], *, is_private: bool = False, is_gated: bool = False) -> None:
        self.commits: dict[str, dict[str, bytes]] = {}
        self.declared: dict[str, int] = {}
        """Bytes that the Hub says files have, where it says more than they do."""
        self.branches: dict[str, str] = {}
        self.is_private, self.is_gated = is_private, is_gated
        self.push(files)

    def push(self, files: dict[str, bytes], branch: str = "main") -> str:
        """Add a commit to a branch; return it."""
        text = repr(sorted((name, hashlib.sha1(data).hexdigest()) for name, data in files.items()))
        commit = hashlib.sha1(f"{branch}{len(self.commits)}{text}".encode()).hexdigest()
        self.commits[commit] = files
        self.branches[branch] = commit
        return commit

    def commit_of(self, revision: str) -> str | None:
        """Return the commit that a revision names."""
        commit = self.branches.get(revision, revision)
        return commit if commit in self.commits else None


class HubServer(ThreadingHTTPServer):
    """The Hub, and what was asked of it."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.begin_anew()

    def begin_anew(self) -> None:
        """Have no repository, and forget what was asked."""
        self.repositories: dict[tuple[str, str], Repository] = {}
        self.requests: list[str] = []
        self.pushed: dict[str, bytes] = {}
        """Large files that clients have sent, by digest."""
        self.messages: list[str] = []
        """Of the commits that clients have made."""
        self.bodies: list[tuple[str, int, int]] = []
        """Of each large file that was sent: its name, and the first and last byte."""
        self.cuts: dict[str, list[int]] = {}
        """By name of a file, after how many bytes the next answers break off."""
        self.connections: set[int] = set()
        """Threads that answer a client, or have not seen yet that it is gone."""
        self.is_broken = False
        """Whether every question is answered with error 503."""
        self.hold: threading.Event | None = None
        """Large files stop in the middle until this is set."""
        self.is_held: Callable[[str], bool] = lambda _: True
        """Whether a large file of this name is among those that stop."""

    @property
    def url(self) -> str:
        """What ``HF_ENDPOINT`` names."""
        return f"http://127.0.0.1:{self.server_port}"

    def add(self, name: str, files: dict[str, bytes], kind: str = "models", **how: bool) -> Repository:
        """Add a repository."""
        return self.repositories.setdefault((kind, name), Repository(files, **how))

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        self.connections.add(threading.get_ident())
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.connections.discard(threading.get_ident())

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of clients that are killed."""


def files_in(folder: Path) -> dict[str, bytes]:
    """Return the files below a folder, by their names in a repository."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@contextmanager
def hub_server() -> Iterator[HubServer]:
    """Serve until the end of the block."""
    server = HubServer()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        if server.hold is not None:
            server.hold.set()
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: HubServer

    def log_message(self, format: str, *args: Any) -> None:
        self.server.requests.append(f"{self.command} {self.path}")

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self._takes_push(content):
            return None
        body = content.decode()
        found = re.fullmatch(rf"/api/(?P<kind>models|datasets)/{_REPO}/paths-info/(?P<revision>.+)", self._path())
        if not found:
            return self._json({})
        files = self._files(found["kind"], found["repo"], found["revision"])
        if files is None:
            return None
        asked = json.loads(body)["paths"] if body.startswith("{") else parse_qs(body).get("paths", [])
        return self._json([_entry(name, files[name]) for name in asked if name in files])

    def do_PUT(self) -> None:
        """Take a large file that is pushed."""
        content = self.rfile.read(int(self.headers["Content-Length"]))
        if self._path() != f"/put/{(digest := hashlib.sha256(content).hexdigest())}":
            return self._error(400, "BadDigest")
        self.server.pushed[digest] = content
        return self._json({})

    def _takes_push(self, content: bytes) -> bool:
        """Answer what a client asks to push a model, as the Hub does; False if that is not what it asks."""
        path = self._path()
        if path == "/api/repos/create":
            told = json.loads(content)
            name = f"{told['organization']}/{told['name']}"
            if not self._may_write():
                self._error(401, "Unauthorized")
            else:
                status = 409 if ("models", name) in self.server.repositories else 200
                self.server.add(name, {}, is_private=told.get("visibility") == "private")
                self._json({"url": f"{self.server.url}/{name}"}, status)
            return True
        if found := re.fullmatch(rf"/{_REPO}\.git/info/lfs/objects/batch", path):
            asked = json.loads(content)["objects"]
            hrefs = {each["oid"]: f"{self.server.url}/put/{each['oid']}" for each in asked}
            actions = [{**each, "actions": {"upload": {"href": hrefs[each["oid"]]}}} for each in asked]
            self._json({"transfer": "basic", "objects": actions})
            return True
        api = rf"/api/models/{_REPO}"
        if found := re.fullmatch(rf"{api}/branch/(?P<branch>.+)", path):
            repository = self.server.repositories["models", found["repo"]]
            repository.branches.setdefault(found["branch"], repository.branches["main"])
            self._json({})
            return True
        if found := re.fullmatch(rf"{api}/preupload/(?P<branch>.+)", path):
            names = [each["path"] for each in json.loads(content)["files"]]
            modes = {name: "lfs" if name.endswith(_LARGE) else "regular" for name in names}
            told = [{"path": name, "uploadMode": mode, "shouldIgnore": False} for name, mode in modes.items()]
            self._json({"files": told})
            return True
        if found := re.fullmatch(rf"{api}/commit/(?P<branch>.+)", path):
            self._commit_pushed(found["repo"], found["branch"], [json.loads(line) for line in content.splitlines()])
            return True
        return False

    def _may_write(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def _commit_pushed(self, name: str, branch: str, lines: list[dict[str, Any]]) -> None:
        if self.server.is_broken:
            return self._error(503, "Unavailable")
        if not self._may_write():
            return self._error(403, "Forbidden")
        repository = self.server.repositories["models", name]
        files = dict(repository.commits[repository.branches[branch]])
        for line in lines:
            value = line["value"]
            match line["key"]:
                case "header":
                    self.server.messages.append(value["summary"])
                case "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                case "lfsFile":
                    files[value["path"]] = self.server.pushed[value["oid"]]
                case "deletedFile":
                    del files[value["path"]]
        commit = repository.push(files, branch)
        told = {"commitUrl": f"{self.server.url}/{name}/commit/{commit}", "commitOid": commit, "success": True}
        return self._json(told)

    def do_GET(self) -> None:
        path = self._path()
        if path in ("", "/"):
            return self._json({"hub": "loopback"})
        if self.server.is_broken:
            return self._error(503, "Unavailable")
        if found := re.fullmatch(r"/large/(?P<digest>[0-9a-f]{64})/(?P<name>.+)", path):
            return self._large(found["digest"], found["name"])
        api = rf"/api/(?P<kind>models|datasets)/{_REPO}"
        if found := re.fullmatch(rf"{api}(?:/revision/(?P<revision>.+))?", path):
            return self._info(found["kind"], found["repo"], found["revision"] or "main")
        if found := re.fullmatch(rf"{api}/tree/(?P<revision>[^/]+)(?:/(?P<inside>.*))?", path):
            return self._tree(found["kind"], found["repo"], found["revision"], found["inside"] or "")
        if found := re.fullmatch(rf"(?P<kind>/datasets)?/{_REPO}/resolve/(?P<revision>[^/]+)/(?P<name>.+)", path):
            kind = "datasets" if found["kind"] else "models"
            return self._resolve(kind, found["repo"], found["revision"], found["name"])
        return self._error(404, "EntryNotFound")

    def _path(self) -> str:
        return unquote(urlparse(self.path).path)

    def _repository(self, kind: str, name: str, *, reads_files: bool) -> Repository | None:
        repository = self.server.repositories.get((kind, name))
        is_known = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if repository is None or (repository.is_private and not is_known):
            # So says the Hub: who may not see a repository is not told that there is one.
            self._error(404 if is_known else 401, "RepoNotFound")
            return None
        if repository.is_gated and reads_files and not is_known:
            self._error(401, "GatedRepo")
            return None
        return repository

    def _files(self, kind: str, name: str, revision: str, *, reads_files: bool = False) -> dict[str, bytes] | None:
        repository = self._repository(kind, name, reads_files=reads_files)
        if repository is None:
            return None
        commit = repository.commit_of(revision)
        if commit is None:
            self._error(404, "RevisionNotFound")
            return None
        self._commit = commit
        return repository.commits[commit]

    def _info(self, kind: str, name: str, revision: str) -> None:
        files = self._files(kind, name, revision)
        if files is None:
            return
        declared = self.server.repositories[kind, name].declared
        siblings = [{"rfilename": each, "size": declared.get(each, len(data))} for each, data in files.items()]
        day = "2026-01-01T00:00:00.000Z"
        told = {"id": name, "modelId": name, "sha": self._commit, "private": False, "gated": False, "disabled": False}
        told |= {"siblings": siblings, "tags": [], "downloads": 0, "likes": 0, "lastModified": day, "createdAt": day}
        self._json(told)

    def _tree(self, kind: str, name: str, revision: str, inside: str) -> None:
        files = self._files(kind, name, revision)
        if files is None:
            return
        prefix = f"{inside}/" if inside else ""
        is_deep = parse_qs(urlparse(self.path).query).get("recursive", ["false"])[0].lower() in ("true", "1")
        entries = {}
        for each, data in files.items():
            if not each.startswith(prefix):
                continue
            first, _, rest = each.removeprefix(prefix).partition("/")
            if rest:
                entries[prefix + first] = {"type": "directory", "path": prefix + first, "oid": "0" * 40, "size": 0}
            if not rest or is_deep:
                entries[each] = _entry(each, data)
        if prefix and not entries:
            return self._error(404, "EntryNotFound")
        return self._json([*entries.values()])

    def _resolve(self, kind: str, repo: str, revision: str, name: str) -> None:
        files = self._files(kind, repo, revision, reads_files=True)
        if files is None:
            return None
        if name not in files:
            return self._error(404, "EntryNotFound")
        data = files[name]
        if not name.endswith(_LARGE):
            return self._send(data, name, {"ETag": f'"{_digest(name, data)}"', "X-Repo-Commit": self._commit})
        digest = _digest(name, data)
        self.send_response(302)
        for header, value in {
            # Under another name: a client asks the Hub itself about a file that it is redirected to elsewhere.
            "Location": f"http://localhost:{self.server.server_port}/large/{digest}/{name}",
            "X-Linked-Size": str(len(data)),
            "X-Linked-Etag": f'"{digest}"',
            "X-Repo-Commit": self._commit,
            "Content-Length": "0",
        }.items():
            self.send_header(header, value)
        self.end_headers()
        return None

    def _large(self, digest: str, name: str) -> None:
        for repository in self.server.repositories.values():
            for files in repository.commits.values():
                if name in files and _digest(name, files[name]) == digest:
                    return self._send(files[name], name, {"ETag": f'"{digest}"'})
        return self._error(404, "EntryNotFound")

    def _send(self, data: bytes, name: str, headers: dict[str, str], status: int = 200) -> None:
        first = 0
        if asked := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            first, status = int(asked[1]), 206
            headers |= {"Content-Range": f"bytes {first}-{len(data) - 1}/{len(data)}"}
        body = data[first:]
        self.send_response(status)
        for header, value in {**headers, "Accept-Ranges": "bytes", "Content-Length": str(len(body))}.items():
            self.send_header(header, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if name.endswith(_LARGE) or name in self.server.cuts:
            if self.server.cuts.get(name):
                body = body[: self.server.cuts[name].pop(0)]
                self.close_connection = True
            if self.server.hold is not None and self.server.is_held(name):
                half = len(body) // 2
                self.wfile.write(body[:half])
                self.server.bodies.append((name, first, first + half))
                self.server.hold.wait(60.0)
                body, first = body[half:], first + half
            self.server.bodies.append((name, first, first + len(body)))
        self.wfile.write(body)

    def _json(self, value: Any, status: int = 200) -> None:
        self._send(json.dumps(value).encode(), "", {"Content-Type": "application/json"}, status)

    def _error(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()


def _digest(name: str, data: bytes) -> str:
    return (hashlib.sha256 if name.endswith(_LARGE) else hashlib.sha1)(data).hexdigest()


def _entry(name: str, data: bytes) -> dict[str, Any]:
    return {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
