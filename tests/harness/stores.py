"""Trainers that publish to a store, and engines that mirror it, in the memory of this process."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

import numpy as np
import torch

from tandem.refit.adapters.catalogue import ModelShape
from tandem.refit.adapters.deployment import HostNames, ParallelDeployment
from tandem.refit.digests.comparison import DigestVerdict, compare
from tandem.refit.layout import Layout
from tandem.refit.store.mirror import StoreMirror
from tandem.refit.store.objects import ObjectStore
from tandem.refit.store.published import plan_with_store
from tandem.refit.store.publisher import StoreAccess, StorePublisher
from tandem.refit.weights import Weights

KEY, RUN = b"k" * 32, "run"
GUARD_S = 180.0
Tensors = dict[str, torch.Tensor]


def await_fact(is_so: Callable[[], bool], describe: Callable[[], object]) -> None:
    """Return once something is so; `describe` says what is there instead."""
    until = time.monotonic() + GUARD_S
    while not is_so():
        assert time.monotonic() < until, f"waited in vain: {describe()}"
        time.sleep(0.005)


def fill(layout: Layout, storages: Mapping[str, torch.Tensor], values: Tensors) -> None:
    """Write a trainer's slices of global tensors."""
    for row in range(len(layout.pieces)):
        tensor, piece = layout.tensors[layout.pieces.tensor_P[row]], layout.piece(row)
        dtype: torch.dtype = getattr(torch, tensor.dtype)
        flat = storages[piece.parameter].view(dtype)
        strides = [stride // dtype.itemsize for stride in piece.strides]
        place = flat.as_strided(piece.box.shape, strides, piece.offset // dtype.itemsize)
        place.copy_(values[tensor.name][piece.box.region])


class StoreRefit:
    """A model's trainers and engines with a store between them."""

    def __init__(
        self,
        url: str,
        model: ModelShape,
        trainers: ParallelDeployment,
        engines: ParallelDeployment,
        wanted: ModelShape | None = None,
        *,
        whole_every: int = 4,
    ) -> None:
        """Let all values be random; nothing is published yet."""
        self.random = torch.Generator().manual_seed(0)
        self.access = StoreAccess(ObjectStore(url), KEY, RUN)
        self.values: Tensors = {each.name: torch.randn(each.shape, generator=self.random) for each in model.tensors}
        hosts = [HostNames(name, per_host=8, has_gpus=False) for name in ("trainers", "engines")]
        self.sources = {f"trainer-{rank}": each for rank, each in enumerate(trainers.layouts(model, hosts[0]))}
        self.wanted = {f"rollout-{rank}": each for rank, each in enumerate(engines.layouts(wanted or model, hosts[1]))}
        self.plan = plan_with_store(self.sources, self.wanted, allow_alias=False, alias_frozen=False)
        self.said: list[str] = []
        self.trainers = {name: self._weights(each) for name, each in self.sources.items()}
        self.publishers: dict[str, StorePublisher] = {}
        for name, weights in self.trainers.items():
            weights.install([self.plan.programs[name]])
            self.publishers[name] = StorePublisher(self.access, whole_every, self.said.append)
            verification = self.plan.programs[name].verification
            self.publishers[name].bind(name, self.sources[name], weights.live, verification)
        self.mirrors: dict[str, StoreMirror] = {}
        self.engines: dict[str, Weights] = {}
        for name in self.wanted:
            self.start_engine(name)

    def start_engine(self, name: str) -> None:
        """Start an engine, in place of one of the name."""
        if name in self.mirrors:
            self.mirrors[name].close()
            self.engines[name].close()
        self.engines[name] = self._weights(self.wanted[name])
        self.mirrors[name] = StoreMirror(self.access, name, lambda: None, self.said.append)
        self.engines[name].install(self.mirrors[name].redirect([self.plan.programs[name]]))

    def train(self, share: float = 1.0) -> None:
        """Change this share of all elements."""
        for name, values in self.values.items():
            changes = torch.rand(values.shape, generator=self.random) < share
            self.values[name] = torch.where(changes, torch.randn(values.shape, generator=self.random), values)

    def publish(self, version: int) -> None:
        for name, weights in self.trainers.items():
            fill(self.sources[name], weights.storages, self.values)
            self.publishers[name].publish(version)

    def await_written(self) -> None:
        for publisher in self.publishers.values():
            await_fact(publisher.is_idle, lambda: self.said)

    def take(self, version: int, *engines: str) -> None:
        """Have engines take a version, as soon as their mirrors have it."""
        for name in engines or self.engines:
            self.mirrors[name].want(version)
        for name in engines or self.engines:
            mirror = self.mirrors[name]
            await_fact(
                partial(mirror.is_held, version), lambda: (self.said, *(m.trouble for m in self.mirrors.values()))
            )
            with mirror.lock:
                counted = self.engines[name].apply(version, 60.0, (), None)
            assert counted, "bytes are counted by link"
            mirror.settle()

    def verdict(self) -> DigestVerdict:
        """Compare the digests of both sides, as the refit service does."""
        held = {name: (self.sources[name], self._digests(weights)) for name, weights in self.trainers.items()}
        parts = {name: (self.plan.received[name], self._digests(weights)) for name, weights in self.engines.items()}
        return compare(held, {"rollout": parts})

    def objects(self) -> list[str]:
        objects = self.access.objects
        return sorted(path.removeprefix(f"{objects._root}/") for path in objects._call("find", objects._root))

    def close(self) -> None:
        for mirror in self.mirrors.values():
            mirror.close()
        for publisher in self.publishers.values():
            publisher.close()

    @staticmethod
    def _digests(weights: Weights) -> object:
        (digests,) = weights.digest_task(None).results()
        return digests

    @staticmethod
    def _weights(layout: Layout) -> Weights:
        storages = {
            storage.name: torch.from_numpy(np.full(storage.num_bytes, 7, np.uint8)) for storage in layout.storages
        }
        return Weights(layout, storages)


def linked_folder(store: Path) -> Path:
    """Make `store` a link to a folder, for `failing`."""
    contents = store.with_name(f"{store.name}-contents")
    contents.mkdir()
    store.symlink_to(contents)
    return store


@contextlib.contextmanager
def failing(store: Path) -> Iterator[None]:
    """Have a file in the place of a `linked_folder` fail every call.

    The place is never empty: a writer that finds nothing there makes a folder of its own.
    """
    contents, other = store.readlink(), store.with_name(f"{store.name}-other")
    other.write_text("not a folder")
    other.replace(store)
    yield
    other.symlink_to(contents)
    other.replace(store)


@contextlib.contextmanager
def through_folder(folder: Path, *arguments: object, **options: object) -> Iterator[StoreRefit]:
    """Yield trainers and engines around a folder."""
    refit = StoreRefit(f"file://{folder}", *arguments, **options)  # type: ignore[arg-type]
    try:
        yield refit
    finally:
        refit.close()
