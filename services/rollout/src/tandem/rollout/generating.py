"""Generations in progress on one engine: prompts in, scored samples out.

    Generate ─▶ `start`: conversations ─▶ engine: a token each ─▶ `_take`: responses ─▶ environments
                                            ▲                                               │
                                            └───────────── another turn ────────────────────┤
                                                                                            ▼
                                            `_finish`: Generated ◀── `_send`: SamplesFinished, stored, recorded

A sample's metadata, such as its reward, goes to the coordinator. Its arrays stay in the store for trainers to fetch.
Without ``async_engine`` the engine pauses while an environment may answer, so that the batch of running sequences does
not depend on how long that takes. With it the engine continues with other samples, and an answered one joins at once.

Environments get a response as a message: the answer, the reasoning, calls, and the whole text, if the model's chat
template writes markers of reasoning, channels or tool calls. Any other response is its text.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from tandem.common.errors import DataError, WireError
from tandem.common.messages import Generate, Generated, PromptGroup, SampleScored, SamplesFinished
from tandem.common.user_code import sayable
from tandem.config.models.model_sizes import vocabulary_size
from tandem.launch.service import ServiceContext
from tandem.rollout.conversation import SampleConversation
from tandem.rollout.engine import EngineCompletion
from tandem.rollout.environments import Score, Turn
from tandem.rollout.environments.outcomes import UnscoredResponse, beyond_in_sum
from tandem.rollout.environments.scorer import RunEnvironments
from tandem.rollout.media import MediaConversation
from tandem.rollout.parts import RolloutParts
from tandem.samples.batch import SampleBatch
from tandem.samples.data_sets.tools import tools_in
from tandem.samples.routed_experts import RoutedExperts

if TYPE_CHECKING:
    from tandem.samples.responses import ResponseParser
    from tandem.samples.tokenizer import Tokenizer
    from tandem.samples.tool_formats import FunctionCall, Tools


NUM_BEFORE = 32
"""Tokens before a response in which a marker may open its reasoning."""


class ResponseMessages:
    """Messages of one model's responses."""

    def __init__(self, tokenizer: Tokenizer, parser: ResponseParser) -> None:
        self._tokenizer = tokenizer
        self._parser = parser

    def message(self, before: Sequence[int], token_ids: Sequence[int], tools: Tools = ()) -> dict[str, Any]:
        """Return a response as a message, by the tokens before it and its own, and the tools that it may call.

        `content` is the text after all reasoning, in the last channel; before calls of tools it is all text. The keys
        `reasoning_content`, `tool_calls` (as in OpenAI's API) and `text` are there if there is any. `text` is all that
        was generated, with its markers, after the marker of reasoning with which the prompt ends, if it does.
        """
        prompt = self._tokenizer.decode(before[-NUM_BEFORE:], skip_special_tokens=False)
        generated = self._tokenizer.decode(token_ids, skip_special_tokens=False)
        parsed = self._parser.parse(generated, prompt=prompt, tools=tools)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": parsed.content if parsed.tool_calls else parsed.answer,
        }
        if parsed.reasoning is not None:
            message["reasoning_content"] = parsed.reasoning
        if parsed.tool_calls:
            message["tool_calls"] = [*map(_tool_call, parsed.tool_calls)]
        text = self._parser.markers.find_opened_reasoning(prompt) + self._parser.visible(generated)
        if text != message["content"]:
            message["text"] = text
        return message


def shown_tools(group: PromptGroup) -> Tools:
    """Return the tools that a group's prompt shows."""
    return tools_in(group.problem.metadata, group.tools_field) or () if group.tools_field else ()


def response_messages(tokenizer: Tokenizer) -> ResponseMessages | None:
    """Return how to read responses of a model; None if they are nothing but text."""
    if not tokenizer.has_chat_template:
        return None
    from tandem.samples.responses import ResponseParser

    parser = ResponseParser.of(tokenizer)
    return ResponseMessages(tokenizer, parser) if parser.reads_markers else None


def _tool_call(call: FunctionCall) -> dict[str, Any]:
    # A policy may call anything with anything: arguments as JSON in ASCII can be sent whatever they are.
    function = {"name": sayable(call.name), "arguments": json.dumps(call.arguments)}
    return {"type": "function", "function": function}


