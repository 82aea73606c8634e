"""Running Tandem for real: a tiny configuration, the console commands, and what a run leaves behind."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from tandem.common.keys import find_key_file
from tandem.common.process_lifetime import is_waiting_for_disk
from tandem.launch.child import ForkedChild
from tandem.observe.run_folder.journal import StepRecord, read_journal
from tests.harness.runs import consoles

TIMEOUT_S, _DEADLINE_S = 500.0, 300.0
"""Longest times of a command, and of what a run waits for: machines may have much else to do."""
_STALL_S = float(os.environ.get("TANDEM_TEST_STALL_S", "0"))
"""Seconds that a test then takes to see what it has waited for, as on a machine that has stalled it."""
BIN = Path(sys.executable).parent
_TICK_S = 0.05
_PROCESSES = "tests.harness.processes."

TINY: dict[str, Any] = {
    "grpo": {
        "num_prompts_per_step": 4,
        "num_generations_per_prompt": 4,
        "max_num_steps": 3,
        "val_period": 2,
        "max_val_samples": 8,
        "seed": 7,
    },
    "loss_fn": {"reference_policy_kl_penalty": 0.0},
    "policy": {
        "model_name": "model",
        "new_model": {
            "characters": "0123456789+-= ",
            "config": {
                "model_type": "qwen3",
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "num_key_value_heads": 1,
                "head_dim": 16,
                "tie_word_embeddings": True,
            },
        },
        "precision": "float32",
        "max_total_sequence_length": 32,
        "train_global_batch_size": 16,
        "train_micro_batch_size": 8,
        "logprob_batch_size": 16,
        "generation": {"max_new_tokens": 6, "transformers_cfg": {"num_slots": 16}},
        "optimizer": {"name": "torch.optim.AdamW", "kwargs": {"lr": 1.0e-3}},
    },
    "data": {"dataset_name": "jsonl", "train_data_path": "sums.jsonl", "num_train": 64, "num_validation": 16},
    "env": {"digits": {"class": "digits.Digits", "timeout_s": _DEADLINE_S}},
    "checkpointing": {"save_period": 2},
    "logger": {"log_dir": "run", "tensorboard_enabled": False, "page": "off"},
    "cluster": {
        "threads_per_process": 1,
        "heartbeat_interval_s": 0.3,
        "heartbeat_timeout_s": 40.0,  # a disk, and who writes to it, was seen to stand still for 22
        "deadlines": dict.fromkeys(("join_s", "build_s", "generate_s", "train_s"), _DEADLINE_S),
    },
}
SOON_MISSED: dict[str, Any] = {"cluster": {"heartbeat_timeout_s": 10.0}}
"""For tests that stop a process, and wait until it is missed."""
SUMS = [
    {"input": f"{a} {sign} {b}", "output": str(a + b if sign == "+" else a - b)}
    for a, b, sign in product(range(10), range(10), "+-")
]
HOLDS = """
import contextlib
import os
import time
from pathlib import Path

def wait_while_held():
    '''Wait while there is the folder `hold`, and note in it who waits; a score's number or a process may bring it.'''
    with contextlib.ExitStack() as opened:
        if Path("holds").exists():
            opened.enter_context(contextlib.suppress(FileNotFoundError))  # it has just been taken away
            scores = opened.enter_context(open("holds/scores", "ab", buffering=0))
            scores.write(b".")
            number = scores.tell()  # which no other process gets
            for cause in (number, f"of_{os.getpid()}"):
                with contextlib.suppress(OSError):  # it is no cause, or all are waiting already
                    os.rename(f"holds/{cause}", "hold")
    while Path("hold").exists():
        with contextlib.suppress(OSError):
            Path("hold", str(os.getpid())).touch()
        time.sleep(0.02)
"""
"""What an environment begins with whose scores wait on a word of `tests.harness.runs.held_runs`."""
DIGITS = f"""{HOLDS}
from tandem.rollout.environments import Score

class Digits:
    '''Digits are worth something wherever they are; the answer is worth one.'''

    def score(self, problem, response):
        wait_while_held()
        correct = response.strip() == problem.answer
        share = sum(character.isdigit() for character in response) / (len(response) + 1)
        return Score(reward=1.0 if correct else 0.5 * share, correct=correct)
