"""Options of served requests beyond training's: penalties, alternatives, a grammar, scores of prompts.

They wrap an engine's forward pass, which knows nothing of them. An engine that was never asked for any is not wrapped,
and training never asks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Protocol

import msgspec
import numpy as np
import torch
from msgspec import Meta
from numpy.typing import NDArray

from tandem.common.messages import SamplingParameters
from tandem.rollout.engine import Alternatives, EngineCompletion, NewTokens, PromptScores, SequenceRequest
from tandem.rollout.engines.sampling import restrict
from tandem.rollout.engines.slots import EngineSlots

Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]
_MOST_LOGITS = 1 << 27
"""Logits of a prompt that are computed at once to score it: half a gigabyte of them."""
Factor = Annotated[float, Meta(gt=0.0, le=100.0)]


class GrammarMatcher(Protocol):
    """The state of a response within a grammar."""

    def take(self, token_ids: Sequence[int]) -> None:
        """Advance by these tokens of the response."""
        ...

    def allowed_V(self, num_tokens: int) -> NDArray[np.bool_]:
        """Return, for each token of the vocabulary, whether it may come next."""
        ...


class ResponseGrammar(Protocol):
    """A constraint on a response."""

    def begin(self) -> GrammarMatcher:
        """Return a matcher for an empty response."""
        ...


class ServedSampling(SamplingParameters, frozen=True, kw_only=True):
    """Sampling parameters of a request that asks for more than training does. They never leave the process."""

    presence_penalty: Penalty = 0.0
    """Value subtracted from the logit of every token that occurs in the response."""
    frequency_penalty: Penalty = 0.0
    """Value subtracted from a token's logit for each of its occurrences in the response."""
    repetition_penalty: Factor = 1.0
    """Factor that divides positive logits and multiplies negative ones, for tokens of the prompt or the response."""
    num_alternatives: int = 0
    """Number of likeliest tokens to return at each position, with their log-probabilities."""
    scores_prompt: bool = False
    """Whether the probabilities of the prompt's tokens are asked for, with as many alternatives."""
    grammar: ResponseGrammar | None = None
    """Grammar of the response; None allows anything."""
    weight_version: int | None = None
    """Version that makes the response; None for the newest one that the engine holds."""
    kept_versions: tuple[int, ...] = ()
    """Versions that other requests may name next, if the engine holds several (`tandem.rollout.engines.adapters`)."""

    @property
    def changes_logits(self) -> bool:
        """Whether logits have to be looked at, or changed."""
        return self.has_penalties or self.num_alternatives > 0 or self.grammar is not None or self.scores_prompt

    @property
    def has_penalties(self) -> bool:
        """Whether any penalty changes a logit."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)


def penalised(
    logits_V: torch.Tensor, sampling: ServedSampling, prompt_ids: list[int], made_ids: list[int]
) -> torch.Tensor:
    """Return the logits with penalties applied, in vLLM's order: repetition, frequency, presence."""
    logits_V = logits_V.clone()
    if sampling.repetition_penalty != 1.0:
        seen = torch.tensor(sorted({*prompt_ids, *made_ids}), device=logits_V.device)
        seen_logits = logits_V[seen]
        factor = sampling.repetition_penalty
        logits_V[seen] = torch.where(seen_logits > 0, seen_logits / factor, seen_logits * factor)
    if made_ids:
        made_T = torch.tensor(made_ids, device=logits_V.device)
        count_V = torch.bincount(made_T, minlength=len(logits_V)).to(logits_V.dtype)
        logits_V -= sampling.frequency_penalty * count_V
        logits_V -= sampling.presence_penalty * (count_V > 0).to(logits_V.dtype)
    return logits_V


def alternatives_in(logits_V: torch.Tensor, sampling: ServedSampling) -> Alternatives:
    """Return the likeliest tokens, with their log-probabilities in the distribution of the next token."""
    if sampling.temperature == 0:  # the point mass on the largest logit
        return [(int(logits_V.argmax()), 0.0)]
    scaled_V = logits_V.float() / sampling.temperature
    if sampling.top_k or sampling.top_p < 1 or sampling.min_p:
        limits = torch.tensor([sampling.top_k]), torch.tensor([sampling.top_p]), torch.tensor([sampling.min_p])
        scaled_V = restrict(scaled_V[None], *(limit_1.to(scaled_V.device) for limit_1 in limits))[0]
    logprob_N, token_N = scaled_V.log_softmax(dim=-1).topk(min(sampling.num_alternatives, len(scaled_V)))
    likeliest = zip(token_N.tolist(), logprob_N.tolist(), strict=True)
    return [(token, logprob) for token, logprob in likeliest if logprob > -np.inf]


