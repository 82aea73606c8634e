"""Load a YAML file and overrides into a checked `Config`: the pipeline, and the ways into it.

| stage | settings afterwards | module |
|---|---|---|
| `read_layers` | layers, each with its source: files by ``defaults:``, the file, overrides; and all merged | `layers` |
| `translate` | those of a run, if they were an evaluation's in NeMo-RL's form | `nemo_eval` |
| `remove_foreign` | without keys of a newer NeMo-RL, which ``ignored`` lists | here |
| `interpolate` | without ``${...}`` | here |
| `_remove_variables` | without what only interpolations read | here |
| `fill` | with derived keys | `derive` |
| `conform` | known names, and values of the right types | `conform` |
| `msgspec.convert` | a `Config` | `schema` |
| `describe_refusal` | or the enabled features that are not built | `unsupported` |
| `fit_megatron` | with what Megatron-Core makes of its settings | `megatron` |
| `find_broken_rules` | or the rules that are broken | `checks` |

`_look_through` goes from `interpolate` to the end, and stops at the first stage that finds problems. If there are any,
`hidden.add_hidden` removes the wrong keys and looks again, so that an error lists the problems of all stages.
"""

from __future__ import annotations

import difflib
import functools
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import NODEFAULT
from msgspec.inspect import StructType

from tandem.common.errors import ConfigError, NotSupportedYet
from tandem.config import checks, hidden, megatron, nemo_eval
from tandem.config.conform import UNKNOWN, complete_settings, config_type, conform, find_setting
from tandem.config.derive import DERIVED, fill, unfill
from tandem.config.dump import differing, escape_interpolations, make_plain
from tandem.config.layers import (
    COMMAND_LINE,
    ConfigLayer,
    ConfigLayers,
    layer_of,
    merge,
    overridden,
    read_layers,
    split_key,
)
from tandem.config.problem import InvalidValue, shown
from tandem.config.schema import Config
from tandem.config.unsupported import describe_foreign_parts, describe_refusal

NEWER = "newer"
"""Value of ``nemo_rl_version`` that names no release."""
HOW_TO_IGNORE = "; if a newer NeMo-RL knows it, --newer ignores it"
"""End of the error for an unknown key that is no near miss of a known one."""
NOT_KNOWN = "is not known to this release: no effect"
"""End of the notice about an ignored key."""
_LATEST = (0, 7)
"""Latest release of NeMo-RL whose keys are all known."""
_MOST_LOOKS = 20


def remove_foreign(
    layers: ConfigLayers, look: hidden.Look, interpolated: Callable[[dict[str, Any]], dict[str, Any]]
) -> tuple[dict[str, Any], Config | hidden.RefusedSettings]:
    """Return settings without the keys of a newer release, which ``ignored`` lists then, and what `look` finds."""
    settings = layers.merged
    version = settings.get("nemo_rl_version")
    if isinstance(version, float):  # written without quotes
        version = str(version)
        settings = {**settings, "nemo_rl_version": version}
    outcome = look(settings)
    for _ in range(_MOST_LOOKS if is_newer(version) else 0):
        if isinstance(outcome, Config):
            break
        foreign = [problem for problem in outcome.problems if is_foreign(problem, layers)]
        fewer = settings
        foreign = [_restore_written(problem, settings) for problem in foreign]
        for problem in foreign:
            fewer = hidden.remove_key(fewer, split_key(problem.key))
        if fewer == settings:
            break
        listed = settings.get("ignored") or ()
        lines = _describe_foreign(interpolated(settings), foreign, layers.written)
        new_lines = [line for line in lines if line not in listed]
        settings = {**fewer, "ignored": [*listed, *escape_interpolations(new_lines)]}
        outcome = look(settings)
    return settings, outcome


def _restore_written(problem: InvalidValue, settings: dict[str, Any]) -> InvalidValue:
    """Return a problem with the key that the settings have: a list of one teacher becomes the teacher."""
    teachers = settings.get("teachers")
    if problem.key.startswith("teacher.") and isinstance(teachers, list) and len(teachers) == 1:
        return InvalidValue(
            f"teachers[0].{problem.key.removeprefix('teacher.')}", problem.text, unknown=problem.unknown
        )
    return problem


def is_foreign(problem: InvalidValue, layers: ConfigLayers) -> bool:
    """Tell whether an unknown key is a name of its own, of a newer release, rather than a slip of the pen.

    It is no slip of a key that stands beside it in the same file. Nor does a slip matter if its value switches
    nothing on, and no file sets the key that may be meant.
    """
    unknown = problem.unknown
    if unknown is None or unknown.is_misplaced:
        return False
    if not unknown.near or layers.are_set_together(problem.key, unknown.near[0]):
        return True
    return unknown.is_idle and not any(map(layers.is_set, unknown.near))


