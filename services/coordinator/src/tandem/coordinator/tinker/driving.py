"""The run behind the front end: its configuration, its algorithm without data, its own spec.

Engines hold the adapters of several models, each with its own versions. Before a newer version of a model comes, its
own samples in progress are made while no more begin. All others go on. What was published before is brought to the
engines again only if one of them lacks it: one that has come in the place of a lost one, or has needed the room.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from tandem.common.errors import ConfigError
from tandem.common.messages import Purpose, SampleScored, SamplingParameters
from tandem.config import Config
from tandem.config.layers import read_layers
from tandem.config.load import build, lay_over
from tandem.config.models.families import is_text_only
from tandem.config.schema.policy import PolicyConfig
from tandem.coordinator.algorithms.running import WithoutGeneration
from tandem.coordinator.loop.loop import CoordinatorLoop
from tandem.coordinator.observers.observer import Observer
from tandem.coordinator.scheduler.events import SampleRecord
from tandem.coordinator.scheduler.spec import RunSpec
from tandem.coordinator.tinker.loop import CallLoop
from tandem.observe.run_folder.journal import StepRecord
from tandem.samples.batch import SampleBatch
from tandem.samples.tokenizer import Tokenizer
from tandem.serving.tinker.calls import CallDesk, EngineAdapterSets, PendingCall, PublishWeights


class ApartLoop(CallLoop):
    """One attempt of a run that clients drive, whose engines hold several models."""

    @property
    def _sets(self) -> EngineAdapterSets:
        assert self._desk.held is not None, "else it is another loop"
        return self._desk.held

    def _may_publish(self, pending: PendingCall) -> bool:
        """Let no more samples of the model's last version begin; tell whether none is being made."""
        if self._publishing is not None:
            return False
        if isinstance(pending.call, PublishWeights):
            number = self._place_of(pending)
            self._sets.renewed.add(number)
            if self._sets.num_samples[number]:
                return False
        self._closing = pending
        return True

    def _has_published(self, version: int, published: PendingCall) -> None:
        """Answer a call for which engines hold a version."""
        weights = self._note_published(version, published)
        self._sets.versions[self._desk.holding] = version
        if weights is not None:
            self._sets.renewed.discard(weights.number)
        published.answer(weights)

    def _reopen(self) -> None:
        """Let samples begin of what could not be replaced."""
        if self._closing is not None and isinstance(self._closing.call, PublishWeights):
            self._sets.renewed.discard(self._places.pop(self._closing.number))
        self._closing = None


_FOR_EVER_S = 1e9
_NUM_STEPS = 10**9
_SOURCE = "coordinator tinker"
_OF_CLIENTS = {"policy", "cluster", "logger", "nemo_rl_version"}
"""Sections of a configuration that says nothing of data, or of how to learn from it."""
_SETS = "policy.generation.adapter_sets", "policy.generation.transformers_cfg.adapter_sets"
"""The key of the versions that an engine holds, and its earlier place."""
_SPARE_SETS = 3
"""Versions that an engine holds beside the newest of each model: the base, and such as samples are being made of."""
_SETTINGS: dict[str, Any] = {
    "algorithm": "grpo",
    "grpo": {
        "num_generations_per_prompt": 2,
        "max_num_steps": _NUM_STEPS,
        "val_period": 0,
        "val_at_start": False,
        "async_grpo": {"enabled": True, "max_trajectory_age_steps": 1, "in_flight_weight_updates": False},
    },
    "loss_fn": {"reference_policy_kl_penalty": 0.0, "use_importance_sampling_correction": True},
    "policy": {
        "generation": {"temperature": 1.0, "expose_http_server": True, "colocated": {"enabled": False}},
    },
    "data": {
        "dataset_name": "reasoning_gym",
        "task": "chain_sum",
        "task_params": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
        "num_train": 64,
        "num_validation": 0,
        "prompt_template": "{metadata[expression]}",
    },
    "env": {"reasoning_gym": {}},
    "checkpointing": {"enabled": False},
    "logger": {"samples": "off"},
    "refit": {"keep_copy": "on"},
}
"""Settings that a run of the front end has whatever its file says. Clients bring data and losses."""
_ADAMW = {"policy": {"optimizer": {"name": "torch.optim.AdamW", "kwargs": {"lr": 1e-4}}, "scheduler": None}}
"""Settings beside them where Megatron-Core, which has an optimizer of its own, does not train."""


def load(path: str, overrides: Sequence[str], most_models: int = 1) -> Config:
    """Read a configuration of model, backends and processes. Raises `ConfigError`.

    Where the engine can, it is to hold the adapters of `most_models` models, unless the configuration says otherwise.
    """
    layers = lay_over(read_layers(Path(path), overrides), _SETTINGS, _SOURCE)
    # Clients send batches of any size, so that the configured one only has to be possible.
    defaults = {field.name: field.default for field in msgspec.structs.fields(PolicyConfig)}
    keys = ("policy", "train_micro_batch_size"), ("cluster", "trainers")
    numbers = [(layers.merged.get(section) or {}).get(key, defaults.get(key)) for section, key in keys]
    size = math.prod(number for number in numbers if isinstance(number, int))
    sized = {"policy": {"train_global_batch_size": size}, "grpo": {"num_prompts_per_step": size}}
    layers = lay_over(layers, sized, _SOURCE)
    megatron = (layers.merged.get("policy") or {}).get("megatron_cfg")
    if not (isinstance(megatron, dict) and megatron.get("enabled")):
        layers = lay_over(layers, _ADAMW, _SOURCE)
    config = build(layers)
    if (
        most_models > 1
        and config.policy.adapters is not None
        and is_text_only(config.policy)
        and not any(map(layers.is_set, _SETS))
    ):
        override: Any = most_models + _SPARE_SETS
        for part in reversed(_SETS[0].split(".")):
            override = {part: override}
        config = build(lay_over(layers, override, _SOURCE))
    problems = []
    if config.policy.megatron_cfg.enabled:
        problems += _of_optimizer(config.policy.megatron_cfg.optimizer)
    if config.policy.router_replay.enabled:
        problems.append("policy.router_replay.enabled: what clients send has no experts to replay")
    if config.prerequisite is not None:
        problems.append("prerequisite: coordinator tinker runs none; name the model that it has made")
    if problems:
        raise ConfigError(*problems)
    return config


