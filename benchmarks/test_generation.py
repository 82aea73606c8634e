"""Is the embedded engine faster than `model.generate` on ragged lengths, same model, same threads, same prompts?

`generate` pads every prompt to the longest and runs until the longest response is done; what it makes beyond a
response's own length is thrown away. Both rates count only the tokens that were asked for.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from matrix_products import MatrixProducts, Products, products_of
from measure import Turns, keep_ratios, seconds_of
from smoke import IS_SMOKE, sized
from torch.nn.functional import scaled_dot_product_attention

from tandem.common.messages import SamplingParameters
from tandem.refit.planner import plan
from tandem.rollout.engine import SequenceRequest
from tandem.rollout.engines.attention import _attend_newest
from tandem.rollout.engines.transformers import TransformersEngine
from tandem.trainer.exposed_weights import weights_of

NUM_PROMPTS = sized(16, 2)
NUM_SAMPLES = sized(8, 2)
VOCABULARY = 512
NUM_THREADS = 1
NUM_PROMPT_TOKENS = 23
"""Of a prompt, in the mean."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        intermediate_size=768,
        vocab_size=VOCABULARY,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.folder = tmp_path_factory.mktemp("model")
    config.save_pretrained(model.folder)
    return model


@pytest.fixture(autouse=True)
def _threads() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(NUM_THREADS)
    yield
    torch.set_num_threads(before)


