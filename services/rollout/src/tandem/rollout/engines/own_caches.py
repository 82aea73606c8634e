"""Models whose attention or cache is of their own: sequences run apart, with Transformers' caches.

Slots take a model that attends through the attention interface. Any other model that generates with a cache runs here:
sequences of one length that joined together are a batch of its forward pass, with the cache that it makes itself, as in
its ``generate``. A step has one such pass for each batch, and a prompt is computed once for all of its samples. So this
is right for every architecture, and slower than slots by the number of batches.

Shapes: ``B`` sequences of a batch, ``T`` new tokens, ``N`` tokens of a step, ``K`` tokens whose logits are returned.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, TypeAlias

import numpy as np
import torch
import transformers
from numpy.typing import NDArray

from tandem.common.attention import stateful
from tandem.common.errors import ModelError
from tandem.rollout.engines.attention import AttentionStep, KeyValueCache, SlotPrompt
from tandem.rollout.engines.states import limit_time_steps

_Slots: TypeAlias = NDArray[np.int64]
BatchAxes: TypeAlias = dict[stateful.CachePath, int | None]
"""The axis of a cache's tensors that counts sequences, None for none."""


class SequenceBatch:
    """Sequences of one length, and the cache of Transformers that holds what came before."""

    def __init__(self, slot_B: _Slots, axes: BatchAxes) -> None:
        """Begin with no tokens of the sequences in these slots."""
        self.slot_B = slot_B
        self.length = 0
        self.cache: Any = None
        self._axes = axes

    def select(self, row_B: NDArray[np.int64], slot_B: _Slots) -> None:
        """Keep these rows of the cache, in this order, for the sequences in these slots."""
        size = len(self.slot_B)
        if len(row_B) and not np.array_equal(row_B, np.arange(size)):
            self.cache = _RowSelection(torch.from_numpy(row_B), size, self._axes).apply(self.cache, ())
        self.slot_B = slot_B


class BatchCache(KeyValueCache):
    """The batches of the running slots."""

    def __init__(self, num_slots: int, max_length: int, axes: BatchAxes) -> None:
        super().__init__(num_slots, max_length)
        self.axes = axes
        self.batches: list[SequenceBatch] = []

    @property
    def num_bytes(self) -> int:
        """Bytes of memory taken so far."""
        return sum(tensor.nbytes for batch in self.batches for tensor in stateful.find_tensors(batch.cache).values())

    def move(self, source_M: _Slots, destination_M: _Slots, length: int) -> None:
        """Have each source slot be called by its destination slot, whose own sequence has ended."""
        moved = dict(zip(source_M.tolist(), destination_M.tolist(), strict=True))
        self._rename(lambda slot: moved.get(slot, None if slot in destination_M else slot))

    def release(self) -> None:
        """Give all memory back."""
        self.batches.clear()

    def drop_from(self, first_slot: int) -> None:
        """Drop the sequences of this slot and the ones above, which have ended."""
        self._rename(lambda slot: slot if slot < first_slot else None)

    def _rename(self, name_of: Callable[[int], int | None]) -> None:
        """Give slots other names; drop those without one."""
        for batch in self.batches:
            names = [name_of(slot) for slot in batch.slot_B.tolist()]
            row_B = np.array([row for row, name in enumerate(names) if name is not None], np.int64)
            batch.select(row_B, np.array([name for name in names if name is not None], np.int64))
        self.batches = [batch for batch in self.batches if len(batch.slot_B)]


