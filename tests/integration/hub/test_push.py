"""Models that are pushed to a Hub on loopback by the real client, and used from there, as in docs/hub.md.

The client sends large files by the LFS protocol here (HF_HUB_DISABLE_XET): the other one is a service of its own.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.hub_server import TOKEN, HubServer, files_in
from tests.harness.runs.running import coordinator, typed, write_config

NAME = "org/digits"
WEIGHTS = "model.safetensors"


def push(*words: str) -> tuple[int, str]:
    """Return the exit code of a push, and what it has printed, its errors last."""
    ended = typed("coordinator", "push", *words)
    assert "Traceback" not in ended.stderr
    return ended.returncode, ended.stdout + ended.stderr


def test_a_run_is_pushed_and_read_from_the_hub(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    steps = {"grpo": {"max_num_steps": 2}, "checkpointing": {"save_period": 1}}
    ended = coordinator("up", write_config(steps))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    code, printed = push("run", NAME)
    assert (code, printed) == (1, f"error: {printed[7:]}")
    assert "there is no token; set HF_TOKEN" in printed
    assert hub.repositories == {}

    monkeypatch.setenv("HF_TOKEN", TOKEN)
    code, printed = push("run", NAME, "--private")
    assert code == 0, printed
    repository = hub.repositories["models", NAME]
    assert repository.is_private
    checkpoint = Path("run/checkpoints/step_2/policy")
    assert repository.commits[repository.branches["main"]] == files_in(checkpoint)
    commit = repository.branches["main"][:8]
    assert f"run/checkpoints/step_2 is {NAME}@{commit}, the newest of main: {hub.url}/{NAME}/commit/{commit}" in printed

    # On a branch, weights of an earlier push do not stay behind.
    repository.push({**files_in(checkpoint), "model-00001-of-00002.safetensors": b"old"}, "tried")
    code, printed = push("run/checkpoints/step_1", f"{NAME}@tried", "--message", "An earlier one")
    assert code == 0, printed
    earlier = files_in(Path("run/checkpoints/step_1/policy"))
    assert repository.commits[repository.branches["tried"]] == earlier
    assert repository.commits[repository.branches["main"]] == files_in(checkpoint)
    assert hub.messages == ["Push run-step_2", "An earlier one"]

    from_hub = {"policy": {"model_name": NAME, "new_model": None}, "logger": {"log_dir": "again"}}
    ended = typed("coordinator", "check", str(write_config(from_hub, "again.yaml")))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert f"OK: grpo on {NAME}@{commit}" in ended.stdout


def test_what_cannot_be_pushed_is_said_on_one_line(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_of_somebody_else")
    folder = Path("model")
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / WEIGHTS).write_bytes(b"weights")
    code, printed = push("model", NAME)
    assert (code, printed.splitlines()[-1]) == (
        1,
        f"error: {NAME} was not pushed: HF_TOKEN is not a token that may write to it",
    )
    for words, why in [
        (["model", "name"], "error: 'name' is no name of a repository: expected OWNER/NAME or OWNER/NAME@BRANCH\n"),
        (["modle", NAME], "error: modle: there is no such folder; did you mean "),
    ]:
        code, printed = push(*words)
        assert code == 1
        assert printed.startswith(why)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert push("model", NAME) == (1, "error: model was not pushed: HF_HUB_OFFLINE is set\n")
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    code, printed = push("model", NAME)
    why = "error: model was not pushed: http://127.0.0.1:9 cannot be reached (Connection refused)\n"
    assert (code, printed) == (1, why)
    assert hub.repositories == {}
