"""Options of rewards, advantages and the policy-gradient loss: those that contradict each other are refused."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.common.errors import ConfigError
from tandem.config import Config, build_config, make_plain, notices
from tandem.config.schema.algorithms import DistillationLossConfig


def configure(loss_fn: dict[str, Any] | None = None, grpo: dict[str, Any] | None = None, **policy: Any) -> Config:
    return build_config(
        {
            "grpo": {"num_prompts_per_step": 4, "num_generations_per_prompt": 4} | (grpo or {}),
            "loss_fn": loss_fn or {},
            "policy": {"model_name": "model", "train_global_batch_size": 16, "train_micro_batch_size": 4} | policy,
            "data": {"dataset_name": "reasoning_gym", "task": "chain_sum"},
        }
    )


def error_of(loss_fn: dict[str, Any] | None = None, grpo: dict[str, Any] | None = None, **policy: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        configure(loss_fn, grpo, **policy)
    return str(caught.value).partition("loss_fn." if loss_fn else "grpo.")[2]


GSPO = {"sequence_level_importance_ratios": True, "token_level_loss": False}
REINFORCE_PLUS_PLUS = {"adv_estimator": {"name": "reinforce_plus_plus"}}


@pytest.mark.parametrize(
    ("loss_fn", "expected"),
    [
        (
            {"sequence_level_importance_ratios": True},
            "sequence_level_importance_ratios: true needs loss_fn.token_level_loss to be false: each sequence has one "
            "ratio",
        ),
        (
            {"use_cispo": True, "token_level_loss": False},
            "use_cispo: true needs loss_fn.token_level_loss to be true: CISPO is a mean over all tokens",
        ),
        (
            {"use_cispo": True, "disable_ppo_ratio": True},
            "use_cispo: true needs loss_fn.disable_ppo_ratio to be false: CISPO weights by the ratio",
        ),
        (
            {"use_cispo": True, "force_on_policy_ratio": True},
            "use_cispo: true needs loss_fn.force_on_policy_ratio to be false: CISPO weights by the ratio",
        ),
        (
            {"use_cispo": True, "ratio_clip_c": 3},
            "use_cispo: true needs loss_fn.ratio_clip_c to be null: no loss of CISPO grows with the ratio",
        ),
        (
            {"disable_ppo_ratio": True, "ratio_clip_c": 3},
            "disable_ppo_ratio: true needs loss_fn.ratio_clip_c to be null: there is no ratio to bound",
        ),
        (
            {"disable_ppo_ratio": True, "force_on_policy_ratio": True},
            "disable_ppo_ratio: true needs loss_fn.force_on_policy_ratio to be false: there is no ratio to force",
        ),
        (
            {"truncated_importance_sampling_type": "tis", "truncated_importance_sampling_ratio": 2},
            "truncated_importance_sampling_type: 'tis' needs loss_fn.use_importance_sampling_correction to be true: it "
            "bounds that correction",
        ),
        (
            {"truncated_importance_sampling_ratio": 2},
            "truncated_importance_sampling_type: null, but loss_fn.truncated_importance_sampling_ratio is 2: expected "
            "tis, icepop or seq-mask-tis",
        ),
        (
            {"use_importance_sampling_correction": True, "truncated_importance_sampling_type": "tis"},
            "truncated_importance_sampling_ratio: null, but loss_fn.truncated_importance_sampling_type tis needs it",
        ),
        (
            {
                "use_importance_sampling_correction": True,
                "truncated_importance_sampling_type": "icepop",
                "truncated_importance_sampling_ratio": 2,
            },
            "truncated_importance_sampling_ratio_min: null, but loss_fn.truncated_importance_sampling_type icepop "
            "needs it",
        ),
        (
            {
                "use_importance_sampling_correction": True,
                "truncated_importance_sampling_type": "icepop",
                "truncated_importance_sampling_ratio": 2,
                "truncated_importance_sampling_ratio_min": 3,
            },
            "truncated_importance_sampling_ratio_min: 3 is more than loss_fn.truncated_importance_sampling_ratio (2)",
        ),
        (
            {
                **GSPO,
                "use_importance_sampling_correction": True,
                "truncated_importance_sampling_type": "seq-mask-tis",
                "truncated_importance_sampling_ratio": 2,
                "truncated_importance_sampling_ratio_min": 0.5,
            },
            "truncated_importance_sampling_type: seq-mask-tis weights each token, but "
            "loss_fn.sequence_level_importance_ratios each sequence",
        ),
        (
            {"truncated_importance_sampling_type": "tiss"},
            "truncated_importance_sampling_type: 'tiss' is not one of icepop, seq-mask-tis, tis; did you mean 'tis'?",
        ),
        (
            {"use_kl_in_reward": True},
            "use_kl_in_reward: true needs grpo.adv_estimator.name to be reinforce_plus_plus: grpo has one advantage a "
            "sample",
        ),
    ],
)
def test_losses_that_contradict_themselves(loss_fn: dict[str, Any], expected: str) -> None:
    assert error_of(loss_fn) == expected


def test_the_divergence_in_the_reward() -> None:
    assert error_of({"use_kl_in_reward": True, "reference_policy_kl_penalty": 0}, REINFORCE_PLUS_PLUS) == (
        "use_kl_in_reward: true needs loss_fn.reference_policy_kl_penalty to be more than 0"
    )
    both = {"use_kl_in_reward": True, "use_on_policy_kl_approximation": True}
    assert error_of(both, REINFORCE_PLUS_PLUS) == (
        "use_kl_in_reward: true needs loss_fn.use_on_policy_kl_approximation to be false: only a divergence in the "
        "loss is weighted"
    )
    assert configure({"use_kl_in_reward": True}, REINFORCE_PLUS_PLUS).loss_fn.use_kl_in_reward


def test_the_mean_has_the_names_of_trl_too() -> None:
    for loss_type, token_level in (("dapo", True), ("bnpo", True), ("dr_grpo", True), ("grpo", False), (None, True)):
        config = configure({"loss_type": loss_type}, generation={"max_new_tokens": 48})
        assert config.loss_fn.token_level_loss == token_level
        assert config.loss_fn.loss_scale_factor == (48 if loss_type == "dr_grpo" else None)
    assert configure({"loss_type": "dr_grpo", "loss_scale_factor": 7}).loss_fn.loss_scale_factor == 7
    assert error_of({"loss_type": "grpo", "token_level_loss": True}) == (
        "token_level_loss: loss_fn.loss_type grpo needs false, or no such key"
    )
    assert error_of({"loss_type": "dapo", "token_level_loss": False}) == (
        "token_level_loss: loss_fn.loss_type dapo needs true, or no such key"
    )
    assert error_of({"loss_scale_factor": 7}) == "loss_scale_factor: 7 needs loss_fn.loss_type to be dr_grpo"
    assert error_of({"loss_type": "dr-grpo"}) == (
        "loss_type: 'dr-grpo' is not one of bnpo, dapo, dr_grpo, grpo; did you mean 'dr_grpo'?"
    )


def test_the_divisor_of_advantages_has_the_names_of_trl_too() -> None:
    for scale, normalizes in (("group", True), ("batch", True), ("none", False), (None, True)):
        for grpo in ({"scale_rewards": scale}, {"adv_estimator": {"scale_rewards": scale}}):
            estimator = configure(None, grpo).grpo.adv_estimator
            assert (estimator.scale_rewards, estimator.normalize_rewards) == (scale, normalizes)
    assert error_of(None, {"scale_rewards": "batch", "normalize_rewards": False}) == (
        "normalize_rewards: grpo.scale_rewards batch needs true, or no such key"
    )
    assert error_of(None, {"scale_rewards": "none", "normalize_rewards": True}) == (
        "normalize_rewards: grpo.scale_rewards none needs false, or no such key"
    )
    assert error_of(None, {"scale_rewards": "batch", "adv_estimator": {"name": "gdpo"}}) == (
        "scale_rewards: batch, but grpo.adv_estimator.name gdpo has a divisor of its own"
    )
    assert error_of(None, {"scale_rewards": "none", **REINFORCE_PLUS_PLUS}) == (
        "scale_rewards: none, but grpo.adv_estimator.name reinforce_plus_plus has a divisor of its own"
    )


def test_a_forced_ratio_is_for_one_optimizer_step() -> None:
    assert configure({"force_on_policy_ratio": True}).loss_fn.force_on_policy_ratio
    assert error_of({"force_on_policy_ratio": True}, train_global_batch_size=8) == (
        "force_on_policy_ratio: true needs one optimizer step a rollout batch: policy.train_global_batch_size is 8, "
        "grpo.num_prompts_per_step * grpo.num_generations_per_prompt 16"
    )
    error = error_of({"force_on_policy_ratio": True}, {"num_iterations": 2})
    assert error.endswith("grpo.num_generations_per_prompt 16, and it passes over it 2 times")


@pytest.mark.parametrize(
    ("grpo", "expected"),
    [
        (
            {"reward_scaling": {"enabled": True, "source_min": 1}},
            "reward_scaling.source_max: 1 is not more than grpo.reward_scaling.source_min (1)",
        ),
        (
            {"reward_shaping": {"enabled": True, "overlong_buffer_length": 4, "overlong_buffer_penalty": 1}},
            "reward_shaping.max_response_length: null, but grpo.reward_shaping.enabled needs it, or "
            "stop_properly_penalty_coef in its place",
        ),
        (
            {
                "num_prompts_per_step": 16,
                "num_generations_per_prompt": 1,
                "use_leave_one_out_baseline": False,
                "use_dynamic_sampling": True,
            },
            "num_generations_per_prompt: 1, but grpo.use_dynamic_sampling needs at least 2 samples of each prompt",
        ),
        (
            {"adv_estimator": {"name": "gdpo"}, "reward_shaping": {"enabled": True, "stop_properly_penalty_coef": 0}},
            "reward_shaping.enabled: true, but grpo.adv_estimator.name gdpo takes the components of the reward, which "
            "are not shaped",
        ),
        (
            {"adv_estimator": {"name": "grppo"}},
            "adv_estimator.name: 'grppo' is not one of gdpo, grpo, opd, reinforce_plus_plus; did you mean 'grpo'?",
        ),
    ],
)
def test_rewards_and_advantages(grpo: dict[str, Any], expected: str) -> None:
    assert error_of(None, grpo) == expected


LATER_GRPO = {
    "adv_estimator": {
        "name": "grpo",
        "normalize_rewards": True,
        "use_leave_one_out_baseline": False,
        "minus_baseline": True,
        "reward_weights": None,
    },
    "overlong_filtering": False,
    "use_dynamic_sampling": True,
    "dynamic_sampling_max_gen_batches": 10,
    "batch_multiplier": 3,
    "reward_scaling": {
        "enabled": True,
        "source_min": 0.0,
        "source_max": 1.0,
        "target_min": -1.0,
        "target_max": 1.0,
    },
    "reward_shaping": {
        "enabled": True,
        "overlong_buffer_length": 2048,
        "overlong_buffer_penalty": 1,
        "max_response_length": 14336,
        "stop_properly_penalty_coef": None,
    },
}
LATER_LOSS = {
    "reference_policy_kl_penalty": 0.0,
    "reference_policy_kl_type": "k3",
    "kl_input_clamp_value": 20.0,
    "kl_output_clamp_value": 10.0,
    "use_kl_in_reward": False,
    "ratio_clip_min": 0.2,
    "ratio_clip_max": 0.28,
    "ratio_clip_c": 10,
    "disable_ppo_ratio": False,
    "use_cispo": False,
    "force_on_policy_ratio": False,
    "use_on_policy_kl_approximation": False,
    "use_importance_sampling_correction": False,
    "truncated_importance_sampling_type": None,
    "truncated_importance_sampling_ratio": None,
    "truncated_importance_sampling_ratio_min": None,
    "sequence_level_importance_ratios": False,
    "positive_example_nll_weight": 0.0,
    "token_level_loss": True,
}


def test_the_names_of_later_releases_of_nemo_rl_are_known() -> None:
    """The keys of its base file, with the values of its recipe for DAPO."""
    config = configure(LATER_LOSS, LATER_GRPO)
    assert notices(config) == []
    of_trl = {"entropy_coef", "loss_type", "loss_scale_factor"}
    besides = {"class_path", "kwargs", "columns", *of_trl, *DistillationLossConfig.__struct_fields__}
    assert set(config.loss_fn.__struct_fields__) - besides == set(LATER_LOSS), "each of them, and no other of our own"
    assert config.grpo.num_prompts_per_batch == 12


def test_what_is_in_vain_is_said() -> None:
    shaping = {"enabled": True, "stop_properly_penalty_coef": 0.5, "max_response_length": 512}
    config = configure(grpo={"reward_shaping": shaping, "adv_estimator": {"reward_weights": [1, 2]}})
    assert notices(config) == [
        "grpo.reward_shaping.max_response_length (512) has no effect: grpo.reward_shaping.stop_properly_penalty_coef "
        "is set",
        "grpo.adv_estimator.reward_weights ([1.0, 2.0]) has no effect: grpo.adv_estimator.name is grpo",
    ]
    assert notices(configure(grpo={"reward_shaping": {**shaping, "max_response_length": None}})) == []
    config = configure(grpo={"batch_multiplier": 1.5})
    assert notices(config) == ["grpo.batch_multiplier (1.5) has no effect: grpo.use_dynamic_sampling is false"]
    assert config.grpo.num_prompts_per_batch == config.grpo.num_prompts_per_step


def test_a_reference_model_that_the_loss_reads_is_not_skipped() -> None:
    skipped = {"skip_reference_policy_logprobs_calculation": True}
    assert not configure(grpo=skipped, loss_fn={"reference_policy_kl_penalty": 0.0}).needs_reference
    with pytest.raises(ConfigError, match=r"grpo\.skip_reference.*: true, but loss_fn\.reference.* is 0\.01$"):
        configure(grpo=skipped)


ASYNCHRONOUS = {"async_grpo": {"enabled": True, "max_trajectory_age_steps": 4}}
APART = {"generation": {"colocated": {"enabled": False}}}
CORRECTION = {"use_importance_sampling_correction": True}


def test_samples_of_older_weights_want_a_correction() -> None:
    assert notices(configure(grpo=ASYNCHRONOUS, **APART)) == [
        "loss_fn.use_importance_sampling_correction is false: samples of older weights are treated like those of the "
        "newest (grpo.async_grpo.max_trajectory_age_steps: 4)"
    ]
    assert notices(configure(CORRECTION, ASYNCHRONOUS, **APART)) == []
    assert notices(configure()) == [], "synchronous training has no older weights"


@pytest.mark.parametrize(
    ("keep_copy", "over", "expected"),
    [
        ("auto", {}, True),
        ("auto", {"in_flight_weight_updates": True}, False),
        ("auto", {"max_trajectory_age_steps": 1}, False),
        ("auto", {"enabled": False}, False),
        ("on", {"in_flight_weight_updates": True}, True),
        ("on", {"enabled": False}, False),
        ("off", {}, False),
    ],
)
def test_a_copy_is_kept_where_trainers_would_wait(keep_copy: str, over: dict[str, Any], expected: bool) -> None:
    asynchronous = {"async_grpo": ASYNCHRONOUS["async_grpo"] | over}
    known = make_plain(configure(CORRECTION, asynchronous, **APART))
    config = build_config(known | {"refit": {"keep_copy": keep_copy}})
    assert config.keeps_copy is expected
    vain = "refit.keep_copy (on) has no effect: grpo.async_grpo.enabled is false"
    assert (vain in notices(config)) == (keep_copy == "on" and not expected)


def test_engines_generate_during_training_on_devices_of_their_own() -> None:
    assert error_of(grpo=ASYNCHRONOUS) == (
        "async_grpo.enabled: true needs policy.generation.colocated.enabled: false: engines generate while trainers "
        "train"
    )


STREAMED = {"streaming_training": True}
WHOLE = {"train_global_batch_size": 64, **APART}


def refusal_of(loss_fn: dict[str, Any] | None = None, *, policy: dict[str, Any] | None = None, **grpo: Any) -> str:
    """Return why streaming training is refused with these settings; empty if it is not."""
    size = {"num_prompts_per_step": 8, "num_generations_per_prompt": 8}
    try:
        configure(CORRECTION | (loss_fn or {}), STREAMED | size | grpo, **WHOLE | (policy or {}))
    except ConfigError as error:
        return str(error).partition("grpo.streaming_training: true, but ")[2] or str(error)
    return ""


def test_groups_are_trained_on_as_they_come_where_each_determines_its_gradient() -> None:
    assert refusal_of() == ""
    assert refusal_of({"token_level_loss": False}) == ""
    assert refusal_of({"entropy_coef": 0.1}) == ""
    assert refusal_of({"loss_type": "dr_grpo"}) == ""
    shaping = {"enabled": True, "max_response_length": 8, "overlong_buffer_length": 4, "overlong_buffer_penalty": 1.0}
    assert refusal_of(reward_shaping=shaping) == ""
    assert refusal_of(async_grpo={"enabled": True}) == ""


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (
            {"policy": {"generation": {"colocated": {"enabled": True}}}},
            "policy.generation.colocated.enabled is true: engines generate while trainers train",
        ),
        ({"num_iterations": 2}, "grpo.num_iterations is 2: the whole batch has to be there for a second pass"),
        ({"num_prompts_per_step": 16}, "policy.train_global_batch_size is 64: a step of 128 samples must be one batch"),
        ({"use_dynamic_sampling": True}, "grpo.use_dynamic_sampling is true: which groups count is known at the end"),
        ({"scale_rewards": "batch"}, "grpo.adv_estimator.scale_rewards is batch: its advantages need the whole batch"),
        (
            {"adv_estimator": {"name": "reinforce_plus_plus"}},
            "grpo.adv_estimator.name is reinforce_plus_plus: its advantages need the whole batch",
        ),
        (
            {"seq_logprob_error_threshold": 2.0},
            "grpo.seq_logprob_error_threshold is 2: a pass over the whole batch leaves sequences out",
        ),
        (
            {"loss_fn": {"loss_type": "bnpo"}},
            "loss_fn.loss_type is bnpo: it depends on what is together in a micro-batch",
        ),
        (
            {"loss_fn": {"positive_example_nll_weight": 0.1}},
            "loss_fn.positive_example_nll_weight is 0.1: it divides by the tokens of samples with a reward",
        ),
        (
            {"loss_fn": {"entropy_coef": 0.1, "token_level_loss": False}},
            "loss_fn.entropy_coef is 0.1: it divides by tokens, and the rest by sequences",
        ),
        ({"loss_fn": {"class": "mine.Loss"}}, "loss_fn.class is mine.Loss: what it divides by is not known"),
        (
            {"policy": {"dtensor_cfg": {"lora_cfg": {"enabled": True, "dropout": 0.1}}}},
            "the adapters' dropout is 0.1: what is dropped depends on a micro-batch's place",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_streaming_training_is_refused_where_the_whole_batch_is_needed(settings: dict[str, Any], expected: str) -> None:
    assert refusal_of(**settings) == expected


def test_ppo_is_asynchronous_by_a_section_of_its_own() -> None:
    ppo = {"async_ppo": ASYNCHRONOUS["async_grpo"]}
    known = make_plain(configure(CORRECTION, {}, **APART)) | {"algorithm": "ppo"}
    known = {key: value for key, value in known.items() if key not in ("grpo", "value")}
    config = build_config(known | {"ppo": ppo})
    assert (config.max_trajectory_age_steps, config.updates_in_flight) == (4, False)
    assert notices(config) == []
    assert not build_config(known | {"ppo": {"async_ppo": {"enabled": False}}}).max_trajectory_age_steps
    assert notices(build_config(known | {"ppo": {"async_ppo": None}})) == []
    in_vain = {
        "warmup_generation_lead_steps": 2,
        "max_generation_failures": 3,
        "drop_incomplete_targets_on_restore": True,
    }
    said = notices(build_config(known | {"ppo": {"async_ppo": ppo["async_ppo"] | in_vain}}))
    assert sorted(line.partition(" ")[0] for line in said) == sorted(f"ppo.async_ppo.{key}" for key in in_vain)
    colocated = {**known["policy"], "generation": known["policy"]["generation"] | {"colocated": {"enabled": True}}}
    with pytest.raises(ConfigError, match=r"ppo\.async_ppo\.enabled: true needs policy\.generation\.colocated"):
        build_config(known | {"ppo": ppo, "policy": colocated})


def test_the_estimator_takes_what_the_section_says() -> None:
    config = configure(grpo={"normalize_rewards": False, "adv_estimator": {"use_leave_one_out_baseline": False}})
    assert config.grpo.adv_estimator.normalize_rewards is False
    assert config.grpo.adv_estimator.use_leave_one_out_baseline is False
    assert config.grpo.use_leave_one_out_baseline


def test_a_group_of_one_needs_no_other_where_none_is_left_out() -> None:
    one = {"num_prompts_per_step": 16, "num_generations_per_prompt": 1}
    assert configure(grpo=one | REINFORCE_PLUS_PLUS)
    assert "needs at least 2" in error_of(None, one)
