"""Replay: train again from a checkpoint of a run, or from its model, on the samples that it recorded.

`begin_replay` makes the configuration of a replay from that of the run, and rejects impossible ones before anything
starts. `continue_replay` finds the configuration of a replay that has begun. Both are then runs like any other; their
section ``replay`` names the source of their samples.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from tandem.common.errors import ConfigError, DamagedCheckpoint, RunFolderError
from tandem.config import ChangedConfig, Config, change_config, changed_keys
from tandem.config.schema.declarations import ALGORITHMS
from tandem.coordinator.algorithms.recorded import is_whole
from tandem.coordinator.preparing.resuming import StartingPoint, check_checkpoint
from tandem.observe.run_folder.calls import journal_has_calls
from tandem.observe.run_folder.checkpoints import CheckpointFolder, checkpoints_of, config_of, steps_in_words
from tandem.observe.run_folder.journal import JournalReader, StepRecord, read_journal
from tandem.observe.run_folder.journal_file import CONFIG_NAME, JOURNAL_NAME, RESOLVED_FROM, list_runs_in
from tandem.samples import manifest, recorded_shards, sample_files

_MODEL = "the recorded samples are tokens of the run's own model"
_DRAWN = "it decides what a step draws, which is recorded"
_IN_VAIN = "it changes nothing on recorded samples"
_VALIDATION = (
    "val_period",
    "val_start_at",
    "val_num_generations_per_prompt",
    "stop_at_validation_metric",
    "stop_at_validation_threshold",
    "val_at_start",
    "val_at_end",
    "max_val_samples",
    "val_batch_size",
    "num_val_generations_per_prompt",
    "val_temperature",
    "val_seed",
)
_ROLLOUTS = tuple(name for name, algorithm in ALGORITHMS.items() if algorithm.rolls_out)
REFUSED = {
    "algorithm": "the samples were recorded for the run's own algorithm",
    "prerequisite": "the model exists already",
    "replay": "coordinator replay names the run, --from and --to the steps",
    "policy.model_name": _MODEL,
    "policy.new_model": _MODEL,
    "policy.tokenizer": _MODEL,
    "value.model_name": _MODEL,
    "value.new_model": _MODEL,
    "value.tokenizer": _MODEL,
    "policy.hf_config_overrides": _MODEL,
    "policy.generation": f"{_IN_VAIN}: nothing is generated",
    "env": f"{_IN_VAIN}: their rewards are recorded with them",
    "data": f"{_IN_VAIN}: no problem is drawn",
    "refit": f"{_IN_VAIN}: there are no engines for weights to move to",
    "cluster.rollouts": f"{_IN_VAIN}: there are no engines",
    "logger.samples": "a replay records no samples: it is made of them",
    "logger.num_val_samples_to_print": f"{_IN_VAIN}: nothing is validated without engines",
    **{
        f"{section}.{name}": f"{_IN_VAIN}: nothing is validated without engines"
        for section in _ROLLOUTS
        for name in _VALIDATION
    },
    **{f"{section}.max_num_steps": "--to STEP says where a replay ends" for section in _ROLLOUTS},
}
"""Keys, or whole sections, that a replay cannot change, with the reasons."""
_LEARNED = (
    "adv_estimator",
    "normalize_rewards",
    "scale_rewards",
    "use_leave_one_out_baseline",
    "overlong_filtering",
    "zero_variance_prompt_filtering",
    "reward_scaling",
    "reward_shaping",
    "num_iterations",
    "ppo_epochs",
    "policy_training_start_step",
)
_OF_ADVANTAGES = tuple(f"{section}.{name}" for section in _ROLLOUTS for name in _LEARNED)
"""Keys of the algorithm's section that a replay can change."""
_OF_OPTIMIZERS = ("policy.megatron_cfg.enabled", "policy.megatron_cfg.optimizer.optimizer", "policy.optimizer.name")
"""Keys that decide the kind of optimizer state in a checkpoint."""
_ROUTES = "policy.router_replay.enabled"
_LENGTH = "policy.max_total_sequence_length"
_OF_NO_WEIGHTS = (
    "prerequisite",
    "replay",
    "checkpointing",
    "eval",
    "logger",
    "refit",
    "cluster.address",
    "cluster.deadlines",
)
"""Keys that differ between a run and its replay without changing weights."""
_OF_CLIPS = ("loss_fn.ratio_clip_min", "loss_fn.ratio_clip_max", "loss_fn.ratio_clip_c")
_CLIPPED = "clip_fraction"
_OF_GPUS = "memory_training_trainer_reserved_gb"
"""Metric that only trainers on GPUs report."""


