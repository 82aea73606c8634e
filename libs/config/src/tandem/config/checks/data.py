"""Rules for problems, for the environments that score them, and for reward models."""

from __future__ import annotations

import re
import string
from typing import Literal

from tandem.common.errors import listed, nearest
from tandem.config.named import GENERATED, NAMED, RAW_TEXT, holds_texts, is_local
from tandem.config.placement import count_gpus_of_reward_models
from tandem.config.problem import InvalidValue, Rule, check_dotted_path, restrict_to_rollouts, shown
from tandem.config.schema import Config, EnvironmentConfig, JudgeConfig
from tandem.config.schema.columns import REWARDS
from tandem.config.schema.declarations import ALGORITHMS
from tandem.config.schema.environments import (
    FUNCTION_ENVIRONMENTS,
    NEMO_GYM,
    NEMO_GYM_ROWS,
    PACKAGED,
    REWARD_MODEL,
    OpenEnvConfig,
)
from tandem.config.shapes import ELSEWHERE

CONVERSING_ENVIRONMENTS = ("calculator", "sliding_puzzle_game")
"""Environments that reply to a response, so that one turn is never enough."""

BUILT_IN_ENVIRONMENTS = (
    "reasoning_gym",
    "math",
    "math_multi_reward",
    "exact_match",
    "python_code",
    *CONVERSING_ENVIRONMENTS,
)

COMPARING_ENVIRONMENTS = ("math", "math_multi_reward", "exact_match", "calculator", *FUNCTION_ENVIRONMENTS)
"""Built-in environments that compare a response with the reference answer."""

PYTHON_REWARDS = "python_rewards"
"""The environment set by `tandem.train`: functions of the calling program."""


def compares_answers(config: Config, name: str) -> bool:
    """Return whether an entry of ``env`` is a built-in environment that compares with the reference answer."""
    settings = config.env[name]
    is_built_in = not (settings.is_custom or settings.judge is not None or settings.is_reward_model)
    return name in COMPARING_ENVIRONMENTS and is_built_in


def reads_boxes(config: Config, name: str) -> bool:
    """Return whether an environment compares boxes, which are lists of numbers."""
    names = [function.get("name") for function in config.env[name].reward_functions]
    return name in FUNCTION_ENVIRONMENTS and "bbox_giou" in names


def check_responses_fit(config: Config) -> None:
    """Check that responses may not exceed a whole sequence."""
    longest, length = config.policy.max_total_sequence_length, config.policy.generation.max_new_tokens
    if length > longest:
        key = "policy.generation.max_new_tokens"
        raise InvalidValue(key, f"{length} is greater than policy.max_total_sequence_length ({longest})")


def check_task_is_named(config: Config) -> None:
    """Check that reasoning-gym, which generates problems by task, has a task, and no other dataset does."""
    if config.data.dataset_name == "reasoning_gym":
        if config.data.task is None:
            raise InvalidValue("data.task", "required where data.dataset_name is reasoning_gym, such as chain_sum")
    elif config.data.task is not None:
        raise InvalidValue(
            "data.task", f"only reasoning_gym has tasks, and data.dataset_name is {config.data.dataset_name}"
        )


def check_curriculum_is_followed(config: Config) -> None:
    """Check that levels of tasks follow accuracy only where there is one."""
    has_curriculum = config.data.task == "composite" and config.data.task_params.get("curriculum") is not None
    if has_curriculum and not config.declaration.rolls_out:
        reason = f"levels follow the accuracy of responses, and {config.declaration.title} generates none"
        raise InvalidValue("data.task_params.curriculum", reason)


def check_file_is_named(config: Config) -> None:
    """Check that JSONL problems have a file; a training file is not needed if nothing is trained."""
    name = config.data.dataset_name
    is_needed = not config.data.train and not (config.evaluates and config.data.val_data_path)
    if is_local(name) and config.data.train_data_path is None and is_needed:
        raise InvalidValue("data.train_data_path", f"required where data.dataset_name is {name}")


