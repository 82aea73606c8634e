"""A run's checkpoints and configuration, read from its folder; which checkpoints count, and are kept.

Trainer ranks write into a temporary folder while later steps run. Once every rank has synced its part, the coordinator
adds ``training.json`` and ``manifest.json``, and renames the folder to ``step_<n>``. The rename is atomic, so a folder
of that name was complete when it got the name. The link ``latest`` then points to it. The manifest reveals later damage
to its files (`tandem.samples.manifest`).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import shutil
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from tandem.common.errors import CheckpointError, ConfigError, DamagedCheckpoint, ModelError, RunFolderError
from tandem.config import Config, config_from_json
from tandem.observe.run_folder.journal import JournalReader
from tandem.observe.run_folder.journal_file import JOURNAL_NAME
from tandem.samples import manifest

if TYPE_CHECKING:
    from tandem.samples.tokenizer import Tokenizer

_TEMPORARY = ".writing_step_"
_RETIRED = ".deleting_step_"
_ASIDE = "superseded_step_"
_RECORD = "training.json"


class CheckpointRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The content of ``training.json``."""

    step: int
    version: int
    metric_name: str
    metric: float | None
    """Value by which checkpoints are ranked; None if it was not measured at this step, or is no number."""
    config_json: str
    """Resolved configuration of the run that wrote it."""


class LateMetrics:
    """Metrics that rank checkpoints, and are measured after they were saved."""

    def __init__(self, metrics: Mapping[int, float]) -> None:
        """`metrics` are those of steps that were measured already."""
        self.metrics: dict[int, float | None] = dict(metrics)
        """Metric of each step that was measured; None if that failed."""
        self.are_expected = True
        """Whether those of other steps may come yet."""

    def is_awaited(self, step: int) -> bool:
        """Tell whether a step's metric may come yet."""
        return self.are_expected and step not in self.metrics


class CheckpointFolder:
    """The checkpoints of one run."""

    def __init__(
        self,
        root: Path,
        *,
        keep_top_k: int | None,
        higher_is_better: bool,
        run_id: str = "",
        late_metrics: LateMetrics | None = None,
    ) -> None:
        """Use the folder `root`; with a `keep_top_k` of None, all checkpoints are kept.

        Those whose metric is awaited are kept too.
        """
        self._root = root
        self._run_id = run_id
        self._temporary = f"{_TEMPORARY}{{step}}.{secrets.token_hex(4)}"
        self._keep_top_k = keep_top_k
        self._late_metrics = late_metrics
        self._higher_is_better = higher_is_better

    @property
    def temporary_pattern(self) -> str:
        """Path of the folder that ranks write to, with ``{step}`` in place of the step.

        No other run uses it: after its coordinator was killed, a rank may go on writing beside the resumed run.
        """
        return str(self._root.absolute() / self._temporary)

    def prepare(self) -> None:
        """Make the folder, and remove what a crash left half-written or half-deleted."""
        try:
            self._root.mkdir(parents=True, exist_ok=True)
            for leftover in [*self._root.glob(f"{_TEMPORARY}*"), *self._root.glob(f"{_RETIRED}*")]:
                shutil.rmtree(leftover)
        except OSError as error:
            raise CheckpointError(f"checkpointing.checkpoint_dir: cannot use {self._root}: {error.strerror}") from error

    def publish(self, record: CheckpointRecord, configuration: str = "") -> Path:
        """Give a completely written checkpoint its final name, and delete those that are no longer kept.

        `configuration` is the fingerprint of its configuration.
        """
        temporary = Path(self.temporary_pattern.format(step=record.step))
        final = self.folder_of(record.step)
        try:
            _write_synced(temporary / _RECORD, msgspec.json.format(msgspec.json.encode(record)))
            checkpoint_manifest = manifest.CheckpointManifest(
                run_id=self._run_id,
                step=record.step,
                version=record.version,
                configuration=configuration,
                files={**manifest.take_parts(temporary), _RECORD: manifest.describe(temporary / _RECORD)},
            )
            _write_synced(temporary / manifest.NAME, msgspec.json.encode(checkpoint_manifest))
            _sync_folder(temporary)
            if final.exists():  # left by a run without its journal
                self._delete(final)
            temporary.rename(final)
            self._point_latest_to(final)
            self.prune(newest=record.step)
            _sync_folder(self._root)
        except OSError as error:
            raise CheckpointError(f"cannot publish checkpoint {final}: {error.strerror}") from error
        return final

    def folder_of(self, step: int) -> Path:
        """Return the folder of the checkpoint of a step."""
        return self._root / f"step_{step}"

    def steps(self) -> list[int]:
        """Return the steps with a checkpoint, readable or not, in order."""
        numbers = [path.name.partition("_")[2] for path in self._root.glob("step_*")]
        return sorted(int(number) for number in numbers if number.isdecimal())

    def read_record(self, step: int) -> CheckpointRecord:
        """Return the record of a checkpoint. Raises `DamagedCheckpoint`."""
        path = self.folder_of(step) / _RECORD
        try:
            return msgspec.json.decode(path.read_bytes(), type=CheckpointRecord)
        except (OSError, msgspec.MsgspecError) as error:
            raise DamagedCheckpoint(f"{path.parent} is no Tandem checkpoint: {error}") from error

    def all(self) -> dict[int, CheckpointRecord]:
        """Return the checkpoints by step. Raises `DamagedCheckpoint`."""
        return {step: self.read_record(step) for step in self.steps()}

    def awaits_metric(self, step: int) -> bool:
        """Tell whether the metric of a step's checkpoint may come yet."""
        return self._late_metrics is not None and self._late_metrics.is_awaited(step)

    def newest(self, *, up_to: int) -> tuple[int, Path] | None:
        """Return step and folder of the newest checkpoint that is not newer than `up_to`."""
        steps = [step for step in self.steps() if step <= up_to]
        return (steps[-1], self.folder_of(steps[-1])) if steps else None

    def set_aside_after(self, step: int) -> list[Path]:
        """Rename the checkpoints of later steps, which invalidates them; return their new folders."""
        aside_folders = []
        for later in self.steps():
            if later > step:
                numbers = (n for n in range(1, 10_000) if not (self._root / f"{_ASIDE}{later}.{n}").exists())
                aside_folders.append(self.folder_of(later).rename(self._root / f"{_ASIDE}{later}.{next(numbers)}"))
        if aside_folders:
            self._point_latest_to(self.folder_of(step))
            _sync_folder(self._root)
        return aside_folders

    def prune(self, newest: int) -> None:
        """Keep the best `keep_top_k`, and the newest, so that the run can always be resumed.

        Those without the metric rank below all others, as in NeMo-RL v0.7 (`nemo_rl/utils/checkpoint.py`), and of equal
        ones the earlier below the later.
        """
        if self._keep_top_k is None:
            return
        sign = 1.0 if self._higher_is_better else -1.0
        worst = float("-inf")

        def rank(item: tuple[int, CheckpointRecord]) -> tuple[float, int]:
            step, record = item
            return (worst if record.metric is None else sign * record.metric, step)

        readable: dict[int, CheckpointRecord] = {}
        late = self._late_metrics
        for step in self.steps():
            if self.awaits_metric(step):
                continue
            with contextlib.suppress(DamagedCheckpoint):  # keep it in case the user can repair it
                record = self.read_record(step)
                if late is not None and record.metric is None:
                    record = msgspec.structs.replace(record, metric=late.metrics.get(step))
                readable[step] = record
        best_first = sorted(readable.items(), key=rank, reverse=True)
        for step, _ in best_first[self._keep_top_k :]:
            if step != newest:
                self._delete(self.folder_of(step))

    def _delete(self, folder: Path) -> None:
        retired = self._root / folder.name.replace("step_", _RETIRED)
        folder.rename(retired)  # rename first, so that a half-deleted folder never looks complete
        shutil.rmtree(retired)

    def _point_latest_to(self, final: Path) -> None:
        link = self._root / ".latest"
        link.unlink(missing_ok=True)
        link.symlink_to(final.name)
        link.rename(self._root / "latest")


