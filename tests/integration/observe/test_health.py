"""A run that learns nothing, on purpose: it goes on, and says what it lacks."""

from __future__ import annotations

from pathlib import Path

from tandem.observe.run_folder.journal import read_journal
from tests.harness.runs.running import coordinator, write_config

CONSTANT = """
from tandem.rollout.environments import Score

class Constant:
    '''Whatever the response is, it is worth a half.'''

    def score(self, problem, response):
        return Score(reward=0.5, correct=False)
"""


def test_a_run_whose_rewards_are_all_equal_says_so_once() -> None:
    over = {"env": {"constant": {"class": "constant.Constant"}}, "grpo": {"max_num_steps": 8}}
    config = write_config(over)
    Path("constant.py").write_text(CONSTANT)
    ended = coordinator("up", config)
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    (number,) = [number for number, line in enumerate(lines) if line.startswith("warning: ")]
    assert lines[number] == (
        "warning: for 5 steps all rewards of a step have been equal, at last 0.5: no sample is better than another; "
        "look at env.constant, and data.prompt_template, which asks for the answer"
    )
    assert lines[number - 1].startswith("step 5/8")
    with read_journal(Path("run")) as journal:
        assert [text for _, _, text in journal.events() if text.startswith("warning: ")] == [lines[number]]
