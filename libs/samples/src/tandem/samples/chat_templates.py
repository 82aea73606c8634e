"""Render chat templates, which are third-party programs, within limits of time, memory and text."""

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
"""A conversation: messages with a ``role`` and ``content``."""

DEADLINE_S = 10.0
"""Time limit of one conversation, in seconds. Most take less than a millisecond, the first takes 0.1 s."""
_MAX_MEMORY = 1 << 30
"""Memory limit of one conversation, in bytes beyond what the process has."""
_MAX_TEXT = 1 << 26
"""Text limit of one rendered conversation, in characters."""
_MAX_ROLES = 8
"""Most messages of which an error lists the roles."""


class _TooSlow(Exception):
    """The deadline has passed."""


class ChatTemplate:
    """A Hugging Face tokenizer's chat template, from the folder `where` and configured at `key`."""

    def __init__(self, hugging_face: Any, where: str, key: str) -> None:
        self._hugging_face = hugging_face
        self._name = f"{key}.chat_template: the chat template of {where}"

    @property
    def words(self) -> frozenset[str]:
        """The words in it, which include the names of all variables that it reads."""
        template = self._hugging_face.chat_template
        return frozenset(re.findall(r"\w+", template if isinstance(template, str) else " ".join(template.values())))

    @property
    def variables(self) -> frozenset[str]:
        """Variables that a conversation may set for it."""
        taken = inspect.signature(self._hugging_face.apply_chat_template).parameters
        return self.words - taken.keys() - {"messages"}

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return a conversation as text; `variables` are further ones for the template.

        Raises `ConfigError` if the template is broken or refuses the conversation.
        """
        import jinja2  # noqa: F401  # the library's slow import should not count towards the time limit

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
    """Make allocations fail that are far beyond what the process has.

    For a process that does nothing else meanwhile, since its other threads would be refused memory too. There is no
    limit if the system does not report the process's memory.
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
    """Raise `_TooSlow` after this time. Only the main thread can be interrupted; in other threads there is no limit."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise _TooSlow

    handler = signal.signal(signal.SIGALRM, interrupt)
    begun = time.monotonic()
    # Repeat the signal: the first exception may be lost, for example in an object's finalizer.
    others, interval = signal.setitimer(signal.ITIMER_REAL, seconds, 0.1)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if others:  # a timer set elsewhere continues
            signal.setitimer(signal.ITIMER_REAL, max(others - (time.monotonic() - begun), 0.001), interval)