class RecordedRun(msgspec.Struct, frozen=True, kw_only=True):
    """A run that can be replayed; it may still be going on."""

    folder: Path
    run_id: str
    config: Config
    last_step: int
    """Last finished step."""
    whole_steps: frozenset[int]
    """Finished steps with all of their samples recorded."""
    longest: int
    """Tokens of the longest of these samples."""
    checkpoints: tuple[int, ...]
    """Finished steps with a checkpoint."""


def begin_replay(
    run: Path, from_step: int | None, to_step: int | None, overrides: Sequence[str], without: Path | None = None
) -> ChangedConfig:
    """Return the configuration of a new replay of the run in a folder, and its keys that overrides changed.

    `without` is a file that names samples to leave out.

    Raises:
        TandemError: the replay is impossible; a `ConfigError` if the command line is the reason.
    """
    with read_journal(run) as journal:
        recorded = _read_recorded_run(run, journal)
        end = _end(recorded, to_step)
        start = _start(recorded, from_step, end)
        if start:
            check_checkpoint(recorded.config, journal, checkpoints_of(run, recorded.config), start)
    settings: dict[str, Any] = {
        "prerequisite": None,
        "checkpointing": {"checkpoint_dir": None},  # within the run folder, unless an override names another
        "eval": {"during_training": False},  # it needs engines
        "logger": {"log_dir": str(new_folder(run)), "tensorboard": {"log_dir": "tensorboard"}},
        "replay": {"run": str(run), "run_id": recorded.run_id, "from_step": start, "to_step": end},
    }
    if without is not None:
        settings["replay"] |= {"without": _find_edits(without, start, end)}
    try:
        changed = change_config(recorded.config, settings, overrides, str(run / CONFIG_NAME))
    except ConfigError:  # also for wrong values of keys that cannot be changed at all
        _refuse_keys([override.partition("=")[0].strip().lstrip("+") for override in overrides], start)
        raise
    _refuse_keys(changed.keys, start)
    refuse_folders(changed.config)
    if changed.config.policy.router_replay.enabled and not recorded.config.policy.router_replay.enabled:
        raise ConfigError(f"{_ROUTES}: true, but {run} had it false: its samples do not say where their tokens went")
    length = changed.config.policy.max_total_sequence_length
    if length < recorded.longest:
        raise ConfigError(f"{_LENGTH}: {length}, but the longest of the recorded samples has {recorded.longest} tokens")
    return changed


def continue_replay(folder: Path, overrides: Sequence[str]) -> Config:
    """Return the configuration of the replay in a folder, to resume it. Raise `TandemError` if it is no replay."""
    with read_journal(folder) as journal:
        config = config_of(journal)
    if config.replay is None:
        replays = [str(path) for path in list_runs_in(folder.parent) if path.name.startswith(f"{folder.name}-replay")]
        hint = f"; its replays: {', '.join(replays)}" if replays else ""
        raise RunFolderError(f"{folder} is not a replay: --resume takes the run folder of one{hint}")
    with read_journal(Path(config.replay.run)) as journal:
        if journal.run_id != config.replay.run_id:
            raise RunFolderError(
                f"{config.replay.run} holds the run {journal.run_id}, and {folder} is a replay of "
                f"{config.replay.run_id}, which was there before"
            )
    return change_config(config, {}, overrides, str(folder / CONFIG_NAME)).config


def origin_of(config: Config) -> StartingPoint:
    """Return where a replay begins: at the model that the run started from, or at a checkpoint of it."""
    assert config.replay is not None, "asked only of a replay"
    run, step = Path(config.replay.run), config.replay.from_step
    if not step:
        return StartingPoint(first_step=1, resume_from="")
    with read_journal(run) as journal:
        folder = checkpoints_of(run, config_of(journal)).folder_of(step)
    return StartingPoint(first_step=step + 1, resume_from=str(folder.absolute()))


def is_driven(run: Path) -> bool:
    """Tell whether clients have driven the run in a folder. Raises `RunFolderError`."""
    with read_journal(run) as journal:
        return journal_has_calls(journal)


def source_of(folder: Path) -> str:
    """Return the configuration file that a folder's run was begun with; custom code may lie beside it."""
    path = folder / CONFIG_NAME
    with contextlib.suppress(OSError, UnicodeDecodeError):
        first = path.read_text(encoding="utf-8").partition("\n")[0]
        if first.startswith(RESOLVED_FROM):
            return first.removeprefix(RESOLVED_FROM)
    return str(path)


