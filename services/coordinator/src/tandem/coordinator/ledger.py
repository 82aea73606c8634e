"""What is known of the step in progress: metrics and seconds, gathered from every reply until the step is committed."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from tandem.common.messages import Evaluated, Generated, Refitted, Trained


class EngineRefit(msgspec.Struct, frozen=True, kw_only=True):
    """One engine's part in a refit."""

    num_bytes: int
    seconds: float
    digest: int


class StepLedger:
    """Metrics and seconds of one step."""

    def __init__(self) -> None:
        self.metrics: dict[str, float] = {}
        self.refits: dict[str, EngineRefit] = {}
        """By engine."""
        self._training_seconds: dict[str, float] = {}
        self._rewards_s = 0.0
        self._num_generated_tokens = 0

    def trained(self, reply: Trained) -> None:
        """Note a rank's training step; the slowest rank is the one that counts."""
        self.metrics.update(reply.metrics)
        _keep_maxima(self._training_seconds, reply.seconds)

    def evaluated(self, reply: Evaluated) -> None:
        """Note the loss on validation data."""
        self.metrics.update({f"val_{name}": value for name, value in reply.metrics.items()})

    def generated(self, reply: Generated) -> None:
        """Note that an engine finished its prompts; only training samples count in the breakdown."""
        if reply.purpose == "train":
            self._num_generated_tokens += reply.num_tokens
            self._rewards_s = max(self._rewards_s, reply.seconds.get("rewards", 0.0))

    def refitted(self, engine: str, reply: Refitted) -> None:
        """Note an engine's refit."""
        self.refits[engine] = EngineRefit(num_bytes=reply.num_bytes, seconds=reply.seconds, digest=reply.digest)

    def breakdown(self, phases: Mapping[str, float]) -> dict[str, float]:
        """Return the step's seconds by the names of NeMo-RL's published table.

        `phases` are wall seconds by phase as the plan saw them. ``training`` there holds everything between the batch
        and the new weights; log-probabilities that were computed apart are taken out of it, so that the parts add up.
        """
        seconds = dict(phases)
        training = seconds.pop("training", None)
        if training is not None:
            logprobs = self._training_seconds.get("logprobs", 0.0) + self._training_seconds.get(
                "reference_logprobs", 0.0
            )
            seconds["get_logprobs"] = logprobs
            seconds["policy_training"] = training - logprobs
        if self._num_generated_tokens:
            self.metrics["tokens_per_s"] = self._num_generated_tokens / seconds["total"]
            self.metrics["generation_tokens_per_s"] = self._num_generated_tokens / max(seconds["generation"], 1e-9)
        return seconds


def _keep_maxima(into: dict[str, float], seconds: Mapping[str, float]) -> None:
    for name, value in seconds.items():
        into[name] = max(into.get(name, 0.0), value)
