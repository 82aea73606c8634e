"""Weights stream between real processes, are resharded on the way, and processes are killed while they do."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from tandem.common.errors import RefitError
from tandem.refit.layout import Layout
from tandem.refit.planner import TransferPlan, plan
from tandem.refit.transfer import TransferGroup
from tandem.refit.transports import process_group
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
from tests.harness.runs.running import Awake

SMALL: Shapes = {"q": (24, 10), "k": (8, 10), "up": (40, 10), "down": (10, 40), "norm": (10,), "experts": (4, 6, 10)}
LARGE: Shapes = {"embed": (3000, 1500), "down": (1000, 3000), "norm": (1500,)}  # 18 and 12 MB in float32
DEADLINE_S, SOON_S = 120.0, 30.0
"""Of what does not wait for ever, and of what says at once that it fails: a machine may have much else to do."""

rendezvous = meeting.rendezvous


@pytest.fixture(autouse=True, params=["group", "tcp"])
def over(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Have members connect over gloo, and over TCP."""
    if request.param == "tcp":
        give_keys(tmp_path)


class Scene:
    """Layouts, their plan, and the member that lives in this process: the first engine if none is named."""

    def __init__(self, folder: Path, sources: dict[str, Layout], engines: dict[str, Layout], own: str = "") -> None:
        self.plan: TransferPlan = plan(sources, engines, allow_alias=False)
        save(folder, self.plan, {**sources, **engines})
        own = own or next(iter(engines))
        self.others = [name for name in (*sources, *engines) if name != own]
        self.own = Member(own, folder)

    def links(self, member: str) -> dict[str, int]:
        """Return the bytes that the plan has for each link of a member."""
        return planned(self.plan, member)


def connect(scene: Scene, others: Mapping[str, Remote], port: int, epoch: int = 0) -> None:
    for other in others.values():
        other.tell("connect", host="127.0.0.1", port=port, epoch=epoch)
    scene.own.connect("127.0.0.1", port, epoch)
    for other in others.values():
        assert other.reply() == {}


def run(scene: Scene, others: Mapping[str, Remote], version: int) -> None:
    """Move a version everywhere and check every element and every count."""
    for name, other in others.items():
        if name.startswith("trainer"):
            other.ask("write", version=version)
    for other in others.values():
        other.tell("run", deadline_s=DEADLINE_S)
    assert scene.own.bound.run(DEADLINE_S) == scene.links(scene.own.name)
    assert differing(scene.own.layout, scene.own.storages, version, "float32") == []
    for name, other in others.items():
        assert other.reply()["counted"] == scene.links(name)
        if name.startswith("rollout"):
            assert other.ask("differing", version=version, source_dtype="float32") == {"differing": []}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_fsdp_4_to_tensor_parallel_2(dtype: str, rendezvous: Rendezvous, tmp_path: Path) -> None:
    sources = {f"trainer-{rank}": fsdp(rank, 4, SMALL) for rank in range(4)}
    engines = {f"rollout-{rank}": tensor_parallel(rank, 2, SMALL, dtype) for rank in range(2)}
    scene = Scene(tmp_path, sources, engines)
    with remotes(tmp_path, scene.others) as others:
        connect(scene, others, rendezvous.port)
        for version in (1, 2):
            run(scene, others, version)
        scene.own.close()


def test_replicas_on_one_host_take_each_byte_once_from_outside(rendezvous: Rendezvous, tmp_path: Path) -> None:
    sources = {f"trainer-{rank}": fsdp(rank, 2, LARGE) for rank in range(2)}
    engines = {f"rollout-{rank}": tensor_parallel(0, 1, LARGE, "bfloat16") for rank in range(2)}
    scene = Scene(tmp_path, sources, engines)
    num_bytes = scene.own.storages["everything"].nbytes
    outside = sum(link.num_bytes for link in scene.plan.links if link.source.startswith("trainer"))
    assert outside == num_bytes
    assert {link.round for link in scene.plan.links} == {0, 1}
    with remotes(tmp_path, scene.others) as others:
        connect(scene, others, rendezvous.port)
        for version in (1, 2):
            run(scene, others, version)
        scene.own.close()


def test_a_trainer_that_is_killed_on_the_way_is_named_within_seconds(rendezvous: Rendezvous, tmp_path: Path) -> None:
    shapes = {"embed": (4096, 8192)}  # 128 MB: eight messages
    scene = Scene(tmp_path, {"trainer-0": fsdp(0, 1, shapes)}, {"rollout-0": tensor_parallel(0, 1, shapes)})
    with remotes(tmp_path, scene.others) as others:
        connect(scene, others, rendezvous.port)
        others["trainer-0"].ask("write", version=1)
        others["trainer-0"].ask("die_after", num_messages=4)
        received = scene.own.storages["everything"]
        others["trainer-0"].tell("run", deadline_s=DEADLINE_S)
        awake = Awake()
        with pytest.raises(
            RefitError, match=r"rollout-0 failed while receiving embed from trainer-0 .*connection was lost"
        ):
            scene.own.bound.run(DEADLINE_S)
        assert awake.seconds() < SOON_S
        assert received[-1] == 0xA5, "it is partial"
        with pytest.raises(RefitError, match="was closed before: rollout-0 failed while receiving"):
            scene.own.bound.run(1.0)
        scene.own.close()


