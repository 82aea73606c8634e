"""Convert NeMo-RL's looser shapes and newer names to the schema's, before defaults are filled in.

A single scheduler becomes a list, Megatron-Core's own keys are collected in one place, metrics get Tandem's names,
and indirect choices of an algorithm or environment become explicit keys.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple, get_args

from tandem.config.conform import config_type, field_of, find_setting, list_struct_types
from tandem.config.problem import InvalidValue, shown
from tandem.config.schema import MODELS, EnvironmentConfig
from tandem.config.schema.declarations import ALGORITHMS, DISTILLATION, OFF_POLICY_DISTILLATION
from tandem.config.schema.environments import FUNCTION_ENVIRONMENTS, NEMO_GYM, NEMO_GYM_ROWS, PACKAGED, NemoGymConfig
from tandem.config.schema.generation import ToolCallParser
from tandem.config.schema.policy import PASSTHROUGH_TEMPLATE

ELSEWHERE = (
    "avqa",
    "mmau",
    "mmpr-tiny",
    "daily-omni",
    "dapo",
    "code",
    "code_jaccard",
    "llm_judge",
    "retriever",
    "bfcl_multiturn",
)
"""Environments of NeMo-RL that are not built."""

_SWITCHES = {
    "should_log_nemo_gym_responses": "the rollout log and logger.num_val_samples_to_print keep responses",
    "should_mask_flagged_samples": "samples that agents of NeMo Gym flag count as others do",
}
"""NeMo-RL's settings of NeMo Gym in the section of the environments, with what makes them without effect."""

_OF_NEMO_RL = {
    "num_gpu_nodes": "its servers are started beside each rollout, and its models elsewhere",
    "effort_levels": "rewards are the environment's, and no response's length changes them",
    "pad_dynamic_image_shapes": "images are processed as the model's own processor does",
    "invalid_tool_call_patterns": "they are those of the model's own format",
    "thinking_tags": "they are those of the model's own chat template",
}
"""NeMo-RL's keys below ``env.nemo_gym`` that NeMo Gym itself does not read, with what makes them without effect."""

_FILES_OF_ROWS = {"train_jsonl_fpath": "train", "validation_jsonl_fpath": "validation"}
"""Keys of NeMo-RL's earlier files for rows of NeMo Gym, and the lists that have them now."""

_EPISODE_S = 600.0
"""Timeout of an episode of a packaged environment, unless the file has one."""

EVERY_ONE = 1_000_000
"""Number of validation problems that means all of them."""

_ENVIRONMENT_KEYS = frozenset(EnvironmentConfig.__struct_encode_fields__)
_NEMO_GYM_KEYS = frozenset(NemoGymConfig.__struct_encode_fields__)
_OF_BOTH_DISTILLATIONS = (
    "max_num_epochs",
    "max_num_steps",
    "val_period",
    "val_at_start",
    "val_at_end",
    "seed",
    "topk_logits_k",
)
BACKEND, BACKEND_HERE = "automodel_cfg", "dtensor_cfg"
"""The section of NeMo-RL's backend that is not Megatron-Core, as its main branch and as its releases name it."""
_RENAMED_OF_MEGATRON = {
    "use_fused_linear_logprobs": "use_linear_ce_fusion_loss",
    "fused_linear_logprobs_chunk_size": "linear_ce_fusion_chunk_size",
}
"""Keys of ``megatron_cfg`` that NeMo-RL's main branch has renamed, and their names in its releases."""
_ALWAYS_OF_NEMO_RL = {"calculate_per_token_loss": True, "perform_initialization": True}
"""Arguments of Megatron-Core that NeMo-RL sets whatever its file says, so that these values ask for nothing."""
_UNSET = {"max_num_steps": -1, "async_grpo": None, "async_ppo": None}
"""Values that leave a key of the algorithm's section at its default: no limit, nothing asynchronous."""


