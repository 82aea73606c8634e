"""What ends a turn, and where the assistant's turns are in a rendered conversation: on a byte-level tokenizer.

`tests/families` has the same over real templates and tokenizers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tools_harness import make_tokenizer

from tandem.common.errors import DataError
from tandem.rollout.engines.stopping import Detokenizer, StopStrings
from tandem.samples.tokenizer import Tokenizer

TALK: list[dict[str, Any]] = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "Four."},
]
HEADER_FREE = (
    "{% for m in messages %}{{ '<|python_tag|>' if m.role == 'user' else '<tool_call>' }}{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<tool_call>{% endif %}"
)
"""As GLM's: a turn ends where the marker of the next one begins."""


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return make_tokenizer(tmp_path)


def with_ends(tokenizer: Tokenizer, **files: Any) -> Tokenizer:
    """Return the tokenizer beside files of a model that say what ends a response."""
    folder = Path(tokenizer.where)
    for name, ends in files.items():
        (folder / f"{name}.json").write_text(json.dumps({"eos_token_id": ends}))
    return Tokenizer(tokenizer.hugging_face, tokenizer.where)


def learned(tokenizer: Tokenizer, messages: list[dict[str, Any]], **options: Any) -> str:
    """Return the text of a conversation with its learned parts in brackets."""
    encoded = tokenizer.encode_conversation(messages, **options)
    text, before = "", False
    for token, counts in zip(encoded.token_ids, encoded.loss_mask, strict=True):
        text += {(False, True): "[", (True, False): "]"}.get((before, counts), "")
        text += tokenizer.decode([token], skip_special_tokens=False)
        before = counts
    return text + "]" * before


def test_a_response_ends_where_tokenizer_generation_config_or_template_says(tokenizer: Tokenizer) -> None:
    assert tokenizer.turn_ends.stop_ids == (257,)
    both = with_ends(tokenizer, generation_config=[260, 257], config=259)
    assert both.turn_ends.stop_ids == (257, 260)
    base = with_ends(tokenizer, generation_config=260)
    base.hugging_face.eos_token = "<|python_tag|>"
    again = Tokenizer(base.hugging_face, base.where)
    assert {257, 260} <= {*again.turn_ends.stop_ids}, "a base model's tokenizer does not name the template's end"


@pytest.mark.parametrize(
    ("generation", "ends"),
    [({"eos_token_id": [3, 4]}, {3, 4}), ({"eos_token_id": None}, {7}), ({"temperature": 0.6}, {7}), (None, {7})],
)
def test_the_models_config_only_counts_where_its_generation_config_does_not_say(
    tokenizer: Tokenizer, generation: dict[str, object] | None, ends: set[int]
) -> None:
    """As Transformers 5.24 does: `GenerationConfig.from_pretrained`, or else `from_model_config`."""
    folder = Path(tokenizer.where)
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 7}))
    (folder / "generation_config.json").unlink(missing_ok=True)
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    stop_ids = {*Tokenizer(tokenizer.hugging_face, tokenizer.where).turn_ends.stop_ids}
    assert stop_ids == {*ends, tokenizer.eos_id}


@pytest.mark.parametrize("damaged", ["[", "[1, 2]", '{"eos_token_id": "x"}', '{"eos_token_id": [true, -1, null]}'])
def test_damaged_files_say_nothing_of_ends(tokenizer: Tokenizer, damaged: str) -> None:
    (Path(tokenizer.where) / "generation_config.json").write_text(damaged)
    assert Tokenizer(tokenizer.hugging_face, tokenizer.where).turn_ends.stop_ids == (257,)


def test_of_each_turn_the_same_is_learned(tokenizer: Tokenizer) -> None:
    begin, end = "<|im_start|>", "<|im_end|>"
    assert learned(tokenizer, TALK) == (
        f"{begin}user\nHi{end}\n{begin}assistant\n[Hello.{end}]\n{begin}user\n2+2?{end}\n{begin}assistant\n[Four.{end}]"
    )
    with_headers = learned(tokenizer, TALK, learns_header=True)
    assert with_headers.count(f"[{begin}assistant\n") == 2
    silent = [*TALK[:1], {**TALK[1], "weight": 0}, *TALK[2:]]
    assert learned(tokenizer, silent).count("[") == 1
    assert learned(tokenizer, TALK, num_given=3).count("[") == 1


