"""The steps over which Megatron-Core's schedules are stretched: the run's own, decided when it begins.

NeMo-RL v0.7 sets ``megatron_cfg.train_iters`` to ``min(max_num_steps, max_num_epochs * len(dataloader))`` before it
makes the policy (`grpo.py`, `sft.py`), and Megatron-Bridge takes it where ``lr_decay_iters`` is null.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers

from tandem.config import Config, build_config, config_to_json, make_plain, resume_differences
from tandem.coordinator.preparing.preflight import set_run_length
from tandem.observe.run_folder.journal_writer import Journal


def sft(folder: Path, max_num_steps: int, enabled: bool = True, **scheduler: Any) -> Config:
    megatron = {"enabled": enabled, "scheduler": {"lr_decay_style": "cosine", **scheduler}} if enabled else {}
    return build_config(
        {
            "sft": {"max_num_steps": max_num_steps},
            "policy": {"model_name": "m", "max_total_sequence_length": 64, "megatron_cfg": megatron},
            "data": {"dataset_name": "reasoning_gym", "task": "chain_sum"},
            "logger": {"log_dir": str(folder)},
        }
    )


def ppo(folder: Path) -> Config:
    return build_config(
        {
            "ppo": {"num_prompts_per_step": 4, "num_generations_per_prompt": 1},
            "policy": {
                "model_name": "m",
                "max_total_sequence_length": 64,
                "train_global_batch_size": 4,
                "megatron_cfg": {"enabled": True},
            },
            "data": {"dataset_name": "reasoning_gym", "task": "chain_sum"},
            "logger": {"log_dir": str(folder)},
        }
    )


def steps_of(config: Config) -> int | None:
    return config.policy.megatron_cfg.train_iters


def begun(config: Config) -> Config:
    """Record a run's beginning in its folder."""
    Path(config.logger.log_dir).mkdir(parents=True, exist_ok=True)
    Journal.create(Path(config.logger.log_dir), config_to_json(config), config.algorithm, "run-1").close()
    return config


def test_a_new_run_takes_the_steps_that_its_data_allow(tmp_path: Path) -> None:
    assert steps_of(set_run_length(sft(tmp_path, 60), 12, "new")) == 12
    assert steps_of(set_run_length(sft(tmp_path, 60, enabled=False), 12, "new")) is None
    both = set_run_length(ppo(tmp_path), 7, "new")
    assert both.value is not None
    assert (steps_of(both), both.value.megatron_cfg.train_iters) == (7, 7)


def test_a_resumed_run_keeps_them_however_long_it_has_become(tmp_path: Path) -> None:
    first = begun(set_run_length(sft(tmp_path, 12), 12, "new"))
    longer = set_run_length(sft(tmp_path, 60), 60, "resume")
    assert steps_of(longer) == 12
    assert not resume_differences(first, longer)
    stretched = set_run_length(sft(tmp_path, 60, override_opt_param_scheduler=True), 60, "resume")
    assert steps_of(stretched) == 60
    assert not resume_differences(first, stretched)
    assert steps_of(set_run_length(sft(tmp_path, 60), 60, "restart")) == 60


def test_a_run_of_an_earlier_release_takes_those_that_it_has_now(tmp_path: Path) -> None:
    first = begun(sft(tmp_path, 12))
    resumed = set_run_length(sft(tmp_path, 12), 12, "resume")
    assert steps_of(resumed) == 12
    assert not resume_differences(first, resumed)


def warming(folder: Path, max_num_steps: int, *, enabled: bool, **policy: Any) -> Config:
    settings = make_plain(sft(folder, max_num_steps))
    return build_config(
        {
            "sft": settings["sft"],
            "policy": {
                "model_name": "m",
                "max_total_sequence_length": 64,
                "megatron_cfg": {"enabled": enabled, "scheduler": {"lr_decay_style": "cosine"}},
                **({} if enabled else {"optimizer": {"name": "torch.optim.AdamW", "kwargs": {"lr": 3e-4}}}),
                "warmup_steps": 0.1,
                **policy,
            },
            "data": settings["data"],
            "logger": settings["logger"],
        }
    )


def warmup_of(config: Config) -> int:
    """Return the steps of a warm-up, in either backend."""
    if config.policy.megatron_cfg.enabled:
        return config.policy.megatron_cfg.scheduler.lr_warmup_iters
    (entry,) = config.policy.scheduler
    return int(entry.kwargs["total_iters"])


@pytest.mark.parametrize("enabled", [False, True])
def test_a_share_of_warmup_is_of_the_steps_that_run(tmp_path: Path, enabled: bool) -> None:
    # Transformers takes it of the steps that it trains, which epochs may end.
    expected = transformers.TrainingArguments(output_dir=".", warmup_steps=0.1).get_warmup_steps(35)
    assert warmup_of(warming(tmp_path, 60, enabled=enabled)) == 6
    first = begun(set_run_length(warming(tmp_path, 60, enabled=enabled), 35, "new"))
    assert warmup_of(first) == expected == 4
    assert warmup_of(build_config(make_plain(first))) == 4, "as a run folder has it"
    longer = set_run_length(warming(tmp_path, 600, enabled=enabled), 350, "resume")
    assert warmup_of(longer) == 4
    assert not resume_differences(first, longer)
    assert warmup_of(set_run_length(warming(tmp_path, 600, enabled=enabled), 350, "restart")) == 35
    whole = set_run_length(warming(tmp_path, 600, enabled=enabled, warmup_steps=7), 350, "resume")
    assert warmup_of(whole) == 7


def test_an_overridden_schedule_keeps_its_warmup(tmp_path: Path) -> None:
    first = begun(set_run_length(warming(tmp_path, 60, enabled=True), 35, "new"))
    scheduler = {"lr_decay_style": "cosine", "override_opt_param_scheduler": True}
    longer = warming(tmp_path, 600, enabled=True, megatron_cfg={"enabled": True, "scheduler": scheduler})
    resumed = set_run_length(longer, 350, "resume")
    assert (warmup_of(resumed), steps_of(resumed)) == (4, 350)
    assert not resume_differences(first, resumed)
