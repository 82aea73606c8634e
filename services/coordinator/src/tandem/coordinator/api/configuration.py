"""The configuration of a run that a program begins: its base, the arguments and the overrides."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from tandem.common.errors import ConfigError
from tandem.common.returned import shown
from tandem.config import Config
from tandem.config.checks.data import PYTHON_REWARDS
from tandem.config.layers import ConfigLayers
from tandem.config.load import build, lay_over, make_layers
from tandem.config.named import GENERATED
from tandem.coordinator.api.rewards import RewardFunction
from tandem.coordinator.api.rows import ANSWER, QUESTION

SOLVED_AT = "solved_at"
"""Key of the first function's lowest value for a response that counts as solved."""
_SOURCE = "tandem.train"
_NO_FILE_YET = "-"


class ConfigurationBuilder(msgspec.Struct, frozen=True, kw_only=True):
    """A configuration that is still being put together."""

    layers: ConfigLayers
    overrides: Mapping[str, Any]

    def apply_argument(self, argument: Mapping[str, Any]) -> ConfigurationBuilder:
        """Return the settings with an argument of `tandem.train` laid over the configuration."""
        layers = lay_over(self.layers, dict(argument), _SOURCE)
        return ConfigurationBuilder(layers=layers, overrides=self.overrides)

    def built(self, *arguments: Mapping[str, Any]) -> Config:
        """Return the configuration with arguments laid over it, and overrides over those. Raise `ConfigError`."""
        return build(self._layers(*arguments))

    @property
    def says_what_is_held_out(self) -> bool:
        """Whether the user sets how many rows are held out."""
        data = self._layers().merged.get("data")
        keys = ("num_validation", "split_validation_size")
        return isinstance(data, Mapping) and any(data.get(key) is not None for key in keys)

    def _layers(self, *arguments: Mapping[str, Any]) -> ConfigLayers:
        layers = self.layers
        for argument in arguments:
            layers = lay_over(layers, dict(argument), _SOURCE)
        for key, value in self.overrides.items():
            nested: Any = value
            for part in reversed(key.split(".")):
                nested = {part: nested}
            layers = lay_over(layers, nested, "overrides")
        return layers


def settings_of(config: object, overrides: object) -> ConfigurationBuilder:
    """Read the user's configuration and overrides. Raise `ConfigError` if they have the wrong type."""
    if not isinstance(config, str | Path | Mapping | Config):
        raise ConfigError(f"config: expected a path, a dict or a Config, got {shown(config)[:200]}")
    settings = {} if overrides is None else overrides
    if not isinstance(settings, Mapping) or not all(isinstance(key, str) and key for key in settings):
        raise ConfigError(
            f"overrides: expected a dict such as {{'grpo.max_num_steps': 10}}, got {shown(overrides)[:200]}"
        )
    return ConfigurationBuilder(layers=make_layers(config), overrides=settings)


def of_rewards(functions: Sequence[RewardFunction], solved_at: object) -> dict[str, Any]:
    """Return the settings by which functions score the samples; a resumed run needs functions with equal settings."""
    if isinstance(solved_at, bool) or not isinstance(solved_at, int | float) or not math.isfinite(solved_at):
        raise ConfigError(f"solved_at: expected a finite number, got {shown(solved_at)[:200]}")
    described = {
        "functions": [function.name for function in functions],
        "weights": [function.weight for function in functions],
        SOLVED_AT: float(solved_at),
    }
    return {"data": {"environment": PYTHON_REWARDS}, "env": {PYTHON_REWARDS: {"kwargs": described}}}


def of_rows(train: str | None, validation: str | None, num_held_out: int | None = None) -> dict[str, Any]:
    """Return the settings by which a run learns from files of rows (`tandem.coordinator.api.rows`).

    `num_held_out` training rows are held out, unless another setting says how many.
    """
    held_out = {} if num_held_out is None else {"num_validation": num_held_out}
    return {
        "data": {
            **held_out,
            "dataset_name": "jsonl",
            "task": None,
            "train_data_path": train or _NO_FILE_YET,
            "val_data_path": validation,
            "input_key": QUESTION,
            "output_key": ANSWER,
        }
    }


def make_placeholder_rows() -> dict[str, Any]:
    """Return the settings of `of_rows` without the names of fields, so that the user's own names can be read."""
    data = of_rows(None, None)["data"]
    return {"data": {key: value for key, value in data.items() if not key.endswith("_key")}}


def row_keys(config: Config) -> tuple[str, str] | None:
    """Return the names under which functions get a problem's question and its reference answer.

    None if the row has both by itself.
    """
    if config.data.dataset_name in GENERATED:
        return "question", "answer"
    return None if config.data.input_key == QUESTION else (config.data.input_key, config.data.output_key)
