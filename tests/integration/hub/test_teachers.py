"""Teachers by environment (``on_policy_distillation.teacher_model_by_agent_name``) whose names are names on the Hub."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tandem.observe.run_folder.journal import read_journal
from tests.harness.hub_server import HubServer, files_in
from tests.harness.runs.of_hub import coordinator_of_hub
from tests.harness.runs.running import TINY, weights_of, write_config
from tests.harness.trainers.trainer_harness import make_model

CHARACTERS = TINY["policy"]["new_model"]["characters"]
KEY = "teacher_model_by_agent_name"
FOLDERS = {"policy": "made/policy", "sums": "made/sums", "products": "made/products"}
ENVIRONMENT = """
from tandem.rollout.environments import Score

class Any:
    def score(self, problem, response):
        return Score(reward=0.0, correct=False)
"""


@pytest.fixture(autouse=True)
def models(hub: HubServer) -> None:
    """Have a policy and two teachers on the Hub."""
    for layers, (name, folder) in enumerate(FOLDERS.items(), 1):
        model = make_model(Path(folder), "llama", characters=CHARACTERS, num_hidden_layers=layers)
        hub.add(f"tiny/{name}", files_in(model))


def config_of(algorithm: str, names: dict[str, str], folder: str) -> str:
    """Write a configuration in which each of two environments has the teacher of its name."""
    Path("marking.py").write_text(ENVIRONMENT)
    sets = []
    for name in ("sums", "products"):
        rows = [{"input": f"{number} + {number}", "output": "1"} for number in range(8)]
        Path(f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        sets.append({"dataset_name": "ResponseDataset", "data_path": f"{name}.jsonl", "env_name": name})
    section: dict[str, Any] = {"num_prompts_per_step": 8, "num_generations_per_prompt": 2, "max_num_steps": 1}
    over: dict[str, Any] = {"distillation": section | {"topk_logits_k": 5}, "loss_fn": {"kl_type": "reverse"}}
    if algorithm == "grpo":
        over = {"grpo": section | {"adv_estimator": {"name": "opd"}}}
    config = write_config(
        {
            **over,
            "algorithm": algorithm,
            "policy": {"model_name": names["policy"], "new_model": None},
            "data": {"dataset_name": None, "task": None, "train": sets, "validation": None, "environment": None},
            "env": {name: {"class": "marking.Any"} for name in ("sums", "products")},
            "on_policy_distillation": {"enabled": True, KEY: {name: names[name] for name in ("sums", "products")}},
            "checkpointing": {"save_period": 1},
            "logger": {"log_dir": folder},
        },
        f"{folder}.yaml",
    )
    return str(config)


@pytest.mark.parametrize("algorithm", ["distillation", "grpo"])
def test_they_are_fetched_and_teach_what_the_same_folders_teach(hub: HubServer, algorithm: str) -> None:
    named = {name: f"tiny/{name}@main" for name in FOLDERS}
    config = config_of(algorithm, named, "hub")
    checked = coordinator_of_hub("check", config)
    assert checked.returncode == 0, checked.stderr
    for name in ("sums", "products"):
        assert f"note: on_policy_distillation.{KEY}.{name}: tiny/{name} is at " in checked.stderr
    assert hub.bodies == []
    done = coordinator_of_hub("up", config)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(size for _, first, size in hub.bodies if first == 0) == sorted(
        len(hub.repositories["models", f"tiny/{name}"].commits.copy().popitem()[1]["model.safetensors"])
        for name in FOLDERS
    )
    with read_journal(Path("hub")) as journal:
        recorded = json.loads(journal.config_json)["on_policy_distillation"][KEY]
    commits = {name: hub.repositories["models", f"tiny/{name}"].branches["main"] for name in FOLDERS}
    assert recorded == {name: f"tiny/{name}@{commits[name]}" for name in ("sums", "products")}

    done = coordinator_of_hub("up", config_of(algorithm, FOLDERS, "local"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert weights_of("hub/checkpoints/step_1") == weights_of("local/checkpoints/step_1")
    swapped = FOLDERS | {"sums": FOLDERS["products"], "products": FOLDERS["sums"]}
    done = coordinator_of_hub("up", config_of(algorithm, swapped, "swapped"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert weights_of("hub/checkpoints/step_1") != weights_of("swapped/checkpoints/step_1"), "each teaches its own"


def test_a_teacher_that_is_not_there_is_named_by_its_environment(hub: HubServer) -> None:
    config = config_of("distillation", {**FOLDERS, "sums": "tiny/none", "products": "made/product"}, "run")
    refused = coordinator_of_hub("check", config)
    assert refused.returncode == 2, refused.stdout
    key = f"error: on_policy_distillation.{KEY}"
    assert f"{key}.sums: 'tiny/none' does not exist; there is no model 'tiny/none' on {hub.url}" in refused.stderr
    assert f"{key}.products: 'made/product' does not exist; did you mean 'made/products'?" in refused.stderr
