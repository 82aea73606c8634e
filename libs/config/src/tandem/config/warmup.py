"""The warm-up of a learning rate by one key, as Transformers' and verl's trainers have it."""

from __future__ import annotations

import math
from typing import Any

NOTHING = 1e-12
"""Fraction of the learning rate in the first step: torch's linear schedule refuses zero."""


def warmup_length(warmup: Any, num_steps: Any, num_passes: Any) -> int:
    """Return the steps of the schedule in which the learning rate rises; 0 for none, or for values of a wrong type.

    Below 1, `warmup` is a share of the run, rounded up (Transformers 5, ``TrainingArguments.get_warmup_steps``).
    """
    if not all(isinstance(value, int | float) for value in (warmup, num_steps, num_passes)) or warmup <= 0:
        return 0
    return int(warmup) if warmup >= 1 else max(0, math.ceil(warmup * num_steps * num_passes))


def linear_warmup(num_steps: int) -> dict[str, Any]:
    """Return the entry of ``policy.scheduler`` whose factor is ``step / num_steps``, then 1.

    That is the first half of Transformers' ``get_constant_schedule_with_warmup``.
    """
    kwargs = {"start_factor": NOTHING, "end_factor": 1.0, "total_iters": num_steps}
    return {"name": "torch.optim.lr_scheduler.LinearLR", "kwargs": kwargs}
