"""The rules of a step: draw and assign its groups, train, offer the weights, validate, save, commit."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from tandem.common.errors import SamplingExhausted
from tandem.common.messages import Purpose, RestoreSamples, SamplesFinished
from tandem.coordinator.scheduler.events import (
    Action,
    CommitStep,
    DispatchBatch,
    DispatchCommand,
    DispatchPrompts,
    DrawPrompts,
    PromptsDrawn,
    StepValidated,
    TellUser,
)
from tandem.coordinator.scheduler.groups.assignment import BalancedAssignment
from tandem.coordinator.scheduler.groups.table import GroupState, SampleGroup, StepGroups
from tandem.coordinator.scheduler.requests import GENERATION, RunPhase
from tandem.coordinator.scheduler.rules import losing, regeneration
from tandem.coordinator.scheduler.spec import DynamicSampling
from tandem.coordinator.scheduler.steps import StepState
from tandem.coordinator.scheduler.tables import SchedulerTables


def lacks_groups(tables: SchedulerTables, of_step: StepGroups, dynamic: DynamicSampling) -> bool:
    """Tell whether too few groups of a step are informative. Raises `SamplingExhausted` at the limit."""
    needed = tables.spec.num_groups
    num_found = 0
    for group in of_step.groups:
        num_found += tables.is_informative([group.results[sample] for sample in sorted(group.results)])
    if num_found >= needed:
        return False
    if of_step.num_batches == dynamic.max_batches:
        raise SamplingExhausted(
            "coordinator",
            RunPhase.GENERATING.value,
            f"the samples of {dynamic.max_batches} x {dynamic.num_groups} prompts have given {num_found} groups whose "
            f"rewards differ, and a step needs {needed}: the problems are too easy or too hard, or "
            "grpo.dynamic_sampling_max_gen_batches too low",
        )
    return True


def draw(tables: SchedulerTables) -> list[Action] | None:
    """Draw the groups of the next step that may be generated for, or more groups if too few are informative."""
    spec = tables.spec
    num_groups = spec.num_groups if spec.dynamic_sampling is None else spec.dynamic_sampling.num_groups
    if tables.steps.drawn < tables.newest_step:
        tables.steps.drawn += 1
        return draw_groups(tables, "train", tables.steps.drawn, num_groups)
    of_step = tables.groups.of_step(tables.step, "train")
    if of_step is None or not is_complete(tables, of_step):
        return None
    if spec.dynamic_sampling is None or not lacks_groups(tables, of_step, spec.dynamic_sampling):
        return None
    return draw_groups(tables, "train", tables.step, num_groups)


def assign(tables: SchedulerTables) -> list[Action] | None:
    """Assign waiting groups to engines with young enough weights and with room."""
    full: dict[str, None] = {}
    chosen_tokens: dict[str, int] = {}

    max_tokens = tables.spec.max_stored_tokens

    def can_generate(engine: str, group: SampleGroup) -> bool:
        """Tell whether an engine holds weights young enough for a group, and has room for its samples."""
        if group.purpose == "validate":  # which needs the weights of its step, and stores nothing
            return tables.weights.can_generate(engine, group.step, group.step)
        if not tables.weights.can_generate(engine, tables.oldest_version(group.step), group.step - 1):
            return False
        if max_tokens is not None:
            num_tokens = chosen_tokens.get(engine, 0) + group.size.num_samples * group.size.num_tokens
            if tables.groups.num_tokens(engine) + num_tokens > max_tokens:
                full[engine] = None
                return False
            chosen_tokens[engine] = num_tokens
        return True

    chosen_groups = tables.assignment.choose(can_generate, tables.requests.now)
    actions = _say_who_is_full(tables, full) if full or tables.full else []
    if not chosen_groups:
        return actions or None
    dropped = regeneration.drop_restored(tables, chosen_groups) if tables.restored.groups else []
    for engine, groups in chosen_groups.items():
        while groups:
            first = groups[0]
            together = [g for g in groups if (g.step, g.purpose) == (first.step, first.purpose)]
            groups = [g for g in groups if g not in together]
            if tables.restored.groups:
                actions += _dispatch_or_restore(tables, engine, together)
            else:
                actions.append(_dispatch_prompts(tables, engine, together))
    return [*dropped, *actions]


# --- events ----------------------------------------------------------------------------------------------------------


def take_prompts(tables: SchedulerTables, drawn: PromptsDrawn) -> None:
    """Add the groups that were drawn, which wait for an engine."""
    groups = tables.groups.add(drawn.step, drawn.purpose, drawn.sizes)
    engines = tables.engines
    tables.assignment.add(groups, (engines.draining and engines.staying()) or [*engines])


def take_results(tables: SchedulerTables, process: str, finished: SamplesFinished) -> list[Action]:
    """Take finished samples. Regenerate groups made with weights too old for their step."""
    old: list[SampleGroup] = []
    for group, num_samples in tables.groups.take_results(process, finished):
        if isinstance(tables.assignment, BalancedAssignment):
            tables.assignment.finished(process, group, num_samples)
        is_ready = group.state is GroupState.READY and group.purpose == "train"
        if is_ready and group.oldest_version < tables.oldest_version(group.step):
            old.append(group)
    return regeneration.drop_too_old(tables, old) if old else []


# --- the groups of a step --------------------------------------------------------------------------------------------


def draw_groups(tables: SchedulerTables, purpose: Purpose, step: int, count: int) -> list[Action]:
    """Ask for `count` more groups of a step."""
    return [DrawPrompts(step=step, purpose=purpose, groups=tables.groups.draw(step, purpose, count))]


def is_complete(tables: SchedulerTables, of_step: StepGroups) -> bool:
    """Tell whether all groups that were drawn are ready, and every version in them is verified."""
    return of_step.is_ready and all(itertools.starmap(tables.weights.is_proven, of_step.newest_versions.items()))


# --- assigning -------------------------------------------------------------------------------------------------------


def _say_who_is_full(tables: SchedulerTables, full: dict[str, None]) -> list[Action]:
    """Report each engine that has no room for new samples, once a step."""
    new = [engine for engine in full if engine not in tables.full]
    tables.full = full
    max_tokens = tables.spec.max_stored_tokens
    return [
        TellUser(
            text=f"{engine} generates no more before samples are trained on: it keeps up to {max_tokens} tokens "
            "(policy.generation.max_stored_tokens)"
        )
        for engine in new
    ]


def _dispatch_or_restore(tables: SchedulerTables, engine: str, groups: Sequence[SampleGroup]) -> list[Action]:
    """Ask an engine for groups of one step, and to restore those of them that are on disk."""
    restored = [group for group in groups if tables.restored.has(group)]
    generated = [group for group in groups if not tables.restored.has(group)]
    actions = [_dispatch_prompts(tables, engine, generated)] if generated else []
    if restored:
        fields = tables.open(engine, RunPhase.GENERATING)
        command = RestoreSamples(
            step=restored[0].step,
            files=tables.restored.files(restored, fields["command_id"]),
            num_samples=restored[0].size.num_samples,
            **fields,
        )
        tables.groups.assign(restored, engine, command.command_id)
        actions.append(DispatchCommand(process=engine, command=command))
    return actions


def _dispatch_prompts(tables: SchedulerTables, engine: str, groups: Sequence[SampleGroup]) -> Action:
    """Ask an engine for groups of one step, beside those it is already generating."""
    step, purpose = groups[0].step, groups[0].purpose
    # An engine may be at the batches of the steps before, and validation comes after all that it has begun.
    phase, num_ahead = RunPhase.VALIDATING, tables.spec.max_trajectory_age_steps
    if purpose == "train":
        phase, num_ahead = RunPhase.GENERATING, step - tables.step
    fields = tables.open(engine, phase, 1 + num_ahead)
    oldest = next(tables.requests.of(engine, *GENERATION))
    tables.groups.assign(groups, engine, fields["command_id"])
    return DispatchPrompts(
        process=engine,
        step=step,
        purpose=purpose,
        groups=tuple(group.number for group in groups),
        cancel_before=oldest.command_id,
        **fields,
    )


# --- from training to the journal ------------------------------------------------------------------------------------


def save(tables: SchedulerTables) -> list[Action] | None:
    """Copy what is to be saved on the trainers; then write it while the run goes on."""
    if tables.saving.copied is not None:
        if tables.requests.num_for(RunPhase.SAVING):
            return None
        return tables.saving.write(tables.processes.of_kind["trainer"])
    if not tables.may_commit or tables.engines_use_devices:
        return None
    tables.steps.saved = tables.step
    return tables.saving.copy(tables.step, tables.processes.of_kind["trainer"])


def publish_checkpoint(tables: SchedulerTables) -> list[Action] | None:
    """Publish the written checkpoint, once the rollout log has all of its steps."""
    step = tables.saving.publishable_step
    assert step is not None, "the rule is open"
    if tables.error is None and tables.recording.is_pending(step):
        return None
    return tables.saving.publish()


def note(tables: SchedulerTables) -> None:
    """Note which processes are idle after an event."""
    num_engines, has_started = len(tables.engines), tables.steps.has_started
    busy = tables.requests.num_for(RunPhase.TRAINING, RunPhase.SAVING, RunPhase.COPYING)
    tables.idleness.note(
        tables.requests.now,
        share_of_engines=has_started * (1 - tables.groups.num_generating / max(num_engines, 1)),
        are_trainers_idle=has_started and not busy,
    )


def metrics(tables: SchedulerTables) -> dict[str, float]:
    """Return the idle seconds of the step, and the groups that were ready ahead or too old."""
    num_too_old, tables.num_too_old = tables.num_too_old, 0
    return {
        **tables.idleness.read(tables.requests.now),
        "buffer_size": float(tables.num_in_store),
        "groups_too_old": float(num_too_old),
    }


def train(tables: SchedulerTables) -> list[Action] | None:
    """Train on the step's groups."""
    progress = tables.progress
    if tables.spec.has_engines:
        of_step = tables.groups.of_step(tables.step, "train")
        if of_step is None or not is_complete(tables, of_step) or not tables.weights.may_step:
            return None
        dynamic = tables.spec.dynamic_sampling
        if dynamic is not None and lacks_groups(tables, of_step, dynamic):
            return None
        if tables.engines_use_devices:
            return None
        tables.groups.take(tables.step, "train")
        if not tables.is_synchronous:
            tables.num_in_store = tables.groups.num_ready_after(tables.step)
    progress.state = StepState.TRAINING
    progress.num_fetches += 1
    tables.weights.withdraw()
    commands = {rank: tables.open(rank, RunPhase.TRAINING) for rank in tables.processes.of_kind["trainer"]}
    return [DispatchBatch(step=tables.step, purpose="train", commands=commands)]


