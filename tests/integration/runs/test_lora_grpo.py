"""GRPO that trains adapters, with the embedded engine: what is moved, that it is proven, and what happens to it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tandem.observe.run_folder.journal import read_journal
from tests.harness.runs.by_hand import MEGATRON_TP2
from tests.harness.runs.held_runs import await_hold, go_on, hold
from tests.harness.runs.running import (
    Command,
    coordinator,
    deterministic,
    process_of,
    steps_of,
    write_config,
)
from tests.harness.trainers.trainer_harness import make_model

STEPS = 6
SETTINGS: dict[str, Any] = {
    "grpo": {"max_num_steps": STEPS, "val_period": 3},
    "loss_fn": {"reference_policy_kl_penalty": 0.01},
    "policy": {
        "model_name": "base",
        "new_model": None,
        "dtensor_cfg": {"lora_cfg": {"enabled": True, "dim": 2}},
        "optimizer": {"kwargs": {"lr": 1e-2}},
    },
    "checkpointing": {"save_period": 2},
    "cluster": {"trainers": 2, "rollouts": 2},
}


def adapters_of(checkpoint: Path) -> dict[str, bytes]:
    tensors = load_file(checkpoint / "policy" / "adapter_model.safetensors")
    return {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}


def assert_same(run: Path, other: Path, *, resumed_at: int = 0) -> None:
    """Compare what two runs ended with, and all steps from that one on: where a run ended, it has validated."""
    last = f"checkpoints/step_{STEPS}"
    assert adapters_of(run / last) == adapters_of(other / last)
    for mine, theirs in zip(steps_of(run)[resumed_at:], steps_of(other)[resumed_at:], strict=True):
        assert deterministic(mine.metrics) == deterministic(theirs.metrics)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run that nothing happens to."""
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        make_model(Path("base"))
        done = coordinator("up", write_config(SETTINGS))
        assert done.returncode == 0, done.stdout + done.stderr
    return folder / "run"


def test_the_base_moves_once_and_adapters_with_every_version(whole: Path) -> None:
    with read_journal(whole) as journal:
        refits = journal.refits()
    assert [record.version for record in refits] == [*range(STEPS + 1)]
    adapters = sum(map(len, adapters_of(whole / f"checkpoints/step_{STEPS}").values()))
    moved = [sum(record.num_bytes.values()) for record in refits]
    assert moved[1:] == [2 * adapters] * STEPS, "to each of two engines"
    # Two trainers have half of each weight, so no engine can read one in place: all of the base is copied, once.
    base = sum(tensor.nbytes for tensor in load_file(whole.parent / "base" / "model.safetensors").values())
    assert moved[0] == 2 * (base + adapters)
    assert not any(record.quarantined for record in refits)
    assert len({record.digest for record in refits}) == STEPS + 1
    for step in steps_of(whole):
        # Trainers do not merge: they add what the adapters say to what the layer does.
        assert step.metrics["token_mult_prob_error"] < 1.0 + 1e-5


def test_an_engine_that_is_killed_is_replaced_and_the_run_ends_with_the_same_bits(whole: Path) -> None:
    make_model(Path("base"))
    hold(at=33)
    with Command("coordinator", "up", write_config(SETTINGS)) as run:
        await_hold(run, "step 2/")
        process_of(run, "rollout").kill()
        go_on()
        assert run.wait() == 0, run.output()
    assert "another is launched in its place" in run.output()
    assert_same(Path("run"), whole)
    with read_journal(Path("run")) as journal:
        moved = [sum(record.num_bytes.values()) for record in journal.refits()]
    assert len([count for count in moved if count > min(moved)]) > 1, "the base went to whoever came, too"


def test_a_run_that_is_resumed_ends_with_the_same_bits(whole: Path) -> None:
    make_model(Path("base"))
    config = write_config(SETTINGS)
    assert coordinator("up", config, "grpo.max_num_steps=4").returncode == 0
    resumed = coordinator("up", config, "--resume")
    assert resumed.returncode == 0, resumed.stderr
    assert_same(Path("run"), whole, resumed_at=5)


@pytest.mark.parametrize("architecture", ["qwen3", "phi3"])
def test_adapters_of_megatron_core_reach_engines_in_the_layers_of_a_checkpoint(architecture: str) -> None:
    """Where queries, keys and values share one matrix in training, or are one layer of the checkpoint as well."""
    make_model(Path("base"), architecture)
    policy: dict[str, Any] = {
        **SETTINGS["policy"],
        "dtensor_cfg": {"enabled": False},
        "megatron_cfg": {**MEGATRON_TP2["policy"]["megatron_cfg"], "peft": {"enabled": True, "dim": 2}},
        "optimizer": None,
    }
    config = write_config({**SETTINGS, "policy": policy})
    # Else engines would read in place what a rank has whole, adapters as well.
    done = coordinator("up", config, "grpo.max_num_steps=2", "grpo.val_period=2", "refit.alias=never")
    assert done.returncode == 0, done.stdout + done.stderr
    for step in steps_of():
        assert step.metrics["token_mult_prob_error"] < 1.0 + 1e-5
    with read_journal(Path("run")) as journal:
        moved = [sum(record.num_bytes.values()) for record in journal.refits()]
    adapters = sum(map(len, adapters_of(Path("run/checkpoints/step_2")).values()))
    assert moved[1:] == [2 * adapters] * 2
    assert moved[0] > 2 * adapters


@pytest.mark.parametrize("backend", ["dtensor", "megatron"])
def test_adapters_beside_routed_experts_are_merged_where_tokens_go_where_the_engine_sent_them(backend: str) -> None:
    """In attention, in a dense layer and in shared experts."""
    make_model(Path("base"), "glm4_moe", n_group=1)
    policy: dict[str, Any] = {**SETTINGS["policy"], "router_replay": {"enabled": True}}
    if backend == "megatron":
        peft = {"enabled": True, "dim": 2, "exclude_modules": ["*.mlp.experts.*"]}
        megatron = {**MEGATRON_TP2["policy"]["megatron_cfg"], "peft": peft}
        policy |= {"dtensor_cfg": {"enabled": False}, "megatron_cfg": megatron, "optimizer": None}
    else:
        lora = {**SETTINGS["policy"]["dtensor_cfg"]["lora_cfg"], "exclude_modules": ["*.mlp.experts.*", "gate"]}
        policy |= {"dtensor_cfg": {"lora_cfg": lora}}
    config = write_config({**SETTINGS, "policy": policy})
    done = coordinator("up", config, "grpo.max_num_steps=2", "grpo.val_period=2", "refit.alias=never")
    assert done.returncode == 0, done.stdout + done.stderr
    for step in steps_of():
        assert step.metrics["token_mult_prob_error"] < 1.0 + 1e-5
    names = adapters_of(Path("run/checkpoints/step_2"))
    parts = {name.split(".layers.")[1].partition(".")[2].rsplit(".", 2)[0] for name in names}
    of_mlp = {f"mlp.{of}{part}_proj" for of in ("", "shared_experts.") for part in ("gate", "up", "down")}
    assert parts == of_mlp | {f"self_attn.{part}_proj" for part in "qkvo"}
    with read_journal(Path("run")) as journal:
        moved = [sum(record.num_bytes.values()) for record in journal.refits()]
    assert moved[1:] == [2 * sum(map(len, names.values()))] * 2
