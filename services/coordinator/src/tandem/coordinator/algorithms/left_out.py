"""The samples that a replay leaves out, or gives another reward, by a file that names them.

The file has a JSON object a line: ``{"step": 3, "group": 0, "sample": 5}``. Without ``sample`` it is the whole group,
and without ``group`` the whole step. With ``reward`` the samples stay, and have that reward. A sample that is left out
is one that its environment dropped: no token of it counts, and its group is compared without it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

import msgspec

from tandem.common.errors import ConfigError, SamplesError
from tandem.common.files import read_text
from tandem.samples.sample_record import RecordedSample

OPTION = "--without"


class SampleEdit(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A line of the file."""

    step: Annotated[int, msgspec.Meta(ge=1)]
    group: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """None for all groups of the step."""
    sample: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """None for all samples of the group."""
    reward: float | None = None
    """Reward in place of the recorded one; None leaves the sample out."""

    def concerns(self, group: int, sample: int) -> bool:
        """Tell whether it concerns a sample of its step."""
        return self.group in (None, group) and self.sample in (None, sample)


class EditedSamples:
    """The edits of a file, by step."""

    def __init__(self, path: str) -> None:
        """Read the file. Raises `ConfigError`, which names the line."""
        self._path = path
        self._edits: dict[int, list[SampleEdit]] = {}
        for edit in read_edits(path):
            self._edits.setdefault(edit.step, []).append(edit)

    @property
    def steps(self) -> list[int]:
        """Steps with edits, in order."""
        return sorted(self._edits)

    def apply(self, step: int, samples: Sequence[RecordedSample]) -> list[RecordedSample]:
        """Return the samples of a step as edited. Raises `SamplesError` for an edit of a sample that is not there."""
        edits = self._edits.get(step, [])
        keys = [(sample.scored.group, sample.scored.sample) for sample in samples]
        for edit in edits:
            if not any(edit.concerns(*key) for key in keys):
                raise SamplesError(f"{self._path}: step {step} has no {_name(edit)} among its {len(keys)} samples")
        return [_apply(sample, edits) for sample in samples]


def read_edits(path: str) -> list[SampleEdit]:
    """Return the edits of a file. Raises `ConfigError`, which names the line."""
    edits = []
    for number, line in enumerate(read_text(OPTION, path).splitlines(), 1):
        if not line.strip():
            continue
        try:
            edit = msgspec.json.decode(line, type=SampleEdit)
        except msgspec.MsgspecError as error:
            raise ConfigError(f"{OPTION}: {path}, line {number}: {error}") from None
        if edit.group is None and edit.sample is not None:
            raise ConfigError(
                f"{OPTION}: {path}, line {number}: a sample needs its group, as numbers begin anew in each"
            )
        edits.append(edit)
    if not edits:
        raise ConfigError(f"{OPTION}: {path} names no sample")
    return edits


def write_edits(path: Path, edits: Iterable[SampleEdit]) -> None:
    """Write a file of edits."""
    path.write_bytes(b"".join(msgspec.json.encode(edit) + b"\n" for edit in edits))


def _apply(sample: RecordedSample, edits: Sequence[SampleEdit]) -> RecordedSample:
    scored = sample.scored
    for edit in edits:
        if edit.concerns(scored.group, scored.sample):
            if edit.reward is None:
                scored = msgspec.structs.replace(scored, dropped=True)
            else:
                scored = msgspec.structs.replace(scored, reward=edit.reward)
    return sample if scored is sample.scored else msgspec.structs.replace(sample, scored=scored)


def _name(edit: SampleEdit) -> str:
    return f"group {edit.group}" if edit.sample is None else f"group {edit.group}, sample {edit.sample}"
