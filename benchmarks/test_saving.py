"""How long does saving a checkpoint hold training up?

A Qwen3 of 41M parameters in float32 with AdamW, one rank, one thread for training. In turns in one process: a save that
is written at once, as where memory has no room for a copy, and one that a thread writes while training goes on, as the
trainer does elsewhere. Measured is the time in which no step can start; beside it, the time until all is synced to the
disk that temporary folders lie on, and how many steps are done meanwhile.
"""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from measure import Turns, report
from one_trainer import make_batch, one_trainer
from pytest_benchmark.fixture import BenchmarkFixture
from smoke import IS_SMOKE

from tandem.config import Config
from tandem.samples.batch import build_given_table
from tandem.trainer import step
from tandem.trainer.backends.dtensor import DTensorBackend
from tandem.trainer.files import checkpoints

NUM_ROUNDS = 7
AT_ONCE, ASIDE = "written at once", "written aside"


@pytest.fixture
def config(tmp_path: Path) -> Iterator[Config]:
    """What this process trains."""
    with one_trainer(tmp_path / "model") as config:
        yield config


class Saving:
    """Saves between training steps."""

    def __init__(self, config: Config, folder: Path) -> None:
        self._config = config
        self._folder = folder
        self._batch = make_batch()
        self.backend = DTensorBackend(config, checkpoint=None)
        self.train()
        self.num_bytes = 0
        self.until_synced: list[float] = []
        self.num_steps: list[int] = []
        """Done while a thread wrote."""

    def train(self) -> None:
        """Take a step."""
        step.train(self.backend, build_given_table(self._batch), self._batch, self._config)

    def aside(self) -> float:
        """Return the seconds in which no step can start; then train until all is written."""
        begun = time.perf_counter()
        writing = self.backend.save(self._folder)
        held_s = time.perf_counter() - begun
        assert not writing.why_waited
        num_steps = 0
        while not writing.num_bytes.done():
            self.train()
            num_steps += 1
        self.until_synced.append(time.perf_counter() - begun)
        self.num_steps.append(num_steps)
        self.num_bytes = writing.num_bytes.result()
        shutil.rmtree(self._folder)
        return held_s

    def at_once(self) -> float:
        """Return the seconds that it takes as if memory had no room for a copy."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(checkpoints, "available_bytes", lambda: 0)
            begun = time.perf_counter()
            writing = self.backend.save(self._folder)
            held_s = time.perf_counter() - begun
        assert writing.why_waited
        assert writing.num_bytes.done()
        shutil.rmtree(self._folder)
        return held_s


def test_the_time_that_a_save_holds_training_up(benchmark: BenchmarkFixture, config: Config, tmp_path: Path) -> None:
    saving = Saving(config, tmp_path / "saved")
    turns = Turns({AT_ONCE: saving.at_once, ASIDE: saving.aside})
    turns.round()
    benchmark.pedantic(turns.round, rounds=NUM_ROUNDS, iterations=1)
    facts = {
        "parameters": saving.backend.num_parameters,
        "until synced, written aside": saving.until_synced[-NUM_ROUNDS:],
        "steps done while it is written": saving.num_steps[-NUM_ROUNDS:],
    }
    shares = report(
        benchmark,
        turns.last(NUM_ROUNDS),
        title=f"A checkpoint of {saving.num_bytes / 1e6:.0f} MB: no step can start for",
        num_bytes=saving.num_bytes,
        against=AT_ONCE,
        **facts,
    )
    print(f"written aside: synced after {statistics.median(saving.until_synced[-NUM_ROUNDS:]):.2f} s")
    assert IS_SMOKE or min(saving.num_steps) > 0
    assert IS_SMOKE or shares[ASIDE] > 2
