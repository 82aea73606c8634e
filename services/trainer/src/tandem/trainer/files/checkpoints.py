"""Checkpoints on disk: ``policy/`` in Hugging Face's format, ``optimizer/`` in boxes of tensors.

Another trained model, such as ``value``, has ``value/`` and ``value_optimizer/``. All are safetensors files and JSON:
nothing in a checkpoint is ever unpickled. Each rank copies its part and hands the copy to a thread, which writes and
syncs it while training goes on. No rank waits for another there: the coordinator waits until all have written their
parts, and then declares the folder whole.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any, Final, NamedTuple, Self, TypeVar

import torch
import torch.distributed as dist

from tandem.common.errors import CheckpointError, DamagedCheckpoint, is_shortage
from tandem.common.memory import available_bytes
from tandem.common.numeric import RecentSteps
from tandem.config import Config
from tandem.config.schema.columns import Model
from tandem.refit.weights import host_name
from tandem.samples import manifest
from tandem.samples.manifest import FileRecord
from tandem.samples.model_files import load_tokenizer
from tandem.trainer.backend import CheckpointWriting
from tandem.trainer.files import adapter_files, box_files, policy_files
from tandem.trainer.files.box_files import BoxFiles, BoxPart

POLICY: Final = "policy"
"""Folder of the policy. Each model's folder has the name of the model."""
OPTIMIZER = "optimizer"
MAX_FILE_BYTES = 5 * 10**9
"""The largest size of one file."""
_COUNTS = "optimizer.json"
_COUNTED = ("num_optimizer_steps", "num_schedule_steps", "recent_grad_norms", "recent_losses")
"""Keys of the counts of `OptimizerCounts` in that file."""
_SPARE = 2
"""How many times the copies of a host's ranks must fit in its memory, because training goes on beside them."""
_MESSAGE_BYTES = 512
_LATER, _FOR_GOOD = "~", "!"
"""Beginnings of a rank's message: of an error by a shortage, which may be over later, and of any other."""

Result = TypeVar("Result")
Files = tuple[Path, Mapping[str, FileRecord]]
"""The files written, by path within a folder."""


class OptimizerCounts(NamedTuple):
    """The number of steps that an optimizer has taken, and its schedule; and the last of them."""

    steps: int = 0
    """Optimizer steps."""
    schedule_steps: int | None = 0
    """Steps of the schedule: passes over a batch. None in a checkpoint of a release that counted optimizer steps."""
    grad_norms: tuple[float, ...] = ()
    losses: tuple[float, ...] = ()
    """Losses of the last optimizer steps, like the norms before them: the next steps are compared with these."""

    @classmethod
    def of(cls, steps: int, schedule_steps: int, recent: RecentSteps) -> Self:
        """Return the counts, and the last steps."""
        return cls(steps, schedule_steps, tuple(recent.grad_norms), tuple(recent.losses))

    @property
    def recent_steps(self) -> RecentSteps:
        """The last steps."""
        return RecentSteps(self.grad_norms, self.losses)

    def schedule_steps_of(self, steps_per_pass: int) -> int:
        """Return the steps of the schedule, where a pass over a batch is that many optimizer steps.

        After a checkpoint of an earlier release, the schedule stands where a run of this release would have it.
        """
        return self.steps // steps_per_pass if self.schedule_steps is None else self.schedule_steps


class ModelState(NamedTuple):
    """One model's contents of a checkpoint, as it is now, in the memory that training changes."""

    model: Any
    """The model, for its configuration and the names of its tensors. It need have no weights."""
    tensors: Iterable[Mapping[str, torch.Tensor]]
    """Whole tensors in CPU memory of their own, a batch at a time. Ranks other than 0 get empty batches, but must go
    through all of them: making a batch may be collective.
    """
    num_bytes: int
    """Bytes of all its tensors."""
    optimizer: Callable[[], Iterator[BoxPart]]
    """Makes this rank's part of the optimizer's state."""
    counts: OptimizerCounts
    adapters: adapter_files.AdapterDescription | None = None
    """If not None, the tensors are adapters, and the model's own weights are not written."""