"""
GYM: dict[str, Any] = {
    "data": {
        "dataset_name": "reasoning_gym",
        "task": "chain_sum",
        "task_params": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
        "num_train": 64,
        "num_validation": 16,
        "prompt_template": "{metadata[expression]}",
    },
    "env": {"reasoning_gym": {}},
}
"""The same problems made by reasoning-gym, whose import takes a second of each process."""


PPO: dict[str, Any] = {
    "algorithm": "ppo",
    "ppo": {
        "num_prompts_per_step": 4,
        "num_generations_per_prompt": 4,
        "max_num_steps": 4,
        "ppo_epochs": 2,
        "policy_training_start_step": 1,
        "val_period": 2,
        "max_val_samples": 8,
        "seed": 7,
    },
    "loss_fn": {"reference_policy_kl_penalty": 0.01, "use_kl_in_reward": True},
    "policy": {"train_global_batch_size": 8},
    "value": {"optimizer": {"name": "torch.optim.AdamW", "kwargs": {"lr": 2.0e-3}}},
}
"""Four steps of PPO, over the base configuration: the policy waits for the value model in the first."""


def merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Return `base` with the settings of `over`, key by key."""
    result = dict(base)
    for key, value in over.items():
        result[key] = merged(base[key], value) if isinstance(value, dict) and isinstance(base.get(key), dict) else value
    return result


def write_config(over: dict[str, Any] | None = None, name: str = "config.yaml") -> Path:
    """Write the tiny configuration, with changes, its problems and its environment to the working directory.

    Another data set, and other environments, take the place of the tiny configuration's.
    """
    over, path = over or {}, Path(name)
    config = merged(TINY, over)
    if "env" in over:
        config["env"] = over["env"]
    if "dataset_name" in over.get("data", {}):
        config["data"] = over["data"]
    path.write_text(yaml.safe_dump(config))
    path.with_name("digits.py").write_text(DIGITS)
    Path("sums.jsonl").write_text("".join(f"{json.dumps(problem)}\n" for problem in SUMS))
    return path.absolute()


def pairs_of_sums() -> list[dict[str, Any]]:
    """Return sums of two digits in a random order, each with its right answer and, rejected, that of the wrong sign."""
    pairs = [
        {"prompt": f"{a} + {b}", "chosen": f" = {a + b}", "rejected": f" = -{a + b}"}
        for a, b in product(range(10), repeat=2)
    ]
    random.Random(1).shuffle(pairs)
    return pairs


def write_rows(name: str, rows: Iterable[dict[str, Any]]) -> None:
    """Write a data set."""
    Path(f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))


def copy_examples(stage_steps: int = 5) -> None:
    """Copy the examples to the working directory, their supervised stages cut to so many steps.

    Where one begins with an early checkpoint of a stage, it begins with its last one.
    """
    shutil.copytree(Path(__file__).parents[3] / "examples", "examples")
    for config in Path("examples").glob("*.yaml"):
        text = re.sub(r"(_sft/checkpoints/step_)\d+", rf"\g<1>{stage_steps}", config.read_text())
        config.write_text(text)
    for stage in Path("examples").glob("*_sft.yaml"):
        text, count = re.subn(
            r"^(  max_num_steps: )\d+$", rf"\g<1>{stage_steps}", stage.read_text(), flags=re.MULTILINE
        )
        assert count == 1, stage
        stage.write_text(text)


def coordinator(*arguments: str | Path, timeout_s: float = TIMEOUT_S) -> subprocess.CompletedProcess[str]:
    """Run the command to its end."""
    words = [str(word) for word in arguments]
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
        process = consoles.start("coordinator", words, out, errors)
        try:
            code = process.wait(timeout_s)
        finally:
            process.kill()
            process.wait(TIMEOUT_S)
        texts = [os.pread(file.fileno(), 1 << 24, 0).decode() for file in (out, errors)]
    return subprocess.CompletedProcess(["coordinator", *words], code, *texts)


def typed(*words: str, timeout_s: float = TIMEOUT_S) -> subprocess.CompletedProcess[str]:
    """Run an installed command to its end, as a user does."""
    command = [str(BIN / words[0]), *words[1:]]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)


class Command:
    """A command that runs while the test does something to it; killed at the end, whatever happened.

    It may be a module of `tests.harness.processes`, which is forked as services are. A service finds the environment in
    the working directory, as the documentation says: by the Python path.
    """

    def __init__(self, *words: str | Path) -> None:
        self._log = Path(f"output-{time.monotonic_ns()}.txt")
        path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), os.getcwd()]))
        command, arguments = words[0], [str(word) for word in words[1:]]
        self.process: ForkedChild | subprocess.Popen[bytes]
        with self._log.open("wb") as out, pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", path)
            if command in consoles.COMMANDS:
                self.process = consoles.start(str(command), arguments, out)
            elif str(command).startswith(_PROCESSES):
                self.process = consoles.fork_server().start(str(command), arguments, out)
            else:
                self.process = subprocess.Popen([BIN / command, *arguments], stdout=out, stderr=subprocess.STDOUT)

    def __enter__(self) -> Command:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.process.kill()
        self.process.wait(TIMEOUT_S)

    def output(self) -> str:
        """Return what it has printed so far."""
        return self._log.read_text()

    def wait_for(self, pattern: str) -> re.Match[str]:
        """Wait until it has printed something that matches. It may be further by then: see CONTRIBUTING.md."""
        found: list[re.Match[str]] = []

        def look() -> bool:
            found[:] = [match] if (match := re.search(pattern, self.output())) else []
            return bool(found)

        wait_until(look, lambda: f"{pattern!r} in:\n{self.output()}", died=lambda: self.process.poll() is not None)
        return found[0]

    def wait(self) -> int:
        """Wait for its end; return the exit code."""
        return self.process.wait(TIMEOUT_S)

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        self.process.send_signal(number)

    def children(self) -> list[psutil.Process]:
        """Return its processes."""
        return psutil.Process(self.process.pid).children(recursive=True)


