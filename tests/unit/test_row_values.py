"""A value of a row keeps its type from the file to the reward: messages, numbers, null, lists."""

from __future__ import annotations

import json
import math
import pickle
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_harness import character_tokenizer, data_config
from environment_harness import config, problem, results

from tandem.common.errors import DataError, WireError
from tandem.common.messages import Problem, ResponseToScore, ScoreResponses, ToRewardServer
from tandem.common.values import LargeInteger, WrittenFloat, answer_texts, encode_json, make_plain_object, text_of
from tandem.common.wire import MessageCodec, encode
from tandem.config import Config, build_config
from tandem.coordinator.algorithms.grpo import GrpoAlgorithm
from tandem.coordinator.api.configuration import rows_of
from tandem.coordinator.api.rewards import reward_functions
from tandem.rollout.environments import Score, make_environment
from tandem.rollout.environments.scorer import EnvironmentScorer
from tandem.samples.data_sets import ConversationWriter, PromptEncoder, load_problems
from tandem.samples.data_sets.sources import file_rows
from tandem.samples.data_sets.sources import problem as problem_of
from tandem.samples.model_files import load_tokenizer

CHARACTERS = "".join(map(chr, range(32, 127))) + "\n"
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
CONVERSATION = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "and 2+2?"},
]


def write_rows(rows: list[dict[str, Any]], name: str = "rows.jsonl") -> str:
    if name.endswith(".parquet"):
        pq.write_table(pa.Table.from_pylist(rows), name)
    else:
        Path(name).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return name


def of_file(text: str, **data: Any) -> Problem:
    """Return the problem of a line of a file."""
    Path("line.jsonl").write_text(text + "\n")
    settings = build(path="line.jsonl", **data)
    ((where, row),) = file_rows("line.jsonl", keeps_digits=True)
    return problem_of(where, row, settings.data)


def build(path: str = "rows.jsonl", environment: str = "exact_match", entry: Any = None, **data: Any) -> Config:
    return build_config(
        {
            "grpo": {"num_prompts_per_step": 2, "num_generations_per_prompt": 2},
            "policy": {
                "model_name": "model",
                "train_global_batch_size": 4,
                "max_total_sequence_length": 256,
                "tokenizer": {"name": "model", "chat_template": TEMPLATE},
            },
            "data": {"dataset_name": "jsonl", "train_data_path": path, "num_validation": 1, **data},
            "env": {environment: entry or {}},
        }
    )


def prompts(settings: Config) -> dict[str, str]:
    """Return the prompts of a run by their answers, as the model sees them."""
    tokenizer = character_tokenizer(settings, CHARACTERS)
    asked = load_problems(settings).list_train(settings.data)
    encoder = PromptEncoder(settings, tokenizer)
    encoded = [encoder.encode(each) for each in asked]
    return {
        each.problem.answer: tokenizer.decode(each.prompt_ids, skip_special_tokens=False) for each in encoded if each
    }


def rendered(settings: Config, messages: list[dict[str, Any]]) -> str:
    """Return a conversation as Transformers' ``apply_chat_template`` writes it."""
    tokenizer = load_tokenizer(settings).hugging_face
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


# --- a question is a text or messages --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
@pytest.mark.parametrize(
    ("key", "wrap"), [("input", lambda value: value), ("extra.0.ask", lambda value: [{"ask": value}])]
)
def test_messages_are_the_prompt_as_transformers_writes_them(name: str, key: str, wrap: Any) -> None:
    field = key.partition(".")[0]
    rows = [
        {field: wrap([*CONVERSATION[:-1], {"role": "user", "content": f"{n}?"}]), "output": str(n)} for n in range(3)
    ]
    settings = build(path=write_rows(rows, name), input_key=key)
    found = prompts(settings)
    assert len(found) == 2
    for answer, prompt in found.items():
        assert prompt == rendered(settings, [*CONVERSATION[:-1], {"role": "user", "content": f"{answer}?"}])


