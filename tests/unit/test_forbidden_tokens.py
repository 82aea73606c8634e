"""Forbidden sequences of tokens: the embedded engine's draws, and the tokens of ``bad_words``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import tokenizers
from engine_harness import (
    logprobs_without,
    make_engine,
    make_model,
    random_prompts,
    reference_logprobs,
    request,
    run_all,
    sequences_in,
)
from tokenizers import models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tandem.common.errors import DataError
from tandem.rollout.engines.served import ServedSampling
from tandem.samples.model_files import load_model_tokenizer

PROMPT = (3, 1, 4, 1, 5)


@pytest.fixture
def model(tmp_path: Path) -> Any:
    return make_model("qwen3", tmp_path)


def test_a_forbidden_sequence_is_never_made_and_log_probabilities_are_of_what_remains(
    model: Any, tmp_path: Path
) -> None:
    engine = make_engine(tmp_path, model, num_slots=4)
    free = run_all(engine, [request(number, PROMPT, max_new_tokens=24) for number in range(4)])
    tokens = free[0].token_ids_T.tolist()
    forbidden = ((tokens[3],), (tokens[6], tokens[7]), (tokens[9], tokens[10], tokens[11]))
    asked = [request(number, PROMPT, max_new_tokens=24, bad_token_ids=forbidden) for number in (0, 1)]
    made = run_all(engine, [*asked, *(request(number, PROMPT, max_new_tokens=24) for number in (2, 3))])
    for number in (2, 3):
        assert made[number].token_ids_T.tolist() == free[number].token_ids_T.tolist(), "it did not ask for that"
        assert (made[number].logprobs_T == free[number].logprobs_T).all()
    for number in (0, 1):
        own = made[number].token_ids_T.tolist()
        assert not any(each in sequences_in(own, len(each)) for each in forbidden)
        assert made[number].logprobs_T.tolist() == pytest.approx(
            logprobs_without(model, PROMPT, own, forbidden), abs=1e-5
        )
        plain = reference_logprobs(model, PROMPT, made[number].token_ids_T)
        assert (made[number].logprobs_T >= plain - 1e-5).all(), "what is forbidden is shared out"
        assert (made[number].logprobs_T > plain + 1e-4).any()


def test_a_greedy_token_is_the_likeliest_of_what_remains_also_for_served_requests(model: Any, tmp_path: Path) -> None:
    engine = make_engine(tmp_path, model)
    first = int(run_all(engine, [request(0, PROMPT, temperature=0.0)])[0].token_ids_T[0])
    one = request(1, PROMPT, temperature=0.0, bad_token_ids=((first,),))
    served = msgspec.structs.replace(
        one,
        request_id=2,
        sampling=ServedSampling(**{**msgspec.structs.asdict(one.sampling), "num_alternatives": 2}),
    )
    made = run_all(engine, [one, served])
    assert first not in made[1].token_ids_T.tolist()
    assert (made[1].logprobs_T == 0).all()
    assert made[2].token_ids_T.tolist() == made[1].token_ids_T.tolist()
    assert made[2].alternatives is not None
    assert [each[0][0] for each in made[2].alternatives] == made[2].token_ids_T.tolist()


def test_a_request_that_continues_remembers_what_it_made(model: Any, tmp_path: Path) -> None:
    engine = make_engine(tmp_path, model)
    (prompt,) = random_prompts(1, seed=3)
    free = run_all(engine, [request(0, prompt)])[0].token_ids_T.tolist()
    forbidden = ((free[3], free[4], free[5]),)
    whole = run_all(engine, [request(0, prompt, bad_token_ids=forbidden)])[0].token_ids_T.tolist()
    assert whole[:5] == free[:5]
    assert whole[5] != free[5]
    for at in (4, 5):  # within the sequence, and just before its last token
        rest = msgspec.structs.replace(
            request(1, (*prompt, *whole[:at]), seed=0, max_new_tokens=12 - at, bad_token_ids=forbidden), num_made=at
        )
        assert run_all(engine, [rest])[1].token_ids_T.tolist() == whole[at:]


def write_tokenizer(folder: Path, words: list[str]) -> None:
    vocabulary = {"[UNK]": 0, **{word: number + 1 for number, word in enumerate(words)}}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r" ?[a-z]+|<[a-z]+>"), "isolated")  # type: ignore[assignment]
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", eos_token="end").save_pretrained(folder)
    make_model("qwen3", folder)


def test_a_word_is_forbidden_at_the_beginning_and_after_a_space(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, ["end", "bad", " bad", "<image>", "good", " word", " good"])
    tokenizer = load_model_tokenizer(tmp_path)
    assert tokenizer.spellings("bad") == tokenizer.spellings(" bad") == [(2,), (3,)]
    assert tokenizer.spellings("bad word") == [(2, 6), (3, 6)]
    assert tokenizer.spellings("good bad good") == [(5, 3, 7), (7, 3, 7)]


def test_a_word_without_a_token_is_refused(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, ["end"])
    with pytest.raises(DataError, match="makes no token of ' '"):
        load_model_tokenizer(tmp_path).spellings(" ")
