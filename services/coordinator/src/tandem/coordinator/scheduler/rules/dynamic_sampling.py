"""Whether enough rollout groups of a step are informative, where it draws until they are."""

from __future__ import annotations

from tandem.common.errors import SamplingExhausted
from tandem.coordinator.scheduler.groups.table import StepGroups
from tandem.coordinator.scheduler.phases import RunPhase
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
            RunPhase.GENERATING.value,
            f"the samples of {dynamic.max_batches} x {dynamic.num_groups} prompts have given {num_found} groups whose "
            f"rewards differ, and a step needs {needed}: the problems are too easy or too hard, or "
            "grpo.dynamic_sampling_max_gen_batches too low",
        )
    return True
