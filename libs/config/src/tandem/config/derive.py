"""Derived defaults: fill in keys that depend on other keys, before the schema is applied."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import msgspec
from msgspec import NODEFAULT

from tandem.config import conform, data_sets, engine_kinds, problem, schema
from tandem.config.named import DEFAULT_FIELDS, GENERATED, NAMED
from tandem.config.schema.declarations import ALGORITHMS, SECTIONS, Algorithm
from tandem.config.schema.loss import MEAN_OF_SEQUENCES
from tandem.config.shapes import choose_environment, name_packaged_tasks, rename_newer, reshape, reshape_model

Look = Callable[[str], Any]
"""A function that returns the current value of a key, else its plain default, else None."""


_PROCESSES_OF = "cluster.processes_of"


class DerivedKey(msgspec.Struct, frozen=True, kw_only=True):
    """A key that gets its default from other keys, if it is absent or null."""

    key: str
    text: str
    """The rule, for the documentation."""
    compute: Callable[[Look], Any]
    """A function that returns the default; None leaves the key null."""


def fill(tree: dict[str, Any]) -> dict[str, Any]:
    """Return `tree` in the schema's shape, with every derived default filled in.

    Values of a wrong type are left for `conform` to report. Raises `InvalidValue` if several algorithms are configured
    and none is chosen.
    """
    tree = _copy_value(tree)
    if tree.get("algorithm") is None:
        tree.pop("algorithm", None)
        tree |= _choose_algorithm(tree)
    reshape(tree)
    rename_newer(tree)
    data_sets.place_data_sets(tree)
    choose_environment(tree)
    name_packaged_tasks(tree)

    def look(key: str) -> Any:
        return _look(tree, key)

    tree.setdefault("teacher", None)
    for rule in DERIVED:
        if _look(tree, rule.key, defaults=False) is None:
            _put(tree, rule.key, rule.compute(look))
    if isinstance(tree.get("teachers"), list):
        tree["teachers"] = [_fill_teacher(tree, teacher) for teacher in tree["teachers"]]
    return tree


def _fill_teacher(tree: dict[str, Any], teacher: Any) -> Any:
    """Return one of several teachers with the derived defaults of a single one."""
    if not isinstance(teacher, dict):
        return teacher
    reshape_model(teacher)
    alone = {**tree, "teacher": teacher}
    for rule in DERIVED:
        if rule.key.startswith("teacher.") and _look(alone, rule.key, defaults=False) is None:
            _put(alone, rule.key, rule.compute(lambda key: _look(alone, key)))
    return teacher


def unfill(tree: dict[str, Any]) -> dict[str, Any]:
    """Return a complete `tree` without the keys that `fill` would set to the same values."""
    tree = _copy_value(tree)

    def look(key: str) -> Any:
        return _look(tree, key)

    derived = [rule.key for rule in DERIVED if _is_same_value(look(rule.key), rule.compute(look))]
    for key in derived:
        *parents, last = key.split(".")
        node = tree
        for part in parents:
            node = node[part] if isinstance(node.get(part), dict) else {}
        node.pop(last, None)
    return tree


def _is_same_value(first: Any, second: Any) -> bool:
    """Compare plain values, treating tuples like lists."""
    return bool(_copy_value(list(first) if isinstance(first, tuple) else first) == second)


def _copy_value(node: Any) -> Any:
    if isinstance(node, dict):
        return {key: _copy_value(value) for key, value in node.items()}
    return [_copy_value(value) for value in node] if isinstance(node, list) else node


def _choose_algorithm(tree: dict[str, Any]) -> dict[str, str]:
    present = [name for name in SECTIONS if name in tree]
    if len(present) > 1:
        raise problem.InvalidValue("algorithm", f"required where several are configured ({', '.join(present)})")
    return {"algorithm": present[0]} if present else {}


def _look(tree: dict[str, Any], key: str, *, defaults: bool = True) -> Any:
    node: Any = tree
    described: Any = conform.config_type()
    field: Any = None
    for part in key.split("."):
        field = conform.field_of(described, part) if described is not None else None
        inner = conform.list_struct_types(field.type) if field is not None else []
        described = inner[0] if inner else None
        node = node.get(part) if isinstance(node, dict) else None
    if node is None and defaults and field is not None and field.default is not NODEFAULT:
        return field.default
    return node


def _put(tree: dict[str, Any], key: str, value: Any) -> None:
    *parents, last = key.split(".")
    if parents and parents[0] in tree and tree[parents[0]] is None:
        return  # the section is null: `conform` reports it
    node = tree
    for part in parents:
        if node.get(part) is None:
            node[part] = {}
        if not isinstance(node[part], dict):
            return
        node = node[part]
    node[last] = value


def _copy_from(key: str) -> Callable[[Look], Any]:
    return lambda look: look(key)


def _find_algorithm(look: Look) -> Algorithm | None:
    """Return the declaration of the algorithm; None if there is none, which `conform` reports."""
    name = look("algorithm")
    return ALGORITHMS.get(name) if isinstance(name, str) else None


def _declared(look: Look, default: Callable[[Algorithm], Any]) -> Any:
    algorithm = _find_algorithm(look)
    return None if algorithm is None else default(algorithm)


def _describe_by_algorithm(default: Callable[[Algorithm], Any]) -> str:
    """Return a key's default for each algorithm as text, beginning with that of the first algorithm."""
    first, *more_algorithms = ALGORITHMS.values()
    titles: dict[Any, list[str]] = {}
    for algorithm in more_algorithms:
        if default(algorithm) != default(first):
            titles.setdefault(default(algorithm), []).append(algorithm.title)
    exceptions = ", ".join(f"{value} for {' and '.join(names)}" for value, names in titles.items())
    return f"{default(first)}; {exceptions}"


