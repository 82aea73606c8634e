"""Places for samples in the engines: when a sample may begin, and of which version it has to be.

`WeightPlaces` are those of engines that hold the weights of one model. A sample of fixed weights begins when engines
hold them. Otherwise it waits, with others of its weights, for the answer to a `RecallWeights`. While there is one,
samples of the weights that engines hold now wait in their turn.

`PlacesApart` are those of engines that hold the adapters of several models. A sample begins at once, and names the
version that makes it. An engine that lacks this version says so, and then it is brought back. Each model has an equal
share of the samples that engines take at a time.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Protocol

import msgspec

from tandem.serving.tinker import calls
from tandem.serving.tinker.sampling import MissingVersion, SamplingEngines, VersionedSamples

_LOOK_S = 0.2
_MOST_AT_ONCE = 2048
"""Samples asked of engines at a time, of all models: half of what one engine takes."""

Ask = Callable[[dict[str, Any]], Awaitable[VersionedSamples]]
"""A way to ask engines. Raises `NoAnswer`, and `CallFailed` if a sample is of another version than it has to be."""
Put = Callable[[calls.Call, Callable[[calls.Answer | calls.CallFailed], None], int, int], None]
"""A way to put a call on the desk, for a set, in a turn."""


class LatestWeights(msgspec.Struct, frozen=True):
    """The weights that a model has published last, at any time."""

    number: int
    """The model's."""
    model_id: str


class SamplingSession:
    """A sampling session."""

    def __init__(
        self, sampler_id: str, owner: str, attempt: int, weights: calls.PublishedSet | LatestWeights, path: str | None
    ) -> None:
        self.sampler_id = sampler_id
        self.owner = owner
        self.attempt = attempt
        self.weights = weights
        """Published weights, or whichever a model has published last."""
        self.path = path

    def number_in(self, desk: calls.CallDesk) -> int:
        """Return the set of its weights."""
        if isinstance(self.weights, calls.PublishedSet):
            return self.weights.number
        return desk.latest.get(self.weights.number, desk.base)

    def check(self, desk: calls.CallDesk) -> None:
        """Raise `CallFailed` if it is over."""
        if self.attempt != desk.attempt:
            reason = f"sampling session {self.sampler_id}: its weights are lost, because a trainer was"
            raise calls.CallFailed(reason, is_users=True)
        if isinstance(self.weights, LatestWeights):
            if desk.model_ids.get(self.weights.number) != self.weights.model_id:
                reason = f"sampling session {self.sampler_id}: another model is in the place of its own"
                raise calls.CallFailed(reason, is_users=True)
            return
        number, version = self.weights.number, self.weights.version
        is_renewed = desk.renewed == number if desk.held is None else number in desk.held.renewed
        if version != desk.newest.get(number) or is_renewed:
            raise calls.CallFailed(
                f"sampling session {self.sampler_id}: {describe_replaced(desk, version)}", is_users=True
            )


def describe_replaced(desk: calls.CallDesk, version: int) -> str:
    """Describe why published weights cannot be sampled from any more."""
    count = desk.most_published
    versions = "one published version" if count == 1 else f"{count} published versions"
    return (
        f"the weights of version {version} are not kept any more: newer ones have taken their place, and the server "
        f"keeps {versions} of a model, those that were used last (coordinator tinker --versions)"
    )


class AnyPlaces(Protocol):
    """Places for samples."""

    def place(self, sampler: SamplingSession, num_samples: int) -> Any:
        """Return a context in which the samples may be made, with the set of their weights and a way to ask for them.

        To enter it may take long. Raises `CallFailed`.
        """
        ...


def places_of(desk: calls.CallDesk, engines: SamplingEngines, put: Put) -> AnyPlaces:
    """Return places in the engines of a run."""
    return WeightPlaces(desk, engines, put) if desk.held is None else PlacesApart(desk, desk.held, engines, put)


class WeightPlaces:
    """Places in engines that hold the weights of one model."""

    def __init__(self, desk: calls.CallDesk, engines: SamplingEngines, put: Put) -> None:
        self._desk = desk
        self._engines = engines
        self._put = put
        self._recalls: dict[int, list[asyncio.Future[calls.Answer | calls.CallFailed]]] = {}
        """Samples that wait until engines hold a set, by its number."""

    @asynccontextmanager
    async def place(self, sampler: SamplingSession, num_samples: int) -> AsyncIterator[tuple[int, Ask]]:
        """Return a context; see `AnyPlaces`."""
        desk = self._desk
        desk.num_following += 1  # before the look, as below
        try:
            if self._may_follow(sampler):
                sampler.check(desk)
                yield desk.holding, self._engines.sample
                return
        finally:
            desk.num_following -= 1
        number = sampler.number_in(desk)
        desk.note_use(number)
        await self._wait_for(sampler, number)
        try:
            sampler.check(desk)
            yield number, partial(_sample_version, self._engines, desk.version)
        finally:
            desk.num_samples -= 1

    def _may_follow(self, sampler: SamplingSession) -> bool:
        """Tell whether samples may be made by what engines hold, also by newer weights that come meanwhile."""
        desk = self._desk
        is_of_newest = isinstance(sampler.weights, LatestWeights) and desk.most_models == 1
        return is_of_newest and desk.holding == sampler.number_in(desk) and not self._recalls

    async def _wait_for(self, sampler: SamplingSession, number: int) -> None:
        """Count a sample as in progress, once engines hold its weights, unless these are lost. Raises `CallFailed`."""
        desk = self._desk
        desk.num_samples += 1  # before the look: then nothing is published meanwhile
        if desk.holding == number and not desk.is_publishing and not self._recalls.keys() - {number}:
            return
        try:
            sampler.check(desk)
        except calls.CallFailed:
            desk.num_samples -= 1
            raise
        desk.num_samples -= 1
        if number not in self._recalls:
            self._recalls[number] = []
            self._put(calls.RecallWeights(), partial(self._finish_recall, number), number, calls.RECALLS)
        waiting: asyncio.Future[calls.Answer | calls.CallFailed] = asyncio.get_running_loop().create_future()
        self._recalls[number].append(waiting)
        answer = await waiting
        if isinstance(answer, calls.CallFailed):
            raise answer

    def _finish_recall(self, number: int, answer: calls.Answer | calls.CallFailed) -> None:
        """Let samples begin that have waited for their weights."""
        waiting = [future for future in self._recalls.pop(number) if not future.done()]  # others were given up
        if not isinstance(answer, calls.CallFailed):
            self._desk.num_samples += len(waiting)
            self._desk.is_reserved = False
        for future in waiting:
            future.set_result(answer)


