"""The handle of a run: its steps, metrics, samples and model, while it goes on and after it has ended."""

from __future__ import annotations

import contextlib
import html
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self

from tandem.common.errors import RunFolderError, TandemError, nearest
from tandem.config import Config
from tandem.observe.lines import sparkline
from tandem.observe.run_folder.journal import outcome_in
from tandem.observe.run_folder.journal_file import JOURNAL_NAME, is_taken

if TYPE_CHECKING:
    import pandas

    from tandem.coordinator.api.callbacks import Callback, CallbackThread
    from tandem.coordinator.api.process import RunProcess
    from tandem.observe.run_folder.journal import JournalReader, StepRecord
    from tandem.samples.recorded_shards import Sample

State = Literal["starting", "running", "finished", "interrupted", "failed", "ended"]
_LOOK_S = 0.1
_SHOWN = ("reward", "val_accuracy", "loss", "val_loss", "kl", "mean_generation_length")
"""Metrics that a notebook shows, where the run has them."""


class Run:
    """A run that goes on or has ended; `tandem.train` and `tandem.load_run` return one.

    Iterating over it yields its steps as they finish, and ends when the run ends. If the run failed, the iteration then
    raises its error. As a context manager it stops the run at the end of the block, if it still goes on.
    """

    def __init__(self, folder: Path, process: RunProcess | None = None) -> None:
        self.folder = folder
        """The run folder."""
        self._process = process
        self._observation: CallbackThread | None = None

    # --- what it is --------------------------------------------------------------------------------------------------

    @property
    def state(self) -> State:
        """State of the run.

        ``starting``, ``running``, ``finished``, ``interrupted`` (it was stopped, and has saved), ``failed``, or
        ``ended``: it was killed before its last step, and could not record how.
        """
        if self._process is not None:
            if self._process.outcome is not None and self._process.has_ended.is_set():
                return self._process.outcome.outcome
            return "running" if self._has_journal() and is_taken(self.folder) else "starting"
        if is_taken(self.folder):
            return "running"
        with self._journal() as journal:
            last, outcome = journal.last_step() or 0, outcome_in(journal.last_event())
        if outcome is not None:
            return outcome
        num_steps = self.config.algorithm_section.max_num_steps
        return "finished" if 0 < num_steps <= last else "ended"

    @property
    def error(self) -> TandemError | None:
        """Error that ended the run, if it failed; known only for a run that this program began."""
        return None if self._process is None or not self._process.has_ended.is_set() else self._process.error

    @property
    def config(self) -> Config:
        """Configuration of the run."""
        from tandem.observe.run_folder.checkpoints import config_of

        with self._journal() as journal:
            return config_of(journal)

    @property
    def run_id(self) -> str:
        """Name of the run."""
        with self._journal() as journal:
            return journal.run_id

    @property
    def log(self) -> str:
        """Console output of the run so far, as `coordinator up` prints it.

        Where a run was not begun by a program, its output went elsewhere: then the events in its journal.
        """
        with contextlib.suppress(FileNotFoundError):
            return self.log_path.read_text(encoding="utf-8", errors="replace")
        if not self._has_journal():
            return ""
        with self._journal() as journal:
            return "".join(f"{text}\n" for _, _, text in journal.events())

    @property
    def log_path(self) -> Path:
        """File of the run's console output, where a program began it; the logs of its processes lie beside it."""
        from tandem.coordinator.api.process import LOG

        return self.folder / LOG

    # --- what it did -------------------------------------------------------------------------------------------------

    @property
    def steps(self) -> list[StepRecord]:
        """Finished steps, in order. Step 0 is the validation of the initial weights."""
        if not self._has_journal():
            return []
        with self._journal() as journal:
            return journal.steps()

    def metrics(self, name: str) -> dict[int, float]:
        """Return a metric by step, for the steps that have it.

        Raise `KeyError` if no step has it; the error names the metric with the nearest name.
        """
        steps = self.steps
        values = {record.step: record.metrics[name] for record in steps if name in record.metrics}
        if not values and steps:
            raise KeyError(f"no step has a metric {name!r}{nearest(name, self.metric_names)}")
        return values

    @property
    def metric_names(self) -> list[str]:
        """Names of the metrics that steps have, sorted."""
        return sorted({name for record in self.steps for name in record.metrics})

    def to_frame(self) -> pandas.DataFrame:
        """Return the steps as a pandas table: a row for each step, with its metrics and seconds (``seconds/PHASE``)."""
        import pandas

        steps = self.steps
        rows = [
            {**record.metrics, **{f"seconds/{phase}": seconds for phase, seconds in record.seconds.items()}}
            for record in steps
        ]
        return pandas.DataFrame(rows, index=pandas.Index([record.step for record in steps], name="step"))

    def samples(self, step: int | None = None, *, validation: bool = False) -> list[Sample]:
        """Return a step's training samples, in the order of their groups; None selects the newest recorded step.

        With `validation`, return the samples that it was validated on. Samples are recorded when their step is done, as
        far as ``logger.samples`` keeps them.
        """
        from tandem.samples.recorded_shards import read_samples

        return read_samples(self.folder, step, self.run_id, "validate" if validation else "train")

    @property
    def checkpoints(self) -> dict[int, Path]:
        """Folders of the existing checkpoints, by step. The model is in each one's folder ``policy``."""
        from tandem.observe.run_folder.checkpoints import checkpoints_of

        if not self._has_journal():
            return {}
        checkpoint_folder = checkpoints_of(self.folder, self.config)
        return {step: checkpoint_folder.folder_of(step) for step in checkpoint_folder.steps()}

    @property
    def model_folder(self) -> Path:
        """Folder of the newest model, for Transformers: ``AutoModelForCausalLM.from_pretrained(run.model_folder)``.

        Raises `RunFolderError` if no checkpoint was saved yet.
        """
        checkpoints = self.checkpoints
        if not checkpoints:
            raise RunFolderError(
                f"{self.folder} has no checkpoint yet (checkpointing.save_period says when one is saved)"
            )
        return checkpoints[max(checkpoints)] / "policy"

    # --- while it goes on --------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[StepRecord]:
        """Yield steps as they finish, until the run ends; then raise its error, if it failed.

        For a run that this program began or resumed, yield the steps done since; for one that was loaded, all steps.
        """
        yield from self._records()
        self._await_callbacks(None)
        self._raise_error()

    def _records(self) -> Iterator[StepRecord]:
        since = 0.0 if self._process is None else self._process.started_at
        last = -1
        with contextlib.ExitStack() as stack:
            journal: JournalReader | None = None
            while True:
                is_over = self._is_over()  # before the look, which then sees every step done until now
                if journal is None and self._has_journal() and (is_over or is_taken(self.folder)):
                    journal = stack.enter_context(self._journal())
                for record in () if journal is None else journal.steps(after=last, since=since):
                    last = record.step
                    yield record
                if is_over:
                    break
                self._pause()

    def wait(self, timeout_s: float | None = None) -> Self:
        """Wait until the run ends; return it.

        Ctrl-C makes the run save and end. Raise the run's error if it failed, and `TimeoutError` if it goes on after
        `timeout_s`.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            while not self._is_over():
                if deadline is not None and time.monotonic() > deadline:
                    raise TimeoutError(f"{self!r} goes on after {timeout_s:g} s")
                self._pause()
            left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not self._await_callbacks(left_s):
                raise TimeoutError(f"{self!r} has ended, and its callbacks have not returned after {timeout_s:g} s")
        except KeyboardInterrupt:
            self.stop()
            raise
        self._raise_error()
        return self

    def stop(self, *, wait: bool = True) -> None:
        """Make the run save and end, as Ctrl-C does; a run that has ended stays as it is.

        Without `wait` it may go on for a moment. Raise `RunFolderError` for a run that another program began.
        """
        if self._process is None:
            if is_taken(self.folder):
                raise RunFolderError(f"{self.folder}: another program began this run, and has to stop it")
            return
        self._process.stop()
        if wait:
            self._process.join(None)
            self._await_callbacks(None)

    def kill(self) -> None:
        """Kill the run's processes at once. It can be resumed from its newest checkpoint."""
        if self._process is not None:
            self._process.kill()
            self._process.join(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            self.stop()

    # --- how it is shown ---------------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r}, {self.state})"

    def _repr_html_(self) -> str:
        """Show the run in a notebook: the newest values of its metrics, and their curves."""
        steps = [record for record in self.steps if record.step > 0]
        at = f"step {steps[-1].step}" if steps else "no step done"
        rows = []
        for name in _SHOWN:
            values = [record.metrics[name] for record in steps if name in record.metrics]
            if values:
                cells = (html.escape(name), f"{values[-1]:.4g}", f"<code>{sparkline(values)}</code>")
                rows.append(f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
        error = f"<p><b>{html.escape(str(self.error))}</b></p>" if self.error is not None else ""
        title = f"<p><b>{html.escape(str(self.folder))}</b>: {self.state}, {at}</p>"
        return f"{title}{error}<table>{''.join(rows)}</table>"

    # --- callbacks ---------------------------------------------------------------------------------------------------

    def _observe(self, callbacks: Sequence[Callback]) -> None:
        """Call callbacks from now on."""
        from tandem.coordinator.api.callbacks import CallbackThread

        self._observation = CallbackThread(self, callbacks)

    def _await_callbacks(self, timeout_s: float | None) -> bool:
        return self._observation is None or self._observation.join(timeout_s)

    def _await_process(self) -> None:
        if self._process is not None:
            self._process.join(None)

    # --- below -------------------------------------------------------------------------------------------------------

    def _has_journal(self) -> bool:
        """Return whether the run has begun. Before that, the folder may hold an older run that will be set aside."""
        return (self.folder / JOURNAL_NAME).exists()

    def _journal(self) -> JournalReader:
        from tandem.observe.run_folder.journal import read_journal

        return read_journal(self.folder)

    def _is_over(self) -> bool:
        return not is_taken(self.folder) if self._process is None else self._process.has_ended.is_set()

    def _pause(self) -> None:
        if self._process is None:
            time.sleep(_LOOK_S)
        else:
            self._process.join(_LOOK_S)

    def _raise_error(self) -> None:
        if self.error is not None:
            raise self.error


def load_run(folder: str | Path) -> Run:
    """Open the run in a run folder, whether it goes on or has ended, and whatever began it.

    Args:
        folder: ``logger.log_dir`` of its configuration.

    Returns:
        Its handle; iterating over it yields all of its steps, and those to come.

    Raises:
        RunFolderError: there is no run in the folder.
    """
    run = Run(Path(folder))
    with run._journal():
        return run
