"""A third engine is a folder and a declaration (docs/engines.md): a copy of the sources with one more trains."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.harness.runs.by_hand import in_folder, undisturbed_run
from tests.harness.runs.running import BIN, TIMEOUT_S, steps_of, write_config
from tests.harness.scripts import ROOT

_DECLARATION = """
_TOY = EngineKind(
    name="toy",
    title="the toy engine",
    summary="slow",
    factory="tandem.rollout.engines.toy.factory.FACTORY",
    plan="tandem.coordinator.forecast.engine_plans.EMBEDDED",
    is_on_gpus=False,
    section="transformers_cfg",
    num_running=lambda settings: settings.transformers_cfg.num_slots,
)
"""
_LIST = "ENGINE_KINDS: dict[str, EngineKind] = {kind.name: kind for kind in (_EMBEDDED, _VLLM"


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """Return a copy of the sources with the toy engine's folder and declaration."""
    folder = tmp_path / "sources"
    for package in (*ROOT.glob("libs/*/src"), *ROOT.glob("services/*/src")):
        shutil.copytree(package, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    shutil.copytree(ROOT / "tests" / "toy_engine", folder / "tandem" / "rollout" / "engines" / "toy")
    declarations = folder / "tandem" / "config" / "engine_kinds.py"
    text = declarations.read_text()
    assert text.count(_LIST) == 1
    declarations.write_text(text.replace(_LIST, f"{_DECLARATION}\n{_LIST}, _TOY"))
    return folder


def test_a_run_with_a_third_engine_is_that_of_the_embedded_one(sources: Path, tmp_path: Path) -> None:
    settings = {"grpo": {"max_num_steps": 2, "val_period": 0}}
    embedded = steps_of(undisturbed_run(tmp_path, settings))
    folder = tmp_path / "toy"
    folder.mkdir()
    with in_folder(folder):
        config = write_config(settings)
        ended = subprocess.run(
            [BIN / "coordinator", "up", config, "policy.generation.backend=toy"],
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(sources), str(folder)])},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    toy = steps_of(folder / "run")
    assert [step.step for step in toy] == [1, 2]
    for step, other in zip(toy, embedded, strict=True):
        for name in ("reward", "mean_generation_length", "accuracy"):
            assert step.metrics[name] == other.metrics[name], "the same tokens"
        assert step.metrics["loss"] == pytest.approx(other.metrics["loss"], abs=1e-5)
        assert step.metrics["token_mult_prob_error"] == pytest.approx(1.0, abs=1e-4)