def _multiply(first: str, second: str) -> Callable[[Look], Any]:
    def compute(look: Look) -> Any:
        values = look(first), look(second)
        return values[0] * values[1] if all(isinstance(value, int) for value in values) else None

    return compute


def _derive_same(key: str, source_key: str) -> DerivedKey:
    return DerivedKey(key=key, text=f"`{source_key}`", compute=_copy_from(source_key))


def compute_warmup_length(warmup: Any, num_steps: Any, num_passes: Any) -> int:
    """Return the steps of the schedule in which the learning rate rises; 0 for none, or for values of a wrong type.

    Below 1, `warmup` is a share of the run, rounded up (Transformers 5, ``TrainingArguments.get_warmup_steps``).
    """
    if not all(isinstance(value, int | float) for value in (warmup, num_steps, num_passes)) or warmup <= 0:
        return 0
    return int(warmup) if warmup >= 1 else max(0, math.ceil(warmup * num_steps * num_passes))


def make_linear_warmup(num_steps: int) -> dict[str, Any]:
    """Return the entry of ``policy.scheduler`` whose factor is ``step / num_steps``, then 1.

    That is Transformers' ``get_constant_schedule_with_warmup``, but for a first factor that torch takes for positive.
    """
    kwargs = {"start_factor": 1e-12, "end_factor": 1.0, "total_iters": num_steps}
    return {"name": "torch.optim.lr_scheduler.LinearLR", "kwargs": kwargs}


def _derive_warmed_up(section: str) -> tuple[DerivedKey, ...]:
    """Return the rules for the schedules that `warmup_steps` stands for."""

    def is_megatron(look: Look) -> bool:
        return bool(look(f"{section}.megatron_cfg.enabled"))

    def schedule(look: Look) -> Any:
        steps = compute_warmup_length(look(f"{section}.warmup_steps"), *_run_length(look))
        return [make_linear_warmup(steps)] if steps and not is_megatron(look) else []

    def iterations(look: Look) -> Any:
        steps = compute_warmup_length(look(f"{section}.warmup_steps"), *_run_length(look))
        return steps if is_megatron(look) else 0

    means = f"what `{section}.warmup_steps` means"
    return (
        DerivedKey(key=f"{section}.scheduler", text=f"{means}, without Megatron-Core", compute=schedule),
        DerivedKey(key=f"{section}.megatron_cfg.scheduler.lr_warmup_iters", text=means, compute=iterations),
    )


