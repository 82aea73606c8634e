"""One episode as its agent sees it: an endpoint like OpenAI's, and a place to post the reward."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from functools import cached_property
from typing import Any, NamedTuple

import msgspec
import numpy as np

from tandem.common.errors import RewardError
from tandem.common.messages import Generate, Media, PromptGroup, SamplingParameters
from tandem.common.user_code import line, shown
from tandem.common.values import LargeInteger, WrittenFloat
from tandem.config import Config
from tandem.config.models.model_sizes import vocabulary_size
from tandem.rollout.agents.session import ChatMessages, EpisodeSession
from tandem.rollout.conversation import turn_seed
from tandem.rollout.engine import EngineCompletion
from tandem.rollout.engines.served import ServedSampling
from tandem.rollout.environments import Score
from tandem.rollout.environments.outcomes import Failure, checked
from tandem.rollout.openai_api.choices import ResponseBuilder, joined
from tandem.rollout.openai_api.driver import EngineDriver
from tandem.rollout.openai_api.generator import RequestMedia, ResponseChunk, ServedModel
from tandem.rollout.openai_api.protocol import ChatMessage, ChatRequest
from tandem.rollout.openai_api.refusals import OpenAIRefused
from tandem.samples.routed_experts import replayed_experts
from tandem.samples.sampling_masks import SamplingMasks
from tandem.samples.tokenizer import Tokenizer

MODEL = "policy"
"""The model's name in agents' requests."""


_JUDGE_TURNS = 1 << 20
"""Number of the first of a judge's answers among the turns that seeds are derived from: beyond all of an agent's."""


class _Asked(NamedTuple):
    """The chat from which a prompt was rendered."""

    request: ChatRequest
    messages: ChatMessages
    variables: dict[str, Any]
    role: int


class _RolePrompt(list[int]):
    """A prompt of a role, with its chat: another role's may have the same tokens."""

    def __init__(self, token_ids: Sequence[int], chat: _Asked) -> None:
        super().__init__(token_ids)
        self.chat = chat


