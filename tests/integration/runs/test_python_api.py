"""Runs that a Python program begins: real processes, whose samples functions of this one score."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

import tandem
from tandem.coordinator.api.handle import Run
from tests.harness.runs.python_api_harness import ROWS, config, digits, right
from tests.harness.runs.running import TIMEOUT_S, all_gone, coordinator, steps_of, weights_of


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, list[tandem.StepRecord]]:
    """Train three steps off the main thread; return the handle, and the steps that it has yielded."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    found: list[Any] = []

    def train() -> None:
        run = tandem.train(config(folder), rewards=[digits, right], reward_weights=[1, 2], dataset=ROWS)
        found.append(run)
        found.append(list(run))

    thread = threading.Thread(target=train)
    thread.start()
    thread.join(TIMEOUT_S)
    run, steps = found
    return run, steps


def without_checkpoints(steps: list[tandem.StepRecord]) -> list[tandem.StepRecord]:
    """Return steps as they were when they were done: their checkpoints are written later."""
    return [msgspec.structs.replace(step, checkpoint="") for step in steps]


def test_a_run_off_the_main_thread_yields_its_steps(trained: tuple[Run, list[tandem.StepRecord]]) -> None:
    run, steps = trained
    assert run.state == "finished"
    assert run.error is None
    assert [step.step for step in steps] == [1, 2, 3]
    assert without_checkpoints(steps) == without_checkpoints(steps_of(run.folder))
    assert run.wait() is run
    assert "step 3/3" in run.log == run.log_path.read_text()


def test_what_is_recorded_is_what_the_functions_say(trained: tuple[Run, list[tandem.StepRecord]]) -> None:
    run, steps = trained
    answers = {row["question"]: row["answer"] for row in ROWS}
    for step in steps:
        samples = run.samples(step.step)
        assert len(samples) == 16
        for sample in samples:
            question = sample.prompt.removeprefix("<bos>").removesuffix("=")
            expected = digits(question, sample.response), float(sample.response.strip() == str(answers[question]))
            assert sample.components == {"digits": expected[0], "right": expected[1]}
            assert sample.reward == pytest.approx(expected[0] + 2 * expected[1], abs=1e-12)
            assert sample.correct == (expected[0] >= 1.0)
        mean = sum(sample.reward for sample in samples) / 16
        assert step.metrics["reward"] == pytest.approx(mean)
    assert len({sample.reward for sample in run.samples(1)}) > 2, "or nothing was compared"
    assert run.samples() == run.samples(3)
    validated = run.samples(2, validation=True)
    assert [(sample.step, sample.advantage) for sample in validated] == [(2, None)] * 8
    assert {sample.problem_id for sample in validated}.isdisjoint(sample.problem_id for sample in run.samples(2))


def test_a_handle_tells_metrics_models_and_tables(trained: tuple[Run, list[tandem.StepRecord]]) -> None:
    from transformers import AutoModelForCausalLM

    run, steps = trained
    loaded = tandem.load_run(run.folder)
    assert loaded.state == "finished"
    assert list(loaded) == loaded.steps == steps_of(run.folder)
    assert loaded.metrics("reward") == {step.step: step.metrics["reward"] for step in steps}
    with pytest.raises(KeyError, match=r"'rewards'; did you mean 'reward'"):
        loaded.metrics("rewards")
    frame = loaded.to_frame()
    assert frame["reward"].to_dict() == loaded.metrics("reward")
    assert frame.loc[2, "seconds/total"] == steps[1].seconds["total"]
    assert loaded.model_folder == run.folder / "checkpoints" / "step_3" / "policy"
    assert set(loaded.checkpoints) == {2, 3}
    assert AutoModelForCausalLM.from_pretrained(loaded.model_folder).config.hidden_size == 32
    assert "<td>reward</td>" in loaded._repr_html_()


def test_a_folder_without_a_run_is_said() -> None:
    with pytest.raises(tandem.RunFolderError, match="nowhere holds no run"):
        tandem.load_run("nowhere")


def test_such_a_run_cannot_go_on_without_its_program(trained: tuple[Run, list[tandem.StepRecord]]) -> None:
    folder = trained[0].folder
    for words in (["up", folder / "config.yaml", "--resume"], ["check", folder / "config.yaml"]):
        ended = coordinator(*words)
        assert ended.returncode == 2
        assert ended.stderr == (
            f"error: {folder}/config.yaml: data.environment: python_rewards: the reward functions (digits, right) are "
            "those of a Python program: run that, with tandem.train(..., resume=True) to continue\n"
        )


