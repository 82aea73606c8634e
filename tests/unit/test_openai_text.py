"""Text while tokens come: whole characters only, nothing of a stop string, the bytes that each token spells."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from serving_harness import EOS, VOCABULARY, text_ids, write_tokenizer
from tokenizers import decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from tandem.rollout.openai_api.text import StoppedText, TextStream
from tandem.samples.tokenizer import Tokenizer

HALF = "\N{REPLACEMENT CHARACTER}"
TEXT = "Grüße, 世界! 👩‍🚀 naïve\n\ttail"


def byte_level(folder: Path) -> Tokenizer:
    return write_tokenizer(folder)


def byte_fallback(folder: Path) -> Tokenizer:
    """A tokenizer like Llama's first: words begin with a mark, what has no token is spelled in bytes."""
    pieces = ["<unk>", "▁", *(f"<0x{byte:02X}>" for byte in range(256)), "a", "e", "n", "t", "l", "▁a", "▁ta"]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    fast = tokenizers.Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    fast.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    fast.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=fast, unk_token="<unk>"), str(folder))


@pytest.fixture(scope="module", params=[byte_level, byte_fallback])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    make: Callable[[Path], Tokenizer] = request.param
    return make(tmp_path_factory.mktemp("tokenizer"))


def test_characters_come_whole(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer)
    ids = tokenizer.encode(TEXT)
    pieces = [stream.push([token]) for token in ids]
    assert len(ids) > len(TEXT), "some characters have several tokens"
    assert HALF not in "".join(pieces)
    assert "".join(pieces) + stream.finish() == TEXT
    assert sum(map(bool, pieces)) > 20, "and each as soon as it is whole"


def test_chunks_of_any_size_are_the_same_text(tokenizer: Tokenizer) -> None:
    ids, chooser = tokenizer.encode(TEXT * 3), random.Random(0)
    stream, text, start = TextStream(tokenizer), "", 0
    while start < len(ids):
        size = chooser.randint(1, 7)
        text += stream.push(ids[start : start + size])
        start += size
    assert text + stream.finish() == TEXT * 3


def test_a_character_that_is_cut_off_shows_in_the_end(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer)
    assert stream.push(tokenizer.encode("a界")[:-1]) == "a"
    assert set(stream.finish()) == {HALF}


def test_special_tokens_show_only_if_asked_for(tmp_path: Path) -> None:
    tokenizer = write_tokenizer(tmp_path)
    ids = [*text_ids("ü"), EOS, *text_ids("x")]
    for skips, text in ((True, "üx"), (False, "ü<eos>x")):
        stream = TextStream(tokenizer, skip_special_tokens=skips)
        assert stream.push(ids) + stream.finish() == text
    stream = TextStream(tokenizer)
    assert stream.push([*text_ids("é")[:1], *[EOS] * 500, *text_ids("b")]) + stream.finish() == f"{HALF}b"


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, VOCABULARY - 1), max_size=60))
def test_any_bytes_are_the_text_that_they_decode_to(ids: list[int]) -> None:
    tokenizer = _BYTES[0]
    stream = TextStream(tokenizer)
    text = "".join(stream.push([token]) for token in ids) + stream.finish()
    whole = tokenizer.decode(ids)
    # Where bytes that are no character go on for long, they are not waited for.
    assert text.replace(HALF, "") == whole.replace(HALF, "") or text.count(HALF) > 10


_BYTES: list[Tokenizer] = []


@pytest.fixture(autouse=True, scope="module")
def bytes_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> None:
    _BYTES[:] = [write_tokenizer(tmp_path_factory.mktemp("bytes"))]


def test_tokens_spell_bytes(tokenizer: Tokenizer) -> None:
    spelled = b"".join(tokenizer.token_bytes(token) for token in tokenizer.encode("aüß世"))
    assert spelled.decode().strip("▁ ") == "aüß世"
    assert tokenizer.token_bytes(10**6) == b""


def test_a_stop_string_never_shows() -> None:
    for cut in range(1, 6):
        stopped, shown = StoppedText(["</s>", "<end"]), ""
        text = "a < b </s </b </s> rest"
        for start in range(0, len(text), cut):
            shown += stopped.push(text[start : start + cut])
            assert "</s>" not in shown
        assert shown + stopped.finish() == "a < b </s </b "
        assert stopped.has_stopped


def test_what_only_began_like_a_stop_string_is_shown_in_the_end() -> None:
    stopped = StoppedText(["abcd"])
    assert stopped.push("xxab") == "xx"
    assert stopped.push("c") == ""
    assert stopped.finish() == "abc"
    assert StoppedText([]).push("abc") == "abc"


def test_tokens_of_sentencepiece_keep_their_spaces(tmp_path: Path) -> None:
    vocabulary = {"<unk>": 0, "▁Hello": 1, "▁world": 2, "<0xC3>": 3, "<0xA9>": 4, "▁": 5}
    fast = tokenizers.Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    fast.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=fast), str(tmp_path))
    token_ids = [1, 2, 5, 3, 4]
    assert b"".join(map(tokenizer.token_bytes, token_ids)) == " Hello world é".encode()
    assert tokenizer.decode(token_ids) == "Hello world é", "the first space is none of the text's"
    assert tokenizer.token_text(2) == " world"