def _run_length(look: Look) -> tuple[Any, Any]:
    """Return the steps of the run and the passes of each over its batch."""
    section = look("algorithm")
    passes = look(f"{section}.ppo_epochs") or look(f"{section}.num_iterations") or 1
    return look(f"{section}.max_num_steps"), passes


def _derive_of_model(section: str) -> tuple[DerivedKey, ...]:
    """Return the rules for every model section."""
    return (
        _derive_same(f"{section}.tokenizer.name", f"{section}.model_name"),
        *(
            _derive_tokens(section, f"{batches}.{key}", batch)
            for batches in ("sequence_packing", "dynamic_batching")
            for key, batch in (
                ("train_mb_tokens", "train_micro_batch_size"),
                ("logprob_mb_tokens", "logprob_batch_size"),
            )
        ),
    )


def _derive_from_policy(section: str) -> tuple[DerivedKey, ...]:
    """Return the rules for a model that follows the policy in its unset keys."""
    return (
        *(_derive_same(f"{section}.{key}", f"policy.{key}") for key in _AS_THE_POLICY),
        DerivedKey(
            key=f"{section}.new_model",
            text="`policy.new_model` if it is the same model",
            compute=lambda look: (
                look("policy.new_model") if look(f"{section}.model_name") == look("policy.model_name") else None
            ),
        ),
        *_derive_of_model(section),
    )


def _derive_tokens(section: str, key: str, batch: str) -> DerivedKey:
    key, length, batch = (f"{section}.{name}" for name in (key, "max_total_sequence_length", batch))
    product = _multiply(length, batch)

    def compute(look: Look) -> Any:
        tokens = product(look)
        algorithm = _find_algorithm(look)
        return tokens * algorithm.sequences_per_unit if tokens is not None and algorithm is not None else tokens

    return DerivedKey(key=key, text=f"`{length}` * `{batch}`, for DPO and RM twice that", compute=compute)


def _derive_from_data_set(key: str) -> DerivedKey:
    """Return the rule for a key of ``data`` that a named data set decides."""
    name = key.removeprefix("data.")
    otherwise = DEFAULT_FIELDS.get(name)

    def compute(look: Look) -> Any:
        named = NAMED.get(str(look("data.dataset_name")))
        if name == "val_split" and look("data.train"):
            return None  # `data.validation` defines the held-out data
        return otherwise if named is None else named.keys.get(name, otherwise)

    by_data_set = ", ".join(
        f"`{named.keys[name]}` for {dataset}" for dataset, named in NAMED.items() if name in named.keys
    )
    return DerivedKey(key=key, text=f"{by_data_set}; else {f'`{otherwise}`' if otherwise else 'null'}", compute=compute)


def _derive_env(look: Look) -> Any:
    return {name: {} for name in [GENERATED.get(look("data.dataset_name"))] if name is not None}


def _derive_environment(look: Look) -> Any:
    env = look("env")
    return next(iter(env)) if isinstance(env, dict) and len(env) == 1 else None


def _derive_num_train(look: Look) -> Any:
    return 10_000 if look("data.dataset_name") in GENERATED else None


def _derive_task_params(look: Look) -> Any:
    if look("data.dataset_name") != "sliding_puzzle":
        return {}
    env = look("env")
    entry = env.get("sliding_puzzle_game") if isinstance(env, dict) else None
    cfg = entry.get("cfg") if isinstance(entry, dict) else None
    return (cfg.get("game_config") if isinstance(cfg, dict) else None) or {}


def _derive_num_validation(look: Look) -> Any:
    return 256 if look("data.dataset_name") in GENERATED else None