def check_several_validation_files_have_names(config: Config) -> None:
    """Check that several validation files are named, since each has its own metrics, and that validation is a loss."""
    key, paths = "data.val_data_paths", config.data.val_data_paths
    if not paths:
        return
    if config.declaration.rolls_out:
        raise InvalidValue(key, f"{config.declaration.title} validates on one file: set data.val_data_path")
    if config.data.val_data_path is not None:
        raise InvalidValue(key, "data.val_data_path is given too")
    if not is_local(config.data.dataset_name):
        raise InvalidValue(
            key, f"only files are validated separately, and data.dataset_name is {config.data.dataset_name}"
        )
    for name in paths:
        if not re.fullmatch(r"[\w.-]+", name):
            raise InvalidValue(key, f"{shown(name)} is not a valid metric name: use letters, digits, '_', '.' and '-'")


def check_listed_sets_are_read(config: Config) -> None:
    """Check that listed sets are files or on the Hub, and that no other key names a validation set."""
    data = config.data
    for side in ("train", "validation"):
        for index, data_set in enumerate(getattr(data, side)):
            key = f"data.{side}[{index}]"
            name = str(data_set.dataset_name)
            if name in GENERATED:
                raise InvalidValue(f"{key}.dataset_name", f"{name} generates its problems: set data.dataset_name alone")
            if is_local(name) and data_set.data_path is None:
                raise InvalidValue(f"{key}.data_path", f"required where dataset_name is {name}")
            if side == "validation" and data_set.weight is not None:
                raise InvalidValue(f"{key}.weight", "only training sets have a weight")
    if data.validation and not data.train:
        raise InvalidValue("data.validation", "data.train is not given: list the training sets too")
    for key in ("val_data_path", "val_data_paths", "val_split"):
        if data.train and getattr(data, key) is not None:
            raise InvalidValue(f"data.{key}", "data.train is given: set data.validation")


def check_raw_text_is_read_as_such(config: Config) -> None:
    """Check that a processor of raw text has raw text, and that all of a run's data is of one kind then."""
    data = config.data
    sets = [] if data.train else [("data", data.dataset_name, data.processor)]
    for side in ("train", "validation"):
        for index, entry in enumerate(getattr(data, side)):
            sets.append((f"data.{side}[{index}]", str(entry.dataset_name), entry.processor))
    for key, name, processor in sets:
        if processor == RAW_TEXT and not holds_texts(name):
            raise InvalidValue(
                f"{key}.processor", f"{RAW_TEXT} reads raw text: {key}.dataset_name is {name}, not arrow_text"
            )
        if holds_texts(name) != holds_texts(data.dataset_name):
            text = f"{name}, but data.dataset_name is {data.dataset_name}: raw text goes with raw text alone"
            raise InvalidValue(f"{key}.dataset_name", text)


def check_splits_are_known(config: Config) -> None:
    """Check the splits of data sets whose splits are data sets of their own."""
    data = config.data
    sets = [("data", data.dataset_name, data.split)] if not data.train else []
    for side in ("train", "validation"):
        for index, data_set in enumerate(getattr(data, side)):
            sets.append((f"data.{side}[{index}]", str(data_set.dataset_name), str(data_set.split)))
    for key, name, split in sets:
        named = NAMED.get(name)
        if named is not None and named.splits and split not in named.splits:
            raise InvalidValue(f"{key}.split", f"{shown(split)}, but {name} has {listed([*named.splits])}")


def check_dataset_fits_algorithm(config: Config) -> None:
    """Check that the algorithm can learn from the dataset."""
    name = config.data.dataset_name
    named = NAMED.get(name)
    if named is None or name == "jsonl":  # the rows of a JSONL file say what they are
        return
    fitting = [algorithm.name for algorithm in ALGORITHMS.values() if named.holds in algorithm.learns_from]
    if config.algorithm not in fitting:
        raise InvalidValue("data.dataset_name", f"{name} holds {named.holds}, which are for {listed(fitting)}")


