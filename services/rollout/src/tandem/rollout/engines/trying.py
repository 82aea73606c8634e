"""The trial of a model in the embedded engine, before it has weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tandem.common.attention.settings import sliding_windows
from tandem.common.errors import ModelError
from tandem.rollout.engines.attention import AttentionStep, KeyValueCache, SlotPrompt


def try_out(model: Any, model_folder: Path, max_length: int) -> None:
    """Run two tokens through a skeleton. Raise `ModelError` if slots cannot run the architecture."""
    windows = sliding_windows(model.config.get_text_config())
    cache = KeyValueCache(1, 2)
    no_rows = torch.zeros(0, dtype=torch.int64)
    step = AttentionStep(cache, 0, no_rows, no_rows, 0, torch.zeros(0, 1, 1, 0), (SlotPrompt(0, 2, 0, 1),))
    inputs = {"input_ids": torch.zeros((1, 2), dtype=torch.int64), "position_ids": torch.arange(2)[None]}
    told_windows: dict[int, int | None] = {}
    with torch.inference_mode():
        model(**inputs, use_cache=False, slot_step=step, told_windows=told_windows)
    cannot = f"{model_folder}: the embedded engine cannot run {model.config.model_type}"
    if cache.num_layers != len(windows):
        raise ModelError(
            f"{cannot}: only {cache.num_layers} of its {len(windows)} layers use the attention interface of "
            "transformers"
        )
    for layer, window in enumerate(windows):
        if window is not None and window < max_length and told_windows.get(layer) != window:
            raise ModelError(f"{cannot}: layer {layer} does not tell attention of its window of {window} tokens")