def _explain(problem: InvalidValue, layers: ConfigLayers) -> str:
    """Return the error for a foreign key, with what would ignore it.

    A key that stands beside it in the same file is not the one meant, unless they differ by a single letter.
    """
    meant = "" if problem.unknown is None else problem.unknown.meant
    is_beside = bool(meant) and layers.are_set_together(problem.key, meant)
    text = UNKNOWN if is_beside and not _is_misspelt(problem.key, meant) else problem.text
    return f"{text}{HOW_TO_IGNORE}"


def _is_misspelt(word: str, known_word: str) -> bool:
    """Tell whether one letter that is missing, added, wrong or swapped with its neighbour is all that differs."""
    blocks = difflib.SequenceMatcher(None, word, known_word).get_matching_blocks()
    return max(len(word), len(known_word)) - sum(block.size for block in blocks) <= 1


def is_newer(version: Any) -> bool:
    """Tell whether keys of a release may be unknown here."""
    if version == NEWER:
        return True
    is_number = isinstance(version, str) and re.fullmatch(r"\d+\.\d+(\.\d+)*", version) is not None
    return is_number and tuple(map(int, version.split(".")[:2])) > _LATEST


def _describe_foreign(
    settings: dict[str, Any], problems: list[InvalidValue], written: Callable[[str], str]
) -> list[str]:
    """Return a notice about the key of each problem, as its file has it."""
    values = [find_setting(settings, split_key(each.key)) for each in problems]
    return [
        f"{written(each.key)} ({_show_plain(value)}) {NOT_KNOWN}" for each, value in zip(problems, values, strict=True)
    ]


def _show_plain(value: Any) -> str:
    return shown(value) if not isinstance(value, str) else shown(value).strip("'")


