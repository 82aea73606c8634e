"""Models of the Hub in every place that names one, and fetches of models in several files that are interrupted."""

from __future__ import annotations

import json
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from tandem.config import load_config
from tandem.observe.run_folder.journal import read_journal
from tests.harness.hub_server import HubServer, files_in
from tests.harness.ports import free_port
from tests.harness.reward_models import write_reward_model
from tests.harness.runs.at_terminal import Terminal
from tests.harness.runs.of_hub import coordinator_of_hub, program_of_hub, start_of_hub, start_program
from tests.harness.runs.running import (
    BIN,
    PPO,
    TIMEOUT_S,
    TINY,
    merged,
    wait_until,
    write_config,
)
from tests.harness.trainers.trainer_harness import make_model

CHARACTERS = TINY["policy"]["new_model"]["characters"]
NAME = "tiny/digits"
FROM_HUB: dict[str, Any] = {"policy": {"model_name": NAME, "new_model": None}, "grpo": {"max_num_steps": 1}}
NUM_SHARDS = 10
"""More than the library of the Hub fetches at once."""

FOUND = """
from pathlib import Path
from tandem.config import load_config
from tandem.launch.preparing.needed_models import find_on_hub
found, _ = find_on_hub(load_config("config.yaml"), "new", None)
for each in (found.policy.model_name, found.policy.tokenizer.name, found.settings_of("value").model_name):
    print(Path(each).name)
"""


def tiny(folder: str = "digits", **sizes: int) -> dict[str, bytes]:
    """Return the files of a model that speaks of digits."""
    return files_in(make_model(Path("made") / folder, "llama", characters=CHARACTERS, **sizes))


def sharded(folder: str) -> dict[str, bytes]:
    """Return the same with weights in several files."""
    files = tiny(folder, num_hidden_layers=NUM_SHARDS)
    model = AutoModelForCausalLM.from_pretrained(Path("made") / folder)
    model.save_pretrained(Path("made") / "shards", max_shard_size="15KB")
    shards = files_in(Path("made") / "shards")
    assert len([name for name in shards if name.endswith(".safetensors")]) >= NUM_SHARDS
    return {name: data for name, data in files.items() if not name.endswith(".safetensors")} | shards


def checked(*words: str) -> str:
    ended = coordinator_of_hub("check", *words)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stderr


def up(*words: str) -> str:
    ended = coordinator_of_hub("up", *words)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def fetched(hub: HubServer) -> list[str]:
    """Return the names of the repositories whose weights were sent, as the commands said."""
    return [name for name, first, _ in hub.bodies if first == 0]


def test_a_value_model(hub: HubServer) -> None:
    hub.add(NAME, tiny())
    hub.add("tiny/critic", tiny("critic", hidden_size=48))
    over = {"policy": FROM_HUB["policy"], "ppo": {"max_num_steps": 1}, "value": {"model_name": "tiny/critic@main"}}
    config = str(write_config(merged(PPO, over)))
    said = checked(config)
    assert "policy.model_name: tiny/digits is at " in said
    assert "value.model_name: tiny/critic is at " in said
    assert fetched(hub) == []
    up(config)
    assert len(fetched(hub)) == 2
    commit = hub.repositories["models", "tiny/critic"].branches["main"]
    with read_journal(Path("run")) as journal:
        assert json.loads(journal.config_json)["value"]["model_name"] == f"tiny/critic@{commit}"


