"""Limits of every sample of a run, which replies must keep."""

from __future__ import annotations

import msgspec

from tandem.config import Config
from tandem.config.model_groups import list_model_groups
from tandem.config.models.model_sizes import vocabulary_size


class SampleLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of every sample of a run."""

    vocabulary: int
    max_tokens: int
    """Most tokens of a whole sequence."""
    max_turns: int
    num_roles: int = 0
    """Roles that the policy plays in an agent's episode; zero where requests name none."""
    plays: bool = False
    """Whether an agent plays episodes, with prompts of its own."""
    speakers: frozenset[str] = frozenset({"trainer-0"})
    """Trainers that report the run's metrics: the first of each model group."""

    @staticmethod
    def of(config: Config) -> SampleLimits:
        """Return the limits of a run; its model folder must exist."""
        policy = config.policy
        agent = config.agent
        turns = config.rollout_section.max_rollout_turns if config.declaration.rolls_out else 0
        if agent is not None:
            turns = agent.max_completions
        vocabulary = vocabulary_size(policy)
        return SampleLimits(
            vocabulary=vocabulary,
            max_tokens=policy.generation.kind.longest_sequence(config),
            max_turns=turns,
            num_roles=0 if agent is None else len(agent.roles),
            plays=agent is not None,
            speakers=frozenset(f"trainer-{model_group.first}" for model_group in list_model_groups(config)),
        )
