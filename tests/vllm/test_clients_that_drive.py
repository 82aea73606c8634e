"""The Tinker API with vLLM as the engine: samples have the log-probabilities of the published weights.

The SDK is not installed here, so that requests are made by hand.
"""

from __future__ import annotations

import http.client
import json
import re
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import numpy as np
import peft
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tandem.config.schema.policy import NewModel
from tandem.samples.model_files import write_new_model
from tandem.serving.tinker.proto import CLASSES
from tests.harness.runs.running import TIMEOUT_S, TINY, merged, process_of
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
    return _result(server, json.loads(_ask(server, path, body))["request_id"])


def _result(server: Served, request_id: str) -> bytes:
    deadline = time.monotonic() + TIMEOUT_S
    while not (text := _ask(server, "retrieve_future", {"request_id": request_id})):
        assert time.monotonic() < deadline, (request_id, server.command.output())
    return text


def _samples(server: Served, sampler_id: str, seq_id: int = 0, num_samples: int = 2) -> Found:
    """Return samples with their log-probabilities, and the largest ones in the place of each of the prompt's."""
    body = _question(sampler_id, seq_id, num_samples)
    return _found(_done(server, "asample", {**body, "topk_prompt_logprobs": 3}))


def _question(sampler_id: str, seq_id: int, num_samples: int) -> dict[str, Any]:
    return {
        "sampling_session_id": sampler_id,
        "seq_id": seq_id,
        "num_samples": num_samples,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": _PROMPT}]},
        "sampling_params": {"max_tokens": 6, "seed": 3, "stop": []},
    }


def _found(answer: bytes) -> Found:
    response = CLASSES["SampleResponse"].FromString(answer)
    samples = [
        (np.frombuffer(each.tokens, "<i4").tolist(), np.frombuffer(each.logprobs, "<f4").tolist())
        for each in response.sequences
    ]
    likeliest = np.frombuffer(response.topk_prompt_logprobs.logprobs, "<f4").reshape(-1, 3).tolist()
    return samples, likeliest


def _gap(model: Any, found: Found) -> float:
    """Return how far the log-probabilities are from Transformers'."""
    samples, likeliest = found
    assert {len(tokens) for tokens, _ in samples} == {6}
    worst = 0.0
    for tokens, logprobs in samples:
        with torch.no_grad():
            logits = model(torch.tensor([_PROMPT + tokens])).logits[0]
        own = torch.log_softmax(logits[len(_PROMPT) - 1 : -1], -1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
        worst = max(worst, float((own - torch.tensor(logprobs)).abs().max()))
    if not likeliest:
        return worst
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


def _write_adapters(folder: Path) -> None:
    """Write adapters of PEFT, none of whose products is zero."""
    layers = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    made = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=8, target_modules=layers))
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "lora_" in name:
                torch.nn.init.normal_(parameter, std=0.2)
    made.save_pretrained(folder)


def _merged(folder: Path, factor: float) -> Any:
    """Return the model with the adapters merged, their matrices multiplied by a factor."""
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    made = peft.PeftModel.from_pretrained(model, folder)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "lora_" in name:
                parameter *= factor
    return made.merge_and_unload()


def _check_same(found: Found, before: Found) -> None:
    """Check that the same tokens were made with the same numbers, whatever else was in the batch."""
    assert [tokens for tokens, _ in found[0]] == [tokens for tokens, _ in before[0]]
    for one, other in ((found[1], before[1]), *((a[1], b[1]) for a, b in zip(found[0], before[0], strict=True))):
        np.testing.assert_allclose(one, other, rtol=0.0, atol=1e-5)


def _num_versions(server: Served) -> int:
    return len(re.findall(r"version \d+ is published", server.command.output()))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("workers", [1, 2])
def test_two_models_are_sampled_together_and_are_back_in_an_engine_that_replaces_a_killed_one(workers: int) -> None:
    _write_model()
    folder = Path("adapters").absolute()
    _write_adapters(folder)
    adapters = {"enabled": True, "dim": 4, "alpha": 8, "restore_from": str(folder)}
    over = {"policy": {"dtensor_cfg": {"lora_cfg": adapters}}}
    sizes = {"policy": {"generation": {"vllm_cfg": {"tensor_parallel_size": workers}}}}
    with served(merged(merged(_VLLM, over), sizes), "--models", "2") as server:
        session_id = json.loads(_ask(server, "create_session", {"sdk_version": "0.38.0"}))["session_id"]
        seq_ids, sessions = [0, 0], [0]

        def create(number: int) -> str:
            asked = {"session_id": session_id, "model_seq_id": number, "base_model": MODEL.name}
            return str(json.loads(_done(server, "create_model", {**asked, "lora_config": {"rank": 4}}))["model_id"])

        models = [create(number) for number in range(2)]

        def do(number: int, call: str, **body: Any) -> Any:
            seq_ids[number] += 1
            return json.loads(_done(server, call, {"model_id": models[number], "seq_id": seq_ids[number], **body}))

        def publish(number: int, num_steps: int) -> str:
            for _ in range(num_steps):
                do(number, "optim_step", adam_params=_DECAY)
            sessions[0] += 1
            made = do(number, "save_weights_for_sampler", sampling_session_seq_id=sessions[0])
            return str(made["sampling_session_id"])

        def together(samplers: list[str], seq_id: int) -> list[Found]:
            asked = [_ask(server, "asample", _question(each, seq_id, 16)) for each in samplers]
            return [_found(_result(server, json.loads(each)["request_id"])) for each in asked]

        samplers = [publish(0, 0), publish(1, 1)]
        smaller = 1 - _DECAY["learning_rate"] * _DECAY["weight_decay"]
        meant = [_merged(folder, 1.0), _merged(folder, smaller)]
        num_versions = _num_versions(server)
        for seq_id in range(3):
            for model, other, found in zip(meant, reversed(meant), together(samplers, seq_id), strict=True):
                assert _gap(model, found) < _CLOSE
                assert _gap(other, found) > 10 * _CLOSE
        assert _num_versions(server) == num_versions, "engines hold both"
        before = _samples(server, samplers[1], 10)
        samplers[0] = publish(0, 2)
        _check_same(_samples(server, samplers[1], 11), before)
        meant[0] = _merged(folder, smaller**2)
        assert _gap(meant[0], _samples(server, samplers[0], 12)) < _CLOSE
        process_of(server.command, "rollout").kill()
        for model, found in zip(meant, together(samplers, 20), strict=True):
            assert _gap(model, found) < _CLOSE
        _check_same(_samples(server, samplers[1], 21), before)
