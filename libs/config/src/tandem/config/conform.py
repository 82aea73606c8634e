"""Fit plain YAML data into the schema's structs; errors name the key, the value and the type.

`msgspec.convert` makes the final check and builds the structs. This module runs before it, because it knows nearby
names, accepts the numbers that YAML 1.1 reads as text (``1e-8``), and says what is wrong in the user's words.
"""

from __future__ import annotations

import difflib
import functools
import itertools
import math
import re
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

from msgspec import inspect

from tandem.common.errors import find_nearest, nearest, suggest
from tandem.config.peer_names import PeerKey, find_peer_keys
from tandem.config.problem import InvalidValue, ProblemCollector, UnknownKey, shown
from tandem.config.schema import MODELS, Config
from tandem.config.schema.algorithms import DistillationLossConfig
from tandem.config.schema.run import DURATION

_OF_DISTILLATION = frozenset(f"loss_fn.{name}" for name in DistillationLossConfig.__struct_encode_fields__)
"""Keys of the distillation loss, not suggested for a misplaced name: they repeat more common ones."""

_FORMS = {DURATION: ": expected days:hours:minutes:seconds, such as 00:03:45:00"}
"""Examples of texts with a fixed form, by the pattern of the form."""

STAND_IN = "?"
"""Text in place of a required one that is not set: a name of nothing, neither on disk nor on the Hub."""

UNKNOWN = "unknown key"
"""Beginning of the error for a key that is not known."""
_REQUIRED = "required, but not set"
_INSTEAD = {"data.dataset_name": "; or set data.train_data_path, a file of your own"}
"""Keys that make a required one needless."""
_NOT_BUILT = {
    "policy.generation.backend": ("dllm", "dynamo"),
    "grpo.adv_estimator.name": ("argmaxrl", "reinforce_baseline"),
}
"""Words of NeMo-RL's main branch that are no slips of those here."""
_WORD_ALIKE, _NAME_ALIKE, _NEARLY_SAME = 0.6, 0.7, 0.85
"""Likeness, by `difflib`, above which a word, a name of fewer or more words, and one of as many words is taken for a
slip of another."""

NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")
SCIENTIFIC = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+")


@functools.cache
def config_type() -> inspect.StructType:
    """Return msgspec's description of `Config`."""
    described = inspect.type_info(Config)
    assert isinstance(described, inspect.StructType)
    return described


def conform(value: Any, expected_type: inspect.Type, key: str) -> Any:
    """Fit a value to `expected_type`. Raises `InvalidValue` for the keys at and below `key` that do not fit."""
    match expected_type:
        case inspect.StructType():
            return _conform_struct(value, expected_type, key)
        case inspect.UnionType():
            return _conform_union(value, expected_type, key)
        case inspect.LiteralType():
            if not _is_choice(value, expected_type):
                choices = sorted(str(choice) for choice in expected_type.values)
                listed = ", ".join(choices)
                if value in _NOT_BUILT.get(key, ()):
                    raise InvalidValue(key, f"{shown(value)} of NeMo-RL is not built: expected one of {listed}")
                raise InvalidValue(key, f"{shown(value)} is not one of {listed}{nearest(str(value), choices)}")
            return _read_word(value)
        case inspect.VarTupleType():
            if not isinstance(value, list | tuple):
                raise _describe_mismatch(value, expected_type, key)
            return list(
                _conform_all(
                    {f"{key}[{index}]": item for index, item in enumerate(value)}, expected_type.item_type
                ).values()
            )
        case inspect.DictType(value_type=inspect.AnyType()):
            return _free(_check_mapping(value, expected_type, key), key)
        case inspect.DictType():
            mapping = _check_mapping(value, expected_type, key)
            fitted = _conform_all({f"{key}.{name}": item for name, item in mapping.items()}, expected_type.value_type)
            return dict(zip(mapping, fitted.values(), strict=True))
        case inspect.AnyType():
            return _free(value, key)
        case _:
            return _conform_scalar(value, expected_type, key)


def complete_settings(value: Any, expected_type: inspect.Type, leaving: Container[str] = (), key: str = "") -> Any:
    """Return settings in which each key that is required and not set, but for some, has a stand-in of its type."""
    if not isinstance(value, dict) or not isinstance(expected_type, inspect.StructType):
        return value
    settings = dict(value)
    for field in expected_type.fields:
        name, path = field.encode_name, _join(key, field.encode_name)
        if name in value:
            inner = next(iter(list_struct_types(field.type)), field.type)
            settings[name] = complete_settings(value[name], inner, leaving, path)
        elif field.required and path not in leaving:
            settings[name] = (
                complete_settings({}, field.type, leaving, path)
                if isinstance(field.type, inspect.StructType)
                else _make_stand_in(field.type)
            )
    return settings


