"""Models from the Hub: a real Hub client, real runs, and a Hub on loopback that fails in the ways the real one does."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

from tests.harness.hub_server import TOKEN, HubServer, files_in
from tests.harness.runs.by_hand import in_folder
from tests.harness.runs.of_hub import coordinator_of_hub, start_of_hub
from tests.harness.runs.running import (
    BIN,
    TIMEOUT_S,
    coordinator,
    wait_until,
    weights_of,
    write_config,
)

NAME = "tiny/digits"
WEIGHTS = "model.safetensors"
FROM_HUB = {"policy": {"model_name": NAME, "new_model": None}, "grpo": {"max_num_steps": 1}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a model that a run has saved."""
    folder = tmp_path_factory.mktemp("model")
    with in_folder(folder):
        ended = coordinator("up", write_config({"grpo": {"max_num_steps": 1}, "checkpointing": {"save_period": 1}}))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return folder / "run/checkpoints/step_1/policy"


def empty_cache() -> None:
    shutil.rmtree("hf")
    Path("hf").mkdir()


def up(config: Path, *words: str) -> str:
    ended = coordinator_of_hub("up", str(config), *words)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout + ended.stderr


def refused(*words: str) -> str:
    """Return the error of a command: its last line, and the only one that begins so."""
    ended = coordinator_of_hub(*words)
    assert ended.returncode in (1, 2), ended.stdout + ended.stderr
    assert "Traceback" not in ended.stderr
    return ended.stderr.split("error: ", 1)[1]


def sent(hub: HubServer) -> list[tuple[int, int]]:
    """Return which bytes of the weights were sent."""
    return [(first, last) for name, first, last in hub.bodies if name == WEIGHTS]


def changed(files: dict[str, bytes]) -> dict[str, bytes]:
    """Return the files of a model with other weights of the same shapes."""
    data = bytearray(files[WEIGHTS])
    data[-64:] = bytes(64)
    return {**files, WEIGHTS: bytes(data)}


def test_a_run_keeps_to_the_commit_that_it_began_with(
    hub: HubServer, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = files_in(model)
    repository = hub.add(NAME, {**files, "pytorch_model.bin": b"pickled", "original/x.safetensors": b"again"})
    repository.is_private = True
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    config = write_config({**FROM_HUB, "checkpointing": {"save_period": 1}})
    checked = coordinator_of_hub("check", str(config), "policy.optimizer.kwargs.lr=0.5")
    assert checked.returncode == 0, checked.stderr
    assert sent(hub) == []  # small files only
    # Its size is known when they are here.
    assert checked.stderr.count("policy.optimizer.kwargs.lr (0.5) is far too large for a model of this size") == 1
    assert f"{len(files[WEIGHTS]) / 1e6:.2f} MB are fetched before the run begins" in checked.stderr
    assert f"grpo on {NAME}@" in checked.stdout

    up(write_config({"policy": {"model_name": str(model), "new_model": None}, **_one_step()}, "local.yaml"))
    up(config, "logger.log_dir=hub")
    assert weights_of("hub/checkpoints/step_1") == weights_of("run/checkpoints/step_1")
    assert sent(hub) == [(0, len(files[WEIGHTS]))]
    assert not [line for line in hub.requests if "pytorch_model.bin" in line or "original" in line]
    commit = repository.branches["main"]
    assert Path("hub/config.yaml").read_text().count(f"{NAME}@{commit}") == 2  # the model, and its tokenizer

    repository.push(changed(files))
    before = len(hub.requests)
    up(config, "logger.log_dir=hub", "--resume", "grpo.max_num_steps=2")
    assert len(hub.requests) == before  # what is there is not asked for
    up(write_config({"policy": {"model_name": str(model), "new_model": None}}, "local.yaml"), "--resume", *_two_steps())
    assert weights_of("hub/checkpoints/step_2") == weights_of("run/checkpoints/step_2")
    replayed = coordinator_of_hub("replay", "hub", "logger.log_dir=again")
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    assert weights_of("again/checkpoints/step_2") == weights_of("hub/checkpoints/step_2")

    # A run that begins now is of the newer commit; of the older one where it says so, without a Hub too.
    assert f"at {repository.branches['main'][:8]}" in coordinator_of_hub("check", str(config)).stderr
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    up(config, "logger.log_dir=offline", f"policy.revision={commit}")
    assert weights_of("offline/checkpoints/step_1") == weights_of("hub/checkpoints/step_1")


def _one_step() -> dict[str, Any]:
    return {"grpo": {"max_num_steps": 1}, "checkpointing": {"save_period": 1}}


def _one_step_words() -> tuple[str, ...]:
    return ("grpo.max_num_steps=1", "checkpointing.save_period=1")


def _two_steps() -> tuple[str, ...]:
    return ("grpo.max_num_steps=2", "checkpointing.save_period=1")


def test_each_node_fetches_into_its_own_cache(hub: HubServer, model: Path, tmp_path: Path) -> None:
    hub.add(NAME, files_in(model))
    config = write_config({**FROM_HUB, "cluster": {"launch": "none", "address": "tcp://127.0.0.1:*"}})
    log = Path("coordinator.log")
    with log.open("wb") as out:
        processes = [subprocess.Popen([BIN / "coordinator", "up", str(config)], stdout=out, stderr=out)]
    try:
        wait_until(lambda: "--key-file" in log.read_text(), lambda: "the coordinator to listen")
        line = next(each for each in log.read_text().splitlines() if "--key-file" in each)
        joining = line[line.index("--coordinator") :].split()
        path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), os.getcwd()]))
        elsewhere = {**os.environ, "HF_HOME": str(tmp_path / "another"), "PYTHONPATH": path}
        for kind in ("refit", "trainer", "rollout"):
            with Path(f"{kind}.log").open("wb") as out:
                processes.append(subprocess.Popen([BIN / kind, *joining], env=elsewhere, stdout=out, stderr=out))
        assert processes[0].wait(TIMEOUT_S) == 0, log.read_text()
        for process in processes[1:]:
            process.wait(TIMEOUT_S)
    finally:
        for process in processes:
            process.kill()
            process.wait(TIMEOUT_S)
    assert sent(hub) == 2 * [(0, len(files_in(model)[WEIGHTS]))]  # once for each node, whatever its processes