def test_teachers(hub: HubServer) -> None:
    hub.add(NAME, tiny())
    for number in (1, 2):
        hub.add(f"tiny/teacher{number}", tiny(f"teacher{number}", num_hidden_layers=number))
    teacher = {"model_name": "tiny/teacher1", "revision": "main", "logprob_batch_size": 4}
    section = {"num_prompts_per_step": 8, "num_generations_per_prompt": 2, "max_num_steps": 1, "topk_logits_k": 5}
    over = {"algorithm": "distillation", "policy": FROM_HUB["policy"], "distillation": section, "teacher": teacher}
    config = str(write_config({**over, "loss_fn": {"kl_type": "reverse"}}))
    assert "teacher.model_name: tiny/teacher1 is at " in checked(config)
    assert fetched(hub) == []
    up(config)
    assert len(fetched(hub)) == 2
    with read_journal(Path("run")) as journal:
        recorded = journal.config_json.decode()
    commit = hub.repositories["models", "tiny/teacher1"].branches["main"]
    assert f"tiny/teacher1@{commit}" in recorded


def test_a_reward_model(hub: HubServer) -> None:
    hub.add(NAME, tiny())
    hub.add("tiny/judge", files_in(write_reward_model(Path("made/judge"))))
    entry = {"model_name": "tiny/judge", "precision": "float32", "tokenizer": {"name": "tiny/judge"}}
    over = {**FROM_HUB, "data": {"prompt_template": "{question} = "}, "env": {"reward_model": entry}}
    over["cluster"] = {"deadlines": {"build_s": 200.0}}
    config = str(write_config(over))
    assert "env.reward_model.model_name: tiny/judge is at " in checked(config)
    assert fetched(hub) == []
    up(config)
    assert len(fetched(hub)) == 2
    commit = hub.repositories["models", "tiny/judge"].branches["main"]
    with read_journal(Path("run")) as journal:
        assert json.loads(journal.config_json)["env"]["reward_model"]["model_name"] == f"tiny/judge@{commit}"
    causal = coordinator_of_hub("check", config, f"env.reward_model.model_name={NAME}")
    assert causal.returncode != 0
    assert "not a sequence classifier" in causal.stderr


def test_a_fetch_of_several_files_that_was_killed_is_gone_on_with(hub: HubServer) -> None:
    files = sharded("large")
    shards = sorted(name for name in files if name.endswith(".safetensors"))
    hub.add(NAME, files)
    hub.hold, hub.is_held = threading.Event(), lambda name: name not in shards[:2]
    config = str(write_config(FROM_HUB))
    process = start_of_hub("up", config)
    blobs = Path("hf/hub/models--tiny--digits/snapshots")
    try:
        wait_until(lambda: len([*blobs.glob("*/*.safetensors")]) == 2, lambda: "two files to be there")
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(TIMEOUT_S)
    hub.hold.set()
    hub.hold = None
    wait_until(lambda: not hub.connections, lambda: "the server to see that the process is gone")
    hub.bodies.clear()
    checked(config)
    assert hub.bodies == []
    up(config)
    assert sorted(name for name, *_ in hub.bodies) == shards[2:]


def test_another_command_does_not_take_part_of_a_model_for_all_of_it(hub: HubServer) -> None:
    files = sharded("large")
    shards = sorted(name for name in files if name.endswith(".safetensors"))
    hub.add(NAME, files)
    hub.hold, hub.is_held = threading.Event(), lambda name: name not in shards[:1]
    program = f"from tandem.config.models import hub; print(hub.fetch_whole({NAME!r}, print))"
    process = start_program(program)
    snapshots = Path("hf/hub/models--tiny--digits/snapshots")
    try:
        wait_until(lambda: bool([*snapshots.glob("*/*.safetensors")]), lambda: "one file to be there")
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(TIMEOUT_S)
    hub.hold.set()
    hub.hold = None
    done = program_of_hub(program)
    assert done.returncode == 0, done.stderr
    folder = Path(done.stdout.splitlines()[-1])
    assert sorted(path.name for path in folder.glob("*.safetensors")) == shards


