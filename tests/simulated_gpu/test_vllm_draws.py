"""How vLLM draws tokens on a GPU: each request by its own seed, and all of them by the same few kernels."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from tests.simulated_gpu.run import IS_RUNNING

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not IS_RUNNING, reason="of simulated GPUs: python tests/simulated_gpu/run.py"),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]
VOCABULARY, MOST_REQUESTS = 8, 400


def _measure() -> dict[str, Any]:
    """Draw in this process, which takes vLLM's environment."""
    from tandem.rollout.engines.vllm import insides

    insides.prepare_environment(1)
    import numpy as np
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

    from tandem.rollout.engines.vllm.worker import TokenDraws

    class Launches(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.num = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            made = func(*args, **(kwargs or {}))
            computes = isinstance(made, torch.Tensor) and made.is_cuda and not func.is_view
            self.num += computes and not func.name().startswith("aten::empty")
            return made

    batch = types.SimpleNamespace(num_tokens_no_spec=np.zeros(MOST_REQUESTS, np.int32))
    device = torch.device("cuda", 0)
    ours = TokenDraws(types.SimpleNamespace(input_batch=batch, device=device, max_num_reqs=MOST_REQUESTS))
    theirs = TopKTopPSampler("processed_logprobs").forward_native
    row_V = torch.linspace(-1.0, 1.5, VOCABULARY)

    def draw(sampler: Any, seeds: list[int], positions: list[int]) -> tuple[list[int], Any, int]:
        batch.num_tokens_no_spec[: len(seeds)] = positions
        generators = {row: torch.Generator(device).manual_seed(seed) for row, seed in enumerate(seeds)}
        logits_BV = row_V.repeat(len(seeds), 1).to(device)
        with Launches() as launches:
            token_ids_B, logprobs_BV = sampler(logits_BV, generators, None, None)
        return token_ids_B.tolist(), logprobs_BV.cpu(), launches.num

    launches = {name: [draw(way, [*range(num)], [0] * num)[2] for num in (2, 9)] for name, way in
                (("ours", ours), ("vLLM's", theirs))}  # fmt: skip
    seeds = [2**64 - 1 - 7 * number for number in range(40)]
    positions = [3 * number for number in range(40)]
    tokens, logprobs, _ = draw(ours, seeds, positions)
    backwards = draw(ours, seeds[::-1], positions[::-1])[0][::-1]
    elsewhere = draw(ours, seeds, [position + 1 for position in positions])[0]
    reseeded = draw(ours, [seed - 1 for seed in seeds], positions)[0]
    half = MOST_REQUESTS // 2
    many = draw(ours, [5] * half + [*range(half)], [*range(half)] + [7] * half)[0]
    counts = np.array([np.bincount(part, minlength=VOCABULARY) for part in (many[:half], many[half:])])
    expected = row_V.softmax(0).numpy() * half
    return {
        "launches": launches,
        "alike": tokens == backwards,
        "moved": [sum(a != b for a, b in zip(tokens, other, strict=True)) for other in (elsewhere, reseeded)],
        "chi_square": ((counts - expected) ** 2 / expected).sum(axis=1).tolist(),
        "logprobs": float((logprobs - row_V.log_softmax(0)).abs().max()),
    }


ROOT = Path(__file__).resolve().parents[2]


def test_requests_draw_by_their_own_seeds_and_all_by_the_same_kernels() -> None:
    command = [sys.executable, "-m", "tests.simulated_gpu.test_vllm_draws"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False, cwd=ROOT)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout.splitlines()[-1])
    print(found)
    few, more = found["launches"]["vLLM's"]
    assert more == few + 7, "one for each request"
    few, more = found["launches"]["ours"]
    assert more == few, "as many for any number of requests"
    assert found["alike"], "a token follows from its request's seed and its position"
    assert min(found["moved"]) > 10, "other positions, and other seeds, have other noise"
    assert max(found["chi_square"]) < 24.3, "99.9 % of samples of the distribution, of 7 degrees of freedom"
    assert found["logprobs"] < 1e-6


if __name__ == "__main__":
    print(json.dumps(_measure()))
