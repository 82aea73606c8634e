"""``coordinator serve`` and ``coordinator chat``, as a user types them: a run's newest checkpoint answers."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import openai
import psutil
import pytest
import torch
import transformers

from tandem.samples.model_files import load_model_tokenizer
from tests.harness.runs.at_terminal import Terminal
from tests.harness.runs.by_hand import undisturbed_run
from tests.harness.runs.running import BIN, TIMEOUT_S, Command, all_gone, wait_until

QUESTION = "1+1="
_FULL = 1 << 14
"""Bytes of a stream that the system keeps for a client that does not read: less than that."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run of two steps, each of which has a checkpoint."""
    return undisturbed_run(
        tmp_path_factory.mktemp("served"), {"grpo": {"max_num_steps": 2}, "checkpointing": {"save_period": 1}}
    )


@pytest.fixture
def answer(trained: Path) -> str:
    """Return what Hugging Face's `generate` says with the newest checkpoint."""
    policy = trained / "checkpoints" / "step_2" / "policy"
    tokenizer = load_model_tokenizer(policy)
    model = transformers.AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    prompt = torch.tensor([tokenizer.encode_chat([{"role": "user", "content": QUESTION}], add_generation_prompt=True)])
    with torch.no_grad():
        made = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=8, do_sample=False)
    return tokenizer.decode(made[0, prompt.shape[1] :].tolist())


@contextlib.contextmanager
def serving(*words: str | Path) -> Iterator[tuple[Command, str]]:
    with Command("coordinator", "serve", *words, "--port", "0") as server:
        yield server, server.wait_for(r"serving \S+ at (http://\S+)/v1")[1]


def ask(url: str, model: str, token: str = "none") -> str:
    with openai.OpenAI(base_url=f"{url}/v1", api_key=token, max_retries=0, timeout=60) as client:
        made = client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": QUESTION}], temperature=0, max_tokens=8
        )
    return made.choices[0].message.content or ""


def complete(url: str, model: str, token: str) -> str:
    with openai.OpenAI(base_url=f"{url}/v1", api_key=token, max_retries=0, timeout=TIMEOUT_S) as client:
        made = client.completions.create(model=model, prompt=QUESTION, temperature=0, max_tokens=8)
    return made.choices[0].text


def test_a_run_is_served_until_ctrl_c_and_talked_to(trained: Path, answer: str) -> None:
    with serving(trained, "--token", "secret", "--max-batch-size", "4") as (server, url):
        assert ask(url, "run-step_2", "secret") == answer
        assert ask(url, str(trained), "secret") == answer
        assert complete(url, "run-step_2", "secret") == answer, "a new model continues a text as it answers it"
        with pytest.raises(openai.AuthenticationError):
            ask(url, "run-step_2")
        example = shlex.split(server.wait_for("try: (curl .*)")[1])
        assert json.loads(example[-1])["model"] == "run-step_2"
        assert example[1] == f"{url}/v1/chat/completions"
        command = [word.replace("TOKEN", "secret") for word in example] + ["--silent", "--fail", "--max-time", "60"]
        suggested = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        assert suggested.returncode == 0, "the model knows the characters of what is suggested"
        assert json.loads(suggested.stdout)["choices"][0]["finish_reason"] in ("stop", "length")
        assert "secret" not in " ".join(psutil.Process(server.process.pid).cmdline()), "others could read it there"
        typed = f"{QUESTION}\nx\n/rest\n/quit\n"
        words = [BIN / "coordinator", "chat", "--url", url, "--token", "secret", "--temperature", "0"]
        chat = subprocess.run(
            [*words, "--max-tokens", "8"], input=typed, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
        assert chat.returncode == 0, chat.stderr
        assert answer in chat.stdout
        assert "talking to run-step_2" in chat.stdout
        assert "does not know the character 'x'" in chat.stderr
        assert "there is no /rest; did you mean '/reset'?" in chat.stderr
        everyone = [psutil.Process(server.process.pid), *server.children()]
        server.signal(signal.SIGINT)
        assert server.wait() == 0, server.output()
        assert "Traceback" not in server.output()
        assert all_gone(everyone, 30.0) == []
    with pytest.raises(openai.APIConnectionError):
        ask(url, "run-step_2")


def test_a_newcomer_is_answered_while_two_hundred_streams_are_not_read(trained: Path) -> None:
    with serving(trained, "--max-length", "30000") as (_, url), contextlib.ExitStack() as stack:
        address = urlsplit(url)
        settings = {"model": "run-step_2", "prompt": QUESTION, "max_tokens": 20_000, "ignore_eos": True, "stream": True}
        body = json.dumps(settings)
        request = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n{body}"
        )
        streams = [stack.enter_context(socket.create_connection((address.hostname, address.port))) for _ in range(200)]
        for stream in streams:
            stream.sendall(request.encode())
        complete(url, "run-step_2", "none")
        num_bytes = [len(stream.recv(_FULL, socket.MSG_PEEK | socket.MSG_DONTWAIT)) for stream in streams]
        assert min(num_bytes) > 0, "all have begun"
        assert max(num_bytes) < _FULL, "none had to fill what the system keeps for its client"


def test_a_chat_at_a_terminal(trained: Path, answer: str) -> None:
    words = ["--temperature", "0", "--max-length", "30000", "--max-batch-size", "1"]
    with Terminal(BIN / "coordinator", "chat", trained / "checkpoints" / "step_2", *words) as terminal:
        terminal.read_until(r"talking to step_2.*\n.*> ")
        children = psutil.Process(terminal.process.pid).children(recursive=True)
        assert len(children) == 1
        # Untrained, it hardly ever ends by itself.
        terminal.type(f"{QUESTION}\n")
        shown = terminal.read_until(rf"{re.escape(QUESTION)}\r\n[^\r]{{{max(len(answer), 1)},}}")
        assert shown.partition("\n")[2].startswith(answer[:4])
        terminal.type("\x03")
        terminal.read_until(r"\(stopped\)\r\n.*> ")
        terminal.type("/reset\n")
        terminal.read_until(r"\(a new conversation\)\r\n.*> ")
        terminal.interrupt_until(r"Ctrl-D or /quit leaves\)\r\n.*> ")
        terminal.type("\x04")
        assert terminal.process.wait(TIMEOUT_S) == 0
        assert all_gone(children, 30.0) == [], "its server has ended with it"


def test_a_chat_that_is_killed_leaves_no_server(trained: Path) -> None:
    with Terminal(BIN / "coordinator", "chat", trained) as terminal:
        terminal.read_until("loading")
        process = psutil.Process(terminal.process.pid)
        wait_until(lambda: bool(process.children()), lambda: "its server to begin")
        children = process.children(recursive=True)
        terminal.process.kill()
        assert all_gone(children, 20.0) == []
