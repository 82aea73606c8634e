"""An engine that gives the memory of its weights back while it sleeps, as vLLM does on a GPU: nobody reads it then."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from own_environments import Length
from rollout_harness import WAIT_S, Rollout

from tandem.common.messages import DigestsReported, Refit, ReportDigests
from tandem.refit.digests import kernels
from tandem.rollout.engines import transformers
from tandem.rollout.engines.transformers import TransformersEngine

MODEL = {"hidden_size": 32, "num_hidden_layers": 1}


class Sleeper(TransformersEngine):
    """What is read of its weights while it sleeps is nonsense; on a GPU it would be an illegal access."""

    weights_sleep = True
    kept: tuple[torch.Tensor, ...] = ()

    def storages(self) -> list[torch.Tensor]:
        return [*self._weights.storages.values()]  # type: ignore[attr-defined]

    def sleep(self) -> None:
        super().sleep()
        if not self.kept:
            self.kept = tuple(storage.clone() for storage in self.storages())
            for storage in self.storages():
                storage.zero_()

    def wake(self) -> None:
        super().wake()
        for storage, kept in zip(self.storages(), self.kept, strict=bool(self.kept)):
            storage.copy_(kept)
        self.kept = ()


@pytest.fixture
def rollout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rollout]:
    monkeypatch.setattr(transformers, "TransformersEngine", Sleeper)
    monkeypatch.setattr(kernels, "cpu_bytes_per_s", lambda: 1.0)  # so that it is not begun before the answers are there
    made = Rollout(tmp_path, f"{Length.__module__}.{Length.__qualname__}", model=MODEL)
    yield made
    made.service.close()


def test_what_is_digested_is_finished_before_they_go(rollout: Rollout) -> None:
    (expected,) = rollout.service.parts.weight_client.digests(0)
    rollout.command(ReportDigests(command_id=next(rollout._command_ids), deadline_s=WAIT_S, version=0))
    rollout.start(rollout.group(0, range(2)), max_new_tokens=3)
    rollout.finish()
    engine = rollout.service.parts.engine
    assert isinstance(engine, Sleeper)
    assert engine.kept, "it sleeps"
    (verified,) = [message for message, _ in rollout.context.sent if isinstance(message, DigestsReported)]
    assert verified.digests == (expected,)
    assert not rollout.context.errors


def test_it_wakes_to_pass_them_on(rollout: Rollout) -> None:
    rollout.run(rollout.group(0, range(2)), max_new_tokens=3)
    engine = rollout.service.parts.engine
    assert isinstance(engine, Sleeper)
    assert engine.kept, "it sleeps"
    refit = Refit(command_id=next(rollout._command_ids), deadline_s=WAIT_S, version=0, only=("rollout-1",))
    rollout.command(refit)
    assert not engine.kept
    assert any(bool(storage.any()) for storage in engine.storages())