def test_what_is_wrong_is_one_line(hub: HubServer, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = files_in(model)
    hub.add(NAME, files)
    hub.add("tiny/private", files, is_private=True)
    hub.add("tiny/gated", files, is_gated=True)
    hub.add("tiny/pickled", {**{name: files[name] for name in files if name != WEIGHTS}, "pytorch_model.bin": b"x"})
    config = str(write_config(FROM_HUB))

    def check(name: str, *words: str) -> str:
        return refused("check", config, f"policy.model_name={name}", *words)

    nothing = "policy.model_name: 'tiny/nothing' does not exist, and neither policy.new_model nor prerequisite makes it"
    absent = "{0!r} on " + hub.url + ", or it is private and HF_TOKEN is not a token that may read it"
    assert check("tiny/nothing") == f"{nothing}; there is no model {absent.format('tiny/nothing')}\n"
    assert absent.format("tiny/private") in check("tiny/private")
    assert f"'tiny/gated' is gated: accept its terms at {hub.url}/tiny/gated, and set HF_TOKEN" in check("tiny/gated")
    assert f"'{NAME}' has no branch, tag or commit 'v2'" in check(f"{NAME}@v2")
    assert f"'{NAME}' has no branch, tag or commit 'v3'" in check(NAME, "policy.revision=v3")
    assert "revision is 'v3', and the name says 'v2'" in check(f"{NAME}@v2", "policy.revision=v3")
    # All at once, with what else is wrong.
    several = check("tiny/nothing", "policy.tokenizer.name=tiny/neither", "logger.log_dir=/proc/run")
    assert [key for key in ("policy.model_name", "policy.tokenizer.name", "logger.log_dir") if key in several] == [
        "policy.model_name",
        "policy.tokenizer.name",
        "logger.log_dir",
    ]
    pickled = refused("up", config, "policy.model_name=tiny/pickled")
    assert "no *.safetensors, and weights in other formats are not read (it has pytorch_model.bin)" in pickled
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "'tiny/other' is not in the cache of the Hub" in check("tiny/other")
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    unreachable = check("tiny/other")
    assert "http://127.0.0.1:9 cannot be reached" in unreachable
    assert unreachable.count("\n") == 1


def test_a_hub_that_is_broken_leaves_the_cache(hub: HubServer, model: Path) -> None:
    hub.add(NAME, files_in(model))
    config = str(write_config(FROM_HUB))
    hub.is_broken = True
    assert f"{NAME!r} is not in the cache of the Hub" in (said := refused("check", config))
    assert f"{hub.url} answers with error 503" in said
    hub.is_broken = False
    up(Path(config), *_one_step_words())
    hub.is_broken = True
    checked = coordinator_of_hub("check", config, "logger.log_dir=other")
    assert checked.returncode == 0, checked.stderr
    assert f"{NAME} is taken from the cache, at " in checked.stderr
    assert f"{hub.url} answers with error 503" in checked.stderr


def test_a_disk_that_is_full_is_one_line(hub: HubServer, model: Path) -> None:
    hub.add(NAME, files_in(model))
    config = write_config(FROM_HUB)
    # The kernel refuses to let files grow, as a full disk does; what describes the model still fits.
    num_blocks = len(files_in(model)[WEIGHTS]) // 1024 // 2
    command = f"ulimit -f {num_blocks}; exec {BIN / 'coordinator'} up {config}"
    ended = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "File too large" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert not Path("run").exists()
    up(config)  # with room again it goes on


def test_a_connection_that_breaks_is_taken_up_where_it_broke(hub: HubServer, model: Path) -> None:
    more = "more.safetensors"  # large enough to be written in parts
    hub.add(NAME, {**files_in(model), more: save({"unused": torch.zeros(6_000_000)})})
    hub.cuts[more] = [16_000_000]
    config = write_config(FROM_HUB)
    ended = coordinator_of_hub("up", str(config))
    (first, cut), (again, last) = ((first, last) for name, first, last in hub.bodies if name == more)
    assert (first, cut, last) == (0, 16_000_000, len(hub.repositories["models", NAME].commits.popitem()[1][more]))
    assert 0 < again <= cut
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_fetching_that_is_killed_is_done_again(hub: HubServer, model: Path) -> None:
    files = files_in(model)
    hub.add(NAME, files)
    hub.hold = threading.Event()
    config = write_config(FROM_HUB)
    process = start_of_hub("up", config)
    try:
        wait_until(lambda: bool(hub.bodies), lambda: "half of the weights to be sent")
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(TIMEOUT_S)
    hub.hold.set()
    hub.hold = None
    up(config)
    assert sent(hub)[-1][1] == len(files[WEIGHTS])


def test_of_two_runs_that_want_a_model_one_fetches_it(hub: HubServer, model: Path) -> None:
    files = files_in(model)
    hub.add(NAME, files)
    hub.hold = threading.Event()
    config = write_config(FROM_HUB)
    processes = [
        start_of_hub("up", config, f"logger.log_dir={name}", f"checkpointing.checkpoint_dir={name}")
        for name in ("one", "two")
    ]
    try:
        wait_until(lambda: bool(hub.bodies), lambda: "one of them to fetch the weights")
        hub.hold.set()
        assert [process.wait(TIMEOUT_S) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
            process.wait(TIMEOUT_S)
    half = len(files[WEIGHTS]) // 2
    assert sent(hub) == [(0, half), (half, len(files[WEIGHTS]))]


def test_other_commands_take_names_of_the_hub(hub: HubServer, model: Path) -> None:
    hub.add(NAME, files_in(model))
    config = str(write_config(FROM_HUB))
    planned = coordinator_of_hub("plan", config)
    assert planned.returncode == 0, planned.stderr
    assert "no config.json of it is here" not in planned.stdout
    assert sent(hub) == []
    evaluated = coordinator_of_hub("eval", config, "--model", NAME, str(model))
    assert evaluated.returncode == 0, evaluated.stdout + evaluated.stderr
    results = [json.loads(path.read_text()) for path in Path("run/eval").glob("*.json")]
    assert results, list(Path("run/eval").iterdir())
    missing = refused("serve", "tiny/nothing")
    assert "tiny/nothing: there is no such folder" in missing
    assert "there is no model 'tiny/nothing'" in missing
    empty_cache()
    trained = up(write_config({**FROM_HUB, "policy": {**FROM_HUB["policy"], **_lora()}}, "lora.yaml"), *_saved("lora"))
    assert f"fetching {NAME}" in trained
    adapters = json.loads(Path("lora/checkpoints/step_1/policy/adapter_config.json").read_text())
    repository = hub.repositories["models", NAME]
    assert (adapters["base_model_name_or_path"], adapters["revision"]) == (NAME, repository.branches["main"])
    empty_cache()
    merged = coordinator_of_hub("merge", "lora", "merged")
    assert merged.returncode == 0, merged.stdout + merged.stderr
    assert (Path("merged") / WEIGHTS).is_file()


def _lora() -> dict[str, Any]:
    return {"dtensor_cfg": {"lora_cfg": {"enabled": True, "dim": 4, "alpha": 8}}}


def _saved(run: str) -> tuple[str, ...]:
    return (f"logger.log_dir={run}", "checkpointing.save_period=1")
