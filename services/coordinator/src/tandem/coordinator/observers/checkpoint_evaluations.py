"""Evaluation during training (``eval.during_training``): each checkpoint is scored as later steps run.

A process of its own, `tandem.coordinator.evaluation.follower`, takes one checkpoint after another, and evaluates it as
``coordinator eval`` would: with trainers, refit and engines of its own, and none of the run's. It leaves a file for
each, `step_N.json` in the folder `evaluation` of the run. What is here reads these files, adds the metrics to the
journal under the step of the checkpoint, whatever step the run has reached by then, and ranks the checkpoint. The run
ends when all have been evaluated; an interrupted one continues with it when it is resumed.

Nothing here can end the run: a process that dies is started again a few times, a checkpoint that cannot be evaluated is
reported, and ranks below those that were.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from tandem.common.errors import RunFolderError
from tandem.common.files import replace_file
from tandem.config import Config, config_from_json, config_to_json
from tandem.coordinator.observers.observer import ReportingObserver
from tandem.coordinator.processes.registry import ProcessRegistry
from tandem.coordinator.scheduler import Scheduler
from tandem.coordinator.scheduler.events import FinishRun
from tandem.launch.helper_process import HelperProcess
from tandem.launch.preparing.beginning import Say
from tandem.observe.run_folder.checkpoints import CheckpointFolder, LateMetrics
from tandem.observe.run_folder.curves import CurvesFile
from tandem.observe.run_folder.journal import StepRecord
from tandem.observe.run_folder.journal_writer import Journal
from tandem.samples import manifest

FOLDER = "evaluation"
"""Folder of it all in the run folder."""
_ORDER = "order.json"
_POLL_S = 0.2
_LOOK_S = 5.0
"""Pause between looks at whether the process is stopped, or stuck."""
_END_S = 10.0
"""Time for the process to end its engines, before it is killed."""


class FollowerOrder(msgspec.Struct, frozen=True, kw_only=True):
    """The order of the process: the content of ``order.json``."""

    source: str
    """Configuration file of the run, for errors, and for custom code that lies next to it."""
    config_json: str
    """Resolved configuration of the run."""


class CheckpointEvaluation(msgspec.Struct, frozen=True, kw_only=True):
    """The evaluation of one checkpoint: the content of ``step_N.json``."""

    step: int
    checkpoint: str
    """Digest of the checkpoint's manifest, so that no other checkpoint of this step is taken for it."""
    seconds: float
    metrics: dict[str, float]
    """Metrics as validation names them."""
    error: str = ""
    """Why there are none; empty if there are."""


def read_order(run: Path) -> tuple[FollowerOrder, Config]:
    """Return the order in a run folder, and its configuration."""
    order = msgspec.json.decode((run / FOLDER / _ORDER).read_bytes(), type=FollowerOrder)
    return order, config_from_json(order.config_json.encode())


def file_of(run: Path, step: int) -> Path:
    """Return the file with the evaluation of a step's checkpoint."""
    return run / FOLDER / f"step_{step}.json"


def write_evaluation(run: Path, evaluation: CheckpointEvaluation) -> None:
    """Write an evaluation, whole or not at all."""
    replace_file(file_of(run, evaluation.step), msgspec.json.encode(evaluation))


def read_evaluation(run: Path, step: int) -> CheckpointEvaluation | None:
    """Return the evaluation of a step's checkpoint; None if there is none, or it is unreadable."""
    try:
        return msgspec.json.decode(file_of(run, step).read_bytes(), type=CheckpointEvaluation)
    except (OSError, msgspec.MsgspecError):
        return None


def digest_of(checkpoint: Path) -> str:
    """Return the digest of a checkpoint's manifest. Raise `OSError` if it has none."""
    return manifest.digest_of((checkpoint / manifest.NAME).read_bytes())


