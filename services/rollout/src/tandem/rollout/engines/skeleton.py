"""A Hugging Face model without weights, filled by refits and driven by slots, and its trial."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from transformers.initialization import no_init_weights

from tandem.common.attention.settings import find_sliding_windows, find_unstable_rotation
from tandem.common.attention.stateful import ATTENTION_TYPES, STATEFUL_TYPES, find_unknown_layer_type
from tandem.common.errors import ModelError
from tandem.config.models.hf_config import find_model_class, load_config
from tandem.config.models.vision_families import VISION
from tandem.rollout.engines.attention import ATTENTION_NAME, BLOCKS_ATTENTION_NAME, AttentionStep, SlotPrompt
from tandem.rollout.engines.states import StatefulCache, make_cache


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
        if with_weights:
            model = _load_with_weights(model_folder, config, dtype)
        else:
            with no_init_weights():
                model = find_model_class(config).from_config(
                    config, dtype=dtype, attn_implementation=_attention(config), trust_remote_code=False
                )
    except (ValueError, KeyError, OSError) as error:
        reason = " ".join(str(error).split())
        if isinstance(error, KeyError) and error.args == (ATTENTION_NAME,):  # it looks its own kinds of attention up
            reason = f"the embedded engine cannot run {config.model_type}: it takes no attention but its own"
        raise ModelError(f"{model_folder}: {reason}") from error
    model.tie_weights()
    return model.eval().requires_grad_(False)


def try_out(model: Any, model_folder: Path, max_length: int) -> None:
    """Run two tokens through a skeleton. Raise `ModelError` if slots cannot run the architecture."""
    config = model.config.get_text_config()
    windows = find_sliding_windows(config)
    types = getattr(config, "layer_types", None) or ["full_attention"] * len(windows)
    cache = make_cache(model, 1, 2)
    no_rows = torch.zeros(0, dtype=torch.int64)
    step = AttentionStep(cache, 0, no_rows, no_rows, 0, torch.zeros(0, 1, 1, 0), (SlotPrompt(0, 2, 0, 1),))
    inputs = {"input_ids": torch.zeros((1, 2), dtype=torch.int64), "position_ids": torch.arange(2)[None]}
    told_windows: dict[int, int | None] = {}
    with torch.inference_mode():
        model(**inputs, use_cache=False, slot_step=step, told_windows=told_windows)
    cannot = f"{model_folder}: the embedded engine cannot run {model.config.model_type}"
    num_attending = sum(layer_type in ATTENTION_TYPES for layer_type in types)
    if cache.num_layers != num_attending:
        raise ModelError(
            f"{cannot}: only {cache.num_layers} of its {num_attending} layers use the attention interface of "
            "transformers"
        )
    stateful_layers = {layer for layer, layer_type in enumerate(types) if layer_type in STATEFUL_TYPES}
    if stateful_layers - (cache.stateful_layers if isinstance(cache, StatefulCache) else set()):
        raise ModelError(f"{cannot}: its {types[min(stateful_layers)]} layers keep no states in transformers' caches")
    for layer, window in enumerate(windows):
        if window is not None and window < max_length and told_windows.get(layer) != window:
            raise ModelError(f"{cannot}: layer {layer} does not tell attention of its window of {window} tokens")


def _load_with_weights(model_folder: Path, config: Any, dtype: torch.dtype) -> Any:
    """Load a whole model. Raises `ModelError` if a tensor is missing, and what the library raises."""
    transformers.utils.logging.disable_progress_bar()
    verbosity = transformers.utils.logging.get_verbosity()
    transformers.utils.logging.set_verbosity_error()  # its warnings are checked for below
    try:
        model, loading_info = find_model_class(config).from_pretrained(
            model_folder,
            config=config,
            dtype=dtype,
            attn_implementation=_attention(config),
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
    family = VISION.get(config.model_type)
    if family is None:
        return ATTENTION_NAME
    return {"text_config": BLOCKS_ATTENTION_NAME if family.has_image_blocks else ATTENTION_NAME}


def _refuse_unsupported(config: Any, max_length: int) -> None:
    """Raise `ModelError` if slots would compute this model wrongly."""
    name = config.model_type
    unknown_type = find_unknown_layer_type(config)
    if unknown_type is not None:
        raise ModelError(f"the embedded engine cannot run {name}: it has layers of type {unknown_type}")
    unstable = find_unstable_rotation(config, max_length)
    if unstable is not None:
        raise ModelError(f"the embedded engine cannot run {name}: rotary embeddings of type {unstable}")
    if getattr(config, "attn_logit_softcapping", None) is not None:
        raise ModelError(f"the embedded engine cannot run {name}: its attention caps its logits")
    if getattr(config, "use_bidirectional_attention", None):
        raise ModelError(f"the embedded engine cannot run {name}: its attention is not causal")