class ServedForward:
    """A forward pass with the options of served requests, which keeps the alternatives that it sees."""

    def __init__(
        self,
        forward: Callable[[], torch.Tensor],
        slots: EngineSlots,
        compute_prompt: Callable[[int, torch.Tensor], torch.Tensor],
    ) -> None:
        """Wrap a forward pass.

        Args:
            forward: returns a row of logits for each running sequence of `slots`.
            slots: those of the engine.
            compute_prompt: returns the logits ``[K, V]`` after these ``K`` tokens of a slot's prompt.

        """
        self._forward = forward
        self._compute_prompt = compute_prompt
        self._prompt_scores: dict[int, PromptScores] = {}
        """Scores of prompts by request."""
        self._slots = slots
        self._alternatives: dict[int, list[Alternatives]] = {}
        """Alternatives by request."""
        self._matchers: dict[int, tuple[GrammarMatcher, int]] = {}
        """Matchers by request, with the number of tokens that each has taken."""

    @torch.inference_mode()
    def __call__(self) -> torch.Tensor:
        """Return the logits ``[R, V]`` from which the next tokens are drawn."""
        logits_RV = self._forward()
        for row, sequence in enumerate(self._slots.sequences):
            request = sequence.request
            if isinstance(request.sampling, ServedSampling) and request.sampling.changes_logits:
                logits_RV[row] = self._served(logits_RV[row], row, request, request.sampling)
                if request.sampling.scores_prompt and request.request_id not in self._prompt_scores:
                    scores = self._score_prompt(row, request, request.sampling, logits_RV.shape[-1])
                    self._prompt_scores[request.request_id] = scores
        return logits_RV

    def complement(self, new_tokens: Mapping[int, NewTokens], starts: Mapping[int, int]) -> dict[int, NewTokens]:
        """Add alternatives, and with a first token the prompt's scores, to what requests have made since `starts`."""
        return {
            number: msgspec.structs.replace(
                tokens,
                alternatives=self._alternatives[number][starts[number] :] if number in self._alternatives else None,
                prompt_scores=None if starts[number] else self._prompt_scores.get(number),
            )
            for number, tokens in new_tokens.items()
        }

    def finish(self, completion: EngineCompletion) -> EngineCompletion:
        """Add alternatives and the prompt's scores to a finished request, and forget it."""
        self._matchers.pop(completion.request_id, None)
        alternatives = self._alternatives.pop(completion.request_id, None)
        scores = self._prompt_scores.pop(completion.request_id, None)
        if alternatives is None and scores is None:
            return completion
        return msgspec.structs.replace(completion, alternatives=alternatives, prompt_scores=scores)

    def _score_prompt(
        self, row: int, request: SequenceRequest, sampling: ServedSampling, vocabulary: int
    ) -> PromptScores:
        """Return the probabilities of a prompt's tokens. It is computed once more, for few logits at a time."""
        token_T = torch.tensor(request.prompt_ids)
        parts: list[NDArray[np.float32]] = []
        alternatives: list[Alternatives] = []
        num_at_once = max(1, _MOST_LOGITS // vocabulary)
        for start in range(0, len(token_T) - 1, num_at_once):
            place_K = torch.arange(start, min(start + num_at_once, len(token_T) - 1))
            logprobs_KV = self._compute_prompt(row, place_K).float().log_softmax(dim=-1)
            next_K = token_T[place_K + 1].to(logprobs_KV.device)
            parts.append(logprobs_KV.gather(1, next_K[:, None])[:, 0].cpu().numpy())
            logprob_KN, token_KN = logprobs_KV.topk(min(sampling.num_alternatives, vocabulary))
            pairs = zip(token_KN.tolist(), logprob_KN.tolist(), strict=True)
            alternatives += [[*zip(token_N, logprob_N, strict=True)] for token_N, logprob_N in pairs]
        return PromptScores(logprobs_P=np.concatenate([*parts, np.zeros(0, np.float32)]), alternatives=alternatives)

    def _served(
        self, logits_V: torch.Tensor, row: int, request: SequenceRequest, sampling: ServedSampling
    ) -> torch.Tensor:
        num_prompt = len(request.prompt_ids) - request.num_made
        prompt_ids = [*request.prompt_ids[:num_prompt]]
        made_ids = [*request.prompt_ids[num_prompt:], *self._slots.read_tokens(row, 0).token_ids_T.tolist()]
        if sampling.has_penalties:
            logits_V = penalised(logits_V, sampling, prompt_ids, made_ids)
        if sampling.grammar is not None:
            allowed_V = torch.from_numpy(self._allowed(request.request_id, sampling.grammar, made_ids, len(logits_V)))
            logits_V = logits_V.masked_fill(~allowed_V.to(logits_V.device), -torch.inf)
        if sampling.num_alternatives:
            alternatives = alternatives_in(logits_V, sampling)
            self._alternatives.setdefault(request.request_id, []).append(alternatives)
        return logits_V

    def _allowed(
        self, number: int, grammar: ResponseGrammar, made_ids: list[int], num_tokens: int
    ) -> NDArray[np.bool_]:
        matcher, num_taken = self._matchers.get(number) or (grammar.begin(), 0)
        matcher.take(made_ids[num_taken:])
        self._matchers[number] = (matcher, len(made_ids))
        return matcher.allowed_V(num_tokens)
