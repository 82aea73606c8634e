"""Diagnose the metrics of real runs again: of those that were broken, the cause comes first; of healthy ones nothing.

``recorded_runs.json`` has the metrics of runs of a Qwen3 model of hidden size 128 on ``chain_sum``, to four digits. The
broken ones and the short healthy one began from the model of ``examples/arithmetic_sft.yaml`` with its GRPO stage, 16
prompts of 8 samples, and without a schedule of the learning rate (4e-4 where it is healthy). Of the longer ones it has
every fifth or twentieth step, and those that were validated.
"""

from __future__ import annotations

import pytest
from diagnosis_harness import RUNS, evidence_of_run, found_in

from tandem.observe.diagnosis import _sort_findings


@pytest.mark.parametrize("name", RUNS)
def test_the_cause_of_a_real_run_comes_first(name: str) -> None:
    run = RUNS[name]
    evidence = evidence_of_run(run)
    found = _sort_findings([*found_in(evidence).values()])
    if not run.cause:
        assert found == []
        return
    assert found[0].name == run.cause
    assert not found[0].explained_by
