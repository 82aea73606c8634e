"""A rollout process whose engine reports an absurd, but finite log-probability: a script that tests start.

``VERSION:LOGPROB ARGUMENTS...``: one token of the first sample that is made with that version has this log-probability.
"""

from __future__ import annotations

import sys

from tandem.rollout import cli
from tandem.rollout.engine import Completion
from tandem.rollout.engines.transformers import TransformersEngine

_real_step = TransformersEngine.step
_absurd: dict[int, float] = {}


def _step(engine: TransformersEngine) -> list[Completion]:
    """Make tokens for real, and say something else of one of them."""
    done = _real_step(engine)
    for completion in done:
        logprob = _absurd.pop(int(completion.versions_T[0]), None)
        if logprob is not None:
            completion.logprobs_T[0] = logprob
    return done


if __name__ == "__main__":
    version, logprob = sys.argv[1].split(":")
    _absurd[int(version)] = float(logprob)
    TransformersEngine.step = _step  # type: ignore[method-assign]
    sys.exit(cli.main(sys.argv[2:]))