def test_a_list_of_one_text_message_is_asked_as_its_text_is() -> None:
    rows = [{"input": [{"role": "user", "content": "1+1?"}], "output": "a"}, {"input": "1+1?", "output": "b"}]
    rows.append({"input": "another", "output": "c"})
    found = prompts(build(path=write_rows(rows), num_validation=1))
    assert len({prompt for answer, prompt in found.items() if answer in "ab"}) == 1


def test_a_system_message_of_the_row_stands_and_another_is_put_in_front_of_the_rest() -> None:
    rows: list[dict[str, Any]] = [{"input": CONVERSATION, "output": "a"}, {"input": CONVERSATION[1:], "output": "b"}]
    settings = build(path=write_rows([*rows, {"input": "x", "output": "c"}]), system_prompt="think")
    own = {"role": "system", "content": "think"}
    expected = {"a": CONVERSATION, "b": [own, *CONVERSATION[1:]], "c": [own, {"role": "user", "content": "x"}]}
    for answer, prompt in prompts(settings).items():
        assert prompt == rendered(settings, expected[answer])


def test_templates_are_filled_with_the_last_of_the_users_messages() -> None:
    Path("cot.txt").write_text("Think. {}")
    rows: list[dict[str, Any]] = [{"input": CONVERSATION, "output": "a"}, {"input": "and 2+2?", "output": "b"}]
    settings = build(path=write_rows([*rows, {"input": "x", "output": "c"}]), prompt_file="cot.txt")
    last = {"role": "user", "content": "Think. and 2+2?"}
    expected = {"a": [*CONVERSATION[:-1], last], "b": [last], "c": [{"role": "user", "content": "Think. x"}]}
    for answer, prompt in prompts(settings).items():
        assert prompt == rendered(settings, expected[answer])


def test_messages_keep_their_fields_and_texts_in_parts_become_one() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 0.5}}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "1"}, {"type": "text", "text": "+1"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "2"},
    ]
    question = of_file(json.dumps({"input": messages, "output": "2"})).question
    assert question == [{"role": "user", "content": "1+1"}, *messages[1:]]


# NeMo-RL v0.7, nemo_rl/data/processors.py, math_hf_data_processor: the first of a row's messages is the question, the
# second the answer.
def test_a_conversation_is_a_question_and_its_answer() -> None:
    talk = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]
    read = of_file(json.dumps({"messages": talk, "level": 3}))
    assert (read.question, read.answer, read.metadata) == (talk[:1], "2", {"level": 3})
    longer = of_file(json.dumps({"messages": [*CONVERSATION, {"role": "assistant", "content": "4"}]}))
    assert (longer.question, longer.answer) == (CONVERSATION, "4")
    with pytest.raises(DataError, match=r"line.jsonl:1 has no field 'input'"):
        of_file(json.dumps({"messages": talk[:1]}))


@pytest.mark.parametrize(
    ("question", "message"),
    [
        ({"role": "user", "content": "x"}, r"expected a text or a list of messages, got \{'role': 'user'"),
        ([], r"expected a text or a list of messages, got \[\]"),
        (["x"], r"\[0\]: expected a message with role and content, got 'x'"),
        ([{"role": "user"}], r"\[0\]: a message of the role 'user' has no content"),
        ([*CONVERSATION[:3]], r"the last of its messages is the assistant's, so that nothing is left to answer"),
        (
            [{"role": "user", "content": [{"type": "image", "image": "a.png"}]}],
            r"\[0\]: it has an image, wh",
        ),
    ],
)
def test_a_question_that_is_neither_is_refused_by_name(question: Any, message: str) -> None:
    with pytest.raises(DataError, match=rf"line.jsonl:1: 'input' \(data.input_key\):? ?{message}"):
        of_file(json.dumps({"input": question, "output": "x"}))


def test_messages_without_the_user_take_no_template() -> None:
    rows = [{"input": [{"role": "system", "content": str(n)}], "output": "a"} for n in range(3)]
    settings = build(path=write_rows(rows), prompt_template="Q: {question}")
    with pytest.raises(DataError, match="none of its messages is the user's, so that no template can be filled"):
        prompts(settings)