class Episode(ServedModel):
    """An episode in play. All of it runs in the event loop that answers HTTP."""

    def __init__(
        self,
        number: int,
        group: PromptGroup,
        sample: int,
        command: Generate,
        config: Config,
        driver: EngineDriver,
        tokenizer: Tokenizer,
        media: RequestMedia | None = None,
    ) -> None:
        assert config.agent is not None, "or nobody plays"
        roles = config.agent.roles
        self._role_of = {f"{MODEL}:{role}": place for place, role in enumerate(roles)}
        """Place of each role by the name of the model in its requests."""
        super().__init__(
            next(iter(self._role_of), MODEL),
            tokenizer,
            self,
            max_length=config.policy.max_total_sequence_length,
            vocabulary=vocabulary_size(config.policy),
            stop_token_ids=command.sampling.stop_token_ids,
            aliases=[*self._role_of][1:] or [config.policy.model_name],
            tool_call_parser=config.policy.generation.tool_call_parser,
            media=media,
        )
        self.number = number
        self.command = command
        self.session = EpisodeSession(
            group, sample, tokenizer, replayed_experts(config), keeps_masks=config.replays_sampling_masks, roles=roles
        )
        self.secret = secrets.token_urlsafe(24)
        self.told: asyncio.Future[Score | Failure] = asyncio.get_running_loop().create_future()
        """The reward or the failure that the agent reports."""
        self.is_over = False
        self._driver = driver
        self._max_completions = config.agent.max_completions
        self._num_asked = 0
        self._asked: dict[tuple[tuple[int, ...], Media], _Asked] = {}
        """Chats by the tokens and media of their prompts."""
        self._why_refused = ""
        """Why the last reward posted was refused."""

    @cached_property
    def judge(self) -> EpisodeJudge:
        """The policy as this episode's judge, made when it is first asked."""
        return EpisodeJudge(self, self._driver, self.media)

    def described(self, server: str) -> dict[str, Any]:
        """Return what the agent is told: where to send requests, and what to play."""
        url, group = f"{server}/sessions/{self.secret}", self.session.group
        roles = self.session.roles
        return {
            "session_url": url,
            "base_url": f"{url}/v1",
            "judge_base_url": f"{url}/judge/v1",
            "api_key": self.secret,
            "model": self.name,
            "purpose": self.command.purpose,
            "step": self.command.step,
            "sample": self.session.sample,
            "seed": group.seeds[self.session.sample],
            **({"roles": {self.session.roles[place]: name for name, place in self._role_of.items()}} if roles else {}),
            "problem": msgspec.to_builtins(group.problem, builtin_types=(WrittenFloat, LargeInteger)),
        }

    # --- what the agent asks of the policy ---------------------------------------------------------------------------

    def chat_ids(self, request: ChatRequest, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the tokens that the policy is to answer; what was said before keeps its very tokens.

        Raises what `ServedModel.chat_ids` raises.
        """
        variables = self.variables_of(request)
        if self._role_of and request.model is None:
            names = ", ".join(self._role_of)
            raise OpenAIRefused(f"model: the policy plays several roles; name one of {names}", param="model")
        role = self._role_of.get(request.model or "", 0)
        prompt_ids = self.encode_given(request, messages) or self.session.prompt_of(messages, variables, role)
        media = self.tokenizer.media_in(messages) or ()
        chat = self._asked[tuple(prompt_ids), media] = _Asked(request, messages, variables, role)
        return _RolePrompt(prompt_ids, chat) if self._role_of else prompt_ids

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParameters,
        seed: int,
        media: Media = (),
        *,
        is_streamed: bool = True,
    ) -> AsyncGenerator[ResponseChunk, None]:
        """Yield a response as it is made, and note it. The seed is the sample's own. Raises `OpenAIRefused`.

        It is always streamed, so that it ends with its episode.
        """
        sampling, asked_seed = self._as_trained(sampling), seed
        if self.is_over:
            raise over()
        if self._num_asked == self._max_completions:
            reason = f"an episode may ask for {self._max_completions} responses (max_completions of its environment)"
            raise OpenAIRefused(reason, status=403, kind="permission_error", code="too_many_completions")
        seed = turn_seed(self.session.group.seeds[self.session.sample], self._num_asked)
        self._num_asked += 1
        if isinstance(prompt_ids, _RolePrompt):
            asked_chat: _Asked | None = prompt_ids.chat
        elif self._role_of:
            reason = "texts are of no role: the policy plays several here, and chats name theirs"
            raise OpenAIRefused(reason, param="prompt", code="unsupported")
        else:
            asked_chat = self._asked.get((tuple(prompt_ids), media))
        response_chunks: list[ResponseChunk] = []
        try:
            async with aclosing(self._driver.generate(prompt_ids, sampling, seed, media)) as chunks:
                async for chunk in chunks:
                    if self.is_over:
                        raise over()
                    response_chunks.append(chunk)
                    if chunk.finish_reason is not None:
                        self._note(prompt_ids, asked_chat, asked_seed, response_chunks, media)
                    yield chunk
        except (asyncio.CancelledError, GeneratorExit):
            # Of a stream that the agent left, it has what it was sent.
            is_part = bool(response_chunks) and response_chunks[-1].finish_reason is None
            if asked_chat is not None and asked_chat.request.stream and is_part and not self.is_over:
                self._note(prompt_ids, asked_chat, asked_seed, response_chunks, media)
            raise

    def _as_trained(self, sampling: SamplingParameters) -> SamplingParameters:
        """Return sampling parameters as training assumes them. Raises `OpenAIRefused` for any others."""
        training_sampling = self.command.sampling
        for name, neutral in (("temperature", 1.0), ("top_p", 1.0), ("top_k", 0), ("min_p", 0.0)):
            requested, configured = getattr(sampling, name), getattr(training_sampling, name)
            if requested not in (neutral, configured):
                drawn = f"training samples are drawn with policy.generation.{name}, {configured:g}"
                raise OpenAIRefused(f"{name}: {requested:g}, but {drawn}: leave it out", param=name, code="unsupported")
        if isinstance(sampling, ServedSampling):
            fields = "presence_penalty, frequency_penalty, repetition_penalty, response_format, top_logprobs, echo"
            reason = f"{fields}: training samples are drawn without, and keep the drawn token's probability only"
            raise OpenAIRefused(f"{reason}: leave them out", code="unsupported")
        return msgspec.structs.replace(
            training_sampling,
            max_new_tokens=min(training_sampling.max_new_tokens, sampling.max_new_tokens),
            stop_token_ids=sampling.stop_token_ids,  # the configuration's, unless the agent asked to ignore them
            stop_strings=tuple(dict.fromkeys([*training_sampling.stop_strings, *sampling.stop_strings])),
        )

    def _note(
        self,
        prompt_ids: Sequence[int],
        asked_chat: _Asked | None,
        seed: int,
        chunks: Sequence[ResponseChunk],
        media: Media,
    ) -> None:
        """Note a response as the agent received it, since that is what it will repeat."""
        completion = EngineCompletion(
            request_id=self.number,
            token_ids_T=np.array([token for chunk in chunks for token in chunk.token_ids], dtype=np.int32),
            logprobs_T=np.array([logprob for chunk in chunks for logprob in chunk.logprobs], dtype=np.float32),
            versions_T=np.array([version for chunk in chunks for version in chunk.versions], dtype=np.int32),
            finish_reason=chunks[-1].finish_reason or "abort",
            masks=_masks_of(chunks),
            routed_experts_TX=chunks[-1].routed_experts_TX,  # unknown for a response that was cut short by the agent
        )
        if asked_chat is None:
            self.session.add(prompt_ids, completion, media=media)
            return
        growing = ResponseBuilder(self, asked_chat.request, prompt_ids, seed)
        piece = joined([growing.add(chunk) for chunk in chunks])
        response = ChatMessage(
            role="assistant",
            content=piece.text,
            reasoning_content=piece.reasoning or None,
            tool_calls=piece.tool_calls or None,
        )
        messages = [*asked_chat.messages, response.for_template(self._mark)]
        self.session.add(prompt_ids, completion, messages, asked_chat.variables, media, asked_chat.role)

    # --- what the agent says of it -----------------------------------------------------------------------------------

    def reward(self, body: bytes) -> Score:
        """Take the reward that the agent posted, which ends the episode. Raises `OpenAIRefused` if it is not one."""
        if self.told.done():
            raise OpenAIRefused("this episode already has its reward", status=410, code="session_over")
        try:
            score = read_reward(body, self.session.roles)
        except RewardError as error:
            self._why_refused = str(error)
            raise OpenAIRefused(str(error), status=422, param="reward") from error
        self.told.set_result(score)
        return score

    def fail(self, body: bytes) -> None:
        """Take the agent's report that it has failed, which ends the episode."""
        if not self.told.done():
            self.told.set_result(Failure(line(body.decode(errors="replace")) or "it says that it has failed"))

    def unrewarded(self, ending: str, errors: str = "") -> Failure:
        """Describe the end of an agent that posted no reward."""
        refusal = f"; it posted an invalid one: {self._why_refused}" if self._why_refused else ""
        return Failure(line(f"{ending} without a reward{refusal}"), errors)


class EpisodeJudge(ServedModel):
    """The policy as a judge within an episode: of what it is asked and answers here, nothing is trained on.

    Requests may name any model, and sample as they like. They are drawn from the sample's seed, by their order.
    """

    def __init__(self, episode: Episode, driver: EngineDriver, media: RequestMedia | None) -> None:
        super().__init__(
            MODEL,
            episode.tokenizer,
            self,
            max_length=episode.max_length,
            vocabulary=episode.vocabulary,
            media=media,
        )
        self._episode = episode
        self._driver = driver
        self._num_asked = 0

    def check_name(self, name: str | None) -> None:
        """Take any name: there is no other model."""

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParameters,
        seed: int,
        media: Media = (),
        *,
        is_streamed: bool = True,
    ) -> AsyncGenerator[ResponseChunk, None]:
        """Yield a response as it is made. It ends with the episode. Raises `OpenAIRefused`."""
        if self._episode.is_over:
            raise over()
        session = self._episode.session
        seed = turn_seed(session.group.seeds[session.sample], _JUDGE_TURNS + self._num_asked)
        self._num_asked += 1
        async with aclosing(self._driver.generate(prompt_ids, sampling, seed, media)) as chunks:
            async for chunk in chunks:
                if self._episode.is_over:
                    raise over()
                yield chunk


