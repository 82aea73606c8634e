"""A session: one episode's requests to the policy and their responses, as a tree of tokens.

A request continues the longest exchange of which it repeats all messages. It is generated from the very tokens of that
exchange; only its new messages are rendered and tokenised. A request that repeats no exchange, or that changes
something said before, begins anew. A request that is repeated is answered again.

So an episode is a tree with responses as its nodes. Training uses its branches: the path from a first request to each
response that nothing follows. Tokens that several branches share count in the first of them only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from tandem.common.messages import Branch, Media, PromptGroup, SampleScored
from tandem.rollout.engine import EngineCompletion
from tandem.rollout.environments import Score
from tandem.rollout.environments.outcomes import UnscoredResponse
from tandem.samples import chat_templates, routed_experts, sampling_masks
from tandem.samples.batch import SampleBatch, media_columns
from tandem.samples.tokenizer import Tokenizer

ChatMessages = Sequence[Mapping[str, Any]]


class AgentExchange(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A response, and what it answers."""

    parent: int | None
    """Number of the exchange that it continues."""
    messages: ChatMessages
    """The whole conversation, response included; empty if tokens or a text were continued rather than a chat."""
    variables: Mapping[str, Any]
    """Variables given to the chat template besides the messages."""
    token_ids: tuple[int, ...]
    """Tokens of the whole sequence."""
    num_given: int
    """Tokens before the response."""
    completion: EngineCompletion
    media: Media = ()
    """Media among its tokens, in order."""
    role: int = 0
    """Place of the role that the policy plays in it among the session's."""


