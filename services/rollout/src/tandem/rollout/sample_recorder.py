"""The recorder of finished samples, and the thread that writes them to the rollout log.

The rollout log's format is in `tandem.samples.sample_record`. The service announces finished samples (`add`) and passes
on commands that concern the log (`command`); neither waits. The thread handles both in the order of their arrival. It
writes samples to the unfinished file of their step. `RecordSamples` makes a shard of the samples that a step trained
on, or was validated by. `RestoreSamples` puts samples that an earlier process had written into the store. The thread
waits for nothing but the disk, and ends when the recorder is closed.

Samples are on disk before trainers fetch them (`flush`), so that those trained on survive any kill. A disk that is
full, slow or not writable never stops a run: missing samples are reported once, and counted with each shard.

Samples of a rollout log that are trained on again are read as if they had just been generated.
"""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, assert_never

import msgspec
import pyarrow as pa

from tandem.common import messages
from tandem.common.errors import SamplesError, WireError
from tandem.common.numeric import bound
from tandem.common.values import question_text, text_of
from tandem.launch.service import ServiceContext
from tandem.samples import recorded_shards, routed_experts, sample_store
from tandem.samples.batch import SampleBatch, list_media
from tandem.samples.sample_files import SHARD, STREAM, UNFINISHED, files, shard_path, unfinished_path
from tandem.samples.sample_record import MEDIA_COLUMN, ROLE_REWARDS, ROLES, SAMPLING_MASKS, RecordedSample, schema_with
from tandem.samples.sample_writing import UnfinishedFile, keys_of, read_unfinished, write_shard
from tandem.samples.tokenizer import Tokenizer

if TYPE_CHECKING:
    from tandem.samples.media import MediaTexts


def restored(
    command: messages.RestoreSamples,
    folder: Path,
    run_id: str,
    rollout: str,
    vocabulary: int,
    experts: routed_experts.RoutedExperts | None,
    *,
    keeps_masks: bool = False,
) -> list[RecordedSample]:
    """Return the samples that a command names, as this rollout's. Raises `SamplesError`.

    Args:
        command: says which samples of which files.
        folder: folder of the rollout log.
        run_id: the run's.
        rollout: name of this rollout.
        vocabulary: number of tokens.
        experts: format of the experts that samples have for each token, if any.
        keeps_masks: whether samples have sampling masks.

    """
    samples = [
        msgspec.structs.replace(
            sample,
            step=command.step,
            rollout=rollout,
            command_id=command.command_id,
            advantage=None,
            scored=bound(sample.scored),
            arrays=routed_experts.as_trained_on(sample.arrays, experts, keeps_masks=keeps_masks),
        )
        for name, groups in command.files.items()
        for sample in _read(folder / name, groups, run_id, vocabulary)
    ]
    num_expected = command.num_samples * sum(map(len, command.files.values()))
    if len({(sample.scored.group, sample.scored.sample) for sample in samples}) != num_expected:
        raise SamplesError(f"{', '.join(command.files)} in {folder} no longer have the {num_expected} samples")
    return samples


def _read(path: Path, groups: Sequence[tuple[int, int]], run_id: str, vocabulary: int) -> list[RecordedSample]:
    """Return the samples of some groups in a file of the rollout log. Raises `SamplesError`."""
    group_keys = {*groups}
    read = recorded_shards.read_shard if path.suffix == SHARD else read_unfinished
    table = read(path, run_id)
    rows = [row for row, (command_id, group, _) in enumerate(keys_of(table)) if (command_id, group) in group_keys]
    samples = recorded_shards.samples_of(table.take(rows))
    for sample in samples:
        try:
            sample.arrays.check_samples(vocabulary)
        except WireError as error:
            raise SamplesError(f"{path} has samples of another model: {error}") from error
    return samples


def as_generated(
    command: messages.RestoreSamples, samples: Sequence[RecordedSample]
) -> Iterator[messages.SamplesFinished | messages.Generated]:
    """Yield the replies of a `Generate` that has made these samples."""
    yield messages.SamplesFinished(
        command_id=command.command_id,
        step=command.step,
        purpose="train",
        samples=tuple(msgspec.structs.replace(sample.scored, response="") for sample in samples),
    )
    yield messages.Generated(
        command_id=command.command_id,
        step=command.step,
        purpose="train",
        num_samples=len(samples),
        num_tokens=0,
        seconds={},
        memory=messages.MemoryUse(peak=0, held=0),
    )


_MOST_WAITING = 10_000
"""Batches of finished samples that may wait for the disk; further ones are not written."""
_FLUSH_S = 20.0
"""How long trainers wait for samples to reach the disk, the first time that this takes too long."""
_SHORT_FLUSH_S = 1.0
"""The same once it has been reported that samples are missing."""
_CLOSE_S = 3.0
"""How long writing the rest may take when the service ends."""