def read_reward(body: bytes, roles: Sequence[str] = ()) -> Score:
    """Read ``{"reward": 1.0, "correct": true, "components": {...}}``; `correct` defaults to a reward above zero.

    Where the policy plays `roles`, ``{"rewards": {"first": 1.0, "second": 0.0}}`` has the reward of each, which are
    components as well, and ``reward`` defaults to their mean. Raises `RewardError`.
    """
    try:
        fields = msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise RewardError(f'the reward is not a JSON object such as {{"reward": 1.0}}: {error}') from error
    names = ("rewards", "reward", "correct", "components") if roles else ("reward", "correct", "components")
    unknown = fields.keys() - {*names}
    if names[0] not in fields or unknown:
        fault = f"has {', '.join(map(repr, sorted(unknown)))}" if unknown else f"has no {names[0]!r}"
        may_have = f"{', '.join(map(repr, names[:-1]))} and {names[-1]!r}"
        raise RewardError(f"the reward posted {fault}; it may have {may_have}")
    components = fields.get("components") or {}
    if roles:
        components = {**components, **_read_role_rewards(fields["rewards"], roles)}
    values = [components[role] for role in roles]
    reward = checked(Score(fields.get("reward", sum(values) / max(1, len(values))), correct=False), is_multi_turn=False)
    assert isinstance(reward, Score), "nothing else was made"
    correct = reward.reward > 0 if fields.get("correct") is None else fields["correct"]
    score = checked(Score(reward.reward, correct, components), is_multi_turn=False)
    assert isinstance(score, Score), "nothing else was made"
    return score


def _read_role_rewards(rewards: object, roles: Sequence[str]) -> dict[str, float]:
    """Return the reward of each role. Raise `RewardError` unless there is one number for each."""
    if not isinstance(rewards, dict) or rewards.keys() != {*roles}:
        named = ", ".join(map(repr, rewards)) if isinstance(rewards, dict) and rewards else shown(rewards)
        raise RewardError(
            f"the rewards posted are of {named}; there is one for each role: {', '.join(map(repr, roles))}"
        )
    checked(Score(0.0, correct=False, components=rewards), is_multi_turn=False)
    return rewards


def over() -> OpenAIRefused:
    """Return the refusal of a request after the end of its episode."""
    return OpenAIRefused("this episode is over", status=410, code="session_over")


def _masks_of(chunks: Sequence[ResponseChunk]) -> SamplingMasks | None:
    """Return the sampling masks of the tokens of these chunks; None if nothing was cut off."""
    if all(chunk.masks is None for chunk in chunks):
        return None
    masks = [chunk.masks or SamplingMasks.none_of(len(chunk.token_ids)) for chunk in chunks]
    return SamplingMasks(*map(np.concatenate, zip(*masks, strict=True)))
