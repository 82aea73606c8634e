"""What tests share whose engines are started by hand: folders of runs, and what two runs have in common."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tandem.observe.run_folder.journal import RefitRecord, read_journal
from tests.harness.runs.running import coordinator, deterministic, steps_of, weights_of, write_config


@contextlib.contextmanager
def in_folder(folder: Path) -> Iterator[None]:
    """Work in a folder that outlives a test."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def undisturbed_run(folder: Path, config: dict[str, Any]) -> Path:
    """Run a configuration on one host to its end; return the folder of the run."""
    with in_folder(folder):
        ended = coordinator("up", write_config(config))
    assert ended.returncode == 0, ended.stderr
    return folder / "run"


MEGATRON_TP2: dict[str, Any] = {
    "policy": {
        "optimizer": None,
        "megatron_cfg": {
            "enabled": True,
            "tensor_model_parallel_size": 2,
            "optimizer": {"lr": 1.0e-3, "use_distributed_optimizer": True},
        },
    },
    "cluster": {"trainers": 2},
}
"""Two ranks of Megatron-Core that share each layer."""
TRAINERS: dict[str, dict[str, Any]] = {
    "1-trainer": {"cluster": {"trainers": 1}},
    "2-trainers": {"cluster": {"trainers": 2}},
    "megatron-tp2": MEGATRON_TP2,
}


def placed_runs(folder: Path, config: dict[str, Any]) -> dict[str, Path]:
    """Run a configuration in turns on the same devices and beside each other; return the two runs' folders."""
    with in_folder(folder):
        path = write_config(config)
        for placement, enabled in (("colocated", True), ("disjoint", False)):
            ended = coordinator(
                "up",
                path,
                f"logger.log_dir={placement}",
                f"policy.generation.colocated.enabled={enabled}",
            )
            assert ended.returncode == 0, ended.stdout + ended.stderr
    return {placement: folder / placement for placement in ("colocated", "disjoint")}


def refits_of(run: str | Path = "run") -> list[RefitRecord]:
    """Return the refits in a run's journal."""
    with read_journal(Path(run)) as journal:
        return list(journal.refits())


def last_weights(run: Path) -> dict[str, bytes]:
    """Return the weights of a run's newest checkpoint."""
    return weights_of(run / "checkpoints" / "latest")


OF_ROUNDING = frozenset({"sampling_importance_ratio", "token_mult_prob_error"})
"""Metrics that compare engines' numbers with trainers': the last bits depend on what is generated together.

Matrix products of one to three rows add up in another order than larger ones, on every processor tried; after a kill
only what is missing is generated, in smaller batches.
"""


def assert_same_metrics(
    found: Mapping[str, float], wanted: Mapping[str, float], *, same_batches: bool = False, step: int = 0
) -> None:
    """Compare the metrics of a step to the bit, those `OF_ROUNDING` only where the same batches were generated."""
    found, wanted = deterministic({**found}), deterministic({**wanted})
    for name in () if same_batches else OF_ROUNDING & found.keys() & wanted.keys():
        assert found.pop(name) == pytest.approx(wanted.pop(name)), name
    differing = {name for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name)}
    values = {name: (found.get(name), wanted.get(name)) for name in sorted(differing)}
    assert not differing, f"step {step} differs (found, wanted): {values}"


def assert_same_results(
    run: str | Path, expected: Path, interrupted_at: int | None = None, *, same_batches: bool = False
) -> None:
    """Compare all steps and the weights that they end with, to the bit.

    `same_batches`: nothing was interrupted and the engines are the same, so that metrics `OF_ROUNDING` are compared to
    the bit, too. The step that an interrupt came in is finished, but no longer validated, if it had not been by then.
    """
    for ours, theirs in zip(steps_of(run), steps_of(expected), strict=True):
        wanted = theirs.metrics
        if ours.step == interrupted_at and "val_accuracy" not in ours.metrics:
            wanted = {name: value for name, value in wanted.items() if not name.startswith("val_")}
        assert_same_metrics(ours.metrics, wanted, same_batches=same_batches, step=ours.step)
    assert last_weights(Path(run)) == last_weights(expected)
