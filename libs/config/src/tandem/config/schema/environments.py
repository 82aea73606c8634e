"""Keys of environments of other packages, of those that a reward model or functions for images score."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from tandem.config.schema.base import ConfigSection, NonEmptyStr, NonNegativeInt, PositiveFloat, PositiveInt
from tandem.config.schema.policy import DtensorCfg, RewardModelCfg, TokenizerConfig

VERIFIERS = "verifiers"
"""Value of ``data.dataset_name`` for the tasks of an environment of verifiers, and the key of its settings."""
OPENENV = "openenv"
"""The same for the episodes of an environment of OpenEnv."""
NEMO_GYM = "nemo_gym"
"""The same for the rows that the agents of NeMo Gym name in their own configuration."""
NEMO_GYM_ROWS = "NemoGymDataset"
"""Value of ``data.dataset_name`` for files with rows of NeMo Gym, by NeMo-RL's name."""
HARBOR = "harbor"
"""The same for the tasks of Harbor in a folder."""
PACKAGED = (VERIFIERS, OPENENV, NEMO_GYM, HARBOR)
"""Data sets whose problems are the tasks of a packaged environment."""
Number = Annotated[float, Meta(ge=-1e6, le=1e6)]
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


class RewardArguments(ConfigSection, frozen=True, kw_only=True, omit_defaults=True):
    """Arguments of all functions; each has some of them."""

    think_tag: NonEmptyStr = "think"
    """Tag of the reasoning."""
    answer_tag: NonEmptyStr = "answer"
    """Tag of the answer."""
    tag: NonEmptyStr = "answer"
    """The same, for ``math_expr``."""
    giou_penalty_thres: Number = 10.0
    """Intersection over union below which boxes that are far apart cost more than none (GIoU)."""


class RewardFunctionConfig(ConfigSection, frozen=True, kw_only=True):
    """An entry of `env.NAME.reward_functions`."""

    name: Literal["format", "exact_alnum", "math_expr", "bbox_giou"]
    """The function."""
    weight: Annotated[float, Meta(ge=0.0, le=1e6)]
    """Its share of the reward, relative to the others'."""
    kwargs: RewardArguments | None = None
    """Its arguments."""


ARGUMENTS = {
    "format": ("think_tag", "answer_tag"),
    "exact_alnum": ("answer_tag",),
    "math_expr": ("tag",),
    "bbox_giou": ("giou_penalty_thres", "answer_tag"),
}
"""Arguments that each function has."""
FUNCTION_ENVIRONMENTS = ("clevr-cogent", "geometry3k", "refcoco", "vlm")
"""Built-in environments that score by such functions, responses about images."""


class VerifiersConfig(ConfigSection, frozen=True, kw_only=True):
    """An environment of the package verifiers, played as the package plays it (``docs/packaged_environments.md``)."""

    id: NonEmptyStr
    """New. Id of the installed taskset, such as ``gsm8k-v1``; ``OWNER/NAME`` is the installed ``NAME``."""
    args: dict[str, Any] = msgspec.field(default_factory=dict)
    """New. Settings of the taskset, as under ``--env.taskset``."""
    validation_args: dict[str, Any] | None = None
    """New. Settings that differ in the tasks to validate on, such as ``{split: test}``; null holds out some of the
    tasks to train on."""
    env: dict[str, Any] = msgspec.field(default_factory=dict)
    """New. Other settings of the environment, as under ``--env``: ``id``, and for each role ``harness``, ``runtime``,
    ``max_turns`` and the like."""
    correct_from: float = 1.0
    """New. Lowest reward of an episode that counts as solved, for the accuracy."""
    python: NonEmptyStr | None = None
    """New. Interpreter that has the package, for one that is installed apart; null means the interpreter of the run."""


