"""Data sets of the Hub: the real `datasets` and a Hub on loopback, from the configuration to a replay."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tandem.config import config_from_json
from tandem.observe.run_folder.journal import read_journal
from tests.harness.hub_server import TOKEN, HubServer, Repository
from tests.harness.ports import refusing_port
from tests.harness.runs.of_hub import coordinator_of_hub, program_of_hub
from tests.harness.runs.running import steps_of, write_config

PROBE = """
import sys
from tandem.config import load_config
from tandem.common.errors import TandemError
from tandem.samples.data_sets import load_problems
from tandem.launch.preparing.hub_data import find_data

for overrides in {overrides!r}:
    try:
        config, notices = find_data(load_config("config.yaml", overrides), "new")
        problems = load_problems(config)
        print(problems.train[0].question, config.data.commit or "none", notices)
    except TandemError as error:
        print(error)
"""


LATER = "+100"
"""What questions of a later commit end with."""


def rows(last: str = "") -> bytes:
    """Return problems; those of another commit are told by what their questions end with."""
    sums = [f"{one}+{two}" for one in range(10) for two in range(8)]
    return "".join(f"{json.dumps({'input': f'{each}{last}', 'output': '1'})}\n" for each in sums).encode()


def sums_on(server: HubServer, name: str = "org/Sums", **how: bool) -> Repository:
    return server.add(name, {"train.jsonl": rows(), "README.md": b"# Sums\n"}, kind="datasets", **how)


def configured(**data: Any) -> Path:
    """Write a configuration of a run on a data set of the Hub."""
    section = {"dataset_name": "org/Sums", "num_train": 48, "num_validation": 16, **data}
    return write_config({"data": section, "grpo": {"max_num_steps": 2}})


def probed(*overrides: list[str], **environment: str) -> list[str]:
    """Return what a process, which has these settings of the Hub, says of the data of some configurations."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        done = program_of_hub(PROBE.format(overrides=overrides))
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def commit_in(run: str) -> str | None:
    with read_journal(Path(run)) as journal:
        return config_from_json(journal.config_json).data.commit


def test_a_connection_that_breaks_costs_no_row(hub: HubServer) -> None:
    sums_on(hub)
    configured()
    hub.cuts["train.jsonl"] = [100]
    (said,) = probed([])
    assert said.startswith(("0+", "1+", "2+", "3+", "4+", "5+", "6+", "7+", "8+", "9+")), said
    sent = [(first, last) for name, first, last in hub.bodies if name == "train.jsonl"]
    assert sent[0] == (0, 100), "it broke off"
    assert sent[-1][1] == len(rows()), "it was taken up again, to the end"


def test_a_run_keeps_its_commit_when_the_branch_moves(hub: HubServer) -> None:
    repository = sums_on(hub)
    first = repository.branches["main"]
    config = str(configured())
    checked = coordinator_of_hub("check", config)
    assert checked.returncode == 0, checked.stderr
    begun = coordinator_of_hub("up", config)
    assert begun.returncode == 0, begun.stdout + begun.stderr
    assert commit_in("run") == first
    # Whoever reads the newer commit finds no column of the name that the configuration says.
    second = repository.push({"train.jsonl": b'{"other": "1"}\n' * 80})
    assert second != first
    resumed = coordinator_of_hub("up", config, "grpo.max_num_steps=3", "--resume")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert [record.step for record in steps_of("run")][-1] == 3
    assert commit_in("run") == first
    replayed = coordinator_of_hub("replay", "run", "--from", "0", "--to", "1")
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    (replay,) = Path().glob("run-replay*")
    assert commit_in(str(replay)) == first


