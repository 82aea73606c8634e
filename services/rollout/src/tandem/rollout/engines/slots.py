"""The engine's running sequences, as arrays over slots.

Running sequences fill the slots 0 to ``num_running`` - 1 without holes, so that a step works on slices and never on a
mask of live rows. Everything that a step needs is an array; Python objects are touched only when a sequence joins or
ends.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tandem.rollout.engine import EngineCompletion, NewTokens, SequenceRequest
from tandem.rollout.engines.stopping import StopStrings
from tandem.samples.routed_experts import RoutedExperts
from tandem.samples.sampling_masks import SamplingMasks, Words

NO_TOKEN = -1


@dataclasses.dataclass(frozen=True)
class EngineSequence:
    """A request on its way through the engine."""

    request: SequenceRequest
    arrival: int
    """Number in the order in which requests were added; finished ones are returned in this order."""
    max_new_tokens: int
    """The request's own limit, or what the context leaves."""
    stop_strings: StopStrings | None
    masks: list[Words] = dataclasses.field(default_factory=list)
    """Sampling mask of each new token; empty where nothing is cut off, or the engine notes no masks."""


class EngineSlots:
    """The state of `num_slots` slots; every array has one row a slot, of which the first `num_running` are live."""

    def __init__(self, num_slots: int, max_length: int, experts: RoutedExperts | None = None) -> None:
        """Begin with all slots free; `experts` describe the routing noted for each cached token, if any is."""
        self.num_slots = num_slots
        self.num_running = 0
        self.sequences: list[EngineSequence] = []
        self.arrival_S = np.zeros(num_slots, np.int64)
        """Numbers in the order in which requests were added."""
        self.length_S = np.zeros(num_slots, np.int64)
        """Positions of the slot's sequence that are in the key-value cache."""
        self.last_token_S = np.zeros(num_slots, np.int64)
        """The newest token; it enters the cache in the next step."""
        self.num_before_S = np.zeros(num_slots, np.int64)
        """Tokens of the response that were made before the sequence joined."""
        self.num_new_S = np.zeros(num_slots, np.int64)
        self.max_new_S = np.zeros(num_slots, np.int64)
        self.seed_S = np.zeros(num_slots, np.uint64)
        self.temperature_S = np.zeros(num_slots, np.float32)
        self.top_k_S = np.zeros(num_slots, np.int64)
        self.top_p_S = np.zeros(num_slots, np.float32)
        self.min_p_S = np.zeros(num_slots, np.float32)
        self.watches_text_S = np.zeros(num_slots, np.bool_)
        """Whether the request has stop strings."""
        self.stop_id_SK = np.full((num_slots, 1), NO_TOKEN, np.int64)
        """Stop token ids, padded with `NO_TOKEN`."""
        self.token_ST = np.zeros((num_slots, max_length), np.int32)
        self.logprob_ST = np.zeros((num_slots, max_length), np.float32)
        self.version_ST = np.zeros((num_slots, max_length), np.int32)
        self._notes_experts = experts is not None
        num_bytes = 0 if experts is None else experts.num_bytes
        self.routed_experts_SLX = np.zeros((num_slots, max_length, num_bytes), np.uint8)
        """Expert routing of the token at each cached position."""

    def join(self, sequence: EngineSequence) -> None:
        """Give the sequence the next slot, its prompt counted as cached."""
        slot = self.num_running
        assert slot < self.num_slots
        sampling = sequence.request.sampling
        self.arrival_S[slot] = sequence.arrival
        self.length_S[slot] = len(sequence.request.prompt_ids)
        self.num_before_S[slot] = sequence.request.num_made
        self.num_new_S[slot] = 0
        self.max_new_S[slot] = sequence.max_new_tokens
        self.seed_S[slot] = sequence.request.seed
        self.temperature_S[slot] = sampling.temperature
        self.top_k_S[slot] = sampling.top_k
        self.top_p_S[slot] = sampling.top_p
        self.min_p_S[slot] = sampling.min_p
        self.watches_text_S[slot] = sequence.stop_strings is not None
        num_missing = len(sampling.stop_token_ids) - self.stop_id_SK.shape[1]
        if num_missing > 0:
            self.stop_id_SK = np.pad(self.stop_id_SK, ((0, 0), (0, num_missing)), constant_values=NO_TOKEN)
        self.stop_id_SK[slot] = NO_TOKEN
        self.stop_id_SK[slot, : len(sampling.stop_token_ids)] = sampling.stop_token_ids
        self.sequences.append(sequence)
        self.num_running += 1

    def record(
        self, token_R: NDArray[np.int64], logprob_R: NDArray[np.float32], version: int | NDArray[np.int64]
    ) -> NDArray[np.bool_]:
        """Append a token to every running slot; return which slots it stopped, by token id or by text."""
        num = self.num_running
        slot_R = np.arange(num)
        index_R = self.num_new_S[:num]
        self.token_ST[slot_R, index_R] = token_R
        self.logprob_ST[slot_R, index_R] = logprob_R
        self.version_ST[slot_R, index_R] = version
        self.last_token_S[:num] = token_R
        self.num_new_S[:num] += 1
        stopped_R: NDArray[np.bool_] = (self.stop_id_SK[:num] == token_R[:, None]).any(axis=1)
        for slot in np.flatnonzero(self.watches_text_S[:num]).tolist():
            stop_strings = self.sequences[slot].stop_strings
            assert stop_strings is not None
            if stop_strings.push(int(token_R[slot])):
                stopped_R[slot] = True
        return stopped_R

    def cached_tokens(self, slot: int) -> NDArray[np.int64]:
        """Return the slot's cached tokens, those that have keys and values: all but the newest."""
        num_made = int(self.num_new_S[slot]) - 1
        tokens_T = np.array([*self.sequences[slot].request.prompt_ids, *self.token_ST[slot, :num_made]], np.int64)
        assert len(tokens_T) == self.length_S[slot]
        return tokens_T

    def read_tokens(self, slot: int, start: int) -> NewTokens:
        """Copy out what the slot's sequence has made from token `start` on."""
        num_new, masks = int(self.num_new_S[slot]), self.sequences[slot].masks
        return NewTokens(
            token_ids_T=self.token_ST[slot, start:num_new].copy(),
            logprobs_T=self.logprob_ST[slot, start:num_new].copy(),
            versions_T=self.version_ST[slot, start:num_new].copy(),
            masks=SamplingMasks.join(masks[start:]) if any(map(len, masks)) else None,
        )

    def newest(self, slot: int, count: int) -> list[int]:
        """Return at most this many of the newest tokens of the slot's response, the oldest first."""
        request, num_new = self.sequences[slot].request, int(self.num_new_S[slot])
        num_before = min(request.num_made, max(0, count - num_new))
        before = request.prompt_ids[len(request.prompt_ids) - num_before :]
        return [*before, *self.token_ST[slot, max(0, num_new - count) : num_new].tolist()]

    def completion(self, slot: int, finish_reason: Literal["stop", "length", "abort"]) -> EngineCompletion:
        """Copy out what the slot's sequence has made."""
        tokens, request = self.read_tokens(slot, 0), self.sequences[slot].request
        routed_SLX = self.routed_experts_SLX if self._notes_experts and not request.is_external else None
        return EngineCompletion(
            request_id=request.request_id,
            token_ids_T=tokens.token_ids_T,
            logprobs_T=tokens.logprobs_T,
            versions_T=tokens.versions_T,
            finish_reason=finish_reason,
            routed_experts_TX=None if routed_SLX is None else routed_SLX[slot, : self.length_S[slot]].copy(),
            masks=tokens.masks,
        )

    def leave(self, slot_F: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Free these slots and move the last running ones into the holes; return the moved slots, from and to."""
        num_left = self.num_running - len(slot_F)
        keeps_S = np.ones(self.num_running, np.bool_)
        keeps_S[slot_F] = False
        hole_M = np.flatnonzero(~keeps_S[:num_left])
        source_M = num_left + np.flatnonzero(keeps_S[num_left:])
        for value in vars(self).values():
            if isinstance(value, np.ndarray):
                value[hole_M] = value[source_M]
        for source, hole in zip(source_M.tolist(), hole_M.tolist(), strict=True):
            self.sequences[hole] = self.sequences[source]
        del self.sequences[num_left:]
        self.num_running = num_left
        return source_M, hole_M
