"""A judge: a language model behind an endpoint that scores responses.

It runs in worker processes, as coroutines, so that one worker has many requests going. The client retries if the
endpoint cannot be reached, is busy (429, after the time it states) or fails (5xx). What still fails then is a failure
like that of any environment. The judge sees text, and one regular expression reads its verdict.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import re
import sqlite3
from typing import Any

import msgspec
import openai

from tandem.common.errors import ConfigError
from tandem.common.messages import EngineServer, Problem
from tandem.common.values import fill_template
from tandem.config.schema import JudgeConfig as Settings
from tandem.rollout.environments.environment import Score

_OWN_MODEL = "policy"
"""Name of the model in a rollout's own engine."""
_LONGEST_QUOTE = 200
_BUSY_S = 30.0
"""How long another process may keep the cache locked."""


class JudgementError(Exception):
    """The error of a judge's text without a score."""


class JudgeReply(msgspec.Struct, frozen=True):
    """A judge's text, and what it took."""

    said: str
    prompt_tokens: int = 0
    completion_tokens: int = 0


class JudgeEnvironment:
    """An environment that asks a model for a score and uses it as the reward."""

    def __init__(self, name: str, settings: Settings, engine: EngineServer | None) -> None:
        """Prepare requests; `engine` is the rollout's own. Raises `ConfigError` if the key or the cache is missing."""
        self._key = f"env.{name}.judge"
        self._settings = settings
        self._pattern = re.compile(settings.score_pattern)
        url, api_key = settings.base_url, "none"
        if url is None:
            if engine is None:
                raise ConfigError(f"{self._key}.base_url: this rollout's engine takes no requests")
            url, api_key = f"{engine.url}/v1", engine.token or api_key
        elif settings.api_key_env is not None:
            api_key = os.environ.get(settings.api_key_env, "")
            if not api_key:
                raise ConfigError(f"{self._key}.api_key_env: {settings.api_key_env} is not set in this environment")
        self._client = openai.AsyncOpenAI(
            base_url=url, api_key=api_key, timeout=settings.timeout_s, max_retries=settings.max_retries
        )
        self._cache = None if settings.cache is None else JudgementCache(f"{self._key}.cache", settings.cache)
        self._asking: dict[str, asyncio.Task[JudgeReply]] = {}
        """Pending requests by their digests, where judgements are kept."""

    async def score(self, problem: Problem, response: str) -> Score:
        """Ask for a score between the lowest and the highest; it becomes a reward from 0 to 1."""
        settings = self._settings
        prompt = fill_template(f"{self._key}.prompt", settings.prompt, problem, response=response)
        messages = [{"role": "user", "content": prompt}]
        if settings.system_prompt is not None:
            messages.insert(0, {"role": "system", "content": settings.system_prompt})
        request: dict[str, Any] = {
            "model": settings.model or _OWN_MODEL,
            "messages": messages,
            "temperature": settings.temperature,
            "max_tokens": settings.max_tokens,
        }
        judgement, is_new = await self._judgement(request)
        reward = self._reward(judgement.said)
        return Score(reward, correct=reward >= settings.correct_from, spent=self._spent(judgement, is_new))

    async def _judgement(self, request: dict[str, Any]) -> tuple[JudgeReply, bool]:
        """Return the judgement, and whether this call asked the judge for it."""
        if self._cache is None:
            return await self._ask(request), True
        request_text = json.dumps([self._settings.base_url, request, self._settings.extra_body], sort_keys=True)
        digest = hashlib.sha256(request_text.encode()).hexdigest()
        cached = self._cache.get(digest)
        if cached is not None:
            return cached, False
        is_new = digest not in self._asking
        if is_new:
            task = self._asking[digest] = asyncio.create_task(self._ask_and_keep(self._cache, digest, request))
            task.add_done_callback(lambda _: self._asking.pop(digest))
        # A caller that gives up must not cancel the request for others.
        return await asyncio.shield(self._asking[digest]), is_new

    async def _ask_and_keep(self, cache: JudgementCache, digest: str, request: dict[str, Any]) -> JudgeReply:
        judgement = await self._ask(request)
        self._reward(judgement.said)  # a text without a score is not kept
        cache.put(digest, judgement)
        return judgement

    async def _ask(self, request: dict[str, Any]) -> JudgeReply:
        answer = await self._client.chat.completions.create(**request, extra_body=self._settings.extra_body or None)
        text = answer.choices[0].message.content if answer.choices else None
        usage = answer.usage
        return JudgeReply(
            text or "",
            prompt_tokens=0 if usage is None else usage.prompt_tokens,
            completion_tokens=0 if usage is None else usage.completion_tokens,
        )

    def _reward(self, text: str) -> float:
        """Return the last score in the text, as a reward. Raises `JudgementError`."""
        matches = [*self._pattern.finditer(text)]
        try:
            score = float(matches[-1][1])
        except (IndexError, TypeError, ValueError):
            quote = f"{text[:_LONGEST_QUOTE]!r}{'...' if len(text) > _LONGEST_QUOTE else ''}"
            raise JudgementError(f"the judge says {quote}, where {self._key}.score_pattern finds no number") from None
        lowest, highest = self._settings.lowest_score, self._settings.highest_score
        return min(1.0, max(0.0, (score - lowest) / (highest - lowest)))

    def _spent(self, judgement: JudgeReply, is_new: bool) -> dict[str, float]:
        if not is_new:
            return {"judge_requests": 0.0, "judge_cached": 1.0}
        prompt, completion = judgement.prompt_tokens, judgement.completion_tokens
        settings = self._settings
        dollars = (
            prompt * settings.dollars_per_million_prompt_tokens
            + completion * settings.dollars_per_million_completion_tokens
        ) / 1e6
        return {
            "judge_requests": 1.0,
            "judge_prompt_tokens": float(prompt),
            "judge_completion_tokens": float(completion),
            **({"judge_dollars": dollars} if dollars else {}),
        }


class JudgementCache:
    """Judgements by the digests of their requests, in a file that several processes may share."""

    def __init__(self, key: str, path: str) -> None:
        """Open the file, or make it. Raises `ConfigError`, with the key first."""
        self._key, self._path = key, path
        try:
            self._file = sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None)
            self._file.execute("PRAGMA journal_mode=WAL")
            self._file.execute("PRAGMA synchronous=NORMAL")
            self._file.execute("CREATE TABLE IF NOT EXISTS judgements (digest TEXT PRIMARY KEY, judgement TEXT)")
        except sqlite3.Error as error:
            raise ConfigError(f"{key}: cannot open {path!r} as a cache: {error}") from error

    def get(self, digest: str) -> JudgeReply | None:
        """Return the judgement of a request; None if it was never made, or if the file cannot be read now."""
        try:
            row = self._file.execute("SELECT judgement FROM judgements WHERE digest = ?", (digest,)).fetchone()
            return None if row is None else msgspec.json.decode(row[0], type=JudgeReply)
        except (sqlite3.Error, msgspec.MsgspecError):
            return None

    def put(self, digest: str, judgement: JudgeReply) -> None:
        """Keep a judgement if the disk allows; otherwise the judge is asked again another time."""
        text = msgspec.json.encode(judgement).decode()
        with contextlib.suppress(sqlite3.Error):
            self._file.execute("INSERT OR REPLACE INTO judgements VALUES (?, ?)", (digest, text))
