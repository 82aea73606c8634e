"""Records of runs for tests of what a diagnosis finds in them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from tandem.config import Config, build_config, config_to_json
from tandem.coordinator.loop.run import record_outcome
from tandem.coordinator.scheduler.events import FinishRun
from tandem.observe.diagnosis import CHECKS
from tandem.observe.diagnosis.evidence import DiagnosisFinding, RunEvidence, SampleRow
from tandem.observe.run_folder.journal import RefitRecord, RunRecord, StepRecord
from tandem.observe.run_folder.journal_writer import Journal

WELL = {
    "reward": 0.4,
    "reward_min": 0.0,
    "reward_max": 1.0,
    "accuracy": 0.4,
    "groups_without_spread": 0.5,
    "mean_generation_length": 40.0,
    "truncated_fraction": 0.25,
    "entropy": 0.6,
    "kl": 0.1,
    "approx_kl": 0.001,
    "clip_fraction": 0.01,
    "token_mult_prob_error": 1.01,
    "loss": 0.1,
    "grad_norm": 0.3,
    "learning_rate": 1e-6,
    "num_valid_tokens": 512.0,
}
"""Metrics of a step of GRPO that learns."""
SLOW_RANK = {
    "slowest_trainer": 3.0,
    "trainer_compute_max_s": 0.8,
    "trainer_compute_median_s": 0.4,
    "trainer_compute_min_s": 0.1,
    "trainer_waited_max_s": 0.7,
    "trainer_waited_min_s": 0.0,
}
"""Of a step of two seconds."""
Metrics = dict[str, float]


class RecordedRun(msgspec.Struct, frozen=True):
    """The metrics of a run, and what was wrong with it."""

    algorithm: str
    cause: str
    """The finding that must come first; empty if nothing may be found."""
    every: int
    """Of how many steps one is here."""
    steps: dict[int, dict[str, float]]


RUNS = msgspec.json.decode(Path(__file__).with_name("recorded_runs.json").read_bytes(), type=dict[str, RecordedRun])


def config_of(algorithm: str = "grpo", **sections: Any) -> Config:
    policy = {"model_name": "model", "generation": {"max_new_tokens": 64}}
    if sections.get("grpo", {}).get("async_grpo"):
        policy["generation"] = {"max_new_tokens": 64, "colocated": {"enabled": False}}
    settings = {
        "algorithm": algorithm,
        "policy": merged(policy, sections.pop("policy", {})),
        "data": {"dataset_name": "reasoning_gym", "task": "chain_sum", "rejected_template": "no"},
        **sections,
    }
    return build_config(settings)


def merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    return base | {k: merged(base[k], v) if isinstance(base.get(k), dict) else v for k, v in over.items()}


def steps_of(metrics: Sequence[Metrics], base: Metrics = WELL) -> tuple[StepRecord, ...]:
    return tuple(
        StepRecord(step=number, version=number, metrics=base | changed, seconds={"total": 2.0})
        for number, changed in enumerate(metrics, 1)
    )


def evidence_of(*metrics: Metrics, config: Config | None = None, **over: Any) -> RunEvidence:
    """Return the record of a run that is well, but for what is changed in each of its steps."""
    config = config or config_of()
    steps = steps_of(metrics)
    fields: dict[str, Any] = {
        "folder": Path("run"),
        "run": RunRecord(
            run_id="r", created_at=0.0, algorithm=config.algorithm, protocol_version=1, package_version="0"
        ),
        "config": config,
        "steps": steps,
        "held_out": tuple(record for record in steps if any(name.startswith("val_") for name in record.metrics)),
        "refits": (),
        "events": (),
        "ending": None,
        "is_running": True,
        "quiet_s": 0.0,
        "samples": (),
        "unread": "",
        "logs": {},
    }
    return RunEvidence(**fields | over)


def evidence_of_run(run: RecordedRun) -> RunEvidence:
    """Return the record of a real run."""
    records = [StepRecord(step=step, version=step, metrics=m, seconds={"total": 1.0}) for step, m in run.steps.items()]
    return evidence_of(
        config=config_of(run.algorithm),
        steps=tuple(record for record in records if record.step),
        held_out=tuple(record for record in records if any(metric.startswith("val_") for metric in record.metrics)),
    )


def found_in(evidence: RunEvidence) -> dict[str, DiagnosisFinding]:
    found = [finding for check in CHECKS if (finding := check.find(evidence)) is not None]
    return {finding.name: finding for finding in found}


def sample(step: int, response: str = "7", **over: Any) -> SampleRow:
    fields: dict[str, Any] = {
        "step": step,
        "group": 0,
        "problem_id": "p",
        "reference_answer": "",
        "response": response,
        "reward": 0.0,
        "failure": "",
        "rollout": "rollout-0",
        "response_length": 10,
        "started_at": 0.0,
        "finished_at": 1.0,
    }
    return SampleRow(**fields | over)


def refit(version: int, digest: int = 0, **over: Any) -> RefitRecord:
    fields: dict[str, Any] = {
        "version": version,
        "engines": ("rollout-0",),
        "num_bytes": {},
        "seconds": {},
        "predicted_s": 0.0,
        "bound_s": 0.0,
        "digest": digest or version + 1,
        "quarantined": {},
        "verify": "full",
    }
    return RefitRecord(**fields | over)


def write_run(*metrics: Metrics, config: Config | None = None, finish: FinishRun | None = None) -> Path:
    """Write the journal of a run; one without an end was killed."""
    config = config or config_of(grpo={"max_num_steps": 9}, policy={"train_global_batch_size": 512})
    with Journal.create(Path("run"), config_to_json(config), config.algorithm) as journal:
        for record in steps_of(metrics):
            journal.commit_step(record)
        journal.record_event("coordinator", "rollout-1 is lost: killed by SIGKILL; another is launched in its place")
        if finish is not None:
            record_outcome(journal, lambda: finish)
    return Path("run")
