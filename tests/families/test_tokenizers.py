"""The harness itself: what the other tests take for real is real."""

from __future__ import annotations

from tests.harness import families
from tests.harness.families import Family


def test_every_marker_of_a_template_is_one_token(family: Family) -> None:
    tokenizer = families.hugging_face(family)
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False)
    token_ids = tokenizer.encode(rendered, add_special_tokens=False)
    assert tokenizer.decode(token_ids, clean_up_tokenization_spaces=False).replace(" ", "") == rendered.replace(" ", "")
    for end in family.ends:
        assert tokenizer.encode(end, add_special_tokens=False) == [tokenizer.convert_tokens_to_ids(end)]
        assert tokenizer.convert_tokens_to_ids(end) != tokenizer.unk_token_id
