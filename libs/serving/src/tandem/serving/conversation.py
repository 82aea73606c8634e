"""A conversation at a terminal: typed lines and pictures are questions, answered as answers come."""

from __future__ import annotations

import base64
import contextlib
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tandem.common.errors import ConfigError, ServiceError, nearest
from tandem.common.files import irregular
from tandem.serving.client import AnswerPiece, ChatServer

PROMPT = "> "
_COMMANDS = {
    "/image PATH": "show a picture with the next question",
    "/reset": "begin a new conversation",
    "/quit": "leave",
    "/help": "list these",
}
HELP = ", ".join(f"{command}: {description}" for command, description in _COMMANDS.items())


class ChatSession:
    """The messages exchanged with a server's model, and the loop that reads the next one."""

    def __init__(
        self,
        find_server: Callable[[], ChatServer],
        model: str,
        system: str | None,
        settings: Mapping[str, Any],
        parts: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """Start a conversation; `find_server` returns the server for the next question, and may raise `ServiceError`.

        If weights change, the conversation shows which versions answered. `parts` are content parts for the first
        question.
        """
        self._find_server = find_server
        self._versions: tuple[int, ...] = ()
        """Versions of the weights that answered last."""
        self._settings = {"model": model, **{name: value for name, value in settings.items() if value is not None}}
        self._beginning = [] if system is None else [{"role": "system", "content": system}]
        self._messages: list[Mapping[str, Any]] = [*self._beginning]
        self._parts = [*parts]
        """Content parts that the next question begins with."""

    def hold(self) -> None:
        """Talk until the user leaves with ``/quit`` or the end of the input."""
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  # lines can then be edited and found again
        while True:
            try:
                typed = input(PROMPT).strip()
            except EOFError:
                print()
                return
            except KeyboardInterrupt:  # discard the typed text
                print("\n(Ctrl-D or /quit leaves)")
                continue
            if typed == "/quit":
                return
            if typed.startswith("/"):
                self._carry_out(typed)
            elif typed:
                self._ask(typed)

    def _carry_out(self, command: str) -> None:
        word, _, argument = command.partition(" ")
        match command:
            case "/reset":
                self._messages, self._parts = [*self._beginning], []
                print("(a new conversation)")
            case "/help":
                print(HELP)
            case _ if word == "/image":
                self._show(argument.strip().strip("'\""))
            case _:
                names = [usage.split()[0] for usage in _COMMANDS]
                print(f"error: there is no {word}{nearest(word, names)} ({HELP})", file=sys.stderr)

    def _show(self, path: str) -> None:
        """Have the next question begin with a picture."""

        try:
            if not path:
                raise ConfigError("/image needs the path of a file")
            self._parts.append(read_part(Path(path).expanduser()))
        except ConfigError as error:
            print(f"error: {error}", file=sys.stderr, flush=True)
            return
        num = len(self._parts)
        print(f"({'it is' if num == 1 else f'{num} pictures are'} shown with the next question)", flush=True)

    def _ask(self, text: str) -> None:
        """Ask, and show the answer; Ctrl-C stops it and keeps what was said until then."""
        parts, self._parts = self._parts, []
        content = [*parts, {"type": "text", "text": text}] if parts else text
        question: dict[str, Any] = {"role": "user", "content": content}
        answer_pieces: list[AnswerPiece] = []
        try:
            server = self._find_server()
            with contextlib.closing(server.stream([*self._messages, question], **self._settings)) as pieces:
                for piece in pieces:
                    if answer_pieces and answer_pieces[-1].is_reasoning and not piece.is_reasoning:
                        print("\n")
                    answer_pieces.append(piece)
                    print(_printable(piece.text), end="", flush=True)
            print()
            self._show_versions(server.versions)
        except KeyboardInterrupt:
            print("\n(stopped)")
        except ServiceError as error:
            print(f"{chr(10) if answer_pieces else ''}error: {error.what}", file=sys.stderr, flush=True)
            return  # the unanswered question is not part of the conversation
        answer = {
            "role": "assistant",
            "content": "".join(piece.text for piece in answer_pieces if not piece.is_reasoning),
        }
        if reasoning := "".join(piece.text for piece in answer_pieces if piece.is_reasoning):
            answer["reasoning_content"] = reasoning
        self._messages += [question, answer]

    def _show_versions(self, versions: tuple[int, ...]) -> None:
        """Show which weights answered, if they are not the previous ones."""
        if versions and versions != self._versions:
            several = "s" if len(versions) > 1 else ""
            print(f"(weights of step{several} {', '.join(map(str, versions))})")
        self._versions = versions


def _printable(text: str) -> str:
    """Return text without characters that control a terminal."""
    return "".join(char if char.isprintable() or char in "\n\t" else "\N{REPLACEMENT CHARACTER}" for char in text)


_MAX_BYTES = 12 * 2**20
"""Most bytes of a file: our servers take requests of a third more, which is what base64 makes of them."""


def read_part(path: Path) -> dict[str, Any]:
    """Return a file's content part. Raises `ConfigError` if it cannot be read, or is no picture."""
    from tandem.samples.images.reading import kind_of  # only this reads pictures

    try:
        if (kind := irregular(path)) is not None:
            raise ConfigError(f"the image {str(path)!r} is {kind}, not a file")
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise ConfigError(f"cannot read the image {str(path)!r}: {reason}") from error
    if len(data) > _MAX_BYTES:
        raise ConfigError(f"the image {str(path)!r} has over {_MAX_BYTES // 2**20} MiB")
    format_name = kind_of(data)
    if format_name is None:
        raise ConfigError(f"the image {str(path)!r} is no PNG, JPEG, WEBP or GIF")
    uri = f"data:image/{format_name.lower()};base64,{base64.b64encode(data).decode()}"
    return {"type": "image_url", "image_url": {"url": uri}}