# --- what cannot be run, said before anything starts -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"overrides": {"grpo.max_num_step": 3}}, r"grpo\.max_num_step: .*did you mean 'max_num_steps'"),
        ({"overrides": ["grpo.max_num_steps=3"]}, r"^overrides: expected a dict such as"),
        ({"config": 3}, r"^config: expected a path, a dict or a Config, got 3"),
        ({"config": "missing.yaml"}, r"^missing\.yaml: there is no such file"),
        ({"rewards": [lambda response, anwser: 1.0]}, r"'anwser' is none of .*did you mean 'answer'"),
        ({"rewards": None, "reward_weights": [1.0]}, r"^reward_weights: there are no rewards"),
        ({"rewards": None}, r"env: required: GRPO needs an environment"),
        ({"resume": True, "restart": True}, r"^resume, restart: a run either goes on or begins anew"),
        ({"from_step": 2}, r"^from_step: says where to resume"),
        ({"resume": True}, r"holds no run"),
        ({"solved_at": "1"}, r"^solved_at: expected a finite number, got '1'"),
        ({"dataset": {"train": ROWS}}, r"^dataset: expected rows, got a mapping of 'train': choose one, such as"),
        ({"dataset": []}, r"^dataset: there are no rows"),
        ({"dataset": ["1 + 1"]}, r"^dataset\[0\]: expected a mapping of names to values, got '1 \+ 1'"),
        ({"dataset": [{"qestion": "1", "x": 2}]}, r"^dataset: its rows have no field 'input' .*they have qestion, x"),
        ({"dataset": [*ROWS, {"question": "1"}]}, r"^dataset\[200\]: it has no field 'answer'"),
        ({"dataset": "missing.jsonl"}, r"^data: cannot read 'missing.jsonl'"),
        ({"validation_dataset": ROWS, "dataset": None}, r"^validation_dataset: give dataset as well"),
        # Said by the process of the run, which has looked it through.
        ({"overrides": {"data.num_validation": 500}}, r"problems.*500"),
    ],
)
def test_bad_input_is_one_error(arguments: dict[str, Any], message: str) -> None:
    given = {"config": config(), "rewards": digits, "dataset": ROWS} | arguments
    with pytest.raises(tandem.TandemError, match=message) as caught:
        tandem.train(given.pop("config"), **given)
    assert "\n" not in str(caught.value)
    assert not Path("run/journal.sqlite").exists()


def test_a_run_folder_that_holds_a_run_is_not_begun_in(trained: tuple[Run, list[tandem.StepRecord]]) -> None:
    folder = trained[0].folder
    with pytest.raises(tandem.RunFolderError, match="already holds a run: continue it with resume=True"):
        tandem.train(config(folder), rewards=[digits, right], dataset=ROWS)
    with pytest.raises(tandem.RunFolderError, match=r"differs in env\.python_rewards\.kwargs\.weights$"):
        tandem.train(config(folder), rewards=[digits, right], dataset=ROWS, resume=True)
    with pytest.raises(
        tandem.ConfigError, match=r"^rewards: functions of a program \(digits, right\) score the samples"
    ):
        tandem.train(config(folder), resume=True)
    with pytest.raises(tandem.RunFolderError, match="dataset is not the one that the run began with"):
        tandem.train(config(folder), rewards=[digits, right], dataset=ROWS[:-1], resume=True)


# --- how runs end ----------------------------------------------------------------------------------------------------


class Gate:
    """A reward function that lets so many calls pass, and holds the others until it is opened."""

    __name__ = "digits"

    def __init__(self, num_calls: int) -> None:
        self._left = num_calls
        self.is_held = threading.Event()
        self.open = threading.Event()

    def __call__(self, prompt: str, response: str) -> float:
        self._left -= 1
        if self._left < 0:
            self.is_held.set()
            assert self.open.wait(TIMEOUT_S)
        return digits(prompt, response)


@pytest.fixture
def gate() -> Iterator[Gate]:
    made = Gate(16 + 5)
    yield made
    made.open.set()


def test_a_run_that_was_stopped_goes_on_to_the_same_bits(
    gate: Gate, trained: tuple[Run, list[tandem.StepRecord]]
) -> None:
    """It is stopped while step 2 is scored; when it goes on, its rows are those in the run folder."""
    with tandem.train(
        config(), rewards=[gate, right], reward_weights=[1, 2], dataset=ROWS, overrides={"env": SLOW}
    ) as run:
        assert gate.is_held.wait(TIMEOUT_S)
        assert run.state == tandem.load_run("run").state == "running"
        with pytest.raises(tandem.RunFolderError, match="another program began this run"):
            tandem.load_run("run").stop()
        run.stop()
        run.stop()
        assert run.state == "interrupted"
    gate.open.set()
    assert [step.step for step in run] == [1]
    again = tandem.train(
        config(), rewards=[digits, right], reward_weights=[1, 2], resume=True, overrides={"env": SLOW}, wait=True
    )
    assert again.state == "finished"
    assert [step.step for step in again] == [2, 3]
    assert [step.metrics["reward"] for step in again.steps] == [step.metrics["reward"] for step in trained[1]]
    assert weights_of(again.checkpoints[3]) == weights_of(trained[0].checkpoints[3])


SLOW = {"python_rewards": {"timeout_s": TIMEOUT_S}}


