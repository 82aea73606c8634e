"""The rollout service: one engine. Prompts in, scored samples out.

It consumes `Generate` commands and weight versions, and produces samples as they finish. A sample's metadata, such as
its reward, goes to the coordinator. Its arrays stay here for trainers to fetch (`tandem.samples.sample_store`): token
ids, the log-probability of each under the sampling distribution, the weight version that made it. An environment may
answer a response, and then the sample goes on (`tandem.rollout.conversation`). Between two steps of the engine the
service looks for commands. It waits only for environments, each with a deadline for its answer. If training and
generation are colocated, the engine sleeps from the end of a `Generate` until the next command.

External requests (`tandem.rollout.guests`) are served while the engine has no samples to make. With ``async_engine``
they run beside samples, and the run cannot be repeated to the bit.

Without ``async_engine`` the engine pauses while an environment may answer, so that the batch of running sequences does
not depend on how long that takes. With it the engine continues with other samples, and an answered one joins at once.
"""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, assert_never

import msgspec

from tandem.common import gc_tuning
from tandem.common.errors import DataError, WireError
from tandem.common.memory import MemoryMeter
from tandem.common.messages import (
    Attest,
    BuildEngine,
    ConnectMesh,
    EngineBuilt,
    Generate,
    Generated,
    InstallProgram,
    Listener,
    PromptGroup,
    Purpose,
    RecordSamples,
    Refit,
    ReleaseSamples,
    RestoreSamples,
    RewardServer,
    RolloutOrder,
    SampleScored,
    SamplesFinished,
)
from tandem.common.network import address_towards
from tandem.common.wire import Arrays
from tandem.config import Config
from tandem.config.models.model_sizes import vocabulary_size
from tandem.config.placement import gpus_per_engine
from tandem.config.threads import limit_threads
from tandem.launch.service import Member
from tandem.observe.exporters.gpu_monitor import GpuMonitor
from tandem.refit import layout
from tandem.refit.endpoint import Endpoint
from tandem.rollout.conversation import Conversation
from tandem.rollout.engine import Completion, Engine
from tandem.rollout.environments import Score, Turn
from tandem.rollout.environments.outcomes import beyond_in_sum
from tandem.rollout.environments.program import Program
from tandem.rollout.environments.routing import Environments
from tandem.rollout.environments.scorer import Unscored
from tandem.samples.batch import Batch
from tandem.samples.routed_experts import RoutedExperts, replayed_experts
from tandem.samples.sample_store import SampleStore
from tandem.samples.tokenizer import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from tandem.rollout.agents.agents import Agents
    from tandem.rollout.guests import Guests
    from tandem.rollout.sample_recorder import SampleRecorder

_REWARD_POLL_S = 0.001
_UNSCORED = Score(0.0, correct=False)
"""Score of a sample that a limit ended before the environment did; it keeps the rewards of its turns."""
_DIGEST_SHARE = 0.25
"""Fraction of the time between tokens that verifies the version they are made with."""
_GUEST_SHARE, _MOST_GUEST_S = 0.1, 5.0
"""Fraction of a generation's time, and most seconds, for external requests before training takes the device."""


_Finished = dict[int, list[tuple[PromptGroup, SampleScored, Batch]]]
"""Samples that finished together, by the command that asked for them."""


class Generation:
    """One `Generate` in progress."""

    def __init__(self, order: Generate, first_number: int, experts: RoutedExperts | None) -> None:
        self.order = order
        self.started_at = time.time()
        samples = [(group, sample) for group in order.groups for sample in range(len(group.seeds))]
        self.conversations = {
            number: Conversation(group, sample, experts) for number, (group, sample) in enumerate(samples, first_number)
        }
        """Unfinished samples by number, which is also the number of their request."""
        self.num_samples = len(samples)
        self.num_tokens = 0
        self.seconds = {"generation": 0.0, "rewards": 0.0}


