"""The formats in which models write tool calls, by the names of vLLM's parsers.

A format reads one call, or one list of calls, at the beginning of a text. What only resembles a call stays text.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from tandem.samples.pythonic_calls import read_pythonic

Tools = Sequence[Mapping[str, Any]]
"""Descriptions of tools as OpenAI's API and chat templates have them."""

_DECODER = json.JSONDecoder()
_JSON_STRING = r'"[^"\\]*(?:\\.[^"\\]*)*(?:"|\\?\Z)'
"""Pattern of a string, which may not have ended yet."""
_INVALID = (
    msgspec.MsgspecError,
    ValueError,
    LookupError,
    RecursionError,
    SyntaxError,
    MemoryError,
    TypeError,
    OverflowError,
)
"""Errors of a text that is not a call."""
_NAME = re.compile(r"[^\s<>{}\"]+")
"""Pattern of a function's name."""
_PADDED_INTEGER = re.compile(r"[+-]?\d{1,18}")
"""Pattern of integers that JSON may not have."""
_MAX_ENDS = 64
"""Most markers that are tried as the end of one call."""


class FunctionCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call of a function by the assistant."""

    name: str
    arguments: dict[str, Any]
    id: str = ""
    """The model's own name of the call, in families that have one."""


class CallSpan(msgspec.Struct, frozen=True):
    """The part of a text that a format has read."""

    size: int
    """Its characters."""
    calls: tuple[FunctionCall, ...] = ()
    """Its calls; none if it is text after all."""


class ToolFormat(msgspec.Struct, frozen=True, kw_only=True):
    """One format of tool calls."""

    opens: tuple[str, ...]
    """Markers that begin a call."""
    inner_markers: tuple[str, ...] = ()
    """Further markers within a call."""
    silent: tuple[str, ...] = ()
    """Markers around calls, which are no text."""
    signs: tuple[str, ...]
    """Texts of which a chat template with this format has one."""
    opens_after_text: tuple[str, ...] = ()
    """Markers that begin a call after a text, if those of `opens` do so only at the beginning of a response."""
    read: Callable[[str, bool, Tools], CallSpan | None]
    """Read what a text begins with, which is one of `opens`; None if more text is needed. Whether this is the whole
    text, and the tools on offer, are further arguments."""
    variants: tuple[tuple[str, Callable[[str, bool, Tools], CallSpan | None]], ...] = ()
    """Other ways to read, each with a text by which a chat template shows that it writes so."""

    def of_template(self, source: str) -> ToolFormat:
        """Return the format as a chat template writes it, by the template's text."""
        reads = (read for sign, read in self.variants if sign in source)
        return msgspec.structs.replace(self, read=next(reads, self.read))

    @property
    def distinct_opens(self) -> tuple[str, ...]:
        """Markers that are seldom anything but the beginning of a call."""
        return self.opens_after_text or self.opens

    @property
    def markers(self) -> tuple[str, ...]:
        """All markers, which must stay in the text even if they are special tokens."""
        return (*self.opens, *self.inner_markers, *self.silent)


# --- JSON between markers --------------------------------------------------------------------------------------------


def _end_outside_strings(text: str, start: int, close: str, strings: str) -> int:
    """Return where a marker comes outside strings, which match a pattern; -1 if it does not."""
    if text.find(close, start) < 0:
        return -1
    pattern = re.compile(rf"{strings}|(?P<close>{re.escape(close)})", re.DOTALL)
    return next((match.start("close") for match in pattern.finditer(text, start) if match["close"]), -1)


def _read_delimited(
    text: str,
    start: int,
    close: str,
    is_last: bool,
    read: Callable[[str], tuple[FunctionCall, ...]],
    strings: str = _JSON_STRING,
) -> CallSpan | None:
    """Return the calls from `start` to the marker `close`, which may be missing at the end of a response."""
    end = _end_outside_strings(text, start, close, strings)
    if end < 0 and not is_last:
        return None
    if end >= 0:
        return CallSpan(end + len(close), read(text[start:end]))
    if calls := read(text[start:]):
        return CallSpan(len(text), calls)
    end = text.find(close, start)
    return CallSpan(len(text) if end < 0 else end + len(close))