class BatchedForward:
    """The forward pass of a model over a step's tokens, batch by batch, in place of its own."""

    def __init__(self, model: Any) -> None:
        """Stand for the model's `forward`. Raises `ModelError` if that takes no cache."""
        self._forward = model.forward
        self._parameters = inspect.signature(model.forward).parameters
        names = [name for name in stateful.CACHE_NAMES if name in self._parameters]
        if not names:
            raise ModelError("its forward pass takes no cache")
        self._cache_name = names[0]
        self._device = model.device
        self._axes: BatchAxes | None = None

    def make_cache(self, num_slots: int, max_length: int) -> BatchCache:
        """Return the cache of `num_slots` slots. The first time, learn which axes of its tensors count sequences."""
        if self._axes is None:
            self._axes = self._learn_axes()
        return BatchCache(num_slots, max_length, self._axes)

    def _learn_axes(self) -> BatchAxes:
        """Run two sequences, and three; the axis that differs counts them."""
        shapes: list[dict[stateful.CachePath, torch.Size]] = []
        for size in (2, 3):
            batch = SequenceBatch(np.arange(size), {})
            with torch.inference_mode():
                self._run(batch, torch.zeros((size, 2), dtype=torch.int64, device=self._device))
            shapes.append({path: tensor.shape for path, tensor in stateful.find_tensors(batch.cache).items()})
        axes: BatchAxes = {}
        for path in shapes[0].keys() & shapes[1].keys():
            sizes = zip(shapes[0][path], shapes[1][path], strict=True)
            axes[path] = next((axis for axis, (two, three) in enumerate(sizes) if two != three), None)
        return axes

    def __call__(self, *, input_ids: torch.Tensor, slot_step: AttentionStep, **kwargs: Any) -> Any:
        """Return the logits ``[1, K, V]`` of every running slot's token and of the last one of every prompt."""
        step, cache = slot_step, slot_step.cache
        assert isinstance(cache, BatchCache), "see `make_cache`"
        tokens_N = input_ids[0]
        cache.drop_from(min((prompt.first_slot for prompt in step.prompts), default=step.num_running))
        rows: dict[int, torch.Tensor] = {}
        for batch in cache.batches:
            slot_B = torch.from_numpy(batch.slot_B).to(tokens_N.device)
            logits_BV = self._run(batch, tokens_N[slot_B][:, None])
            rows |= dict(zip(batch.slot_B.tolist(), logits_BV, strict=True))
        lengths = sorted({prompt.length for prompt in step.prompts})
        for length in lengths:
            prompts = [prompt for prompt in step.prompts if prompt.length == length]
            tokens_BT = torch.stack([tokens_N[prompt.start : prompt.start + length] for prompt in prompts])
            batch = SequenceBatch(np.array([prompt.first_slot for prompt in prompts], np.int64), cache.axes)
            logits_BV = self._run(batch, tokens_BT)
            rows |= dict(zip(batch.slot_B.tolist(), logits_BV, strict=True))
            _share_prompts(batch, prompts)
            cache.batches.append(batch)
        order = [*range(step.num_running), *(prompt.first_slot for prompt in step.prompts)]
        return SimpleNamespace(logits=torch.stack([rows[slot] for slot in order])[None])

    @torch.inference_mode()
    def compute_prompt(self, token_T: NDArray[np.int64], place_K: torch.Tensor) -> torch.Tensor:
        """Return the logits ``[K, V]`` after these tokens of a prompt; it joins no batch."""
        place_K = place_K.to(self._device)
        accepted = self._accepted(
            attention_mask=torch.ones((1, len(token_T)), dtype=torch.int64, device=self._device),
            position_ids=torch.arange(len(token_T), device=self._device)[None],
            logits_to_keep=place_K,
        )
        input_ids = torch.from_numpy(token_T)[None].to(self._device)
        logits_TV: torch.Tensor = self._forward(input_ids=input_ids, use_cache=False, **accepted).logits[0]
        return logits_TV if "logits_to_keep" in accepted else logits_TV[place_K]

    def _accepted(self, **inputs: Any) -> dict[str, Any]:
        """Return those inputs that the model's forward pass takes."""
        return {name: value for name, value in inputs.items() if name in self._parameters}

    def _run(self, batch: SequenceBatch, tokens_BT: torch.Tensor) -> torch.Tensor:
        """Return the logits ``[B, V]`` of the last tokens, and leave what they carry on in the batch's cache."""
        size, num_tokens = tokens_BT.shape
        length = batch.length + num_tokens
        accepted = self._accepted(
            attention_mask=torch.ones((size, length), dtype=torch.int64, device=tokens_BT.device),
            position_ids=torch.arange(batch.length, length, device=tokens_BT.device).expand(size, -1),
            logits_to_keep=1,
        )
        output = self._forward(input_ids=tokens_BT, use_cache=True, **{self._cache_name: batch.cache}, **accepted)
        batch.cache, batch.length = output.get(self._cache_name), length
        if batch.cache is None:
            raise ModelError("its forward pass returns no cache")
        logits_BV: torch.Tensor = output.logits[:, -1]
        return logits_BV


def run_apart(model: Any) -> None:
    """Have a model run sequences with caches of its own. Raises `ModelError` if it has none."""
    if stateful.is_replaced(model):
        stateful.restore_forward(model)
    else:
        limit_time_steps(model)
    for module in model.modules():  # Transformers' own setter refuses models whose attention is no interface
        if isinstance(module, transformers.PreTrainedModel):
            module.config._attn_implementation = "sdpa" if model._supports_sdpa else "eager"
    model.forward = BatchedForward(model)


def _share_prompts(batch: SequenceBatch, prompts: list[SlotPrompt]) -> None:
    """Give each prompt's row of a batch to all slots that start from it."""
    row_B = np.repeat(np.arange(len(prompts)), [prompt.num_slots for prompt in prompts])
    slots = [range(prompt.first_slot, prompt.first_slot + prompt.num_slots) for prompt in prompts]
    batch.select(row_B, np.array([*itertools.chain(*slots)], np.int64))


class _RowSelection:
    """A selection of sequences in all tensors of a cache."""

    def __init__(self, row_B: torch.Tensor, size: int, axes: BatchAxes) -> None:
        """Take these rows of `size`."""
        self._row_B = row_B
        self._size = size
        self._axes = axes
        self._visited: set[int] = set()

    def apply(self, value: Any, path: stateful.CachePath) -> Any:
        """Return a part of a cache with the selected rows. Objects are changed in place."""
        if isinstance(value, torch.Tensor):
            # A tensor that a cache of few tokens lacks has its sequences first, as all but positions have.
            is_batch = value.ndim > 1 and value.shape[0] == self._size
            axis = self._axes.get(path, 0 if is_batch else None)
            return value if axis is None else value.index_select(axis, self._row_B.to(value.device))
        if isinstance(value, list | tuple):
            return type(value)(self.apply(each, (*path, index)) for index, each in enumerate(value))
        if isinstance(value, dict):
            return {key: self.apply(each, (*path, key)) for key, each in value.items()}
        if stateful.has_parts(value) and id(value) not in self._visited:
            self._visited.add(id(value))
            vars(value).update({name: self.apply(each, (*path, name)) for name, each in vars(value).items()})
        return value
