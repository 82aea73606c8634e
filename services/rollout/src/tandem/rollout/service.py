"""The rollout service: one engine. Prompts in, scored samples out.

It consumes `Generate` orders and weight versions, and produces samples as they finish: token ids, the log-probabilities
of the distribution each token was drawn from, the weight version that made it, and the reward. An environment may
answer a response, and then the sample goes on (`tandem.rollout.conversation`). Between two steps of the engine it looks
for orders; it waits only for environments, each of whose answers has a deadline of its own.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Literal, assert_never

from tandem.common.batch import SampleArrays
from tandem.common.config import Config
from tandem.common.errors import DataError, RewardError
from tandem.common.messages import (
    Attest,
    BuildEngine,
    ConnectMesh,
    EngineBuilt,
    Generate,
    Generated,
    InstallProgram,
    Refit,
    RolloutOrder,
    SampleScored,
    SamplesFinished,
)
from tandem.common.service import Member
from tandem.common.threads import limit_threads
from tandem.common.tokenizer import Tokenizer, load_tokenizer
from tandem.common.wire import Arrays
from tandem.refit import layout
from tandem.refit.endpoint import Endpoint
from tandem.rollout.conversation import Conversation
from tandem.rollout.engine import Completion, Engine
from tandem.rollout.environments import Score, Scorer, Turn

_REWARD_POLL_S = 0.001
_UNSCORED = Score(0.0, correct=False)
"""A sample that a limit ended before the environment did; it has the rewards of its turns."""
_DIGEST_SHARE = 0.25
"""Of the time between tokens that goes into attesting the version they are made with."""


class Generation:
    """One `Generate` in progress."""

    def __init__(self, order: Generate) -> None:
        self.order = order
        samples = [(group, sample) for group in order.groups for sample in range(len(group.seeds))]
        self.conversations = {number: Conversation(group, sample) for number, (group, sample) in enumerate(samples)}
        """Unfinished samples by number, which is also the number of their request."""
        self.num_samples = len(samples)
        self.awaited: set[int] = set()
        """Samples with the environment, which may go on."""
        self.answered: list[int] = []
        """Samples that go on."""
        self.num_tokens = 0
        self.seconds = {"generation": 0.0, "rewards": 0.0}


class RolloutService:
    """One engine's answers to the coordinator."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self._config = member.config
        self._engine: Engine | None = None
        self._endpoint: Endpoint | None = None
        self._scorer: Scorer | None = None
        self._tokenizer: Tokenizer | None = None
        self._generation: Generation | None = None

    def handle(self, order: RolloutOrder, arrays: Arrays) -> None:
        """Carry out one order; `Generate` goes on in `work`."""
        match order:
            case BuildEngine():
                with self._member.phase("building the engine"):
                    self._build(order)
            case Refit():
                if not order.only or self._member.name in order.only:
                    self._abandon_generation()
                self._plane().handle(order)
            case InstallProgram() | ConnectMesh() | Attest():
                self._plane().handle(order)
            case Generate():
                self._start(order)
            case other:
                assert_never(other)

    def work(self) -> bool:
        """Advance the generation in progress by one token, and the digest in progress by a share of that time."""
        generation = self._generation
        if generation is None:
            return self._endpoint is not None and self._endpoint.work()
        started = time.perf_counter()
        try:
            with self._member.phase(f"generating step {generation.order.step}"):
                self._advance(generation)
        except Exception as error:
            self._generation = None
            self._member.fail(generation.order.command_id, error)
        is_digesting = self._plane().work(_DIGEST_SHARE * (time.perf_counter() - started))
        return self._generation is not None or is_digesting

    def close(self) -> None:
        """Release the engine and the environments."""
        if self._scorer is not None:
            self._scorer.close()
        if self._endpoint is not None:
            self._endpoint.close()
        if self._engine is not None:
            self._engine.close()

    # --- building and refit ------------------------------------------------------------------------------------------

    def _build(self, order: BuildEngine) -> None:
        limit_threads(self._config, "rollouts")
        self._tokenizer = load_tokenizer(self._config)
        self._scorer = Scorer(self._config)
        self._engine = _make_engine(self._config)
        self._endpoint = Endpoint(self._member, self._engine)
        layouts = tuple(map(layout.encode, self._engine.layouts()))
        reply = EngineBuilt(command_id=order.command_id, layouts=layouts)
        self._member.reply(order.command_id, reply)

    def _built(self) -> Engine:
        assert self._engine is not None, "the coordinator orders BuildEngine first"
        return self._engine

    def _plane(self) -> Endpoint:
        assert self._endpoint is not None, "the coordinator orders BuildEngine first"
        return self._endpoint

    # --- generation --------------------------------------------------------------------------------------------------

    def _start(self, order: Generate) -> None:
        """Begin a generation, abandoning one that the coordinator no longer waits for."""
        engine = self._built()
        self._abandon_generation()
        self._generation = Generation(order)
        for number, conversation in self._generation.conversations.items():
            engine.add_request(conversation.request(number, order.sampling))

    def _abandon_generation(self) -> None:
        """Stop a generation that the coordinator no longer waits for."""
        if self._generation is None:
            return
        for number in self._generation.conversations:
            self._built().abort(number)
        if self._scorer is not None:
            self._scorer.reset()
        self._generation = None

    def _advance(self, generation: Generation) -> None:
        engine, scorer = self._built(), self._scorer
        assert scorer is not None
        started = time.perf_counter()
        # The engine waits for the answers that its next step might build on: what runs together, and with it the last
        # bit of a probability, then does not depend on how long an environment takes.
        if engine.num_unfinished and not generation.awaited:
            for completion in engine.step():
                self._take(generation, completion, scorer)
            generation.seconds["generation"] += time.perf_counter() - started
        else:
            time.sleep(_REWARD_POLL_S)
            generation.seconds["rewards"] += time.perf_counter() - started
        self._answer(generation, scorer.poll())
        if not generation.awaited:
            for number in sorted(generation.answered):
                engine.add_request(generation.conversations[number].request(number, generation.order.sampling))
            generation.answered.clear()
        if not generation.conversations:
            self._finish(generation)

    def _take(self, generation: Generation, completion: Completion, scorer: Scorer) -> None:
        """Hand a response to the environment."""
        assert self._tokenizer is not None
        number = completion.request_id
        conversation = generation.conversations[number]
        conversation.add_response(completion, self._tokenizer.decode(completion.token_ids_T.tolist()))
        generation.num_tokens += len(completion.token_ids_T)
        if scorer.converses and conversation.num_turns < self._config.grpo.max_rollout_turns:
            generation.awaited.add(number)
        scorer.submit(number, conversation.group.problem, tuple(conversation.messages))

    def _answer(self, generation: Generation, results: list[tuple[int, Score | Turn]]) -> None:
        """Send the samples that have ended; let the others go on."""
        order = generation.order
        finished: list[tuple[SampleScored, SampleArrays]] = []
        for number, result in results:
            generation.awaited.discard(number)
            conversation = generation.conversations[number]
            if isinstance(result, Score):
                finished.append(conversation.finish(result, "score"))
            elif (limit := self._go_on(conversation, result)) is not None:
                finished.append(conversation.finish(_UNSCORED, limit))
            else:
                generation.answered.append(number)
                continue
            del generation.conversations[number]
        if finished:
            message = SamplesFinished(
                command_id=order.command_id,
                step=order.step,
                purpose=order.purpose,
                samples=tuple(sample for sample, _ in finished),
            )
            arrays = SampleArrays.concatenate([arrays for _, arrays in finished])
            self._member.reply(order.command_id, message, arrays.to_frames())

    def _go_on(self, conversation: Conversation, turn: Turn) -> Literal["length", "turns"] | None:
        """Add what the environment said, if another response may follow; else return the limit that ends the sample."""
        assert self._tokenizer is not None
        conversation.reward += turn.reward
        if conversation.num_turns >= self._config.grpo.max_rollout_turns:
            return "turns"
        try:
            token_ids = self._tokenizer.encode_continuation(turn.messages, conversation.last_id)
        except DataError as error:
            raise RewardError(f"environment {self._config.data.environment!r}: {error}") from error
        if conversation.num_tokens + len(token_ids) >= self._config.policy.max_total_sequence_length:
            return "length"
        conversation.add_answer(turn.messages, token_ids)
        return None

    def _finish(self, generation: Generation) -> None:
        self._generation = None
        reply = Generated(
            command_id=generation.order.command_id,
            step=generation.order.step,
            purpose=generation.order.purpose,
            num_samples=generation.num_samples,
            num_tokens=generation.num_tokens,
            seconds=generation.seconds,
        )
        self._member.reply(generation.order.command_id, reply)


def _make_engine(config: Config) -> Engine:
    """Start the engine that the configuration names."""
    policy, generation = config.policy, config.policy.generation
    if generation.backend == "vllm":
        from tandem.rollout.engines.vllm.engine import VllmEngine

        return VllmEngine(Path(policy.model_name), generation.vllm_cfg, extra=generation.vllm_kwargs)
    from tandem.rollout.engines.transformers import TransformersEngine

    return TransformersEngine(
        Path(policy.model_name),
        num_slots=generation.transformers_cfg.num_slots,
        max_total_sequence_length=policy.max_total_sequence_length,
        dtype=policy.precision,
    )