RESOLVERS: dict[str, Callable[[Any, Any], Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "max": max,
}
"""Functions of two numbers in ``${name:a,b}``, as in NeMo-RL; integers give an integer, except with ``div``."""


Written = Callable[[str], tuple[str, str]]

_DERIVED = frozenset(rule.key for rule in DERIVED)
"""Derived keys. Unless a user has set them, their problems follow from those of other keys."""


def load_config(path: str | Path, overrides: Sequence[str] = (), *, to_run: bool = True) -> Config:
    """Read a configuration file with ``key=value`` overrides.

    Inheritance (``defaults:``), interpolation (``${...}``) and overrides work as in NeMo-RL; see
    ``docs/configuration.md``. Raises `ConfigError` with lines that begin with the file (or ``command line``) and the
    key. If the configuration is `to_run`, raises `NotSupportedYet` for an enabled feature that is not built.
    """
    return _build(read_layers(Path(path), overrides), to_run=to_run)


def load_evaluation(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read the configuration of an evaluation: that of a run, or one in NeMo-RL's form (``evals/*.yaml``).

    Raises the errors of `load_config`.
    """
    layers, written = _read_any_layers(path, overrides)
    return _build(layers, to_run=True, written=written)


def _read_any_layers(path: str | Path, overrides: Sequence[str]) -> tuple[ConfigLayers, Written | None]:
    """Return the layers of a run's configuration, or of an evaluation's in NeMo-RL's form, with what wrote its keys."""
    layers = read_layers(Path(path), overrides)
    if not nemo_eval.is_nemo_eval(layers.merged):
        return layers, None
    try:
        settings = nemo_eval.translate(interpolate(layers.merged))
    except InvalidValue as problem:
        raise ConfigError(f"{layers.source_of(problem.key)}: {problem.key}: {problem.text}") from None

    def written(key: str) -> tuple[str, str]:
        eval_key = nemo_eval.find_original_key(key)
        return layers.source_of(eval_key), eval_key if layers.is_set(eval_key) else key

    merged = escape_interpolations(settings)
    return msgspec.structs.replace(layers, merged=merged, find_written=nemo_eval.find_original_key), written


def build_config(settings: Mapping[str, Any], source: str = "configuration") -> Config:
    """Make a configuration from a mapping, like `load_config` from a file; errors begin with `source`."""
    return build(make_layers(settings, source))


def make_layers(configuration: str | Path | Mapping[str, Any] | Config, source: str = "config") -> ConfigLayers:
    """Return the lowest layer, given as a file, a mapping or a finished configuration.

    `source` is the name in errors if it is not a file.
    """
    if isinstance(configuration, str | Path):
        return read_layers(Path(configuration), ())
    plain = (
        escape_interpolations(_unfill_config(configuration))
        if isinstance(configuration, Config)
        else dict(configuration)
    )
    layer = layer_of(source, plain)
    return ConfigLayers(main=source, layers=(layer,), merged=layer.settings)


def lay_over(layers: ConfigLayers, settings: Mapping[str, Any], source: str) -> ConfigLayers:
    """Return layers with one more on top, named `source` in errors."""
    top = layer_of(source, settings)
    return ConfigLayers(main=layers.main, layers=(*layers.layers, top), merged=merge(layers.merged, top.settings))


def build(layers: ConfigLayers, *, to_run: bool = True) -> Config:
    """Make a configuration from layers. Raises the errors of `load_config`."""
    return _build(layers, to_run=to_run)


class ValidPart(msgspec.Struct, frozen=True):
    """The valid part of a refused configuration."""

    config: Config
    """Configuration without its wrong keys; those that it needs have a stand-in, which names nothing."""
    source_of: Callable[[str], str]
    """Function that returns the file of a key."""


def valid_part(path: str | Path, overrides: Sequence[str] = ()) -> ValidPart | None:
    """Return the valid part of a refused configuration; None if it is not enough to make one."""
    try:
        layers, written = _read_any_layers(path, overrides)
        look = functools.partial(_look_through, to_run=True)
        tree = hidden.remove_wrong_keys(remove_foreign(layers, look, interpolate)[0], look)
        tree = complete_settings(_remove_variables(interpolate(tree), tree), config_type(), _DERIVED)
        config = msgspec.convert(conform(complete_settings(fill(tree), config_type()), config_type(), ""), Config)
    except (ConfigError, InvalidValue, ArithmeticError, LookupError, TypeError, ValueError):
        return None
    return ValidPart(config, layers.source_of if written is None else lambda key: written(key)[0])


class ChangedConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A configuration derived from that of an earlier run."""

    config: Config
    keys: tuple[str, ...]
    """Keys that got new values from the overrides, in the schema's order."""


def change_config(
    earlier: Config, settings: Mapping[str, Any], overrides: Sequence[str], source: str = "configuration"
) -> ChangedConfig:
    """Change a resolved configuration, first by Tandem's own `settings`, then by the user's overrides.

    Derived keys are derived again. Raises `ConfigError`; a key that no override sets has `source` as its file.
    """
    plain = merge(escape_interpolations(_unfill_config(earlier)), dict(settings))
    layers = overridden(
        ConfigLayers(main=source, layers=(ConfigLayer(source=source, settings=plain),), merged=plain), overrides
    )
    config = _build(layers, to_run=True)
    return ChangedConfig(
        config=config,
        keys=tuple(
            key for key in differing(make_plain(earlier), make_plain(config)) if layers.source_of(key) == COMMAND_LINE
        ),
    )


def changed_keys(earlier: Config, later: Config) -> list[str]:
    """Return the keys that differ, without those derived from others that differ, in the schema's order."""
    places = {key: place for place, key in enumerate(differing(make_plain(earlier), make_plain(later)))}
    keys = differing(_unfill_config(earlier), _unfill_config(later))
    return sorted(keys, key=lambda key: places.get(key, len(places)))


def _unfill_config(config: Config) -> dict[str, Any]:
    return unfill(make_plain(megatron.unfit_megatron(config)))


def _build(layers: ConfigLayers, *, to_run: bool, written: Written | None = None) -> Config:
    """Make a configuration; `written` returns the file and the name of a key where they are not those in `layers`."""
    look = functools.partial(_look_through, to_run=to_run)
    merged, outcome = remove_foreign(layers, look, interpolate)
    if isinstance(outcome, Config):
        return outcome
    outcome = hidden.add_hidden(outcome, merged, look)
    locate = written or (lambda key: (layers.source_of(key), layers.written(key)))
    foreign = {each for each in outcome.problems if is_foreign(each, layers)}
    is_told = is_newer(merged.get("nemo_rl_version"))  # a foreign key that another problem hid is no problem then
    seen = [each for each in outcome.problems if not (is_told and each in foreign)] or outcome.problems
    problems = [each for each in seen if each.key not in _DERIVED or layers.is_set(each.key)]
    lines = [
        ": ".join(filter(None, (*locate(each.key), _explain(each, layers) if each in foreign else each.text)))
        for each in problems or (() if outcome.unsupported else seen)
    ]
    if outcome.unsupported:
        raise NotSupportedYet(f"{layers.main}: {outcome.unsupported}", *dict.fromkeys(lines))
    raise ConfigError(*dict.fromkeys(lines))


def _look_through(merged: dict[str, Any], *, to_run: bool) -> Config | hidden.RefusedSettings:
    """Return the configuration of settings, or else the problems of the first stage that finds any.

    Features that are not supported yet hide no other problem.
    """
    if foreign_parts := describe_foreign_parts(merged):
        return hidden.RefusedSettings(foreign_parts, ())
    unsupported = None
    try:
        tree = interpolate(merged)
        tree = _remove_variables(tree, merged)
        tree = fill(tree)
        tree = conform(tree, config_type(), "")
        config = msgspec.convert(tree, Config)
        unsupported = describe_refusal(config) if to_run else None
        config = megatron.fit_megatron(config, to_run=to_run)
        problems = checks.find_broken_rules(config, (checks.run.check_prerequisite_exists,))
        problems.found = [*(megatron.find_missing_megatron(config) if to_run else ()), *problems.found]
        problems.complain()
    except InvalidValue as problem:
        return hidden.RefusedSettings(unsupported, problem.all)
    return hidden.RefusedSettings(unsupported, ()) if unsupported else config


def interpolate(tree: dict[str, Any]) -> dict[str, Any]:
    """Replace every ``${...}``, which may also refer to an unset key with a plain default. Raises `InvalidValue`."""
    from omegaconf import OmegaConf  # imported late, as in `layers`
    from omegaconf.errors import OmegaConfBaseException

    for name, function in RESOLVERS.items():
        resolver = functools.partial(_compute, name, function)
        OmegaConf.register_resolver(name, resolver, replace=True, annotation_validation="off")
    try:
        if _is_literal(tree):
            return tree
        with_defaults = OmegaConf.create(merge(_list_defaults(config_type()), tree))
        resolved = OmegaConf.to_container(with_defaults, resolve=True)
    except OmegaConfBaseException as error:
        # OmegaConf wraps a resolver's error in a sentence of its own.
        reason = re.sub(r"\w+ raised while resolving interpolation: ", "", str(error).splitlines()[0]).strip('"')
        raise InvalidValue(error.full_key or "", f"cannot be resolved: {reason}") from None
    except RecursionError:
        raise InvalidValue("", "mappings or lists are nested too deeply") from None
    interpolated: dict[str, Any] = _restrict(resolved, tree)
    return interpolated


def _remove_variables(tree: dict[str, Any], raw_tree: dict[str, Any]) -> dict[str, Any]:
    """Remove top-level keys that are not sections and that interpolations read; a mapping begins with ``_`` then."""
    sections = {field.encode_name for field in config_type().fields}
    variables = {
        key for key in tree if key not in sections and (key.startswith("_") or not isinstance(tree[key], dict))
    }
    named = set(re.findall(r"\$\{(\w+)[}.]", repr(raw_tree))) if variables else set()
    return {key: value for key, value in tree.items() if key not in variables & named}


def _is_literal(node: Any) -> bool:
    """Tell whether OmegaConf would return a value unchanged: YAML's own types, and no text with a meaning to it."""
    if type(node) is dict:
        return all(type(key) is str and _is_literal(value) for key, value in node.items())
    if type(node) is list:
        return all(map(_is_literal, node))
    if type(node) is str:
        return "$" not in node and node != "???"
    return node is None or type(node) in (bool, int, float)


def _compute(name: str, function: Callable[[Any, Any], Any], *arguments: Any) -> Any:
    """Return the value of ``${name:a,b}``."""
    are_numbers = all(isinstance(each, int | float) and not isinstance(each, bool) for each in arguments)
    if len(arguments) != 2 or not are_numbers:
        listed = ", ".join(shown(each) for each in arguments)
        raise ValueError(f"{name} takes two numbers, got {listed or 'none'}")
    if name == "div" and not arguments[1]:
        raise ValueError(f"div cannot divide {arguments[0]} by 0")
    return function(*arguments)


def _list_defaults(described: StructType) -> dict[str, Any]:
    """Return the defaults of a struct's scalar fields, and those of its inner structs."""
    defaults: dict[str, Any] = {}
    for field in described.fields:
        if isinstance(field.type, StructType):
            defaults[field.encode_name] = _list_defaults(field.type)
        elif field.default is not NODEFAULT and isinstance(field.default, bool | int | float | str | None):
            defaults[field.encode_name] = field.default
    return defaults


def _restrict(resolved: Any, tree: Any) -> Any:
    """Return `resolved` without the keys that only the defaults added."""
    if isinstance(resolved, dict) and isinstance(tree, dict):
        return {key: _restrict(resolved[key], value) for key, value in tree.items()}
    return resolved
