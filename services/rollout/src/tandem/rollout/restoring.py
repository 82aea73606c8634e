"""Samples of a rollout log that are trained on again, read as if they had just been generated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from tandem.common.errors import SamplesError, WireError
from tandem.common.messages import Generated, MemoryUse, RestoreSamples, SamplesFinished
from tandem.common.numeric.bounds import bound
from tandem.samples.recorded_shards import read_shard, samples_of
from tandem.samples.routed_experts import RoutedExperts, as_trained_on
from tandem.samples.sample_files import SHARD
from tandem.samples.sample_record import RecordedSample
from tandem.samples.sample_writing import keys_of, read_unfinished


def restored(
    command: RestoreSamples,
    folder: Path,
    run_id: str,
    rollout: str,
    vocabulary: int,
    experts: RoutedExperts | None,
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
            arrays=as_trained_on(sample.arrays, experts, keeps_masks=keeps_masks),
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
    read = read_shard if path.suffix == SHARD else read_unfinished
    table = read(path, run_id)
    rows = [row for row, (command_id, group, _) in enumerate(keys_of(table)) if (command_id, group) in group_keys]
    samples = samples_of(table.take(rows))
    for sample in samples:
        try:
            sample.arrays.check_samples(vocabulary)
        except WireError as error:
            raise SamplesError(f"{path} has samples of another model: {error}") from error
    return samples


def as_generated(command: RestoreSamples, samples: Sequence[RecordedSample]) -> Iterator[SamplesFinished | Generated]:
    """Yield the replies of a `Generate` that has made these samples."""
    yield SamplesFinished(
        command_id=command.command_id,
        step=command.step,
        purpose="train",
        samples=tuple(msgspec.structs.replace(sample.scored, response="") for sample in samples),
    )
    yield Generated(
        command_id=command.command_id,
        step=command.step,
        purpose="train",
        num_samples=len(samples),
        num_tokens=0,
        seconds={},
        memory=MemoryUse(peak=0, held=0),
    )
