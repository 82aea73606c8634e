"""The models that a run begins with: policy, teachers, reward models; on the Hub, or made from scratch.

A name that is not a folder, and that nothing makes, is a name on the Hub. It is resolved to a commit and becomes the
folder of that commit in this node's cache, before anything else looks at it. The model's description is fetched; its
weights are fetched when the run begins (`tandem.config.model_names.fetch_models`).
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from tandem.common.errors import ConfigError, ModelError, nearest
from tandem.config import Config, checks, config_from_json, load_config, model_names
from tandem.config.models import hub, lora, model_sizes
from tandem.config.schema.policy import ModelConfig, TokenizerConfig
from tandem.launch.preparing.beginning import Mode, Say, has_begun, set_aside
from tandem.observe.run_folder.journal import read_journal
from tandem.samples.model_files import write_new_model


def find_model_problem(config: Config) -> str | None:
    """Describe the problem with the model's folder; None if it exists or is to be made from scratch."""
    folder = Path(config.policy.model_name)
    if folder.exists():
        if (reason := lora.explain_no_model(folder)) is not None:
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
    return missing | {key: name for key, name in judging.items() if model_sizes.local_folder(name) is None}


_CHECKPOINT = re.compile(r"(latest|step_\d+)(/|$)")


def find_on_hub(
    config: Config, mode: Mode, earlier: Config | None, *, fetches_weights: bool = True
) -> tuple[Config, list[str]]:
    """Return a configuration with folders for its models, and notices about those on the Hub.

    `earlier` is the configuration of the run before it, which may make models of this one. With `fetches_weights`, a
    model without available weights is a problem.

    Raises:
        ModelError: a model is neither a folder nor on the Hub.
        ConfigError: several are neither.
    """
    finding = _Finding(config, _read_recorded(config, mode), earlier, fetches_weights)
    resolved = model_names.change_model_names(config, finding.find)
    if len(finding.problems) == 1:
        raise ModelError(finding.problems[0])
    if finding.problems:
        raise ConfigError(*finding.problems)
    if resolved is not config and (
        broken := checks.find_broken_rules(resolved).found
    ):  # by sizes that were not known before
        raise ConfigError(*map(str, broken))
    return resolved, finding.notices


def find_missing_models(config: Config, mode: Mode, earlier: Config | None, say: Callable[[str], None]) -> None:
    """Say which models are neither folders nor on the Hub, one line each, as soon as that is known; fetch nothing."""
    finding = _Finding(config, _read_recorded(config, mode), earlier, fetches_weights=False, only_looks=True)
    finding.say = say
    model_names.change_model_names(config, finding.find)


