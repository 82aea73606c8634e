"""A rank that is slow is told from those that wait for it, however ranks share the work."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tandem.config import Config
from tandem.config.schema.columns import Model
from tandem.trainer.backend import LossOfMicroBatch
from tandem.trainer.backends import make_backend
from tandem.trainer.micro_batches import MicroBatch
from tandem.trainer.rank_time import measured
from tandem.trainer.scores import TokenScores
from tests.harness.trainers.megatron_harness import OPTIMIZER, make_checkpoint
from tests.harness.trainers.trainer_harness import make_batch, make_config, run_ranks, train_on

pytestmark = pytest.mark.usefixtures("rank_server")

SLOW, SLOW_S = 1, 2.0
"""The rank that takes so long more for a step than the other."""
CASES: dict[str, dict[str, Any]] = {
    "FSDP2": {},
    "TP2": {"dtensor_cfg": {"tensor_parallel_size": 2}},
    "CP2": {"dtensor_cfg": {"context_parallel_size": 2}},
    "Megatron, TP2": {"megatron_cfg": {"tensor_model_parallel_size": 2}},
    "Megatron, PP2": {"megatron_cfg": {"pipeline_model_parallel_size": 2}},
    "Megatron, EP2": {"megatron_cfg": {"expert_model_parallel_size": 2}},
}


def times_of(rank: int, config: Config) -> tuple[float, float]:
    """Train one step, on one rank slowly; return the seconds of the rank's own work, and those that it waited.

    It waits for the other rank, or for a processor, of which a busy machine gives one rank more than the other.
    """
    os.environ["NRL_MEGATRON_CHECKPOINT_DIR"] = f"{config.policy.model_name}-converted"
    backend = make_backend(config, checkpoint=None)
    real = backend.train_step

    def late(micro_batches: list[MicroBatch], loss: LossOfMicroBatch, model: Model, **how: bool) -> Any:
        def of_micro_batch(batch: MicroBatch, scores_BT: TokenScores) -> torch.Tensor:
            time.sleep(SLOW_S / len(micro_batches))
            return loss(batch, scores_BT)

        return real(micro_batches, of_micro_batch if rank == SLOW else loss, model, **how)

    backend.train_step = late  # type: ignore[method-assign]
    dist.barrier()
    with measured(backend.device) as found:
        train_on(backend, make_batch(), config)
    backend.close()
    return found.compute_s - found.queued_s, found.waited_s + found.queued_s


@pytest.mark.parametrize("policy", CASES.values(), ids=CASES)
def test_what_a_rank_waits_for_is_not_its_own_work(policy: dict[str, Any], tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model", "qwen3_moe" if "expert" in str(policy) else "qwen3")
    if "megatron_cfg" in policy:
        policy = {"megatron_cfg": {"enabled": True, "optimizer": OPTIMIZER, **policy["megatron_cfg"]}}
    (fast_s, waited_s), (slow_s, waited_by_slow_s) = run_ranks(2, times_of, make_config(model, trainers=2, **policy))
    assert slow_s >= SLOW_S
    assert slow_s - fast_s > SLOW_S / 2, "the rank that was not slowed only waited"
    assert waited_s - waited_by_slow_s > SLOW_S / 2


def test_nothing_is_measured_outside_of_the_block_and_other_threads_count_nothing() -> None:
    before = dist.Work.wait
    with measured(torch.device("cpu")) as found:
        assert dist.Work.wait is not before
        time.sleep(0.05)
    assert dist.Work.wait is before
    assert found.compute_s >= 0.05
    assert found.waited_s == 0.0
    with pytest.raises(RuntimeError, match="broken"), measured(torch.device("cpu")) as found:
        raise RuntimeError("broken")
    assert dist.Work.wait is before
    assert found.compute_s == 0.0