def test_what_a_function_raises_is_raised_to_whoever_waits(capfd: pytest.CaptureFixture[str]) -> None:
    def fails(response: str) -> float:
        raise ValueError("no such answer")

    run = tandem.train(config(), rewards=fails, dataset=ROWS)
    with pytest.raises(tandem.ServiceError, match=r"fails: ValueError: no such answer \(.*in fails\)") as caught:
        for _ in run:
            pass
    assert caught.value.process == "rollout-0"
    assert run.state == "failed"
    assert str(run.error) == str(caught.value)
    with pytest.raises(tandem.ServiceError):
        run.wait()
    said = capfd.readouterr().err
    assert said.count("Traceback") == said.count("ValueError: no such answer\n") == 1
    assert said.splitlines()[-1].startswith("run: failed: rollout-0 failed")
    # And then it is mended, in the same folder, which is set aside with its data.
    overrides = {"grpo.max_num_steps": 1}
    mended = tandem.train(config(), rewards=digits, dataset=ROWS, overrides=overrides, restart=True, wait=True)
    assert [step.step for step in mended.steps] == [1]
    assert Path("run.1/journal.sqlite").exists()


PROGRAM = """
import sys
import tandem
sys.path.insert(0, {tests!r})
from tests.harness.runs.python_api_harness import ROWS, config
{body}
"""


def program(body: str) -> list[str]:
    text = PROGRAM.format(tests=str(Path(__file__).parents[3]), body=body)
    Path("program.py").write_text(text)
    return [sys.executable, "program.py"]


def test_a_program_that_comes_to_its_end_waits_for_its_run() -> None:
    """Functions still have executors then."""
    body = """
import asyncio
async def judge(response):
    return await asyncio.to_thread(len, response)
tandem.train(config(), rewards=judge, dataset=ROWS, overrides={"grpo.max_num_steps": 1})
print("at its end", flush=True)
"""
    ended = subprocess.run(program(body), capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert (ended.returncode, ended.stdout) == (0, "at its end\n"), ended.stderr
    step, end = ended.stderr.splitlines()
    assert (step.startswith("step 1/1 "), end) == (True, "run: finished")
    assert [step.step for step in steps_of()] == [1]


def test_of_a_program_that_is_killed_nothing_stays() -> None:
    body = """
import time
def waits(response):
    print("held", flush=True)
    time.sleep(1000)
tandem.train(config(), rewards=waits, dataset=ROWS, overrides={"env.python_rewards.timeout_s": 1000}).wait()
"""
    with subprocess.Popen(program(body), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        below = psutil.Process(process.pid).children(recursive=True)
        process.kill()
    names = {" ".join(each.name().split()) for each in below if each.is_running()}
    assert len(below) >= 5, names
    assert all_gone(below, 20.0) == []
    assert os.path.exists("run/journal.sqlite")


def test_a_program_that_is_stopped_for_longer_than_heartbeats_may_be_ends_its_run_which_says_so(
    trained: tuple[Run, list[tandem.StepRecord]],
) -> None:
    """It was stopped for a moment before, and the run that is resumed ends with the weights of one without stops."""
    body = """
import time
from pathlib import Path
from tests.harness.runs.python_api_harness import digits, right
def held(prompt, response):
    print("held", flush=True)
    while Path("hold").exists():
        time.sleep(0.02)
    return digits(prompt, response)
settings = {"resume": Path("run").exists(), "overrides": {"env.python_rewards.timeout_s": 1000}}
settings["overrides"] |= {"cluster.deadlines.generate_s": 1000, "cluster.heartbeat_timeout_s": 10}
try:
    tandem.train(config(), rewards=[held, right], reward_weights=[1, 2], dataset=ROWS, **settings).wait()
except tandem.TandemError as error:
    print(f"raised {error}", flush=True)
"""
    Path("hold").touch()
    with subprocess.Popen(program(body), stdout=subprocess.PIPE, text=True) as process, contextlib.ExitStack() as stack:
        stack.callback(process.kill)
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        below = psutil.Process(process.pid).children(recursive=True)
        services = [each for each in below if each.ppid() != process.pid]  # without the child that it has to reap
        process.send_signal(signal.SIGSTOP)
        time.sleep(2.0)
        process.send_signal(signal.SIGCONT)
        assert {*all_gone(services, 12.0)} == {*services}, "the run waits for the function: there are signs of life"
        process.send_signal(signal.SIGSTOP)
        assert all_gone(services, 60.0) == [], "nothing waits for it"
        process.send_signal(signal.SIGCONT)
        *_, raised = process.stdout.read().splitlines()
    silent = r"the program that called tandem\.train\(\), .* has been silent for \d\d s: it is stopped"
    assert re.search(silent, raised), raised
    assert re.search(silent, Path("run/logs/console.log").read_text())
    Path("hold").unlink()
    ended = subprocess.run(program(body), capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.splitlines()[-1] == "run: finished"
    assert weights_of(Path("run/checkpoints/step_3")) == weights_of(trained[0].folder / "checkpoints" / "step_3")