_REWARD_POLL_S = 0.001
UNSCORED = Score(0.0, correct=False)
"""Score of a sample that a limit ended before the environment did, or on which that failed. Its turns keep theirs."""
_EXTERNAL_SHARE, _MOST_EXTERNAL_S = 0.1, 5.0
"""Fraction of a generation's time, and most seconds, for external requests before training takes the device."""


Finished = dict[int, list[tuple[PromptGroup, SampleScored, SampleBatch]]]
"""Samples that finished together, by the command that asked for them."""


class RunningGeneration:
    """One `Generate` in progress."""

    def __init__(
        self, command: Generate, first_number: int, experts: RoutedExperts | None, *, keeps_masks: bool
    ) -> None:
        self.command = command
        self.started_at = time.time()
        self.conversations: dict[int, SampleConversation] = {}
        """Unfinished samples by number, which is also the number of their request."""
        for group in command.groups:
            kind = SampleConversation if group.media is None else MediaConversation
            for sample in range(len(group.seeds)):
                number = first_number + len(self.conversations)
                self.conversations[number] = kind(group, sample, experts, keeps_masks=keeps_masks)
        self.num_samples = len(self.conversations)
        self.num_tokens = 0
        self.seconds = {"generation": 0.0, "rewards": 0.0}


class RunningGenerations:
    """The `Generate` commands that an engine is carrying out."""

    def __init__(self, context: ServiceContext, parts: RolloutParts, experts: RoutedExperts | None) -> None:
        self._context = context
        self._config = context.config
        self._parts = parts
        self._experts = experts
        self._keeps_masks = context.config.replays_sampling_masks
        self._vocabulary = vocabulary_size(context.config.policy)
        self._takes_media = parts.tokenizer.takes_media
        self._max_turns = context.config.rollout_section.max_rollout_turns
        self.generations: dict[int, RunningGeneration] = {}
        """Generations in progress, by command."""
        self._generation_of: dict[int, RunningGeneration] = {}
        """Generations by the number of an unfinished sample."""
        self._num_samples = 0
        """Samples ever asked for, and so the number of the next one."""
        self._response_messages = response_messages(parts.tokenizer)
        """Reader of responses that are more than text; None if there are none."""
        self._awaited: set[int] = set()
        """Samples at the environment, which may go on."""
        self._answered: list[int] = []
        """Samples that continue after an answer."""
        self._unreadable: dict[int, str] = {}
        """Samples whose prompt the engine refuses, with the reason: a file of its media is missing or damaged."""

    def start(self, command: Generate) -> None:
        """Begin a generation beside those in progress. Raises `WireError` for a prompt that the model cannot read."""
        if command.command_id in self.generations:
            return  # repeated so late that it is not recognised as a repetition
        with self._context.phase(f"reading the prompts of step {command.step}"):
            self._check(command)
        engine = self._parts.engine
        if self.generations:
            self._give_up([command_id for command_id in self.generations if command_id < command.cancel_before])
        if not self.generations:
            engine.meter.begin()
        engine.wake()
        generation = RunningGeneration(command, self._num_samples, self._experts, keeps_masks=self._keeps_masks)
        self._num_samples += generation.num_samples
        self.generations[command.command_id] = generation
        for number, conversation in generation.conversations.items():
            self._generation_of[number] = generation
            self._request(number, conversation, command)

    def _request(self, number: int, conversation: SampleConversation, command: Generate) -> None:
        """Ask the engine for the next response of a sample; `_end_unreadable` deals with what it cannot read."""
        try:
            self._parts.engine.add_request(conversation.request(number, command.sampling))
        except DataError as error:
            self._unreadable[number] = str(error)

    def _check(self, command: Generate) -> None:
        """Raise `WireError`, naming the field, for prompts that the model cannot read or answer."""
        longest, numbers = self._config.policy.max_total_sequence_length, set[int]()
        for index, group in enumerate(command.groups):
            highest, size = max(group.prompt_ids), len(group.prompt_ids)
            field = f"Generate.groups[{index}].prompt_ids"
            if highest >= self._vocabulary:
                raise WireError(f"{field}: {highest}, must be from 0 to {self._vocabulary - 1}")
            if size >= longest:
                raise WireError(f"{field}: {size} tokens, must be fewer than {longest}")
            if self._takes_media or group.media:
                self._check_media(index, group)
            if self._parts.environments is not None and group.environment not in self._parts.environments.of:
                raise WireError(f"Generate.groups[{index}].environment: the run has none {group.environment!r}")
            if group.group in numbers:
                raise WireError("Generate.groups: a group is there twice")
            numbers.add(group.group)

    def _check_media(self, index: int, group: PromptGroup) -> None:
        """Raise `WireError` for a prompt with other media than its tokens say."""
        wrong = self._parts.tokenizer.explain_wrong_media(group.prompt_ids, group.media or ())
        if wrong is not None:
            raise WireError(f"Generate.groups[{index}].images: {wrong}")

    def _give_up(self, command_ids: list[int]) -> None:
        """Stop generations that the coordinator no longer awaits; whole groups of their samples stay."""
        for command_id in command_ids:
            conversations = self.generations.pop(command_id).conversations
            self._parts.store.release_groups(command_id, {each.group.group for each in conversations.values()})
            numbers = conversations.keys()
            for number in numbers:
                del self._generation_of[number]
            self._forget(numbers)

    def _forget(self, numbers: Collection[int]) -> None:
        """Stop these samples."""
        for number in numbers:
            self._parts.engine.abort(number)
        self._environments.forget(numbers)
        self._awaited.difference_update(numbers)
        self._answered = [number for number in self._answered if number not in numbers]
        self._unreadable = {number: reason for number, reason in self._unreadable.items() if number not in numbers}

    def give_up_all(self) -> None:
        """Stop all generations."""
        if self.generations:
            self._give_up([*self.generations])

    def work(self) -> None:
        """Make a token for each sample, and take what environments have answered; report what fails."""
        step = next(iter(self.generations.values())).command.step
        begun = [*self.generations]  # a generation at its end may fail while answering
        try:
            with self._context.phase(f"generating step {step}"):
                self._converse()
                for generation in [*self.generations.values()]:
                    if not generation.conversations:
                        self._finish(generation)
        except Exception as error:
            for command_id in begun:
                self._context.fail(command_id, error)
            self.give_up_all()

    def _converse(self) -> None:
        """Make one token for each conversation; let environments answer those with a response."""
        parts = self._parts
        started = time.perf_counter()
        phase = "rewards"
        num_running = parts.sample_engine.num_unfinished
        if num_running and (parts.is_async or not self._awaited):
            phase = "generation"
            for completion in parts.sample_engine.step():
                self._take(completion)
        elif num_running or parts.external_requests is None or not parts.external_requests.work():
            time.sleep(_REWARD_POLL_S)
        for generation in self.generations.values():
            generation.seconds[phase] += time.perf_counter() - started
        self._answer(self._environments.poll())
        if self._unreadable:
            self._end_unreadable()
        if parts.is_async or not self._awaited:
            for number in sorted(self._answered):
                generation = self._generation_of[number]
                self._request(number, generation.conversations[number], generation.command)
            self._answered.clear()

    def _take(self, completion: EngineCompletion) -> None:
        """Pass a response to the environment."""
        number = completion.request_id
        generation = self._generation_of[number]
        conversation = generation.conversations[number]
        token_ids = completion.token_ids_T.tolist()
        if self._response_messages is None:
            message = {"role": "assistant", "content": self._parts.tokenizer.decode(token_ids)}
        else:
            before = conversation.last_ids(NUM_BEFORE)
            message = self._response_messages.message(before, token_ids, shown_tools(conversation.group))
        conversation.add_response(completion, message)
        generation.num_tokens += len(completion.token_ids_T)
        group = conversation.group
        scorer = self._environments.of[group.environment]
        if scorer.is_multi_turn and conversation.num_turns < self._max_turns:
            self._awaited.add(number)
        scorer.submit(number, group.problem, tuple(conversation.messages), generation.command.step)

    def _answer(self, results: list[tuple[int, Score | Turn | UnscoredResponse]]) -> None:
        """Report which samples have ended; let the others go on."""
        finished: Finished = {}
        for number, result in results:
            self._awaited.discard(number)
            generation = self._generation_of[number]
            conversation = generation.conversations[number]
            if wrong := beyond_in_sum(conversation.reward, result):
                result = self._refuse(conversation, wrong)
            ended = self._end_or_continue(conversation, result) if isinstance(result, Turn) else result
            match ended:
                case None:
                    self._answered.append(number)
                    continue
                case Score():
                    sample = conversation.finish(ended, "score")
                case UnscoredResponse():
                    sample = conversation.finish(UNSCORED, "score", ended)
                case _:
                    sample = conversation.finish(UNSCORED, ended)
            self._end(finished, number, *sample)
        self._send(finished)

    def _end_unreadable(self) -> None:
        """Report the samples whose prompts the engine refuses; raise `RewardError` where that ends the run."""
        finished: Finished = {}
        for number, reason in self._unreadable.items():
            conversation = self._generation_of[number].conversations[number]
            unscored = self._refuse(conversation, reason)
            if conversation.num_turns:
                conversation.take_back_answer()
            else:  # trainers could not read the prompt either
                unscored = msgspec.structs.replace(unscored, dropped=True)
            version = self._parts.engine.version or 0
            self._end(finished, number, *conversation.finish(UNSCORED, "score", unscored, version))
        self._unreadable.clear()
        self._send(finished)

    @property
    def _environments(self) -> RunEnvironments:
        assert self._parts.environments is not None, "asked only where no agents play"
        return self._parts.environments

    def _refuse(self, conversation: SampleConversation, reason: str) -> UnscoredResponse:
        """Judge an answer or a prompt that cannot be used. Raises `RewardError` if that ends the run."""
        group = conversation.group
        return self._environments.of[group.environment].refuse(group.problem, conversation.messages, reason)

    def _end(self, finished: Finished, number: int, scored: SampleScored, arrays: SampleBatch) -> None:
        """Note a sample as finished, to be reported with the others of its command."""
        generation = self._generation_of.pop(number)
        group = generation.conversations.pop(number).group
        finished.setdefault(generation.command.command_id, []).append((group, scored, arrays))

    def _send(self, finished: Finished) -> None:
        """Store the samples that have finished, and report them."""
        for command_id, samples in finished.items():
            command = self.generations[command_id].command
            sent = []
            for _, scored, arrays in samples:
                if command.purpose == "train":
                    self._parts.store.put((command_id, scored.group, scored.sample), arrays)
                    # The coordinator shows only validation texts.
                    scored = msgspec.structs.replace(scored, response="", extracted_answer=None)
                sent.append(scored)
            if self._parts.recorder is not None:
                started_at = self.generations[command_id].started_at
                self._parts.recorder.add(command.step, command.purpose, command_id, started_at, samples)
            message = SamplesFinished(
                command_id=command_id,
                step=command.step,
                purpose=command.purpose,
                samples=tuple(sent),
            )
            self._context.reply(command_id, message)

    def _end_or_continue(
        self, conversation: SampleConversation, turn: Turn
    ) -> Literal["length", "turns"] | UnscoredResponse | None:
        """Add the environment's reply if another response may follow; else return what ends the sample."""
        conversation.reward += turn.reward
        if conversation.num_turns >= self._max_turns:
            return "turns"
        try:
            token_ids = self._parts.tokenizer.encode_continuation(
                turn.messages, conversation.last_id, turn=conversation.messages[-1]
            )
        except DataError as error:
            return self._refuse(conversation, str(error))
        if conversation.num_tokens + len(token_ids) >= self._config.policy.max_total_sequence_length:
            return "length"
        conversation.add_answer(turn.messages, token_ids, self._parts.tokenizer.media_in(turn.messages))
        return None

    def _finish(self, generation: RunningGeneration) -> None:
        del self.generations[generation.command.command_id]
        if self._config.is_colocated and not self.generations:
            if self._parts.external_requests is not None and not self._parts.is_async:
                self._parts.external_requests.work_for(
                    min(_EXTERNAL_SHARE * sum(generation.seconds.values()), _MOST_EXTERNAL_S)
                )
            self.sleep()
        reply = Generated(
            command_id=generation.command.command_id,
            step=generation.command.step,
            purpose=generation.command.purpose,
            num_samples=generation.num_samples,
            num_tokens=generation.num_tokens,
            seconds=generation.seconds,
            memory=self._parts.engine.meter.use(),
            gpus={} if self._parts.gpus is None else self._parts.gpus.means(),
            drafts=None if self._parts.engine.drafts is None else self._parts.engine.drafts.take(),
        )
        self._context.reply(generation.command.command_id, reply)

    def sleep(self) -> None:
        """Release the device to training."""
        parts = self._parts
        if parts.external_requests is not None:
            parts.external_requests.pause()
        if parts.engine.weights_sleep:
            parts.weight_client.finish_digest()
        parts.engine.sleep()
