"""Layers of multi-token prediction that draft in the real vLLM, refitted with their policy."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_harness import random_prompts, reference_logprobs, request, run_all
from safetensors.torch import load_file, save_file

from tandem.common.errors import ModelError
from tandem.config.schema.generation import VllmCfg
from tandem.config.schema.policy import MtpConfig
from tandem.rollout.engines.vllm.drafter import DraftingVllmEngine
from tandem.rollout.engines.vllm.engine import VllmEngine
from tandem.trainer.backends.mtp import MtpLayers, attach_layers
from tests.harness.runs.running import coordinator, merged, write_config
from tests.harness.trainers.trainer_harness import add_mtp_layers, make_model
from tests.vllm.run_harness import JUDGE, SEVENS, curve
from tests.vllm.vllm_harness import (
    CHANCE,
    drafts_parameters,
    find_chance_of_third_token,
    greedy,
    measure_drafter,
    num_steps,
    plan_drafter,
    refit,
    running,
    tiny_model,
    train,
)

NUM_SAMPLES = 2048
FAMILIES = ("glm4_moe", "deepseek_v3")
IN_BFLOAT16 = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
PROMPT = (2, 7, 1, 8)
SPECULATION = {"method": "mtp", "num_speculative_tokens": 3}
TWO = {"tensor_parallel_size": 2}
CACHE = {"kv_cache_memory_bytes": 2**26, "max_num_seqs": 32, "speculative_config": SPECULATION}


@pytest.fixture(scope="module", autouse=True)
def _first_engine(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Start and end an engine with experts: vLLM keeps a socket of the first one in a process for good."""
    folder = tmp_path_factory.mktemp("first")
    tiny_model("qwen3_moe", folder)
    with running(folder):
        pass


def make_policy(family: str, folder: Path, num_layers: int = 1, **changes: Any) -> Any:
    """Write a random model with such layers; return it as a trainer has it."""
    tiny_model(family, folder, **changes).save_pretrained(folder)
    add_mtp_layers(folder, num_layers)
    model = tiny_model(family, folder.with_name("again"), **changes)
    attach_layers(model, str(folder), MtpConfig(num_layers=num_layers), torch.float32)
    return model


def make_agree(model: Any, seed: int) -> None:
    """Have the policy look at the last token alone, and its layer agree with it."""
    scale = torch.rand(model.config.hidden_size, generator=torch.Generator().manual_seed(seed)) + 0.1
    layer = model.mtp.layers[0]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight", "down_proj")):
                parameter.zero_()
        for norm in (layer.enorm, layer.hnorm):
            norm.weight.fill_(1.0)
        layer.eh_proj.weight.zero_()
        layer.eh_proj.weight[:, : len(scale)].copy_(torch.eye(len(scale)))
        for norm in (layer.norm, model.model.norm):
            norm.weight.copy_(scale)


