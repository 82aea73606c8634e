"""Fields of a model's configuration that a run overrides: both backends, the engine, and the saved policy have them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from tandem.common.messages import SamplingParameters
from tandem.refit.planner import plan
from tandem.rollout.engine import SequenceRequest
from tandem.rollout.engines.transformers import TransformersEngine
from tandem.trainer.exposed_weights import weights_of
from tests.harness.trainers.megatron_harness import config_for, make
from tests.harness.trainers.reference import Numbers, assert_same_numbers, numbers_of, plain_numbers
from tests.harness.trainers.trainer_harness import make_batch, make_config, make_model

pytestmark = pytest.mark.usefixtures("rank_server")

OVERRIDES: dict[str, Any] = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 7.0},
    "max_position_embeddings": 32,
    "rms_norm_eps": 0.05,
}
BATCHES = [make_batch(seed=seed) for seed in range(2)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model, and the same weights beside a configuration that has the overrides written into it."""
    plain = make_model(tmp_path_factory.mktemp("models") / "plain", "qwen3")
    written = shutil.copytree(plain, plain.with_name("written"))
    path = written / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | OVERRIDES))
    return plain, written


@pytest.mark.parametrize("backend", ["dtensor", "megatron"])
def test_training_is_that_of_a_configuration_with_the_fields(
    backend: str, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    plain, written = folders
    is_megatron = backend == "megatron"
    expected: Numbers = plain_numbers(written, BATCHES, temperature=0.7, kl=0.1, decays_vectors=not is_megatron)
    loss = {"reference_policy_kl_penalty": 0.1}
    config = (
        config_for(plain, 1, {}, hf_config_overrides=OVERRIDES)
        if is_megatron
        else make_config(plain, loss=loss, temperature=0.7, hf_config_overrides=OVERRIDES)
    )
    assert_same_numbers(numbers_of(1, make, config, BATCHES, tmp_path), expected, 1e-5)
    saved = transformers.AutoConfig.from_pretrained(tmp_path / "policy")
    assert saved.rope_parameters["rope_theta"] == 7.0
    assert saved.max_position_embeddings == 32


def test_the_engine_generates_with_them(folders: tuple[Path, Path]) -> None:
    plain, written = folders
    model = transformers.AutoModelForCausalLM.from_pretrained(written)
    engine = TransformersEngine(
        plain, num_slots=2, max_total_sequence_length=16, dtype="float32", config_overrides=OVERRIDES
    )
    source = weights_of(dict(model.named_parameters())).layout
    program = plan({"trainer-0": source}, {"rollout-0": engine.layouts()[0]}, allow_alias=False).programs["rollout-0"]
    engine.install([program])
    engine.apply(0, 60.0)
    sampling = SamplingParameters(
        temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=8, stop_token_ids=(), stop_strings=()
    )
    engine.add_request(SequenceRequest(request_id=0, prompt_ids=(3, 4, 5), sampling=sampling, seed=0))
    (made,) = (done for _ in range(16) for done in engine.step())
    sequence = torch.tensor([[3, 4, 5, *made.token_ids_T.tolist()]])
    with torch.no_grad():
        logprobs_TV = model(input_ids=sequence).logits[0, 2:-1].log_softmax(dim=-1)
    expected_T = logprobs_TV.gather(1, sequence[0, 3:, None])[:, 0].numpy()
    assert np.abs(made.logprobs_T - expected_T).max() < 1e-5
    engine.close()
