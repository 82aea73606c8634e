"""Keys of TRL and verl: the error says what they are called here."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.common.errors import ConfigError
from tandem.config import build_config
from tandem.config.conform import config_type, list_keys
from tandem.config.layers import merge
from tandem.config.load import HOW_TO_IGNORE
from tandem.config.peer_names import TRL, VERL, find_peer_keys

SETTINGS: dict[str, Any] = {
    "grpo": {},
    "policy": {"model_name": "model"},
    "data": {"dataset_name": "reasoning_gym", "task": "chain_sum"},
}
KNOWN = frozenset(list_keys(config_type())) | {"env.NAME.class", "env.NAME.model_name"}
OF_LIBRARIES = ("policy.optimizer.kwargs.", "value.optimizer.kwargs.")


def put(key: str, value: object) -> dict[str, Any]:
    given: Any = value
    for part in reversed(key.split(".")):
        given = {part: given}
    return merge(SETTINGS, given)


def problems_of(settings: dict[str, Any]) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        build_config(settings)
    return caught.value.problems


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        (
            "grpo.beta",
            0.1,
            "did you mean 'loss_fn.reference_policy_kl_penalty', for DPO dpo.reference_policy_kl_penalty?",
        ),
        ("beta", 0.1, "did you mean 'loss_fn.reference_policy_kl_penalty', for DPO dpo.reference_policy_kl_penalty?"),
        ("num_iterations", 2, "did you mean 'grpo.num_iterations'?"),
        ("loss_fn.num_iterations", 2, "did you mean 'grpo.num_iterations'?"),
        ("grpo.num_generations", 4, "did you mean 'grpo.num_generations_per_prompt'?"),
        ("dpo.max_steps", 3, "did you mean 'dpo.max_num_steps'?"),
        ("max_steps", 3, "TRL's word for the algorithm's max_num_steps, such as grpo.max_num_steps"),
        ("learning_rate", 1e-6, "did you mean 'policy.optimizer.kwargs.lr'?"),
        ("optimizer.lr", 1e-6, "did you mean 'policy.optimizer.kwargs.lr'?"),
        ("policy.optimizer.lr", 1e-6, "did you mean 'policy.optimizer.kwargs.lr'?"),
        ("actor_rollout_ref.actor.optim.lr", 1e-6, "did you mean 'policy.optimizer.kwargs.lr'?"),
        ("actor_rollout_ref.rollout.n", 8, "did you mean 'grpo.num_generations_per_prompt'?"),
        ("actor_rollout_ref.actor.tau_pos", 8, "verl has it, and here there is nothing like it"),
        ("algorithm.lam", 0.9, "did you mean 'ppo.adv_estimator.gae_lambda'?"),
        ("data.max_response_length", 9, "did you mean 'policy.generation.max_new_tokens'?"),
        ("trainer.n_gpus_per_node", 8, "did you mean 'cluster.gpus_per_node'?"),
        ("critic.optim.lr", 1e-6, "did you mean 'value.optimizer.kwargs.lr'?"),
        ("vespo_k_pos", 1.0, "TRL has it, and here there is no key: the loss is a class (loss_fn.class)"),
        ("grpo.use_adaptive_entropy", True, "TRL has it, and here there is nothing like it"),
    ],
)
def test_a_peers_word_is_known(key: str, value: object, expected: str) -> None:
    (line,) = problems_of({"algorithm": "grpo", **put(key, value)})
    assert line.startswith(f"configuration: {key}: unknown key; {expected}")


def test_a_whole_file_of_verl_is_answered_key_by_key() -> None:
    """One line a setting, and none about what would be required in its place."""
    settings = {
        "algorithm": {"adv_estimator": "grpo"},
        "data": {"train_files": "a.parquet", "train_batch_size": 32},
        "actor_rollout_ref": {
            "model": {"path": "model"},
            "rollout": {"name": "vllm", "n": 8},
            "actor": {"ppo_mini_batch_size": 32, "optim": {"lr": 1e-6}, "checkpoint": {"save_contents": ["model"]}},
        },
        "trainer": {"test_freq": 20, "esi_redundant_time": 0},
    }
    lines = [line.removeprefix("configuration: ") for line in problems_of(settings)]
    keys = [line.partition(":")[0] for line in lines]
    assert sorted(keys) == sorted(
        [
            "algorithm.adv_estimator",
            "data.train_files",
            "data.train_batch_size",
            "actor_rollout_ref.model.path",
            "actor_rollout_ref.rollout.name",
            "actor_rollout_ref.rollout.n",
            "actor_rollout_ref.actor.ppo_mini_batch_size",
            "actor_rollout_ref.actor.optim.lr",
            "actor_rollout_ref.actor.checkpoint.save_contents",
            "trainer.test_freq",
            "trainer.esi_redundant_time",
            "data.dataset_name",
        ]
    )
    assert not any(HOW_TO_IGNORE in line for line in lines), "no release of NeMo-RL has them"


@pytest.mark.parametrize(
    ("peer", "name", "here"), [("TRL", *row) for row in TRL.items()] + [("verl", *row) for row in VERL.items()]
)
def test_what_a_row_says_exists_here(peer: str, name: str, here: str) -> None:
    if not here or here.startswith("no key"):
        return
    named = [word.strip(",.?:()") for word in here.split() if "." in word.strip(",.?:()")]
    for word in named:
        assert word in KNOWN or word.startswith(OF_LIBRARIES), f"{peer}'s {name}: there is no {word}"
    if not named:
        assert here.split()[0].strip(",") in {*KNOWN, "the", "up"}, f"{peer}'s {name}: {here}"
    if here.partition(" ")[0].rpartition(".")[2] == name:
        return  # a key of that name is found without the table
    (setting,) = find_peer_keys(name, 1)
    assert setting.equivalent == here


def test_other_names_are_no_peers() -> None:
    assert find_peer_keys("grpo.num_prompts", 1) == []
    assert find_peer_keys("policy.megatron_cfg.beta", 1) == [], "Megatron-Core's own words are no peer's"
    assert find_peer_keys("data.quorum", 1) == []
    assert find_peer_keys("env.exact_match.beta", 1) == []
