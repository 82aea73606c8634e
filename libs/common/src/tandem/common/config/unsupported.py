"""Keys that are known but not supported yet: refused where they are switched on.

Building one of these means deleting its row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from tandem.common.algorithms import ALGORITHMS, NOT_BUILT, SECTIONS
from tandem.common.config.problem import shown
from tandem.common.config.schema import Config


def _always(config: Config) -> bool:
    return True


def _rolls_out(config: Config) -> bool:
    return config.declaration.rolls_out


def _vllm(config: Config) -> bool:
    return _rolls_out(config) and config.policy.generation.backend == "vllm"


class Row(msgspec.Struct, frozen=True):
    """One key that is known but not built."""

    key: str
    off: tuple[Any, ...]
    """The values that leave it switched off."""
    read: Callable[[Config], bool] = _always
    """Whether the run would read the key at all."""


_PRECISIONS = ("auto", "bfloat16", "float16", "half", "float32", "float", "fp8")
"""Element types of vLLM's weights, by its names."""

NOT_SUPPORTED_YET = (Row("policy.generation.vllm_cfg.precision", _PRECISIONS, _vllm),)
"""Refused, in the order in which an error lists them."""

NO_EFFECT_YET = (Row("data.add_system_prompt", (False,)),)
"""Accepted with a notice: a run without it gives the same result. NeMo-RL's base files switch it on."""


def algorithm_not_built(tree: Mapping[str, Any]) -> str | None:
    """Return the line that refuses the algorithm of plain settings, if it is one that is known and not built."""
    chosen = tree.get("algorithm") or next((name for name in SECTIONS if name in tree), None)
    if chosen not in NOT_BUILT:
        return None
    return f"algorithm: {chosen} is not supported yet: expected {', '.join(sorted(ALGORITHMS))}"


def refusal(config: Config) -> str | None:
    """Return the line that lists everything switched on but not built, or None."""
    found = [
        row.key if isinstance(value := _value_at(config, row.key), msgspec.Struct) else f"{row.key} ({_plain(value)})"
        for row in _switched_on(config, NOT_SUPPORTED_YET)
    ]
    return f"not supported yet: {', '.join(found)}" if found else None


def without_effect_yet(config: Config) -> list[str]:
    """Return a line for each key that is accepted but has no effect yet."""
    return [
        f"{row.key} ({_plain(_value_at(config, row.key))}) has no effect yet"
        for row in _switched_on(config, NO_EFFECT_YET)
    ]


def _switched_on(config: Config, rows: tuple[Row, ...]) -> list[Row]:
    return [row for row in rows if row.read(config) and _value_at(config, row.key) not in row.off]


def _value_at(config: Config, key: str) -> Any:
    node: Any = config
    for part in key.split("."):
        node = node.get(part) if isinstance(node, dict) else getattr(node, part)
    return node


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else shown(value)
