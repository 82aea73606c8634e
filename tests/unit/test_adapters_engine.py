"""The embedded engine with the adapters of several versions: each request has the numbers of its own alone."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from engine_harness import make_model, random_prompts, reference_logprobs, request, run_all
from lora_harness import mark
from peft_harness import adapted, adapted_experts, parameters_of, train

from tandem.refit.digests.comparison import compare
from tandem.refit.planner import plan
from tandem.refit.weights import Weights
from tandem.rollout.engine import SequenceRequest, VersionNotHeld
from tandem.rollout.engines.adapters import AdaptersEngine
from tandem.rollout.engines.served import ServedSampling
from tandem.rollout.openai_api.driver import EngineDriver
from tandem.rollout.openai_api.refusals import OpenAIRefused
from tandem.trainer import exposed_weights, lora
from tandem.trainer.files.policy_files import saved_buffers

pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),  # by PEFT
    # PEFT looks for a parameter's rank among the names of modules, and warns though it has taken it.
    pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys did not match:RuntimeWarning"),
]

NUM_SETS = 3


def of(version: int | None, one: SequenceRequest, *kept: int, num_alternatives: int = 0) -> SequenceRequest:
    """Return a request that names a version."""
    fields = msgspec.structs.asdict(one.sampling)
    named = ServedSampling(
        **fields, weight_version=version, kept_versions=tuple(kept), num_alternatives=num_alternatives
    )
    return msgspec.structs.replace(one, sampling=named)


class Several:
    """A trainer of adapters, whose versions are kept as models of their own, and an engine that holds several."""

    def __init__(self, folder: Path, *, in_place: bool = True, architecture: str = "qwen3") -> None:
        smaller = {"initializer_range": 0.1} if architecture.endswith(("moe", "oss")) else {}
        model = make_model(architecture, folder, **smaller)
        self.model = adapted_experts(model, torch.float32)[0] if _has_experts(model) else adapted(model, torch.float32)
        parameters = parameters_of(self.model)
        if _has_experts(model):
            parameters = lora.parameters_of(model) | saved_buffers(model)
        exposed_weights.share(parameters)
        self.engine = AdaptersEngine(
            folder, num_slots=8, max_total_sequence_length=64, dtype="float32", num_sets=NUM_SETS
        )
        self.source = mark(exposed_weights.weights_of(parameters).layout)
        self.plan = plan(
            {"trainer-0": self.source},
            {"rollout-0": self.engine.layouts()[0]},
            allow_alias=False,
            alias_frozen=in_place,
        )
        self.trainer = Weights(self.source, parameters)
        self.trainer.install([self.plan.programs["trainer-0"]])
        self.engine.install([self.plan.programs["rollout-0"]])
        self.versions: dict[int, Any] = {}

    def publish(self, version: int) -> None:
        """Change the adapters, and bring them to the engine."""
        train(self.model)
        self.engine.apply(version, 60.0, joining_engines=() if self.versions else ("rollout-0",))
        self.versions[version] = copy.deepcopy(self.model).eval()

    def gap(self, one: SequenceRequest, completion: Any, version: int) -> float:
        """Return the largest difference from the log-probabilities of a version's model."""
        assert completion.versions_T.tolist() == [version] * len(completion.token_ids_T)
        meant = reference_logprobs(self.versions[version], one.prompt_ids, completion.token_ids_T)
        return float(np.abs(completion.logprobs_T - meant).max())

    def differences(self) -> int:
        """Return how many tensors differ from the trainer's, by their digests."""
        (held,) = self.engine.digest_task(None).results()
        (sent,) = self.trainer.digest_task(None).results()
        verdict = compare(
            {"trainer-0": (self.source, sent)}, {"rollout-0": {"rollout-0": (self.plan.received["rollout-0"], held)}}
        )
        return sum(each.num_tensors for each in verdict.differences)


def _has_experts(model: Any) -> bool:
    return any(".experts." in name for name, _ in model.named_parameters())


@pytest.fixture
def several(tmp_path: Path) -> Iterator[Several]:
    made = Several(tmp_path)
    yield made
    made.engine.close()
    made.trainer.close()


@pytest.mark.parametrize(
    ("architecture", "in_place"),
    [
        ("qwen3", True),
        ("qwen3", False),
        ("gemma3_text", True),
        ("qwen3_moe", True),
        ("glm4_moe", False),
        ("gpt_oss", True),
    ],
)
def test_requests_of_several_versions_in_one_batch_are_those_of_each_alone(
    architecture: str, in_place: bool, tmp_path: Path
) -> None:
    several = Several(tmp_path, in_place=in_place, architecture=architecture)
    for version in (1, 2, 3):
        several.publish(version)
    prompts = random_prompts(4)
    prompts[1] = prompts[0]  # by another version: nothing of it is shared
    requests = [of(1 + number % 3, request(number, prompts[number % 4])) for number in range(12)]
    requests += [request(12, prompts[2])]  # by the newest
    together = run_all(several.engine, requests)
    alone: dict[int, Any] = {}
    for one in requests:
        alone |= run_all(several.engine, [one])
    for one in requests:
        version = 3 if one.request_id == 12 else 1 + one.request_id % 3
        assert several.gap(one, together[one.request_id], version) < 1e-5
        assert together[one.request_id].token_ids_T.tolist() == alone[one.request_id].token_ids_T.tolist()
    apart = reference_logprobs(several.versions[1], (1, 2, 3), np.array([4, 5], np.int32))
    assert np.abs(apart - reference_logprobs(several.versions[2], (1, 2, 3), np.array([4, 5], np.int32))).max() > 1e-3
    several.engine.close()
    several.trainer.close()


