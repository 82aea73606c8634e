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
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Any

from msgspec import inspect
from msgspec.inspect import (
    AnyType,
    BoolType,
    DictType,
    FloatType,
    IntType,
    LiteralType,
    NoneType,
    StrType,
    StructType,
    Type,
    UnionType,
    VarTupleType,
)

from tandem.common.errors import nearest
from tandem.config.names.peer_names import PeerKey, peer_keys
from tandem.config.problem import InvalidValue, ProblemCollector, UnknownKey, shown
from tandem.config.schema import MODELS, Config
from tandem.config.schema.distillation import DistillationLossConfig
from tandem.config.schema.run import DURATION

_OF_DISTILLATION = frozenset(f"loss_fn.{name}" for name in DistillationLossConfig.__struct_encode_fields__)
"""Keys of the distillation loss, not suggested for a misplaced name: they repeat more common ones."""

_FORMS = {DURATION: ": expected days:hours:minutes:seconds, such as 00:03:45:00"}
"""Examples of texts with a fixed form, by the pattern of the form."""

STAND_IN = "?"
"""Text in place of a required one that is not set: a name of nothing, neither on disk nor on the Hub."""

_REQUIRED = "required, but not set"
_WORD_ALIKE, _NAME_ALIKE, _NEARLY_SAME = 0.6, 0.7, 0.85
"""Likeness, by `difflib`, above which a word, a name of fewer or more words, and one of as many words is taken for a
slip of another."""

NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")
SCIENTIFIC = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+")


@functools.cache
def config_type() -> StructType:
    """Return msgspec's description of `Config`."""
    described = inspect.type_info(Config)
    assert isinstance(described, StructType)
    return described


def conform(value: Any, wanted: Type, key: str) -> Any:
    """Fit a value to the type `wanted`. Raises `InvalidValue` for the keys at and below `key` that do not fit."""
    match wanted:
        case StructType():
            return _struct(value, wanted, key)
        case UnionType():
            return _union(value, wanted, key)
        case LiteralType():
            if not _is_choice(value, wanted):
                choices = sorted(str(choice) for choice in wanted.values)
                listed = ", ".join(choices)
                raise InvalidValue(key, f"{shown(value)} is not one of {listed}{nearest(str(value), choices)}")
            return _word(value)
        case VarTupleType():
            if not isinstance(value, list | tuple):
                raise _mismatch(value, wanted, key)
            return list(_each({f"{key}[{index}]": item for index, item in enumerate(value)}, wanted.item_type).values())
        case DictType(value_type=AnyType()):
            return _free(_mapping(value, wanted, key), key)
        case DictType():
            mapping = _mapping(value, wanted, key)
            fitted = _each({f"{key}.{name}": item for name, item in mapping.items()}, wanted.value_type)
            return dict(zip(mapping, fitted.values(), strict=True))
        case AnyType():
            return _free(value, key)
        case _:
            return _scalar(value, wanted, key)


def completed(value: Any, wanted: Type, leaving: Container[str] = (), key: str = "") -> Any:
    """Return settings in which each key that is required and not set, but for some, has a stand-in of its type."""
    if not isinstance(value, dict) or not isinstance(wanted, StructType):
        return value
    whole = dict(value)
    for field in wanted.fields:
        name, path = field.encode_name, _join(key, field.encode_name)
        if name in value:
            inner = next(iter(struct_types(field.type)), field.type)
            whole[name] = completed(value[name], inner, leaving, path)
        elif field.required and path not in leaving:
            whole[name] = (
                completed({}, field.type, leaving, path)
                if isinstance(field.type, StructType)
                else _stand_in(field.type)
            )
    return whole


def _stand_in(wanted: Type) -> Any:
    match wanted:
        case LiteralType():
            return min(wanted.values, key=str)
        case BoolType():
            return False
        case IntType() | FloatType():
            return max(1, wanted.ge or 0)
        case StrType():
            return STAND_IN
        case VarTupleType():
            return []
        case DictType():
            return {}
        case _:
            return None


