"""An environment that fails on samples, or takes too long."""

from __future__ import annotations

import re
from collections import Counter

from tandem.coordinator.inspect.diagnosis.evidence import Evidence, in_steps, shortened
from tandem.coordinator.inspect.diagnosis.finding import Certainty, Finding

FAILURE_SHARES: tuple[tuple[float, Certainty], ...] = ((0.5, "certain"), (0.1, "likely"), (0.02, "possible"))
"""Share of samples that the environment failed on, and how certain it is then that this is what is wrong."""
_ENVIRONMENT = re.compile(r"environment '")
_QUOTED = re.compile(r"(environment '[^']*')|'[^']*'|\"[^\"]*\"")


def failing_environment(evidence: Evidence) -> Finding | None:
    """Find samples that the environment could not score."""
    config, ending = evidence.config, evidence.ending
    if not config.declaration.rolls_out:
        return None
    texts = Counter(_cause(row.failure) for row in evidence.samples if row.failure)
    lines = [f"{count} recorded samples: {text}" for text, count in texts.most_common(2)]
    keys = f"{config.environment_keys}: its class, timeout_s and on_error"
    if ending is not None and ending.outcome == "failed" and _ENVIRONMENT.search(ending.why):
        return Finding(
            name="failing environment",
            what="The environment failed on a response, and the run ended with it.",
            evidence=(shortened(ending.why, 600), *lines),
            look_at=f"{keys} (zero and drop go on)",
            certainty="certain",
            explains=("run failed",),
        )
    points = evidence.points("environment_failures")
    failed = sum(value for _, value in points)
    late = sum(value for _, value in evidence.points("environment_timeouts"))
    size = config.rollout_section.num_prompts_per_step * config.rollout_section.num_generations_per_prompt
    share = min(1.0, failed / max(1, size * len(evidence.steps)))
    certainty = next((certainty for least, certainty in FAILURE_SHARES if share >= least), None)
    if certainty is None:
        return None
    return Finding(
        name="failing environment",
        what=f"The environment could not score {share:.0%} of the samples"
        + (", mostly because it took too long." if late > failed / 2 else "."),
        evidence=(
            f"{failed:.0f} failures in {in_steps(points[0][0], points[-1][0])}, {late:.0f} of them timeouts "
            f"({FAILURE_SHARES[-1][0]:.0%} of all samples is the threshold)",
            *lines,
        ),
        look_at=f"{keys}, and logs/rollout-0.log",
        certainty=certainty,
        since=points[0][0],
        explains=("equal rewards", "groups without spread", "no gradient"),
    )


def _cause(failure: str) -> str:
    """Return a failure without what differs from sample to sample."""
    return shortened(_QUOTED.sub(lambda found: found[1] or "…", failure), 300)
