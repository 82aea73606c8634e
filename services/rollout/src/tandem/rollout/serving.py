"""A server of one model, which answers OpenAI's API until asked to end.

The command line starts it (`tandem.serving.server_process`). The main thread drives the engine; HTTP has a thread of
its own.
"""

from __future__ import annotations

import contextlib
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tandem.common import signals
from tandem.common.errors import ConfigError, DataError, TandemError
from tandem.common.process_lifetime import adopt_orphans, die_with, end_descendants
from tandem.rollout.media import describe_media, keep_served
from tandem.samples.model_files import load_model_tokenizer, wrap_for_media
from tandem.samples.tokenizer import Tokenizer
from tandem.serving.server_process import ServingHandover, take

if TYPE_CHECKING:
    from tandem.rollout.engine import Engine
    from tandem.rollout.engines.factory import EngineMedia

_WAIT_S = 1.0
"""Longest sleep of the engine's thread without work; a request wakes it."""
_OK, _FAILED = 0, 1


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until interrupted; return the exit code. The argument is the descriptor from which the settings are
    read."""
    (descriptor,) = sys.argv[1:] if argv is None else argv
    serving = take(int(descriptor))
    if serving.launched_by:
        die_with(serving.launched_by)
    adopt_orphans()
    signals.interrupt_when_asked()
    try:
        serve(serving)
    except TandemError as error:
        print(f"error: {error}", file=sys.stderr)
        return _FAILED
    except KeyboardInterrupt:
        return _OK  # the normal way to end a server
    finally:
        end_descendants()
    return _OK


def serve(serving: ServingHandover) -> None:
    """Load the model and answer. Raises `TandemError`, and `KeyboardInterrupt` once all is closed."""
    listening = socket.socket(fileno=serving.listening)
    with contextlib.closing(listening), contextlib.ExitStack() as stack:
        folder = Path(serving.model_folder)
        tokenizer = wrap_for_media(load_model_tokenizer(folder), folder)
        received = keep_served(tokenizer)
        engine = _make_engine(serving, describe_media(tokenizer, received))
        stack.callback(engine.close)
        _try_template(tokenizer)
        # Not before the engine: it forks workers, which must have no thread to miss.
        from tandem.rollout.openai_api.app import make_app, only_with
        from tandem.rollout.openai_api.driver import EngineDriver
        from tandem.rollout.openai_api.generator import ServedModel
        from tandem.rollout.openai_api.server import HttpServer

        driver = EngineDriver(engine, most_at_once=serving.vllm_kwargs.get("max_num_seqs") or serving.max_batch_size)
        model = ServedModel(
            serving.name,
            tokenizer,
            driver,
            max_length=serving.max_length,
            vocabulary=serving.vocabulary,
            aliases=serving.aliases,
            tool_call_parser=serving.tool_call_parser,
            media=received,
        )
        app = make_app(only_with(serving.token, model), deadline_s=serving.deadline_s)
        stack.enter_context(HttpServer(app, listening, asks_for_token=serving.token is not None))
        stack.callback(driver.close, "the server ends")
        print(serving.greeting, flush=True)
        try:
            while True:
                driver.wait(_WAIT_S)
                driver.work()
        except TandemError as error:
            driver.close(f"the engine has failed: {error}")
            raise


def _make_engine(serving: ServingHandover, media: EngineMedia | None) -> Engine:
    from tandem.rollout.engines.factory import find_factory

    factory = find_factory(serving.engine)
    factory.prepare_process(serving.num_threads)
    return factory.load(serving, media)


def _try_template(tokenizer: Tokenizer) -> None:
    """Raise `ConfigError` if the chat template is broken or never ends, while that can still be interrupted."""
    try:
        tokenizer.encode_chat([{"role": "user", "content": "1"}], add_generation_prompt=True)
    except DataError:
        return  # a vocabulary without a 1
    except ConfigError as error:
        if "refuses messages" not in str(error):  # a template may refuse messages for its own reasons
            raise


if __name__ == "__main__":
    sys.exit(main())