def test_running_requests_go_on_with_their_version_while_newer_ones_come(several: Several) -> None:
    several.publish(1)
    prompts = random_prompts(2)
    requests = [of(1, request(number, prompt, max_new_tokens=20)) for number, prompt in enumerate(prompts)]
    for one in requests:
        several.engine.add_request(one)
    several.engine.step()
    for version in range(2, 2 + 2 * NUM_SETS):
        several.publish(version)
        assert several.engine.step() == []
    made = run_all(several.engine, [])
    for one in requests:
        assert several.gap(one, made[one.request_id], 1) < 1e-5
    for version in range(20, 20 + NUM_SETS):
        several.publish(version)
        run_all(several.engine, [of(version, request(9, prompts[0]))])
    with pytest.raises(VersionNotHeld, match="does not hold weight version 1"):
        several.engine.add_request(requests[0])


def test_the_version_that_was_named_longest_ago_makes_room(several: Several) -> None:
    for version in (1, 2, 3):
        several.publish(version)
    prompt = random_prompts(1)[0]
    run_all(several.engine, [of(3, request(0, prompt), 1)])  # 1 may be named next
    several.publish(4)
    for version in (1, 3, 4):
        several.engine.add_request(of(version, request(version, prompt)))
    with pytest.raises(VersionNotHeld):
        several.engine.add_request(of(2, request(9, prompt)))
    assert several.engine.num_unfinished == 3


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
    requests = [of(1 + number % 2, request(number, prompts[number % 2])) for number in range(4)]
    made = run_all(several.engine, requests)
    assert [made[number].finish_reason for number in (1, 3)] == ["abort", "abort"]
    for number in (0, 2):
        assert several.gap(requests[number], made[number], 1) < 1e-5
    assert several.engine.num_unfinished == 0


def test_each_version_has_the_trainers_digests_and_a_damaged_one_is_dropped(
    several: Several, capsys: pytest.CaptureFixture[str]
) -> None:
    several.publish(1)
    assert several.differences() == 0
    several.publish(2)
    assert several.differences() == 0
    sets = several.engine._sets._held
    next(iter(sets[1].storages.values()))[0] += 1.0
    several.publish(3)
    assert several.differences() == 0
    assert "version 1 have changed in memory" in capsys.readouterr().out
    assert sorted(sets) == [2, 3]
    next(iter(sets[3].storages.values()))[0] += 1.0
    assert several.differences() == 1


def test_another_program_forgets_all_versions(several: Several) -> None:
    several.publish(1)
    several.engine.install([several.plan.programs["rollout-0"]])
    several.versions.clear()
    with pytest.raises(VersionNotHeld):
        several.engine.add_request(of(1, request(0, (1, 2))))
    with pytest.raises(VersionNotHeld):
        several.engine.add_request(request(0, (1, 2)))
    several.publish(1)
    one = of(1, request(0, (1, 2)), num_alternatives=2)
    made = run_all(several.engine, [one])[0]
    assert several.gap(one, made, 1) < 1e-5
    assert made.alternatives is not None
    assert len(made.alternatives[0]) >= 2


def test_versions_have_equal_shares_of_the_places_and_a_broken_one_is_told(several: Several) -> None:
    several.publish(1)
    several.publish(2)
    driver = EngineDriver(several.engine, most_at_once=4)
    ended: list[int] = []

    async def ask(version: int, number: int) -> None:
        sampling = of(version, request(number, (3, 4), max_new_tokens=4)).sampling
        async for _ in driver.generate((3, 4), sampling, number):
            pass
        ended.append(version)

    async def all_of_them() -> None:
        tasks = [asyncio.create_task(ask(1, number)) for number in range(20)]
        tasks += [asyncio.create_task(ask(2, number)) for number in range(4)]
        while not all(task.done() for task in tasks):
            await asyncio.sleep(0)
            driver.work()
        await asyncio.gather(*tasks)
        several.engine._sets._held[1].matrices[0] = tuple(  # type: ignore[call-overload]
            torch.full_like(each, torch.nan)
            for each in several.engine._sets._held[1].matrices[0]  # type: ignore[union-attr]
        )
        broken = [asyncio.create_task(ask(version, 0)) for version in (1, 2)]
        while not all(task.done() for task in broken):
            await asyncio.sleep(0)
            driver.work()
        with pytest.raises(OpenAIRefused, match="not numbers"):
            await broken[0]
        await broken[1]

    asyncio.run(all_of_them())
    assert max(place for place, version in enumerate(ended) if version == 2 and place < 24) < 12, ended
    with pytest.raises(OpenAIRefused) as error:
        asyncio.run(_one(driver, of(7, request(0, (3, 4)))))
    assert error.value.status == 409


async def _one(driver: EngineDriver, one: SequenceRequest) -> None:
    async def work() -> None:
        while True:
            driver.work()
            await asyncio.sleep(0)

    working = asyncio.create_task(work())
    try:
        async for _ in driver.generate(one.prompt_ids, one.sampling, 0):
            pass
    finally:
        working.cancel()
