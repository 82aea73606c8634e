"""Sampling sessions, and the samples that clients ask of them: each is a task that asks an engine.

When a sample may begin is decided elsewhere (`tandem.serving.tinker.placing`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tandem.serving.tinker import gradients, placing, proto, requests, sampling
from tandem.serving.tinker.calls import SCORES, Answer, CallDesk, CallFailed, GradientsScored
from tandem.serving.tinker.futures import FinishedRequest, RequestFutures, RequestSummary, failure

_SAMPLES_OF_A_CLIENT = 10**9
"""Numbers of the requests of one client of a sampling session: a copy of the client has those of another billion."""
_MOST_KEPT = 1 << 16
"""Sampling sessions that are known; the oldest are forgotten."""


class ClientSamplers:
    """The sampling sessions of clients. Methods raise `TinkerRefused`."""

    def __init__(
        self,
        desk: CallDesk,
        engines: sampling.SamplingEngines,
        futures: RequestFutures,
        limits: gradients.ClientLimits,
        put: placing.Put,
        check_room: Callable[[str, RequestSummary], None],
    ) -> None:
        """Begin without any.

        `put` puts a call on the desk, and `check_room` raises `TinkerRefused` if a key has too much in progress.
        """
        self._desk = desk
        self._engines = engines
        self._futures = futures
        self._limits = limits
        self._put = put
        self._check_room = check_room
        self._places = placing.places_of(desk, engines, put)
        self._samplers: dict[str, placing.SamplingSession] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def add(self, sampler: placing.SamplingSession) -> None:
        """Begin a session."""
        self._samplers[sampler.sampler_id] = sampler
        if len(self._samplers) > _MOST_KEPT:
            del self._samplers[next(iter(self._samplers))]

    def get(self, owner: str, sampler_id: str) -> placing.SamplingSession:
        """Return a session."""
        sampler = self._samplers.get(sampler_id)
        if sampler is None or sampler.owner != owner:
            raise requests.TinkerRefused(f"there is no sampling session {sampler_id!r}", 404)
        return sampler

    def sample(self, owner: str, body: requests.SampleRequest) -> dict[str, Any]:
        """Begin to sample."""
        if body.sampling_session_id is None or body.seq_id is None:
            raise requests.TinkerRefused(
                "sampling_session_id with seq_id is needed: samples without a session are not served"
            )
        sampler = self.get(owner, body.sampling_session_id)
        request_id = f"{sampler.sampler_id}:{body.seq_id}"
        sequence_ids = [f"{request_id}:{number}" for number in range(body.num_samples)]
        reply = {"request_id": request_id, "sample_sequence_ids": sequence_ids}
        if self._futures.get(request_id, owner) is not None or self._futures.is_dropped(request_id, owner):
            return reply
        for name in ("prompt_alt_tokens_k", "target_prompt_logprobs"):
            if getattr(body, name):
                raise requests.TinkerRefused(f"{name}: is not served")
        if body.record_stability_info:
            raise requests.TinkerRefused(
                "record_stability_info: is not served, nor is stable_reinforce; importance_sampling is"
            )
        if any(chunk.type != "encoded_text" for chunk in body.prompt.chunks):
            raise requests.TinkerRefused("prompt: images and audio are not served; only encoded_text is")
        token_ids = [token for chunk in body.prompt.chunks for token in chunk.tokens]
        if token_ids and max(token_ids) >= self._limits.vocabulary:
            raise requests.TinkerRefused(f"prompt: token ids must be from 0 to {self._limits.vocabulary - 1}")
        last = body.prompt_logprobs_last_n
        if last is not None and not (body.prompt_logprobs and 1 <= last < len(token_ids)):
            raise requests.TinkerRefused(
                "prompt_logprobs_last_n: must be from 1 to below the prompt's tokens, with prompt_logprobs"
            )
        question = self._engines.question(body, token_ids)
        scoring = self._engines.question_of_prompt(body, token_ids)
        about = RequestSummary(
            kind="sample",
            model=sampler.sampler_id,
            num_sequences=body.num_samples,
            num_tokens=body.num_samples * (len(token_ids) + question["max_tokens"])
            + (0 if scoring is None else len(token_ids)),
        )
        if about.num_tokens > self._limits.most_tokens:
            raise requests.TinkerRefused(
                f"num_samples: up to {about.num_tokens} tokens, and a key may have {self._limits.most_tokens}"
            )
        self._check_room(owner, about)
        self._futures.begin(request_id, owner, about, _batch_of(sampler, body.seq_id // _SAMPLES_OF_A_CLIENT))
        task = asyncio.create_task(self._sample(sampler, request_id, question, scoring, body))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return reply

    async def _sample(
        self,
        sampler: placing.SamplingSession,
        request_id: str,
        question: dict[str, Any],
        scoring: dict[str, Any] | None,
        body: requests.SampleRequest,
    ) -> None:
        (token_ids,) = question["prompt"]
        try:
            async with self._places.place(sampler, body.num_samples) as (number, ask):
                prompt_logprobs = await self._scores_of(token_ids, number) if body.prompt_logprobs else None
                if prompt_logprobs is not None and body.prompt_logprobs_last_n is not None:
                    prompt_logprobs[: -body.prompt_logprobs_last_n] = np.nan
                samples = await ask(question)
                likeliest = [] if scoring is None else (await ask(scoring)).sequences[0].likeliest
            num_tokens = sum(len(token_ids) + len(each.token_ids) for each in samples.sequences)
            num_unscored = len(token_ids) - (body.prompt_logprobs_last_n or len(token_ids))
            likeliest[:num_unscored] = [()] * num_unscored
            num = body.topk_prompt_logprobs
            output = proto.sample_output(
                samples.sequences, prompt_logprobs, (likeliest, num) if num else None, body.topk_sample_logprobs
            )
            self._futures.finish(request_id, FinishedRequest(output, is_proto=True, num_tokens=num_tokens))
        except (sampling.NoAnswer, CallFailed) as error:
            self._fail(request_id, str(error), is_users=error.is_users)
        except Exception as error:
            self._fail(request_id, f"{type(error).__name__} while sampling")
            raise

    async def wait_until_ended(self, owner: str, body: requests.RetrieveMany, timeout_s: float) -> dict[str, Any]:
        """Wait until samples of a client have ended, and return which."""
        sampler = self.get(owner, body.target.sampling_session_id)
        batch = _batch_of(sampler, body.target.cloned_sampler_id)
        for request_id in body.retrieved_request_ids:
            self._futures.drop_seen(request_id, batch)
        wait_s = timeout_s if body.timeout is None else min(body.timeout, timeout_s)
        ended, cursor = await self._futures.ends(batch, body.prev_cursor, wait_s)
        completions: list[dict[str, Any]] = []
        for request_id, result in ended.items():
            if result is None or result.why_failed:
                completions.append({"state": "failed", "request_id": request_id})
            else:
                size = len(result.body)
                completions.append(
                    {"state": "finished", "request_id": request_id, "response_payload_uncompressed_size": size}
                )
        return {"completions": completions, "cursor": cursor}

    async def _scores_of(self, token_ids: list[int], number: int) -> NDArray[np.float32]:
        """Return the log-probabilities of a prompt's tokens, NaN for the first. Raises `CallFailed`."""
        logprobs = np.full(len(token_ids), np.nan, dtype=np.float32)
        if len(token_ids) < 2:
            return logprobs
        answered: asyncio.Future[Answer | CallFailed] = asyncio.get_running_loop().create_future()

        def finish(answer: Answer | CallFailed) -> None:
            if not answered.done():
                answered.set_result(answer)

        self._put(gradients.scores_call(token_ids), finish, number, SCORES)
        answer = await answered
        if isinstance(answer, CallFailed):
            raise answer
        assert isinstance(answer, GradientsScored), "as asked for"
        logprobs[1:] = answer.logprobs[0][1:]
        return logprobs

    def _fail(self, request_id: str, reason: str, *, is_users: bool = False) -> None:
        self._futures.finish(request_id, failure(reason, is_users=is_users))


def _batch_of(sampler: placing.SamplingSession, client: int) -> str:
    return f"{sampler.sampler_id}:{client}"
