"""No tensor of a training step is as large as all logits of its tokens, or as all pairs of them.

Torch is asked about each tensor that it makes, in the forward and in the backward pass.

Shapes: ``T`` tokens of a sequence, ``V`` tokens of the vocabulary.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from tandem.config import Config
from tandem.samples.batch import SampleBatch
from tandem.trainer import scoring
from tests.harness.trainers import megatron_harness as megatron
from tests.harness.trainers.masks_harness import masked
from tests.harness.trainers.trainer_harness import make_config, make_model, run_ranks, train_on

pytestmark = pytest.mark.usefixtures("rank_server")

LENGTH = 2048
CHARACTERS = "".join(map(chr, range(0x4E00, 0x4E00 + 2000)))
LOGITS = 2**17
"""That may exist at once."""
LARGEST = LENGTH * len(CHARACTERS) // 4
"""Elements that no tensor has: a quarter of all logits, and of all pairs of tokens."""
SIZES: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "max_position_embeddings": LENGTH,
}
MEGATRON = {"megatron_cfg": {"enabled": True, "optimizer": megatron.OPTIMIZER}}
PACKED = {"sequence_packing": {"enabled": True, "train_mb_tokens": LENGTH, "logprob_mb_tokens": LENGTH}}
RECOMPUTED = {"activation_checkpointing_enabled": True}
FEATURES: dict[str, dict[str, Any]] = {
    "sft": {"algorithm": "sft", **PACKED},
    "recomputed": {"algorithm": "sft", **PACKED, **RECOMPUTED},
    "padded": {"algorithm": "sft"},
    "penalty and entropy": {"loss": {"reference_policy_kl_penalty": 0.1, "entropy_coef": 0.01}, **PACKED},
    "masks": {"generation": {"top_k": 2}, "loss": {"reference_policy_kl_penalty": 0.1}, **PACKED},
    "distillation": {"algorithm": "distillation", "topk": 8, "loss": {"zero_outside_topk": True}, **PACKED},
}
ATTENTION: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 64},
    "gpt_oss": {"sliding_window": 64},
}
"""Models with attention that has a mask, or sinks, for which torch has no kernel."""


class TensorSizes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The elements of the largest tensor that an operation has made, and its name."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.largest = (0, "")

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and look at what it returns in memory of its own."""
        result = function(*args, **(kwargs or {}))
        inputs, outputs = (
            [each for each in tree_flatten(values)[0] if isinstance(each, torch.Tensor)]
            for values in ((args, kwargs), result)
        )
        storages = {each.untyped_storage().data_ptr() for each in inputs}
        for tensor in outputs:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in storages:
                size = storage.nbytes() // tensor.element_size()
                self.largest = max(self.largest, (size, f"{function} {tuple(tensor.shape)}"))
        return result


def long_batch() -> SampleBatch:
    """One sequence; all but its first token count."""
    mask_T = np.arange(LENGTH) > 0
    return SampleBatch(
        lengths_S=np.array([LENGTH], dtype=np.int32),
        token_ids_T=np.random.default_rng(0).integers(3, len(CHARACTERS), LENGTH).astype(np.int32),
        loss_mask_T=mask_T,
        generation_logprobs_T=np.where(mask_T, -7.0, 0.0).astype(np.float32),
        advantages_S=np.ones(1, dtype=np.float32),
        rewards_S=np.ones(1, dtype=np.float32),
    )


def find_largest(rank: int, config: Config, batch: SampleBatch) -> tuple[int, str]:
    """Train one step; return the elements of the largest tensor, and what made it."""
    scoring._LOGITS = LOGITS
    backend = megatron.make(config)
    sizes = TensorSizes()
    with sizes:
        train_on(backend, batch, config)
    return sizes.largest


def make_long_config(folder: Path, **keys: Any) -> Config:
    return make_config(
        folder,
        max_total_sequence_length=LENGTH,
        train_global_batch_size=1,
        train_micro_batch_size=1,
        grpo={"num_prompts_per_step": 1, "num_generations_per_prompt": 1, "use_leave_one_out_baseline": False},
        **{"algorithm": "grpo", **keys},
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "model", characters=CHARACTERS, **SIZES)


@pytest.mark.parametrize("backend", ["dtensor", "megatron"])
@pytest.mark.parametrize("feature", FEATURES)
def test_logits_never_all_exist(feature: str, backend: str, model: Path) -> None:
    keys = dict(FEATURES[feature])
    batch = long_batch()
    if feature == "masks":
        batch = masked(batch, len(CHARACTERS) + 3)
    if feature == "distillation":
        keys["teacher"] = {"model_name": str(model)}
    config = make_long_config(model, **keys, **(MEGATRON if backend == "megatron" else {}))
    ((largest, name),) = run_ranks(1, find_largest, config, batch)
    assert LOGITS / 2 < largest < LARGEST, name


@pytest.mark.parametrize("is_packed", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("architecture", ATTENTION)
def test_attention_has_no_matrix_of_all_pairs(architecture: str, is_packed: bool, tmp_path: Path) -> None:
    sizes = SIZES | ATTENTION[architecture]
    folder = make_model(tmp_path / "model", architecture, characters=CHARACTERS, **sizes)
    config = make_long_config(folder, algorithm="sft", **(PACKED if is_packed else {}))
    ((largest, name),) = run_ranks(1, find_largest, config, long_batch())
    assert largest < LARGEST, name
