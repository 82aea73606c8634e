"""The rollout service: one engine. Prompts in, scored samples out.

It consumes `Generate` commands and weight versions, and produces samples as they finish (`tandem.rollout.generating`).
Between two steps of the engine the service looks for commands. It waits for environments, each with a deadline for its
answer, for the media of prompts, and for the peers of a refit, within the command's deadline. If training and
generation are colocated, the engine sleeps from the end of a `Generate` until the next `Generate` or `Refit`.

External requests (`tandem.rollout.external_requests`) are served while the engine has no samples to make. With
``async_engine`` they run beside samples, and the run cannot be repeated to the bit.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import TYPE_CHECKING, assert_never

from tandem.common import gc_tuning, messages
from tandem.common.network import find_address_towards
from tandem.common.wire import Arrays
from tandem.config import Config, placement, threads
from tandem.config.models.model_sizes import vocabulary_size
from tandem.launch.service import ServiceContext
from tandem.observe.exporters.nvml import GpuMonitor
from tandem.refit import layout
from tandem.refit.weight_client import WeightClient
from tandem.rollout import media
from tandem.rollout.engine import Engine
from tandem.rollout.engines.factory import find_factory
from tandem.rollout.environments.program import RewardProgram
from tandem.rollout.environments.scorer import RunEnvironments
from tandem.rollout.generating import RunningGenerations
from tandem.rollout.parts import RolloutParts
from tandem.samples import media as run_media
from tandem.samples import model_files, routed_experts
from tandem.samples.sample_store import SampleStore
from tandem.samples.tokenizer import Tokenizer

if TYPE_CHECKING:
    from tandem.rollout.agents.agents import RolloutAgents
    from tandem.rollout.external_requests import ExternalRequests
    from tandem.rollout.openai_api.generator import RequestMedia
    from tandem.rollout.sample_recorder import SampleRecorder
    from tandem.samples.media import MediaFetcher

_FETCH_SHARE = 0.25
"""The longest time for fetching media, as a share of the deadline of what needs them."""
_DIGEST_SHARE = 0.25
"""Fraction of the time between tokens that verifies the version they are made with."""


class RolloutService:
    """One engine's answers to the coordinator."""

    def __init__(self, context: ServiceContext) -> None:
        self._context = context
        self._config = context.config
        self._parts: RolloutParts | None = None
        self._generating: RunningGenerations | None = None
        self._is_closed = False
        self._restoring: list[messages.RestoreSamples] = []
        """Commands to restore samples that have not begun."""

    @property
    def parts(self) -> RolloutParts:
        """The engine, and what works beside it."""
        assert self._parts is not None, "the coordinator sends BuildEngine first"
        return self._parts

    @property
    def generating(self) -> RunningGenerations:
        """The generations in progress."""
        assert self._generating is not None, "the coordinator sends BuildEngine first"
        return self._generating

    def handle(self, command: messages.RolloutCommand, arrays: Arrays) -> None:
        """Carry out one command; `Generate` goes on in `work`."""
        match command:
            case messages.BuildEngine() if self._parts is None:
                with self._context.phase("building the engine"):
                    self._build(command)
            case messages.BuildEngine():
                with self._context.phase("beginning anew"):
                    self.generating.give_up_all()
                    self._restoring.clear()
                    begin_anew(command, self._context, self.parts)
            case messages.Refit():
                self._refit(command)
            case messages.InstallProgram() | messages.ConnectTransferGroup():
                if self.parts.external_requests is not None:
                    self.parts.external_requests.pause()
                self.parts.weight_client.handle(command)
            case messages.ReportDigests():
                self.parts.weight_client.handle(command)
            case messages.Generate():
                if self.parts.media is not None:
                    self._fetch_media(command, self.parts.media)
                self.generating.start(command)
            case messages.ReleaseSamples():
                self.parts.store.release(command.command_ids)
            case messages.RecordSamples():
                self._record(command)
            case messages.RestoreSamples():
                self._restoring.append(command)
            case unknown:
                assert_never(unknown)

    def work(self) -> bool:
        """Advance generation by one token, and the digest in progress by a fraction of that time."""
        if self._parts is None or self._generating is None:
            return False
        parts, generating = self._parts, self._generating
        if not generating.generations:
            is_digesting = parts.weight_client.work()
            if self._restoring and not is_digesting:
                self._restore()
            return (
                is_digesting
                if parts.external_requests is None
                else self._serve_external_requests(parts) or is_digesting
            )
        started = time.perf_counter()
        generating.work()
        is_digesting = parts.weight_client.work(_DIGEST_SHARE * (time.perf_counter() - started))
        if self._restoring:
            self._restore()
        return bool(generating.generations) or is_digesting

    def close(self) -> None:
        """Release the engine and the environments."""
        if self._parts is not None and not self._is_closed:
            self._is_closed = True
            self._parts.close()

    @gc_tuning.pause_collection()
    def _build(self, command: messages.BuildEngine) -> None:
        experts = routed_experts.replayed_experts(self._config)
        self._parts = parts = build_parts(command, self._context, experts)
        if parts.agents is None:
            self._generating = RunningGenerations(self._context, parts, experts)
        else:
            from tandem.rollout.agents.agents import AgentGenerations  # it serves HTTP

            self._generating = AgentGenerations(self._context, parts, experts, parts.agents)
        self._context.reply(command.command_id, engine_built(command, parts))

    def _fetch_media(self, command: messages.Generate, fetcher: MediaFetcher) -> None:
        """Fetch the media of prompts that the run's folder lacks here, before the engine or an agent reads them.

        A sample that lacks a file fails by name, as one whose file is damaged does.
        """
        with self._context.phase(f"fetching the images of step {command.step}"):
            digests = (each.digest for group in command.groups for each in group.media or ())
            for reason in fetcher.fetch(digests, _FETCH_SHARE * command.deadline_s):
                print(f"step {command.step}: {reason}", flush=True)

    def _refit(self, command: messages.Refit) -> None:
        """Take a version, or pass one on; running requests continue only with a newer one, and only if allowed.

        Commands are carried out between two steps of the engine: that is the token boundary.
        """
        parts, engine, config = self.parts, self.parts.engine, self._config
        receives = not command.only or self._context.name in command.only
        # The same version again repairs an engine: tokens from the first attempt do not count.
        is_newer = engine.version is not None and command.version > engine.version
        keeps_requests = receives and is_newer and config.updates_in_flight
        if receives and not keeps_requests:
            self.generating.give_up_all()
        if parts.external_requests is not None:
            parts.external_requests.pause()
        if receives or engine.weights_sleep:  # passing weights on reads them
            engine.wake()
        try:
            parts.weight_client.handle(command)
        except Exception:
            if engine.version is None:  # partial: the coordinator sends all of it again
                self.generating.give_up_all()
            raise
        if keeps_requests and config.rollout_section.asynchronous.recompute_kv_cache_after_weight_updates:
            engine.recompute_caches()

    def _serve_external_requests(self, parts: RolloutParts) -> bool:
        """Make one token for each external request while no sample is made; return whether there is more to do.

        Not while training may use the device and the engine's memory.
        """
        if parts.external_requests is None or self._config.is_colocated or parts.engine.version is None:
            return False
        return parts.external_requests.work()

    def _record(self, command: messages.RecordSamples | messages.RestoreSamples) -> None:
        assert self.parts.recorder is not None, "asked only where BuildEngine named a folder"
        self.parts.recorder.command(command)

    def _restore(self) -> None:
        """Have samples restored from disk; if training follows on the same device, the engine first releases it."""
        if self._config.is_colocated and not self.generating.generations:
            self.generating.sleep()
        for command in self._restoring:
            self._record(command)
        self._restoring.clear()


