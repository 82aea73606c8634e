"""Samples of the run's engines, asked for by their OpenAI endpoint.

A sample waits for an engine with a place for it, and for its answer, both within one deadline. If an engine goes away
before it has answered, another is asked.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec

from tandem.observe.run_folder.live import read_engine_servers
from tandem.serving.tinker.proto import Likeliest, SampledSequence
from tandem.serving.tinker.requests import SampleRequest, TinkerRefused
from tandem.serving.upstream import BROKEN, UpstreamServers

_LOOK_S = 0.2
_MOST_STOPS = 64
_NOT_HELD = 409
_AS_IDS = {"return_token_ids": True, "return_tokens_as_token_ids": True, "detokenize": False}
_HEADERS = {"content-type": "application/json", "accept": "*/*"}


class _Logprobs(msgspec.Struct):
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    """The likeliest tokens in the place of each; empty if none were asked for. The first token of a prompt has none."""


class _Choice(msgspec.Struct):
    token_ids: list[int]
    logprobs: _Logprobs
    finish_reason: str


class _Answer(msgspec.Struct):
    choices: list[_Choice]
    weight_versions: list[int]


class VersionedSamples(msgspec.Struct, frozen=True):
    """Samples, and the weight versions that made them."""

    sequences: list[SampledSequence]
    versions: list[int]


class NoAnswer(Exception):
    """No engine has answered in time, or one has refused, with the reason."""

    def __init__(self, reason: str, *, is_users: bool = False) -> None:
        super().__init__(reason)
        self.is_users = is_users


class MissingVersion(NoAnswer):
    """An engine lacks the version that was asked for."""


class SamplingEngines:
    """The engines of a run, as servers of samples."""

    def __init__(self, run: Path, max_length: int, timeout_s: float) -> None:
        self._run = run
        self._max_length = max_length
        self.timeout_s = timeout_s
        self._upstream = UpstreamServers()
        self._num_asked: Counter[str] = Counter()

    def question(self, sample: SampleRequest, token_ids: list[int]) -> dict[str, Any]:
        """Return the body for an engine. Raises `TinkerRefused`."""
        params = sample.sampling_params
        room = self._max_length - len(token_ids)
        if not token_ids or room < 1:
            raise TinkerRefused(
                f"prompt: {len(token_ids)} tokens; it must have at least one, and at most {self._max_length - 1}"
            )
        body: dict[str, Any] = {
            "model": "policy",
            "prompt": [token_ids],
            "n": sample.num_samples,
            "max_tokens": min(params.max_tokens or room, room),
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k,
            "logprobs": sample.topk_sample_logprobs,
            **_AS_IDS,
        }
        body["seed"] = (random.getrandbits(63) if params.seed is None else params.seed) % (1 << 63)
        if params.stop is not None:
            stops = [params.stop] if isinstance(params.stop, str) else params.stop
            if len(stops) > _MOST_STOPS:
                raise TinkerRefused(f"stop: {len(stops)} sequences, at most {_MOST_STOPS}")
            body["ignore_eos"] = True
            body["stop"] = [stop for stop in stops if isinstance(stop, str)]
            body["stop_token_ids"] = [stop for stop in stops if isinstance(stop, int)]
        return body

    @staticmethod
    def question_of_prompt(sample: SampleRequest, token_ids: list[int]) -> dict[str, Any] | None:
        """Return the body that asks for the likeliest tokens in the place of a prompt's, if they are wanted."""
        if not sample.topk_prompt_logprobs:
            return None
        scores = {"echo": True, "max_tokens": 0, "logprobs": sample.topk_prompt_logprobs}
        return {"model": "policy", "prompt": [token_ids], **scores, **_AS_IDS}

    async def sample(self, question: dict[str, Any]) -> VersionedSamples:
        """Return samples. Raises `NoAnswer`."""
        deadline = time.monotonic() + self.timeout_s
        body, reason = msgspec.json.encode(question), "no engine answers yet"
        while time.monotonic() < deadline:
            try:
                async with asyncio.timeout(deadline - time.monotonic()):
                    answer = await self._ask_one(body)
            except TimeoutError:
                break
            if isinstance(answer, VersionedSamples):
                return answer
            reason = answer or reason
            await asyncio.sleep(_LOOK_S)
        raise NoAnswer(f"no sample within {self.timeout_s:g} s: {reason}")

    async def _ask_one(self, body: bytes) -> VersionedSamples | str:
        """Ask the engine with the fewest requests; return why it has not answered, if another may."""
        servers = read_engine_servers(self._run) or {}
        if not servers:
            return "no engine is there"
        name = min(servers, key=lambda server_name: (self._num_asked[server_name], random.random()))
        self._num_asked[name] += 1
        try:
            async with self._upstream.request(servers[name], "POST", "/v1/completions", _HEADERS, body) as answer:
                text = b"".join([part async for part in answer.body()])
                status = answer.status
        except BROKEN as error:
            return f"{name} is gone ({type(error).__name__})"
        finally:
            self._num_asked[name] -= 1
        if status == 200:
            return _read(text)
        reason = _read_error(text)
        if status == _NOT_HELD:
            raise MissingVersion(f"{name}: {reason}")
        if status in (429, 503):
            return f"{name}: {reason}"
        raise NoAnswer(reason, is_users=400 <= status < 500)


def _read(text: bytes) -> VersionedSamples:
    answer = msgspec.json.decode(text, type=_Answer)
    sequences = [
        SampledSequence(
            token_ids=choice.token_ids,
            logprobs=[0.0 if logprob is None else logprob for logprob in choice.logprobs.token_logprobs],
            stop_reason="length" if choice.finish_reason == "length" else "stop",
            likeliest=[_likeliest(logprobs or {}) for logprobs in choice.logprobs.top_logprobs],
        )
        for choice in answer.choices
    ]
    return VersionedSamples(sequences, answer.weight_versions)


def _likeliest(logprobs: dict[str, float]) -> Likeliest:
    """Return tokens by their log-probabilities; the one that was drawn is among them."""
    by_id = [(int(name.removeprefix("token_id:")), logprob) for name, logprob in logprobs.items()]
    return sorted(by_id, key=lambda pair: -pair[1])


def _read_error(text: bytes) -> str:
    try:
        body = msgspec.json.decode(text)
        return str(body["error"]["message"])[:1000]
    except (msgspec.DecodeError, LookupError, TypeError):
        return "it has refused the request"
