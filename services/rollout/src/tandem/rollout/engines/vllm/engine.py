"""vLLM behind `tandem.rollout.engine.Engine`: one `LLMEngine`, written in place by refits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from tandem.common.errors import DataError, ModelError, TandemError
from tandem.config.installed.vllm_arguments import SPECULATION, select_forwarded
from tandem.config.schema.generation import VllmCfg
from tandem.rollout.engine import Alternatives, EngineCompletion, NewTokens, PromptScores, SequenceRequest
from tandem.rollout.engines import refitted, served, stopping
from tandem.rollout.engines.vllm import float8, insides, speculation, token_columns
from tandem.rollout.engines.vllm.workers import EngineWorkers, NoRefits, WorkersMeter
from tandem.samples.routed_experts import Bytes, RoutedExperts
from tandem.samples.sampling_masks import MaskFormat, SamplingMasks

_CACHE_BYTES = 2**30
"""Size of the key-value cache on a CPU, unless ``vllm_kwargs.kv_cache_memory_bytes`` says otherwise."""
_BLOCK = 32
"""Tokens in a block of the key-value cache on a CPU. Samples share the whole blocks of a prompt."""
_FEWEST_TOKENS_PER_STEP = 8192
FinishReason = Literal["stop", "length", "abort"]


class NoNumber(ModelError):
    """Weights give a probability that is not a number."""


class RunningSequence(msgspec.Struct):
    """One request and what has been made for it so far."""

    request: SequenceRequest
    arrival: int
    stop_strings: stopping.StopStrings | None
    token_ids: list[int] = []
    logprobs: list[float] = []
    versions: list[int] = []
    alternatives: list[Alternatives] | None = None
    prompt_scores: PromptScores | None = None

    @property
    def num_computed(self) -> int:
        """Tokens that the engine has computed: all but the newest; none before the first is made."""
        return len(self.request.prompt_ids) + len(self.token_ids) - 1 if self.token_ids else 0

    def read_tokens(self, start: int) -> NewTokens:
        """Return what it has made from a token on."""
        return NewTokens(
            token_ids_T=np.array(self.token_ids[start:], np.int32),
            logprobs_T=np.array(self.logprobs[start:], np.float32),
            versions_T=np.array(self.versions[start:], np.int32),
            alternatives=None if self.alternatives is None else self.alternatives[start:],
            prompt_scores=None if start else self.prompt_scores,
        )

    def completion(
        self, finish_reason: FinishReason, routed_TX: Bytes | None = None, masks: SamplingMasks | None = None
    ) -> EngineCompletion:
        """Return it as finished."""
        tokens = self.read_tokens(0)
        return EngineCompletion(
            request_id=self.request.request_id,
            token_ids_T=tokens.token_ids_T,
            logprobs_T=tokens.logprobs_T,
            versions_T=tokens.versions_T,
            finish_reason=finish_reason,
            routed_experts_TX=routed_TX,
            alternatives=tokens.alternatives,
            masks=masks,
            prompt_scores=tokens.prompt_scores,
        )


class VllmEngine(refitted.RefittedEngine):
    """Continuous batching, paged attention and prefix caching by vLLM; follows `tandem.rollout.engine.Engine`.

    It starts with meaningless weights and holds none until `install` and `apply`. After `apply`, running sequences keep
    their keys and values unless `recompute_caches` follows; sequences added later share none of them.
    """

    def __init__(
        self,
        model_folder: Path,
        settings: VllmCfg,
        *,
        extra: Mapping[str, Any] | None = None,
        with_weights: bool = False,
        experts: RoutedExperts | None = None,
        mask_format: MaskFormat | None = None,
        config_overrides: Mapping[str, Any] | None = None,
    ) -> None:
        """Start vLLM with the model of `model_folder`; `insides.prepare_environment` must come first.

        Args:
            model_folder: has ``config.json``; its weights are read only with `with_weights`.
            settings: ``policy.generation.vllm_cfg``.
            extra: further arguments of vLLM's, ``policy.generation.vllm_kwargs``.
            with_weights: have vLLM load the folder's weights, as version 0; there are no refits then.
            experts: of the model, if completions are to carry the routing of their tokens.
            mask_format: of the model, if completions are to carry the sampling masks of their tokens.
            config_overrides: fields of ``config.json`` to replace.

        Raises:
            ModelError: this release of vLLM is unknown, or it refuses the model or an argument.
            ConfigError: an argument in `extra` is unknown or not the user's to set.

        """
        insides.check_release()
        arguments = self._arguments(model_folder, settings, extra or {})
        replaced = dict(config_overrides or {})
        if settings.precision == float8.PRECISION:
            replaced.pop("quantization_config", None)  # the engine's own, whatever the checkpoint has
        arguments["hf_overrides"] = {**arguments["hf_overrides"], **replaced}
        if with_weights:
            if settings.precision == float8.PRECISION:
                raise ModelError("weights in float8 are made by refits: vLLM cannot load them from a folder")
            arguments["load_format"] = "safetensors"
        self._experts, self._mask_format = experts, mask_format
        worker_config: dict[str, Any] = {}
        if experts is not None:
            worker_config[token_columns.ASKED] = [experts.num_layers, experts.top_k]
        if mask_format is not None:
            worker_config[token_columns.KEPT] = mask_format.vocabulary
        if worker_config:
            arguments["additional_config"] = {**arguments.get("additional_config", {}), **worker_config}
        self._llm = insides.InProcessLlm(arguments)
        try:
            self._workers = None if with_weights else self._make_workers()
        except TandemError:
            self._llm.close()
            raise
        length_key = "policy.generation.vllm_cfg.max_model_len"
        super().__init__(model_folder, self._workers or NoRefits(), settings.max_model_len, length_key)
        self.weights_sleep = not insides.is_on_cpu()  # on GPUs they wait in host memory
        self.meter = WorkersMeter(self._llm)
        if arguments.get(SPECULATION) is not None:
            self.drafts = speculation.ScheduledDrafts(self._llm.engine)
        self._sequences: dict[int, RunningSequence] = {}
        self._num_arrived = 0
        self._num_updates = 0
        if with_weights:
            self.version = 0

    @property
    def num_unfinished(self) -> int:
        """Requests added and neither finished nor aborted."""
        return len(self._sequences)

    def add_request(self, request: SequenceRequest) -> None:
        """Queue a request; it joins at the next `step` with room. Raises `DataError` if it can make no token."""
        self._require_room(request)
        if isinstance(request.sampling, served.ServedSampling):
            self._require_held(request)
        stop_strings = self._stop_strings(request) if request.sampling.stop_strings else None
        params = self._params(request)
        # Cached keys and values are looked up by the salt, too.
        salt = f"{'external requests of ' if request.is_external else ''}{self._cached_with(request)}"
        prompt = self._prompt(request, salt)
        priority = -1 if request.is_external else 0  # the lower one goes first, where ``scheduling_policy`` is priority
        self._llm.engine.add_request(str(request.request_id), prompt, params, priority=priority)
        sequence = RunningSequence(request, self._num_arrived, stop_strings)
        self._sequences[request.request_id] = sequence
        if params.logprobs:
            sequence.alternatives = []
        self._num_arrived += 1

    def step(self) -> list[EngineCompletion]:
        """Make one token for every running request; return those that finished, in request order.

        Raises `RefitError` if the engine holds no whole version, `ModelError` if its weights give a probability that is
        not a number.
        """
        version = self._require_version()
        if self._is_paused or not self._sequences:
            return []
        finished: list[tuple[RunningSequence, FinishReason]] = []
        for output in self._llm.engine.step():
            sequence = self._sequences.get(int(output.request_id))
            if sequence is None:
                continue
            (sequence_output,) = output.outputs
            if output.prompt_logprobs:
                sequence.prompt_scores = _read_prompt_scores(sequence.request, output.prompt_logprobs)
            reason = self._record(sequence, sequence_output, version)
            if reason is not None:
                finished.append((sequence, reason))
            if reason is not None and not output.finished:  # a stop string: vLLM has no text in which to find it
                self._llm.engine.abort_request([output.request_id])
        finished.sort(key=lambda pair: pair[0].arrival)
        for sequence, _ in finished:
            del self._sequences[sequence.request.request_id]
        ended = [sequence for sequence, _ in finished]
        routed, masks = self._routed(ended), self._masks_of(ended)
        numbers = [sequence.request.request_id for sequence in ended]
        return [
            sequence.completion(reason, routed.get(number), masks.get(number))
            for number, (sequence, reason) in zip(numbers, finished, strict=True)
        ]

    def made(self, starts: Mapping[int, int]) -> dict[int, NewTokens]:
        """Return what running requests have made from these tokens on, by id."""
        sequences = {number: sequence for number, sequence in self._sequences.items() if number in starts}
        new_tokens = {number: sequence.read_tokens(starts[number]) for number, sequence in sequences.items()}
        masks = {
            number: sampling_masks.slice_from(starts[number])
            for number, sampling_masks in self._masks_of(sequences.values()).items()
        }
        return {
            number: msgspec.structs.replace(tokens, masks=masks.get(number)) for number, tokens in new_tokens.items()
        }

    def abort(self, request_id: int) -> EngineCompletion | None:
        """Stop a request and return what it has made; None if it is unknown."""
        sequence = self._sequences.pop(request_id, None)
        if sequence is None:
            return None
        routed, masks = self._routed([sequence]), self._masks_of([sequence])
        self._llm.engine.abort_request([str(request_id)])
        return sequence.completion("abort", routed.get(request_id), masks.get(request_id))

    def recompute_caches(self) -> None:
        """Have running sequences compute all their keys and values anew before their next token."""
        self._llm.reset_caches()

    def sleep(self) -> None:
        """Release the key-value cache; on a GPU the weights wait in host memory. Refuses while requests run."""
        if self.num_unfinished:
            raise RuntimeError(f"sleep called while {self.num_unfinished} requests are unfinished")
        if not self._is_asleep:
            self._llm.release_cache()
        self._is_asleep = True

    def wake(self) -> None:
        """Take the memory back; on a CPU it is allocated as sequences need it."""
        if self._is_asleep:
            self._llm.take_cache()
        self._is_asleep = False

    def close(self) -> None:
        """Release everything."""
        self.version = None
        self._weights.close()
        self._sequences.clear()
        self._llm.close()

    def _make_workers(self) -> EngineWorkers:
        return EngineWorkers(self._llm)

    def _record(self, sequence: RunningSequence, output: Any, version: int) -> FinishReason | None:
        return _record(sequence, output, version)

    def _arguments(self, model_folder: Path, settings: VllmCfg, extra: Mapping[str, Any]) -> dict[str, Any]:
        return engine_arguments(model_folder, settings, extra)

    def _params(self, request: SequenceRequest) -> Any:
        """Return a request as vLLM's parameters."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        sampling = request.sampling
        params = SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            seed=(request.seed + request.num_made) % 2**64,
            max_tokens=min(sampling.max_new_tokens, self._max_length - len(request.prompt_ids)),
            stop_token_ids=list(sampling.stop_token_ids),
            ignore_eos=True,
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        insides.forbid(params, sampling.bad_token_ids)
        if isinstance(sampling, served.ServedSampling):
            if sampling.grammar is not None:
                raise DataError("response_format: vLLM has no tokenizer here, so it cannot follow a grammar")
            params.logprobs = sampling.num_alternatives
            if sampling.scores_prompt:
                params.prompt_logprobs = sampling.num_alternatives
                params.skip_reading_prefix_cache = True  # what is not computed has no scores
            params.presence_penalty = sampling.presence_penalty
            params.frequency_penalty = sampling.frequency_penalty
            params.repetition_penalty = sampling.repetition_penalty
        return params

    def _cached_with(self, request: SequenceRequest) -> str:
        """Return what names the weights by which a request's keys and values are computed."""
        return f"update {self._num_updates}"

    def _prompt(self, request: SequenceRequest, salt: str) -> dict[str, Any]:
        return {"type": "token", "prompt_token_ids": list(request.prompt_ids), "cache_salt": salt}

    def _routed(self, sequences: Iterable[RunningSequence]) -> dict[int, Bytes]:
        """Return the routing of requests' tokens, which workers know until the next step; not of external requests."""
        internal_sequences = [
            sequence for sequence in sequences if sequence.num_computed and not sequence.request.is_external
        ]
        if self._experts is None or not internal_sequences:
            return {}
        layers, top_k = self._experts.num_layers, self._experts.top_k
        routed_by_id = {}
        answers = self._llm.ask(
            "routed", {str(sequence.request.request_id): sequence.num_computed for sequence in internal_sequences}
        )
        for sequence, of_workers in zip(internal_sequences, zip(*answers, strict=True), strict=True):
            experts = [np.frombuffer(worker, np.int16).reshape(-1, layers, top_k) for worker in of_workers]
            # A pipeline stage knows its own layers; it reports -1 for all others.
            routed_by_id[sequence.request.request_id] = self._experts.encode(np.maximum.reduce(experts))
        return routed_by_id

    def _masks_of(self, sequences: Iterable[RunningSequence]) -> dict[int, SamplingMasks]:
        """Return the sampling masks of requests' tokens, which workers know until the next step; not of external
        requests."""
        internal_sequences = [
            sequence for sequence in sequences if sequence.token_ids and not sequence.request.is_external
        ]
        if self._mask_format is None or not internal_sequences:
            return {}
        answers = self._llm.ask(
            "masks", {str(sequence.request.request_id): len(sequence.token_ids) for sequence in internal_sequences}
        )
        masks_by_id = {}
        for sequence, of_workers in zip(internal_sequences, zip(*answers, strict=True), strict=True):
            arrays = (np.frombuffer(part, np.int32) for part in max(of_workers, key=lambda parts: len(parts[0])))
            masks = SamplingMasks(*arrays)
            if len(masks.lengths_T):
                masks_by_id[sequence.request.request_id] = masks
        return masks_by_id

    def _take_weights(self) -> None:
        """Repack the weights that CPUs multiply by, and forget cached keys and values."""
        assert self._workers is not None, "an engine without refits applies none"
        self._workers.pack()
        self._num_updates += 1
        if not self._sequences:
            self._llm.reset_caches()


