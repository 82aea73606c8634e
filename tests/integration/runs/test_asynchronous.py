"""Asynchronous runs: whole ones with everything on, their numbers, and what happens when they are stopped or killed."""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.harness import leaks
from tests.harness.processes import held_processes
from tests.harness.processes.held_processes import at_file, hold_file, lines_of
from tests.harness.runs import consoles
from tests.harness.runs.by_hand import MEGATRON_TP2, in_folder, refits_of
from tests.harness.runs.running import (
    BIN,
    Awake,
    Command,
    all_gone,
    coordinator,
    joins,
    merged,
    process_of,
    steps_of,
    wait_until,
    write_config,
)

TALKS = """
import time
from tandem.rollout.environments import Score, Turn

class Talks:
    '''Answers twice, after a while; every digit of the policy's is worth a tenth.'''

    def step(self, problem, conversation):
        said = [message["content"] for message in conversation if message["role"] == "assistant"]
        time.sleep(0.05)
        reward = 0.1 * sum(character.isdigit() for character in said[-1])
        if len(said) == 3:
            return Score(reward, correct=reward > 0.2)
        return Turn([{"role": "user", "content": f"{len(said)}+1"}], reward)
"""
ASYNCHRONOUS: dict[str, Any] = {
    "grpo": {
        "max_num_steps": 8,
        "val_period": 3,
        "async_grpo": {"enabled": True, "max_trajectory_age_steps": 1},
    },
    "loss_fn": {"use_importance_sampling_correction": True},
    "policy": {
        "generation": {"colocated": {"enabled": False}},
        "optimizer": {"kwargs": {"lr": 1.0e-2}},
    },
    "cluster": {"rollouts": 2},
}
TALKING: dict[str, Any] = {
    "grpo": {"max_rollout_turns": 3},
    "policy": {"max_total_sequence_length": 64, "generation": {"max_new_tokens": 8}},
    "env": {"talks": {"class": "talking.Talks", "num_workers": 3}},
    "cluster": {"launch": {"refit": True}},
}
"""Requests take long enough to meet new weights; trainer and rollouts are started by the test."""
IN_FLIGHT: dict[str, Any] = {
    "grpo": {
        "use_dynamic_sampling": True,
        "batch_multiplier": 1.25,
        "async_grpo": {
            "max_trajectory_age_steps": 3,
            "in_flight_weight_updates": True,
            "recompute_kv_cache_after_weight_updates": True,
        },
    },
    "policy": {"generation": {"async_engine": True, "transformers_cfg": {"num_slots": 8}}},
    "checkpointing": {"save_period": 1, "keep_top_k": None},
}


@contextlib.contextmanager
def held_run(*arguments: str | Path) -> Iterator[Command]:
    """Start a run whose trainer and two rollouts are of `held_processes`."""
    Path("talking.py").write_text(TALKS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path.cwd()))
        with _started(*arguments) as run:
            yield run


@contextlib.contextmanager
def _started(*arguments: str | Path) -> Iterator[Command]:
    with Command("coordinator", "up", *arguments) as run, contextlib.ExitStack() as started:
        address = run.wait_for(r"listens on (tcp://\S+)")[1]
        for kind in ("trainer", "rollout", "rollout"):
            out = started.enter_context(Path(f"{kind}-{time.monotonic_ns()}.txt").open("wb"))
            words = (kind, *joins(address))
            process = consoles.fork_server().start(held_processes.__name__, words, out)
            started.callback(process.wait, 20.0)
            started.callback(process.kill)
        yield run
        for file in Path().glob("hold_*"):
            file.unlink()