class OpenEnvConfig(ConfigSection, frozen=True, kw_only=True):
    """An environment of OpenEnv, behind its server (``docs/packaged_environments.md``). One of `package`, `image` and
    `url` is required."""

    package: NonEmptyStr | None = None
    """New. The application of an installed package, such as ``echo_env.server.app:app``. Each program that plays
    starts a server with it, on loopback, and watches it."""
    image: NonEmptyStr | None = None
    """New. An image whose command serves an environment at port 8000, such as ``openenv build`` makes. Each program
    that plays starts a container of it by Docker, at a port on loopback, and watches it."""
    url: NonEmptyStr | None = None
    """New. A server that runs already: ``http://HOST:PORT``."""
    python: NonEmptyStr | None = None
    """New. Interpreter that has the `package`; null means the interpreter of the run."""
    variables: dict[str, str] = msgspec.field(default_factory=dict)
    """New. Environment variables of the server that is started; one in a container has no others of the run's."""
    reset: dict[str, Any] = msgspec.field(default_factory=dict)
    """New. Arguments of every reset. Each problem adds a seed of its own, which its samples share."""
    resets: tuple[dict[str, Any], ...] = ()
    """New. Arguments of resets, one problem each, instead of seeds."""
    system_prompt: NonEmptyStr | None = None
    """New. The system message of every episode."""
    action: NonEmptyStr | None = None
    """New. What an answer of the policy becomes: the name of the action's field that it fills, ``json`` for an object
    with the action's fields, or ``tools`` for calls of the environment's tools. null means tools where the
    environment has them, else the only field that an action requires, else json."""
    observation: NonEmptyStr | None = None
    """New. Field of an observation that the policy is shown; null means all but `done`, `reward` and `metadata`."""
    max_turns: PositiveInt = 32
    """New. Most answers of an episode."""
    step_timeout_s: PositiveFloat = 60.0
    """New. Longest time of a reset or a step."""
    correct_from: float = 1.0
    """New. Lowest reward of an episode that counts as solved, for the accuracy."""


class NemoGymConfig(ConfigSection, frozen=True, kw_only=True):
    """Agents and resources servers of NeMo Gym (``docs/packaged_environments.md``). In NeMo-RL's files all of this
    stands directly below ``env.nemo_gym``, the keys of `config` among the others."""

    config: dict[str, Any] = msgspec.field(default_factory=dict)
    """NeMo Gym's own configuration: ``config_paths``, ``head_server``, ``uv_venv_dir``, and settings of its servers by
    their names. NeMo-RL has these keys below ``env.nemo_gym`` itself."""
    python: NonEmptyStr | None = None
    """New. Interpreter that has the package ``nemo-gym``; null means the interpreter of the run."""
    agent: NonEmptyStr | None = None
    """New. The agent that plays rows without an ``agent_ref``; null means the only one that is configured."""
    variables: dict[str, str] = msgspec.field(default_factory=dict)
    """New. Environment variables of the servers."""
    correct_from: float = 1.0
    """New. Lowest reward of an episode that counts as solved, for the accuracy."""


class HarborConfig(ConfigSection, frozen=True, kw_only=True):
    """Tasks of Harbor in a folder, played in sandboxes on this machine (``docs/packaged_environments.md``)."""

    tasks: NonEmptyStr
    """New. Folder with tasks: every folder below it that has a ``task.toml``, or itself."""
    validation_tasks: NonEmptyStr | None = None
    """New. Folder with the tasks to validate on; null holds out some of the tasks to train on."""
    python: NonEmptyStr | None = None
    """New. Interpreter that has the package, which needs Python 3.12; null means the interpreter of the run."""
    agent: NonEmptyStr = "terminus-2"
    """New. The agent that plays: the name of one of Harbor's, or ``MODULE:CLASS``."""
    kwargs: dict[str, Any] = msgspec.field(default_factory=dict)
    """New. Arguments of the agent, such as ``{max_turns: 8}``."""
    network: bool = False
    """New. Whether programs in a sandbox have the machine's network. Otherwise they have none, whatever a task says."""
    root: NonEmptyStr | None = None
    """New. Folder with a prepared root file system that sandboxes change a copy of; ``{task}`` stands for a task's
    name. null shows the machine's own programs, read-only."""
    paths: tuple[NonEmptyStr, ...] = ()
    """New. More files and folders of the machine that a sandbox sees, read-only."""
    variables: tuple[NonEmptyStr, ...] = ()
    """New. Environment variables of the run that tasks may name in their ``env``; all others are hidden from them."""
    memory_mb: PositiveInt = 2048
    """New. Most memory of each process in a sandbox, where its task says nothing."""
    storage_mb: PositiveInt = 1024
    """New. Size of a sandbox's files, which lie in memory, where its task says nothing."""
    processes: PositiveInt = 256
    """New. Most processes and threads of a sandbox at once."""
    timeout_multiplier: PositiveFloat = 1.0
    """New. Factor of all times that tasks allow."""
    reward: NonEmptyStr = "reward"
    """New. Which of a verifier's rewards counts; the others are components."""
    correct_from: float = 1.0
    """New. Lowest reward of an episode that counts as solved, for the accuracy."""


PackagedConfig = VerifiersConfig | OpenEnvConfig | NemoGymConfig | HarborConfig
