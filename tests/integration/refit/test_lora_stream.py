"""Adapters that are streamed: the base crosses once, to whoever has none yet, and engines pass on what they got."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tandem.refit.layout import Layout
from tandem.refit.planner import TransferPlan, plan
from tests.harness import rendezvous as meeting
from tests.harness.processes.stream_processes import Member, Remote, fsdp, remotes, save, tensor_parallel
from tests.harness.rendezvous import Rendezvous

WEIGHTS = {"up.weight": (40, 10), "down.weight": (10, 40), "norm": (10,)}
ADAPTERS = {"up.lora_A.weight": (2, 10), "up.lora_B.weight": (40, 2), "down.lora_A.weight": (2, 40)}
ADAPTERS |= {"down.lora_B.weight": (10, 2)}


rendezvous = meeting.rendezvous


@pytest.fixture
def port(rendezvous: Rendezvous) -> int:
    return rendezvous.port


def trainer(rank: int) -> Layout:
    layout = fsdp(rank, 2, {**WEIGHTS, **ADAPTERS})
    tensors = (
        msgspec.structs.replace(
            tensor, is_frozen=".lora_" not in tensor.name, product_scale=2.0 if "lora_B" in tensor.name else 0.0
        )
        for tensor in layout.tensors
    )
    return msgspec.structs.replace(layout, tensors=tuple(tensors))


class Scene:
    """Two trainers on hosts of their own, and two replicas on another, the first of them in this process."""

    def __init__(self, folder: Path) -> None:
        sources = {f"trainer-{rank}": trainer(rank) for rank in range(2)}
        engines = {f"rollout-{rank}": tensor_parallel(0, 1, WEIGHTS) for rank in range(2)}
        self.plan: TransferPlan = plan(sources, engines, allow_alias=False)
        save(folder, self.plan, {**sources, **engines})
        self.own = Member("rollout-0", folder)
        self.others: dict[str, Remote] = {}

    def connect(self, port: int) -> None:
        for other in self.others.values():
            other.tell("connect", host="127.0.0.1", port=port)
        self.own.connect("127.0.0.1", port)
        for other in self.others.values():
            assert other.reply() == {}

    def run(self, version: int, only: list[str] | None, joining_engines: list[str]) -> dict[str, int]:
        """Move a version; return the bytes that engines counted."""
        for rank in range(2):
            self.others[f"trainer-{rank}"].ask("write", version=version)
        for other in self.others.values():
            other.tell("run", deadline_s=120.0, only=only, joining_engines=joining_engines)
        counted = self.own.bound.run(120.0, only, joining_engines)
        replies: dict[str, Any] = {name: other.reply() for name, other in self.others.items()}
        assert all("error" not in reply for reply in replies.values()), replies
        counted = {link: count for link, count in counted.items() if link.endswith(">rollout-0")}
        of_other = replies["rollout-1"]["counted"].items()
        return counted | {link: count for link, count in of_other if link.endswith(">rollout-1")}

    def differing(self, version: int) -> dict[str, list[str]]:
        """Return for each engine the weights that it should not compute with."""
        command: dict[str, Any] = {"version": version, "source_dtype": "float32"}
        own, other = self.own.obey({"do": "differing", **command}), self.others["rollout-1"].ask("differing", **command)
        return {"rollout-0": own["differing"], "rollout-1": other["differing"]}

    def planned(self, *, first: bool) -> dict[str, int]:
        found: dict[str, int] = {}
        for link in (*self.plan.links, *(self.plan.frozen_links if first else ())):
            found[link.name] = found.get(link.name, 0) + link.num_bytes
        return found


def test_the_base_is_streamed_to_newcomers_only(port: int, tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    both = [*scene.plan.links, *scene.plan.frozen_links]
    assert {(link.transport, link.round) for link in both} == {("stream", 0), ("stream", 1)}
    outside = [link for link in scene.plan.links if link.round == 0]
    of_adapters = sum(math.prod(shape) * 4 for shape in ADAPTERS.values())
    assert sum(link.num_bytes for link in outside) == of_adapters, "to one of them, which passes it on"
    with remotes(tmp_path, ["trainer-0", "trainer-1", "rollout-1"]) as scene.others:
        scene.connect(port)
        assert scene.run(1, None, ["rollout-0", "rollout-1"]) == scene.planned(first=True)
        for version in (2, 3):
            assert scene.run(version, None, []) == scene.planned(first=False)
            assert scene.differing(version) == {"rollout-0": [], "rollout-1": []}
        # One that has lost its memory gets all of it, from trainers and from the other one, which gets nothing.
        for storage in scene.own.bound.staging.values():
            storage.fill_(float("nan"))
        alone = scene.run(3, ["rollout-0"], ["rollout-0"])
        first = scene.planned(first=True)
        assert alone == {link: count for link, count in first.items() if link.endswith(">rollout-0")}
        assert scene.differing(3) == {"rollout-0": [], "rollout-1": []}
        scene.own.close()