def offer(tables: SchedulerTables) -> list[Action] | None:
    """Have missing samples made again once every rank has answered; if none are, note that the step has trained.

    Then engines may have its weights.
    """
    progress = tables.progress
    if tables.requests.num_for(RunPhase.TRAINING):
        return None
    if progress.missing:
        return losing.make_again(tables)
    if not tables.weights.may_offer:  # which goes on beside the step
        return None
    if tables.unusable:
        losing.forget_unusable(tables)
    progress.state = StepState.TRAINED
    of_step = tables.groups.of_step(progress.number, "train")
    if of_step is not None:
        tables.recording.begin(progress.number, "train", {str(group.engine) for group in of_step.groups})
    if not tables.spec.has_engines or tables.steps.is_interrupted:
        return []
    return tables.weights.offer(progress.number, has_update=progress.has_update)


def validate(tables: SchedulerTables) -> list[Action] | None:
    """Validate a step that has trained, once engines hold its weights, and note when that is done."""
    progress = tables.progress
    if tables.is_refitting:
        return None
    if progress.state is StepState.TRAINED:
        every, step = tables.spec.validate_every, tables.step
        is_periodic = every > 0 and step >= tables.spec.validate_from
        is_due = step == 0 or (is_periodic and (step % every == 0 or tables.is_last))
        is_due |= tables.spec.validate_at_end and tables.is_last
        if not is_due or tables.steps.is_interrupted:
            progress.state = StepState.VALIDATED
            return []
        progress.state = StepState.VALIDATING
        if not tables.spec.has_engines:
            commands = {rank: tables.open(rank, RunPhase.VALIDATING) for rank in tables.processes.of_kind["trainer"]}
            return [DispatchBatch(step=tables.step, purpose="validate", commands=commands)]
        return draw_groups(tables, "validate", progress.number, tables.spec.num_validation_groups)
    return _end_validation(tables)


