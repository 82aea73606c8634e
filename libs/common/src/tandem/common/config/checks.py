"""Rules that no single key can break: one small function a rule, each naming the key to change."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from pathlib import Path

from tandem.common.config.problem import Invalid, shown
from tandem.common.config.schema import Config
from tandem.common.errors import nearest
from tandem.common.model_fields import model_fields
from tandem.common.placement import gpus_per_engine
from tandem.common.vllm_arguments import complaint

CONVERSING_ENVIRONMENTS = ("calculator", "sliding_puzzle_game")
"""Those that answer a response, so that one turn is never enough."""

BUILT_IN_ENVIRONMENTS = ("reasoning_gym", "math", "exact_match", *CONVERSING_ENVIRONMENTS)

METRICS = {
    "grpo": ("val_reward", "val_accuracy", "reward", "accuracy", "loss"),
    "sft": ("val_loss", "loss"),
    "dpo": ("val_loss", "loss"),
}
"""Metrics that can rank checkpoints, by algorithm."""

Rule = Callable[[Config], None]
"""Raises `Invalid` if the configuration breaks it."""


def first_problem(config: Config) -> None:
    """Raise `Invalid` for the first rule that the configuration breaks."""
    for rule in RULES:
        rule(config)


def a_backend_is_enabled(config: Config) -> None:
    """Megatron-Core wins over FSDP2, but one of them must train."""
    if not config.policy.dtensor_cfg.enabled and not config.policy.megatron_cfg.enabled:
        raise Invalid(
            "policy.dtensor_cfg.enabled", "false, and policy.megatron_cfg.enabled is false too: nothing can train"
        )


def an_optimizer_is_named(config: Config) -> None:
    """Only Megatron-Core brings an optimizer of its own."""
    if config.policy.optimizer is None and not config.policy.megatron_cfg.enabled:
        raise Invalid("policy.optimizer", "null, but policy.dtensor_cfg needs an optimizer")


def schedules_have_milestones_between(config: Config) -> None:
    """Schedules follow each other at the milestones, as in `torch.optim.lr_scheduler.SequentialLR`."""
    entries = config.policy.scheduler
    for index, entry in enumerate(entries):
        if (entry.name is None) == (entry.milestones is None):
            raise Invalid(f"policy.scheduler[{index}]", "expected either a name or milestones")
    num_schedules = sum(entry.name is not None for entry in entries)
    milestones = [entry.milestones for entry in entries if entry.milestones is not None]
    if len(milestones) > 1:
        raise Invalid("policy.scheduler", "milestones are given more than once")
    times = milestones[0] if milestones else ()
    if len(times) != max(0, num_schedules - 1):
        raise Invalid(
            "policy.scheduler",
            f"{num_schedules} schedules need {max(0, num_schedules - 1)} milestones between them, got {len(times)}",
        )
    if any(later <= earlier for earlier, later in itertools.pairwise(times)):
        raise Invalid("policy.scheduler", f"milestones must rise, got {shown(times)}")


def a_rollout_batch_divides_into_global_batches(config: Config) -> None:
    """A rollout batch is a whole number of optimizer steps."""
    if config.algorithm != "grpo":
        return
    prompts, generations = config.grpo.num_prompts_per_step, config.grpo.num_generations_per_prompt
    batch = config.policy.train_global_batch_size
    if prompts * generations % batch:
        raise Invalid(
            "policy.train_global_batch_size",
            f"{batch} does not divide grpo.num_prompts_per_step * grpo.num_generations_per_prompt "
            f"= {prompts} * {generations} = {prompts * generations} samples",
        )


def a_global_batch_divides_into_micro_batches(config: Config) -> None:
    """Each trainer takes an equal share of a global batch, in whole micro-batches."""
    _divides(
        config,
        "policy.train_global_batch_size",
        config.policy.train_global_batch_size,
        "policy.train_micro_batch_size",
        config.policy.train_micro_batch_size,
    )


def a_validation_batch_divides_into_micro_batches(config: Config) -> None:
    """The same for the batches that SFT validates on."""
    if config.algorithm == "sft" and (config.sft.val_period or config.sft.val_at_start):
        _divides(
            config,
            "sft.val_global_batch_size",
            config.sft.val_global_batch_size,
            "sft.val_micro_batch_size",
            config.sft.val_micro_batch_size,
        )


def _divides(config: Config, whole_key: str, whole: int, part_key: str, part: int) -> None:
    trainers = config.cluster.trainers
    if whole % (part * trainers):
        raise Invalid(
            whole_key,
            f"{whole} is not a multiple of {part_key} * cluster.trainers = {part} * {trainers} = {part * trainers}",
        )


def leaving_one_out_leaves_one(config: Config) -> None:
    """The leave-one-out baseline of a group of one is the mean of nothing."""
    grpo = config.grpo
    if config.algorithm == "grpo" and grpo.use_leave_one_out_baseline and grpo.num_generations_per_prompt < 2:
        raise Invalid(
            "grpo.num_generations_per_prompt",
            "1, but grpo.use_leave_one_out_baseline needs at least 2 samples of each prompt",
        )


def samples_differ(config: Config) -> None:
    """GRPO compares the samples of a group, so they must be drawn, not taken greedily."""
    if config.algorithm == "grpo" and config.policy.generation.temperature == 0:
        raise Invalid("policy.generation.temperature", "0 draws the same sample every time, and GRPO learns from none")


def lengths_fit(config: Config) -> None:
    """Neither prompt nor response may be longer than a whole sequence."""
    longest = config.policy.max_total_sequence_length
    lengths = [("data.max_input_seq_length", config.data.max_input_seq_length)]
    if config.algorithm == "grpo":
        lengths.append(("policy.generation.max_new_tokens", config.policy.generation.max_new_tokens))
    for key, length in lengths:
        if length > longest:
            raise Invalid(key, f"{length} is greater than policy.max_total_sequence_length ({longest})")


def the_task_is_named(config: Config) -> None:
    """reasoning-gym makes problems by task; no other dataset has one."""
    if config.data.dataset_name == "reasoning_gym":
        if config.data.task is None:
            raise Invalid("data.task", "required where data.dataset_name is reasoning_gym, such as chain_sum")
    elif config.data.task is not None:
        raise Invalid("data.task", f"only reasoning_gym has tasks, and data.dataset_name is {config.data.dataset_name}")


def the_file_is_named(config: Config) -> None:
    """JSONL problems come from a file."""
    if config.data.dataset_name == "jsonl" and config.data.train_data_path is None:
        raise Invalid("data.train_data_path", "required where data.dataset_name is jsonl")


def environments_are_known(config: Config) -> None:
    """An environment is built in or names its class."""
    for name, entry in config.env.items():
        if entry.class_path is None:
            if name not in BUILT_IN_ENVIRONMENTS:
                built_in = ", ".join(BUILT_IN_ENVIRONMENTS)
                raise Invalid(
                    f"env.{name}",
                    f"not built in ({built_in}) and without a class{nearest(name, BUILT_IN_ENVIRONMENTS)}",
                )
        elif not re.fullmatch(r"\w+(\.\w+)+", entry.class_path):
            raise Invalid(f"env.{name}.class", f"{shown(entry.class_path)} is not a dotted path, such as package.Class")


def samples_are_scored(config: Config) -> None:
    """GRPO needs one environment, and one that can score the dataset."""
    if config.algorithm != "grpo":
        return
    chosen, names = config.data.environment, list(config.env)
    if not names:
        raise Invalid("env", f"required: GRPO needs an environment, such as {', '.join(BUILT_IN_ENVIRONMENTS)}")
    if chosen is None:
        raise Invalid("data.environment", f"required where env has several entries ({', '.join(names)})")
    if chosen not in names:
        raise Invalid("data.environment", f"{shown(chosen)} is not an entry of env ({', '.join(names)})")
    dataset = config.data.dataset_name
    built_in = config.env[chosen].class_path is None
    if built_in and chosen == "reasoning_gym" and dataset != "reasoning_gym":
        raise Invalid("data.environment", f"reasoning_gym cannot score data.dataset_name {dataset}")
    if built_in and chosen == "sliding_puzzle_game" and dataset != "sliding_puzzle":
        raise Invalid("data.environment", f"sliding_puzzle_game plays data.dataset_name sliding_puzzle, not {dataset}")


def conversations_have_turns(config: Config) -> None:
    """An environment that answers must be listened to."""
    chosen = config.data.environment
    if config.algorithm != "grpo" or chosen not in CONVERSING_ENVIRONMENTS or config.env[chosen].class_path is not None:
        return
    if config.grpo.max_rollout_turns == 1:
        raise Invalid("grpo.max_rollout_turns", f"1, but {chosen} answers, and the policy needs a turn after that")


def checkpoints_can_be_ranked(config: Config) -> None:
    """The metric that ranks checkpoints must be measured."""
    if not config.checkpointing.enabled or config.checkpointing.keep_top_k is None:
        return
    metric = config.checkpointing.metric_name
    known = METRICS[config.algorithm]
    if metric not in known:
        raise Invalid("checkpointing.metric_name", f"{config.algorithm} has no {metric}, only {', '.join(known)}")
    section = config.algorithm_section
    if metric.startswith("val_") and not section.val_period and not section.val_at_start:
        raise Invalid("checkpointing.metric_name", f"{metric} is never measured: {config.algorithm}.val_period is 0")


def there_are_rollouts(config: Config) -> None:
    """GRPO generates; SFT does not."""
    if config.algorithm == "grpo" and config.cluster.rollouts == 0:
        raise Invalid("cluster.rollouts", "0, but GRPO needs at least 1")


def generation_fits_its_gpus(config: Config) -> None:
    """GPUs that are set aside for generation are part of the cluster's, leave some to training, and are enough."""
    generation, cluster = config.policy.generation, config.cluster
    if config.algorithm != "grpo" or generation.colocated.enabled:
        return
    gpus, nodes = generation.colocated.resources.gpus_per_node, generation.colocated.resources.num_nodes
    prefix = "policy.generation.colocated.resources."
    if cluster.num_nodes == 1:
        key, set_aside, whole, gpus_each = "gpus_per_node", gpus, cluster.gpus_per_node, 1
        other_key, other, fitting = "num_nodes", nodes, 1
    else:
        key, set_aside, whole, gpus_each = "num_nodes", nodes, cluster.num_nodes, cluster.gpus_per_node
        other_key, other, fitting = "gpus_per_node", gpus, cluster.gpus_per_node
    if other not in (None, fitting):
        rule = f"where cluster.num_nodes is {cluster.num_nodes}, it is {fitting} or null"
        raise Invalid(prefix + other_key, f"{other}, but {rule}")
    if set_aside is None:
        return
    if set_aside >= whole:
        raise Invalid(prefix + key, f"{set_aside} of cluster.{key} ({whole}) leaves none to training")
    sides = (
        ("cluster.rollouts", cluster.rollouts * gpus_per_engine(config), set_aside * gpus_each),
        ("cluster.trainers", cluster.trainers, (whole - set_aside) * gpus_each),
    )
    for process_key, needed, there in sides:
        if needed > there:
            raise Invalid(process_key, f"needs {needed} GPUs, and {prefix}{key} ({set_aside}) leaves it {there}")