def _object(text: str) -> dict[str, Any]:
    return msgspec.json.decode(text.strip(), type=dict[str, Any])


def _call_of(fields: Mapping[str, Any], *names: str) -> FunctionCall:
    """Return the call of an object that has the arguments under one of these names. Raises one of `_INVALID`."""
    name, arguments = fields["name"], next((fields[key] for key in names if key in fields), None)
    if not (isinstance(name, str) and name and isinstance(arguments, dict)):
        raise ValueError("not a call")
    call_id = fields.get("id")
    return FunctionCall(name=name, arguments=arguments, id=call_id if isinstance(call_id, str) else "")


def _make_call(name: str, arguments: str, call_id: str = "") -> tuple[FunctionCall, ...]:
    if _NAME.fullmatch(name) is None:
        return ()
    try:
        return (FunctionCall(name=name, arguments=_object(arguments), id=call_id),)
    except _INVALID:
        return ()


def _json_call(body: str) -> tuple[FunctionCall, ...]:
    try:
        return (_call_of(_object(body), "arguments"),)
    except _INVALID:
        return ()


def _read_hermes(text: str, is_last: bool, tools: Tools) -> CallSpan | None:
    return _read_delimited(text, len("<tool_call>"), "</tool_call>", is_last, _json_call)


def _read_llama3(text: str, is_last: bool, tools: Tools) -> CallSpan | None:
    if not is_last:
        return None
    bodies, calls = text.strip().removeprefix("<|python_tag|>"), list[FunctionCall]()
    while bodies:
        try:
            size = _DECODER.raw_decode(bodies)[1]
            calls.append(_call_of(_object(bodies[:size]), "parameters", "arguments"))
        except _INVALID:
            return CallSpan(len(text))
        bodies = bodies[size:].lstrip("; \n\t")
    return CallSpan(len(text), tuple(calls))


_MISTRAL_NAME = re.compile(r"\s*(?P<name>[^\s\[{]+?)\s*(?:\[CALL_ID\](?P<id>\w+))?(?:\[ARGS\]|(?=\{))")


def _read_mistral(text: str, is_last: bool, tools: Tools) -> CallSpan | None:
    start = len("[TOOL_CALLS]")
    named = _MISTRAL_NAME.match(text, start)
    body_start = named.end() if named else start
    body = text[body_start:]
    if named is None and not is_last and not body.lstrip().startswith("["):
        return None
    try:
        size = _DECODER.raw_decode(body.lstrip())[1]
    except (ValueError, RecursionError):
        return CallSpan(len(text)) if is_last else None
    source = body.lstrip()[:size]
    end = body_start + len(body) - len(body.lstrip()) + size
    if named is not None:
        return CallSpan(end, _make_call(named["name"], source, named["id"] or ""))
    try:
        value = msgspec.json.decode(source)
        calls = value if isinstance(value, list) else [value]
        return CallSpan(end, tuple(_call_of(call, "arguments") for call in calls))
    except _INVALID:
        return CallSpan(end)


_DEEPSEEK_V3 = re.compile(r"\w*<｜tool▁sep｜>(?P<name>[^\n]+)\n```json\n(?P<arguments>.*?)\n```\s*", re.DOTALL)
_DEEPSEEK_V31 = re.compile(r"(?P<name>[^\n<]+)<｜tool▁sep｜>(?P<arguments>.*)", re.DOTALL)


def _deepseek_call(body: str) -> tuple[FunctionCall, ...]:
    match = _DEEPSEEK_V3.fullmatch(body) or _DEEPSEEK_V31.fullmatch(body)
    return () if match is None else _make_call(match["name"].strip(), match["arguments"])


def _read_deepseek(text: str, is_last: bool, tools: Tools) -> CallSpan | None:
    return _read_delimited(text, len("<｜tool▁call▁begin｜>"), "<｜tool▁call▁end｜>", is_last, _deepseek_call)