def write(model: Any, folder: Path) -> Path:
    """Write what a trainer has as a checkpoint."""
    mtp: MtpLayers = model.mtp
    state = model.state_dict()
    del model.mtp
    model.save_pretrained(folder)
    model.mtp = mtp
    whole = load_file(folder / "model.safetensors")
    for number in range(len(mtp.layers)):
        prefix = f"mtp.layers.{number}."
        tensors = {name.removeprefix(prefix): each for name, each in state.items() if name.startswith(prefix)}
        whole |= mtp.describe(model, number, tensors)
    save_file({name: each.contiguous() for name, each in whole.items()}, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_bytes((folder.with_name("policy") / "config.json").read_bytes())
    return folder


def without_layers(model: Any) -> Any:
    """Return a copy of the policy alone."""
    policy = copy.deepcopy(model)
    del policy.mtp
    return policy


@contextlib.contextmanager
def drafting(
    folder: Path, settings: dict[str, Any] | None = None, *, num_layers: int = 1, num_tokens: int = 3
) -> Iterator[VllmEngine]:
    """Start vLLM with layers that refits bring; with 0, with the whole of a folder's weights."""
    cfg = VllmCfg(**{"precision": "float32", "max_model_len": 128, **(settings or {})})
    extra = {**CACHE, "speculative_config": {**SPECULATION, "num_speculative_tokens": num_tokens}}
    if num_layers:
        engine: VllmEngine = DraftingVllmEngine(folder, cfg, extra=extra, num_layers=num_layers)
    else:
        engine = VllmEngine(folder, cfg, extra=extra, with_weights=True)
    try:
        yield engine
    finally:
        engine.close()


@pytest.mark.parametrize("family", [*FAMILIES, *IN_BFLOAT16])
def test_refits_bring_what_vllm_reads_of_a_checkpoint(family: str, tmp_path: Path) -> None:
    """Also what its kernels read in the place of parameters, bit for bit."""
    settings = {"precision": "bfloat16"} if family in IN_BFLOAT16 else {}
    model = make_policy(family, tmp_path / "policy")
    expected = []
    for version in range(2):
        with drafting(write(model, tmp_path / f"version_{version}"), settings, num_layers=0) as engine:
            expected.append(drafts_parameters(engine))
        train(model, seed=version)
    model = make_policy(family, tmp_path / "policy")
    with drafting(tmp_path / "policy", settings) as engine:
        for version in range(2):
            refit(engine, model, version)
            held = drafts_parameters(engine)
            assert held.keys() == expected[version].keys()
            assert not [name for name, each in expected[version].items() if not torch.equal(held[name], each)]
            train(model, seed=version)


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_the_model_and_drafts_stay_good(family: str, tmp_path: Path) -> None:
    model = make_policy(family, tmp_path / "policy")
    with drafting(tmp_path / "policy") as engine:
        assert engine.drafts is not None
        for version in range(3):
            make_agree(model, seed=version)
            refit(engine, model, version)
            asked = [request(0, PROMPT, temperature=0.0, max_new_tokens=40)]
            engine.drafts.take()
            assert num_steps(engine, asked) <= 1 + 39 // 4 + 1, "all drafts are accepted"
            drafted, accepted = engine.drafts.take()
            assert drafted == accepted >= 29
            assert run_all(engine, asked)[0].token_ids_T.tolist() == greedy(model, PROMPT, 40)
        train(model, seed=1)
        engine.add_request(request(1, PROMPT, max_new_tokens=40))
        for _ in range(3):
            engine.step()
        refit(engine, model, 3)  # in flight
        engine.recompute_caches()
        (finished,) = [one for _ in range(40) if engine.num_unfinished for one in engine.step()]
        newer_T = finished.versions_T == 3
        assert 0 < newer_T.sum() < 40
        expected_T = reference_logprobs(model, PROMPT, finished.token_ids_T)
        assert np.abs(finished.logprobs_T - expected_T)[newer_T].max() < 1e-4
        engine.sleep()
        engine.wake()
        prompts = random_prompts(6, seed=1)
        made = run_all(engine, [request(n, each, temperature=0.0, max_new_tokens=40) for n, each in enumerate(prompts)])
        for number, prompt in enumerate(prompts):
            assert made[number].token_ids_T.tolist() == greedy(model, prompt, 40)


def test_tokens_have_the_distribution_that_they_have_without_drafts(tmp_path: Path) -> None:
    """At temperature 1, where about half of what refitted layers draft is accepted; so do their log-probabilities."""
    model = make_policy("glm4_moe", tmp_path / "policy")
    make_agree(model, seed=0)
    with torch.no_grad():  # so that the likeliest token, which is drafted, has about half of the chance
        model.model.norm.weight.mul_(4.0)
    samples = [request(number, PROMPT, max_new_tokens=3, seed=number * 7919) for number in range(NUM_SAMPLES)]
    with drafting(tmp_path / "policy") as engine:
        refit(engine, model, 0)
        drafted_responses = run_all(engine, samples)
        assert engine.drafts is not None
        drafted, accepted = engine.drafts.take()
    with running(tmp_path / "policy") as engine:
        refit(engine, without_layers(model), 0)
        responses = run_all(engine, samples)
    assert 0.2 < accepted / drafted < 0.9
    for made in (drafted_responses, responses):
        assert find_chance_of_third_token(model, PROMPT, list(made.values()), {}) > CHANCE
        for number in range(64):
            expected_T = reference_logprobs(model, PROMPT, made[number].token_ids_T)
            assert np.abs(made[number].logprobs_T - expected_T).max() < 1e-4
    different = sum((drafted_responses[n].token_ids_T != responses[n].token_ids_T).any() for n in range(NUM_SAMPLES))
    assert different > NUM_SAMPLES / 4, "the same seeds draw others with drafts"


@pytest.mark.parametrize("family", IN_BFLOAT16)
def test_drafts_beside_layers_with_states_are_accepted_where_they_agree(family: str, tmp_path: Path) -> None:
    """vLLM computes such layers in bfloat16 alone on a CPU: of tokens that are as likely, it may make either."""
    model = make_policy(family, tmp_path / "policy")
    make_agree(model, seed=0)
    with drafting(tmp_path / "policy", {"precision": "bfloat16"}) as engine:
        refit(engine, model, 0)
        made = run_all(engine, [request(0, PROMPT, temperature=0.0, max_new_tokens=40)])[0].token_ids_T
        assert engine.drafts is not None
        drafted, accepted = engine.drafts.take()
    assert drafted == accepted >= 29
    with torch.no_grad():
        logits_TV = model(torch.tensor([[*PROMPT, *made.tolist()]])).logits[0, len(PROMPT) - 1 : -1]
    shortfall_T = logits_TV.amax(dim=-1) - logits_TV.gather(-1, torch.from_numpy(made).long()[:, None])[:, 0]
    assert shortfall_T.max() < 0.1


def test_two_workers_share_the_layers(tmp_path: Path) -> None:
    model = make_policy("glm4_moe", tmp_path / "policy")
    make_agree(model, seed=0)
    with drafting(tmp_path / "policy", TWO) as engine:
        refit(engine, model, 0)
        made = run_all(engine, [request(0, PROMPT, temperature=0.0, max_new_tokens=40)])
        assert made[0].token_ids_T.tolist() == greedy(model, PROMPT, 40)
        assert engine.drafts is not None
        drafted, accepted = engine.drafts.take()
        assert drafted == accepted >= 29


@pytest.mark.parametrize("family", FAMILIES)
def test_of_two_layers_vllm_has_both_and_drafts_with_the_first(family: str, tmp_path: Path) -> None:
    """Refits bring both, bit for bit; a second layer that agrees with nothing costs no draft."""
    before = make_policy(family, tmp_path / "policy", 2)
    model = copy.deepcopy(before)
    train(model, seed=0)
    make_agree(model, seed=0)
    with drafting(write(model, tmp_path / "version_1"), num_layers=0, num_tokens=4) as engine:
        expected = drafts_parameters(engine)
    with drafting(tmp_path / "policy", num_layers=2, num_tokens=4) as engine:
        refit(engine, before, 0)
        refit(engine, model, 1)
        held = drafts_parameters(engine)
        made = run_all(engine, [request(0, PROMPT, temperature=0.0, max_new_tokens=40)])
        assert engine.drafts is not None
        drafted, accepted = engine.drafts.take()
    assert held.keys() == expected.keys()
    assert not [name for name, each in expected.items() if not torch.equal(held[name], each)]
    assert sum(name.endswith(".enorm.weight") for name in held) == 2
    assert made[0].token_ids_T.tolist() == greedy(model, PROMPT, 40)
    assert drafted == accepted >= 31


@pytest.mark.parametrize(
    ("family", "sizes"),
    [("glm4_moe", {}), ("glm4_moe", TWO), ("deepseek_v3", TWO | {"expert_parallel_size": 2}), ("qwen3_next", {})],
    ids=str,
)
def test_their_memory_is_planned(family: str, sizes: dict[str, Any], tmp_path: Path) -> None:
    precision = "bfloat16" if family in IN_BFLOAT16 else "float32"
    # Experts of a multiple of 32 rows on each worker: vLLM pads others for CPUs.
    make_policy(family, tmp_path / "policy", moe_intermediate_size=64)
    planned = plan_drafter(tmp_path / "policy", SPECULATION, precision=precision, **sizes)
    with drafting(tmp_path / "policy", {"precision": precision, **sizes}) as engine:
        measured = measure_drafter(engine)
    assert {weights for weights, _ in measured} == {planned.weights}
    if family == "glm4_moe":  # Transformers' older releases, which vLLM takes, cannot be asked for others without it
        assert planned.cache is not None
        assert sum(cache for _, cache in measured) == planned.cache.num_bytes


def test_a_folder_without_layers_is_refused(tmp_path: Path) -> None:
    """vLLM would draft with whatever is in its memory."""
    tiny_model("glm4_moe", tmp_path / "policy").save_pretrained(tmp_path / "policy")
    with pytest.raises(ModelError, match="has no layers of multi-token prediction"), drafting(tmp_path / "policy"):
        pass


def test_grpo_trains_what_drafts() -> None:
    """As the policy learns, its layer learns to draft for it."""
    Path("judging.py").write_text(JUDGE)
    model = make_model(Path("model").absolute(), "glm4_moe", characters="0123456789+-= ", hidden_size=64, head_dim=32)
    add_mtp_layers(model)
    over = {
        "policy": {
            "new_model": None,
            "model_name": str(model),
            "mtp": {"num_layers": 1, "loss_scaling_factor": 1.0},
            "generation": {"backend": "vllm", "vllm_kwargs": {"speculative_config": SPECULATION}},
        }
    }
    ended = coordinator("up", write_config(merged(SEVENS, over)), timeout_s=280)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    rewards, accepted = curve("run", "reward"), curve("run", "draft_acceptance_rate")
    assert rewards[-3:].mean() > rewards[:3].mean() + 0.2
    assert accepted[-3:].mean() > accepted[:3].mean() + 0.1
    assert curve("run", "token_mult_prob_error").max() < 1.001
    assert np.abs(curve("run", "sampling_importance_ratio") - 1).max() < 1e-3