def the_launch_fits_the_cluster(config: Config) -> None:
    """The coordinator launches no more processes than it waits for."""
    launch = config.cluster.launch
    if isinstance(launch, str):
        return
    cluster = config.cluster
    counts = (("trainers", launch.trainers, cluster.trainers), ("rollouts", launch.rollouts, cluster.rollouts))
    for kind, launched, expected in counts:
        if launched > expected:
            raise Invalid(f"cluster.launch.{kind}", f"{launched} is more than cluster.{kind} ({expected})")


def the_address_can_be_bound(config: Config) -> None:
    """ZeroMQ takes ``tcp://host:port``, or ``*`` for any free port."""
    match = re.fullmatch(r"tcp://[^/\s]+:(\*|\d+)", config.cluster.address)
    if not match or (match[1] != "*" and not 0 < int(match[1]) < 65536):
        raise Invalid("cluster.address", f"{shown(config.cluster.address)} is not tcp://host:port or tcp://host:*")


def silence_outlasts_a_heartbeat(config: Config) -> None:
    """One late heartbeat is not yet a lost process."""
    interval, timeout = config.cluster.heartbeat_interval_s, config.cluster.heartbeat_timeout_s
    if timeout < 2 * interval:
        raise Invalid(
            "cluster.heartbeat_timeout_s", f"{timeout:g} is less than twice cluster.heartbeat_interval_s ({interval:g})"
        )


