"""Gather a step's metrics and seconds from replies, until the step is committed."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping
from typing import TypeVar

from tandem.common.messages import Attested, Evaluated, Generated, MemoryUse, Refitted, Trained

Number = TypeVar("Number", int, float)

_OF_OTHERS = {
    "values": "value_inference",
    "value_training": "value_training",
    "teacher_logprobs": "teacher_logprob_inference",
}
"""What a value model, or a teacher, takes of a trainer's time, and its name beside those of NeMo-RL's table."""


class StepMetrics:
    """Metrics and seconds of one step."""

    def __init__(self, *, is_asynchronous: bool = False, without_policy: Collection[str] = ()) -> None:
        """`is_asynchronous`: whether engines generate while trainers train. `without_policy`: trainers without one."""
        self.metrics: dict[str, float] = {}
        self._is_asynchronous = is_asynchronous
        self._without_policy = without_policy
        self._training_seconds: dict[str, float] = {}
        self._rewards_s = 0.0
        self._num_generated_tokens = 0
        self._memory: dict[str, int] = {}
        """Most bytes that a process of a kind had in a phase, named ``training_engine``."""
        self._compute_s: dict[int, float] = {}
        """What each trainer rank took for its own work, and below for its waits."""
        self._waited_s: dict[int, float] = {}
        self._gpus: dict[str, list[float]] = {}
        """What processes said of their GPUs, named ``gpu_power_w_trainer``."""

    def trained(self, member: str, reply: Trained) -> None:
        """Note a rank's training step; the slowest rank is the one that counts."""
        self.metrics.update(reply.metrics)
        if member not in self._without_policy:  # who holds another model has other work to do
            rank = int(member.rpartition("-")[2])
            self._compute_s[rank], self._waited_s[rank] = reply.compute_s, reply.waited_s
        _keep_maxima(self._training_seconds, reply.seconds)
        self._note_memory("training", "generation", "trainer", reply.memory)
        self._note_gpus("trainer", reply.gpus)

    def evaluated(self, reply: Evaluated) -> None:
        """Note the loss on validation data."""
        self.metrics.update({f"val_{name}": value for name, value in reply.metrics.items()})

    def generated(self, reply: Generated) -> None:
        """Note that an engine finished its prompts; only training samples count in the breakdown."""
        if not reply.num_tokens:  # they come from disk
            return
        self._note_memory("generation", "training", "engine", reply.memory)
        self._note_gpus("engine", reply.gpus)
        if reply.purpose == "train":
            self._num_generated_tokens += reply.num_tokens
            self._rewards_s = max(self._rewards_s, reply.seconds.get("rewards", 0.0))

    def refitted(self, member: str, reply: Refitted) -> None:
        """Note what memory a refit took; `RefitMetrics` keeps the rest."""
        kind = "trainer" if member.startswith("trainer") else "engine"
        _keep_maxima(self._memory, {f"refit_{kind}": reply.memory.peak})

    def _note_memory(self, works: str, waits: str, kind: str, use: MemoryUse) -> None:
        """Note the memory of a process that works in one phase, and waits in another with what it holds then."""
        _keep_maxima(self._memory, {f"{works}_{kind}": use.peak, f"{waits}_{kind}": use.held})

    def _note_gpus(self, kind: str, gpus: Mapping[str, float]) -> None:
        for name, value in gpus.items():
            self._gpus.setdefault(f"gpu_{name}_{kind}", []).append(value)

    def breakdown(self, phases: Mapping[str, float]) -> dict[str, float]:
        """Return the step's seconds by the names of NeMo-RL's published table.

        `phases` are wall seconds by phase as the scheduler saw them. ``training`` there holds all between the batch
        and the new weights; log-probabilities that were computed apart, and all that a value model or a teacher took,
        are taken out of it, so that the parts add up.
        """
        seconds = dict(phases)
        training = seconds.pop("training", None)
        if training is not None:
            spent = self._training_seconds
            logprobs = spent.get("logprobs", 0.0) + spent.get("reference_logprobs", 0.0)
            of_others = {phase: spent[name] for name, phase in _OF_OTHERS.items() if name in spent}
            seconds |= {"get_logprobs": logprobs, **of_others}
            seconds["policy_training"] = training - logprobs - sum(of_others.values())
        if self._num_generated_tokens:
            self.metrics["tokens_per_s"] = self._num_generated_tokens / seconds["total"]
            if seconds.get("generation") and not self._is_asynchronous:  # else it is the time trainers waited for it
                self.metrics["generation_tokens_per_s"] = self._num_generated_tokens / seconds["generation"]
        else:
            self._memory.pop("generation_trainer", None)  # there is no generation to wait for
        self.metrics |= {name: sum(values) / len(values) for name, values in self._gpus.items()}
        self.metrics |= {f"memory_{name}_gb": num_bytes / 1e9 for name, num_bytes in self._memory.items()}
        self.metrics |= self._of_ranks()
        return seconds

    def _of_ranks(self) -> dict[str, float]:
        """Return what tells a slow trainer rank from the others, however many there are; nothing of a single one."""
        if len(self._compute_s) < 2:
            return {}
        slowest = max(self._compute_s, key=lambda rank: self._compute_s[rank])
        return {
            "slowest_trainer": slowest,
            "trainer_compute_max_s": self._compute_s[slowest],
            "trainer_compute_median_s": statistics.median_low(self._compute_s.values()),  # of two ranks, the other
            "trainer_compute_min_s": min(self._compute_s.values()),
            "trainer_waited_max_s": max(self._waited_s.values()),
            "trainer_waited_min_s": min(self._waited_s.values()),
        }


class RefitMetrics:
    """What processes said of a refit, until it is recorded."""

    def __init__(self) -> None:
        self.num_bytes: dict[str, int] = {}
        """Counted on each link, named ``trainer-0>rollout-1``; a stream is counted at both ends, and is one link."""
        self.seconds: dict[str, float] = {}
        """Of the slowest process, by phase: ``copy`` and ``digest``."""

    def refitted(self, reply: Refitted) -> None:
        """Note that a process has received or sent all it should."""
        self.num_bytes |= reply.num_bytes
        _keep_maxima(self.seconds, {"copy": reply.seconds})

    def attested(self, reply: Attested) -> None:
        """Note that a process has computed its digests."""
        _keep_maxima(self.seconds, {"digest": reply.seconds})


def _keep_maxima(into: dict[str, Number], values: Mapping[str, Number]) -> None:
    for name, value in values.items():
        into[name] = max(into.get(name, value), value)
