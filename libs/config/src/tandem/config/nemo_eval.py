"""NeMo-RL's configurations of evaluations (``evals/*.yaml``), in Tandem's shape.

Their top level has ``generation`` and ``tokenizer``, which a run has in ``policy``, and a data set that is used only
for validation.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from tandem.common.errors import nearest
from tandem.config.problem import InvalidValue
from tandem.config.schema.environments import NEMO_GYM_ROWS
from tandem.config.shapes import EVERY_ONE

_OF_NO_USE = ("num_prompts_per_step", "model_name")
"""Ignored keys of ``generation``: all prompts are sent at once, and the model is named elsewhere."""
_VALIDATION = "val_"
_FILES = (".jsonl", ".jsonl.gz", ".json", ".csv")
_DATA_OF_NO_USE = ("shuffle", "num_workers", "processor", "_override_")
"""Ignored keys of ``data``: every problem is evaluated, in its order."""


class HubDataset(msgspec.Struct, frozen=True):
    """A data set for evaluations that NeMo-RL knows by name."""

    path: str
    split: str
    input_key: str = "problem"
    output_key: str = "answer"


HUB = {
    "aime2024": HubDataset("HuggingFaceH4/aime_2024", "train"),
    "math500": HubDataset("HuggingFaceH4/MATH-500", "test"),
}
"""Known data sets, by name in lower case."""
NOT_BUILT = ("aime2025", "bfcl_multiturn", "gpqa", "gpqa_diamond", "math", "mmlu", "mmlu_pro", "mmau")
"""Data sets that need several splits, files of a web server, or an environment that Tandem does not have."""


def is_nemo_eval(tree: Mapping[str, Any]) -> bool:
    """Tell whether settings are an evaluation in NeMo-RL's form: only that has ``generation`` at the top."""
    return "generation" in tree


def translate(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of an evaluation as those of a run. Raises `InvalidValue`."""
    sections = {name: _read_mapping(tree, name) for name in ("generation", "tokenizer", "data", "env")}
    run_settings = {key: value for key, value in tree.items() if key not in sections}
    generation = dict(sections["generation"])
    if not isinstance(model := generation.get("model_name"), str):
        raise InvalidValue("generation.model_name", "required, but not set: expected text")
    vllm = dict(generation.get("vllm_cfg") or {})
    for key in ("temperature", "top_p", "top_k"):
        if (validation_value := generation.pop(f"{_VALIDATION}{key}", None)) is not None:
            generation[key] = validation_value
    if generation.get("top_k") == -1:
        generation["top_k"] = None
    policy = {
        "model_name": model,
        "generation": {key: value for key, value in generation.items() if key not in _OF_NO_USE},
    }
    if "max_model_len" in vllm:
        policy["max_total_sequence_length"] = vllm["max_model_len"]
    if "precision" in vllm and vllm["precision"] in ("bfloat16", "float32"):
        policy["precision"] = vllm["precision"]
    tokenizer = dict(sections["tokenizer"])
    if tokenizer.get("chat_template_kwargs", ...) is None:
        del tokenizer["chat_template_kwargs"]
    if tokenizer:
        policy["tokenizer"] = tokenizer
    grpo = {"max_num_steps": 0, "max_val_samples": EVERY_ONE, **_read_mapping(run_settings, "grpo")}
    env = {name: _translate_environment(entry) for name, entry in sections["env"].items()}
    return {
        **run_settings,
        "algorithm": "grpo",
        "grpo": grpo,
        "policy": policy,
        "data": _translate_data(sections["data"]),
        "env": env,
    }


def find_original_key(key: str) -> str:
    """Return the original name of a key of translated settings."""
    if key == "policy.model_name":
        return "generation.model_name"
    return re.sub(r"^policy\.(?=(generation|tokenizer)\b)", "", key)


def _read_mapping(tree: Mapping[str, Any], name: str) -> dict[str, Any]:
    section = tree.get(name) or {}
    if not isinstance(section, dict):
        raise InvalidValue(name, "expected a mapping")
    return section


def _translate_environment(entry: Any) -> Any:
    """Return an environment without the key that names the only implementation."""
    if isinstance(entry, dict) and entry.get("math_verify_impl") == "hf_math_verify":
        return {key: value for key, value in entry.items() if key != "math_verify_impl"}
    return entry


def _translate_data(section: Mapping[str, Any]) -> dict[str, Any]:
    """Return the data section for these problems, all of which are held out."""
    data = dict(section)
    for key in _DATA_OF_NO_USE:
        data.pop(key, None)
    if (repeat := data.pop("repeat", None)) not in (None, 1):
        raise InvalidValue("data.repeat", f"{repeat!r}: set the number of samples in eval.num_tests_per_prompt instead")
    name = data.pop("dataset_name", None)
    if not isinstance(name, str):
        raise InvalidValue("data.dataset_name", "required, but not set: expected text")
    if name == NEMO_GYM_ROWS:
        raise InvalidValue(
            "data.dataset_name", f"{name}: a run validates NeMo Gym's rows (data.validation), not this form"
        )
    split = data.pop("split", None) or data.pop("dataset_key", None)
    kind = data.pop("file_format", None)
    keys = {"input_key": data.pop("problem_key", None), "output_key": data.pop("solution_key", None)}
    if "env_name" in data:
        data["environment"] = data.pop("env_name")
    hub_set = HUB.get(name.lower())
    if hub_set is not None:
        keys = {"input_key": hub_set.input_key, "output_key": hub_set.output_key}
        return {**data, **keys, "dataset_name": hub_set.path, "val_split": hub_set.split}
    data |= {key: value for key, value in keys.items() if value is not None}
    if name == "jsonl" or data.get("val_data_path"):
        return {**data, "dataset_name": "jsonl"}
    if kind is not None or name.endswith(_FILES) or Path(name).is_file():
        return {**data, "dataset_name": "jsonl", "val_data_path": name}
    if name.lower() not in NOT_BUILT and "/" not in name and not Path(name).exists():
        listed = ", ".join(HUB)
        raise InvalidValue(
            "data.dataset_name",
            f"{name!r} is unknown: expected {listed}, a local file of problems ({', '.join(_FILES)}) or the name of a "
            f"data set on the Hub, such as HuggingFaceH4/MATH-500{nearest(name, HUB)}",
        )
    return {**data, "dataset_name": name, "val_split": split or "test"}