def _count_gpus(look: Look) -> tuple[int, int] | None:
    """Return the number of GPUs for policy and generation, and how many of them are reserved for generation.

    None if the configuration does not say.
    """
    nodes, gpus = look("cluster.num_nodes"), look("cluster.gpus_per_node")
    if not isinstance(nodes, int) or not isinstance(gpus, int):
        return None
    if nodes == 1:
        gpus -= _count_gpus_of_reward_models(look)
    algorithm, of_others = _find_algorithm(look), _count_processes_of_others(look)
    if algorithm is None or not algorithm.rolls_out or look(f"{_COLOCATED}.enabled") is not False:
        return nodes * gpus - of_others, 0
    key, gpus_each = ("gpus_per_node", 1) if nodes == 1 else ("num_nodes", gpus)
    aside = look(f"{_COLOCATED}.resources.{key}")
    return (nodes * gpus - of_others, aside * gpus_each) if isinstance(aside, int) else None


def _count_processes_of_others(look: Look) -> int:
    """Return the number of processes for models beside the policy."""
    counts = (look(f"{_PROCESSES_OF}.{model}") for model in schema.MODELS if model != "policy")
    return sum(num for num in counts if isinstance(num, int))


def _count_processes_of_teachers(look: Look) -> Any:
    """Return the number of teacher processes as in NeMo-RL: the same number for each loaded teacher."""
    key = "on_policy_distillation"
    names = look(f"{key}.teacher_model_by_agent_name")
    if not (isinstance(names, dict) and look(f"{key}.enabled") and look(f"{key}.non_colocated_teachers.enabled")):
        return 0
    num = len({*names.values()} if look(f"{key}.deduplicate_shared_teacher_checkpoints") is not False else names)
    sizes = (
        look(f"{key}.non_colocated_teachers.default_teacher_cfg.{each}") for each in ("num_nodes", "gpus_per_node")
    )
    return num * math.prod(size for size in sizes if isinstance(size, int))


def _count_gpus_of_reward_models(look: Look) -> int:
    """Return the number of a single node's GPUs that are reserved for reward models."""
    env = look("env")
    of_sets = (each for key in ("data.train", "data.validation") for each in look(key) or () if isinstance(each, dict))
    names = {look("data.environment"), *(each.get("env_name") for each in of_sets)}
    total = 0
    for name in names if isinstance(env, dict) else ():
        entry = env.get(name)
        resources = entry.get("resources") if isinstance(entry, dict) and entry.get("model_name") else None
        aside = resources.get("gpus_per_node") if isinstance(resources, dict) else None
        total += aside if isinstance(aside, int) else 0
    return total


def _derive_trainers(look: Look) -> Any:
    """Return the number of trainers as in NeMo-RL: one for every GPU that is not reserved for generation."""
    gpus = _count_gpus(look)
    return max(1, gpus[0] - gpus[1]) if gpus else 1


