"""The trainer service: one rank. Batches in, weight versions out.

It takes commands from the coordinator, and training samples from the rollouts that made them. It produces new weights
in memory that engines read in place. During a command it waits for the rollouts, at most `_FETCH_SHARE` of the
command's deadline (twice that if the policy sees), and for the other ranks, inside collective operations with that
deadline as their timeout. Between commands it touches no weight. A checkpoint is copied during a command, and a thread
writes the copy during later ones. Another thread writes the log-probabilities of the trained tokens to the rollout log.
If generation and training are colocated, optimizer states leave the device between commands.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, assert_never

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from tandem.common import gc_tuning, memory, messages, numeric, wire
from tandem.common.errors import WireError
from tandem.config.models.model_sizes import vocabulary_size
from tandem.config.placement import find_model_group
from tandem.launch.service import ServiceContext
from tandem.samples.batch import TABLE, SampleBatch, is_of_table
from tandem.samples.batch_sharding import NO_RANK, data_parallel_ranks
from tandem.trainer import building, fetching, step
from tandem.trainer.backend import CheckpointWriting, TrainerBackend
from tandem.trainer.rank_time import measured
from tandem.trainer.set_aside import BY_LOGPROBS, TrainingShard, finite_metrics, least_logprobs, set_aside
from tandem.trainer.step import evaluate

if TYPE_CHECKING:
    from tandem.trainer.calls.calls import RankCalls
    from tandem.trainer.streaming import StreamedGradient

BatchCommand = messages.Train | messages.StreamGroups | messages.Evaluate
"""The commands with a batch's table."""
_FETCH_SHARE = 0.25
"""The longest time for fetching samples, as a share of the training step's deadline."""


class SavingReplies:
    """The replies about one rank's checkpoints."""

    def __init__(self, context: ServiceContext) -> None:
        self._context = context
        self._writing: CheckpointWriting | None = None
        """The last checkpoint that is being written, or was."""

    def save(self, command: messages.SaveCheckpoint, training_state: AbstractContextManager[TrainerBackend]) -> None:
        """Copy what is saved, and reply; a thread writes the copy."""
        assert self._writing is None or self._writing.num_bytes.done(), "the coordinator asks for one at a time"
        with training_state as backend:
            self._writing = backend.save(Path(command.folder))
        reply = messages.CheckpointCopied(command_id=command.command_id, why_waited=self._writing.why_waited)
        self._context.reply(command.command_id, reply)

    def answer_once_written(self, command: messages.AwaitCheckpoint) -> None:
        """Reply once the thread has written all, or could not: from that thread, or at once if it is done."""
        assert self._writing is not None, "the coordinator sends SaveCheckpoint first"
        self._writing.num_bytes.add_done_callback(partial(self._answer, command))

    def _answer(self, command: messages.AwaitCheckpoint, num_bytes: Future[int]) -> None:
        error = num_bytes.exception()
        if error is not None:
            self._context.fail(command.command_id, error, aside=f"writing step {command.step}")
            return
        reply = messages.CheckpointSaved(command_id=command.command_id, num_bytes=num_bytes.result())
        self._context.reply(command.command_id, reply)