class FollowerProcess:
    """The process that evaluates. It ends with this one, however that ends, and all that it has started with it."""

    def __init__(self, run: Path, gpus: tuple[int, ...] | None) -> None:
        self._run, self._gpus = run, gpus
        self._ends = False
        log = run / "logs" / "evaluation.log"
        self._helper = HelperProcess(
            "the evaluation of checkpoints", log, self._start, ": evaluate them by coordinator eval"
        )
        self.wake, self.kill = self._helper.wake, self._helper.kill

    @property
    def is_running(self) -> bool:
        """Whether it runs, or may be started again."""
        return self._helper.process is not None

    def end_after_all(self) -> None:
        """Have it end by itself, once every checkpoint has been evaluated."""
        self._ends = True
        self._hang_up(self._helper.process)

    def death(self) -> str:
        """Return how it died, and start it again; empty while it runs, when it has ended in order, and when it is dead.

        One that dies often stays dead.
        """
        process = self._helper.process
        if process is None or (code := process.poll()) is None:
            return ""
        self._hang_up(process)
        if code == 0 and self._ends:
            self._helper.process = None
            return ""
        return self._helper.death()

    def close(self) -> None:
        """End it now."""
        process = self._helper.process
        self._helper.end(signal.SIGTERM, _END_S)
        self._hang_up(process)

    def _start(self, log: BinaryIO) -> subprocess.Popen[bytes]:
        environment = dict(os.environ)
        if self._gpus is not None:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, self._gpus))
        process = subprocess.Popen(
            [sys.executable, "-m", "tandem.coordinator.evaluation.follower", str(self._run), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            env=environment,
            process_group=0,  # Ctrl-C in a terminal is for the coordinator
        )
        if self._ends:
            self._hang_up(process)
        return process

    @staticmethod
    def _hang_up(process: subprocess.Popen[bytes] | None) -> None:
        """Close its standard input: no more checkpoints will come."""
        if process is not None and process.stdin is not None:
            with contextlib.suppress(OSError):  # it has just died, which `death` finds
                process.stdin.close()


class CheckpointEvaluations(ReportingObserver):
    """The evaluations of a run's checkpoints: takes them to the journal, and has the process run until all are in."""

    def __init__(self, source: str, config: Config, journal: Journal, say: Say, limit_s: float) -> None:
        """Start the process; evaluations of earlier coordinators count, if their checkpoints do.

        One that evaluates nothing for `limit_s` is killed.
        """
        super().__init__()
        self._journal, self._say, self._run = journal, say, journal.folder
        self._metric_name = config.checkpointing.metric_name
        self.late_metrics = LateMetrics(journal.values_of(self._metric_name))
        self._amended: Callable[[StepRecord], None] = self._amend_curves
        self._is_full = False
        self._limit_s = limit_s
        self._taken_at = time.monotonic()
        """When the last evaluation was taken, or there was none to wait for."""
        self._looked_after_at = self._taken_at
        self._checkpoints = CheckpointFolder(
            Path(config.checkpointing.checkpoint_dir),
            keep_top_k=config.checkpointing.keep_top_k,
            higher_is_better=config.checkpointing.higher_is_better,
            run_id=journal.run_id,
            late_metrics=self.late_metrics,
        )
        order = FollowerOrder(source=source, config_json=config_to_json(config).decode())
        try:
            (self._run / FOLDER).mkdir(exist_ok=True)
            replace_file(self._run / FOLDER / _ORDER, msgspec.json.encode(order))
            for step in self._list_waiting():
                evaluation = read_evaluation(self._run, step)
                if evaluation is not None and evaluation.error:  # try again
                    file_of(self._run, step).unlink()
            self._process = FollowerProcess(self._run, config.eval.gpus)
        except OSError as error:
            raise RunFolderError(f"cannot evaluate in {self._run / FOLDER}: {error.strerror}") from error

    @contextlib.contextmanager
    def telling(self, amended: Callable[[StepRecord], None]) -> Iterator[None]:
        """Tell of steps that get metrics by a function, in place of writing the run's curves."""
        self._amended = amended
        last = self._journal.last_step() or 0  # a run that goes back to an earlier step does later ones again
        self.late_metrics.metrics = {step: m for step, m in self.late_metrics.metrics.items() if step <= last}
        try:
            yield
        finally:
            self._amended = self._amend_curves

    def show(self, scheduler: Scheduler, registry: ProcessRegistry) -> None:
        """Take what has been evaluated since."""
        self._look()

    def wait_after(self, carry_out: Callable[[], FinishRun]) -> FinishRun:
        """Carry out a run, and if it finishes wait for the evaluations of all of its checkpoints."""
        finish = carry_out()
        if finish.outcome != "finished":
            return finish
        self._look()
        if waiting := self._list_waiting():
            num = f"{len(waiting)} checkpoint{'s are' if len(waiting) > 1 else ' is'}"
            self._say(f"the run is done; {num} still to be evaluated")
        self._process.end_after_all()
        while self._process.is_running:
            time.sleep(_POLL_S)
            self._look()
            self._print_news()
        self._look()
        self._print_news()
        if waiting := self._list_waiting():
            self._say(f"not evaluated: {len(waiting)} of the checkpoints; --resume tries again")
        self._checkpoints.prune(newest=max(self._checkpoints.steps(), default=0))
        return finish

    def end(self) -> None:
        """End the process."""
        self._process.close()

    def _list_waiting(self) -> list[int]:
        return [step for step in self._checkpoints.steps() if step not in self.late_metrics.metrics]

    def _print_news(self) -> None:
        for line in self.take_news():
            self._say(line)

    def _look(self) -> None:
        """Take evaluations to the journal, and look after the process."""
        last = self._journal.last_step()
        waiting = self._list_waiting()
        for step in waiting:
            if last is not None and step <= last and (evaluation := read_evaluation(self._run, step)) is not None:
                self._take(evaluation)
        self._look_after(time.monotonic(), is_waiting=bool(waiting))
        if line := self._process.death():
            self.news.append(line)
        self.late_metrics.are_expected = self._process.is_running

    def _look_after(self, now: float, *, is_waiting: bool) -> None:
        """Wake a process that was stopped, and kill one that takes longer than its own deadlines allow.

        `is_waiting` says whether there was a checkpoint to evaluate.
        """
        if not is_waiting:
            self._taken_at = now
        if now - self._looked_after_at < _LOOK_S:
            return
        self._looked_after_at = now
        self._process.wake()
        if now - self._taken_at > self._limit_s:
            self.news.append(f"no checkpoint was evaluated for {self._limit_s:.0f} s: the process that does is killed")
            self._process.kill()
            self._taken_at = now

    def _take(self, evaluation: CheckpointEvaluation) -> None:
        step = evaluation.step
        try:
            if digest_of(self._checkpoints.folder_of(step)) != evaluation.checkpoint:
                return  # of the step before it was repeated: the process evaluates it again
        except OSError:
            return
        text = f"step {step}: the checkpoint {_describe(evaluation)}"
        try:
            self._journal.record_late(step, evaluation.metrics, text)
        except RunFolderError as error:
            if not self._is_full:
                self.news.append(f"an evaluation is not in the journal yet, and is tried again: {error}")
            self._is_full = True
            return
        self._is_full = False
        self._taken_at = time.monotonic()
        self.late_metrics.metrics[step] = evaluation.metrics.get(self._metric_name)
        self.news.append(text)
        self._amended(self._journal.step(step))

    def _amend_curves(self, record: StepRecord) -> None:
        with contextlib.suppress(OSError):  # they are a copy of the journal's
            curves = CurvesFile(self._run, self._journal.steps())
            try:
                curves.amend(record)
            finally:
                curves.close()


def _describe(evaluation: CheckpointEvaluation) -> str:
    if evaluation.error:
        return f"could not be evaluated: {evaluation.error}"
    shown = {"val_accuracy": "held-out accuracy", "val_reward": "held-out reward"}
    parts = [f"{words} {evaluation.metrics[name]:.3f}" for name, words in shown.items() if name in evaluation.metrics]
    return f"has {', '.join(parts)} (evaluated in {evaluation.seconds:.0f} s)"