def build_parts(
    command: messages.BuildEngine, context: ServiceContext, experts: routed_experts.RoutedExperts | None
) -> RolloutParts:
    """Build all that a run's configuration asks for, in the order in which they need each other."""
    config, host = context.config, find_address_towards(context.coordinator)
    threads.limit_threads(config, "rollouts")
    tokenizer = model_files.load_tokenizer(config)
    with contextlib.ExitStack() as stack:  # closes what is there if the rest cannot be built
        environments = None
        if config.agent is None:
            environments = RunEnvironments(config, _program(command.reward_server, context.coordinator))
            stack.callback(environments.close)
        received = media.keep_received(config, tokenizer)
        factory = find_factory(config.policy.generation.backend)
        engine = factory.build(config, media.describe_media(tokenizer, received, config))
        stack.callback(engine.close)
        parts = RolloutParts(
            tokenizer=tokenizer,
            engine=engine,
            sample_engine=engine,
            weight_client=WeightClient(context, engine),
            environments=environments,
            is_async=config.policy.generation.is_async,
        )
        if config.policy.generation.takes_external_requests:
            parts.external_requests = _make_external_requests(context, engine, tokenizer, host, received)
            parts.sample_engine = parts.external_requests
            stack.callback(parts.external_requests.close)
        if environments is not None:  # its import has begun beside the engine's
            environments.await_ready(None if parts.external_requests is None else parts.external_requests.address)
        else:
            parts.agents = _make_agents(parts, config, host)
            stack.callback(parts.agents.close)
        if num_gpus := placement.count_gpus_per_engine(config):
            parts.gpus = GpuMonitor(config.logger)
            parts.gpus.begin(0, num_gpus)
            stack.callback(parts.gpus.close)
        # After engine and agents: processes that they fork must not hold the socket.
        max_tokens = config.policy.generation.max_stored_tokens
        parts.store = SampleStore(host, context.run_id, max_tokens, context.trainers)
        stack.callback(parts.store.close)
        if tokenizer.takes_media:
            parts.store.give_media(run_media.answer_requests(config, context.run_id))
            parts.media = run_media.make_media_fetcher(config, context.name, context.run_id, context.keys)
            parts.media.begin(command.media_at, context.coordinator)
        if command.samples_folder:
            parts.recorder = _make_recorder(Path(command.samples_folder), context, parts.store, tokenizer, experts)
        stack.pop_all()
        return parts


