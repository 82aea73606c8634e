"""The tables of docs/migrating.md have every field of TRL's and verl's configurations, and no other."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.harness import migrating

SECTIONS = ("profiler",)
"""Sections of verl that are one row, as are those that are free in form."""


def test_every_argument_of_transformers_is_there() -> None:
    import transformers

    fields = {field.name for field in dataclasses.fields(transformers.TrainingArguments)}
    assert migrating.named(migrating.TRL["TrainingArguments"]) == fields


@pytest.mark.parametrize("name", ["GRPOConfig", "SFTConfig", "DPOConfig"])
def test_every_field_of_trl_is_there(name: str) -> None:
    import transformers
    import trl

    common = {field.name for field in dataclasses.fields(transformers.TrainingArguments)}
    fields = {field.name for field in dataclasses.fields(getattr(trl, name))}
    assert migrating.named(migrating.TRL[name]) == fields - common


def leaves(node: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in node.items():
        if key in ("_target_", "defaults"):
            continue
        if isinstance(value, dict) and key not in SECTIONS:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def verl_file(name: str) -> dict[str, Any]:
    spec = importlib.util.find_spec("verl")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("verl is not installed")
    folder = Path(spec.submodule_search_locations[0]) / "trainer" / "config"
    content: dict[str, Any] = yaml.safe_load((folder / name).read_text())
    return content


def test_every_field_of_verls_actor_is_there() -> None:
    fields = {*leaves(verl_file("actor/actor.yaml")), *leaves(verl_file("actor/dp_actor.yaml"))}
    fields |= {*leaves(verl_file("optim/fsdp.yaml"), "optim.")}
    assert migrating.named(migrating.VERL["actor"]) == fields


def test_every_field_of_verls_algorithm_is_there() -> None:
    fields = {*leaves(verl_file("ppo_trainer.yaml")["algorithm"])}
    fields |= {*leaves(verl_file("algorithm/rollout_correction.yaml"), "rollout_correction.")}
    assert migrating.named(migrating.VERL["algorithm"]) == fields
