"""Responses by the markers of their families: what is reasoning, what is the answer, what is a call."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tandem.samples.responses import ParsedResponse, ResponseMarkers, ResponseParser, ResponseStream, chat_markers
from tandem.samples.tool_formats import TOOL_FORMATS, FunctionCall

THINK = "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}</think><tool_call>"
HARMONY = "<|start|>assistant<|channel|>final<|message|><|return|>"
WEATHER = {"city": "Paris", "days": 3, "units": ["C"], "note": "</tool_call>"}
CALL = FunctionCall(name="get_weather", arguments=WEATHER)
JSON = '{"city": "Paris", "days": 3, "units": ["C"], "note": "</tool_call>"}'
HERMES = f'<tool_call>\n{{"name": "get_weather", "arguments": {JSON}}}\n</tool_call>'
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer"},
                    "units": {"type": "array"},
                    "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                },
            },
        },
    }
]
NOTE = WEATHER | {"note": "a"}
# Each is written as the documentation of vLLM 0.32's parser of that name, or the family's own template, has it.
CALLS: dict[str, tuple[str, str, list[dict[str, Any]]]] = {
    "hermes": ("hermes", HERMES, [WEATHER]),
    "hermes, two": ("hermes", f"{HERMES}\n{HERMES}", [WEATHER] * 2),
    "qwen3_coder": (
        "qwen3_coder",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
        '<parameter=units>\n["C"]\n</parameter>\n<parameter=note>\na\n</parameter>\n</function>\n</tool_call>',
        [NOTE],
    ),
    "qwen3_coder without its outer tag": (
        "qwen3_coder",
        "<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
        '<parameter=units>\n["C"]\n</parameter>\n<parameter=note>\na\n</parameter>\n</function>',
        [NOTE],
    ),
    "qwen3_coder, two": (
        "qwen3_coder",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\n7\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=get_weather>\n<parameter=note>\nnull\n</parameter>\n</function>\n</tool_call>",
        [{"city": "7"}, {"note": None}],
    ),
    "llama3_json": ("llama3_json", f'{{"name": "get_weather", "parameters": {JSON}}}', [WEATHER]),
    "mistral, a list": ("mistral", f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {JSON}}}]', [WEATHER]),
    "mistral, a list of two": (
        "mistral",
        f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {JSON}}}, {{"name": "get_weather", "arguments": {{}}}}]',
        [WEATHER, {}],
    ),
    "mistral from v11": ("mistral", f"[TOOL_CALLS]get_weather[ARGS]{JSON}[TOOL_CALLS]get_weather{{}}", [WEATHER, {}]),
    "mistral with an id": ("mistral", f"[TOOL_CALLS]get_weather[CALL_ID]abcdef123[ARGS]{JSON}", [WEATHER]),
    "deepseek_v3": (
        "deepseek_v3",
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{JSON}\n```"
        f"<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{{}}\n```"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        [WEATHER, {}],
    ),
    "deepseek_v31": (
        "deepseek_v3",
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{JSON}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        [WEATHER],
    ),
    "deepseek_v32": (
        "deepseek_v32",
        "<｜DSML｜function_calls>\n"
        '<｜DSML｜invoke name="get_weather">\n'
        '<｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="units" string="false">["C"]</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="note" string="true"></tool_call></｜DSML｜parameter>\n'
        '</｜DSML｜invoke>\n<｜DSML｜invoke name="get_weather">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
        [WEATHER, {}],
    ),
    "deepseek_v4": (
        "deepseek_v32",
        '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="note" string="true">'
        '</｜DSML｜invoke> 7 </｜DSML｜parameter>\n<｜DSML｜parameter name="more" string="false">{"a": [1.50]}'
        "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>",
        [{"note": "</｜DSML｜invoke> 7 ", "more": {"a": [1.5]}}],
    ),
    "deepseek_v41": (
        "deepseek_v32",
        '<｜DSML｜ calls>\n<｜DSML｜ invoke name="get_weather">\n<｜DSML｜ parameter name="city" string="true">Paris'
        "</｜DSML｜ parameter>\n</｜DSML｜ invoke>\n</｜DSML｜ calls>",
        [{"city": "Paris"}],
    ),
    "cohere_command3": (
        "cohere_command3",
        f'<|START_ACTION|>[\n    {{"tool_call_id": "0", "tool_name": "get_weather", "parameters": {JSON}}},\n'
        '    {"tool_call_id": "1", "tool_name": "get_weather", "parameters": {}}\n]<|END_ACTION|>',
        [WEATHER, {}],
    ),
    "glm45": (
        "glm45",
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n<arg_key>days</arg_key>\n"
        '<arg_value>3</arg_value>\n<arg_key>units</arg_key>\n<arg_value>["C"]</arg_value>\n<arg_key>note</arg_key>\n'
        "<arg_value></tool_call></arg_value>\n</tool_call>",
        [WEATHER],
    ),
    "glm47": (
        "glm45",
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris</arg_value></tool_call>"
        "<tool_call>get_weather</tool_call>",
        [{"city": "Paris"}, {}],
    ),
    "kimi_k2": (
        "kimi_k2",
        f"<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0\n<|tool_call_argument_begin|>{JSON}"
        "<|tool_call_end|><|tool_call_begin|>functions.get_weather:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
        "<|tool_calls_section_end|>",
        [WEATHER, {}],
    ),
    "gemma4": (
        "gemma4",
        '<|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:3,note:<|"|></tool_call><|"|>,units:[<|"|>C<|"|>]}'
        "<tool_call|>",
        [WEATHER],
    ),
    "lfm2": (
        "lfm2",
        "<|tool_call_start|>[get_weather(city='Paris', days=3, units=[\"C\"], note='</tool_call>'), get_weather()]"
        "<|tool_call_end|>",
        [WEATHER, {}],
    ),
    # As vLLM 0.32's parser reads what models write that is no Python.
    "lfm2, quotes": (
        "lfm2",
        """<|tool_call_start|>[get_weather(city='it's', note="say "hi" now", days=3)]<|tool_call_end|>""",
        [{"city": "it's", "note": 'say "hi" now', "days": 3}],
    ),
    "lfm2, lines": (
        "lfm2",
        """<|tool_call_start|>[get_weather(city="a\nb", note='c\\nd \\'e\\'')]<|tool_call_end|>""",
        [{"city": "a\nb", "note": "c\nd 'e'"}],
    ),
    "lfm2, keywords": (
        "lfm2",
        "<|tool_call_start|>[get_weather(from='x', class=None, month=07), get_weather(units=['a', (1, 2)],)]"
        "<|tool_call_end|>",
        [{"from": "x", "class": None, "month": 7}, {"units": ["a", [1, 2]]}],
    ),
    "lfm2, marker": (
        "lfm2",
        "<|tool_call_start|>[get_weather(note='it's <|tool_call_end|>', place={\"a b\": 'x)]'})]<|tool_call_end|>",
        [{"note": "it's <|tool_call_end|>", "place": {"a b": "x)]"}}],
    ),
    "qwen3_coder, padded": (
        "qwen3_coder",
        "<tool_call>\n<function=get_weather>\n<parameter=days>\n007\n</parameter>\n<parameter=city>\n007\n</parameter>\n"
        "</function>\n</tool_call>",
        [{"days": 7, "city": "007"}],
    ),
    "gemma4, keys": (
        "gemma4",
        '<|tool_call>call:get_weather{place:{a "k" x:{b:null}}}<tool_call|>',
        [{"place": {'a "k" x': {"b": None}}}],
    ),
}
NO_LFM2 = (
    *("get_weather(city='x')", "[get_weather(city=Paris)]", "[get_weather('Paris')]", "[]", "[get_weather(city='x'"),
    *("[{'name': 'get_weather'}]", "[get_weather(city='x', city='y')]", "[get_weather(city='x')] or", "[f(a=g(1))]"),
    *(
        "[get_weather(city=1 + 2)]",
        "[get_weather(units=[[[[)]",
        "[get_weather(city='x\\')]",
        "[get_weather(units=[1)]]",
    ),
)


