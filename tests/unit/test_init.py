"""Starting configurations: whatever is chosen, what is written passes `coordinator check`."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import yaml

from tandem.common.distribution import install_command
from tandem.config import load_config
from tandem.config.schema import NewModel
from tandem.coordinator import cli
from tandem.launch.starting import ALGORITHMS, ENGINES, ENVIRONMENTS, ROLLS_OUT, TASKS, is_installed
from tandem.samples.model_files import write_new_model
from tests.harness.runs.at_terminal import Terminal

Init = Callable[..., Path]
FILES = ("problems.jsonl", "problems.csv")
NAMES = "grpo, sft, dpo, ppo, rm, distillation"
COORDINATOR = Path(sys.executable).parent / "coordinator"
_OF_NUMBERS = [task for task in TASKS if task != "spell_backward"]
COMBINATIONS = [
    *product(["grpo"], [f"--task={task}" for task in TASKS], ["new", "model"], ENGINES, [None]),
    *product(["grpo"], [f"--from={file}" for file in FILES], ["new", "model"], ENGINES, ENVIRONMENTS),
    *product(
        ["sft"],
        [*(f"--task={task}" for task in TASKS), *(f"--from={file}" for file in FILES)],
        ["new", "model"],
        [None],
        [None],
    ),
    *product(
        ["ppo", "distillation"],
        [*(f"--task={task}" for task in TASKS), "--from=problems.jsonl"],
        ["new", "model"],
        ["transformers"],
        [None],
    ),
    *product(
        ["dpo", "rm"],
        [*(f"--task={task}" for task in _OF_NUMBERS), *(f"--from=pairs-{file}" for file in FILES)],
        ["new", "model"],
        [None],
        [None],
    ),
]
"""Every one of the choices that are offered."""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in a folder with data of each kind, and a model; what the command adds to the path is taken back."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    rows = [{"question": f'What is {i} + 1, "né"?', "answer": str(i + 1)} for i in range(40)]
    pairs = [{"prompt": f"{i} + 1 =", "chosen": str(i + 1), "rejected": str(i + 2)} for i in range(40)]
    for name, items in (("problems", rows), ("pairs-problems", pairs)):
        Path(f"{name}.jsonl").write_text("".join(f"{json.dumps(item)}\n" for item in items))
        lines = [
            ",".join(items[0]),
            *(",".join('"' + value.replace('"', '""') + '"' for value in item.values()) for item in items),
        ]
        Path(f"{name}.csv").write_text("\n".join(lines))
    letters = "".join(map(chr, range(32, 127))) + "é\n"
    write_new_model(Path("model"), NewModel(config={"model_type": "qwen3"}, characters=letters))
    return tmp_path


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_combination_that_is_offered_passes_the_check(algorithm: str, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = [combination for combination in COMBINATIONS if combination[0] == algorithm]
    assert len(chosen) >= 10
    for number, (_, source, model, engine, environment) in enumerate(chosen):
        words = ["init", f"{number}.yaml", f"--algorithm={algorithm}", source, f"--model={model}"]
        words += ["--teacher=model"] * (algorithm == "distillation" and model == "model")
        words += [f"--engine={engine}"] * bool(engine) + [f"--environment={environment}"] * bool(environment)
        assert cli.main(words) == 0, capsys.readouterr().err
        text = Path(f"{number}.yaml").read_text()
        assert yaml.safe_load(text)["algorithm"] == algorithm
        assert _uncommented(text) == [], "each key has a line of its own"
        capsys.readouterr()
        code, said = cli.main(["check", f"{number}.yaml"]), capsys.readouterr()
        if engine == "vllm" and not is_installed("vllm"):
            missing = f"policy.generation.backend: vllm, but vLLM is not installed; {install_command('vllm')}"
            assert (code, said.err) == (2, f"error: {missing}\n"), (words, said)
        else:
            # The rows are few here, so that passes over them end a run before its steps do, or fill no step.
            noted = [line for line in said.err.splitlines() if not any(each in line for each in OF_FEW_ROWS)]
            assert (code, noted) == (0, []), (words, said)
            made = f"results/{number}/model"
            if algorithm in ROLLS_OUT:
                step = "step_20" if algorithm == "distillation" else "latest"
                made = f"results/{number}_sft/checkpoints/{step}/policy"
            assert said.out.startswith(f"OK: {algorithm} on {made if model == 'new' else 'model'}, ")


OF_FEW_ROWS = ("but the run ends after", "each step takes some of them several times")

LORA = [("grpo", "new"), *product(("grpo", "ppo", "sft", "dpo"), ["model"])]


@pytest.mark.parametrize(("algorithm", "model"), LORA)
def test_adapters_alone_are_trained(algorithm: str, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["init", "x.yaml", f"--algorithm={algorithm}", f"--model={model}", "--lora"]) == 0
    assert _uncommented(Path("x.yaml").read_text()) == []
    assert load_config("x.yaml", to_run=False).policy.adapters is not None
    capsys.readouterr()
    assert cli.main(["check", "x.yaml"]) == 0, capsys.readouterr().err


def _uncommented(text: str) -> list[str]:
    """Return the lines with a key that nothing explains: no section, and no argument of a library."""
    lines = text.splitlines()
    found = []
    for before, line in zip(["", *lines], lines, strict=False):
        is_section, in_library = line.rstrip().endswith(":"), line.startswith("      ") and "new_model" in text
        if (
            ":" in line
            and "#" not in line
            and not before.lstrip().startswith("#")
            and not is_section
            and not in_library
        ):
            found.append(line)
    return found


def test_nothing_is_overwritten(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "mine.yaml").write_text("mine")
    assert cli.main(["init", "mine.yaml"]) == 2
    assert capsys.readouterr().err == "error: mine.yaml already exists, and is not overwritten: name another file\n"
    assert (here / "mine.yaml").read_text() == "mine"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            ["--algorithm", "grp"],
            f"--algorithm: 'grp' is not one of {NAMES}; did you mean 'grpo'?",
        ),
        (["--engine", "vlm"], "--engine: 'vlm' is not one of transformers, vllm; did you mean 'vllm'?"),
        (["--task", "chain_sums"], "data.task: reasoning-gym has no task 'chain_sums'; did you mean 'chain_sum'?"),
        (["--model", "modell"], "--model modell: there is no config.json in it"),
        (["--algorithm", "dpo", "--task", "spell_backward"], "--task spell_backward: dpo needs worse solutions too"),
        (["--from", "pairs-problems.csv"], "pairs-problems.csv:2 has the fields prompt, chosen, rejected"),
        (["--algorithm", "rm", "--model", "model", "--lora"], "--lora: a reward model trains an output of its own"),
        (["--algorithm", "sft", "--lora"], "--lora: adapters need a trained model"),
        (["--algorithm", "distillation", "--model", "model"], "--teacher: distillation needs one"),
        (["--teacher", "model"], "--teacher model: grpo has no teacher"),
        (["--from", "nothing.jsonl"], "data: cannot read 'nothing.jsonl'"),
    ],
)
def test_what_cannot_be_is_said_and_nothing_written(
    words: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["init", "x.yaml", *words]) in (1, 2)
    said = capsys.readouterr().err
    assert expected in said
    assert said.count("\n") == 1
    assert not Path("x.yaml").exists()


def test_a_new_model_has_its_sft_before_grpo(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["init", "mine.yaml", "--from", "problems.csv"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "mine_sft.yaml is written: SFT, which comes first and makes the model"
    first, then = (load_config(name, to_run=False) for name in ("mine_sft.yaml", "mine.yaml"))
    assert (first.algorithm, first.policy.model_name) == ("sft", "results/mine_sft/model")
    assert first.policy.new_model is not None
    assert (then.algorithm, then.policy.new_model) == ("grpo", None)
    assert then.policy.model_name == "results/mine_sft/checkpoints/latest/policy"
    assert yaml.safe_load(Path("mine.yaml").read_text())["prerequisite"] == "mine_sft.yaml"
    assert (first.data.input_key, first.data.output_key) == (then.data.input_key, then.data.output_key)
    assert cli.main(["init", "other.yaml", "--model", "model"]) == 0
    assert not Path("other_sft.yaml").exists()
    Path("third_sft.yaml").write_text("mine")
    assert cli.main(["init", "third.yaml"]) == 2
    assert "third_sft.yaml already exists" in capsys.readouterr().err
    assert not Path("third.yaml").exists()


def test_on_a_terminal_what_is_not_given_is_asked_for() -> None:
    with Terminal(COORDINATOR, "init", "asked.yaml", "--model", "new") as terminal:
        terminal.read_until(r"algorithm \[grpo\]: ")
        terminal.type("sft\n")
        terminal.read_until(r"file \[chain_sum\]: ")
        terminal.type("problems.csv\n")
        terminal.read_to_the_end()
        assert terminal.process.wait(60) == 0, terminal.seen
    assert "learn from worked solutions" in terminal.seen
    assert "engine" not in terminal.seen, "sft generates nothing"
    written = yaml.safe_load(Path("asked.yaml").read_text())
    assert (written["algorithm"], written["data"]["train_data_path"]) == ("sft", "problems.csv")
    assert (written["data"]["input_key"], written["data"]["output_key"]) == ("question", "answer")


def test_what_cannot_be_is_asked_again_at_once() -> None:
    answers = [
        (
            r"algorithm \[grpo\]: ",
            "gpro",
            f"algorithm: 'gpro' is not one of {NAMES}; did you mean 'grpo'?",
        ),
        (r"algorithm \[grpo\]: ", "", ""),
        (r"file \[chain_sum\]: ", "chain_sums", "reasoning-gym has no task 'chain_sums'; did you mean 'chain_sum'?"),
        (r"file \[chain_sum\]: ", "problem.csv", "cannot read 'problem.csv'"),
        (r"file \[chain_sum\]: ", "problems.csv", ""),
        (r"model \[new\]: ", "modell", "model modell: there is no config.json in it"),
        (r"model \[new\]: ", "model", ""),
        (r"engine \[transformers\]: ", "vlm", "engine: 'vlm' is not one of transformers, vllm; did you mean 'vllm'?"),
        (r"engine \[transformers\]: ", "", ""),
        (r"environment \[exact_match\]: ", "math", ""),
    ]
    with Terminal(COORDINATOR, "init") as terminal:
        before = ""
        for question, answer, objection in answers:
            terminal.read_until(rf"(?s){re.escape(before)}.*{question}")
            terminal.type(f"{answer}\n")
            before = objection
        terminal.read_to_the_end()
        assert terminal.process.wait(60) == 0, terminal.seen
    written = yaml.safe_load(Path("tandem.yaml").read_text())
    assert (written["policy"]["model_name"], *written["env"]) == ("model", "math")


def test_ctrl_c_at_a_question_writes_nothing() -> None:
    with Terminal(COORDINATOR, "init") as terminal:
        terminal.read_until(r"algorithm \[grpo\]: ")
        assert "Traceback" not in terminal.interrupt()
        assert terminal.process.wait(60) == 130
    assert not Path("tandem.yaml").exists()