def describe_type(wanted: Type) -> str:
    """Return the values that a type allows, in plain words."""
    match wanted:
        case NoneType():
            return "null"
        case BoolType():
            return "true or false"
        case IntType() | FloatType():
            noun = "an integer" if isinstance(wanted, IntType) else "a number"
            bounds = _bounds(wanted)
            return f"{noun} {bounds}" if bounds else noun
        case StrType():
            return "text"
        case LiteralType():
            return ", ".join(sorted(str(choice) for choice in wanted.values))
        case VarTupleType():
            item = describe_type(wanted.item_type)
            return f"a list of {item.replace('an integer', 'integers').replace('a mapping', 'mappings')}"
        case UnionType():
            ordered = sorted(wanted.types, key=lambda member: isinstance(member, NoneType))
            return " or ".join(describe_type(member) for member in ordered)
        case _:
            return "a mapping"


def all_keys(described: StructType, prefix: str = "") -> Iterator[str]:
    """Yield the path of every key that the schema knows by name."""
    for field in described.fields:
        yield (key := f"{prefix}{field.encode_name}")
        for inner in struct_types(field.type):
            yield from all_keys(inner, f"{key}.")


def choices_of_keys() -> Iterator[tuple[str, list[str]]]:
    """Yield each key that is not a section, with the words that it may be, or none where any value is possible."""

    def words(wanted: Type) -> list[str]:
        match wanted:
            case BoolType():
                return ["true", "false"]
            case LiteralType():
                return [str(value) for value in wanted.values]
            case UnionType():
                return [word for member in wanted.types for word in words(member)]
            case _:
                return []

    def each(described: StructType, prefix: str) -> Iterator[tuple[str, list[str]]]:
        for field in described.fields:
            inner = struct_types(field.type)
            if not inner:
                yield f"{prefix}{field.encode_name}", words(field.type)
            for struct in inner:
                yield from each(struct, f"{prefix}{field.encode_name}.")

    return each(config_type(), "")


def struct_types(wanted: Type) -> list[StructType]:
    """Return the struct of a field's type, if it is one directly or in a union with null or choices."""
    members = wanted.types if isinstance(wanted, UnionType) else (wanted,)
    return [member for member in members if isinstance(member, StructType)]


def field_of(described: Any, name: str) -> Any:
    """Return msgspec's description of a struct's field; None if the struct has no such field."""
    return next((field for field in described.fields if field.encode_name == name), None)


def _struct(value: Any, wanted: StructType, key: str) -> dict[str, Any]:
    mapping = _mapping(value, wanted, key)
    fields = {field.encode_name: field for field in wanted.fields}
    problems = ProblemCollector()
    others = [name for name in mapping if name not in fields]
    # verl has a section of the name of a key here, `algorithm`.
    sections = [name for name in mapping if name in fields and _is_section(mapping[name], fields[name].type)]
    of_peers = {name: peer_keys(_join(key, str(name)), mapping[name]) for name in (*others, *sections)}
    suggestions = {name: _suggestion(name, key, list(fields)) for name in others if not of_peers[name]}
    for each in itertools.chain(*of_peers.values()):
        unknown = UnknownKey(is_misplaced=bool(each.here) or each.peer == "verl")
        problems.found.append(InvalidValue(each.path, f"unknown key{each.hint}", unknown=unknown))
    for name, hint in suggestions.items():
        unknown = unknown_key(_join(key, name), mapping[name], {known: fields[known].default for known in fields})
        problems.found.append(InvalidValue(_join(key, name), f"unknown key{hint}", unknown=unknown))
    result: dict[str, Any] = {}
    for name, field in fields.items():
        if of_peers.get(name):
            continue
        if name in mapping:
            with problems.collected():
                result[name] = conform(mapping[name], field.type, _join(key, name))
        elif field.required and f"; did you mean {name!r}?" not in suggestions.values():
            expected = describe_type(field.type)
            problems.found.append(InvalidValue(_join(key, name), f"{_REQUIRED}: expected {expected}"))
    settings = [*itertools.chain(*of_peers.values())]
    problems.found = [each for each in problems.found if not _is_named(each, settings)]
    problems.complain()
    return result


