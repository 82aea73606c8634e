"""vLLM with the adapters of several versions: each request has the numbers of its version's merged weights."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from engine_harness import random_prompts, reference_logprobs, request, run_all
from lora_harness import mark
from peft_harness import LAYERS, adapted, parameters_of, train

from tandem.common.errors import RefitError
from tandem.common.worker_shards import worker_shard_names
from tandem.config.schema.generation import VllmCfg
from tandem.refit.digests.comparison import compare
from tandem.refit.planner import plan
from tandem.refit.weights import Weights
from tandem.rollout.engine import EngineCompletion, SequenceRequest, VersionNotHeld
from tandem.rollout.engines.served import ServedSampling
from tandem.rollout.engines.vllm.adapters import AdaptersVllmEngine
from tandem.trainer import exposed_weights
from tests.vllm.vllm_harness import refit, running, tiny_model

NUM_SETS = 3
_CLOSE = 1e-3
"""vLLM computes attention by other kernels than Transformers."""
_LAYERS = {"qwen3_moe": LAYERS[:4], "phi3": ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")}
"""Layers with adapters, where these are not those of most: PEFT would adapt experts, too."""


def of(version: int, one: SequenceRequest) -> SequenceRequest:
    """Return a request that names a version."""
    sampling = ServedSampling(**msgspec.structs.asdict(one.sampling), weight_version=version)
    return msgspec.structs.replace(one, sampling=sampling)


class Several:
    """A trainer of adapters, whose versions are kept as models of their own, and an engine that holds several."""

    def __init__(
        self,
        folder: Path,
        architecture: str = "qwen3",
        *,
        in_place: bool = False,
        precision: str = "float32",
        extra: dict[str, Any] | None = None,
        **sizes: int,
    ) -> None:
        made = tiny_model(architecture, folder)
        self.model = adapted(made, getattr(torch, precision), _LAYERS.get(architecture, LAYERS))
        parameters = parameters_of(self.model)
        exposed_weights.share(parameters)
        cfg = VllmCfg(precision=precision, max_model_len=128, **sizes)
        extra = {"kv_cache_memory_bytes": 2**26, "max_num_seqs": 32, **(extra or {})}
        self.engine = AdaptersVllmEngine(folder, cfg, extra=extra, num_sets=NUM_SETS)
        self.source = mark(exposed_weights.weights_of(parameters).layout)
        layouts = self.engine.layouts()
        wanted = dict(zip(worker_shard_names("rollout-0", len(layouts)), layouts, strict=True))
        self.plan = plan({"trainer-0": self.source}, wanted, allow_alias=False, alias_frozen=in_place)
        self.parts = [*wanted]
        self.trainer = Weights(self.source, parameters)
        self.trainer.install([self.plan.programs["trainer-0"]])
        self.versions: dict[int, Any] = {}
        self.install()

    def install(self) -> None:
        """Give the engine its programs, whose base comes with the next version."""
        self.engine.install([self.plan.programs[part] for part in self.parts])
        self.versions.clear()

    def publish(self, version: int, *, trained: bool = True) -> None:
        """Change the adapters, and bring them to the engine."""
        if trained:
            train(self.model)
        self.engine.apply(version, 60.0, joining_engines=() if self.versions else ("rollout-0",))
        self.versions[version] = copy.deepcopy(self.model).float().merge_and_unload().eval()

    def gap(self, one: SequenceRequest, completion: EngineCompletion, version: int) -> float:
        """Return the largest difference from the log-probabilities of a version's merged model."""
        assert completion.versions_T.tolist() == [version] * len(completion.token_ids_T)
        meant = reference_logprobs(self.versions[version], one.prompt_ids, completion.token_ids_T)
        return float(np.abs(completion.logprobs_T - meant).max())

    def differences(self) -> list[str]:
        """Return the first tensor of each part that differs from the trainer's, by their digests."""
        held = zip(self.parts, self.engine.digest_task(None).results(), strict=True)
        (sent,) = self.trainer.digest_task(None).results()
        own = {part: (self.plan.received[part], digests) for part, digests in held}
        return [*compare({"trainer-0": (self.source, sent)}, {"rollout-0": own}).differing.values()]


@contextlib.contextmanager
def several_in(folder: Path, *given: Any, **named: Any) -> Iterator[Several]:
    """Start an engine and its trainer; stop both at the end."""
    made = Several(folder, *given, **named)
    try:
        yield made
    finally:
        made.engine.close()
        made.trainer.close()


