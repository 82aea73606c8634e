"""Every key of NeMo-RL v0.7's, with its files' values (``nemo_rl_07_keys.yaml``): taken, noticed or refused by name."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tandem.common.errors import ConfigError, NotSupportedYet
from tandem.config import Config, load_evaluation, notices
from tandem.config.layers import merge, read_layers
from tandem.config.load import build, interpolate, make_layers
from tandem.config.unsupported import describe_refusal

HERE = Path(__file__).parent
FILES = HERE / "nemo_rl_07"
GROUPS: list[dict[str, Any]] = yaml.safe_load((HERE / "nemo_rl_07_keys.yaml").read_text())
OUTCOMES = ("taken", "noticed", "refused", "beside")


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(FILES)
    monkeypatch.setenv("TANDEM_TEST_HOME", "/data")
    monkeypatch.setenv("HF_HOME", "/data")


def put(settings: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    for part in reversed(key.split(".")):
        value = {part: value}
    return merge(settings, value)


@functools.cache
def settings_of(file: str) -> dict[str, Any]:
    """Read a file, all that it inherits included; what is put into it later reads nothing of it by interpolation."""
    return interpolate(read_layers(Path(file), ()).merged)


def values_of(group: dict[str, Any]) -> Iterator[tuple[str, str, Any]]:
    for outcome in OUTCOMES:
        for key, values in group.get(outcome, {}).items():
            for value in values:
                yield outcome, key, value


def names(text: str, key: str) -> bool:
    """Tell whether a text begins with a key, with one that it is part of, or with a part of it."""
    parts = key.split(".")
    keys = (".".join(parts[:count]) for count in range(len(parts), min(1, len(parts) - 1), -1))
    return text.startswith(f"{key}.") or any(re.match(rf"{re.escape(each)}( |$)", text) for each in keys)


def outcome_of(config: Config, key: str) -> str:
    refused = (describe_refusal(config) or "").removeprefix("not supported yet: ")
    if any(names(re.sub(r"\[\d\]", "", part), key) for part in re.split(r", (?=[a-z_]+[.\[])", refused)):
        return "refused"
    if any(names(notice, key) for notice in notices(config)):
        return "noticed"
    return "beside" if refused else "taken"


def titled(group: dict[str, Any]) -> str:
    return "-".join((group["file"], *group.get("with", {})))


@pytest.mark.parametrize("group", GROUPS, ids=titled)
def test_each_value_is_taken_or_told_of(group: dict[str, Any]) -> None:
    found: list[str] = []
    for expected, key, value in values_of(group):
        try:
            got = outcome_in(group, key, value)
        except ConfigError as error:
            got = f"wrong: {error}"
        if got != expected:
            found.append(f"{key} ({value!r}): {got}, not {expected}")
    assert not found, "\n".join(found)


def outcome_in(group: dict[str, Any], key: str, value: Any) -> str:
    given = [*group.get("with", {}).items(), (key, value)]
    if group["file"] == "eval":
        words = [f"++{name}={yaml.safe_dump(each, default_flow_style=True, width=999)}" for name, each in given]
        try:
            config = load_evaluation(HERE / "nemo_rl_07_eval.yaml", [word.removesuffix("...\n") for word in words])
        except NotSupportedYet as error:
            return "refused" if key in str(error) else "beside"
        return outcome_of(config, key)
    settings = settings_of(group["file"])
    for name, each in given:
        settings = put(settings, name, each)
    return outcome_of(build(make_layers(settings), to_run=False), key)


@pytest.mark.parametrize(("section", "file"), [("value", "ppo_math_1B.yaml"), ("teacher", "distillation_math.yaml")])
def test_models_beside_the_policy_have_its_keys(section: str, file: str) -> None:
    """What a value is of the policy it is of them; what both must have alike is said."""
    found = []
    for group in GROUPS:
        for _, key, value in values_of(group) if group["file"] == "grpo_math_1B.yaml" else ():
            if not key.startswith("policy.") or key.startswith("policy.generation."):
                continue
            settings = settings_of(file)
            for name, each in (*group.get("with", {}).items(), (key, value)):
                settings = put(settings, name, each)
                if name.startswith("policy."):
                    settings = put(settings, name.replace("policy", section, 1), each)
            try:
                build(make_layers(settings), to_run=False)
            except ConfigError as error:
                found.append(f"{key} ({value!r}): {error}")
    assert not found, "\n".join(found)
