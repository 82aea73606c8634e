"""A checkpoint's layers of multi-token prediction: their names there and in memory, and their shapes.

In memory they are a module of the policy's model. The layer ``mtp.layers.<n>`` has two norms, a projection, a decoder
layer of the family (``block``), and a last norm.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from tandem.common.errors import ModelError
from tandem.config.models.families import MTP
from tandem.config.models.hf_config import find_model_class

ATTRIBUTE = "mtp"
"""Attribute of the policy's model that has the layers."""
PREFIX = f"{ATTRIBUTE}."
"""Beginning of their tensors' names in memory."""
BLOCK = "block."
"""Beginning of the names of a decoder layer's tensors, within its layer."""
EMBEDDING, HEAD = "embedding", "head"
"""Names of the policy's modules whose tensors some checkpoints have once more in each of these layers."""
ATTENTION = "full_attention"
"""Kind of each of these layers, by Transformers' name."""
COUNT = "num_nextn_predict_layers"
"""Field of ``config.json`` with their number."""
_FIRST_LAYER = re.compile(r"^(?:.*\.)?layers\.0\.")
_APART = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
"""Families with one such layer, whose tensors have a prefix of their own."""
_PARTS = {"eh_proj": "eh_proj", "enorm": "enorm", "hnorm": "hnorm", "norm": "shared_head.norm"}
_PARTS_APART = {"eh_proj": "fc", "enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "norm": "norm"}


class LayerNames(msgspec.Struct, frozen=True):
    """The names of one layer's tensors in a checkpoint."""

    block: str
    """Prefix of the names of its decoder layer."""
    parts: Mapping[str, str]
    """The names of its other tensors, by those in the layer."""
    shared: Mapping[str, str]
    """The module of each copy of the policy's own tensors that a checkpoint may have."""

    def rename(
        self, tensors: Mapping[str, Any], convert: Callable[[dict[str, Any]], Mapping[str, Any]]
    ) -> dict[str, Any]:
        """Return a layer's whole tensors by their names in checkpoints.

        Args:
            tensors: by their names in the layer.
            convert: function that names the tensors of a decoder layer as a checkpoint of the family does.

        """
        renamed = {name: tensors[part] for part, name in self.parts.items() if part in tensors}
        # The decoder layer has the names of the policy's own layers.
        block = {
            f"model.layers.0.{name.removeprefix(BLOCK)}": tensor
            for name, tensor in tensors.items()
            if name.startswith(BLOCK)
        }
        for name, tensor in convert(block).items():
            renamed[_FIRST_LAYER.sub(self.block, name, count=1)] = tensor
        return renamed


def count_layers(config_json: Mapping[str, Any]) -> int:
    """Return the number of these layers in the checkpoint that a ``config.json`` describes, as vLLM reads it."""
    default = int(config_json.get("model_type") == "qwen3_next")  # which has one even without the field
    return int(config_json.get(COUNT, default) or 0)


def name_layer(number: int, config: Any) -> LayerNames | None:
    """Return the names of the layer `number` of a model's checkpoint; None if the family has no such layer.

    `config` is the configuration of the model or of its text part.
    """
    if config.model_type not in MTP:
        return None
    if config.model_type in _APART:
        described = {f"{part}.weight": f"mtp.{name}.weight" for part, name in _PARTS_APART.items()}
        return None if number else LayerNames("mtp.layers.0.", described, {})
    prefix = f"model.layers.{config.num_hidden_layers + number}."
    return LayerNames(
        prefix,
        {f"{part}.weight": f"{prefix}{name}.weight" for part, name in _PARTS.items()},
        {f"{prefix}embed_tokens.weight": EMBEDDING, f"{prefix}shared_head.head.weight": HEAD},
    )


def describe_blocks(config: Any, num_layers: int) -> Any:
    """Return the configuration of a small model whose layers are those of multi-token prediction."""
    config = copy.deepcopy(config)
    config.num_hidden_layers, config.vocab_size = num_layers, 1
    config.pad_token_id = config.bos_token_id = config.eos_token_id = None
    for name, kind in {"layer_types": ATTENTION, "mlp_layer_types": "sparse"}.items():
        if getattr(config, name, None) is not None:
            setattr(config, name, [kind] * num_layers)
    dense: dict[str, Any] = {"first_k_dense_replace": 0, "mlp_only_layers": []}
    for name, none in dense.items():
        if hasattr(config, name):
            setattr(config, name, none)
    return config


def build_skeleton(config: Any, num_layers: int) -> Any:
    """Return the small model of `describe_blocks` without memory for its weights. Raises `ModelError`."""
    import torch  # imported late, since both take seconds
    from transformers.initialization import no_init_weights

    described = describe_blocks(config, num_layers)
    try:
        with torch.device("meta"), no_init_weights():
            return find_model_class(described).from_config(described, trust_remote_code=False)
    except (ValueError, KeyError, AttributeError, ImportError) as error:
        reason = " ".join(str(error).split())
        raise ModelError(f"Transformers cannot build the layers of multi-token prediction: {reason}") from error


def list_shapes(skeleton: Any) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors that a trainer holds of these layers, by their names in memory.

    `skeleton` is what `build_skeleton` returns.
    """
    decoder = skeleton.base_model
    size = skeleton.config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {}
    for number, layer in enumerate(decoder.layers):
        prefix = f"{PREFIX}layers.{number}."
        shapes |= {f"{prefix}{norm}.weight": (size,) for norm in ("enorm", "hnorm", "norm")}
        shapes[f"{prefix}eh_proj.weight"] = (size, 2 * size)
        shapes |= {f"{prefix}{BLOCK}{name}": tuple(tensor.shape) for name, tensor in layer.state_dict().items()}
    return shapes
