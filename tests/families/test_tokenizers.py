"""The harness itself: what the other tests take for real is real."""

from __future__ import annotations

from tests.harness import families
from tests.harness.families import FAMILIES, Family


def test_every_marker_of_a_template_is_one_token(family: Family) -> None:
    tokenizer = families.hugging_face(family)
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]
    rendered = tokenizer.apply_chat_template(families.as_read(family, messages), tokenize=False)
    token_ids = tokenizer.encode(rendered, add_special_tokens=False)
    assert tokenizer.decode(token_ids, clean_up_tokenization_spaces=False).replace(" ", "") == rendered.replace(" ", "")
    for end in family.ends:
        assert tokenizer.encode(end, add_special_tokens=False) == [tokenizer.convert_tokens_to_ids(end)]
        assert tokenizer.convert_tokens_to_ids(end) != tokenizer.unk_token_id


def test_every_template_of_the_package_has_its_family() -> None:
    templates = {path.stem for path in families.template_path("qwen3").parent.glob("*.jinja")}
    assert {family.name for family in FAMILIES} == {name for name in templates if not name.endswith("_training")}