def test_an_engine_that_is_killed_on_the_way_is_named_within_seconds(rendezvous: Rendezvous, tmp_path: Path) -> None:
    shapes = {"embed": (4096, 8192)}
    sources, engines = {"trainer-0": fsdp(0, 1, shapes)}, {"rollout-0": tensor_parallel(0, 1, shapes)}
    scene = Scene(tmp_path, sources, engines, own="trainer-0")
    with remotes(tmp_path, scene.others) as others:
        connect(scene, others, rendezvous.port)
        engine = others["rollout-0"]
        engine.tell("run", deadline_s=DEADLINE_S)
        scene.own.bound.run(DEADLINE_S)
        engine.reply()
        engine.tell("run", deadline_s=DEADLINE_S)
        time.sleep(0.5)  # it asks for the first messages, of which a part fits into the sockets
        engine.kill(signal.SIGSTOP)
        killer = threading.Timer(0.5, engine.kill)
        killer.start()
        awake = Awake()
        with pytest.raises(RefitError, match=r"trainer-0 failed while sending embed to rollout-0 .*connection was"):
            scene.own.bound.run(DEADLINE_S)
        assert awake.seconds() < SOON_S
        killer.join()
        scene.own.close()


def test_an_engine_that_dies_before_its_first_refit_is_named_within_seconds(
    rendezvous: Rendezvous, tmp_path: Path
) -> None:
    sources, engines = {"trainer-0": fsdp(0, 1, SMALL)}, {"rollout-0": tensor_parallel(0, 1, SMALL)}
    scene = Scene(tmp_path, sources, engines, own="trainer-0")
    with remotes(tmp_path, scene.others) as others:
        connect(scene, others, rendezvous.port)
        others["rollout-0"].kill()
        awake = Awake()
        with pytest.raises(RefitError, match="trainer-0 failed while sending q to rollout-0"):
            scene.own.bound.run(3.0)
        assert awake.seconds() < SOON_S, "gloo tries to connect five times"
        scene.own.close()


def test_an_engine_that_is_gone_costs_the_others_nothing(rendezvous: Rendezvous, tmp_path: Path) -> None:
    sources = {"trainer-0": fsdp(0, 1, LARGE)}
    engines = {f"rollout-{rank}": tensor_parallel(0, 1, LARGE, host=f"engine-host-{rank}") for rank in range(3)}
    scene = Scene(tmp_path, sources, engines)
    with remotes(tmp_path, scene.others) as others:
        connect(scene, others, rendezvous.port)
        run(scene, others, 1)
        others["rollout-2"].kill()
        others["trainer-0"].ask("write", version=2)
        for name in ("trainer-0", "rollout-1"):
            others[name].tell("run", deadline_s=DEADLINE_S)
        assert scene.own.bound.run(DEADLINE_S) == scene.links("rollout-0")
        told = others["trainer-0"].reply()
        assert "trainer-0 failed while sending" in told["error"]
        assert "to rollout-2" in told["error"]
        assert "rollout-1" not in told["error"]
        assert told["seconds"] < SOON_S
        assert others["rollout-1"].reply()["counted"] == scene.links("rollout-1")

        # The next refit is for those that are left.
        others["trainer-0"].ask("write", version=3)
        left = ["rollout-0", "rollout-1"]
        for name in ("trainer-0", "rollout-1"):
            others[name].tell("run", deadline_s=DEADLINE_S, only=left)
        assert scene.own.bound.run(DEADLINE_S, left) == scene.links("rollout-0")
        assert others["trainer-0"].reply()["counted"].keys() == {f"trainer-0>{name}" for name in left}
        others["rollout-1"].reply()
        assert differing(scene.own.layout, scene.own.storages, 3, "float32") == []
        scene.own.close()


def test_a_peer_that_stands_still_costs_the_deadline_and_is_met_again(rendezvous: Rendezvous, tmp_path: Path) -> None:
    scene = Scene(tmp_path, {"trainer-0": fsdp(0, 1, SMALL)}, {"rollout-0": tensor_parallel(0, 1, SMALL)})
    with remotes(tmp_path, scene.others) as others:
        connect(scene, others, rendezvous.port)
        run(scene, others, 1)
        started, awake = time.monotonic(), Awake()
        with pytest.raises(
            RefitError, match=r"rollout-0 failed while receiving .* from trainer-0 .*: the deadline passed"
        ):
            scene.own.bound.run(0.5)  # of which the trainer has not been told
        assert time.monotonic() - started > 0.4
        assert awake.seconds() < SOON_S
        answer = others["trainer-0"].ask("run", deadline_s=DEADLINE_S)
        assert "to rollout-0" in answer["error"], "who fails leaves, and the peer notices"
        assert answer["seconds"] < SOON_S
        connect(scene, others, rendezvous.port, epoch=1)
        run(scene, others, 2)
        scene.own.close()


def test_a_member_that_does_not_come_is_named(rendezvous: Rendezvous) -> None:
    transfer_group = TransferGroup("m", ("rollout-0", "trainer-0", "trainer-1"))
    with pytest.raises(
        RefitError, match=r"rollout-0 waited 0.2 s for trainer-0, trainer-1 to connect transfer group 'm'"
    ):
        process_group.connect(transfer_group, "rollout-0", rendezvous.store, torch.device("cpu"), 0.2)
    with pytest.raises(RefitError, match="rollout-7 is not in transfer group 'm'"):
        process_group.connect(transfer_group, "rollout-7", rendezvous.store, torch.device("cpu"), 0.2)


def test_a_program_without_its_mesh_says_so(tmp_path: Path) -> None:
    scene = Scene(tmp_path, {"trainer-0": fsdp(0, 1, SMALL)}, {"rollout-0": tensor_parallel(0, 1, SMALL)})
    with pytest.raises(RefitError, match=r"rollout-0 is not connected to transfer group .* of rollout-0, trainer-0"):
        scene.own.bound.run(1.0)
