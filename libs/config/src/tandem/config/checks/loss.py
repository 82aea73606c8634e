"""Rules for the loss: options that contradict each other."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from tandem.common.errors import nearest
from tandem.config.problem import InvalidValue, Rule, check_dotted_path, shown
from tandem.config.schema import Config, LossColumn
from tandem.config.schema.columns import BUILT_IN, TAKEN, ColumnDeclaration
from tandem.config.schema.loss import MEAN_OF_SEQUENCES


class OptionConflict(msgspec.Struct, frozen=True):
    """Two options of ``loss_fn`` with values that exclude each other."""

    key: str
    """The option which, if neither false nor null, needs the other."""
    required_key: str
    """The other option."""
    needed: bool | None
    """The value that the other option must have."""
    reason: str


_CONFLICTS = (
    OptionConflict("sequence_level_importance_ratios", "token_level_loss", False, "each sequence has one ratio"),
    OptionConflict("use_cispo", "token_level_loss", True, "CISPO is a mean over all tokens"),
    OptionConflict("use_cispo", "disable_ppo_ratio", False, "CISPO weights by the ratio"),
    OptionConflict("use_cispo", "force_on_policy_ratio", False, "CISPO weights by the ratio"),
    OptionConflict("use_cispo", "sequence_level_importance_ratios", False, "CISPO weights each token"),
    OptionConflict("use_cispo", "ratio_clip_c", None, "no loss of CISPO grows with the ratio"),
    OptionConflict("disable_ppo_ratio", "ratio_clip_c", None, "there is no ratio to bound"),
    OptionConflict("disable_ppo_ratio", "force_on_policy_ratio", False, "there is no ratio to force"),
    OptionConflict(
        "use_kl_in_reward", "use_on_policy_kl_approximation", False, "only a divergence in the loss is weighted"
    ),
    OptionConflict(
        "truncated_importance_sampling_type", "use_importance_sampling_correction", True, "it bounds that correction"
    ),
)
_KIND = "loss_fn.truncated_importance_sampling_type"
_HIGH, _LOW = "truncated_importance_sampling_ratio", "truncated_importance_sampling_ratio_min"


def check_loss_is_named(config: Config) -> None:
    """Check that loss arguments come with a custom loss class."""
    loss = config.loss_fn
    if loss.class_path is not None:
        check_dotted_path("loss_fn.class", loss.class_path)
    elif loss.kwargs:
        raise InvalidValue("loss_fn.kwargs", f"{shown(loss.kwargs)}, but loss_fn.class names no class that takes them")


def check_columns_have_source(config: Config) -> None:
    """Check that each loss input has a source that exists; engines, coordinator and environments exist only in
    rollouts."""
    loss, key = config.loss_fn, "loss_fn.columns"
    if loss.columns and loss.class_path is None:
        raise InvalidValue(key, f"{', '.join(loss.columns)}, but loss_fn.class names no class that reads them")
    for name, column in loss.columns.items():
        built_in = BUILT_IN.get(name)
        if built_in is not None and column != LossColumn(source=built_in.source):
            raise InvalidValue(
                f"{key}.{name}", f"it is built in: its source is {built_in.source}, and its fill is fixed"
            )
        if built_in is None and column.source in ("engine", "coordinator", "trainer"):
            names = [each.name for each in BUILT_IN.values() if each.source == column.source]
            which = f"{column.source} has {', '.join(names)}, but no {name}{nearest(name, names)}"
            raise InvalidValue(f"{key}.{name}.source", which)
        if built_in is None and (not name.isidentifier() or name in TAKEN):
            raise InvalidValue(key, f"{shown(name)} cannot be the name of a column")
        missing = {"value": "no value model", "teacher": "no teacher", "trainer": "no columns from trainers"}.get(
            column.source
        )
        if missing is not None and column.source not in {each.source for each in _list_declared(config)}:
            raise InvalidValue(f"{key}.{name}.source", f"{column.source}, but {config.declaration.title} has {missing}")
        if column.source not in ("policy", "reference") and not config.declaration.rolls_out:
            raise InvalidValue(
                f"{key}.{name}.source", f"{column.source}, but {config.declaration.title} rolls nothing out"
            )


def _list_declared(config: Config) -> Iterator[ColumnDeclaration]:
    """Yield the loss inputs that the algorithm's own losses read."""
    declared = (column for training in config.declaration.trainings for column in training.columns)
    return (column for column in declared if column.is_read(config, config.num_optimizer_steps))


def check_options_agree(config: Config) -> None:
    """Check that the loss options do not contradict each other."""
    for conflict in _CONFLICTS:
        value, actual = (getattr(config.loss_fn, name) for name in (conflict.key, conflict.required_key))
        if value and actual != conflict.needed:
            raise InvalidValue(
                f"loss_fn.{conflict.key}",
                f"{shown(value)} needs loss_fn.{conflict.required_key} to be {shown(conflict.needed)}: "
                f"{conflict.reason}",
            )


def check_mean_is_one(config: Config) -> None:
    """Check that the two keys of the loss's mean agree, and that a constant length has a use."""
    loss = config.loss_fn
    if loss.loss_type is not None and loss.token_level_loss == (loss.loss_type == MEAN_OF_SEQUENCES):
        needed = shown(not loss.token_level_loss)
        raise InvalidValue(
            "loss_fn.token_level_loss", f"loss_fn.loss_type {loss.loss_type} needs {needed}, or no such key"
        )
    if loss.loss_scale_factor is not None and loss.loss_type != "dr_grpo":
        raise InvalidValue(
            "loss_fn.loss_scale_factor", f"{loss.loss_scale_factor} needs loss_fn.loss_type to be dr_grpo"
        )


def check_importance_weights_have_bounds(config: Config) -> None:
    """Check that truncated importance weights have the bounds that they need, and that bounds have a use."""
    loss = config.loss_fn
    kind = loss.truncated_importance_sampling_type
    high, low = loss.truncated_importance_sampling_ratio, loss.truncated_importance_sampling_ratio_min
    needed = () if kind is None else (_HIGH,) if kind == "tis" else (_HIGH, _LOW)
    for name, bound in ((_HIGH, high), (_LOW, low)):
        if kind is None and bound is not None:
            raise InvalidValue(_KIND, f"null, but loss_fn.{name} is {bound:g}: expected tis, icepop or seq-mask-tis")
        if name in needed and bound is None:
            raise InvalidValue(f"loss_fn.{name}", f"null, but {_KIND} {kind} needs it")
    if high is not None and low is not None and low > high:
        raise InvalidValue(f"loss_fn.{_LOW}", f"{low:g} is more than loss_fn.{_HIGH} ({high:g})")
    if kind == "seq-mask-tis" and loss.sequence_level_importance_ratios:
        raise InvalidValue(
            _KIND, "seq-mask-tis weights each token, but loss_fn.sequence_level_importance_ratios each sequence"
        )


def check_kl_in_reward_reaches_advantage(config: Config) -> None:
    """Check that a KL penalty in the reward has an estimator with token rewards: Reinforce++ or PPO's."""
    if not config.loss_fn.use_kl_in_reward:
        return
    estimator = config.rollout_section.group_estimator
    if estimator is not None and estimator.name != "reinforce_plus_plus":
        raise InvalidValue(
            "loss_fn.use_kl_in_reward",
            "true needs grpo.adv_estimator.name to be reinforce_plus_plus: "
            f"{estimator.name} has one advantage a sample",
        )
    if config.loss_fn.reference_policy_kl_penalty == 0:
        raise InvalidValue(
            "loss_fn.use_kl_in_reward", "true needs loss_fn.reference_policy_kl_penalty to be more than 0"
        )


def check_forced_ratios_are_true(config: Config) -> None:
    """Check that a ratio is forced only with one optimizer step: after it, the policy differs from the one before."""
    batch, samples, passes = config.policy.train_global_batch_size, config.units_per_step, config.num_passes
    if config.loss_fn.force_on_policy_ratio and (batch != samples or passes > 1):
        name, times = config.algorithm, f", and it passes over it {passes} times" if passes > 1 else ""
        raise InvalidValue(
            "loss_fn.force_on_policy_ratio",
            f"true needs one optimizer step a rollout batch: policy.train_global_batch_size is {batch}, "
            f"{name}.num_prompts_per_step * {name}.num_generations_per_prompt {samples}{times}",
        )


RULES: tuple[Rule, ...] = (check_loss_is_named, check_columns_have_source)


def check_reference_is_read_or_skipped(config: Config) -> None:
    """Check that the reference's log-probabilities are skipped only if the loss does not read them, as in NeMo-RL."""
    penalty, name = config.loss_fn.reference_policy_kl_penalty, config.algorithm
    if getattr(config, name).skip_reference_policy_logprobs_calculation and penalty > 0:
        raise InvalidValue(
            f"{name}.skip_reference_policy_logprobs_calculation",
            f"true, but loss_fn.reference_policy_kl_penalty is {penalty:g}",
        )


POLICY_GRADIENT_RULES: tuple[Rule, ...] = (
    check_reference_is_read_or_skipped,
    check_options_agree,
    check_mean_is_one,
    check_importance_weights_have_bounds,
    check_kl_in_reward_reaches_advantage,
    check_forced_ratios_are_true,
)
