"""Streams of what changed, between real processes: equal to the bit, small, and whole again after a failure."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.common.errors import RefitError
from tandem.refit.adapters.catalogue import make_shape
from tandem.refit.adapters.deployment import HostNames
from tandem.refit.adapters.megatron import Megatron
from tandem.refit.adapters.vllm import Vllm
from tandem.refit.layout import Layout
from tandem.refit.planner import TransferPlan, plan
from tests.harness import rendezvous as meeting
from tests.harness.processes.stream_processes import (
    Member,
    Remote,
    Shapes,
    differing,
    fsdp,
    give_keys,
    planned,
    remotes,
    save,
    tensor_parallel,
)
from tests.harness.rendezvous import Rendezvous

SHAPES: Shapes = {"embed": (1500, 1000), "down": (600, 2000), "norm": (1500,), "experts": (4, 300, 100)}
SHARE = 0.01
DEADLINE_S = 120.0
"""Of what does not fail: a machine may have much else to do."""
EXPERTS = {
    "model_type": "qwen3_moe",
    "hidden_size": 256,
    "intermediate_size": 384,
    "moe_intermediate_size": 128,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 2048,
    "tie_word_embeddings": False,
}

rendezvous = meeting.rendezvous


@pytest.fixture(autouse=True, params=["group", "tcp"])
def over(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Have members connect over gloo, and over TCP."""
    if request.param == "tcp":
        give_keys(tmp_path)


class Scene:
    """Layouts, their plan, and the member that lives in this process."""

    def __init__(
        self, folder: Path, sources: dict[str, Layout], engines: dict[str, Layout], own: str, largest: float = 1.0
    ) -> None:
        self.folder = folder
        self.plan: TransferPlan = plan(sources, engines, allow_alias=False)
        save(folder, self.plan, {**sources, **engines}, largest_difference=largest)
        self.own = Member(own, folder)
        self.others: dict[str, Remote] = {}
        self.names = [name for name in (*sources, *engines) if name != own]

    def connect(self, port: int, epoch: int = 0) -> None:
        for other in self.others.values():
            other.tell("connect", host="127.0.0.1", port=port, epoch=epoch)
        self.own.connect("127.0.0.1", port, epoch)
        for other in self.others.values():
            assert other.reply() == {}

    def tell(self, version: int, only: list[str] | None = None, deadline_s: float = DEADLINE_S) -> None:
        """Write a version at the trainers, and have the others begin their part."""
        ends = {name: self.others[name] for name in self.others if only is None or name in only or "trainer" in name}
        for name, other in ends.items():
            if "trainer" in name:
                other.ask("write", version=version, share=SHARE)
        if "trainer" in self.own.name:
            self.own.obey({"do": "write", "version": version, "share": SHARE})
        for other in ends.values():
            other.tell("run", deadline_s=deadline_s, only=only)

    def run(self, version: int, only: list[str] | None = None, *, is_compared: bool = True) -> dict[str, int]:
        """Move a version to the engines, to all or only to some; return the bytes that each of them got.

        `is_compared`: engines hold each element as the trainers do, but for its type, and all of them are compared.
        """
        self.tell(version, only)
        takes_part = only is None or self.own.name in only or "trainer" in self.own.name
        counted: dict[str, dict[str, int]] = {}
        if takes_part:
            counted[self.own.name] = self.own.bound.run(DEADLINE_S, only)
        for name, other in self.others.items():
            if only is None or name in only or "trainer" in name:
                reply = other.reply()
                assert "error" not in reply, reply
                counted[name] = reply["counted"]
        received: dict[str, int] = {}
        for name, links in counted.items():
            for link, count in links.items():
                source, _, destination = link.partition(">")
                assert counted[source][link] == counted[destination][link], "both ends counted the same"
                if destination == name:
                    received[name] = received.get(name, 0) + count
        for name in received if is_compared else ():
            assert self.differing(name, version) == []
        return received

    def differing(self, name: str, version: int) -> list[str]:
        """Return the tensors of an engine that are not this version's."""
        if name == self.own.name:
            return differing(self.own.layout, self.own.storages, version, "float32", share=SHARE)
        found: list[str] = self.others[name].ask("differing", version=version, source_dtype="float32", share=SHARE)[
            "differing"
        ]
        return found

    def whole(self, name: str) -> int:
        """Return the bytes of an engine's weights."""
        return sum(n for link, n in planned(self.plan, name).items() if link.endswith(f">{name}"))


