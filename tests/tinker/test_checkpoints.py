"""Saved states are published, downloaded, and given another time to live, by the real SDK and its command line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

from tests.harness.runs.running import TIMEOUT_S
from tests.harness.tinker.server import Served, served

_CLOSE = 1e-5


def test_states_are_published_and_downloaded_and_expire_when_their_owner_says_so() -> None:
    with served() as server:
        found = server.client("managed")
        assert found["gap"] < _CLOSE
        assert found["info"] == "base"
        assert found["states"] == [
            [[False, False], [False, True]],
            [[True, True], [False, False]],
            [[True, False], [True, False]],
        ]
        for name, text in {
            "short": "must be from 3600 to",
            "sampler": "sampler weights are held by engines only",
            "missing": "there are no saved weights",
            "again": "is saved already",
            "age": "age_encryption_recipients: are not served",
            "training": "it must be tinker://MODEL/weights/NAME",
        }.items():
            assert text in found["errors"][name], (name, found["errors"][name])
        paths = found["paths"]
        borrowed = server.client("borrows", *paths, key="another")
        assert borrowed["errors"][:3] == ["", "", ""]
        assert all("only the key that has saved it" in error for error in borrowed["errors"][3:]), borrowed
        assert borrowed["listed"] == 0, "they are listed for their owner"
        _is_downloaded_by_command(server, paths[0])
        _refuses_other_links(server, found["link"])
        assert server.client("withdraws", *paths) == [
            paths[0],
            paths[0].replace("weights/kept", "sampler_weights/held"),
        ]
        status, text = _link(server, urlsplit(found["link"]).path, urlsplit(found["link"]).query)
        assert (status, "have been deleted" in text) == (404, True)
        borrowed = server.client("borrows", *paths, key="another")
        assert all("there are no saved weights" in error for error in borrowed["errors"]), borrowed
    assert {path.name for path in Path("downloaded").iterdir()} >= {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    }


def _is_downloaded_by_command(server: Served, path: str) -> None:
    """Download by the command line of the SDK, which makes weights for it and deletes them then."""
    words = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "tinker.cli",
        "checkpoint",
        "download",
        path,
        "--output",
        "by_command",
    ]
    environment = {**os.environ, "TINKER_API_KEY": server.keys["me"], "TINKER_BASE_URL": server.url}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}\n{server.command.output()}"
    (weights,) = Path("by_command").rglob("model.safetensors")
    assert weights.read_bytes() == Path("downloaded", "model.safetensors").read_bytes()


def _link(server: Served, path: str, query: str) -> tuple[int, str]:
    """Ask for a link, without a key."""
    return server.ask("GET", f"{path.removeprefix('/api/v1/')}?{query}", key=None)


def _refuses_other_links(server: Served, link: str) -> None:
    path, query = urlsplit(link).path, urlsplit(link).query
    assert _link(server, path, query)[0] == 200
    expires, signature = (part.partition("=")[2] for part in query.split("&"))
    for other in (
        f"expires={int(expires) + 1}&signature={signature}",
        f"expires={expires}&signature={signature[:-1]}",
        f"expires={expires}&signature=%ff%00",
        f"signature={signature}",
        "",
    ):
        status, text = _link(server, path, other)
        assert (status, "not one of this server" in text) == (403, True), other
    folder = path.rpartition("/")[0]
    for name in (
        "config.json",
        "tinker.json",
        "../tinker.json",
        "..%2Ftinker.json",
        "%2Fetc%2Fpasswd",
        "a/../../b",
        "",
    ):
        assert _link(server, f"{folder}/{name}", query)[0] in (403, 404), name
    model = path.split("/")[4]
    for checkpoint in (
        "weights/..",
        "weights/../../x",
        "weights/kept/../kept",
        "weights/%2e%2e%2fkept",
        "..",
        "weights",
        "x/y",
    ):
        for what, method in (
            ("publish", "POST"),
            ("publish", "DELETE"),
            ("ttl", "PUT"),
            ("external_weights_urls", "GET"),
        ):
            body = {"ttl_seconds": None} if what == "ttl" else {}
            status, _ = server.ask(method, f"training_runs/{model}/checkpoints/{checkpoint}/{what}", body)
            assert status in (400, 404), (checkpoint, what, status)
        assert server.ask("DELETE", f"training_runs/{model}/checkpoints/{checkpoint}", {})[0] in (400, 404)
    url = f"training_runs/{model}/checkpoints/weights/kept/ttl"
    for body in (b"", b"[]", b'{"ttl_seconds": "x"}', b'{"ttl_seconds": 1e30}', b"{}"):
        assert server.ask("PUT", url, body)[0] in (400, 422), body
    assert server.ask("PUT", url, {"ttl_seconds": 10**12})[0] == 400
    assert server.ask("PUT", url, {"ttl_seconds": None}, key=None)[0] == 401