def name_backend_as_here(node: Any) -> Any:
    """Return settings with the section `BACKEND` under its name here, in keys and in what ``${...}`` refers to.

    A section with both names keeps both: one of them is unknown.
    """
    if isinstance(node, dict):
        is_renamed = BACKEND in node and BACKEND_HERE not in node
        return {
            BACKEND_HERE if is_renamed and key == BACKEND else key: name_backend_as_here(value)
            for key, value in node.items()
        }
    if isinstance(node, list):
        return [name_backend_as_here(item) for item in node]
    if isinstance(node, str) and "${" in node:
        return re.sub(rf"\.{BACKEND}\b", f".{BACKEND_HERE}", node)
    return node


def rename_newer(tree: dict[str, Any]) -> None:
    """Move settings to the keys that say the same here, in place. Raises `InvalidValue` if the two disagree.

    Values of another type are left for `conform` to report.
    """
    for model in (tree.get(name) for name in MODELS):
        packing = model.get("sequence_packing") if isinstance(model, dict) else None
        if isinstance(packing, dict) and packing.get("algorithm") == "modified_ffd":
            packing["algorithm"] = "modified_first_fit_decreasing"
    policy, algorithm = tree.get("policy"), tree.get("algorithm")
    generation = policy.get("generation") if isinstance(policy, dict) else None
    if isinstance(generation, dict) and generation.get("top_k") == -1:
        generation["top_k"] = None
    if not isinstance(algorithm, str) or algorithm not in ALGORITHMS or not ALGORITHMS[algorithm].rolls_out:
        return
    if isinstance(tree.get(algorithm, {}), dict):
        section = tree.setdefault(algorithm, {})
        few = _Moved(algorithm, "val_num_generations_per_prompt", "num_val_generations_per_prompt", usual=1)
        _move(section, section, few, algorithm)
        if isinstance(generation, dict):
            _move(generation, section, _Moved("policy.generation", "val_temperature", "val_temperature"), algorithm)
        if section.get("val_start_at") == -1:
            section["val_start_at"] = 0
        for key, unset in _UNSET.items():
            if key in section and section[key] == unset:
                del section[key]
        metric = section.get("stop_at_validation_metric")
        if isinstance(metric, str) and metric:
            section["stop_at_validation_metric"] = f"val_{metric.removeprefix('val:').removeprefix('val_')}"


class _Moved(NamedTuple):
    """A setting that has another key here."""

    section: str
    name: str
    meant: str
    """Its name here, in the algorithm's section."""
    usual: Any = None
    """Value that older files may have at the key here, and that another one at the new key overrides."""


def _move(source: dict[str, Any], section: dict[str, Any], moved: _Moved, algorithm: str) -> None:
    """Move a setting to its key here; the other one keeps null."""
    value, current = source.get(moved.name), section.get(moved.meant)
    if value is None:
        return
    if current in (None, moved.usual):
        section[moved.meant] = value
    elif value not in (current, moved.usual):
        key, new_key = f"{moved.section}.{moved.name}", f"{algorithm}.{moved.meant}"
        raise InvalidValue(key, f"{shown(value)}, but {new_key} is {shown(current)}: they are the same")
    source[moved.name] = None


def reshape(tree: dict[str, Any]) -> None:
    """Change the settings in place. Values of another type are left for `conform` to report."""
    _name_off_policy_distillation(tree)
    for name in MODELS:
        model = tree.get(name)
        if isinstance(model, dict):
            reshape_model(model)
    for section in tree.values():
        if isinstance(section, dict):
            _reshape_validation(section)
    if isinstance(tree.get("env"), dict):
        _leave_out_switches(tree, tree["env"])
        if tree["env"].get("should_use_nemo_gym") or isinstance(tree["env"].get(NEMO_GYM), dict):
            _list_files_of_rows(tree, tree["env"])
            _read_server_arguments(tree)
        _reshape_nemo_gym(tree, tree["env"])
        _reshape_environments(tree["env"])
    checkpointing = tree.get("checkpointing")
    if isinstance(checkpointing, dict) and isinstance(checkpointing.get("metric_name"), str):
        checkpointing["metric_name"] = _translate_metric(checkpointing["metric_name"])


