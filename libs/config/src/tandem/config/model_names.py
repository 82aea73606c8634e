"""All model names in a configuration.

In memory they are folders. In a configuration's written form, folders of the Hub's cache become names with commits
(`tandem.config.models.hub`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from tandem.common.errors import ModelError
from tandem.config.installed import vllm_arguments
from tandem.config.models import hub
from tandem.config.schema import Config
from tandem.config.schema.policy import TokenizerConfig

Section = TypeVar("Section", bound=msgspec.Struct)
Change = Callable[[str, str, msgspec.Struct], str]
"""A function from the key of a model's name, the name, and its section to a new name."""

_DRAFT = f"generation.vllm_kwargs.{vllm_arguments.SPECULATION}.model"
"""Key of the policy with the name of the model that drafts tokens for vLLM."""
_TEACHERS = "teacher_model_by_agent_name"
"""Key with model names as values."""


def change_model_names(config: Config, change: Change) -> Config:
    """Return a configuration with its model names changed; the same object if none changes."""
    return _change_section(config, change, "")


def write_names(config: Config) -> Config:
    """Return the written form of a configuration: commits of the Hub by name, independent of the node's cache
    folder."""
    return change_model_names(config, lambda _, name, __: str(hub.find_cached_name(name) or name))


def write_folders(config: Config) -> Config:
    """Return the in-memory form of a written configuration: commits of the Hub as folders in this node's cache.

    The folders need not exist yet.
    """
    return change_model_names(config, lambda _, name, __: _find_folder(name))


def is_used(config: Config, key: str) -> bool:
    """Tell whether a run reads the model named at a key."""
    section, _, subkey = key.partition(".")
    match section:
        case "policy":
            if subkey == _DRAFT:
                generation = config.policy.generation
                takes_drafts = config.declaration.rolls_out and generation.kind.drafts
                return takes_drafts and vllm_arguments.find_draft_model(generation.vllm_kwargs) is not None
            return not subkey.startswith("draft.") or config.policy.draft.enabled
        case "env":
            return subkey.partition(".")[0] in config.reward_models
        case "value":
            return "value" in config.holds
        case _:
            return bool(config.teacher_sections)


def fetch_models(config: Config, say: Callable[[str], None]) -> list[str]:
    """Fetch the configuration's models from the Hub that this node's cache lacks.

    Returns the keys of the fetched models. Raises `ModelError`, which names the key.
    """
    fetched: list[str] = []

    def look(key: str, name: str, section: msgspec.Struct) -> str:
        reference = hub.find_cached_name(name)
        if reference is None or not is_used(config, key):
            return name
        snapshot = hub.RepositorySnapshot(reference.repo, str(reference.revision), None)
        folder = hub.find_folder(reference)
        hub.remove_unfinished(reference)
        is_tokenizer = isinstance(section, TokenizerConfig)
        if (folder / "tokenizer.json").is_file() if is_tokenizer else hub.is_whole(folder):
            return name
        try:
            if is_tokenizer:
                hub.fetch_description(snapshot)
            else:
                hub.fetch(snapshot, say)
        except ModelError as error:
            raise ModelError(f"{key}: {error}") from error
        fetched.append(key)
        return name

    change_model_names(config, look)
    return fetched


def _find_folder(name: str) -> str:
    reference = hub.parse_reference(name) if "@" in name else None
    return str(hub.find_folder(reference)) if reference is not None and reference.is_pinned else name


def _change_draft(arguments: dict[str, Any], change: Change, section: msgspec.Struct) -> dict[str, Any]:
    """Return vLLM's arguments with the name of the draft model changed."""
    name = vllm_arguments.find_draft_model(arguments)
    changed = None if name is None else change(f"policy.{_DRAFT}", name, section)
    if changed == name:
        return arguments
    return {**arguments, vllm_arguments.SPECULATION: {**arguments[vllm_arguments.SPECULATION], "model": changed}}


def _change_section(section: Section, change: Change, key: str) -> Section:
    name_field = "name" if isinstance(section, TokenizerConfig) else "model_name"
    changes: dict[str, Any] = {}
    for field in section.__struct_fields__:
        value = getattr(section, field)
        path = f"{key}.{field}" if key else field
        changed = value
        if field == name_field and isinstance(value, str):
            changed = change(path, value, section)
        elif isinstance(value, msgspec.Struct):
            changed = _change_section(value, change, path)
        elif path == "policy.generation.vllm_kwargs":
            changed = _change_draft(value, change, section)
        elif isinstance(value, dict):
            entries = {
                name: _change_section(each, change, f"{path}.{name}")
                if isinstance(each, msgspec.Struct)
                else change(f"{path}.{name}", each, section)
                if field == _TEACHERS
                else each
                for name, each in value.items()
            }
            changed = entries if any(entries[name] is not value[name] for name in value) else value
        elif isinstance(value, tuple) and any(isinstance(each, msgspec.Struct) for each in value):
            several = tuple(
                _change_section(each, change, f"{path}[{index}]") if isinstance(each, msgspec.Struct) else each
                for index, each in enumerate(value)
            )
            changed = several if any(a is not b for a, b in zip(several, value, strict=True)) else value
        if changed is not value:
            changes[field] = changed
    return msgspec.structs.replace(section, **changes) if changes else section