def commit(tables: SchedulerTables) -> list[Action] | None:
    """Write to the journal that the step is done."""
    if not tables.may_commit or tables.must_save or tables.saving.copied is not None:
        return None
    tables.progress.state = StepState.COMMITTED
    step = tables.step
    validated = tables.groups.of_step(step, "validate")
    committed = CommitStep(
        step=step,
        version=step,
        seconds=tables.watch.read(tables.requests.now),
        validated=() if validated is None else tuple(record.scored for record in validated.records()),
        metrics={} if tables.is_synchronous else metrics(tables),
    )
    tables.groups.remove(step, "train")
    tables.groups.remove(step, "validate")
    if tables.restored.groups:
        tables.restored.forget(step)
    return [committed]


def advance(tables: SchedulerTables) -> list[Action] | None:
    """Begin the next step."""
    if not tables.steps.has_started or tables.steps.is_interrupted or tables.is_last:
        return None
    tables.steps.begin(tables.step + 1)
    tables.watch.begin_step(tables.requests.now)
    return []


def _end_validation(tables: SchedulerTables) -> list[Action] | None:
    """Note that the step is validated, once its groups, or its batch, are evaluated."""
    if not _is_evaluated(tables):
        return None
    actions: list[Action] = []
    if tables.spec.has_engines:
        tables.groups.take(tables.step, "validate")
        actions = _record_validation(tables)
    tables.progress.state = StepState.VALIDATED
    return actions


def _is_evaluated(tables: SchedulerTables) -> bool:
    if not tables.spec.has_engines:
        return not tables.requests.num_for(RunPhase.VALIDATING)
    of_step = tables.groups.of_step(tables.step, "validate")
    assert of_step is not None, "drawn when validation began"
    return is_complete(tables, of_step)


def _record_validation(tables: SchedulerTables) -> list[Action]:
    """Log the samples that the step was validated by."""
    of_step = tables.groups.of_step(tables.step, "validate")
    records = () if of_step is None else tuple(of_step.records())
    if not tables.recording.begin(tables.step, "validate", {record.rollout for record in records}):
        return []
    return [StepValidated(step=tables.step, records=records)]