@pytest.mark.parametrize("text", NO_LFM2)
def test_what_is_no_call_of_lfm2(text: str) -> None:
    """vLLM 0.32's parser reads none of these, or loses an argument."""
    response = f"<|tool_call_start|>{text}<|tool_call_end|>"
    parsed = ResponseParser(ResponseMarkers(tool_format=TOOL_FORMATS["lfm2"])).parse(response)
    assert parsed.tool_calls == ()
    assert parsed.malformed_calls == (response,)


def test_a_template_that_writes_strings_as_they_are_is_read_so() -> None:
    """LFM2.5's does, also where the parser is named."""
    template = ResponseMarkers.of_template("""<|tool_call_start|>{{- "'" + arg_value + "'" -}}""")
    escaping = ResponseMarkers.of_template("<|tool_call_start|>")
    text = r"<|tool_call_start|>[get_weather(note='\frac{1}{2} it's \', days=3)]<|tool_call_end|>"
    for markers in (template, chat_markers(template, "lfm2", may_call=True)):
        (call,) = ResponseParser(markers).parse(text).tool_calls
        assert call.arguments == {"note": "\\frac{1}{2} it's \\", "days": 3}
    plain = r"<|tool_call_start|>[get_weather(note='a\nb')]<|tool_call_end|>"
    for markers in (escaping, chat_markers(escaping, "lfm2", may_call=True)):
        assert ResponseParser(markers).parse(plain).tool_calls[0].arguments == {"note": "a\nb"}