def _kimi_call(body: str) -> tuple[FunctionCall, ...]:
    call_id, marker, arguments = body.partition("<|tool_call_argument_begin|>")
    name = call_id.strip().rpartition(":")[0].rpartition(".")[2]
    return _make_call(name, arguments, call_id.strip()) if marker else ()


def _read_kimi(text: str, is_last: bool, tools: Tools) -> CallSpan | None:
    return _read_delimited(text, len("<|tool_call_begin|>"), "<|tool_call_end|>", is_last, _kimi_call)


def _cohere_calls(body: str) -> tuple[FunctionCall, ...]:
    try:
        actions = msgspec.json.decode(body.strip())
        return tuple(_action_call(action) for action in (actions if isinstance(actions, list) else [actions]))
    except _INVALID:
        return ()


def _action_call(action: Mapping[str, Any]) -> FunctionCall:
    named = {"name": action["tool_name"], "id": action.get("tool_call_id"), "arguments": action["parameters"]}
    return _call_of(named, "arguments")


def _read_cohere(text: str, is_last: bool, tools: Tools) -> CallSpan | None:
    return _read_delimited(text, len("<|START_ACTION|>"), "<|END_ACTION|>", is_last, _cohere_calls)


# --- arguments as tags -----------------------------------------------------------------------------------------------


def _properties(tools: Tools, name: str) -> Mapping[str, Any] | None:
    """Return the parameters' schemas of a tool; None if it is not on offer."""
    for tool in tools:
        function = tool.get("function", tool)
        if isinstance(function, Mapping) and function.get("name") == name:
            parameters = function.get("parameters")
            properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
            return properties if isinstance(properties, Mapping) else {}
    return None


def _types(schema: Any) -> frozenset[str]:
    """Return the JSON types that a schema allows, by name."""
    if not isinstance(schema, Mapping):
        return frozenset()
    declared = schema.get("type")
    types = {declared} if isinstance(declared, str) else set(declared) if isinstance(declared, list) else set[str]()
    for key in ("anyOf", "oneOf"):
        choices = schema.get(key)
        types.update(*(_types(choice) for choice in choices) if isinstance(choices, list) else ())
    return frozenset({*types, "null"} if schema.get("nullable") is True else types)


def _json_value(text: str) -> Any:
    """Return the value of a text that may be JSON, or else the text."""
    try:
        return msgspec.json.decode(text.strip())
    except _INVALID:
        return text


def _type_name(value: Any) -> str:
    names = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return names.get(type(value), "null")


def _convert_argument(text: str, schema: Any) -> Any:
    """Return the value of an argument that is written without quotes, as its schema has it; a text if it fits none."""
    types = _types(schema)
    value = _json_value({"True": "true", "False": "false", "None": "null"}.get(text.strip(), text))
    name = _type_name(value)
    if name in types - {"string"}:
        return value
    if name == "integer" and "number" in types:
        return value
    if name == "number" and "integer" in types and value.is_integer():
        return int(value)
    if types & {"integer", "number"} and "string" not in types and _PADDED_INTEGER.fullmatch(text.strip()):
        return int(text)
    return text


def _arguments(pairs: Sequence[tuple[str, str]], name: str, tools: Tools) -> dict[str, Any]:
    """Return arguments with the types that their tool declares, or that JSON shows where no tool is known."""
    properties = _properties(tools, name)
    if properties is None:
        return {key: _json_value(value) for key, value in pairs}
    return {key: _convert_argument(value, properties.get(key)) for key, value in pairs}


_XML_CALL = re.compile(
    r"(?:<tool_call>\s*)?<function=(?P<name>[^>\n]+)>(?P<body>.*?)</function>(?:\s*</tool_call>)?", re.DOTALL
)
_XML_PARAMETER = re.compile(
    r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?(?:</parameter>\s*(?=<parameter=|\Z)|(?=<parameter=)|\Z)",
    re.DOTALL,
)