def _make_stand_in(field_type: inspect.Type) -> Any:
    match field_type:
        case inspect.LiteralType():
            return min(field_type.values, key=str)
        case inspect.BoolType():
            return False
        case inspect.IntType() | inspect.FloatType():
            return max(1, field_type.ge or 0)
        case inspect.StrType():
            return STAND_IN
        case inspect.VarTupleType():
            return []
        case inspect.DictType():
            return {}
        case _:
            return None


def describe_type(field_type: inspect.Type) -> str:
    """Return the values that a type allows, in plain words."""
    match field_type:
        case inspect.NoneType():
            return "null"
        case inspect.BoolType():
            return "true or false"
        case inspect.IntType() | inspect.FloatType():
            noun = "an integer" if isinstance(field_type, inspect.IntType) else "a number"
            bounds = _describe_bounds(field_type)
            return f"{noun} {bounds}" if bounds else noun
        case inspect.StrType():
            return "text"
        case inspect.LiteralType():
            return ", ".join(sorted(str(choice) for choice in field_type.values))
        case inspect.VarTupleType():
            item = describe_type(field_type.item_type)
            return f"a list of {item.replace('an integer', 'integers').replace('a mapping', 'mappings')}"
        case inspect.UnionType():
            ordered = sorted(field_type.types, key=lambda member: isinstance(member, inspect.NoneType))
            return " or ".join(describe_type(member) for member in ordered)
        case _:
            return "a mapping"


def list_keys(described: inspect.StructType, prefix: str = "") -> Iterator[str]:
    """Yield the path of every key that the schema knows by name."""
    for field in described.fields:
        yield (key := f"{prefix}{field.encode_name}")
        for inner in list_struct_types(field.type):
            yield from list_keys(inner, f"{key}.")


def list_choices_of_keys() -> Iterator[tuple[str, list[str]]]:
    """Yield each key that is not a section, with the words that it may be, or none where any value is possible."""

    def words(field_type: inspect.Type) -> list[str]:
        match field_type:
            case inspect.BoolType():
                return ["true", "false"]
            case inspect.LiteralType():
                return [str(value) for value in field_type.values]
            case inspect.UnionType():
                return [word for member in field_type.types for word in words(member)]
            case _:
                return []

    def walk(described: inspect.StructType, prefix: str) -> Iterator[tuple[str, list[str]]]:
        for field in described.fields:
            inner = list_struct_types(field.type)
            if not inner:
                yield f"{prefix}{field.encode_name}", words(field.type)
            for struct in inner:
                yield from walk(struct, f"{prefix}{field.encode_name}.")

    return walk(config_type(), "")


def list_struct_types(field_type: inspect.Type) -> list[inspect.StructType]:
    """Return the struct of a field's type, if it is one directly or in a union with null or choices."""
    members = field_type.types if isinstance(field_type, inspect.UnionType) else (field_type,)
    return [member for member in members if isinstance(member, inspect.StructType)]


def field_of(described: Any, name: str) -> Any:
    """Return msgspec's description of a struct's field; None if the struct has no such field."""
    return next((field for field in described.fields if field.encode_name == name), None)


def _conform_struct(value: Any, struct_type: inspect.StructType, key: str) -> dict[str, Any]:
    mapping = _check_mapping(value, struct_type, key)
    fields = {field.encode_name: field for field in struct_type.fields}
    problems = ProblemCollector()
    unknown_names = [name for name in mapping if name not in fields]
    # verl has a section of the name of a key here, `algorithm`.
    sections = [name for name in mapping if name in fields and _is_section(mapping[name], fields[name].type)]
    of_peers = {name: find_peer_keys(_join(key, str(name)), mapping[name]) for name in (*unknown_names, *sections)}
    meant = {name: _find_meant(name, key, list(fields)) for name in unknown_names if not of_peers[name]}
    for peer_key in itertools.chain(*of_peers.values()):
        unknown = UnknownKey(is_misplaced=bool(peer_key.equivalent) or peer_key.peer == "verl")
        problems.found.append(InvalidValue(peer_key.path, f"{UNKNOWN}{peer_key.hint}", unknown=unknown))
    for name, meant_name in meant.items():
        unknown = describe_unknown_key(
            _join(key, name), mapping[name], {sibling: fields[sibling].default for sibling in fields}
        )
        if meant_name in fields:
            unknown = unknown._replace(meant=_join(key, meant_name))
        hint = suggest(meant_name) if meant_name else f"; {key or 'the top level'} knows {', '.join(fields)}"
        problems.found.append(InvalidValue(_join(key, name), f"{UNKNOWN}{hint}", unknown=unknown))
    result: dict[str, Any] = {}
    for name, field in fields.items():
        if of_peers.get(name):
            continue
        if name in mapping:
            with problems.collected():
                result[name] = conform(mapping[name], field.type, _join(key, name))
        elif field.required and name not in meant.values():
            path, expected = _join(key, name), describe_type(field.type)
            problems.found.append(InvalidValue(path, f"{_REQUIRED}: expected {expected}{_INSTEAD.get(path, '')}"))
    settings = [*itertools.chain(*of_peers.values())]
    problems.found = [problem for problem in problems.found if not _is_named(problem, settings)]
    problems.complain()
    return result


