"""The run spec: what the scheduler knows of a run before it begins, all of it plain data."""

from __future__ import annotations

import msgspec

from tandem.common.messages import RewardServer, ServiceKind


class CommandDeadlines(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds that each kind of command may take."""

    join: float
    build: float
    generate: float
    train: float
    evaluate: float
    refit: float
    save: float
    leave: float


class EngineBalance(msgspec.Struct, frozen=True, kw_only=True):
    """How engines share rollout groups where ``async_engine`` is on (`scheduler.groups.assignment`)."""

    width: int
    """The samples that an engine runs at once."""
    timeout_s: float | None
    """The seconds that an idle engine waits for others before it takes over their groups; None for ever."""


class DynamicSampling(msgspec.Struct, frozen=True, kw_only=True):
    """The limits within which a step generates until enough of its rollout groups are informative.

    DAPO, Yu et al. 2025, arXiv:2503.14476, section 3.2.
    """

    num_groups: int
    """Groups generated at once."""
    max_batches: int
    """The most batches of groups."""


class StreamingTraining(msgspec.Struct, frozen=True, kw_only=True):
    """Training on a step's first groups while the last are generated."""

    min_groups: int
    """The fewest groups that trainers are given at once."""


class RunSpec(msgspec.Struct, frozen=True, kw_only=True):
    """All properties of a run that its schedule depends on."""

    has_engines: bool
    """Whether samples are generated, and weights brought to engines."""
    expected: dict[ServiceKind, int]
    """The number of processes of each kind that make the run complete."""
    without_policy: frozenset[str] = frozenset()
    """Trainers that hold only another model, and so have no weights for engines."""
    departed: tuple[str, ...] = ()
    """Engines that left in earlier attempts, which the run does not wait for."""
    first_step: int
    """The first step: 1, or the step after the resumed checkpoint."""
    last_step: int
    num_groups: int
    """Rollout groups that a training step trains on; zero without engines."""
    num_validation_groups: int
    validate_every: int
    """Steps between validations; zero for never."""
    validate_from: int = 0
    """First step that `validate_every` applies to."""
    validate_at_start: bool
    validate_at_end: bool = False
    """Whether the last step is validated even if no other is."""
    save_every: int
    """Steps between checkpoints; zero for never. The last step is always saved unless it is zero."""
    resume_from: str
    """Checkpoint folder to restore; empty for none."""
    checkpoint_folder: str
    """Folder that a checkpoint is written to before it gets its final name, with ``{step}`` for the step."""
    samples_folder: str = ""
    """Folder of the rollout log; empty if none is kept."""
    reward_server: RewardServer | None = None
    """Address of the coordinator's reward server; None if the engines' environments do not need it."""
    engines_first: bool = False
    """Whether engines measure the free memory of GPUs that trainers also use. Trainers are then built after them, and
    neither train nor save while an engine is built in the place of a lost one.
    """
    allow_alias: bool
    """Whether engines may read trainers' weights in place, which change while they do."""
    alias_frozen: bool = False
    """Whether engines may read in place the weights that never change."""
    streams_over_tcp: bool = False
    """Whether transfer groups connect over TCP, where each process proves its key to the others."""
    sends_differences: bool = False
    """Whether trainers stream what changed since an engine's version, instead of whole weights."""
    is_verified: bool
    """Whether the digests of each version are verified before its samples are trained on."""
    max_trajectory_age_steps: int = 0
    """The most training steps by which the weights of a sample may be older than those it is trained on. With 0,
    generation and training wait for each other: synchronous training.
    """
    updates_in_flight: bool = False
    """Whether engines take a version while they generate. Otherwise they first finish what they have, and get no more
    until they hold it.
    """
    keeps_copy: bool = False
    """Whether engines read a copy of the trainers' weights, so that trainers step as soon as it is made. Trainers that
    have to send weights to engines wait nevertheless.
    """
    max_stored_tokens: int | None = None
    """Tokens that a rollout can keep until they are trained on; None for any number."""
    max_replacements: int
    """The most processes that may be lost and replaced within `replacement_window_s` before the run fails."""
    replacement_window_s: float
    replaced_at: tuple[float, ...] = ()
    """Times of the replacements in earlier attempts, by `time.monotonic`."""
    balance: EngineBalance | None = None
    """None: each group belongs to one engine from the beginning, so that a repeated run has the same batches."""
    dynamic_sampling: DynamicSampling | None = None
    """None: a step trains on all groups that it generates."""
    streaming: StreamingTraining | None = None
    """None: a step trains once all of its groups are there."""
    deadlines: CommandDeadlines

    @property
    def is_synchronous(self) -> bool:
        """Whether generation for a step waits until the weights of the step before are published."""
        return self.max_trajectory_age_steps == 0
