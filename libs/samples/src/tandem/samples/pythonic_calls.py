"""Calls of tools that LFM2 writes as Python: ``[f(a="x", b=3), g()]``.

Not all of it is Python. A parameter may have the name of a keyword (``from``), and strings may hold quotes and line
breaks as they are: LFM2.5's own template writes them so, and backslashes too.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

_MAX_SIZE = 1 << 16
"""Most characters of calls that are read."""
_MAX_QUOTES = 256
"""Most quotes of one string that are tried as its end."""
_NAME = re.compile(r"\s*([^\W\d]\w*(?:\.[^\W\d]\w*)*)\s*\(\s*")
_PARAMETER = re.compile(r"\s*([^\W\d]\w*)\s*=\s*")
_AFTER_STRING = re.compile(r"\s*(?:,\s*[^\W\d]\w*\s*=|\)\s*(?:,\s*[^\W\d][\w.]*\s*\(|\]\s*\Z))")
"""Pattern of what follows a parameter's value: the next parameter, the next call, or the end of all."""
_WORD = re.compile(r"[^\s,()\[\]{}'\"=]+")
_PADDED_INTEGER = re.compile(r"-?0+\d{1,18}")
_STRING_OR_BRACKET = re.compile(
    r"""'[^'\\]*(?:\\.[^'\\]*)*'|"[^"\\]*(?:\\.[^"\\]*)*"|(?P<bracket>[\[({\])}])""", re.DOTALL
)
_CONSTANTS: Mapping[str, Any] = {
    **{"true": True, "false": False, "null": None},
    **{"True": True, "False": False, "None": None},
}
"""The constants of JSON and of Python."""


class _JsonNames(ast.NodeTransformer):
    """The constants of JSON, in Python."""

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Constant(_CONSTANTS[node.id])


def read_pythonic(text: str, *, is_raw: bool) -> list[tuple[str, dict[str, Any]]]:
    """Return the calls of a text: names and arguments.

    Args:
        text: all of a list of calls.
        is_raw: whether a backslash in a parameter's string is itself, as LFM2.5's template writes it.

    Raises:
        ValueError: it is not a list of calls.

    """
    body = text.strip()
    if not body.startswith("[") or not body.endswith("]") or len(body) > _MAX_SIZE:
        raise ValueError("not a list of calls")
    calls, place = list[tuple[str, dict[str, Any]]](), 1
    while True:
        name = _NAME.match(body, place)
        if name is None:
            raise ValueError("not a call")
        arguments, place = _read_arguments(body, name.end(), is_raw)
        calls.append((name[1], arguments))
        place = _skip_space(body, place)
        if body[place] == "," and body[place + 1 :].strip() != "]":
            place += 1
        elif body[place:].lstrip(", \n\t") == "]":
            return calls
        else:
            raise ValueError("not a list of calls")


def _read_arguments(body: str, place: int, is_raw: bool) -> tuple[dict[str, Any], int]:
    """Return the arguments that begin at a place, and where their call ends."""
    arguments = dict[str, Any]()
    while body[place] != ")":
        parameter = _PARAMETER.match(body, place)
        if parameter is None or parameter[1] in arguments:
            raise ValueError("not an argument")
        arguments[parameter[1]], place = _read_value(body, parameter.end(), is_raw)
        place = _skip_space(body, place)
        if body[place] == ",":
            place = _skip_space(body, place + 1)
        elif body[place] != ")":
            raise ValueError("not an argument")
    return arguments, place + 1


def _read_value(body: str, place: int, is_raw: bool) -> tuple[Any, int]:
    """Return the value that begins at a place, and where it ends."""
    if body[place : place + 1] in ("'", '"'):
        end = _end_of_string(body, place, is_raw)
        inner, quote = body[place + 1 : end], body[place]
        return (inner if is_raw else _unescape(inner, quote)), end + 1
    if body[place : place + 1] in ("[", "{", "("):
        return _read_collection(body, place)
    word = _WORD.match(body, place)
    if word is None:
        raise ValueError("not a value")
    if word[0] in _CONSTANTS:
        return _CONSTANTS[word[0]], word.end()
    return int(word[0]) if _PADDED_INTEGER.fullmatch(word[0]) else ast.literal_eval(word[0]), word.end()


def _end_of_string(body: str, begin: int, is_raw: bool) -> int:
    """Return where the quote is that ends a string: the first after which a parameter's value may end."""
    for place in _quotes(body, begin, is_raw):
        if _AFTER_STRING.match(body, place + 1):
            return place
    raise ValueError("a string does not end")


def _quotes(body: str, begin: int, is_raw: bool) -> Iterator[int]:
    """Yield the places of the quotes that may end a string."""
    place, count = begin + 1, 0
    while place < len(body) and count < _MAX_QUOTES:
        if body[place] == "\\" and not is_raw:
            place += 2
            continue
        if body[place] == body[begin]:
            count += 1
            yield place
        place += 1


def _unescape(inner: str, quote: str) -> str:
    """Return the text of a Python string; quotes and line breaks in it may stand as they are."""
    plain = re.sub(rf"(\\.)|{quote}", lambda match: match[1] or f"\\{quote}", inner, flags=re.DOTALL)
    plain = plain.replace("\r", "\\r").replace("\n", "\\n").replace("\0", "\\0")
    value: str = ast.literal_eval(f"{quote}{plain}{quote}")
    return value


def _read_collection(body: str, place: int) -> tuple[Any, int]:
    """Return a list, an object or a tuple, as JSON or as Python writes it, and where it ends."""
    try:
        value, end = json.JSONDecoder().raw_decode(body, place)
    except ValueError:
        pass
    else:
        return value, end
    depth = 0
    for match in _STRING_OR_BRACKET.finditer(body, place):
        if not match["bracket"]:
            continue
        depth += 1 if match["bracket"] in "[({" else -1
        if not depth:
            node = ast.parse(body[place : match.end()], mode="eval").body
            return ast.literal_eval(_JsonNames().visit(node)), match.end()
    raise ValueError("not a value")


def _skip_space(body: str, place: int) -> int:
    while body[place].isspace():
        place += 1
    return place
