"""Losses and advantages of verl 0.9: its own functions, beside Tandem's by the keys that docs/migrating.md names.

verl's package asks for Ray when it is imported. So the functions are compiled from its installed source, each alone.
"""

from __future__ import annotations

import ast
import importlib.util
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Optional

import msgspec
import numpy as np
import pytest
import torch

from tandem.config.schema import AdvEstimator, LossFn
from tandem.coordinator.algorithms.advantages import advantages
from tandem.trainer.losses import Counts
from tandem.trainer.losses.policy_gradient import PolicyGradientLoss
from tandem.trainer.micro_batches import MicroBatch
from tandem.trainer.scores import TokenScores

CPU = torch.device("cpu")
MASK_BT = torch.tensor(
    [[False, True, True, True, True], [False, False, True, True, False], [False, True, False, True, False]]
)
COUNTS = Counts(tokens=int(MASK_BT.sum()), sequences=3)
CLIPS = {"clip_ratio": 0.2, "clip_ratio_low": 0.1, "clip_ratio_high": 0.3, "clip_ratio_c": 1.5}
OURS = {"ratio_clip_min": 0.1, "ratio_clip_max": 0.3}


def compiled(file: str, names: tuple[str, ...], **around: Any) -> SimpleNamespace:
    """Return functions of a file of verl's package, which see only `around` and each other."""
    spec = importlib.util.find_spec("verl")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("verl is not installed")
    tree = ast.parse((Path(spec.submodule_search_locations[0]) / file).read_text())
    chosen = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in names]
    assert {node.name for node in chosen} == set(names)
    for node in chosen:
        node.decorator_list = []
    space = {"torch": torch, "np": np, "Any": Any, "Optional": Optional, "defaultdict": defaultdict, **around}
    module = ast.Module(body=[ast.ImportFrom("__future__", [ast.alias("annotations")], 0), *chosen], type_ignores=[])
    exec(compile(ast.fix_missing_locations(module), file, "exec"), space)
    return SimpleNamespace(**{name: space[name] for name in names})


def verl(*names: str) -> SimpleNamespace:
    functions = compiled("utils/torch_functional.py", ("masked_sum", "masked_mean"))
    return compiled(
        "trainer/ppo/core_algos.py",
        ("agg_loss", *names),
        verl_F=functions,
        ActorConfig=Settings,
        AlgoConfig=type("AlgoConfig", (), {}),
    )


class Settings(SimpleNamespace):
    """The keys of verl's actor that its losses read."""

    def get(self, name: str, default: Any) -> Any:
        return getattr(self, name, default)


