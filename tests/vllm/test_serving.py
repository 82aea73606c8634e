"""``coordinator serve --engine vllm``: vLLM loads a folder's weights itself and answers OpenAI's client."""

from __future__ import annotations

import base64
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import openai
import psutil
import torch
from serving_harness import EOS, VOCABULARY, write_tokenizer
from tools_harness import check_calls, write_calling_model
from vision_harness import Seeing

from tests.harness.runs.running import Command, all_gone
from tests.vllm.vllm_harness import tiny_model

PROMPT = [72, 105, 33]
IDS: dict[str, Any] = {"return_token_ids": True}


def test_vllm_serves_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "served"
    model = tiny_model("qwen3", folder, vocab_size=VOCABULARY, bos_token_id=256, eos_token_id=EOS)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    words = ["--engine", "vllm", "--max-length", "96", "--max-batch-size", "8", "--port", "0"]
    with Command("coordinator", "serve", folder, *words, f"vllm_kwargs.kv_cache_memory_bytes={2**26}") as server:
        url = server.wait_for(r"serving served at (http://\S+)")[1]
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=120) as client:
            _check_greedy(client, model)
            _check_sampling(client, model)
        everyone = [psutil.Process(server.process.pid), *server.children()]
        server.signal(signal.SIGINT)
        assert server.wait() == 0, server.output()
        assert all_gone(everyone, 20.0) == []


def test_vllm_serves_calls_of_tools(tmp_path: Path) -> None:
    """And streams them with log-probabilities."""
    folder = tmp_path / "caller"
    write_calling_model(folder)
    words = ["--engine", "vllm", "--max-length", "512", "--max-batch-size", "4", "--port", "0"]
    tools = ("--tool-call-parser", "hermes", f"vllm_kwargs.kv_cache_memory_bytes={2**26}")
    with Command("coordinator", "serve", folder, *words, *tools) as server:
        url = server.wait_for(r"serving caller at (http://\S+)")[1]
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=120) as client:
            check_calls(client, "caller")


def test_vllm_answers_questions_about_pictures(tmp_path: Path) -> None:
    seeing = Seeing("qwen2_5_vl", tmp_path)
    images = [seeing.image(48, 40, seed) for seed in range(2)]
    words = ["--engine", "vllm", "--max-length", "256", "--max-batch-size", "4", "--port", "0"]
    with Command("coordinator", "serve", seeing.folder, *words, f"vllm_kwargs.kv_cache_memory_bytes={2**26}") as server:
        url = server.wait_for(r"serving model at (http://\S+)")[1]
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=120) as client:
            for image, other in (images, images[::-1]):
                data = base64.b64encode(seeing.images.get(image.digest)).decode()
                shown = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
                messages: Any = [{"role": "user", "content": [shown, {"type": "text", "text": "How many?"}]}]
                answer = client.chat.completions.create(
                    model="model", messages=messages, seed=3, max_tokens=12, logprobs=True, extra_body=IDS
                )
                (choice,) = answer.choices
                request = seeing.request(0, "", [image])
                request = msgspec.structs.replace(request, prompt_ids=tuple(answer.prompt_token_ids))
                token_ids_T = np.array(choice.token_ids, np.int32)
                found_T = np.array([each.logprob for each in choice.logprobs.content])
                assert np.abs(found_T - seeing.logprobs(request, token_ids_T)).max() < 1e-5
                wrong = msgspec.structs.replace(request, media=(other,))
                assert np.abs(found_T - seeing.logprobs(wrong, token_ids_T)).max() > 0.01


def _check_greedy(client: openai.OpenAI, model: Any) -> None:
    """Tokens are those that Hugging Face makes, streamed or not."""
    prompt = torch.tensor([PROMPT])
    with torch.no_grad():
        made = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=16, do_sample=False)
    expected = made[0, len(PROMPT) :].tolist()
    asked: dict[str, Any] = {"model": "served", "prompt": PROMPT, "temperature": 0, "max_tokens": 16}
    (choice,) = client.completions.create(**asked, extra_body=IDS).choices
    assert choice.token_ids == expected  # type: ignore[attr-defined]
    chunks = [chunk.choices[0] for chunk in client.completions.create(**asked, stream=True, extra_body=IDS)]
    assert [token for chunk in chunks for token in chunk.token_ids] == expected  # type: ignore[attr-defined]
    assert "".join(chunk.text for chunk in chunks) == choice.text


def _check_sampling(client: openai.OpenAI, model: Any) -> None:
    """Seeds repeat, in a batch too, and log-probabilities are those of Hugging Face."""

    def ask(seed: int) -> Any:
        messages: Any = [{"role": "user", "content": "Hi"}]
        return client.chat.completions.create(
            model="served", messages=messages, seed=seed, max_tokens=12, logprobs=True, extra_body=IDS
        )

    alone = [ask(seed) for seed in range(8)]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(ask, range(8)))
    assert [one.choices[0].token_ids for one in together] == [one.choices[0].token_ids for one in alone]
    for one in alone:
        token_ids = one.choices[0].token_ids
        sequence = torch.tensor([[*one.prompt_token_ids, *token_ids]])
        with torch.no_grad():
            logits_TV = model(input_ids=sequence).logits[0, len(one.prompt_token_ids) - 1 : -1]
        expected_T = logits_TV.log_softmax(dim=-1).gather(1, torch.tensor(token_ids)[:, None]).squeeze(1)
        found_T = torch.tensor([each.logprob for each in one.choices[0].logprobs.content])
        assert (found_T - expected_T).abs().max() < 1e-3
