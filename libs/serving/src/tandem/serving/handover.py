"""What a server of one model is told: by the command line that starts it, through an open file."""

from __future__ import annotations

import os
from typing import Any, Literal

import msgspec

from tandem.config.schema.base import NonEmptyStr, PositiveFloat, PositiveInt, Section
from tandem.config.schema.generation import ToolCallParser, VllmCfg

MODULE = "tandem.rollout.serving"
"""What such a server runs."""


class Serving(Section, frozen=True, kw_only=True):
    """A model and how it is served."""

    model_folder: NonEmptyStr
    """A Hugging Face model."""
    name: NonEmptyStr
    """By which requests ask for it."""
    aliases: tuple[str, ...] = ()
    """Its other names."""
    engine: Literal["transformers", "vllm"]
    max_length: PositiveInt
    """Longest sequence, prompt included."""
    vocabulary: PositiveInt
    """Tokens that the model can read."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a response, beside the tokenizer's end of a sequence."""
    max_batch_size: PositiveInt
    """Responses that are made at the same time."""
    precision: Literal["float32", "bfloat16"]
    num_threads: PositiveInt
    deadline_s: PositiveFloat
    """Of one request."""
    token: str | None = None
    """Whoever asks must have it."""
    vllm_cfg: VllmCfg
    vllm_kwargs: dict[str, Any] = msgspec.field(default_factory=dict)
    """Further arguments of vLLM's engine."""
    tool_call_parser: ToolCallParser | None = None
    """How the model writes calls of tools; by itself they stay text."""
    greeting: str = "ready"
    """Printed once it answers."""
    listening: int = -1
    """Descriptor of a socket that listens."""
    launched_by: int = 0
    """Process with which this one ends; zero for none."""


def pass_on(serving: Serving) -> int:
    """Return a descriptor from which another process reads this; its text is in no list of processes."""
    descriptor = os.memfd_create("serving", 0)
    os.write(descriptor, msgspec.json.encode(serving))
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def take(descriptor: int) -> Serving:
    """Return what was passed on."""
    with os.fdopen(descriptor, "rb") as file:
        return msgspec.json.decode(file.read(), type=Serving)
