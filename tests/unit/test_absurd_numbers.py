"""Numbers that are absurd, finite or not: bounds where they enter, and groups that are set aside."""

from __future__ import annotations

import json
import math
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from data_harness import character_tokenizer
from environment_harness import config, problem, said
from loss_harness import COUNTS, CPU, CURRENT_BT, MASK_BT, micro_batch, scores, settings
from run_harness import Run, make_config, record, samples_of_step
from samples_harness import scored

from tandem.common.curve import AdmittedKeys
from tandem.common.errors import ConfigError, RewardError, WireError
from tandem.common.messages import LARGEST, FromRewardServer, FromRollout, ResponsesScored, SamplesFinished
from tandem.common.numeric import LARGEST_LOG_RATIO, LEAST_LOGPROB, bound
from tandem.common.wire import MessageCodec, encode
from tandem.config import build_config
from tandem.config.schema import ReplayConfig
from tandem.coordinator.algorithms import make_algorithm
from tandem.coordinator.algorithms.recorded import RecordedAlgorithm
from tandem.coordinator.algorithms.step_batch import training_batch
from tandem.coordinator.api.rewards import reward_functions, total
from tandem.coordinator.scheduler.events import SampleRecord
from tandem.rollout.agents.episodes import read_reward
from tandem.rollout.environments import Score, Turn
from tandem.rollout.environments.outcomes import Failure, FaultPolicy, ScoringCall, beyond_in_sum, outcome_of
from tandem.samples.batch import SampleBatch
from tandem.trainer.losses.policy_gradient import PolicyGradientLoss
from tandem.trainer.set_aside import finite_metrics, least_logprobs, not_finite, set_aside
from tests.harness.members import MEMBER

ABSURD = [1e39, 1e308, math.nan, math.inf, -math.inf, -2e12, 10**400, np.float64(1e13)]


# --- rewards ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ABSURD, ids=lambda value: repr(value)[:12])
@pytest.mark.parametrize("place", ["reward", "component", "cost", "turn"])
def test_on_error_says_what_becomes_of_an_absurd_reward(place: str, value: Any) -> None:
    returned = {
        "reward": Score(value, correct=True),
        "component": Score(1.0, correct=True, components={"part": value}),
        "cost": Score(1.0, correct=True, spent={"dollars": value}),
        "turn": Turn([{"role": "user", "content": "and?"}], value),
    }[place]
    call = ScoringCall(1, problem(), tuple(said("x")))
    outcome = outcome_of(call, lambda *_: returned, is_multi_turn=True, module="")
    assert isinstance(outcome, Failure)
    for on_error in ("zero", "drop"):
        faults = FaultPolicy(config("mine", {"class": "mine.Judge", "on_error": on_error}))
        unscored = faults.judged(call.problem, call.conversation, outcome)
        assert unscored.dropped == (on_error == "drop")
        assert unscored.failure.startswith("environment 'mine', problem 'p1': the ")
        assert " is " in unscored.failure
    with pytest.raises(RewardError, match=r"^environment 'mine', problem 'p1': the "):
        FaultPolicy(config("mine", {"class": "mine.Judge"})).judged(call.problem, call.conversation, outcome)


def test_a_bound_is_named_and_reached() -> None:
    for reward in (LARGEST, -LARGEST, 5, np.float32(0.5)):
        assert outcome_of(
            ScoringCall(1, problem(), ()), lambda *_, r=reward: Score(r, True), is_multi_turn=False, module=""
        ) == (Score(float(reward), True))
    outcome = outcome_of(ScoringCall(1, problem(), ()), lambda *_: Score(1e39, True), is_multi_turn=False, module="")
    assert outcome == Failure("the reward is 1e+39, not a number from -1e+12 to 1e+12")


def test_turns_are_bounded_together() -> None:
    assert not beyond_in_sum(LARGEST, Score(0.0, correct=False))
    assert beyond_in_sum(LARGEST, Turn([], 1e6)) == (
        "the sum of the rewards is 1000001000000.0, not a number from -1e+12 to 1e+12"
    )


@pytest.mark.parametrize("value", [1e39, 1e308, -2e12])
def test_agents_and_functions_are_held_to_it(value: float) -> None:
    with pytest.raises(RewardError, match="not a number from"):
        read_reward(json.dumps({"reward": value}).encode())
    with pytest.raises(RewardError, match="not a number from"):
        total(reward_functions([lambda response: 1.0] * 2, [1.0, 1.0]), [value, 1.0])
    with pytest.raises(ConfigError, match=r"^reward_weights\[0\]: .* not a number from"):
        reward_functions([lambda response: 1.0], [value])


