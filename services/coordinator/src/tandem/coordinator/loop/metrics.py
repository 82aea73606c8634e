"""A step's metrics and seconds, gathered from replies until the step is committed."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping
from typing import TypeVar

import msgspec

from tandem.common.messages import DigestsReported, Evaluated, Generated, MemoryUse, Refitted, Trained

Number = TypeVar("Number", int, float)

_OF_OTHERS = {
    "values": "value_inference",
    "value_training": "value_training",
    "teacher_logprobs": "teacher_logprob_inference",
}
"""A trainer's seconds for a value model or a teacher, and their names beside those of NeMo-RL's table."""


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
        """Peak bytes of a process of a kind in a phase, named ``training_engine``."""
        self._compute_s: dict[int, float] = {}
        """Seconds of each trainer rank's own work, and below of its waits."""
        self._waited_s: dict[int, float] = {}
        self._queued_s: dict[int, float] = {}
        self._gpus: dict[str, list[float]] = {}
        """GPU readings of processes, named ``gpu_power_w_trainer``."""

    def trained(self, process: str, reply: Trained) -> None:
        """Add a rank's training step; the slowest rank counts."""
        self.metrics.update(reply.metrics)
        if process not in self._without_policy:  # one with another model has other work to do
            rank = int(process.rpartition("-")[2])
            self._compute_s[rank], self._waited_s[rank] = reply.compute_s, reply.waited_s
            self._queued_s[rank] = reply.queued_s
        _keep_maxima(self._training_seconds, reply.seconds)
        self._note_memory("training", "generation", "trainer", reply.memory)
        if reply.gpus:
            self._note_gpus("trainer", reply.gpus)

    def evaluated(self, reply: Evaluated) -> None:
        """Add the loss on validation data."""
        self.metrics.update({f"val_{name}": value for name, value in reply.metrics.items()})

    def generated(self, reply: Generated) -> None:
        """Add an engine's finished prompts; only training samples count in the breakdown."""
        if not reply.num_tokens:  # they come from disk
            return
        self._note_memory("generation", "training", "engine", reply.memory)
        if reply.gpus:
            self._note_gpus("engine", reply.gpus)
        if reply.purpose == "train":
            self._num_generated_tokens += reply.num_tokens
            self._rewards_s = max(self._rewards_s, reply.seconds.get("rewards", 0.0))

    def refitted(self, process: str, reply: Refitted) -> None:
        """Add the memory that a refit took; `RefitMetrics` keeps the rest."""
        kind = "trainer" if process.startswith("trainer") else "engine"
        _keep_maxima(self._memory, {f"refit_{kind}": reply.memory.peak})

    def _note_memory(self, works: str, waits: str, kind: str, use: MemoryUse) -> None:
        """Add the memory of a process that works in one phase, and in another waits with what it holds."""
        _keep_maxima(self._memory, {f"{works}_{kind}": use.peak, f"{waits}_{kind}": use.held})
        if use.reserved:
            _keep_maxima(self._memory, {f"{works}_{kind}_reserved": use.reserved})

    def _note_gpus(self, kind: str, gpus: Mapping[str, float]) -> None:
        for name, value in gpus.items():
            self._gpus.setdefault(f"gpu_{name}_{kind}", []).append(value)

    def breakdown(self, phases: Mapping[str, float]) -> dict[str, float]:
        """Return the step's seconds by the names of NeMo-RL's published table.

        `phases` are the scheduler's wall seconds by phase. ``training`` there is all time between the batch and the new
        weights. Separately computed log-probabilities, and the time of a value model or a teacher, are taken out of it,
        so that the parts add up.
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
            if seconds.get("generation") and not self._is_asynchronous:  # else it is the trainers' wait for it
                self.metrics["generation_tokens_per_s"] = self._num_generated_tokens / seconds["generation"]
        else:
            self._memory.pop("generation_trainer", None)  # no process waits for generation
        self.metrics |= {name: sum(values) / len(values) for name, values in self._gpus.items()}
        self.metrics |= {f"memory_{name}_gb": num_bytes / 1e9 for name, num_bytes in self._memory.items()}
        self.metrics |= self._of_ranks()
        return seconds

    def _of_ranks(self) -> dict[str, float]:
        """Return the metrics that tell a slow trainer rank from the others, and from a busy machine."""
        slowest = max(self._compute_s, key=self._compute_s.__getitem__, default=0)
        own_s, queued_s = self._compute_s.get(slowest, 0.0), self._queued_s.get(slowest, 0.0)
        busy = {"trainer_queued_per_s": min(1.0, queued_s / own_s)} if queued_s and own_s else {}
        if len(self._compute_s) < 2:
            return busy
        return busy | {
            "slowest_trainer": slowest,
            "trainer_compute_max_s": self._compute_s[slowest],
            "trainer_compute_median_s": statistics.median_low(self._compute_s.values()),  # of two ranks, the faster
            "trainer_compute_min_s": min(self._compute_s.values()),
            "trainer_waited_max_s": max(self._waited_s.values()),
            "trainer_waited_min_s": min(self._waited_s.values()),
        }


class RefitMetrics(msgspec.Struct):
    """Measurements of a refit, until it is recorded."""

    num_bytes: dict[str, int] = {}
    """Bytes on each link, named ``trainer-0>rollout-1``; a stream is counted at both ends, and is one link."""
    seconds: dict[str, float] = {}
    """Seconds of the slowest process, by phase: ``copy`` and ``digest``."""

    def refitted(self, reply: Refitted) -> None:
        """Add a process's finished transfer."""
        self.num_bytes |= reply.num_bytes
        _keep_maxima(self.seconds, {"copy": reply.seconds})

    def verified(self, reply: DigestsReported) -> None:
        """Add a process's computed digests."""
        _keep_maxima(self.seconds, {"digest": reply.seconds})


def _keep_maxima(into: dict[str, Number], values: Mapping[str, Number]) -> None:
    for name, value in values.items():
        into[name] = max(into.get(name, value), value)
