"""Generations in progress where agents play: each sample is an episode."""

from __future__ import annotations

import time
from collections.abc import Collection

from tandem.common.messages import Generate
from tandem.launch.service import ServiceContext
from tandem.rollout.agents.agents import RolloutAgents
from tandem.rollout.conversation import SampleConversation
from tandem.rollout.environments import Score
from tandem.rollout.generating import UNSCORED, Finished, RunningGeneration, RunningGenerations
from tandem.rollout.parts import RolloutParts
from tandem.samples.routed_experts import RoutedExperts


class AgentGenerations(RunningGenerations):
    """The `Generate` commands whose samples the agents of a rollout play."""

    def __init__(
        self, context: ServiceContext, parts: RolloutParts, experts: RoutedExperts | None, agents: RolloutAgents
    ) -> None:
        """Begin without commands, as any `RunningGenerations`; `agents` play."""
        super().__init__(context, parts, experts)
        self._agents = agents

    def _request(self, number: int, conversation: SampleConversation, command: Generate) -> None:
        self._agents.begin(number, conversation.group, conversation.sample, command)

    def _forget(self, numbers: Collection[int]) -> None:
        self._agents.forget(numbers)

    def _converse(self) -> None:
        """Make one token for each request of an agent; take the episodes that have ended."""
        started = time.perf_counter()
        phase = "generation" if self._agents.work() else "rewards"
        if self._parts.external_requests is not None and not self._parts.sample_engine.num_unfinished:
            self._parts.external_requests.work()
        for generation in self.generations.values():
            generation.seconds[phase] += time.perf_counter() - started
        finished: Finished = {}
        for number, session, result in self._agents.poll():
            score, unscored = (result, None) if isinstance(result, Score) else (UNSCORED, result)
            sample, arrays = session.finish(score, self._parts.engine.version or 0, unscored)
            self._generation_of[number].num_tokens += sample.response_length
            self._end(finished, number, sample, arrays)
        self._send(finished)

    def _finish(self, generation: RunningGeneration) -> None:
        if len(self.generations) == 1:
            self._agents.abandon_requests()
        super()._finish(generation)
