"""Render chat templates, which are programs of others, within limits of time, memory and text."""

from __future__ import annotations

import contextlib
import inspect
import re
import resource
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from tandem.common.errors import ConfigError

Messages = Sequence[Mapping[str, str]]
"""A conversation: each message has a ``role`` and its ``content``."""

DEADLINE_S = 10.0
"""Seconds that one conversation may take. Most take less than a thousandth, the first a tenth."""
_MAX_MEMORY = 1 << 30
"""Bytes that one conversation may take, beyond what the process has."""
_MAX_TEXT = 1 << 26
"""Characters that a template may make of one conversation."""
_MAX_ROLES = 8
"""Messages whose roles an error lists."""


class _TooSlow(Exception):
    """The deadline has passed."""


class ChatTemplate:
    """The chat template of a Hugging Face tokenizer, which is in the folder `where` and configured at `key`."""

    def __init__(self, hugging_face: Any, where: str, key: str) -> None:
        self._hugging_face = hugging_face
        self._name = f"{key}.chat_template: the chat template of {where}"

    @property
    def words(self) -> frozenset[str]:
        """The words in it, among which are the names of all variables that it reads."""
        template = self._hugging_face.chat_template
        return frozenset(re.findall(r"\w+", template if isinstance(template, str) else " ".join(template.values())))

    @property
    def variables(self) -> frozenset[str]:
        """Names that it may read and that are nobody else's to set."""
        taken = inspect.signature(self._hugging_face.apply_chat_template).parameters
        return self.words - taken.keys() - {"messages"}

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return a conversation as text; `variables` are more for the template.

        Raises `ConfigError` if the template is broken or refuses it.
        """
        import jinja2  # noqa: F401  # before the time is taken; it is the library's, and slow to import

        try:
            with _deadline(DEADLINE_S):
                rendered = self._hugging_face.apply_chat_template(
                    list(messages), tokenize=False, add_generation_prompt=add_generation_prompt, **(variables or {})
                )
        except _TooSlow:
            raise ConfigError(f"{self._name} takes longer than {DEADLINE_S:g} s for one conversation") from None
        except MemoryError:
            raise ConfigError(f"{self._name} needs too much memory for one conversation") from None
        except RecursionError:
            raise ConfigError(f"{self._name} calls itself without end") from None
        except Exception as error:  # a template may do most of what Python can, and raise as much
            reason = " ".join(str(error).split()) or type(error).__name__
            raise ConfigError(f"{self._name} refuses messages of {_roles(messages)}: {reason}") from error
        if len(rendered) > _MAX_TEXT:
            raise ConfigError(f"{self._name} makes {len(rendered):,} characters of one conversation")
        return str(rendered)


def _roles(messages: Sequence[Mapping[str, Any]]) -> str:
    roles = [str(message.get("role")) for message in messages[:_MAX_ROLES]]
    return ", ".join([*roles, "..."] if len(messages) > _MAX_ROLES else roles)


@contextlib.contextmanager
def memory_limit() -> Iterator[None]:
    """Have allocations fail that are far beyond what the process has.

    This is for a process that does nothing else meanwhile: others of its threads would be refused memory as well. Where
    the system does not say what a process has, there is no limit.
    """
    try:
        num_pages = int(Path("/proc/self/statm").read_text().split()[0])
    except OSError:
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = num_pages * resource.getpagesize() + _MAX_MEMORY
    if soft != resource.RLIM_INFINITY and soft <= most:
        yield
        return
    resource.setrlimit(resource.RLIMIT_AS, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@contextlib.contextmanager
def _deadline(seconds: float) -> Iterator[None]:
    """Raise `_TooSlow` in what runs for longer. Only the main thread can be interrupted; others are not."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise _TooSlow

    handler = signal.signal(signal.SIGALRM, interrupt)
    begun = time.monotonic()
    # Again and again: where it is raised first it may be lost, as in an object's end.
    others, interval = signal.setitimer(signal.ITIMER_REAL, seconds, 0.1)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if others:  # a timer that somebody else has set goes on
            signal.setitimer(signal.ITIMER_REAL, max(others - (time.monotonic() - begun), 0.001), interval)
