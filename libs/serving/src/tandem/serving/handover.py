"""Settings of a server of one model, passed by the command that starts it through an open file."""

from __future__ import annotations

import os
from typing import Any, Literal

import msgspec

from tandem.config.engine_kinds import EngineName
from tandem.config.schema.base import ConfigSection, NonEmptyStr, PositiveFloat, PositiveInt
from tandem.config.schema.generation import ToolCallParser, VllmCfg

MODULE = "tandem.rollout.serving"
"""Module that such a server runs."""


class ServingHandover(ConfigSection, frozen=True, kw_only=True):
    """A model, and how to serve it."""

    model_folder: NonEmptyStr
    """Folder of a Hugging Face model."""
    name: NonEmptyStr
    """Name in requests."""
    aliases: tuple[str, ...] = ()
    """Other names in requests."""
    engine: EngineName
    max_length: PositiveInt
    """Longest sequence, prompt included."""
    vocabulary: PositiveInt
    """Number of tokens that the model can read."""
    max_batch_size: PositiveInt
    """Most responses generated at the same time."""
    precision: Literal["float32", "bfloat16"]
    num_threads: PositiveInt
    deadline_s: PositiveFloat
    """Deadline of one request."""
    token: str | None = None
    """Token that requests must carry."""
    vllm_cfg: VllmCfg
    vllm_kwargs: dict[str, Any] = msgspec.field(default_factory=dict)
    """Further arguments of vLLM's engine."""
    tool_call_parser: ToolCallParser | None = None
    """Format of the model's tool calls; without it they stay text."""
    example: str = "Hello"
    """A text that the model can read."""
    greeting: str = "ready"
    """Line that the server prints once it answers."""
    listening: int = -1
    """Descriptor of a listening socket."""
    launched_by: int = 0
    """Process with which this one ends; zero for none."""


def pass_on(serving: ServingHandover) -> int:
    """Return a descriptor from which another process reads the settings; they appear in no process list."""
    descriptor = os.memfd_create("serving", 0)
    os.write(descriptor, msgspec.json.encode(serving))
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def take(descriptor: int) -> ServingHandover:
    """Return the settings that were passed on."""
    with os.fdopen(descriptor, "rb") as file:
        return msgspec.json.decode(file.read(), type=ServingHandover)