class RolloutService:
    """One engine's answers to the coordinator."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self._config = member.config
        self._experts = replayed_experts(member.config)
        self._vocabulary = vocabulary_size(member.config.policy)
        self._engine: Engine | None = None
        self._endpoint: Endpoint | None = None
        self._scorers: Environments | None = None
        """None where agents play."""
        self._agents: Agents | None = None
        self._store: SampleStore | None = None
        self._guests: Guests | None = None
        """None if external requests are not allowed."""
        self._recorder: SampleRecorder | None = None
        """None if there is no rollout log."""
        self._tokenizer: Tokenizer | None = None
        self._is_async = member.config.policy.generation.is_async
        self._generations: dict[int, Generation] = {}
        """Generations in progress, by command."""
        self._generation_of: dict[int, Generation] = {}
        """Generations by the number of an unfinished sample."""
        self._num_samples = 0
        """Samples ever asked for, and so the number of the next one."""
        self._awaited: set[int] = set()
        """Samples at the environment, which may go on."""
        self._answered: list[int] = []
        """Samples that continue after an answer."""
        self._restoring: list[RestoreSamples] = []
        """Commands to restore samples that have not begun."""
        self._memory = MemoryMeter()
        self._gpus: GpuMonitor | None = None
        """None where it computes on the CPU."""

    def handle(self, order: RolloutOrder, arrays: Arrays) -> None:
        """Carry out one command; `Generate` goes on in `work`."""
        match order:
            case BuildEngine() if self._engine is None:
                with self._member.phase("building the engine"):
                    self._build(order)
            case BuildEngine():
                with self._member.phase("beginning anew"):
                    self._begin_anew(order)
            case Refit():
                self._refit(order)
            case InstallProgram() | ConnectMesh():
                if self._guests is not None:
                    self._guests.pause()
                self._plane().handle(order)
            case Attest():
                self._plane().handle(order)
            case Generate():
                self._start(order)
            case ReleaseSamples():
                self._samples().release(order.command_ids)
            case RecordSamples():
                self._record_of().order(order)
            case RestoreSamples():
                self._restoring.append(order)
            case other:
                assert_never(other)

    def work(self) -> bool:
        """Advance generation by one token, and the digest in progress by a fraction of that time."""
        if not self._generations:
            is_digesting = self._endpoint is not None and self._endpoint.work()
            if not is_digesting:
                self._restore()
            return is_digesting if self._guests is None else self._serve_guests(self._guests) or is_digesting
        started = time.perf_counter()
        step = next(iter(self._generations.values())).order.step
        begun = [*self._generations]  # a generation at its end may fail while answering
        try:
            with self._member.phase(f"generating step {step}"):
                self._advance()
        except Exception as error:
            for command_id in begun:
                self._member.fail(command_id, error)
            self._give_up([*self._generations])
        is_digesting = self._plane().work(_DIGEST_SHARE * (time.perf_counter() - started))
        self._restore()
        return bool(self._generations) or is_digesting

    def close(self) -> None:
        """Release the engine and the environments."""
        if self._guests is not None:
            self._guests.close()
        if self._gpus is not None:
            self._gpus.close()
        if self._recorder is not None:
            self._recorder.close()
        if self._agents is not None:
            self._agents.close()
        if self._scorers is not None:
            self._scorers.close()
        if self._store is not None:
            self._store.close()
        if self._endpoint is not None:
            self._endpoint.close()
        if self._engine is not None:
            engine, self._engine = self._engine, None
            engine.close()

    # --- building and refit ------------------------------------------------------------------------------------------

    @gc_tuning.paused()
    def _build(self, order: BuildEngine) -> None:
        limit_threads(self._config, "rollouts")
        self._tokenizer = load_tokenizer(self._config)
        program = _program(order.reward_server, self._member.coordinator)
        self._scorers = Environments(self._config, program) if self._config.agent is None else None
        self._engine = _make_engine(self._config)
        self._endpoint = Endpoint(self._member, self._engine)
        if self._config.policy.generation.has_guests:
            self._guests = self._make_guests(self._engine, self._tokenizer)
        if self._scorers is not None:  # its import has begun beside the engine's
            self._scorers.await_ready(None if self._guests is None else self._guests.address)
        else:
            self._agents = self._make_agents(self._engine, self._tokenizer)
        if num_gpus := gpus_per_engine(self._config):
            self._gpus = GpuMonitor(self._config.logger)
            self._gpus.begin(0, num_gpus)
        # After the engine: processes that it forks must not hold the socket.
        max_tokens = self._config.policy.generation.max_stored_tokens
        host = address_towards(self._member.coordinator)
        self._store = SampleStore(host, self._member.run_id, max_tokens, self._member.trainers)
        if order.samples_folder:
            self._recorder = self._make_recorder(Path(order.samples_folder), self._store, self._tokenizer)
        self._say_built(order)

    def _say_built(self, order: BuildEngine) -> None:
        """Answer that the engine is built; from any thread."""
        reply = EngineBuilt(
            command_id=order.command_id,
            layouts=tuple(map(layout.encode, self._built().layouts())),
            samples_at=self._samples().at,
            guests=None if self._guests is None else self._guests.address,
        )
        self._member.reply(order.command_id, reply)

    def _begin_anew(self, order: BuildEngine) -> None:
        """Give up all earlier commands, keep the engine, and answer once nothing of theirs is written any more.

        The trainers were restarted. The samples they need are generated here again, or restored from the rollout log.
        """
        self._give_up([*self._generations])
        self._restoring.clear()
        if self._guests is not None:
            self._guests.pause()
        if self._agents is not None:
            self._agents.rest()
        self._plane().close()
        if self._config.takes_turns:
            self._built().sleep()
        self._samples().release_all()
        if self._recorder is None:
            self._say_built(order)
        else:
            self._recorder.begin_anew(partial(self._say_built, order))

    def _make_agents(self, engine: Engine, tokenizer: Tokenizer) -> Agents:
        # Imported only where agents play: it serves HTTP.
        from tandem.rollout.agents.agents import Agents

        return Agents(self._config, engine, tokenizer, address_towards(self._member.coordinator), self._step)

    def _make_guests(self, engine: Engine, tokenizer: Tokenizer) -> Guests:
        # Likewise.
        from tandem.rollout.guests import Guests

        tokenizer.encode("")  # as for the recorder
        host = address_towards(self._member.coordinator)
        return Guests(self._config, engine, tokenizer, host, self._member.wake)

    def _make_recorder(self, folder: Path, store: SampleStore, tokenizer: Tokenizer) -> SampleRecorder:
        # Importing Arrow starts threads, and services are forked by a process that must have none.
        from tandem.rollout.sample_recorder import SampleRecorder

        tokenizer.encode("")  # the first call settles how it encodes; from then on two threads can read it
        recorder = SampleRecorder(folder, self._member, store, tokenizer, self._vocabulary, self._experts)
        store.give_after(recorder.flush)
        return recorder

    def _built(self) -> Engine:
        assert self._engine is not None, "the coordinator sends BuildEngine first"
        return self._engine

    def _record_of(self) -> SampleRecorder:
        assert self._recorder is not None, "asked only where BuildEngine named a folder"
        return self._recorder

    def _plane(self) -> Endpoint:
        assert self._endpoint is not None, "the coordinator sends BuildEngine first"
        return self._endpoint

    def _environments(self) -> Environments:
        assert self._scorers is not None, "the coordinator sends BuildEngine first"
        return self._scorers

    def _samples(self) -> SampleStore:
        assert self._store is not None, "the coordinator sends BuildEngine first"
        return self._store

    def _refit(self, order: Refit) -> None:
        """Take a version, or pass one on; running requests continue only with a newer one, and only if allowed.

        Commands are carried out between two steps of the engine: that is the token boundary.
        """
        engine, config = self._built(), self._config
        receives = not order.only or self._member.name in order.only
        # The same version again repairs an engine: tokens from the first attempt do not count.
        is_newer = engine.version is not None and order.version > engine.version
        keeps_requests = receives and is_newer and config.updates_in_flight
        if receives and not keeps_requests:
            self._give_up([*self._generations])
        if self._guests is not None:
            self._guests.pause()
        if receives or engine.weights_sleep:  # passing weights on reads them
            engine.wake()
        try:
            self._plane().handle(order)
        except Exception:
            if engine.version is None:  # partial: the coordinator sends all of it again
                self._give_up([*self._generations])
            raise
        if keeps_requests and config.rollout_section.asynchronous.recompute_kv_cache_after_weight_updates:
            engine.recompute_caches()

    # --- generation --------------------------------------------------------------------------------------------------

    def _start(self, order: Generate) -> None:
        """Begin a generation beside those in progress. Raises `WireError` if there is no prompt."""
        if order.command_id in self._generations:
            return  # repeated so late that it is not recognised as a repetition
        with self._member.phase(f"reading the prompts of step {order.step}"):
            self._check(order)
        engine = self._built()
        self._give_up([command_id for command_id in self._generations if command_id < order.cancel_before])
        if not self._generations:
            self._memory.begin()
        engine.wake()
        generation = Generation(order, self._num_samples, self._experts)
        self._num_samples += generation.num_samples
        self._generations[order.command_id] = generation
        for number, conversation in generation.conversations.items():
            self._generation_of[number] = generation
            if self._agents is not None:
                self._agents.begin(number, conversation.group, conversation.sample, order)
            else:
                engine.add_request(conversation.request(number, order.sampling))

    def _check(self, order: Generate) -> None:
        """Raise `WireError`, naming the field, for prompts that the model cannot read or answer."""
        longest = self._config.policy.max_total_sequence_length
        for index, group in enumerate(order.groups):
            highest, size = max(group.prompt_ids), len(group.prompt_ids)
            field = f"Generate.groups[{index}].prompt_ids"
            if highest >= self._vocabulary:
                raise WireError(f"{field}: {highest}, must be from 0 to {self._vocabulary - 1}")
            if size >= longest:
                raise WireError(f"{field}: {size} tokens, must be fewer than {longest}")
            if self._scorers is not None and group.environment not in self._scorers:
                raise WireError(f"Generate.groups[{index}].environment: the run has none {group.environment!r}")
        if len({group.group for group in order.groups}) < len(order.groups):
            raise WireError("Generate.groups: a group is there twice")

    def _give_up(self, command_ids: list[int]) -> None:
        """Stop generations that the coordinator no longer awaits; whole groups of their samples stay."""
        for command_id in command_ids:
            conversations = self._generations.pop(command_id).conversations
            self._samples().release_groups(command_id, {each.group.group for each in conversations.values()})
            numbers = conversations.keys()
            for number in numbers:
                del self._generation_of[number]
            if self._agents is not None:
                self._agents.forget(numbers)
                continue
            for number in numbers:
                self._built().abort(number)
            self._environments().forget(numbers)
            self._awaited.difference_update(numbers)
            self._answered = [number for number in self._answered if number not in numbers]

    def _advance(self) -> None:
        if self._agents is not None:
            self._play(self._agents)
        else:
            self._converse()
        for generation in [*self._generations.values()]:
            if not generation.conversations:
                self._finish(generation)

    def _play(self, agents: Agents) -> None:
        """Make one token for each request of an agent; take the episodes that have ended."""
        started = time.perf_counter()
        phase = "generation" if agents.work() else "rewards"
        if self._guests is not None and not self._num_running:
            self._guests.work()
        for generation in self._generations.values():
            generation.seconds[phase] += time.perf_counter() - started
        finished: _Finished = {}
        for number, session, result in agents.poll():
            score, unscored = (result, None) if isinstance(result, Score) else (_UNSCORED, result)
            sample, arrays = session.finish(score, self._built().version or 0, unscored)
            self._generation_of[number].num_tokens += sample.response_length
            self._end(finished, number, sample, arrays)
        self._send(finished)

    def _converse(self) -> None:
        """Make one token for each conversation; let environments answer those with a response."""
        engine, environments = self._built(), self._environments()
        started = time.perf_counter()
        phase = "rewards"
        if self._num_running and (self._is_async or not self._awaited):
            phase = "generation"
            for completion in self._step():
                self._take(completion)
        elif self._num_running or self._guests is None or not self._guests.work():
            time.sleep(_REWARD_POLL_S)
        for generation in self._generations.values():
            generation.seconds[phase] += time.perf_counter() - started
        self._answer(environments.poll())
        if self._is_async or not self._awaited:
            for number in sorted(self._answered):
                generation = self._generation_of[number]
                engine.add_request(generation.conversations[number].request(number, generation.order.sampling))
            self._answered.clear()

    @property
    def _num_running(self) -> int:
        """Requests for samples that the engine has."""
        return self._built().num_unfinished - (0 if self._guests is None else self._guests.num_running)

    def _step(self) -> list[Completion]:
        """Make one token for each sample; return the finished ones. External requests run beside them only with
        `is_async`."""
        engine, guests = self._built(), self._guests
        if guests is None:
            return engine.step()
        if not self._is_async:
            guests.pause()
            return engine.step()
        guests.admit()
        return guests.hand_out(engine.step())

    def _serve_guests(self, guests: Guests) -> bool:
        """Make one token for each external request while no sample is made; return whether there is more to do.

        Not while training may use the device and the engine's memory.
        """
        if self._config.takes_turns or self._built().version is None:
            return False
        return guests.work()

    def _sleep(self) -> None:
        """Release the device to training."""
        engine = self._built()
        if self._guests is not None:
            self._guests.pause()
        if engine.weights_sleep:
            self._plane().finish_digest()
        engine.sleep()

    def _take(self, completion: Completion) -> None:
        """Pass a response to the environment."""
        assert self._tokenizer is not None
        environments, number = self._environments(), completion.request_id
        generation = self._generation_of[number]
        conversation = generation.conversations[number]
        conversation.add_response(completion, self._tokenizer.decode(completion.token_ids_T.tolist()))
        generation.num_tokens += len(completion.token_ids_T)
        has_turns_left = conversation.num_turns < self._config.rollout_section.max_rollout_turns
        if has_turns_left and environments.converses(conversation.group):
            self._awaited.add(number)
        environments.submit(number, conversation.group, tuple(conversation.messages))

    def _answer(self, results: list[tuple[int, Score | Turn | Unscored]]) -> None:
        """Report which samples have ended; let the others go on."""
        finished: _Finished = {}
        for number, result in results:
            self._awaited.discard(number)
            generation = self._generation_of[number]
            conversation = generation.conversations[number]
            if wrong := beyond_in_sum(conversation.reward, result):
                result = self._environments().refuse(conversation.group, conversation.messages, wrong)
            ended = self._go_on(conversation, result) if isinstance(result, Turn) else result
            match ended:
                case None:
                    self._answered.append(number)
                    continue
                case Score():
                    sample = conversation.finish(ended, "score")
                case Unscored():
                    sample = conversation.finish(_UNSCORED, "score", ended)
                case _:
                    sample = conversation.finish(_UNSCORED, ended)
            self._end(finished, number, *sample)
        self._send(finished)

    def _end(self, finished: _Finished, number: int, scored: SampleScored, arrays: Batch) -> None:
        """Note a sample as finished, to be reported with the others of its command."""
        generation = self._generation_of.pop(number)
        group = generation.conversations.pop(number).group
        finished.setdefault(generation.order.command_id, []).append((group, scored, arrays))

    def _send(self, finished: _Finished) -> None:
        """Store the samples that have finished, and report them."""
        for command_id, samples in finished.items():
            order = self._generations[command_id].order
            if order.purpose == "train":
                for _, scored, arrays in samples:
                    self._samples().put((command_id, scored.group, scored.sample), arrays)
            self._record(self._generations[command_id], samples)
            message = SamplesFinished(
                command_id=command_id,
                step=order.step,
                purpose=order.purpose,
                samples=tuple(_as_sent(scored, order.purpose) for _, scored, _ in samples),
            )
            self._member.reply(command_id, message)

    def _restore(self) -> None:
        """Have samples restored from disk; if training follows on the same device, the engine first releases it."""
        if self._restoring and self._config.takes_turns and not self._generations:
            self._sleep()
        for order in self._restoring:
            self._record_of().order(order)
        self._restoring.clear()

    def _record(self, generation: Generation, samples: list[tuple[PromptGroup, SampleScored, Batch]]) -> None:
        if self._recorder is not None:
            order = generation.order
            self._recorder.add(order.step, order.purpose, order.command_id, generation.started_at, samples)

    def _go_on(self, conversation: Conversation, turn: Turn) -> Literal["length", "turns"] | Unscored | None:
        """Add the environment's reply if another response may follow; else return what ends the sample."""
        assert self._tokenizer is not None
        conversation.reward += turn.reward
        if conversation.num_turns >= self._config.rollout_section.max_rollout_turns:
            return "turns"
        try:
            token_ids = self._tokenizer.encode_continuation(turn.messages, conversation.last_id)
        except DataError as error:
            return self._environments().refuse(conversation.group, conversation.messages, str(error))
        if conversation.num_tokens + len(token_ids) >= self._config.policy.max_total_sequence_length:
            return "length"
        conversation.add_answer(turn.messages, token_ids)
        return None

    def _finish(self, generation: Generation) -> None:
        del self._generations[generation.order.command_id]
        if self._agents is not None and not self._generations:
            self._agents.rest()
        if self._config.takes_turns and not self._generations:
            if self._guests is not None and not self._is_async:
                self._guests.work_for(min(_GUEST_SHARE * sum(generation.seconds.values()), _MOST_GUEST_S))
            self._sleep()
        reply = Generated(
            command_id=generation.order.command_id,
            step=generation.order.step,
            purpose=generation.order.purpose,
            num_samples=generation.num_samples,
            num_tokens=generation.num_tokens,
            seconds=generation.seconds,
            memory=self._memory.use(),
            gpus={} if self._gpus is None else self._gpus.means(),
        )
        self._member.reply(generation.order.command_id, reply)