def _is_section(value: Any, wanted: Type) -> bool:
    """Tell whether a mapping was written where one of a few words is expected."""
    return isinstance(value, dict) and isinstance(wanted, LiteralType)


def _is_named(problem: InvalidValue, settings: Iterable[PeerKey]) -> bool:
    """Tell whether a key is only missing because it, or one within it, was written in a peer's words."""
    here = [each.here.replace(",", " ") for each in settings]
    return problem.text.startswith(_REQUIRED) and any(
        f"{each} ".startswith((f"{problem.key} ", f"{problem.key}.")) for each in here
    )


def _each(values: dict[str, Any], wanted: Type) -> dict[str, Any]:
    """Fit values, given by key, to one type."""
    problems, fitted = ProblemCollector(), {}
    for key, value in values.items():
        with problems.collected():
            fitted[key] = conform(value, wanted, key)
    problems.complain()
    return fitted


def unknown_key(key: str, value: Any, siblings: Mapping[str, Any]) -> UnknownKey:
    """Tell of an unknown key which known ones it may be a slip of, given the defaults of its siblings.

    It may be one of a sibling that it nearly equals, or of the same name in another section, if it is a single value.
    A sibling's name with further words, such as ``gym_num_nodes`` beside ``num_nodes``, is a name of its own, and so
    is one with a list or a mapping where the sibling has neither, unless they are almost the same.
    """
    prefix, _, name = key.rpartition(".")
    near = [
        known
        for known, default in siblings.items()
        if _is_slip(name.lower().split("_"), known.split("_"))
        if _likeness(name, known) > _NEARLY_SAME or not (isinstance(value, list | dict) and _is_scalar(default))
    ]
    near.sort(key=lambda known: -_likeness(name.lower(), known))
    return UnknownKey(
        near=tuple(_join(prefix, known) for known in near),
        is_misplaced=not isinstance(value, dict)
        and any(known.endswith(f".{name}") for known in all_keys(config_type())),
        is_idle=_is_idle(value) and all(_is_idle(siblings[known]) for known in near),
    )


def _is_scalar(default: Any) -> bool:
    return isinstance(default, bool | int | float | str)


def _is_idle(value: Any) -> bool:
    """Tell whether a value switches nothing on: null, false, zero, or an empty text, list or mapping."""
    return value is None or value is False or value in (0, "", [], (), {})


def _is_slip(words: list[str], known: list[str]) -> bool:
    """Tell whether the words of a name are nearly those of a known one."""
    if len(words) > len(known) and not Counter(known) - Counter(words):
        return False
    if len(words) != len(known):
        return _likeness("_".join(words), "_".join(known)) > _NAME_ALIKE
    each_alike = all(_likeness(*pair) > _WORD_ALIKE for pair in zip(words, known, strict=True))
    return each_alike or sorted(words) == sorted(known) or _likeness("_".join(words), "_".join(known)) > _NEARLY_SAME


def _likeness(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one, other).ratio()


def _suggestion(name: str, key: str, siblings: list[str]) -> str:
    """Return a hint for an unknown key: the section where that name belongs, the nearest sibling, or all siblings."""
    near = nearest(name, siblings)
    for known in all_keys(config_type()):
        if known.rpartition(".")[2] == name and known not in _OF_DISTILLATION and (not near or key):
            return f"; did you mean {known!r}?"
    return near or f"; {key or 'the top level'} knows {', '.join(siblings)}"