def _read_qwen3_coder(text: str, is_last: bool, tools: Tools) -> CallSpan | None:
    close = "</tool_call>" if text.startswith("<tool_call>") else "</function>"
    ends = [match.end() for match in re.finditer(re.escape(close), text)]
    for end in ends:
        if calls := _xml_call(text[:end], tools):
            return CallSpan(end, calls)
        if "</function>" in text[:end] or "<function=" not in text[:end]:
            return CallSpan(end)
    if not is_last:
        return None
    body, closing, _ = text.partition("</function>")  # the outer tag may be missing at the end of a response
    if calls := _xml_call(body + closing, tools):
        return CallSpan(len(body + closing), calls)
    return CallSpan(ends[0] if ends else len(text))


def _xml_call(text: str, tools: Tools) -> tuple[FunctionCall, ...]:
    match = _XML_CALL.fullmatch(text)
    if match is None:
        return ()
    name = match["name"].strip()
    pairs = [(each["key"].strip(), each["value"]) for each in _XML_PARAMETER.finditer(match["body"].strip())]
    return (FunctionCall(name=name, arguments=_arguments(pairs, name, tools)),)


_GLM_PAIR = re.compile(r"<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>\s*", re.DOTALL)
_GLM_NAME = re.compile(rf"\s*(?P<name>{_NAME.pattern})\s*")


def _glm_call(body: str, tools: Tools) -> tuple[FunctionCall, ...]:
    name = _GLM_NAME.match(body)
    if name is None:
        return ()
    pairs, place = list[tuple[str, str]](), name.end()
    while (pair := _GLM_PAIR.match(body, place)) is not None:
        pairs.append((pair["key"].strip(), pair["value"]))
        place = pair.end()
    if place < len(body):
        return ()
    return (FunctionCall(name=name["name"], arguments=_arguments(pairs, name["name"], tools)),)


def _read_glm(text: str, is_last: bool, tools: Tools) -> CallSpan | None:
    start, close = len("<tool_call>"), "</tool_call>"
    ends = [match.start() for match in re.finditer(re.escape(close), text)]
    if not ends and not is_last:
        return None
    for end in [*ends, *([len(text)] if is_last else [])]:
        body = text[start:end]
        if body.count("<arg_value>") != body.count("</arg_value>"):
            continue  # this end is within a value
        return CallSpan(min(end + len(close), len(text)), _glm_call(body, tools))
    return CallSpan(ends[0] + len(close) if ends else len(text)) if is_last else None


class _Tags(NamedTuple):
    """Patterns of a call whose arguments have tags of their own, with or without a mark of what is a text."""

    begin: re.Pattern[str]
    parameter: re.Pattern[str]
    end: re.Pattern[str]


_DSML_TAGS = _Tags(
    re.compile(r'<｜DSML｜ ?invoke\s+name="(?P<name>[^"]+)"\s*>\s*'),
    re.compile(
        r'<｜DSML｜ ?parameter\s+name="(?P<key>[^"]+)"\s+string="(?P<text>true|false)"\s*>'
        r"(?P<value>.*?)</｜DSML｜ ?parameter>\s*",
        re.DOTALL,
    ),
    re.compile(r"</｜DSML｜ ?invoke>"),
)
_ATEM_TAGS = _Tags(
    re.compile(r'<atem:invoke\s+name="(?P<name>[^"]+)"\s*>\s*'),
    re.compile(r'<atem:parameter\s+name="(?P<key>[^"]+)"\s*>(?P<text>)(?P<value>.*?)</atem:parameter>\s*', re.DOTALL),
    re.compile(r"</atem:invoke>"),
)


