"""The comparison of a replay's weights with those of its run after the same steps, to the bit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tandem.common.errors import DamagedCheckpoint
from tandem.config import Config, changed_keys
from tandem.coordinator.preparing.replay import is_within
from tandem.observe.run_folder.checkpoints import CheckpointFolder, checkpoints_of, config_of, steps_in_words
from tandem.observe.run_folder.journal import StepRecord, read_journal
from tandem.samples import manifest

_OF_NO_WEIGHTS = ("prerequisite", "replay", "checkpointing", "logger", "refit", "cluster.address", "cluster.deadlines")
"""Keys that differ between a run and its replay without changing weights."""
_OF_CLIPS = ("loss_fn.ratio_clip_min", "loss_fn.ratio_clip_max", "loss_fn.ratio_clip_c")
_CLIPPED = "clip_fraction"
_OF_GPUS = "memory_training_trainer_reserved_gb"
"""Metric that only trainers on GPUs report."""


def compare(config: Config) -> str:
    """Compare a finished replay with its run, at each step for which both have a checkpoint; return a line.

    Manifests have a digest of each tensor, so that only they are read.
    """
    assert config.replay is not None, "asked only of a replay"
    run, folder = Path(config.replay.run), Path(config.logger.log_dir)
    with read_journal(run) as journal:
        before, theirs, run_id = config_of(journal), journal.steps(), journal.run_id
    with read_journal(folder) as journal:
        ours, own_id = journal.steps(), journal.run_id
    equal = _equal(checkpoints_of(run, before), run_id, checkpoints_of(folder, config), own_id)
    if not equal:
        return f"weights are not compared: {run} and this have no checkpoints of the same step{_losses(theirs, ours)}"
    last = max(equal)
    if equal[last]:
        return (
            f"weights are equal to the bit to those of step {last} of {run}{_describe_no_effect(before, config, ours)}"
        )
    same = [step for step in equal if equal[step]]
    until = f" (those of {steps_in_words(same)} are equal)" if same else ""
    return f"weights differ from those of step {last} of {run}{until}, {_explain_difference(before, config, theirs)}"


def _equal(theirs: CheckpointFolder, run_id: str, ours: CheckpointFolder, own_id: str) -> dict[int, bool]:
    """Return whether the weights are equal, for each step for which both runs have a checkpoint."""
    equal = {}
    for step in sorted({*theirs.steps()} & {*ours.steps()}):
        their_digests, our_digests = _digests(theirs.folder_of(step), run_id), _digests(ours.folder_of(step), own_id)
        if their_digests and our_digests:
            equal[step] = their_digests == our_digests
    return equal


def _digests(folder: Path, run_id: str) -> dict[str, str]:
    """Return the digests of the policy's tensors in a run's checkpoint; empty if it is none of that run."""
    try:
        contents = manifest.read(folder)
    except DamagedCheckpoint:
        return {}
    if contents is None or contents.run_id != run_id:
        return {}
    files = manifest.only(contents, "policy").files.values()
    return {name: digest for file in files for name, digest in file.tensors.items()}


def _describe_no_effect(before: Config, after: Config, steps: Sequence[StepRecord]) -> str:
    """Return, of settings that were changed though the weights are equal, that they had no effect; empty without."""
    changes = _changes(before, after)
    if not changes:
        return ""
    shares = [step.metrics[_CLIPPED] for step in steps if _CLIPPED in step.metrics]
    is_of_clips = all(is_within(key, _OF_CLIPS) for key in changes)
    effect = "no ratio was clipped" if is_of_clips and shares and not any(shares) else "no effect in these steps"
    return f", though {_were_changed(changes)}: {effect}"


def _explain_difference(before: Config, after: Config, steps: Sequence[StepRecord]) -> str:
    changes = _changes(before, after)
    if not changes and any(_OF_GPUS in step.metrics for step in steps):
        return "though nothing was changed: kernels of GPUs add gradients up in another order each time"
    if not changes:
        return "though nothing was changed"
    return f"as {_were_changed(changes)}"


def _changes(before: Config, after: Config) -> list[str]:
    """Return the keys that were changed and may change weights."""
    return [key for key in changed_keys(before, after) if not is_within(key, _OF_NO_WEIGHTS)]


def _were_changed(keys: Sequence[str]) -> str:
    return f"{', '.join(keys)} {'was' if len(keys) == 1 else 'were'} changed"


def _losses(before: Sequence[StepRecord], after: Sequence[StepRecord]) -> str:
    """Return in how many steps loss and gradient norm are equal, where both runs have trained."""
    earlier_metrics = {record.step: record.metrics for record in before}
    pairs = [(record.metrics, earlier_metrics[record.step]) for record in after if record.step in earlier_metrics]
    same = sum(all(later.get(name) == earlier.get(name) for name in ("loss", "grad_norm")) for later, earlier in pairs)
    return f"; loss and gradient norm are equal in {same} of {len(pairs)} steps" if pairs else ""