class PlacesApart:
    """Places in engines that hold the adapters of several models."""

    def __init__(
        self, desk: calls.CallDesk, adapter_sets: calls.EngineAdapterSets, engines: SamplingEngines, put: Put
    ) -> None:
        self._desk = desk
        self._held = adapter_sets
        self._engines = engines
        self._put = put
        self._shares = EqualShares(max(1, _MOST_AT_ONCE // (desk.most_models + 1)))
        self._recalls: dict[int, asyncio.Future[calls.Answer | calls.CallFailed]] = {}
        """Recalls in progress, by the number of the set."""

    @asynccontextmanager
    async def place(self, sampler: SamplingSession, num_samples: int) -> AsyncIterator[tuple[int, Ask]]:
        """Return a context; see `AnyPlaces`."""
        number, is_fixed = sampler.number_in(self._desk), isinstance(sampler.weights, calls.PublishedSet)
        self._desk.note_use(number)
        async with self._shares.share(self._desk.model_of(number), num_samples):
            self._held.num_samples[number] += is_fixed  # before the look: then nothing newer is published meanwhile
            try:
                sampler.check(self._desk)
                yield number, partial(self._ask, sampler, number)
            finally:
                self._held.num_samples[number] -= is_fixed

    async def _ask(self, sampler: SamplingSession, number: int, question: dict[str, Any]) -> VersionedSamples:
        deadline = time.monotonic() + self._engines.timeout_s
        while True:
            versions = self._held.versions
            version = versions.get(number)
            if version is None:
                sampler.check(self._desk)
                raise calls.CallFailed(f"sampling session {sampler.sampler_id}: its weights are not there")
            try:
                sets = self._desk.base, *self._desk.latest.values()
                newest = [versions[number] for number in sets if number in versions]
                named = {"weight_version": version, "kept_versions": newest}
                samples = await _sample_version(self._engines, version, {**question, **named})
            except MissingVersion:
                if time.monotonic() > deadline:
                    raise
                if self._held.versions.get(number) == version:
                    await self._recall(number)
                if self._held.versions.get(number) == version:  # the engine is about to get it
                    await asyncio.sleep(_LOOK_S)
                continue
            if sampler.attempt != self._desk.attempt:  # versions have begun anew
                sampler.check(self._desk)
            return samples

    async def _recall(self, number: int) -> None:
        """Have all engines hold a set again. Raises `CallFailed`."""
        recall = self._recalls.get(number)
        if recall is None:
            self._recalls[number] = recall = asyncio.get_running_loop().create_future()
            self._put(calls.RecallWeights(), partial(self._finish_recall, number), number, calls.RECALLS)
        answer = await asyncio.shield(recall)
        if isinstance(answer, calls.CallFailed):
            raise answer

    def _finish_recall(self, number: int, answer: calls.Answer | calls.CallFailed) -> None:
        self._recalls.pop(number).set_result(answer)


class EqualShares:
    """Equal shares of what is done at a time; what is more waits, in its order."""

    def __init__(self, largest_share: int) -> None:
        """Something larger than `largest_share` has it alone."""
        self._most = largest_share
        self._taken: dict[int, int] = {}
        self._waiting: dict[int, deque[tuple[int, asyncio.Future[None]]]] = {}

    @asynccontextmanager
    async def share(self, number: int, count: int) -> AsyncIterator[None]:
        """Return a context in which `count` of the share of `number` are taken."""
        waiting = self._waiting.setdefault(number, deque())
        if waiting or not self._fits(number, count):
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            waiting.append((count, turn))
            try:
                await turn
            except asyncio.CancelledError:
                if not turn.cancelled():  # its turn had come just before
                    self._give_back(number, count)
                raise
        else:
            self._taken[number] = self._taken.get(number, 0) + count
        try:
            yield
        finally:
            self._give_back(number, count)

    def _give_back(self, number: int, count: int) -> None:
        self._taken[number] -= count
        self._go_on(number)

    def _fits(self, number: int, count: int) -> bool:
        num_taken = self._taken.get(number, 0)
        return not num_taken or num_taken + count <= self._most

    def _go_on(self, number: int) -> None:
        waiting = self._waiting[number]
        while waiting and (waiting[0][1].done() or self._fits(number, waiting[0][0])):
            count, turn = waiting.popleft()
            if not turn.done():  # else it was given up
                self._taken[number] = self._taken.get(number, 0) + count
                turn.set_result(None)


async def _sample_version(engines: SamplingEngines, version: int, question: dict[str, Any]) -> VersionedSamples:
    """Return samples of one version. Raises `CallFailed` if they are of another."""
    samples = await engines.sample(question)
    if samples.versions != [version]:
        raise calls.CallFailed(f"it was made by versions {samples.versions}, not by {version} alone")
    return samples
