"""Engines of several workers: each holds its share, all of them together are one engine, and they end together."""

from __future__ import annotations

import copy
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from engine_harness import random_prompts, reference_logprobs, request, run_all

from tandem.common.errors import RefitError
from tandem.refit.digests.comparison import compare
from tandem.refit.digests.task import digest_layout
from tandem.rollout.engines.skeleton import weights_of
from tandem.rollout.engines.vllm import engine as vllm_engine
from tandem.rollout.engines.vllm.engine import VllmEngine
from tandem.rollout.engines.vllm.insides import InProcessLlm
from tandem.rollout.engines.vllm.workers import EngineWorkers
from tests.harness import leaks
from tests.harness.runs import hosts_harness
from tests.harness.runs.by_hand import refits_of, undisturbed_run
from tests.harness.runs.hosts_harness import on_two_hosts
from tests.harness.runs.running import Command, all_gone, merged, process_of, wait_until, write_config
from tests.vllm.run_harness import JUDGE, SEVENS, curve
from tests.vllm.vllm_harness import CHANGES, all_parameters, refit, running, tiny_model, train

TWO = {"tensor_parallel_size": 2}
EXPERTS = {"tensor_parallel_size": 2, "expert_parallel_size": 2}
OF_TWO = merged(
    SEVENS,
    {
        "grpo": {"max_num_steps": 6},
        "policy": {"generation": {"backend": "vllm", "vllm_cfg": TWO}},
        # Beside another host, the loss of an engine is noticed by its silence.
        "cluster": {"heartbeat_timeout_s": 20.0},
    },
)
other_host = hosts_harness.other_host


def load_as_vllm_does(monkeypatch: pytest.MonkeyPatch) -> list[list[dict[str, torch.Tensor]]]:
    """Have engines start with the weights of their checkpoint; return where what each worker then holds is kept."""
    loaded: list[list[dict[str, torch.Tensor]]] = []
    arguments = vllm_engine.engine_arguments

    def look_first(llm: InProcessLlm) -> EngineWorkers:
        loaded.append(all_parameters(llm))
        return EngineWorkers(llm)

    def loading(*given: Any) -> dict[str, Any]:
        return {**arguments(*given), "load_format": "safetensors"}

    monkeypatch.setattr(vllm_engine, "engine_arguments", loading)
    monkeypatch.setattr(vllm_engine, "EngineWorkers", look_first)
    return loaded


def check_samples(engine: VllmEngine, model: Any, version: int) -> None:
    """Check that tokens have the log-probabilities that Hugging Face gives them, and carry the version."""
    prompts = random_prompts(24)
    engine.meter.begin()
    made = run_all(engine, [request(index, prompt, max_new_tokens=64) for index, prompt in enumerate(prompts)])
    use = engine.meter.use()
    assert 0 < use.held <= use.peak, "of a worker, in its process"
    for index, one in made.items():
        assert one.versions_T.tolist() == [version] * 64
        assert np.abs(one.logprobs_T - reference_logprobs(model, prompts[index], one.token_ids_T)).max() < 1e-4


def check_digests(engine: VllmEngine, source: Any) -> None:
    """Check that the workers' digests add up to the source's, and that damage in one of them shows."""
    held = weights_of(source)
    sent = {"trainer-0": (held.layout, digest_layout(held.layout, held.storages))}
    task = engine.digest_task(None)
    while not task.advance(0.001):
        pass
    parts = {str(rank): each for rank, each in enumerate(zip(engine.layouts(), task.results(), strict=True))}
    assert compare(sent, {"engine": parts}).differing == {}
    engine._llm.engine.collective_rpc(_damage)
    damaged = engine.digest_task(None).results()
    parts = {str(rank): each for rank, each in enumerate(zip(engine.layouts(), damaged, strict=True))}
    assert compare(sent, {"engine": parts}).differing == {"engine": "model.layers.2.self_attn.o_proj.weight"}


def _damage(worker: Any) -> None:
    if worker.rank == 1:
        worker.part.parameters()["model.layers.2.self_attn.o_proj.weight"].data[3, 5] += 1.0