def joins(address: str, run: str | Path = "run") -> list[str]:
    """Return what a service that is started by hand is told, to join the run of a folder."""
    return ["--coordinator", address, "--key-file", str(find_key_file(Path(run)))]


def processes_of(run: Command, kind: str) -> list[psutil.Process]:
    """Return the processes of a kind that the coordinator launched, in the order in which it did."""
    return sorted(titled(run.children(), f"{kind} --coordinator"), key=lambda process: process.create_time())


def titled(processes: Iterable[psutil.Process], title: str) -> list[psutil.Process]:
    """Return those processes whose command lines begin so."""
    found = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):  # one that was short may have ended
            if " ".join(process.cmdline()).startswith(title):
                found.append(process)
    return found


def process_of(run: Command, kind: str, index: int = 0) -> psutil.Process:
    """Return a process that the coordinator launched."""
    return processes_of(run, kind)[index]


def wait_until(
    condition: Callable[[], bool],
    what: Callable[[], str],
    died: Callable[[], bool] = lambda: False,
    timeout_s: float = TIMEOUT_S,
) -> None:
    """Wait for a condition, at most `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if died() and not condition():
            raise AssertionError(f"it ended before {what()}")
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {timeout_s:g} s for {what()}")
        time.sleep(0.05)
    time.sleep(_STALL_S)


class Awake:
    """Counts the seconds in which this process could run: a machine that stands still takes none of anyone's time."""

    def __init__(self) -> None:
        self._seconds = 0.0
        threading.Thread(target=self._count, args=(weakref.ref(self),), daemon=True).start()

    def seconds(self) -> float:
        """Return how many there have been."""
        return self._seconds

    @staticmethod
    def _count(counter: weakref.ref[Awake]) -> None:
        last = time.monotonic()
        while (awake := counter()) is not None:
            now = time.monotonic()
            awake._seconds += min(now - last, 4 * _TICK_S)
            last = now
            del awake
            time.sleep(_TICK_S)


def kill_at_once(victims: Sequence[psutil.Process]) -> None:
    """Kill processes so that none sees the end of another before its own."""
    for victim in victims:
        victim.suspend()
    for victim in victims:
        with contextlib.suppress(psutil.NoSuchProcess):  # it ends with one that was killed before
            victim.kill()


def all_gone(processes: Sequence[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Wait for processes to end, for so many seconds in which they and this one could run; return those that did not.

    One that waits for a disk cannot end: disks were seen to stand still for 22 s.
    """
    awake, alive = Awake(), list(processes)
    waited_s = looked_at_s = 0.0
    while alive and waited_s < timeout_s:
        _, alive = psutil.wait_procs(alive, timeout=_TICK_S)
        seconds = awake.seconds()
        if not any(is_waiting_for_disk(process.pid) for process in alive):
            waited_s += seconds - looked_at_s
        looked_at_s = seconds
    return alive


def steps_of(run: str | Path = "run") -> list[StepRecord]:
    """Return the steps in a run's journal."""
    with read_journal(Path(run)) as journal:
        return journal.steps()


def deterministic(metrics: dict[str, float]) -> dict[str, float]:
    """Return the metrics that measure neither time nor memory."""
    of_ranks = ("slowest_trainer", "trainer_compute_", "trainer_waited_")
    kept = {name: value for name, value in metrics.items() if not name.startswith(of_ranks)}
    return {name: value for name, value in kept.items() if not name.endswith(("_per_s", "_gb"))}


def weights_of(checkpoint: str | Path) -> dict[str, bytes]:
    """Return the policy's tensors in a checkpoint, to the bit."""
    import torch
    from safetensors.torch import load_file

    tensors = load_file(Path(checkpoint) / "policy" / "model.safetensors")
    return {name: tensor.flatten().view(torch.uint8).numpy().tobytes() for name, tensor in tensors.items()}
