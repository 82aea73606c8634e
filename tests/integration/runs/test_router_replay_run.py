"""Rollout routing replay in runs: over several turns and refits in flight, recorded, and replayed with and without."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from tandem.common.errors import ConfigError
from tandem.config import build_config
from tandem.samples.recorded_shards import read_step
from tandem.samples.routed_experts import COLUMN, RoutedExperts
from tests.harness.runs.record_harness import kill_after, record_of
from tests.harness.runs.running import HOLDS, coordinator, merged, steps_of, weights_of, write_config

EXPERTS = RoutedExperts(num_layers=3, num_experts=8, top_k=2)
TALKS = f"""{HOLDS}
from tandem.rollout.environments import Score, Turn

class Talks:
    '''Answers once; every digit of the policy's is worth a tenth.'''

    def step(self, problem, conversation):
        said = [message["content"] for message in conversation if message["role"] == "assistant"]
        reward = 0.1 * sum(character.isdigit() for character in said[-1])
        if len(said) == 2:
            wait_while_held()
            return Score(reward, correct=reward > 0.2)
        return Turn([{{"role": "user", "content": "+1"}}], reward)
"""
REPLAYED: dict[str, Any] = {
    "grpo": {
        "max_num_steps": 3,
        "val_period": 0,
        "max_rollout_turns": 2,
        "async_grpo": {"enabled": True, "max_trajectory_age_steps": 1, "in_flight_weight_updates": True},
    },
    "loss_fn": {"use_importance_sampling_correction": True, "reference_policy_kl_penalty": 0.01},
    "policy": {
        "router_replay": {"enabled": True},
        "precision": "bfloat16",
        "new_model": {
            "config": {
                "model_type": "qwen3_moe",
                "num_hidden_layers": 3,
                "mlp_only_layers": [1],
                "num_experts": 8,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 16,
                "norm_topk_prob": True,
            }
        },
        "generation": {"async_engine": True, "colocated": {"enabled": False}},
    },
    "env": {"mine": {"class": "talking.Talks", "timeout_s": 300.0}},
    "cluster": {"gpus_per_node": 0},
    "checkpointing": {"metric_name": "reward", "save_period": 3},
}


RESUMED = merged(
    REPLAYED,
    {
        "grpo": {"max_num_steps": 7, "async_grpo": {"enabled": False}},
        "policy": {"generation": {"async_engine": False, "colocated": {"enabled": True}}},
        "checkpointing": {"save_period": 3, "keep_top_k": None},
    },
)


def write_replayed(settings: dict[str, Any]) -> Path:
    """Write a configuration, and the environment that it names."""
    Path("talking.py").write_text(TALKS)
    config = write_config(settings)
    written = yaml.safe_load(config.read_text())
    del written["policy"]["new_model"]["config"]["head_dim"]  # which this type does not have
    config.write_text(yaml.safe_dump(written))
    return config


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recorded")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        run = coordinator("up", write_replayed(REPLAYED))
    assert run.returncode == 0, run.stdout + run.stderr
    return folder


@pytest.fixture
def run(recorded: Path) -> str:
    shutil.copytree(recorded, ".", dirs_exist_ok=True, symlinks=True)
    return "run"


def test_samples_say_where_each_token_went(recorded: Path) -> None:
    samples = [sample for step in (1, 2, 3) for sample in read_step(recorded / "run/samples", step)]
    assert len(samples) == 3 * 16
    assert max(sample.scored.num_turns for sample in samples) == 2
    for sample in samples:
        experts_TLK = EXPERTS.decode(sample.arrays.columns[COLUMN])
        assert len(experts_TLK) == sample.scored.num_tokens
        assert (experts_TLK[:-1, [0, 2]] >= 0).all(), "of all turns, and of what was said between them"
        assert (experts_TLK[-1] < 0).all(), "which no engine has computed"
        assert (experts_TLK[:, 1] < 0).all(), "a dense layer"
    for step in steps_of(recorded / "run"):
        assert 1 <= step.metrics["token_mult_prob_error"] < 1.05


def test_a_replay_of_the_record_gives_the_same_weights_and_none_without_routes(run: str) -> None:
    same = coordinator("replay", run, "logger.log_dir=same")
    assert same.returncode == 0, same.stdout + same.stderr
    assert weights_of("same/checkpoints/step_3") == weights_of("run/checkpoints/step_3")
    other = coordinator("replay", run, "policy.router_replay.enabled=false", "logger.log_dir=other")
    assert other.returncode == 0, other.stdout + other.stderr
    assert weights_of("other/checkpoints/step_3") != weights_of("run/checkpoints/step_3")


def test_a_run_that_is_resumed_replays_the_routes_of_recorded_samples() -> None:
    config = write_replayed(RESUMED)
    whole = coordinator("up", config, "logger.log_dir=whole")
    assert whole.returncode == 0, whole.stdout + whole.stderr
    last = kill_after(config, 5)[-1].step
    assert 5 <= last < 7
    before, since = routes_of("run"), time.time()
    resumed = coordinator("up", config, "--resume")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert "had been generated, and are not generated again" in resumed.stdout
    # Steps 4 and 5 are trained anew on samples of the record; where tokens went to other experts, weights would differ.
    for step in steps_of("run"):
        if 3 < step.step <= last:
            made = [sample.finished_at for sample in read_step(Path("run/samples"), step.step)]
            assert max(made) < since < step.committed_at
    assert weights_of("run/checkpoints/step_6") == weights_of("whole/checkpoints/step_6")
    again = routes_of("run")
    assert before.items() <= again.items()
    assert again == routes_of("whole")


def routes_of(run: str) -> dict[tuple[int, int, int], bytes]:
    """Return where the tokens of each sample of a record went."""
    samples = ((step, each) for step, rows in record_of(run).items() for each in rows)
    return {
        (step, each.scored.group, each.scored.sample): each.arrays.columns[COLUMN].tobytes() for step, each in samples
    }


DENSE = {"policy": {"new_model": {"config": {"model_type": "qwen3"}}}}


@pytest.mark.parametrize(
    ("over", "why"),
    [
        (DENSE, "true, but qwen3, the model of policy.model_name, has no experts"),
        ({"algorithm": "sft"}, "true, but no engine generates what SFT trains on"),
        (
            {"policy": {"new_model": {"config": {"model_type": "granitemoe", "num_local_experts": 8}}}},
            "true, but policy.dtensor_cfg supports qwen2_moe, qwen3_moe, mixtral, olmoe, glm4_moe, deepseek_v3, "
            "gpt_oss, not granitemoe",
        ),
        (
            {
                "policy": {
                    "megatron_cfg": {
                        "enabled": True,
                        "moe_router_load_balancing_type": "sinkhorn",
                        "optimizer": {"lr": 1e-3},
                    }
                }
            },
            "true, but policy.megatron_cfg.moe_router_load_balancing_type is sinkhorn",
        ),
        (
            {
                "policy": {
                    "megatron_cfg": {
                        "enabled": True,
                        "pipeline_model_parallel_size": 2,
                        "recompute_granularity": "selective",
                        "recompute_modules": ["moe"],
                        "optimizer": {"lr": 1e-3},
                    }
                },
                "cluster": {"trainers": 2},
            },
            "true, but policy.megatron_cfg.recompute_modules has moe",
        ),
        ({"policy": {"max_total_sequence_length": 2**26}}, "6 bytes of experts a token, more than 256 MB in all"),
    ],
    ids=["dense", "no engine", "unknown routers", "sinkhorn", "recomputation", "too long"],
)
def test_what_cannot_be_replayed_is_refused_by_name(over: dict[str, Any], why: str) -> None:
    policy = {
        "model_name": "nowhere",
        "tokenizer": {},
        "router_replay": {"enabled": True},
        "new_model": {"characters": "01", "config": REPLAYED["policy"]["new_model"]["config"]},
    }
    config = {"algorithm": "grpo", "policy": policy, "data": {"dataset_name": "reasoning_gym", "task": "chain_sum"}}
    settings = merged(config, over)
    if over is DENSE:
        settings["policy"]["new_model"]["config"] = {"model_type": "qwen3"}
    if settings["policy"]["new_model"]["config"]["model_type"] == "granitemoe":
        settings["policy"]["new_model"]["config"] = over["policy"]["new_model"]["config"]
    with pytest.raises(ConfigError) as caught:
        build_config(settings)
    (line,) = [line for line in caught.value.problems if "router_replay" in line]
    assert line.startswith("configuration: policy.router_replay.enabled: ")
    assert why in line
