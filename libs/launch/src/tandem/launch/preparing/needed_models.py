"""The models that a run begins with: policy, teachers, reward models; one may be made from scratch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tandem.common.errors import ModelError
from tandem.config import Config
from tandem.config.models.lora import explain_no_model
from tandem.config.models.model_sizes import local_folder
from tandem.launch.preparing.beginning import Mode, Say, set_aside
from tandem.samples.model_files import write_new_model


def find_model_problem(config: Config) -> str | None:
    """Describe the problem with the model's folder; None if it exists or is to be made from scratch."""
    folder = Path(config.policy.model_name)
    if folder.exists():
        if (reason := explain_no_model(folder)) is not None:
            return f"policy.model_name: {reason}"
        if not (folder / "config.json").exists():
            return f"policy.model_name: {str(folder)!r} holds no config.json, so it is not a model"
    elif config.policy.new_model is None:
        return (
            f"policy.model_name: {str(folder)!r} does not exist, and neither policy.new_model nor prerequisite makes it"
        )
    return None


def make_model(config: Config, mode: Mode, say: Say) -> None:
    """Write the folder of a model that is made from scratch; check that any other local model exists.

    A folder that differs from ``policy.new_model`` is kept, or set aside if the run begins anew.
    """
    if (problem := find_model_problem(config)) is not None:
        raise ModelError(problem)
    new, folder = config.policy.new_model, Path(config.policy.model_name)
    if new is None:
        return
    if folder.exists():
        differences = find_model_differences(config)
        if not differences:
            return
        if mode != "restart":
            say(f"note: policy.new_model differs from {folder} in {differences}; --restart makes it again")
            return
        say(f"{folder} is made again, because policy.new_model differs from it in {differences}")
        set_aside(folder, say)
    write_new_model(folder, new)
    say(f"new {new.config['model_type']} model in {folder}")


def find_model_differences(config: Config) -> str:
    """Return the keys of ``policy.new_model`` that differ from the existing folder; empty if none."""
    new, folder = config.policy.new_model, Path(config.policy.model_name)
    if new is None or not folder.exists():
        return ""
    existing = _read(folder / "config.json")
    differing = [f"config.{key}" for key, value in new.config.items() if _differs(existing.get(key, ...), value)]
    vocabulary = _read(folder / "tokenizer.json").get("model", {}).get("vocab", {})
    if {token for token in vocabulary if len(token) == 1} != set(new.characters):
        differing.append("characters")
    return ", ".join(differing)


def _differs(existing: Any, configured: Any) -> bool:
    """Return whether a value differs, or a field of it that is wanted."""
    if isinstance(existing, dict) and isinstance(configured, dict):
        return any(_differs(existing.get(key, ...), value) for key, value in configured.items())
    return bool(existing != configured)


def _read(path: Path) -> dict[str, Any]:
    """Return the content of a JSON file; empty, which differs from any other, if it cannot be read."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def list_missing_models(config: Config) -> dict[str, str]:
    """Return the missing models, by the keys that name them."""
    folders = {"policy.model_name": config.policy.model_name}
    folders |= {key: teacher.model_name for key, teacher in config.teacher_sections.items()}
    missing = {key: name for key, name in folders.items() if not Path(name).exists()}
    judging = {f"env.{name}.model_name": str(entry.model_name) for name, entry in config.reward_models.items()}
    return missing | {key: name for key, name in judging.items() if local_folder(name) is None}
