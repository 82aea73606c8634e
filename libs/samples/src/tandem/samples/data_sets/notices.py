"""Notices about the items of a run: those that are left out, and steps that they do not suffice for."""

from __future__ import annotations

from tandem.config import Config


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