def describe_start(config: Config) -> Iterator[str]:
    """Yield notices about a replay before it begins."""
    replay = config.replay
    assert replay is not None, "asked only of a replay"
    source = f"its checkpoint of step {replay.from_step}" if replay.from_step else "the model that it started from"
    steps = steps_in_words(range(replay.from_step + 1, replay.to_step + 1))
    yield f"{config.logger.log_dir} is a replay of {replay.run}: {steps}, from {source}"
    if replay.without is not None:
        yield f"note: samples that {replay.without} names are left out, or have the rewards that it gives them"
    section = config.rollout_section
    if section.val_period or section.val_at_start or section.val_at_end:
        yield "note: validation is left out, because it needs engines"


# --- what can be replayed --------------------------------------------------------------------------------------------


def _find_edits(without: Path, start: int, end: int) -> str:
    """Return the path of a file of samples to leave out. Raise `ConfigError` unless all are of replayed steps."""
    from tandem.coordinator.algorithms.left_out import OPTION, EditedSamples

    path = str(without.absolute())
    outside = [step for step in EditedSamples(path).steps if not start < step <= end]
    if outside:
        replayed = steps_in_words(range(start + 1, end + 1))
        raise ConfigError(f"{OPTION}: {without} names samples of {steps_in_words(outside)}; replayed are {replayed}")
    return path


def _read_recorded_run(run: Path, journal: JournalReader) -> RecordedRun:
    """Read what is recorded of a run. Raise `RunFolderError` if nothing is."""
    config = config_of(journal)
    if config.replay is not None:
        raise RunFolderError(f"{run} is a replay itself, of {config.replay.run}: replay that")
    if not config.declaration.rolls_out:
        raise RunFolderError(
            f"{run} is a run of {config.algorithm}, which generates no samples: run its configuration again instead"
        )
    last = journal.last_step() or 0
    whole_steps, longest = _find_whole_steps(run / sample_files.FOLDER, journal.run_id, config, last)
    if not whole_steps:
        raise RunFolderError(f"{run} has recorded no samples of a finished step: see logger.samples")
    steps = tuple(step for step in checkpoints_of(run, config).steps() if 0 < step <= last)
    return RecordedRun(
        folder=run,
        run_id=journal.run_id,
        config=config,
        last_step=last,
        whole_steps=frozenset(whole_steps),
        longest=longest,
        checkpoints=steps,
    )


def _find_whole_steps(folder: Path, run_id: str, config: Config, last: int) -> tuple[set[int], int]:
    """Return the steps up to `last` with all samples recorded, and the tokens of the longest sample.

    Raise `SamplesError` for a file that is damaged, or of another run.
    """
    steps, longest = set(), 0
    for step, files in itertools.groupby(sample_files.files(folder), key=lambda file: file.step):
        if not 0 < step <= last:
            continue
        columns = ("group", "sample", "num_tokens", "branches")
        tables = [recorded_shards.read_shard(file.path, run_id, columns).to_pydict() for file in files]
        groups, samples, sizes, branches = ([value for table in tables for value in table[name]] for name in columns)
        if is_whole(config, list(zip(groups, samples, strict=True))):
            steps.add(step)
            of_agents = (branch["num_tokens"] for sequences in branches for branch in sequences)
            of_others = (size for size, sequences in zip(sizes, branches, strict=True) if not sequences)
            longest = max(longest, *of_agents, *of_others)
    return steps, longest


def _end(recorded: RecordedRun, to_step: int | None) -> int:
    """Return the step to end with: the newest recorded one, unless one is named."""
    newest = max(recorded.whole_steps)
    if to_step is None:
        return newest
    if to_step in recorded.whole_steps:
        return to_step
    raise ConfigError(f"--to {to_step}: {_not_recorded(recorded, [to_step])}")


def list_starts(run: Path, to_step: int) -> list[int]:
    """Return the steps after which a replay up to `to_step` can begin, in order. Raises `TandemError`."""
    with read_journal(run) as journal:
        recorded = _read_recorded_run(run, journal)
    missing = _find_missing(recorded, _end(recorded, to_step))
    return [step for step in missing if not missing[step]]


def _find_missing(recorded: RecordedRun, end: int) -> dict[int, list[int]]:
    """Return the steps that are not recorded, for each step that a replay up to `end` might begin after."""
    starts = [0, *(step for step in recorded.checkpoints if step < end)]
    return {step: sorted({*range(step + 1, end + 1)} - recorded.whole_steps) for step in starts}


