"""The embedded engine with adapters of PEFT: the bits of its merge, and the log-probabilities of the unmerged model."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_harness import (
    assert_close_to_transformers,
    make_model,
    random_prompts,
    reference_logprobs,
    request,
    run_all,
)
from lora_harness import mark
from peft_harness import adapted, adapted_experts, as_peft, parameters_of, train

from tandem.refit.planner import TransferPlan, plan
from tandem.rollout.engines.transformers import TransformersEngine
from tandem.trainer import exposed_weights, lora
from tandem.trainer.files.policy_files import saved_buffers

pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),  # by PEFT
    # PEFT looks for a parameter's rank among the names of modules, and warns though it has taken it.
    pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys did not match:RuntimeWarning"),
]


class Served:
    """An adapted model, and an engine that gets its adapters."""

    def __init__(self, folder: Path, dtype: str, *, in_place: bool, architecture: str = "qwen3") -> None:
        self.model = adapted(make_model(architecture, folder), getattr(torch, dtype))
        parameters = parameters_of(self.model)
        exposed_weights.share(parameters)
        engine = TransformersEngine(folder, num_slots=8, max_total_sequence_length=64, dtype=dtype)  # type: ignore[arg-type]
        source = mark(exposed_weights.weights_of(parameters).layout)
        self.plan: TransferPlan = plan(
            {"trainer-0": source}, {"rollout-0": engine.layouts()[0]}, allow_alias=False, alias_frozen=in_place
        )
        self.engine = engine
        engine.install([self.plan.programs["rollout-0"]])
        engine.apply(0, 60.0, joining_engines=("rollout-0",))

    def assert_has_bits_of_merge_and_unload(self) -> None:
        merged = copy.deepcopy(self.model).merge_and_unload()
        live = dict(self.engine._model.named_parameters())
        for name, parameter in merged.named_parameters():
            assert torch.equal(parameter, live[name]), name


@pytest.fixture(params=[("float32", False), ("float32", True), ("bfloat16", True)], ids=["copied", "in place", "half"])
def served(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    dtype, in_place = request.param
    made = Served(tmp_path, dtype, in_place=in_place)
    yield made
    made.engine.close()


def test_live_weights_have_the_bits_of_pefts_merge(served: Served) -> None:
    served.assert_has_bits_of_merge_and_unload()
    for version in range(1, 4):
        train(served.model)
        served.engine.apply(version, 60.0, joining_engines=())
        served.assert_has_bits_of_merge_and_unload()
        served.engine.digest_task(None).results()  # raises if the weights held are not the merge


def test_log_probabilities_are_those_of_the_trainers_unmerged_model(tmp_path: Path) -> None:
    served = Served(tmp_path, "float32", in_place=True)
    model = served.model.eval()
    with model.disable_adapter():
        frozen = reference_logprobs(model, (1, 2, 3), np.array([4, 5], np.int32))
    for version in (1, 2):
        train(served.model)
        served.engine.apply(version, 60.0, joining_engines=())
        requests = [request(number, prompt) for number, prompt in enumerate(random_prompts(8, seed=version))]
        made = run_all(served.engine, requests)
        for one in requests:
            completion = made[one.request_id]
            assert completion.versions_T.tolist() == [version] * len(completion.token_ids_T)
        assert_close_to_transformers(model, [(one, made[one.request_id]) for one in requests])
    assert np.abs(reference_logprobs(model, (1, 2, 3), np.array([4, 5], np.int32)) - frozen).max() > 1e-3
    moved = sum(link.num_bytes for link in served.plan.links)
    assert moved == sum(p.nbytes for name, p in model.named_parameters() if "lora_" in name)
    assert sum(link.num_bytes for link in served.plan.frozen_links) == 0, "all of the base is read in place"
    served.engine.close()


@pytest.mark.parametrize("architecture", ["qwen3_moe", "glm4_moe", "gpt_oss", "qwen3_5_moe_text"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_experts_and_routers_are_merged_as_peft_merges_them(architecture: str, dtype: str, tmp_path: Path) -> None:
    torch_dtype = getattr(torch, dtype)
    base = make_model(architecture, tmp_path / "model", initializer_range=0.1).to(torch_dtype)
    model, described = adapted_experts(copy.deepcopy(base), torch_dtype)
    adapted_names = {name for name in lora.parameters_of(model) if ".experts." in name and "lora_" in name}
    assert adapted_names, "of experts"
    parameters = lora.parameters_of(model) | saved_buffers(model)
    exposed_weights.share(parameters)
    engine = TransformersEngine(tmp_path / "model", num_slots=8, max_total_sequence_length=64, dtype=dtype)  # type: ignore[arg-type]
    source = mark(exposed_weights.weights_of(parameters).layout)
    planned = plan({"trainer-0": source}, {"rollout-0": engine.layouts()[0]}, allow_alias=False, alias_frozen=True)
    engine.install([planned.programs["rollout-0"]])
    for version in range(2):
        train(model)
        engine.apply(version, 60.0, joining_engines=() if version else ("rollout-0",))
        # PEFT rounds the product of a parameter, and then the sum; the engine only the sum.
        merged = as_peft(model, described, copy.deepcopy(base).float(), tmp_path / f"v{version}").merge_and_unload()
        live = {name: parameter.float() for name, parameter in engine._model.named_parameters()}
        rounding = 1e-6 if dtype == "float32" else 2**-8
        for name, parameter in merged.named_parameters():
            torch.testing.assert_close(live[name], parameter, rtol=rounding, atol=1e-6, msg=name)
        engine.digest_task(None).results()  # raises if the weights held are not the merge
        if dtype == "float32":
            one = request(0, random_prompts(1)[0])
            made = run_all(engine, [one])[0]
            meant = reference_logprobs(model.eval(), one.prompt_ids, made.token_ids_T)
            assert np.abs(made.logprobs_T - meant).max() < 1e-5
    moved = sum(link.num_bytes for link in planned.links)
    shared = sum(p.nbytes for name, p in parameters.items() if name.endswith("gate_up_proj.lora_A.weight"))
    own = sum(p.nbytes for name, p in parameters.items() if "lora_" in name)
    assert moved in (own, own + shared), "one lora_A goes to a gate and to an up projection"
    engine.close()
