"""NeMo-RL 0.8's names and values for what has another name here."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from tandem.config.problem import InvalidValue, shown
from tandem.config.schema import MODELS
from tandem.config.schema.declarations import ALGORITHMS

BACKEND, BACKEND_HERE = "automodel_cfg", "dtensor_cfg"
"""The section of NeMo-RL's backend that is not Megatron-Core, as its main branch and as its releases name it."""
_UNSET = {"max_num_steps": -1, "async_grpo": None, "async_ppo": None}
"""Values that leave a key of the algorithm's section at its default: no limit, nothing asynchronous."""


def name_backend_as_here(node: Any) -> Any:
    """Return settings with the section `BACKEND` under its name here, in keys and in what ``${...}`` refers to.

    A section with both names keeps both: one of them is unknown.
    """
    if isinstance(node, dict):
        is_renamed = BACKEND in node and BACKEND_HERE not in node
        return {
            BACKEND_HERE if is_renamed and key == BACKEND else key: name_backend_as_here(value)
            for key, value in node.items()
        }
    if isinstance(node, list):
        return [name_backend_as_here(item) for item in node]
    if isinstance(node, str) and "${" in node:
        return re.sub(rf"\.{BACKEND}\b", f".{BACKEND_HERE}", node)
    return node


def rename_newer(tree: dict[str, Any]) -> None:
    """Move settings to the keys that say the same here, in place. Raises `InvalidValue` if the two disagree.

    Values of another type are left for `conform` to report.
    """
    for model in (tree.get(name) for name in MODELS):
        packing = model.get("sequence_packing") if isinstance(model, dict) else None
        if isinstance(packing, dict) and packing.get("algorithm") == "modified_ffd":
            packing["algorithm"] = "modified_first_fit_decreasing"
    policy, algorithm = tree.get("policy"), tree.get("algorithm")
    generation = policy.get("generation") if isinstance(policy, dict) else None
    if isinstance(generation, dict) and generation.get("top_k") == -1:
        generation["top_k"] = None
    if not isinstance(algorithm, str) or algorithm not in ALGORITHMS or not ALGORITHMS[algorithm].rolls_out:
        return
    if isinstance(tree.get(algorithm, {}), dict):
        section = tree.setdefault(algorithm, {})
        few = _Moved(algorithm, "val_num_generations_per_prompt", "num_val_generations_per_prompt", usual=1)
        _move(section, section, few, algorithm)
        if isinstance(generation, dict):
            _move(generation, section, _Moved("policy.generation", "val_temperature", "val_temperature"), algorithm)
        if section.get("val_start_at") == -1:
            section["val_start_at"] = 0
        for key, unset in _UNSET.items():
            if key in section and section[key] == unset:
                del section[key]
        metric = section.get("stop_at_validation_metric")
        if isinstance(metric, str) and metric:
            section["stop_at_validation_metric"] = f"val_{metric.removeprefix('val:').removeprefix('val_')}"


class _Moved(NamedTuple):
    """A setting that has another key here."""

    section: str
    name: str
    meant: str
    """Its name here, in the algorithm's section."""
    usual: Any = None
    """Value that older files may have at the key here, and that another one at the new key overrides."""


def _move(source: dict[str, Any], section: dict[str, Any], moved: _Moved, algorithm: str) -> None:
    """Move a setting to its key here; the other one keeps null."""
    value, current = source.get(moved.name), section.get(moved.meant)
    if value is None:
        return
    if current in (None, moved.usual):
        section[moved.meant] = value
    elif value not in (current, moved.usual):
        key, new_key = f"{moved.section}.{moved.name}", f"{algorithm}.{moved.meant}"
        raise InvalidValue(key, f"{shown(value)}, but {new_key} is {shown(current)}: they are the same")
    source[moved.name] = None
