"""Files of a model that training does not change: copied as they are, for readers of its exports.

Transformers 5 would write them anew, and in a form that Transformers 4 cannot read.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

GENERATION_CONFIG = "generation_config.json"
_TEMPLATE = "chat_template.jinja"
_TOKENIZER_CONFIG = "tokenizer_config.json"
_TEMPLATES = ("additional_chat_templates", "chat_template.json", _TEMPLATE)
_VOCABULARIES = (
    "tokenizer.json",
    "*.model",
    "tokenizer.model.v*",
    "*.tiktoken",
    "tekken.json",
    "vocab.json",
    "vocab.txt",
)
"""Files that a tokenizer is read from, by their names: any of them is enough."""
_PATTERNS = (
    *_VOCABULARIES,
    _TOKENIZER_CONFIG,
    "special_tokens_map.json",
    "added_tokens.json",
    "merges.txt",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "processor_config.json",
    *_TEMPLATES,
)
"""Files of tokenizers and processors, by their names."""
_OLD_CLASS = "PreTrainedTokenizerFast"
"""Name of the class `TokenizersBackend` in Transformers 4, which Transformers 5 knows too."""


def save_tokenizer(hugging_face: Any, folder: Path) -> None:
    """Write a tokenizer of Transformers beside a model's weights: the files that it was read from, if there are any.

    Only the chat template may differ from them. Raises the errors of the library and of the system.
    """
    name = hugging_face.name_or_path  # empty for one that was made, not read
    source = Path(name)
    has_files = bool(name) and any(path.is_file() for pattern in _VOCABULARIES for path in source.glob(pattern))
    if not has_files or source.resolve() == folder.resolve():
        hugging_face.save_pretrained(folder)
        use_older_names(folder)
        return
    folder.mkdir(parents=True, exist_ok=True)
    has_own_template = read_template(source) != hugging_face.chat_template
    for path in _files(source):
        if has_own_template and path.name in _TEMPLATES:
            continue
        if path.is_dir():
            shutil.copytree(path, folder / path.name, copy_function=shutil.copyfile, dirs_exist_ok=True)
        else:
            shutil.copyfile(path, folder / path.name)
    if has_own_template:
        _write_template(hugging_face.chat_template, folder)


def copy_generation_config(source: Path, folder: Path) -> bool:
    """Copy a model's settings of generation; return whether it has such a file."""
    has_file = (source / GENERATION_CONFIG).is_file()
    if has_file and source.resolve() != folder.resolve():
        shutil.copyfile(source / GENERATION_CONFIG, folder / GENERATION_CONFIG)
    return has_file


def read_template(folder: Path) -> str | dict[str, str] | None:
    """Return the chat template of a tokenizer's folder, or its templates by name, as Transformers reads them."""
    named_templates = {path.stem: path.read_text() for path in sorted((folder / _TEMPLATES[0]).glob("*.jinja"))}
    template = _object(folder / _TOKENIZER_CONFIG).get("chat_template")
    if (folder / _TEMPLATE).is_file():
        template = (folder / _TEMPLATE).read_text()
    if isinstance(template, list):
        template = {item["name"]: item["template"] for item in template}
    if not named_templates or not isinstance(template, str | None):
        return template
    return named_templates if template is None else {"default": template, **named_templates}


def _files(source: Path) -> Iterator[Path]:
    for pattern in _PATTERNS:
        yield from (path for path in sorted(source.glob(pattern)) if path.is_file() or path.is_dir())


def _object(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.is_file() else {}


def _write_template(template: str | dict[str, str] | None, folder: Path) -> None:
    """Write another chat template than that of the copied files."""
    settings = _object(folder / _TOKENIZER_CONFIG)
    had_template = settings.pop("chat_template", None) is not None
    if isinstance(template, dict):
        settings["chat_template"] = [{"name": name, "template": text} for name, text in template.items()]
    elif template is not None:
        (folder / _TEMPLATE).write_text(template)
    if had_template or isinstance(template, dict):
        _write_object(folder / _TOKENIZER_CONFIG, settings)


def use_older_names(folder: Path) -> None:
    """Give a tokenizer that Transformers 5 has written the names that Transformers 4 knows."""
    path = folder / _TOKENIZER_CONFIG
    settings = _object(path)
    if settings.get("tokenizer_class") == "TokenizersBackend":
        settings["tokenizer_class"] = _OLD_CLASS
        if isinstance(settings.get("extra_special_tokens"), list):
            settings["additional_special_tokens"] = settings.pop("extra_special_tokens")
        _write_object(path, settings)


def _write_object(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")