def is_for_clients(path: str, overrides: Sequence[str]) -> bool:
    """Tell whether a configuration can be served to clients, and has no section that only a run needs."""
    try:
        sections = {*read_layers(Path(path), overrides).merged}
        load(path, overrides)
    except ConfigError:
        return False
    return "policy" in sections and sections <= _OF_CLIENTS


def _of_optimizer(settings: Mapping[str, Any]) -> list[str]:
    """Return why the steps of clients, which are AdamW's, cannot be taken by an optimizer of Megatron-Core."""
    key = "policy.megatron_cfg.optimizer"
    problems = []
    if settings.get("optimizer", "adam") != "adam":
        problems.append(f"{key}.optimizer: coordinator tinker steps by AdamW alone: set adam")
    if not settings.get("decoupled_weight_decay", True):
        problems.append(f"{key}.decoupled_weight_decay: coordinator tinker steps by AdamW alone: set true")
    for name in ("optimizer_cpu_offload", "use_precision_aware_optimizer"):
        if settings.get(name):
            problems.append(f"{key}.{name}: coordinator tinker cannot set the state of this optimizer aside: set false")
    return problems


class NoAlgorithm(WithoutGeneration):
    """An algorithm without data: the batch of a step is what clients send."""

    def __init__(self, config: Config, tokenizer: Tokenizer) -> None:
        self.notices: tuple[str, ...] = ()

    @property
    def validation_parts(self) -> dict[str, int]:
        """Parts of the validation batch: none."""
        return {}

    @property
    def num_steps(self) -> int:
        """Steps of a whole run: more than any client takes."""
        return _NUM_STEPS

    def sampling(self, purpose: Purpose) -> SamplingParameters:  # type: ignore[override]
        """Return some parameters, by which nothing is sampled."""
        return SamplingParameters(
            temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=1, stop_token_ids=(), stop_strings=()
        )

    def prompt_groups(self, step: int, purpose: Purpose, groups: Sequence[int]) -> tuple[()]:  # type: ignore[override]
        """Return no groups: a step has none."""
        return ()

    def batch(
        self, step: int, purpose: Purpose, records: Sequence[SampleRecord] = ()
    ) -> tuple[SampleBatch, dict[str, float]]:
        """Fail: clients bring the batch."""
        raise AssertionError("clients bring the batch")

    def describe(self, samples: Sequence[SampleScored]) -> list[str]:
        """Return nothing: nothing is validated."""
        return []


class ServerConsole(Observer):
    """The console of a server: what happens to its processes, and the versions that clients publish."""

    def noted(self, text: str) -> None:
        """Print a line."""
        print(text, flush=True)

    def committed(self, record: StepRecord) -> None:
        """Print the version, with what the last calls before it have reported."""
        names = ("loss", "grad_norm", "learning_rate")
        numbers = "".join(f"  {name} {record.metrics[name]:.4g}" for name in names if name in record.metrics)
        print(f"version {record.step} is published{numbers}", flush=True)


class TinkerFrontEnd:
    """The front end, as a run sees it."""

    def __init__(
        self, desk: CallDesk, config: Config, begin: Callable[[], None], opened: Callable[[], None] = lambda: None
    ) -> None:
        """`begin` is called once, when the model is there and the first attempt begins.

        `opened` is called once, when calls are carried out: from then on lost processes are replaced.
        """
        self._opened = opened
        self._desk = desk
        self._config = config
        self._begin: Callable[[], None] | None = begin

    def spec(self, spec: RunSpec) -> RunSpec:
        """Return a spec by which a step has no samples, and lasts until a client publishes."""
        deadlines = msgspec.structs.replace(spec.deadlines, train=_FOR_EVER_S)
        return msgspec.structs.replace(spec, num_groups=0, deadlines=deadlines, last_step=_NUM_STEPS)

    def display(self) -> Observer:
        """Return an observer that prints a line for each published version."""
        return ServerConsole()

    def loop(self, *parts: Any) -> CoordinatorLoop:
        """Return a loop that takes calls from the desk."""
        self.begin()
        return (CallLoop if self._desk.held is None else ApartLoop)(self._desk, self._config, self.open, *parts)

    def open(self) -> None:
        """Note that calls are carried out, once."""
        opened, self._opened = self._opened, lambda: None
        opened()

    def begin(self) -> None:
        """Let clients come, once."""
        if self._begin is not None:
            self._begin()
            self._begin = None
