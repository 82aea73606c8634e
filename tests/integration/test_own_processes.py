"""Models with processes of their own: what a run learns is what it learns where they live in the policy's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from tests.integration.harness import coordinator, deterministic, steps_of, write_config

KL: dict[str, Any] = {"loss_fn": {"reference_policy_kl_penalty": 0.1}}


def tensors_of(checkpoint: Path) -> dict[str, bytes]:
    """Every tensor that training has left in a checkpoint, to the bit."""
    return {
        f"{path.relative_to(checkpoint)} {name}": tensor.numpy().tobytes()
        for path in checkpoint.rglob("*.safetensors")
        for name, tensor in load_file(path).items()
    }


def up(config: dict[str, Any], *words: str) -> None:
    ended = coordinator("up", write_config(config), *words)
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr


def test_a_reference_in_a_process_of_its_own_changes_nothing() -> None:
    up(KL, "logger.log_dir=beside")
    up(KL, "cluster.processes_of.reference=1")
    found, expected = steps_of("run"), steps_of("beside")
    assert [deterministic(step.metrics) for step in found] == [deterministic(step.metrics) for step in expected]
    assert tensors_of(Path("run/checkpoints/step_3")) == tensors_of(Path("beside/checkpoints/step_3"))
