"""A server of the Tinker API with a small model, and clients of it as processes of their own.

The SDK keeps threads and connections for as long as its process lives, so that no test imports it.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM

from tandem.config.schema.policy import NewModel
from tandem.samples.model_files import write_new_model
from tests.harness.runs.running import TIMEOUT_S, TINY, Command, coordinator, merged

MODEL = Path("base")
ROOT = Path(__file__).parents[3]
CONFIG: dict[str, Any] = {
    "policy": {
        "model_name": str(MODEL),
        "precision": "float32",
        "max_total_sequence_length": 32,
        "train_micro_batch_size": 2,
        "logprob_batch_size": 16,
        "generation": {"transformers_cfg": {"num_slots": 16}},
    },
    "logger": {"log_dir": "run", "tensorboard_enabled": False, "page": "off"},
    "cluster": {
        "trainers": 2,
        "rollouts": 1,
        "threads_per_process": 1,
        "heartbeat_interval_s": 0.3,
        "heartbeat_timeout_s": 10.0,
        "deadlines": {"join_s": 60.0, "build_s": 60.0, "generate_s": 60.0, "train_s": 60.0},
    },
}


class Served:
    """A server that answers."""

    def __init__(self, command: Command, url: str, keys: dict[str, str]) -> None:
        self.command = command
        self.url = url
        self.keys = keys
        self.ca: Path | None = None
        """Certificate of the CA that clients trust, if the server has one from it."""

    def start(self, name: str, *arguments: str, key: str = "me") -> subprocess.Popen[str]:
        """Start a client: a function of `tests.harness.tinker.clients`."""
        words = [sys.executable, "-W", "ignore", "-m", "tests.harness.tinker.clients", name, self.url, *arguments]
        environment = {**os.environ, "TINKER_API_KEY": self.keys[key], "TINKER_TELEMETRY": "0"}
        environment |= {} if self.ca is None else {"SSL_CERT_FILE": str(self.ca)}
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        return subprocess.Popen(
            words, env={**environment, "PYTHONPATH": path}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def result_of(self, client: subprocess.Popen[str]) -> Any:
        """Wait for a client, and return what it has found."""
        try:
            out, errors = client.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            client.kill()
            out, errors = client.communicate()
        assert client.returncode == 0, f"{errors}\n{self.command.output()}"
        return json.loads(out.splitlines()[-1])

    def client(self, name: str, *arguments: str, key: str = "me") -> Any:
        """Run a client, and return what it has found."""
        return self.result_of(self.start(name, *arguments, key=key))

    def ask(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None, *, key: str | None = "me"
    ) -> tuple[int, str]:
        """Ask without the SDK; return status and text."""
        parts = urlsplit(self.url)
        connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=TIMEOUT_S)
        given = {"Content-Type": "application/json", **({} if key is None else {"X-API-Key": self.keys[key]})}
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        try:
            connection.request(method, f"/api/v1/{path}", data, {**given, **(headers or {})})
            response = connection.getresponse()
            return response.status, response.read().decode("utf-8", "replace")
        finally:
            connection.close()


@contextlib.contextmanager
def served(
    over: dict[str, Any] | None = None,
    *options: str,
    keys: dict[str, str] | None = None,
    command: str = "coordinator",
) -> Iterator[Served]:
    """Serve a small model with two trainers and an engine; `keys` are those that there are already."""
    if not MODEL.exists():
        write_model()
    Path("tinker.yaml").write_text(yaml.safe_dump(merged(CONFIG, over or {})))
    with serving(Path("tinker.yaml"), *options, keys=keys, command=command) as server:
        yield server


@contextlib.contextmanager
def serving(
    config: Path, *options: str, keys: dict[str, str] | None = None, command: str | Path = "coordinator"
) -> Iterator[Served]:
    """Serve a configuration; without `keys`, a new key each for `me` and `another`.

    A path as the command is a new interpreter.
    """
    keys = keys or {name: coordinator("tinker", "keys", name).stdout.strip() for name in ("me", "another")}
    with Command(command, "tinker", config, "--port", "0", *options) as running:
        url = running.wait_for(r"serving the Tinker API at (https?://\S+?):? ")[1].rstrip(":")
        running.wait_for(r"rollout-0 answers OpenAI's API")
        yield Served(running, url, keys)


def write_model() -> None:
    """Write a small model whose distributions are far from uniform."""
    write_new_model(MODEL, msgspec.convert(TINY["policy"]["new_model"], NewModel))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(MODEL), dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    model.save_pretrained(MODEL)


def write_certificates() -> None:
    """Write the certificate of a new CA, and one of 127.0.0.1 from it with its key."""
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    _openssl("req", "-x509", *key, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=the CA of a test")
    _openssl("req", *key[:-2], "-keyout", "tls.key", "-out", "tls.csr", "-subj", "/CN=a server of a test")
    Path("names").write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\n")
    signed = ["-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "names"]
    _openssl("x509", "-req", "-in", "tls.csr", "-out", "tls.pem", *signed)
    Path("tls.key").chmod(0o600)


def _openssl(*words: str) -> None:
    done = subprocess.run(["openssl", *words], capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr
