"""Notices to the user: keys without effect, or with another effect than they suggest."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from tandem.common.user_code import named
from tandem.config import derive, unread_keys, unsupported
from tandem.config.checks import adapters, numbers, run
from tandem.config.installed.sources import find_package
from tandem.config.models.families import is_text_only
from tandem.config.models.model_sizes import read_expert_sizes, read_model_config, read_model_sizes
from tandem.config.named import holds_texts
from tandem.config.problem import describe_without_effect
from tandem.config.schema import MODELS, Config, OptimizerConfig
from tandem.config.schema.algorithms import DistillationLossConfig
from tandem.config.schema.declarations import SECTIONS
from tandem.config.schema.loss import OF_ANY_LOSS, LossFn

_MEGATRON = "policy.megatron_cfg"
_DDP = f"{_MEGATRON}.distributed_data_parallel_config"
_OF_TRANSFORMER_ENGINE = {
    "optimizer.use_precision_aware_optimizer": False,
    "attention_backend": "auto",
    "tp_comm_overlap": False,
}
"""Keys of ``policy.megatron_cfg`` that only Transformer Engine reads, with their neutral values."""


_FOLLOW = frozenset(rule.key.rpartition(".")[0] for rule in derive.DERIVED)
"""Sections in which some keys follow other keys by default."""


def notices(config: Config) -> list[str]:
    """Return all notices about a configuration, a line each."""
    return [*(line for notice in _NOTICES for line in notice(config)), *unsupported.list_without_effect(config)]


def _notice_ignored(config: Config) -> Iterator[str]:
    """Yield the notices about keys that the configuration does not have any more."""
    yield from config.ignored


def _notice_other_sections(config: Config) -> Iterator[str]:
    """Yield the sections that only another algorithm reads."""
    for name in (*(name for names in SECTIONS.values() for name in names), "loss_fn"):
        section = getattr(config, name)
        if name in (*SECTIONS[config.algorithm], config.declaration.loss_section) or section is None:
            continue
        if name in MODELS or isinstance(section, tuple):
            yield f"{name} has no effect: algorithm is {config.algorithm}"
            continue
        settings, otherwise = msgspec.to_builtins(section), msgspec.to_builtins(type(section)())
        read = _FOLLOW | {f"loss_fn.{key}" for key in OF_ANY_LOSS}
        keys = [key for key, value in settings.items() if value != otherwise[key] and f"{name}.{key}" not in read]
        if keys:
            yield f"{name} ({', '.join(keys)}) has no effect: algorithm is {config.algorithm}"


_OF_ENGINES = ("policy.generation", "refit")
"""Sections that only runs with engines read."""
_DERIVED = frozenset(rule.key for rule in derive.DERIVED)


def _notice_engines(config: Config) -> Iterator[str]:
    """Yield the keys of engines, and of weights on their way to them, in a run that generates nothing."""
    if config.declaration.rolls_out:
        return
    for name in _OF_ENGINES:
        section = unsupported.find_value(config, name)
        keys = sorted({key.partition(".")[0] for key in _list_changed(section, f"{name}.")})
        if keys:
            yield f"{name} ({', '.join(keys)}) has no effect: {config.declaration.title} generates nothing"


def _list_changed(section: Any, prefix: str) -> Iterator[str]:
    """Yield the keys of a section, and of those in it, without the default value; not those that others decide."""
    for field in msgspec.structs.fields(section):
        value, key = getattr(section, field.name), f"{prefix}{field.encode_name}"
        if isinstance(value, msgspec.Struct):
            yield from (f"{field.encode_name}.{inner}" for inner in _list_changed(value, f"{key}."))
        elif key not in _DERIVED and value != _default_of(field):
            yield field.encode_name


def _default_of(field: msgspec.structs.FieldInfo) -> Any:
    """Return the default value of a field."""
    factory = field.default_factory
    return field.default if factory is msgspec.NODEFAULT else factory()


def _notice_backends(config: Config) -> Iterator[str]:
    """Yield the keys that are overridden by Megatron-Core with its own optimizer and schedule."""
    policy = config.policy
    if not policy.megatron_cfg.enabled:
        if policy.megatron_cfg.env_vars:
            yield describe_without_effect(
                f"{_MEGATRON}.env_vars", policy.megatron_cfg.env_vars, f"{_MEGATRON}.enabled is false"
            )
        return
    reason = f"{_MEGATRON}.enabled is true"
    if policy.dtensor_cfg.env_vars:
        yield describe_without_effect("policy.dtensor_cfg.env_vars", policy.dtensor_cfg.env_vars, reason)
    if policy.dtensor_cfg.enabled:
        yield describe_without_effect("policy.dtensor_cfg.enabled", True, f"{reason}, and wins")
    if policy.optimizer not in (None, OptimizerConfig()):
        yield describe_without_effect("policy.optimizer", policy.optimizer.name, f"{_MEGATRON}.optimizer decides")
    if policy.scheduler:
        yield f"policy.scheduler has no effect: {_MEGATRON}.scheduler decides"


def _notice_sequences(config: Config) -> Iterator[str]:
    """Yield sequence parallelism without tensor-parallel ranks to split sequences over."""
    policy = config.policy
    if policy.megatron_cfg.enabled:
        section, split, ranks = _MEGATRON, policy.megatron_cfg.sequence_parallel, "tensor_model_parallel_size"
        size = policy.megatron_cfg.tensor_model_parallel_size
    else:
        section, split, ranks = "policy.dtensor_cfg", policy.dtensor_cfg.sequence_parallel, "tensor_parallel_size"
        size = policy.dtensor_cfg.tensor_parallel_size
    if split and size == 1:
        yield describe_without_effect(f"{section}.sequence_parallel", True, f"{section}.{ranks} is 1")


def _notice_experts(config: Config) -> Iterator[str]:
    """Yield disabled sequence parallelism where Megatron-Core's experts require it on tensor-parallel ranks."""
    megatron = config.policy.megatron_cfg
    ranks = megatron.tensor_model_parallel_size
    if (
        megatron.enabled
        and ranks > 1
        and not megatron.sequence_parallel
        and read_model_sizes(config.policy).num_experts
    ):
        reason = f"the model has experts, and {_MEGATRON}.tensor_model_parallel_size is {ranks}"
        yield f"{_MEGATRON}.sequence_parallel (false) is taken as true: {reason}"


def _notice_megatron(config: Config) -> Iterator[str]:
    """Yield the arguments of Megatron-Core that other settings override."""
    policy, megatron = config.policy, config.policy.megatron_cfg
    if not megatron.enabled:
        return
    if megatron.converter_type is not None:
        yield describe_without_effect(
            f"{_MEGATRON}.converter_type", megatron.converter_type, "the model's config.json decides"
        )
    if megatron.forwarded.get("moe_token_dispatcher_type") == "allgather":
        reason = "micro-batches have different lengths"
        yield f"{_MEGATRON}.moe_token_dispatcher_type (allgather) is taken as alltoall: {reason}"
    bf16 = megatron.optimizer.get("bf16")
    if bf16 is not None and bf16 != (policy.precision == "bfloat16"):
        yield describe_without_effect(
            f"{_MEGATRON}.optimizer.bf16", bf16, f"policy.precision ({policy.precision}) decides"
        )
    clip_grad = megatron.optimizer.get("clip_grad")
    if clip_grad != (policy.max_grad_norm or 0.0):
        yield describe_without_effect(
            "policy.max_grad_norm", policy.max_grad_norm, f"{_MEGATRON}.optimizer.clip_grad is {clip_grad:g}"
        )
    if find_package("transformer_engine") is None:
        arguments = {**megatron.forwarded, **{f"optimizer.{key}": value for key, value in megatron.optimizer.items()}}
        for key, off in _OF_TRANSFORMER_ENGINE.items():
            if arguments.get(key, off) != off:
                yield describe_without_effect(
                    f"{_MEGATRON}.{key}", arguments[key], "Transformer Engine is not installed here"
                )


def _notice_adapters(config: Config) -> Iterator[str]:
    """Yield NeMo-RL's options for adapters that are not used here, and target modules where all layers are chosen."""
    policy = config.policy
    if policy.adapters is None:
        return
    if policy.megatron_cfg.enabled:
        if policy.megatron_cfg.peft.a2a_experimental:
            yield describe_without_effect(
                f"{_MEGATRON}.peft.a2a_experimental", True, "ranks exchange only small tensors already"
            )
        return
    lora, key = policy.dtensor_cfg.lora_cfg, "policy.dtensor_cfg.lora_cfg"
    if lora.use_triton:
        yield describe_without_effect(f"{key}.use_triton", True, "torch multiplies")
    if lora.match_all_linear and lora.target_modules:
        yield describe_without_effect(
            f"{key}.target_modules", list(lora.target_modules), f"{key}.match_all_linear is true"
        )
    if read_expert_sizes(read_model_config(policy) or {}) is not None and not adapters.list_adapted_experts(config):
        yield f"{key}: routed experts have no adapters and stay as they are"


def _notice_data_parallel(config: Config) -> Iterator[str]:
    """Yield the keys of Megatron's FSDP in NeMo-RL's files, and averaging, since Tandem divides a sum once."""
    ddp_config = config.policy.megatron_cfg.distributed_data_parallel_config
    if not config.policy.megatron_cfg.enabled:
        return
    if ddp_config.get("average_in_collective"):
        yield describe_without_effect(
            f"{_DDP}.average_in_collective", True, "gradients are summed, since the loss is already a mean"
        )
    if ddp_config.get("overlap_param_gather"):
        yield describe_without_effect(
            f"{_DDP}.overlap_param_gather", True, "weights are read as soon as a step is over"
        )
    strategy = ddp_config.get("data_parallel_sharding_strategy")
    if strategy not in (None, "no_shard"):
        yield describe_without_effect(f"{_DDP}.data_parallel_sharding_strategy", strategy, "use_megatron_fsdp is off")


def _notice_rewards(config: Config) -> Iterator[str]:
    """Yield the settings of reward options that are not chosen."""
    if not config.declaration.rolls_out:
        return
    section = config.rollout_section
    if section.batch_multiplier != 1 and not section.use_dynamic_sampling:
        key = f"{config.algorithm}.use_dynamic_sampling"
        yield describe_without_effect(
            f"{config.algorithm}.batch_multiplier", section.batch_multiplier, f"{key} is false"
        )
    shaping, estimator = config.rollout_section.reward_shaping, config.rollout_section.group_estimator
    if shaping.enabled and shaping.stop_properly_penalty_coef is not None and shaping.max_response_length is not None:
        key = f"{config.algorithm}.reward_shaping"
        yield describe_without_effect(
            f"{key}.max_response_length", shaping.max_response_length, f"{key}.stop_properly_penalty_coef is set"
        )
    if estimator is not None and estimator.reward_weights is not None and estimator.name != "gdpo":
        key = f"{config.algorithm}.adv_estimator"
        yield describe_without_effect(
            f"{key}.reward_weights", estimator.reward_weights, f"{key}.name is {estimator.name}"
        )


def _notice_reward_model(config: Config) -> Iterator[str]:
    """Yield the options of reward models that make sense only for models in training."""
    for environment, entry in config.reward_models.items():
        key, scores = f"env.{environment}", "it scores batches of one shape"
        for name in ("sequence_packing", "dynamic_batching"):
            if getattr(entry, name).enabled:
                yield describe_without_effect(f"{key}.{name}.enabled", True, scores)
        if entry.max_grad_norm is not None:
            yield describe_without_effect(
                f"{key}.max_grad_norm", entry.max_grad_norm, "a reward model is not trained here"
            )
        gpus, nodes = entry.resources.gpus_per_node, config.cluster.num_nodes
        if gpus and (nodes > 1 or not config.cluster.gpus_per_node):
            reason = f"cluster.num_nodes is {nodes}" if nodes > 1 else "cluster.gpus_per_node is 0"
            placement = "a reward model runs beside its rollout process"
            yield describe_without_effect(f"{key}.resources.gpus_per_node", gpus, f"{reason}; {placement}")


def _notice_asynchronous(config: Config) -> Iterator[str]:
    """Yield uncorrected asynchronous training, and options of asynchronous training that is off."""
    if not config.declaration.rolls_out:
        return
    asynchronous, key = config.rollout_section.asynchronous, config.asynchronous_key
    if config.max_trajectory_age_steps:
        if not config.loss_fn.use_importance_sampling_correction:
            yield (
                "loss_fn.use_importance_sampling_correction is false: samples of older weights are treated like "
                f"those of the newest ({key}.max_trajectory_age_steps: {asynchronous.max_trajectory_age_steps})"
            )
        if asynchronous.recompute_kv_cache_after_weight_updates and not asynchronous.in_flight_weight_updates:
            reason = f"{key}.in_flight_weight_updates is false"
            yield describe_without_effect(f"{key}.recompute_kv_cache_after_weight_updates", True, reason)
        return
    if config.refit.keep_copy == "on":
        yield describe_without_effect("refit.keep_copy", "on", f"{key}.enabled is false")
    for name in ("in_flight_weight_updates", "recompute_kv_cache_after_weight_updates"):
        if getattr(asynchronous, name):
            yield describe_without_effect(f"{key}.{name}", True, f"{key}.enabled is false")


def _notice_engine_arguments(config: Config) -> Iterator[str]:
    """Yield what the engine's own declaration has a notice about."""
    for path in config.policy.generation.kind.notices if config.generates else ():
        yield from named(path)(config)


USUAL_PEAK_TIMES_WIDTH = 0.46
"""Adam's peak learning rate times the hidden size, in pretraining. A rule of thumb: 6e-4 at 768, the smallest of the
eight models in table 2.1 of "Language Models are Few-Shot Learners" (Brown et al. 2020). The others' products are
0.31 to 0.74, so it holds within a factor of 1.6 over these sizes."""
FAR_ABOVE, OF_ADAPTERS = 5.0, 10.0
"""Multiple of that rate which destroys any model in time, and a further factor for LoRA adapters."""
LOWEST_RATE = 1e-9
"""Lowest useful learning rate of Adam: below it, most updates leave float32 weights of usual size (0.02) unchanged."""


def find_max_learning_rate(config: Config) -> float | None:
    """Return the rate above which Adam destroys a model of this size; None for other optimizers and unknown sizes."""
    policy = config.policy
    name = policy.megatron_cfg.optimizer.get("optimizer", "adam") if policy.megatron_cfg.enabled else None
    if name is None:
        name = policy.optimizer.name if policy.optimizer is not None else ""
    width = (read_model_config(policy) or {}).get("hidden_size")
    if "adam" not in str(name).lower() or not isinstance(width, int) or width < 1:
        return None
    return FAR_ABOVE * USUAL_PEAK_TIMES_WIDTH / width * (1.0 if policy.adapters is None else OF_ADAPTERS)


def about_learning_rate(config: Config) -> Iterator[str]:
    """Yield a notice for a rate far outside what the optimizer and the size of the model bear."""
    policy, max_rate = config.policy, find_max_learning_rate(config)
    is_megatron = policy.megatron_cfg.enabled
    arguments = policy.megatron_cfg.optimizer if is_megatron else policy.optimizer.kwargs if policy.optimizer else {}
    key, rate = f"{_MEGATRON}.optimizer.lr" if is_megatron else "policy.optimizer.kwargs.lr", arguments.get("lr")
    if max_rate is None or not isinstance(rate, int | float) or LOWEST_RATE <= rate <= max_rate or rate == 0:
        return
    source = "pretraining peaks near 0.46 / hidden size with Adam (after Brown et al. 2020), post-training below it"
    if rate > max_rate:
        yield f"{key} ({rate:g}) is far too large for a model of this size: above {max_rate:.2g} it breaks; {source}"
    else:
        yield f"{key} ({rate:g}) is too small: below {LOWEST_RATE:g} most float32 weights do not change; {source}"


def _notice_seed(config: Config) -> Iterator[str]:
    """Yield the seed of the data, which NeMo-RL uses to hold out part of some data sets."""
    if config.data.seed is not None:
        reason = f"prompts decide what is held out, {config.algorithm}.seed the order"
        yield describe_without_effect("data.seed", config.data.seed, reason)


def _notice_moot_keys(config: Config) -> Iterator[str]:
    """Yield the keys that NeMo-RL leaves to its own machinery, or to libraries that are not used here."""
    for row in unread_keys.MOOT:
        for key in unread_keys.list_keys(row, config):
            value = unsupported.find_value(config, key)
            if key == unread_keys.MODEL_ARGUMENTS and not is_text_only(config.policy):
                value = {name: each for name, each in value.items() if name != "freeze_config"}
            if value not in row.off:
                yield describe_without_effect(key, value, row.reason)


def _notice_other_losses(config: Config) -> Iterator[str]:
    """Yield the keys of ``loss_fn`` that belong to the loss of other algorithms."""
    if config.declaration.loss_section != "loss_fn" or config.loss_fn.class_path is not None:
        return
    of_distillation, distils = {*DistillationLossConfig.__struct_encode_fields__}, config.topk_logits_k > 0
    settings, otherwise = msgspec.to_builtins(config.loss_fn), msgspec.to_builtins(LossFn())
    read = {*OF_ANY_LOSS, *(of_distillation if distils else settings.keys() - of_distillation)}
    keys = [key for key, value in settings.items() if value != otherwise[key] and key not in read]
    if keys:
        yield f"loss_fn ({', '.join(keys)}) has no effect: algorithm is {config.algorithm}"


def _notice_joint_teachers(config: Config) -> Iterator[str]:
    """Yield settings of the weights of joint teachers that other settings leave without effect."""
    if not config.joint_teachers:
        return
    loss = config.loss_fn
    if loss.sum_weights_metric is None and loss.alpha != 1.0:
        yield describe_without_effect("loss_fn.alpha", loss.alpha, "loss_fn.sum_weights_metric is null")
    for index, teacher in enumerate(config.joint_teachers if config.weighs_teachers_by else ()):
        if teacher.weight != 1.0:
            by = "kd_loss_mode" if loss.sum_weights_metric is None else "sum_weights_metric"
            yield describe_without_effect(f"teachers[{index}].weight", teacher.weight, f"loss_fn.{by} decides")


def _notice_data_sets(config: Config) -> Iterator[str]:
    """Yield the keys of listed data sets that nothing reads, but those of `notice_data_keys`."""
    for side, sets in (("train", config.data.train), ("validation", config.data.validation)):
        for index, data_set in enumerate(sets):
            if data_set.seed is not None and data_set.split_validation_size:
                reason = "prompts decide what is held out"
                yield describe_without_effect(f"data.{side}[{index}].seed", data_set.seed, reason)
            if data_set.data_files is not None and not holds_texts(str(data_set.dataset_name)):
                reason = "only arrow_text is raw text"
                yield describe_without_effect(f"data.{side}[{index}].data_files", data_set.data_files, reason)


def _notice_vlm(config: Config) -> Iterator[str]:
    """Yield a wrong statement whether the model takes more than text."""
    stated = config.policy.is_vlm
    if stated is not None and stated == is_text_only(config.policy):
        yield describe_without_effect("policy.is_vlm", stated, "the model's config.json decides")


