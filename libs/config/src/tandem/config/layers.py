"""Merge configuration files and overrides, remembering the origin of each key."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import yaml  # type: ignore[import-untyped]

from tandem.common.errors import ConfigError
from tandem.common.files import irregular
from tandem.config.checks.run import explain_no_path
from tandem.config.shapes import BACKEND, BACKEND_HERE, name_backend_as_here

COMMAND_LINE = "command line"

OVERRIDE = "_override_"
"""Key that marks a mapping as replacing the inherited one; not a key of the section."""

MAX_PATH_SHOWN = 200
"""Most characters of a path in an error."""

Plain = dict[str, Any]
"""Parsed YAML: nested dictionaries, lists and scalars, with interpolations unresolved."""
_TOO_DEEP = "mappings or lists are nested too deeply"


class ConfigLayer(msgspec.Struct, frozen=True, kw_only=True):
    """A file or an override, and the keys that it sets."""

    source: str
    """Name in errors: the file's path, or ``command line``."""
    settings: Plain
    has_backend_renamed: bool = False
    """Whether it has a section `BACKEND`, which is under its name here."""


def layer_of(source: str, settings: Mapping[str, Any]) -> ConfigLayer:
    """Return the layer of a file, a mapping or an override."""
    renamed = name_backend_as_here(dict(settings))
    return ConfigLayer(source=source, settings=renamed, has_backend_renamed=renamed != settings)


class ConfigLayers(msgspec.Struct, frozen=True, kw_only=True):
    """All layers, in order of increasing precedence."""

    main: str
    """Name of the user's file; the source of problems with keys that no layer sets."""
    layers: tuple[ConfigLayer, ...]
    merged: Plain
    find_written: Callable[[str], str] | None = None
    """Function that returns the key in `layers` of one in `merged`, where they differ."""

    def source_of(self, key: str) -> str:
        """Return the name of the topmost layer that sets `key`."""
        layer = self._layer_of(key)
        return self.main if layer is None else layer.source

    def written(self, key: str) -> str:
        """Return the name of `key` in the topmost layer that sets it."""
        layer = self._layer_of(key)
        if layer is None or not layer.has_backend_renamed:
            return key
        return re.sub(rf"\b{BACKEND_HERE}\b", BACKEND, key)

    def _layer_of(self, key: str) -> ConfigLayer | None:
        parts = split_key(key)
        for layer in reversed(self.layers):
            if _sets(layer.settings, parts) or _replaces(layer.settings, parts):
                return layer
        return None

    def are_set_together(self, first_key: str, second_key: str) -> bool:
        """Tell whether a single file, or the command line, sets both keys."""
        first_sources, second_sources = (
            {layer.source for layer in self.layers if _sets(layer.settings, split_key(each))}
            for each in map(self.find_written or str, (first_key, second_key))
        )
        return not first_sources.isdisjoint(second_sources)

    def is_set(self, key: str) -> bool:
        """Tell whether any layer sets `key`."""
        return _sets(self.merged, split_key(key))


def read_layers(path: Path, overrides: Sequence[str]) -> ConfigLayers:
    """Read a file, the files that it inherits from, and the overrides.

    Raises `ConfigError` for a file that is missing, is not YAML or inherits from itself, and for an override that is
    not ``key=value``.
    """
    layers = _read_chain(path, ())
    merged: Plain = {}
    for layer in layers:
        merged = merge(merged, layer.settings)
    return overridden(ConfigLayers(main=str(path), layers=tuple(layers), merged=merged), overrides)


def overridden(settings: ConfigLayers, overrides: Sequence[str]) -> ConfigLayers:
    """Return settings with ``key=value`` overrides on top. Raises `ConfigError` for anything else."""
    layers, merged = [*settings.layers], settings.merged
    for override in overrides:
        parts, value = _parse_override(override)
        if parts == ["prerequisite"] and isinstance(value, str):
            value = os.path.abspath(value)
        layer = layer_of(COMMAND_LINE, _nest(parts, value))
        if layer.has_backend_renamed:
            parts = [BACKEND_HERE if part == BACKEND else part for part in parts]
            value = name_backend_as_here(value)
        merged = _update(merged, parts, value, override)
        layers.append(layer)
    return ConfigLayers(main=settings.main, layers=tuple(layers), merged=merged)


