"""``coordinator chat``: talk to a model in the terminal."""

from __future__ import annotations

import argparse
import os
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem.common.errors import OK, ConfigError
from tandem.config.models import hub
from tandem.coordinator.commands.arguments import Commands, count, number
from tandem.coordinator.commands.serve import FOLDER_HELP, add_checkpoint, add_engine, is_answered_by_the_run
from tandem.serving.access_token import add_token, token_of

if TYPE_CHECKING:
    from tandem.serving.client import ChatServer


def add(commands: Commands) -> None:
    """Declare the command."""
    chat = commands.add_parser("chat", help="talk to a model in the terminal")
    chat.add_argument("folder", type=Path, nargs="?", metavar="FOLDER", help=FOLDER_HELP)
    chat.add_argument("--url", help="talk to a running server, such as that of coordinator serve, and load nothing")
    add_token(chat, "with --url: the token that the server asks for")
    chat.add_argument("--model", help="with --url: the model, where several are served")
    chat.add_argument("--system", metavar="TEXT", help="system prompt of the conversation")
    chat.add_argument(
        "--image",
        type=Path,
        action="append",
        dest="shown",
        metavar="PATH",
        help="a picture for the first question, to a vision model; may be given several times",
    )
    from_0 = number("from 0 on", lambda number: number >= 0)
    chat.add_argument("--temperature", type=from_0, help="0 is greedy (default: 1)")
    chat.add_argument("--top-p", type=number("above 0, at most 1", lambda number: 0 < number <= 1), help="default: 1")
    chat.add_argument("--top-k", type=count, help="draw from this many tokens (default: all)")
    chat.add_argument("--max-tokens", type=count, help="longest answer (default: what the context leaves)")
    chat.add_argument("--seed", type=int, help="gives the same answers again")
    add_engine(chat)
    add_checkpoint(chat)
    chat.set_defaults(carry_out=_chat)


def _chat(arguments: argparse.Namespace) -> int:
    if (arguments.folder is None) == (arguments.url is None):
        raise ConfigError("give the FOLDER of a model, or the --url of a server")
    parts = _read_parts(arguments.shown or ())
    if arguments.url is not None:
        return _talk_to(arguments, arguments.url, token_of(arguments), parts)
    if is_answered_by_the_run(arguments):
        from tandem.serving.client import LiveRun

        return _talk(arguments, LiveRun(arguments.folder).server, parts)
    import msgspec

    from tandem.common.network import url_of
    from tandem.coordinator.preparing.serving_settings import open_port, settings_of
    from tandem.serving.server_process import launch_server

    token = secrets.token_hex()
    serving = settings_of(arguments, token)
    with open_port("127.0.0.1", 0, token) as listening:
        print(f"loading {hub.show_reference(serving.model_folder)}", flush=True)
        with launch_server(msgspec.structs.replace(serving, listening=listening.fileno(), launched_by=os.getpid())):
            return _talk_to(arguments, url_of(listening), token, parts)


def _read_parts(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """Return the content parts of files. Raise `ConfigError` for one that is no picture."""
    if not paths:
        return []
    from tandem.serving.conversation import read_part

    return [read_part(path) for path in paths]


def _talk_to(arguments: argparse.Namespace, url: str, token: str | None, parts: list[dict[str, Any]]) -> int:
    from tandem.serving.client import ChatServer

    server = ChatServer(url, token)
    return _talk(arguments, lambda: server, parts)


def _talk(arguments: argparse.Namespace, find_server: Callable[[], ChatServer], parts: list[dict[str, Any]]) -> int:
    from tandem.serving.conversation import HELP, ChatSession

    model = find_server().choose_model(arguments.model)
    names = ("temperature", "top_p", "top_k", "max_tokens", "seed")
    settings = {name: getattr(arguments, name) for name in names}
    print(f"talking to {model}; {HELP}; Ctrl-C stops an answer", flush=True)
    ChatSession(find_server, model, arguments.system, settings, parts).hold()
    return OK
