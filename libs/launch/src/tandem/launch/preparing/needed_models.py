"""The models that a run begins with: policy, teachers, reward models; its prerequisite may make any."""

from __future__ import annotations

from pathlib import Path

from tandem.config import Config
from tandem.config.models.model_sizes import local_folder


def list_missing_models(config: Config) -> dict[str, str]:
    """Return the missing models, by the keys that name them."""
    folders = {"policy.model_name": config.policy.model_name}
    folders |= {key: teacher.model_name for key, teacher in config.teacher_sections.items()}
    missing = {key: name for key, name in folders.items() if not Path(name).exists()}
    judging = {f"env.{name}.model_name": str(entry.model_name) for name, entry in config.reward_models.items()}
    return missing | {key: name for key, name in judging.items() if local_folder(name) is None}
