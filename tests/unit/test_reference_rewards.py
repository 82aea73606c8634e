"""``coordinator check --show``: the reference answer itself is scored, and a reward below the best is said."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from data_harness import data_config

from tandem.common.messages import Problem, PromptGroup
from tandem.config import Config, build_config
from tandem.coordinator.preparing.reference_rewards import ReferenceRewards, reference_rewards

OWN = """
import time
from tandem.rollout.environments import Score

class Stingy:
    async def score(self, problem, response):
        print("chatter")
        return Score(reward=0.5, correct=True)

class Broken:
    def score(self, problem, response):
        raise KeyError("no such column")

class Stuck:
    def score(self, problem, response):
        time.sleep(1000)

class Ending:
    def score(self, problem, response):
        import os
        os._exit(7)

class Unlicensed:
    def __init__(self):
        raise OSError("no licence")

    def score(self, problem, response):
        return Score(reward=1.0, correct=True)
"""
JUDGE = {
    "model": "judge",
    "base_url": "http://127.0.0.1:9/v1",
    "system_prompt": "Judge.",
    "prompt": "{response}",
    "score_pattern": "(.)",
}


def config_of(*names: str, join_s: float = 120.0, **env: Any) -> Config:
    """Return the configuration of a run that these entries of ``env`` score."""
    Path("own_rewards.py").write_text(OWN)
    row = {"dataset_name": "jsonl", "data_path": "train.jsonl", "split_validation_size": 0.5}
    return build_config(
        {
            "algorithm": "grpo",
            "grpo": {"max_rollout_turns": 2, "num_prompts_per_step": 4, "num_generations_per_prompt": 2},
            "policy": {"model_name": "model", "train_global_batch_size": 8, "max_total_sequence_length": 64},
            "data": {"train": [{**row, "env_name": name} for name in names]},
            "env": {name: env.get(name, {}) for name in names},
            "cluster": {"deadlines": {"join_s": join_s}},
        }
    )


def rewards_of(config: Config, *answers: tuple[str, object]) -> ReferenceRewards:
    groups = [
        PromptGroup(
            group=number,
            problem=Problem(problem_id=f"row:{number}", question="?", answer=answer, metadata={}),
            prompt_ids=(1,),
            seeds=(1,),
            environment=name,
        )
        for number, (name, answer) in enumerate(answers)
    ]
    return reference_rewards(config, groups)


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    folders = [os.environ.get("PYTHONPATH", ""), os.getcwd()]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, folders)))


def test_a_right_answer_is_worth_the_best_and_each_of_several_is_asked_for() -> None:
    config = config_of("exact_match", "math", "math_multi_reward", exact_match={"kwargs": {"answer_after": "####"}})
    answers = [("exact_match", "seventy"), ("exact_match", ["4", "four"]), ("math", "\\frac{1}{2}"), ("math", 0.00001)]
    rewards = rewards_of(config, *answers, ("math_multi_reward", 72))
    assert rewards.notices == ()
    assert rewards.lines[0] == "row:0: 1 (correct) in env.exact_match, written as '####seventy'"
    assert [line.split(" in ")[0] for line in rewards.lines[1:4]] == [f"row:{n}: 1 (correct)" for n in (1, 2, 3)]
    assert rewards.lines[4].startswith("row:4: 3 (correct) in env.math_multi_reward"), rewards.lines[4]


def test_a_right_answer_that_is_worth_less_is_named_and_failures_are_one_line_each() -> None:
    own: dict[str, Any] = {name: {"class": f"own_rewards.{name.title()}"} for name in ("stingy", "broken")}
    own |= {"judged": {"judge": JUDGE}, "math": {"verifier_type": "english_multichoice"}}
    config = config_of("math", "calculator", "stingy", "broken", "judged", **own)
    names = ("math", "stingy", "broken", "calculator", "judged")
    rewards = rewards_of(config, *((name, "1/2" if name == "math" else "7") for name in names))
    assert [line.partition(", written")[0] for line in rewards.notices] == [
        "the reference answer of row:0 scores 0, not correct in env.math",
        "the reference answer of row:1 scores 0.5 in env.stingy",
    ]
    said = "\n".join(rewards.lines)
    assert "row:2: no reward in env.broken: KeyError: 'no such column'" in said
    assert "row:3: no reward in env.calculator: it plays several turns" in said
    assert "env.judged: a judge needs its model" in said
    assert all("\n" not in line for line in rewards.lines)


def test_an_answer_of_several_lines_is_scored_by_its_last_line() -> None:
    config = config_of("math", "exact_match")
    solution, matrix = "3 * 4 is 12.\n12", "\\begin{pmatrix}1\\\\\n2\\end{pmatrix}"
    answers = [("math", solution), ("math", matrix), ("math", "12\n"), ("math", ["7", "3\n4"]), ("exact_match", "a\nb")]
    rewards = rewards_of(config, *answers)
    assert [line.split(" in ")[0] for line in rewards.lines] == [
        "row:0: 0 (not correct)",
        "row:1: 1 (correct)",
        "row:2: 1 (correct)",
        "row:3: 0 (not correct)",
        "row:4: 1 (correct)",
    ]
    assert [line.partition(", written")[0] for line in rewards.notices] == [
        "the reference answer of row:0 scores 0, not correct in env.math",
        "the reference answer of row:3 scores 0, not correct in env.math",
    ]
    assert "'12', in a box" in rewards.notices[0]
    assert rewards.notices[0].endswith("(the last line alone: the reference answer has several)")


def test_what_never_answers_and_what_ends_its_process_do_not_hold_up_the_check() -> None:
    own = {name: {"class": f"own_rewards.{name.title()}"} for name in ("stuck", "ending")}
    ended = rewards_of(config_of("exact_match", "ending", **own), ("exact_match", "7"), ("ending", "7"))
    assert ended.lines[0].startswith("row:0: 1 (correct)"), "what came before is not lost"
    assert "no reward in env.ending: it ended the process (exit code 7)" in ended.lines[1]
    stuck = rewards_of(config_of("stuck", join_s=0.5, **own), ("stuck", "7"))
    assert stuck.lines == ("row:0: no reward in env.stuck: that takes over 0.5 s (cluster.deadlines.join_s)",)


def test_an_environment_that_cannot_be_made_is_a_problem_and_not_a_reward() -> None:
    own = {"unlicensed": {"class": "own_rewards.Unlicensed"}}
    answers = ("exact_match", "7"), ("unlicensed", "7"), ("unlicensed", "8")
    rewards = rewards_of(config_of("exact_match", "unlicensed", **own), *answers)
    assert rewards.problems == ("env.unlicensed: OSError: no licence",)
    (line,) = rewards.lines
    assert line.startswith("row:0: 1 (correct)")


def test_nothing_is_scored_where_no_environment_scores() -> None:
    config = data_config("sft")
    assert rewards_of(config, ("", "7")) == ReferenceRewards((), ())
