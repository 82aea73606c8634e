"""Keys of an environment that scores with a reward model: a sequence classifier with one label."""

from __future__ import annotations

from typing import Literal

from tandem.config.schema.base import NonEmptyStr, NonNegativeInt, PositiveFloat, PositiveInt, Section
from tandem.config.schema.policy import DtensorCfg, RewardModelCfg, Tokenizer

REWARD_MODEL = "reward_model"
"""The environment of NeMo-RL's with these keys; any other that has a `model_name` is one, too."""


class RewardModelResources(Section, frozen=True, kw_only=True):
    """GPUs that are set aside for the reward model: the last of the node. On several nodes it shares the engines'."""

    gpus_per_node: NonNegativeInt = 0
    """GPUs that only reward models use, of a single node; 0: each is on the first GPU of its rollout process."""
    num_nodes: PositiveInt | None = None
    """Accepted: there is a reward model beside each rollout process, on every node that has one."""


class Switch(Section, frozen=True, kw_only=True):
    """Accepted: a way to make batches in training. Rewards are computed in batches of one shape."""

    enabled: bool = False
    """Whether it is asked for."""


class RewardModelKeys(Section, frozen=True, kw_only=True):
    """What an environment says of its reward model."""

    enabled: bool = True
    """Of a reward model: whether it may be used."""
    model_name: NonEmptyStr | None = None
    """The reward model: folder (relative to the working directory) or Hub name of a Hugging Face sequence classifier
    with one label. Its output is the reward."""
    tokenizer: Tokenizer | None = None
    """Of a reward model; null is the one in its folder. Its chat template makes text of prompt and response."""
    precision: Literal["float32", "bfloat16"] = "bfloat16"
    """Of a reward model: element type of its weights and of its forward pass."""
    batch_size: PositiveInt = 8
    """Of a reward model: conversations of one forward pass. All passes over conversations of like length have the same
    shape, so that a reward is the same, to the bit, whatever is scored with it."""
    max_model_len: PositiveInt | None = None
    """Of a reward model: the longest conversation that it scores, in its own tokens; `on_error` says what becomes of a
    longer one. null: as many as the model has positions."""
    correct_from: float = 0.0
    """New. Of a reward model: the reward from which on a response counts as solved, for the accuracy."""
    checkpoint_path: NonEmptyStr | None = None
    """Of a reward model: a checkpoint of NeMo-RL's, whose weights replace those of `model_name`."""
    resources: RewardModelResources = RewardModelResources()
    dtensor_cfg: DtensorCfg = DtensorCfg()
    reward_model_cfg: RewardModelCfg = RewardModelCfg(enabled=True)
    dynamic_batching: Switch = Switch()
    sequence_packing: Switch = Switch()
    max_grad_norm: PositiveFloat | None = None
    """Accepted: a reward model is not trained here."""
    offload_optimizer_for_logprob: bool = False
    """Accepted: a reward model has no optimizer here."""
    processor: NonEmptyStr | None = None
    """Accepted: the function of NeMo-RL's that makes prompts of rows; see `data.processor`."""