def _derive_rollouts(look: Look) -> Any:
    """Return the number of engines that fit on the GPUs for generation; 1 for engines without GPUs."""
    gpus, kind = _count_gpus(look), engine_kinds.ENGINE_KINDS.get(look("policy.generation.backend"))
    if gpus is None or kind is None or not kind.is_on_gpus:
        return 1
    sizes = [look(f"policy.generation.{key}") for key in kind.size_keys]
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        return 1
    return max(1, (gpus[1] or gpus[0]) // math.prod(sizes))


def _derive_launch(look: Look) -> Any:
    """Return ``all``, or the processes on the first of several nodes: ranks and engines are numbered through the
    nodes."""
    nodes, gpus_per_node = look("cluster.num_nodes"), look("cluster.gpus_per_node")
    trainers, rollouts = look("cluster.trainers"), look("cluster.rollouts")
    sizes, of_others = (nodes, gpus_per_node, trainers, rollouts), _count_processes_of_others(look)
    if not all(isinstance(size, int) for size in sizes) or nodes <= 1 or gpus_per_node <= 0:
        return "all"
    shared = look(f"{_COLOCATED}.enabled") is not False
    with_engines = max(1, -(-(nodes * gpus_per_node - of_others) // gpus_per_node))  # engines are on the policy's nodes
    rollouts_per_node = max(1, -(-rollouts // with_engines)) if shared else 0
    return {
        "trainers": min(trainers + of_others, gpus_per_node),
        "rollouts": min(rollouts, rollouts_per_node),
        "refit": True,
    }


def _normalizes(look: Look) -> Any:
    scale = look("grpo.adv_estimator.scale_rewards")
    return look("grpo.normalize_rewards") if scale is None else scale != "none"


def _is_dr_grpo(look: Look) -> bool:
    return bool(look("loss_fn.loss_type") == "dr_grpo")


def _derive_metric_name(look: Look) -> Any:
    of_training = look("data.num_validation") == 0 or not _validates(look)
    return _declared(
        look, lambda algorithm: next(name for name in algorithm.metrics if not (of_training and name[:4] == "val_"))
    )


def _validates(look: Look) -> bool:
    """Tell whether the algorithm's section makes the run validate at any step."""
    section, never = look("algorithm"), (None, False, 0)
    when = (look(f"{section}.{key}") for key in ("val_period", "val_at_start", "val_at_end"))
    is_due = any(each not in never for each in when) or look(f"{section}.max_num_steps") == 0
    return is_due or bool(look("eval.during_training"))


def _derive_higher_is_better(look: Look) -> Any:
    return not str(look("checkpointing.metric_name")).endswith("loss")


_AS_THE_POLICY = (
    "model_name",
    "max_total_sequence_length",
    "train_global_batch_size",
    "train_micro_batch_size",
    "logprob_batch_size",
    "precision",
    "make_sequence_length_divisible_by",
    "dtensor_cfg.enabled",
    "dtensor_cfg.tensor_parallel_size",
    "dtensor_cfg.context_parallel_size",
    "dtensor_cfg.expert_parallel_size",
    "dtensor_cfg.dp_replicate_size",
    "megatron_cfg.enabled",
    "megatron_cfg.tensor_model_parallel_size",
    "megatron_cfg.pipeline_model_parallel_size",
    "megatron_cfg.virtual_pipeline_model_parallel_size",
    "megatron_cfg.context_parallel_size",
    "megatron_cfg.virtual_pipeline_model_parallel_size",
    "megatron_cfg.expert_model_parallel_size",
    "megatron_cfg.expert_tensor_parallel_size",
)
"""Keys of other models that default to the policy's values."""

_COLOCATED = "policy.generation.colocated"
_VLLM = "policy.generation.vllm_cfg"

DERIVED = (
    DerivedKey(
        key="policy.train_global_batch_size",
        text=_describe_by_algorithm(lambda algorithm: algorithm.train_global_batch_size),
        compute=lambda look: _declared(look, lambda algorithm: algorithm.train_global_batch_size),
    ),
    DerivedKey(
        key="grpo.normalize_rewards",
        text="false if `grpo.scale_rewards` is none, else true",
        compute=lambda look: look("grpo.scale_rewards") != "none",
    ),
    _derive_same("grpo.adv_estimator.scale_rewards", "grpo.scale_rewards"),
    DerivedKey(
        key="grpo.adv_estimator.normalize_rewards",
        text="`grpo.normalize_rewards`, or what `grpo.adv_estimator.scale_rewards` means",
        compute=_normalizes,
    ),
    _derive_same("grpo.adv_estimator.use_leave_one_out_baseline", "grpo.use_leave_one_out_baseline"),
    *_derive_of_model("policy"),
    *_derive_warmed_up("policy"),
    DerivedKey(
        key="value",
        text="for PPO a model like the policy, else null",
        compute=lambda look: _declared(look, lambda algorithm: {} if "value" in algorithm.trains else None),
    ),
    *_derive_from_policy("value"),
    *_derive_warmed_up("value"),
    *_derive_from_policy("teacher"),
    _derive_same("policy.generation.max_new_tokens", "policy.max_total_sequence_length"),
    DerivedKey(
        key="loss_fn.token_level_loss",
        text="false if `loss_fn.loss_type` is grpo, else true",
        compute=lambda look: look("loss_fn.loss_type") != MEAN_OF_SEQUENCES,
    ),
    DerivedKey(
        key="loss_fn.loss_scale_factor",
        text="`policy.generation.max_new_tokens` if `loss_fn.loss_type` is dr_grpo, else null",
        compute=lambda look: look("policy.generation.max_new_tokens") if _is_dr_grpo(look) else None,
    ),
    _derive_same("policy.generation.transformers_cfg.num_slots", "policy.generation_batch_size"),
    _derive_same("policy.generation.vllm_cfg.precision", "policy.precision"),
    _derive_same("policy.generation.vllm_cfg.max_model_len", "policy.max_total_sequence_length"),
    _derive_same("data.max_input_seq_length", "policy.max_total_sequence_length"),
    _derive_from_data_set("data.input_key"),
    _derive_from_data_set("data.output_key"),
    _derive_from_data_set("data.chat_key"),
    _derive_from_data_set("data.chosen_key"),
    _derive_from_data_set("data.rejected_key"),
    _derive_from_data_set("data.split"),
    _derive_from_data_set("data.val_split"),
    _derive_from_data_set("data.subset"),
    DerivedKey(
        key="env",
        text="`reasoning_gym: {}`, `sliding_puzzle_game: {}` or `exact_match: {}`, by `data.dataset_name`, else none",
        compute=_derive_env,
    ),
    DerivedKey(key="data.environment", text="the only entry of `env`", compute=_derive_environment),
    DerivedKey(
        key="data.task_params",
        text="for sliding_puzzle `env.sliding_puzzle_game.cfg.game_config`, else none",
        compute=_derive_task_params,
    ),
    DerivedKey(key="data.num_train", text="10000 for problems that are made, else null", compute=_derive_num_train),
    DerivedKey(
        key="data.num_validation",
        text="256 for problems that are made, else null",
        compute=_derive_num_validation,
    ),
    DerivedKey(
        key=f"{_PROCESSES_OF}.teacher",
        text="with `on_policy_distillation.non_colocated_teachers` enabled, the GPUs of its `default_teacher_cfg` "
        "for each teacher; else 0",
        compute=_count_processes_of_teachers,
    ),
    DerivedKey(
        key="cluster.trainers",
        text="one for each GPU of the cluster, except those reserved by `policy.generation.colocated.resources`, the "
        "`resources` of a reward model, or `cluster.processes_of`",
        compute=_derive_trainers,
    ),
    DerivedKey(
        key="cluster.rollouts",
        text="with vLLM, the number of GPUs for generation divided by `tensor_parallel_size` times "
        "`pipeline_parallel_size`; else 1",
        compute=_derive_rollouts,
    ),
    DerivedKey(
        key="cluster.launch",
        text="all; with several nodes, the processes of the first",
        compute=_derive_launch,
    ),
    DerivedKey(
        key="checkpointing.checkpoint_dir",
        text="`checkpoints` within `logger.log_dir`",
        compute=lambda look: f"{look('logger.log_dir')}/checkpoints",
    ),
    DerivedKey(
        key="checkpointing.metric_name",
        text=(
            f"{_describe_by_algorithm(lambda algorithm: algorithm.metrics[0])}; the training metric if there is no "
            "validation"
        ),
        compute=_derive_metric_name,
    ),
    DerivedKey(
        key="checkpointing.higher_is_better",
        text="true, unless `checkpointing.metric_name` is a loss",
        compute=_derive_higher_is_better,
    ),
)
"""The rules, in the order in which they are applied."""
