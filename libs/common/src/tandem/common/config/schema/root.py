"""The whole configuration."""

from __future__ import annotations

from typing import Literal

import msgspec

from tandem.common.config.schema.algorithms import Dpo, Sft
from tandem.common.config.schema.base import NonEmptyStr, Section
from tandem.common.config.schema.data import Data, Environment
from tandem.common.config.schema.grpo import Grpo
from tandem.common.config.schema.loss import LossFn
from tandem.common.config.schema.policy import Policy
from tandem.common.config.schema.run import Checkpointing, Cluster, Logger, Refit


class Config(Section, frozen=True, kw_only=True):
    """The whole configuration of a run, resolved: every default filled in, every interpolation replaced."""

    algorithm: Literal["grpo", "sft", "dpo"]
    """New. What the run does."""
    prerequisite: NonEmptyStr | None = None
    """New. Configuration of a run that makes `policy.model_name`; it runs first, unless that folder exists. Relative
    to the file it is written in, absolute once loaded."""
    grpo: Grpo = Grpo()
    sft: Sft = Sft()
    dpo: Dpo = Dpo()
    loss_fn: LossFn = LossFn()
    policy: Policy
    data: Data
    env: dict[str, Environment] = msgspec.field(default_factory=dict)
    """Ways to score samples, by name."""
    checkpointing: Checkpointing
    logger: Logger = Logger()
    cluster: Cluster
    refit: Refit = Refit()

    @property
    def data_parallel_size(self) -> int:
        """Shares that a global batch is cut into: trainers that see different sequences."""
        return self.cluster.trainers // self.policy.model_parallel_size

    @property
    def takes_turns(self) -> bool:
        """Whether training and generation share their devices, so that each gives up what only it needs while the other
        works."""
        return self.algorithm == "grpo" and self.policy.generation.colocated.enabled

    @property
    def sequences_per_sample(self) -> int:
        """Sequences that one unit of the batch sizes stands for: of a pair of DPO both responses, the chosen first."""
        return 2 if self.algorithm == "dpo" else 1

    @property
    def needs_reference(self) -> bool:
        """Whether the loss compares the policy with the model it started from."""
        return self.algorithm == "dpo" or (self.algorithm == "grpo" and self.loss_fn.reference_policy_kl_penalty > 0)

    @property
    def algorithm_section(self) -> Grpo | Sft | Dpo:
        """The section of the algorithm in use; all of them have `seed`, `max_num_steps`, `val_period` and
        `val_at_start`."""
        match self.algorithm:
            case "grpo":
                return self.grpo
            case "sft":
                return self.sft
            case "dpo":
                return self.dpo
