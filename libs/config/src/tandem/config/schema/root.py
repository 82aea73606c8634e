"""The whole configuration.

NeMo-RL 0.8's reward penalties, which are only for NeMo Gym's rollouts.
"""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from tandem.config.schema import columns
from tandem.config.schema.algorithms import (
    DistillationConfig,
    DpoConfig,
    EvalConfig,
    OffPolicyDistillation,
    OnPolicyDistillation,
    RewardModelConfig,
    SftConfig,
    TeacherConfig,
)
from tandem.config.schema.base import ConfigSection, NonEmptyStr, cached_method
from tandem.config.schema.data import DataConfig, EnvironmentConfig
from tandem.config.schema.declarations import ALGORITHMS, Algorithm, AlgorithmName
from tandem.config.schema.grpo import GrpoConfig, PpoConfig, RolloutsConfig, ValueConfig, ValueLossFn
from tandem.config.schema.loss import LossFn
from tandem.config.schema.policy import ModelConfig, PolicyConfig
from tandem.config.schema.run import (
    CheckpointingConfig,
    ClusterConfig,
    DataPlane,
    LoggerConfig,
    RefitConfig,
    ReplayConfig,
)


class PenaltyTokenIds(ConfigSection, frozen=True, kw_only=True):
    """Tokens that reward penalties look for."""

    unwanted: tuple[int, ...] | None = None
    """Accepted: tokens that a response should not have."""
    think_open: int | None = None
    """Accepted: token that begins thinking."""
    think_close: int | None = None
    """Accepted: token that ends thinking."""


class RewardPenalties(ConfigSection, frozen=True, kw_only=True):
    """Responses of NeMo Gym's agents whose reward becomes zero. NeMo-RL applies them to no other environment."""

    penalize_duplicated_reasoning: bool = False
    """Accepted: responses that repeat their reasoning."""
    penalize_empty_final_answer: bool = False
    """Accepted: responses without a final answer."""
    penalize_unwanted_tokens: bool = False
    """Accepted: responses with tokens of `token_ids.unwanted`."""
    penalize_malformed_think_tag: bool = False
    """Accepted: responses whose tags of thinking are malformed."""
    token_ids: PenaltyTokenIds | None = None
    """Accepted: tokens that the penalties look for."""


VERSION = r"^(newer|\d+\.\d+(\.\d+)*)$"
"""Form of `nemo_rl_version`."""

MODELS = ("policy", "value", "teacher")
"""Sections of models, each with `policy`'s keys."""