def _is_section(value: Any, field_type: inspect.Type) -> bool:
    """Tell whether a mapping was written where one of a few words is expected."""
    return isinstance(value, dict) and isinstance(field_type, inspect.LiteralType)


def _is_named(problem: InvalidValue, settings: Iterable[PeerKey]) -> bool:
    """Tell whether a key is only missing because it, or one within it, was written in a peer's words."""
    equivalents = [each.equivalent.replace(",", " ") for each in settings]
    return problem.text.startswith(_REQUIRED) and any(
        f"{each} ".startswith((f"{problem.key} ", f"{problem.key}.")) for each in equivalents
    )


def _conform_all(values: dict[str, Any], expected_type: inspect.Type) -> dict[str, Any]:
    """Fit values, given by key, to one type."""
    problems, fitted = ProblemCollector(), {}
    for key, value in values.items():
        with problems.collected():
            fitted[key] = conform(value, expected_type, key)
    problems.complain()
    return fitted


def describe_unknown_key(key: str, value: Any, siblings: Mapping[str, Any]) -> UnknownKey:
    """Tell of an unknown key which known ones it may be a slip of, given the defaults of its siblings.

    It may be one of a sibling that it nearly equals, or of the same name in another section, if it is a single value.
    A sibling's name with further words, such as ``gym_num_nodes`` beside ``num_nodes``, is a name of its own, and so
    is one with a list or a mapping where the sibling has neither, unless they are almost the same.
    """
    prefix, _, name = key.rpartition(".")
    near = [
        sibling
        for sibling, default in siblings.items()
        if _is_slip(name.lower().split("_"), sibling.split("_"))
        if _compute_likeness(name, sibling) > _NEARLY_SAME
        or not (isinstance(value, list | dict) and _is_scalar(default))
    ]
    near.sort(key=lambda sibling: -_compute_likeness(name.lower(), sibling))
    return UnknownKey(
        near=tuple(_join(prefix, sibling) for sibling in near),
        is_misplaced=not isinstance(value, dict)
        and any(config_key.endswith(f".{name}") for config_key in list_keys(config_type())),
        is_idle=_is_idle(value) and all(_is_idle(siblings[sibling]) for sibling in near),
    )


def find_setting(node: Any, parts: Sequence[str]) -> Any:
    """Return the value at a key of settings; None where they have none, or have it in another place."""
    for part in parts:
        if isinstance(node, list) and part.isdecimal() and int(part) < len(node):
            node = node[int(part)]
        else:
            node = node.get(part) if isinstance(node, dict) else None
    return node


def _is_scalar(default: Any) -> bool:
    return isinstance(default, bool | int | float | str)


def _is_idle(value: Any) -> bool:
    """Tell whether a value switches nothing on: null, false, zero, or an empty text, list or mapping."""
    return value is None or value is False or value in (0, "", [], (), {})


def _is_slip(words: list[str], known_words: list[str]) -> bool:
    """Tell whether the words of a name are nearly those of a known one."""
    if len(words) > len(known_words) and not Counter(known_words) - Counter(words):
        return False
    if len(words) != len(known_words):
        return _compute_likeness("_".join(words), "_".join(known_words)) > _NAME_ALIKE
    each_alike = all(_compute_likeness(*pair) > _WORD_ALIKE for pair in zip(words, known_words, strict=True))
    return (
        each_alike
        or sorted(words) == sorted(known_words)
        or _compute_likeness("_".join(words), "_".join(known_words)) > _NEARLY_SAME
    )


def _compute_likeness(first: str, second: str) -> float:
    return difflib.SequenceMatcher(None, first, second).ratio()


def _find_meant(name: str, key: str, siblings: list[str]) -> str:
    """Return what an unknown key may be meant for: the key where that name belongs, or the nearest sibling."""
    near = find_nearest(name, siblings)
    for config_key in list_keys(config_type()):
        if config_key.rpartition(".")[2] == name and config_key not in _OF_DISTILLATION and (not near or key):
            return config_key
    return near


