"""The checkpoint that a rank writes: copied at a command, and reported once it is on disk."""

from __future__ import annotations

from concurrent.futures import Future
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

from tandem.common.messages import AwaitCheckpoint, CheckpointCopied, CheckpointSaved, SaveCheckpoint
from tandem.launch.service import ServiceContext
from tandem.trainer.backend import CheckpointWriting, TrainerBackend


class SavingReplies:
    """The replies about one rank's checkpoints."""

    def __init__(self, context: ServiceContext) -> None:
        self._context = context
        self._writing: CheckpointWriting | None = None
        """The last checkpoint that is being written, or was."""

    def save(self, command: SaveCheckpoint, training_state: AbstractContextManager[TrainerBackend]) -> None:
        """Copy what is saved, and reply; a thread writes the copy."""
        assert self._writing is None or self._writing.num_bytes.done(), "the coordinator asks for one at a time"
        with training_state as backend:
            self._writing = backend.save(Path(command.folder))
        reply = CheckpointCopied(command_id=command.command_id, why_waited=self._writing.why_waited)
        self._context.reply(command.command_id, reply)

    def answer_once_written(self, command: AwaitCheckpoint) -> None:
        """Reply once the thread has written all, or could not: from that thread, or at once if it is done."""
        assert self._writing is not None, "the coordinator sends SaveCheckpoint first"
        self._writing.num_bytes.add_done_callback(partial(self._answer, command))

    def _answer(self, command: AwaitCheckpoint, num_bytes: Future[int]) -> None:
        error = num_bytes.exception()
        if error is not None:
            self._context.fail(command.command_id, error, aside=f"writing step {command.step}")
            return
        reply = CheckpointSaved(command_id=command.command_id, num_bytes=num_bytes.result())
        self._context.reply(command.command_id, reply)