def check_worse_solutions_are_written(config: Config) -> None:
    """Check for a template of worse solutions: preferences need one, and a generated problem has only the right one."""
    data = config.data
    if config.declaration.learns_preferences and data.dataset_name in GENERATED and data.rejected_template is None:
        reason = f"{config.algorithm} learns from data.dataset_name {data.dataset_name}"
        raise InvalidValue("data.rejected_template", f"required where {reason}")


def check_margins_are_read(config: Config) -> None:
    """Check that margins are given only to a reward model: losses over the policy's own probabilities ignore them."""
    reads = config.declaration.learns_preferences and REWARDS in config.declaration.columns
    if config.data.margin_key is not None and not reads:
        raise InvalidValue(
            "data.margin_key",
            f"{config.data.margin_key}, but only a reward model learns margins: algorithm is {config.algorithm}",
        )


def check_system_message_is_given_once(config: Config) -> None:
    """Check that the system message is given as text or as a file, not both."""
    if config.data.system_prompt is not None and config.data.system_prompt_file is not None:
        raise InvalidValue("data.system_prompt", "data.system_prompt_file is given too")


def check_environments_are_known(config: Config) -> None:
    """Check that each environment is built in or fully described."""
    for name, entry in config.env.items():
        if entry.persistent and entry.command is None:
            raise InvalidValue(f"env.{name}.persistent", f"only agents' programs persist: set env.{name}.command")
        if entry.roles and (entry.packaged is not None or not entry.is_agent):
            raise InvalidValue(
                f"env.{name}.roles", f"only agents' requests name their role: set env.{name}.command or url"
            )
        if entry.model_name is not None and not entry.is_reward_model:
            raise InvalidValue(
                f"env.{name}.model_name", "a class, an agent or a judge is given too, which scores by itself"
            )
        if entry.packaged is not None:
            _check_packaged(name, entry)
        elif entry.is_agent:
            _check_agent(name, entry)
        elif entry.judge is not None:
            _check_judge(name, entry, entry.judge, config)
        elif entry.is_reward_model or (name == REWARD_MODEL and not entry.is_custom):
            check_reward_model(name, entry)
        elif entry.class_path is None:
            if name not in (*BUILT_IN_ENVIRONMENTS, *FUNCTION_ENVIRONMENTS, *ELSEWHERE, PYTHON_REWARDS):
                built_in = ", ".join(BUILT_IN_ENVIRONMENTS)
                guess = nearest(name, BUILT_IN_ENVIRONMENTS)
                raise InvalidValue(
                    f"env.{name}",
                    f"not built in ({built_in}) and without a class, a command, a judge or a model_name{guess}",
                )
        else:
            check_dotted_path(f"env.{name}.class", entry.class_path)
        if name == PYTHON_REWARDS and entry.is_custom:
            raise InvalidValue(f"env.{name}.class", "the name is for functions given to tandem.train: choose another")
        if entry.max_failures is not None and decide_on_error(name, entry) == "fail":
            raise InvalidValue(
                f"env.{name}.max_failures", f"the first failure ends the run; set env.{name}.on_error, too"
            )


def decide_on_error(name: str, entry: EnvironmentConfig) -> Literal["zero", "drop", "fail"]:
    """Return what happens to a sample if scoring it fails; a failure in the user's own code ends the run by default."""
    if entry.judge is not None or entry.is_reward_model:
        return entry.on_error or "drop"  # the response is not at fault
    return entry.on_error or ("fail" if entry.is_custom or name == PYTHON_REWARDS else "zero")


