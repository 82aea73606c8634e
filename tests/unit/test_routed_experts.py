"""Where tokens went: the column of samples, the routers it is of, and what the embedded engine says."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import transformers
from engine_harness import EXPERTS as SIZES_OF_EXPERTS
from engine_harness import SIZES, make_model, refit, request, run_all
from numpy.typing import NDArray
from samples_harness import sample_of

from tandem.common.errors import ModelError, SamplesError, WireError
from tandem.common.messages import Problem, PromptGroup
from tandem.common.routers import intercept
from tandem.config.checks.generation import ROUTERS
from tandem.rollout.agents.session import EpisodeSession
from tandem.rollout.engine import EngineCompletion
from tandem.rollout.engines.transformers import TransformersEngine
from tandem.rollout.environments import Score
from tandem.samples.batch import SAMPLES, SampleBatch
from tandem.samples.routed_experts import COLUMN, DTYPE, RoutedExperts, as_trained_on, experts_in
from tandem.trainer.fetching import SampleFormat

SMALL = RoutedExperts(num_layers=3, num_experts=8, top_k=2)
LARGE = RoutedExperts(num_layers=61, num_experts=256, top_k=8)
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2_moe": SIZES_OF_EXPERTS,
    "qwen3_moe": SIZES_OF_EXPERTS,
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "olmoe": SIZES_OF_EXPERTS,
    "glm4_moe": {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1},
    "deepseek_v3": {
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 4,
        "q_lora_rank": 12,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 6,
        "qk_rope_head_dim": 4,
        "v_head_dim": 6,
    },
    "gpt_oss": {"num_local_experts": 4, "head_dim": 8},
}


def routes(experts: RoutedExperts, num_tokens: int, seed: int = 0) -> NDArray[np.int16]:
    random = np.random.default_rng(seed)
    scores = random.random((num_tokens, experts.num_layers, experts.num_experts))
    return np.argsort(scores, axis=2)[:, :, : experts.top_k].astype(np.int16)


@pytest.mark.parametrize(("experts", "num_bytes"), [(SMALL, 6), (LARGE, 61 * 8 * 2)])
def test_a_column_is_small_and_says_what_is_not_known(experts: RoutedExperts, num_bytes: int) -> None:
    known_TLK = routes(experts, 5)
    known_TLK[:, 1] = known_TLK[4] = -1
    column_TX = experts.encode(known_TLK)
    assert column_TX.shape == (5, num_bytes)
    assert column_TX.dtype == np.dtype(DTYPE)
    experts.check(column_TX)
    assert np.array_equal(experts.decode(column_TX), known_TLK)
    assert np.array_equal(column_TX[4:], experts.nothing(1))
    with pytest.raises(WireError, match=f"{num_bytes - 1} bytes a token, must be {num_bytes}"):
        experts.check(column_TX[:, 1:])


@pytest.mark.parametrize(
    ("wrong", "why"), [([8, 1], "expert 8, must be less than 8"), ([3, 3], "twice"), ([3, -1], "fewer than 2")]
)
def test_what_no_router_chooses_is_refused(wrong: list[int], why: str) -> None:
    known_TLK = routes(SMALL, 5)
    known_TLK[2, 1] = wrong
    with pytest.raises(WireError, match=f"{COLUMN}: .*{why}"):
        SMALL.check(SMALL.encode(known_TLK))


def test_samples_travel_with_the_column_or_without() -> None:
    column_TX = SMALL.encode(routes(SMALL, 5))
    sample = sample_of(5).replace(**{COLUMN: column_TX})
    both = SampleBatch.concatenate([sample, sample])
    found = SampleBatch.parse_frames(both.columns, SAMPLES, {COLUMN: DTYPE}).take([1])
    assert np.array_equal(found.columns[COLUMN], column_TX)
    with pytest.raises(WireError, match=f"{COLUMN}: is missing"):
        SampleBatch.parse_frames(sample_of(5).columns, SAMPLES, {COLUMN: DTYPE})
    with pytest.raises(WireError, match=f"{COLUMN}: is uint8 .5,., must be uint8 of 2 dimensions"):
        SampleBatch.parse_frames({**sample.columns, COLUMN: column_TX[:, 0]}, SAMPLES, {COLUMN: DTYPE})
    with pytest.raises(WireError, match=f"{COLUMN}: 4 numbers, does not fit lengths_S"):
        SampleBatch.parse_frames({**sample.columns, COLUMN: column_TX[1:]}, SAMPLES, {COLUMN: DTYPE})
    assert [*as_trained_on(sample, None).columns] == [*SAMPLES]
    with pytest.raises(SamplesError, match=r"policy\.router_replay was off"):
        as_trained_on(sample_of(5), SMALL)


def test_requests_for_samples_are_as_small_as_a_reply_may_be() -> None:
    with_experts = SampleFormat(vocabulary=9, experts=LARGE).max_tokens
    assert with_experts * LARGE.num_bytes <= 2**28
    assert SampleFormat(vocabulary=9).max_tokens > with_experts


@pytest.mark.parametrize("model_type", ROUTERS)
def test_routers_of_each_family_take_what_they_are_given(model_type: str) -> None:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(
        model_type, **{**SIZES, "moe_intermediate_size": 16, "num_experts_per_tok": 2, **FAMILIES[model_type]}
    )
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    sizes = experts_in(config.to_dict())
    assert sizes == RoutedExperts(num_layers=3, num_experts=4, top_k=2)
    token_ids = torch.arange(1, 10)[None]
    plain = model(input_ids=token_ids).logits
    own: dict[int, torch.Tensor] = {}
    given: dict[int, torch.Tensor] = {}

    def choose(layer: int, own_NK: torch.Tensor) -> torch.Tensor:
        own.setdefault(layer, own_NK)
        return given.get(layer, own_NK)

    layers = intercept(model, choose)
    assert layers == tuple(range(int(getattr(config, "first_k_dense_replace", None) or 0), 3))
    assert torch.equal(model(input_ids=token_ids).logits, plain), "to the bit, where nothing is given"
    given.update({layer: chosen_NK.clone() for layer, chosen_NK in own.items()})
    assert torch.equal(model(input_ids=token_ids).logits, plain), "and where it is what they would choose"
    elsewhere = routes(sizes, 9)
    given.update({layer: torch.from_numpy(elsewhere[:, layer].astype(np.int64)) for layer in layers})
    routers = [module for module in model.modules() if type(module).__name__.lower().endswith("topkrouter")]
    for layer, router in zip(layers, routers, strict=True):
        _, gates_NK, chosen_NK = router(torch.randn(9, SIZES["hidden_size"]))
        assert torch.equal(chosen_NK, given[layer])
        assert (gates_NK > 0).all(), "also for experts that the router would not have chosen, in any group"
        (gates_NK * torch.arange(1.0, 3.0)).sum().backward()
        assert router.weight.grad is not None
        assert router.weight.grad.abs().max() > 0
    assert not torch.allclose(model(input_ids=token_ids).logits, plain)


def test_a_dense_model_has_no_routers(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="Qwen3ForCausalLM has no Transformers-style routers"):
        intercept(make_model("qwen3", tmp_path), lambda layer, own_NK: own_NK)
    assert experts_in({"model_type": "qwen3", "num_hidden_layers": 2}) is None


def test_the_embedded_engine_says_where_tokens_went(tmp_path: Path) -> None:
    model = make_model("qwen3_moe", tmp_path, mlp_only_layers=[1])
    sizes = experts_in(model.config.to_dict())
    assert sizes is not None
    # Fewer slots than requests, which are of several lengths, so that sequences move from slot to slot.
    engine = TransformersEngine(tmp_path, num_slots=3, max_total_sequence_length=64, dtype="float32", experts=sizes)
    refit(engine, model, 0)
    prompts = [(5, 6, 7, 8 + number % 2) for number in range(7)]
    requests = [request(number, prompt, max_new_tokens=3 + number) for number, prompt in enumerate(prompts)]
    guest = msgspec.structs.replace(request(-1, (5, 6), seed=0), is_external=True)
    found = run_all(engine, [*requests, guest])
    assert found[-1].routed_experts_TX is None
    chosen: dict[int, torch.Tensor] = {}
    intercept(model, lambda layer, own_NK: chosen.setdefault(layer, own_NK))
    for number, prompt in enumerate(prompts):
        chosen.clear()
        model(input_ids=torch.tensor([[*prompt, *found[number].token_ids_T.tolist()]]))
        routed_TX = found[number].routed_experts_TX
        assert routed_TX is not None
        experts_TLK = sizes.decode(routed_TX)
        assert len(experts_TLK) == len(prompt) + 3 + number - 1, "all but the last"
        assert (experts_TLK[:, 1] == -1).all(), "a dense layer"
        for layer in (0, 2):
            assert np.array_equal(experts_TLK[:, layer], chosen[layer][:-1].numpy())
    # One that is taken out says of what was computed.
    engine.add_request(request(20, (5, 6, 7)))
    engine.step()
    engine.step()
    taken = engine.abort(20)
    assert taken is not None
    assert taken.routed_experts_TX is not None
    assert len(taken.routed_experts_TX) == 3 + 2 - 1


@dataclasses.dataclass
class Said:
    """What the engine has said of the first tokens of a sequence."""

    routed_TX: NDArray[np.uint8] | None

    def completion(self, *token_ids: int) -> EngineCompletion:
        token_ids_T = np.array(token_ids, np.int32)
        return EngineCompletion(
            request_id=0,
            token_ids_T=token_ids_T,
            logprobs_T=np.zeros(len(token_ids), np.float32),
            versions_T=np.zeros(len(token_ids), np.int32),
            finish_reason="stop",
            routed_experts_TX=self.routed_TX,
        )


class Texts:
    """As much of a tokenizer as a session needs to show what was said."""

    takes_media = False

    def decode(self, token_ids: tuple[int, ...]) -> str:
        return " ".join(map(str, token_ids))


def test_an_agents_branches_have_the_routes_of_all_that_they_repeat() -> None:
    problem = Problem(problem_id="p", question="", answer="", metadata={})
    group = PromptGroup(group=0, problem=problem, prompt_ids=(5, 6), seeds=(1,))
    session = EpisodeSession(group, 0, Texts(), SMALL)  # type: ignore[arg-type]
    first, second, third = (SMALL.encode(routes(SMALL, size, seed)) for seed, size in enumerate((3, 6, 5)))
    session.add([5, 6], Said(first).completion(7, 8))
    session.add([5, 6, 7, 8, 9], Said(second).completion(10, 11))
    session.add([5, 6, 7, 8, 3], Said(third).completion(4))
    session.add([1, 2], Said(None).completion(3))  # it was left before its end
    _, arrays = session.finish(Score(1.0, correct=True), 0)
    assert arrays.lengths_S.tolist() == [7, 6, 3]
    unknown = SMALL.nothing(1)
    # Of what was repeated the first answer says where it went: the second's tokens were drawn from another pass.
    expected = [first, second[3:], unknown, first, third[3:], unknown, SMALL.nothing(3)]
    assert np.array_equal(arrays.columns[COLUMN], np.concatenate(expected))
    _, arrays = EpisodeSession(group, 0, Texts(), SMALL).finish(Score(0.0, correct=False), 0)  # type: ignore[arg-type]
    assert np.array_equal(arrays.columns[COLUMN], SMALL.nothing(2))
