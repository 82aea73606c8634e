"""Layers that carry a state from token to token, run sequence by sequence, and the tensors in caches.

Linear attention, state-space layers and short convolutions mix a row's tokens outside of attention. In a row of several
sequences each has to begin with an empty state, or with that of its prompt. Transformers keeps such states in layers of
its own caches (`LinearAttentionLayer`): those of convolutions, and those of recurrences. A module that asks a cache for
them is run here once for each sequence, with a layer of its own.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import transformers
from transformers import cache_utils

from tandem.common.attention.chunks import CHUNKED_TYPE

if TYPE_CHECKING:
    from transformers.cache_utils import LinearAttentionLayer

STATEFUL_TYPES = frozenset({"linear_attention", "conv", "hybrid", "hybrid_sliding"})
"""Types of layers in Transformers that carry a state; hybrid ones have attention, too."""
ATTENTION_TYPES = frozenset({"full_attention", "sliding_attention", CHUNKED_TYPE, "hybrid", "hybrid_sliding"})
"""Types of layers that attend to earlier tokens by the attention interface."""
PLAIN_TYPES = frozenset({"mlp", "moe", "dummy"})
"""Types of layers in which no tokens meet."""
INDEXED_TYPE = "indexed_attention"
"""The type of layers that attend to the few keys that an indexer chooses."""
_STATE_CALLS = frozenset({"update_conv_state", "update_recurrent_state"})
_CACHE = "cache"
"""Parameter of a stateful module's `forward` that takes the cache."""
CACHE_NAMES = ("cache", "cache_params", "state")
"""Parameters of forward passes that take a cache, and fields of their outputs."""
_HAS_OWN_LAYERS = hasattr(cache_utils, "DummyLayer")
"""Whether caches of this release have layers that keep states: those of 5.24 and later."""
CachePath: TypeAlias = tuple[object, ...]
"""The place of a tensor in a cache: names of attributes, keys and indices."""


def find_tensors(cache: Any) -> dict[CachePath, torch.Tensor]:
    """Return the tensors of a cache by their places, each once."""
    tensors: dict[CachePath, torch.Tensor] = {}
    visited: set[int] = set()

    def collect(value: Any, path: CachePath) -> None:
        if id(value) in visited:
            return
        visited.add(id(value))
        if isinstance(value, torch.Tensor):
            tensors[path] = value
        elif isinstance(value, list | tuple):
            for index, part in enumerate(value):
                collect(part, (*path, index))
        elif isinstance(value, dict) or has_parts(value):
            for name, part in (value if isinstance(value, dict) else vars(value)).items():
                collect(part, (*path, name))

    collect(cache, ())
    return tensors


def has_parts(value: Any) -> bool:
    """Return whether a value within a cache may hold tensors in its attributes."""
    return (
        hasattr(value, "__dict__")
        and not isinstance(value, type | torch.nn.Module | transformers.PretrainedConfig)
        and not inspect.isroutine(value)
    )


def find_unknown_layer_type(config: Any, *types_elsewhere: str) -> str | None:
    """Return the first type of layer that neither attends nor carries a state in a known way, from a text
    configuration; None if there is none. `types_elsewhere` are dealt with by the caller."""
    types = set(getattr(config, "layer_types", None) or ())
    return min(types - ATTENTION_TYPES - STATEFUL_TYPES - PLAIN_TYPES - {*types_elsewhere}, default=None)


def explain_release(config: Any) -> str | None:
    """Return why sequences in a row cannot be told apart with this release of Transformers, from a text configuration;
    None if another release would be no better."""
    types = STATEFUL_TYPES.intersection(getattr(config, "layer_types", None) or ())
    if not types or _HAS_OWN_LAYERS:
        return None
    return (
        f"its layers of type {min(types)} need Transformers 5.24 or later, and {transformers.__version__} is installed"
    )


def find_stateful_modules(model: torch.nn.Module) -> dict[int, Any]:
    """Return the modules that carry a state, by layer.

    There are none where a layer has several, which are not told apart here, or with a release of Transformers whose
    caches are others (before 5.24).
    """
    if not _HAS_OWN_LAYERS:
        return {}
    modules: list[Any] = [module for module in model.modules() if _carries_state(type(module))]  # type: ignore[arg-type]
    by_layer = {int(module.layer_idx): module for module in modules}
    return by_layer if len(by_layer) == len(modules) else {}


