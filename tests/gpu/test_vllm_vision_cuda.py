"""The real vLLM on one GPU with a vision model: it is given pixels, and says what Hugging Face says of them."""

from __future__ import annotations

import importlib.util
import multiprocessing
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from tandem.config.schema.generation import VllmCfg
from tandem.rollout.engines.vllm import insides
from tests.simulated_gpu.run import IS_RUNNING

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here"),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.timeout(900),
]
TEST_S = 800
# Only torch's own attention is computed where the GPU is simulated.
EXTRA: dict[str, Any] = {"mm_encoder_attn_backend": "TORCH_SDPA"} if IS_RUNNING else {}


def look(folder: Path) -> None:
    """Run the test in this process: vLLM takes its environment once a process."""
    insides.prepare_environment(num_threads=1)
    sys.path.append(str(Path(__file__).parents[1] / "unit"))
    from engine_harness import run_all
    from vision_harness import Seeing

    from tandem.rollout.engines.vllm.pictures import SeeingVllmEngine

    seeing = Seeing("qwen2_5_vl", folder)
    settings = VllmCfg(precision="bfloat16", max_model_len=256, gpu_memory_utilization=0.3, enforce_eager=True)
    engine = SeeingVllmEngine(
        seeing.folder,
        settings,
        read_image=seeing.images.get,
        undrawable=seeing.undrawable,
        extra={"max_num_seqs": 4, **EXTRA},
        with_weights=True,
    )
    try:
        images = [seeing.image(48, 40, 1), seeing.image(64, 24, 2)]
        requests = [
            seeing.request(0, "how many?", images[:1], max_new_tokens=4),
            seeing.request(1, "which?", images, max_new_tokens=4),
            seeing.request(2, "nothing to see", max_new_tokens=4),
        ]
        made = run_all(engine, requests)
        for each in requests:
            off = np.abs(made[each.request_id].logprobs_T - seeing.logprobs(each, made[each.request_id].token_ids_T))
            assert off.max() < 0.04, "bfloat16 keeps 8 bits"
        other = msgspec.structs.replace(requests[0], media=(seeing.image(48, 40, 5),))
        assert np.abs(made[0].logprobs_T - seeing.logprobs(other, made[0].token_ids_T)).max() > 0.06
    finally:
        engine.close()


def test_log_probabilities_are_hugging_faces(tmp_path: Path) -> None:
    process = multiprocessing.get_context("spawn").Process(target=look, args=(tmp_path,))
    process.start()
    try:
        process.join(TEST_S)
        assert process.exitcode == 0, "it has said why"
    finally:
        process.kill()
        process.join(30)
