"""How often does `coordinator bisect` name the setting that broke a run? Of the same runs as `test_diagnose`.

`CAUSES` says for each broken run what was done to it, as the keys that would undo it. Anything else that is named is
wrong, and nothing may be named of a healthy run. Three were broken in a way that no key undoes: problems that are too
hard or too easy, and prompts that tell the answer. In a smoke test one broken run is looked into.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import NamedTuple

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks.broken_runs import BROKEN, HEALTHY, Case, prepare, prepare_others, run
from benchmarks.measure import keep_ratios
from benchmarks.smoke import IS_SMOKE, sized
from tests.harness.runs.running import coordinator

LEAST_NAMED = 20
_RATE = "policy.optimizer.kwargs.lr"
_REWARDS = ("env.sums.kwargs", "env.sums")
CAUSES: dict[str, tuple[str, ...]] = {
    "learning rate 100 times too high": (_RATE,),
    "max_new_tokens too short": ("policy.generation.max_new_tokens",),
    "reward constant": _REWARDS,
    "learning rate 100 times too high, SFT": (_RATE,),
    "learning rate 0": (_RATE,),
    "learning rate 1e-7 of what it was": (_RATE,),
    "learning rate a thousandth of what it was": (_RATE,),
    "clip range of 0": ("loss_fn.ratio_clip_min, loss_fn.ratio_clip_max", "loss_fn.ratio_clip_max"),
    "KL weight of 1000": ("loss_fn.reference_policy_kl_penalty",),
    "wrong prompt template": ("data.prompt_template",),
    "stop string too early": ("policy.generation.stop_strings",),
    "reward inverted": _REWARDS,
    "reward for length": _REWARDS,
    "reward that one answer gets": _REWARDS,
    "right answers in a form that is not rewarded": _REWARDS,
    "problems too hard": (),
    "problems too easy": (),
    "stale weights": ("grpo.async_grpo.max_trajectory_age_steps", "samples ", _RATE),  # both were raised
    "tokenizer of another model": ("policy.tokenizer.name",),
    "slow environment": _REWARDS,
    "environment that raises": _REWARDS,
    "environment that becomes slow": _REWARDS,
    "samples that hardly differ": ("policy.generation.temperature",),
    "engine that samples otherwise": ("policy.generation.top_p",),
    "groups of one sample": ("grpo.num_generations_per_prompt",),
    "few problems": ("data.num_train",),
    "dropout of nearly everything": ("policy.dtensor_cfg.lora_cfg.dropout",),
    "wrong reference": ("loss_fn.reference_policy_kl_penalty", "policy.model_name"),
    "prompts with the answer": (),
    "SFT over few examples": ("data.num_train",),
}


class Row(NamedTuple):
    """What was named of a run."""

    case: Case
    cause: str
    """Empty if nothing was."""
    num_trials: int
    seconds: float
    reason: str

    @property
    def is_right(self) -> bool:
        """Whether the cause is that of a broken run, or a healthy one has none."""
        if not self.case.expected:
            return not self.cause
        causes = CAUSES[self.case.name]
        return self.cause in causes or any(self.cause.startswith(each) for each in causes if each.endswith(" "))


def bisected(case: Case, folder: Path) -> Row:
    """Bisect the run of a case; print and return what is named."""
    done = coordinator("bisect", folder, "--json", "--trial-minutes=6", timeout_s=3600)
    assert done.returncode == 0, done.stdout + done.stderr
    end = json.loads(done.stdout)
    row = Row(
        case,
        end["cause"]["cause"] if end["cause"] else "",
        len(end["trials"]),
        sum(trial["seconds"] for trial in end["trials"]),
        end["reason"],
    )
    print(
        f"{case.name:46} | {row.cause or '-':48} | {row.is_right!s:5} | {row.num_trials:2} | {row.seconds:5.0f} s | "
        f"{row.reason}",
        flush=True,
    )
    return row


def bisect_all(cases: tuple[Case, ...]) -> list[Row]:
    """Run each case, and bisect it."""
    rows = []
    here = Path().resolve()
    for number, case in enumerate(cases):
        folder = run(case, f"case-{number}").resolve()
        os.chdir(folder.parent)
        rows.append(bisected(case, Path("run")))
        os.chdir(here)
    return rows


@pytest.mark.long(minutes=30)
@pytest.mark.timeout(14400)  # 35 runs, and some 100 trials, of 5 to 30 seconds each
def test_the_cause_is_named(benchmark: BenchmarkFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    prepare()
    if not IS_SMOKE:
        prepare_others()
    cases = (*BROKEN[: sized(len(BROKEN), 1)], *HEALTHY[: sized(len(HEALTHY), 0)])
    rows: list[Row] = []
    benchmark.pedantic(lambda: rows.extend(bisect_all(cases)), rounds=1)
    broken = [row for row in rows if row.case.expected]
    named = [row for row in broken if row.is_right]
    benchmark.extra_info["right"] = f"{len(named)} of {len(broken)}"
    benchmark.extra_info["named in healthy runs"] = [row.cause for row in rows if not row.case.expected and row.cause]
    benchmark.extra_info["wrong"] = {row.case.name: row.cause for row in broken if row.cause and not row.is_right}
    benchmark.extra_info["named"] = {row.case.name: row.cause or "nothing" for row in rows}
    benchmark.extra_info["trials"] = sum(row.num_trials for row in rows)
    keep_ratios(benchmark, "causes named", {"of broken runs": len(named) / len(broken)}, aim=LEAST_NAMED / len(BROKEN))
    print(f"{len(named)} of {len(broken)} causes named")
    assert len(named) >= LEAST_NAMED * len(broken) / len(BROKEN)
    assert [row.cause for row in rows if not row.case.expected and row.cause] == []