def test_a_process_that_sends_one_breaks_the_protocol() -> None:
    finished = SamplesFinished(command_id=1, step=1, purpose="train", samples=(scored(0, 0, reward=1e39),))
    with pytest.raises(WireError, match=r"reward: Expected `float` <= 1000000000000"):
        MessageCodec(FromRollout).decode([bytes(frame) for frame in encode(finished)])
    plain = msgspec.msgpack.decode(encode(ResponsesScored(scored=()))[0])
    plain["scored"] = [{"number": 1, "reward": -1e39}]
    with pytest.raises(WireError, match=r"reward: Expected `float` >= -1000000000000"):
        MessageCodec(FromRewardServer).decode(
            [msgspec.msgpack.encode(plain), *map(bytes, encode(ResponsesScored(scored=()))[1:])]
        )


def test_a_recorded_sample_that_has_one_is_dropped() -> None:
    sample = scored(3, 1, reward=1.0, components={"a": 1.0}, spent={"dollars": 0.5})
    assert bound(sample) is sample
    wrong = bound(msgspec.structs.replace(sample, reward=1e39))
    assert (wrong.reward, wrong.components, wrong.dropped) == (0.0, {}, True)
    assert wrong.failure == "group 3, sample 1: the reward is 1e+39, not a number from -1e+12 to 1e+12"
    assert bound(msgspec.structs.replace(sample, components={"a": math.nan})).dropped
    cheaper = bound(msgspec.structs.replace(sample, spent={"dollars": 1e300, "tokens": 1.0}))
    assert (cheaper.spent, cheaper.dropped) == ({"tokens": 1.0}, False)


def test_a_replay_drops_a_recorded_sample_that_has_one() -> None:
    run = Run("run")
    samples = samples_of_step(1, num_samples=2)
    scored_so = msgspec.structs.replace(samples[2].scored, reward=1e39)
    record(run, [*samples[:2], msgspec.structs.replace(samples[2], scored=scored_so), samples[3]])
    replay = ReplayConfig(run="run", run_id=run.journal.run_id, from_step=0, to_step=1)
    config = msgspec.structs.replace(make_config(), replay=replay)
    algorithm = make_algorithm(config, character_tokenizer(config))
    assert isinstance(algorithm, RecordedAlgorithm)
    try:
        algorithm.serve("tcp://127.0.0.1:1234", "again", 1, AdmittedKeys([MEMBER.public]))
        batch, metrics = algorithm.batch(1, "train")
    finally:
        algorithm.close()
    assert metrics["environment_dropped"] == 1
    assert batch.num_valid_S.astype(bool).tolist() == [True, True, False, True]
    assert np.isfinite(batch.advantages_S).all()


def test_a_group_whose_advantage_is_absurd_is_set_aside_and_named() -> None:
    """Two rewards that hardly differ are a tiny spread, and the third, without it, is very far from them."""
    config = make_config()
    config = msgspec.structs.replace(
        config, grpo=msgspec.structs.replace(config.grpo, num_generations_per_prompt=3, num_prompts_per_step=2)
    )
    rows = samples_of_step(1, num_samples=3)
    rewards = [1e12, 0.0, 1e-9, 1.0, 0.0, 2.0]
    records = [
        SampleRecord(msgspec.structs.replace(row.scored, reward=reward), row.rollout, row.command_id)
        for row, reward in zip(rows, rewards, strict=True)
    ]
    batch, metrics = training_batch(config, 1, records, {0: "a", 1: "b"})
    assert metrics["groups_set_aside/rewards"] == 1
    assert batch.num_valid_S.astype(bool).tolist() == [False] * 3 + [True] * 3
    assert batch.advantages_S.tolist()[:3] == [0.0] * 3
    (note,) = batch.notes
    assert note.startswith("group 0, sample 0: its advantage is ")
    assert note.endswith("not a number from -1e+12 to 1e+12: groups with such a sample are set aside")


# --- log-probabilities -----------------------------------------------------------------------------------------------


def share_of(logprobs: list[float], lengths: list[int]) -> SampleBatch:
    lengths_S = np.array(lengths, dtype=np.int32)
    num_tokens = int(lengths_S.sum())
    return SampleBatch(
        lengths_S=lengths_S,
        token_ids_T=np.zeros(num_tokens, dtype=np.int32),
        loss_mask_T=np.ones(num_tokens, dtype=np.bool_),
        generation_logprobs_T=np.array(logprobs, dtype=np.float32),
        advantages_S=np.zeros(len(lengths), dtype=np.float32),
        rewards_S=np.zeros(len(lengths), dtype=np.float32),
    )