def test_revisions_and_lists_of_data_sets(hub: HubServer) -> None:
    repository = sums_on(hub)
    first = repository.branches["main"]
    second = repository.push({"train.jsonl": rows(LATER)}, branch="v2")
    configured()
    listed = "data={train: [{dataset_name: org/Sums, revision: v2}], num_validation: 16}"
    found = probed([], ["data.revision=v2"], [f"data.revision={first}"], [listed])
    assert [line.split()[1] for line in found] == [first, second, first, second]
    assert [line.split()[0].endswith(LATER) for line in found] == [False, True, False, True]
    # Without a network, each commit is read as it is: the library alone would return what it has prepared last.
    offline = probed([f"data.commit={first}"], [f"data.commit={second}"], HF_HUB_OFFLINE="1")
    assert [line.split()[0].endswith(LATER) for line in offline] == [False, True]


def test_what_cannot_be_had_is_one_line(hub: HubServer) -> None:
    sums_on(hub)
    sums_on(hub, "org/Gated", is_gated=True)
    sums_on(hub, "org/Private", is_private=True)
    config = str(configured())
    gated, private = ["data.dataset_name=org/Gated"], ["data.dataset_name=org/Private"]
    lines = probed(gated, private, ["data.dataset_name=org/Missing"], ["data.revision=v9"])
    assert len(lines) == 4
    for name, line in zip(("org/Gated", "org/Private", "org/Missing", "org/Sums"), lines, strict=True):
        assert line.startswith(f"data.dataset_name: cannot load '{name}', split 'train': ")
    assert "gated" in lines[0]
    assert "set HF_TOKEN" in lines[0]
    assert "HF_TOKEN" in lines[1]
    assert f"there is no data set 'org/Missing' on {hub.url}" in lines[2]
    assert lines[3].endswith("'org/Sums' has no branch, tag or commit 'v9'")
    told = coordinator_of_hub("check", config, "data.dataset_name=org/Missing")
    assert (told.returncode != 0, told.stderr) == (True, f"error: {lines[2]}\n")
    assert all(re.match(r"\d\+\d [0-9a-f]{40} ", line) for line in probed(gated, private, HF_TOKEN=TOKEN))


def test_a_hub_that_is_out_of_reach(hub: HubServer, tmp_path: Path) -> None:
    first = sums_on(hub).branches["main"]
    configured()
    (warm,) = probed([])
    (offline,) = probed([], HF_HUB_OFFLINE="1")
    assert offline.split()[:2] == warm.split()[:2]
    assert warm.split()[1] == first
    with refusing_port() as port:
        nowhere = f"http://127.0.0.1:{port}"
        kept, unknown = probed([], ["data.revision=v2"], HF_ENDPOINT=nowhere)
    assert kept.split()[1] == first
    assert "is taken from the cache" in kept
    assert f"{nowhere} cannot be reached" in unknown
    (cold,) = probed([], HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path / "empty"))
    assert cold.startswith("data.dataset_name: cannot load 'org/Sums', split 'train': ")


def test_a_full_disk(hub: HubServer) -> None:
    large = b"".join(rows(f"+{index}") for index in range(100))
    hub.add("org/Large", {"train.jsonl": large}, kind="datasets")
    configured(dataset_name="org/Large")
    limited = PROBE.format(overrides=[[]]).replace(
        "import sys\n",
        "import resource, signal, sys\nsignal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))\n",
        1,
    )
    done = program_of_hub(limited)
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    assert line.startswith("data.dataset_name: cannot load 'org/Large', split 'train': File too large")
    assert "HF_HOME" in line


def test_a_branch_of_a_model_is_known_offline(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = hub.add("org/Model", {"config.json": b"{}", "tokenizer.json": b"{}"}).branches["main"]
    program = (
        "from tandem.config.models import hub\n"
        "snapshot = hub.resolve(hub.HubReference('org/Model'))\n"
        "hub.is_offline() or hub.fetch_description(snapshot)\n"
        "print(snapshot.commit)\n"
    )
    for offline in (False, True):
        if offline:
            monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        done = program_of_hub(program)
        assert done.stdout.split() == [commit], done.stderr
