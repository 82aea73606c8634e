"""Attention of rows that share prompts: the one place where `SharedPrompts` meets a Hugging Face model.

A model takes it through `transformers.AttentionInterface`, by the name `ATTENTION_NAME`; without `SharedPrompts` beside
the tokens it is the library's own attention, to the bit.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import transformers
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from tandem.trainer.sharing import SharedPrompts, share_prompts

ATTENTION_NAME = "tandem_shared_prompts"


def shared_prompt_attention(
    module: torch.nn.Module,
    query_BHTD: torch.Tensor,
    key_BHTD: torch.Tensor,
    value_BHTD: torch.Tensor,
    attention_mask: torch.Tensor | None,
    shared_prompts: SharedPrompts | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend causally, within each sample where the row holds several: ``[1, H, N, D]`` in, ``[1, N, H, D]`` out.

    Keys and values of a prompt are spread to all of its samples, so that the fast kernels for plain causal attention
    serve; gradients of all samples add up in the prompt.
    """
    if shared_prompts is None:
        plain: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query_BHTD, key_BHTD, value_BHTD, attention_mask, **kwargs
        )
        return plain
    spread = [_spread(tensor_1HND, shared_prompts.source_BW) for tensor_1HND in (query_BHTD, key_BHTD, value_BHTD)]
    attended_BWHD, _ = sdpa_attention_forward(module, *spread, None, **kwargs)
    return attended_BWHD.flatten(0, 1).index_select(0, shared_prompts.taken_N)[None], None


def _spread(tensor_1HND: torch.Tensor, source_BW: torch.Tensor) -> torch.Tensor:
    """Return ``[B, H, W, D]``."""
    tensor_NHD = tensor_1HND[0].transpose(0, 1)
    return tensor_NHD.index_select(0, source_BW.flatten()).view(*source_BW.shape, *tensor_NHD.shape[1:]).transpose(1, 2)


transformers.AttentionInterface.register(ATTENTION_NAME, shared_prompt_attention)


def prepare_to_share(model: Any, max_length: int) -> str | None:
    """Make a whole model on the CPU take `SharedPrompts`; return None, or why it cannot, and is as it was.

    The model is asked, not its name: two samples that share a prompt must have the logits they have one by one.
    """
    config = model.config.get_text_config()
    window = getattr(config, "sliding_window", None)
    if window is not None and window < max_length:
        return f"its attention slides over {window} tokens"
    others = sorted(set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"})
    if others:
        return f"it has layers of type {others[0]}"
    before = model.config._attn_implementation
    try:
        expected_TV = _logits(model, None)
        model.set_attn_implementation(ATTENTION_NAME)
        found_TV = _logits(model, _PROBE)
    except Exception as error:  # an architecture of its own fails in ways of its own
        reason = f"it takes no attention but its own: {type(error).__name__}: {error}".split("\n")[0]
    else:
        if torch.allclose(found_TV, expected_TV, rtol=1e-3, atol=1e-4):
            return None
        reason = "its tokens meet outside of attention"
    model.set_attn_implementation(before)
    return reason


_SAMPLES = np.array([[0, 1, 2, 0], [0, 1, 1, 2]])
_PROBE = share_prompts(
    _SAMPLES,
    np.array([[False, False, True, True]] * 2),
    np.zeros(2, dtype=np.int64),
    np.array([2, 2]),
    divisible_by=1,
    device=torch.device("cpu"),
)


@torch.no_grad()
def _logits(model: Any, shared: SharedPrompts | None) -> torch.Tensor:
    """Return the logits of the tokens that predict something in `_SAMPLES`."""
    if shared is None:
        logits: torch.Tensor = model(input_ids=torch.from_numpy(_SAMPLES), use_cache=False).logits
        return logits[:, 1:3].flatten(0, 1)
    logits = model(
        input_ids=shared.token_ids_1N, position_ids=shared.position_ids_1N, use_cache=False, shared_prompts=shared
    ).logits
    return logits[0, shared.predictor_K]