def make_requests(max_new_tokens_R: list[int]) -> list[SequenceRequest]:
    """One prompt group after the other; prompts of 16 to 30 tokens."""
    generator = np.random.default_rng(0)
    prompts = [tuple(generator.integers(1, VOCABULARY, length).tolist()) for length in range(16, 32)][:NUM_PROMPTS]
    return [
        SequenceRequest(
            request_id=index,
            prompt_ids=prompts[index // NUM_SAMPLES],
            sampling=SamplingParameters(
                temperature=1.0,
                top_p=1.0,
                top_k=0,
                max_new_tokens=max_new_tokens,
                stop_token_ids=(),
                stop_strings=(),
            ),
            seed=index,
        )
        for index, max_new_tokens in enumerate(max_new_tokens_R)
    ]


def make_engine(model: Any) -> TransformersEngine:
    folder: Path = model.folder
    engine = TransformersEngine(
        folder, num_slots=NUM_PROMPTS * NUM_SAMPLES, max_total_sequence_length=128, dtype="float32"
    )
    source = weights_of(dict(model.named_parameters())).layout
    programs = plan({"trainer-0": source}, {"rollout-0": engine.layouts()[0]}, allow_alias=False).programs
    engine.install([programs["rollout-0"]])
    engine.apply(0, 60.0)
    return engine


def run_engine(engine: TransformersEngine, requests: list[SequenceRequest]) -> int:
    for request in requests:
        engine.add_request(request)
    num_tokens = 0
    while engine.num_unfinished:
        num_tokens += sum(len(completion.token_ids_T) for completion in engine.step())
    return num_tokens


def run_generate(model: Any, requests: list[SequenceRequest]) -> None:
    longest_prompt = max(len(request.prompt_ids) for request in requests)
    rows = [[0] * (longest_prompt - len(request.prompt_ids)) + list(request.prompt_ids) for request in requests]
    inputs = torch.tensor(rows)
    longest = max(request.sampling.max_new_tokens for request in requests)
    with torch.inference_mode():
        made = model.generate(
            inputs,
            attention_mask=(inputs != 0).long(),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=longest,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,  # what a trainer needs beside the tokens, as the engine returns log-probabilities
        )
    assert made.sequences.shape == (len(requests), longest_prompt + longest)


def bound_s(model: Any, lengths_R: list[int]) -> float:
    """Return the seconds of the matrix products alone of responses of these lengths."""
    of_model = model.config.to_dict()
    counted: Products = Counter()
    for made in range(max(lengths_R)):
        num = sum(length > made for length in lengths_R)
        counted += products_of(
            of_model, rows=num, outputs=num, sequences=num, queries=1, keys=NUM_PROMPT_TOKENS + made, trains=False
        )
    products = MatrixProducts(counted)
    return float(np.median([seconds_of(products.run) for _ in range(3)]))


def test_ragged_lengths_beat_generate(benchmark: Any, model: Any) -> None:
    lengths_R = np.random.default_rng(1).integers(8, 65, NUM_PROMPTS * NUM_SAMPLES).tolist()
    requests = make_requests(lengths_R)
    engine = make_engine(model)
    assert run_engine(engine, requests) == sum(lengths_R)  # also warms up

    benchmark.pedantic(run_engine, args=(engine, requests), rounds=5)

    generate_seconds = []
    run_generate(model, requests)
    for _ in range(3):
        start = time.perf_counter()
        run_generate(model, requests)
        generate_seconds.append(time.perf_counter() - start)

    seconds = benchmark.stats.stats.median
    generate_rate = sum(lengths_R) / float(np.median(generate_seconds))
    rate = sum(lengths_R) / seconds
    benchmark.extra_info["tokens_per_second"] = round(rate)
    benchmark.extra_info["generate_useful_tokens_per_second"] = round(generate_rate)
    benchmark.extra_info["times_generate"] = round(rate / generate_rate, 2)
    most_rate = sum(lengths_R) / bound_s(model, lengths_R)
    keep_ratios(benchmark, "tokens a second, times transformers' generate", {"tandem": rate / generate_rate}, aim=4.0)
    most = {"matrix products alone": most_rate / generate_rate}
    keep_ratios(benchmark, "the most that tokens a second can be, times transformers' generate", most)
    assert IS_SMOKE or rate > generate_rate


def test_one_training_steps_worth(benchmark: Any, model: Any) -> None:
    requests = make_requests([24] * NUM_PROMPTS * NUM_SAMPLES)
    engine = make_engine(model)
    run_engine(engine, requests)
    num_tokens = benchmark.pedantic(run_engine, args=(engine, requests), rounds=5)
    run_generate(model, requests)
    generate_s = float(np.median([seconds_of(lambda: run_generate(model, requests)) for _ in range(3)]))
    ratio = generate_s / benchmark.stats.stats.median
    keep_ratios(benchmark, "tokens a second, times transformers' generate", {"tandem, equal lengths": ratio})
    assert num_tokens == 24 * NUM_PROMPTS * NUM_SAMPLES
    benchmark.extra_info["tokens_per_second"] = round(num_tokens / benchmark.stats.stats.median)


@pytest.mark.parametrize("num_threads", [1, 2])
def test_attention_of_the_newest_tokens(benchmark: Any, num_threads: int) -> None:
    """The engine's attention of one token a sequence, beside torch's fused one: 128 sequences, two heads of keys."""
    torch.set_num_threads(num_threads)
    num, heads, each, length, head = NUM_PROMPTS * NUM_SAMPLES, 2, 2, 26, 64
    queries = torch.randn(num, heads, each, head)
    layers = [(torch.randn(num, heads, 128, head), torch.randn(num, heads, 128, head)) for _ in range(4)]
    mask = torch.zeros(num, 1, 1, length)

    @torch.inference_mode()
    def attend(by: Callable[..., torch.Tensor]) -> float:
        return seconds_of(lambda: [by(queries, keys[:, :, :length], values[:, :, :length]) for keys, values in layers])

    ways = {
        "tandem": lambda: attend(lambda q, k, v: _attend_newest(q, k, v, mask, None, None)),
        "fused": lambda: attend(lambda q, k, v: scaled_dot_product_attention(q, k, v, attn_mask=mask)),
    }
    turns = Turns(ways)
    benchmark.pedantic(turns.round, rounds=sized(50, 2))
    medians = {way: float(np.median(times)) for way, times in turns.seconds.items()}
    keep_ratios(
        benchmark, "times as fast as fused attention", {"tandem": medians["fused"] / medians["tandem"]}, aim=1.0
    )