def _tagged_call(text: str, start: int, tags: _Tags, tools: Tools) -> tuple[int, FunctionCall] | None:
    """Return where a call ends that begins at `start`, and the call; None if there is none that is complete."""
    begin = tags.begin.match(text, start)
    if begin is None:
        return None
    name, place = begin["name"], begin.end()
    properties, arguments = _properties(tools, name), dict[str, Any]()
    while (parameter := tags.parameter.match(text, place)) is not None:
        key, value, place = parameter["key"], parameter["value"], parameter.end()
        schema = (properties or {}).get(key)
        if parameter["text"] == "true":
            arguments[key] = value
        else:
            arguments[key] = _convert_argument(value, schema) if _types(schema) else _json_value(value)
    end = tags.end.match(text, place)
    return None if end is None else (end.end(), FunctionCall(name=name, arguments=arguments))


_DSML_PARAMETER = re.compile(r"</?｜DSML｜ ?parameter")


def _read_dsml(text: str, is_last: bool, tools: Tools) -> CallSpan | None:
    call = _tagged_call(text, 0, _DSML_TAGS, tools)
    if call is not None:
        return CallSpan(call[0], call[1:])
    ends = [match.end() for match in _DSML_TAGS.end.finditer(text)]
    for end in ends:
        if len(_DSML_PARAMETER.findall(text, 0, end)) % 2 == 0:
            return CallSpan(end)
    return CallSpan(ends[0] if ends else len(text)) if is_last else None  # an end may be within an argument


def read_atem_calls(text: str, tools: Tools) -> tuple[FunctionCall, ...]:
    """Return the calls of a message to a function, as Muse writes them; none if it is anything but calls."""
    body, calls = text.strip().removeprefix("<atem:function_calls>").lstrip(), list[FunctionCall]()
    place = 0
    while (call := _tagged_call(body, place, _ATEM_TAGS, tools)) is not None:
        name, _, function = call[1].name.partition(".")
        # A tool without a namespace is offered as its own namespace, and called by both.
        is_doubled = name == function and _properties(tools, name) is not None
        calls.append(msgspec.structs.replace(call[1], name=name) if is_doubled else call[1])
        place = len(body) - len(body[call[0] :].lstrip())
    return tuple(calls) if body[place:] in ("", "</atem:function_calls>") else ()


# --- others ----------------------------------------------------------------------------------------------------------

_GEMMA_TEXT = '<|"|>'
_GEMMA_STRING = r'<\|"\|>.*?(?:<\|"\|>|\Z)'
_GEMMA_TOKEN = re.compile(
    r'<\|"\|>(?P<text>.*?)<\|"\|>|(?P<before>[{,]\s*)(?!"[^"]*"\s*:)(?P<key>[^\s<>{}\[\],:](?:[^<>{}\[\],:]*[^\s<>{}\[\],:])?)\s*:|(?P<null>\bNone)(?=\s*[,}\]])',
    re.DOTALL,
)


def _gemma_json(match: re.Match[str]) -> str:
    if match["text"] is not None:
        return json.dumps(match["text"])
    if match["null"]:  # as earlier templates write it
        return "null"
    return f"{match['before']}{json.dumps(match['key'])}:"


def _gemma_call(body: str) -> tuple[FunctionCall, ...]:
    name, brace, arguments = body.partition("{")
    return _make_call(name.strip(), _GEMMA_TOKEN.sub(_gemma_json, brace + arguments))


def _read_gemma4(text: str, is_last: bool, tools: Tools) -> CallSpan | None:
    return _read_delimited(text, len("<|tool_call>call:"), "<tool_call|>", is_last, _gemma_call, _GEMMA_STRING)


_LFM2_STRING = rf"'[^'\\]*(?:\\.[^'\\]*)*(?:'|\\?\Z)|{_JSON_STRING}"


def _pythonic_calls(body: str, is_raw: bool) -> tuple[FunctionCall, ...]:
    try:
        calls = read_pythonic(body, is_raw=is_raw)
        arguments = msgspec.json.decode(msgspec.json.encode([values for _, values in calls]), type=list[dict[str, Any]])
    except _INVALID:
        return ()
    return tuple(FunctionCall(name=name, arguments=each) for (name, _), each in zip(calls, arguments, strict=True))


