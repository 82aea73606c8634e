"""The configuration of an exported model: its source's file, with what differs.

Transformers 5 has other names for some settings than Transformers 4, which reads its files without error but wrongly:
the base of rotary embeddings, `rope_theta`, would be the default.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tandem.config.models.hf_config import load_config

_CONFIG = "config.json"
_OF_WHOLE = ("architectures", "dtype", "transformers_version", "_name_or_path")
"""Settings that the whole of a model has, and a part of it does not need."""


def save_config(config: Any, folder: Path) -> Path | None:
    """Write a configuration of Transformers so that Transformers 4 reads it too.

    Return the folder that it was read from; None if there is none. Raises the errors of the library and of the system.
    """
    config.save_pretrained(folder)
    written = json.loads((folder / _CONFIG).read_text())
    source = Path(config.name_or_path or folder)
    if not (source / _CONFIG).is_file() or source.resolve() == folder.resolve():
        settings, source_folder = _add_older_names(written, config.attribute_map), None
    else:
        source_settings = json.loads((source / _CONFIG).read_text())
        same = json.loads(load_config(str(source), None).to_json_string())
        settings, source_folder = _apply_to_source(source_settings, same, written), source
    (folder / _CONFIG).write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")
    return source_folder


def _apply_to_source(
    original: Mapping[str, Any], source: Mapping[str, Any], written: Mapping[str, Any]
) -> dict[str, Any]:
    """Return given settings with what differs, which may be of the text part alone of a vision model."""
    text = source.get("text_config")
    if (
        not isinstance(text, dict)
        or not isinstance(original.get("text_config"), dict)
        or not written.get("model_type") == text.get("model_type") != source.get("model_type")
    ):
        return _apply_changes(original, source, written)
    part = {key: value for key, value in written.items() if key not in _OF_WHOLE}
    settings = {**original, "text_config": _apply_changes(original["text_config"], text, part)}
    for key in ("dtype", "torch_dtype"):
        if key in original and "dtype" in written:
            settings[key] = written["dtype"]
    return settings


def _apply_changes(
    original: Mapping[str, Any], source: Mapping[str, Any], written: Mapping[str, Any]
) -> dict[str, Any]:
    """Return given settings with what differs between two forms that Transformers has written."""
    settings = dict(original)
    for key in source.keys() | written.keys():
        forms = (original.get(key), source.get(key), written.get(key))
        if key in source and key in written and source[key] == written[key]:
            continue
        if key not in written:
            settings.pop(key, None)
        elif all(isinstance(form, dict) for form in forms):
            settings[key] = _apply_changes(original[key], source[key], written[key])
        elif key == "dtype" and "dtype" not in original:
            settings["torch_dtype"] = written[key]
        else:
            settings[key] = written[key]
    return settings


def _add_older_names(written: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return settings with the names that Transformers 4 has for some of them, besides those of Transformers 5.

    `names` are those of settings by the names that a type has for them too, such as ``num_experts`` of Qwen3-MoE.
    """
    settings = {alias: written[name] for alias, name in names.items() if name in written} | dict(written)
    if "dtype" in written:
        settings["torch_dtype"] = written["dtype"]
    rope = written.get("rope_parameters")
    if isinstance(rope, Mapping) and "rope_theta" in rope:
        settings["rope_theta"] = rope["rope_theta"]
        if rope.get("rope_type", "default") != "default":
            settings["rope_scaling"] = {key: value for key, value in rope.items() if key != "rope_theta"}
    return settings
