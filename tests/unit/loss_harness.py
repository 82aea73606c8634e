"""A micro-batch of a few tokens whose loss one can compute by hand."""

from __future__ import annotations

from typing import Any

import msgspec
import torch

from tandem.config.schema import LossFn
from tandem.config.schema.columns import BUILT_IN
from tandem.trainer.losses import Counts
from tandem.trainer.micro_batches import MicroBatch
from tandem.trainer.scores import TokenScores

CPU = torch.device("cpu")
MASK_BT = torch.tensor([[False, True, True, True], [False, False, True, False]])
COUNTS = Counts(tokens=4, sequences=2, positive_tokens=3)


def settings(**changes: Any) -> LossFn:
    return msgspec.structs.replace(LossFn(reference_policy_kl_penalty=0.0), **changes)


def micro_batch(**changes: Any) -> MicroBatch:
    """Four counted tokens in two rows, with every log-probability different."""
    generator = torch.Generator().manual_seed(3)

    def logprobs() -> torch.Tensor:
        return torch.where(MASK_BT, torch.randn(2, 4, generator=generator, dtype=torch.float64) * 0.5 - 1.5, 0.0)

    defaults: dict[str, Any] = {
        "rows": (0, 1),
        "lengths_B": torch.tensor([4, 3]),
        "token_ids_BT": torch.zeros(2, 4, dtype=torch.int64),
        "attention_mask_BT": torch.ones(2, 4, dtype=torch.bool),
        "loss_mask_BT": MASK_BT,
        "generation_logprobs_BT": logprobs(),
        "advantages_BT": torch.tensor([[1.5], [-0.5]], dtype=torch.float64).expand(2, 4),
        "previous_logprobs_BT": logprobs(),
        "reference_logprobs_BT": logprobs(),
        "is_positive_BT": torch.tensor([[True], [False]]).expand(2, 4),
    }
    given = defaults | changes
    columns = {name: given.pop(f"{name}_BT") for name in BUILT_IN if f"{name}_BT" in given}
    columns["rewards"] = given.pop("is_positive_BT").float()
    return MicroBatch(**given, columns={name: values for name, values in columns.items() if values is not None})


CURRENT_BT = torch.where(
    MASK_BT, torch.tensor([[0.0, -1.0, -2.0, -0.3], [0.0, 0.0, -1.7, 0.0]], dtype=torch.float64), 0.0
)
ENTROPY_BT = torch.tensor([[7.0, 0.5, 1.0, 1.5], [7.0, 7.0, 2.0, 7.0]], dtype=torch.float64)
LIKELIEST_BT = torch.tensor([[1.0, 1.0, 0.0, 1.0], [1.0, 1.0, 0.0, 1.0]], dtype=torch.float64)


def scores(logprobs_BT: torch.Tensor) -> TokenScores:
    """Return scores with these log-probabilities."""
    return TokenScores(logprobs_BT, ENTROPY_BT, LIKELIEST_BT)