def _as_sent(sample: SampleScored, purpose: Purpose) -> SampleScored:
    """Return a sample as sent to the coordinator, which shows only validation texts."""
    return sample if purpose == "validate" else msgspec.structs.replace(sample, response="", extracted_answer=None)


def _program(server: RewardServer | None, coordinator: str) -> Program | None:
    """Return where the program that began the run scores samples, if it does: on the coordinator's host."""
    if server is None:
        return None
    address = f"{coordinator.rpartition(':')[0]}:{server.port}"
    return Program(Listener(address=address, public_key=server.public_key), server.callers)


def _make_engine(config: Config) -> Engine:
    """Start the engine that the configuration names."""
    policy, generation = config.policy, config.policy.generation
    if generation.backend == "vllm":
        from tandem.rollout.engines.vllm.engine import VllmEngine

        # External requests are few, and do not wait for all waiting samples.
        extra = {"scheduling_policy": "priority"} if generation.has_guests and generation.is_async else {}
        return VllmEngine(
            Path(policy.model_name),
            generation.vllm_cfg,
            extra={**extra, **generation.vllm_kwargs},
            experts=replayed_experts(config),
            config_overrides=policy.hf_config_overrides,
        )
    from tandem.rollout.engines.transformers import TransformersEngine

    return TransformersEngine(
        Path(policy.model_name),
        num_slots=generation.transformers_cfg.num_slots,
        max_total_sequence_length=policy.max_total_sequence_length,
        dtype=policy.precision,
        experts=replayed_experts(config),
        config_overrides=policy.hf_config_overrides,
    )