def is_small(num_bytes: int, whole: int) -> bool:
    return 0 < num_bytes < whole / 20


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_changed_is_resharded_on_its_way(dtype: str, rendezvous: Rendezvous, tmp_path: Path) -> None:
    """From rows of four trainers to columns, rows and experts of two engines, each on its own host."""
    sources = {f"trainer-{rank}": fsdp(rank, 4, SHAPES) for rank in range(4)}
    engines = {f"rollout-{rank}": tensor_parallel(rank, 2, SHAPES, dtype, f"host-{rank}") for rank in range(2)}
    scene = Scene(tmp_path, sources, engines, own="rollout-0")
    with remotes(tmp_path, scene.names) as scene.others:
        scene.connect(rendezvous.port)
        whole = {name: scene.whole(name) for name in engines}
        assert scene.run(1) == whole
        for version in (2, 3):
            assert all(is_small(count, whole[name]) for name, count in scene.run(version).items())
        assert scene.run(3) == dict.fromkeys(engines, 0), "nothing has changed"
        assert all(is_small(count, whole[name]) for name, count in scene.run(4).items())
        scene.own.close()


@pytest.mark.parametrize("dtype", ["bfloat16", "float8"])
def test_experts_of_megatron_are_resharded_for_vllm_as_whole_weights_are(
    dtype: str, rendezvous: Rendezvous, tmp_path: Path
) -> None:
    """Engines in float8 make it of what has changed, and hold the same bits as engines that are sent everything."""
    model = make_shape(EXPERTS, "bfloat16")
    trainers = Megatron(tp=2, dp=2, ep=2).layouts(model, HostNames("trainers", 1, has_gpus=False))
    held = model.quantised((64, 64)) if dtype == "float8" else model
    workers = Vllm(tp=2, pp=2, expert_parallel=True).layouts(held, HostNames("engines", 1, has_gpus=False))
    sources = {f"trainer-{rank}": each for rank, each in enumerate(trainers)}
    engines = {f"rollout-0/{rank}": each for rank, each in enumerate(workers)}
    memories: dict[float, list[dict[str, Any]]] = {0.0: [], 1.0: []}
    counted: dict[float, list[int]] = {0.0: [], 1.0: []}
    for epoch, largest in enumerate(memories):
        folder = tmp_path / str(epoch)
        folder.joinpath("rollout-0").mkdir(parents=True)
        scene = Scene(folder, sources, engines, own="trainer-0", largest=largest)
        assert all(bool(scene.plan.programs[name].quantisations) == (dtype == "float8") for name in engines)
        with remotes(folder, scene.names) as scene.others:
            scene.connect(rendezvous.port, epoch)
            for version in (1, 2, 3):
                counted[largest].append(sum(scene.run(version, is_compared=False).values()))
                memories[largest].append({name: scene.others[name].ask("memory") for name in engines})
            scene.own.close()
    assert memories[1.0] == memories[0.0]
    assert all(memories[1.0][0] != memory for memory in memories[1.0][1:])
    whole = sum(link.num_bytes for link in scene.plan.links if link.round == 0)
    passed_on = sum(link.num_bytes for link in scene.plan.links if link.round)
    assert counted[0.0] == [whole + passed_on] * 3
    assert counted[1.0][0] == whole + passed_on
    assert all(is_small(num_bytes - passed_on, whole) for num_bytes in counted[1.0][1:]), counted


def test_engines_of_one_host_pass_whole_weights_on(rendezvous: Rendezvous, tmp_path: Path) -> None:
    sources = {"trainer-0": fsdp(0, 1, SHAPES)}
    engines = {f"rollout-{rank}": tensor_parallel(0, 1, SHAPES, "bfloat16") for rank in range(2)}
    scene = Scene(tmp_path, sources, engines, own="rollout-0")
    assert {link.round for link in scene.plan.links} == {0, 1}
    with remotes(tmp_path, scene.names) as scene.others:
        scene.connect(rendezvous.port)
        sizes = [sum(scene.run(version).values()) for version in (1, 2)]
        within = sum(link.num_bytes for link in scene.plan.links if link.round)
        assert sizes[0] == 2 * scene.whole("rollout-0")
        assert is_small(sizes[1] - within, sizes[0] - within)
        scene.own.close()


