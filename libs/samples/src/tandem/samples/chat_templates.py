"""Render chat templates, which are third-party programs, within limits of time, memory and text."""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import re
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from tandem.common.errors import ConfigError

Messages = Sequence[Mapping[str, Any]]
"""A conversation: messages with a ``role``, and with ``content``, ``tool_calls``, ``reasoning_content`` and whatever
else they came with."""

REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
"""Names of a message's reasoning: DeepSeek's, vLLM's and GPT-OSS's. Templates read one, Transformers gives them all."""

DEADLINE_S = 10.0
"""Limit of one conversation, in seconds that a processor works for it: a machine may have much else to do. Most take
less than a millisecond, the first takes 0.1 s."""
_BUSY_TIMES = 30
"""How many times as long it may take in all."""
_MAX_MEMORY = 1 << 30
"""Memory limit of one conversation, in bytes beyond what the process has."""
_MAX_TEXT = 1 << 26
"""Text limit of one rendered conversation, in characters."""
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_PROBE = "q7zqx"
"""Content that is found again where a template shows it."""
Result = TypeVar("Result")
_MAX_ROLES = 8
"""Most messages of which an error lists the roles."""


def reasoning_of(message: Mapping[str, Any]) -> Any:
    """Return the reasoning of a message, by the first of its names that has any; None if none has."""
    return next((message[field] for field in REASONING_FIELDS if message.get(field)), None)


def _as_parts(text: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text}]