def test_check_says_what_could_not_be_fetched(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    files = tiny()
    hub.add(NAME, files).declared["model.safetensors"] = 10**18
    others = {name: data for name, data in files.items() if name != "model.safetensors"}
    hub.add("tiny/pickled", {**others, "pytorch_model.bin": b"x"})
    config = str(write_config(FROM_HUB))
    for command in ("check", "up"):
        large = coordinator_of_hub(command, config)
        assert large.returncode == 1, large.stdout
        assert f"error: policy.model_name: {NAME!r} does not exist" not in large.stderr
        assert "needs 1000000000.00 GB, but " in large.stderr
        assert "(set HF_HOME to another folder)" in large.stderr
        pickled = coordinator_of_hub(command, config, "policy.model_name=tiny/pickled")
        assert pickled.returncode == 1, pickled.stdout
        assert "'tiny/pickled' has no *.safetensors" in pickled.stderr
        for ended in (large, pickled):
            assert ended.stderr.split("error: ", 1)[1].count("\n") == 1
    assert hub.bodies == []
    planned = coordinator_of_hub("plan", config)  # of a model that this machine could not hold
    assert planned.returncode == 0, planned.stderr
    assert "no config.json of it is here" not in planned.stdout
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for command in ("check", "up"):
        offline = coordinator_of_hub(command, config)
        assert offline.returncode == 1, offline.stdout
        assert "the cache of the Hub has not all weights" in offline.stderr
        assert "HF_HUB_OFFLINE is set" in offline.stderr


def test_a_starting_configuration_takes_a_name(hub: HubServer) -> None:
    hub.add(NAME, tiny())
    written = coordinator_of_hub("init", "begun.yaml", "--model", f"{NAME}@main", "--task", "chain_sum")
    assert written.returncode == 0, written.stderr
    assert load_config("begun.yaml").policy.model_name == f"{NAME}@main"
    assert hub.bodies == []
    refused = coordinator_of_hub("init", "more.yaml", "--model", "tiny/nothing")
    assert refused.returncode != 0
    assert "--model tiny/nothing: there is no such folder, and there is no model 'tiny/nothing' on " in refused.stderr
    assert refused.stderr.count("\n") == 1


def test_two_models_of_one_name_may_be_of_different_commits(hub: HubServer) -> None:
    files = tiny()
    hub.add(NAME, files).push({**files, "README.md": b"later"}, "v2")
    over = {"policy": FROM_HUB["policy"], "ppo": {"max_num_steps": 1}, "value": {"model_name": NAME, "revision": "v2"}}
    write_config(merged(PPO, over))
    done = program_of_hub(FOUND)
    branches = hub.repositories["models", NAME].branches
    assert done.stdout.split() == [branches["main"], branches["main"], branches["v2"]], done.stderr


def test_a_terminal_shows_a_bar(hub: HubServer) -> None:
    hub.add(NAME, tiny())
    hub.hold = threading.Event()
    with Terminal(BIN / "coordinator", "up", write_config(FROM_HUB)) as terminal:
        shown = terminal.read_until(rf"fetching {NAME} at [0-9a-f]{{8}}[\s\S]*\d+%\|")  # both may come at once
        hub.hold.set()
        shown += terminal.read_until("step 1/1")
        terminal.read_to_the_end()
        assert terminal.process.returncode == 0
    assert "100%|" in shown


def test_serve_and_chat_take_names(hub: HubServer) -> None:
    files = tiny()
    repository = hub.add(NAME, files)
    first = repository.branches["main"]
    repository.push({**files, "README.md": b"later"})
    with Terminal(BIN / "coordinator", "serve", f"{NAME}@{first}", "--port", str(free_port())) as terminal:
        terminal.read_until(rf"fetching {NAME} at {first[:8]}")
        terminal.read_until("serving digits")
        terminal.interrupt()
    sent = len(hub.bodies)
    with Terminal(BIN / "coordinator", "chat", NAME, "--max-tokens", "4") as terminal:
        terminal.read_until(r"talking to [^\n]*\n> ")
        terminal.type("/quit\n")
        terminal.read_to_the_end()
        assert terminal.process.returncode == 0
    assert len(hub.bodies) == sent, "the weights of the newer commit are the same file"
