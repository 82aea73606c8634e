"""Models that see, by the real vLLM: what they say of pictures is what Hugging Face says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_harness import run_all
from vision_harness import Seeing

from tandem.config.models.families import VLLM_SEEING
from tandem.rollout.engine import Completion, Request
from tests.vllm.vision_harness_vllm import seeing_engine
from tests.vllm.vllm_harness import refit

TOLERANCE = 1e-5


def apart(seeing: Seeing, requests: list[Request], finished: dict[int, Completion], model: Any = None) -> float:
    """Return how far log-probabilities are from Hugging Face's, at most."""
    worst = 0.0
    for request in requests:
        made = finished[request.request_id]
        expected_T = seeing.logprobs(request, made.token_ids_T, model=model)
        worst = max(worst, float(np.abs(made.logprobs_T - expected_T).max()))
    return worst


@pytest.mark.parametrize("family", VLLM_SEEING)
def test_logprobs_match_a_forward_over_the_whole_sequence(family: str, tmp_path: Path) -> None:
    seeing = Seeing(family, tmp_path)
    first, second, wide = seeing.image(48, 40, 1), seeing.image(48, 40, 2), seeing.image(64, 24, 3)
    requests = [
        *(seeing.request(number, "how many?", [first], max_new_tokens=4 + number) for number in range(4)),
        seeing.request(4, "how many?", [second]),
        seeing.request(5, "no picture at all", max_new_tokens=5),
        seeing.request(6, "which is wider?", [wide, first], temperature=0.8),
        seeing.request(7, "and now?", [first, first, second], temperature=1.3),
        seeing.request(8, "hello"),
    ]
    with seeing_engine(seeing) as engine:
        refit(engine, seeing.model, 0)
        finished = run_all(engine, requests)
        print(family, apart(seeing, requests, finished))
        assert apart(seeing, requests, finished) < TOLERANCE
