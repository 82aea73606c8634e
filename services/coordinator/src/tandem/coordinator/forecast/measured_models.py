"""Tensors and caches of any model of Transformers, measured on a model that has no memory.

Transformers builds the model on torch's device ``meta``, where tensors have shapes and no elements, and runs a few
tokens through it with its own cache: that costs seconds, whatever the size of the model.
"""

from __future__ import annotations

import contextlib
import functools
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from tandem.common.attention.settings import find_sliding_windows
from tandem.common.errors import ModelError
from tandem.config.models.families import find_language_prefix
from tandem.config.models.hf_config import describe_text_part, find_model_class, load_config
from tandem.refit.adapters.catalogue import ModelShape
from tandem.refit.adapters.geometry import AttentionGeometry, LatentAttention
from tandem.refit.layout import Tensor

if TYPE_CHECKING:
    import torch

    from tandem.common.attention.stateful import CachePath

_RECORDED = "tandem_recorded"
"""Name of the attention that notes what it is given."""


class LayerCache(msgspec.Struct, frozen=True, order=True):
    """A layer's memory of one sequence between two tokens, in bytes; of elements of two bytes until `cast`."""

    kind: str
    """Its kind, by Transformers' name."""
    heads_per_token: int
    """A token's keys and values of all heads as attention takes them, which the embedded engine's slots keep."""
    bytes_of_state: int
    """Its state, which does not grow with the sequence."""
    num_bytes: int
    """All of it for a sequence of the longest length: less than a share for each token where a layer has a window."""
    bytes_in_float32: int = 0
    """Those of the state that are in float32 whatever the model's element type."""

    def cast(self, item_size: int) -> LayerCache:
        """Return the same for a model whose elements have so many bytes."""
        fixed = self.bytes_in_float32
        return LayerCache(
            kind=self.kind,
            heads_per_token=self.heads_per_token * item_size // 2,
            bytes_of_state=(self.bytes_of_state - fixed) * item_size // 2 + fixed,
            num_bytes=(self.num_bytes - fixed) * item_size // 2 + fixed,
            bytes_in_float32=fixed,
        )


def derive_cache(attention: AttentionGeometry | LatentAttention, max_length: int) -> LayerCache:
    """Return what a layer without a window keeps of a sequence, from its sizes."""
    if isinstance(attention, LatentAttention):
        per_token = 2 * (attention.kv_rank + attention.rope_dim)
        of_head = attention.nope_dim + attention.rope_dim + attention.value_dim
        of_heads = 2 * attention.num_heads * of_head
    else:
        of_heads = per_token = 2 * 2 * attention.num_kv_heads * attention.head_dim
    return LayerCache("full_attention", of_heads, 0, per_token * max_length)


class MeasuredModel(msgspec.Struct, frozen=True):
    """A model as Transformers builds it."""

    shape: ModelShape
    caches: Mapping[LayerCache, int] | None
    """The number of layers by what they keep; None where a model without elements cannot be run."""


def measure_model(config_json: Mapping[str, Any], max_length: int) -> MeasuredModel:
    """Return the tensors and the cache of the model that a ``config.json`` describes.

    A vision model's checkpoint is its text part, which is what is trained here. Raises `ModelError` if the
    installed Transformers builds no such model.

    Args:
        config_json: the file's content.
        max_length: tokens of the longest sequence.
    """
    return _measure_model(msgspec.json.encode(config_json), max_length)


@functools.lru_cache(maxsize=8)
def _measure_model(encoded_config: bytes, max_length: int) -> MeasuredModel:
    """Measure a model of which nothing is remembered."""
    import torch  # imported late, since they take seconds, and plans of known families need neither
    import transformers
    from transformers.initialization import no_init_weights

    verbosity = transformers.utils.logging.get_verbosity()
    transformers.utils.logging.set_verbosity_error()
    try:
        config = _read_config(encoded_config)
        # In bfloat16, since experts in float32 do not run without elements: findings/torch_grouped_mm_on_meta
        with torch.device("meta"), no_init_weights():
            model = find_model_class(config).from_config(
                config, dtype=torch.bfloat16, attn_implementation="eager", trust_remote_code=False
            )
        model.tie_weights()
        caches = None if find_language_prefix(config.model_type) else _measure_caches(model.eval(), max_length)
    except Exception as error:  # the library passes on any error of its readers
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ModelError(f"Transformers {transformers.__version__} cannot build it: {reason}") from error
    finally:
        transformers.utils.logging.set_verbosity(verbosity)
    return MeasuredModel(ModelShape(tuple(_list_tensors(model)), None), caches)


def _read_config(encoded_config: bytes) -> Any:
    """Return Transformers' configuration of a model or, of one that sees, of its text part."""
    # Through a file, since `from_dict` refuses infinity: findings/transformers_infinity_in_config
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_bytes(encoded_config)
        return describe_text_part(load_config(folder, None))[0]


