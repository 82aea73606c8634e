"""Evaluation: the samples and scores of `coordinator eval`."""

from __future__ import annotations

from typing import Literal

from tandem.config.schema.base import (
    ConfigSection,
    Fraction,
    NonEmptyStr,
    NonNegativeFloat,
    PositiveInt,
    Seed,
)


class EvalConfig(ConfigSection, frozen=True, kw_only=True):
    """Settings of `coordinator eval` alone. The problems are the held-out ones, limited by `grpo.max_val_samples`;
    null keys follow the validation of a run."""

    metric: Literal["pass@k", "cons@k"] = "pass@k"
    """Score reported beside the table: the chance that one of k samples is correct, or that the answer given by most
    of k samples is."""
    k_value: PositiveInt = 1
    """The k of the metric."""
    num_tests_per_prompt: PositiveInt | None = None
    """Samples per problem; null means `grpo.num_val_generations_per_prompt`. NeMo-RL's default is 1."""
    seed: Seed | None = None
    """Seed of the samples; null means `grpo.val_seed`. NeMo-RL's default is 42."""
    temperature: NonNegativeFloat | None = None
    """New. Divisor of the logits before sampling; 0 takes the likeliest token; null means `grpo.val_temperature`."""
    top_p: Fraction | None = None
    """New. Null means `policy.generation.top_p`."""
    top_k: PositiveInt | None = None
    """New. Null means `policy.generation.top_k`."""
    max_new_tokens: PositiveInt | None = None
    """New. Null means `policy.generation.max_new_tokens`."""
    save_path: NonEmptyStr | None = None
    """Folder of the results; null means `eval` within `logger.log_dir`."""
