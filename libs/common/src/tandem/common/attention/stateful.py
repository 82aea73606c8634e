"""Layers that carry a state from token to token, found in a model and run sequence by sequence.

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
from transformers import cache_utils

if TYPE_CHECKING:
    from transformers.cache_utils import LinearAttentionLayer

STATEFUL_TYPES = frozenset({"linear_attention", "conv", "hybrid", "hybrid_sliding"})
"""Types of layers in Transformers that carry a state; hybrid ones have attention, too."""
ATTENTION_TYPES = frozenset({"full_attention", "sliding_attention", "hybrid", "hybrid_sliding"})
"""Types of layers that attend to earlier tokens by the attention interface."""
PLAIN_TYPES = frozenset({"mlp", "moe", "dummy"})
"""Types of layers in which no tokens meet."""
_STATE_CALLS = frozenset({"update_conv_state", "update_recurrent_state"})
_CACHE = "cache"
"""Parameter of a stateful module's `forward` that takes the cache."""

SequenceForward: TypeAlias = "Callable[[torch.Tensor, LinearAttentionLayer | None], torch.Tensor]"
"""A module's output ``[B, T, E]`` for inputs ``[B, T, E]`` of B sequences.

Their states are read and left in a layer of a cache; with None they begin empty, and are not kept.
"""


def find_stateful_modules(model: torch.nn.Module) -> dict[int, Any]:
    """Return the modules that carry a state, by layer.

    There are none where a layer has several, which are not told apart here, or with a release of Transformers whose
    caches are others (before 5.24).
    """
    if not hasattr(cache_utils, "DummyLayer"):
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


RowForward: TypeAlias = "Callable[[int, torch.Tensor, SequenceForward], torch.Tensor | None]"
"""The output ``[1, N, E]`` of a layer's module for a row of sequences ``[1, N, E]``; None if there is no such row."""


class StatefulModule:
    """The forward pass of one stateful module, in place of its own: it asks `run` what its row consists of."""

    def __init__(self, module: Any, config: Any, run: RowForward) -> None:
        """Take over the `forward` of `module`."""
        self.layer = int(module.layer_idx)
        self._forward = module.forward
        self._run = run
        template = cache_utils.DynamicCache(config=config)
        self._num_layers = max(len(template.layers), self.layer + 1)
        self._num_states = int(getattr(template.layers[self.layer], "number_of_states", 1))

    def __call__(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return the module's output for a row of sequences, or for what else it is given."""
        output = self._run(self.layer, hidden_states, self._run_sequences)
        return self._forward(hidden_states, *args, **kwargs) if output is None else output

    def empty_layer(self) -> LinearAttentionLayer:
        """Return a layer of a cache without states."""
        return cache_utils.LinearAttentionLayer(number_of_states=self._num_states)

    def _run_sequences(self, hidden_BTE: torch.Tensor, states: LinearAttentionLayer | None) -> torch.Tensor:
        if states is None:
            plain_output: torch.Tensor = self._forward(hidden_BTE)
            return plain_output
        layers: list[Any] = [cache_utils.DummyLayer() for _ in range(self._num_layers)]
        layers[self.layer] = states
        output: torch.Tensor = self._forward(hidden_BTE, cache=cache_utils.Cache(layers=layers))
        return output


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