def step_of(folder: Path) -> int:
    """Return the training step of a checkpoint ``step_<n>``. Raises `CheckpointError`."""
    name = folder.resolve().name
    prefix, _, number = name.partition("_")
    if prefix != "step" or not number.isdecimal():
        raise CheckpointError(f"{folder} is no checkpoint of Tandem: its folder should be named step_<number>")
    return int(number)


class _Copy(NamedTuple):
    """This rank's part of one model's checkpoint."""

    name: Model
    writer: policy_files.PolicyWriter | adapter_files.AdapterWriter | None
    """The writer of the model's weights; None on ranks other than 0."""
    tensors: Iterable[Mapping[str, torch.Tensor]]
    optimizer: Iterable[BoxPart]
    counts: OptimizerCounts


def optimizer_folder(model: Model) -> str:
    """Return the name of the folder of a model's optimizer, beside that of the model."""
    return OPTIMIZER if model == POLICY else f"{model}_{OPTIMIZER}"


def save(
    folder: Path,
    states: Mapping[Model, ModelState],
    config: Config,
    *,
    max_file_bytes: int = MAX_FILE_BYTES,
    first_writer: int = 0,
) -> CheckpointWriting:
    """Copy the states and begin to write the copies under `folder`. From then on the states may change.

    Processes of another group may write other models there. `first_writer` is the number of this group's first process.

    If the memory of some host has no room for the copies, everything is written before this returns, one file's
    contents at a time. Collective. Raises `CheckpointError` if an optimizer's state cannot be saved. The result has an
    error on a rank that could not write.
    """
    is_first = dist.get_rank() == 0
    writers = {
        name: _writer(folder / name, state, max_file_bytes, config.settings_of(name).model_name) if is_first else None
        for name, state in states.items()
    }
    needed = sum(
        sum(part.elements.nbytes for part in state.optimizer()) + (state.num_bytes if is_first else 0)
        for state in states.values()
    )
    shortage = _shortage(needed)
    copies = [_copy(name, state, writers[name], is_lazy=bool(shortage)) for name, state in states.items()]
    write = partial(_write, folder, copies, config, max_file_bytes, first_writer + dist.get_rank())
    num_bytes: Future[int] = Future()
    if shortage:
        _run(write, num_bytes)
        return CheckpointWriting(num_bytes, shortage)
    Thread(target=_run, args=(write, num_bytes), name="checkpoint", daemon=True).start()
    return CheckpointWriting(num_bytes, "")


def _writer(
    folder: Path, state: ModelState, max_file_bytes: int, source: str
) -> policy_files.PolicyWriter | adapter_files.AdapterWriter:
    if state.adapters is not None:
        return adapter_files.AdapterWriter(folder, state.adapters)
    return policy_files.PolicyWriter(folder, state.model, max_file_bytes, source)


def _copy(
    name: Model,
    state: ModelState,
    writer: policy_files.PolicyWriter | adapter_files.AdapterWriter | None,
    *,
    is_lazy: bool,
) -> _Copy:
    """Copy a state. If `is_lazy`, copy it a part at a time while it is written."""
    tensors = state.tensors
    if state.adapters is None:
        tensors = (policy_files.convert_names(state.model, batch) if batch else batch for batch in tensors)
    optimizer = box_files.snapshot(state.optimizer())
    if is_lazy:
        return _Copy(name, writer, tensors, optimizer, state.counts)
    is_first = writer is not None
    return _Copy(name, writer, [batch for batch in tensors if is_first], list(optimizer), state.counts)


def _run(work: Callable[[], Result], result: Future[Result]) -> None:
    try:
        result.set_result(work())
    except Exception as error:
        result.set_exception(error)


def _shortage(num_bytes: int) -> str:
    """Return why the ranks of a host have no memory to copy what they write; empty if they have.

    `num_bytes` is this rank's part. Collective, with the same result on every rank.
    """
    mine = torch.tensor([zlib.crc32(host_name().encode()), num_bytes, available_bytes()])
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    rows = torch.stack(everyone)
    for host in set(rows[:, 0].tolist()):
        host_rows = rows[rows[:, 0] == host]
        needed, free = int(host_rows[:, 1].sum()), int(host_rows[:, 2].min())
        if _SPARE * needed > free:
            return (
                f"a copy takes {needed / 1e9:.1f} GB of a host's memory, where {free / 1e9:.1f} GB are free, and "
                f"training goes on beside it only if {_SPARE} fit"
            )
    return ""


