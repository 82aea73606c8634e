"""The check of how many sequences a step asks for: no run begins a step that it cannot finish."""

from __future__ import annotations

from tandem.common.errors import ConfigError
from tandem.config import Config

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
