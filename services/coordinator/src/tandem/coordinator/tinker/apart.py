"""The loop where engines hold the adapters of several models, each with its own versions.

Before a newer version of a model comes, its own samples in progress are made while no more begin. All others go on.
What was published before is brought to the engines again only if one of them lacks it: one that has come in the place
of a lost one, or has needed the room.
"""

from __future__ import annotations

from tandem.coordinator.tinker.loop import CallLoop
from tandem.serving.tinker.calls import EngineAdapterSets, PendingCall, PublishWeights


class ApartLoop(CallLoop):
    """One attempt of a run that clients drive, whose engines hold several models."""

    @property
    def _sets(self) -> EngineAdapterSets:
        assert self._desk.held is not None, "else it is another loop"
        return self._desk.held

    def _may_publish(self, pending: PendingCall) -> bool:
        """Let no more samples of the model's last version begin; tell whether none is being made."""
        if self._publishing is not None:
            return False
        if isinstance(pending.call, PublishWeights):
            number = self._place_of(pending)
            self._sets.renewed.add(number)
            if self._sets.num_samples[number]:
                return False
        self._closing = pending
        return True

    def _has_published(self, version: int, published: PendingCall) -> None:
        """Answer a call for which engines hold a version."""
        weights = self._note_published(version, published)
        self._sets.versions[self._desk.holding] = version
        if weights is not None:
            self._sets.renewed.discard(weights.number)
        published.answer(weights)

    def _reopen(self) -> None:
        """Let samples begin of what could not be replaced."""
        if self._closing is not None and isinstance(self._closing.call, PublishWeights):
            self._sets.renewed.discard(self._places.pop(self._closing.number))
        self._closing = None