class TrainerService:
    """The replies of one rank to the coordinator."""

    def __init__(self, context: ServiceContext) -> None:
        self._context = context
        self._config = context.config
        self._vocabulary = vocabulary_size(context.config.policy)
        self._model_group = find_model_group(context.config, context.index)
        self._rank = data_parallel_ranks(context.config)[context.index] if self._model_group.has_policy else NO_RANK
        self._is_colocated = context.config.is_colocated and self._model_group.has_policy
        """Whether this process shares its device with engines, which are where the policy is."""
        self._store: TCPStore | None = None
        """The store at which ranks meet, if this one has opened it."""
        self._parts: building.TrainerParts | None = None
        self._format = fetching.SampleFormat.of(context.config)
        self._fetcher = fetching.make_fetcher(context, self._format)
        self._version = 0
        self._memory = memory.MemoryMeter()
        self._saving = SavingReplies(context)
        self._calls: RankCalls | None = None
        """None until a front end trains by single calls."""
        self._streamed: StreamedGradient | None = None
        """None without streaming training."""
        self._take_step = step.train

    def handle(self, command: messages.TrainerCommand, arrays: wire.Arrays) -> None:
        """Carry out one command and reply."""
        match command:
            case messages.OpenRendezvous():
                with self._context.phase("opening the rendezvous"):
                    self._store, opened = building.open_rendezvous(self._context, command)
                    self._context.reply(command.command_id, opened)
            case messages.BuildTrainer():
                with self._context.phase("building the trainer"):
                    self._build(command)
            case messages.Train():
                with self._context.phase(f"training step {command.step}"):
                    self._train(command, self._table(command, arrays), arrays)
            case messages.StreamGroups():
                self._stream(command, arrays)
            case messages.Evaluate():
                with self._context.phase(f"evaluating step {command.step}"):
                    self._evaluate(command, self._table(command, arrays), arrays)
            case (
                messages.InstallProgram()
                | messages.ConnectTransferGroup()
                | messages.Refit()
                | messages.ReportDigests()
            ):
                weight_client = self._built().weight_client
                assert weight_client is not None, "the coordinator sends this to trainers of the policy"
                weight_client.handle(command)
            case messages.CopyWeights():
                with self._context.phase(f"copying the weights of version {command.version}"):
                    self._copy(command)
            case messages.SaveCheckpoint():
                with self._context.phase(f"saving step {command.step}"):
                    self._saving.save(command, self._training_state())
            case messages.AwaitCheckpoint():
                self._saving.answer_once_written(command)
            case (
                messages.AddGradient()
                | messages.StepOptimizer()
                | messages.RestoreTraining()
                | messages.SwitchTraining()
                | messages.KeepWeights()
            ):
                self._call(command, arrays)
            case unknown:
                assert_never(unknown)

    def work(self) -> bool:
        """Continue to take the digests of a version. The weights do not change until the next `Train`."""
        if self._parts is None or self._parts.weight_client is None:
            return False
        return self._parts.weight_client.work()

    def close(self) -> None:
        """Leave the transfer groups and the process group."""
        self._fetcher.close()
        if self._parts is not None:
            self._parts.close()
        if dist.is_initialized():
            dist.destroy_process_group()
        self._parts = self._store = None

    def _table(self, command: BatchCommand, arrays: wire.Arrays) -> SampleBatch:
        """Return the table of a command. Raises `WireError`, which names the array, if it is malformed."""
        try:
            # Arrays with one number for each sequence. The rest are the tokens of a data set.
            table = SampleBatch.parse_frames(
                {name: array for name, array in arrays.items() if is_of_table(name)},
                TABLE,
                self._config.table_columns,
                sources=sorted(command.sources),
            )
            # A step may have no valid token: all samples truncated, dropped or set aside, or none made.
            table.check_table(
                num_ranks=self._config.data_parallel_size, may_mask_all=self._config.declaration.rolls_out
            )
            num_parts = sum(command.parts.values()) if isinstance(command, messages.Evaluate) else 0
            if num_parts not in (0, len(table)):
                raise WireError(f"parts: {num_parts} sequences, must be all {len(table)}")
        except WireError as error:
            raise WireError(f"{type(command).__name__}.{error}") from error
        return table

    def _read_samples(self, command: BatchCommand, table: SampleBatch, arrays: wire.Arrays) -> SampleBatch:
        """Return this rank's sequences, with tokens that came with the command. Raises `WireError` as `_table` does."""
        rank_table = table.take(table.rows_of(self._rank))
        try:
            tokens = {name: array for name, array in arrays.items() if not is_of_table(name)}
            samples = self._format.read_tokens({"lengths_S": rank_table.lengths_S, **tokens}, rank_table.num_valid_S)
        except WireError as error:
            raise WireError(f"{type(command).__name__}.{error}") from error
        self._fetcher.complete(samples, _FETCH_SHARE * command.deadline_s)
        return rank_table.replace(**tokens, generation_logprobs_T=np.zeros(len(samples.token_ids_T), dtype=np.float32))

    def _built(self) -> building.TrainerParts:
        assert self._parts is not None, "the coordinator sends BuildTrainer first"
        return self._parts

    @contextmanager
    def _training_state(self) -> Iterator[TrainerBackend]:
        """Load what optimizer steps need onto the computing device, and offload it afterwards if others need room."""
        backend = self._built().backend
        backend.reload()
        try:
            yield backend
        finally:
            if self._is_colocated:
                backend.offload()

    @gc_tuning.pause_collection()
    def _build(self, command: messages.BuildTrainer) -> None:
        self._fetcher.begin(command.media_at, self._context.coordinator)
        self._parts = parts = building.build_parts(self._context, command, self._store, self._model_group)
        assert self._rank in (NO_RANK, parts.backend.data_parallel_rank), "the coordinator sends shards by this number"
        self._version = command.version
        if self._config.streams_training:
            from tandem.trainer.streaming import StreamedGradient  # other runs need none of it

            keeps_logprobs = parts.recorder is not None
            self._streamed = StreamedGradient(parts.backend, self._config, keeps_logprobs=keeps_logprobs)
            self._take_step = self._streamed.train
        self._context.reply(command.command_id, parts.built(command))

    def _copy(self, command: messages.CopyWeights) -> None:
        parts = self._built()
        assert parts.weights is not None, "the coordinator sends this to trainers of the policy"
        assert parts.weight_client is not None, "as with the weights"
        is_called = self._calls is not None  # then a front end says what a version is
        assert is_called or command.version == self._version, "the coordinator asks for a copy of what was trained last"
        parts.weights.refresh()
        digests = parts.weight_client.digests(command.version) if command.with_digests else ()
        reply = messages.WeightsCopied(command_id=command.command_id, version=command.version, digests=digests)
        self._context.reply(command.command_id, reply)

    def _train(self, command: messages.Train, table: SampleBatch, arrays: wire.Arrays) -> None:
        shard = self._fetch_shard(command, table, arrays)
        if isinstance(shard, messages.SamplesMissing):
            self._context.reply(command.command_id, shard)
            return
        parts = self._built()
        if parts.weight_client is not None:
            parts.weight_client.abandon_digest()
        self._memory.begin()
        with self._training_state() as backend, measured(backend.device) as time:
            result = self._take_step(
                backend,
                shard.table,
                shard.samples,
                self._config,
                trained=None if command.step > self._config.num_steps_without_policy else self._config.trained_early,
                keeps_logprobs=parts.recorder is not None,
                exchange=parts.exchange,
            )
        self._fetcher.clear()
        self._version = command.step
        if parts.recorder is not None and result.logprobs is not None:
            parts.recorder.add(command.step, shard.samples, result.logprobs)
        metrics = dict[str, float]()
        notes = shard.notes if self._context.index == 0 else ()  # all trainers have the same
        if self._context.index == self._model_group.first:
            metrics, notes = result.metrics, (*notes, *result.notes)
            if not all(map(math.isfinite, metrics.values())):
                metrics, unsaid = finite_metrics(metrics)
                notes += unsaid
            if shard.num_aside and self._model_group.has_policy:
                metrics[BY_LOGPROBS] = float(shard.num_aside)
        reply = messages.Trained(
            command_id=command.command_id,
            step=command.step,
            version=self._version,
            metrics=metrics,
            notes=notes,
            seconds=result.seconds if self._model_group.has_policy else {},
            compute_s=time.compute_s,
            waited_s=time.waited_s,
            queued_s=time.queued_s,
            has_update=result.has_update,
            memory=self._memory.use(),
            gpus={} if parts.gpus is None else parts.gpus.means(),
        )
        self._context.reply(command.command_id, reply)

    def _stream(self, command: messages.StreamGroups, arrays: wire.Arrays) -> None:
        """Add the gradient of groups that are there before the others of their step, if every rank has its samples.

        Otherwise they are trained on with the others. The step's `Train` then says which samples are missing.
        """
        assert self._streamed is not None, "the coordinator sends this in runs with streaming training"
        num_tokens = 0
        with self._context.phase(f"training on groups of step {command.step}"):
            shard = self._fetch_shard(command, self._table(command, arrays), arrays)
            if not isinstance(shard, messages.SamplesMissing):
                self._streamed.begin(command.step)
                with self._training_state():
                    num_tokens = self._streamed.add(shard.table, shard.samples)
        reply = messages.GroupsStreamed(command_id=command.command_id, step=command.step, num_tokens=num_tokens)
        self._context.reply(command.command_id, reply)

    def _fetch_shard(
        self, command: messages.Train | messages.StreamGroups, table: SampleBatch, arrays: wire.Arrays
    ) -> TrainingShard | messages.SamplesMissing:
        """Return the table and this rank's sequences, fetched or sent with the command, or what any rank lacks.

        Groups with log-probabilities that no loss can compute with are set aside. Collective where rollouts have the
        samples.
        """
        if not command.sources:
            return TrainingShard(table, self._read_samples(command, table, arrays))
        rows, timeout_s = table.rows_of(self._rank), _FETCH_SHARE * command.deadline_s
        with self._context.phase(f"fetching the samples of step {command.step}"):
            samples, missing = self._fetcher.fetch(command.step, table, rows, command.sources, timeout_s)
        is_wild = samples is not None and bool((samples.generation_logprobs_T < numeric.LEAST_LOGPROB).any())
        num_lacking, num_wild = self._sum(torch.tensor([int(samples is None), int(is_wild)])).tolist()
        if num_lacking:
            return messages.SamplesMissing(command_id=command.command_id, step=command.step, rollouts=missing)
        assert samples is not None, "all have theirs, so has this rank"
        if num_wild:
            return set_aside(table, samples, rows, least_logprobs(samples), self._sum)
        return TrainingShard(table, samples)

    def _sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum a tensor over all trainers. Collective: all of them reach this."""
        exchange = self._built().exchange
        if exchange is not None:
            return exchange.sum(values)
        dist.all_reduce(values)
        return values

    def _evaluate(self, command: messages.Evaluate, table: SampleBatch, arrays: wire.Arrays) -> None:
        samples = self._read_samples(command, table, arrays)
        parts = self._built()
        evaluation = evaluate(parts.backend, table, samples, self._config, command.parts, parts.exchange)
        metrics, notes = finite_metrics(evaluation)
        reply = messages.Evaluated(command_id=command.command_id, step=command.step, metrics=metrics, notes=notes)
        self._context.reply(command.command_id, reply)

    def _call(self, command: messages.CallCommand, arrays: wire.Arrays) -> None:
        """Carry out a call of a front end that trains step by step."""
        from tandem.trainer.calls.calls import RankCalls  # runs of their own need none of it

        parts = self._built()
        if self._calls is None:
            self._calls = RankCalls(self._context, parts.backend, self._vocabulary)
        if parts.weight_client is not None and not isinstance(command, messages.AddGradient):
            parts.weight_client.abandon_digest()
        with self._context.phase(self._calls.phase_of(command)), self._training_state():
            self._calls.handle(command, arrays)
