"""Optimizers and schedules by name, against torch's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tandem.common.errors import ConfigError
from tandem.config.schema import OptimizerConfig, SchedulerEntry
from tandem.trainer.backends.dtensor import advance
from tandem.trainer.backends.optimizers import make_optimizer, make_scheduler


def parameters() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(3))]


def optimizer(name: str = "torch.optim.AdamW", **kwargs: Any) -> torch.optim.Optimizer:
    return make_optimizer(OptimizerConfig(name=name, kwargs={"lr": 0.1, **kwargs}), [parameters()])


def entry(name: str, **kwargs: Any) -> SchedulerEntry:
    return SchedulerEntry(name=f"torch.optim.lr_scheduler.{name}", kwargs=kwargs)


def rates(scheduler: torch.optim.lr_scheduler.LRScheduler, num_steps: int) -> list[float]:
    found = []
    for _ in range(num_steps):
        found.append(float(scheduler.optimizer.param_groups[0]["lr"]))
        advance(scheduler)
    return found


def test_arguments_reach_the_class() -> None:
    made = optimizer("torch.optim.SGD", momentum=0.5, nesterov=True)
    assert isinstance(made, torch.optim.SGD)
    assert (made.defaults["lr"], made.defaults["momentum"], made.defaults["nesterov"]) == (0.1, 0.5, True)


def test_the_fused_implementation_is_used_unless_the_configuration_chooses() -> None:
    assert optimizer().defaults["fused"] is True
    assert optimizer(foreach=True).defaults["fused"] is None
    chosen = optimizer(foreach=False, fused=False)
    assert (chosen.defaults["foreach"], chosen.defaults["fused"]) == (False, False)
    assert "fused" not in optimizer("torch.optim.Adamax").defaults


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        (
            "torch.optim.AdamV",
            {},
            r"policy.optimizer.name: 'torch.optim.AdamV' is no Optimizer class; did you mean 'Adam",
        ),
        ("torch.nn.Linear", {}, r"policy.optimizer.name: 'torch.nn.Linear' is no Optimizer class$"),
        ("torch.optimizers.Adam", {}, r"policy.optimizer.name: there is no module 'torch.optimizers'"),
        ("Adam", {}, r"policy.optimizer.name: there is no module ''"),
        ("torch.optim.AdamW", {"beta": 1}, r"policy.optimizer.kwargs: AdamW takes no 'beta'; did you mean 'betas'\?"),
        ("torch.optim.AdamW", {"eps": -1.0}, r"policy.optimizer.kwargs: AdamW refuses .*Invalid epsilon"),
    ],
)
def test_a_bad_optimizer_is_refused_in_one_line(name: str, kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        optimizer(name, **kwargs)
    assert "\n" not in str(raised.value)


def test_a_bad_scheduler_is_refused_with_its_place() -> None:
    with pytest.raises(ConfigError, match=r"policy.scheduler\[0\].name: .*did you mean 'LinearLR'"):
        make_scheduler([entry("LinearLr")], optimizer())
    with pytest.raises(ConfigError, match=r"policy.scheduler\[1\].kwargs: ConstantLR takes no 'facto'"):
        make_scheduler([entry("LinearLR"), entry("ConstantLR", facto=1)], optimizer())


def test_no_schedule_keeps_the_rate() -> None:
    assert rates(make_scheduler([], optimizer()), 3) == [0.1] * 3


def test_one_schedule_is_used_as_it_is() -> None:
    scheduler = make_scheduler([entry("LinearLR", start_factor=0.5, total_iters=2)], optimizer())
    assert rates(scheduler, 4) == pytest.approx([0.05, 0.075, 0.1, 0.1])


def test_schedules_follow_each_other_at_the_milestones() -> None:
    # The shape of NeMo-RL's default: warm up, then stay.
    entries = [
        entry("LinearLR", start_factor=0.1, end_factor=1.0, total_iters=3),
        entry("ConstantLR", factor=1.0, total_iters=10),
        SchedulerEntry(milestones=(3,)),
    ]
    assert rates(make_scheduler(entries, optimizer()), 6) == pytest.approx([0.01, 0.04, 0.07, 0.1, 0.1, 0.1])


@pytest.mark.parametrize(
    "entries",
    [
        [],
        [entry("CosineAnnealingLR", T_max=7)],
        [entry("MultiStepLR", milestones=[2, 4], gamma=0.3)],
        [entry("OneCycleLR", max_lr=0.3, total_steps=40)],
        [entry("LinearLR", total_iters=3), entry("ExponentialLR", gamma=0.9), SchedulerEntry(milestones=(3,))],
    ],
)
def test_a_schedule_brought_to_a_step_stands_where_an_uninterrupted_one_does(entries: list[SchedulerEntry]) -> None:
    whole = rates(make_scheduler(entries, optimizer()), 12)
    resumed = make_scheduler(entries, optimizer())
    advance(resumed, 5)
    assert rates(resumed, 7) == whole[5:]