def reshape_model(model: dict[str, Any]) -> None:
    """Change the section of a model in place."""
    _write_passthrough(model.get("tokenizer"))
    scheduler = model.pop("scheduler", None)
    if scheduler:
        model["scheduler"] = [scheduler] if isinstance(scheduler, dict) else scheduler
    dtensor = model.get("dtensor_cfg")
    if isinstance(dtensor, dict) and isinstance(dtensor.get("save_consolidated"), bool):  # of an earlier file
        dtensor["save_consolidated"] = str(dtensor["save_consolidated"]).lower()
    megatron = model.get("megatron_cfg")
    if isinstance(megatron, dict):
        for name, meant in _RENAMED_OF_MEGATRON.items():
            if name in megatron and meant not in megatron:
                megatron[meant] = megatron.pop(name)
        options = (megatron.get(key) for key in ("recompute_method", "recompute_num_layers"))
        is_usual = megatron.get("recompute_granularity") == "full" and not any(options)
        if is_usual and "activation_checkpointing" in megatron:  # the key that decides in NeMo-RL's files
            del megatron["recompute_granularity"]
        (described,) = list_struct_types(field_of(field_of(config_type(), "policy").type, "megatron_cfg").type)
        ours = {field.encode_name for field in described.fields}
        free = {key: megatron.pop(key) for key in list(megatron) if key not in ours}
        free = {key: value for key, value in free.items() if (key, value) not in _ALWAYS_OF_NEMO_RL.items()}
        if free:
            megatron["forwarded"] = {**(megatron.get("forwarded") or {}), **free}


def choose_environment(tree: dict[str, Any]) -> None:
    """Choose NeMo Gym if it is requested, and where nothing is, a data set's own environment, or the puzzle's.

    NeMo-RL v0.3's files with images have an environment for each of its data sets. Its file of the puzzle inherits
    another file with its data set.
    """
    env, data = tree.get("env"), tree.get("data")
    if not isinstance(env, dict) or not isinstance(data, dict):
        return
    if env.pop("should_use_nemo_gym", False):
        env.setdefault(NEMO_GYM, {NEMO_GYM: {}})
        data["environment"] = NEMO_GYM
        for data_set in (*data.get("train", ()), *data.get("validation", ())):
            data_set["env_name"] = NEMO_GYM
    if (
        len(env) > 1
        and data.get("environment") is None
        and data.get("dataset_name") in {*FUNCTION_ENVIRONMENTS} & {*env}
    ):
        data["environment"] = data["dataset_name"]
    if len(env) > 1 and data.get("environment") is None and "sliding_puzzle_game" in env:
        data |= {"environment": "sliding_puzzle_game", "dataset_name": "sliding_puzzle"}


def name_packaged_tasks(tree: dict[str, Any]) -> None:
    """Choose the tasks of a packaged environment, if the run has one and names no data, and give episodes time."""
    env = tree.get("env")
    if not isinstance(env, dict):
        return
    for entry in env.values():
        if isinstance(entry, dict) and any(isinstance(entry.get(kind), dict) for kind in PACKAGED):
            entry.setdefault("timeout_s", _EPISODE_S)
    data = tree.get("data", {})
    if not isinstance(data, dict) or data.get("dataset_name") is not None or data.get("train"):
        return
    name = data.get("environment") or (next(iter(env)) if len(env) == 1 else None)
    entry = env.get(name) if isinstance(name, str) else None
    kind = next((kind for kind in PACKAGED if isinstance(entry, dict) and isinstance(entry.get(kind), dict)), None)
    if kind is not None:
        tree["data"] = {**data, "dataset_name": kind}


