"""Reference answers of rows as text: the right ones, and how they are shown."""

from __future__ import annotations

from decimal import Decimal

from tandem.common.values.texts import text_of


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