def of_template(source: str, prompt: str = "", special_tokens: tuple[str, ...] = ()) -> ResponseParser:
    return ResponseParser(ResponseMarkers.of_template(source), prompt=prompt, special_tokens=special_tokens)


@pytest.mark.parametrize(("name", "text", "arguments"), CALLS.values(), ids=CALLS)
def test_calls_of_every_format(name: str, text: str, arguments: list[dict[str, Any]]) -> None:
    parser = ResponseParser(ResponseMarkers(tool_format=TOOL_FORMATS[name]))
    response = parser.parse(text, tools=TOOLS)
    assert [(call.name, call.arguments) for call in response.tool_calls] == [("get_weather", one) for one in arguments]
    assert (response.content, response.answer, response.malformed_calls) == ("", "", ())


@pytest.mark.parametrize("size", [1, 2, 7, 10_000])
@pytest.mark.parametrize(("name", "text", "arguments"), CALLS.values(), ids=CALLS)
def test_a_stream_has_the_calls_of_the_whole(name: str, text: str, arguments: list[dict[str, Any]], size: int) -> None:
    stream = ResponseStream(ResponseMarkers(tool_format=TOOL_FORMATS[name]).reader(tools=TOOLS))
    deltas = [stream.push(text[start : start + size]) for start in range(0, len(text), size)]
    deltas.append(stream.finish())
    assert [call.arguments for delta in deltas for call in delta.tool_calls] == arguments
    assert "".join(delta.content for delta in deltas) == ""


@pytest.mark.parametrize("name", sorted(TOOL_FORMATS))
def test_what_is_cut_is_text(name: str) -> None:
    text = next(text for one, text, _ in CALLS.values() if one == name)
    parser = ResponseParser(ResponseMarkers(tool_format=TOOL_FORMATS[name]))
    response = parser.parse(text[: text.index("Paris")], tools=TOOLS)
    assert response.tool_calls == ()
    assert response.content


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4", ParsedResponse(reasoning=None, content="4", answer="4")),
        (
            "<think>\n2+2 is 4.\n</think>\n\nFour.<|im_end|>",
            ParsedResponse(reasoning="2+2 is 4.", content="Four.", answer="Four."),
        ),
        ("<think>\n\n</think>\n\nFour.", ParsedResponse(reasoning=None, content="Four.", answer="Four.")),
        ("2+2 is 4.\n</think>\n\nFour.", ParsedResponse(reasoning="2+2 is 4.", content="Four.", answer="Four.")),
        (
            "<think>\nIs it 4",
            ParsedResponse(reasoning="Is it 4", content="", answer="", is_reasoning_closed=False),
        ),
        (
            f"<think>{HERMES}</think>No call.",
            ParsedResponse(reasoning=HERMES, content="No call.", answer="No call."),
        ),
        (
            f"I look. {HERMES}<|im_end|>",
            ParsedResponse(reasoning=None, content="I look.", answer="", tool_calls=(CALL,)),
        ),
        (
            "<tool_call>add(1)</tool_call>",
            ParsedResponse(
                reasoning=None,
                content="<tool_call>add(1)</tool_call>",
                answer="<tool_call>add(1)</tool_call>",
                malformed_calls=("<tool_call>add(1)</tool_call>",),
            ),
        ),
        (
            "Maybe 5.<think>No.</think>Four.",
            ParsedResponse(reasoning="No.", content="Maybe 5.\nFour.", answer="Four."),
        ),
    ],
)
def test_reasoning_between_tags(text: str, expected: ParsedResponse) -> None:
    assert of_template("<think></think><tool_call>", special_tokens=("<|im_end|>",)).parse(text) == expected