def engine_built(command: messages.BuildEngine, parts: RolloutParts) -> messages.EngineBuilt:
    """Return the answer that the engine is built."""
    return messages.EngineBuilt(
        command_id=command.command_id,
        layouts=tuple(map(layout.encode, parts.engine.layouts())),
        samples_at=parts.store.at,
        external_requests=None if parts.external_requests is None else parts.external_requests.address,
    )


def begin_anew(command: messages.BuildEngine, context: ServiceContext, parts: RolloutParts) -> None:
    """Keep the engine, forget all earlier commands, and answer once nothing of theirs is written any more.

    The trainers were restarted. The samples they need are generated here again, or restored from the rollout log.
    """

    def answer() -> None:
        context.reply(command.command_id, engine_built(command, parts))

    if parts.media is not None:
        parts.media.begin(command.media_at, context.coordinator)
    if parts.external_requests is not None:
        parts.external_requests.pause()
    if parts.agents is not None:
        parts.agents.abandon_requests()
    parts.weight_client.close()
    if context.config.is_colocated:
        parts.engine.sleep()
    parts.store.release_all()
    if parts.recorder is None:
        answer()
    else:
        parts.recorder.begin_anew(answer)


def _make_agents(parts: RolloutParts, config: Config, host: str) -> RolloutAgents:
    # Imported only where agents play: it serves HTTP.
    from tandem.rollout.agents.agents import RolloutAgents

    return RolloutAgents(config, parts.engine, parts.tokenizer, host, parts.sample_engine.step)


def _make_external_requests(
    context: ServiceContext, engine: Engine, tokenizer: Tokenizer, host: str, received: RequestMedia | None
) -> ExternalRequests:
    # Likewise.
    from tandem.rollout.external_requests import ExternalRequests

    tokenizer.encode("")  # as for the recorder
    return ExternalRequests(context.config, engine, tokenizer, host, context.wake, received)


def _make_recorder(
    folder: Path,
    context: ServiceContext,
    store: SampleStore,
    tokenizer: Tokenizer,
    experts: routed_experts.RoutedExperts | None,
) -> SampleRecorder:
    # Importing Arrow starts threads, and services are forked by a process that must have none.
    from tandem.rollout.sample_recorder import SampleRecorder

    tokenizer.encode("")  # the first call settles how it encodes; from then on two threads can read it
    vocabulary, texts = vocabulary_size(context.config.policy), run_media.read_texts(tokenizer, context.config)
    recorder = SampleRecorder(folder, context, store, tokenizer, vocabulary, experts, texts)
    store.give_after(recorder.flush)
    return recorder


def _program(server: messages.RewardServer | None, coordinator: str) -> RewardProgram | None:
    """Return where the program that began the run scores samples, if it does: on the coordinator's host."""
    if server is None:
        return None
    address = f"{coordinator.rpartition(':')[0]}:{server.port}"
    return RewardProgram(messages.Listener(address=address, public_key=server.public_key), server.callers)
