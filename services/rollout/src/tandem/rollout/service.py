"""The rollout service: one engine. Prompts in, scored samples out.

It consumes `Generate` orders and weight versions, and produces samples as they finish: token ids, the log-probabilities
of the distribution each token was drawn from, the weight version that made it, and the reward. An environment may
answer a response, and then the sample goes on (`tandem.rollout.conversation`). Between two steps of the engine it looks
for orders; it waits only for environments, each of whose answers has a deadline of its own.

Without ``async_engine`` the engine stands still while an environment may answer, so that what runs together does not
depend on how long that takes. With it the engine goes on with the others, and who was answered joins at once.
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

    def __init__(self, order: Generate, first_number: int) -> None:
        self.order = order
        samples = [(group, sample) for group in order.groups for sample in range(len(group.seeds))]
        self.conversations = {
            number: Conversation(group, sample) for number, (group, sample) in enumerate(samples, first_number)
        }
        """Unfinished samples by number, which is also the number of their request."""
        self.num_samples = len(samples)
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
        self._is_async = member.config.policy.generation.is_async
        self._generations: dict[int, Generation] = {}
        """In progress, by command."""
        self._generation_of: dict[int, Generation] = {}
        """By the number of an unfinished sample."""
        self._num_samples = 0
        """That were ever asked for, which is the number of the next one."""
        self._awaited: set[int] = set()
        """Samples with the environment, which may go on."""
        self._answered: list[int] = []
        """Samples that go on."""

    def handle(self, order: RolloutOrder, arrays: Arrays) -> None:
        """Carry out one order; `Generate` goes on in `work`."""
        match order:
            case BuildEngine():
                with self._member.phase("building the engine"):
                    self._build(order)
            case Refit():
                self._refit(order)
            case InstallProgram() | ConnectMesh() | Attest():
                self._plane().handle(order)
            case Generate():
                self._start(order)
            case other:
                assert_never(other)

    def work(self) -> bool:
        """Advance the generation in progress by one token, and the digest in progress by a share of that time."""
        if not self._generations:
            return self._endpoint is not None and self._endpoint.work()
        started = time.perf_counter()
        step = next(iter(self._generations.values())).order.step
        try:
            with self._member.phase(f"generating step {step}"):
                self._advance()
        except Exception as error:
            failed = [*self._generations]
            self._give_up(failed)
            for command_id in failed:
                self._member.fail(command_id, error)
        is_digesting = self._plane().work(_DIGEST_SHARE * (time.perf_counter() - started))
        return bool(self._generations) or is_digesting

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

    def _environments(self) -> Scorer:
        assert self._scorer is not None, "the coordinator orders BuildEngine first"
        return self._scorer

    def _refit(self, order: Refit) -> None:
        """Take a version, or pass one on; requests that run go on only with a newer one, and if they are meant to.

        Orders are carried out between two steps of the engine: that is the token boundary.
        """
        engine, generation = self._built(), self._config.policy.generation
        receives = not order.only or self._member.name in order.only
        # A version that comes again mends an engine: what it made of the first attempt does not count.
        is_newer = engine.version is not None and order.version > engine.version
        keeps_requests = generation.in_flight_weight_updates and is_newer
        if receives and not keeps_requests:
            self._give_up([*self._generations])
        try:
            self._plane().handle(order)
        except Exception:
            if engine.version is None:  # torn: the coordinator asks for all of it again
                self._give_up([*self._generations])
            raise
        if receives and generation.recompute_kv_cache_after_weight_updates:
            engine.recompute_caches()

    # --- generation --------------------------------------------------------------------------------------------------

    def _start(self, order: Generate) -> None:
        """Begin a generation beside those that the coordinator still waits for."""
        if order.command_id in self._generations:
            return  # sent once more, so long after the first time that it is not known to be a repetition
        engine = self._built()
        self._give_up([command_id for command_id in self._generations if command_id < order.oldest])
        generation = Generation(order, self._num_samples)
        self._num_samples += generation.num_samples
        self._generations[order.command_id] = generation
        for number, conversation in generation.conversations.items():
            self._generation_of[number] = generation
            engine.add_request(conversation.request(number, order.sampling))

    def _give_up(self, command_ids: list[int]) -> None:
        """Stop generations that the coordinator no longer waits for."""
        for command_id in command_ids:
            numbers = self._generations.pop(command_id).conversations.keys()
            for number in numbers:
                self._built().abort(number)
                del self._generation_of[number]
            self._environments().forget(numbers)
            self._awaited.difference_update(numbers)
            self._answered = [number for number in self._answered if number not in numbers]

    def _advance(self) -> None:
        engine, environments = self._built(), self._environments()
        started = time.perf_counter()
        phase = "rewards"
        if engine.num_unfinished and (self._is_async or not self._awaited):
            phase = "generation"
            for completion in engine.step():
                self._take(completion)
        else:
            time.sleep(_REWARD_POLL_S)
        for generation in self._generations.values():
            generation.seconds[phase] += time.perf_counter() - started
        self._answer(environments.poll())
        if self._is_async or not self._awaited:
            for number in sorted(self._answered):
                generation = self._generation_of[number]
                engine.add_request(generation.conversations[number].request(number, generation.order.sampling))
            self._answered.clear()
        for generation in [*self._generations.values()]:
            if not generation.conversations:
                self._finish(generation)

    def _take(self, completion: Completion) -> None:
        """Hand a response to the environment."""
        assert self._tokenizer is not None
        environments, number = self._environments(), completion.request_id
        generation = self._generation_of[number]
        conversation = generation.conversations[number]
        conversation.add_response(completion, self._tokenizer.decode(completion.token_ids_T.tolist()))
        generation.num_tokens += len(completion.token_ids_T)
        if environments.converses and conversation.num_turns < self._config.grpo.max_rollout_turns:
            self._awaited.add(number)
        environments.submit(number, conversation.group.problem, tuple(conversation.messages))

    def _answer(self, results: list[tuple[int, Score | Turn]]) -> None:
        """Send the samples that have ended; let the others go on."""
        finished: dict[int, list[tuple[SampleScored, SampleArrays]]] = {}
        for number, result in results:
            self._awaited.discard(number)
            generation = self._generation_of[number]
            conversation = generation.conversations[number]
            if isinstance(result, Score):
                sample = conversation.finish(result, "score")
            elif (limit := self._go_on(conversation, result)) is not None:
                sample = conversation.finish(_UNSCORED, limit)
            else:
                self._answered.append(number)
                continue
            finished.setdefault(generation.order.command_id, []).append(sample)
            del generation.conversations[number], self._generation_of[number]
        for command_id, samples in finished.items():
            order = self._generations[command_id].order
            message = SamplesFinished(
                command_id=command_id,
                step=order.step,
                purpose=order.purpose,
                samples=tuple(sample for sample, _ in samples),
            )
            arrays = SampleArrays.concatenate([arrays for _, arrays in samples])
            self._member.reply(command_id, message, arrays.to_frames())

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
        del self._generations[generation.order.command_id]
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
