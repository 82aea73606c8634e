"""Callbacks, the progress line, and a model object: runs of `tandem.train`, with real processes."""

from __future__ import annotations

import contextlib
import io
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tandem
from tandem.common.errors import ConfigError
from tandem.coordinator.api.callbacks import ProgressLine
from tests.harness.runs.python_api_harness import ROWS, config, digits
from tests.harness.runs.running import TIMEOUT_S, weights_of


class Noting(tandem.Callback):
    """What it was told, in order."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.threads: set[threading.Thread] = set()

    def on_start(self, run: tandem.Run) -> None:
        self.told.append("start")

    def on_step(self, run: tandem.Run, step: tandem.StepRecord) -> None:
        self.threads.add(threading.current_thread())
        self.told.append(("step", step.step, step.metrics["reward"]))

    def on_validation(self, run: tandem.Run, step: tandem.StepRecord) -> None:
        self.told.append(("validation", step.step, step.metrics["val_accuracy"]))

    def on_end(self, run: tandem.Run) -> None:
        self.told.append(("end", run.state))


class Raising(tandem.Callback):
    def on_step(self, run: tandem.Run, step: tandem.StepRecord) -> None:
        raise ValueError(f"no step {step.step}")


class Stopping(tandem.Callback):
    def on_step(self, run: tandem.Run, step: tandem.StepRecord) -> None:
        if step.step == 1:
            run.stop(wait=False)


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> tuple[tandem.Run, Noting, str]:
    """Train three steps with callbacks; return the handle, what one was told, and what stderr shows."""
    noting, folder, err = Noting(), tmp_path_factory.mktemp("told") / "run", io.StringIO()
    with contextlib.redirect_stderr(err):
        run = tandem.train(config(folder), rewards=digits, dataset=ROWS, callbacks=[Raising(), noting], wait=True)
    return run, noting, err.getvalue()


def test_callbacks_are_told_of_everything_in_order_and_one_that_raises_ends_nothing(
    told: tuple[tandem.Run, Noting, str],
) -> None:
    run, noting, err = told
    expected: list[Any] = ["start"]
    for step in run.steps:
        if step.step:
            expected.append(("step", step.step, step.metrics["reward"]))
        if "val_accuracy" in step.metrics:
            expected.append(("validation", step.step, step.metrics["val_accuracy"]))
    assert noting.told == [*expected, ("end", "finished")]
    assert any(each[0] == "validation" for each in noting.told)
    assert noting.threads.isdisjoint({threading.main_thread()})
    assert err.count("Traceback") == 1
    assert err.count("callbacks[0] (Raising) raised ValueError: no step") == 3
    assert "step 3/3" in err, "the progress line is on by default"
    assert f"{run.folder}: finished" in err


def test_a_callback_asks_to_stop_and_a_model_object_is_saved_equal_to_the_bit(
    told: tuple[tandem.Run, Noting, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    settings = config(tmp_path / "run", grpo={"max_num_steps": 500})
    made = told[0].model_folder
    model, tokenizer = AutoModelForCausalLM.from_pretrained(made), AutoTokenizer.from_pretrained(made)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    run = tandem.train(
        settings,
        rewards=digits,
        dataset=ROWS,
        model=model,
        tokenizer=tokenizer,
        callbacks=[Stopping()],
        progress=False,
    )
    run.wait(TIMEOUT_S)
    assert run.state == "interrupted"
    assert 1 <= run.steps[-1].step < 500
    assert "step 1/500" not in capsys.readouterr().err
    (saved,) = (run.folder / "models").iterdir()
    assert run.config.policy.model_name == str(saved) == run.config.policy.tokenizer.name
    again = AutoModelForCausalLM.from_pretrained(saved).state_dict()
    assert list(again) == list(before)
    assert all(torch.equal(again[name], tensor) for name, tensor in before.items())
    assert AutoTokenizer.from_pretrained(saved).get_vocab() == tokenizer.get_vocab()
    assert [*tmp_path.glob(".model-*")] == []
    assert weights_of(run.model_folder.parent), "or it was not trained from there"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"callbacks": Stopping()}, "callbacks: expected a list of callbacks, got one"),
        ({"callbacks": [Stopping]}, r"callbacks\[0\]: expected an object, got the class: write Stopping\(\)"),
        ({"callbacks": [print]}, r"callbacks\[0\]: expected a tandem.Callback"),
        ({"model": "Qwen/Qwen3-0.6B"}, "model: expected a transformers.PreTrainedModel.* policy.model_name"),
        ({"tokenizer": 3}, "tokenizer: expected a transformers.PreTrainedTokenizerBase"),
    ],
)
def test_arguments_that_cannot_be_used_are_refused_before_anything_starts(
    arguments: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=said):
        tandem.train(config(tmp_path / "run"), rewards=digits, dataset=ROWS, **arguments)
    assert not (tmp_path / "run").exists()


def test_a_terminal_gets_one_line_and_a_file_few() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    algorithm = SimpleNamespace(max_num_steps=3)
    run: Any = SimpleNamespace(
        folder=Path("run"), state="finished", error=None, config=SimpleNamespace(algorithm_section=algorithm)
    )
    import ipykernel.iostream  # noqa: F401 — a program that has it imported is no notebook for that

    steps = [tandem.StepRecord(step=n, version=n, metrics={"reward": n / 4}, seconds={"total": 1.0}) for n in (1, 2, 3)]
    shown = {}
    for file in (Terminal(), io.StringIO()):
        line = ProgressLine(file)
        for step in steps:
            line.on_step(run, step)
        line.on_end(run)
        shown[file.isatty()] = file.getvalue()
    at_terminal, in_file = shown[True], shown[False]
    assert [at_terminal.count(f"\rstep {n}/3") for n in (1, 2, 3)] == [1, 1, 1]
    assert at_terminal.count("\n") == 2
    assert [line for line in in_file.splitlines() if "step 2" not in line] == [
        *(line for line in in_file.splitlines() if line.startswith(("step 1/3", "step 3/3"))),
        "run: finished",
    ]
    assert in_file.count("step 1/3") == in_file.count("step 3/3") == 1
    assert "\r" not in in_file
