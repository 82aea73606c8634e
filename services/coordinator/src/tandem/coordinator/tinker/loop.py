"""The loop of a run that clients drive: a step of the scheduler is open until a client publishes.

The scheduler begins a step and asks trainers to train on its batch, which has no samples. This loop sends no batch. It
keeps the request open, and sends trainers the calls from the desk, one at a time. Those of a model stay in their order,
and models take turns: before a call of another one, trainers switch to its weights. When a client publishes, it answers
the request for the trainers: the scheduler copies the weights, brings them to the engines, verifies them, writes the
step to the journal, and begins the next one. So engines join, leave, are lost and replaced as in any run.

Engines hold one set of weights. Before samples of another, which is an earlier version or of another model, those in
progress are made while no more begin, and the set is brought to the engines again, as a new version.

It consumes what its base does, and calls from the desk. It waits for nothing longer than that. A call has the deadline
of a training step. If a trainer does not answer within it, or fails for a reason of its own, that trainer counts as
lost: all trainers start again, with the first weights.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, assert_never

import numpy as np
from numpy.typing import NDArray

from tandem.common import messages
from tandem.common.errors import RunFolderError
from tandem.config import Config
from tandem.coordinator.loop.loop import CoordinatorLoop
from tandem.coordinator.scheduler import events
from tandem.coordinator.scheduler.weights import HAS_ARRIVED
from tandem.observe.run_folder.calls import record_calls
from tandem.samples.batch_sharding import EMPTY_ROW, data_parallel_ranks, shards_by_count
from tandem.serving.tinker import calls
from tandem.serving.tinker.prefixes import prefixes_of

_SAMPLES_POLL_S = 0.003
"""Time between looks while a call waits until samples are made; else the loop is woken."""
_WRITE_S = 1.0
"""Time between writes to the journal, each of which is synced to disk: a server that is killed loses these records."""
_SETTLE_S = 0.1
_LOST = "a trainer was lost, and with it the weights since the last save_weights: create the model anew from those"


class _Running:
    """A call that trainers are carrying out."""

    def __init__(self, pending: calls.PendingCall, deadline: float) -> None:
        self.pending = pending
        self.deadline = deadline
        self.unanswered: dict[int, str] = {}
        """Trainers that owe an answer, by the id of the command."""
        self.replies: dict[str, messages.Reply] = {}
        self.failed: messages.Failed | None = None
        self.rows: dict[int, list[int]] = {}
        """Sequences of each data-parallel rank."""
        self.is_writing = False
        """Whether a checkpoint is copied, and being written."""


class CallLoop(CoordinatorLoop):
    """One attempt of a run that clients drive."""

    def __init__(self, desk: calls.CallDesk, config: Config, opened: Callable[[], None], *parts: Any) -> None:
        """Take what `CoordinatorLoop` takes, as `parts`; `opened` is called when calls are carried out."""
        super().__init__(*parts)
        self._opened = opened
        self._desk = desk
        self._ranks = data_parallel_ranks(config)
        self._deadline_s = config.cluster.deadlines.train_s
        self._save_s = config.cluster.deadlines.save_s
        self._trainers = [f"trainer-{index}" for index in range(config.cluster.trainers)]
        self._held: events.DispatchBatch | None = None
        """The request to train in the step that is open, of every trainer."""
        self._running: _Running | None = None
        self._publishing: tuple[int, calls.PendingCall] | None = None
        self._places: dict[int, int] = {}
        """Sets in which what is about to be published is kept, by the number of the model."""
        self._number = 0
        """The set that trainers hold."""
        self._closing: calls.PendingCall | None = None
        """The call for which no more samples begin, until those in progress are made."""
        self._metrics: dict[str, float] = {}
        self._began_at = time.monotonic()
        self._write_at = 0.0
        self._idle_s = self.poll_s
        desk.wake = self._registry.waker()

    def run(self) -> events.FinishRun:
        """Run until the scheduler finishes; nothing stays without an answer."""
        reason = "the run has ended"
        try:
            finish = super().run()
            reason = _LOST if finish.outcome == "failed" else reason
            return finish
        finally:
            self._desk.close(reason)
            if self._running is not None:
                self._running.pending.answer(calls.CallFailed(reason))
            if self._publishing is not None:
                self._publishing[1].answer(calls.CallFailed(reason))
            time.sleep(_SETTLE_S)  # the web server ends the requests
            with contextlib.suppress(RunFolderError):  # a full disk may be the reason for the end
                self._write_calls()

    def _send_batch(self, action: events.DispatchBatch | events.DispatchGroups) -> None:
        """Open the step instead: the calls of clients are what is trained on."""
        assert isinstance(action, events.DispatchBatch), "such a run streams no groups"
        self._held = action
        self._metrics, self._began_at = {}, time.monotonic()
        if not self._desk.is_open:
            self._desk.open(self.scheduler.tables.weights.version)
            self._opened()

    def _events(self) -> Iterator[events.Event]:
        running = self._running
        for event in super()._events():
            if (
                running is not None
                and isinstance(event, events.ProcessReplied)
                and event.reply.command_id in running.unanswered
            ):
                running.replies[running.unanswered.pop(event.reply.command_id)] = event.reply
            elif (
                running is not None
                and isinstance(event, events.CommandErred)
                and event.failed.command_id in running.unanswered
            ):
                del running.unanswered[event.failed.command_id]
                running.failed = running.failed or event.failed
                if not event.failed.expected:
                    yield events.ProcessLost(now=event.now, process=event.process, reason=event.failed.error)
            else:
                yield event
        now = time.monotonic()
        # Beside what trainers do, not between two calls: the disk may be slow.
        if now > self._write_at and (self._running is not None or not self._desk.next()):
            self._write_calls()
            self._write_at = now + _WRITE_S
        yield from self._go_on(now)

    def _write_calls(self) -> None:
        """Write to the journal which requests have ended."""
        records = self._desk.take_records()
        if records:
            record_calls(self.recorder.journal, records)

    def _go_on(self, now: float) -> Iterator[events.Event]:
        """Go on with calls as far as possible; yield what the scheduler has to know."""
        self.poll_s = self._idle_s
        if self._publishing is not None and self._is_published(self._publishing[0]):
            (version, published), self._publishing = self._publishing, None
            self._has_published(version, published)
        if self._running is not None:
            running = self._running
            yield from self._conclude(running, now)
            self._look_on(running)
            return
        if self.scheduler.tables.steps.is_interrupted and self._held is not None:
            self._desk.close("the server is ending", is_over=True)
            yield from self._trained(self._held, now)
        if self._held is None:
            return
        for pending in self._desk.next():
            self.poll_s = _SAMPLES_POLL_S
            if not isinstance(pending.call, calls.PublishWeights | calls.RecallWeights) or self._may_publish(pending):
                started = self._start(self._desk.take(pending.turn), now)
                if started is not None and not started.unanswered:
                    yield from self._conclude(started, now)
                self._look_on(started)
                return

    def _look_on(self, running: _Running | None) -> None:
        """Wait for the answers of trainers, if any are owed; else look for the next call at once."""
        self.poll_s = self._idle_s if running is not None and running.unanswered else 0.0

    # --- publishing --------------------------------------------------------------------------------------------------

    def _may_publish(self, pending: calls.PendingCall) -> bool:
        """Let no more samples begin; tell whether none is being made that must have the weights of the engines."""
        desk = self._desk
        if self._publishing is not None or self._closing not in (None, pending):
            return False
        self._closing = pending
        is_new = isinstance(pending.call, calls.PublishWeights)
        desk.renewed = self._place_of(pending) if is_new else None
        desk.is_publishing = True
        return not (desk.num_samples or desk.is_reserved or (desk.num_following and not is_new))

    def _place_of(self, pending: calls.PendingCall) -> int:
        """Return the set in which the weights are kept that a call publishes."""
        number = pending.number
        if number not in self._places:
            self._places[number] = self._desk.place_of_next(number)
        return self._places[number]

    def _publish(self, pending: calls.PendingCall, now: float) -> Iterator[events.Event]:
        """Finish the step: trainers hold the weights."""
        assert self._held is not None, "calls are carried out in an open step only"
        self._closing = None
        self._publishing = self._held.step, pending
        yield from self._trained(self._held, now)

    def _has_published(self, version: int, published: calls.PendingCall) -> None:
        """Answer a call for which engines hold a version, whose samples may begin."""
        weights = self._note_published(version, published)
        self._desk.is_reserved = weights is None
        self._reopen()
        published.answer(weights)

    def _note_published(self, version: int, published: calls.PendingCall) -> calls.PublishedSet | None:
        """Note the version that engines hold, and return it if it is new."""
        desk, weights = self._desk, None
        desk.version, desk.holding = version, published.number
        if isinstance(published.call, calls.PublishWeights):
            weights = calls.PublishedSet(self._places.pop(published.number), version)
            desk.holding = weights.number
            desk.note_published(weights)
        return weights

    def _reopen(self) -> None:
        self._places.clear()
        self._closing = self._desk.renewed = None
        self._desk.is_publishing = False

    def _is_published(self, version: int) -> bool:
        weights = self.scheduler.tables.weights
        return weights.version == version and weights.state in HAS_ARRIVED and weights.is_done

    def _trained(self, batch: events.DispatchBatch, now: float) -> Iterator[events.Event]:
        """Answer the scheduler's request to train, for each trainer."""
        self._held = None
        seconds = now - self._began_at
        for process, fields in batch.commands.items():
            reply = messages.Trained(
                command_id=fields["command_id"],
                step=batch.step,
                version=batch.step,
                metrics=self._metrics if process == "trainer-0" else {},
                seconds={"policy_training": seconds},
                compute_s=seconds,
                waited_s=0.0,
                # A client may step by too little to change a weight, or go back to the weights of before.
                has_update=False,
                memory=messages.MemoryUse(peak=0, held=0),
            )
            yield events.ProcessReplied(now=now, process=process, reply=reply)

    # --- calls of trainers -------------------------------------------------------------------------------------------

    def _start(self, pending: calls.PendingCall, now: float) -> _Running | None:
        """Send trainers the commands of a call; None if it is answered already."""
        call = pending.call
        if isinstance(call, calls.RecallWeights) and self._desk.holding == pending.number:
            self._has_published(self._desk.version, pending)
            return None
        self._running = running = _Running(pending, now + self._deadline_s)
        self._switch(running, pending.number)
        match call:
            case calls.AddGradients():
                self._send_gradients(running, call)
            case calls.TakeStep():
                for trainer in self._trainers:
                    fields = self._fields(running, trainer)
                    self._send_call(trainer, messages.StepOptimizer(**_fields_of(call), **fields))
            case calls.RestoreState():
                for trainer in self._trainers:
                    self._send_call(
                        trainer, messages.RestoreTraining(**_fields_of(call), **self._fields(running, trainer))
                    )
            case calls.SaveState():
                running.deadline = now + self._save_s
                for trainer in self._trainers:
                    fields = self._fields(running, trainer, self._save_s)
                    self._send_call(trainer, messages.SaveCheckpoint(folder=_name_unfinished(call), step=0, **fields))
            case calls.PublishWeights():
                number = self._place_of(pending)
                for trainer in self._trainers:
                    self._send_call(trainer, messages.KeepWeights(number=number, **self._fields(running, trainer)))
            case calls.RecallWeights():
                pass
            case unhandled:
                assert_never(unhandled)
        return running

    def _switch(self, running: _Running, number: int) -> None:
        """Have trainers hold another set before they carry out the call."""
        if number == self._number:
            return
        self._number = number
        for trainer in self._trainers:
            fields = self._fields(running, trainer)
            self._send_call(trainer, messages.SwitchTraining(number=number, **fields))

    def _fields(self, running: _Running, trainer: str, deadline_s: float | None = None) -> dict[str, Any]:
        fields = self.scheduler.tables.requests.notice(deadline_s or self._deadline_s)
        running.unanswered[fields["command_id"]] = trainer
        return {**fields}

    def _send_call(
        self, trainer: str, command: messages.AnyCommand, arrays: dict[str, NDArray[Any]] | None = None
    ) -> None:
        self._send(trainer, command, arrays)
        self._sent.pop(command.command_id)  # the scheduler does not know it

    def _send_gradients(self, running: _Running, call: calls.AddGradients) -> None:
        """Divide the sequences among the data-parallel ranks, with those that begin alike beside each other."""
        num_ranks = max(self._ranks) + 1
        lengths_S = np.array([len(each.token_ids) for each in call.sequences], dtype=np.int32)
        prefixes = prefixes_of([each.token_ids for each in call.sequences])
        rank_S = np.zeros(len(lengths_S), dtype=np.int32)
        for rank, shard in enumerate(shards_by_count(range(len(lengths_S)), lengths_S, num_ranks, prefixes.prompt_S)):
            rank_S[[row for row in shard if row != EMPTY_ROW]] = rank
        running.rows = {rank: np.flatnonzero(rank_S == rank).tolist() for rank in range(num_ranks)}
        table = {"lengths_S": lengths_S, "rank_S": rank_S, **prefixes._asdict()}
        # Other targets cost more, and all trainers have to compute the same.
        has_others = call.has_other_targets
        for trainer, rank in zip(self._trainers, self._ranks, strict=True):
            rank_sequences = [call.sequences[row] for row in running.rows[rank]]
            arrays: dict[str, NDArray[Any]] = {
                **table,
                "token_ids_T": _join([each.token_ids for each in rank_sequences], "int32"),
                "loss_mask_T": _join([each.mask for each in rank_sequences], "bool"),
                **{
                    f"{name}_T": _join([each.inputs[name] for each in rank_sequences], "float32")
                    for name in calls.INPUTS
                },
            }
            if has_others:
                arrays["targets_T"] = _join([each.targets for each in rank_sequences], "int32")
            command = messages.AddGradient(
                loss=call.loss,
                settings=call.settings,
                has_gradient=call.has_gradient,
                **self._fields(running, trainer),
            )
            self._send_call(trainer, command, arrays)

    def _conclude(self, running: _Running, now: float) -> Iterator[events.Event]:
        """Answer a call once all trainers have; without an answer in time, a trainer is lost."""
        if running.unanswered:
            if now > running.deadline:
                late = next(iter(running.unanswered.values()))
                yield events.ProcessLost(
                    now=now, process=late, reason=f"it has not carried out a call within {self._deadline_s:g} s"
                )
            return
        if running.failed is None and isinstance(running.pending.call, calls.SaveState) and not running.is_writing:
            running.is_writing, running.replies = True, {}
            for trainer in self._trainers:
                fields = self._fields(running, trainer, self._save_s)
                self._send_call(trainer, messages.AwaitCheckpoint(step=0, **fields))
            return
        self._running = None
        is_published = isinstance(running.pending.call, calls.PublishWeights | calls.RecallWeights)
        if running.failed is not None:
            if is_published:
                self._reopen()
            is_users = running.failed.expected and isinstance(running.pending.call, calls.AddGradients | calls.TakeStep)
            running.pending.answer(calls.CallFailed(running.failed.error, is_users=is_users))
            return
        if is_published:
            yield from self._publish(running.pending, now)
            return
        try:
            answer = self._answer_of(running)
        except OSError as error:
            running.pending.answer(calls.CallFailed(f"cannot save the state: {error.strerror}"))
            return
        running.pending.answer(answer)

    def _answer_of(self, running: _Running) -> calls.Answer:
        call, replies = running.pending.call, running.replies
        match call:
            case calls.AddGradients():
                return self._collect_scores(running, call)
            case calls.TakeStep():
                stepped = replies["trainer-0"]
                assert isinstance(stepped, messages.OptimizerStepped), "checked against the command"
                self._metrics |= {"grad_norm": stepped.grad_norm, "learning_rate": call.learning_rate}
                return stepped.grad_norm
            case calls.SaveState():
                Path(_name_unfinished(call)).rename(call.folder)
                _sync(Path(call.folder).parent)
                return sum(reply.num_bytes for reply in replies.values() if isinstance(reply, messages.CheckpointSaved))
            case _:
                return None

    def _collect_scores(self, running: _Running, call: calls.AddGradients) -> calls.GradientsScored:
        """Return the log-probabilities in the order of the sequences."""
        logprobs_of_row: dict[int, NDArray[np.float32]] = {}
        loss = 0.0
        for trainer, rank in zip(self._trainers, self._ranks, strict=True):
            reply = running.replies[trainer]
            assert isinstance(reply, messages.GradientAdded), "checked against the command"
            loss = reply.loss
            logprobs_T = np.frombuffer(reply.logprobs, dtype="<f4")
            rows = running.rows[rank]
            ends = np.cumsum([len(call.sequences[row].token_ids) for row in rows], dtype=np.int64)
            logprobs_of_row |= dict(zip(rows, np.split(logprobs_T, ends[:-1]), strict=True)) if rows else {}
        if call.has_gradient:
            self._metrics["loss"] = loss
        return calls.GradientsScored(loss=loss, logprobs=[logprobs_of_row[row] for row in range(len(call.sequences))])


def _fields_of(call: calls.TakeStep | calls.RestoreState) -> dict[str, Any]:
    return {name: getattr(call, name) for name in call.__struct_fields__}


def _join(arrays: list[NDArray[Any]], dtype: str) -> NDArray[Any]:
    return np.concatenate([np.zeros(0, dtype=dtype), *arrays]).astype(dtype, copy=False)


def _name_unfinished(call: calls.SaveState) -> str:
    return f"{call.folder}.unfinished"


def _sync(folder: Path) -> None:
    file = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