def test_an_engine_that_missed_a_version_gets_a_whole_one(rendezvous: Rendezvous, tmp_path: Path) -> None:
    """Two engines take the same bytes, of which the trainer keeps one copy, and one of them is late or left out."""
    sources = {"trainer-0": fsdp(0, 1, SHAPES)}
    engines = {f"rollout-{rank}": tensor_parallel(0, 1, SHAPES, "bfloat16", f"host-{rank}") for rank in range(2)}
    scene = Scene(tmp_path, sources, engines, own="rollout-0")
    with remotes(tmp_path, scene.names) as scene.others:
        scene.connect(rendezvous.port)
        whole = scene.whole("rollout-0")
        assert set(scene.run(1).values()) == {whole}
        assert is_small(scene.run(2, ["rollout-0"])["rollout-0"], whole)
        assert is_small(scene.run(2, ["rollout-1"])["rollout-1"], whole), "late, and the change is still there"
        assert is_small(scene.run(3, ["rollout-0"])["rollout-0"], whole)
        received = scene.run(4)
        assert is_small(received["rollout-0"], whole)
        assert received["rollout-1"] == whole, "it missed version 3"
        assert all(is_small(count, whole) for count in scene.run(5).values())
        scene.own.close()


def test_an_engine_in_the_place_of_another_gets_a_whole_version(rendezvous: Rendezvous, tmp_path: Path) -> None:
    sources, engines = {"trainer-0": fsdp(0, 1, SHAPES)}, {"rollout-0": tensor_parallel(0, 1, SHAPES, "bfloat16")}
    scene = Scene(tmp_path, sources, engines, own="trainer-0")
    whole = scene.whole("rollout-0")
    with remotes(tmp_path, ["rollout-0"]) as scene.others:
        scene.connect(rendezvous.port)
        assert scene.run(1) == {"rollout-0": whole}
        assert is_small(scene.run(2)["rollout-0"], whole)
    with remotes(tmp_path, ["rollout-0"]) as scene.others:
        scene.connect(rendezvous.port, epoch=1)
        assert scene.run(3) == {"rollout-0": whole}
        assert is_small(scene.run(4)["rollout-0"], whole)
        scene.own.close()


def test_a_trainer_that_is_replaced_in_the_middle_sends_a_whole_version(rendezvous: Rendezvous, tmp_path: Path) -> None:
    """What it had begun to send is in the engine's weights; the other knows nothing of it."""
    sources, engines = {"trainer-0": fsdp(0, 1, SHAPES)}, {"rollout-0": tensor_parallel(0, 1, SHAPES, "bfloat16")}
    scene = Scene(tmp_path, sources, engines, own="rollout-0")
    whole = scene.whole("rollout-0")
    with remotes(tmp_path, ["trainer-0"]) as scene.others:
        scene.connect(rendezvous.port)
        assert scene.run(1) == {"rollout-0": whole}
        before = scene.own.storages["everything"].clone()
        trainer = scene.others["trainer-0"]
        trainer.ask("die_after", num_messages=12)
        scene.tell(2)
        with pytest.raises(RefitError, match=r"rollout-0 failed while receiving \w+ from trainer-0"):
            scene.own.bound.run(DEADLINE_S)
        assert not torch.equal(before, scene.own.storages["everything"]), "it is partial"
    with remotes(tmp_path, ["trainer-0"]) as scene.others:
        scene.connect(rendezvous.port, epoch=1)
        assert scene.run(2) == {"rollout-0": whole}
        assert is_small(scene.run(3)["rollout-0"], whole)
        scene.own.close()


def test_an_engine_that_is_killed_in_the_middle_costs_the_others_nothing(
    rendezvous: Rendezvous, tmp_path: Path
) -> None:
    sources = {"trainer-0": fsdp(0, 1, SHAPES)}
    engines = {f"rollout-{rank}": tensor_parallel(0, 1, SHAPES, "bfloat16", f"host-{rank}") for rank in range(2)}
    scene = Scene(tmp_path, sources, engines, own="trainer-0")
    whole = scene.whole("rollout-0")
    with remotes(tmp_path, scene.names) as scene.others:
        scene.connect(rendezvous.port)
        assert set(scene.run(1).values()) == {whole}
        scene.others["rollout-1"].ask("die_after", num_messages=12)
        scene.tell(2)
        with pytest.raises(RefitError, match=r"trainer-0 failed while sending \w+ to rollout-1") as failure:
            scene.own.bound.run(DEADLINE_S)
        assert "rollout-0" not in str(failure.value)
        assert is_small(scene.others["rollout-0"].reply()["counted"]["trainer-0>rollout-0"], whole)
        assert scene.differing("rollout-0", 2) == []
        assert is_small(scene.run(3, ["rollout-0"])["rollout-0"], whole)
        scene.own.close()