def test_a_prompt_that_opens_reasoning_begins_within_it() -> None:
    parser = of_template(THINK, prompt="<|im_start|>assistant\n<think>\n")
    for text in ("4?</think>Four.", "<think>4?</think>Four."):
        assert parser.parse(text) == ParsedResponse(reasoning="4?", content="Four.", answer="Four.")
    assert parser.parse("Four.").is_reasoning_closed is False
    assert parser.parse("Four.").answer == ""
    closed = parser.parse("Four.", prompt="<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert closed == ParsedResponse(reasoning=None, content="Four.", answer="Four.")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "<|channel|>analysis<|message|>2+2.<|end|><|start|>assistant<|channel|>final<|message|>4<|return|>",
            ParsedResponse(reasoning="2+2.", content="4", answer="4"),
        ),
        ("<|channel|>final<|message|>4", ParsedResponse(reasoning=None, content="4", answer="4")),
        (
            "<|channel|>analysis<|message|>2+",
            ParsedResponse(reasoning="2+", content="", answer="", is_reasoning_closed=False),
        ),
        (
            "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>commentary "
            f"to=functions.get_weather <|constrain|>json<|message|>{JSON}<|call|>",
            ParsedResponse(reasoning=None, content="I look.", answer="", tool_calls=(CALL,)),
        ),
        (
            f" to=functions.get_weather<|channel|>commentary json<|message|>{JSON}<|call|>",
            ParsedResponse(reasoning=None, content="", answer="", tool_calls=(CALL,)),
        ),
        (
            "<|channel|>commentary<|message|>Soon.<|end|><|start|>assistant<|channel|>final<|message|>4<|return|>",
            ParsedResponse(reasoning=None, content="Soon.\n4", answer="4"),
        ),
        ("4", ParsedResponse(reasoning=None, content="4", answer="4")),
    ],
)
def test_channels_of_harmony(text: str, expected: ParsedResponse) -> None:
    parser = of_template(HARMONY, prompt="<|start|>assistant", special_tokens=("<|return|>", "<|call|>", "<|end|>"))
    assert parser.parse(text) == expected


MUSE = "<|start|>assistant to=self<|message|><atem:invoke><|eom|><|eot|>"
ATEM = (
    '<atem:function_calls>\n<atem:invoke name="get_weather">\n<atem:parameter name="city">Paris</atem:parameter>\n'
    '<atem:parameter name="days">3</atem:parameter>\n<atem:parameter name="units">["C"]</atem:parameter>\n'
    '<atem:parameter name="note"></tool_call></atem:parameter>\n</atem:invoke>\n</atem:function_calls>'
)


# As the parser muse_glimmer of vLLM's main branch documents it (November 2026), and TRL 1.16's template writes it.
@pytest.mark.parametrize("size", [1, 5, 10_000])
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            " to=self<|message|>2+2.<|eom|><|start|>assistant to=user<|message|>4<|eot|>",
            ParsedResponse(reasoning="2+2.", content="4", answer="4"),
        ),
        ("<|message|>4<|eot|>", ParsedResponse(reasoning=None, content="4", answer="4")),
        (
            " to=self<|message|>2+",
            ParsedResponse(reasoning="2+", content="", answer="", is_reasoning_closed=False),
        ),
        (
            f" to=self<|message|>{ATEM}<|eom|><|start|>assistant to=get_weather<|message|>{ATEM}<|eot|>",
            ParsedResponse(reasoning=ATEM, content="", answer="", tool_calls=(CALL,)),
        ),
        (
            f" to=get_weather<|message|>{ATEM.replace('get_weather', 'get_weather.get_weather')}<|eom|>"
            f"<|start|>assistant to=a.b<|message|>{ATEM.replace('get_weather', 'a.b')}<|eot|>",
            ParsedResponse(
                reasoning=None,
                content="",
                answer="",
                tool_calls=(CALL, FunctionCall(name="a.b", arguments=WEATHER)),
            ),
        ),
        (
            " to=get_weather<|message|>Paris<|eot|>",
            ParsedResponse(reasoning=None, content="Paris", answer="Paris", malformed_calls=("Paris",)),
        ),
        (
            f" to=user<|message|>{ATEM}<|eot|>",
            ParsedResponse(reasoning=None, content=ATEM, answer=ATEM),
        ),
    ],
)
def test_messages_of_muse(text: str, expected: ParsedResponse, size: int) -> None:
    parser = of_template(MUSE, prompt="<|start|>assistant", special_tokens=("<|eom|>", "<|eot|>"))
    assert parser.parse(text, tools=TOOLS) == expected
    stream = ResponseStream(parser.markers.reader("<|start|>assistant", tools=TOOLS))
    deltas = [stream.push(text[start : start + size]) for start in range(0, len(text), size)]
    deltas.append(stream.finish())
    assert tuple(call for delta in deltas for call in delta.tool_calls) == expected.tool_calls
    assert "".join(delta.content for delta in deltas) == expected.content
    assert "".join(delta.reasoning for delta in deltas) == (expected.reasoning or "")


