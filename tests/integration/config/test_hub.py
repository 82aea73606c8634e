"""A run whose model and data are names on the Hub; what may go wrong with them is in `tests/integration/hub`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tandem.observe.run_folder.journal import read_journal
from tests.harness.hub_server import HubServer, files_in
from tests.harness.runs.of_hub import coordinator_of_hub
from tests.harness.runs.running import SUMS, TINY, write_config
from tests.harness.trainers.trainer_harness import make_model

MEGATRON: dict[str, Any] = {
    "optimizer": None,
    "dtensor_cfg": {"enabled": False},
    "megatron_cfg": {"enabled": True, "optimizer": {"lr": 1.0e-3}},
}


def test_megatron_trains_a_model_from_the_hub_on_data_from_there(hub: HubServer) -> None:
    files = files_in(make_model(Path("made"), "qwen3", characters=TINY["policy"]["new_model"]["characters"]))
    model = hub.add("tiny/digits", files)
    rows = "".join(f"{json.dumps(problem)}\n" for problem in SUMS)
    data = hub.add("org/Sums", {"train.jsonl": rows.encode()}, kind="datasets")
    over = {
        "policy": {"model_name": "tiny/digits", "new_model": None, **MEGATRON},
        "data": {"dataset_name": "org/Sums", "num_train": 64, "num_validation": 16},
        "grpo": {"max_num_steps": 1},
    }
    config = write_config(over)
    checked = coordinator_of_hub("check", config)
    assert checked.returncode == 0, checked.stderr
    assert hub.bodies == [], "small files only"
    ended = coordinator_of_hub("up", config)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert [body for body in hub.bodies if body[0] == "model.safetensors"] == [
        ("model.safetensors", 0, len(files["model.safetensors"]))
    ]
    with read_journal(Path("run")) as journal:
        recorded = json.loads(journal.config_json)
    assert recorded["policy"]["model_name"] == f"tiny/digits@{model.branches['main']}"
    assert recorded["data"]["commit"] == data.branches["main"]