def _write(folder: Path, copies: Iterable[_Copy], config: Config, max_file_bytes: int, writer: int) -> int:
    """Write and sync this rank's part; return its bytes. Raises `CheckpointError`."""
    files: dict[str, FileRecord] = {}
    for copy in copies:
        files |= _write_model(folder, copy, config)
        files |= _write_optimizer(folder, copy, max_file_bytes)
    with as_checkpoint_error(f"cannot write {folder}"):
        folder.mkdir(parents=True, exist_ok=True)  # ranks that train no model have not created it
        num_bytes = sync([manifest.write_part(folder, writer, files)])
        sync_folder(folder)
    return num_bytes + sum(record.size for record in files.values())


def _write_model(folder: Path, copy: _Copy, config: Config) -> dict[str, FileRecord]:
    """Write weights, configuration and tokenizer if there is a writer; return the files.

    Raises `CheckpointError` on a rank that could not write, after all has been gathered.
    """
    target, writer = folder / copy.name, copy.writer
    failure: CheckpointError | None = None
    for tensors in copy.tensors:
        if writer is not None and failure is None:
            try:
                with as_checkpoint_error(f"cannot write {target}"):
                    writer.add(tensors)
            except CheckpointError as error:
                failure = error  # and gather on, because the others may be waiting for this rank
    if failure is not None:
        raise failure
    if writer is None:
        return {}
    with as_checkpoint_error(f"cannot write {target}"):
        digests = writer.finish()
        load_tokenizer(config).save(target)
        return _synced(folder, target, target.iterdir(), digests)


def _write_optimizer(folder: Path, copy: _Copy, max_file_bytes: int) -> dict[str, FileRecord]:
    target = folder / optimizer_folder(copy.name)
    with as_checkpoint_error(f"cannot write {target}"):
        digests = box_files.write(target, dist.get_rank(), copy.optimizer, max_file_bytes)
        paths = list(digests)
        if dist.get_rank() == 0:
            paths.append(target / _COUNTS)
            paths[-1].write_text(json.dumps(dict(zip(_COUNTED, copy.counts, strict=True))) + "\n")
        return _synced(folder, target, paths, digests)


def _synced(
    folder: Path, target: Path, paths: Iterable[Path], digests: Mapping[Path, Mapping[str, str]]
) -> dict[str, FileRecord]:
    """Sync files of a checkpoint's folder to disk; return them by path in the checkpoint."""
    files = {str(path.relative_to(folder)): manifest.describe(path, digests.get(path)) for path in sorted(paths)}
    sync(folder / name for name in files)
    sync_folder(target)
    sync_folder(folder)
    return files


def files_of(checkpoint: Path) -> list[Files]:
    """Return the files of a checkpoint; none if it has no manifest. Raises `DamagedCheckpoint`."""
    described = manifest.read(checkpoint)
    return [] if described is None else [(checkpoint, described.files)]


def files_of_model(source: str) -> list[Files]:
    """Return the files of a model's folder; none unless it is the ``policy/`` of a checkpoint.

    Raises `DamagedCheckpoint`.
    """
    folder_manifest = manifest.of_model(Path(source))
    return [] if folder_manifest is None else [(folder_manifest[0], folder_manifest[1].files)]


def files_to_load(config: Config, checkpoint: Path | None, models_held: Collection[Model]) -> list[Files]:
    """Return the files that a backend with these models loads at its start.

    With the policy, these are all files of the checkpoint except those of models held elsewhere. Raises
    `DamagedCheckpoint`.
    """
    trained = config.declaration.trains
    # A trained model comes from the checkpoint, if there is one. The base of adapters never does.
    saved_models = [model for model in trained if config.settings_of(model).adapters is None]
    read = [model for model in models_held if checkpoint is None or model not in saved_models]
    sources = dict.fromkeys(
        config.settings_of(model, number).model_name for model in read for number in range(config.num_of(model))
    )
    other_folders = {
        folder for model in trained if model not in models_held for folder in (model, optimizer_folder(model))
    }
    parts = [] if checkpoint is None else files_of(checkpoint)
    parts = [
        (folder, {name: each for name, each in files.items() if Path(name).parts[0] not in other_folders})
        for folder, files in parts
    ]
    return [*parts, *(files for source in sources for files in files_of_model(source))]


