"""Attention over rows of several sequences, in Hugging Face models, which are tried out first.

A model takes a `TokenRow`, packed or with shared prompts, through `transformers.AttentionInterface`, by the name
`ATTENTION_NAME`. Without a row this is the library's own attention, to the bit. Layers with sliding attention, chunks,
sinks or capped scores differ, because the library needs a mask or other kernels for them.

Layers that carry a state: in a packed row each sequence runs apart, from an empty state. With shared prompts each
sample runs with its prompt, as one batch of all samples: such a layer computes a prompt once for each of its samples,
all other layers once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import transformers
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from tandem.common.attention import chunks, settings, stateful
from tandem.common.attention.segments import attend as attend_within
from tandem.common.attention.segments import attend_on_gpu
from tandem.config.models.families import find_language_prefix
from tandem.trainer.batching.packing import pack_row, share_prompts
from tandem.trainer.micro_batches import TokenRow

ATTENTION_NAME = "tandem_rows"
CHUNKS_ATTENTION_NAME = "tandem_rows_in_chunks"
"""Name for models some of whose layers attend within chunks."""
OUTSIDE_OF_GRAPHS: dict[str, Callable[..., tuple[torch.Tensor, None]]] = {}
"""Attention, by its name, that does not take tensors alone, and is no part of a graph; vision models add theirs."""


def attend(
    module: torch.nn.Module,
    query_BHTD: torch.Tensor,
    key_BHTD: torch.Tensor,
    value_BHTD: torch.Tensor,
    attention_mask: torch.Tensor | None,
    row: TokenRow | None = None,
    told_windows: dict[int, int | None] | None = None,
    ends_2S: torch.Tensor | None = None,
    chunk_size: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend causally, within each sequence of a row: ``[1, H, N, D]`` in, ``[1, N, H, D]`` out.

    Keys and values of a shared prompt are copied to all of its samples, so that the fast kernels for plain causal
    attention apply. Gradients of all samples add up in the prompt. `told_windows` collects the window that each layer
    gives for its sliding attention. `ends_2S` stands for a packed row on a GPU
    (`tandem.common.attention.segments.find_boundaries`): unlike its lengths it is an input of a compiled graph.
    `chunk_size` comes from `attend_in_chunks`.
    """
    window, sinks_H, cap = kwargs.get("sliding_window"), kwargs.get("s_aux"), kwargs.get("softcap")
    if ends_2S is not None:
        return _attend_compiled(query_BHTD, key_BHTD, value_BHTD, ends_2S, chunk_size, kwargs), None
    if told_windows is not None:
        told_windows[int(module.layer_idx)] = window  # type: ignore[arg-type]
    source_BW = None if row is None else row.source_BW
    is_packed = row is not None and source_BW is None
    if source_BW is not None:
        query_BHTD, key_BHTD = _spread(query_BHTD, source_BW), _spread(key_BHTD, source_BW)
        value_BHTD = _spread(value_BHTD, source_BW)
    is_plain = window is None and sinks_H is None and cap is None and chunk_size is None
    if is_plain and not is_packed:
        attended_BTHD, _ = sdpa_attention_forward(module, query_BHTD, key_BHTD, value_BHTD, attention_mask, **kwargs)
    else:
        if kwargs.get("position_bias") is not None:
            raise ValueError("its attention needs position_bias")
        num_rows, _, width, _ = query_BHTD.shape
        lengths = row.lengths if row is not None and is_packed else (width,) * num_rows
        query_NHD, key_NGD, value_NGD = (
            each.transpose(1, 2).flatten(0, 1) for each in (query_BHTD, key_BHTD, value_BHTD)
        )
        segments = [(length, length) for length in lengths]
        if chunk_size is not None:
            segments = chunks.split_segments(segments, chunk_size)
        scaling = kwargs.get("scaling")
        attended_NHD = attend_within(query_NHD, key_NGD, value_NGD, segments, scaling, window, sinks_H, cap)
        attended_BTHD = attended_NHD.view(num_rows, width, *attended_NHD.shape[1:])
    if row is not None and row.taken_N is not None:
        attended_BTHD = attended_BTHD.flatten(0, 1).index_select(0, row.taken_N)[None]
    return attended_BTHD, None