def _check_packaged(name: str, entry: EnvironmentConfig) -> None:
    """Raise `InvalidValue` if something else is to score or play where a packaged environment does."""
    (kind, *second) = [kind for kind in PACKAGED if getattr(entry, kind) is not None]
    if second:
        raise InvalidValue(f"env.{name}.{second[0]}", f"env.{name}.{kind} is given too: an entry is one environment")
    if entry.openenv is not None:
        _check_openenv(f"env.{name}.openenv", entry.openenv)
    rivals = {"class": entry.class_path, "command": entry.command, "url": entry.url, "judge": entry.judge}
    for key, value in rivals.items():
        if value is not None:
            raise InvalidValue(f"env.{name}.{key}", f"env.{name}.{kind} is given too, which plays and scores by itself")


def _check_openenv(key: str, settings: OpenEnvConfig) -> None:
    """Raise `InvalidValue` unless there is one server, and what is set for it has an effect."""
    if [settings.package, settings.image, settings.url].count(None) != 2:
        raise InvalidValue(key, "needs one of package and image, which are served here, and the url of a server")
    if settings.url is not None:
        _check_url(f"{key}.url", settings.url)
    if settings.python is not None and settings.image is not None:
        raise InvalidValue(f"{key}.python", "has no effect: the image brings its interpreter")


def _check_agent(name: str, entry: EnvironmentConfig) -> None:
    """Raise `InvalidValue` unless an agent is either a program or a server, without a class, and its roles differ."""
    for index, role in enumerate(entry.roles):
        if not re.fullmatch(r"[\w.-]+", role):
            raise InvalidValue(
                f"env.{name}.roles[{index}]",
                f"{shown(role)} cannot name a metric: use letters, digits, '_', '.' and '-'",
            )
        if role in entry.roles[:index]:
            raise InvalidValue(f"env.{name}.roles[{index}]", f"{shown(role)} is named twice")
    if entry.command is not None and entry.url is not None:
        raise InvalidValue(f"env.{name}.url", f"env.{name}.command is given too: an agent is a program or a server")
    key = f"env.{name}.{'url' if entry.command is None else 'command'}"
    if entry.class_path is not None:
        raise InvalidValue(key, f"env.{name}.class is given too: an agent plays whole episodes, and has no class")
    if entry.command == ():
        raise InvalidValue(key, "is empty, must begin with the program")
    if entry.url is not None:
        _check_url(key, entry.url)


def _check_url(key: str, url: str) -> None:
    if not re.fullmatch(r"https?://[^\s/]+(/\S*)?", url):
        raise InvalidValue(key, f"{shown(url)}, must be http://HOST:PORT/PATH")


def _check_judge(name: str, entry: EnvironmentConfig, judge: JudgeConfig, config: Config) -> None:
    """Raise `InvalidValue` unless a judge has an endpoint, and its answer a number."""
    key = f"env.{name}.judge"
    if entry.class_path is not None:
        raise InvalidValue(key, f"env.{name}.class is given too: a judge scores by itself")
    if judge.base_url is None:
        if judge.cache is not None:
            raise InvalidValue(
                f"{key}.cache", f"given, but {key}.base_url is null: the run's own weights change every step"
            )
        if not config.policy.generation.takes_external_requests:
            raise InvalidValue(
                key, "without base_url it asks the run's own engine: set policy.generation.expose_http_server"
            )
    else:
        _check_url(f"{key}.base_url", judge.base_url)
        if judge.model is None:
            raise InvalidValue(key, "has a base_url but no model")
    if judge.highest_score <= judge.lowest_score:
        raise InvalidValue(f"{key}.highest_score", f"{judge.highest_score:g} is not more than {key}.lowest_score")
    try:
        groups = re.compile(judge.score_pattern).groups
    except re.error as error:
        raise InvalidValue(f"{key}.score_pattern", f"{shown(judge.score_pattern)}: {error}") from None
    if not groups:
        raise InvalidValue(f"{key}.score_pattern", f"{shown(judge.score_pattern)} has no group to capture the score")
    try:
        fields = {field.partition("[")[0] for _, field, *_ in string.Formatter().parse(judge.prompt) if field}
    except ValueError as error:
        raise InvalidValue(f"{key}.prompt", f"{shown(judge.prompt)}: {error}") from None
    if "response" not in fields:
        raise InvalidValue(f"{key}.prompt", "has no {response}: the judge would not see what it grades")


