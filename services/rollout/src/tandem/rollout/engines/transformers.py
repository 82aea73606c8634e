"""The embedded engine: any Hugging Face causal language model, decoded in slots.

Shapes of expert routing: ``N`` tokens of a pass, ``L`` layers, ``K`` experts a token, ``X`` bytes of the column of
samples.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from tandem.common.errors import ModelError
from tandem.common.routers import intercept
from tandem.rollout.engine import EngineCompletion, NewTokens, SequenceRequest
from tandem.rollout.engines import own_caches, refitted, served, states
from tandem.rollout.engines.attention import AttentionStep, SlotPrompt
from tandem.rollout.engines.sampling import ForbiddingForward, draw, note_masks, uniforms
from tandem.rollout.engines.skeleton import load_skeleton, try_out, weights_of
from tandem.rollout.engines.slots import EngineSequence, EngineSlots
from tandem.samples.routed_experts import Bytes, RoutedExperts
from tandem.samples.sampling_masks import MaskFormat

MAX_PROMPT_TOKENS_PER_STEP = 8192
"""Prompt tokens that join in one step, unless a single prompt is longer; bounds the memory of a step."""


class RoutingRecord:
    """Listener to the routers of one model. Raises `ModelError` for a model without routers."""

    def __init__(self, model: torch.nn.Module, experts: RoutedExperts) -> None:
        """Begin to listen; `experts` describe the routing that samples of the model carry for each token."""
        if "forward" in vars(model):  # `tandem.rollout.engines.own_caches`: in several passes a step
            raise ModelError("router replay needs a model that runs in slots, not one with a cache of its own")
        self._experts = experts
        self._chosen: dict[int, torch.Tensor] = {}
        """Experts chosen by each layer, ``[N, K]``."""
        intercept(model, self._note)

    def take(self) -> Bytes:
        """Return the routing column of the tokens of the last pass."""
        first_NK = next(iter(self._chosen.values()))
        size = len(first_NK), self._experts.num_layers, self._experts.top_k
        experts_NLK = torch.full(size, -1, dtype=torch.int32, device=first_NK.device)
        for layer, chosen_NK in self._chosen.items():
            experts_NLK[:, layer] = chosen_NK
        self._chosen.clear()
        return self._experts.encode(experts_NLK.cpu().numpy())

    def note(self, slots: EngineSlots, position_R: NDArray[np.int64], prompts: Iterable[SlotPrompt]) -> None:
        """Note the routing of the last pass's tokens: one of each running slot, and the prompts behind them."""
        num, routed_experts_NX = len(position_R), self.take()
        slots.routed_experts_SLX[np.arange(num), position_R] = routed_experts_NX[:num]
        for prompt in prompts:
            its_slots = slice(prompt.first_slot, prompt.first_slot + prompt.num_slots)
            its_LX = routed_experts_NX[prompt.start : prompt.start + prompt.length]
            slots.routed_experts_SLX[its_slots, : prompt.length] = its_LX

    def _note(self, layer: int, chosen_NK: torch.Tensor) -> torch.Tensor:
        self._chosen[layer] = chosen_NK
        return chosen_NK


