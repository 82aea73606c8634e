"""What does it cost to check a checkpoint while it is loaded?

A Qwen3 of 41M parameters in float32 with AdamW, one rank, one thread for training, and the files in the page cache,
where reading costs the least and checking the most. In turns in one process: building the trainer from a checkpoint
with a manifest, and from the same files without one, which are believed. A thread checks while others load, so beside
the seconds stand those of processors, which it takes from whatever else there is to do.
"""

from __future__ import annotations

import gc
import os
import shutil
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from measure import Turns, report, seconds_of
from one_trainer import make_batch, one_trainer
from pytest_benchmark.fixture import BenchmarkFixture
from smoke import IS_SMOKE, sized

from tandem.config import Config
from tandem.observe.run_folder.checkpoints import CheckpointFolder, CheckpointRecord
from tandem.samples import manifest
from tandem.samples.batch import build_given_table
from tandem.trainer import step
from tandem.trainer.backends.dtensor import DTensorBackend

NUM_ROUNDS = sized(5, 1, long=9)
CHECKED, BELIEVED = "checked", "believed"
MOST = 1.2
"""Seconds of processors with the check over those without."""


@pytest.fixture
def config(tmp_path: Path) -> Iterator[Config]:
    """What this process trains."""
    with one_trainer(tmp_path / "model") as config:
        yield config


def make_checkpoint(config: Config, folder: Path) -> Path:
    """Train a step and publish a checkpoint of it."""
    checkpoints = CheckpointFolder(folder, keep_top_k=None, higher_is_better=True)
    checkpoints.prepare()
    backend = DTensorBackend(config, checkpoint=None)
    batch = make_batch()
    step.train(backend, build_given_table(batch), batch, config)
    backend.save(Path(checkpoints.temporary_pattern.format(step=1))).num_bytes.result()
    backend.close()
    return checkpoints.publish(CheckpointRecord(step=1, version=1, metric_name="", metric=None, config_json="{}"))


class Loads:
    """Loads of one checkpoint."""

    def __init__(self, config: Config, checkpoint: Path) -> None:
        self._config, self._checkpoint = config, checkpoint
        self.processor_s: list[float] = []

    def __call__(self) -> float:
        """Return the seconds until a trainer is built."""
        gc.collect()
        begun, processor = time.perf_counter(), time.process_time()
        backend = DTensorBackend(self._config, checkpoint=self._checkpoint)
        seconds = time.perf_counter() - begun
        self.processor_s.append(time.process_time() - processor)
        backend.close()
        return seconds


def test_what_checking_a_checkpoint_costs(benchmark: BenchmarkFixture, config: Config, tmp_path: Path) -> None:
    checked = make_checkpoint(config, tmp_path / "checkpoints")
    believed = tmp_path / "believed"
    shutil.copytree(checked, believed, copy_function=os.link)
    (believed / manifest.NAME).unlink()
    ways = {CHECKED: Loads(config, checked), BELIEVED: Loads(config, believed)}
    turns = Turns(ways)
    turns.round()
    benchmark.pedantic(turns.round, rounds=NUM_ROUNDS, iterations=1)
    found = manifest.read(checked)
    assert found is not None
    files = found.files
    alone = min(seconds_of(lambda: manifest.check_tensors(checked, files)) for _ in range(NUM_ROUNDS))
    num_bytes = sum(record.size for record in files.values())
    processor_s = {name: statistics.median(way.processor_s[-NUM_ROUNDS:]) for name, way in ways.items()}
    report(
        benchmark,
        turns.last(NUM_ROUNDS),
        title=f"Building a trainer from a checkpoint of {num_bytes / 1e6:.0f} MB",
        num_bytes=num_bytes,
        against=BELIEVED,
        **{"seconds of the check alone, best": alone, "median seconds of processors": processor_s},
    )
    print(f"the check alone: {1e3 * alone:.0f} ms, {num_bytes / alone / 1e9:.1f} GB/s")
    more = processor_s[CHECKED] / processor_s[BELIEVED]
    print(
        f"seconds of processors: {processor_s[CHECKED]:.2f} and {processor_s[BELIEVED]:.2f}, {more:.3f} times as many"
    )
    assert IS_SMOKE or more < MOST
