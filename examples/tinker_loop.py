"""GRPO as a loop of one's own, over the Tinker API: a model learns to repeat the digit that it is shown.

coordinator tinker examples/tinker.yaml serves it; TINKER_API_KEY has the key that `coordinator tinker keys me` prints.
"""

from __future__ import annotations

import argparse

import numpy as np
import tinker
from tinker import types

SAMPLES, LENGTH = 16, 4
"""Samples of each prompt, and tokens of each."""


def rewarded(tokens: list[int], right: int) -> float:
    """Return the share of tokens that are right."""
    return tokens.count(right) / LENGTH


def datum(prompt: list[int], sequence: tinker.SampledSequence, advantage: float) -> types.Datum:
    """Return a sample to train on: the prompt's tokens have no advantage."""
    tokens, before = prompt + sequence.tokens, len(prompt) - 1
    assert sequence.logprobs is not None
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": np.array(tokens[1:], dtype=np.int64),
            "logprobs": np.array([0.0] * before + sequence.logprobs, dtype=np.float32),
            "advantages": np.array([0.0] * before + [advantage] * len(sequence.tokens), dtype=np.float32),
        },
    )


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", default="http://127.0.0.1:8010")
    parser.add_argument("--steps", type=int, default=40)
    arguments = parser.parse_args()
    service = tinker.ServiceClient(base_url=arguments.url)
    base_model = service.get_server_capabilities().supported_models[0].model_name
    training = service.create_lora_training_client(base_model, rank=0).result()  # rank 0: all weights
    tokenizer = training.get_tokenizer()
    digits = [tokenizer.encode(digit, add_special_tokens=False)[0] for digit in "0123456789"]
    prompts = [tokenizer.encode(f"{digit}: ", add_special_tokens=False) for digit in "0123456789"]
    params = types.SamplingParams(max_tokens=LENGTH, temperature=1.0, stop=[])
    for step in range(arguments.steps):
        sampling = training.save_weights_and_get_sampling_client().result()
        futures = [sampling.sample(types.ModelInput.from_ints(prompt), SAMPLES, params) for prompt in prompts]
        data, rewards = [], []
        for prompt, right, future in zip(prompts, digits, futures, strict=True):
            sequences = future.result().sequences
            group = np.array([rewarded(sequence.tokens, right) for sequence in sequences])
            rewards += [*group]
            scaled = (group - group.mean()) / (group.std() + 1e-6) / (len(prompts) * SAMPLES * LENGTH)
            data += [datum(prompt, *each) for each in zip(sequences, scaled.tolist(), strict=True)]
        training.forward_backward(data, "importance_sampling")
        training.optim_step(types.AdamParams(learning_rate=5e-3, beta2=0.95, eps=1e-8)).result()
        print(f"step {step}: reward {np.mean(rewards):.3f}", flush=True)
    print(training.save_state("last").result().path)


if __name__ == "__main__":
    main()