def merge(base: Plain, over: Plain) -> Plain:
    """Return `base` with `over` on top: mappings are merged key by key, anything else is replaced.

    A mapping with ``_override_: true`` also replaces the inherited one, as in NeMo-RL.
    """
    result = dict(base)
    for key, value in over.items():
        old = result.get(key)
        if isinstance(value, dict):
            inherited = old if isinstance(old, dict) and not value.get(OVERRIDE, False) else {}
            value = merge(inherited, {name: item for name, item in value.items() if name != OVERRIDE})
        result[key] = value
    return result


def _read_chain(path: Path, children: tuple[Path, ...]) -> list[ConfigLayer]:
    """Read `path` and its ancestors, eldest first; `children` are the files that led here."""
    resolved = path.resolve()
    if resolved in children:
        names = " -> ".join(os.path.relpath(child, children[0].parent) for child in (*children, resolved))
        raise ConfigError(f"{path}: defaults: the file inherits from itself: {names}")
    settings = _read_file(path)
    prerequisite = settings.get("prerequisite")
    if isinstance(prerequisite, str):
        settings["prerequisite"] = os.path.abspath(path.parent / prerequisite)
    defaults = settings.pop("defaults", None)
    names_of_parents = [defaults] if isinstance(defaults, str) else (defaults or [])
    if not isinstance(names_of_parents, list) or not all(isinstance(name, str) for name in names_of_parents):
        raise ConfigError(f"{path}: defaults: expected a path or a list of paths, got {defaults!r}")
    layers: list[ConfigLayer] = []
    for name in names_of_parents:
        parent = Path(os.path.normpath(path.parent / name))
        if explain_no_path(parent) is not None or not parent.is_file():
            raise ConfigError(
                f"{path}: defaults: there is no file {shorten_path(parent)}{suggest_nearest_file(parent)}"
            )
        layers += _read_chain(parent, (*children, resolved))
    _check_markers(path, settings, "")
    return [*layers, layer_of(str(path), settings)]


def _check_markers(path: Path, node: Plain, key: str) -> None:
    """Raise `ConfigError` for an ``_override_`` that is neither true nor false."""
    for name, value in node.items():
        inner = f"{key}.{name}" if key else str(name)
        if name == OVERRIDE and not isinstance(value, bool):
            raise ConfigError(f"{path}: {inner}: expected true or false, got {value!r}")
        if isinstance(value, dict):
            _check_markers(path, value, inner)


def _read_file(path: Path) -> Plain:
    from omegaconf import OmegaConf  # imported late, since services import this package and read no files
    from omegaconf.errors import OmegaConfBaseException

    kind = irregular(path)
    if kind is not None and not path.is_dir():
        raise ConfigError(f"{path}: cannot be read: it is {kind}, not a file")
    try:
        content: Any = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such file{suggest_nearest_file(path)}") from None
    except yaml.YAMLError as error:
        if "nesting depth" in str(error):  # PyYAML's own limit, since 6.0.4
            raise ConfigError(f"{path}: cannot be read: {_TOO_DEEP}") from None
        raise ConfigError(f"{path}: {_describe_syntax_error(error)}") from None
    except OmegaConfBaseException as error:
        location = f"{path}: {error.full_key}" if error.full_key else path
        raise ConfigError(f"{location}: cannot be resolved: {str(error).splitlines()[0]}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: cannot be read: it does not hold YAML text") from None
    except OSError as error:
        if error.strerror is None:  # raised by OmegaConf for a scalar, for example
            raise ConfigError(f"{path}: expected a mapping at the top, got a scalar") from None
        raise ConfigError(f"{shorten_path(path)}: cannot be read: {error.strerror}") from None
    except RecursionError:
        raise ConfigError(f"{path}: cannot be read: {_TOO_DEEP}") from None
    except ValueError as error:
        raise ConfigError(f"{shorten_path(path)}: cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: expected a mapping at the top, got a list")
    return content