def _record(sequence: RunningSequence, output: Any, version: int) -> FinishReason | None:
    """Take the tokens of one step; return why the sequence ends, if it does."""
    is_greedy = sequence.request.sampling.temperature == 0
    for token, logprobs in zip(output.token_ids, output.logprobs, strict=True):
        logprob = logprobs[token].logprob
        if not np.isfinite(logprob):
            raise NoNumber(f"weight version {version} gives probabilities that are not numbers")
        sequence.token_ids.append(token)
        # A greedy token is drawn from the point mass on it.
        sequence.logprobs.append(0.0 if is_greedy else logprob)
        sequence.versions.append(version)
        if sequence.alternatives is not None:
            sequence.alternatives.append([(token, 0.0)] if is_greedy else _likeliest(logprobs, sequence.request))
        if sequence.stop_strings is not None and sequence.stop_strings.push(token):
            return "stop"
    match output.finish_reason:
        case None | "stop" | "length" as reason:
            return reason
        case ending:
            raise ModelError(f"vLLM ended request {sequence.request.request_id} with {ending!r}")


def _read_prompt_scores(
    request: SequenceRequest, logprobs_by_place: Sequence[Mapping[int, Any] | None]
) -> PromptScores:
    """Return the probabilities of a prompt's tokens; vLLM has none of the first."""
    pairs = [(token, each) for token, each in zip(request.prompt_ids, logprobs_by_place, strict=True) if each]
    return PromptScores(
        logprobs_P=np.array([logprobs[token].logprob for token, logprobs in pairs], np.float32),
        alternatives=[_likeliest(logprobs, request) for _, logprobs in pairs],
    )