@pytest.mark.parametrize(
    ("architecture", "sizes"),
    [*((each, TWO) for each in CHANGES), ("qwen3", {"pipeline_parallel_size": 2}), ("qwen3_moe", EXPERTS)],
    ids=[*CHANGES, "qwen3, stages", "qwen3_moe, experts"],
)
def test_two_workers_hold_what_load_weights_gives_them(
    architecture: str, sizes: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "model"
    model = tiny_model(architecture, folder)
    train(model, seed=0)  # biases are no longer zero, norms no longer one
    model.save_pretrained(folder)
    loaded = load_as_vllm_does(monkeypatch)
    with running(folder, sizes) as engine:
        (expected,) = loaded
        assert len(expected) == 2
        other = copy.deepcopy(model)
        train(other, seed=1)
        refit(engine, other, 0)
        before = all_parameters(engine._llm)
        check_samples(engine, other, 0)
        source = refit(engine, model, 1)
        found = all_parameters(engine._llm)
        for rank in range(2):
            assert found[rank].keys() == expected[rank].keys()
            assert not any(torch.equal(held, expected[rank][name]) for name, held in before[rank].items())
            for name, held in found[rank].items():
                assert torch.equal(held, expected[rank][name]), f"worker {rank}: {name}"
        check_samples(engine, model, 1)
        check_digests(engine, source)


def test_the_memory_that_workers_share_is_no_other_engines_and_has_no_name(tmp_path: Path) -> None:
    """A name is the same for all workers of an engine; descriptors' numbers are those of other processes as well."""
    tiny_model("qwen3", tmp_path / "model")
    names = []
    for _ in range(2):
        with running(tmp_path / "model", TWO) as engine:
            assert not [*Path("/dev/shm").glob("*cpushm*")]
            names += engine._llm.engine.collective_rpc(lambda worker: os.environ["VLLM_DIST_IDENT"])
    assert names[0] == names[1] != names[2] == names[3]
    assert all(str(os.getpid()) in name for name in names)


def test_an_update_in_flight_reaches_both_workers_between_two_tokens(tmp_path: Path) -> None:
    old = tiny_model("qwen3", tmp_path / "model")
    new = copy.deepcopy(old)
    train(new, seed=0)
    prompts = random_prompts(12)
    with running(tmp_path / "model", TWO) as engine:
        refit(engine, old, 4)
        for index, prompt in enumerate(prompts):
            engine.add_request(request(index, prompt, max_new_tokens=40))
        for _ in range(15):
            assert engine.step() == []
        refit(engine, new, 5)
        engine.recompute_caches()
        made = run_all(engine, [])
        for index, one in made.items():
            assert set(one.versions_T.tolist()) == {4, 5}
            before = reference_logprobs(old, prompts[index], one.token_ids_T)
            after = reference_logprobs(new, prompts[index], one.token_ids_T)
            assert np.abs(one.logprobs_T - np.where(one.versions_T == 4, before, after)).max() < 1e-4
        engine.sleep()
        engine.wake()
        check_samples(engine, new, 5)
        # What one worker refuses is told as it was, and the engine answers on.
        with pytest.raises(RefitError, match=r"rollout-0/[01] failed .*the deadline passed"):
            engine.apply(6, -1.0)
        assert engine.version is None
        engine.apply(6, 60.0)
        check_samples(engine, new, 6)


def engine_processes(run: Command) -> tuple[psutil.Process, list[psutil.Process]]:
    """Return the rollout process of a run, and its workers."""
    rollout = process_of(run, "rollout")
    return rollout, [child for child in rollout.children() if "Worker" in " ".join(child.cmdline())]


def sockets() -> set[str]:
    """Return the Unix sockets of vLLM's that are open somewhere."""
    return {line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines() if "@vllm" in line}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of an undisturbed run whose engine has two workers beside the trainer."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "judging.py").write_text(JUDGE)
    return undisturbed_run(folder, OF_TWO)


def assert_same_curves(run: Path, whole: Path) -> None:
    """Every sample was drawn again from its own seed: none is lost, and none counted twice."""
    for metric in ("reward", "loss", "mean_generation_length"):
        assert curve(run, metric).tolist() == curve(whole, metric).tolist(), metric


@pytest.mark.timeout(600)
def test_kill_9_of_a_worker_or_of_its_engine_changes_nothing_but_the_time_it_takes(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    Path("judging.py").write_text(JUDGE)
    segments_before, sockets_before = leaks.segments(), sockets()
    with Command("coordinator", "up", write_config(OF_TWO)) as run:
        for step, worker in ((2, 1), (4, None)):
            run.wait_for(rf"step {step}/6")
            rollout, workers = engine_processes(run)
            assert len(workers) == 2
            (rollout if worker is None else workers[worker]).send_signal(signal.SIGKILL)
            assert all_gone([rollout, *workers], 10.0) == []
        run.wait_for(r"rollout-0 is lost: exited with code 1.*worker 1 of vLLM's 2 has ended")
        run.wait_for(r"rollout-0 is lost: killed by SIGKILL.*; another is launched in its place")
        assert run.wait() == 0, run.output()
    assert_same_curves(Path("run"), whole)
    assert curve(whole, "token_mult_prob_error").max() < 1.001
    rewards = curve(whole, "reward")
    assert rewards[-2:].mean() > rewards[:2].mean()
    assert leaks.segments_left(segments_before) == set()
    wait_until(lambda: sockets() <= sockets_before, lambda: "no socket to be left", timeout_s=10.0)
    assert list(temporary.iterdir()) == []


@pytest.mark.timeout(600)
def test_an_engine_whose_worker_is_stopped_is_replaced_after_its_deadline(whole: Path) -> None:
    """Nobody continues it: its engine waits in a step, and heartbeats go on."""
    Path("judging.py").write_text(JUDGE)
    with Command("coordinator", "up", write_config(OF_TWO)) as run:
        run.wait_for(r"step 2/6")
        rollout, workers = engine_processes(run)
        workers[1].suspend()
        run.wait_for(r"rollout-0 is lost: no answer within \d+ s \(generating\); another is launched in its place")
        assert all_gone([rollout, *workers], 30.0) == []
        assert run.wait() == 0, run.output()
    assert_same_curves(Path("run"), whole)


@pytest.mark.timeout(600)
def test_workers_on_another_host_are_sent_their_shares_and_so_is_a_replacement(
    whole: Path, other_host: tuple[str, ...]
) -> None:
    Path("judging.py").write_text(JUDGE)
    with on_two_hosts(OF_TWO, other_host) as (run, engines, words):
        run.wait_for("step 2/6")
        engines[0].signal(signal.SIGKILL)
        run.wait_for(r"rollout-0 is lost: .*; start another: rollout --coordinator")
        with Command(*words) as another:
            assert run.wait() == 0, run.output() + another.output()
            assert another.wait() == 0
    assert_same_curves(Path("run"), whole)
    for one in refits_of():
        across = {link: n for link, n in one.num_bytes.items() if link.startswith("trainer-0>")}
        within = {link: n for link, n in one.num_bytes.items() if link not in across}
        assert across.keys() == {"trainer-0>rollout-0/0", "trainer-0>rollout-0/1"}
        # What both have whole crosses once, and is passed on.
        assert within.keys() <= {"rollout-0/0>rollout-0/1", "rollout-0/1>rollout-0/0"}
        assert 0 < sum(within.values()) < sum(across.values())
        assert not one.quarantined