class FileProof:
    """The proof that files are as they were written, found by all ranks together while they load them.

    Each rank checks all names, sizes and headers before it loads anything. A thread reads its part of the tensors
    meanwhile.
    """

    def __init__(self, parts: Iterable[Files]) -> None:
        """Begin to check. Raises `DamagedCheckpoint`."""
        self._parts = list(parts)
        for folder, files in self._parts:
            manifest.check_files(folder, files)
        self._is_read: Future[None] = Future()
        share = dist.get_rank(), dist.get_world_size()
        Thread(target=_run, args=(partial(self._read, *share), self._is_read), name="proof", daemon=True).start()

    def conclude(self) -> None:
        """Wait for all tensors. Collective. Raises `DamagedCheckpoint` on every rank if one found damage."""
        try:
            agree(self._is_read.result)
        except CheckpointError as error:
            raise DamagedCheckpoint(str(error)) from error

    def _read(self, rank: int, num_ranks: int) -> None:
        for folder, files in self._parts:
            manifest.check_tensors(folder, files, reader=rank, num_readers=num_ranks)


def read_counts(folder: Path, model: Model = POLICY) -> OptimizerCounts:
    """Return the steps that a model's optimizer, and its schedule, have taken. Raises `CheckpointError`."""
    source = folder / optimizer_folder(model)
    with as_checkpoint_error(f"cannot read {source}"):
        if not (source / _COUNTS).exists():
            raise CheckpointError(f"it has no {_COUNTS}: an earlier version of Tandem wrote it, or it is not whole")
        counts = json.loads((source / _COUNTS).read_bytes())
        steps, schedule_steps, *recent = map(counts.get, _COUNTED)
        return OptimizerCounts(int(steps), schedule_steps, *(tuple(values or ()) for values in recent))


def read_optimizer(folder: Path, read: Callable[[BoxFiles], None], model: Model = POLICY) -> None:
    """Read a model's optimizer with `read`, from files that any number of ranks wrote.

    Raises `CheckpointError`.
    """
    source = folder / optimizer_folder(model)
    with as_checkpoint_error(f"cannot read {source}"):
        read(BoxFiles(source))


def agree(action: Callable[[], Result]) -> Result:
    """Run `action` here and on all ranks; raise `CheckpointError` on every rank if one of them raised."""
    try:
        result = action()
    except CheckpointError as error:
        _tell(f"{_LATER if is_shortage(error) else _FOR_GOOD}{error}")
        raise
    for rank, error_there in enumerate(_tell("")):
        if error_there:
            failed = CheckpointError(f"rank {rank} {error_there[1:]}")
            failed.is_final = error_there[0] != _LATER
            raise failed
    return result


def _tell(error: str) -> list[str]:
    """Exchange error messages, empty without an error, and return those of all ranks."""
    mine = torch.zeros(_MESSAGE_BYTES, dtype=torch.uint8)
    text = torch.frombuffer(bytearray(error.encode()[:_MESSAGE_BYTES] + b"\0"), dtype=torch.uint8)[:_MESSAGE_BYTES]
    mine[: len(text)] = text
    everyone = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    return [bytes(message.numpy()).rstrip(b"\0").decode(errors="replace") for message in everyone]


@contextmanager
def as_checkpoint_error(action: str) -> Iterator[None]:
    """Turn the libraries' errors for full disks and broken files into `CheckpointError`."""
    try:
        yield
    except Exception as error:  # tokenizers raises bare `Exception` on a full disk, and others their own
        raise CheckpointError(f"{action}: {_line(error)}") from error


def _line(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return (str(error) or type(error).__name__).split("\n")[0]


def sync(paths: Iterable[Path]) -> int:
    """Sync files to disk; return their bytes."""
    num_bytes = 0
    for path in paths:
        with path.open("rb+") as file:
            os.fsync(file.fileno())
            num_bytes += os.fstat(file.fileno()).st_size
    return num_bytes


def sync_folder(folder: Path) -> None:
    """Sync the names in a folder to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