def _name_off_policy_distillation(tree: dict[str, Any]) -> None:
    """Rename the section of distillation over recorded text, which NeMo-RL marks only by a list of teachers."""
    written, meant = DISTILLATION.name, OFF_POLICY_DISTILLATION.name
    teachers, section = tree.get("teachers"), tree.get(written)
    if tree.get("algorithm") != written or not isinstance(teachers, list) or not teachers:
        return
    section = section if isinstance(section, dict) else {}
    tree.pop(written, None)
    tree["algorithm"] = meant
    loss, policy = (_find_section(tree, name) for name in ("loss_fn", "policy"))
    moved = {key: section[key] for key in _OF_BOTH_DISTILLATIONS if key in section}
    if "vocab_topk" in loss:
        moved["topk_logits_k"] = loss["vocab_topk"]
    if section.get("val_batch_size") is not None:
        moved["val_global_batch_size"] = section["val_batch_size"]
    tree[meant] = moved | _find_section(tree, meant)
    if "num_prompts_per_step" in section:
        policy.setdefault("train_global_batch_size", section["num_prompts_per_step"])
    if "reverse_kl" in loss:  # `kl_type` is inherited and does not apply
        loss["kl_type"] = "reverse" if loss["reverse_kl"] else "forward"
    for teacher in teachers:
        _place_aligner(teacher)
    first = teachers[0]
    is_alone = len(teachers) == 1 and isinstance(first, dict) and first.get("projection_matrix_path") is None
    if is_alone and first.get("weight", 1) in (None, 1):
        tree |= {"teacher": first, "teachers": None}


def _place_aligner(teacher: Any) -> None:
    """Move the map to a teacher's tokens, as NeMo-RL's main branch places it, to where its releases do, in place.

    The rest of ``aligner`` is unknown here, unless it asks for nothing.
    """
    aligner = teacher.get("aligner") if isinstance(teacher, dict) else None
    if not isinstance(aligner, dict):
        return
    if teacher.get("projection_matrix_path") is None:
        teacher["projection_matrix_path"] = aligner.get("projection_matrix_path")
    alignment = {key: value for key, value in aligner.items() if key != "projection_matrix_path"}
    if any(alignment.values()):
        teacher["aligner"] = alignment
    else:
        del teacher["aligner"]