def the_new_model_is_described(config: Config) -> None:
    """A new model needs an architecture, and each character one token."""
    new = config.policy.new_model
    if new is None:
        return
    if not isinstance(new.config.get("model_type"), str):
        raise Invalid("policy.new_model.config.model_type", "required: the Hugging Face model type, such as qwen3")
    doubled = sorted({character for character in new.characters if new.characters.count(character) > 1})
    if doubled:
        raise Invalid("policy.new_model.characters", f"{shown(doubled[0])} is there more than once")


def the_new_model_has_fields_of_its_type(config: Config) -> None:
    """transformers takes any field, and makes nothing of one that is misspelt."""
    new = config.policy.new_model
    if new is None:
        return
    model_type = new.config["model_type"]
    fields = model_fields(model_type)  # none of a type that does not exist: making the model says so
    unknown = next((field for field in new.config if fields and field not in fields), None)
    if unknown is not None:
        raise Invalid(
            f"policy.new_model.config.{unknown}",
            f"a {model_type} configuration has no such field{nearest(unknown, fields)}",
        )


def vllm_takes_its_arguments(config: Config) -> None:
    """Names are checked where vLLM is installed: its engine would refuse them once everything has started."""
    generation = config.policy.generation
    if config.algorithm != "grpo" or generation.backend != "vllm":
        return
    found = complaint(generation.vllm_kwargs)
    if found is not None:
        raise Invalid(f"policy.generation.vllm_kwargs.{found[0]}", found[1])
    longest = config.policy.max_total_sequence_length
    if generation.vllm_cfg.max_model_len < longest:
        raise Invalid(
            "policy.generation.vllm_cfg.max_model_len",
            f"{generation.vllm_cfg.max_model_len} is less than policy.max_total_sequence_length ({longest})",
        )


