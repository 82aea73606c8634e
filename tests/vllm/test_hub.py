"""A run with vLLM whose model is on the Hub."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.hub_server import files_in, hub_server
from tests.harness.runs.running import coordinator, merged, typed, write_config
from tests.vllm.run_harness import JUDGE, SEVENS

NAME = "tiny/sevens"


def test_vllm_generates_with_a_model_from_the_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    Path("judging.py").write_text(JUDGE)
    small = {"grpo": {"max_num_steps": 1}, "checkpointing": {"enabled": True, "save_period": 1}}
    made = coordinator("up", write_config(merged(SEVENS, small)))
    assert made.returncode == 0, made.stdout + made.stderr
    from_hub = {"model_name": NAME, "new_model": None, "generation": {"backend": "vllm"}}
    config = write_config(merged(merged(SEVENS, small), {"policy": from_hub, "logger": {"log_dir": "hub"}}), "hub.yaml")
    with hub_server() as hub:
        repository = hub.add(NAME, files_in(Path("run/checkpoints/step_1/policy")))
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        ended = typed("coordinator", "up", str(config))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert f"{NAME}@{repository.branches['main']}" in Path("hub/config.yaml").read_text()
    assert len([name for name, *_ in hub.bodies if name == "model.safetensors"]) == 1