@pytest.fixture
def several(tmp_path: Path) -> Iterator[Several]:
    """Start an engine of one worker and its trainer."""
    with several_in(tmp_path) as made:
        yield made


@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("qwen3", {}),
        ("qwen3", {"in_place": True}),
        ("qwen3", {"tensor_parallel_size": 2}),
        ("qwen3", {"pipeline_parallel_size": 2}),
        ("llama", {"tensor_parallel_size": 2, "in_place": True}),
        ("qwen3_moe", {}),
        ("phi3", {}),
    ],
    ids=["alone", "in place", "tensor", "pipeline", "tensor, in place", "experts", "fused"],
)
def test_requests_of_several_versions_in_one_batch_are_those_of_each_alone(
    architecture: str, options: dict[str, Any], tmp_path: Path
) -> None:
    with several_in(tmp_path, architecture, **options) as several:
        for version in (1, 2, 3):
            several.publish(version)
            assert several.differences() == []
        prompts = random_prompts(4)
        prompts[1] = prompts[0] = tuple(
            range(1, 50)
        )  # longer than a block, by several versions: nothing of it is shared
        requests = [of(1 + number % 3, request(number, prompts[number % 4])) for number in range(12)]
        requests += [request(12, prompts[2])]  # by the newest
        together = run_all(several.engine, requests)
        again = run_all(several.engine, requests)
        for one in requests:
            version = 3 if one.request_id == 12 else 1 + one.request_id % 3
            made = together[one.request_id]
            assert several.gap(one, made, version) < _CLOSE
            assert made.token_ids_T.tolist() == again[one.request_id].token_ids_T.tolist()
            others = [
                reference_logprobs(model, one.prompt_ids, made.token_ids_T)
                for number, model in several.versions.items()
                if number != version
            ]
            assert min(np.abs(made.logprobs_T - each).max() for each in others) > 10 * _CLOSE


def test_requests_of_a_version_are_the_same_to_the_bit_whatever_comes_and_goes(several: Several) -> None:
    several.publish(1)
    several.publish(2)
    prompts = random_prompts(6)
    requests = [of(1 + number % 2, request(number, prompt, max_new_tokens=20)) for number, prompt in enumerate(prompts)]
    before = run_all(several.engine, requests)
    for one in requests:
        several.engine.add_request(one)
    several.engine.step()
    for version in range(3, 3 + NUM_SETS):  # while requests need the others
        several.publish(version)
        assert several.engine.step() == []
    again = run_all(several.engine, [])
    for one in requests:
        assert again[one.request_id].token_ids_T.tolist() == before[one.request_id].token_ids_T.tolist()
        assert again[one.request_id].logprobs_T.tolist() == before[one.request_id].logprobs_T.tolist()
        assert several.gap(one, again[one.request_id], 1 + one.request_id % 2) < _CLOSE
    several.publish(9)
    with pytest.raises(VersionNotHeld, match="does not hold weight version 1"):
        several.engine.add_request(requests[0])
    one = of(9, request(0, prompts[0]))
    assert several.gap(one, run_all(several.engine, [one])[0], 9) < _CLOSE


def test_a_version_without_adapters_is_the_base_to_the_bit(tmp_path: Path) -> None:
    requests = [request(number, prompt) for number, prompt in enumerate(random_prompts(6))]
    with several_in(tmp_path) as several:
        with torch.no_grad():
            for name, parameter in several.model.named_parameters():
                if "lora_B" in name:
                    parameter.zero_()
        several.publish(1, trained=False)
        several.publish(2)
        found = run_all(several.engine, [of(1, one) for one in requests])
        base = several.versions[1]
    with running(tmp_path) as engine:
        refit(engine, base, 1)
        alone = run_all(engine, requests)
    for number, one in alone.items():
        assert found[number].token_ids_T.tolist() == one.token_ids_T.tolist()
        assert found[number].logprobs_T.tolist() == one.logprobs_T.tolist()


def test_weights_that_are_no_numbers_end_the_requests_of_their_version_alone(several: Several) -> None:
    several.publish(1)
    good = copy.deepcopy(several.model.state_dict())
    with torch.no_grad():
        for name, parameter in several.model.named_parameters():
            if "lora_B" in name:
                parameter.fill_(torch.nan)
    several.publish(2)
    several.model.load_state_dict(good)
    prompts = random_prompts(2)
    requests = [of(1 + number % 2, request(number, prompts[number % 2])) for number in range(24)]
    for _ in range(2):  # the second time in the memory of the cache that the first has left
        made = run_all(several.engine, requests)
        for one in requests:
            if one.request_id % 2:
                assert made[one.request_id].finish_reason == "abort"
            else:
                assert several.gap(one, made[one.request_id], 1) < _CLOSE
        assert several.engine.num_unfinished == 0


