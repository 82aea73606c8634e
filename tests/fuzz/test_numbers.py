"""Numbers of every kind, wherever a message or an array has some: none comes through that a run cannot compute with."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import msgspec
import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.common.errors import RewardError, WireError
from tandem.common.messages import LARGEST, Message, Problem, SampleScored
from tandem.common.numeric import LEAST_LOGPROB
from tandem.common.wire import MessageCodec, encode
from tandem.config import build_config
from tandem.config.schema import LossFn
from tandem.config.schema.columns import GENERATION_LOGPROBS
from tandem.coordinator.algorithms.step_batch import training_batch
from tandem.coordinator.processes.replies import require_finite
from tandem.coordinator.scheduler.events import SampleRecord
from tandem.rollout.environments import Score
from tandem.rollout.environments.outcomes import Failure, ScoringCall, outcome_of
from tandem.samples.batch import SampleBatch
from tandem.trainer.losses import Counts
from tandem.trainer.losses.policy_gradient import PolicyGradientLoss
from tandem.trainer.micro_batches import MicroBatch
from tandem.trainer.scores import TokenScores
from tests.protocol.examples import UNIONS, example, messages_of

Function = TypeVar("Function", bound=Callable[..., None])

NUMBERS = st.floats() | st.sampled_from([1e12, -1e12, 1.0000001e12, 1e39, 1e300, 1e308, 5e-324, -0.0, 3.5e38])
LINKS = [(union, message) for union in UNIONS for message in messages_of(union)]
GROUPS, SAMPLES = 2, 3


def floats_of(value: object) -> Iterator[float]:
    """Yield all floating-point numbers in plain data."""
    if isinstance(value, float):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from floats_of(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from floats_of(each)


def changed(value: Any, numbers: Iterator[float]) -> Any:
    """Return plain data with other numbers in the place of its own."""
    if isinstance(value, float):
        return next(numbers)
    if isinstance(value, dict):
        return {name: changed(each, numbers) for name, each in value.items()}
    return [changed(each, numbers) for each in value] if isinstance(value, list | tuple) else value


def with_settings(fuzz: settings, test: Function) -> None:
    """Run a test of hypothesis's as often as is asked for."""
    fuzz(test)()


def test_messages_have_numbers_that_are_finite_or_are_refused(fuzz: settings) -> None:
    with_floats = [(union, message) for union, message in LINKS if [*floats_of(msgspec.to_builtins(example(message)))]]
    assert {"SamplesFinished", "Trained", "RecordSamples"} <= {message.__name__ for _, message in with_floats}

    @given(link=st.sampled_from(with_floats), data=st.data())
    def run(link: tuple[Any, type[Message]], data: st.DataObject) -> None:
        union, message = link
        (frame,) = encode(example(message))
        plain = msgspec.msgpack.decode(bytes(frame))
        drawn = iter(lambda: data.draw(NUMBERS), None)
        try:
            decoded = MessageCodec[Message](union).decode([msgspec.msgpack.encode(changed(plain, drawn))]).message
            for field in ("metrics", "gpus"):
                require_finite(getattr(decoded, field, {}))
        except WireError:
            return
        assert all(map(math.isfinite, floats_of(msgspec.to_builtins(decoded))))
        for sample in getattr(decoded, "samples", ()):
            assert abs(sample.reward) <= LARGEST

    with_settings(fuzz, run)


def scored(place: int, score: Score) -> SampleScored:
    return SampleScored(
        group=place // SAMPLES,
        sample=place % SAMPLES,
        prompt_length=1,
        response_length=1,
        num_tokens=2,
        oldest_version=0,
        newest_version=0,
        tokens_by_version=(1,),
        num_turns=1,
        finish_reason="stop",
        reward=score.reward,
        components=dict(score.components),
        correct=score.correct,
        response="",
    )


