"""The matrix products that a step cannot do without, and the seconds that torch takes for them alone: a bound.

Each linear layer, the output layer included, has one product forward and two backward: the gradients of its inputs and
of its weights. Causal attention has two forward and four backward, over the keys that queries may see, which are half.
Products are those of the step in shape and number, each into memory of its own that exists beforehand, and operands are
laid out as a step's are. Those of like shapes share their operands, which makes them no slower: it stays a bound.

With fewer threads, or on a processor with narrower vectors, the bound is another. So it is measured in the turns of
what it bounds, never taken from elsewhere.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch


class Product(NamedTuple):
    """A batch of products of a left side of `rows` x `inner` with a right side of `inner` x `columns`."""

    batch: int
    rows: int
    inner: int
    columns: int
    left_is_transposed: bool = False
    right_is_transposed: bool = False

    @property
    def num_operations(self) -> int:
        return 2 * self.batch * self.rows * self.inner * self.columns


Products = Counter[Product]


def linear(num_rows: int, num_in: int, num_out: int, *, trains: bool) -> Iterator[Product]:
    """Yield the products of a linear layer, whose weights are `num_out` x `num_in`."""
    yield Product(1, num_rows, num_in, num_out, right_is_transposed=True)
    if trains:
        yield Product(1, num_rows, num_out, num_in)  # the gradients of the inputs
        yield Product(1, num_out, num_rows, num_in, left_is_transposed=True)  # those of the weights


def attention(batch: int, queries: int, keys: int, head: int, *, trains: bool) -> Iterator[Product]:
    """Yield the products of attention; `batch` counts heads of all sequences."""
    yield Product(batch, queries, head, keys, right_is_transposed=True)  # scores
    yield Product(batch, queries, keys, head)  # outputs
    if trains:
        yield Product(batch, queries, head, keys, right_is_transposed=True)  # of the probabilities
        yield Product(batch, keys, queries, head, left_is_transposed=True)  # of the values
        yield Product(batch, queries, keys, head)  # of the queries
        yield Product(batch, keys, queries, head, left_is_transposed=True)  # of the keys


def products_of(
    model: Mapping[str, Any],
    *,
    rows: int,
    outputs: int,
    sequences: int,
    queries: int,
    keys: int,
    trains: bool,
) -> Products:
    """Return the products of a pass over `rows` tokens, of which `outputs` need their logits.

    `model` has the keys of Transformers' settings. Each of the sequences has so many `queries`, which see `keys` each
    in the mean: about half of the length where all are computed at once.
    """
    hidden, mlp, head = model["hidden_size"], model["intermediate_size"], model["head_dim"]
    heads, kv_heads = model["num_attention_heads"], model["num_key_value_heads"]
    layers = [(hidden, heads * head), (hidden, kv_heads * head), (hidden, kv_heads * head), (heads * head, hidden)]
    layers += [(hidden, mlp), (hidden, mlp), (mlp, hidden)]
    counted: Products = Counter()
    for num_in, num_out in layers:
        counted.update(linear(rows, num_in, num_out, trains=trains))
    counted.update(attention(sequences * heads, queries, keys, head, trains=trains))
    counted = Counter({product: times * model["num_hidden_layers"] for product, times in counted.items()})
    counted.update(linear(outputs, hidden, model["vocab_size"], trains=trains))
    return counted


def seen(length: int) -> int:
    """Return how many keys the queries of a sequence see, in the mean."""
    return math.ceil((length + 1) / 2)


class MatrixProducts:
    """Products with their operands in memory."""

    def __init__(self, products: Products) -> None:
        generator = torch.Generator().manual_seed(0)
        self.num_operations = sum(product.num_operations * times for product, times in products.items())
        self._products = [(*_operands(product, generator), times) for product, times in products.items()]

    def run(self) -> None:
        """Compute them all with as many threads as torch has now."""
        for left, right, out, times in self._products:
            multiply = torch.mm if left.dim() == 2 else torch.bmm
            for _ in range(times):
                multiply(left, right, out=out)


def _operands(product: Product, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return both sides and the result."""
    left = _matrix(product.batch, product.rows, product.inner, product.left_is_transposed, generator)
    right = _matrix(product.batch, product.inner, product.columns, product.right_is_transposed, generator)
    out = torch.empty(product.batch, product.rows, product.columns)
    return (left, right, out) if product.batch > 1 else (left[0], right[0], out[0])


def _matrix(batch: int, rows: int, columns: int, is_transposed: bool, generator: torch.Generator) -> torch.Tensor:
    if is_transposed:
        return torch.randn(batch, columns, rows, generator=generator).transpose(1, 2)
    return torch.randn(batch, rows, columns, generator=generator)


def capability() -> str:
    """Return the widest vectors that torch uses on this processor: AVX2 or AVX512."""
    return torch.backends.cpu.get_cpu_capability()