@pytest.mark.parametrize("workers", [1, 2])
def test_each_version_has_the_trainers_digests_and_a_damaged_one_is_dropped(workers: int, tmp_path: Path) -> None:
    with several_in(tmp_path, tensor_parallel_size=workers) as several:
        several.publish(1)
        assert several.differences() == []
        several.publish(2)
        assert several.differences() == []
        running_one = of(1, request(9, (1, 2), max_new_tokens=20))
        several.engine.add_request(running_one)
        several.engine.step()
        several.engine._llm.engine.collective_rpc(_damage, args=(1,))
        several.publish(3)
        assert several.differences() == []
        with pytest.raises(RefitError, match="the adapters of version 1 are lost"):
            several.engine.step()
        assert several.engine.abort(9) is not None
        with pytest.raises(VersionNotHeld):
            several.engine.add_request(of(1, request(0, (1, 2))))
        one = of(2, request(0, (1, 2)))
        assert several.gap(one, run_all(several.engine, [one])[0], 2) < _CLOSE
        several.engine._llm.engine.collective_rpc(_damage, args=(3,))
        assert several.differences() != []


def _damage(worker: Any, version: int) -> None:
    if worker.rank == 0:
        next(iter(worker.part._sets._held[version].storages.values()))[0] += 1.0


def test_the_base_is_held_once_and_damage_to_it_shows(several: Several) -> None:
    several.publish(1)
    (part,) = several.engine._llm.engine.collective_rpc(lambda worker: worker.part)
    own = {name: weight.untyped_storage() for name, weight in part.parameters().items()}
    held = {"model.layers.0.self_attn.qkv_proj.weight", "model.layers.0.mlp.gate_up_proj.weight"}
    lies_in = {own[name].data_ptr(): name for name in held}
    found = {lies_in.get(storage.untyped_storage().data_ptr()) for storage in part._described().storages.values()}
    assert held <= found
    assert not any("base of" in name for name in part._staging)
    part.parameters()["model.layers.0.self_attn.qkv_proj.weight"].data[3, 5] += 1.0
    several.install()
    several.publish(1)
    assert several.differences() == [], "another program brings the base again"
    part.parameters()["model.layers.0.self_attn.qkv_proj.weight"].data[3, 5] += 1.0
    several.engine.apply(2, 60.0, joining_engines=("rollout-0",))
    assert several.differences() == []


def test_another_program_forgets_all_versions(several: Several) -> None:
    several.publish(1)
    prompt = tuple(range(1, 60))
    one = of(1, request(0, prompt))
    run_all(several.engine, [one])
    several.install()
    for again in (one, request(0, prompt)):
        with pytest.raises(VersionNotHeld):
            several.engine.add_request(again)
    several.publish(1)  # another one of that number: nothing of the first is found in the cache
    assert several.gap(one, run_all(several.engine, [one])[0], 1) < _CLOSE


def test_drafted_tokens_are_verified_by_the_version_of_their_request(tmp_path: Path) -> None:
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    with several_in(tmp_path, extra={"speculative_config": drafts}) as several:
        several.publish(1)
        several.publish(2)
        repeated = (1, 2, 3) * 6
        requests = [of(1 + number % 2, request(number, repeated, max_new_tokens=40)) for number in range(8)]
        made = run_all(several.engine, requests)
        for one in requests:
            assert several.gap(one, made[one.request_id], 1 + one.request_id % 2) < _CLOSE
    assert torch.get_num_threads() == 1, "numba's threads are torch's as well"


def test_in_bfloat16_adapters_are_added_in_float32(tmp_path: Path) -> None:
    with several_in(tmp_path, precision="bfloat16") as several:
        for version in (1, 2):
            several.publish(version)
            assert several.differences() == []
        requests = [of(1 + number % 2, request(number, prompt)) for number, prompt in enumerate(random_prompts(8))]
        made = run_all(several.engine, requests)
        gaps = [several.gap(one, made[one.request_id], 1 + one.request_id % 2) for one in requests]
        assert float(np.mean(gaps)) < 0.1
