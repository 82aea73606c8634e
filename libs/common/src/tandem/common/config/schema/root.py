"""The whole configuration."""

from __future__ import annotations

import msgspec

from tandem.common import columns
from tandem.common.algorithms import ALGORITHMS, Algorithm, AlgorithmName
from tandem.common.config.schema.algorithms import Dpo, Rm, Sft
from tandem.common.config.schema.base import NonEmptyStr, Section
from tandem.common.config.schema.data import Data, Environment
from tandem.common.config.schema.distillation import Distillation, OnPolicyDistillation, Teacher
from tandem.common.config.schema.evaluation import Eval
from tandem.common.config.schema.grpo import Grpo, Rollouts
from tandem.common.config.schema.loss import LossFn
from tandem.common.config.schema.policy import Model, Policy
from tandem.common.config.schema.ppo import Ppo, Value, ValueLossFn
from tandem.common.config.schema.run import Checkpointing, Cluster, DataPlane, Logger, Refit, Replay

MODELS = ("policy", "value", "teacher")
"""Sections that hold a model, each with `policy`'s keys."""


class Config(Section, frozen=True, kw_only=True):
    """The whole configuration of a run, resolved: every default filled in, every interpolation replaced."""

    algorithm: AlgorithmName
    """New. What the run does."""
    prerequisite: NonEmptyStr | None = None
    """New. Configuration of a run that makes `policy.model_name`, or the reward model that scores samples; it runs
    first, unless those folders exist. Relative to the file it is written in, absolute once loaded."""
    grpo: Grpo = Grpo()
    ppo: Ppo = Ppo()
    sft: Sft = Sft()
    dpo: Dpo = Dpo()
    rm: Rm = Rm()
    distillation: Distillation = Distillation()
    on_policy_distillation: OnPolicyDistillation | None = None
    """GRPO with a teacher in the place of rewards; null is as `enabled: false`."""
    loss_fn: LossFn = LossFn()
    value_loss_fn: ValueLossFn = ValueLossFn()
    policy: Policy
    value: Value | None
    """The value model of PPO."""
    teacher: Teacher | None = None
    """The teacher of distillation."""
    teachers: tuple[Teacher, ...] | None = None
    """Several teachers of distillation, in the place of one."""
    data: Data
    env: dict[str, Environment] = msgspec.field(default_factory=dict)
    """Ways to score samples, by name."""
    checkpointing: Checkpointing
    logger: Logger = Logger()
    cluster: Cluster
    refit: Refit = Refit()
    data_plane: DataPlane | None = None
    """Accepted: NeMo-RL's own way for samples to travel."""
    replay: Replay | None = None
    """New. Null: the run makes its own samples."""
    eval: Eval = Eval()

    @property
    def data_parallel_size(self) -> int:
        """Shares that a global batch is cut into: trainers that see different sequences."""
        return self.cluster.trainers // self.policy.model_parallel_size

    @property
    def declaration(self) -> Algorithm:
        """What the algorithm in use needs."""
        return ALGORITHMS[self.algorithm]

    @property
    def evaluates(self) -> bool:
        """Whether the run takes no step, and only validates the model that it begins with."""
        return self.algorithm_section.max_num_steps == 0

    @property
    def has_validation(self) -> bool:
        """Whether there is anything to validate on."""
        return self.data.num_validation != 0

    @property
    def generates(self) -> bool:
        """Whether the run has engines, which make what it trains on, and not the recorded samples of another run."""
        return self.declaration.rolls_out and self.replay is None

    @property
    def environments(self) -> tuple[str, ...]:
        """Entries of `env` that score samples of the run; the first is that of `data.environment`."""
        if not self.declaration.rolls_out:
            return ()
        of_sets = (each.env_name for each in (*self.data.train, *self.data.validation))
        return tuple(dict.fromkeys(filter(None, (self.data.environment, *of_sets))))

    @property
    def reward_models(self) -> dict[str, Environment]:
        """Those of them that are reward models, if anything is generated that they score."""
        entries = {name: self.env.get(name) for name in self.environments} if self.generates else {}
        return {name: entry for name, entry in entries.items() if entry is not None and entry.is_reward_model}

    @property
    def environment_keys(self) -> str:
        """Their keys, as a message to the user says where to look."""
        return ", ".join(f"env.{name}" for name in self.environments)

    def of_environment(self, name: str) -> Config:
        """Return the configuration as though this entry of `env` scored all samples."""
        return msgspec.structs.replace(self, data=msgspec.structs.replace(self.data, environment=name))

    @property
    def agent(self) -> Environment | None:
        """The program outside that plays the episodes of the run, if one does."""
        environment = self.env.get(self.data.environment or "") if self.declaration.rolls_out else None
        return environment if environment is not None and environment.is_agent else None

    @property
    def takes_turns(self) -> bool:
        """Whether training and generation share their devices, so that each gives up what only it needs while the other
        works."""
        return self.generates and self.policy.generation.colocated.enabled

    @property
    def sequences_per_sample(self) -> int:
        """Sequences that one unit of the batch sizes stands for."""
        return self.declaration.sequences_per_unit

    @property
    def needs_reference(self) -> bool:
        """Whether the loss compares the policy with the model it started from."""
        return "reference" in self.declaration.holds(self)

    def settings_of(self, model: columns.Model) -> Model:
        """Return the section of a model that trainers hold; the reference is the policy before any training."""
        if model != "value":
            return self.policy
        assert self.value is not None, "the algorithm declares that it holds one"
        return self.value

    @property
    def algorithm_section(self) -> Rollouts | Sft | Dpo | Rm:
        """The section of the algorithm in use; all of them have `seed`, `max_num_steps`, `val_period` and
        `val_at_start`."""
        section: Rollouts | Sft | Dpo | Rm = getattr(self, self.algorithm)
        return section

    @property
    def rollout_section(self) -> Rollouts:
        """The same, of an algorithm that rolls out."""
        assert self.declaration.rolls_out, f"{self.algorithm} does not roll out"
        section: Rollouts = getattr(self, self.algorithm)
        return section

    @property
    def largest_logprob_error(self) -> float | None:
        """The multiplicative error of probabilities above which a sequence is left out of the loss, if any is."""
        return self.rollout_section.largest_logprob_error if self.declaration.rolls_out else None

    @property
    def max_trajectory_age_steps(self) -> int:
        """Training steps that the weights a sample is begun with may be behind; 0 is synchronous training."""
        asynchronous = self.rollout_section.asynchronous if self.declaration.rolls_out else None
        return asynchronous.max_trajectory_age_steps if asynchronous is not None and asynchronous.enabled else 0

    @property
    def updates_in_flight(self) -> bool:
        """Whether engines take weights while they generate, between two tokens."""
        return self.max_trajectory_age_steps > 0 and self.rollout_section.asynchronous.in_flight_weight_updates

    @property
    def keeps_copy(self) -> bool:
        """Whether trainers keep a copy of their weights for engines to read while they step."""
        if not self.generates or not self.max_trajectory_age_steps:
            return False
        if self.refit.keep_copy != "auto":
            return self.refit.keep_copy == "on"
        # A step waits for the samples that engines finish with weights one step old anyway; and to other nodes trainers
        # have to send, which they do not do while they step.
        return self.max_trajectory_age_steps > 1 and not self.updates_in_flight and self.cluster.num_nodes == 1

    @property
    def data_set_section(self) -> Sft | Dpo | Rm:
        """The same, of an algorithm over a data set."""
        assert not self.declaration.rolls_out, f"{self.algorithm} rolls out"
        section: Sft | Dpo | Rm = getattr(self, self.algorithm)
        return section

    @property
    def units_per_step(self) -> int:
        """Samples, or whatever else batch sizes count, that a step trains on."""
        if not self.declaration.rolls_out:
            return self.policy.train_global_batch_size
        return self.rollout_section.num_prompts_per_step * self.rollout_section.num_generations_per_prompt

    @property
    def num_optimizer_steps(self) -> int:
        """Optimizer steps of the policy in a step."""
        return self.num_passes * -(-self.units_per_step // self.policy.train_global_batch_size)

    @property
    def num_passes(self) -> int:
        """Times that a step trains on its batch."""
        return self.rollout_section.num_passes if self.declaration.rolls_out else 1

    def trained_in(self, step: int) -> tuple[columns.Model, ...]:
        """Return the models that a step trains, in order: all, but in the first steps of some runs not the policy."""
        is_early = self.declaration.rolls_out and step <= self.rollout_section.num_steps_without_policy
        return tuple(model for model in self.declaration.trains if model != "policy" or not is_early)

    @property
    def scoring_temperature(self) -> float:
        """What logits are divided by before log-probabilities are taken of them: what samples are drawn at.

        A temperature of zero is greedy decoding, whose distribution has no gradient.
        """
        return (self.policy.generation.temperature or 1.0) if self.declaration.rolls_out else 1.0