def _conform_union(value: Any, expected_type: inspect.UnionType, key: str) -> Any:
    if value is None and expected_type.includes_none:
        return None
    members = [member for member in expected_type.types if not isinstance(member, inspect.NoneType)]
    if len(members) == 1 and value is not None:
        return conform(value, members[0], key)
    has_choices = any(isinstance(member, inspect.LiteralType) for member in members)
    for member in sorted(members, key=lambda member: not isinstance(member, inspect.LiteralType)):
        kinds = (isinstance(member, inspect.StructType), isinstance(member, inspect.VarTupleType))
        if kinds == (isinstance(value, dict), isinstance(value, list | tuple)) and value is not None:
            if isinstance(member, inspect.LiteralType) and not _is_choice(value, member):
                continue
            is_word = isinstance(value, bool) or (isinstance(value, str) and not NUMBER.fullmatch(value))
            if isinstance(member, inspect.FloatType | inspect.IntType) and is_word and has_choices:
                continue  # so that the error names the choices too
            return conform(value, member, key)
    raise _describe_mismatch(value, expected_type, key)


def _is_choice(value: Any, expected_type: inspect.LiteralType) -> bool:
    """Tell whether a value is one of the choices."""
    return _read_word(value) in expected_type.values


def _read_word(value: Any) -> Any:
    """Return a value as it was written: YAML 1.1 reads ``on`` and ``off`` as true and false."""
    return ("on" if value else "off") if isinstance(value, bool) else value


def _conform_scalar(value: Any, expected_type: inspect.Type, key: str) -> Any:
    match expected_type:
        case inspect.BoolType() if isinstance(value, bool):
            return value
        case inspect.StrType() if isinstance(value, str):
            if expected_type.min_length and not value:
                raise InvalidValue(key, "is empty")
            if expected_type.pattern is not None and not re.search(expected_type.pattern, value):
                raise InvalidValue(key, f"{shown(value)} is malformed{_FORMS.get(expected_type.pattern, '')}")
            return value
        case inspect.IntType() if (
            isinstance(value, int | float) and not isinstance(value, bool) and value == value // 1
        ):
            return _check_within(int(value), expected_type, key)
        case inspect.FloatType() if isinstance(value, str) and NUMBER.fullmatch(value):
            return _check_within(float(value), expected_type, key)
        case inspect.FloatType() if isinstance(value, int | float) and not isinstance(value, bool):
            return _check_within(float(value), expected_type, key)
        case _:
            raise _describe_mismatch(value, expected_type, key)


def _check_within(value: float, number_type: inspect.IntType | inspect.FloatType, key: str) -> float:
    ok = (
        math.isfinite(value)
        and (number_type.ge is None or value >= number_type.ge)
        and (number_type.gt is None or value > number_type.gt)
        and (number_type.le is None or value <= number_type.le)
        and (number_type.lt is None or value < number_type.lt)
    )
    if ok and isinstance(number_type, inspect.IntType) and abs(value) >= 2**63:
        raise InvalidValue(key, f"expected {describe_type(number_type)}, got one of more than 64 bits")
    if not ok:
        raise InvalidValue(key, f"expected {describe_type(number_type)}, got {value}")
    return value


def _describe_bounds(number_type: inspect.IntType | inspect.FloatType) -> str:
    named = [
        ("at least", number_type.ge),
        ("greater than", number_type.gt),
        ("at most", number_type.le),
        ("less than", number_type.lt),
    ]
    unreachable = 2**63 - 1
    return " and ".join(f"{words} {bound:g}" for words, bound in named if bound is not None and bound != unreachable)


def _free(value: Any, key: str) -> Any:
    """Check a value that another library interprets: it must survive JSON unchanged."""
    match value:
        case dict():
            return {name: _free(item, _join(key, name)) for name, item in _check_mapping(value, None, key).items()}
        case list():
            return [_free(item, f"{key}[{index}]") for index, item in enumerate(value)]
        case str() if key.partition(".")[0] in MODELS and SCIENTIFIC.fullmatch(value):
            return float(value)
        case None | str() | int():
            return value
        case float() if math.isfinite(value):
            return value
        case _:
            raise InvalidValue(
                key, f"{shown(value)} cannot be used here: expected text, a finite number, a list or a mapping"
            )


def _check_mapping(value: Any, expected_type: inspect.Type | None, key: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidValue(
            key, f"expected {describe_type(expected_type) if expected_type else 'a mapping'}, got {shown(value)}"
        )
    for name in value:
        if not isinstance(name, str):
            raise InvalidValue(key, f"the key {shown(name)} is not text; quote it")
    return value


def _describe_mismatch(value: Any, expected_type: inspect.Type, key: str) -> InvalidValue:
    return InvalidValue(key, f"expected {describe_type(expected_type)}, got {shown(value)}")


def _join(key: str, name: object) -> str:
    return f"{key}.{name}" if key else str(name)
