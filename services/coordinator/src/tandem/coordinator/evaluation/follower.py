"""The process that evaluates a run's checkpoints during training.

Its arguments are the run's folder, and the id of its parent. Its standard input ends when no more checkpoints will
come. It ends once all have been evaluated, and at once with its parent. What it prints goes to a log of the run.
"""

from __future__ import annotations

import math
import select
import shutil
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

from tandem.common import messages, process_lifetime, signals
from tandem.common.errors import INTERRUPTED, OK, ModelError, TandemError, is_shortage
from tandem.config import Config
from tandem.config.models import lora
from tandem.coordinator.observers.checkpoint_evaluations import (
    FOLDER,
    CheckpointEvaluation,
    digest_of,
    read_evaluation,
    read_order,
    write_evaluation,
)
from tandem.coordinator.preparing.evaluation_settings import make_follower_config
from tandem.launch.fork_server import ServiceForkServer
from tandem.launch.launch import preload
from tandem.launch.nodes import launched_processes
from tandem.observe.run_folder.checkpoints import CheckpointFolder
from tandem.observe.run_folder.journal import read_journal

_POLL_S = 0.5
_SHORTAGE_S = 5.0
"""Pause while the machine lacks room."""
_MERGED = "merged"


class CheckpointFollower:
    """The evaluation of one checkpoint after another, the oldest first."""

    def __init__(self, run: Path, fork_server: ServiceForkServer) -> None:
        self._run = run
        self._order, self._config = read_order(run)
        self._fork_server = fork_server
        root = Path(self._config.checkpointing.checkpoint_dir)
        self._checkpoints = CheckpointFolder(root, keep_top_k=None, higher_is_better=True)

    def follow(self) -> None:
        """Evaluate checkpoints until all are, and no more will come."""
        while True:
            has_ended = bool(select.select([sys.stdin], [], [], 0.0)[0])  # before the look: none comes after it
            step = self._find_next()
            if step is not None:
                self._evaluate(step)
            elif has_ended:
                return
            else:
                select.select([sys.stdin], [], [], _POLL_S)

    def _find_next(self) -> int | None:
        """Return the step of the oldest checkpoint that was not evaluated yet."""
        for step in self._checkpoints.steps():
            evaluation = read_evaluation(self._run, step)
            try:
                if evaluation is None or evaluation.checkpoint != digest_of(self._checkpoints.folder_of(step)):
                    return step
            except OSError:
                continue  # it has just been deleted
        return None

    def _evaluate(self, step: int) -> None:
        """Evaluate a checkpoint, and write what came of it."""
        began, folder = time.monotonic(), self._checkpoints.folder_of(step)
        metrics: dict[str, float] = {}
        error = ""
        try:
            digest = digest_of(folder)
        except OSError:
            return
        print(f"evaluating the checkpoint of step {step}", flush=True)
        try:
            metrics = self._score(step, folder)
        except (TandemError, OSError) as problem:
            if is_shortage(problem):
                print(f"tried again in a moment: {problem}", flush=True)
                time.sleep(_SHORTAGE_S)
                return
            error = " ".join(str(problem).split()) or type(problem).__name__
        seconds = time.monotonic() - began
        evaluation = CheckpointEvaluation(step=step, checkpoint=digest, seconds=seconds, metrics=metrics, error=error)
        while True:
            try:
                write_evaluation(self._run, evaluation)
            except OSError as problem:
                print(f"tried again in a moment: cannot write the evaluation of step {step}: {problem}", flush=True)
                time.sleep(_SHORTAGE_S)
            else:
                return

    def _score(self, step: int, checkpoint: Path) -> dict[str, float]:
        """Return the validation's metrics of a checkpoint. Raise `TandemError` or `OSError` if there are none."""
        from tandem.coordinator.evaluation.evaluate import EvaluatedModel, evaluate
        from tandem.coordinator.preparing.preflight import preflight

        results = self._run / FOLDER / f"step_{step}"
        shutil.rmtree(results, ignore_errors=True)  # what a killed process left
        results.mkdir()
        policy = checkpoint / "policy"
        if (policy / lora.CONFIG).exists():
            policy = _merge(policy, results / _MERGED)
        model = EvaluatedModel(label=checkpoint.name, name=checkpoint.name, folder=policy)
        config = make_follower_config(self._config, policy, results / "run")
        ready = preflight(self._order.source, config, "new")
        say = partial(print, flush=True)
        finish, _ = evaluate(self._config, [model], [ready], results, say, self._fork_server)
        shutil.rmtree(results / _MERGED, ignore_errors=True)
        if finish.outcome == "interrupted":
            raise KeyboardInterrupt
        if finish.error is not None:
            raise finish.error
        with read_journal(results / "run") as journal:
            metrics = journal.steps()[-1].metrics
        return {name: value for name, value in metrics.items() if name.startswith("val_") and math.isfinite(value)}


def _merge(adapters: Path, target: Path) -> Path:
    """Make a plain model of a checkpoint's adapters; return its folder. Raise `ModelError` if that fails."""
    words = [sys.executable, "-m", "tandem.trainer.files.merging", str(adapters), str(target)]
    if subprocess.run(words, check=False).returncode:  # in a process of its own: this one imports no torch
        raise ModelError(f"cannot merge the adapters of {adapters}")
    return target


def _list_kinds(config: Config) -> list[messages.ServiceKind]:
    folder = Path(config.logger.log_dir)
    its_own = make_follower_config(config, Path(config.policy.model_name), folder)
    return [kind for kind, count in launched_processes(its_own).items() if count]


def main() -> int:
    """Evaluate the checkpoints of the run that the command line names."""
    run = Path(sys.argv[1])
    process_lifetime.die_with(int(sys.argv[2]))
    signals.interrupt_when_asked()
    _, config = read_order(run)
    kinds, environment = _list_kinds(config), config.policy.environment
    try:
        with ServiceForkServer(partial(preload, kinds, environment), config.cluster.deadlines.join_s) as fork_server:
            CheckpointFollower(run, fork_server).follow()
    except KeyboardInterrupt:
        return INTERRUPTED
    return OK


if __name__ == "__main__":
    sys.exit(main())