def test_whatever_environments_return_becomes_a_finite_batch(fuzz: settings) -> None:
    estimators: list[dict[str, Any]] = [
        {"name": "grpo"},
        {"name": "grpo", "normalize_rewards": False},
        {"name": "gdpo"},
        {"name": "reinforce_plus_plus"},
    ]
    configs = [
        build_config(
            {
                "grpo": {"num_prompts_per_step": GROUPS, "num_generations_per_prompt": SAMPLES, "adv_estimator": each},
                "policy": {"model_name": "m", "train_global_batch_size": 6, "train_micro_batch_size": 6},
                "data": {"dataset_name": "reasoning_gym", "task": "chain_sum"},
            }
        )
        for each in estimators
    ]
    problem = Problem(problem_id="p", question="q", answer="a", metadata={})

    @given(config=st.sampled_from(configs), rewards=st.lists(NUMBERS, min_size=6, max_size=6), other=NUMBERS)
    def run(config: Any, rewards: list[float], other: float) -> None:
        records = []
        for place, reward in enumerate(rewards):
            score = Score(reward, correct=True, components={"a": reward, "b": other})
            outcome = outcome_of(ScoringCall(1, problem, ()), lambda *_, s=score: s, is_multi_turn=False, module="")
            if isinstance(outcome, Failure):
                assert not all(math.isfinite(value) and abs(value) <= LARGEST for value in (reward, other))
                outcome = Score(0.0, correct=False, components={"a": 0.0, "b": 0.0})
            assert isinstance(outcome, Score)
            records.append(SampleRecord(scored(place, outcome), "rollout-0", 1))
        try:
            batch, metrics = training_batch(config, 1, records, {group: group for group in range(GROUPS)})
        except RewardError:
            return
        batch.check_table(num_ranks=1, may_mask_all=True)
        assert all(map(math.isfinite, metrics.values()))
        assert np.abs(batch.advantages_S).max() <= LARGEST

    with_settings(fuzz, run)


def test_whatever_log_probabilities_engines_report_the_metrics_are_finite(fuzz: settings) -> None:
    shape = (2, 3)
    mask_BT = torch.tensor([[False, True, True]] * 2)

    @given(
        logprobs=st.lists(st.floats(width=32, max_value=0.0), min_size=4, max_size=4),
        others=st.lists(st.floats(-90, 0), min_size=4, max_size=4),
    )
    def run(logprobs: list[float], others: list[float]) -> None:
        given_T = np.array([0, *logprobs[:2], 0, *logprobs[2:]], dtype=np.float32)
        made_T = mask_BT.numpy().reshape(-1)
        arrays = SampleBatch(
            lengths_S=np.array([3, 3], dtype=np.int32),
            token_ids_T=np.zeros(6, dtype=np.int32),
            loss_mask_T=made_T,
            generation_logprobs_T=given_T,
            versions_T=np.where(made_T, 0, -1).astype(np.int32),
        )
        try:
            arrays.check_samples(vocabulary=10)
        except WireError:
            assert not np.isfinite(given_T).all()
            return
        kept_S = np.minimum.reduceat(given_T, [0, 3]) >= LEAST_LOGPROB
        kept_BT = mask_BT & torch.from_numpy(kept_S)[:, None]
        current_BT = torch.zeros(shape)
        current_BT[:, 1:] = torch.tensor(others).view(2, 2)
        batch = MicroBatch(
            rows=(0, 1),
            lengths_B=torch.tensor([3, 3]),
            token_ids_BT=torch.zeros(shape, dtype=torch.int64),
            attention_mask_BT=torch.ones(shape, dtype=torch.bool),
            loss_mask_BT=kept_BT,
            columns={GENERATION_LOGPROBS.name: torch.from_numpy(given_T).view(shape), "advantages": torch.ones(shape)},
        )
        count = Counts(tokens=int(kept_BT.sum()), sequences=int(kept_S.sum()))
        loss = PolicyGradientLoss(LossFn(reference_policy_kl_penalty=0.0), count, torch.device("cpu"))
        leaf_BT = current_BT.requires_grad_()
        value = loss(batch, TokenScores(leaf_BT, torch.ones(shape), torch.ones(shape)))
        value.backward()  # type: ignore[no-untyped-call]
        assert value.isfinite()
        assert leaf_BT.grad is not None
        assert leaf_BT.grad[kept_BT].isfinite().all()
        assert loss.report.sums.isfinite().all()

    with_settings(fuzz, run)
