"""NeMo-RL v0.7's lists of data sets, converted to the shape of the rest of the configuration.

Each data set gets defaults from ``data.default`` and from its name. The keys of ``data`` itself then become those of
the first set.
"""

from __future__ import annotations

import functools
from typing import Any

from msgspec import inspect
from msgspec.inspect import StructType

from tandem.config.conform import STAND_IN, conform
from tandem.config.named import DEFAULT_FIELDS, FILES, NAMED, find_place, holds_texts, is_local
from tandem.config.problem import InvalidValue, ProblemCollector, shown
from tandem.config.schema.data import OF_EACH_SET, DataSet

_SIDES = ("train", "validation")
_FILE_OF_ONES_OWN = "ResponseDataset"
_FILES_OF_DATA, _LOCAL = ("train_data_path", "val_data_path", "val_data_paths"), "jsonl"
"""Keys of ``data`` that name a local file, and the data set that they mean if none is named."""


def place_data_sets(tree: dict[str, Any]) -> None:
    """Complete the listed data sets of a settings tree, in place. Raises `InvalidValue`."""
    data = tree.get("data")
    if not isinstance(data, dict):
        return
    if data.get("env_name") is not None:
        data.setdefault("environment", data["env_name"])
    data.pop("env_name", None)
    is_listed = any(data.get(side) for side in _SIDES)
    if data.get("dataset_name") is None and not is_listed and any(data.get(key) for key in _FILES_OF_DATA):
        data["dataset_name"] = _LOCAL
    _name_both_sides(data)
    default = data.pop("default", None)
    shared = {} if default is None else _fit(default, "data.default")
    sets: dict[str, list[dict[str, Any]]] = {side: [] for side in _SIDES}
    problems = ProblemCollector()
    for side in _SIDES:
        listed = data.get(side)
        entries = [listed] if isinstance(listed, dict) else (listed or [])
        if not isinstance(entries, list | tuple):
            text = f"expected a mapping, or a list of mappings, got {shown(entries)}"
            problems.found.append(InvalidValue(f"data.{side}", text))
            continue
        for index, entry in enumerate(entries):
            with problems.collected():
                key = f"data.{side}" if isinstance(listed, dict) else f"data.{side}[{index}]"
                sets[side].append(_complete(entry, shared, data, key))
    problems.complain()
    if "validation" in data and data["validation"] is None and not _holds_out(data, sets["train"]):
        data["num_validation"] = 0
    data |= sets
    first_key, first = next(
        ((f"data.{side}", sets[side][0]) for side in _SIDES if sets[side]), ("data.default", shared)
    )
    if sets["train"]:
        _overrule_name(tree, data, first["dataset_name"], first_key)
    _agree(data, first, first_key)


def _overrule_name(tree: dict[str, Any], data: dict[str, Any], name: str, first_key: str) -> None:
    """Replace the name of a single data set by that of the first one listed, as NeMo-RL does, and note it."""
    single_name, ignored = data.get("dataset_name"), tree.get("ignored") or []
    if isinstance(single_name, str) and single_name != name and isinstance(ignored, list | tuple):
        data["dataset_name"] = name
        if single_name == STAND_IN:  # no file has it
            return
        tree["ignored"] = [*ignored, f"data.dataset_name ({single_name}) has no effect: {first_key} says {name}"]


def _name_both_sides(data: dict[str, Any]) -> None:
    """List the split to train on and the one to validate on of a data set whose splits are data sets of their own."""
    name = str(data.get("dataset_name"))
    named = NAMED.get(name)
    if named is None or not named.splits or any(data.get(side) for side in _SIDES):
        return
    copy, val_copy = data.pop("train_data_path", None), data.pop("val_data_path", None)
    data["train"] = {"dataset_name": name, "data_path": copy}
    split = data.pop("val_split", None) or named.held_out
    train_path, held_out = (find_place(name, each, None)[0] for each in (data.get("split"), split))
    if val_copy is None and train_path == held_out:
        val_copy = copy  # a copy of one repository has both splits
    is_there = val_copy is not None or copy is None
    if is_there and not _holds_out(data, []) and data.get("num_validation") != 0:
        data["validation"] = {"dataset_name": name, "data_path": val_copy, "split": split}


def _holds_out(data: dict[str, Any], train: list[dict[str, Any]]) -> bool:
    """Tell whether other keys define validation data, where no data set does."""
    keys = ("num_validation", "split_validation_size", "val_data_path", "val_data_paths", "val_split")
    return any(data.get(key) for key in keys) or any(each.get("split_validation_size") for each in train)


def _fit(entry: Any, key: str) -> dict[str, Any]:
    fitted: dict[str, Any] = conform(entry, _describe(), key)
    return fitted


@functools.cache
def _describe() -> StructType:
    described = inspect.type_info(DataSet)
    assert isinstance(described, StructType)
    return described


def _complete(entry: Any, shared: dict[str, Any], data: dict[str, Any], key: str) -> dict[str, Any]:
    """Return a data set with its defaults; a key without any is null."""
    data_set = shared | _fit(entry, key)
    path = data_set.get("data_path")
    if data_set.get("dataset_name") is None:
        beside = data.get("dataset_name")
        if isinstance(beside, str) and (path is None or is_local(beside)):
            data_set["dataset_name"] = beside
        elif path is None:
            raise InvalidValue(f"{key}.dataset_name", "required, but not set: expected text")
        else:
            data_set["dataset_name"] = _FILE_OF_ONES_OWN
    if holds_texts(data_set["dataset_name"]):
        data_set["data_path"] = data_set.get("data_files") or path
    elif is_local(data_set["dataset_name"]) and path is not None and not path.endswith(FILES):
        data_set |= {"dataset_name": path, "data_path": None}  # the path is a name on the Hub
    named = NAMED.get(data_set["dataset_name"])
    for name in OF_EACH_SET:
        if name not in data_set:
            data_set[name] = data.get(name)
        if data_set[name] is None:
            data_set[name] = named.keys.get(name) if named is not None else None
        if data_set[name] is None:
            data_set[name] = DEFAULT_FIELDS.get(name)
    return data_set


def _agree(data: dict[str, Any], first: dict[str, Any], first_key: str) -> None:
    """Set the keys of ``data`` itself to those of its first data set."""
    flat = {key: first.get(key) for key in OF_EACH_SET}
    flat |= {"train_data_path": first.get("data_path"), "environment": first.get("env_name")}
    for key, value in flat.items():
        if value is None:
            continue
        if data.get(key) not in (None, value):
            raise InvalidValue(f"data.{key}", f"{shown(data[key])}, but {first_key} says {shown(value)}")
        data[key] = value