def logprobs(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(3, 5, generator=generator, dtype=torch.float64) * 0.4 - 1.5


ADVANTAGES_BT = torch.tensor([[1.5], [-0.7], [0.4]], dtype=torch.float64).expand(3, 5)
ENTROPY_BT = logprobs(7).abs()


def loss_of(**settings: Any) -> tuple[float, torch.Tensor]:
    """Return Tandem's loss, and its gradient by the log-probabilities."""
    logprobs_BT = logprobs(1).requires_grad_()
    batch = MicroBatch(
        rows=(0, 1, 2),
        lengths_B=torch.tensor([5, 4, 4]),
        token_ids_BT=torch.zeros(3, 5, dtype=torch.int64),
        attention_mask_BT=torch.ones(3, 5, dtype=torch.bool),
        loss_mask_BT=MASK_BT,
        columns={
            "generation_logprobs": logprobs(2),
            "previous_logprobs": logprobs(2),
            "reference_logprobs": logprobs(3),
            "advantages": ADVANTAGES_BT,
        },
    )
    section = msgspec.structs.replace(LossFn(reference_policy_kl_penalty=0.0), **settings)
    scores = TokenScores(logprobs_BT, ENTROPY_BT, torch.zeros_like(ENTROPY_BT))
    loss = PolicyGradientLoss(section, COUNTS, CPU)(batch, scores)
    (gradient_BT,) = torch.autograd.grad(loss, logprobs_BT)
    return float(loss.detach()), gradient_BT


def assert_equal(loss: torch.Tensor, logprobs_BT: torch.Tensor, **settings: Any) -> None:
    """Compare verl's loss and its gradient with Tandem's."""
    (gradient_BT,) = torch.autograd.grad(loss, logprobs_BT)
    expected, expected_BT = loss_of(**settings)
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-6)
    torch.testing.assert_close(gradient_BT, expected_BT, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(
    ("verls", "ours"),
    [
        ({"loss_agg_mode": "token-mean"}, {"token_level_loss": True}),
        ({"loss_agg_mode": "seq-mean-token-mean"}, {"token_level_loss": False}),
        (
            {"loss_agg_mode": "seq-mean-token-sum-norm", "loss_scale_factor": 7},
            {"loss_type": "dr_grpo", "loss_scale_factor": 7},
        ),
        ({"loss_agg_mode": "seq-mean-token-sum"}, {"loss_type": "dr_grpo", "loss_scale_factor": 1}),
    ],
    ids=lambda keys: str(next(iter(keys.values()))),
)
def test_losses_are_aggregated_alike(verls: dict[str, Any], ours: dict[str, Any]) -> None:
    functions = verl("compute_policy_loss_vanilla")
    logprobs_BT = logprobs(1).requires_grad_()
    info = {"loss_scale_factor": verls["loss_scale_factor"]} if "loss_scale_factor" in verls else {}
    loss, _ = functions.compute_policy_loss_vanilla(
        logprobs(2),
        logprobs_BT,
        ADVANTAGES_BT,
        MASK_BT,
        verls["loss_agg_mode"],
        Settings(**CLIPS, global_batch_info=info),
    )
    assert_equal(loss, logprobs_BT, ratio_clip_c=1.5, **OURS, **ours)


@pytest.mark.parametrize(
    ("mode", "ours"),
    [
        ("gspo", {"sequence_level_importance_ratios": True, "token_level_loss": False}),
        ("cispo", {"use_cispo": True}),
    ],
)
def test_loss_modes_are_keys_here(mode: str, ours: dict[str, Any]) -> None:
    function = getattr(verl(f"compute_policy_loss_{mode}"), f"compute_policy_loss_{mode}")
    logprobs_BT = logprobs(1).requires_grad_()
    loss, _ = function(logprobs(2), logprobs_BT, ADVANTAGES_BT, MASK_BT, config=Settings(**CLIPS, global_batch_info={}))
    assert_equal(loss, logprobs_BT, **OURS, **ours)


def test_the_kl_penalty_with_its_unbiased_gradient_is_the_one_here() -> None:
    """With the policy before the step in its place, as in the first optimizer step, and verl's clamps."""
    functions = verl("kl_penalty", "kl_penalty_forward")
    logprobs_BT = logprobs(1).requires_grad_()
    kl_BT = functions.kl_penalty(logprobs_BT, logprobs(3), "low_var_kl+")
    loss = 0.3 * functions.agg_loss(kl_BT, MASK_BT, "token-mean")
    keys = {"reference_policy_kl_type": "k3", "kl_input_clamp_value": 20.0, "kl_output_clamp_value": 10.0}
    plain, plain_BT = loss_of()
    expected, expected_BT = loss_of(reference_policy_kl_penalty=0.3, **keys)
    (gradient_BT,) = torch.autograd.grad(loss, logprobs_BT)
    assert float(loss.detach()) == pytest.approx(expected - plain, rel=1e-6)
    torch.testing.assert_close(gradient_BT, expected_BT - plain_BT, rtol=1e-6, atol=1e-9)


def test_the_entropy_bonus_is_that_of_a_mean_over_tokens() -> None:
    """As `verl.workers.utils.losses.ppo_loss` has it: minus the coefficient times the aggregated entropy."""
    loss, _ = loss_of(entropy_coef=0.2)
    bonus = verl().agg_loss(ENTROPY_BT, MASK_BT, "token-mean")
    assert loss == pytest.approx(loss_of()[0] - 0.2 * float(bonus), rel=1e-9)


REWARDS_GN = np.array([[1.0, 2.0, 6.0, 6.0], [0.0, 0.0, 1.0, 0.0], [30.0, 10.0, 20.0, 70.0]])


@pytest.mark.parametrize("normalize", [True, False])
def test_grpos_advantages_differ_by_the_kind_of_deviation(normalize: bool) -> None:
    index = np.repeat(np.arange(3), 4)
    rewards = torch.from_numpy(REWARDS_GN.reshape(-1, 1)).clone()
    found, _ = verl("compute_grpo_outcome_advantage").compute_grpo_outcome_advantage(
        rewards, torch.ones(12, 1), index, norm_adv_by_std_in_grpo=normalize
    )
    settings = AdvEstimator(normalize_rewards=normalize, use_leave_one_out_baseline=False)
    ours_GN = advantages(REWARDS_GN, settings, np.ones((3, 4), dtype=np.bool_))
    factor = np.sqrt(3 / 4) if normalize else 1.0
    np.testing.assert_allclose(found.numpy().reshape(3, 4), ours_GN * factor, rtol=1e-5)


def test_rloos_advantages_are_equal() -> None:
    index = np.repeat(np.arange(3), 4)
    rewards = torch.from_numpy(REWARDS_GN.reshape(-1, 1)).clone()
    found, _ = verl("compute_rloo_outcome_advantage").compute_rloo_outcome_advantage(rewards, torch.ones(12, 1), index)
    ours_GN = advantages(REWARDS_GN, AdvEstimator(normalize_rewards=False), np.ones((3, 4), dtype=np.bool_))
    np.testing.assert_allclose(found.numpy().reshape(3, 4), ours_GN, rtol=1e-5, atol=1e-6)
