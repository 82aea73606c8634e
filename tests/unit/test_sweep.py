"""Sweeps: what their command lines mean, and what is refused before anything starts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tandem.common.errors import ConfigError
from tandem.coordinator.cli import main
from tandem.coordinator.sweeping.checking import MOST_RUNS, combinations, parse_sweep, representatives
from tandem.coordinator.sweeping.side_by_side import measure_memory
from tests.harness.runs.running import write_config


def test_keys_with_several_values_are_combined() -> None:
    settings = parse_sweep(["grpo.seed=1,2,3", "grpo.max_num_steps=9", "policy.optimizer.kwargs.lr=1e-6, 3e-6"])
    assert settings.fixed == ("grpo.max_num_steps=9",)
    runs = combinations(settings, Path("out"))
    assert [run.name for run in runs] == [f"seed={seed},lr={lr}" for seed in (1, 2, 3) for lr in ("1e-6", "3e-6")]
    assert runs[3].values == ("2", "3e-6")
    assert runs[3].settings == (
        "grpo.max_num_steps=9",
        "grpo.seed=2",
        "policy.optimizer.kwargs.lr=3e-6",
        "logger.log_dir=out/seed=2,lr=3e-6",
    )
    chosen = representatives(settings, runs)
    assert [{run.values[place] for run in chosen} for place in (0, 1)] == [{"1", "2", "3"}, {"1e-6", "3e-6"}]
    assert len(chosen) == 3


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("[1,2],[3]", ("[1,2]", "[3]")),
        ("{a: 1, b: 2},null", ("{a: 1, b: 2}", "null")),
        ("'a, b',c", ("'a, b'", "c")),
        ("it's,its", ("it's", "its")),
    ],
)
def test_commas_within_brackets_and_quotes_divide_nothing(text: str, values: tuple[str, ...]) -> None:
    assert parse_sweep([f"key={text}"]).swept[0].values == values
    for value in values:
        assert parse_sweep([f"key={value}", "other=1,2"]).fixed == (f"key={value}",)


def test_folders_have_names_of_their_own() -> None:
    same_ends = parse_sweep(["policy.optimizer.kwargs.lr=1,2", "value.optimizer.kwargs.lr=1,2"])
    assert combinations(same_ends, Path())[1].name == "policy.optimizer.kwargs.lr=1,value.optimizer.kwargs.lr=2"
    odd = combinations(parse_sweep(["policy.model_name=org/a,org_a,../x"]), Path())
    assert [run.name for run in odd] == ["model_name=org_a", "model_name=org_a-2", "model_name=.._x"]
    long = combinations(parse_sweep([f"{'k' * 200}=1,2"]), Path())
    assert len({run.name for run in long}) == 2
    assert max(len(run.name) for run in long) < 200


def test_what_is_no_sweep_is_refused_all_at_once() -> None:
    with pytest.raises(ConfigError) as refused:
        parse_sweep(["a=1,,2", "b=1,2,1", "c=1,2", "c=3,4", "logger.log_dir=x,y"])
    assert [line.split(":")[1].strip() for line in refused.value.problems] == ["a", "b", "c", "logger.log_dir"]
    with pytest.raises(ConfigError, match=r"no key has several values, such as grpo\.seed=1,2,3"):
        parse_sweep(["grpo.seed=1"])
    with pytest.raises(ConfigError, match=r"10,000 combinations are more than 1,000"):
        parse_sweep([f"{key}={','.join(map(str, range(100)))}" for key in "ab"])
    assert MOST_RUNS == 1_000


def test_every_combination_is_checked_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    config = str(write_config())
    assert main(["sweep", config, "grpo.sed=1,2", "loss_fn.ratio_clip_min=0.2,x", "data.num_train=64"]) == 2
    captured = capsys.readouterr()
    assert captured.err.splitlines() == [
        "error: command line: grpo.sed: unknown key; did you mean 'seed'?",
        "error: command line: loss_fn.ratio_clip_min: expected a number at least 0 and at most 1, got 'x' "
        "(in sed=1,ratio_clip_min=x and sed=2,ratio_clip_min=x)",
        "2 problems",
    ]
    # Models of one name that differ, of which each run is right by itself.
    assert main(["sweep", config, "policy.new_model.config.hidden_size=32,64"]) == 2
    assert "'model' would be 2 different new models" in capsys.readouterr().err
    # What only data shows.
    assert main(["sweep", config, "data.train_data_path=sums.jsonl,sum.jsonl"]) == 2
    assert "(in train_data_path=sum.jsonl)" in capsys.readouterr().err
    # A port for all.
    assert main(["sweep", config, "grpo.seed=1,2", "cluster.address=tcp://127.0.0.1:5555", "--jobs", "2"]) == 2
    assert "cluster.address: runs side by side cannot share a port" in capsys.readouterr().err
    assert not list(Path().glob("run*"))


def test_memory_counts_what_descendants_hold() -> None:
    block = bytearray(32 << 20)
    block[::4096] = b"x" * len(block[::4096])
    assert measure_memory(os.getpid()) > len(block)
