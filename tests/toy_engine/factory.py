"""An engine that computes a whole sequence for each of its tokens: slow, and as short as an engine can be."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tandem.common.errors import ModelError
from tandem.rollout.engine import EngineCompletion, NewTokens, SequenceRequest
from tandem.rollout.engines.refitted import RefittedEngine
from tandem.rollout.engines.sampling import draw, uniforms
from tandem.rollout.engines.skeleton import weights_of


class ToyEngine(RefittedEngine):
    """One sequence at a time, without a cache; follows `tandem.rollout.engine.Engine`."""

    def __init__(self, folder: Path, max_length: int) -> None:
        """Build the model of `folder`, whose weights come by refits."""
        self._model: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
        super().__init__(folder, weights_of(self._model), max_length, "policy.max_total_sequence_length")
        self._running: dict[int, tuple[SequenceRequest, list[tuple[int, float, int]]]] = {}

    @property
    def num_unfinished(self) -> int:
        """Requests added and neither finished nor aborted."""
        return len(self._running)

    def add_request(self, request: SequenceRequest) -> None:
        """Queue a request."""
        self._require_room(request)
        self._running[request.request_id] = request, []

    def step(self) -> list[EngineCompletion]:
        """Make one token for every running request; return those that finished."""
        version, completions = self._require_version(), []
        for request, tokens in [] if self._is_paused else [*self._running.values()]:
            tokens.append((*self._draw(request, tokens), version))
            sampling = request.sampling
            stops = tokens[-1][0] in sampling.stop_token_ids
            num = len(request.prompt_ids) + len(tokens)
            if stops or len(tokens) == sampling.max_new_tokens or num == self._max_length:
                completions.append(self._finish(request.request_id, "stop" if stops else "length"))
        return completions

    def made(self, starts: Mapping[int, int]) -> dict[int, NewTokens]:
        """Return what running requests have made from these tokens on."""
        running = {number: self._running[number] for number in starts if number in self._running}
        return {number: NewTokens(**_columns(tokens[starts[number] :])) for number, (_, tokens) in running.items()}

    def abort(self, request_id: int) -> EngineCompletion | None:
        """Stop a request and return what it has made; None if it is unknown."""
        return self._finish(request_id, "abort") if request_id in self._running else None

    def recompute_caches(self) -> None:
        """Do nothing: there are no caches."""

    def sleep(self) -> None:
        """Release nothing: there are no caches."""
        self._is_asleep = True

    def wake(self) -> None:
        """Go on after `sleep`."""
        self._is_asleep = False

    def close(self) -> None:
        """Release everything."""
        self._weights.close()

    def _draw(self, request: SequenceRequest, tokens: list[tuple[int, float, int]]) -> tuple[int, float]:
        token_ids = torch.tensor([[*request.prompt_ids, *(token for token, *_ in tokens)]])
        with torch.inference_mode():
            logits_1V = self._model(input_ids=token_ids, use_cache=False).logits[:, -1]
        sampling, count = request.sampling, request.num_made + len(tokens)
        token_1, logprob_1 = draw(
            logits_1V,
            uniforms(np.array([request.seed], np.uint64), np.array([count], np.int64)),
            np.array([sampling.temperature], np.float32),
            np.array([sampling.top_k or 0], np.int64),
            np.array([sampling.top_p], np.float32),
        )
        if not np.isfinite(logprob_1).all():
            raise ModelError("the weights give probabilities that are not numbers")
        return int(token_1[0]), float(logprob_1[0])

    def _finish(self, request_id: int, reason: Any) -> EngineCompletion:
        _, tokens = self._running.pop(request_id)
        return EngineCompletion(request_id=request_id, finish_reason=reason, **_columns(tokens))


def _columns(tokens: list[tuple[int, float, int]]) -> dict[str, Any]:
    token_ids, logprobs, versions = zip(*tokens, strict=True) if tokens else ((), (), ())
    return {
        "token_ids_T": np.array(token_ids, np.int32),
        "logprobs_T": np.array(logprobs, np.float32),
        "versions_T": np.array(versions, np.int32),
    }


class ToyFactory:
    """Builds the toy engine."""

    def prepare_process(self, num_threads: int) -> None:
        """Do nothing."""

    def build(self, config: Any, media: Any) -> ToyEngine:
        """Return the engine of a run."""
        return ToyEngine(Path(config.policy.model_name), config.policy.max_total_sequence_length)

    def load(self, serving: Any, media: Any) -> ToyEngine:
        """Refuse: it takes its weights by refits alone."""
        raise ModelError("the toy engine is not served")


FACTORY = ToyFactory()
