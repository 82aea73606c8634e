"""Load a YAML file and overrides into a checked `Config`."""

from __future__ import annotations

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
from tandem.config.checks import broken_rules
from tandem.config.conform import config_type, conform
from tandem.config.derive import DERIVED, fill, unfill
from tandem.config.dump import differing, escaped, to_plain
from tandem.config.hidden import Refused, with_hidden
from tandem.config.layers import COMMAND_LINE, Layer, Layers, merge, overridden, read_layers
from tandem.config.megatron import fit_megatron, unfit_megatron
from tandem.config.nemo_eval import is_nemo_eval, original_key, translated
from tandem.config.problem import Invalid, shown
from tandem.config.schema import Config
from tandem.config.unsupported import refusal

RESOLVERS: dict[str, Callable[[Any, Any], Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "max": max,
}
"""What ``${name:a,b}`` computes of two numbers, as in NeMo-RL: of integers an integer, but for ``div``."""


Written = Callable[[str], tuple[str, str]]

_DERIVED = frozenset(rule.key for rule in DERIVED)
"""Keys that, where nobody set them, are wrong only because others are."""


def load_config(path: str | Path, overrides: Sequence[str] = (), *, to_run: bool = True) -> Config:
    """Read a configuration file with ``key=value`` overrides.

    Inheritance (``defaults:``), interpolation (``${...}``) and overrides work as in NeMo-RL; ``docs/configuration.md``
    describes them. Raises `ConfigError`, lines that begin with the file (or ``command line``) and the key, and,
    if it is `to_run`, `NotSupportedYet` where something is switched on that is not built.
    """
    return _build(read_layers(Path(path), overrides), to_run=to_run)


def load_evaluation(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read the configuration of an evaluation: that of a run, or NeMo-RL's form (``evals/*.yaml``).

    Raises what `load_config` raises.
    """
    layers = read_layers(Path(path), overrides)
    if not is_nemo_eval(layers.merged):
        return _build(layers, to_run=True)
    try:
        settings = translated(interpolated(layers.merged))
    except Invalid as problem:
        raise ConfigError(f"{layers.source_of(problem.key)}: {problem.key}: {problem.text}") from None

    def written(key: str) -> tuple[str, str]:
        own = original_key(key)
        return layers.source_of(own), own if layers.is_set(own) else key

    return _build(
        Layers(main=layers.main, layers=(Layer(source=layers.main, settings=settings),), merged=escaped(settings)),
        to_run=True,
        written=written,
    )


def build_config(settings: Mapping[str, Any], source: str = "configuration") -> Config:
    """Make a configuration from a mapping as `load_config` makes it from a file; errors begin with `source`."""
    return build(layers_of(settings, source))


def layers_of(given: str | Path | Mapping[str, Any] | Config, source: str = "config") -> Layers:
    """Return what a program gave as the lowest of layers: a file, a mapping, or a configuration that is made.

    `source` is what errors call what is no file.
    """
    if isinstance(given, str | Path):
        return read_layers(Path(given), ())
    plain = escaped(_unfilled(given)) if isinstance(given, Config) else dict(given)
    return Layers(main=source, layers=(Layer(source=source, settings=plain),), merged=plain)


def laid_over(layers: Layers, settings: Mapping[str, Any], source: str) -> Layers:
    """Return layers with one more on top of them, which errors call `source`."""
    top = Layer(source=source, settings=dict(settings))
    return Layers(main=layers.main, layers=(*layers.layers, top), merged=merge(layers.merged, top.settings))


def build(layers: Layers, *, to_run: bool = True) -> Config:
    """Make a configuration of layers. Raises what `load_config` raises."""
    return _build(layers, to_run=to_run)


class Changed(msgspec.Struct, frozen=True, kw_only=True):
    """A configuration that was made from that of an earlier run."""

    config: Config
    keys: tuple[str, ...]
    """Those whose values overrides have changed, in the schema's order."""


def change_config(
    earlier: Config, settings: Mapping[str, Any], overrides: Sequence[str], source: str = "configuration"
) -> Changed:
    """Change a configuration that is resolved: by `settings`, which are ours, and then by the user's overrides.

    What followed from other keys follows from what they are now. Raises `ConfigError`; what no override says is said to
    be in `source`.
    """
    plain = merge(escaped(_unfilled(earlier)), dict(settings))
    layers = overridden(Layers(main=source, layers=(Layer(source=source, settings=plain),), merged=plain), overrides)
    config = _build(layers, to_run=True)
    return Changed(
        config=config,
        keys=tuple(
            key for key in differing(to_plain(earlier), to_plain(config)) if layers.source_of(key) == COMMAND_LINE
        ),
    )


def changed_keys(earlier: Config, later: Config) -> list[str]:
    """Return the keys that differ, without those that follow from others which do."""
    return differing(_unfilled(earlier), _unfilled(later))


def _unfilled(config: Config) -> dict[str, Any]:
    return unfill(to_plain(unfit_megatron(config)))


def _build(layers: Layers, *, to_run: bool, written: Written | None = None) -> Config:
    """Make a configuration; `written` returns which file says a key, and by what name, where that is not `layers`."""
    look = functools.partial(_look_through, to_run=to_run)
    found = look(layers.merged)
    if isinstance(found, Config):
        return found
    found = with_hidden(found, layers.merged, look)
    where = written or (lambda key: (layers.source_of(key), key))
    problems = [each for each in found.problems if each.key not in _DERIVED or layers.is_set(each.key)]
    lines = [
        ": ".join(filter(None, (*where(each.key), each.text)))
        for each in problems or (() if found.unsupported else found.problems)
    ]
    if found.unsupported:
        raise NotSupportedYet(f"{layers.main}: {found.unsupported}", *dict.fromkeys(lines))
    raise ConfigError(*dict.fromkeys(lines))


def _look_through(merged: dict[str, Any], *, to_run: bool) -> Config | Refused:
    """Return the configuration that settings make, or else what the first of the steps has found that finds anything.

    What is not supported yet hides nothing.
    """
    unsupported = None
    try:
        tree = _without_variables(interpolated(merged), merged)
        config = msgspec.convert(conform(fill(tree), config_type(), ""), Config)
        unsupported = refusal(config) if to_run else None
        config = fit_megatron(config, to_run=to_run)
        broken_rules(config).complain()
    except Invalid as problem:
        return Refused(unsupported, problem.all)
    return Refused(unsupported, ()) if unsupported else config


def interpolated(tree: dict[str, Any]) -> dict[str, Any]:
    """Replace every ``${...}``; a key that is not set but has a plain default may be referred to. Raises `Invalid`."""
    from omegaconf import OmegaConf  # late, as in `layers`
    from omegaconf.errors import OmegaConfBaseException

    for name, function in RESOLVERS.items():
        resolver = functools.partial(_computed, name, function)
        OmegaConf.register_resolver(name, resolver, replace=True, annotation_validation="off")
    try:
        if _is_literal(tree):
            return tree
        whole = OmegaConf.create(merge(_defaults(config_type()), tree))
        resolved = OmegaConf.to_container(whole, resolve=True)
    except OmegaConfBaseException as error:
        # What a resolver raised is told within a sentence of OmegaConf's.
        reason = re.sub(r"\w+ raised while resolving interpolation: ", "", str(error).splitlines()[0]).strip('"')
        raise Invalid(error.full_key or "", f"cannot be resolved: {reason}") from None
    except RecursionError:
        raise Invalid("", "mappings or lists within each other are too many") from None
    interpolated: dict[str, Any] = _restricted(resolved, tree)
    return interpolated


def _without_variables(tree: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Leave out keys of the top level that are no sections, and that interpolations read."""
    sections = {field.encode_name for field in config_type().fields}
    variables = {key for key in tree if key not in sections and not isinstance(tree[key], dict)}
    named = set(re.findall(r"\$\{(\w+)\}", repr(given))) if variables else set()
    return {key: value for key, value in tree.items() if key not in variables & named}


def _is_literal(node: Any) -> bool:
    """Tell whether OmegaConf would return this as it is: YAML's own types, and no text that means anything to it."""
    if type(node) is dict:
        return all(type(key) is str and _is_literal(value) for key, value in node.items())
    if type(node) is list:
        return all(map(_is_literal, node))
    if type(node) is str:
        return "$" not in node and node != "???"
    return node is None or type(node) in (bool, int, float)


def _computed(name: str, function: Callable[[Any, Any], Any], *arguments: Any) -> Any:
    """Return what ``${name:a,b}`` is."""
    are_numbers = all(isinstance(each, int | float) and not isinstance(each, bool) for each in arguments)
    if len(arguments) != 2 or not are_numbers:
        given = ", ".join(shown(each) for each in arguments)
        raise ValueError(f"{name} takes two numbers, got {given or 'none'}")
    if name == "div" and not arguments[1]:
        raise ValueError(f"div cannot divide {arguments[0]} by 0")
    return function(*arguments)


def _defaults(described: StructType) -> dict[str, Any]:
    """Return the defaults of a struct's scalar fields, and those of the structs within."""
    defaults: dict[str, Any] = {}
    for field in described.fields:
        if isinstance(field.type, StructType):
            defaults[field.encode_name] = _defaults(field.type)
        elif field.default is not NODEFAULT and isinstance(field.default, bool | int | float | str | None):
            defaults[field.encode_name] = field.default
    return defaults


def _restricted(resolved: Any, tree: Any) -> Any:
    """Return `resolved` without the keys that only the defaults brought in."""
    if isinstance(resolved, dict) and isinstance(tree, dict):
        return {key: _restricted(resolved[key], value) for key, value in tree.items()}
    return resolved
