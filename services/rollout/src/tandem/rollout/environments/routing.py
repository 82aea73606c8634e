"""The environments of a run by name: each response goes to its problem's environment."""

from __future__ import annotations

from collections.abc import Iterable

from tandem.common.messages import EngineServer, PromptGroup
from tandem.config import Config
from tandem.config.checks.data import PYTHON_REWARDS
from tandem.rollout.environments.environment import Score, Turn
from tandem.rollout.environments.faults import Unscored
from tandem.rollout.environments.program import Program
from tandem.rollout.environments.scorer import Scorer
from tandem.samples.chat_templates import Messages


class Environments:
    """A `Scorer` for each of the run's environments, behind the same methods."""

    def __init__(self, config: Config, program: Program | None = None) -> None:
        """Make the scorers; `program` scores with functions given to `tandem.train`."""
        self._scorers = {
            name: Scorer(config.of_environment(name), program if name == PYTHON_REWARDS else None)
            for name in config.environments
        }
        self._only = config.environments[0]
        self._scorer_of: dict[int, Scorer] = {}
        """Scorers by the keys of submitted responses."""

    def __contains__(self, environment: str) -> bool:
        """Return whether a prompt may name this environment."""
        return environment in self._scorers or (not environment and len(self._scorers) == 1)

    def await_ready(self, engine: EngineServer | None = None) -> None:
        """Wait until responses can be scored. Raises `ConfigError` if an environment cannot be made."""
        for scorer in self._scorers.values():
            scorer.await_ready(engine)

    def is_multi_turn(self, group: PromptGroup) -> bool:
        """Return whether a response to this prompt may be answered."""
        return self._of(group).is_multi_turn

    def submit(self, key: int, group: PromptGroup, conversation: Messages, step: int | None = None) -> None:
        """Queue a conversation that ends with a response; `key` comes back with its score, or with the next turn."""
        self._scorer_of[key] = scorer = self._of(group)
        scorer.submit(key, group.problem, conversation, step)

    def poll(self) -> list[tuple[int, Score | Turn | Unscored]]:
        """Return what is ready. Raises `RewardError` where a failure of an environment ends the run."""
        ready: list[tuple[int, Score | Turn | Unscored]] = []
        for scorer in self._scorers.values():
            ready += scorer.poll()
        for key, _ in ready:
            del self._scorer_of[key]
        return ready

    def forget(self, keys: Iterable[int]) -> None:
        """Abandon what was submitted with these keys."""
        for key in keys:
            if (scorer := self._scorer_of.pop(key, None)) is not None:
                scorer.forget([key])

    def refuse(self, group: PromptGroup, conversation: Messages, what: str) -> Unscored:
        """Judge an environment's answer that cannot be used. Raises `RewardError` if that ends the run."""
        return self._of(group).refuse(group.problem, conversation, what)

    def close(self) -> None:
        """End everything that runs the environments."""
        self._scorer_of.clear()
        for scorer in self._scorers.values():
            scorer.close()

    def _of(self, group: PromptGroup) -> Scorer:
        return self._scorers[group.environment or self._only]