def check_samples_are_scored(config: Config) -> None:
    """Check that each data set has an environment that can score it."""
    environment, names, title = config.data.environment, list(config.env), config.declaration.title
    if not names:
        raise InvalidValue("env", f"required: {title} needs an environment, such as {', '.join(BUILT_IN_ENVIRONMENTS)}")
    if environment is None:
        raise InvalidValue("data.environment", f"required where env has several entries ({', '.join(names)})")
    _check_scores(config, "data.environment", environment, "data.dataset_name", config.data.dataset_name)
    for side in ("train", "validation"):
        for index, data_set in enumerate(getattr(config.data, side)):
            if data_set.env_name not in (None, environment):
                _check_scores(
                    config, f"data.{side}[{index}].env_name", data_set.env_name, "dataset_name", data_set.title
                )
    agents = [name for name in config.environments if config.env[name].is_agent]
    if agents and len(config.environments) > 1:
        raise InvalidValue(
            f"env.{agents[0]}",
            f"an agent plays whole episodes: there can be no other environment ({', '.join(config.environments)})",
        )


def _check_scores(config: Config, key: str, environment: str, dataset_key: str, dataset: str) -> None:
    if environment not in config.env:
        raise InvalidValue(key, f"{shown(environment)} is not an entry of env ({', '.join(config.env)})")
    packaged = next((kind for kind in PACKAGED if getattr(config.env[environment], kind) is not None), None)
    is_of_gym = packaged == NEMO_GYM and dataset == NEMO_GYM_ROWS
    if dataset == NEMO_GYM_ROWS and not is_of_gym:
        raise InvalidValue(dataset_key, f"{dataset}, but env.{environment} is not NeMo Gym's: give env.nemo_gym")
    if packaged is not None and dataset != packaged and not is_of_gym:
        raise InvalidValue(key, f"{environment} plays the tasks of its package: {dataset_key} {dataset} is not for it")
    if dataset in PACKAGED and packaged != dataset:
        raise InvalidValue(dataset_key, f"{dataset}, but env.{environment}.{dataset} is not given")
    built_in = not config.env[environment].is_custom
    if built_in and environment == "reasoning_gym" and dataset != "reasoning_gym":
        raise InvalidValue(key, f"reasoning_gym cannot score {dataset_key} {dataset}")
    if built_in and environment == "sliding_puzzle_game" and dataset != "sliding_puzzle":
        raise InvalidValue(key, f"sliding_puzzle_game plays {dataset_key} sliding_puzzle, not {dataset}")


def check_sets_are_drawn_from(config: Config) -> None:
    """Check that the numbers of prompts from several data sets fill a step evenly."""
    data, key = config.data, "data.num_prompts_per_dataloader"
    num_prompts = data.num_prompts_per_dataloader
    if not data.use_multiple_dataloader:
        return
    if not config.declaration.rolls_out:
        raise InvalidValue(
            "data.use_multiple_dataloader", f"{config.declaration.title} has none: give the sets a weight"
        )
    if len(data.train) < 2:
        raise InvalidValue("data.use_multiple_dataloader", "needs several data sets in data.train")
    if any(each.weight is not None for each in data.train):
        raise InvalidValue("data.use_multiple_dataloader", "sets take turns, but a set of data.train has a weight")
    if data.chooser is not None:
        check_dotted_path("data.custom_dataloader", data.chooser)
        return
    if num_prompts is None:
        raise InvalidValue(key, "required with data.use_multiple_dataloader")
    per_step = config.rollout_section.num_prompts_per_step
    if per_step % num_prompts:
        raise InvalidValue(
            key, f"{config.algorithm}.num_prompts_per_step ({per_step}) is not a multiple of {num_prompts}"
        )


