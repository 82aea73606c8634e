"""A Hugging Face model without weights, the weights that refits fill, its drive by slots, its trial."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from transformers.initialization import no_init_weights

from tandem.common.attention import chunks, settings, stateful
from tandem.common.errors import ModelError
from tandem.config.models.families import find_language_prefix, has_blocks
from tandem.config.models.hf_config import describe_text_part, find_model_class, load_config
from tandem.refit.adapters.huggingface import as_checkpoint
from tandem.refit.layout import LayoutBuilder, whole
from tandem.refit.weights import Weights, device_name, host_name
from tandem.rollout.engines.attention import (
    ATTENTION_NAME,
    BLOCKS_ATTENTION_NAME,
    CHUNKS_ATTENTION_NAME,
    AttentionStep,
    NotCausalError,
    SlotPrompt,
)
from tandem.rollout.engines.states import StatefulCache, make_cache


def weights_of(model: torch.nn.Module) -> Weights:
    """Describe a model's live parameters, each a full slice in a private storage of its own. Tied ones appear once.

    Buffers that checkpoints contain are included, such as what routers add to their scores.
    """
    saved = model.state_dict().keys()
    tensors: dict[str, torch.Tensor] = dict(model.named_parameters())
    tensors |= {name: buffer for name, buffer in model.named_buffers() if name in saved}
    builder = LayoutBuilder(host_name(), device_name(next(iter(tensors.values())).device))
    for name, tensor in tensors.items():
        size = tensor.element_size()
        index = builder.tensor(name, tensor.shape, str(tensor.dtype).removeprefix("torch."))
        storage = builder.storage(name, tensor.numel() * size)
        builder.add(index, whole(tensor.shape), storage, 0, [stride * size for stride in tensor.stride()])
    return Weights(as_checkpoint(builder.build()), tensors)


def load_skeleton(
    model_folder: Path,
    max_length: int,
    dtype: torch.dtype,
    *,
    with_weights: bool = False,
    config_overrides: Mapping[str, Any] | None = None,
) -> Any:
    """Build the model that ``config.json`` in `model_folder` describes, with its tower if it sees, uninitialised.

    Buffers such as rotary frequencies are computed. Parameters stay uninitialised, or come from the folder's
    safetensors files if asked for. Raises `ModelError` if the folder holds no model, or one that slots of `max_length`
    positions cannot run.
    """
    if not (model_folder / "config.json").is_file():
        raise ModelError(f"{model_folder} holds no model: config.json is missing")
    try:
        config = load_config(str(model_folder), config_overrides)
        _refuse_unsupported(config.get_text_config(), max_length)
        attention = None if stateful.find_unknown_layer_type(config.get_text_config()) else _attention(config)
        build = functools.partial(_build, model_folder, config, dtype, with_weights=with_weights)
        try:
            model = build(attention)
        except KeyError as error:
            if error.args != (attention,):
                raise
            attention = None  # it looks its own kinds of attention up
            model = build(attention)
    except (ValueError, KeyError, OSError) as error:
        raise ModelError(f"{model_folder}: {' '.join(str(error).split())}") from error
    model.tie_weights()
    if attention is None:
        _run_apart(model)
    elif any(chunks.find_chunk_sizes(model.config.get_text_config())):
        chunks.give_positions(model, _find_positions)
    return model.eval().requires_grad_(False)


def try_out(model: Any, model_folder: Path, max_length: int) -> None:
    """Run a few tokens through a skeleton in slots, or else with its own caches (`tandem.rollout.engines.own_caches`).

    Raises `ModelError` if neither can run the architecture.
    """
    obstacle = None
    if "forward" not in vars(model):
        obstacle = _try_slots(model, max_length)
        if obstacle is None:
            return
    cannot = f"{model_folder}: the embedded engine cannot run {model.config.model_type}"
    try:
        if obstacle is not None:
            _run_apart(model)
        cache = make_cache(model, 2, 3)
        slot_R, mask = torch.arange(2), torch.zeros(2, 1, 1, 3)
        no_rows = slot_R[:0]
        prompt = AttentionStep(cache, 0, no_rows, no_rows, 0, mask[:0], (SlotPrompt(0, 2, 0, 2),))
        tokens = AttentionStep(cache, 2, slot_R, torch.full((2,), 2), 3, mask, ())
        with torch.inference_mode():
            for step in (prompt, tokens):
                model(input_ids=torch.zeros((1, 2), dtype=torch.int64), slot_step=step)
    except Exception as error:  # each architecture fails in ways of its own
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        slots = "" if obstacle is None else f"{obstacle}, and "
        raise ModelError(f"{cannot}: {slots}with a cache of its own it fails: {reason}") from error


def _try_slots(model: Any, max_length: int) -> str | None:
    """Run two tokens through a skeleton in slots; return why slots cannot run it, None if they can.

    Raises `ModelError` for an architecture that attends to later tokens.
    """
    config = model.config.get_text_config()
    windows = settings.find_sliding_windows(config)
    types = getattr(config, "layer_types", None) or ["full_attention"] * len(windows)
    num_attending = sum(layer_type in stateful.ATTENTION_TYPES for layer_type in types)
    if num_attending and "position_ids" not in inspect.signature(model.forward).parameters:
        return "it takes no positions"
    cache = make_cache(model, 1, 2)
    no_rows = torch.zeros(0, dtype=torch.int64)
    step = AttentionStep(cache, 0, no_rows, no_rows, 0, torch.zeros(0, 1, 1, 0), (SlotPrompt(0, 2, 0, 1),))
    inputs = {"input_ids": torch.zeros((1, 2), dtype=torch.int64), "position_ids": torch.arange(2)[None]}
    told_windows: dict[int, int | None] = {}
    try:
        with torch.inference_mode():
            model(**inputs, use_cache=False, slot_step=step, told_windows=told_windows)
    except NotCausalError:
        raise
    except Exception as error:  # each architecture fails in ways of its own
        return " ".join(str(error).split())
    if cache.num_layers != num_attending:
        return f"only {cache.num_layers} of its {num_attending} layers use the attention interface of transformers"
    stateful_layers = {layer for layer, layer_type in enumerate(types) if layer_type in stateful.STATEFUL_TYPES}
    if stateful_layers - (cache.stateful_layers if isinstance(cache, StatefulCache) else set()):
        return f"its {types[min(stateful_layers)]} layers keep no states in transformers' caches"
    for layer, window in enumerate(windows):
        if window is not None and window < max_length and told_windows.get(layer) != window:
            return f"layer {layer} does not tell attention of its window of {window} tokens"
    return None


def _run_apart(model: Any) -> None:
    """Have a model run with caches of its own. Raises `ModelError` if that takes less than it is given."""
    if find_language_prefix(model.config.model_type):
        raise ModelError("only slots take features of images")
    from tandem.rollout.engines.own_caches import run_apart  # most models need none of it

    run_apart(model)


def _find_positions(inputs: dict[str, Any]) -> torch.Tensor | None:
    step: AttentionStep | None = inputs.get("slot_step")
    return None if step is None else step.positions()


def _build(model_folder: Path, config: Any, dtype: torch.dtype, attention: Any, *, with_weights: bool) -> Any:
    """Return a model with this attention, None for its own."""
    config, renamed = describe_text_part(config)
    if with_weights:
        return _load_with_weights(model_folder, config, renamed, dtype, attention)
    with no_init_weights():
        return find_model_class(config).from_config(
            config, dtype=dtype, attn_implementation=attention, trust_remote_code=False
        )


def _load_with_weights(
    model_folder: Path, config: Any, renamed: Mapping[str, str], dtype: torch.dtype, attention: Any
) -> Any:
    """Load a whole model. Raises `ModelError` if a tensor is missing, and what the library raises."""
    transformers.utils.logging.disable_progress_bar()
    verbosity = transformers.utils.logging.get_verbosity()
    transformers.utils.logging.set_verbosity_error()  # its warnings are checked for below
    try:
        model, loading_info = find_model_class(config).from_pretrained(
            model_folder,
            config=config,
            key_mapping=dict(renamed) or None,
            dtype=dtype,
            attn_implementation=attention,
            use_safetensors=True,  # the other format is unpickled
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # checked below instead
        )
    except (RuntimeError, SafetensorError) as error:  # unreadable, or not convertible to the model's own form
        raise ModelError(f"{model_folder}: {' '.join(str(error).split())}") from error
    finally:
        transformers.utils.logging.set_verbosity(verbosity)
    for list_name in ("missing_keys", "mismatched_keys"):
        names = sorted(key if isinstance(key, str) else str(key[0]) for key in loading_info[list_name])
        if names:
            state = list_name.removesuffix("_keys")
            raise ModelError(f"{model_folder}: {names[0]} is {state}, the first of {len(names)} such tensors")
    return model


def _attention(config: Any) -> str | dict[str, str]:
    """Return what to call the attention of slots by: only the language model's, if the model also has a tower."""
    if not find_language_prefix(config.model_type):
        return CHUNKS_ATTENTION_NAME if any(chunks.find_chunk_sizes(config.get_text_config())) else ATTENTION_NAME
    return {"text_config": BLOCKS_ATTENTION_NAME if has_blocks(config.model_type) else ATTENTION_NAME}


def _refuse_unsupported(config: Any, max_length: int) -> None:
    """Raise `ModelError` if slots would compute this model wrongly."""
    name = config.model_type
    unstable = settings.find_unstable_rotation(config, max_length)
    if unstable is not None:
        raise ModelError(f"the embedded engine cannot run {name}: rotary embeddings of type {unstable}")
    if getattr(config, "use_bidirectional_attention", None):
        raise ModelError(f"the embedded engine cannot run {name}: its attention is not causal")
