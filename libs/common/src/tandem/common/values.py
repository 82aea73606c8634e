"""Values from outside: how they keep their type, how they become text, and which numbers are allowed."""

from __future__ import annotations

import math
import numbers
import re
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from typing import Any, Literal

import msgspec

from tandem.common.errors import ConfigError, RewardError
from tandem.common.messages import LARGEST, Problem
from tandem.common.user_code import line, shown

_NUMBER = re.compile(rb"-?(?:0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_NUMBER_CODE = 1
"""Extension type of msgpack for a number that its own types cannot hold: its digits as JSON writes them."""
_MAX_DIGITS = 4300
"""Most digits of a number; Python converts no longer integers."""
_SMALLEST, _LARGEST = -(1 << 63), (1 << 64) - 1
"""Bounds of msgpack's integers."""


def fill_template(key: str, template: str, problem: Problem, **more: str) -> str:
    """Fill a format string with a problem's question, answer and metadata. Raises `ConfigError` naming the field.

    Several right answers are written with `` or `` between them.
    """
    fields: Mapping[str, Any] = {
        **problem.metadata,
        "metadata": problem.metadata,
        "question": question_text(problem.question),
        "answer": show_answer(problem.answer),
        **more,
    }
    try:
        return template.format_map(fields)
    except (KeyError, IndexError, ValueError, AttributeError, TypeError) as error:
        valid = ", ".join(sorted(fields))
        raise ConfigError(f"{key}: cannot fill {template!r}: {error} (fields are {valid})") from error


def answer_texts(answer: object, *, boxes: bool = False) -> tuple[str, ...]:
    """Return the texts of a reference answer, any of which is right: those of a list, or else the only one.

    With `boxes`, a list of numbers is one answer. There is none for null and for an object, which no response can
    equal. Truth values have two spellings; a number with an exponent is written without, since e is also a constant.
    """
    if boxes and _is_box(answer):
        return (text_of(answer),)
    texts: list[str] = []
    for value in answer if isinstance(answer, list | tuple) else (answer,):
        if isinstance(value, bool):
            texts += [text_of(value), str(value)]
        elif isinstance(value, str | int | float) or (boxes and _is_box(value)):
            texts.append(_positional(value) if isinstance(value, float) else text_of(value))
        else:
            return ()
    return tuple(dict.fromkeys(texts))


def _positional(number: float) -> str:
    """Return a number without an exponent: ``0.00001`` for ``1e-05``."""
    digits = str(number)
    return format(Decimal(digits), "f") if "e" in digits.lower() else digits


def _is_box(value: object) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(part, int | float) for part in value)


def show_answer(answer: object) -> str:
    """Return a reference answer as one text, to be read: several right ones with `` or `` between them."""
    return " or ".join(map(text_of, answer)) if isinstance(answer, list | tuple) else text_of(answer)


def text_of(value: object) -> str:
    """Return a value as text: a text as it is, null as an empty one, anything else as JSON writes it."""
    if isinstance(value, str):
        return value
    return "" if value is None else encode_json(value, str).decode()


def question_text(question: str | Sequence[Mapping[str, Any]]) -> str:
    """Return a question as one text: messages as what they say, each after its role if there are several."""
    if isinstance(question, str):
        return question
    if len(question) == 1:
        return text_of(question[0].get("content"))
    return "\n\n".join(f"{message.get('role')}: {text_of(message.get('content'))}" for message in question)


class WrittenFloat(float):
    """A floating-point number that is written as it stood in its file: ``str`` of 0.00001 is not ``1e-05``.

    Results of arithmetic are ordinary numbers.
    """

    __slots__ = ("digits",)

    digits: str

    def __new__(cls, digits: str) -> WrittenFloat:
        """Read a number as JSON writes it. Raises `ValueError` for one that is beyond all floating-point numbers."""
        number = super().__new__(cls, digits)
        if math.isinf(number):
            raise ValueError("Number out of range")
        number.digits = digits
        return number

    def __repr__(self) -> str:
        """Return the digits."""
        return self.digits

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        """Return the digits, unless a format is given."""
        return super().__format__(spec) if spec else self.digits

    def __reduce__(self) -> tuple[type[WrittenFloat], tuple[str]]:
        """Copy the digits too."""
        return WrittenFloat, (self.digits,)


class LargeInteger(int):
    """An integer of more than 64 bits, which msgpack has no type for."""


def written_number(digits: str) -> float:
    """Return a floating-point number; it keeps its digits where Python would write others."""
    number = float(digits)
    return number if str(number) == digits else WrittenFloat(digits)  # which refuses what is out of range


