"""Tiny models that vLLM's kernels take, and engines of both kinds filled from them."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from engine_harness import make_model, make_programs, shared_layout

from tandem.config import load_config
from tandem.config.schema.generation import VllmCfg
from tandem.coordinator.forecast.drafters import DrafterForecast, forecast_drafter
from tandem.coordinator.forecast.sides import model_shape
from tandem.rollout.engine import EngineCompletion, SequenceRequest
from tandem.rollout.engines.sampling import restrict
from tandem.rollout.engines.vllm import insides
from tandem.rollout.engines.vllm.engine import VllmEngine
from tandem.samples.routed_experts import RoutedExperts
from tandem.samples.sampling_masks import MaskFormat
from tests.harness.runs.running import write_config

CHANGES: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 128, "head_dim": 32},
    "qwen2": {"hidden_size": 128},
    "qwen3": {"hidden_size": 64, "head_dim": 32},
    "qwen3_moe": {"hidden_size": 64, "head_dim": 32, "moe_intermediate_size": 40},
}
"""What the tiny models of the other tests need for vLLM: heads of 32 elements, experts whose rows are padded."""
FAMILIES: dict[str, dict[str, Any]] = {
    "mistral": {"hidden_size": 128, "head_dim": 32, "sliding_window": 7},
    "gemma3_text": {"hidden_size": 64, "head_dim": 32, "tie_word_embeddings": True, "final_logit_softcapping": None},
    "phi3": {"hidden_size": 128, "rope_parameters": {"rope_type": "default", "rope_theta": 1e3}},
    "glm4_moe": {"hidden_size": 64, "head_dim": 32, "moe_intermediate_size": 40, "n_shared_experts": 1},
}
"""The same of families with parts of their own, which run through fewer cases."""
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LATENT: dict[str, Any] = {
    # The only sizes that vLLM's kernel for CPUs has.
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "hidden_size": 64,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    **_EXPERTS,
}
_WINDOWS: dict[str, Any] = {
    "hidden_size": 128,
    "sliding_window": 7,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
}
_DELTA_NET = {"hidden_size": 64, "head_dim": 32, "linear_key_head_dim": 64, "linear_value_head_dim": 64}
LEARNED: dict[str, dict[str, Any]] = {
    "mixtral": {"hidden_size": 64, "head_dim": 32, "num_local_experts": 4, "intermediate_size": 40},
    "gemma2": {"hidden_size": 64, "head_dim": 32, "query_pre_attn_scalar": 8, "sliding_window": 5},
    "exaone4": {**_WINDOWS, "head_dim": 32},
    "smollm3": {"hidden_size": 128},
    "olmo3": _WINDOWS,
    "seed_oss": {"hidden_size": 64, "head_dim": 32},
    "granitemoe": {"hidden_size": 128, "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32},
    "ernie4_5_moe": {
        "hidden_size": 128,
        "head_dim": 32,
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_intermediate_size": 32,
        "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": 2,
    },
    "gpt_oss": {
        "hidden_size": 64,
        "head_dim": 32,
        "intermediate_size": 64,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "falcon_h1": {"hidden_size": 64, "head_dim": 32, "mamba_d_state": 16},
    "nemotron_h": {"hidden_size": 64, "head_dim": 32, "ssm_state_size": 16},
    "qwen3_next": {**_DELTA_NET, "num_experts": 4, "shared_expert_intermediate_size": 32, **_EXPERTS},
    "qwen3_5_text": _DELTA_NET,
    "qwen3_5_moe_text": {**_DELTA_NET, "num_experts": 4, "shared_expert_intermediate_size": 32, **_EXPERTS},
    "deepseek_v3": _LATENT,
    "glm4_moe_lite": _LATENT,
}
"""The same of families without a table of their parameters, whose layouts are learned from vLLM's loader."""
CHANCE = 1e-6
"""Least chance of tokens as far from their distribution as a test's: of other seeds, one in a million fails."""
_ABSORBED = ("W_UK_T", "W_UV")
_NEEDED = CHANGES | FAMILIES | LEARNED


