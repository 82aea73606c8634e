"""The files of a new vision model: configuration with tokens, template, image processor."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tandem.config.models.vision_families import VisionFamily
from tandem.samples.images.families import PROCESSOR_FILES

_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}IMAGE{% else %}{{ part['text'] }}"
    "{% endif %}{% endfor %}{% endif %}{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)
"""The template of a new model of texts, with images where the message has them."""


def chat_template(family: VisionFamily) -> str:
    """Return the chat template of a family's new model."""
    return _TEMPLATE.replace("IMAGE", family.part)


def config_of(family: VisionFamily, settings: Mapping[str, Any], vocabulary: Mapping[str, int]) -> dict[str, Any]:
    """Return the configuration of a new model with the numbers of its tokens."""
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    text = {**(settings.get("text_config") or {}), "vocab_size": len(vocabulary), **ids}
    numbers = {field: vocabulary[token] for field, token in family.token_fields.items()}
    return {**settings, "text_config": text, **numbers}


def write_image_processor(folder: Path, family: VisionFamily, settings: Mapping[str, Any] | None) -> None:
    """Write the image processor's file."""
    content = {"image_processor_type": family.image_processor, **(settings or {})}
    (folder / PROCESSOR_FILES[1]).write_text(json.dumps(content, indent=2) + "\n")
