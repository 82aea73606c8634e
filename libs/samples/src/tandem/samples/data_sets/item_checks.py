"""Checks of the items of a run: answers to compare with, enough for each step, those left out."""

from __future__ import annotations

from collections.abc import Iterable

from tandem.common.errors import ConfigError, DataError
from tandem.common.user_code import shown
from tandem.common.values import answer_texts
from tandem.config import Config
from tandem.config.checks.data import compares_answers, reads_boxes
from tandem.samples.data_sets.prompts import PromptedProblem

_MAX_SHOWN = 200
MAX_SEQUENCES = 1 << 20
"""Most sequences of one step. The coordinator has a record of each; the largest known runs have a tenth of this."""


def check_step_size(config: Config, num_items: int) -> None:
    """Raise `ConfigError` naming the key that asks for more sequences in a step than the limit.

    `num_items` is the size of the dataset; a step may take each item several times.
    """
    keys: dict[str, float] = {"policy.train_global_batch_size": config.policy.train_global_batch_size}
    if config.declaration.rolls_out:
        names = ("num_prompts_per_step", "num_generations_per_prompt", "batch_multiplier")
        keys = {f"{config.algorithm}.{name}": getattr(config.rollout_section, name) for name in names}
    num_sequences = 1.0
    for value in keys.values():
        num_sequences *= min(value, MAX_SEQUENCES + 1)  # a larger integer may not fit a float
    if num_sequences <= MAX_SEQUENCES:
        return
    key = max(keys, key=lambda name: keys[name])
    product = " * ".join(
        f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}" for name, value in keys.items()
    )
    raise ConfigError(
        f"{key}: {keys[key]} is too much: a step can have {MAX_SEQUENCES:,} sequences at most, and the data set has "
        f"{num_items:,} items" + (f" ({product})" if len(keys) > 1 else "")
    )


def check_answers(config: Config, problems: Iterable[PromptedProblem]) -> None:
    """Raise `DataError` naming the first row whose answer its built-in environment cannot compare with."""
    comparing = {name: reads_boxes(config, name) for name in config.environments if compares_answers(config, name)}
    if not comparing:
        return
    for problem, data, _ in problems:
        name = str(data.environment)
        if name in comparing and not answer_texts(problem.answer, boxes=comparing[name]):
            raise DataError(
                f"{problem.problem_id}: env.{name} compares responses with the answer, which is "
                f"{'null' if problem.answer is None else shown(problem.answer)[:_MAX_SHOWN]} (data.output_key); it "
                "takes a text, a number, a truth value, or a list of them, any of which is right"
            )


def describe_left_out(num_too_long: int, num_checked: int, num_items: int) -> str | None:
    """Return a notice about items that are too long; None if there are none so far."""
    if not num_too_long:
        return None
    reason = "longer than data.max_input_seq_length and policy.max_total_sequence_length allow"
    if num_checked == num_items:
        return f"data: {num_too_long} of {num_items} left out: {reason}"
    return f"data: {num_too_long} of the first {num_checked} left out, and others when it is their turn: {reason}"


def describe_set_aside(num_set_aside: int, num_items: int) -> str | None:
    """Return a notice about items that are too similar to held-out ones; None if there are none."""
    if not num_set_aside:
        return None
    reason = "what is held out (data.num_validation) has the same prompt or content"
    return f"data: {num_set_aside} of {num_items} left out: {reason}"


def describe_repeats(config: Config, num_items: int) -> str | None:
    """Return a notice if a step takes more prompts than there are, and so some of them several times; else None."""
    size, key = config.rollout_section.num_prompts_per_step, f"{config.algorithm}.num_prompts_per_step"
    if config.evaluates or num_items >= size:
        return None
    return f"data: {num_items} to train on, but {key} is {size}: each step takes some of them several times"


def describe_capped_steps(config: Config, num_steps: int, num_items: int, size: int) -> str | None:
    """Return a notice if the passes over the data end before the run's steps; None if they do not."""
    section = config.algorithm_section
    max_steps = section.max_num_steps
    if max_steps == type(section)().max_num_steps or num_steps >= max_steps:
        return None
    passes = "1 pass" if section.max_num_epochs == 1 else f"{section.max_num_epochs} passes"
    key = config.algorithm
    return (
        f"{key}.max_num_steps is {max_steps}, but the run ends after {num_steps} steps: {key}.max_num_epochs allows "
        f"{passes} over {num_items} items, {size} a step"
    )
