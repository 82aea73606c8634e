"""One sample as it grows: the policy's responses, the environment's replies, and how it ends.

Tokens in, tokens out: the next response is generated from exactly the tokens of the prompt, of the responses so far and
of the replies between them. Tokens that exist are never tokenised again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from tandem.common.messages import Media, PromptGroup, SampleScored, SamplingParameters
from tandem.rollout.engine import EngineCompletion, SequenceRequest
from tandem.rollout.environments import Score
from tandem.rollout.environments.outcomes import UnscoredResponse
from tandem.samples import chat_templates, sampling_masks
from tandem.samples.batch import Bools, Float32s, Int32s, SampleBatch
from tandem.samples.routed_experts import RoutedExperts

FinishReason = Literal["stop", "length", "turns"]
_Part = tuple[Int32s, Bools, Float32s, Int32s]
"""Token ids, loss mask, log-probabilities and versions of consecutive tokens."""


class SampleConversation:
    """One sample of a prompt group."""

    def __init__(
        self, group: PromptGroup, sample: int, experts: RoutedExperts | None = None, *, keeps_masks: bool = False
    ) -> None:
        """Begin with the prompt. `experts` describe the routing that the engine reports for each token, if it does;
        with `keeps_masks` the sample has sampling masks.
        """
        self.group = group
        self.sample = sample
        self._experts = experts
        self._routed: list[NDArray[np.uint8]] = []
        """Expert routing of each response."""
        self._keeps_masks = keeps_masks
        self._masks: list[tuple[int, sampling_masks.SamplingMasks | None]] = []
        """Sampling masks of each response, with the place of its first token."""
        self.messages: list[Mapping[str, Any]] = []
        """Messages after the prompt."""
        self.num_turns = 0
        """Responses so far."""
        self.reward = 0.0
        """Sum of the rewards of the turns so far."""
        self._token_ids: list[int] = list(group.prompt_ids)
        self._before_answer = (0, 0)
        """Messages and tokens before the environment's last reply."""
        self._num_made = 0
        self._cut_off = False
        """Whether the last response ran into a limit."""
        self._parts: list[_Part] = [_lay_out_given(group.prompt_ids)]

    @property
    def num_tokens(self) -> int:
        """Tokens of the whole sequence so far."""
        return len(self._token_ids)

    @property
    def last_id(self) -> int:
        """The last token so far."""
        return self._token_ids[-1]

    def last_ids(self, count: int) -> list[int]:
        """Return the last tokens so far, at most `count`."""
        return self._token_ids[-count:]

    def request(self, request_id: int, sampling: SamplingParameters) -> SequenceRequest:
        """Return the request to the engine for the next response."""
        return SequenceRequest(
            request_id=request_id,
            prompt_ids=tuple(self._token_ids),
            sampling=sampling,
            seed=turn_seed(self.group.seeds[self.sample], self.num_turns),
        )

    def add_response(self, completion: EngineCompletion, message: Mapping[str, Any]) -> None:
        """Append a response of the policy, and the message that it is to the environment."""
        assert completion.finish_reason != "abort", "aborted requests are given up"
        num_tokens = len(completion.token_ids_T)
        self.messages.append(message)
        self.num_turns += 1
        self._masks.append((len(self._token_ids), completion.masks))
        self._token_ids += completion.token_ids_T.tolist()
        self._num_made += num_tokens
        self._cut_off = completion.finish_reason == "length"
        if completion.routed_experts_TX is not None:
            self._routed.append(completion.routed_experts_TX)
        mask_T = np.ones(num_tokens, dtype=np.bool_)
        self._parts.append((completion.token_ids_T, mask_T, completion.logprobs_T, completion.versions_T))

    def add_answer(self, messages: chat_templates.Messages, token_ids: list[int], media: Media | None = None) -> None:
        """Append the environment's reply, as the tokens that lead from the last response to the next one.

        `media` are those of the reply, in `tandem.rollout.media.MediaConversation`.
        """
        self._before_answer = (len(self.messages), len(self._token_ids))
        self.messages += messages
        self._token_ids += token_ids
        self._parts.append(_lay_out_given(token_ids))

    def take_back_answer(self) -> None:
        """Forget the environment's last reply: it has media that cannot be read, by trainers neither."""
        num_messages, num_tokens = self._before_answer
        del self.messages[num_messages:], self._token_ids[num_tokens:], self._parts[-1]

    def finish(
        self,
        score: Score,
        cause: Literal["score", "length", "turns"],
        unscored: UnscoredResponse | None = None,
        version: int = 0,
    ) -> tuple[SampleScored, SampleBatch]:
        """Return the finished sample: ended by a score or a missing score, or by a limit that leaves no room for a
        response. `version` is the current weight version, for a sample without a response."""
        scored: FinishReason = "length" if self._cut_off else "stop"
        token_ids_T, loss_mask_T, logprobs_T, versions_T = map(np.concatenate, zip(*self._parts, strict=True))
        made_T = versions_T[loss_mask_T] if self.num_turns else np.array([version])
        oldest, newest = int(made_T.min()), int(made_T.max())
        sample = SampleScored(
            group=self.group.group,
            sample=self.sample,
            prompt_length=len(self.group.prompt_ids),
            response_length=self._num_made,
            num_tokens=len(token_ids_T),
            oldest_version=oldest,
            newest_version=newest,
            tokens_by_version=(self._num_made,) if oldest == newest else tuple(np.bincount(made_T - oldest).tolist()),
            num_turns=self.num_turns,
            finish_reason=scored if cause == "score" else cause,
            reward=self.reward + score.reward,
            components=dict(score.components),
            spent=dict(score.spent),
            correct=score.correct,
            extracted_answer=score.answer,
            response="\n".join(message.get("text", message["content"]) for message in self.messages),
            failure=unscored.failure if unscored else "",
            timed_out=unscored is not None and unscored.timed_out,
            dropped=unscored is not None and unscored.dropped,
        )
        arrays = SampleBatch(
            lengths_S=np.array([len(token_ids_T)], dtype=np.int32),
            token_ids_T=token_ids_T,
            loss_mask_T=loss_mask_T,
            generation_logprobs_T=logprobs_T,
            versions_T=versions_T,
            **({} if self._experts is None else self._experts.make_columns(self._routed, self.num_tokens)),
            **(sampling_masks.mask_columns(self.num_tokens, self._masks) if self._keeps_masks else {}),
        )
        return sample, arrays


def turn_seed(seed: int, turn: int) -> int:
    """Return the unsigned 64-bit seed of response number `turn` of a sample; the first response has the sample's
    seed."""
    if turn == 0:
        return seed
    return int.from_bytes(hashlib.blake2b(f"{seed}/{turn}".encode(), digest_size=8).digest(), "little")


def _lay_out_given(token_ids: tuple[int, ...] | list[int]) -> _Part:
    """Lay out tokens that the policy did not generate."""
    num_tokens = len(token_ids)
    return (
        np.array(token_ids, dtype=np.int32),
        np.zeros(num_tokens, dtype=np.bool_),
        np.zeros(num_tokens, dtype=np.float32),
        np.full(num_tokens, -1, dtype=np.int32),
    )
