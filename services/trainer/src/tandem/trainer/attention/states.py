"""Rows of several sequences in layers that carry a state from token to token.

In a packed row each sequence runs apart, from an empty state. With shared prompts each sample runs with its prompt, as
one batch of all samples: such a layer computes a prompt once for each of its samples, all other layers once.
"""

from __future__ import annotations

from typing import Any

import torch

from tandem.common.attention.stateful import StatefulModule, find_stateful_modules, is_replaced, replace_forward
from tandem.trainer.micro_batches import TokenRow


class _RowModel:
    """A model whose stateful modules run each sequence of a `TokenRow` apart."""

    def __init__(self, model: Any) -> None:
        self._row: TokenRow | None = None
        self._is_within = False
        replace_forward(model, self._run_row)
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

    def _run_row(self, module: StatefulModule, hidden_BTE: torch.Tensor) -> torch.Tensor | None:
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
    if find_stateful_modules(model) and not is_replaced(model):
        _RowModel(model)
