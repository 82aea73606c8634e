"""From problems to prompts, solutions and batches: what the loop gets, step by step."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import reasoning_gym
from data_harness import character_tokenizer, data_config
from samples_harness import finished, records_of, scored

from tandem.common.errors import ConfigError, DataError, TandemError
from tandem.common.messages import Problem
from tandem.config import Config
from tandem.config.schema import TokenizerConfig as TokenizerSettings
from tandem.coordinator.algorithms.data_set import DataSetAlgorithm
from tandem.coordinator.algorithms.grpo import GrpoAlgorithm
from tandem.coordinator.algorithms.step_batch import batch_of_samples, turn_metrics
from tandem.coordinator.data import worked
from tandem.coordinator.scheduler.events import SampleRecord
from tandem.samples.batch import SampleBatch
from tandem.samples.data_sets import (
    ChatEncoder,
    ConversationWriter,
    PromptedProblem,
    PromptEncoder,
    epoch_stream,
    sample_seed,
)
from tandem.samples.data_sets.prompts import PromptWriter
from tandem.samples.model_files import load_tokenizer
from tandem.samples.tokenizer import EncodedConversation, Tokenizer

MARKED = (
    "{% for m in messages %}{{ m['role'][0] + ': ' + m['content'] }}"
    "{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}a: {% endif %}"
)
"""A template of the usual shape: a line for each turn, marked by who speaks (u, a or s)."""
LETTERS = "0123456789+-= aus:\n"
SUM = Problem(problem_id="p", question="What is 4 + 5?", answer="9", metadata={"expression": "4 + 5"})


def marked(config: Config) -> tuple[Config, Tokenizer]:
    """Give a configuration the template above."""
    settings = TokenizerSettings(name="model", chat_template=MARKED)
    policy = msgspec.structs.replace(config.policy, tokenizer=settings)
    config = msgspec.structs.replace(config, policy=policy)
    character_tokenizer(config, LETTERS)
    return config, load_tokenizer(config)


def given(config: Config, tokenizer: Tokenizer) -> EncodedConversation:
    """Prompt and solution of `SUM`, as SFT has them."""
    (written,), chat = ConversationWriter(config)([SUM]), ChatEncoder(config, tokenizer)
    return chat.conversation(written.name, written.prompt, *written.answers)


def texts(tokenizer: Tokenizer, encoded: EncodedConversation) -> tuple[str, str]:
    """The texts of prompt and solution."""
    length = encoded.prompt_length
    return text(tokenizer, encoded.token_ids[:length]), text(tokenizer, encoded.token_ids[length:])


def text(tokenizer: Tokenizer, tokens: Any) -> str:
    return tokenizer.decode([int(token) for token in tokens], skip_special_tokens=False)


def error_of(config: Config, kind: type[TandemError], characters: str = "0123456789+-= ") -> str:
    tokenizer = character_tokenizer(config, characters)
    with pytest.raises(kind) as caught:
        DataSetAlgorithm(config, tokenizer) if config.algorithm == "sft" else GrpoAlgorithm(config, tokenizer)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- order and seeds -------------------------------------------------------------------------------------------------


def test_each_epoch_is_a_permutation_of_its_own() -> None:
    stream = epoch_stream(3, 10, 0, 30)
    epochs = [stream[:10], stream[10:20], stream[20:]]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert stream != epoch_stream(4, 10, 0, 30)


def test_any_part_of_the_stream_can_be_had_without_the_rest() -> None:
    whole = epoch_stream(3, 7, 0, 50)
    assert [epoch_stream(3, 7, first, 4) for first in range(40)] == [whole[i : i + 4] for i in range(40)]


def test_seeds_of_samples_are_those_of_the_first_release() -> None:
    # Written down, so that a change of the hash, which would break resuming, does not go unnoticed.
    assert sample_seed(42, 1, "train", 0, 0) == 12443581061145015183
    assert sample_seed(42, 7, "validate", 3, 1) == 8065661844020066815


def test_no_two_samples_have_the_same_seed() -> None:
    places = itertools.product((0, 1), (1, 2, 11), ("train", "validate"), (0, 1, 11), (0, 1))
    seeds = [sample_seed(*place) for place in places]
    assert len(set(seeds)) == len(seeds) == 72
    assert all(0 <= seed < 2**64 for seed in seeds)


# --- prompts and solutions -------------------------------------------------------------------------------------------


def test_a_prompt_ends_where_the_model_goes_on() -> None:
    config, tokenizer = marked(data_config())
    encoded = PromptEncoder(config, tokenizer).encode(PromptedProblem(SUM, config.data))
    assert text(tokenizer, encoded.prompt_ids) == "u: 4 + 5\na: "


def test_prompt_files_are_read(tmp_path: Path) -> None:
    Path("prompt.txt").write_text("= {} =")
    Path("system.txt").write_text("0")
    config, tokenizer = marked(data_config(prompt_file="prompt.txt", system_prompt_file="system.txt"))
    encoded = PromptEncoder(config, tokenizer).encode(PromptedProblem(SUM, config.data))
    assert text(tokenizer, encoded.prompt_ids) == "s: 0\nu: = 4 + 5 =\na: "


# NeMo-RL v0.7 fills prompt files by str.format (nemo_rl/data/processors.py, math_hf_data_processor); so are its own
# cot.txt and math.txt written.
@pytest.mark.parametrize(
    ("file", "prompt"),
    [
        ("Answer in \\boxed{{}}.\n{}\n", "Answer in \\boxed{}.\n4 + 5\n"),
        ("{0}, again: {0}", "4 + 5, again: 4 + 5"),
        ("{{{}}}", "{4 + 5}"),
    ],
)
def test_prompt_files_are_format_strings(file: str, prompt: str) -> None:
    Path("prompt.txt").write_text(file)
    writer = PromptWriter(data_config(prompt_file="prompt.txt").data)
    assert writer.messages(SUM) == [{"role": "user", "content": file.format("4 + 5")}]
    assert file.format("4 + 5") == prompt


def test_instructions_of_multiple_choice_are_no_format_string() -> None:
    Path("prompt.txt").write_text("Answer \\boxed{A}.")
    writer = PromptWriter(data_config(prompt_file="prompt.txt", processor="multichoice_qa_processor").data)
    assert writer.messages(SUM) == [{"role": "user", "content": "Answer \\boxed{A}.\n\n4 + 5"}]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("\\boxed{x} {}", "it has a field 'x'"),
        ("{} {}", "Replacement index 1 out of range for positional args tuple"),
        ("{ {}", "unexpected '{' in field name"),
        ("} {}", "Single '}' encountered in format string"),
        ("{:d}", "Unknown format code 'd' for object of type 'str'"),
    ],
)
def test_a_prompt_file_that_cannot_be_filled_says_how_to_write_braces(text: str, why: str) -> None:
    Path("prompt.txt").write_text(text)
    with pytest.raises(ConfigError) as error:
        PromptWriter(data_config(prompt_file="prompt.txt").data)
    assert str(error.value) == (
        f"data.prompt_file: 'prompt.txt' cannot be filled: {why}. It is a format string: {{}} stands for the prompt, "
        "once, and a brace of the text is written twice, as in \\boxed{{}}"
    )


@pytest.mark.parametrize(
    ("settings", "prompt", "solution"),
    [
        # As in NeMo-RL, the marker is learned as part of the solution unless it is part of the prompt.
        ({"add_generation_prompt": True}, "u: 4 + 5\na: ", " = 9<eos>"),
        ({}, "u: 4 + 5\n", "a:  = 9<eos>"),
        # A template begins sequences itself: nothing is put in front of it, as in a rollout.
        ({"add_bos": False}, "u: 4 + 5\n", "a:  = 9<eos>"),
    ],
)
def test_a_solution_is_the_assistants_turn(settings: dict[str, bool], prompt: str, solution: str) -> None:
    config, tokenizer = marked(data_config("sft", **settings))
    assert texts(tokenizer, given(config, tokenizer)) == (prompt, solution)


def talk(problem: Problem) -> Any:
    return [
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "u: 5"},
        {"role": "system", "content": "6"},
        {"role": "assistant", "content": problem.answer},
    ]


def silence(problem: Problem) -> Any:
    return [{"role": "assistant", "content": "4"}, {"role": "user", "content": "5"}]


def told_first(problem: Problem) -> Any:
    return [{"role": "user", "content": "5"}, {"role": "assistant", "content": "4"}]


@pytest.mark.parametrize(("add_generation_prompt", "header"), [(True, ""), (False, "a: ")])
def test_of_a_conversation_the_assistants_turns_are_learned(add_generation_prompt: bool, header: str) -> None:
    settings = {"solution_template": f"{__name__}:talk", "add_generation_prompt": add_generation_prompt}
    config, tokenizer = marked(data_config("sft", **settings))
    solution = given(config, tokenizer)
    parts = [
        text(tokenizer, [token for token, _ in run])
        for _, run in itertools.groupby(
            zip(solution.token_ids, solution.loss_mask, strict=True), key=lambda pair: pair[1]
        )
    ]
    between = "\nu: u: 5\ns: 6\n" + ("" if header else "a: ")
    assert parts[1:] == [f"{header}4<eos>", between, f"{header}9<eos>"]
    assert not solution.loss_mask[0]


@pytest.mark.parametrize(("name", "place"), [("silence", "end"), ("told_first", "begin")])
def test_a_conversation_without_the_assistants_word_is_refused(name: str, place: str) -> None:
    config, tokenizer = marked(data_config("sft", solution_template=f"{__name__}:{name}"))
    with pytest.raises(DataError, match=f"^problem 'p': its solution does not {place} with a turn of the assistant$"):
        given(config, tokenizer)


@pytest.mark.parametrize(("add_eos", "ending"), [(True, "<eos>"), (False, "")])
def test_without_a_template_a_solution_follows_the_question(add_eos: bool, ending: str) -> None:
    config = data_config("sft", add_eos=add_eos)
    character_tokenizer(config)
    Path("model/chat_template.jinja").unlink()
    tokenizer = load_tokenizer(config)
    assert texts(tokenizer, given(config, tokenizer)) == ("<bos>4 + 5", " = 9" + ending)
    rollout = PromptEncoder(config, tokenizer).encode(PromptedProblem(SUM, config.data))
    assert text(tokenizer, rollout.prompt_ids) == "<bos>4 + 5"


def test_the_new_models_template_begins_with_one_mark_and_ends_with_one() -> None:
    for algorithm in ("sft", "grpo"):
        config = data_config(algorithm)
        Path("model").exists() or character_tokenizer(config)
        tokenizer = load_tokenizer(config)
        encoded = PromptEncoder(config, tokenizer).encode(PromptedProblem(SUM, config.data))
        assert text(tokenizer, encoded.prompt_ids) == "<bos>4 + 5", algorithm
        assert texts(tokenizer, given(config, tokenizer)) == ("<bos>4 + 5", " = 9<eos>"), algorithm


@pytest.mark.parametrize(
    ("algorithm", "data", "message"),
    [
        (
            "grpo",
            {"max_input_seq_length": 4},
            ": its prompt has 6 tokens, but data.max_input_seq_length (4) and policy.max_total_sequence_length (64) "
            "leave room for 4",
        ),
        (
            "sft",
            {"solution_template": "{answer}" + " " * 60},
            " tokens, policy.max_total_sequence_length is 64",
        ),
        (
            "sft",
            {"solution_template": "tandem.coordinator.data.worked:gcd"},
            ": data.solution_template tandem.coordinator.data.worked:gcd raised KeyError: 'numbers'",
        ),
    ],
)
def test_a_problem_that_does_not_fit_is_named(algorithm: str, data: dict[str, Any], message: str) -> None:
    found = error_of(data_config(algorithm, **data), DataError)
    assert found.startswith("problem 'chain_sum-")
    assert message in found


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"prompt_file": "none.txt"}, "data.prompt_file: cannot read 'none.txt': No such file or directory"),
        ({"prompt_file": "empty.txt"}, "data.prompt_file: 'empty.txt' has no {} for the prompt to go to"),
        ({"prompt_file": "escaped.txt"}, "data.prompt_file: 'escaped.txt' has no {} for the prompt to go to ({{}} is "),
        (
            {"solution_template": "tandem.coordinator.data.worked:sum"},
            "data.solution_template: cannot import 'tandem.coordinator.data.worked:sum': module "
            "'tandem.coordinator.data.worked' has no attribute 'sum'",
        ),
        (
            {"solution_template": "{solution}"},
            "data.solution_template: cannot fill '{solution}': 'solution' (fields are ",
        ),
    ],
)
def test_a_template_that_cannot_be_filled_is_named(data: dict[str, Any], message: str) -> None:
    Path("empty.txt").write_text("Answer this.")
    Path("escaped.txt").write_text("Answer in \\boxed{{}}.")
    assert error_of(data_config("sft", **data), ConfigError).startswith(message)


def test_a_template_that_writes_turns_apart_is_refused() -> None:
    config, _ = marked(data_config("sft", add_generation_prompt=True))
    template = MARKED.replace("'a: '", "'s: '").replace("%}a: {%", "%}s: {%")
    Path("model/chat_template.jinja").write_text(template)
    tokenizer = load_tokenizer(data_config("sft"))
    with pytest.raises(DataError, match=r"problem 'p': the chat template does not write the assistant's turn"):
        given(config, tokenizer)


@pytest.mark.parametrize(
    ("task", "parameters"),
    [("chain_sum", {}), ("spell_backward", {}), ("gcd", {"max_numbers": 4})],
)
def test_worked_solutions_end_with_the_right_answer(task: str, parameters: dict[str, int]) -> None:
    score = reasoning_gym.get_score_answer_fn(task)
    for entry in reasoning_gym.create_dataset(task, size=200, seed=5, **parameters):
        problem = Problem(problem_id="p", question="", answer=entry["answer"], metadata=entry["metadata"])
        solution = getattr(worked, task)(problem)
        assert score(solution.rpartition("=")[2].strip(), entry) == 1.0, solution


def test_worked_solutions_show_the_work() -> None:
    problem = Problem(problem_id="p", question="", answer="-2", metadata={"expression": "4 + 3 - 9"})
    assert worked.chain_sum(problem) == " = 7 - 9 = -2"
    problem = Problem(problem_id="p", question="", answer="nus", metadata={"word": "sun"})
    assert worked.spell_backward(problem) == " : n u s = nus"
    problem = Problem(problem_id="p", question="", answer="1", metadata={"numbers": [12, 9, 4]})
    assert worked.gcd(problem) == " : 12 9 3 0 4 3 1 0 = 1"


# --- GRPO ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def grpo() -> GrpoAlgorithm:
    config = data_config()
    return GrpoAlgorithm(config, character_tokenizer(config))


def test_a_step_has_its_prompts_whatever_came_before(grpo: GrpoAlgorithm) -> None:
    late = grpo.prompt_groups(9, "train", range(4))
    earlier = [grpo.prompt_groups(step, "train", range(4)) for step in range(1, 9)]
    assert grpo.prompt_groups(9, "train", range(4)) == late
    assert late not in earlier
    # Two engines get two halves of the same groups.
    halves = grpo.prompt_groups(9, "train", (0, 1)) + grpo.prompt_groups(9, "train", (2, 3))
    assert halves == late
    assert [group.group for group in late] == [0, 1, 2, 3]


def test_every_problem_is_used_once_before_any_comes_again(grpo: GrpoAlgorithm) -> None:
    used = [g.problem.problem_id for step in range(1, 16) for g in grpo.prompt_groups(step, "train", range(4))]
    assert len(set(used)) == len(used) == 60
    again = [g.problem.problem_id for step in range(16, 31) for g in grpo.prompt_groups(step, "train", range(4))]
    assert sorted(again) == sorted(used)
    assert again != used


def test_samples_of_a_run_have_seeds_of_their_own(grpo: GrpoAlgorithm) -> None:
    seeds = [s for step in (1, 2, 3) for g in grpo.prompt_groups(step, "train", range(4)) for s in g.seeds]
    assert len(set(seeds)) == len(seeds) == 3 * 4 * 2


def test_validation_asks_the_same_once_each_time(grpo: GrpoAlgorithm) -> None:
    first, later = (grpo.prompt_groups(step, "validate", range(grpo.num_validation)) for step in (0, 8))
    assert first == later
    assert len(first) == 20
    assert {len(group.seeds) for group in first} == {1}
    training = {g.prompt_ids for step in range(1, 16) for g in grpo.prompt_groups(step, "train", range(4))}
    assert not training & {group.prompt_ids for group in first}


def test_a_batch_is_the_same_in_whatever_order_its_samples_came(grpo: GrpoAlgorithm) -> None:
    groups = grpo.prompt_groups(1, "train", range(4))
    messages = finished(groups, 1, "train")
    batches = []
    for order in (messages, messages[::-1], messages + messages):
        batches.append(grpo.batch(1, "train", records_of(groups, order)))
    (table, metrics), *others = batches
    assert table.advantages_S.tolist() == [1, -1] * 4  # each of two is alone against the other
    assert (metrics["reward"], metrics["accuracy"], metrics["groups_without_spread"]) == (0.5, 0.5, 0)
    assert table.prompt_lengths_S.tolist() == [len(group.prompt_ids) for group in groups for _ in range(2)]
    assert (table.lengths_S - table.prompt_lengths_S).tolist() == table.num_valid_S.tolist() == [1] * 8
    assert table.prompt_S.tolist() == [0, 0, 2, 2, 4, 4, 6, 6]
    assert table.sources == ("rollout-0", "rollout-1")
    assert table.source_S.tolist() == [0, 0, 1, 1] * 2
    assert table.command_S.tolist() == [10, 10, 11, 11] * 2
    assert list(zip(table.group_S.tolist(), table.sample_S.tolist(), strict=True)) == [divmod(i, 2) for i in range(8)]
    for other, other_metrics in others:
        assert other_metrics == metrics
        assert other.sources == table.sources
        for name, values in table.columns.items():
            np.testing.assert_array_equal(other.columns[name], values)


def test_a_prompt_group_is_made_once_until_its_step_has_trained(grpo: GrpoAlgorithm) -> None:
    first, again = (grpo.prompt_groups(1, "train", range(4)) for _ in range(2))
    assert all(one is other for one, other in zip(first, again, strict=True))
    for step in (1, 2):
        groups = grpo.prompt_groups(step, "train", range(4))
        grpo.batch(step, "train", records_of(groups, finished(groups, step, "train")))
    late = grpo.prompt_groups(1, "train", range(4))
    assert late == first
    assert late[0] is not first[0], "nothing is kept of a step that has trained"


def test_groups_of_the_same_problem_share_their_prompt(grpo: GrpoAlgorithm) -> None:
    records = [SampleRecord(scored(group, sample), "rollout-0", 1) for group in range(3) for sample in range(2)]
    nothing_S = np.zeros(6, dtype=np.float32)
    batch = batch_of_samples(
        records,
        {0: (1, 2), 1: (3,), 2: (1, 2)},
        advantages_S=nothing_S,
        rewards_S=nothing_S,
        filters_overlong=False,
    )
    assert batch.prompt_S.tolist() == [0, 0, 2, 2, 0, 0]


def test_turns_are_summed_up_where_there_may_be_several() -> None:
    settings = data_config()
    assert turn_metrics(settings, []) == {}
    settings = msgspec.structs.replace(settings, grpo=msgspec.structs.replace(settings.grpo, max_rollout_turns=3))
    groups = GrpoAlgorithm(settings, character_tokenizer(settings)).prompt_groups(1, "train", [0])
    one, two = (message.samples[0] for message in finished(groups, 1, "train"))
    three = msgspec.structs.replace(one, num_turns=3, finish_reason="turns")
    assert turn_metrics(settings, [one, two, three, three]) == {
        "avg_turns_per_sample": 2,
        "max_turns_reached_rate": 0.5,
    }


def test_validation_is_summed_up_when_the_step_is_done(grpo: GrpoAlgorithm) -> None:
    messages = finished(grpo.prompt_groups(4, "validate", range(20)), 4, "validate")
    samples = [sample for message in messages for sample in message.samples]
    assert grpo.validation_metrics(samples) == {"val_reward": 1, "val_accuracy": 1, "val_mean_generation_length": 1}
    assert grpo.validation_metrics([]) == {}


def changed(config: Config, **grpo: Any) -> Config:
    return msgspec.structs.replace(config, grpo=msgspec.structs.replace(config.grpo, **grpo))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"num_prompts_per_step": 10**9},
            "grpo.num_prompts_per_step: 1000000000 is too much: a step can have 1,048,576 sequences at most, and the "
            "data set has 60 items (grpo.num_prompts_per_step 1000000000 * grpo.num_generations_per_prompt 2 * "
            "grpo.batch_multiplier 1)",
        ),
        ({"num_generations_per_prompt": 10**9}, "grpo.num_generations_per_prompt: 1000000000 is too much: "),
        ({"num_generations_per_prompt": 10**400}, "grpo.num_generations_per_prompt: 1000"),
        ({"use_dynamic_sampling": True, "batch_multiplier": 1e300}, "grpo.batch_multiplier: 1e+300 is too much: "),
        ({"use_dynamic_sampling": True, "batch_multiplier": float("inf")}, "grpo.batch_multiplier: inf is too much: "),
        ({"num_prompts_per_step": 1 << 19, "num_generations_per_prompt": 3}, "grpo.num_prompts_per_step: 524288 is "),
    ],
)
def test_a_step_that_nobody_can_wait_for_is_refused_at_once(settings: dict[str, Any], message: str) -> None:
    assert error_of(changed(data_config(), **settings), ConfigError).startswith(message)


def test_a_batch_that_nobody_can_wait_for_is_refused_at_once() -> None:
    config = data_config("sft")
    config = msgspec.structs.replace(
        config, policy=msgspec.structs.replace(config.policy, train_global_batch_size=10**9)
    )
    assert error_of(config, ConfigError) == (
        "policy.train_global_batch_size: 1000000000 is too much: a step can have 1,048,576 sequences at most, and the "
        "data set has 60 items"
    )


def test_large_numbers_of_what_is_not_counted_take_no_time() -> None:
    config = changed(
        data_config(), max_num_steps=10**12, max_val_samples=10**12, dynamic_sampling_max_gen_batches=10**12
    )
    running = GrpoAlgorithm(config, character_tokenizer(config))
    assert (running.num_steps, running.num_validation) == (10**12, 20)
    assert len(running.prompt_groups(10**12, "train", range(4))) == 4
    many = changed(data_config(), num_prompts_per_step=100)
    groups = GrpoAlgorithm(many, load_tokenizer(many)).prompt_groups(1, "train", range(100))
    assert len({group.problem.problem_id for group in groups}) == 60, "a step may have more than there are"


# --- SFT -------------------------------------------------------------------------------------------------------------


def rows_of(batch: SampleBatch | None) -> list[tuple[list[int], list[bool]]]:
    assert batch is not None
    ends = np.cumsum(batch.lengths_S)
    return [
        (batch.token_ids_T[end - length : end].tolist(), batch.loss_mask_T[end - length : end].tolist())
        for length, end in zip(batch.lengths_S, ends, strict=True)
    ]


def test_the_loss_counts_the_solution_and_nothing_else() -> None:
    config = data_config("sft")
    tokenizer = character_tokenizer(config)
    made, metrics = DataSetAlgorithm(config, tokenizer).batch(1, "train")
    assert metrics == {}
    batch = made
    assert made.num_valid_S.tolist() == batch.num_valid().tolist()
    assert set(made.source_S.tolist()) == {-1}
    assert len(batch.lengths_S) == config.policy.train_global_batch_size
    for tokens, mask in rows_of(batch):
        prompt = text(tokenizer, itertools.compress(tokens, np.logical_not(mask)))
        solution = text(tokenizer, itertools.compress(tokens, mask))
        assert solution.startswith(" = ")
        assert solution.endswith("<eos>")
        assert eval(prompt.removeprefix("<bos>")) == int(solution.removeprefix(" = ").removesuffix("<eos>"))
        assert mask == sorted(mask)
    assert batch.advantages_S.tolist() == [1.0] * 8
    assert not batch.generation_logprobs_T.any()


def test_sft_goes_through_its_problems_and_stops_when_told() -> None:
    config = data_config("sft", num_train=64)
    running = DataSetAlgorithm(config, character_tokenizer(config))
    assert running.num_steps == 8  # one epoch of 64 in batches of 8, before max_num_steps
    used = [tuple(tokens) for step in range(1, 9) for tokens, _ in rows_of(running.batch(step, "train")[0])]
    assert len(set(used)) == 64
    assert rows_of(running.batch(3, "train")[0]) == rows_of(running.batch(3, "train")[0])
    held_out = [tuple(tokens) for tokens, _ in rows_of(running.batch(3, "validate")[0])]
    assert len(held_out) == 20
    assert not set(held_out) & set(used)


def test_sft_trains_on_solutions_of_a_file() -> None:
    rows = [{"input": f"{i} + 1", "output": f" = {i + 1}"} for i in range(9)]
    Path("sums.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    config = data_config("sft", dataset_name="jsonl", train_data_path="sums.jsonl", num_validation=1)
    tokenizer = character_tokenizer(config)
    made, _ = DataSetAlgorithm(config, tokenizer).batch(1, "train")
    assert {text(tokenizer, tokens) for tokens, _ in rows_of(made)} < {
        f"<bos>{row['input']}{row['output']}<eos>" for row in rows
    }


def test_algorithms_are_made_without_torch() -> None:
    probe = (
        "import sys; from data_harness import data_config, character_tokenizer\n"
        "from tandem.coordinator.algorithms import make_algorithm\n"
        "config = data_config('sft'); tokenizer = character_tokenizer(config)\n"
        "make_algorithm(config, tokenizer).batch(1, 'train')\n"
        "make_algorithm(data_config(), tokenizer).prompt_groups(1, 'train', range(4))\n"
        "print('torch' in sys.modules)"
    )
    path = {"PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, timeout=60, check=True, env=path
    )
    assert done.stdout.strip() == "False"