class TransformersEngine(refitted.RefittedEngine):
    """Continuous batching over a fixed number of slots; follows `tandem.rollout.engine.Engine`.

    Each `step` is one forward pass over the newest token of every running sequence and the prompts that join; see
    `tandem.rollout.engines.attention`. The model has no weights until `install` and `apply`. After an `apply`, running
    sequences keep their keys and values unless `recompute_caches` follows it.
    """

    _slots_kind: type[EngineSlots] = EngineSlots

    def __init__(
        self,
        model_folder: Path,
        *,
        num_slots: int,
        max_total_sequence_length: int,
        dtype: Literal["float32", "bfloat16"],
        num_threads: int | None = None,
        with_weights: bool = False,
        experts: RoutedExperts | None = None,
        mask_format: MaskFormat | None = None,
        config_overrides: Mapping[str, Any] | None = None,
    ) -> None:
        """Build the model of `model_folder` without weights, or with those in the folder as version 0.

        `num_slots` sequences run at once, each of at most `max_total_sequence_length` tokens, prompt included.
        `num_threads` sets the threads of this process (None leaves them). With `experts`, completions carry the routing
        of their tokens, with `mask_format` their sampling masks. `config_overrides` replaces fields of its
        ``config.json``.

        Raises `ModelError`.
        """
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        dtype_of = getattr(torch, dtype)
        self._model = load_skeleton(
            model_folder,
            max_total_sequence_length,
            dtype_of,
            with_weights=with_weights,
            config_overrides=config_overrides,
        )
        length_key = "policy.max_total_sequence_length"
        super().__init__(model_folder, weights_of(self._model), max_total_sequence_length, length_key)
        try_out(self._model, model_folder, max_total_sequence_length)
        self._cache = states.make_cache(self._model, num_slots, max_total_sequence_length)
        self._slots = self._slots_kind(num_slots, max_total_sequence_length, experts)
        self._routing = None if experts is None else RoutingRecord(self._model, experts)
        self._mask_note = None if mask_format is None else partial(note_masks, self._slots, mask_format)
        self._queue: deque[EngineSequence] = deque()
        self._num_arrived = 0
        self._logits: Callable[[], torch.Tensor] = self._forward
        """The forward pass; `ForbiddingForward` once a request has asked for that."""
        self._served: served.ServedForward | None = None
        """Set once a request has asked for more than training does."""
        self._has_stale_keys = False
        """Whether running sequences must compute their keys and values anew."""
        if with_weights:
            self.version = 0

    @property
    def num_unfinished(self) -> int:
        """Requests added and neither finished nor aborted."""
        return len(self._queue) + self._slots.num_running

    def add_request(self, request: SequenceRequest) -> None:
        """Queue a request; it joins at the next `step` with room. Raises `DataError` if it can make no token."""
        self._require_room(request)
        if isinstance(request.sampling, served.ServedSampling):
            self._require_held(request)
            if self._served is None and request.sampling.changes_logits:
                self._served = served.ServedForward(lambda: self._logits(), self._slots, self._compute_prompt)
        if request.sampling.bad_token_ids and not isinstance(self._logits, ForbiddingForward):
            self._logits = ForbiddingForward(self._forward, self._slots)
        sequence = EngineSequence(
            request=request,
            arrival=self._num_arrived,
            max_new_tokens=min(request.sampling.max_new_tokens, self._max_length - len(request.prompt_ids)),
            stop_strings=self._stop_strings(request) if request.sampling.stop_strings else None,
        )
        if request.is_external:
            self._queue.appendleft(sequence)
        else:
            self._queue.append(sequence)
        self._num_arrived += 1

    def step(self) -> list[EngineCompletion]:
        """Make one token for every running request; return those that finished, in request order.

        Raises `RefitError` if the engine holds no whole version, `ModelError` if its weights give a probability that is
        not a number.
        """
        version = self._require_version()
        if self._is_paused or not self.num_unfinished:
            return []
        slots = self._slots
        if self._has_stale_keys:
            self._recompute()
        logits_RV = self._logits() if self._served is None else self._served()
        num = slots.num_running
        token_R, logprob_R = draw(
            logits_RV,
            uniforms(slots.seed_S[:num], slots.num_before_S[:num] + slots.num_new_S[:num]),
            slots.temperature_S[:num],
            slots.top_k_S[:num],
            slots.top_p_S[:num],
            slots.min_p_S[:num],
            self._mask_note,
        )
        if not np.isfinite(logprob_R).all():
            raise ModelError(f"weight version {version} gives probabilities that are not numbers")
        stopped_R = slots.record(token_R, logprob_R, version)
        finished_F = np.flatnonzero(stopped_R | (slots.num_new_S[:num] >= slots.max_new_S[:num]))
        if not len(finished_F):
            return []
        finished_F = finished_F[np.argsort(slots.arrival_S[finished_F])]
        return self._retire(finished_F, np.where(stopped_R[finished_F], "stop", "length").tolist())

    def made(self, starts: Mapping[int, int]) -> dict[int, NewTokens]:
        """Return what running requests have made from these tokens on, by id."""
        numbers = [(slot, sequence.request.request_id) for slot, sequence in enumerate(self._slots.sequences)]
        new_tokens = {
            number: self._slots.read_tokens(slot, starts[number]) for slot, number in numbers if number in starts
        }
        return new_tokens if self._served is None else self._served.complement(new_tokens, starts)

    def abort(self, request_id: int) -> EngineCompletion | None:
        """Stop a request and return what it has made; None if it is unknown."""
        for slot, sequence in enumerate(self._slots.sequences):
            if sequence.request.request_id == request_id:
                return self._retire(np.array([slot]), ["abort"])[0]
        for sequence in self._queue:
            if sequence.request.request_id == request_id:
                self._queue.remove(sequence)
                nothing_T = np.zeros(0, np.int32)
                return EngineCompletion(
                    request_id=request_id,
                    token_ids_T=nothing_T,
                    logprobs_T=nothing_T.astype(np.float32),
                    versions_T=nothing_T,
                    finish_reason="abort",
                )
        return None

    def recompute_caches(self) -> None:
        """Have running sequences compute all their keys and values anew before their next token."""
        self._has_stale_keys = True

    def sleep(self) -> None:
        """Release the key-value cache. Refuses while requests run."""
        if self.num_unfinished:
            raise RuntimeError(f"sleep called while {self.num_unfinished} requests are unfinished")
        self._cache.release()
        self._is_asleep = True

    def wake(self) -> None:
        """Take the key-value cache back; its memory is allocated as sequences need it."""
        self._is_asleep = False

    def close(self) -> None:
        """Release everything."""
        self.version = None
        self._weights.close()
        self._queue.clear()
        self._cache.release()

    def _admit(self) -> list[list[EngineSequence]]:
        """Take the requests that join now off the queue, grouped by prompt, in queue order."""
        groups: dict[tuple[object, ...], list[EngineSequence]] = {}
        num_tokens = 0
        num_free = self._slots.num_slots - self._slots.num_running
        while self._queue and num_free:
            request = self._queue[0].request
            prompt = self._shared_by(request)
            if prompt not in groups:
                num_tokens += len(request.prompt_ids)
                if groups and num_tokens > MAX_PROMPT_TOKENS_PER_STEP:
                    break
            groups.setdefault(prompt, []).append(self._queue.popleft())
            num_free -= 1
        return list(groups.values())

    def _shared_by(self, request: SequenceRequest) -> tuple[object, ...]:
        """Return what requests have in common that share keys and values of their prompts."""
        return request.prompt_ids, request.media

    def _forward(self) -> torch.Tensor:
        """Run the model over all due tokens; return the logits ``[R, V]`` of every running slot's next token."""
        slots = self._slots
        num_decoding = slots.num_running
        length_R = slots.length_S[:num_decoding].copy()
        slots.length_S[:num_decoding] += 1
        token_parts = [slots.last_token_S[:num_decoding]]
        position_parts = [length_R]
        prompts: list[SlotPrompt] = []
        token_indices = [*range(num_decoding)]
        num_slots = [1] * num_decoding  # that go on from each of these tokens
        start = num_decoding
        for group in self._admit():
            prompt_ids = group[0].request.prompt_ids
            prompts.append(SlotPrompt(start, len(prompt_ids), slots.num_running, len(group)))
            for sequence in group:
                slots.join(sequence)
            token_parts.append(np.array(prompt_ids, np.int64))
            position_parts.append(np.arange(len(prompt_ids)))
            start += len(prompt_ids)
            token_indices.append(start - 1)  # what a prompt's other tokens predict is known
            num_slots.append(len(group))
        kept_K = torch.from_numpy(np.array(token_indices, np.int64)) if prompts else None
        logits_KV = self._run(token_parts, position_parts, self._plan(length_R, tuple(prompts)), kept_K)
        if not prompts:
            return logits_KV
        row_R = torch.from_numpy(np.repeat(np.arange(len(token_indices)), num_slots)).to(self._model.device)
        with torch.inference_mode():
            return logits_KV.index_select(0, row_R)

    def _recompute(self) -> None:
        """Compute the keys and values of every running sequence with the current weights; draw nothing."""
        slots, slot = self._slots, 0
        no_rows = np.zeros(0, np.int64)
        while slot < slots.num_running:
            token_parts: list[NDArray[np.int64]] = []
            prompts: list[SlotPrompt] = []
            num_tokens = 0
            while slot < slots.num_running and (
                not prompts or num_tokens + slots.length_S[slot] <= MAX_PROMPT_TOKENS_PER_STEP
            ):
                token_parts.append(slots.cached_tokens(slot))
                prompts.append(SlotPrompt(num_tokens, len(token_parts[-1]), slot, 1))
                num_tokens += len(token_parts[-1])
                slot += 1
            position_parts = [np.arange(len(tokens)) for tokens in token_parts]
            self._run(token_parts, position_parts, self._plan(no_rows, tuple(prompts)), torch.tensor([0]))
        self._has_stale_keys = False

    def _compute_prompt(self, slot: int, place_K: torch.Tensor) -> torch.Tensor:
        """Compute a running slot's prompt once more; return the logits ``[K, V]`` after these of its tokens."""
        token_T = np.array(self._slots.sequences[slot].request.prompt_ids, np.int64)
        if isinstance(self._model.forward, own_caches.BatchedForward):
            return self._model.forward.compute_prompt(token_T, place_K)
        plan = self._plan(np.zeros(0, np.int64), (SlotPrompt(0, len(token_T), slot, 1),))
        return self._run([token_T], [np.arange(len(token_T))], plan, place_K)

    def _run(
        self,
        token_parts: list[NDArray[np.int64]],
        position_parts: list[NDArray[np.int64]],
        step: AttentionStep,
        kept_K: torch.Tensor | None,
    ) -> torch.Tensor:
        """Run the model over the tokens of a step; return the logits ``[K, V]`` of the selected tokens, None for
        all."""
        device = self._model.device
        with torch.inference_mode():
            output = self._model(
                input_ids=torch.from_numpy(np.concatenate(token_parts))[None].to(device),
                position_ids=torch.from_numpy(np.concatenate(position_parts))[None].to(device),
                use_cache=False,
                logits_to_keep=0 if kept_K is None else kept_K.to(device),
                slot_step=step,
            )
            logits_KV: torch.Tensor = output.logits[0]
        if self._routing is not None:
            position_R = np.concatenate(position_parts)[: step.num_running]
            self._routing.note(self._slots, position_R, step.prompts)
        return logits_KV

    def _plan(self, length_R: NDArray[np.int64], prompts: tuple[SlotPrompt, ...]) -> AttentionStep:
        num = len(length_R)
        position_R = torch.from_numpy(length_R).to(self._model.device)
        length = int(length_R.max()) + 1 if num else 0
        beyond_RL = torch.arange(length, device=position_R.device) > position_R[:, None]
        mask_RL = torch.zeros(beyond_RL.shape, dtype=self._model.dtype, device=position_R.device)
        return AttentionStep(
            cache=self._cache,
            num_running=num,
            slot_R=torch.arange(num, device=position_R.device),
            position_R=position_R,
            length=length,
            mask_R11L=mask_RL.masked_fill_(beyond_RL, -torch.inf)[:, None, None, :],
            prompts=prompts,
        )

    def _retire(
        self, slot_F: NDArray[np.int64], finish_reasons: list[Literal["stop", "length", "abort"]]
    ) -> list[EngineCompletion]:
        """Complete these slots and close their holes; return their completions."""
        slots = self._slots
        completions = list(map(slots.completion, slot_F.tolist(), finish_reasons))
        if self._served is not None:
            completions = [self._served.finish(completion) for completion in completions]
        source_M, destination_M = slots.leave(slot_F)
        if len(source_M):
            with torch.inference_mode():
                self._cache.move(source_M, destination_M, int(slots.length_S[destination_M].max()))
        return completions