def _as_parted(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages of which contents are lists of parts."""
    return [
        {**message, "content": _as_parts(message["content"])}
        if isinstance(message.get("content"), str)
        else dict(message)
        for message in messages
    ]


class _TooSlow(Exception):
    """The deadline has passed."""


class ChatTemplate:
    """A Hugging Face tokenizer's chat template, from the folder `where` and configured at `key`."""

    def __init__(self, hugging_face: Any, source: str, key: str) -> None:
        self._hugging_face = hugging_face
        self._name = f"{key}.chat_template: the chat template of {source}"

    @property
    def words(self) -> frozenset[str]:
        """The words in it, which include the names of all variables that it reads."""
        template = self._hugging_face.chat_template
        return frozenset(re.findall(r"\w+", template if isinstance(template, str) else " ".join(template.values())))

    @property
    def variables(self) -> frozenset[str]:
        """Variables that a conversation may set for it."""
        parameters = inspect.signature(self._hugging_face.apply_chat_template).parameters
        return self.words - parameters.keys() - {"messages"}

    @functools.cached_property
    def reads_only_parts(self) -> bool:
        """Whether it shows contents that are lists of parts, but no text: some of vision models do."""
        return "type" in self.words and not self._shows(_PROBE) and self._shows(_as_parts(_PROBE))

    def _shows(self, content: Any) -> bool:
        def apply(form: list[dict[str, Any]]) -> str:
            return str(self._hugging_face.apply_chat_template(form, tokenize=False))

        try:
            return _PROBE in self._call_limited(apply, [{"role": "user", "content": content}], is_read_as_given=True)
        except ConfigError:
            return False

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

        def apply(form: list[dict[str, Any]]) -> str:
            return str(
                self._hugging_face.apply_chat_template(
                    form, tokenize=False, add_generation_prompt=add_generation_prompt, **(variables or {})
                )
            )

        rendered = self._call_limited(apply, messages)
        if len(rendered) > _MAX_TEXT:
            raise ConfigError(f"{self._name} makes {len(rendered):,} characters of one conversation")
        return rendered

    @property
    def marks_generated(self) -> bool:
        """Whether it marks what the assistant generates, by ``{% generation %}``."""
        template = self._hugging_face.chat_template
        return isinstance(template, str) and _GENERATION.search(template) is not None

    def find_generated(
        self, messages: Sequence[Mapping[str, Any]], *, variables: Mapping[str, Any] | None = None
    ) -> list[tuple[int, int]]:
        """Return the parts of a rendered conversation that the template marks as generated, in characters.

        Raises `ConfigError` as `render` does.
        """
        from transformers.utils.chat_template_utils import render_jinja_template

        template = self._hugging_face.chat_template
        all_variables = {**self._hugging_face.special_tokens_map, **(variables or {})}

        def apply(form: list[dict[str, Any]]) -> list[tuple[int, int]]:
            present = [{name: value for name, value in message.items() if value is not None} for message in form]
            _, (parts,) = render_jinja_template(
                conversations=[present], chat_template=template, return_assistant_tokens_mask=True, **all_variables
            )
            return [(int(begin), int(end)) for begin, end in parts]

        return self._call_limited(apply, messages)

    def _call_limited(
        self,
        apply: Callable[[list[dict[str, Any]]], Result],
        messages: Sequence[Mapping[str, Any]],
        *,
        is_read_as_given: bool = False,
    ) -> Result:
        """Return what a template makes of messages, within limits of time and memory.

        Contents are in the form that it shows, unless it is to be tried with one (`is_read_as_given`).
        """
        import jinja2  # noqa: F401  # the library's slow import should not count towards the time limit

        try:
            read = list if is_read_as_given or not self.reads_only_parts else _as_parted
            with _deadline(DEADLINE_S):
                return _first_accepted(lambda form: apply(read(form)), messages)
        except _TooSlow:
            raise ConfigError(f"{self._name} takes longer than {DEADLINE_S:g} s for one conversation") from None
        except MemoryError:
            raise ConfigError(f"{self._name} needs too much memory for one conversation") from None
        except RecursionError:
            raise ConfigError(f"{self._name} calls itself without end") from None
        except Exception as error:  # a template may do most of what Python can, and raise as much
            reason = " ".join(str(error).split()) or type(error).__name__
            raise ConfigError(f"{self._name} refuses messages of {_roles(messages)}: {reason}") from error


def _first_accepted(apply: Callable[[list[dict[str, Any]]], Result], messages: Sequence[Mapping[str, Any]]) -> Result:
    """Return what a template makes of the first form of messages that it accepts; raise its first error if of none."""
    refusal: Exception | None = None
    for form in forms(messages):
        try:
            return apply(form)
        except (_TooSlow, MemoryError, RecursionError):
            raise
        except Exception as error:  # a template may raise anything
            refusal = refusal or error
    assert refusal is not None, "there is at least one form"
    raise refusal


def forms(messages: Sequence[Mapping[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Yield the forms in which templates read messages, best first; plain messages have one.

    The arguments of a call are JSON text in OpenAI's messages; most templates write them as an object, some as text
    (DeepSeek's). A message of calls alone has no content, or an empty one.
    """
    as_objects = [_convert_arguments(message, as_text=False) for message in messages]
    yield as_objects
    has_calls = any(message.get("tool_calls") for message in messages)
    has_null = any("content" in message and message["content"] is None for message in messages)
    if has_calls:
        yield [_convert_arguments(message, as_text=True) for message in messages]
    if has_null:
        yield [_fill_content(message) for message in as_objects]
    if has_null and has_calls:
        yield [_fill_content(_convert_arguments(message, as_text=True)) for message in messages]


def _fill_content(message: Mapping[str, Any]) -> dict[str, Any]:
    return {**message, "content": ""} if message.get("content") is None else dict(message)


def _convert_arguments(message: Mapping[str, Any], *, as_text: bool) -> dict[str, Any]:
    """Return a message with the arguments of its calls as JSON text, or as objects."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list | tuple):
        return dict(message)
    return {**message, "tool_calls": [_call_with_arguments(call, as_text) for call in calls]}


def _call_with_arguments(call: Any, as_text: bool) -> Any:
    if not isinstance(call, Mapping):
        return call
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": _call_with_arguments(call["function"], as_text)}
    arguments = call.get("arguments")
    if as_text and isinstance(arguments, Mapping | list):
        return {**call, "arguments": json.dumps(arguments, ensure_ascii=False)}
    if not as_text and isinstance(arguments, str):
        with contextlib.suppress(ValueError):  # what is not JSON is text
            return {**call, "arguments": json.loads(arguments)}
    return dict(call)


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
    max_bytes = num_pages * resource.getpagesize() + _MAX_MEMORY
    if soft != resource.RLIM_INFINITY and soft <= max_bytes:
        yield
        return
    resource.setrlimit(resource.RLIMIT_AS, (max_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@contextlib.contextmanager
def _deadline(seconds: float) -> Iterator[None]:
    """Raise `_TooSlow` once a processor has worked so long for this thread, or after `_BUSY_TIMES` that.

    Only the main thread can be interrupted; in other threads there is no limit.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        if time.thread_time() - worked_s >= seconds or time.monotonic() - begun >= _BUSY_TIMES * seconds:
            raise _TooSlow

    worked_s = time.thread_time()
    handler = signal.signal(signal.SIGALRM, interrupt)
    begun = time.monotonic()
    # Repeat the signal: the first exception may be lost, for example in an object's finalizer.
    earlier_s, interval = signal.setitimer(signal.ITIMER_REAL, seconds, 0.1)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if earlier_s:  # a timer set elsewhere continues
            signal.setitimer(signal.ITIMER_REAL, max(earlier_s - (time.monotonic() - begun), 0.001), interval)