def test_a_message_that_is_lost_costs_the_deadline_and_a_whole_version(rendezvous: Rendezvous, tmp_path: Path) -> None:
    sources, engines = {"trainer-0": fsdp(0, 1, SHAPES)}, {"rollout-0": tensor_parallel(0, 1, SHAPES, "bfloat16")}
    scene = Scene(tmp_path, sources, engines, own="trainer-0")
    whole = scene.whole("rollout-0")
    with remotes(tmp_path, ["rollout-0"]) as scene.others:
        scene.connect(rendezvous.port)
        assert scene.run(1) == {"rollout-0": whole}
        scene.others["rollout-0"].ask("lose_message", number=3)
        scene.tell(2, deadline_s=1.0)
        started = time.monotonic()
        with pytest.raises(RefitError, match="trainer-0 failed while sending"):
            scene.own.bound.run(DEADLINE_S)
        assert time.monotonic() - started < DEADLINE_S - 1
        assert "rollout-0 failed while receiving" in scene.others["rollout-0"].reply()["error"]
        scene.connect(rendezvous.port, epoch=1)
        assert scene.run(2) == {"rollout-0": whole}
        assert is_small(scene.run(3)["rollout-0"], whole)
        scene.own.close()


def test_a_flipped_bit_is_gone_after_a_whole_version(rendezvous: Rendezvous, tmp_path: Path) -> None:
    """The transfer cannot know; who compares digests has the sender distrust the engine."""
    sources, engines = {"trainer-0": fsdp(0, 1, SHAPES)}, {"rollout-0": tensor_parallel(0, 1, SHAPES, "bfloat16")}
    scene = Scene(tmp_path, sources, engines, own="trainer-0")
    whole = scene.whole("rollout-0")
    with remotes(tmp_path, ["rollout-0"]) as scene.others:
        scene.connect(rendezvous.port)
        assert scene.run(1) == {"rollout-0": whole}
        scene.others["rollout-0"].ask("damage")
        scene.tell(2)
        scene.own.bound.run(DEADLINE_S)
        assert scene.others["rollout-0"].reply()["counted"]
        assert scene.differing("rollout-0", 2) == ["embed"]
        scene.own.bound.distrust(["rollout-1"])
        scene.own.bound.distrust(["rollout-0"])
        assert scene.run(2) == {"rollout-0": whole}
        assert is_small(scene.run(3)["rollout-0"], whole)
        scene.own.close()


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [
        ("kind", 9, "what came in the place of its header is none"),
        ("num_changed", -1, "what came in the place of its header is none"),
        ("num_changed", 10**9, "what came in the place of its header is none"),
        ("num_gaps", -(10**9), "what came in the place of its header is none"),
        ("num_gaps", 10**9, "what came in the place of its header is none"),
        ("after", 0, "what came in the place of its header is none"),
        ("before", 7, "it is a difference from weights that are not here"),
    ],
)
def test_a_header_that_cannot_be_is_refused(
    field: str, value: int, why: str, rendezvous: Rendezvous, tmp_path: Path
) -> None:
    sources, engines = {"trainer-0": fsdp(0, 1, SHAPES)}, {"rollout-0": tensor_parallel(0, 1, SHAPES, "bfloat16")}
    scene = Scene(tmp_path, sources, engines, own="rollout-0")
    with remotes(tmp_path, ["trainer-0"]) as scene.others:
        scene.connect(rendezvous.port)
        scene.run(1)
        scene.others["trainer-0"].ask("forge_header", **{field: value})
        scene.tell(2)
        with pytest.raises(RefitError, match=why):
            scene.own.bound.run(DEADLINE_S)
        assert "trainer-0 failed while sending" in scene.others["trainer-0"].reply()["error"]
        scene.connect(rendezvous.port, epoch=1)
        assert scene.run(3) == {"rollout-0": scene.whole("rollout-0")}
        scene.own.close()