class _Finding:
    """The search through one configuration."""

    def __init__(
        self,
        config: Config,
        recorded: dict[str, hub.HubReference],
        earlier: Config | None,
        fetches_weights: bool,
        only_looks: bool = False,
    ) -> None:
        self._config = config
        self._fetches_weights = fetches_weights
        self._only_looks = only_looks
        self._recorded = recorded
        self._earlier = earlier
        self._known: dict[tuple[str, str | None], str] = {}
        """Folders by name and requested revision; models that will be made keep their names."""
        self.problems: list[str] = []
        self.say: Callable[[str], None] = self.problems.append
        self.notices: list[str] = []

    def find(self, key: str, name: str, section: msgspec.Struct) -> str:
        """Return the folder of a model."""
        if not model_names.is_used(self._config, key):
            return name
        revision = section.revision if isinstance(section, ModelConfig) else None
        if revision is None:  # such as a tokenizer: it has the commit of the model of this name
            revision = next((known_revision for known_name, known_revision in self._known if known_name == name), None)
        if (name, revision) not in self._known:
            try:
                self._known[name, revision] = self._find(key, name, section)
            except ModelError as error:
                self._known[name, revision] = name
                self.say(f"{key}: {self._missing(key, name, error)}")
        return self._known[name, revision]

    def _find(self, key: str, name: str, section: msgspec.Struct) -> str:
        cached = hub.find_cached_name(name)
        if cached is None and (Path(name).exists() or self._is_made(name, section)):
            return name
        reference = cached or hub.parse_reference(name)
        if reference is None:
            if self._earlier is not None:
                raise ModelError("a name on the Hub is OWNER/NAME")
            return name  # what reads the folder says so
        if isinstance(section, ModelConfig) and section.revision is not None and cached is None:
            if reference.revision not in (None, section.revision):
                raise ModelError(f"revision is {section.revision!r}, and the name says {reference.revision!r}")
            reference = hub.HubReference(reference.repo, section.revision)
        before = self._recorded.get(key)
        if before is not None and before.repo == reference.repo and not reference.is_pinned:
            reference = before
        folder = hub.find_folder(reference)
        if reference.is_pinned and hub.is_whole(folder):
            return str(folder)
        snapshot = hub.resolve(reference)
        if self._only_looks:
            return name
        hub.fetch_description(snapshot)
        if snapshot.note:
            self.notices.append(f"{key}: {snapshot.note}")
        if self._fetches_weights and not isinstance(section, TokenizerConfig):
            self._tell_size(key, snapshot)
        return str(hub.find_folder(hub.HubReference(snapshot.repo, snapshot.commit)))

    def _tell_size(self, key: str, snapshot: hub.RepositorySnapshot) -> None:
        """Add a notice of the bytes to fetch, or the problem with them."""
        folder = hub.find_folder(hub.HubReference(snapshot.repo, snapshot.commit))
        if hub.is_whole(folder):
            return
        try:
            missing = hub.find_missing(snapshot)
        except ModelError as error:
            self.problems.append(f"{key}: {error}")
            return
        self.notices.append(
            f"{key}: {snapshot.repo} is at {snapshot.commit[:8]} on the Hub; "
            f"{hub.show_size(sum(missing.values()))} are fetched before the run begins"
        )

    def _is_made(self, name: str, section: msgspec.Struct) -> bool:
        """Return whether this run or one before it makes the folder."""
        if isinstance(section, ModelConfig) and section.new_model is not None:
            return True
        path, earlier = Path(name).absolute(), self._earlier
        while earlier is not None:
            checkpoints = Path(earlier.checkpointing.checkpoint_dir).absolute()
            if path.is_relative_to(Path(earlier.policy.model_name).absolute()):
                return True
            if path.is_relative_to(checkpoints) and _CHECKPOINT.match(str(path.relative_to(checkpoints))):
                return True
            earlier = None if earlier.prerequisite is None else load_config(earlier.prerequisite)
        return False

    def _missing(self, key: str, name: str, error: ModelError) -> str:
        """Describe a model that is neither a folder nor on the Hub; if a folder is meant, the Hub is not."""
        if hub.find_cached_name(name) is not None:
            return str(error)
        nothing_makes_it = ", and neither policy.new_model nor prerequisite makes it"
        missing = f"{name!r} does not exist{nothing_makes_it * key.startswith('policy.model_name')}"
        if near := nearest(name, _list_beside(Path(name))):
            return f"{missing}{near}"
        return f"{missing}; {error}{nearest(name, hub.list_cached_names())}"


def _list_beside(path: Path) -> Iterator[str]:
    """Yield the folders beside a missing one."""
    with contextlib.suppress(OSError):
        yield from (str(path.with_name(each.name)) for each in path.parent.iterdir() if each.is_dir())


def _read_recorded(config: Config, mode: Mode) -> dict[str, hub.HubReference]:
    """Return the commits that a resumed run began with, by key."""
    references: dict[str, hub.HubReference] = {}
    if mode != "resume" or not has_begun(config):
        return references
    with read_journal(Path(config.logger.log_dir)) as journal:
        recorded = config_from_json(journal.config_json)

    def note(key: str, name: str, _: msgspec.Struct) -> str:
        if (reference := hub.find_cached_name(name)) is not None:
            references[key] = reference
        return name

    model_names.change_model_names(recorded, note)
    return references