def _union(value: Any, wanted: UnionType, key: str) -> Any:
    if value is None and wanted.includes_none:
        return None
    members = [member for member in wanted.types if not isinstance(member, NoneType)]
    if len(members) == 1 and value is not None:
        return conform(value, members[0], key)
    has_choices = any(isinstance(member, LiteralType) for member in members)
    for member in sorted(members, key=lambda member: not isinstance(member, LiteralType)):
        kinds = (isinstance(member, StructType), isinstance(member, VarTupleType))
        if kinds == (isinstance(value, dict), isinstance(value, list | tuple)) and value is not None:
            if isinstance(member, LiteralType) and not _is_choice(value, member):
                continue
            is_word = isinstance(value, bool) or (isinstance(value, str) and not NUMBER.fullmatch(value))
            if isinstance(member, FloatType | IntType) and is_word and has_choices:
                continue  # so that the error names the choices too
            return conform(value, member, key)
    raise _mismatch(value, wanted, key)


def _is_choice(value: Any, wanted: LiteralType) -> bool:
    """Tell whether a value is one of the choices."""
    return _word(value) in wanted.values


def _word(value: Any) -> Any:
    """Return a value as it was written: YAML 1.1 reads ``on`` and ``off`` as true and false."""
    return ("on" if value else "off") if isinstance(value, bool) else value


def _scalar(value: Any, wanted: Type, key: str) -> Any:
    match wanted:
        case BoolType() if isinstance(value, bool):
            return value
        case StrType() if isinstance(value, str):
            if wanted.min_length and not value:
                raise InvalidValue(key, "is empty")
            if wanted.pattern is not None and not re.search(wanted.pattern, value):
                raise InvalidValue(key, f"{shown(value)} is malformed{_FORMS.get(wanted.pattern, '')}")
            return value
        case IntType() if isinstance(value, int | float) and not isinstance(value, bool) and value == value // 1:
            return _within(int(value), wanted, key)
        case FloatType() if isinstance(value, str) and NUMBER.fullmatch(value):
            return _within(float(value), wanted, key)
        case FloatType() if isinstance(value, int | float) and not isinstance(value, bool):
            return _within(float(value), wanted, key)
        case _:
            raise _mismatch(value, wanted, key)


def _within(value: float, wanted: IntType | FloatType, key: str) -> float:
    ok = (
        math.isfinite(value)
        and (wanted.ge is None or value >= wanted.ge)
        and (wanted.gt is None or value > wanted.gt)
        and (wanted.le is None or value <= wanted.le)
        and (wanted.lt is None or value < wanted.lt)
    )
    if ok and isinstance(wanted, IntType) and abs(value) >= 2**63:
        raise InvalidValue(key, f"expected {describe_type(wanted)}, got one of more than 64 bits")
    if not ok:
        raise InvalidValue(key, f"expected {describe_type(wanted)}, got {value}")
    return value


def _bounds(wanted: IntType | FloatType) -> str:
    named = [("at least", wanted.ge), ("greater than", wanted.gt), ("at most", wanted.le), ("less than", wanted.lt)]
    unreachable = 2**63 - 1
    return " and ".join(f"{words} {bound:g}" for words, bound in named if bound is not None and bound != unreachable)


def _free(value: Any, key: str) -> Any:
    """Check a value that another library interprets: it must survive JSON unchanged."""
    match value:
        case dict():
            return {name: _free(item, _join(key, name)) for name, item in _mapping(value, None, key).items()}
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


def _mapping(value: Any, wanted: Type | None, key: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidValue(key, f"expected {describe_type(wanted) if wanted else 'a mapping'}, got {shown(value)}")
    for name in value:
        if not isinstance(name, str):
            raise InvalidValue(key, f"the key {shown(name)} is not text; quote it")
    return value


def _mismatch(value: Any, wanted: Type, key: str) -> InvalidValue:
    return InvalidValue(key, f"expected {describe_type(wanted)}, got {shown(value)}")


def _join(key: str, name: object) -> str:
    return f"{key}.{name}" if key else str(name)
