"""Configurations and a tokenizer for the tests of data: two-term sums of one digit, of which there are 200."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tandem.config import Config, build_config
from tandem.config.schema import NewModel
from tandem.samples.model_files import load_tokenizer, write_new_model
from tandem.samples.tokenizer import Tokenizer

SUMS: dict[str, Any] = {
    "dataset_name": "reasoning_gym",
    "task": "chain_sum",
    "task_params": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
    "num_train": 60,
    "num_validation": 20,
    "prompt_template": "{metadata[expression]}",
    "solution_template": " = {answer}",
}
NUM_SUMS = 200


def data_config(algorithm: str = "grpo", seed: int = 1, **data: Any) -> Config:
    """Return a configuration whose data section is `SUMS`, changed; a `dataset_name` in `data` replaces it."""
    section = data if "dataset_name" in data else {**SUMS, **data}
    settings: dict[str, Any] = {
        "algorithm": algorithm,
        algorithm: {"seed": seed},
        "policy": {"model_name": "model", "train_global_batch_size": 8, "max_total_sequence_length": 64},
        "data": section,
    }
    if algorithm == "grpo":
        settings["grpo"] |= {"num_prompts_per_step": 4, "num_generations_per_prompt": 2}
    if section["dataset_name"] != "reasoning_gym":
        settings["env"] = {"exact_match": {}}
    return build_config(settings)


def character_tokenizer(config: Config, characters: str = "0123456789+-= ") -> Tokenizer:
    """Write a new model to the working directory and load its tokenizer."""
    new_model = NewModel(config={"model_type": "qwen3"}, characters=characters)
    write_new_model(Path(config.policy.model_name), new_model)
    return load_tokenizer(config)
