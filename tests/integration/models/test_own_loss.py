"""Whole runs with a loss of the user's, beside the configuration: that of the documentation's page."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.harness.runs.running import coordinator, deterministic, merged, steps_of, weights_of, write_config

PAGE = Path(__file__).parents[3] / "docs" / "algorithms.md"
MEGATRON = {"policy": {"optimizer": None, "dtensor_cfg": {"enabled": False}, "megatron_cfg": {"enabled": True}}}


@pytest.fixture(autouse=True)
def focal() -> None:
    """Write the page's class to the module that the page names."""
    (text,) = re.findall(r"```python\n(.*?class Focal.*?)```", PAGE.read_text(), re.DOTALL)
    Path("focal.py").write_text(text)


def own(gamma: float) -> dict[str, Any]:
    return {"loss_fn": {"class": "focal.Focal", "kwargs": {"gamma": gamma}}}


def run(over: dict[str, Any], folder: str) -> dict[str, float]:
    """Run to the end; return the metrics of the first step, which are of the model as it was made."""
    ended = coordinator("up", write_config(over), f"logger.log_dir={folder}")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return deterministic(steps_of(folder)[0].metrics)


def test_the_class_of_the_page_trains() -> None:
    """Without its weights it is REINFORCE as it is built in, to the bit; with them it is another loss."""
    built_in = run({"loss_fn": {"disable_ppo_ratio": True}}, "built_in")
    plain, focused = run(own(0.0), "plain"), run(own(2.0), "focused")
    assert weights_of("plain/checkpoints/step_3") == weights_of("built_in/checkpoints/step_3")
    assert plain["loss"] == built_in["loss"]
    assert plain["focus"] == 1.0
    assert 0.5 < focused["focus"] < 1.0
    assert focused["loss"] != plain["loss"]
    assert weights_of("focused/checkpoints/step_3") != weights_of("plain/checkpoints/step_3")


def test_it_is_the_same_under_megatron() -> None:
    sharded, whole = (
        run(merged(own(2.0), {"cluster": {"trainers": 2}}), "dtensor"),
        run(own(2.0) | MEGATRON, "megatron"),
    )
    for name in ("loss", "focus", "num_valid_tokens"):
        assert whole[name] == pytest.approx(sharded[name], rel=1e-4, abs=1e-6), name


def test_one_that_is_wrong_ends_the_run_in_one_line_before_anything_starts() -> None:
    text = Path("focal.py").read_text()
    Path("focal.py").write_text(text.replace("token_level=True)", "token_level=True) * batch.advantages_BT"))
    ended = coordinator("up", write_config(own(2.0)))
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert line.startswith(
        "error: loss_fn.class focal.Focal returned a tensor of shape [2, 4]: a loss is a scalar tensor"
    )
    assert not Path("run").exists()
