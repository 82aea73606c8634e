"""From sharded trainers to sharded engines in real memory; the digests of both agree, or tell what is wrong."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from lora_harness import HOST, MODEL

from tandem.refit.adapters.deployment import ParallelDeployment
from tandem.refit.adapters.dtensor import DTensor
from tandem.refit.adapters.vllm import Vllm
from tandem.refit.digests.comparison import DigestVerdict, compare
from tandem.refit.digests.task import DigestTask
from tandem.refit.layout import Layout
from tandem.refit.planner import TransferPlan, plan
from tandem.refit.transports import shm
from tandem.refit.weights import BoundProgram, bind

Memory = dict[str, torch.Tensor]


class Refit:
    """Two trainers and one engine of two ranks, in the memory of this process."""

    def __init__(self, trainers: ParallelDeployment, engine: ParallelDeployment, wanted: Any) -> None:
        random = torch.Generator().manual_seed(0)
        self.sources: dict[str, Layout] = {}
        self.memory: dict[str, Memory] = {}
        for rank, layout in enumerate(trainers.layouts(MODEL, HOST)):
            held = {s.name: torch.randn(s.num_bytes // 4, generator=random) for s in layout.storages}
            storages = tuple(msgspec.structs.replace(s, address=shm.share(held[s.name])) for s in layout.storages)
            self.sources[f"trainer-{rank}"] = msgspec.structs.replace(layout, storages=storages)
            self.memory[f"trainer-{rank}"] = held
        self.engines: dict[str, Layout] = {}
        for rank, layout in enumerate(engine.layouts(wanted, HOST)):
            self.engines[f"rollout-{rank}"] = layout
            self.memory[f"rollout-{rank}"] = {
                s.name: torch.zeros(s.num_bytes, dtype=torch.uint8) for s in layout.storages
            }
        self.plan: TransferPlan = plan(self.sources, self.engines, allow_alias=False)
        self.bound: dict[str, BoundProgram] = {
            member: bind(program, self.memory[member]) for member, program in self.plan.programs.items()
        }

    def run(self) -> None:
        for engine in self.engines:
            self.bound[engine].run(60.0)

    def verdict(self) -> DigestVerdict:
        held = {member: (layout, self._digests(member, layout)) for member, layout in self.sources.items()}
        engine = {member: (layout, self._digests(member, layout)) for member, layout in self.engines.items()}
        return compare(held, {"rollout": engine})

    def _digests(self, member: str, layout: Layout) -> np.ndarray[Any, np.dtype[np.uint64]]:
        program = self.plan.programs[member]
        memory = {**self.memory[member], **self.bound[member].staging}
        return DigestTask(layout, memory, program.verification, quantisations=program.quantisations).result()


@pytest.fixture(params=["float32", "bfloat16", "float8"])
def refit(request: pytest.FixtureRequest) -> Refit:
    wanted = MODEL.quantised((8, 8)) if request.param == "float8" else MODEL.cast(request.param)
    return Refit(DTensor(shard=2), Vllm(tp=2), wanted)


def test_what_arrives_is_what_was_sent_and_every_tensor_is_verified(refit: Refit) -> None:
    assert refit.verdict().differences[0].num_tensors > 10, "nothing has arrived yet"
    refit.run()
    verdict = refit.verdict()
    assert verdict.differences == ()
    for member, layout in refit.sources.items():
        verified = refit.plan.programs[member].verification
        assert {layout.tensors[t].name for t in layout.pieces.tensor_P[verified.rows]} <= {
            t.name for t in MODEL.tensors
        }
        assert "" not in verified.dtypes
    refit.memory["trainer-1"]["model.layers.1.mlp.down_proj.weight"][3] += 1.0
    assert refit.verdict().digest != verdict.digest
    assert refit.verdict().differing == {"rollout": "model.layers.1.mlp.down_proj.weight"}
    refit.run()
    assert refit.verdict().differences == ()


def test_a_bit_that_flips_at_the_receiver_is_told(refit: Refit) -> None:
    refit.run()
    memory = refit.memory["rollout-1"]["model.layers.0.mlp.gate_up_proj.weight"]
    memory[17] ^= 4
    bound = refit.bound["rollout-1"]
    told = refit.verdict().differing.get("rollout", "") + ", ".join(bound.misquantised())
    assert told in ("model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight")
    memory[17] ^= 4
    for staging in bound.staging.values():
        staging[5] ^= 1
    differs = bool(refit.verdict().differences)
    assert differs == bool(bound.staging)
