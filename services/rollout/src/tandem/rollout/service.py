"""The rollout service: one engine. Prompts in, scored samples out.

It consumes `Generate` commands and weight versions, and produces samples as they finish (`tandem.rollout.generating`).
Between two steps of the engine the service looks for commands. It waits for environments, each with a deadline for its
answer, for the media of prompts, and for the peers of a refit, within the command's deadline. If training and
generation are colocated, the engine sleeps from the end of a `Generate` until the next `Generate` or `Refit`.

External requests (`tandem.rollout.external_requests`) are served while the engine has no samples to make. With
``async_engine`` they run beside samples, and the run cannot be repeated to the bit.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, assert_never

from tandem.common import gc_tuning, messages
from tandem.common.wire import Arrays
from tandem.launch.service import ServiceContext
from tandem.rollout.building import begin_anew, build_parts, engine_built
from tandem.rollout.generating import RunningGenerations
from tandem.rollout.parts import RolloutParts
from tandem.samples.routed_experts import replayed_experts

if TYPE_CHECKING:
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
        experts = replayed_experts(self._config)
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
