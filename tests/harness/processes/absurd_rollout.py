"""A rollout process whose engine reports an absurd, but finite log-probability: a module that tests start.

``VERSION:LOGPROB ARGUMENTS...``: one token of the first sample that is made with that version has this log-probability.
"""

from __future__ import annotations

from collections.abc import Sequence

from tandem.rollout import cli
from tandem.rollout.engine import EngineCompletion
from tandem.rollout.engines.transformers import TransformersEngine

_real_step = TransformersEngine.step
_absurd: dict[int, float] = {}


def _step(engine: TransformersEngine) -> list[EngineCompletion]:
    """Make tokens for real, and say something else of one of them."""
    done = _real_step(engine)
    for completion in done:
        logprob = _absurd.pop(int(completion.versions_T[0]), None)
        if logprob is not None:
            completion.logprobs_T[0] = logprob
    return done


def main(arguments: Sequence[str]) -> int:
    """Run the real command with the engine patched; the first word is what it says of which version."""
    version, logprob = arguments[0].split(":")
    _absurd[int(version)] = float(logprob)
    TransformersEngine.step = _step  # type: ignore[method-assign]
    return cli.main(arguments[1:])
