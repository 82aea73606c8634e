"""Whole runs that stream what changed: engines that come and go, trainers that share tensors, experts and adapters.

Each is equal to the bit to the run that differs in `refit.differences` only, and sends fewer bytes.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tandem.observe.run_folder.journal import RefitRecord
from tests.harness.runs import hosts_harness
from tests.harness.runs.by_hand import MEGATRON_TP2, assert_same_metrics, assert_same_results, in_folder, refits_of
from tests.harness.runs.held_runs import ENVIRONMENT, HELD, await_hold, engines, go_on, go_on_until, hold, version_of
from tests.harness.runs.hosts_harness import on_two_hosts
from tests.harness.runs.running import Command, merged, steps_of, wait_until
from tests.harness.trainers.trainer_harness import make_model

other_host = hosts_harness.other_host

NUM_STEPS = 4
SETTINGS: dict[str, Any] = {
    "policy": {"precision": "bfloat16", "optimizer": {"kwargs": {"lr": 1e-5}}},
    "grpo": {"max_num_steps": NUM_STEPS, "val_period": NUM_STEPS},
    "checkpointing": {"save_period": NUM_STEPS},
}
AUTO: dict[str, Any] = {"refit": {"differences": "auto"}, "cluster": {"links": {"network": 0.1}}}
"""Differences of any size, as over a slow network."""
EXPERTS: dict[str, Any] = {
    "policy": {"model_name": "base", "new_model": None, "dtensor_cfg": {"expert_parallel_size": 2}},
    "cluster": {"trainers": 2},
}
TRAINERS: dict[str, dict[str, Any]] = {
    "experts": EXPERTS,
    "megatron-tp2": merged(MEGATRON_TP2, {"policy": {"megatron_cfg": {"optimizer": {"lr": 1.0e-5}}}}),
}
ADAPTERS: dict[str, Any] = {
    "policy": {
        "model_name": "base",
        "new_model": None,
        "dtensor_cfg": {"lora_cfg": {"enabled": True, "dim": 2}},
        "optimizer": {"kwargs": {"lr": 1e-2}},
    },
    "cluster": {"trainers": 2},
}


def run_both(
    other_host: tuple[str, ...], tmp_path: Path, over: dict[str, Any], architecture: str = "qwen3"
) -> dict[str, Path]:
    """Run a configuration on two hosts without differences and with them; return the folders of the runs."""
    config = merged(SETTINGS, over)
    for name, each in (("off", config), ("auto", merged(config, AUTO))):
        (tmp_path / name).mkdir()
        with in_folder(tmp_path / name):
            if each["policy"].get("model_name") == "base":
                make_model(Path("base"), architecture)
            with on_two_hosts(each, other_host) as (run, started, _):
                assert run.wait() == 0, run.output()
                assert [engine.wait() for engine in started] == [0]
    runs = {name: tmp_path / name / "run" for name in ("off", "auto")}
    off, auto = refits_of(runs["off"]), refits_of(runs["auto"])
    assert [refit.digest for refit in auto] == [refit.digest for refit in off]
    assert not any(refit.quarantined for refit in auto)
    return runs


@pytest.mark.parametrize("trainers", TRAINERS)
def test_what_trainers_share_is_put_together_by_the_engine(
    trainers: str, other_host: tuple[str, ...], tmp_path: Path
) -> None:
    runs = run_both(other_host, tmp_path, TRAINERS[trainers], "qwen3_moe")
    assert_same_results(runs["auto"], runs["off"], same_batches=True)
    whole = {refit.version: refit.num_bytes for refit in refits_of(runs["off"])}
    refits = refits_of(runs["auto"])
    assert {*whole[0]} == {"trainer-0>rollout-0", "trainer-1>rollout-0"}
    assert refits[0].num_bytes == whole[0]
    for refit in refits[1:]:
        for link, num_bytes in refit.num_bytes.items():
            assert 0 < num_bytes < whole[refit.version][link] / 2, refit


def test_adapters_are_sent_as_ever(other_host: tuple[str, ...], tmp_path: Path) -> None:
    """All of an adapter changes, and its base is sent once anyway: there is nothing to leave out."""
    runs = run_both(other_host, tmp_path, ADAPTERS)
    for ours, theirs in zip(steps_of(runs["auto"]), steps_of(runs["off"]), strict=True):
        assert_same_metrics(ours.metrics, theirs.metrics, same_batches=True, step=ours.step)
    trained = [
        {name: tensor.numpy().tobytes() for name, tensor in load_file(run / path).items()}
        for run in runs.values()
        for path in ("checkpoints/latest/policy/adapter_model.safetensors",)
    ]
    assert trained[0] == trained[1]
    refits = refits_of(runs["auto"])
    assert [refit.num_bytes for refit in refits] == [refit.num_bytes for refit in refits_of(runs["off"])]
    assert sum(refits[1].num_bytes.values()) < sum(refits[0].num_bytes.values()) / 2


# --- engines that come and go ----------------------------------------------------------------------------------------

ELASTIC: dict[str, Any] = {
    **ENVIRONMENT,
    "grpo": {"max_num_steps": 24, "val_period": 24},  # the last engine has to leave before they are done
    "checkpointing": {"save_period": 24},
}


def of_link(refits: list[RefitRecord], link: str) -> dict[int, int]:
    """Return the bytes that went over a link, by version."""
    return {refit.version: refit.num_bytes[link] for refit in refits if link in refit.num_bytes}


def test_engines_that_join_and_come_back_are_sent_whole_weights_first(
    other_host: tuple[str, ...], tmp_path: Path
) -> None:
    """Beside the engine that is streamed to, one joins that shares the trainer's memory; then each leaves."""
    for name in ("off", "auto"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "held.py").write_text(HELD)
    for step in (2, 5):
        hold(16 * step + 1, tmp_path / "auto")
    config = merged(SETTINGS, ELASTIC)
    with in_folder(tmp_path / "off"), on_two_hosts(config, other_host) as (run, _, _):
        assert run.wait() == 0, run.output()
    with in_folder(tmp_path / "auto"), on_two_hosts(merged(config, AUTO), other_host) as (run, started, words):
        await_hold(run, "step +2/")
        with Command("rollout", *words[len(other_host) + 1 :]) as joining:
            run.wait_for("rollout-1 joins the run")
            wait_until(lambda: version_of("rollout-1") >= 2, lambda: f"it to be refitted: {engines()}")
            go_on()
            await_hold(run, "step +5/")
            joining.signal(signal.SIGTERM)
            run.wait_for("rollout-1 was told to leave")
            go_on_until(run, "rollout-1 leaves the run: it was told to", started[0].process)
            started[0].signal(signal.SIGTERM)
            run.wait_for("rollout-0 was told to leave")
            go_on()
            assert joining.wait() == 0, joining.output()
        run.wait_for("rollout-0 leaves the run: it was told to; the run waits for another")
        assert started[0].wait() == 0, started[0].output()
        with Command(*words) as another:
            assert run.wait() == 0, run.output()
            assert another.wait() == 0, another.output()
    assert_same_results(tmp_path / "auto" / "run", tmp_path / "off" / "run")
    off, auto = (refits_of(tmp_path / name / "run") for name in ("off", "auto"))
    assert {refit.version: refit.digest for refit in auto} == {refit.version: refit.digest for refit in off}
    assert not any(refit.quarantined for refit in auto)
    (whole,) = {sum(refit.num_bytes.values()) for refit in off}
    assert {*of_link(auto, "trainer-0>rollout-1").values()} == {whole}, "it copies out of the trainer's memory"
    streamed = of_link(auto, "trainer-0>rollout-0")
    first, came_back = (version for version, num_bytes in streamed.items() if num_bytes == whole)
    assert (first, came_back > 5) == (0, True), streamed
    assert all(0 < num_bytes < whole / 2 for version, num_bytes in streamed.items() if version not in (0, came_back))
