"""The fingerprint of a configuration whose sections may be null."""

from __future__ import annotations

from tandem.config import build_config, fingerprint


def test_a_configuration_with_a_teacher_for_each_environment_has_one() -> None:
    """Its section `teacher` is null, and checkpoints are published with the fingerprint."""
    routes = {"enabled": True, "teacher_model_by_agent_name": {"reasoning_gym": "one"}}
    config = build_config(
        {
            "algorithm": "distillation",
            "policy": {"model_name": "model", "generation": {"max_new_tokens": 8}},
            "data": {"dataset_name": "reasoning_gym", "task": "chain_sum"},
            "on_policy_distillation": routes,
        }
    )
    assert config.teacher is None
    assert fingerprint(config)