def _write_synced(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def config_of(journal: JournalReader) -> Config:
    """Return the configuration of a run. Raises `RunFolderError` if this release does not know it."""
    try:
        return config_from_json(journal.config_json)
    except ConfigError as error:
        raise RunFolderError(f"{journal.folder / JOURNAL_NAME}: another release wrote it: {error}") from error


def checkpoints_of(run: Path, config: Config) -> CheckpointFolder:
    """Return the checkpoints of the run in a folder; both may have been moved together."""
    root, log_dir = Path(config.checkpointing.checkpoint_dir), Path(config.logger.log_dir)
    if root.is_relative_to(log_dir):
        root = run / root.relative_to(log_dir)
    return CheckpointFolder(root, keep_top_k=None, higher_is_better=True)


def tokenizer_of(run: Path, config: Config) -> Tokenizer | None:
    """Return the tokenizer of a run, or its copy in a checkpoint; None if neither is on this machine."""
    from tandem.samples.model_files import load_tokenizer

    checkpoints = checkpoints_of(run, config)
    folders = [checkpoints.folder_of(step) / "policy" for step in reversed(checkpoints.steps())]
    for folder in [Path(config.policy.tokenizer.name), *folders]:
        if (folder / "tokenizer.json").is_file():
            try:
                return load_tokenizer(config, folder)
            except ModelError as error:
                print(f"note: {error}", file=sys.stderr)
    return None


def steps_in_words(steps: Iterable[int]) -> str:
    """Name steps on one line: ``step 3``, or ``steps 1 to 4, 7``."""
    numbers = sorted(steps)
    runs = itertools.groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])
    parts: list[str] = []
    for _, run in runs:
        places = [number for _, number in run]
        parts += [f"{places[0]} to {places[-1]}"] if len(places) > 2 else map(str, places)
    return f"step{'s' * (len(numbers) > 1)} {', '.join(parts)}"
