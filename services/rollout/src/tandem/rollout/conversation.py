"""One sample as it grows: the policy's responses, the environment's replies, and how it ends.

Tokens in, tokens out: the next response is generated from exactly the tokens of the prompt, of the responses so far and
of the replies between them. Tokens that exist are never tokenised again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tandem.common.messages import PromptGroup, SampleScored, SamplingParameters
from tandem.rollout.engine import Completion, Request
from tandem.rollout.environments import Score
from tandem.rollout.environments.scorer import Unscored
from tandem.samples.batch import Batch
from tandem.samples.chat_templates import Messages
from tandem.samples.routed_experts import COLUMN, RoutedExperts

FinishReason = Literal["stop", "length", "turns"]


class Conversation:
    """One sample of a prompt group."""

    def __init__(self, group: PromptGroup, sample: int, experts: RoutedExperts | None = None) -> None:
        """Begin with the prompt. `experts` describe the routing that the engine reports for each token, if it does."""
        self.group = group
        self.sample = sample
        self._experts = experts
        self._routed: list[NDArray[np.uint8]] = []
        """Expert routing of each response."""
        self.messages: list[Mapping[str, str]] = []
        """Messages after the prompt."""
        self.num_turns = 0
        """Responses so far."""
        self.reward = 0.0
        """Sum of the rewards of the turns so far."""
        self._token_ids: list[int] = list(group.prompt_ids)
        self._num_made = 0
        self._cut_off = False
        """Whether the last response ran into a limit."""
        self._parts: list[Batch] = [_given(group.prompt_ids)]

    @property
    def num_tokens(self) -> int:
        """Tokens of the whole sequence so far."""
        return len(self._token_ids)

    @property
    def last_id(self) -> int:
        """The last token so far."""
        return self._token_ids[-1]

    def request(self, request_id: int, sampling: SamplingParameters) -> Request:
        """Return the request to the engine for the next response."""
        return Request(
            request_id=request_id,
            prompt_ids=tuple(self._token_ids),
            sampling=sampling,
            seed=turn_seed(self.group.seeds[self.sample], self.num_turns),
        )

    def add_response(self, completion: Completion, text: str) -> None:
        """Append a response of the policy."""
        assert completion.finish_reason != "abort", "aborted requests are given up"
        num_tokens = len(completion.token_ids_T)
        self.messages.append({"role": "assistant", "content": text})
        self.num_turns += 1
        self._token_ids += completion.token_ids_T.tolist()
        self._num_made += num_tokens
        self._cut_off = completion.finish_reason == "length"
        if completion.routed_experts_TX is not None:
            self._routed.append(completion.routed_experts_TX)
        self._parts.append(
            Batch(
                lengths_S=np.array([num_tokens], dtype=np.int32),
                token_ids_T=completion.token_ids_T,
                loss_mask_T=np.ones(num_tokens, dtype=np.bool_),
                generation_logprobs_T=completion.logprobs_T,
                versions_T=completion.versions_T,
            )
        )

    def add_answer(self, messages: Messages, token_ids: list[int]) -> None:
        """Append the environment's reply, as the tokens that lead from the last response to the next one."""
        self.messages += messages
        self._token_ids += token_ids
        self._parts.append(_given(token_ids))

    def finish(
        self, score: Score, cause: Literal["score", "length", "turns"], unscored: Unscored | None = None
    ) -> tuple[SampleScored, Batch]:
        """Return the finished sample: ended by a score or a missing score, or by a limit that leaves no room for a
        response."""
        scored: FinishReason = "length" if self._cut_off else "stop"
        parts = Batch.concatenate(self._parts)
        made_versions_T = parts.versions_T[parts.loss_mask_T]
        sample = SampleScored(
            group=self.group.group,
            sample=self.sample,
            prompt_length=len(self.group.prompt_ids),
            response_length=self._num_made,
            num_tokens=self.num_tokens,
            oldest_version=int(made_versions_T.min()),
            newest_version=int(made_versions_T.max()),
            tokens_by_version=tuple(np.bincount(made_versions_T - made_versions_T.min()).tolist()),
            num_turns=self.num_turns,
            finish_reason=scored if cause == "score" else cause,
            reward=self.reward + score.reward,
            components=dict(score.components),
            spent=dict(score.spent),
            correct=score.correct,
            extracted_answer=score.answer,
            response="\n".join(message["content"] for message in self.messages),
            failure=unscored.failure if unscored else "",
            timed_out=unscored is not None and unscored.timed_out,
            dropped=unscored is not None and unscored.dropped,
        )
        own = {"lengths_S": np.array([len(parts.token_ids_T)], dtype=np.int32)}
        routed = {} if self._experts is None else {COLUMN: self._experts.of_sequence(self._routed, self.num_tokens)}
        return sample, parts.replace(**own, **routed)


def turn_seed(seed: int, turn: int) -> int:
    """Return the unsigned 64-bit seed of response number `turn` of a sample; the first response has the sample's
    seed."""
    if turn == 0:
        return seed
    return int.from_bytes(hashlib.blake2b(f"{seed}/{turn}".encode(), digest_size=8).digest(), "little")


def _given(token_ids: tuple[int, ...] | list[int]) -> Batch:
    """Lay out tokens that the policy did not generate."""
    num_tokens = len(token_ids)
    return Batch(
        lengths_S=np.array([num_tokens], dtype=np.int32),
        token_ids_T=np.array(token_ids, dtype=np.int32),
        loss_mask_T=np.zeros(num_tokens, dtype=np.bool_),
        generation_logprobs_T=np.zeros(num_tokens, dtype=np.float32),
        versions_T=np.full(num_tokens, -1, dtype=np.int32),
    )
