"""Keys of environments that another package brings."""

from __future__ import annotations

from typing import Any

import msgspec

from tandem.config.schema.base import ConfigSection, NonEmptyStr, PositiveFloat, PositiveInt

VERIFIERS = "verifiers"
"""Value of ``data.dataset_name`` for the tasks of an environment of verifiers, and the key of its settings."""
OPENENV = "openenv"
"""The same for the episodes of an environment of OpenEnv."""
NEMO_GYM = "nemo_gym"
"""The same for the rows that the agents of NeMo Gym name in their own configuration."""
NEMO_GYM_ROWS = "NemoGymDataset"
"""Value of ``data.dataset_name`` for files with rows of NeMo Gym, by NeMo-RL's name."""
PACKAGED = (VERIFIERS, OPENENV, NEMO_GYM)
"""Data sets whose problems are the tasks of a packaged environment."""


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
    """An environment of OpenEnv, behind its server (``docs/packaged_environments.md``). One of `package` and `url` is
    required."""

    package: NonEmptyStr | None = None
    """New. The application of an installed package, such as ``echo_env.server.app:app``. Each program that plays
    starts a server with it, on loopback, and watches it."""
    url: NonEmptyStr | None = None
    """New. A server that runs already: ``http://HOST:PORT``."""
    python: NonEmptyStr | None = None
    """New. Interpreter that has the `package`; null means the interpreter of the run."""
    variables: dict[str, str] = msgspec.field(default_factory=dict)
    """New. Environment variables of the server that is started."""
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


PackagedConfig = VerifiersConfig | OpenEnvConfig | NemoGymConfig
