"""Evaluation: what `coordinator eval` draws and reports."""

from __future__ import annotations

from typing import Literal

from tandem.config.schema.base import (
    Fraction,
    NonEmptyStr,
    NonNegativeFloat,
    PositiveInt,
    Section,
    Seed,
)


class Eval(Section, frozen=True, kw_only=True):
    """What `coordinator eval` draws and reports; nothing else reads it. The problems are those that are held out, as
    `grpo.max_val_samples` says; what is null is as the validation of a run has it."""

    metric: Literal["pass@k", "cons@k"] = "pass@k"
    """The score that is told beside the table: the chance that one of k samples is correct, or that the answer which
    most of k samples give is."""
    k_value: PositiveInt = 1
    """Its k."""
    num_tests_per_prompt: PositiveInt | None = None
    """Samples drawn for each problem; null means `grpo.num_val_generations_per_prompt`. NeMo-RL's default is 1."""
    seed: Seed | None = None
    """Decides the samples; null means `grpo.val_seed`. NeMo-RL's default is 42."""
    temperature: NonNegativeFloat | None = None
    """New. Logits are divided by this before sampling, 0 takes the likeliest token; null means
    `grpo.val_temperature`."""
    top_p: Fraction | None = None
    """New. Null means `policy.generation.top_p`."""
    top_k: PositiveInt | None = None
    """New. Null means `policy.generation.top_k`."""
    max_new_tokens: PositiveInt | None = None
    """New. Null means `policy.generation.max_new_tokens`."""
    save_path: NonEmptyStr | None = None
    """Folder of the results; null means `eval` within `logger.log_dir`."""