class Config(ConfigSection, frozen=True, kw_only=True):
    """The whole configuration of a run, resolved: every default filled in, every interpolation replaced."""

    algorithm: AlgorithmName
    """New. The algorithm of the run."""
    prerequisite: NonEmptyStr | None = None
    """New. Configuration of an earlier run that makes `policy.model_name`, a teacher, or the reward model that
    scores samples. It runs first, unless those folders exist. Relative to the file it is written in, absolute once
    loaded."""
    nemo_rl_version: Annotated[str, Meta(pattern=VERSION)] | None = None
    """New. Release of NeMo-RL that the file is written for, such as '0.8', or newer. If it is a later one than 0.7,
    keys that no release known here has are ignored, with a notice. A near miss of a known key stays an error, unless
    the same file sets that key too, or neither value would switch anything on."""
    ignored: tuple[str, ...] = ()
    """New. Written by Tandem: notices about keys of the file that the configuration does not keep, those ignored
    because of `nemo_rl_version` above all."""
    grpo: GrpoConfig = GrpoConfig()
    ppo: PpoConfig = PpoConfig()
    sft: SftConfig = SftConfig()
    dpo: DpoConfig = DpoConfig()
    rm: RewardModelConfig = RewardModelConfig()
    distillation: DistillationConfig = DistillationConfig()
    off_policy_distillation: OffPolicyDistillation = OffPolicyDistillation()
    on_policy_distillation: OnPolicyDistillation | None = None
    """GRPO with a teacher instead of rewards; null means `enabled: false`."""
    loss_fn: LossFn = LossFn()
    value_loss_fn: ValueLossFn = ValueLossFn()
    policy: PolicyConfig
    value: ValueConfig | None
    """The value model of PPO."""
    teacher: TeacherConfig | None = None
    """The teacher of distillation."""
    teachers: tuple[TeacherConfig, ...] | None = None
    """Several teachers of distillation, instead of one."""
    data: DataConfig
    reward_penalties: RewardPenalties = RewardPenalties()
    env: dict[str, EnvironmentConfig] = msgspec.field(default_factory=dict)
    """Ways to score samples, by name."""
    checkpointing: CheckpointingConfig
    logger: LoggerConfig = LoggerConfig()
    cluster: ClusterConfig
    refit: RefitConfig = RefitConfig()
    data_plane: DataPlane | None = None
    """Accepted: NeMo-RL's own transport of samples."""
    replay: ReplayConfig | None = None
    """New. The run to replay; null means that the run generates its own samples."""
    eval: EvalConfig = EvalConfig()

    @cached_property
    def data_parallel_size(self) -> int:
        """Data-parallel shards of a global batch: trainers with different sequences."""
        return self.cluster.trainers // self.policy.model_parallel_size

    @cached_property
    def processes_of(self) -> dict[columns.Model, int]:
        """Trainers of each model group: the policy's first, then those of each model with processes of its own."""
        num_by_model: dict[columns.Model, int] = {"policy": self.cluster.trainers}
        for model in self.holds:
            num = 0 if model == "policy" else getattr(self.cluster.processes_of, model)
            if num:
                num_by_model[model] = num
        return num_by_model

    @cached_property
    def num_trainers(self) -> int:
        """Trainers of all model groups."""
        return sum(self.processes_of.values())

    @cached_property
    def declaration(self) -> Algorithm:
        """Declaration of the algorithm in use."""
        return ALGORITHMS[self.algorithm]

    @cached_property
    def evaluates(self) -> bool:
        """Whether the run takes no step and only validates its initial model."""
        return self.algorithm_section.max_num_steps == 0

    @cached_property
    def has_validation(self) -> bool:
        """Whether there is anything to validate on."""
        return self.data.num_validation != 0

    @cached_property
    def generates(self) -> bool:
        """Whether the run has engines that generate its training data, rather than replaying another run's samples."""
        return self.declaration.rolls_out and self.replay is None

    @cached_property
    def environments(self) -> tuple[str, ...]:
        """Entries of `env` that score samples of the run; `data.environment` comes first."""
        if not self.declaration.rolls_out:
            return ()
        of_sets = (each.env_name for each in (*self.data.train, *self.data.validation))
        return tuple(dict.fromkeys(filter(None, (self.data.environment, *of_sets))))

    @cached_property
    def reward_models(self) -> dict[str, EnvironmentConfig]:
        """Reward models among the run's environments; empty if nothing is generated."""
        entries = {name: self.env.get(name) for name in self.environments} if self.generates else {}
        return {name: entry for name, entry in entries.items() if entry is not None and entry.is_reward_model}

    @cached_property
    def environment_keys(self) -> str:
        """Keys of the run's environments, for messages to the user."""
        return ", ".join(f"env.{name}" for name in self.environments)

    def of_environment(self, name: str) -> Config:
        """Return the configuration as if this entry of `env` scored all samples."""
        return msgspec.structs.replace(self, data=msgspec.structs.replace(self.data, environment=name))

    @cached_property
    def agent(self) -> EnvironmentConfig | None:
        """The external program that plays the run's episodes, if there is one."""
        environment = self.env.get(self.data.environment or "") if self.declaration.rolls_out else None
        return environment if environment is not None and environment.is_agent else None

    @cached_property
    def is_colocated(self) -> bool:
        """Whether training and generation are colocated, so that each frees what only it needs while the other
        works."""
        return self.generates and self.policy.generation.colocated.enabled

    @cached_property
    def sequences_per_sample(self) -> int:
        """Sequences per unit of the batch sizes."""
        return self.declaration.sequences_per_unit

    @cached_method
    def columns_of(self, num_steps: int, model: columns.Model = "policy") -> tuple[columns.ColumnDeclaration, ...]:
        """Return the columns that a model's loss reads in a step of `num_steps` optimizer steps.

        The policy's end with those of a custom loss.
        """
        read = {
            column.name: column
            for column in self.declaration.training_of[model].columns
            if column.is_read(self, num_steps)
        }
        if model == "policy":
            read |= self.loss_fn.custom_columns
        return tuple(read.values())

    @cached_method
    def all_columns(self, num_steps: int) -> tuple[columns.ColumnDeclaration, ...]:
        """Return the columns that the losses of all models read."""
        read = (column for model in self.declaration.trains for column in self.columns_of(num_steps, model))
        return tuple(dict.fromkeys(read))

    @cached_method
    def scored_by(self, num_steps: int) -> tuple[columns.Model, ...]:
        """Return the models that score a batch before training on it with `num_steps` optimizer steps."""
        read = {column.model for column in self.all_columns(num_steps)}
        return tuple(model for model in columns.MODELS if model in read)

    @cached_property
    def holds(self) -> tuple[columns.Model, ...]:
        """Models that trainers hold; if nothing is trained, only the policy."""
        if self.evaluates:
            return ("policy",)
        return tuple(dict.fromkeys(("policy", *self.scored_by(1), *self.declaration.trains)))

    @cached_property
    def advantage_estimator(self) -> str:
        """Function of `tandem.trainer.advantages` that completes advantages in the trainers; empty if none does."""
        return self.declaration.advantage_estimator(self)

    @cached_property
    def needs_reference(self) -> bool:
        """Whether the loss compares the policy with its initial model."""
        return "reference" in self.holds

    @cached_method
    def settings_of(self, model: columns.Model, number: int = 0) -> ModelConfig:
        """Return the section of a model that trainers hold; `number` selects one of several teachers.

        The reference is the policy before any training.
        """
        if model in ("policy", "reference"):
            return self.policy
        if model == "teacher":
            return [*self.teacher_sections.values()][number]
        section: ModelConfig | None = getattr(self, model)
        assert section is not None, "the algorithm declares that it holds one"
        return section

    @cached_method
    def num_of(self, model: columns.Model) -> int:
        """Return how many models of a kind trainers hold: there may be several teachers."""
        return len(self.teacher_sections) if model == "teacher" else 1

    @cached_property
    def table_columns(self) -> dict[str, str]:
        """Dtypes of the batch table's additional arrays, by name."""
        several = {f"{columns.TEACHER}_S": "int32"} if self.has_routed_teachers else {}
        return self.loss_fn.environment_columns | several

    def replace_policy(self, section: ModelConfig, **updates: Any) -> Config:
        """Return the configuration as if another model's section, updated with `updates`, were the policy's."""
        fields = {name: getattr(section, name) for name in ModelConfig.__struct_fields__} | updates
        return msgspec.structs.replace(self, policy=msgspec.structs.replace(self.policy, **fields))

    @cached_property
    def algorithm_section(self) -> RolloutsConfig | SftConfig | DpoConfig | RewardModelConfig:
        """Section of the algorithm in use; every one has `seed`, `max_num_steps`, `val_period` and `val_at_start`."""
        section: RolloutsConfig | SftConfig | DpoConfig | RewardModelConfig = getattr(self, self.algorithm)
        return section

    @cached_property
    def rollout_section(self) -> RolloutsConfig:
        """Section of an algorithm that rolls out."""
        assert self.declaration.rolls_out, f"{self.algorithm} does not roll out"
        section: RolloutsConfig = getattr(self, self.algorithm)
        return section

    @cached_property
    def largest_logprob_error(self) -> float | None:
        """Multiplicative error of probabilities above which a sequence is excluded from the loss, if there is a
        limit."""
        return self.rollout_section.largest_logprob_error if self.declaration.rolls_out else None

    @cached_property
    def asynchronous_key(self) -> str:
        """Key of the settings of asynchronous generation."""
        return f"{self.algorithm}.async_{self.algorithm}"

    @cached_property
    def max_trajectory_age_steps(self) -> int:
        """Most training steps by which the weights that begin a sample may be behind; 0 for synchronous training."""
        asynchronous = self.rollout_section.asynchronous if self.declaration.rolls_out else None
        return asynchronous.max_trajectory_age_steps if asynchronous is not None and asynchronous.enabled else 0

    @cached_property
    def updates_in_flight(self) -> bool:
        """Whether engines take new weights while they generate, between two tokens."""
        return self.max_trajectory_age_steps > 0 and self.rollout_section.asynchronous.in_flight_weight_updates

    @cached_property
    def streams_training(self) -> bool:
        """Whether trainers compute the gradient of a step's first groups while the last are generated."""
        return self.generates and self.rollout_section.streams_groups

    @cached_property
    def keeps_copy(self) -> bool:
        """Whether trainers keep a copy of their weights for engines to read while they step."""
        if not self.generates:
            return False
        if self.refit.store is not None:
            return True  # a version is written beside the next step
        if not self.max_trajectory_age_steps:
            return False
        if self.refit.keep_copy != "auto":
            return self.refit.keep_copy == "on"
        # At an age of one, a step waits anyway for the samples that engines finish with the older weights. Across
        # nodes, trainers have to send weights, which they cannot do while they step.
        return self.max_trajectory_age_steps > 1 and not self.updates_in_flight and self.cluster.num_nodes == 1

    @cached_property
    def data_set_section(self) -> SftConfig | DpoConfig | RewardModelConfig:
        """Section of an algorithm over a data set."""
        assert not self.declaration.rolls_out, f"{self.algorithm} rolls out"
        section: SftConfig | DpoConfig | RewardModelConfig = getattr(self, self.algorithm)
        return section

    @cached_property
    def units_per_step(self) -> int:
        """Samples, or other units of the batch sizes, that a step trains on."""
        if not self.declaration.rolls_out:
            return self.policy.train_global_batch_size
        return self.rollout_section.num_prompts_per_step * self.rollout_section.num_generations_per_prompt

    @cached_property
    def num_optimizer_steps(self) -> int:
        """Optimizer steps of the policy in a step."""
        return self.num_passes * self.num_optimizer_steps_per_pass

    @cached_property
    def num_optimizer_steps_per_pass(self) -> int:
        """Optimizer steps of each model in a pass over a step's batch."""
        return -(-self.units_per_step // self.policy.train_global_batch_size)

    @cached_property
    def num_passes(self) -> int:
        """Passes of a step over its batch."""
        return self.rollout_section.num_passes if self.declaration.rolls_out else 1

    @cached_property
    def num_steps_without_policy(self) -> int:
        """Initial steps that do not train the policy."""
        return self.rollout_section.num_steps_without_policy if self.declaration.rolls_out else 0

    @cached_property
    def trained_early(self) -> tuple[columns.Model, ...]:
        """Models that the initial steps without the policy train."""
        return tuple(model for model in self.declaration.trains if model != "policy")

    def trained_in(self, step: int) -> tuple[columns.Model, ...]:
        """Return the models that a step trains, in order."""
        return self.declaration.trains if step > self.num_steps_without_policy else self.trained_early

    @cached_property
    def routes(self) -> OnPolicyDistillation | None:
        """Assignment of samples to several teachers; None if there is one teacher for all, or none."""
        section = self.on_policy_distillation
        return section if section is not None and section.enabled else None

    @cached_property
    def teacher_sections(self) -> dict[str, ModelConfig]:
        """Teachers of the policy, by the key of each one's name, in order."""
        if "teacher" not in self.holds:
            return {}
        joint: dict[str, ModelConfig] = {
            f"teachers[{index}].model_name": each for index, each in enumerate(self.joint_teachers)
        }
        return joint or self._routed() or {"teacher.model_name": self._teacher_like("")}

    @cached_property
    def joint_teachers(self) -> tuple[TeacherConfig, ...]:
        """Teachers that all score every sequence; empty if each sequence has one."""
        return () if self.declaration.rolls_out else self.teachers or ()

    @cached_property
    def has_routed_teachers(self) -> bool:
        """Whether trainers hold several teachers, and each sequence has one of them."""
        return self.num_of("teacher") > 1 and not self.joint_teachers

    @cached_property
    def weighs_teachers_by(self) -> str:
        """Measure of trust that weights of joint teachers follow: ce, entropy or max_prob; empty if they are given."""
        if not self.joint_teachers:
            return ""
        return "ce" if self.loss_fn.kd_loss_mode == "select_teacher" else self.loss_fn.sum_weights_metric or ""

    def _routed(self) -> dict[str, ModelConfig]:
        routes = self.routes
        if routes is None:
            return {}
        key, sections = "on_policy_distillation.teacher_model_by_agent_name", dict[str, ModelConfig]()
        for alias, name in routes.teacher_model_by_agent_name.items():
            model_names = [section.model_name for section in sections.values()]
            if name not in model_names or not routes.deduplicate_shared_teacher_checkpoints:
                sections[f"{key}.{alias}"] = self._teacher_like(name)
        return sections

    def _teacher_like(self, name: str) -> ModelConfig:
        """Return the section `teacher`, or else one like the policy's, for the named model if a name is given."""
        section: ModelConfig | None = self.teacher
        if section is None:
            section = TeacherConfig(**{field: getattr(self.policy, field) for field in ModelConfig.__struct_fields__})
            if self.routes is not None and self.routes.non_colocated_teachers.enabled:
                section = self.routes.non_colocated_teachers.default_teacher_cfg.applied_to(section)
        if not name or name == section.model_name:
            return section
        tokenizer = msgspec.structs.replace(section.tokenizer, name=name)
        return msgspec.structs.replace(section, model_name=name, tokenizer=tokenizer, new_model=None)

    def teacher_of(self, *names: str) -> int | None:
        """Return the number of the teacher for samples with these names (of their environment, of their data set):
        that of the first name with a teacher, else the default, else None."""
        routes = self.routes
        if routes is None:
            return 0
        models = routes.teacher_model_by_agent_name
        default = () if routes.strict_agent_name_match else (routes.default_teacher_alias or "",)
        alias = next((name for name in (*names, *default) if name in models), None)
        if alias is None:
            return None
        sections = list(self._routed().values())
        return [section.model_name for section in sections].index(models[alias])

    @cached_property
    def learns_from_logprobs(self) -> bool:
        """Whether advantages are a teacher's log-probabilities minus the policy's."""
        estimator = self.rollout_section.group_estimator
        return estimator is not None and estimator.name == "opd"

    @cached_property
    def topk_logits_k(self) -> int:
        """Likeliest tokens that a teacher provides for each token; 0 without a teacher."""
        return int(getattr(self.algorithm_section, "topk_logits_k", 0))

    @cached_property
    def loss_maker(self) -> str | None:
        """Dotted path of what makes the policy's loss in place of the algorithm's declaration; None without it."""
        if self.policy.mtp.num_layers:
            return "tandem.trainer.losses.mtp.MtpLoss"
        return None if self.loss_fn.class_path is None else "tandem.trainer.losses.custom.CustomLoss"

    @cached_property
    def learns_entropy(self) -> bool:
        """Whether the gradient of the policy's loss includes that of its entropy."""
        loss = self.loss_fn
        if not self.topk_logits_k:
            return self.declaration.rolls_out and loss.entropy_coef > 0
        return loss.zero_outside_topk and loss.kl_type in ("reverse", "mixed")

    @cached_property
    def replays_sampling_masks(self) -> bool:
        """Whether the policy's log-probabilities are of the tokens that engines drew from, and not of all tokens."""
        reads = self.declaration.rolls_out and columns.GENERATION_LOGPROBS in self.declaration.columns
        return reads and self.policy.generation.cuts_off

    @cached_property
    def compares_whole_policy(self) -> bool:
        """Whether advantages hold the previous policy, scored with sampling masks, against a model without them."""
        return self.replays_sampling_masks and (self.loss_fn.use_kl_in_reward or self.learns_from_logprobs)

    @cached_property
    def scoring_temperature(self) -> float:
        """Divisor of the logits for log-probabilities: the sampling temperature.

        A temperature of zero is greedy decoding, a distribution without gradient; 1 is used instead.
        """
        return (self.policy.generation.temperature or 1.0) if self.declaration.rolls_out else 1.0
