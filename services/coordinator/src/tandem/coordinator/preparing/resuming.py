"""The choice of the checkpoint that a run continues from, and of another if that one is damaged."""

from __future__ import annotations

import re
from collections.abc import Callable

import msgspec

from tandem.common.errors import CheckpointError, DamagedCheckpoint, RunFolderError, nearest
from tandem.config import Config, config_from_json, fingerprint, resume_differences
from tandem.coordinator.scheduler.events import FinishRun
from tandem.observe.run_folder.checkpoints import CheckpointFolder
from tandem.observe.run_folder.journal import JournalReader, RefitRecord
from tandem.observe.run_folder.journal_writer import Journal
from tandem.samples import manifest
from tandem.samples.manifest import CheckpointManifest

_OF_A_RANK = re.compile(r"^rank \d+ ")


class StartingPoint(msgspec.Struct, frozen=True, kw_only=True):
    """The point where a run begins."""

    first_step: int
    resume_from: str
    """Checkpoint folder; empty to start from the model."""


FROM_THE_MODEL = StartingPoint(first_step=1, resume_from="")


class ResumePoints:
    """The checkpoints that a run may continue from."""

    def __init__(
        self,
        config: Config,
        journal: Journal,
        checkpoints: CheckpointFolder,
        say: Callable[[str], None],
        origin: StartingPoint = FROM_THE_MODEL,
    ) -> None:
        """`origin` is where the run begins while it has no checkpoint."""
        self._origin = origin
        self._config = config
        self._journal = journal
        self._checkpoints = checkpoints
        self._say = say
        last = journal.last_step()
        self._steps = [] if last is None else [step for step in checkpoints.steps() if step <= last]
        """Finished steps with a checkpoint."""

    def start(self, from_step: int | None) -> StartingPoint:
        """Find the checkpoint to continue from: the newest, unless a step is named. Later steps are done again.

        Raise `CheckpointError` if that step has none, and `DamagedCheckpoint` if it is damaged.
        """
        if from_step is not None and from_step not in self._steps:
            raise CheckpointError(f"--from {from_step}: that step has no checkpoint; {self._choices(from_step)}")
        if not self._steps:
            self._journal.forget_after(-1)  # also refits, where no step was done
            return self._origin
        step = self._steps[-1] if from_step is None else from_step
        folder = self._checkpoints.folder_of(step)
        try:
            if self._check(step) is None:
                self._say(f"{folder} has no {manifest.NAME}: an earlier release wrote it, so it cannot be verified")
            elif from_step is not None:  # before later steps are dropped
                self._read_all(step)
        except DamagedCheckpoint as error:
            raise self.add_way_out(error, step) from error
        if from_step is not None:
            for aside in self._checkpoints.set_aside_after(step):
                self._say(f"the steps after {step} are done again; a checkpoint of them is kept as {aside}")
        self._journal.forget_after(step)
        self._journal.record_checkpoint(step, str(folder))  # the run may have ended before it was recorded
        return StartingPoint(first_step=step + 1, resume_from=str(folder.absolute()))

    def damage_in(self, finish: FinishRun, start: StartingPoint) -> DamagedCheckpoint | None:
        """Return the damage that trainers found in the checkpoint to continue from; None for other errors."""
        text = "" if finish.error is None else finish.error.what
        if not start.resume_from or manifest.DAMAGED not in text or f"{start.resume_from}/" not in text:
            return None
        return DamagedCheckpoint(_OF_A_RANK.sub("", text))

    def add_way_out(self, error: DamagedCheckpoint, step: int) -> DamagedCheckpoint:
        """Add the newest other checkpoint that is whole, read completely, to the error of a step's checkpoint."""
        candidates = [candidate for candidate in reversed(self._steps) if candidate != step]
        if candidates:
            self._say(f"looking for a checkpoint that is whole among those of steps {', '.join(map(str, candidates))}")
        error.whole_step = next((candidate for candidate in candidates if self._is_whole(candidate)), None)
        return error

    def _is_whole(self, step: int) -> bool:
        try:
            if self._check(step) is None:
                return False
            self._read_all(step)
        except CheckpointError as error:
            self._say(f"not that of step {step}: {error}")
            return False
        return True

    def _check(self, step: int) -> CheckpointManifest | None:
        return check_checkpoint(self._config, self._journal, self._checkpoints, step)

    def _read_all(self, step: int) -> None:
        folder = self._checkpoints.folder_of(step)
        contents = manifest.read(folder)
        assert contents is not None, "it was checked before"
        manifest.check_tensors(folder, contents.files)

    def _choices(self, step: int) -> str:
        if not self._steps:
            return "none has"
        steps = list(map(str, self._steps))
        return f"these have: {', '.join(steps)}{nearest(str(step), steps)}"


def check_checkpoint(
    config: Config, journal: JournalReader, checkpoints: CheckpointFolder, step: int
) -> CheckpointManifest | None:
    """Check the origin and the files of a run's checkpoint, but not its tensors.

    Return its manifest, if it has one. Raise `DamagedCheckpoint` if a check fails.
    """
    folder = checkpoints.folder_of(step)
    contents = manifest.read(folder)
    if contents is None:
        checkpoints.read_record(step)
        return None
    for discrepancy, is_ in (
        (f"of step {contents.step}, not {step}", contents.step == step),
        (f"of the run {contents.run_id}, not {journal.run_id}", contents.run_id == journal.run_id),
        (
            f"of weight version {contents.version}, not {journal.step(step).version}",
            contents.version == journal.step(step).version,
        ),
    ):
        if not is_:
            raise DamagedCheckpoint(f"{folder} {manifest.DAMAGED}: what lies there is {discrepancy}")
    manifest.check_files(folder, contents.files)
    if contents.configuration != fingerprint(config):
        written = config_from_json(checkpoints.read_record(step).config_json.encode())
        differing = resume_differences(written, config)
        if differing:  # not only the keys of another release
            raise DamagedCheckpoint(
                f"{folder} {manifest.DAMAGED}: what lies there was written with another {', '.join(differing)}"
            )
    return contents


def refuse_other_weights(earlier: RefitRecord, checkpoints: CheckpointFolder, digest: int, verify: str) -> None:
    """Compare the digest of a version with the one that the journal has from before the run was resumed.

    Raise `DamagedCheckpoint` if they differ: then trainers loaded other weights than those that were trained.
    """
    if earlier.verify == verify and earlier.digest and digest and earlier.digest != digest:
        raise DamagedCheckpoint(
            f"{checkpoints.folder_of(earlier.version)} {manifest.DAMAGED}: its weights have the digest {digest:016x}; "
            f"those of version {earlier.version} had {earlier.digest:016x} when they were trained"
        )


def refuse_changes(journal: JournalReader, config: Config) -> None:
    """Raise `RunFolderError` if a run cannot be resumed because this configuration changes what it learns from."""
    differences = resume_differences(config_from_json(journal.config_json), config)
    if differences:
        raise RunFolderError(f"cannot resume {journal.folder}: the configuration differs in {', '.join(differences)}")
