"""The record of calls: a desk that keeps what changed each model, in a file of its own.

`tandem.serving.tinker.call_files` knows the files. A call is noted when it is answered, and a thread writes it, so
that no client waits for the disk. What is not written yet is lost with the server, as the weights are.

The record is bounded. Once it is full, files of models that are trained no more are deleted, the oldest first. If there
is none, the record of the model that needs the room ends, and says so: a record without its beginning is worth nothing.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from queue import SimpleQueue

from tandem.common.errors import RunFolderError
from tandem.observe.run_folder.journal import read_journal
from tandem.serving.tinker import call_files, calls

_MOST_TOKENS_BEHIND = 1 << 26
"""Tokens that wait to be written; then the disk is too slow."""
_MOST_FILES = 10_000
_END_S = 60.0

Say = Callable[[str], None]


class RecordingDesk(calls.CallDesk):
    """A desk that records the calls of models."""

    def __init__(self, most_models: int, most_published: int, record: ModelRecords) -> None:
        super().__init__(most_models, most_published)
        self._record = record

    def take(self, turn: int) -> calls.PendingCall:
        """Return the next call of a queue, whose answer is recorded."""
        pending = super().take(turn)
        if not pending.model or isinstance(pending.call, calls.PublishWeights | calls.RecallWeights):
            return pending
        if isinstance(pending.call, calls.AddGradients) and not pending.call.has_gradient:
            return pending
        self._record.holds(pending.number, pending.model)
        answer = partial(self._note_answer, pending, self.attempt)
        return calls.PendingCall(pending.call, answer, pending.number, pending.turn, pending.model)

    def _note_answer(self, pending: calls.PendingCall, attempt: int, answer: calls.Answer | calls.CallFailed) -> None:
        if attempt == self.attempt:  # else a trainer was lost, and the model with it
            self._record.add(pending.model, pending.call, answer)
        pending.answer(answer)


class ModelRecords:
    """The files of all models. `close` ends it."""

    def __init__(self, run: Path, most_bytes: int, say: Say) -> None:
        """Begin; the folder is made with the first call, when the run has one."""
        self._run = run
        self._folder = run / call_files.FOLDER
        self._most_bytes = most_bytes
        self._say = say
        self._trained: dict[int, str] = {}
        """The models that are trained, by number."""
        self._files: dict[str, int] = {}
        """Descriptors of the files of these."""
        self._counts: dict[str, int] = {}
        """Calls of each file."""
        self._sizes: dict[str, int] = {}
        """Bytes of each file, the oldest first."""
        self._num_bytes = 0
        """Bytes of all files."""
        self._ended: set[str] = set()
        """Models whose record was given up."""
        self._run_id = ""
        self._behind = 0
        self._lock = threading.Lock()
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._write_all, name="record", daemon=True)
        self._thread.start()

    def holds(self, number: int, model: str) -> None:
        """Note which model a set of weights is of, from now on."""
        before = self._trained.get(number)
        if before != model:
            self._trained[number] = model
            self._queue.put(partial(self._close, before))

    def add(self, model: str, call: object, answer: calls.Answer | calls.CallFailed) -> None:
        """Note a call."""
        num_tokens = sum(len(each.token_ids) for each in call.sequences) if isinstance(call, calls.AddGradients) else 0
        with self._lock:
            self._behind += num_tokens
            is_late = self._behind > _MOST_TOKENS_BEHIND
        # Now, because the client may replace the state as soon as it has the answer.
        is_of_state = isinstance(call, calls.SaveState | calls.RestoreState) and not isinstance(
            answer, calls.CallFailed
        )
        state = (
            call_files.digest_of_state(call)
            if is_of_state and isinstance(call, calls.SaveState | calls.RestoreState)
            else ""
        )
        make_frame = None if is_late else partial(self._frame_of, call, answer, state)
        self._queue.put(partial(self._write, model, make_frame, num_tokens))

    def close(self) -> None:
        """Write what is left."""
        self._queue.put(None)
        self._thread.join(_END_S)

    # --- in the thread -----------------------------------------------------------------------------------------------

    def _write_all(self) -> None:
        while (work := self._queue.get()) is not None:
            work()
        for model in [*self._files]:
            self._close(model)

    def _write(self, model: str, frame_of: Callable[[int], call_files.Done] | None, num_tokens: int) -> None:
        try:
            if model in self._ended:
                return
            if frame_of is None:
                self._end(model, "the disk is too slow")
                return
            frame = call_files.encode(frame_of(self._counts.get(model, 0)))
            if model not in self._files:
                self._begin(model)
            if not self._make_room(model, len(frame)):
                self._end(model, f"the record has {self._most_bytes / 1e9:g} GB, as --record says")
                return
            self._append(model, frame)
            self._counts[model] = self._counts.get(model, 0) + 1
        except (OSError, RunFolderError) as error:
            self._end(model, error.strerror or "it cannot be written" if isinstance(error, OSError) else str(error))
        finally:
            with self._lock:
                self._behind -= num_tokens

    def _begin(self, model: str) -> None:
        if not self._run_id:
            with read_journal(self._run) as journal:
                self._run_id = journal.run_id
        self._folder.mkdir(mode=0o700, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        self._files[model] = os.open(call_files.path_of(self._folder, model), flags, 0o600)
        self._sizes[model] = 0
        head = call_files.CallHead(run_id=self._run_id, model=model, began_at=time.time())
        self._append(model, call_files.encode(head))

    def _append(self, model: str, frame: bytes) -> None:
        unwritten = memoryview(frame)
        while unwritten:
            unwritten = unwritten[os.write(self._files[model], unwritten) :]
        self._sizes[model] += len(frame)
        self._num_bytes += len(frame)

    def _make_room(self, model: str, num_bytes: int) -> bool:
        """Delete what is over, as far as needed; tell whether there is room."""
        while self._num_bytes + num_bytes > self._most_bytes or len(self._sizes) > _MOST_FILES:
            over = next((each for each in self._sizes if each not in self._files and each != model), None)
            if over is None:
                return False
            call_files.path_of(self._folder, over).unlink(missing_ok=True)
            self._num_bytes -= self._sizes.pop(over)
            self._ended.discard(over)
        return True

    def _end(self, model: str, reason: str) -> None:
        """Give the record of a model up."""
        self._ended.add(model)
        self._say(f"note: the record of {model} has ended, and no replay goes further: {reason}")
        with contextlib.suppress(OSError):  # a full disk may be the reason
            if model in self._files:
                self._append(model, call_files.encode(call_files.RecordEnd(why=reason)))
        self._close(model)

    def _close(self, model: str | None) -> None:
        file = self._files.pop(model or "", None)
        if file is not None:
            os.close(file)

    def _frame_of(
        self, call: object, answer: calls.Answer | calls.CallFailed, state: str, index: int
    ) -> call_files.Done:
        error = str(answer) if isinstance(answer, calls.CallFailed) else ""
        match call:
            case calls.AddGradients():
                assert isinstance(answer, calls.GradientsScored | calls.CallFailed), "as asked for"
                return call_files.gradient_done(index, call, answer)
            case calls.TakeStep():
                norm = 0.0 if error else float(str(answer))
                return call_files.StepDone(index=index, error=error, step=call, norm=norm)
            case calls.RestoreState(folder=folder, with_optimizer=with_optimizer):
                return call_files.RestoreDone(
                    index=index, error=error, folder=folder, with_optimizer=with_optimizer, state=state
                )
            case calls.SaveState(folder=folder):
                return call_files.SaveDone(index=index, error=error, folder=folder, state=state)
            case _:
                raise AssertionError("calls of models")