class EpisodeSession:
    """The exchanges of one episode."""

    def __init__(
        self,
        group: PromptGroup,
        sample: int,
        tokenizer: Tokenizer,
        experts: routed_experts.RoutedExperts | None = None,
        *,
        keeps_masks: bool = False,
        roles: Sequence[str] = (),
    ) -> None:
        """Begin an empty session.

        `experts` describe the routing that the engine reports for each token, if it does; with `keeps_masks` sequences
        have sampling masks. The policy plays `roles`, if it plays several.
        """
        self._experts = experts
        self._keeps_masks = keeps_masks
        self.roles = tuple(roles)
        self.group = group
        self.sample = sample
        self.exchanges: list[AgentExchange] = []
        """Exchanges, in the order in which they were answered."""
        self._tokenizer = tokenizer

    def prompt_of(self, messages: ChatMessages, variables: Mapping[str, Any], role: int = 0) -> list[int]:
        """Return the tokens from which a conversation of a role continues. Raises what `Tokenizer.encode_chat`
        raises."""
        exchange = self._continued(messages, variables, role)
        if exchange is None:
            return self._tokenizer.encode_chat(messages, add_generation_prompt=True, variables=variables)
        new_messages = messages[len(exchange.messages) :]
        last_id, turn = exchange.token_ids[-1], exchange.messages[-1]
        return [*exchange.token_ids, *self._tokenizer.encode_continuation(new_messages, last_id, variables, turn)]

    def add(
        self,
        prompt_ids: Sequence[int],
        completion: EngineCompletion,
        messages: ChatMessages = (),
        variables: Mapping[str, Any] | None = None,
        media: Media = (),
        role: int = 0,
    ) -> None:
        """Note a response as the agent receives it. The prompt's tokens and media tell which exchange it continues.

        `messages` are those of the whole conversation, the response included, and `media` those of the prompt.
        """
        exchange = AgentExchange(
            parent=self._parent(prompt_ids, media, role),
            messages=messages,
            variables=variables or {},
            token_ids=(*prompt_ids, *completion.token_ids_T.tolist()),
            num_given=len(prompt_ids),
            completion=completion,
            media=media,
            role=role,
        )
        self.exchanges.append(exchange)

    def finish(
        self, score: Score, version: int, unscored: UnscoredResponse | None = None
    ) -> tuple[SampleScored, SampleBatch]:
        """Return the episode as a sample with its branches as sequences.

        `version` is the current weight version, for an episode that made no request.
        """
        parts = self._branches()
        unplayed = () if parts else [self._sequence(self.group.prompt_ids, self.group.media or ())]
        arrays = SampleBatch.concatenate([*(arrays for arrays, _ in parts), *unplayed])
        branches = tuple(branch for _, branch in parts)
        made_versions_T = arrays.versions_T[arrays.loss_mask_T] if branches else np.array([version])
        counts = np.bincount(made_versions_T - made_versions_T.min()) * bool(branches)
        was_cut = bool(self.exchanges) and self.exchanges[-1].completion.finish_reason == "length"
        sample = SampleScored(
            group=self.group.group,
            sample=self.sample,
            prompt_length=branches[0].prompt_length if branches else len(self.group.prompt_ids),
            response_length=sum(branch.num_made for branch in branches),
            num_tokens=len(arrays.token_ids_T),
            branches=branches,
            roles=self._branch_roles() if self.roles else (),
            role_rewards=tuple(score.components.get(name, 0.0) for name in self.roles),
            oldest_version=int(made_versions_T.min()),
            newest_version=int(made_versions_T.max()),
            tokens_by_version=tuple(counts.tolist()),
            num_turns=len(self.exchanges),
            finish_reason="length" if was_cut else "stop",
            reward=score.reward,
            components=dict(score.components),
            correct=score.correct,
            response=self._text(),
            failure=unscored.failure if unscored else "",
            timed_out=unscored is not None and unscored.timed_out,
            dropped=unscored is not None and unscored.dropped,
        )
        return sample, arrays

    def _continued(self, messages: ChatMessages, variables: Mapping[str, Any], role: int) -> AgentExchange | None:
        """Return the longest exchange that a conversation repeats and continues."""
        candidates = [
            exchange
            for exchange in self.exchanges
            if exchange.messages
            and exchange.role == role
            and exchange.variables == variables
            and len(exchange.messages) < len(messages)
            and _repeats(messages[: len(exchange.messages)], exchange.messages)
        ]
        return max(candidates, key=lambda exchange: len(exchange.messages), default=None)

    def _parent(self, prompt_ids: Sequence[int], media: Media, role: int) -> int | None:
        candidates = [
            (len(exchange.token_ids), number)
            for number, exchange in enumerate(self.exchanges)
            if len(exchange.token_ids) < len(prompt_ids)
            and exchange.role == role
            and exchange.token_ids == tuple(prompt_ids[: len(exchange.token_ids)])
            and exchange.media == media[: len(exchange.media)]
        ]
        return max(candidates, key=lambda item: item[0], default=(0, None))[1]  # of several equal ones, the first

    def _branch_roles(self) -> tuple[int, ...]:
        """Return the role of each of `_branches`."""
        followed = {exchange.parent for exchange in self.exchanges}
        return tuple(exchange.role for leaf, exchange in enumerate(self.exchanges) if leaf not in followed)

    def _branches(self) -> list[tuple[SampleBatch, Branch]]:
        """Return a sequence for each response that nothing follows, in the order of these responses."""
        followed = {exchange.parent for exchange in self.exchanges}
        counted: set[int] = set()
        branches = []
        for leaf in range(len(self.exchanges)):
            if leaf in followed:
                continue
            path = self._path(leaf)
            uncounted = [number for number in path if number not in counted]
            counted.update(uncounted)
            responses = [(self.exchanges[number].num_given, self.exchanges[number].completion) for number in uncounted]
            token_ids = self.exchanges[leaf].token_ids
            branch = Branch(
                prompt_length=responses[0][0],
                num_made=sum(len(completion.token_ids_T) for _, completion in responses),
                num_tokens=len(token_ids),
            )
            branches.append((self._sequence(token_ids, self.exchanges[leaf].media, responses, path), branch))
        return branches

    def _sequence(
        self,
        token_ids: Sequence[int],
        media: Media,
        responses: Sequence[tuple[int, EngineCompletion]] = (),
        path: Sequence[int] = (),
    ) -> SampleBatch:
        """Lay out a sequence in which these responses count, each from its place on; `path` are all of its
        responses."""
        arrays = _laid_out(token_ids, responses)
        if self._tokenizer.takes_media:
            arrays = arrays.replace(**media_columns([media]))
        if self._keeps_masks:
            masks = [(first, completion.masks) for first, completion in responses]
            arrays = arrays.replace(**sampling_masks.mask_columns(len(token_ids), masks))
        if self._experts is None:
            return arrays
        routed_parts = [self.exchanges[number].completion.routed_experts_TX for number in path]
        routings = [routing_TX for routing_TX in routed_parts if routing_TX is not None]
        return arrays.replace(**self._experts.make_columns(routings, len(token_ids)))

    def _path(self, leaf: int) -> list[int]:
        path: list[int] = []
        number: int | None = leaf
        while number is not None:
            path.append(number)
            number = self.exchanges[number].parent
        return path[::-1]

    def _text(self) -> str:
        """Return what followed the first prompt, branch by branch, for display."""
        followed = {exchange.parent for exchange in self.exchanges}
        texts = []
        for leaf in range(len(self.exchanges)):
            if leaf not in followed:
                exchange = self.exchanges[leaf]
                num_first = self.exchanges[self._path(leaf)[0]].num_given
                texts.append(self._tokenizer.decode(exchange.token_ids[num_first:]))
        return "\n---\n".join(texts)


def _repeats(messages: ChatMessages, exchanged: ChatMessages) -> bool:
    """Return whether messages are the known ones; clients that do not know of reasoning send none back."""
    return all(
        message == exchanged_message
        or (
            chat_templates.reasoning_of(message) in (None, chat_templates.reasoning_of(exchanged_message))
            and _plain(message) == _plain(exchanged_message)
        )
        for message, exchanged_message in zip(messages, exchanged, strict=True)
    )


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in message.items() if name not in chat_templates.REASONING_FIELDS}


def _laid_out(token_ids: Sequence[int], responses: Sequence[tuple[int, EngineCompletion]]) -> SampleBatch:
    """Lay out a sequence in which these responses count, each from its place on."""
    num_tokens = len(token_ids)
    mask_T = np.zeros(num_tokens, dtype=np.bool_)
    logprobs_T = np.zeros(num_tokens, dtype=np.float32)
    versions_T = np.full(num_tokens, -1, dtype=np.int32)
    for first, completion in responses:
        place = slice(first, first + len(completion.token_ids_T))
        mask_T[place], logprobs_T[place], versions_T[place] = True, completion.logprobs_T, completion.versions_T
    return SampleBatch(
        lengths_S=np.array([num_tokens], dtype=np.int32),
        token_ids_T=np.array(token_ids, dtype=np.int32),
        loss_mask_T=mask_T,
        generation_logprobs_T=logprobs_T,
        versions_T=versions_T,
    )
