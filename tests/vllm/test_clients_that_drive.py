"""The Tinker API with vLLM as the engine: samples have the log-probabilities of the published weights.

The SDK is not installed here, so that requests are made by hand.
"""

from __future__ import annotations

import http.client
import json
import time
from typing import Any
from urllib.parse import urlsplit

import msgspec
import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tandem.config.schema.policy import NewModel
from tandem.coordinator.tinker.proto import _fields
from tandem.samples.model_files import write_new_model
from tests.harness.runs.running import TIMEOUT_S, TINY, merged
from tests.harness.tinker.server import MODEL, Served, served

_CLOSE = 1e-3
"""vLLM computes attention by other kernels than Transformers."""
_PROMPT = [4, 5, 6, 9, 7]
_VLLM = {
    "policy": {
        "generation": {
            "backend": "vllm",
            "vllm_cfg": {"precision": "float32", "max_model_len": 32},
            "vllm_kwargs": {"kv_cache_memory_bytes": 2**26},
        }
    },
    "cluster": {"trainers": 1, "deadlines": {"build_s": 240.0}},
}
Found = tuple[list[tuple[list[int], list[float]]], list[list[float]]]
_DECAY = {"learning_rate": 0.5, "weight_decay": 0.5}
"""Without a gradient, a step makes all weights smaller, by a quarter."""


def _write_model() -> None:
    over = {"config": {"hidden_size": 64, "head_dim": 32}}
    write_new_model(MODEL, msgspec.convert(merged(TINY["policy"]["new_model"], over), NewModel))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(MODEL), dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    model.save_pretrained(MODEL)


def _ask(server: Served, path: str, body: dict[str, Any]) -> bytes:
    """Ask as the SDK does, again while the run starts; return nothing for a future that takes longer."""
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        status, text = _answer(server, path, body)
        if status != 503 or time.monotonic() > deadline:
            break
        time.sleep(0.2)
    if (status, path) == (408, "retrieve_future"):
        return b""
    assert status == 200, (status, text)
    return text


def _answer(server: Served, path: str, body: dict[str, Any]) -> tuple[int, bytes]:
    parts = urlsplit(server.url)
    connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=TIMEOUT_S)
    headers = {"Content-Type": "application/json", "X-API-Key": server.keys["me"]}
    try:
        connection.request("POST", f"/api/v1/{path}", json.dumps(body), headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def _done(server: Served, path: str, body: dict[str, Any]) -> bytes:
    """Ask, and return the future's result."""
    request_id = json.loads(_ask(server, path, body))["request_id"]
    deadline = time.monotonic() + TIMEOUT_S
    while not (text := _ask(server, "retrieve_future", {"request_id": request_id})):
        assert time.monotonic() < deadline, (path, server.command.output())
    return text


def _samples(server: Served, sampler_id: str) -> Found:
    """Return two samples with their log-probabilities, and the largest ones in the place of each of the prompt's."""
    body = {
        "sampling_session_id": sampler_id,
        "seq_id": 0,
        "num_samples": 2,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": _PROMPT}]},
        "sampling_params": {"max_tokens": 6, "seed": 3, "stop": []},
        "topk_prompt_logprobs": 3,
    }
    samples, likeliest = [], list[list[float]]()
    for number, value in _fields(_done(server, "asample", body)):
        assert isinstance(value, bytes)
        parts = dict(_fields(value))
        if number == 1:
            tokens, logprobs = (np.frombuffer(bytes(parts[at]), dtype) for at, dtype in ((2, "<i4"), (3, "<f4")))
            samples.append((tokens.tolist(), logprobs.tolist()))
        elif number == 3:
            likeliest = np.frombuffer(bytes(parts[2]), "<f4").reshape(-1, 3).tolist()
    return samples, likeliest


def _gap(model: Any, found: Found) -> float:
    """Return how far the log-probabilities are from Transformers'."""
    samples, likeliest = found
    assert [len(tokens) for tokens, _ in samples] == [6, 6]
    worst = 0.0
    for tokens, logprobs in samples:
        with torch.no_grad():
            logits = model(torch.tensor([_PROMPT + tokens])).logits[0]
        own = torch.log_softmax(logits[len(_PROMPT) - 1 : -1], -1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
        worst = max(worst, float((own - torch.tensor(logprobs)).abs().max()))
    largest = torch.log_softmax(logits[: len(_PROMPT) - 1], -1).topk(3).values
    return max(worst, float((largest - torch.tensor(likeliest[1:])).abs().max()))


def test_samples_of_vllm_have_the_log_probabilities_of_the_published_weights() -> None:
    _write_model()
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    with served(_VLLM) as server:
        session_id = json.loads(_ask(server, "create_session", {"sdk_version": "0.38.0"}))["session_id"]
        sampling = {"session_id": session_id, "sampling_session_seq_id": 0, "base_model": MODEL.name}
        base = json.loads(_ask(server, "create_sampling_session", sampling))["sampling_session_id"]
        assert _gap(model, _samples(server, base)) < _CLOSE
        created = {"session_id": session_id, "model_seq_id": 0, "base_model": MODEL.name}
        model_id = json.loads(_done(server, "create_model", created))["model_id"]
        _done(server, "optim_step", {"model_id": model_id, "seq_id": 1, "adam_params": _DECAY})
        published = {"model_id": model_id, "seq_id": 2, "sampling_session_seq_id": 1}
        newest = json.loads(_done(server, "save_weights_for_sampler", published))["sampling_session_id"]
        found = _samples(server, newest)
    assert _gap(model, found) > 100 * _CLOSE, "the step has changed something"
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 1 - _DECAY["learning_rate"] * _DECAY["weight_decay"]
    assert _gap(model, found) < _CLOSE