def tiny_model(architecture: str, folder: Path, *, seed: int = 0, **changes: Any) -> Any:
    """Build a random float32 model; its vocabulary of 61 is padded by vLLM."""
    folder.mkdir(exist_ok=True)
    return make_model(
        architecture, folder, seed=seed, **{"initializer_range": 0.15, **_NEEDED[architecture], **changes}
    )


@contextlib.contextmanager
def running(
    folder: Path,
    settings: Mapping[str, Any] | None = None,
    config_overrides: Mapping[str, Any] | None = None,
    *,
    experts: RoutedExperts | None = None,
    mask_format: MaskFormat | None = None,
    **extra: Any,
) -> Iterator[VllmEngine]:
    """Start vLLM with a model's configuration, without weights; stop it at the end. `settings` are `VllmCfg`'s."""
    cfg = VllmCfg(**{"precision": "float32", "max_model_len": 128, **(settings or {})})
    extra = {"kv_cache_memory_bytes": 2**26, "max_num_seqs": 32, **extra}
    engine = VllmEngine(
        folder, cfg, extra=extra, experts=experts, mask_format=mask_format, config_overrides=config_overrides
    )
    try:
        yield engine
    finally:
        engine.close()


def refit(engine: VllmEngine, model: Any, version: int, *, allow_alias: bool = False) -> Any:
    """Bring an engine to what `model` holds now, by a whole refit out of a copy of it; return the copy."""
    source = copy.deepcopy(model)
    programs = make_programs(shared_layout(source), engine, allow_alias=allow_alias)
    transports = {transfer.transport for program in programs for transfer in program.receives}
    assert transports <= {"shm", "alias"}, "both are on this host"
    engine.install(programs)
    engine.apply(version, 60.0)
    return source


