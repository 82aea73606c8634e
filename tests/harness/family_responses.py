"""A response of every family, as its template writes it: reasoning, a call, an answer."""

from __future__ import annotations

from typing import Any

from tests.harness import families
from tests.harness.families import Family

QUESTION = [{"role": "user", "content": "What is the weather?"}]
ARGUMENTS = {"city": "Paris", "days": 3, "units": ["C", "F"], "note": "7", "is_brief": True}
SCHEMAS = {"city": "string", "days": "integer", "units": "array", "note": "string", "is_brief": "boolean"}
PARAMETERS = {"type": "object", "properties": {name: {"type": schema} for name, schema in SCHEMAS.items()}}
TOOL = {"type": "function", "function": {"name": "get_weather", "description": "Tell it.", "parameters": PARAMETERS}}
REASONING = "I think it is fine."
CALL = {"id": "functions.get_weather:0", "type": "function", "function": {"name": "get_weather"}}


def rendered(family: Family, message: dict[str, Any], **variables: Any) -> tuple[str, str]:
    """Return the text before a response and the response, as the template of a family writes the message."""
    hugging_face = families.hugging_face(family)
    question = families.as_read(family, QUESTION)
    conversation = [*question, *families.as_read(family, [message])]
    whole = hugging_face.apply_chat_template(conversation, tokenize=False, **variables)
    prompt = hugging_face.apply_chat_template(question, tokenize=False, add_generation_prompt=True, **variables)
    num_shared = next(
        (at for at, (one, other) in enumerate(zip(whole, prompt, strict=False)) if one != other), len(prompt)
    )
    shared = prompt[:num_shared].removesuffix("<")  # two markers that differ
    return shared, whole[len(shared) :].rstrip("\n")