def test_a_call_is_learned_and_its_result_is_not(tokenizer: Tokenizer) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "calc", "arguments": '{"x": 12}'}}
    talk = [
        TALK[0],
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "36", "tool_call_id": "c"},
        TALK[1],
    ]
    text = learned(tokenizer, talk)
    assert '[<tool_call>\n{"name": "calc", "arguments": {"x": 12}}\n</tool_call><|im_end|>]' in text
    assert "36" in text.replace("[", "]").split("]")[2], "the result stands between two turns that are learned"


def test_a_marker_of_the_next_turn_ends_a_turn_where_generation_stops_at_it(tokenizer: Tokenizer) -> None:
    tokenizer.hugging_face.chat_template = HEADER_FREE
    glm = with_ends(tokenizer, generation_config=[257, 260])
    assert glm.turn_ends.missing_id == 260
    assert learned(glm, TALK) == "<|python_tag|>Hi<tool_call>[Hello.<|python_tag|>]2+2?<tool_call>[Four.<|python_tag|>]"
    follow = [{"role": "user", "content": "3"}]
    assert glm.decode(glm.encode_continuation(follow, 260), skip_special_tokens=False) == "3<tool_call>"
    assert glm.decode(glm.encode_continuation(follow, 257), skip_special_tokens=False) == "<|python_tag|>3<tool_call>"


def test_a_turn_that_the_template_does_not_close_gets_an_end_unless_asked_otherwise(tokenizer: Tokenizer) -> None:
    tokenizer.hugging_face.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    plain = Tokenizer(tokenizer.hugging_face, tokenizer.where)
    assert learned(plain, TALK[:2]) == "Hi[Hello.<|im_end|>]"
    assert learned(plain, TALK[:2], add_eos=False) == "Hi[Hello.]"


def test_a_turn_that_a_response_would_not_follow_is_refused(tokenizer: Tokenizer) -> None:
    template = tokenizer.hugging_face.chat_template
    tokenizer.hugging_face.chat_template = template.replace("'<|im_start|>assistant\\n' }}{%", "'<tool_call>' }}{%")
    assert tokenizer.hugging_face.chat_template != template
    other = Tokenizer(tokenizer.hugging_face, tokenizer.where)
    with pytest.raises(DataError, match="does not write the assistant's turn after the prompt"):
        other.encode_conversation(TALK)


def test_a_stop_string_that_is_a_token_is_looked_for_as_that_token(tokenizer: Tokenizer) -> None:
    assert tokenizer.stop_conditions((9,), ("<|python_tag|>", "Hi", "<|im_end|>\n")) == (
        (257, 9, 260),
        ("Hi", "<|im_end|>\n"),
    )


def test_without_a_template_a_message_of_calls_alone_has_no_text(tokenizer: Tokenizer) -> None:
    tokenizer.hugging_face.chat_template = None
    plain = Tokenizer(tokenizer.hugging_face, tokenizer.where)
    calls = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "calc", "arguments": {}}}]}
    assert learned(plain, [TALK[0], calls, *TALK[2:]]) == "Hi[<|im_end|>]2+2?[Four.<|im_end|>]"
    assert plain.render_chat([TALK[0], calls], add_generation_prompt=True) == "Hi"


@pytest.mark.parametrize("stop_string", ["<|im_end|>\n", "o.\n", "\n"])
def test_a_stop_string_may_have_a_special_token_in_it(tokenizer: Tokenizer, stop_string: str) -> None:
    """Without one in the stop string, special tokens have no text: here `o.` is followed by a line break."""
    detokenizer = Detokenizer(tokenizer.hugging_face.backend_tokenizer, ("<|im_start|>", "<|im_end|>"))
    watcher = StopStrings(detokenizer, (stop_string,))
    matches = [watcher.push(token) for token in tokenizer.encode("Hello.<|im_end|>\n")]
    assert matches == [False] * (len(matches) - 1) + [True]
