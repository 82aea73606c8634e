"""Keys of an environment that scores with a reward model: a sequence classifier with one label."""

from __future__ import annotations

from typing import Literal

from tandem.config.schema.base import ConfigSection, NonEmptyStr, NonNegativeInt, PositiveFloat, PositiveInt
from tandem.config.schema.policy import DtensorCfg, RewardModelCfg, TokenizerConfig

REWARD_MODEL = "reward_model"
"""NeMo-RL's environment with these keys; any other environment with a `model_name` is a reward model too."""


class RewardModelResources(ConfigSection, frozen=True, kw_only=True):
    """GPUs reserved for the reward model: the last of the node. On several nodes it shares the engines' GPUs."""

    gpus_per_node: NonNegativeInt = 0
    """GPUs of a single node for reward models only; 0 puts each on the first GPU of its rollout process."""
    num_nodes: PositiveInt | None = None
    """Accepted: every node with rollout processes has a reward model beside each of them."""


class AcceptedSwitch(ConfigSection, frozen=True, kw_only=True):
    """Accepted: a way to make batches in training. Rewards are computed in batches of one shape."""

    enabled: bool = False
    """Whether it is requested."""


class RewardModelKeys(ConfigSection, frozen=True, kw_only=True):
    """Keys of an environment's reward model."""

    enabled: bool = True
    """For a reward model: whether it may be used."""
    model_name: NonEmptyStr | None = None
    """The reward model: folder (relative to the working directory) or Hub name of a Hugging Face sequence classifier
    with one label. Its output is the reward."""
    tokenizer: TokenizerConfig | None = None
    """For a reward model: its tokenizer; the chat template turns prompt and response into text; null means the one
    in its folder."""
    precision: Literal["float32", "bfloat16"] = "bfloat16"
    """For a reward model: element type of its weights and its forward pass."""
    batch_size: PositiveInt = 8
    """For a reward model: conversations in one forward pass. All passes over conversations of similar length have
    the same shape, so that a reward is the same to the bit, whatever is scored with it."""
    max_model_len: PositiveInt | None = None
    """For a reward model: the longest conversation that it scores, in its own tokens; `on_error` decides about
    longer ones. null means the model's number of positions."""
    correct_from: float = 0.0
    """New. For a reward model: lowest reward of a response that counts as solved, for the accuracy."""
    checkpoint_path: NonEmptyStr | None = None
    """For a reward model: a checkpoint of NeMo-RL with weights that replace those of `model_name`."""
    resources: RewardModelResources = RewardModelResources()
    dtensor_cfg: DtensorCfg = DtensorCfg()
    reward_model_cfg: RewardModelCfg = RewardModelCfg(enabled=True)
    dynamic_batching: AcceptedSwitch = AcceptedSwitch()
    sequence_packing: AcceptedSwitch = AcceptedSwitch()
    max_grad_norm: PositiveFloat | None = None
    """Accepted: a reward model is not trained here."""
    offload_optimizer_for_logprob: bool = False
    """Accepted: a reward model has no optimizer here."""
    processor: NonEmptyStr | None = None
    """Accepted: NeMo-RL's function that makes prompts from rows; see `data.processor`."""