def test_the_groups_of_absurd_log_probabilities_are_set_aside() -> None:
    rows = samples_of_step(1)
    records = [SampleRecord(row.scored, row.rollout, row.command_id) for row in rows]
    table = training_batch(make_config(), 1, records, {0: "a", 1: "b"})[0]
    logprobs = [-1.0] * int(table.lengths_S.sum())
    logprobs[5] = -100.0
    share = share_of(logprobs, table.lengths_S.tolist())
    least_S = least_logprobs(share)
    assert least_S.tolist() == [0.0, -100.0, 0.0, 0.0]
    aside = set_aside(table, share, np.arange(4), least_S, lambda values: 2 * values)
    assert aside.num_aside == 1
    assert aside.table.num_valid_S.astype(bool).tolist() == [False, False, True, True]
    assert aside.samples.loss_mask_T.tolist() == [False] * 9 + [True] * 9
    assert aside.notes == (
        "group 0, sample 1 of rollout-0 has a log-probability of -100 for a token that was drawn, below -40, which is "
        "as far as float32 carries: group 0 is set aside",
    )
    assert not least_logprobs(share_of([LEAST_LOGPROB], [1])).any()
    assert len(least_logprobs(share_of([], []))) == 0


@pytest.mark.parametrize("logprob", [-100.0, -1e30, LEAST_LOGPROB, -1.0])
def test_metrics_stay_finite_and_sane_ones_are_what_they_were(logprob: float) -> None:
    gone_BT = torch.where(MASK_BT, logprob, 0.0)
    for changes in ({"generation_logprobs_BT": gone_BT}, {"previous_logprobs_BT": gone_BT}):
        batch = micro_batch(**changes)
        loss = PolicyGradientLoss(settings(), COUNTS, CPU)
        loss(batch, scores(CURRENT_BT))
        found = dict(zip(loss.report.names, loss.report.sums.tolist(), strict=True))
        assert math.isfinite(found["token_mult_prob_error"])
        assert math.isfinite(found["approx_kl"])
        previous_BT = batch.previous_logprobs_BT
        assert previous_BT is not None
        errors = (batch.generation_logprobs_BT - previous_BT).abs()[MASK_BT]
        if bool((errors < LARGEST_LOG_RATIO).all()):
            assert found["token_mult_prob_error"] == float(errors.exp().sum(dtype=torch.float64))


def test_a_metric_that_is_no_finite_number_is_left_out_by_name() -> None:
    sane = {"loss": 1.0, "kl": -2.0}
    assert finite_metrics(sane) == (sane, ())
    metrics, notes = finite_metrics(sane | {"mine": math.inf, "other": math.nan})
    assert metrics == sane | {"metrics_not_finite": 2.0}
    assert notes == ("metrics that are no finite number: mine (inf), other (nan)",)


def test_rows_whose_gradient_is_not_finite_are_found_and_padding_is_not_asked() -> None:
    batch = micro_batch()

    class Loss:
        def __init__(self, weights_BT: torch.Tensor, constant: float = 0.0) -> None:
            self._weights_BT, self._constant = weights_BT, constant

        def __call__(self, batch: Any, scores: Any) -> torch.Tensor:
            return torch.where(batch.loss_mask_BT, self._weights_BT * scores.logprobs, 0.0).sum() + self._constant

    def found(weights: list[list[float]], constant: float = 0.0) -> list[int]:
        return not_finite(Loss(torch.tensor(weights), constant), batch, scores(CURRENT_BT.float()))  # type: ignore[arg-type]

    assert found([[1.0] * 4, [1.0] * 4]) == []
    assert found([[math.nan, 1.0, 1.0, 1.0], [1.0, math.inf, 1.0, 1.0]]) == [], "no token counts there"
    assert found([[1.0] * 4, [1.0, 1.0, 1e30, 1.0]]) == [1], "its square is not in float32"
    assert found([[1.0] * 4, [1.0] * 4], math.inf) == [0, 1]


# --- the configuration -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("over", "message"),
    [
        (
            {"policy": {"optimizer": {"name": "torch.optim.AdamW", "kwargs": {"lr": 1e300}}}},
            "policy.optimizer.kwargs.lr: 1e+300 must be from",
        ),
        (
            {"policy": {"generation": {"temperature": 1e-300}}},
            "policy.generation.temperature: 1e-300 must be 0 or at least 1e-30",
        ),
        ({"loss_fn": {"reference_policy_kl_penalty": 1e39}}, "loss_fn.reference_policy_kl_penalty: 1e+39 must be from"),
        ({"policy": {"max_grad_norm": 1e-40}}, "policy.max_grad_norm: 1e-40 must be 0 or at least 1e-30"),
        (
            {"grpo": {"reward_scaling": {"enabled": True, "target_max": 1e200}}},
            "grpo.reward_scaling.target_max: 1e+200 must be from",
        ),
    ],
)
def test_settings_that_float32_does_not_carry_are_refused(over: dict[str, Any], message: str) -> None:
    plain: dict[str, Any] = {
        "grpo": {"num_prompts_per_step": 2, "num_generations_per_prompt": 2},
        "policy": {"model_name": "model", "train_global_batch_size": 4, "train_micro_batch_size": 4},
        "data": {"dataset_name": "reasoning_gym", "task": "chain_sum"},
    }
    with pytest.raises(ConfigError) as caught:
        build_config({name: plain.get(name, {}) | over.get(name, {}) for name in plain | over})
    assert message in str(caught.value)