# --- an answer is the value that stood in the file -------------------------------------------------------------------

VALUES = ["0.00001", "1E5", "0.10", "4", "4.0", "true", "null", '"1e-05"', '["4", "four"]', '{"a": 0.00001}', "1" * 30]


@pytest.mark.parametrize("value", VALUES)
def test_an_answer_is_what_the_file_says_digits_as_written(value: str) -> None:
    read = of_file(f'{{"input": "x", "output": {value}, "other": {value}}}')
    parsed = json.loads(value)
    for answer in (read.answer, read.metadata["other"]):
        assert answer == parsed
        assert isinstance(answer, type(parsed))
        assert encode_json(answer) == value.replace(" ", "").encode()


@pytest.mark.parametrize("value", ["1e999", "-1e400"])
def test_a_number_that_is_out_of_range_is_refused_with_its_line(value: str) -> None:
    with pytest.raises(DataError, match=r"line\.jsonl:1 is not a JSON object: Number out of range"):
        of_file(f'{{"input": "x", "output": {value}}}')


@pytest.mark.parametrize("value", VALUES)
def test_an_answer_travels_as_it_is(value: str) -> None:
    read = of_file(f'{{"input": "x", "output": {value}}}')
    sent = ScoreResponses(responses=(ResponseToScore(number=1, problem=read, response="r"),))
    codec: MessageCodec[ScoreResponses] = MessageCodec(ToRewardServer)
    (response,) = codec.decode([bytes(frame) for frame in encode(sent)]).message.responses
    assert response.problem == read
    assert text_of(response.problem.answer) == text_of(read.answer)


@pytest.mark.parametrize("data", [b"", b"NaN", b"1_0", b"0x1", b"9" * 5000, b"1e5\n", b"1e999", b"-1e400"])
def test_an_extension_that_is_no_number_is_refused(data: bytes) -> None:
    response = ResponseToScore(number=1, problem=problem("?"), response="r")
    frame = msgspec.msgpack.encode(ScoreResponses(responses=(response,)))
    number = msgspec.msgpack.encode(msgspec.msgpack.Ext(1, data))
    codec: MessageCodec[ScoreResponses] = MessageCodec(ToRewardServer)
    with pytest.raises(WireError, match="is not a number"):
        codec.decode([frame.replace(msgspec.msgpack.encode("?"), number)])


def test_a_written_number_is_a_number() -> None:
    number = WrittenFloat("0.00001")
    assert (str(number), f"{number}", f"{number:.1e}", repr([number])) == ("0.00001", "0.00001", "1.0e-05", "[0.00001]")
    assert number == 1e-5
    assert hash(number) == hash(1e-5)
    assert math.isclose(2 * number, 2e-5)
    assert str(pickle.loads(pickle.dumps(number))) == "0.00001"
    assert type(number + 0) is float
    assert json.dumps(number) == "1e-05"  # a program's own JSON has the same value


def test_csv_is_text_and_parquet_has_types_of_its_own() -> None:
    Path("rows.csv").write_text('input,output\nx,0.00001\ny,"[1, 2]"\n')
    settings = build(path="rows.csv")
    assert [problem_of(*row, settings.data).answer for row in file_rows("rows.csv")] == ["0.00001", "[1, 2]"]
    path = write_rows([{"input": "x", "output": [1, 2]}, {"input": "y", "output": None}], "rows.parquet")
    assert [problem_of(*row, settings.data).answer for row in file_rows(path)] == [[1, 2], None]


def test_numbers_of_other_sources_are_those_of_python() -> None:
    path = write_rows([{"input": "x", "output": 1e-05, "other": [1e22, 0.1]}], "rows.parquet")
    ((where, row),) = file_rows(path)
    read = problem_of(where, row, build().data)
    assert (type(read.answer), str(read.answer)) == (float, "1e-05")
    assert [type(number) for number in read.metadata["other"]] == [float, float]
    mixed = make_plain_object({"written": WrittenFloat("0.50"), "native": 1e-05})
    assert (str(mixed["written"]), str(mixed["native"])) == ("0.50", "1e-05")