@pytest.fixture(scope="module")
def in_flight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run with engines that take weights while they generate, and all that can be on."""
    folder = tmp_path_factory.mktemp("in_flight")
    with in_folder(folder), held_run(write_config(merged(merged(ASYNCHRONOUS, IN_FLIGHT), TALKING))) as run:
        assert run.wait() == 0, run.output()
    return folder


def check_steps(run: str | Path, age: int, num_steps: int = 8) -> None:
    """Assert that every step is there once, of samples that are young enough, and every version attested."""
    steps = steps_of(run)
    assert [step.step for step in steps] == list(range(1, num_steps + 1))
    for step in steps:
        metrics = step.metrics
        assert 0 <= metrics["avg_trajectory_age"] <= metrics["max_trajectory_age"] <= min(age, step.step - 1)
        assert sum(metrics[f"token_share/age_{k}"] for k in range(age + 1)) == pytest.approx(1.0)
        assert metrics["groups_too_old"] == 0
        assert ("val_accuracy" in metrics) == (step.step % 3 == 0 or step.step == num_steps)
    assert max(step.metrics["max_trajectory_age"] for step in steps) > 0
    refits = refits_of(run)
    assert {refit.version for refit in refits} == set(range(num_steps + 1))
    for version in range(num_steps + 1):
        (digest,) = {refit.digest for refit in refits if refit.version == version}
        assert digest, "attested"


def test_a_run_in_flight_does_every_step_with_samples_that_are_young_enough(in_flight: Path) -> None:
    check_steps(in_flight / "run", age=3)
    with in_folder(in_flight):
        sent, trained = lines_of("sent"), lines_of("trained")
    mixed = [sample for sample in sent if sample["oldest"] < sample["newest"]]
    assert mixed, "some requests went on with new weights"
    assert all(sample["purpose"] == "train" for sample in mixed)
    validated = [sample for sample in sent if sample["purpose"] == "validate"]
    assert {sample["step"] for sample in validated} == {3, 6, 8}
    assert all(sample["oldest"] == sample["newest"] == sample["step"] for sample in validated)
    beside = [any(step["began"] < sample["at"] < step["ended"] for sample in sent) for step in trained[:-1]]
    assert sum(beside) > len(beside) / 2, "engines generate while a step trains"


def test_a_token_has_the_probability_that_the_weights_of_its_version_give_it(in_flight: Path) -> None:
    """Computed by plain transformers: what engines say of tokens, and what trainers make of it."""
    import torch
    import transformers

    from tests.harness.trainers.reference import logprobs_of

    folders = {v: in_flight / f"run/checkpoints/step_{v}/policy" for v in range(1, 8)} | {
        0: in_flight / "step_0/policy"
    }
    models = {v: transformers.AutoModelForCausalLM.from_pretrained(path) for v, path in folders.items()}
    num_mixed = 0
    for step in range(1, 9):
        arrays = np.load(in_flight / f"trained_{step}.npz")
        ends = np.cumsum(arrays["lengths_S"])
        expected_weights = []
        for end, length in zip(ends, arrays["lengths_S"], strict=True):
            part = slice(end - length, end)
            token_ids = torch.from_numpy(arrays["token_ids_T"][part].astype(np.int64))
            mask, versions = arrays["loss_mask_T"][part][1:], arrays["versions_T"][part][1:]
            said = arrays["generation_logprobs_T"][part][1:]
            assert set(versions[~mask]) <= {-1}
            made = versions[mask]
            assert (np.diff(made) >= 0).all(), "never back to older weights"
            assert step - 4 <= made.min() <= made.max() <= step - 1
            num_mixed += made.min() < made.max()
            with torch.no_grad():
                known = {v: logprobs_of(models[v], token_ids).numpy() for v in {*made.tolist(), step - 1}}
            for version in set(made.tolist()):
                chosen = mask & (versions == version)
                np.testing.assert_allclose(said[chosen], known[version][chosen], rtol=0, atol=2e-4)
            expected_weights.append(np.exp(known[step - 1] - said)[mask])
        found, expected = np.sort(arrays["weights"]), np.sort(np.concatenate(expected_weights))
        np.testing.assert_allclose(found, expected, rtol=1e-3)
    assert num_mixed, "some samples have tokens of two versions"


@pytest.mark.parametrize("over", [{}, MEGATRON_TP2], ids=["dtensor", "megatron"])
def test_an_engine_that_is_killed_is_replaced_and_the_run_does_every_step(over: dict[str, Any]) -> None:
    """Engines finish what they have before they take weights; the environment scores at once."""
    before = leaks.segments()
    config = merged(merged(ASYNCHRONOUS, over), {"grpo": {"max_num_steps": 40}, "checkpointing": {"save_period": 5}})
    with Command("coordinator", "up", write_config(config)) as run:
        for step in (2, 5):
            run.wait_for(f"step {step}/40")
            time.sleep(random.Random(step).uniform(0.0, 0.1))  # a fast machine must not be done before
            children = run.children()
            process_of(run, "rollout", step % 2).kill()
            wait_until(lambda: run.output().count("another is launched") == 1 + (step > 2), run.output)  # noqa: B023
        assert run.wait() == 0, run.output()
        assert all_gone(children, 5.0) == []
    check_steps("run", age=1, num_steps=40)
    assert leaks.segments_left(before) == set()


def test_kill_9_of_who_may_not_be_replaced_ends_the_run_and_it_goes_on_from_its_checkpoint() -> None:
    before, over = leaks.segments(), {"grpo": {"max_num_steps": 1000}, "checkpointing": {"save_period": 2}}
    config = write_config(merged(merged(ASYNCHRONOUS, over), {"cluster": {"max_replacements": 0}}))
    done = 0
    for kind in ("trainer", "refit", "coordinator"):
        with Command("coordinator", "up", config, *(["--resume"] if done else [])) as run:
            run.wait_for(f"step {done + 4}/1000")
            children = run.children()
            time.sleep(random.Random(kind).uniform(0.0, 0.5))
            since_killed = Awake()
            if kind == "coordinator":
                run.signal(signal.SIGKILL)
                run.wait()
            else:
                process_of(run, kind).kill()
                assert run.wait() == 1
                assert re.search(rf"error: {kind}-0 failed while .*: killed by SIGKILL", run.output()), run.output()
            assert all_gone(children, 5.0) == []
            assert since_killed.seconds() < 10.0
        assert leaks.segments_left(before) == set()
        done = steps_of()[-1].step
        assert [step.step for step in steps_of()] == list(range(1, done + 1))
    resumed = coordinator("up", config, "--resume", f"grpo.max_num_steps={done + 1}")
    assert resumed.returncode == 0, resumed.stderr
    assert [step.step for step in steps_of()] == list(range(1, done + 2))


def test_all_processes_are_asked_to_end_while_engines_generate_beside_a_step() -> None:
    before, setsid = leaks.segments(), shutil.which("setsid")
    assert setsid is not None
    config = write_config(
        merged(ASYNCHRONOUS, {"grpo": {"max_num_steps": 1000}, "checkpointing": {"save_period": 1000}})
    )
    with Command(setsid, BIN / "coordinator", "up", config) as run:
        run.wait_for("step 3/1000")
        children = run.children()
        os.killpg(run.process.pid, signal.SIGTERM)
        assert run.wait() == 130, run.output()
        assert all_gone(children, 5.0) == []
    done = steps_of()[-1].step
    assert Path(f"run/checkpoints/step_{done}").exists(), run.output()
    assert leaks.segments_left(before) == set()


def test_an_interrupt_in_any_phase_saves_and_the_run_goes_on_from_there() -> None:
    before = leaks.segments()
    grpo = {"max_num_steps": 12, "async_grpo": {"in_flight_weight_updates": True}}
    in_flight = {"grpo": grpo, "checkpointing": {"save_period": 4}}
    config = write_config(merged(merged(ASYNCHRONOUS, in_flight), TALKING))
    done = 0
    for point in ("train", "refit", "validate", "save"):
        hold_file(point).touch()
        at_file(point).unlink(missing_ok=True)
        with held_run(config, *(["--resume"] if done else [])) as run:
            wait_until(at_file(point).exists, run.output, died=lambda: run.process.poll() is not None)
            children = run.children()
            run.signal(signal.SIGINT)
            run.wait_for("interrupted: finishing or abandoning the step")
            hold_file(point).unlink()
            assert run.wait() == 130, run.output()
            assert all_gone(children, 5.0) == []
        steps = [step.step for step in steps_of()]
        assert steps == list(range(1, len(steps) + 1)), point
        assert Path(f"run/checkpoints/step_{steps[-1]}").exists(), point
        done = len(steps)
        assert leaks.segments_left(before) == set()
    with held_run(config, "--resume") as run:
        assert run.wait() == 0, run.output()
    assert [step.step for step in steps_of()] == list(range(1, 13))
