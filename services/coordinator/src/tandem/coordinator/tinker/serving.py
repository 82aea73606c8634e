"""The run and its web server, from the command to the end of both."""

from __future__ import annotations

import contextlib
import socket
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from starlette.types import ASGIApp

from tandem.common import signals
from tandem.common.errors import FAILED, OK, ConfigError, RunFolderError
from tandem.config import Config, notices
from tandem.launch.fork_server import ServiceForkServer
from tandem.launch.launch import preload
from tandem.launch.nodes import launched_processes
from tandem.launch.preparing.beginning import Mode, has_begun
from tandem.serving.tinker.access import ApiKeys, TlsCertificate

if TYPE_CHECKING:
    from tandem.serving.tinker.calls import CallDesk


class ServingTerms(msgspec.Struct, frozen=True, kw_only=True):
    """How clients are served."""

    listening: socket.socket
    url: str
    tls: TlsCertificate | None
    """The certificate for HTTPS; None for HTTP."""
    most_tokens: int
    """Tokens that a key may have in progress."""
    most_models: int
    """Models that are trained at a time."""
    most_published: int
    """Published versions of each model that are kept."""
    most_recorded: int
    """Bytes of the record of calls; zero for none."""


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket; port 0 picks a free port. Raises `ConfigError`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=1024)
    except (OSError, OverflowError) as error:
        reason = error.strerror if isinstance(error, OSError) else "no such port"
        raise ConfigError(f"--host {host} --port {port}: cannot listen: {reason}") from error


def serve(source: str, config: Config, mode: Mode, keys: ApiKeys, states: Path, terms: ServingTerms) -> int:
    """Serve until Ctrl-C; return the exit code. Raises `RunFolderError` if the run folder has a run already."""
    if mode == "new" and has_begun(config):  # clients go on from what they saved, and no run is resumed
        raise RunFolderError(
            f"{config.logger.log_dir} already holds a run: set it aside with --restart, or choose another "
            "logger.log_dir; clients go on from what save_weights has saved"
        )
    for notice in notices(config):
        print(f"note: {notice}", flush=True)
    signals.interrupt_when_asked()
    kinds = [kind for kind, count in launched_processes(config).items() if count]
    # First: it must have no threads.
    with ServiceForkServer(
        partial(preload, kinds, config.policy.environment), config.cluster.deadlines.join_s
    ) as fork_server:
        from tandem.coordinator.loop.opening import CommandInvocation
        from tandem.coordinator.loop.run import run
        from tandem.coordinator.preparing.preflight import preflight
        from tandem.coordinator.tinker.driving import NoAlgorithm, TinkerFrontEnd
        from tandem.serving.tinker.app import TinkerServer

        ready = preflight(source, config, mode, make=NoAlgorithm)
        with contextlib.ExitStack() as stack:
            desk = _desk(ready.config, terms, stack)

            def begin() -> None:
                app = partial(_app, desk, ready.config, keys, states, terms)
                server = TinkerServer(app, terms.listening, terms.tls)
                stack.callback(server.close)

            def say_where() -> None:
                url = terms.url
                print(f'serving the Tinker API at {url}: tinker.ServiceClient(base_url="{url}")', flush=True)

            invocation = CommandInvocation(
                ready=ready,
                mode=mode,
                say=partial(print, flush=True),
                fork_server=fork_server,
                front_end=TinkerFrontEnd(desk, ready.config, begin, say_where),
            )
            try:
                finish = run(invocation)
            except KeyboardInterrupt:
                return OK
            finally:
                desk.close("the run has ended", is_over=True)
    if finish.error is not None:
        raise finish.error
    return FAILED if finish.outcome == "failed" else OK


def _desk(config: Config, terms: ServingTerms, stack: contextlib.ExitStack) -> CallDesk:
    """Return the desk, with a record that `stack` closes."""
    from tandem.serving.tinker.calls import CallDesk, EngineAdapterSets

    if terms.most_recorded:
        from tandem.serving.tinker.recording import ModelRecords, RecordingDesk

        record = ModelRecords(Path(config.logger.log_dir), terms.most_recorded, partial(print, flush=True))
        stack.callback(record.close)
        desk: CallDesk = RecordingDesk(terms.most_models, terms.most_published, record)
    else:
        desk = CallDesk(terms.most_models, terms.most_published)
    if config.policy.generation.num_adapter_sets > 1:
        desk.held = EngineAdapterSets()
    return desk


def _app(desk: object, config: Config, keys: ApiKeys, states: Path, terms: ServingTerms) -> ASGIApp:
    """Make the application, in the thread of its event loop."""
    from tandem.serving.tinker.app import make_app, reaches_loopback_only
    from tandem.serving.tinker.calls import CallDesk
    from tandem.serving.tinker.sampling import SamplingEngines
    from tandem.serving.tinker.service import TinkerService
    from tandem.serving.tinker.states import StateFolder

    assert isinstance(desk, CallDesk), "as `_desk` returns"
    longest = config.policy.generation.kind.longest_sequence(config)
    engines = SamplingEngines(Path(config.logger.log_dir), longest, config.cluster.deadlines.generate_s)
    service = TinkerService(desk, config, engines, StateFolder(states.absolute()), terms.most_tokens)
    return make_app(service, keys, is_on_loopback=reaches_loopback_only(terms.listening))