def test_messages_and_other_data_have_numbers_as_json_has() -> None:
    call = '{"role": "tool", "content": "x", "score": 0.10}'
    (message,) = of_file(f'{{"input": [{call}], "output": 0.10}}').question
    assert repr(message["score"]) == "0.1"  # type: ignore[index]
    ((_, row),) = file_rows("line.jsonl")
    assert type(row["output"]) is float


# --- what rewards get ------------------------------------------------------------------------------------------------


class Typed:
    """An environment that says the type and the text of the answer that it is given."""

    def score(self, problem: Problem, response: str) -> Score:
        told = f"{type(problem.answer).__name__} {problem.answer}"
        return Score(float(told == response), correct=told == response, answer=told)


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("4", "int 4"),
        ("0.00001", "WrittenFloat 0.00001"),
        ("null", "NoneType None"),
        ('["4", 4]', "list ['4', 4]"),
        ("1" * 30, f"LargeInteger {'1' * 30}"),
    ],
)
def test_a_custom_environment_gets_the_value_in_its_process(value: str, told: str) -> None:
    read = of_file(f'{{"input": "x", "output": {value}}}')
    scorer = EnvironmentScorer(config("mine", {"class": "test_row_values.Typed"}))
    try:
        scorer.await_ready()
        (score,) = results(scorer, told, of=read)
    finally:
        scorer.close()
    assert score == Score(1.0, correct=True, answer=told)


def test_functions_of_a_program_get_the_values_of_their_rows() -> None:
    rows = [{"prompt": CONVERSATION, "answer": answer} for answer in (4, None, ["4", "four"], 0.5)]
    path = Path("rows.jsonl")
    path.write_bytes(rows_of(rows, build().data, "dataset").content)
    settings = build(input_key="_question", output_key="_answer")
    (function,) = reward_functions(lambda prompts, completions, answer: [0.0], None)
    for (where, row), given in zip(file_rows(str(path), keeps_digits=True), rows, strict=True):
        response = ResponseToScore(number=0, problem=problem_of(where, row, settings.data), response="r")
        arguments = function.arguments([response], None)
        completions = [[{"role": "assistant", "content": "r"}]]
        assert arguments == {"prompts": [CONVERSATION], "completions": completions, "answer": [given["answer"]]}


# --- built-in environments -------------------------------------------------------------------------------------------

COMPARING: list[tuple[str, dict[str, Any], str]] = [
    ("exact_match", {}, "{}"),
    ("math", {}, r"so \boxed{{{}}}"),
    ("math", {"math_verify_impl": "dapo_math_verify"}, "Answer: {}"),
    ("math_multi_reward", {}, "<think>x</think>\n<answer>{}</answer>"),
    ("vlm", {"reward_functions": [{"name": "exact_alnum", "weight": 1.0}]}, "<answer>{}</answer>"),
]


@pytest.mark.parametrize(("name", "settings", "form"), COMPARING)
def test_any_of_several_answers_is_right(name: str, settings: dict[str, Any], form: str) -> None:
    environment: Any = make_environment(config(name, settings))
    of_several = msgspec.structs.replace(problem(), answer=["12", 7, "9"])
    verdicts = [environment.score(of_several, form.format(number)).correct for number in (12, 7, 9, 8)]
    assert verdicts == [True, True, True, False]


def test_any_of_several_letters_is_right() -> None:
    environment: Any = make_environment(config("math", {"verifier_type": "english_multichoice"}))
    of_several = msgspec.structs.replace(problem(), answer=["A", "C"])
    assert [environment.score(of_several, f"Answer: {letter}").correct for letter in "ABC"] == [True, False, True]


def test_any_of_several_answers_ends_a_conversation() -> None:
    environment: Any = make_environment(
        build_config(
            {
                "grpo": {"max_rollout_turns": 2},
                "policy": {"model_name": "model"},
                "data": {"dataset_name": "jsonl", "train_data_path": "rows.jsonl"},
                "env": {"calculator": {}},
            }
        )
    )
    of_several = msgspec.structs.replace(problem(), answer=[12, "7"])
    turns = [environment.step(of_several, [{"role": "assistant", "content": text}]) for text in ("12", "7.0", "8")]
    assert [turn.correct for turn in turns] == [True, True, False]