def _read_lfm2(text: str, is_last: bool, tools: Tools, is_raw: bool = False) -> CallSpan | None:
    start, close = len("<|tool_call_start|>"), "<|tool_call_end|>"
    outside = _end_outside_strings(text, start, close, _LFM2_STRING)
    ends = [match.start() for match in itertools.islice(re.finditer(re.escape(close), text), _MAX_ENDS)]
    for end in ends:
        body = text[start:end]
        if calls := _pythonic_calls(body, is_raw):
            return CallSpan(end + len(close), calls)
        if end == outside and body.rstrip().endswith("]"):
            return CallSpan(ends[0] + len(close))
    if not is_last:
        return None  # an end may be within a string
    if calls := _pythonic_calls(text[start:], is_raw):
        return CallSpan(len(text), calls)
    return CallSpan(ends[0] + len(close) if ends else len(text))


_DEEPSEEK_V3_FORMAT = ToolFormat(
    opens=("<｜tool▁call▁begin｜>",),
    inner_markers=("<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
    silent=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    signs=("<｜tool▁call▁begin｜>",),
    read=_read_deepseek,
)
_LFM2_FORMAT = ToolFormat(
    opens=("<|tool_call_start|>",),
    inner_markers=("<|tool_call_end|>",),
    signs=("<|tool_call_start|>",),
    read=_read_lfm2,
    variants=(("""\"'" + arg_value + "'\"""", functools.partial(_read_lfm2, is_raw=True)),),
)
_DSML_BLOCKS = ("｜DSML｜function_calls>", "｜DSML｜tool_calls>", "｜DSML｜ calls>")
"""Tags around calls of DeepSeek V3.2, V4 and V4.1."""
TOOL_FORMATS: Mapping[str, ToolFormat] = {
    "deepseek_v32": ToolFormat(
        opens=("<｜DSML｜invoke", "<｜DSML｜ invoke"),
        inner_markers=("</｜DSML｜",),
        silent=tuple(f"{slash}{block}" for block in _DSML_BLOCKS for slash in ("<", "</")),
        signs=("｜DSML｜",),
        read=_read_dsml,
    ),
    "cohere_command3": ToolFormat(
        opens=("<|START_ACTION|>",), inner_markers=("<|END_ACTION|>",), signs=("<|START_ACTION|>",), read=_read_cohere
    ),
    "gemma4": ToolFormat(
        opens=("<|tool_call>call:",),
        inner_markers=("<tool_call|>", _GEMMA_TEXT),
        signs=("<|tool_call>call:",),
        read=_read_gemma4,
    ),
    "kimi_k2": ToolFormat(
        opens=("<|tool_call_begin|>",),
        inner_markers=("<|tool_call_argument_begin|>", "<|tool_call_end|>"),
        silent=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        signs=("<|tool_call_begin|>",),
        read=_read_kimi,
    ),
    "deepseek_v3": _DEEPSEEK_V3_FORMAT,
    "lfm2": _LFM2_FORMAT,
    "mistral": ToolFormat(
        opens=("[TOOL_CALLS]",), inner_markers=("[ARGS]", "[CALL_ID]"), signs=("[TOOL_CALLS]",), read=_read_mistral
    ),
    "qwen3_coder": ToolFormat(
        opens=("<tool_call>", "<function="),
        inner_markers=("</tool_call>",),
        signs=("<function=",),
        read=_read_qwen3_coder,
    ),
    "glm45": ToolFormat(
        opens=("<tool_call>",),
        inner_markers=("</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        signs=("<arg_key>",),
        read=_read_glm,
    ),
    "hermes": ToolFormat(
        opens=("<tool_call>",), inner_markers=("</tool_call>",), signs=("<tool_call>",), read=_read_hermes
    ),
    "llama3_json": ToolFormat(
        opens=("<|python_tag|>", "{"),
        opens_after_text=("<|python_tag|>", '{"name":'),
        signs=("<|python_tag|>", '"parameters": '),
        read=_read_llama3,
    ),
}
"""Formats by the names of vLLM's parsers; the first whose sign a chat template has is the template's."""