@functools.lru_cache(maxsize=8)
def list_mtp_tensors(encoded_config: bytes, num_layers: int) -> tuple[Tensor, ...]:
    """Return the tensors of so many layers of multi-token prediction, as trainers of a ``config.json`` hold them.

    Raises `ModelError` if the installed Transformers builds no such layer.
    """
    from tandem.config.models.mtp_layers import build_skeleton, list_shapes  # they import torch

    try:
        config = _read_config(encoded_config).get_text_config()
    except (ValueError, KeyError, OSError) as error:
        raise ModelError(" ".join(str(error).split())) from error
    shapes = list_shapes(build_skeleton(config, num_layers))
    return tuple(Tensor(name, shape, "float32") for name, shape in shapes.items())


def _list_tensors(model: Any) -> Iterator[Tensor]:
    """Yield the tensors of a model; tied ones once."""
    visited: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in visited:
            visited.add(id(tensor))
            yield Tensor(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


def _measure_caches(model: Any, max_length: int) -> Mapping[LayerCache, int] | None:
    """Return the number of layers by what they keep of a sequence; None if it does not run without elements."""
    from tandem.common.attention.chunks import find_chunk_sizes  # imports torch

    lengths = 2, 3
    with _record_heads(model) as heads:
        try:
            _fill_cache(model, lengths[0])
        except Exception:  # it looks its own kinds of attention up
            heads.clear()
        heads_per_token = {layer: num_bytes // lengths[0] for layer, num_bytes in heads.items()}
    try:
        short, longer = (_fill_cache(model, length) for length in lengths)
    except Exception:  # each architecture fails in ways of its own, and only the plan's line about caches needs it
        return None
    per_token: Counter[int] = Counter()
    state: Counter[int] = Counter()
    in_float32: Counter[int] = Counter()
    for path, tensor in (longer | short).items():
        layer = next((part for part in path if isinstance(part, int)), 0)
        sizes = [cache[path].nbytes if path in cache else 0 for cache in (short, longer)]
        if sizes[1] > sizes[0]:
            per_token[layer] += sizes[1] - sizes[0]
            continue
        state[layer] += sizes[0]
        in_float32[layer] += sizes[0] * (tensor.element_size() == 4)
    config = model.config.get_text_config()
    types = getattr(config, "layer_types", None) or ()
    windows = dict(enumerate(find_sliding_windows(config)))
    chunks = dict(enumerate(find_chunk_sizes(config)))
    counts: Counter[LayerCache] = Counter()
    for layer in sorted(per_token.keys() | state.keys()):
        num_bytes, window = per_token[layer], windows.get(layer) or chunks.get(layer) or max_length
        kind = "sliding_attention" if window < max_length else "full_attention" if num_bytes else "state"
        counts[
            LayerCache(
                kind=types[layer] if layer < len(types) else kind,
                heads_per_token=heads_per_token.get(layer, num_bytes),
                bytes_of_state=state[layer],
                num_bytes=state[layer] + num_bytes * min(window, max_length),
                bytes_in_float32=in_float32[layer],
            )
        ] += 1
    return dict(counts) or None


@contextlib.contextmanager
def _record_heads(model: Any) -> Iterator[dict[int, int]]:
    """Note the bytes of keys and values that each layer gives to attention within this context."""
    import transformers

    heads: dict[int, int] = {}

    def attend(module: Any, query_BHTD: Any, key_BHTD: Any, value_BHTD: Any, *args: Any, **kwargs: Any) -> Any:
        heads[int(module.layer_idx)] = key_BHTD.nbytes + value_BHTD.nbytes
        batch_size, num_heads, num_tokens, _ = query_BHTD.shape
        return query_BHTD.new_empty((batch_size, num_tokens, num_heads, value_BHTD.shape[-1])), None

    transformers.AttentionInterface.register(_RECORDED, attend)
    modules = [module for module in model.modules() if isinstance(module, transformers.PreTrainedModel)]
    names = [module.config._attn_implementation for module in modules]
    try:
        for module in modules:
            module.config._attn_implementation = _RECORDED
        yield heads
    finally:
        for module, name in zip(modules, names, strict=True):
            module.config._attn_implementation = name


def _fill_cache(model: Any, length: int) -> dict[CachePath, torch.Tensor]:
    """Return the numbers, without elements, that a model's own cache has after so many tokens of one sequence."""
    import torch

    from tandem.common.attention.stateful import CACHE_NAMES, find_tensors

    validates = torch.distributions.Distribution._validate_args
    torch.distributions.Distribution.set_default_validate_args(False)  # it would look at elements
    try:
        with torch.inference_mode(), torch.device("meta"):
            tokens_BT = torch.zeros((1, length), dtype=torch.int64)
            try:
                output = model(input_ids=tokens_BT, use_cache=True)
            except RuntimeError:  # some look for padding among the tokens unless a mask says
                output = model(input_ids=tokens_BT, use_cache=True, attention_mask=torch.ones_like(tokens_BT))
    finally:
        torch.distributions.Distribution.set_default_validate_args(validates)
    cache = next((output[name] for name in CACHE_NAMES if output.get(name) is not None), None)
    return {path: tensor for path, tensor in find_tensors(cache).items() if tensor.is_floating_point()}