class _Finished(NamedTuple):
    """Samples of one command that finished together."""

    step: int
    purpose: messages.Purpose
    command_id: int
    started_at: float
    finished_at: float
    samples: Sequence[tuple[messages.PromptGroup, messages.SampleScored, SampleBatch]]


class _Anew(NamedTuple):
    """The message that the same steps begin again: earlier samples are of no use here any more."""

    on_closed: Callable[[], None]
    """Callback once nothing earlier is written any more."""


class SampleRecorder:
    """The rollout log of one rollout."""

    def __init__(
        self,
        folder: Path,
        context: ServiceContext,
        store: sample_store.SampleStore,
        tokenizer: Tokenizer,
        vocabulary: int,
        experts: routed_experts.RoutedExperts | None = None,
        texts: MediaTexts | None = None,
    ) -> None:
        """Write below `folder`, which is made with the first sample.

        `experts` describe the routing that samples carry for each token, if they do; `texts` decodes prompts
        with more than text.
        """
        self._experts = experts
        self._texts = texts
        self._folder = folder
        self._context = context
        self._store = store
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        has_masks = context.config.replays_sampling_masks
        has_roles = context.config.agent is not None and bool(context.config.agent.roles)
        self._schema = schema_with(
            {MEDIA_COLUMN: tokenizer.takes_media, SAMPLING_MASKS: has_masks, ROLES: has_roles, ROLE_REWARDS: has_roles}
        )
        self._queue: queue.SimpleQueue[_Finished | _Anew | messages.RecordSamples | messages.RestoreSamples | None] = (
            queue.SimpleQueue()
        )
        self._files: dict[tuple[int, messages.Purpose], UnfinishedFile] = {}
        """Files that this process writes to, by step and purpose."""
        self._newest: dict[messages.Purpose, int] = {}
        """Newest step with a shard requested. Samples that finish for it, or for an earlier one, are no longer used."""
        self._has_complained = False
        self._num_added = 0
        self._num_written = 0
        """Additions handled so far: each is on disk, or never will be."""
        self._has_written = threading.Condition()
        self._thread = threading.Thread(target=self._write, name="record of samples", daemon=True)
        self._thread.start()

    def add(
        self,
        step: int,
        purpose: messages.Purpose,
        command_id: int,
        started_at: float,
        samples: Sequence[tuple[messages.PromptGroup, messages.SampleScored, SampleBatch]],
    ) -> None:
        """Have samples written that have finished now; they include the text of the response."""
        if self._queue.qsize() > _MOST_WAITING:
            self._complain("the disk is slower than samples finish")
        else:
            self._num_added += 1
            self._queue.put(_Finished(step, purpose, command_id, started_at, time.time(), samples))

    def command(self, command: messages.RecordSamples | messages.RestoreSamples) -> None:
        """Have a command carried out after everything added before; the answer comes from another thread."""
        self._queue.put(command)

    def begin_anew(self, on_closed: Callable[[], None]) -> None:
        """Close all files after everything before this call; then call `on_closed` from another thread."""
        self._queue.put(_Anew(on_closed))

    def flush(self) -> None:
        """Wait until all that was added is on disk, with a time limit; from any thread."""
        num_added = self._num_added
        patience_s = _SHORT_FLUSH_S if self._has_complained else _FLUSH_S
        with self._has_written:
            if not self._has_written.wait_for(lambda: self._num_written >= num_added, patience_s):
                self._complain("the disk is slower than samples are trained on")

    def close(self) -> None:
        """Write the rest, and end the thread."""
        self._queue.put(None)
        self._thread.join(_CLOSE_S)

    # --- the thread --------------------------------------------------------------------------------------------------

    def _write(self) -> None:
        while (item := self._queue.get()) is not None:
            match item:
                case _Finished():
                    self._append(item.step, item.purpose, map(partial(self._recorded, item), item.samples))
                    with self._has_written:
                        self._num_written += 1
                        self._has_written.notify_all()
                case messages.RecordSamples() | messages.RestoreSamples():
                    self._carry_out(item)
                case _Anew(on_closed=on_closed):
                    self._let_go()
                    on_closed()
                case unknown:
                    assert_never(unknown)
        self._let_go()

    def _let_go(self) -> None:
        """Close all files."""
        for key in [*self._files]:
            self._close(key)
        self._newest.clear()

    def _carry_out(self, command: messages.RecordSamples | messages.RestoreSamples) -> None:
        doing = "recording" if isinstance(command, messages.RecordSamples) else "restoring"
        try:
            if isinstance(command, messages.RecordSamples):
                self._record(command)
            else:
                self._restore(command)
        except OSError as error:
            write_error = SamplesError(f"cannot write to {self._folder}: {error.strerror}")
            self._context.fail(command.command_id, write_error, aside=f"{doing} samples")
        except Exception as error:
            self._context.fail(command.command_id, error, aside=f"{doing} samples")

    def _append(self, step: int, purpose: messages.Purpose, samples: Iterable[RecordedSample]) -> None:
        """Append samples to those of their step, or report that this fails."""
        if step <= self._newest.get(purpose, -1):
            return
        key = step, purpose
        try:
            if key not in self._files:
                path = unfinished_path(self._folder, step, self._context.name, purpose)
                self._files[key] = UnfinishedFile(path, self._context.run_id, self._schema)
            self._files[key].append([*samples])
        except OSError as error:
            self._complain(error.strerror or str(error))
            self._close(key)  # a write cut off at its end would hide all that follows
        except Exception as error:
            self._complain(f"{type(error).__name__}: {error}")

    def _record(self, command: messages.RecordSamples) -> None:
        """Make the shard of a step. Raises `SamplesError` for unreadable files, and `OSError`."""
        key = command.step, command.purpose
        self._newest[command.purpose] = max(self._newest.get(command.purpose, -1), command.step)
        of_rollout = [self._files[key].path] if key in self._files else []
        self._close(key)
        for file in files(self._folder / UNFINISHED, STREAM, command.purpose):
            if (file.step, file.rollout) == (command.step, command.rollout) and file.path not in of_rollout:
                of_rollout.append(file.path)  # of an earlier process of that name
        shard = shard_path(self._folder, command.step, command.rollout, command.purpose)
        tables = [read_unfinished(path, self._context.run_id) for path in of_rollout]
        if shard.exists():  # the command has come before
            tables.append(recorded_shards.read_shard(shard, self._context.run_id))
        advantages: dict[tuple[int, int, int], float | None] = {}
        for group in command.groups:
            for sample, advantage in enumerate(group.advantages):
                advantages[group.command_id, group.group, sample] = advantage
        table = _select_rows(tables, advantages)
        num_bytes = write_shard(shard, self._context.run_id, table)
        for path in of_rollout:
            path.unlink(missing_ok=True)
        recorded = messages.SamplesRecorded(
            command_id=command.command_id,
            step=command.step,
            num_samples=table.num_rows,
            num_bytes=num_bytes,
            num_missing=len(advantages) - table.num_rows,
        )
        self._context.reply(command.command_id, recorded)

    def _restore(self, command: messages.RestoreSamples) -> None:
        """Put samples into the store as if this command had generated them. Raises `SamplesError`."""
        context = self._context
        keeps_masks = context.config.replays_sampling_masks
        samples = restored(
            command,
            self._folder,
            context.run_id,
            context.name,
            self._vocabulary,
            self._experts,
            keeps_masks=keeps_masks,
        )
        for sample in samples:
            self._store.put((command.command_id, sample.scored.group, sample.scored.sample), sample.arrays)
        self._append(command.step, "train", samples)
        for reply in as_generated(command, samples):
            context.reply(command.command_id, reply)

    def _close(self, key: tuple[int, messages.Purpose]) -> None:
        file = self._files.pop(key, None)
        if file is not None:
            file.close()

    def _recorded(
        self, finished: _Finished, sample: tuple[messages.PromptGroup, messages.SampleScored, SampleBatch]
    ) -> RecordedSample:
        group, scored, arrays = sample
        # As the model saw it: the agent's own prompt, if one plays.
        prompt_ids = arrays.token_ids_T[: scored.prompt_length].tolist()
        if self._texts is None:
            prompt = self._tokenizer.decode(prompt_ids, skip_special_tokens=False)
        else:
            prompt = self._texts.text_of(prompt_ids, list_media(arrays), group.media or ())
        return RecordedSample(
            step=finished.step,
            rollout=self._context.name,
            command_id=finished.command_id,
            scored=scored,
            arrays=arrays,
            problem_id=group.problem.problem_id,
            question=question_text(group.problem.question),
            answer=text_of(group.problem.answer),
            prompt=prompt,
            started_at=finished.started_at,
            finished_at=finished.finished_at,
        )

    def _complain(self, reason: str) -> None:
        """Report once that samples are missing."""
        if not self._has_complained:
            self._has_complained = True
            line = f"{self._context.name}: samples are missing in the record {self._folder}: {reason}"
            print(line, file=sys.stderr, flush=True)


def _select_rows(tables: Sequence[pa.Table], advantages: dict[tuple[int, int, int], float | None]) -> pa.Table:
    """Return the rows of these samples, each once, with their advantages. Raises `SamplesError` if there are none."""
    rows: dict[tuple[int, int, int], int] = {}
    table = pa.concat_tables(tables, promote_options="default") if tables else None
    for row, key in enumerate(keys_of(table) if table is not None else []):
        if key in advantages:
            rows.setdefault(key, row)
    if table is None or not rows:
        raise SamplesError(f"none of the {len(advantages)} samples was written when it finished")
    keys = [key for key in advantages if key in rows]
    selected = table.take([rows[key] for key in keys])
    at = selected.schema.get_field_index("advantage")
    return selected.set_column(at, "advantage", pa.array([advantages[key] for key in keys], pa.float32()))
