"""Checks across several keys: one function per rule, one module per topic."""

from __future__ import annotations

from collections.abc import Sequence

from tandem.common.user_code import named
from tandem.config.checks import (
    adapters,
    data,
    generation,
    loss,
    megatron,
    model,
    numbers,
    run,
    sizes,
    streaming,
    vision,
)
from tandem.config.engine_kinds import ENGINE_KINDS
from tandem.config.problem import InvalidValue, ProblemCollector, Rule
from tandem.config.schema import Config

RULES: tuple[Rule, ...] = (
    *run.PATH_RULES,
    *model.RULES,
    *megatron.RULES,
    *sizes.RULES,
    *sizes.DTENSOR_RULES,
    *adapters.RULES,
    *sizes.BATCH_RULES,
    *loss.RULES,
    *data.RULES,
    *vision.IMAGE_REWARD_RULES,
    *data.REWARD_MODEL_RULES,
    *run.RULES,
    *sizes.PROCESS_RULES,
    *run.CLUSTER_RULES,
    *generation.RULES,
    *streaming.RULES,
    *vision.RULES,
    *numbers.RULES,
)
"""Rules for all algorithms, in the order of checking; those of the engine's and the algorithm's declarations follow."""


def find_broken_rules(config: Config, of_files: Sequence[Rule] = ()) -> ProblemCollector:
    """Return the problems that the rules find, one per key, in order: the first often explains the others.

    `of_files` are rules for the time when files are read.
    """
    problems = ProblemCollector()
    paths = config.declaration.rules
    if config.declaration.rolls_out and config.policy.generation.backend in ENGINE_KINDS:
        paths = (*config.policy.generation.kind.rules, *paths)
    declared_rules: list[Rule] = [rule for path in paths for rule in named(path)]
    for rule in (*RULES, *of_files, *declared_rules):
        try:
            with problems.collected():
                rule(config)
        except (ArithmeticError, LookupError, OSError, TypeError, ValueError):
            if not problems.found:  # otherwise it relied on a key that an earlier rule has found wrong
                raise
    by_key: dict[str, InvalidValue] = {}
    for problem in problems.found:
        by_key.setdefault(problem.key, problem)
    problems.found = [*by_key.values()]
    return problems
