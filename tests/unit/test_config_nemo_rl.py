"""NeMo-RL v0.3's own files, key for key (``nemo_rl/``), are taken as they are, and `coordinator plan` explains them.

Base files and recipes for 1B to 70B, dense and with experts, GRPO, SFT and DPO, Megatron-Core and DTensor.
"""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path

import pytest

from tandem.config import Config, dump_yaml, load_config, make_plain, notices
from tandem.config.schema import LaunchConfig
from tandem.coordinator.cli import main

FILES = Path(__file__).parent / "nemo_rl"
MODELS = Path(__file__).parents[2] / "examples" / "models"

NAMES = sorted(str(path.relative_to(FILES)) for path in FILES.rglob("*.yaml"))


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(FILES)


@functools.cache
def planned(name: str, *overrides: str) -> Config:
    return load_config(name, overrides, to_run=False)


def test_every_kind_is_here() -> None:
    assert len(NAMES) == 27
    configs = [planned(name) for name in NAMES]
    kinds = {(config.algorithm, config.policy.megatron_cfg.enabled) for config in configs}
    assert kinds == {(algorithm, backend) for algorithm in ("grpo", "sft", "dpo") for backend in (False, True)}


@pytest.mark.parametrize("name", NAMES)
def test_check_takes_it_but_for_what_is_not_on_this_machine(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--resolved", name, "cluster.threads_per_process=1"]) in (1, 2)
    printed = capsys.readouterr()
    assert printed.out.startswith("algorithm: ")
    missing = [line for line in printed.err.splitlines() if line.startswith("error: ")]
    assert any(line.startswith("error: policy.model_name: ") and "does not exist" in line for line in missing)
    assert all(" does not exist" in line or " is not installed" in line for line in missing), printed.err


@pytest.mark.parametrize("name", NAMES)
def test_it_is_the_same_once_resolved(name: str, tmp_path: Path) -> None:
    config = planned(name)
    (tmp_path / "resolved.yaml").write_text(dump_yaml(config))
    assert load_config(tmp_path / "resolved.yaml", to_run=False) == config


PLANS = {
    "grpo_math_8B.yaml": (
        "8 trainer ranks: DTensor, FSDP8",
        "8 engine ranks: vLLM on one GPU, 8 engines",
        "64 prompts × 32 samples = 2,048 sequences, 4 optimizer steps",
        "of each, a rank trains on 64 sequences: at most 64 packed rows of at most 4,096 tokens",
        "log-probabilities of the policy and the reference: at most 128 packed rows of at most 8,192 tokens",
        "unknown: parameters, memory and transfers, because no config.json of it is here",
    ),
    "grpo_math_70B_megatron.yaml": (
        "64 trainer ranks, 16 to each of 4 data-parallel shards: Megatron-Core TP4 × PP4 × DP4",
        "64 engine ranks: vLLM TP4, 16 engines",
        "on the same GPUs, 8 a node",
    ),
    "grpo_math_qwen30ba3b_megatron.yaml": (
        "64 trainer ranks, 2 to each of 32 data-parallel shards: Megatron-Core TP2 × EP8 × DP32",
        "of each, a rank trains on 16 sequences: 16 micro-batches of 1",
    ),
    "grpo-deepscaler-1.5b-24K.yaml": (
        "8 trainer ranks, 2 to each of 4 data-parallel shards: DTensor, FSDP4 × TP2",
        "128 prompts × 8 samples = 1,024 sequences, 16 optimizer steps",
    ),
    "grpo_sliding_puzzle.yaml": (
        "note: policy.dtensor_cfg.sequence_parallel (true) has no effect: policy.dtensor_cfg.tensor_parallel_size is 1",
        "note: data.dataset_name is sliding_puzzle, because env has sliding_puzzle_game",
    ),
    "recipes/grpo-llama3.1-8b-instruct-2n8g-fsdp2tp1-noncolocated.yaml": (
        "8 trainer ranks: DTensor, FSDP8",
        "8 engine ranks: vLLM on one GPU, 8 engines",
        "on different GPUs, 8 a node",
        "at most 64 micro-batches of at most 4,096 tokens",
    ),
    "recipes/dpo-llama3.1-8b-instruct-4n8g-megatrontp2pp2-quick.yaml": (
        "32 trainer ranks, 4 to each of 8 data-parallel shards: Megatron-Core TP2 × PP2 × DP8",
        "no engines: dpo generates nothing, and no weights move",
        "256 pairs, 1 optimizer step",
    ),
    "recipes/sft-llama3.1-70b-8n8g-tp4pp2-long-megatron.yaml": (
        "64 trainer ranks, 8 to each of 8 data-parallel shards: Megatron-Core TP4 × PP2 × DP8",
        "512 sequences, 1 optimizer step",
    ),
}
"""What `coordinator plan` says of some of them, among other things."""


@pytest.mark.parametrize("name", NAMES)
def test_plan_explains_it_without_the_model(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", name]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    model, ranks, *_ = printed.out.splitlines()
    config = planned(name)
    assert model == config.policy.model_name
    backend = "Megatron-Core" if config.policy.megatron_cfg.enabled else "DTensor"
    assert ranks.startswith(f"  {config.cluster.trainers} trainer rank")
    assert backend in ranks
    assert sum(line.startswith("unknown: ") for line in printed.out.splitlines()) == 1
    for notice in notices(config):
        assert f"note: {notice}\n" in printed.out
    for line in PLANS.get(name, ()):
        assert line in printed.out


@pytest.mark.parametrize(
    ("name", "model", "lines"),
    [
        (
            "grpo_math_8B_megatron.yaml",
            "Llama-3.1-8B",
            # Two stages of 16 layers, the second with the output layer and the last norm; no vocabulary to pad.
            (
                "8.0 billion parameters",
                "optimizer step 8.03 8.03 16.06 8.03 0.00 0.00 40.15",
                "cuda_ipc",
                "lower bound",
            ),
        ),
        (
            "recipes/sft-llama3.1-8b-instruct-1n8g-fsdp2tp2sp.yaml",
            "Llama-3.1-8B",
            ("weights 4.02, gradients 4.02, optimizer 8.03",),
        ),
    ],
)
def test_plan_knows_memory_and_transfers_with_the_model(
    name: str, model: str, lines: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", name, f"policy.model_name={MODELS / model}"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "unknown" not in printed
    for line in lines:
        assert line in printed


def test_values_are_read_as_they_are_written() -> None:
    sft = planned("sft.yaml")
    assert sft.policy.optimizer is not None
    assert sft.policy.optimizer.kwargs["eps"] == 1e-5
    assert sft.policy.megatron_cfg.moe_router_bias_update_rate == 1e-3
    assert sft.policy.megatron_cfg.optimizer["adam_eps"] == 1e-5
    assert sft.policy.megatron_cfg.pipeline_dtype == "bfloat16"
    assert sft.logger.tensorboard.log_dir == "tb_logs-sft-dev-squad"
    assert sft.checkpointing.higher_is_better is False
    grpo = planned("grpo_math_1B.yaml")
    assert grpo.policy.sequence_packing.train_mb_tokens == 512 * 4
    assert grpo.policy.generation.max_new_tokens == 512
    assert grpo.policy.scheduler[0].kwargs == {"start_factor": 0.1, "end_factor": 1.0, "total_iters": 50}
    assert grpo.policy.scheduler[2].milestones == (50,)
    assert grpo.data.environment == "math"
    assert grpo.env["math"].num_workers == 8
    assert grpo.logger.wandb.name == "dev-OpenMathInstruct-2"


def test_trainers_and_engines_follow_the_gpus() -> None:
    share = LaunchConfig(trainers=8, rollouts=2, refit=True)
    for name, trainers, engines, shares, launch in (
        ("grpo_math_1B.yaml", 1, 1, 1, "all"),
        ("grpo_math_8B.yaml", 8, 8, 8, "all"),
        ("grpo_math_70B_megatron.yaml", 64, 16, 4, share),
        (
            "recipes/grpo-llama3.1-8b-instruct-2n8g-fsdp2tp1-noncolocated.yaml",
            8,
            8,
            8,
            LaunchConfig(trainers=8, refit=True),
        ),
        (
            "recipes/grpo-qwen2.5-32b-32n8g-fsdp2tp8sp-actckpt.yaml",
            256,
            64,
            32,
            share,
        ),
    ):
        config = planned(name)
        assert (config.cluster.trainers, config.cluster.rollouts) == (trainers, engines)
        assert config.data_parallel_size == shares
        assert config.cluster.launch == launch


def test_megatron_clips_as_the_policy_says_unless_it_says_otherwise() -> None:
    assert planned("grpo_math_1B_megatron.yaml").policy.megatron_cfg.optimizer["clip_grad"] == 1.0
    name = "recipes/sft-llama3.1-70b-8n8g-tp4pp2-long-megatron.yaml"
    assert planned(name).policy.megatron_cfg.optimizer["clip_grad"] == 0.0


def test_keys_that_only_megatron_knows_are_kept_where_they_were() -> None:
    config = planned("grpo_math_1B_megatron.yaml", "policy.megatron_cfg.moe_per_layer_logging=true")
    assert config.policy.megatron_cfg.forwarded == {"moe_per_layer_logging": True}
    assert make_plain(config)["policy"]["megatron_cfg"]["moe_per_layer_logging"] is True


def test_the_puzzle_is_made_as_its_environment_says() -> None:
    config = planned("grpo_sliding_puzzle.yaml")
    assert (config.data.dataset_name, config.data.environment) == ("sliding_puzzle", "sliding_puzzle_game")
    assert config.grpo.max_rollout_turns == 50
    assert config.data.task_params == {"size": 5, "shuffle_moves": 15}
    assert config.env["sliding_puzzle_game"].cfg["max_moves"] == 50
    assert config.policy.generation.top_k == 10000


def test_checking_and_planning_import_no_torch() -> None:
    script = """
import sys
from tandem.coordinator.cli import main
print(main(["plan", "grpo_math_70B_megatron.yaml"]), "torch" in sys.modules, "zmq" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "0 False False"
