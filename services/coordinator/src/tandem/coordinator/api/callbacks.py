"""Callbacks: methods of the user's program that are called while a run that it began goes on.

One thread (`CallbackThread._observe`) reads steps from the run's journal, as ``for step in run`` does, and calls every
callback in order. It produces nothing that the run reads, except a request to stop. The run does not wait for it.
"""

from __future__ import annotations

import shutil
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TextIO

from tandem.common.errors import ConfigError, TandemError
from tandem.common.user_code import shown
from tandem.observe.lines import step_line
from tandem.observe.run_folder.journal import StepRecord

if TYPE_CHECKING:
    from tandem.coordinator.api.handle import Run

_LINE_EVERY_S = 30.0
_WIDTH = 120
"""Width of a line that is rewritten in place, in columns, where the terminal does not report its own."""


class Callback:
    """Base class of callbacks; a subclass overrides the methods that it needs.

    Methods run one after the other in a thread of the program that called `tandem.train`. The run goes on meanwhile.
    ``run.stop(wait=False)`` asks the run to save and end. A method that raises is reported on stderr, and the run
    goes on.
    """

    def on_start(self, run: Run) -> None:
        """Handle the start of the run, after its configuration was checked."""

    def on_step(self, run: Run, step: StepRecord) -> None:
        """Handle a finished training step."""

    def on_validation(self, run: Run, step: StepRecord) -> None:
        """Handle a validation: its metrics begin with ``val_``. Step 0 validates the initial weights."""

    def on_end(self, run: Run) -> None:
        """Handle the end of the run: `run.state` and `run.error` say how it ended."""


class ProgressLine(Callback):
    """One line that shows the newest step.

    A terminal or a notebook shows one line that is rewritten in place. Anything else, such as a file, gets the first
    and the last step, and at most one line every 30 seconds between them.
    """

    def __init__(self, file: TextIO | None = None) -> None:
        self._file = sys.stderr if file is None else file
        self._in_place = self._file.isatty() or type(self._file).__module__.startswith("ipykernel.")
        self._last_step = 0
        self._line = ""
        self._num_columns = 0
        self._is_written = True
        self._written_at = float("-inf")

    def on_step(self, run: Run, step: StepRecord) -> None:
        """Show the step."""
        self._last_step = self._last_step or run.config.algorithm_section.max_num_steps
        self._line = step_line(step, self._last_step)
        self._is_written = False
        if self._in_place or time.monotonic() - self._written_at >= _LINE_EVERY_S:
            self._write()

    def on_end(self, run: Run) -> None:
        """Show the last step, and how the run ended."""
        if not self._is_written:
            self._write()
        lead = "\n" if self._in_place and self._num_columns else ""
        detail = f": {run.error}" if run.error is not None else ""
        self._file.write(f"{lead}{run.folder}: {run.state}{detail}\n")
        self._file.flush()

    def _write(self) -> None:
        self._is_written = True
        self._written_at = time.monotonic()
        if self._in_place:
            line = self._line[: shutil.get_terminal_size((_WIDTH, 24)).columns - 1]
            self._file.write(f"\r{line.ljust(self._num_columns)}")
            self._num_columns = len(line)
        else:
            self._file.write(f"{self._line}\n")
        self._file.flush()


class CallbackThread:
    """The thread that calls the callbacks of a run."""

    def __init__(self, run: Run, callbacks: Sequence[Callback]) -> None:
        self._run = run
        self._callbacks = callbacks
        self._reported: set[int] = set()
        # Not a daemon: a program that reaches its end waits until the last callback has returned.
        self._thread = threading.Thread(target=self._observe, name="tandem-callbacks", daemon=False)
        self._thread.start()

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait until the last callback has returned; return False on timeout.

        In the callbacks' own thread, return at once.
        """
        if threading.current_thread() is self._thread:
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _observe(self) -> None:
        self._call(lambda callback: callback.on_start(self._run))
        try:
            for step in self._run._records():
                self._tell(step)
        except TandemError as error:  # the journal cannot be read; on_end is called all the same
            print(f"callbacks: {error}", file=sys.stderr)
        self._run._await_process()
        self._call(lambda callback: callback.on_end(self._run))

    def _tell(self, step: StepRecord) -> None:
        if step.step > 0:
            self._call(lambda callback: callback.on_step(self._run, step))
        if any(name.startswith("val_") for name in step.metrics):
            self._call(lambda callback: callback.on_validation(self._run, step))

    def _call(self, method: Callable[[Callback], None]) -> None:
        for index, callback in enumerate(self._callbacks):
            try:
                method(callback)
            except Exception as error:
                message = f"callbacks[{index}] ({type(callback).__name__}) raised {type(error).__name__}: {error}"
                print(f"{message}; the run goes on", file=sys.stderr)
                if index not in self._reported:
                    self._reported.add(index)
                    traceback.print_exc()


def check_callbacks(callbacks: object) -> tuple[Callback, ...]:
    """Return the callbacks that were given. Raise `ConfigError` if one of them is not a callback."""
    if callbacks is None:
        return ()
    if isinstance(callbacks, Callback):
        raise ConfigError("callbacks: expected a list of callbacks, got one: put it into a list")
    if not isinstance(callbacks, Sequence) or isinstance(callbacks, str):
        raise ConfigError(f"callbacks: expected a list of tandem.Callback, got {shown(callbacks)[:200]}")
    for index, callback in enumerate(callbacks):
        if isinstance(callback, type) and issubclass(callback, Callback):
            raise ConfigError(f"callbacks[{index}]: expected an object, got the class: write {callback.__name__}()")
        if not isinstance(callback, Callback):
            raise ConfigError(f"callbacks[{index}]: expected a tandem.Callback, got {shown(callback)[:200]}")
    return tuple(callbacks)