@functools.cache
def _carries_state(module_class: Any) -> bool:
    """Return whether a class updates states of a cache, and makes them of nothing but hidden states."""
    _, *inputs = inspect.signature(module_class.forward).parameters.values()
    names = [each.name for each in inputs]
    required = [each.name for each in inputs if each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD]
    if required != ["hidden_states"] or _CACHE not in names:
        return False
    functions = [inspect.unwrap(member) for member in vars(module_class).values() if inspect.isroutine(member)]
    return any(_STATE_CALLS.intersection(each.__code__.co_names) for each in functions if inspect.isfunction(each))


class StatefulModule:
    """The forward pass of one stateful module, in place of its own: it asks what its row consists of."""

    def __init__(self, module: Any, cache: Any, run_row: RowForward) -> None:
        """Stand for a module's `forward`; `cache` is an empty one of its model."""
        self.layer = int(module.layer_idx)
        self._forward = module.forward
        self._run_row = run_row
        self._num_states = int(getattr(cache.layers[self.layer], "number_of_states", 1))
        self._cache = cache_utils.Cache(layers=[cache_utils.DummyLayer() for _ in cache.layers])

    def __call__(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return the module's output for a row of sequences, or for what else it is given."""
        output = self._run_row(self, hidden_states)
        return self._forward(hidden_states, *args, **kwargs) if output is None else output

    def make_layer(self) -> LinearAttentionLayer:
        """Return a layer of a cache without states."""
        return cache_utils.LinearAttentionLayer(number_of_states=self._num_states)

    def run_apart(self, hidden_BTE: torch.Tensor, states: LinearAttentionLayer | None = None) -> torch.Tensor:
        """Return the output ``[B, T, E]`` for B sequences.

        Their states are read and left in a layer of a cache; with None they begin empty, and are not kept.
        """
        output: torch.Tensor
        if states is None:
            output = self._forward(hidden_BTE)
        else:
            self._cache.layers[self.layer] = states
            output = self._forward(hidden_BTE, cache=self._cache)
        return output


RowForward: TypeAlias = Callable[[StatefulModule, torch.Tensor], torch.Tensor | None]
"""The output ``[1, N, E]`` of a module for a row of sequences ``[1, N, E]``; None if there is no such row."""


def replace_forward(model: Any, run_row: RowForward) -> None:
    """Have `run_row` run the stateful modules of a model."""
    cache = cache_utils.DynamicCache(config=model.config.get_text_config(decoder=True))
    for module in find_stateful_modules(model).values():
        module.forward = StatefulModule(module, cache, run_row)


def restore_forward(model: Any) -> None:
    """Have the stateful modules of a model run as before `replace_forward`."""
    for module in find_stateful_modules(model).values():
        del module.forward


def is_replaced(model: Any) -> bool:
    """Return whether that has been done."""
    return any(isinstance(module.forward, StatefulModule) for module in find_stateful_modules(model).values())


def take_states(layer: LinearAttentionLayer) -> Iterator[tuple[tuple[str, int], torch.Tensor]]:
    """Yield the states of a cache layer ``[B, ...]``, each with its kind and number."""
    for number in range(layer.number_of_states):
        if layer.is_conv_states_initialized[number]:
            yield ("conv", number), layer.conv_states[number]
        if layer.is_recurrent_states_initialized[number]:
            yield ("recurrent", number), layer.recurrent_states[number]


def put_states(layer: LinearAttentionLayer, states: dict[tuple[str, int], torch.Tensor]) -> None:
    """Have an empty cache layer hold these states, and go on from them. It writes to them in place."""
    for (kind, number), state in states.items():
        if kind == "conv":
            layer.conv_states[number] = state
            layer.conv_kernel_size[number] = state.shape[-1]
            layer.is_conv_states_initialized[number] = True
        else:
            layer.recurrent_states[number] = state
            layer.is_recurrent_states_initialized[number] = True
        layer.dtype, layer.device = state.dtype, state.device
        layer.has_previous_state[number] = True
