"""``check`` and ``up`` say at once which keys are wrong and which models, data sets and classes do not exist."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.harness.hub_server import HubServer, files_in, hub_server
from tests.harness.runs.running import PPO, TINY, merged, typed, write_config
from tests.harness.trainers.trainer_harness import make_model

CHARACTERS = TINY["policy"]["new_model"]["characters"]
NAME = "tiny/digits"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    """Serve a Hub with one model, and let commands ask it, with an empty cache."""
    with hub_server() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        for name in ("HF_HUB_OFFLINE", "HF_TOKEN", "HF_HUB_CACHE"):
            monkeypatch.delenv(name, raising=False)
        server.add(NAME, files_in(make_model(Path("models/digits"), "llama", characters=CHARACTERS)))
        yield server


def problems(command: str, config: Path, *words: str) -> list[str]:
    # The library of the Hub reads where the Hub is once, as it is imported: a command of its own.
    ended = typed("coordinator", command, config.name, *words)
    assert ended.returncode in (1, 2), ended.stdout
    assert "Traceback" not in ended.stderr
    lines = [line for line in ended.stderr.splitlines() if not line.startswith("note: ")]
    if len(lines) > 1:
        assert lines.pop() == f"{len(lines)} problems"
    return [line.removeprefix("error: ") for line in lines]


def test_six_kinds_of_mistakes_are_named_at_once(hub: HubServer) -> None:
    Path("base.yaml").write_text(yaml.safe_dump({"env": {"reward_model": {"model_name": "models/digit"}}}))
    Path("problems.jsonl").touch()
    over: dict[str, Any] = {
        "defaults": "base.yaml",
        "grpo": {"num_prompt_per_step": 4, "val_period": "often"},
        "policy": {
            "model_name": "tiny/digit",
            "new_model": None,
            "tokenizer": {"name": "models/digitz"},
        },
        "cluster": {"address": "127.0.0.1"},
        "data": {"dataset_name": "jsonl", "task": None, "train_data_path": "problem.jsonl", "environment": "mine"},
        "env": {"mine": {"class": "mine.Missing"}},
    }
    config = write_config(over)
    for command in ("check", "up"):
        lines = problems(command, config, "policy.generation.backend=transformerz")
        nowhere = (
            "'tiny/digit' does not exist, and neither policy.new_model nor prerequisite makes it; there is no model "
        )
        expected = [
            "config.yaml: grpo.num_prompt_per_step: unknown key; did you mean 'num_prompts_per_step'?",
            "config.yaml: grpo.val_period: expected an integer at least 0, got 'often'",
            "command line: policy.generation.backend: 'transformerz' is not one of ",
            "config.yaml: cluster.address: '127.0.0.1' is not tcp://host:port",
            f"config.yaml: policy.model_name: {nowhere}'tiny/digit' on {hub.url}",
            "config.yaml: policy.tokenizer.name: 'models/digitz' does not exist; did you mean 'models/digits'?",
            "config.yaml: data.train_data_path: 'problem.jsonl' does not exist; did you mean 'problems.jsonl'?",
            "config.yaml: env.mine.class: cannot import 'mine.Missing': No module named 'mine'",
        ]
        for begin in expected:
            assert [line for line in lines if line.startswith(begin)], "\n".join([begin, *lines])
        assert len(lines) == len(expected), lines
    assert hub.bodies == [], "nothing is fetched"


WRONG = {"policy": {"generation": {"max_new_tokens": "many"}}}
SAID = "config.yaml: policy.generation.max_new_tokens: expected an integer at least 1, got 'many'"
DISTILLATION = {
    "algorithm": "distillation",
    "distillation": {"num_prompts_per_step": 8, "num_generations_per_prompt": 2, "max_num_steps": 1},
}


DRAFT = {"method": "draft_model", "model": "models/draft", "num_speculative_tokens": 3}


@pytest.mark.parametrize(
    ("over", "key"),
    [
        (merged(PPO, {"value": {"model_name": "tiny/critic"}}), "value.model_name: 'tiny/critic'"),
        ({**DISTILLATION, "teacher": {"model_name": "tiny/teacher"}}, "teacher.model_name: 'tiny/teacher'"),
        (
            {"data": {"environment": "reward_model"}, "env": {"reward_model": {"model_name": "models/judge"}}},
            "env.reward_model.model_name: 'models/judge'",
        ),
        (
            {"policy": {"draft": {"enabled": True, "model_name": "models/draft"}}},
            "policy.draft.model_name: 'models/draft'",
        ),
        (
            {"policy": {"generation": {"backend": "vllm", "vllm_kwargs": {"speculative_config": DRAFT}}}},
            "policy.generation.vllm_kwargs.speculative_config.model: 'models/draft'",
        ),
    ],
    ids=["value", "teacher", "reward model", "draft", "draft of vLLM"],
)
def test_a_model_of_every_place_is_looked_for_beside_a_wrong_key(
    hub: HubServer, over: dict[str, Any], key: str
) -> None:
    lines = problems("check", write_config(merged(over, WRONG)))
    assert SAID in lines
    assert [line for line in lines if line.startswith(f"config.yaml: {key} does not exist")], lines


def test_a_data_set_of_the_hub_is_looked_for_beside_a_wrong_key_and_a_missing_model(hub: HubServer) -> None:
    data = {"dataset_name": "tiny/sums", "task": None}
    over = {"data": data, "policy": {"model_name": "tiny/nothing", "new_model": None}}
    asked = [
        f"data.dataset_name: cannot load 'tiny/sums', split 'train': there is no data set 'tiny/sums' on {hub.url}"
    ]
    asked.append("policy.model_name: 'tiny/nothing' does not exist, ")
    for wrong, where in ((WRONG, "config.yaml: "), ({}, "")):
        lines = problems("check", write_config(merged(over, wrong)))
        for begin in asked:
            assert [line for line in lines if line.startswith(f"{where}{begin}")], (begin, lines)


def test_a_hub_that_never_answers_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setenv("HF_HOME", "hf")
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        over = {
            "policy": {"model_name": "tiny/digits", "new_model": None},
            "data": {"dataset_name": "a/b", "task": None},
        }
        lines = problems("check", write_config(merged(over, WRONG)))
    assert SAID in lines
    assert [line for line in lines if "policy.model_name: " in line and "cannot be reached" in line], lines


def test_a_stand_in_for_a_required_key_is_not_looked_for() -> None:
    lines = problems("check", write_config({"policy": {"model_name": 3, "new_model": None}}))
    assert lines == ["config.yaml: policy.model_name: expected text, got 3"]
