"""States of slots: what layers without keys and values carry from a sequence's tokens to its next one."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tandem.common.attention import stateful
from tandem.rollout.engines.attention import AttentionStep, KeyValueCache

_StateKey = tuple[int, str, int]
"""Layer, kind of state (``conv`` or ``recurrent``), and number within the layer."""


class StatefulCache(KeyValueCache):
    """Keys and values of slots, and the states ``[S, ...]`` of layers that carry one.

    The memory of a state is allocated when a prompt first leaves one, in its own shape.
    """

    def __init__(self, num_slots: int, max_length: int) -> None:
        super().__init__(num_slots, max_length)
        self.states: dict[_StateKey, torch.Tensor] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of memory taken so far."""
        return super().num_bytes + sum(state.nbytes for state in self.states.values())

    @property
    def stateful_layers(self) -> set[int]:
        """Layers that have left a state."""
        return {layer for layer, _, _ in self.states}

    def move(self, source_M: NDArray[np.int64], destination_M: NDArray[np.int64], length: int) -> None:
        """Copy keys, values and states of each source slot to its destination slot."""
        super().move(source_M, destination_M, length)
        for state in self.states.values():
            source_index_M = torch.from_numpy(source_M).to(state.device)
            state[torch.from_numpy(destination_M).to(state.device)] = state[source_index_M]

    def release(self) -> None:
        """Give all memory back."""
        super().release()
        self.states.clear()

    def keep(self, layer: int, first_slot: int, num_slots: int, kind: tuple[str, int], state_1: torch.Tensor) -> None:
        """Have slots start from the state ``[1, ...]`` that their prompt left."""
        key = layer, *kind
        if key not in self.states:
            self.states[key] = torch.zeros(
                (self._num_slots, *state_1.shape[1:]), dtype=state_1.dtype, device=state_1.device
            )
        self.states[key][first_slot : first_slot + num_slots] = state_1

    def running(self, layer: int, num_running: int) -> dict[tuple[str, int], torch.Tensor]:
        """Return views of the states of a layer's running slots, by kind and number."""
        return {(kind, number): state[:num_running] for (of, kind, number), state in self.states.items() if of == layer}


class _SteppedModel:
    """A model whose stateful modules run each sequence of an `AttentionStep` apart."""

    def __init__(self, model: Any) -> None:
        self._step: AttentionStep | None = None
        limit_time_steps(model)
        stateful.replace_forward(model, self._run_row)
        model.register_forward_pre_hook(self._note_step, with_kwargs=True)

    def _note_step(self, model: Any, args: Any, kwargs: dict[str, Any]) -> None:
        self._step = kwargs.get("slot_step")

    def _run_row(self, module: stateful.StatefulModule, hidden_1NE: torch.Tensor) -> torch.Tensor:
        """Run the running slots' new tokens as one batch, each from its slot's state, then each prompt from none."""
        step = self._step
        assert step is not None, "the engine gives one to every forward pass"
        assert isinstance(step.cache, StatefulCache), "see `make_cache`"
        num, outputs = step.num_running, []
        if num:
            states = module.make_layer()
            stateful.put_states(states, step.cache.running(module.layer, num))
            outputs.append(module.run_apart(hidden_1NE[0, :num, None], states)[:, 0])
        for prompt in step.prompts:
            states = module.make_layer()
            outputs.append(module.run_apart(hidden_1NE[:, prompt.start : prompt.start + prompt.length], states)[0])
            for kind, state_1 in stateful.take_states(states):
                step.cache.keep(module.layer, prompt.first_slot, prompt.num_slots, kind, state_1)
        return torch.cat(outputs)[None]


def limit_time_steps(model: Any) -> None:
    """Have the state-space modules of a model limit their time steps in passes over single tokens, too."""
    for module in stateful.find_stateful_modules(model).values():
        _limit_time_steps(module)


def _limit_time_steps(module: Any) -> None:
    """Have a state-space module limit its time steps also where it makes a single token.

    Transformers 5.24 limits them (``time_step_limit``) only in a pass over several tokens, as trainers make it. A step
    is ``softplus(dt + dt_bias)``, and ``dt`` is the end of what ``in_proj`` gives, so both can be limited alike.
    """
    low, high = getattr(module, "time_step_limit", (0.0, math.inf))
    if low <= 0 and high == math.inf:
        return

    def limit(in_proj: torch.nn.Module, inputs: Any, output_BTP: torch.Tensor) -> torch.Tensor:
        bias_H = module.dt_bias.to(output_BTP.dtype)
        rest_BTP, steps_BTH = output_BTP[..., : -len(bias_H)], output_BTP[..., -len(bias_H) :]
        least_H = None if low <= 0 else _inverse_of_softplus(low) - bias_H
        most_H = None if high == math.inf else _inverse_of_softplus(high) - bias_H
        return torch.cat((rest_BTP, steps_BTH.clamp(least_H, most_H)), dim=-1)

    module.in_proj.register_forward_hook(limit)


def _inverse_of_softplus(value: float) -> float:
    return value + math.log(-math.expm1(-value))


def make_cache(model: Any, num_slots: int, max_length: int) -> KeyValueCache:
    """Return the cache of a model's slots; have its stateful modules, if it has some, use the states in it."""
    own_forward = vars(model).get("forward")
    if own_forward is not None:  # `tandem.rollout.engines.own_caches`
        cache: KeyValueCache = own_forward.make_cache(num_slots, max_length)
        return cache
    if not stateful.find_stateful_modules(model):
        return KeyValueCache(num_slots, max_length)
    if not stateful.is_replaced(model):
        _SteppedModel(model)
    return StatefulCache(num_slots, max_length)