def test_frames_around_final_text_are_no_text() -> None:
    source = "<|START_THINKING|><|END_THINKING|><|START_RESPONSE|><|END_RESPONSE|><|START_ACTION|>"
    text = "<|START_THINKING|>2+2.<|END_THINKING|><|START_RESPONSE|>4<|END_RESPONSE|>"
    assert of_template(source).parse(text) == ParsedResponse(reasoning="2+2.", content="4", answer="4")


@pytest.mark.parametrize("size", [1, 3, 10_000])
def test_a_stream_separates_reasoning(size: int) -> None:
    for markers, prompt, text in (
        (ResponseMarkers.of_template(THINK), "<think>\n", "Is it 4?\n</think>\n\nIt is\n\nfour. "),
        (
            ResponseMarkers.of_template(HARMONY),
            "<|start|>assistant",
            "<|channel|>analysis<|message|>Is it 4?<|end|><|start|>assistant<|channel|>final<|message|>It is\n\nfour. ",
        ),
    ):
        stream = ResponseStream(markers.reader(prompt))
        deltas = [stream.push(text[start : start + size]) for start in range(0, len(text), size)]
        deltas.append(stream.finish())
        assert "".join(delta.reasoning for delta in deltas) == "Is it 4?"
        assert "".join(delta.content for delta in deltas) == "It is\n\nfour. "


def test_a_text_alone_stays_as_it_is() -> None:
    parser = of_template("<think></think>", special_tokens=("<|im_end|>",))
    assert parser.parse(" 4 \n<|im_end|>").content == " 4 \n"
    assert of_template("no markers").parse("<think>4</think>").content == "<think>4</think>"


def test_a_response_template_of_transformers_is_read_where_markers_are_unknown() -> None:
    template = {
        "defaults": {"role": "assistant"},
        "start_anchor": "<assistant>",
        "fields": {
            "reasoning_content": {"open": "<<", "close": ">>", "content": "text"},
            "content": {"content": "text"},
        },
    }
    parser = ResponseParser(ResponseMarkers(), response_template=template, special_tokens=("<eos>",))
    assert parser.parse("<<2+2>> 4<eos>") == ParsedResponse(reasoning="2+2", content="4", answer="4")


PIECES = (
    '"',
    "\\",
    "\n",
    "{",
    "}",
    "[",
    "]",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "1e999",
    "'",
    "<|",
    "é",
)


def damaged(text: str, draw: random.Random) -> str:
    """Return a text with pieces put in and left out."""
    for _ in range(draw.randrange(6)):
        place = draw.randrange(len(text) + 1)
        if draw.random() < 0.5:
            text = text[:place] + draw.choice(PIECES) + text[place:]
        else:
            text = text[:place] + text[place + draw.randrange(1, 20) :]
    return text


@pytest.mark.parametrize(("name", "text", "arguments"), CALLS.values(), ids=CALLS)
def test_a_damaged_response_is_read_the_same_however_it_comes(
    name: str, text: str, arguments: list[dict[str, Any]]
) -> None:
    draw = random.Random(name)
    markers = ResponseMarkers(reasoning=(("<think>", "</think>"),), tool_format=TOOL_FORMATS[name])
    for _ in range(10):
        response = damaged(f"<think>So.</think>{text}\n{text}", draw)
        outcomes = []
        for size in (len(response) + 1, 1, draw.randrange(2, 9)):
            stream = ResponseStream(markers.reader(tools=TOOLS))
            deltas = [stream.push(response[start : start + size]) for start in range(0, len(response), size)]
            deltas.append(stream.finish())
            texts = ("".join(delta.content for delta in deltas), "".join(delta.reasoning for delta in deltas))
            outcomes.append((texts, [call for delta in deltas for call in delta.tool_calls]))
        assert outcomes[1:] == outcomes[:1] * 2


def test_a_name_of_glm_is_a_name() -> None:
    """vLLM 0.32's parser reads no call either."""
    for text in ("<tool_call>{}</tool_call>", '<tool_call>{"name": "f", "arguments": {}}</tool_call>'):
        assert ResponseParser(ResponseMarkers(tool_format=TOOL_FORMATS["glm45"])).parse(text).tool_calls == ()
