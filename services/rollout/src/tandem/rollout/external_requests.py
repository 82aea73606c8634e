"""External requests, which get what training leaves of the engine.

Two threads meet here, as in `tandem.rollout.openai_api.driver`: one answers HTTP, and the engine's thread calls all
other methods of `ExternalRequests`. In a run that can be repeated to the bit, they and samples never share the
engine. External requests have it while there are no samples to make (`work`). They are taken out before there are
(`pause`), and later continue from what they have. In an asynchronous run, a few external requests run beside samples.
Samples then see the engine through `step` and `num_unfinished`.
"""

from __future__ import annotations

import secrets
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tandem.common.messages import EngineServer
from tandem.common.network import is_loopback
from tandem.config import Config
from tandem.config.models.model_sizes import vocabulary_size
from tandem.rollout.engine import Engine, EngineCompletion
from tandem.rollout.openai_api.app import make_app, only_with
from tandem.rollout.openai_api.driver import EngineDriver
from tandem.rollout.openai_api.generator import RequestMedia, ServedModel
from tandem.rollout.openai_api.server import HttpServer, listen
from tandem.samples.tokenizer import Tokenizer

MODEL = "policy"
"""Name of the model in external requests, beside the run's folder and the model that the run began with."""
_BESIDE_SAMPLES = 4
"""External responses made at once beside samples."""
_AT_ONCE = 64
"""External responses made at once when there are no samples."""
_DEADLINE_S = 600.0
"""Seconds for a request, including the time in which the engine does other things."""


class ExternalRequests:
    """The endpoint of one rollout process for external requests."""

    def __init__(
        self,
        config: Config,
        engine: Engine,
        tokenizer: Tokenizer,
        host: str,
        notify: Callable[[], None],
        media: RequestMedia | None = None,
    ) -> None:
        """Begin to listen; `notify` is called when there is something to do.

        `media` keeps those of requests, for an engine that takes them.
        """
        generation = config.policy.generation
        self._engine = engine
        self._is_beside = is_beside = generation.is_async
        self._driver = EngineDriver(
            engine,
            notify=notify,
            most_at_once=min(_BESIDE_SAMPLES if is_beside else _AT_ONCE, generation.width),
            for_external_requests=True,
        )
        run = config.logger.log_dir
        model = ServedModel(
            MODEL,
            tokenizer,
            self._driver,
            max_length=config.policy.max_total_sequence_length,
            vocabulary=vocabulary_size(config.policy),
            stop_token_ids=generation.stop_token_ids or (),
            aliases=[*dict.fromkeys([run, Path(run).resolve().name, config.policy.model_name])],
            shows_versions=True,
            media=media,
        )
        token = "" if is_loopback(host) else secrets.token_urlsafe(24)
        app = make_app(only_with(token or None, model), deadline_s=_DEADLINE_S)
        self._server = HttpServer(app, listen(host, 0), asks_for_token=bool(token))
        self.address = EngineServer(url=self._server.url, token=token)

    @property
    def num_running(self) -> int:
        """External requests that the engine has."""
        return self._driver.num_running

    def work(self) -> bool:
        """Make one token for each external request; return whether there is more to do. The engine has no other
        requests."""
        if not self._driver.has_work:
            return False
        try:
            self._driver.work()
        except Exception as error:  # the run finds out for itself
            print(f"external requests are refused: {error}", file=sys.stderr, flush=True)
            self._driver.drop(f"the engine has failed: {error}")
        return self._driver.has_work

    def work_for(self, seconds: float) -> None:
        """Go on for this long, or until there is nothing to do."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self.work():
            pass

    def pause(self) -> None:
        """Take external requests out of the engine until the next `work`."""
        self._driver.suspend()

    @property
    def num_unfinished(self) -> int:
        """Requests for samples that the engine has."""
        return self._engine.num_unfinished - self._driver.num_running

    def step(self) -> list[EngineCompletion]:
        """Make one token for each sample; return the finished ones.

        External requests run beside samples only with ``async_engine``.
        """
        if not self._is_beside:
            self._driver.suspend()
            return self._engine.step()
        self._driver.admit()
        return self._driver.hand_out(self._engine.step())

    def close(self) -> None:
        """Refuse all external requests: the run ends, or this process."""
        self._driver.close("the run has ended, or this rollout has")
        self._server.close()
