"""The run spec: what the scheduler is told of a run before it begins, all of it plain data."""

from __future__ import annotations

import msgspec

from tandem.common.messages import RewardServer, ServiceKind


class Deadlines(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds each kind of order may take."""

    join: float
    build: float
    generate: float
    train: float
    evaluate: float
    refit: float
    save: float
    leave: float


class Balance(msgspec.Struct, frozen=True, kw_only=True):
    """How engines share rollout groups where ``async_engine`` is on (`scheduler.assignment.BalancedAssignment`)."""

    width: int
    """Samples that an engine runs at once."""
    timeout_s: float | None
    """How long an engine without work waits for others before it takes over their groups; None for ever."""


class DynamicSampling(msgspec.Struct, frozen=True, kw_only=True):
    """How a step goes on generating until enough of its rollout groups are informative.

    DAPO, Yu et al. 2025, arXiv:2503.14476, section 3.2.
    """

    num_groups: int
    """Groups generated at once."""
    max_batches: int
    """How often, at most."""


class RunSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Everything about a run that its schedule depends on."""

    has_engines: bool
    """Whether samples are generated, and weights moved to where that is done."""
    expected: dict[ServiceKind, int]
    """How many processes of each kind make the run complete."""
    without_policy: frozenset[str] = frozenset()
    """Trainers that hold another model alone, and so have no weights for engines."""
    departed: tuple[str, ...] = ()
    """Which of the engines among them have left in earlier attempts: the run does not wait for these."""
    first_step: int
    """The step to begin with: 1, or one after the step a resumed run was saved at."""
    last_step: int
    num_groups: int
    """Rollout groups that a training step trains on; zero without engines."""
    num_validation_groups: int
    validate_every: int
    """Steps between validations; zero for never."""
    validate_at_start: bool
    validate_at_end: bool = False
    """Whether the last step is validated though none other is."""
    save_every: int
    """Steps between checkpoints; zero for never. The last step is always saved unless it is zero."""
    resume_from: str
    """Checkpoint folder to restore; empty for none."""
    checkpoint_folder: str
    """Folder a checkpoint is written to before it gets its final name; ``{step}`` stands for the step."""
    samples_folder: str = ""
    """Folder of the record of samples; empty where none is kept."""
    reward_server: RewardServer | None = None
    """Where the program that began the run scores samples; None where engines' environments do without it."""
    engines_first: bool = False
    """Whether trainers are built once engines are: these look at how much memory of their device is free meanwhile."""
    allow_alias: bool
    """Whether engines may read trainers' weights in place, which change while they do."""
    alias_frozen: bool = False
    """Whether they may read in place those that never change."""
    is_verified: bool
    """Whether each version is attested by digests before its samples are trained on."""
    max_trajectory_age_steps: int = 0
    """Training steps that the weights a sample was made with may be behind those it is trained on. With 0, generation
    and training wait for each other: synchronous training."""
    updates_in_flight: bool = False
    """Whether engines take a version while they generate. Otherwise they first finish what they have, and get no more
    until they hold it."""
    keeps_copy: bool = False
    """Whether engines read a copy of the trainers' weights, so that trainers step as soon as it is made. Not where they
    have to send weights themselves: then they wait as they would without it."""
    max_stored_tokens: int | None = None
    """Tokens that a rollout can keep until they are trained on; None for any number."""
    max_replacements: int
    """How many processes may be lost and replaced within `replacement_window_s` before the run fails."""
    replacement_window_s: float
    replaced_at: tuple[float, ...] = ()
    """When some were, in earlier attempts, by `time.monotonic`."""
    balance: Balance | None = None
    """None: each group belongs to one engine from the beginning, so that the same run computes the same together."""
    dynamic_sampling: DynamicSampling | None = None
    """None: a step trains on all groups that it generates."""
    deadlines: Deadlines

    @property
    def is_synchronous(self) -> bool:
        """Whether nothing is generated for a step before the weights of the one before are published."""
        return self.max_trajectory_age_steps == 0

    def oldest_version(self, step: int) -> int:
        """Return the oldest weights that samples to train on in a step may be made with."""
        return step - 1 - self.max_trajectory_age_steps
