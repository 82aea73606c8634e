"""Rows that a run of SFT, DPO or a reward model trained on, read from its data again.

As a program, it answers the page's requests for rows of one run.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from tandem.common.errors import RunFolderError, TandemError
from tandem.coordinator.algorithms import make_algorithm
from tandem.coordinator.algorithms.data_set import DataSetAlgorithm
from tandem.coordinator.preparing.shown_rows import show_sequences
from tandem.launch.preparing.hub_data import list_data_files
from tandem.observe.page.worker import answer_requests
from tandem.observe.run_folder.checkpoints import config_of, tokenizer_of
from tandem.observe.run_folder.journal import read_journal
from tandem.observe.shown_rows import RowsAnswer, RowsRequest, RunRows

_IDLE_S = 60.0


class RecordedRows:
    """The rows of one run, in the order of training."""

    def __init__(self, run: Path) -> None:
        """Read the run's data. Raises `RunFolderError` if that, or its tokenizer, is not there."""
        self._run = run
        with read_journal(run) as journal:
            config = config_of(journal)
            began = journal.run.created_at
        if config.replay is not None or config.declaration.rolls_out:
            raise RunFolderError(f"{run} is a run of samples, not of rows")
        self.size = config.policy.train_global_batch_size
        """Rows of a step."""
        tokenizer = tokenizer_of(run, config)
        if tokenizer is None:
            name = config.policy.tokenizer.name
            raise RunFolderError(f"the tokenizer is neither in {name} nor in a checkpoint of {run}")
        self.tokenizer = tokenizer
        try:
            algorithm = make_algorithm(config, tokenizer)
        except TandemError as error:
            raise RunFolderError(
                f"the rows of {run} are read from its data again, which cannot be read: {error}"
            ) from error
        assert isinstance(algorithm, DataSetAlgorithm), "nothing is generated, and it is no replay"
        self.algorithm = algorithm
        paths = [Path(path) for key, path in list_data_files(config) if key.startswith("data.train")]
        changed = [path for path in dict.fromkeys(paths) if path.is_file() and path.stat().st_mtime > began]
        self.notes = (
            *(
                f"{path} has changed since the run began: its rows may not be those that it trained on"
                for path in changed
            ),
            *algorithm.notices,
        )

    def last_step(self) -> int:
        """Return the newest step of the run, 1 before it is done."""
        with read_journal(self._run) as journal:
            return max(1, journal.last_step() or 0)

    def check_step(self, step: int | None) -> int:
        """Return a step, the newest for None. Raises `RunFolderError` if the run has not trained it."""
        last = self.last_step()
        if step is None:
            return last
        if not 1 <= step <= last:
            raise RunFolderError(f"{self._run} has trained no step {step}, only those up to {last}")
        return step

    def rows(self, request: RowsRequest) -> RunRows:
        """Return the first rows of a step."""
        step = self.check_step(request.step)
        rows = show_sequences(self.algorithm, self.tokenizer, step, min(request.limit, self.size))
        return RunRows(step=step, last_step=self.last_step(), num_rows=self.size, rows=tuple(rows), notes=self.notes)


def main(run: Path) -> None:
    """Answer requests for the run's rows until the input ends, or nothing is asked for a while."""
    recorded: RecordedRows | None = None

    def answer(data: bytes) -> bytes:
        nonlocal recorded
        try:
            recorded = recorded or RecordedRows(run)
            rows = recorded.rows(msgspec.json.decode(data, type=RowsRequest))
        except TandemError as error:
            return msgspec.json.encode(RowsAnswer(error=str(error)))
        return msgspec.json.encode(RowsAnswer(rows=rows))

    answer_requests(answer, _IDLE_S)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