def prompts_move_where_engines_are_async(config: Config) -> None:
    """Prompts that move change what an engine computes together, and with it the last bits of a run."""
    generation = config.policy.generation
    if config.algorithm == "grpo" and generation.generation_timeout is not None and not generation.is_async:
        raise Invalid("policy.generation.generation_timeout", "needs policy.generation.async_engine")


def experts_are_spread_over_tensor_ranks(config: Config) -> None:
    """vLLM spreads the experts of a layer over all ranks that share the layer, or over none."""
    generation = config.policy.generation
    if config.algorithm != "grpo" or generation.backend != "vllm":
        return
    vllm = generation.vllm_cfg
    if vllm.expert_parallel_size not in (1, vllm.tensor_parallel_size):
        raise Invalid(
            "policy.generation.vllm_cfg.expert_parallel_size",
            f"{vllm.expert_parallel_size} is neither 1 nor policy.generation.vllm_cfg.tensor_parallel_size, which is "
            f"{vllm.tensor_parallel_size}",
        )


def the_prerequisite_exists(config: Config) -> None:
    """The configuration of the earlier run must be there before anything starts."""
    if config.prerequisite is not None and not Path(config.prerequisite).is_file():
        raise Invalid("prerequisite", f"there is no file {config.prerequisite}")


RULES: tuple[Rule, ...] = (
    a_backend_is_enabled,
    an_optimizer_is_named,
    schedules_have_milestones_between,
    a_rollout_batch_divides_into_global_batches,
    a_global_batch_divides_into_micro_batches,
    a_validation_batch_divides_into_micro_batches,
    leaving_one_out_leaves_one,
    samples_differ,
    lengths_fit,
    the_task_is_named,
    the_file_is_named,
    environments_are_known,
    samples_are_scored,
    conversations_have_turns,
    checkpoints_can_be_ranked,
    there_are_rollouts,
    generation_fits_its_gpus,
    the_launch_fits_the_cluster,
    the_address_can_be_bound,
    silence_outlasts_a_heartbeat,
    the_new_model_is_described,
    the_new_model_has_fields_of_its_type,
    vllm_takes_its_arguments,
    prompts_move_where_engines_are_async,
    experts_are_spread_over_tensor_ranks,
    the_prerequisite_exists,
)
"""Checked in this order."""
