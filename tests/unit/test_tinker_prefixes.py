"""Common prefixes of a client's sequences: what their groups save, beside all groups that there are."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch

from tandem.config import build_config
from tandem.samples.batch import SampleBatch
from tandem.samples.batch_sharding import NO_PROMPT
from tandem.serving.tinker.prefixes import prefixes_of
from tandem.trainer.backend import ModelReplicas
from tandem.trainer.batching.shard import BatchShard


def partitions(rows: list[int]) -> Iterator[list[list[int]]]:
    """Yield all ways to divide rows into groups."""
    if not rows:
        yield []
        return
    for rest in partitions(rows[1:]):
        yield [rows[:1], *rest]
        for place, group in enumerate(rest):
            yield [*rest[:place], [rows[0], *group], *rest[place + 1 :]]


def saved(sequences: Sequence[Sequence[int]], group: Sequence[int]) -> int:
    """Return the tokens that a group of rows needs not compute: it keeps the last token of each sequence apart."""
    texts = [sequences[row][:-1] for row in group]
    same = itertools.takewhile(lambda tokens: len(set(tokens)) == 1, zip(*texts, strict=False))
    return (len(group) - 1) * len([*same])


@pytest.mark.parametrize("seed", range(40))
def test_other_groups_save_hardly_more(seed: int) -> None:
    rng = np.random.default_rng(seed)
    sequences = [rng.integers(0, 2, rng.integers(1, 9)).tolist() for _ in range(7)]
    found = prefixes_of([np.array(each, dtype=np.int32) for each in sequences])
    total = 0
    for prompt in {*found.prompt_S.tolist()} - {NO_PROMPT}:
        group = np.flatnonzero(found.prompt_S == prompt).tolist()
        (length,) = {*found.prompt_lengths_S[group].tolist()}
        assert (len(group) - 1) * length == saved(sequences, group) > 0
        total += saved(sequences, group)
    assert found.prompt_lengths_S[found.prompt_S == NO_PROMPT].tolist() == [0] * (found.prompt_S == NO_PROMPT).sum()
    best = max(sum(saved(sequences, group) for group in groups) for groups in partitions([*range(7)]))
    assert 0.85 * best <= total <= best


def test_prompts_that_begin_alike_are_told_apart_where_that_saves_more() -> None:
    long, short = list(range(100)), list(range(10))
    prompts = [[*long, 7], [*long, 8], [*long, 7, 1], [*short, 99], [*short, 98], [5]]
    found = prefixes_of([np.array([*prompt, 3], dtype=np.int32) for prompt in prompts])
    assert found.prompt_S.tolist() == [0, 0, 0, 3, 3, NO_PROMPT]
    assert found.prompt_lengths_S.tolist() == [100, 100, 100, 10, 10, 0]


def test_trainers_compute_prefixes_once() -> None:
    lengths_S = np.array([12, 10, 9, 4], dtype=np.int32)
    token_ids = [np.array([*range(8), *range(20, 12 + length)], dtype=np.int32) for length in lengths_S[:3]]
    token_ids.append(np.array([9, 8, 7, 6], dtype=np.int32))
    table = {"lengths_S": lengths_S, "rank_S": np.zeros(4, np.int32), **prefixes_of(token_ids)._asdict()}
    token_ids_T = np.concatenate(token_ids)
    own = SampleBatch(
        **table, token_ids_T=token_ids_T, loss_mask_T=np.concatenate([np.arange(each) > 0 for each in lengths_S])
    )
    model = {"model_name": "model", "max_total_sequence_length": 32, "train_micro_batch_size": 4}
    data = {"dataset_name": "reasoning_gym", "task": "chain_sum"}
    policy = build_config({"grpo": {}, "policy": model, "data": data}).policy
    replicas = ModelReplicas(sizes=(1,), rank=0, size=1, sequence_divisor=1, sum=torch.Tensor.clone)
    shard = BatchShard(policy, SampleBatch(**table), own, replicas, shares_prompts=True)
    (micro_batch,) = shard.laid_out(shard.training(range(4)), torch.device("cpu"))
    assert micro_batch.row is not None
    # Nothing is predicted by the last token of a sequence.
    sequences = [[*range(8), 20, 21, 22], [20], [], [9, 8, 7]]
    assert micro_batch.row.token_ids_1N[0].tolist() == [token for each in sequences for token in each]
    assert len(micro_batch.row.predictor_K) == sum(lengths_S - 1)


def test_many_sequences_of_which_each_begins_with_the_one_before() -> None:
    tokens = np.arange(3000, dtype=np.int32)
    found = prefixes_of([tokens[: 1 + row] for row in range(3000)])
    assert found.prompt_lengths_S.max() == 1500, "half of them, with half of the tokens"