def _find_section(tree: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a section of settings, created if missing; a separate empty one if it has another type."""
    section = tree.setdefault(name, {})
    return section if isinstance(section, dict) else {}


def _reshape_validation(section: dict[str, Any]) -> None:
    """Convert NeMo-RL's values for no validation, and for validation on everything."""
    if section.get("val_period") == -1:
        section["val_period"] = 0
    if "max_val_samples" in section and section["max_val_samples"] is None:
        section["max_val_samples"] = EVERY_ONE
    if "val_batch_size" in section and section["val_batch_size"] is None:
        del section["val_batch_size"]


def _translate_metric(name: str) -> str:
    """Return Tandem's name of a metric; NeMo-RL's may begin with ``train:`` or ``val:``."""
    prefix, colon, metric = name.rpartition(":")
    metric = re.sub(r"^validation-default_", "val_", metric)
    metric = re.sub(r"^validation-(.+)_(?=[a-z]+$)", r"val_\1/", metric)
    metric = re.sub(r"^total_reward/mean$", "reward", metric)  # with NeMo Gym
    if not colon:
        return metric
    return metric if prefix == "train" or metric.startswith("val_") else f"val_{metric}"


def _leave_out_switches(tree: dict[str, Any], env: dict[str, Any]) -> None:
    """Remove NeMo Gym's switches, which stand among the environments, and note those that are on."""
    ignored = tree.get("ignored") or []
    for name, reason in _SWITCHES.items():
        if env.get(name) is True and isinstance(ignored, list | tuple):
            tree["ignored"] = ignored = [*ignored, f"env.{name} (true) has no effect: {reason}"]
        if isinstance(env.get(name), bool):
            del env[name]


def _list_files_of_rows(tree: dict[str, Any], env: dict[str, Any]) -> None:
    """Convert the files of rows, and the agent that plays them, from NeMo-RL's form before its lists of data sets."""
    data = tree.get("data")
    if not isinstance(data, dict):
        return
    for name, side in _FILES_OF_ROWS.items():
        if isinstance(data.get(name), str) and data.get(side) is None:
            data[side] = {"dataset_name": NEMO_GYM_ROWS, "data_path": data.pop(name)}
    entry = env.setdefault(NEMO_GYM, {})
    if isinstance(data.get("agent_name"), str) and isinstance(entry, dict) and NEMO_GYM not in entry:
        entry.setdefault("agent", data.pop("agent_name"))


def _read_server_arguments(tree: dict[str, Any]) -> None:
    """Name the format of tool calls and the chat template as the arguments of vLLM's own server do.

    Without the one, agents would get no calls; without the other, prompts would have another text than in NeMo-RL.
    """
    policy = tree.get("policy")
    arguments = find_setting(policy, ("generation", "vllm_cfg", "http_server_serving_chat_kwargs"))
    if not isinstance(policy, dict) or not isinstance(arguments, dict):
        return
    parser, generation = arguments.get("tool_parser"), policy["generation"]
    if arguments.get("enable_auto_tools") and isinstance(parser, str) and generation.get("tool_call_parser") is None:
        generation["tool_call_parser"] = parser if parser in get_args(ToolCallParser) else "auto"
    template, variables = arguments.get("chat_template"), arguments.get("default_chat_template_kwargs")
    tokenizer = policy.get("tokenizer")
    if not (isinstance(template, str) or isinstance(variables, dict)) or not isinstance(tokenizer, dict | None):
        return
    policy["tokenizer"] = tokenizer = {**(tokenizer or {})}
    if isinstance(template, str) and tokenizer.get("chat_template", "default") == "default":
        tokenizer["chat_template"] = template
    if isinstance(variables, dict):
        tokenizer["chat_template_kwargs"] = {**variables, **(tokenizer.get("chat_template_kwargs") or {})}


def _reshape_nemo_gym(tree: dict[str, Any], env: dict[str, Any]) -> None:
    """Collect NeMo Gym's own configuration, which stands directly below ``env.nemo_gym`` in NeMo-RL's files."""
    entry = env.get(NEMO_GYM)
    if not isinstance(entry, dict) or entry.get("class") is not None or isinstance(entry.get(NEMO_GYM), dict):
        return
    ignored = tree.get("ignored") or []
    for name in [*_OF_NEMO_RL] if isinstance(ignored, list | tuple) else ():
        if entry.get(name) not in (None, False, 0, [], {}):
            value = shown(entry[name])
            tree["ignored"] = ignored = [*ignored, f"env.nemo_gym.{name} ({value}) has no effect: {_OF_NEMO_RL[name]}"]
        entry.pop(name, None)
    settings = {key: entry.pop(key) for key in list(entry) if key in _NEMO_GYM_KEYS and key != "config"}
    free = {key: entry.pop(key) for key in list(entry) if key not in _ENVIRONMENT_KEYS}
    config = free.pop("config", None) or {}
    entry[NEMO_GYM] = {**settings, "config": {**config, **free} if isinstance(config, dict) else config}


def _reshape_environments(env: dict[str, Any]) -> None:
    """Keep the settings of environments that are not built unchanged, in ``cfg``."""
    for name in ELSEWHERE:
        entry = env.get(name)
        if isinstance(entry, dict) and entry.get("class") is None:
            free = {key: entry.pop(key) for key in list(entry) if key not in _ENVIRONMENT_KEYS}
            if free:
                entry["cfg"] = {**(entry.get("cfg") or {}), **free}
    for entry in env.values():
        tokenizer = entry.get("tokenizer") if isinstance(entry, dict) else None
        if isinstance(tokenizer, dict) and tokenizer.get("name") is None:
            tokenizer["name"] = entry.get("model_name")
        _write_passthrough(tokenizer)


def _write_passthrough(tokenizer: object) -> None:
    """Write the template that null stands for: journals of earlier releases have null for the tokenizer's own."""
    if isinstance(tokenizer, dict) and tokenizer.get("chat_template", "default") is None:
        tokenizer["chat_template"] = PASSTHROUGH_TEMPLATE
