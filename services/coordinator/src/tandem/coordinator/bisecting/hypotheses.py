"""Hypotheses about a trouble, by its finding: settings to set back, and sets of samples to leave out.

A setting is changed in a replay of recorded samples where training alone shows the trouble, and otherwise in a short
run of its own, which generates. Settings that are as usual are left alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import msgspec

from tandem.config import Config
from tandem.config.checks.data import BUILT_IN_ENVIRONMENTS
from tandem.config.notice_rules import FAR_ABOVE, find_max_learning_rate
from tandem.coordinator.bisecting.troubles import RunTrouble

Kind = Literal["replay", "rerun", "samples", "ages", "rewards"]
_USUAL_SHARE = 0.05
"""Share of the rate that pretraining of a model of this width bears which a rate is set back to."""
_LONGER = 4
"""Factor of a limit of tokens."""
_OVERRIDE = "_override_"
_GROUP = 8
"""Samples of a prompt where there are too few to compare."""


class CauseHypothesis(msgspec.Struct, frozen=True, kw_only=True):
    """A possible cause, and the change of a trial that would undo it."""

    kind: Kind
    """replay and rerun change settings; samples and ages leave recorded samples out, rewards changes theirs."""
    cause: str = ""
    """Key, or keys, of the configuration."""
    was: str = ""
    """Value that the run has."""
    settings: dict[str, Any] = {}
    """New values by key."""


def list_hypotheses(config: Config, trouble: RunTrouble) -> list[CauseHypothesis]:
    """Return the hypotheses about a trouble, in the order in which they are tried."""
    rolls_out = config.declaration.rolls_out
    replays: Kind = "replay" if trouble.is_of_trainers and rolls_out else "rerun"
    rate = [*_lower_rate(config, replays)]
    samples = [CauseHypothesis(kind="samples")] if replays == "replay" else []
    rewards = [CauseHypothesis(kind="rewards")] if replays == "replay" else []
    match trouble.finding:
        case "learning rate too large":
            return [*rate, *samples, *_clipping(config, replays)] if trouble.is_certain else [*samples, *rate]
        case "no learning rate" | "learning rate too small" | "unchanged weights":
            return [*_usual_rate(config, replays)]
        case "numbers out of proportion":
            return [*samples, *rewards, *_outliers(config, replays), *rate]
        case "clip range too narrow":
            return [*_set_back(config, {"loss_fn.ratio_clip_min": 0.2, "loss_fn.ratio_clip_max": 0.2}, replays)]
        case "KL penalty too large":
            return [*_set_back(config, {"loss_fn.reference_policy_kl_penalty": 0.01}, replays)]
        case "dropout":
            return [*_dropout(config)]
        case "stale samples":
            return [CauseHypothesis(kind="ages"), *_ages(config), *_lower_rate(config, "rerun")]
        case "overfitting":
            return [*_set_back(config, {"data.num_train": None}, "rerun"), *_lower_rate(config, "rerun")]
        case "repeated problems":
            return [*_set_back(config, {"data.num_train": None}, "rerun")]
        case "":
            return [
                *samples,
                *rewards,
                *rate,
                *_clipping(config, replays),
                *_of_generation(config),
                *_of_rewards(config),
            ]
        case "equal rewards":
            return [*rewards, *_of_generation(config), *_of_rewards(config), *_of_groups(config)]
        case _:
            generated = [*_of_generation(config), *_of_rewards(config)] if rolls_out else []
            return [*generated, *_of_groups(config)] if rolls_out else [*_lower_rate(config, "rerun")]


def value_of(config: Config, key: str) -> Any:
    """Return the value of a key; None where a section on the way is null."""
    node: Any = config
    for part in key.split("."):
        node = node.get(part) if isinstance(node, dict) else getattr(node, part, None)
    return node


def rate_key(config: Config) -> str:
    """Return the key of the learning rate."""
    return "policy.megatron_cfg.optimizer.lr" if config.policy.megatron_cfg.enabled else "policy.optimizer.kwargs.lr"


def _set_back(config: Config, values: dict[str, Any], kind: Kind) -> Iterator[CauseHypothesis]:
    """Yield one hypothesis: these settings together, if any of them is not so already."""
    changed = {key: value for key, value in values.items() if value_of(config, key) != value}
    if changed:
        was = ", ".join(_show(value_of(config, key)) for key in changed)
        yield CauseHypothesis(kind=kind, cause=", ".join(changed), was=was, settings=changed)


def _usual(config: Config) -> float | None:
    """Return a rate that is usual for the width of the model; None if that is unknown."""
    max_rate = find_max_learning_rate(config)
    return None if max_rate is None else float(f"{max_rate / FAR_ABOVE * _USUAL_SHARE:.1g}")


def _lower_rate(config: Config, kind: Kind) -> Iterator[CauseHypothesis]:
    key, usual = rate_key(config), _usual(config)
    rate = value_of(config, key)
    if isinstance(rate, int | float) and rate > 0:
        yield from _set_back(config, {key: min(float(f"{rate / 10:.3g}"), usual or rate)}, kind)


def _usual_rate(config: Config, kind: Kind) -> Iterator[CauseHypothesis]:
    rate, usual = value_of(config, rate_key(config)), _usual(config)
    new = usual if usual is not None else 1000 * rate if isinstance(rate, int | float) else None
    if new:
        yield from _set_back(config, {rate_key(config): new}, kind)


def _clipping(config: Config, kind: Kind) -> Iterator[CauseHypothesis]:
    norm = config.policy.max_grad_norm
    if norm is None or norm > 1.0:
        yield from _set_back(config, {"policy.max_grad_norm": 1.0}, kind)
    if not config.declaration.rolls_out:
        return
    if max(config.loss_fn.ratio_clip_min, config.loss_fn.ratio_clip_max) > 0.5:
        yield from _set_back(config, {"loss_fn.ratio_clip_min": 0.2, "loss_fn.ratio_clip_max": 0.2}, kind)
    if config.loss_fn.reference_policy_kl_penalty > 0.1:
        yield from _set_back(config, {"loss_fn.reference_policy_kl_penalty": 0.01}, kind)


def _outliers(config: Config, kind: Kind) -> Iterator[CauseHypothesis]:
    if config.declaration.rolls_out:
        yield from _set_back(config, {f"{config.algorithm}.normalize_rewards": True}, kind)
        yield from _set_back(config, {f"{config.algorithm}.set_aside_outliers": True}, "rerun")


def _dropout(config: Config) -> Iterator[CauseHypothesis]:
    adapters = "megatron_cfg.peft" if config.policy.megatron_cfg.enabled else "dtensor_cfg.lora_cfg"
    yield from _set_back(config, {f"policy.{adapters}.dropout": 0.0}, "rerun")


def _ages(config: Config) -> Iterator[CauseHypothesis]:
    if config.max_trajectory_age_steps > 1:
        yield from _set_back(config, {f"{config.asynchronous_key}.max_trajectory_age_steps": 1}, "rerun")


def _of_generation(config: Config) -> Iterator[CauseHypothesis]:
    """Yield what engines do otherwise than they usually do, and how problems are asked."""
    if not config.declaration.rolls_out:
        return
    generation = "policy.generation."
    usual = {"temperature": 1.0, "top_p": 1.0, "top_k": None, "min_p": 0.0, "stop_strings": None}
    for name, value in usual.items():
        yield from _set_back(config, {f"{generation}{name}": value}, "rerun")
    if config.policy.tokenizer.name not in (None, config.policy.model_name):
        yield from _set_back(config, {"policy.tokenizer.name": config.policy.model_name}, "rerun")
    yield from _set_back(config, {"data.prompt_template": "{question}"}, "rerun")
    tokens, longest = config.policy.generation.max_new_tokens, config.policy.max_total_sequence_length
    if tokens < longest:
        yield from _set_back(config, {f"{generation}max_new_tokens": min(_LONGER * tokens, longest)}, "rerun")


def _of_rewards(config: Config) -> Iterator[CauseHypothesis]:
    """Yield the environments without their arguments, and a built-in one in the place of a custom one."""
    if not config.declaration.rolls_out:
        return
    for name in config.environments:
        entry = config.env.get(name)
        if entry is not None and entry.kwargs:
            key = f"env.{name}.kwargs"
            yield CauseHypothesis(kind="rerun", cause=key, was=_show(entry.kwargs), settings={key: {_OVERRIDE: True}})
    if len(config.environments) == 1 and config.environments[0] not in BUILT_IN_ENVIRONMENTS:
        (name,) = config.environments
        yield CauseHypothesis(
            kind="rerun",
            cause=f"env.{name}",
            was=_show(value_of(config, f"env.{name}.class_path") or name),
            settings={"env": {_OVERRIDE: True, "math": {}}, "data.environment": "math"},
        )


def _of_groups(config: Config) -> Iterator[CauseHypothesis]:
    """Yield larger groups, of as many samples in all, where there is little to compare."""
    section, name = config.rollout_section, config.algorithm
    size, num_groups = section.num_generations_per_prompt, section.num_prompts_per_step
    if size < _GROUP // 2 and size * num_groups % _GROUP == 0:
        settings = {f"{name}.num_generations_per_prompt": _GROUP}
        settings[f"{name}.num_prompts_per_step"] = size * num_groups // _GROUP
        yield CauseHypothesis(kind="rerun", cause=next(iter(settings)), was=str(size), settings=settings)


def _show(value: Any) -> str:
    text = msgspec.json.encode(value, enc_hook=str).decode() if not isinstance(value, float) else f"{value:g}"
    return text if len(text) <= 80 else f"{text[:80]} …"