def _likeliest(logprobs: Mapping[int, Any], request: SequenceRequest) -> Alternatives:
    """Return the alternatives at a position, the drawn token among them."""
    assert isinstance(request.sampling, served.ServedSampling), "no other asks for them"
    ranked = sorted((each.rank, token, each.logprob) for token, each in logprobs.items())
    num_alternatives = request.sampling.num_alternatives
    return [(token, logprob) for rank, token, logprob in ranked if rank <= num_alternatives and logprob > -np.inf]


def engine_arguments(model_folder: Path, settings: VllmCfg, extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of vLLM's engine. Raises `ConfigError` for an argument in `extra` that it does not take."""
    further = select_forwarded(extra)
    if further.get(SPECULATION) is not None:
        further[SPECULATION] = speculation.engine_argument(further[SPECULATION], settings, model_folder)
    overrides, dtype = insides.architectures(model_folder), settings.precision
    if settings.precision == float8.PRECISION:
        overrides["quantization_config"] = float8.quantization_config(insides.read_config(model_folder))
        dtype = float8.ACTIVATIONS
    return {
        "model": str(model_folder),
        "hf_overrides": overrides,
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "load_format": "dummy",
        "dtype": dtype,
        "tensor_parallel_size": settings.tensor_parallel_size,
        "pipeline_parallel_size": settings.pipeline_parallel_size,
        "enable_expert_parallel": settings.expert_parallel_size > 1,
        "distributed_executor_backend": "mp" if settings.num_workers > 1 else "uni",
        "worker_cls": insides.WORKER,
        "max_model_len": settings.max_model_len,
        "gpu_memory_utilization": settings.gpu_memory_utilization,
        "kv_cache_dtype": settings.kv_cache_dtype,
        # States are not kept by prefix without partial prompts.
        "enable_prefix_caching": not insides.carries_state(model_folder),
        # A partial prompt would draw a token to no purpose, which vLLM cannot undo with a seed on a CPU.
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(settings.max_model_len, _FEWEST_TOKENS_PER_STEP),
        "logprobs_mode": "processed_logprobs",
        "async_scheduling": False,
        "disable_log_stats": True,
        **_of_device(settings),
        **further,
    }


def _of_device(settings: VllmCfg) -> dict[str, Any]:
    """Return the arguments that differ between CPUs and GPUs."""
    if insides.is_on_cpu():
        return {"enforce_eager": True, "kv_cache_memory_bytes": _CACHE_BYTES, "block_size": _BLOCK}
    # Other kernels for experts order their weights differently.
    return {"enforce_eager": settings.enforce_eager, "enable_sleep_mode": True, "moe_backend": "triton"}