_plain_decoder = msgspec.json.Decoder(dict[str, Any])
_decoder = msgspec.json.Decoder(dict[str, Any], float_hook=written_number)


def decode_object(text: str | bytes) -> dict[str, Any]:
    """Return a JSON object; its numbers keep their digits. Raise the errors of `msgspec.json.decode`."""
    return _decoder.decode(text)


def encode_json(
    value: object, plain: Callable[[Any], Any] | None = None, order: Literal["sorted"] | None = None
) -> bytes:
    """Return a value as JSON, with numbers as they were written; `plain` converts what JSON lacks."""

    def convert(instance: Any) -> Any:
        if isinstance(instance, WrittenFloat):
            return msgspec.Raw(instance.digits.encode())
        if isinstance(instance, LargeInteger):
            return int(instance)
        if plain is None:
            raise TypeError(f"JSON has no {type(instance).__name__}")
        return plain(instance)

    return msgspec.json.encode(value, enc_hook=convert, order=order)


def make_plain_object(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values as plain JSON ones, of which written numbers keep their digits; what JSON lacks becomes text.

    The result can travel (`encode_number`).
    """
    written: set[str] = set()

    def convert(instance: Any) -> Any:
        if isinstance(instance, WrittenFloat):
            written.add(instance.digits)
            return msgspec.Raw(instance.digits.encode())
        return int(instance) if isinstance(instance, LargeInteger) else str(instance)

    encoded = msgspec.json.encode(dict(values), enc_hook=convert)
    plain: dict[str, Any] = _plain_decoder.decode(encoded)
    if written:  # numbers of other sources have the digits of Python

        def number(digits: str) -> float:
            return WrittenFloat(digits) if digits in written else float(digits)

        plain = msgspec.json.Decoder(dict[str, Any], float_hook=number).decode(encoded)
    try:
        msgspec.msgpack.encode(plain, enc_hook=encode_number)
    except OverflowError:
        plain = wrap_large_integers(plain)
    return plain


# --- on the wire -----------------------------------------------------------------------------------------------------


def encode_number(value: Any) -> msgspec.msgpack.Ext:
    """Return a number that msgpack has no type for as an extension (``enc_hook``). Raise `TypeError` for all else."""
    if isinstance(value, WrittenFloat):
        return msgspec.msgpack.Ext(_NUMBER_CODE, value.digits.encode())
    if isinstance(value, LargeInteger):
        return msgspec.msgpack.Ext(_NUMBER_CODE, str(value).encode())
    raise TypeError(f"values of type {type(value).__name__} cannot travel")


def decode_number(code: int, data: memoryview) -> float:
    """Return the number of an extension (``ext_hook``). Raise `msgspec.ValidationError` for any other extension."""
    digits = bytes(data[: _MAX_DIGITS + 1])
    number = _NUMBER.fullmatch(digits)
    try:
        if code == _NUMBER_CODE and number is not None and len(digits) <= _MAX_DIGITS:
            is_integer = number[1] is None and number[2] is None
            return LargeInteger(digits) if is_integer else WrittenFloat(digits.decode())
    except ValueError:
        pass  # a number that is out of range
    raise msgspec.ValidationError(f"extension {code} of {len(data)} bytes is not a number")


def wrap_large_integers(value: Any) -> Any:
    """Return a JSON value with each integer of more than 64 bits as a `LargeInteger`."""
    if isinstance(value, int) and not _SMALLEST <= value <= _LARGEST:
        return LargeInteger(value)
    if isinstance(value, dict):
        return {key: wrap_large_integers(part) for key, part in value.items()}
    return [wrap_large_integers(part) for part in value] if isinstance(value, list | tuple) else value


def check_finite_number(value: object, name: str) -> float:
    """Return a number that training can compute with; text, booleans and other types are errors.

    Raises `RewardError`, which begins with `name`.
    """
    number = math.nan
    # NumPy's floating and integer scalars are instances of Real, and its booleans are not.
    if type(value) is not bool and isinstance(value, numbers.Real):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
    if not math.isfinite(number):
        raise RewardError(f"{name} is {shown(value)}, not a finite number")
    if beyond(number):
        raise RewardError(f"{name} is {beyond(number, shown(value))}")
    return number


def beyond(number: float, text: str = "") -> str:
    """Return why a run cannot compute with a number, given as `text`; empty if it can."""
    if abs(number) <= LARGEST:
        return ""
    return f"{line(text) or repr(number)}, not a number from {-LARGEST:g} to {LARGEST:g}"
