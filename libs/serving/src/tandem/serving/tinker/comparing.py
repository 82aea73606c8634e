"""The comparison of calls that were done again with those of the record."""

from __future__ import annotations

import struct
from collections.abc import Collection
from pathlib import Path

from tandem.serving.tinker.call_files import Done, GradientDone, RestoreDone, SaveDone, StepDone, digest_of
from tandem.serving.tinker.calls import GradientsScored

_NAMES = {GradientDone: "gradient", StepDone: "step", SaveDone: "saved state", RestoreDone: "load"}


class CallComparison:
    """The calls of one model, as far as they were done again."""

    def __init__(self, model: str, why_over: str) -> None:
        self._model = model
        self._why_over = why_over
        self._counts = dict.fromkeys((GradientDone, StepDone, SaveDone), 0)
        """Calls that were compared."""
        self._num_equal = 0
        self._first = ""
        """The first difference."""
        self._gap = 0.0
        """The largest relative difference of a loss or norm."""
        self.has_failed = False
        """Whether a call failed that had not, so that the model cannot go on."""

    @property
    def is_equal(self) -> bool:
        """Whether nothing differs."""
        return not self._first

    def compare_gradient(self, recorded: GradientDone, scored: GradientsScored | None, error: str) -> None:
        """Compare a gradient: its loss, and the log-probabilities that it was taken at."""
        difference = self._failure(recorded, error)
        if not difference and scored is not None:
            difference = self._number("loss", recorded.loss, scored.loss)
            difference = difference or (
                "" if digest_of(scored) == recorded.logprobs else "its log-probabilities differ"
            )
        self._count(recorded, difference)

    def compare_step(self, recorded: StepDone, norm: float | None, error: str) -> None:
        """Compare a step: the norm of its gradient."""
        difference = self._failure(recorded, error)
        if not difference and norm is not None:
            difference = self._number("norm", recorded.norm, norm)
        self._count(recorded, difference)

    def compare_saved(self, recorded: SaveDone, state: str, error: str) -> None:
        """Compare a saved state: the digests of its tensors, those of the optimizer too."""
        difference = self._failure(recorded, error)
        if not difference and state != recorded.state:
            difference = "its tensors differ" if recorded.state else "the record has no digests of its tensors"
        self._count(recorded, difference)

    def note_restored(self, recorded: RestoreDone, error: str) -> None:
        """Note that a state was loaded, or could not be."""
        self._note(recorded, self._failure(recorded, error))

    def describe(self, run: Path, changed: Collection[str]) -> str:
        """Return a line about the model, and a second one if its record has ended early."""
        counted = [
            f"{count} {_NAMES[kind]}{'' if count == 1 else 's'}" for kind, count in self._counts.items() if count
        ]
        calls = " and ".join(filter(None, [", ".join(counted[:-1]), *counted[-1:]])) or "no calls"
        if self.is_equal:
            summary = f"{self._model}: {calls}: equal to the bit to those of {run}"
        else:
            cause = f"as {', '.join(changed)} changed" if changed else "though nothing was changed"
            num = f"{self._num_equal} of {sum(self._counts.values())}"
            gap = f"losses and norms within {self._gap:.1g}"
            summary = f"{self._model}: {calls}: {num} are equal to the bit to those of {run}, {gap}, {cause}"
            summary = f"{summary}; the first that differs is {self._first}"
        return summary if not self._why_over else f"{summary}\n{self._model}: its record ends there: {self._why_over}"

    def _count(self, recorded: Done, difference: str) -> None:
        self._counts[type(recorded)] += 1
        self._num_equal += not difference
        self._note(recorded, difference)

    def _note(self, recorded: Done, difference: str) -> None:
        if difference and not self._first:
            self._first = f"call {recorded.index}, a {_NAMES[type(recorded)]}: {difference}"

    def _failure(self, recorded: Done, error: str) -> str:
        """Return how a failure differs from the record; empty if both have failed, or neither."""
        if error and not recorded.error:
            self.has_failed = True
            return f"it has failed: {error}"
        return "it has not failed, and had before" if recorded.error and not error else ""

    def _number(self, name: str, before: float, after: float) -> str:
        if struct.pack("<d", before) == struct.pack("<d", after) or (before != before and after != after):
            return ""
        self._gap = max(self._gap, abs(after - before) / max(abs(before), 1e-30))
        return f"its {name} is {after!r}, and was {before!r}"