def _notice_validation(config: Config) -> Iterator[str]:
    """Yield settings of validation, and of groups with equal rewards, that other settings leave without effect."""
    if not config.declaration.rolls_out:
        return
    section, name = config.rollout_section, config.algorithm
    if section.val_start_at and not section.val_period:
        yield describe_without_effect(f"{name}.val_start_at", section.val_start_at, f"{name}.val_period is 0")
    elif section.val_start_at > section.max_num_steps:
        yield f"{name}.val_start_at ({section.val_start_at}) is after the last step ({section.max_num_steps})"
    if section.stop_at_validation_threshold is not None and section.stop_at_validation_metric is None:
        reason = f"{name}.stop_at_validation_metric is null"
        yield describe_without_effect(
            f"{name}.stop_at_validation_threshold", section.stop_at_validation_threshold, reason
        )
    if getattr(section, "zero_variance_prompt_filtering", False) and not section.leaves_out_equal_rewards:
        left_out = "grpo.use_dynamic_sampling leaves such groups out already"
        reason = left_out if section.use_dynamic_sampling else "grpo.adv_estimator.name opd does not learn from rewards"
        yield describe_without_effect(f"{name}.zero_variance_prompt_filtering", True, reason)


def _notice_lengths(config: Config) -> Iterator[str]:
    """Yield a limit of prompts that is above that of whole sequences."""
    longest, length = config.policy.max_total_sequence_length, config.data.max_input_seq_length
    if length > longest:
        reason = f"policy.max_total_sequence_length is {longest}"
        yield describe_without_effect("data.max_input_seq_length", length, f"{reason}, and a longer prompt is left out")


def _notice_unranked(config: Config) -> Iterator[str]:
    """Yield a metric that would rank checkpoints if the run measured it, ever or in each step that saves one."""
    settings, reason, period = (
        config.checkpointing,
        run.explain_never_validated(config),
        config.algorithm_section.val_period,
    )
    metric = settings.metric_name
    if not settings.enabled or settings.keep_top_k is None or not metric.startswith("val_"):
        return
    if reason is not None:
        yield f"checkpointing.metric_name: {metric} is never measured ({reason}): the newest checkpoints are kept"
    elif not config.evaluates and not config.eval.during_training and (not period or settings.save_period % period):
        yield (
            f"checkpointing.save_period is {settings.save_period} and {config.algorithm}.val_period {period}: a "
            f"checkpoint of a step without validation has no {metric}, ranks below all that have one, and is deleted "
            f"before them once there are more than keep_top_k ({settings.keep_top_k}), unless it is the newest"
        )


def _notice_puzzle(config: Config) -> Iterator[str]:
    """Yield a notice about the puzzle: NeMo-RL's file inherits another dataset, which its script never reads."""
    if config.data.dataset_name == "sliding_puzzle" and len(config.env) > 1:
        yield "data.dataset_name is sliding_puzzle, because env has sliding_puzzle_game"


def _notice_nodes(config: Config) -> Iterator[str]:
    """Yield a loopback address that processes of other nodes could not reach."""
    cluster = config.cluster
    if cluster.num_nodes > 1 and cluster.address.startswith("tcp://127.0.0.1:"):
        other_nodes = "the other node" if cluster.num_nodes == 2 else f"the other {cluster.num_nodes - 1} nodes"
        yield (
            f"cluster.address ({cluster.address}) cannot be reached from {other_nodes}: name this one's, tcp://HOST:PORT"
        )


_NOTICES: tuple[Callable[[Config], Iterator[str]], ...] = (
    _notice_ignored,
    _notice_other_sections,
    _notice_engines,
    _notice_backends,
    _notice_sequences,
    _notice_experts,
    _notice_megatron,
    _notice_adapters,
    _notice_data_parallel,
    _notice_rewards,
    _notice_reward_model,
    _notice_asynchronous,
    _notice_engine_arguments,
    about_learning_rate,
    _notice_seed,
    _notice_moot_keys,
    _notice_other_losses,
    _notice_joint_teachers,
    _notice_data_sets,
    unread_keys.notice_data_keys,
    _notice_vlm,
    _notice_validation,
    _notice_lengths,
    numbers.find_too_small_rates,
    numbers.find_ended_schedules,
    _notice_unranked,
    _notice_puzzle,
    _notice_nodes,
)
