"""The building of a rollout: its engine, and what works beside it, as `BuildEngine` asks for them."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

from tandem.common.messages import BuildEngine, EngineBuilt, Listener, RewardServer
from tandem.common.network import find_address_towards
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
from tandem.rollout.parts import RolloutParts
from tandem.samples import media as run_media
from tandem.samples import model_files, routed_experts, sample_store
from tandem.samples.tokenizer import Tokenizer

if TYPE_CHECKING:
    from tandem.rollout.agents.agents import RolloutAgents
    from tandem.rollout.external_requests import ExternalRequests
    from tandem.rollout.openai_api.generator import RequestMedia
    from tandem.rollout.sample_recorder import SampleRecorder


def build_parts(
    command: BuildEngine, context: ServiceContext, experts: routed_experts.RoutedExperts | None
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
        parts.store = sample_store.SampleStore(host, context.run_id, max_tokens, context.trainers)
        stack.callback(parts.store.close)
        if tokenizer.takes_media:
            parts.store.give_media(run_media.answer_requests(config, context.run_id))
            parts.media = run_media.make_media_fetcher(config, context.name, context.run_id, context.keys)
            parts.media.begin(command.media_at, context.coordinator)
        if command.samples_folder:
            parts.recorder = _make_recorder(Path(command.samples_folder), context, parts.store, tokenizer, experts)
        stack.pop_all()
        return parts


def engine_built(command: BuildEngine, parts: RolloutParts) -> EngineBuilt:
    """Return the answer that the engine is built."""
    return EngineBuilt(
        command_id=command.command_id,
        layouts=tuple(map(layout.encode, parts.engine.layouts())),
        samples_at=parts.store.at,
        external_requests=None if parts.external_requests is None else parts.external_requests.address,
    )


def begin_anew(command: BuildEngine, context: ServiceContext, parts: RolloutParts) -> None:
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
    store: sample_store.SampleStore,
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


def _program(server: RewardServer | None, coordinator: str) -> RewardProgram | None:
    """Return where the program that began the run scores samples, if it does: on the coordinator's host."""
    if server is None:
        return None
    address = f"{coordinator.rpartition(':')[0]}:{server.port}"
    return RewardProgram(Listener(address=address, public_key=server.public_key), server.callers)