def _start(recorded: RecordedRun, from_step: int | None, end: int) -> int:
    """Return the step to begin after: the first with all samples after it, unless one is named."""
    missing = _find_missing(recorded, end)
    starts = [*missing]
    possible = [step for step in starts if not missing[step]]
    begins = [*(f"from step {step}" for step in possible if step), *(["from the beginning"] if 0 in possible else [])]
    choices = f"it can be replayed {', '.join(begins)}" if begins else "no step can be replayed"
    if from_step is None:
        if possible:
            return possible[0]
        raise RunFolderError(
            f"no replay of {recorded.folder} can end with step {end}: {_not_recorded(recorded, missing[starts[-1]])}, "
            "and no checkpoint lies in between; --to STEP says where else to end"
        )
    if from_step in possible:
        return from_step
    if from_step in missing:
        raise ConfigError(f"--from {from_step}: {_not_recorded(recorded, missing[from_step])}; {choices}")
    if from_step >= end:
        raise ConfigError(f"--from {from_step}: step {end} is the last to train on; {choices}")
    near = min(starts[1:], key=lambda step: abs(step - from_step), default=0)
    hint = f"; did you mean {near}?" if near in possible and near else ""
    raise ConfigError(f"--from {from_step}: {recorded.folder} has no checkpoint of that step; {choices}{hint}")


def _not_recorded(recorded: RecordedRun, steps: Collection[int]) -> str:
    undone = [step for step in steps if step > recorded.last_step]
    if undone:
        return f"{recorded.folder} has done {recorded.last_step} steps"
    return (
        f"the samples of {steps_in_words(steps)} are not in {recorded.folder / sample_files.FOLDER}, "
        f"only those of {steps_in_words(recorded.whole_steps)}"
    )


# --- what can be changed ---------------------------------------------------------------------------------------------


def _refuse_keys(keys: Iterable[str], start: int) -> None:
    """Raise `ConfigError` for keys that cannot be changed, or would change nothing."""
    problems = []
    for key in keys:
        reason = next((reason for name, reason in REFUSED.items() if is_within(key, (name,))), None)
        if reason is None and is_within(key, _ROLLOUTS) and not is_within(key, _OF_ADVANTAGES):
            reason = _DRAWN
        if reason is None and start and is_within(key, _OF_OPTIMIZERS):
            reason = (
                f"the checkpoint of step {start} has the state of another optimizer; leave --from out, or give --from 0"
            )
        if reason is not None:
            problems.append(f"command line: {key}: cannot be changed in a replay: {reason}")
    if problems:
        raise ConfigError(*problems)


def is_within(key: str, names: Iterable[str]) -> bool:
    """Return whether a key is one of these, or in one of these sections."""
    return any(key == name or key.startswith(f"{name}.") for name in names)


def refuse_folders(config: Config) -> None:
    """Raise `ConfigError` if a replay would write into the folders of another run."""
    folder, root = Path(config.logger.log_dir), Path(config.checkpointing.checkpoint_dir)
    if (folder / JOURNAL_NAME).exists():
        raise ConfigError(
            f"logger.log_dir: {folder} already holds a run: choose another folder; a replay goes on by "
            f"coordinator replay {folder} --resume"
        )
    if any(root.glob("step_*")):
        raise ConfigError(f"checkpointing.checkpoint_dir: {root} already holds checkpoints: choose another folder")


def new_folder(run: Path) -> Path:
    """Return a new folder name beside a run's."""
    base = run if run.name else run.absolute()
    names = itertools.chain([f"{base.name}-replay"], (f"{base.name}-replay-{n}" for n in itertools.count(2)))
    return next(path for path in map(base.with_name, names) if not path.exists())


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
    keys = [key for key in changed_keys(before, after) if not is_within(key, _OF_NO_WEIGHTS)]
    return keys if after.replay is None or after.replay.without is None else [*keys, "replay.without"]


def _were_changed(keys: Sequence[str]) -> str:
    return f"{', '.join(keys)} {'was' if len(keys) == 1 else 'were'} changed"


def _losses(before: Sequence[StepRecord], after: Sequence[StepRecord]) -> str:
    """Return in how many steps loss and gradient norm are equal, where both runs have trained."""
    earlier_metrics = {record.step: record.metrics for record in before}
    pairs = [(record.metrics, earlier_metrics[record.step]) for record in after if record.step in earlier_metrics]
    same = sum(all(later.get(name) == earlier.get(name) for name in ("loss", "grad_norm")) for later, earlier in pairs)
    return f"; loss and gradient norm are equal in {same} of {len(pairs)} steps" if pairs else ""
