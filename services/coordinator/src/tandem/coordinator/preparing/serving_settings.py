"""The settings by which a model is served: from the checked command line and the model's own files."""

from __future__ import annotations

import argparse
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec
from msgspec.inspect import type_info

from tandem.common.errors import ConfigError, DamagedCheckpoint, ModelError
from tandem.common.network import is_loopback
from tandem.config.conform import conform
from tandem.config.engine_kinds import ENGINE_KINDS
from tandem.config.installed.sources import find_package
from tandem.config.installed.vllm_arguments import check_arguments
from tandem.config.layers import COMMAND_LINE, ConfigLayers, overridden
from tandem.config.models.model_sizes import find_max_positions, find_vocabulary
from tandem.config.problem import InvalidValue
from tandem.config.schema.base import ConfigSection
from tandem.config.schema.generation import VllmCfg
from tandem.coordinator.model_folders import check_weights, read_json
from tandem.observe.run_folder.found_models import models_in
from tandem.samples.model_files import load_model_tokenizer
from tandem.serving.server_process import ServingHandover

LONGEST_BY_DEFAULT = 4096
"""Longest sequence by default, if the model could do more: memory is reserved for the whole batch."""
_LAST_PORT = 65535
_GPU_SHARE = 0.9
"""Fraction of a GPU's memory for vLLM: nothing is trained beside it."""


class _Given(ConfigSection, frozen=True, kw_only=True):
    """The settings that ``key=value`` can set."""

    vllm_cfg: VllmCfg
    vllm_kwargs: dict[str, Any] = msgspec.field(default_factory=dict)


def settings_of(arguments: argparse.Namespace, token: str | None) -> ServingHandover:
    """Return how the model in ``arguments.folder`` is served. Raise `TandemError` before anything starts."""
    (model,) = models_in(arguments.folder)
    if not any(model.folder.glob("*.safetensors")):
        raise ModelError(f"{model.folder} has a config.json and no weights: there are no *.safetensors")
    try:
        for notice in check_weights(model.folder):
            print(f"note: {notice}", file=sys.stderr)
    except DamagedCheckpoint as error:
        raise ModelError(str(error)) from error
    config = read_json(model.folder / "config.json")
    vocabulary = find_vocabulary(config)
    if vocabulary is None:
        raise ModelError(f"{model.folder / 'config.json'}: it has no vocab_size")
    tokenizer = load_model_tokenizer(model.folder)
    _ = tokenizer.eos_id  # a response must end somewhere
    length = _length(arguments.max_length, find_max_positions(config))
    precision = arguments.precision or _precision(config)
    engine_settings = _read_engine_settings(arguments.overrides, length, precision)
    kind = ENGINE_KINDS[arguments.engine]
    if arguments.overrides and kind.section != "vllm_cfg":
        raise ConfigError(f"{COMMAND_LINE}: {arguments.overrides[0]}: a setting of vLLM: give --engine vllm as well")
    if kind.module and find_package(kind.module) is None:
        raise ConfigError(
            f"--engine {kind.name}: {kind.title} is not installed; the embedded engine is --engine transformers"
        )
    typed = str(arguments.folder)
    name = arguments.name or model.name
    return ServingHandover(
        model_folder=str(model.folder.resolve()),
        name=name,
        aliases=() if typed == name else (typed,),
        engine=arguments.engine,
        max_length=engine_settings.vllm_cfg.max_model_len,
        vocabulary=vocabulary,
        max_batch_size=arguments.max_batch_size,
        precision=precision,
        num_threads=len(os.sched_getaffinity(0)),
        deadline_s=arguments.timeout_s,
        token=token,
        vllm_cfg=engine_settings.vllm_cfg,
        vllm_kwargs=engine_settings.vllm_kwargs,
        example=tokenizer.short_text(),
    )


def open_port(host: str, port: int, token: str | None) -> socket.socket:
    """Return a socket that listens there; port 0 is any free one.

    Raise `ConfigError` if it cannot listen, or if other machines could use it without a token.
    """
    if not 0 <= port <= _LAST_PORT:
        raise ConfigError(f"--port {port}: it must be from 0 to {_LAST_PORT}; 0 takes any that is free")
    try:
        address = str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0])
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"--host {host}: it is not an address of this machine: {error}") from error
    if token is None and not is_loopback(address.partition("%")[0]):
        raise ConfigError(f"--host {host}: others can reach it: give a --token that they must have")
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, port), family=family, backlog=1024)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else error
        raise ConfigError(f"--port {port}: cannot listen at {host}: {reason}; 0 takes any that is free") from error


def _read_engine_settings(overrides: Sequence[str], length: int, precision: str) -> _Given:
    plain: dict[str, Any] = {
        "vllm_cfg": {"precision": precision, "max_model_len": length, "gpu_memory_utilization": 0.9}
    }
    try:
        merged = overridden(ConfigLayers(main=COMMAND_LINE, layers=(), merged=plain), overrides).merged
        engine_settings = msgspec.convert(conform(merged, type_info(_Given), ""), _Given)
    except InvalidValue as problem:
        raise ConfigError(*(f"{COMMAND_LINE}: {each.key}: {each.text}" for each in problem.all)) from None
    check_arguments(engine_settings.vllm_kwargs)
    return engine_settings


def _length(max_length: int | None, positions: int | None) -> int:
    if max_length is None:
        return min(positions or LONGEST_BY_DEFAULT, LONGEST_BY_DEFAULT)
    if positions is not None and max_length > positions:
        raise ConfigError(f"--max-length {max_length}: the model was made for sequences of at most {positions} tokens")
    return max_length


def _precision(config: Mapping[str, Any]) -> Literal["float32", "bfloat16"]:
    dtype = config.get("dtype", config.get("torch_dtype"))
    return "float32" if dtype in ("float32", None) else "bfloat16"
