"""``coordinator serve``: serve a model by OpenAI's API."""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from tandem.common.errors import OK, ConfigError, TandemError
from tandem.config.engine_kinds import ENGINE_KINDS
from tandem.config.models import hub
from tandem.config.schema.generation import ToolCallParser
from tandem.coordinator.commands.arguments import Commands, count, number
from tandem.serving.access_token import add_token, token_of

if TYPE_CHECKING:
    from tandem.serving.server_process import ServingHandover


def add(commands: Commands) -> None:
    """Declare the command."""
    serve = commands.add_parser("serve", help="serve a model by OpenAI's API: chats, completions, streams")
    serve.add_argument("folder", type=Path, metavar="FOLDER", help=FOLDER_HELP)
    serve.add_argument("--port", type=int, default=8000, help="port to listen on; 0: any free one (default: 8000)")
    serve.add_argument("--host", default="127.0.0.1", help="address to listen on (default: this machine only)")
    add_token(serve, "clients must send it: Authorization: Bearer TOKEN")
    add_engine(serve)
    serve.add_argument(
        "--tool-call-parser",
        choices=get_args(ToolCallParser),
        help="format of the model's tool calls; auto: the chat template's (default: they stay text)",
    )
    add_checkpoint(serve)
    serve.set_defaults(carry_out=_serve)


FOLDER_HELP = (
    "a Hugging Face model, a checkpoint step_N, or a run folder: its engines answer while it goes on and has "
    "policy.generation.expose_http_server, else its newest checkpoint"
)
_ENGINE_DEFAULTS: dict[str, Any] = {
    "name": None,
    "engine": "transformers",
    "max_batch_size": 32,
    "max_length": None,
    "precision": None,
    "timeout_s": 600.0,
    "tool_call_parser": None,
}


def add_checkpoint(parser: argparse.ArgumentParser) -> None:
    """Add the option to serve a checkpoint rather than the run to a parser."""
    parser.add_argument(
        "--checkpoint", action="store_true", help="if the run still goes on, serve its newest checkpoint all the same"
    )


def is_answered_by_the_run(arguments: argparse.Namespace) -> bool:
    """Return whether the run in the folder answers by its own engines. Raise `TandemError` for other options."""
    from tandem.serving.client import answers_itself

    if arguments.checkpoint or not answers_itself(arguments.folder):
        return False
    defaults = _ENGINE_DEFAULTS.items()
    options = [f"--{name.replace('_', '-')}" for name, default in defaults if getattr(arguments, name) != default]
    if options := [*options, *arguments.overrides]:
        raise ConfigError(
            f"{options[0]}: the run in {arguments.folder} goes on and its engines answer, with settings of their own; "
            "--checkpoint serves its newest checkpoint instead"
        )
    return True


def add_engine(parser: argparse.ArgumentParser) -> None:
    """Add the settings of the engine that generates to a parser."""
    engine = parser.add_argument_group("engine")
    engine.add_argument("--name", help="the model's name in requests (default: the folder's name)")
    engine.add_argument("--engine", choices=tuple(ENGINE_KINDS), help="default: transformers, embedded")
    engine.add_argument("--max-batch-size", type=count, metavar="N", help="responses at the same time (default: 32)")
    engine.add_argument(
        "--max-length",
        type=count,
        metavar="TOKENS",
        help="longest sequence, prompt included (default: the model's limit, at most 4096)",
    )
    engine.add_argument("--precision", choices=("float32", "bfloat16"), help="default: that of the model's files")
    engine.add_argument(
        "--timeout-s",
        type=number("above 0", lambda number: number > 0),
        metavar="SECONDS",
        help="time limit of a request (default: 600)",
    )
    engine.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="key=value",
        help="settings of vLLM: vllm_cfg.tensor_parallel_size=2, vllm_kwargs.ARGUMENT=VALUE",
    )
    parser.set_defaults(**_ENGINE_DEFAULTS)


def _serve(arguments: argparse.Namespace) -> int:
    if is_answered_by_the_run(arguments):
        return _serve_run(arguments)
    import msgspec

    from tandem.common.network import url_of
    from tandem.coordinator.preparing.serving_settings import open_port, settings_of
    from tandem.serving.server_process import become

    token = token_of(arguments)
    serving = settings_of(arguments, token)
    serving = msgspec.structs.replace(serving, tool_call_parser=arguments.tool_call_parser)
    with open_port(arguments.host, arguments.port, token) as listening:
        print(f"loading {hub.show_reference(serving.model_folder)}", flush=True)
        greeting = _greeting(serving, url_of(listening))
        become(msgspec.structs.replace(serving, greeting=greeting, listening=listening.fileno()))


def _serve_run(arguments: argparse.Namespace) -> int:
    from tandem.common.network import url_of
    from tandem.coordinator.preparing.serving_settings import open_port
    from tandem.serving.proxy import serve_run

    run, token = arguments.folder, token_of(arguments)
    with open_port(arguments.host, arguments.port, token) as listening:
        url = url_of(listening)
        print(f"serving policy at {url}/v1 (the rollouts of {run}, as long as it goes on); Ctrl-C ends it")
        print(f"try: {_example(url, 'policy', token, _text_for(run))}", flush=True)
        if serve_run(run, listening, token):
            print(f"the run in {run} has ended; coordinator serve {shlex.quote(str(run))} serves its newest checkpoint")
    return OK


def _greeting(serving: ServingHandover, url: str) -> str:
    return (
        f"serving {serving.name} at {url}/v1 ({serving.engine}, {serving.precision}, {serving.max_batch_size} answers "
        f"at once, at most {serving.max_length} tokens each, prompt included); Ctrl-C ends it\n"
        f"try: {_example(url, serving.name, serving.token, serving.example)}"
    )


def _text_for(run: Path) -> str:
    """Return a text that the model of a run can read."""
    from tandem.observe.run_folder.checkpoints import config_of
    from tandem.observe.run_folder.journal import read_journal
    from tandem.samples.model_files import load_tokenizer

    try:
        with read_journal(run) as journal:
            return load_tokenizer(config_of(journal)).short_text()
    except TandemError:
        return "Hello"  # the engines say what is wrong


def _example(url: str, model: str, token: str | None, text: str) -> str:
    """Return a command that sends a server one request."""
    body = f'{{"model": "{model}", "messages": [{{"role": "user", "content": {json.dumps(text)}}}]}}'
    words = ["curl", f"{url}/v1/chat/completions", "-H", "Content-Type: application/json"]
    if token is not None:
        words += ["-H", "Authorization: Bearer TOKEN"]
    return shlex.join([*words, "-d", body])
