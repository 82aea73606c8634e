"""The rollout service: one engine. Prompts in, scored samples out.

It consumes `Generate` orders and weight versions, and produces samples as they finish: token ids, the log-probabilities
of the distribution each token was drawn from, the weight version that made it, and the reward. Tokens in, tokens out:
nothing is ever re-tokenised. Between two steps of the engine it looks for orders; it waits only for rewards, each of
which has a deadline of its own.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import assert_never

import numpy as np

from tandem.common.batch import SampleArrays
from tandem.common.config import Config
from tandem.common.messages import (
    Attest,
    BuildEngine,
    ConnectMesh,
    EngineBuilt,
    Generate,
    Generated,
    InstallProgram,
    PromptGroup,
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
from tandem.rollout.engine import Completion, Engine, Request
from tandem.rollout.environments import Score, Scorer

_REWARD_POLL_S = 0.001
_DIGEST_SHARE = 0.25
"""Of the time between tokens that goes into attesting the version they are made with."""


class Generation:
    """One `Generate` in progress."""

    def __init__(self, order: Generate) -> None:
        self.order = order
        self.requests: dict[int, tuple[PromptGroup, int]] = {}
        """Group and position within it, by request id."""
        self.completions: dict[int, Completion] = {}
        """Finished and not yet sent."""
        self.texts: dict[int, str] = {}
        self.num_sent = 0
        self.num_tokens = 0
        self.seconds = {"generation": 0.0, "rewards": 0.0}
        for group in order.groups:
            for sample in range(len(group.seeds)):
                self.requests[len(self.requests)] = (group, sample)

    def request(self, request_id: int) -> Request:
        """Return what the engine is asked for."""
        group, sample = self.requests[request_id]
        return Request(
            request_id=request_id,
            prompt_ids=group.prompt_ids,
            sampling=self.order.sampling,
            seed=group.seeds[sample],
        )


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
        reply = EngineBuilt(command_id=order.command_id, layout=layout.encode(self._engine.layout()))
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
        for request_id in self._generation.requests:
            engine.add_request(self._generation.request(request_id))

    def _abandon_generation(self) -> None:
        """Stop a generation that the coordinator no longer waits for."""
        if self._generation is None:
            return
        for request_id in self._generation.requests:
            self._built().abort(request_id)
        if self._scorer is not None:
            self._scorer.reset()
        self._generation = None

    def _advance(self, generation: Generation) -> None:
        engine, scorer, tokenizer = self._built(), self._scorer, self._tokenizer
        assert scorer is not None
        assert tokenizer is not None
        started = time.perf_counter()
        if engine.num_unfinished:
            for completion in engine.step():
                group, _ = generation.requests[completion.request_id]
                text = tokenizer.decode(completion.token_ids_T.tolist())
                generation.completions[completion.request_id] = completion
                generation.texts[completion.request_id] = text
                generation.num_tokens += len(completion.token_ids_T)
                scorer.submit(completion.request_id, group.problem, text)
            generation.seconds["generation"] += time.perf_counter() - started
        else:
            time.sleep(_REWARD_POLL_S)
            generation.seconds["rewards"] += time.perf_counter() - started
        self._send(generation, scorer.poll())
        if generation.num_sent == len(generation.requests):
            self._finish(generation)

    def _send(self, generation: Generation, scores: list[tuple[int, Score]]) -> None:
        """Send the samples that were just scored."""
        if not scores:
            return
        order = generation.order
        samples: list[SampleScored] = []
        rows: list[SampleArrays] = []
        for request_id, score in scores:
            group, sample = generation.requests[request_id]
            completion = generation.completions.pop(request_id)
            samples.append(_describe(group, sample, completion, score, generation.texts.pop(request_id)))
            rows.append(_arrays(group, completion))
        generation.num_sent += len(samples)
        message = SamplesFinished(
            command_id=order.command_id, step=order.step, purpose=order.purpose, samples=tuple(samples)
        )
        self._member.reply(order.command_id, message, SampleArrays.concatenate(rows).to_frames())

    def _finish(self, generation: Generation) -> None:
        self._generation = None
        reply = Generated(
            command_id=generation.order.command_id,
            step=generation.order.step,
            purpose=generation.order.purpose,
            num_samples=generation.num_sent,
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


def _describe(group: PromptGroup, sample: int, completion: Completion, score: Score, text: str) -> SampleScored:
    assert completion.finish_reason != "abort", "aborted requests are not scored"
    return SampleScored(
        group=group.group,
        sample=sample,
        prompt_length=len(group.prompt_ids),
        response_length=len(completion.token_ids_T),
        finish_reason=completion.finish_reason,
        reward=score.reward,
        correct=score.correct,
        response=text,
    )


def _arrays(group: PromptGroup, completion: Completion) -> SampleArrays:
    """Lay prompt and response end to end."""
    num_prompt, num_response = len(group.prompt_ids), len(completion.token_ids_T)
    return SampleArrays(
        lengths_S=np.array([num_prompt + num_response], dtype=np.int32),
        token_ids_T=np.concatenate([np.array(group.prompt_ids, dtype=np.int32), completion.token_ids_T]),
        loss_mask_T=np.concatenate([np.zeros(num_prompt, dtype=np.bool_), np.ones(num_response, dtype=np.bool_)]),
        generation_logprobs_T=np.concatenate([np.zeros(num_prompt, dtype=np.float32), completion.logprobs_T]),
        versions_T=np.concatenate([np.full(num_prompt, -1, dtype=np.int32), completion.versions_T]),
    )
