"""Generation: draw the groups of later steps, and assign them to engines."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from tandem.common.errors import SamplingExhausted
from tandem.common.messages import Purpose, RestoreSamples, SamplesFinished
from tandem.coordinator.scheduler import events, requests
from tandem.coordinator.scheduler.groups.table import GroupState, SampleGroup, StepGroups
from tandem.coordinator.scheduler.rules import regeneration
from tandem.coordinator.scheduler.spec import DynamicSampling
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
            requests.RunPhase.GENERATING.value,
            f"the samples of {dynamic.max_batches} x {dynamic.num_groups} prompts have given {num_found} groups whose "
            f"rewards differ, and a step needs {needed}: the problems are too easy or too hard, or "
            "grpo.dynamic_sampling_max_gen_batches too low",
        )
    return True


# --- rules -----------------------------------------------------------------------------------------------------------


def draw(tables: SchedulerTables) -> list[events.Action] | None:
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


def assign(tables: SchedulerTables) -> list[events.Action] | None:
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


def take_prompts(tables: SchedulerTables, drawn: events.PromptsDrawn) -> None:
    """Add the groups that were drawn, which wait for an engine."""
    groups = tables.groups.add(drawn.step, drawn.purpose, drawn.sizes)
    engines = tables.engines
    tables.assignment.add(groups, engines.staying() or [*engines])


def take_results(tables: SchedulerTables, process: str, finished: SamplesFinished) -> list[events.Action]:
    """Take finished samples. Regenerate groups made with weights too old for their step."""
    news = tables.groups.take_results(process, finished)
    for group, num_samples in news:
        tables.assignment.finished(process, group, num_samples)
    old = [
        group
        for group, _ in news
        if group.state is GroupState.READY
        and group.purpose == "train"
        and group.oldest_version < tables.oldest_version(group.step)
    ]
    return regeneration.drop_too_old(tables, old) if old else []


# --- the groups of a step --------------------------------------------------------------------------------------------


def draw_groups(tables: SchedulerTables, purpose: Purpose, step: int, count: int) -> list[events.Action]:
    """Ask for `count` more groups of a step."""
    return [events.DrawPrompts(step=step, purpose=purpose, groups=tables.groups.draw(step, purpose, count))]


def is_complete(tables: SchedulerTables, of_step: StepGroups) -> bool:
    """Tell whether all groups that were drawn are ready, and every version in them is verified."""
    return of_step.is_ready and all(itertools.starmap(tables.weights.is_proven, of_step.newest_versions.items()))


# --- assigning -------------------------------------------------------------------------------------------------------


def _say_who_is_full(tables: SchedulerTables, full: dict[str, None]) -> list[events.Action]:
    """Report each engine that has no room for new samples, once a step."""
    new = [engine for engine in full if engine not in tables.full]
    tables.full = full
    max_tokens = tables.spec.max_stored_tokens
    return [
        events.TellUser(
            text=f"{engine} generates no more before samples are trained on: it keeps up to {max_tokens} tokens "
            "(policy.generation.max_stored_tokens)"
        )
        for engine in new
    ]


def _dispatch_or_restore(tables: SchedulerTables, engine: str, groups: Sequence[SampleGroup]) -> list[events.Action]:
    """Ask an engine for groups of one step, and to restore those of them that are on disk."""
    restored = [group for group in groups if tables.restored.has(group)]
    generated = [group for group in groups if not tables.restored.has(group)]
    actions = [_dispatch_prompts(tables, engine, generated)] if generated else []
    if restored:
        fields = tables.open(engine, requests.RunPhase.GENERATING)
        command = RestoreSamples(
            step=restored[0].step,
            files=tables.restored.files(restored, fields["command_id"]),
            num_samples=restored[0].size.num_samples,
            **fields,
        )
        tables.groups.assign(restored, engine, command.command_id)
        actions.append(events.DispatchCommand(process=engine, command=command))
    return actions


def _dispatch_prompts(tables: SchedulerTables, engine: str, groups: Sequence[SampleGroup]) -> events.Action:
    """Ask an engine for groups of one step, beside those it is already generating."""
    step, purpose = groups[0].step, groups[0].purpose
    # An engine may be at the batches of the steps before, and validation comes after all that it has begun.
    phase, num_ahead = requests.RunPhase.VALIDATING, tables.spec.max_trajectory_age_steps
    if purpose == "train":
        phase, num_ahead = requests.RunPhase.GENERATING, step - tables.step
    fields = tables.open(engine, phase, 1 + num_ahead)
    oldest = next(tables.requests.of(engine, *requests.GENERATION))
    tables.groups.assign(groups, engine, fields["command_id"])
    return events.DispatchPrompts(
        process=engine,
        step=step,
        purpose=purpose,
        groups=tuple(group.number for group in groups),
        cancel_before=oldest.command_id,
        **fields,
    )
