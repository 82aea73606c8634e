"""vLLM behind `tandem.rollout.engine.Engine`: one `LLMEngine` in the rollout process, written in place by refits."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import tokenizers
import torch

from tandem.common.config.schema.generation import VllmCfg
from tandem.common.errors import DataError, ModelError, RefitError, TandemError
from tandem.common.vllm_arguments import check_arguments
from tandem.refit.digests.task import DigestTask, Sampling
from tandem.refit.layout import Layout
from tandem.refit.program import TransferProgram
from tandem.refit.transports import BoundProgram
from tandem.refit.transports.stream import Group
from tandem.rollout.engine import Completion, Request
from tandem.rollout.engines.stopping import StopStrings, load_detokenizer
from tandem.rollout.engines.vllm import insides
from tandem.rollout.engines.vllm.weights import weights_of

_CACHE_BYTES = 2**30
"""Of the key-value cache on a CPU, unless ``vllm_kwargs.kv_cache_memory_bytes`` says otherwise."""
_BLOCK = 32
"""Tokens a block of the key-value cache on a CPU: whole blocks of a prompt are shared by its samples."""
_FEWEST_TOKENS_PER_STEP = 8192
FinishReason = Literal["stop", "length", "abort"]


class _Sequence(msgspec.Struct):
    """One request and what has been made for it so far."""

    request: Request
    arrival: int
    stop_strings: StopStrings | None
    token_ids: list[int] = []
    logprobs: list[float] = []
    versions: list[int] = []

    def completion(self, finish_reason: FinishReason) -> Completion:
        return Completion(
            request_id=self.request.request_id,
            token_ids_T=np.array(self.token_ids, np.int32),
            logprobs_T=np.array(self.logprobs, np.float32),
            versions_T=np.array(self.versions, np.int32),
            finish_reason=finish_reason,
        )


class VllmEngine:
    """Continuous batching, paged attention and prefix caching by vLLM; obeys `tandem.rollout.engine.Engine`.

    It starts with weights of no meaning and has none until `install` and `apply`. After `apply`, sequences that run go
    on: their keys and values are computed anew, so that their next tokens are those of an engine that had the new
    weights and the same prefix.
    """

    def __init__(self, model_folder: Path, settings: VllmCfg, *, extra: Mapping[str, Any] | None = None) -> None:
        """Start vLLM with the model of `model_folder`; needs `insides.prepare_environment` first.

        Args:
            model_folder: has ``config.json``; no weights are read.
            settings: ``policy.generation.vllm_cfg``.
            extra: further arguments of vLLM's, ``policy.generation.vllm_kwargs``.

        Raises:
            ModelError: this release of vLLM is unknown, or it refuses the model or an argument.
            ConfigError: an argument in `extra` is unknown or not the user's to set.

        """
        insides.check_release()
        self._model_folder = model_folder
        self._max_length = settings.max_model_len
        self._llm = insides.Llm(engine_arguments(model_folder, settings, extra or {}))
        try:
            self._weights = weights_of(self._llm.model_config, self._llm.parameters(), self._llm.dtype)
        except TandemError:
            self._llm.close()
            raise
        self._sequences: dict[int, _Sequence] = {}
        self._num_arrived = 0
        self._member = ""
        self._version: int | None = None
        self._is_paused = False
        self._is_asleep = False
        self._detokenizer: tokenizers.Tokenizer | None = None

    @property
    def version(self) -> int | None:
        """The weight version it holds; None while it holds none, or a torn one."""
        return self._version

    @property
    def num_unfinished(self) -> int:
        """Requests added and neither finished nor aborted."""
        return len(self._sequences)

    def parameters(self) -> Mapping[str, torch.Tensor]:
        """Return the live parameters that refits write, by vLLM's names."""
        return self._weights.storages

    def add_request(self, request: Request) -> None:
        """Queue a request; it joins at the next `step` that has room. Raises `DataError` if it can make no token."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        num_prompt, sampling = len(request.prompt_ids), request.sampling
        if num_prompt == 0:
            raise DataError(f"request {request.request_id}: the prompt is empty")
        if num_prompt >= self._max_length:
            raise DataError(
                f"request {request.request_id}: a prompt of {num_prompt} tokens leaves no room to generate within "
                f"policy.generation.vllm_cfg.max_model_len={self._max_length}"
            )
        stop_strings = self._stop_strings(sampling.stop_strings)
        params = SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            seed=request.seed,
            max_tokens=min(sampling.max_new_tokens, self._max_length - num_prompt),
            stop_token_ids=list(sampling.stop_token_ids),
            ignore_eos=True,
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        prompt = {"type": "token", "prompt_token_ids": list(request.prompt_ids)}
        self._llm.engine.add_request(str(request.request_id), prompt, params)
        self._sequences[request.request_id] = _Sequence(request, self._num_arrived, stop_strings)
        self._num_arrived += 1

    def step(self) -> list[Completion]:
        """Make one token for every running request; return those that finished, in request order.

        Raises `RefitError` if the engine holds no whole version, `ModelError` if its weights give a probability that
        is not a number.
        """
        if self._version is None:
            raise RefitError("the engine holds no whole weight version: it serves no token until a refit has succeeded")
        if self._is_asleep:
            raise RuntimeError("step called while the engine sleeps")
        if self._is_paused or not self._sequences:
            return []
        finished: list[tuple[_Sequence, FinishReason]] = []
        for output in self._llm.engine.step():
            sequence = self._sequences.get(int(output.request_id))
            if sequence is None:
                continue
            (made,) = output.outputs
            reason = self._record(sequence, made)
            if reason is not None:
                finished.append((sequence, reason))
            if reason is not None and not output.finished:  # a stop string: vLLM has no text to find it in
                self._llm.engine.abort_request([output.request_id])
        finished.sort(key=lambda one: one[0].arrival)
        for sequence, _ in finished:
            del self._sequences[sequence.request.request_id]
        return [sequence.completion(reason) for sequence, reason in finished]

    def _record(self, sequence: _Sequence, made: Any) -> FinishReason | None:
        """Take the tokens that one step has made; return why the sequence ends, if it does."""
        assert self._version is not None, "checked by the caller"
        is_greedy = sequence.request.sampling.temperature == 0
        for token, logprobs in zip(made.token_ids, made.logprobs, strict=True):
            logprob = logprobs[token].logprob
            if not np.isfinite(logprob):
                raise ModelError(f"weight version {self._version} gives probabilities that are not numbers")
            sequence.token_ids.append(token)
            # A greedy token is drawn from the point mass on it.
            sequence.logprobs.append(0.0 if is_greedy else logprob)
            sequence.versions.append(self._version)
            if sequence.stop_strings is not None and sequence.stop_strings.push(token):
                return "stop"
        match made.finish_reason:
            case None | "stop" | "length" as reason:
                return reason
            case other:
                raise ModelError(f"vLLM ended request {sequence.request.request_id} with {other!r}")

    def abort(self, request_id: int) -> Completion | None:
        """Stop a request and return what it has made; None if it is not known."""
        sequence = self._sequences.pop(request_id, None)
        if sequence is None:
            return None
        self._llm.engine.abort_request([str(request_id)])
        return sequence.completion("abort")

    def pause(self) -> None:
        """Keep the requests and their caches, make no token until `resume`."""
        self._is_paused = True

    def resume(self) -> None:
        """Go on after `pause`."""
        self._is_paused = False

    def layout(self) -> Layout:
        """Describe the weights it wants, read from the live parameters."""
        return self._weights.layout

    def install(self, program: TransferProgram, groups: Mapping[str, Group]) -> BoundProgram:
        """Bind a program to the parameters, in place of the one before it. The engine holds no version until `apply`.

        Raises `RefitError`.
        """
        self._version = None
        self._member = program.member
        return self._weights.install(program, groups)

    def apply(self, version: int, deadline_s: float, only: Collection[str] = ()) -> dict[str, int]:
        """Run the installed program and hold `version`; return the bytes on each link.

        All cached keys and values are forgotten. If this raises `RefitError`, `version` is None until a later `apply`
        succeeds. If it is not among `only`, it does no more than pass its weights on.
        """
        if only and self._member not in only:
            return self._weights.apply(version, deadline_s, only)
        self._version = None
        num_bytes = self._weights.apply(version, deadline_s, only)
        for packed in self._llm.packed:
            packed.pack()
        self._llm.reset_caches()
        self._version = version
        return num_bytes

    def digest_task(self, sampling: Sampling | None) -> DigestTask:
        """Return a task that digests the weights it computes with."""
        return self._weights.digest_task(sampling)

    def misquantised(self) -> tuple[str, ...]:
        """Return the tensors held that are not the quantisation of what was received."""
        return self._weights.misquantised()

    def sleep(self) -> None:
        """Release the key-value cache. Refuses while requests run."""
        if self.num_unfinished:
            raise RuntimeError(f"sleep called while {self.num_unfinished} requests are unfinished")
        if not self._is_asleep:
            self._llm.release_cache()
        self._is_asleep = True

    def wake(self) -> None:
        """Take the key-value cache back."""
        if self._is_asleep:
            self._llm.take_cache()
        self._is_asleep = False

    def close(self) -> None:
        """Release everything."""
        self._version = None
        self._weights.close()
        self._sequences.clear()
        self._llm.close()

    def _stop_strings(self, stop_strings: tuple[str, ...]) -> StopStrings | None:
        if not stop_strings:
            return None
        if self._detokenizer is None:
            self._detokenizer = load_detokenizer(self._model_folder)
        return StopStrings(self._detokenizer, stop_strings)


def engine_arguments(model_folder: Path, settings: VllmCfg, extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of vLLM's engine. Raises `ConfigError` for one in `extra` that it does not take."""
    check_arguments(extra)
    return {
        "model": str(model_folder),
        "hf_overrides": insides.architectures(model_folder),
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "load_format": "dummy",
        "dtype": settings.precision,
        "max_model_len": settings.max_model_len,
        "enforce_eager": True,
        "gpu_memory_utilization": settings.gpu_memory_utilization,
        "kv_cache_dtype": settings.kv_cache_dtype,
        "kv_cache_memory_bytes": _CACHE_BYTES,
        "block_size": _BLOCK,
        "enable_prefix_caching": True,
        # A part of a prompt would draw a token to no purpose, which vLLM cannot undo with a seed on a CPU.
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(settings.max_model_len, _FEWEST_TOKENS_PER_STEP),
        "logprobs_mode": "processed_logprobs",
        "async_scheduling": False,
        "disable_log_stats": True,
        **extra,
    }
