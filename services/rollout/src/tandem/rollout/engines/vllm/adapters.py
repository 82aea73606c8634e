"""vLLM with the adapters of several versions over one base.

The workers hold them and add them (`tandem.rollout.engines.vllm.adapter_part`). Keys and values are found in the cache
by a number that each version gets when it comes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tandem.common.errors import RefitError
from tandem.config.schema.generation import VllmCfg
from tandem.refit.digests.comparison import Digests
from tandem.refit.digests.slices import ElementSampling
from tandem.refit.holder import RunningDigest
from tandem.refit.program import TransferProgram
from tandem.rollout.engine import EngineCompletion, SequenceRequest
from tandem.rollout.engines.adapters import SeveralVersions, version_of
from tandem.rollout.engines.vllm import insides
from tandem.rollout.engines.vllm.engine import FinishReason, NoNumber, RunningSequence, VllmEngine
from tandem.rollout.engines.vllm.insides import InProcessLlm
from tandem.rollout.engines.vllm.workers import EngineWorkers, WorkersDigest, WorkersInstalled


class AdapterWorkers(EngineWorkers):
    """The parts of an engine that hold the adapters of several versions."""

    def __init__(self, llm: InProcessLlm) -> None:
        super().__init__(llm)
        self.held: frozenset[int] = frozenset()
        """Versions that all workers hold."""
        self.lost: frozenset[int] = frozenset()
        """Versions that a worker has dropped by itself, for `AdaptersVllmEngine.step` to see."""

    def install(self, programs: Sequence[TransferProgram]) -> WorkersInstalled:
        """Bind the program of each worker, which then holds no version."""
        self.held = frozenset()
        return super().install(programs)

    def keep(self, version: int, dropped: Iterable[int]) -> None:
        """Have all workers copy the adapters of the version that has just come, and drop others."""
        self._find(self._llm.ask("keep", version, [*dropped]))

    def look(self) -> None:
        """Ask which versions are held: a worker drops one that has changed in its memory."""
        before = self.held
        self._find(self._llm.ask("list_versions"))
        self.lost |= before - self.held

    def wipe(self) -> None:
        """Have zeros in the place of what is cached and is no number."""
        self._llm.ask("wipe")

    def digest_task(self, sampling: ElementSampling | None) -> WorkersDigest:
        """Return a task that digests the newest version, and another one again."""
        return _AdaptersDigest(self._llm, sampling, self.look)

    def _find(self, versions_of_workers: Sequence[Sequence[int]]) -> None:
        self.held = frozenset.intersection(*map(frozenset, versions_of_workers))


class _AdaptersDigest(WorkersDigest):
    """A digest after which a version may be gone."""

    def __init__(self, llm: InProcessLlm, sampling: ElementSampling | None, look: Callable[[], None]) -> None:
        super().__init__(llm, sampling)
        self._look = look

    def results(self) -> tuple[Digests, ...]:
        """Return the digests of each worker."""
        digests = super().results()
        self._look()
        return digests


class AdaptersVllmEngine(SeveralVersions, VllmEngine):
    """`VllmEngine` with the adapters of several versions."""

    def __init__(self, *args: Any, num_sets: int, **kwargs: Any) -> None:
        """Take what `VllmEngine` takes, without weights of its own. `num_sets` versions are held.

        Raises `ModelError` and `ConfigError`.
        """
        self._numbers: dict[int, int] = {}
        """Number of each version, by which its keys and values are found; a version that comes again has another."""
        self._num_numbers = 0
        self._broken: set[int] = set()
        """Versions whose weights have just given something that is no number."""
        super().__init__(*args, num_sets=num_sets, **kwargs)

    def digest_task(self, sampling: ElementSampling | None) -> RunningDigest:
        """Return a task that digests the adapters in use, and those of another version."""
        return self._workers_of_sets.digest_task(sampling)

    def add_request(self, request: SequenceRequest) -> None:
        """Queue a request. Raises `VersionNotHeld` without its version, and `DataError` if it can make no token."""
        request = self._named(request)
        super().add_request(request)
        self._note(request)

    def step(self) -> list[EngineCompletion]:
        """Make one token for every running request; those of a version that gives no numbers end as aborted.

        All of them, since what they have cached is wiped: the memory of the cache goes to others, where attention would
        multiply what is no number by zero.

        Raises `RefitError` if the adapters of a running request have changed in memory.
        """
        workers = self._workers_of_sets
        if workers.lost:
            lost, workers.lost = workers.lost & {*map(version_of, self._requests())}, frozenset()
            if lost:
                raise RefitError(f"the adapters of version {min(lost)} are lost, by which requests are being made")
        completions = super().step()
        broken, self._broken = self._broken, set()
        if broken:
            ended = [number for number, each in self._sequences.items() if version_of(each.request) in broken]
            completions += [each for each in map(self.abort, ended) if each is not None]
            workers.wipe()
            for version in broken:
                self._number(version)
        return completions

    @property
    def _workers_of_sets(self) -> AdapterWorkers:
        assert isinstance(self._workers, AdapterWorkers), "as it was made"
        return self._workers

    def _make_workers(self) -> EngineWorkers:
        return AdapterWorkers(self._llm)

    def _arguments(self, model_folder: Path, settings: VllmCfg, extra: Mapping[str, Any]) -> dict[str, Any]:
        arguments = super()._arguments(model_folder, settings, extra)
        arguments["enforce_eager"] = True  # a graph would repeat the adapters of the step in which it was captured
        arguments["additional_config"] = {**arguments.get("additional_config", {}), insides.ADAPTERS: True}
        return arguments

    def _params(self, request: SequenceRequest) -> Any:
        params = super()._params(request)
        params.extra_args = {insides.VERSION: version_of(request)}
        return params

    def _cached_with(self, request: SequenceRequest) -> str:
        return f"adapters {self._numbers[version_of(request)]}"

    def _record(self, sequence: RunningSequence, output: Any, version: int) -> FinishReason | None:
        try:
            return super()._record(sequence, output, version_of(sequence.request))
        except NoNumber:
            self._broken.add(version_of(sequence.request))
            return "abort"

    def _take_weights(self) -> None:
        """Repack what came of the base; the versions that are held have their keys and values."""
        self._workers_of_sets.pack()

    def _list_versions(self) -> Collection[int]:
        return self._workers_of_sets.held

    def _keep(self, version: int, dropped: Iterable[int]) -> None:
        self._workers_of_sets.keep(version, dropped)
        versions = self._workers_of_sets.held
        self._numbers = {each: number for each, number in self._numbers.items() if each in versions}
        self._number(version)

    def _number(self, version: int) -> None:
        self._num_numbers += 1
        self._numbers[version] = self._num_numbers

    def _requests(self) -> Iterable[SequenceRequest]:
        return [sequence.request for sequence in self._sequences.values()]