def shorten_path(path: Path) -> str:
    """Return a path as an error shows it."""
    text = str(path)
    return text if len(text) <= MAX_PATH_SHOWN else f"{text[: MAX_PATH_SHOWN - 3]}..."


def suggest_nearest_file(path: Path) -> str:
    """Return ``; did you mean 'x'?`` for the YAML file nearest to a missing one, or an empty string."""
    if explain_no_path(path) is not None or path.exists():
        return ""
    folders = [folder for folder in (path.parent, path.parent / path.stem, Path("examples")) if folder.is_dir()]
    files = {file.stem: file for folder in reversed(folders) for file in folder.glob("*.y*ml")}
    matches = difflib.get_close_matches(path.stem, files, n=1, cutoff=0.6)
    return f"; did you mean {str(files[matches[0]])!r}?" if matches else ""


def _describe_syntax_error(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    location = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
    problem = getattr(error, "problem", None) or str(error)
    return f"{location}not valid YAML: {' '.join(problem.split())}"


def _parse_override(override: str) -> tuple[list[str], Any]:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    key, equals, text = override.partition("=")
    key = key.strip().lstrip("+")
    parts = split_key(key)
    if not equals or not all(re.fullmatch(r"[\w-]+", part) for part in parts):
        raise ConfigError(f"{COMMAND_LINE}: {override!r}: expected key=value, such as grpo.max_num_steps=10")
    try:
        parsed: Any = OmegaConf.to_container(OmegaConf.create(f"value: {text}"), resolve=False)
    except (yaml.YAMLError, OmegaConfBaseException, RecursionError, ValueError):
        parsed = None
    if not isinstance(parsed, dict) or list(parsed) != ["value"]:
        raise ConfigError(f"{COMMAND_LINE}: {key}: {text!r} is not a YAML value; quote it if it is text")
    return parts, parsed["value"]


def split_key(key: str) -> list[str]:
    """Split ``a.b[0].c`` or ``a.b.0.c`` into its parts."""
    return re.sub(r"\[(\d+)\]", r".\1", key).split(".")


def _nest(parts: Sequence[str], value: Any) -> Plain:
    for part in reversed(parts):
        value = {part: value}
    nested: Plain = value
    return nested


def _update(node: Any, parts: Sequence[str], value: Any, override: str) -> Any:
    """Return a copy of `node` with `value` at the path `parts`; a number in the path indexes a list."""
    if not parts:
        return merge({"": node}, {"": value})[""]
    head, *inner_parts = parts
    if isinstance(node, list):
        if not head.isdecimal() or int(head) >= len(node):
            raise ConfigError(f"{COMMAND_LINE}: {override!r}: {head!r} is not an index into a list of {len(node)}")
        index = int(head)
        return [*node[:index], _update(node[index], inner_parts, value, override), *node[index + 1 :]]
    branch = node if isinstance(node, dict) else {}
    return {**branch, head: _update(branch.get(head), inner_parts, value, override)}


def _replaces(node: Any, parts: Sequence[str]) -> bool:
    """Tell whether the settings `node` have a replacing mapping on the path `parts`."""
    for part in parts:
        node = node.get(part) if isinstance(node, Mapping) else None
        if isinstance(node, Mapping) and node.get(OVERRIDE, False):
            return True
    return False


def _sets(node: Any, parts: Sequence[str]) -> bool:
    """Tell whether the settings `node` set the path `parts` or a value that contains it."""
    for part in parts:
        if isinstance(node, Mapping):
            if part == "0" and part not in node:
                continue  # a single entry, written without its list
            if part not in node:
                return False
            node = node[part]
        elif isinstance(node, list):
            if not part.isdecimal() or int(part) >= len(node):
                return False
            node = node[int(part)]
        else:
            return True
    return True