def check_conversations_have_turns(config: Config) -> None:
    """Check that there is more than one turn if the environment replies."""
    for environment in config.environments:
        if environment not in CONVERSING_ENVIRONMENTS or config.env[environment].is_custom:
            continue
        if config.rollout_section.max_rollout_turns == 1:
            raise InvalidValue(
                f"{config.algorithm}.max_rollout_turns",
                f"1, but {environment} replies, and the policy needs another turn after that",
            )


RULES: tuple[Rule, ...] = (
    check_task_is_named,
    check_curriculum_is_followed,
    check_file_is_named,
    check_several_validation_files_have_names,
    check_listed_sets_are_read,
    check_raw_text_is_read_as_such,
    check_splits_are_known,
    check_dataset_fits_algorithm,
    check_worse_solutions_are_written,
    check_margins_are_read,
    check_system_message_is_given_once,
    check_environments_are_known,
    check_sets_are_drawn_from,
    *restrict_to_rollouts(check_responses_fit, check_samples_are_scored, check_conversations_have_turns),
)


def check_gives_scores(config: Config) -> None:
    """Check that a reward model gives one score per response, by which pairs are compared."""
    kind = config.policy.reward_model_cfg.reward_model_type
    if kind != "bradley_terry":
        raise InvalidValue(
            "policy.reward_model_cfg.reward_model_type",
            f"{kind}, but training on pairs needs bradley_terry",
        )


REWARD_TRAINING_RULES: tuple[Rule, ...] = (check_gives_scores,)


def check_reward_model(name: str, entry: EnvironmentConfig) -> None:
    """Raise `InvalidValue` if the settings of a reward model lack the model or ask for something that is not built."""
    key = f"env.{name}"
    if entry.model_name is None:
        raise InvalidValue(f"{key}.model_name", "required: the folder of a sequence classifier")
    if not entry.reward_model_cfg.enabled:
        raise InvalidValue(f"{key}.reward_model_cfg.enabled", "false, but the environment is a reward model")
    if entry.checkpoint_path is not None:
        raise InvalidValue(
            f"{key}.checkpoint_path", f"not supported: save a Hugging Face folder, and name it in {key}.model_name"
        )
    for size in ("tensor_parallel_size", "context_parallel_size", "expert_parallel_size", "dp_replicate_size"):
        if (ranks := getattr(entry.dtensor_cfg, size)) != 1:
            raise InvalidValue(f"{key}.dtensor_cfg.{size}", f"{ranks}, but a reward model is on one device")
    for switch in ("cpu_offload", "custom_parallel_plan"):
        if getattr(entry.dtensor_cfg, switch):
            raise InvalidValue(f"{key}.dtensor_cfg.{switch}", "not supported: a reward model is whole on one device")


def check_reward_model_is_enabled(config: Config) -> None:
    """Check that a reward model that scores samples is enabled."""
    for name, entry in config.reward_models.items():
        if not entry.enabled:
            raise InvalidValue(f"env.{name}.enabled", "false, but the environment scores samples")


def check_reward_models_leave_gpus(config: Config) -> None:
    """Check that the GPUs reserved for reward models exist, and that they leave one for training."""
    aside, num_gpus = count_gpus_of_reward_models(config), config.cluster.gpus_per_node
    if aside >= max(1, num_gpus):
        name = next(iter(config.reward_models))
        raise InvalidValue(
            f"env.{name}.resources.gpus_per_node",
            f"{aside} of cluster.gpus_per_node ({num_gpus}) leaves none to training",
        )


REWARD_MODEL_RULES: tuple[Rule, ...] = restrict_to_rollouts(
    check_reward_model_is_enabled, check_reward_models_leave_gpus
)
