"""Roles of an agent's episode: which branch is whose, what each has won, and how that compares with its group."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from agent_rollouts_harness import rollout_of
from agents_harness import seen
from rollout_harness import WAIT_S
from samples_harness import scored

from tandem.common.errors import ConfigError
from tandem.common.messages import Branch, SampleScored
from tandem.config import Config, build_config
from tandem.coordinator.algorithms.advantages import group_advantages
from tandem.coordinator.algorithms.rewards import has_spread
from tandem.coordinator.algorithms.step_batch import training_batch
from tandem.coordinator.scheduler.events import SampleRecord
from tandem.samples.recorded_shards import samples_of
from tandem.samples.sample_writing import table_of

ROLES = {"roles": ["first", "second"]}
DUEL = """
opening = [user("12")]
a = ask(opening, model=order["roles"]["first"])
b = ask(opening, model=order["roles"]["second"])   # the same words, said to another player
c = ask([*opening, assistant(a), user("3")], model="policy:first")
d = ask([*opening, assistant(b), user("4")], model="policy:second")
refused = [
    ask(opening),
    ask(opening, model=None),
    ask(opening, model="policy:third"),
    post(order["base_url"] + "/completions", {"model": "policy:first", "prompt": "12"}),
    reward(1),
    post(order["session_url"] + "/reward", {"rewards": {"first": 1}}),
    post(order["session_url"] + "/reward", {"rewards": {"first": 1, "second": "x"}}),
    post(order["session_url"] + "/reward", {"rewards": {"first": 1, "second": -0.5}, "components": {"long": 2}}),
]
note(a, b, c, d, *refused)
"""


@pytest.fixture(autouse=True)
def _in_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_each_role_has_its_own_branches_and_reward(tmp_path: Path) -> None:
    with rollout_of(tmp_path, DUEL, **ROLES) as rollout:
        (((sample, arrays)),) = rollout.run(rollout.group(0, [7])).values()
        deadline = time.monotonic() + WAIT_S
        while not seen():
            assert time.monotonic() < deadline
            time.sleep(0.01)
    ((order, answers),) = seen()
    assert order["roles"] == {"first": "policy:first", "second": "policy:second"}
    a, b, c, d = ([*answer["prompt_token_ids"], *answer["choices"][0]["token_ids"]] for answer in answers[:4])
    assert (sample.roles, sample.role_rewards) == ((0, 1), (1.0, -0.5))
    assert (sample.reward, sample.correct) == (0.25, True)
    assert sample.components == {"first": 1.0, "second": -0.5, "long": 2.0}
    rows = [arrays.take([row]).token_ids_T.tolist() for row in range(2)]
    assert rows == [c, d]
    assert (rows[0][: len(a)], rows[1][: len(b)]) == (a, b), "each continues its own response"
    expected = [
        (404, "the model 'policy' does not exist"),
        (400, "model: the policy plays several roles; name one of policy:first, policy:second"),
        (404, "the model 'policy:third' does not exist"),
        (400, "texts are of no role"),
        (422, "the reward posted has no 'rewards'; it may have 'rewards', 'reward', 'correct' and 'components'"),
        (422, "the rewards posted are of 'first'; there is one for each role: 'first', 'second'"),
        (422, "the component 'second' is 'x', not a finite number"),
        (None, None),
    ]
    for answer, (status, part) in zip(answers[4:], expected, strict=True):
        assert answer.get("status") == status
        assert part is None or part in answer["error"]["message"]


def config_of(**grpo: Any) -> Config:
    return build_config(
        {
            "grpo": {"num_prompts_per_step": 2, "num_generations_per_prompt": 4, **grpo},
            "policy": {"model_name": "model", "train_global_batch_size": 8},
            "data": {"dataset_name": "jsonl", "train_data_path": "games.jsonl", "environment": "duel"},
            "env": {"duel": {"command": ["true"], "timeout_s": 60, **ROLES}},
        }
    )


ROLES_OF = [(0, 1), (0, 1, 0), (0, 1), (1,)] * 2
"""Roles of the branches of each sample; in the last of each group, nobody asks for the first role."""
REWARDS = np.array([[1, -1], [0, 5], [0, 0], [9, 1], [1, 1], [1, 1], [1, 1], [0, 1]], dtype=np.float64)


def records(dropped: int | None = None) -> list[SampleRecord]:
    branch = Branch(prompt_length=2, num_made=1, num_tokens=3)
    made: list[SampleScored] = []
    for place, roles in enumerate(ROLES_OF):
        made.append(
            scored(
                place // 4,
                place % 4,
                prompt_length=2,
                response_length=len(roles),
                num_tokens=3 * len(roles),
                branches=(branch,) * len(roles),
                roles=roles,
                role_rewards=tuple(REWARDS[place]),
                reward=float(REWARDS[place].mean()),
                dropped=place == dropped,
            )
        )
    return [SampleRecord(rollout="rollout-0", command_id=1, scored=one) for one in made]


@pytest.mark.parametrize("leave_one_out", [True, False])
def test_a_baseline_is_over_the_same_role_in_the_group(leave_one_out: bool) -> None:
    config = config_of(use_leave_one_out_baseline=leave_one_out)
    batch, metrics = training_batch(config, 1, records(), {0: (), 1: ()})
    rows = list(zip(batch.group_S.tolist(), batch.sample_S.tolist(), batch.branch_S.tolist(), strict=True))
    assert len(rows) == 16
    of_first = group_advantages(REWARDS[None, :3, 0], leave_one_out=leave_one_out, normalize=True)[0]
    of_second = group_advantages(REWARDS[None, :4, 1], leave_one_out=leave_one_out, normalize=True)[0]
    for row, (group, sample, branch) in enumerate(rows):
        role = ROLES_OF[4 * group + sample][branch]
        expected = 0.0 if group == 1 else (of_first, of_second)[role][sample]
        assert batch.advantages_S[row] == pytest.approx(expected, abs=1e-6)
        assert batch.rewards_S[row] == REWARDS[4 * group + sample, role]
    assert metrics["groups_without_spread"] == 0.5
    assert not has_spread(config.rollout_section, [record.scored for record in records()[4:7]])


def test_a_dropped_episode_is_in_no_roles_baseline() -> None:
    batch, _ = training_batch(config_of(), 1, records(dropped=1), {0: (), 1: ()})
    of_second = group_advantages(REWARDS[None, [0, 2, 3], 1], leave_one_out=True, normalize=True)[0]
    rows = zip(batch.group_S, batch.sample_S, batch.branch_S, batch.advantages_S, batch.num_valid_S, strict=True)
    by_sample = {
        sample: value for group, sample, branch, value, _ in rows if group == 0 and ROLES_OF[sample][branch] == 1
    }
    assert by_sample[1] == 0
    assert [by_sample[sample] for sample in (0, 2, 3)] == pytest.approx(of_second.tolist(), abs=1e-6)


def test_roles_are_recorded(tmp_path: Path) -> None:
    from samples_harness import recorded, sample_of

    arrays = [sample_of(3, prompt_length=2) for _ in ROLES_OF[0]]
    sample = recorded(records()[0].scored, type(arrays[0]).concatenate(arrays))
    (again,) = samples_of(table_of([sample]))
    assert again.scored == sample.scored


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"env": {"duel": {"command": ["true"], "roles": ["a", "a"]}}}, r"env\.duel\.roles\[1\]: 'a' is named twice"),
        (
            {"env": {"duel": {"command": ["true"], "roles": ["a b"]}}},
            r"env\.duel\.roles\[0\]: 'a b' cannot name a metric",
        ),
        (
            {"env": {"duel": {"class": "mine.Duel", "roles": ["a"]}}},
            r"env\.duel\.roles: only agents' requests name their role",
        ),
        (
            {"grpo": {"adv_estimator": {"name": "gdpo"}}},
            r"grpo\.adv_estimator\.name: gdpo takes no rewards by role, which env\.duel has",
        ),
        (
            {"grpo": {"reward_shaping": {"enabled": True, "stop_properly_penalty_coef": 0.5}}},
            r"grpo\.reward_shaping\.enabled: true, but env\.duel has roles",
        ),
    ],
)
def test_what_roles_cannot_be_is_refused(changes: dict[str, Any], message: str) -> None:
    values = {
        "grpo": {},
        "policy": {"model_name": "model"},
        "data": {"dataset_name": "jsonl", "train_data_path": "games.jsonl", "environment": "duel"},
        "env": {"duel": {"command": ["true"], **ROLES}},
    }
    with pytest.raises(ConfigError, match=message):
        build_config(values | changes)