def test_numbers_are_compared_as_they_were_written() -> None:
    environment: Any = make_environment(config("math"))
    small = of_file('{"input": "x", "output": 0.00001}')
    assert environment.score(small, r"\boxed{0.00001}").correct
    assert environment.score(small, r"\boxed{10^{-5}}").correct
    assert not environment.score(small, "e - 5").correct
    assert not make_environment(config("exact_match")).score(of_file('{"input": "x", "output": 0.10}'), "0.1").correct  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("value", "text"), [("1E5", "100000"), ("1e-05", "0.00001"), ("2.50", "2.50"), ("1e-7", "0.0000001")]
)
def test_a_number_is_compared_without_exponent(value: str, text: str) -> None:
    assert answer_texts(of_file(f'{{"input": "x", "output": {value}}}').answer) == (text,)
    if value == "1e-05":
        assert answer_texts(1e-05) == (text,)


def test_truth_has_two_spellings() -> None:
    assert answer_texts(True) == ("true", "True")


def test_a_list_of_four_numbers_is_one_box_where_boxes_are_compared() -> None:
    environment: Any = make_environment(config("vlm", {"reward_functions": [{"name": "bbox_giou", "weight": 1.0}]}))
    for answer in ([1, 2, 3, 4], [[5, 6, 7, 8], [1, 2, 3, 4]], "[1, 2, 3, 4]"):
        box = msgspec.structs.replace(problem(), answer=answer)
        assert environment.score(box, "<answer>[1, 2, 3, 4]</answer>").correct


@pytest.mark.parametrize("answer", [None, {"a": 1}, [], ["4", None]])
@pytest.mark.parametrize(("name", "settings"), [(name, settings) for name, settings, _ in COMPARING if name != "vlm"])
def test_a_row_without_an_answer_to_compare_is_refused_by_name(
    answer: Any, name: str, settings: dict[str, Any]
) -> None:
    rows = [{"input": f"{number}?", "output": "4"} for number in range(3)]
    config_of = build(path=write_rows([*rows, {"input": "3?", "output": answer}]), environment=name, entry=settings)
    with pytest.raises(DataError, match=rf"^rows.jsonl:4: env.{name} compares responses with the answer, which is "):
        GrpoAlgorithm(config_of, character_tokenizer(config_of, CHARACTERS))


def test_other_environments_get_null() -> None:
    rows = [{"input": f"{number}?", "output": None} for number in range(3)]
    settings = build(path=write_rows(rows), environment="mine", entry={"class": "test_row_values.Typed"})
    algorithm = GrpoAlgorithm(settings, character_tokenizer(settings, CHARACTERS))
    assert [group.problem.answer for group in algorithm.prompt_groups(1, "train", range(2))] == [None, None]


# --- SFT -------------------------------------------------------------------------------------------------------------


def solutions(answers: list[Any]) -> list[str]:
    rows = [{"input": f"{number}?", "output": answer} for number, answer in enumerate(answers)]
    settings = data_config("sft", dataset_name="jsonl", train_data_path=write_rows(rows), num_validation=1)
    problems = [problem_of(*row, settings.data) for row in file_rows("rows.jsonl", keeps_digits=True)]
    return [each.answers[0][0]["content"] for each in ConversationWriter(settings)(problems)]


def test_a_solution_is_written_as_the_file_has_it_and_of_several_the_first_is_learned() -> None:
    assert solutions([4, 0.5, "x", ["4", "four"], {"a": [1]}]) == ["4", "0.5", "x", "4", '{"a":[1]}']


def test_null_is_not_learned() -> None:
    with pytest.raises(
        DataError, match=r"^rows.jsonl:2: its answer is null \(data.output_key\), and data.solution_tem"
    ):
        solutions(["x", None])


def test_large_integers_are_integers() -> None:
    assert LargeInteger("1" * 30) == int("1" * 30)
