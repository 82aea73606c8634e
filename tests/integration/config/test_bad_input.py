"""Bad input: one clear line, before anything starts where that is possible, and nothing lost."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tandem.common.errors import RunFolderError
from tandem.common.keys import find_key_file, read_key_file
from tandem.common.messages import PROTOCOL_VERSION, Hello, ToRefit
from tandem.common.wire import Link
from tandem.common.wire import link as link_module
from tandem.observe.run_folder.journal import StepRecord
from tandem.observe.run_folder.journal_writer import Journal
from tests.harness.ports import refusing_port
from tests.harness.runs.running import (
    GYM,
    Command,
    coordinator,
    joins,
    merged,
    process_of,
    steps_of,
    typed,
    wait_until,
    write_config,
)

CHARACTERS = "0123456789+-= "


def refusal(over: dict[str, Any], *overrides: str) -> str:
    """Run a bad configuration; return its one line of error. No process was launched, no run was begun."""
    return line_of(coordinator("up", write_config(over), *overrides))


def line_of(ended: subprocess.CompletedProcess[str]) -> str:
    assert ended.returncode in (1, 2), ended.stdout + ended.stderr
    assert "launched" not in ended.stdout
    assert not Path("run").exists()
    (line,) = ended.stderr.splitlines()
    return line.removeprefix("error: ").replace(f"{Path.cwd()}/", "")


def test_an_unknown_key_names_the_nearest() -> None:
    line = refusal({"grpo": {"num_prompt_per_step": 4}})
    assert line.startswith("config.yaml: grpo.num_prompt_per_step")
    assert "did you mean 'num_prompts_per_step'?" in line


def test_a_wrong_type_names_value_and_type() -> None:
    line = refusal({"grpo": {"max_num_steps": "many"}})
    assert line.startswith("config.yaml: grpo.max_num_steps")
    assert "'many'" in line
    assert "integer" in line


def test_batches_that_do_not_divide() -> None:
    line = refusal({"policy": {"train_global_batch_size": 12}})
    assert "grpo.num_prompts_per_step" in line
    assert "16" in line
    assert "12" in line


def test_a_missing_model() -> None:
    line = refusal({"policy": {"model_name": "no/such/model", "new_model": None}})
    assert re.fullmatch(r"policy.model_name: 'no/such/model' does not exist.*", line)


def test_an_empty_dataset() -> None:
    Path("empty.jsonl").write_text("\n")
    assert "'empty.jsonl' holds no problem" in refusal({"data": {"train_data_path": "empty.jsonl"}})


def test_a_dataset_on_a_hub_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(Path("home").absolute()))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    with refusing_port() as port:
        endpoint = f"http://127.0.0.1:{port}"
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        # Typed: all this is read when its library is imported.
        line = line_of(typed("coordinator", "up", str(write_config({"data": {"dataset_name": "nobody/nothing"}}))))
    assert line.startswith("data.dataset_name: cannot load 'nobody/nothing', split 'train': ")
    assert f"{endpoint} cannot be reached (Connection refused)" in line


@pytest.mark.parametrize(
    ("endpoint", "why"),
    [
        ("", "https://huggingface.co cannot be reached"),  # as if it were not set
        ("hub.example", "HF_ENDPOINT is 'hub.example', not an address that begins with https:// or http://"),
    ],
)
def test_an_endpoint_of_the_hub_that_is_no_address(endpoint: str, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(Path("home").absolute()))
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    with refusing_port() as port:
        monkeypatch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{port}")  # the Hub is out of reach wherever this runs
        config = write_config({"policy": {"model_name": "nobody/nothing", "new_model": None}})
        line = line_of(typed("coordinator", "check", str(config)))
    assert line.startswith("policy.model_name: 'nobody/nothing' does not exist")
    assert why in line


def test_a_task_that_does_not_exist() -> None:
    assert "did you mean 'chain_sum'?" in refusal(merged(GYM, {"data": {"task": "chain_sums"}}))


def test_too_few_problems() -> None:
    line = refusal(merged(GYM, {"data": {"num_train": 5000}}))
    assert "distinct problems" in line
    assert "data.num_train" in line


def test_a_prompt_longer_than_the_context() -> None:
    line = refusal(merged(GYM, {"data": {"max_input_seq_length": 4}}))
    assert re.search(r"problem 'chain_sum-\d+': its prompt has \d+ tokens.*room for 4", line)


QUICKLY_S = 300.0
"""What hangs is killed after this."""


@pytest.mark.parametrize("kind", ["a FIFO", "a character device"])
def test_a_configuration_that_is_no_file(kind: str) -> None:
    path = Path("odd.yaml") if kind == "a FIFO" else Path("/dev/zero")
    if kind == "a FIFO":
        os.mkfifo(path)
    ended = coordinator("check", path, timeout_s=QUICKLY_S)
    assert ended.returncode == 2
    assert ended.stderr == f"error: {path}: cannot be read: it is {kind}, not a file\n"


def test_data_that_is_no_file() -> None:
    os.mkfifo("odd.jsonl")
    config = write_config({"data": {"train_data_path": "odd.jsonl"}})
    line = line_of(coordinator("up", config, timeout_s=QUICKLY_S))
    assert line == "data: cannot read 'odd.jsonl': it is a FIFO, not a file of one JSON object a line"


def test_data_that_is_not_text() -> None:
    Path("bytes.jsonl").write_bytes(b'{"input": "1 + 1", "output": "2"}\n{"input": "\xff", "output": "2"}\n')
    line = refusal({"data": {"train_data_path": "bytes.jsonl"}})
    assert line == "bytes.jsonl:2 is not UTF-8: byte 0xff at position 12 of the line"


def test_characters_that_a_new_model_does_not_know() -> None:
    line = refusal({"data": {"prompt_template": "What is {question}?"}})
    assert line == (
        "the tokenizer in model does not know 7 characters: 'Whatis?' (first in data.prompt_template); "
        "policy.new_model.characters lacks them"
    )


def test_a_chat_template_that_does_not_end() -> None:
    template = "{% for i in range(10**5) %}{% for j in range(10**5) %}{% endfor %}{% endfor %}"
    config = write_config({"policy": {"tokenizer": {"name": "model", "chat_template": template}}})
    line = line_of(coordinator("up", config, timeout_s=QUICKLY_S))
    assert re.fullmatch(
        r"policy.tokenizer.chat_template: the chat template of model takes longer than 10 s for one conversation "
        r"\(problem 'sums.jsonl:\d+'\)",
        line,
    )


@pytest.mark.parametrize("key", ["num_prompts_per_step", "num_generations_per_prompt"])
def test_a_step_that_nobody_can_wait_for(key: str) -> None:
    config = write_config({"grpo": {key: 10**9}, "policy": {"generation": {"max_stored_tokens": 10**12}}})
    line = line_of(coordinator("up", config, timeout_s=QUICKLY_S))
    assert line.startswith(f"grpo.{key}: 1000000000 is too much: a step can have 1,048,576 sequences at most")


def test_as_many_steps_as_anyone_can_name_begin_at_once() -> None:
    with Command(
        "coordinator", "up", write_config({"grpo": {"max_num_steps": 10**12, "max_val_samples": 10**12}})
    ) as run:
        run.wait_for("step 2/1000000000000 ")
        run.signal(signal.SIGINT)
        assert run.wait() == 130


def test_a_game_whose_state_is_hidden_is_played() -> None:
    """All prompts are the same, and the answer is what tells one problem from another."""
    rows = [{"input": "1 + ", "output": str(number)} for number in range(64)]
    config = write_config({"data": {"train_data_path": "games.jsonl", "num_train": 48}, "grpo": {"max_num_steps": 1}})
    Path("games.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    ended = coordinator("up", config)
    assert ended.returncode == 0, ended.stderr
    assert [step.step for step in steps_of()] == [1]


def test_a_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = coordinator("up", write_config({"cluster": {"address": f"tcp://127.0.0.1:{port}"}}))
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert line == f"error: cluster.address: cannot listen on 'tcp://127.0.0.1:{port}': the port is in use"
    assert not Path("run").exists()  # so the next attempt is a first one


def test_a_service_of_another_protocol_version_is_refused_with_both_named() -> None:
    with Command("coordinator", "up", write_config({"cluster": {"launch": "none"}})) as run:
        address = run.wait_for(r"listens on (tcp://\S+)")[1]
        other = Path("other.py")
        other.write_text(
            "import sys, tandem.common.messages as messages\n"
            f"messages.PROTOCOL_VERSION = {PROTOCOL_VERSION + 41}\n"
            "from tandem.refit.cli import main\n"
            f"sys.exit(main({joins(address)!r}))\n"
        )
        with Command("python", other) as stranger:
            assert stranger.wait() == 1
            (line,) = (line for line in stranger.output().splitlines() if "waiting for" not in line)
        assert line.startswith(f"refit: the coordinator at {address} refused this refit: refit (pid ")
        assert f"speaks protocol version {PROTOCOL_VERSION + 41}, this coordinator speaks {PROTOCOL_VERSION}" in line
        run.signal(signal.SIGINT)
        assert run.wait() == 130


def test_a_process_that_breaks_the_protocol_ends_the_run_with_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "SHUTDOWN_GRACE_S", 600.0)  # a link that is told to end would end this process
    with Command("coordinator", "up", write_config({"cluster": {"launch": "none", "max_replacements": 0}})) as run:
        address, keys = run.wait_for(r"listens on (tcp://\S+)")[1], read_key_file(find_key_file(Path("run")))
        link: Link[Any] = Link(address, "refit", "me", ToRefit, keys)
        link.join(Hello(protocol_version=PROTOCOL_VERSION, service="refit", host="here", pid=1), 30.0)
        link.send([b"junk"])
        assert run.wait() == 1
        link.close("the run is over")
    (line,) = (line for line in run.output().splitlines() if line.startswith("error: "))
    assert re.match(r"error: refit-0 failed while .*: it broke the protocol: not a message of this link: ", line), line


def test_a_reward_that_is_nan() -> None:
    Path("strange.py").write_text(
        "from tandem.rollout.environments import Score\n"
        "class NotANumber:\n"
        "    def score(self, problem, response):\n"
        "        return Score(reward=float('nan'), correct=False)\n"
    )
    ended = coordinator("up", write_config({"env": {"strange": {"class": "strange.NotANumber"}}}))
    assert ended.returncode == 1
    (line,) = ended.stderr.splitlines()
    assert line.startswith("error: rollout-0 failed while generating step 1: ")
    assert "nan" in line
    assert "'strange'" in line


def test_a_disk_that_is_full_while_saving_loses_no_earlier_checkpoint() -> None:
    config = write_config({"grpo": {"max_num_steps": 1000, "val_period": 500}, "checkpointing": {"save_period": 20}})
    with Command("coordinator", "up", config) as run:
        wait_until(lambda: Path("run/checkpoints/step_20/training.json").exists(), lambda: "the first checkpoint")
        trainer = process_of(run, "trainer")
        # No file of the trainer may grow past this: what writing to a full disk feels like.
        psutil.Process(trainer.pid).rlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        assert run.wait() == 1
        error = [line for line in run.output().splitlines() if line.startswith("error: ")]
    (line,) = error
    assert re.match(r"error: trainer-0 failed while writing step \d+: .*(File too large|No space left)", line), line
    kept = sorted(p.name for p in Path("run/checkpoints").iterdir() if p.name.startswith("step_"))
    assert "step_20" in kept
    last = max(int(name.removeprefix("step_")) for name in kept)
    assert all((Path("run/checkpoints") / name / "training.json").exists() for name in kept)
    resumed = coordinator("up", config, "--resume", f"grpo.max_num_steps={last + 1}")
    assert resumed.returncode == 0, resumed.stderr
    assert steps_of()[-1].step == last + 1


@pytest.fixture
def small_disk() -> Iterator[Path]:
    """A file system of about a megabyte."""
    folder = Path("disk").absolute()
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1200k", "tmpfs", folder], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a small disk: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


def test_a_disk_that_fills_up_with_the_whole_run_on_it(small_disk: Path) -> None:
    """Journal, logs and checkpoints share the disk, as they do unless told otherwise."""
    over = {
        "grpo": {"max_num_steps": 1000, "val_period": 0},
        "checkpointing": {"save_period": 1, "keep_top_k": None},
        "logger": {"log_dir": str(small_disk / "run")},
    }
    ended = coordinator("up", write_config(over))
    assert ended.returncode == 1
    (line,) = ended.stderr.splitlines()
    checkpoints = small_disk / "run" / "checkpoints"
    by_trainer = (
        rf"trainer-0 failed while writing step \d+: cannot write {re.escape(str(checkpoints))}/\.writing_step_.*"
    )
    by_journal = f"cannot use {re.escape(str(small_disk / 'run' / 'journal.sqlite'))}"
    whoever_is_first = rf"error: ({by_trainer}: No space left on device|{by_journal}: database or disk is full)"
    assert re.match(whoever_is_first, line), line
    assert re.search(r"continue with: coordinator up \S*config\.yaml --resume$", ended.stdout), ended.stdout
    kept = [path for path in checkpoints.iterdir() if path.name.startswith("step_")]
    assert kept
    assert all((path / "training.json").stat().st_size for path in kept)


@pytest.mark.parametrize("num_free_kib", [0, 4, 16, 64, 256])
def test_a_run_on_a_full_disk_is_refused_in_a_line_and_continues_once_there_is_room(
    small_disk: Path, num_free_kib: int
) -> None:
    """Whatever of the run is written when there is no room any more, from its folder to its journal."""
    filler = small_disk / "filler"
    with pytest.raises(OSError, match="No space left"):
        filler.write_bytes(bytes(2**21))
    os.truncate(filler, filler.stat().st_size - 1024 * num_free_kib)
    over = {"grpo": {"max_num_steps": 2}, "logger": {"log_dir": str(small_disk / "run"), "samples": "off"}}
    config = write_config(merged(over, {"checkpointing": {"enabled": False}}))
    ended = coordinator("up", config)
    assert "Traceback" not in ended.stderr
    if ended.returncode:
        (line,) = ended.stderr.splitlines()
        assert re.match(r"error: .*(No space left on device|disk is full)", line), line
    filler.unlink()
    to_continue = re.search(r"continue with: coordinator up \S*config\.yaml --resume", ended.stdout)
    options = ["--resume"] if to_continue or not ended.returncode else []
    again = coordinator("up", config, *options)
    assert again.returncode == 0, (ended.stdout, ended.stderr, again.stderr)


def commit_steps(journal: Journal, num: int) -> None:
    first = len(list(journal.steps())) + 1
    for step in range(first, first + num):
        journal.commit_step(StepRecord(step=step, version=step, metrics={"reward": 0.5}, seconds={"total": 1.0}))


def test_a_journal_on_a_full_disk_says_that_it_is_full(small_disk: Path) -> None:
    """SQLite undoes a transaction by itself after some errors, and at which statement depends on the room left."""
    filler = small_disk / "filler"
    full = re.escape(f"cannot use {small_disk / 'run' / 'journal.sqlite'}: database or disk is full")
    with Journal.create(small_disk / "run", b"{}", "grpo") as journal:
        with pytest.raises(OSError, match="No space left"):
            filler.write_bytes(bytes(2**21))
        num_pages = filler.stat().st_size // 4096
        for num_free_pages in range(4):
            os.truncate(filler, 4096 * (num_pages - num_free_pages))
            with pytest.raises(RunFolderError, match=f"^{full}$"):
                commit_steps(journal, 1000)
        filler.unlink()
        commit_steps(journal, 1)
        steps = [record.step for record in journal.steps()]
        assert steps == list(range(1, len(steps) + 1))