def _attend_compiled(
    query_BHTD: torch.Tensor,
    key_BHTD: torch.Tensor,
    value_BHTD: torch.Tensor,
    ends_2S: torch.Tensor,
    chunk_size: int | None,
    arguments: Mapping[str, Any],
) -> torch.Tensor:
    """Attend within the sequences of a packed row, in a compiled graph on a GPU."""
    cap = arguments.get("softcap")
    if arguments.get("s_aux") is not None or cap is not None or chunk_size is not None:
        kind = "in chunks" if chunk_size is not None else "with sinks" if cap is None else "with capped scores"
        raise ValueError(f"attention {kind} cannot be compiled: set policy.compile to false")
    query_NHD, key_NGD, value_NGD = (each[0].transpose(0, 1) for each in (query_BHTD, key_BHTD, value_BHTD))
    longest, scaling = (query_NHD.shape[0], key_NGD.shape[0]), arguments.get("scaling")
    return attend_on_gpu(query_NHD, key_NGD, value_NGD, ends_2S, longest, scaling, arguments.get("sliding_window"))[
        None
    ]


def attend_in_chunks(module: Any, *tensors: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
    """Attend as `attend` does, within chunks where the layer's type says so."""
    kwargs["chunk_size"] = chunks.find_chunk_size(module)
    return attend(module, *tensors, **kwargs)


def _spread(tensor_1HND: torch.Tensor, source_BW: torch.Tensor) -> torch.Tensor:
    """Return ``[B, H, W, D]``."""
    tensor_NHD = tensor_1HND[0].transpose(0, 1)
    return tensor_NHD.index_select(0, source_BW.flatten()).view(*source_BW.shape, *tensor_NHD.shape[1:]).transpose(1, 2)


transformers.AttentionInterface.register(ATTENTION_NAME, attend)
OUTSIDE_OF_GRAPHS[ATTENTION_NAME] = attend
transformers.AttentionInterface.register(CHUNKS_ATTENTION_NAME, attend_in_chunks)


class _RowModel:
    """A model whose stateful modules run each sequence of a `TokenRow` apart."""

    def __init__(self, model: Any) -> None:
        self._row: TokenRow | None = None
        self._is_within = False
        stateful.replace_forward(model, self._run_row)
        model.register_forward_pre_hook(self._begin, with_kwargs=True)
        model.register_forward_hook(self._end, always_call=True)
        if model.base_model is not model:  # which is called by itself where no logits are wanted
            model.base_model.register_forward_pre_hook(self._begin_within, with_kwargs=True)

    def _begin(self, model: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """Note what the row of a forward pass consists of; its backward pass may compute layers again."""
        self._row, self._is_within = kwargs.get("row"), True

    def _end(self, model: Any, args: Any, output: Any) -> None:
        self._is_within = False

    def _begin_within(self, model: Any, args: Any, kwargs: dict[str, Any]) -> None:
        if not self._is_within:  # not every model hands its arguments on
            self._row = kwargs.get("row")

    def _run_row(self, module: stateful.StatefulModule, hidden_BTE: torch.Tensor) -> torch.Tensor | None:
        row = self._row
        if row is None:
            return None
        if row.source_BW is None:
            parts = torch.split(hidden_BTE, [*row.lengths], dim=1)
            return torch.cat([module.run_apart(part_1TE) for part_1TE in parts], dim=1)
        assert row.taken_N is not None, "rows with shared prompts have it"
        samples_BWE = hidden_BTE[0].index_select(0, row.source_BW.flatten()).view(*row.source_BW.shape, -1)
        return module.run_apart(samples_BWE).flatten(0, 1).index_select(0, row.taken_N)[None]


def separate_sequences(model: Any) -> None:
    """Have a model's stateful modules, if it has some, run each sequence of a row apart."""
    if stateful.find_stateful_modules(model) and not stateful.is_replaced(model):
        _RowModel(model)


def prepare_to_share(model: Any, max_length: int) -> str | None:
    """Make a whole model on the CPU take rows with shared prompts. Return None, or why it cannot and stays unchanged.

    The model is tried out: two samples that share a prompt must have the same logits as each sample alone.
    """
    return _prepare(model, max_length, _SHARED)


def prepare_to_pack(model: Any, max_length: int) -> str | None:
    """Make a whole model on the CPU take packed rows. Return None, or why it cannot and stays unchanged.

    The model is tried out: two sequences in one row must have the same logits as each sequence alone.
    """
    config = model.config.get_text_config()
    if _is_indexed(config) and stateful.find_unknown_layer_type(config, stateful.INDEXED_TYPE) is None:
        return _prepare_indexers(model)
    return _prepare(model, max_length, _PACKED)


def explain_undivided(model: Any) -> str | None:
    """Return why ranks cannot share the sequences of a model that takes packed rows; None if they can."""
    config = model.config.get_text_config()
    if stateful.find_stateful_modules(model):
        return "it has layers that carry a state from token to token"
    if any(chunks.find_chunk_sizes(config)):
        return "it has attention in chunks"
    return f"it has layers of type {stateful.INDEXED_TYPE}" if _is_indexed(config) else None


def _is_indexed(config: Any) -> bool:
    return stateful.INDEXED_TYPE in (getattr(config, "layer_types", None) or ())


def _prepare_indexers(model: Any) -> str | None:
    """Have a model whose indexers choose keys take packed rows. Return None, or why it cannot.

    It keeps its own attention. Transformers makes the mask that keeps sequences apart, by positions that begin anew,
    and indexers choose keys within it. The model is tried out with indexers that choose fewer keys than there are.
    """
    indexers = [module for module in model.modules() if isinstance(getattr(module, "index_topk", None), int)]
    if not indexers:
        return f"it has layers of type {stateful.INDEXED_TYPE}, whose indexers choose no single keys"
    num_keys = {module: module.index_topk for module in indexers}
    pool_size = max(getattr(module, "index_kpool", 1) for module in indexers)
    length = 6 * pool_size + 1
    config = model.config.get_text_config()
    tokens = [token for token in range(min(config.vocab_size, 64)) if token != config.pad_token_id]
    samples_BT = np.random.default_rng(0).choice(tokens, (2, length))
    counted_BT = np.arange(length)[None].repeat(2, axis=0) > 0
    row = pack_row(samples_BT, np.full(2, length), counted_BT, divisible_by=1, row_divisible_by=1, device=_CPU)
    scored_model = model if model.can_generate() else model.base_model
    try:
        for module in indexers:
            module.index_topk = 2 * pool_size
        separate_sequences(model)
        inputs = {"input_ids": row.token_ids_1N, "position_ids": row.position_ids_1N, "row": row}
        with torch.no_grad():
            expected_KV = scored_model(input_ids=torch.from_numpy(samples_BT), use_cache=False)[0][:, :-1].flatten(0, 1)
            packed_KV = scored_model(**inputs, use_cache=False)[0][0, row.predictor_K]
    except Exception as error:  # each architecture fails in ways of its own
        return f"it does not take them: {type(error).__name__}: {error}".split("\n")[0]
    finally:
        for module, number in num_keys.items():
            module.index_topk = number
    if torch.allclose(packed_KV, expected_KV, rtol=1e-3, atol=1e-4):
        return None
    return "its tokens meet outside of attention"


def explain_lookahead(model: Any) -> str | None:
    """Return why a whole model on the CPU cannot be trained on sequences in rows of any width; None if it can.

    Rows are padded at their ends and have no mask, so no token may look ahead. Two rows that begin alike are tried out.
    Some models attend to later tokens unless a mask forbids it (`findings/doge_experts_of_other_tokens.sh`).
    """
    try:
        first_V, _, second_V, _ = _logits(model).float()
    except Exception:  # a custom architecture may take no rows as short as these
        return None
    tolerance = 1e-3 if next(model.parameters()).dtype == torch.float32 else 0.03
    if (first_V - second_V).abs().max() <= tolerance * first_V.abs().max():
        return None
    return "the logits of a token depend on the tokens after it"


def _prepare(model: Any, max_length: int, row: TokenRow) -> str | None:
    config = model.config.get_text_config()
    unstable = settings.find_unstable_rotation(config, max_length)
    if unstable is not None:
        return f"its rotary embeddings of type {unstable} turn tokens by the length of the longest row"
    unknown_type = stateful.find_unknown_layer_type(config)
    if unknown_type is not None:
        return f"it has layers of type {unknown_type}"
    before = config._attn_implementation
    told_windows: dict[int, int | None] = {}
    try:
        expected_KV = _logits(model)
        if any(chunks.find_chunk_sizes(config)):
            use_attention(model, CHUNKS_ATTENTION_NAME)
            chunks.give_positions(model, _find_positions)
        else:
            use_attention(model, ATTENTION_NAME)
        separate_sequences(model)
        found_KV = _logits(model, told_windows, row)
    except Exception as error:  # a custom architecture fails in ways of its own
        reason = f"it takes no attention but its own: {type(error).__name__}: {error}".split("\n")[0]
    else:
        untold = [
            (layer, window)
            for layer, window in enumerate(settings.find_sliding_windows(config))
            if window is not None and window < max_length and told_windows.get(layer) != window
        ]
        if untold:
            reason = f"layer {untold[0][0]} does not tell its attention that it slides over {untold[0][1]} tokens"
        elif torch.allclose(found_KV, expected_KV, rtol=1e-3, atol=1e-4):
            return None
        else:
            reason = stateful.explain_release(config) or "its tokens meet outside of attention"
    use_attention(model, before)
    return reason


def _find_positions(inputs: dict[str, Any]) -> torch.Tensor | None:
    row: TokenRow | None = inputs.get("row")
    return None if row is None else row.position_ids_1N


def use_attention(model: Any, name: str) -> None:
    """Set the attention of a model; of its language model alone if it has other parts, which do not attend causally."""
    model.set_attn_implementation({"text_config": name} if find_language_prefix(model.config.model_type) else name)


_SAMPLES = np.array([[0, 1, 2, 0], [0, 1, 1, 2]])
_COUNTED = np.array([[False, False, True, True]] * 2)
_CPU = torch.device("cpu")
_SHARED = share_prompts(_SAMPLES, _COUNTED, np.zeros(2, dtype=np.int64), np.array([2, 2]), divisible_by=1, device=_CPU)
_PACKED = pack_row(_SAMPLES, np.array([4, 4]), _COUNTED, divisible_by=1, row_divisible_by=1, device=_CPU)


@torch.no_grad()
def _logits(model: Any, told_windows: dict[int, int | None] | None = None, row: TokenRow | None = None) -> torch.Tensor:
    """Return the logits of the predicting tokens in `_SAMPLES`, ``[K, V]``, from samples or from a row.

    Other models may have a head with the same output everywhere, so their hidden states are returned. With a row,
    `told_windows` collects the window that each layer gives for its sliding attention.
    """
    logits: torch.Tensor
    scored_model = model if model.can_generate() else model.base_model
    if row is not None:
        inputs = {"input_ids": row.token_ids_1N, "position_ids": row.position_ids_1N, "row": row}
        logits = scored_model(**inputs, told_windows=told_windows, use_cache=False)[0]
        return logits[0, row.predictor_K]
    logits = scored_model(input_ids=torch.from_numpy(_SAMPLES), use_cache=False)[0]
    return logits[:, 1:3].flatten(0, 1)