def train(model: Any, seed: int) -> None:
    """Move every weight a little, as an optimizer step would."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.01)


def all_parameters(llm: insides.InProcessLlm) -> list[dict[str, torch.Tensor]]:
    """Return, for each worker, a copy of what refits write, and beside it of whatever kernels read in its place."""
    found: list[dict[str, torch.Tensor]] = llm.engine.collective_rpc(_parameters_of)
    return found


def _parameters_of(worker: Any) -> dict[str, torch.Tensor]:
    model = worker.model_runner.get_model()
    packed = {f"packed {name}": held.detach().clone() for name, held in model.named_parameters()}
    return {**packed, **{name: held.detach().clone() for name, held in worker.part.parameters().items()}}


def live_parameters(engine: VllmEngine) -> dict[str, torch.Tensor]:
    """Return the parameters that refits write, of an engine whose worker is in this process."""
    (found,) = engine._llm.engine.collective_rpc(lambda worker: worker.part.parameters())
    return dict(found)


def greedy(model: Any, prompt: tuple[int, ...], num_new: int) -> list[int]:
    sequence = [*prompt]
    for _ in range(num_new):
        with torch.no_grad():
            sequence.append(int(model(torch.tensor([sequence])).logits[0, -1].argmax()))
    return sequence[len(prompt) :]


def num_steps(engine: VllmEngine, requests: list[SequenceRequest]) -> int:
    """Generate, and return how many steps that took."""
    for one in requests:
        engine.add_request(one)
    steps = 0
    while engine.num_unfinished:
        engine.step()
        steps += 1
    return steps


def drafts_parameters(engine: VllmEngine) -> dict[str, torch.Tensor]:
    (found,) = engine._llm.engine.collective_rpc(
        lambda worker: {n: p.detach().clone() for n, p in worker.model_runner.drafter.model.named_parameters()}
    )
    return dict(found)


def plan_drafter(folder: Path, speculation: Mapping[str, Any], **vllm_cfg: Any) -> DrafterForecast:
    """Return what `coordinator plan` says of a drafter, for sequences of up to 128 tokens in the vLLM of `running`."""
    settings = {"precision": "float32", "max_model_len": 128, **vllm_cfg}
    generation = {"backend": "vllm", "vllm_cfg": settings, "vllm_kwargs": {"speculative_config": dict(speculation)}}
    lengths = {"max_total_sequence_length": 128, "sequence_packing": {"enabled": False}}
    over = {"policy": {"new_model": None, "model_name": str(folder), **lengths, "generation": generation}}
    config = load_config(write_config(over), to_run=False)
    model = model_shape(config)
    assert not isinstance(model, str)
    drafter = forecast_drafter(config, model)
    assert drafter is not None
    return drafter


def measure_drafter(engine: VllmEngine) -> list[tuple[int, int]]:
    """Return, for each worker, the bytes of weights that only drafts use, and of what they keep of 128 tokens.

    What latent attention multiplies of its weights beforehand is left out, as it is of the policy.
    """
    measured: list[tuple[int, int]] = engine._llm.engine.collective_rpc(_measure_drafter)
    return measured


def _measure_drafter(worker: Any) -> tuple[int, int]:
    runner = worker.model_runner
    shared = {parameter.data_ptr() for parameter in runner.get_model().parameters()}
    alone = [
        parameter
        for name, parameter in runner.drafter.model.named_parameters()
        if parameter.data_ptr() not in shared and not name.endswith(_ABSORBED)
    ]
    specs = runner.get_kv_cache_spec()
    caches = [specs[name] for name in runner.drafter._draft_attn_layer_names]
    return sum(each.nbytes for each in alone), sum(each.page_size_bytes * 128 // each.block_size for each in caches)


def find_chance_of_third_token(
    model: Any, prompt: tuple[int, ...], responses: Sequence[EngineCompletion], changes: Mapping[str, Any]
) -> float:
    """Return the chance of third tokens as far from the model's distribution as those of responses, by Pearson's test.

    `changes` are the sampling parameters of all. Tokens that are expected twice or less are counted together.
    """
    expected_V = find_third_token(model, prompt, changes) * len(responses)
    tokens_N = torch.tensor([int(response.token_ids_T[2]) for response in responses])
    counts_V = torch.bincount(tokens_N, minlength=len(expected_V)).double()
    is_common_V = expected_V > 2.0
    expected, counts = (
        torch.cat([each_V[is_common_V], each_V[~is_common_V].sum()[None]]) for each_V in (expected_V, counts_V)
    )
    expected[-1].clamp_(min=1.0)
    statistic = ((counts - expected) ** 2 / expected).sum()
    freedom = torch.tensor(len(expected) - 1, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom / 2, statistic / 2))


def find_third_token(model: Any, prompt: tuple[int, ...], changes: Mapping[str, Any]) -> torch.Tensor:
    """Return its distribution, by all pairs of tokens before it."""
    first_V = find_probabilities(model, torch.tensor([prompt]), changes)[0]
    size = len(first_V)
    ones = torch.tensor([[*prompt, token] for token in range(size)])
    second_VV = find_probabilities(model, ones, changes)
    pairs_VV = first_V[:, None] * second_VV
    result_V = torch.zeros(size)
    for token in range(size):
        twos = torch.cat([ones[token].repeat(size, 1), torch.arange(size)[:, None]], dim=1)
        result_V += pairs_VV[token] @ find_probabilities(model, twos, changes)
    return result_V.double()


def find_probabilities(model: Any, ids: torch.Tensor, changes: Mapping[str, Any]) -> torch.Tensor:
    """Return the distribution of the token after each row of `ids`, as sampling parameters restrict it."""
    with torch.no_grad():
        logits_BV = model(ids).logits[:, -1] / changes.get("temperature", 1.0)
    num = len(ids)
    top_k, top_p = torch.tensor([changes.get("top_k", 0)]), torch.tensor([changes.get("top_p", 1.0)])
    return restrict(logits_BV, top_k.expand(num), top_p.expand(num)).softmax(dim=-1)
