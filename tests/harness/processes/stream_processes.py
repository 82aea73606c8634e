"""Processes that stream weights to each other: what tests start, and the script that they start.

`main` takes ``FOLDER PATH NAME ...``, also as a script. It forks one process a member, which finds its layout and
program in the folder, connects to the socket at the path, and takes orders from there, one JSON line each.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.distributed import PrefixStore, TCPStore

from tandem.common.curve import new_key_pair
from tandem.common.errors import RefitError
from tandem.common.keys import KeyPair
from tandem.common.worker_shards import process_of
from tandem.launch.child import ForkedChild
from tandem.refit import layout, program
from tandem.refit.layout import ITEM_SIZES, Box, Layout, LayoutBuilder, contiguous_strides, whole
from tandem.refit.planner import TransferPlan
from tandem.refit.program import Merging
from tandem.refit.transports import process_group, tcp_group
from tandem.refit.transports.process_group import ConnectedGroup, GroupKeys
from tandem.refit.weights import BoundProgram, bind
from tests.harness.processes import wires
from tests.harness.processes.stream_harms import HARMS
from tests.harness.processes.wires import TIMEOUT_S, Wire
from tests.harness.runs import consoles

KEYS = "keys.json"
"""File of the key pairs of all members, in their folder, if they connect over TCP."""
FROZEN_VERSION = 1
"""Of all tensors that never change."""


Shapes = Mapping[str, tuple[int, ...]]
COLUMNS = ("down",)
"""Tensors of which an engine's shard is columns."""


def fsdp(rank: int, num_ranks: int, shapes: Shapes, dtype: str = "float32") -> Layout:
    """Describe a shard of the rows of each tensor, one storage a tensor; the last rank may have fewer."""
    builder, size = LayoutBuilder(f"trainer-host-{rank}"), ITEM_SIZES[dtype]
    for name, (rows, *rest) in shapes.items():
        step = -(-rows // num_ranks)
        start, stop = min(rows, rank * step), min(rows, (rank + 1) * step)
        box = Box((start, *(0 for _ in rest)), (stop - start, *rest))
        storage = builder.storage(name, box.num_elements * size)
        builder.add(builder.tensor(name, (rows, *rest), dtype), box, storage, 0, contiguous_strides(box.shape, size))
    return builder.build()


def tensor_parallel(rank: int, size: int, shapes: Shapes, dtype: str = "float32", host: str = "engine-host") -> Layout:
    """Describe a tensor-parallel shard, all of it in one storage: rows, or columns, or a whole vector."""
    builder, item, offset, pieces = LayoutBuilder(host), ITEM_SIZES[dtype], 0, []
    for name, shape in shapes.items():
        dim = len(shape) - 1 if name in COLUMNS else 0
        box = whole(shape)
        if len(shape) > 1:
            step = shape[dim] // size
            start, extent = list(box.start), list(box.shape)
            start[dim], extent[dim] = rank * step, step
            box = Box(tuple(start), tuple(extent))
        pieces.append((builder.tensor(name, shape, dtype), box, offset))
        offset += box.num_elements * item
    storage = builder.storage("everything", offset)
    for tensor, box, at in pieces:
        builder.add(tensor, box, storage, at, contiguous_strides(box.shape, item))
    return builder.build()


def planned(plan: TransferPlan, member: str) -> dict[str, int]:
    """Return the bytes that a plan has for each link of a member."""
    found: dict[str, int] = {}
    for link in plan.links:
        if member in (link.source, link.destination):
            found[link.name] = found.get(link.name, 0) + link.num_bytes
    return found


def values(name: str, shape: tuple[int, ...], version: int) -> torch.Tensor:
    """Return a tensor of a version in float32: neighbours differ, and so do names and versions."""
    num = math.prod(shape)
    first = sum(name.encode()) * 31 + version * 7919
    if ".lora_" in name:  # of few small numbers, so that products are exact in any order
        return ((torch.arange(num, dtype=torch.int64) + first) % 7).float().reshape(shape) - 3
    return ((torch.arange(num, dtype=torch.int64) + first) % 9973).float().reshape(shape) / 64 - 70


@lru_cache(maxsize=8)
def partly(name: str, shape: tuple[int, ...], version: int, share: float) -> torch.Tensor:
    """Return a tensor of a version that differs from the one before in about this share of its elements.

    It is kept for the next version, and must not be written to.
    """
    if version <= FROZEN_VERSION:
        return values(name, shape, FROZEN_VERSION)
    generator = torch.Generator().manual_seed(sum(name.encode()) * 1000 + version)
    return partly(name, shape, version - 1, share) + version * (torch.rand(shape, generator=generator) < share)


def allocate(described: Layout) -> dict[str, torch.Tensor]:
    """Return the memory that a layout describes, as bytes of a pattern that no weight has."""
    return {s.name: torch.full((s.num_bytes,), 0xA5, dtype=torch.uint8) for s in described.storages}


def views(
    described: Layout, storages: Mapping[str, torch.Tensor]
) -> Iterator[tuple[int, tuple[slice, ...], torch.Tensor]]:
    """Yield each piece: its tensor's index, its box as slices, and a view of where it lies."""
    at = described.pieces
    for row, index in enumerate(at.tensor_P.tolist()):
        piece = described.piece(row)
        dtype = getattr(torch, described.tensors[index].dtype)
        memory = storages[described.storages[at.storage_P[row]].name].view(dtype)
        strides = [stride // dtype.itemsize for stride in piece.strides]
        box = tuple(slice(a, b) for a, b in zip(piece.box.start, piece.box.stop, strict=True))
        yield index, box, memory.as_strided(piece.box.shape, strides, piece.offset // dtype.itemsize)


def write(described: Layout, storages: Mapping[str, torch.Tensor], version: int, share: float | None = None) -> None:
    """Write a version to all pieces; with a share, one that differs from the one before only so much."""
    made: dict[int, torch.Tensor] = {}
    for index, box, view in views(described, storages):
        tensor = described.tensors[index]
        if index not in made and share is not None:
            made = {index: partly(tensor.name, tensor.shape, version, share)}
        elif index not in made:
            made = {index: values(tensor.name, tensor.shape, FROZEN_VERSION if tensor.is_frozen else version)}
        view.copy_(made[index][box])


def differing(
    described: Layout,
    storages: Mapping[str, torch.Tensor],
    version: int,
    source_dtype: str,
    merging: Merging | None = None,
    share: float | None = None,
) -> list[str]:
    """Return the tensors that differ anywhere from a version that came from elements of `source_dtype`.

    `share` is that of `write`.
    """
    found = []
    for index, box, view in views(described, storages):
        tensor = described.tensors[index]
        whole = merged(tensor.name, tensor.shape, version, merging) if merging else None
        if share is not None:
            whole = partly(tensor.name, tensor.shape, version, share)
        whole = values(tensor.name, tensor.shape, version) if whole is None else whole
        meant = whole[box].to(getattr(torch, source_dtype)).to(view.dtype)
        if not torch.equal(view, meant):
            found.append(tensor.name)
    return found


def merged(name: str, shape: tuple[int, ...], version: int, merging: Merging) -> torch.Tensor:
    """Return a tensor that never changes with the product of the adapter of a version, if it has one."""
    weight = values(name, shape, FROZEN_VERSION)
    if name not in merging.tensors:
        return weight
    (rows, columns), index = shape, merging.tensors.index(name)
    rank = int(merging.products.rank_M[merging.products.tensor_M == index][0])
    layer = name.removesuffix(".weight")
    b = values(f"{layer}.lora_B.weight", (rows, rank), version)
    a = values(f"{layer}.lora_A.weight", (rank, columns), version)
    return weight + merging.scales[index] * (b @ a)


def give_keys(folder: Path, num_processes: int = 4) -> None:
    """Have the members of a folder connect over TCP, with a key pair for each process."""
    names = [f"{kind}-{index}" for kind in ("trainer", "rollout") for index in range(num_processes)]
    (folder / KEYS).write_bytes(msgspec.json.encode({name: new_key_pair() for name in names}))


def keys_of(folder: Path, member: str) -> GroupKeys | None:
    """Return the keys that a member has; None if it connects over gloo."""
    if not (folder / KEYS).exists():
        return None
    pairs = msgspec.json.decode((folder / KEYS).read_bytes(), type=dict[str, KeyPair])
    return GroupKeys(pairs[process_of(member)], {name: pair.public for name, pair in pairs.items()})


class Member:
    """One end of everything: a trainer or an engine of raw memory, in whatever process."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.keys = keys_of(folder, name)
        self.layout = layout.decode((folder / f"{name}.layout").read_bytes())
        self.program = program.decode((folder / f"{name}.program").read_bytes())
        self.storages = allocate(self.layout)
        self.groups: dict[str, ConnectedGroup] = {}
        self.hosted: list[TCPStore] = []
        self.bound: BoundProgram = bind(self.program, self.storages, self.groups)

    def connect(self, host: str, port: int, epoch: int = 0, timeout_s: float = TIMEOUT_S) -> None:
        store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=TIMEOUT_S))
        prefixed = PrefixStore(f"epoch {epoch}", store)
        for transfer_group in self.program.transfer_groups:
            if transfer_group.name in self.groups:
                self.groups[transfer_group.name].close()
            self.groups[transfer_group.name] = (
                tcp_group.connect(transfer_group, self.name, prefixed, self.keys, timeout_s)
                if self.keys
                else process_group.connect(transfer_group, self.name, prefixed, torch.device("cpu"), timeout_s)
            )

    def close(self) -> None:
        self.bound.close()
        for group in self.groups.values():
            group.close()
        self.groups.clear()

    def obey(self, command: dict[str, Any]) -> dict[str, Any]:
        do, started = command.pop("do"), time.monotonic()
        try:
            if do == "host":
                store = TCPStore(command["host"], command["port"], is_master=True, wait_for_workers=False)
                self.hosted.append(store)
            elif do == "connect":
                self.connect(**command)
            elif do == "write":
                write(self.layout, self.storages, command["version"], command.get("share"))
            elif do == "distrust":
                self.bound.distrust(command["engines"])
            elif do in HARMS:
                HARMS[do](**command)
            elif do == "run":
                counted = self.bound.run(command["deadline_s"], command.get("only"), command.get("joining_engines"))
                return {"counted": counted, "seconds": time.monotonic() - started}
            elif do == "differing":
                meant = command["version"], command["source_dtype"], self.program.merging, command.get("share")
                return {"differing": differing(self.layout, self.storages, *meant)}
            elif do == "memory":
                return {name: hashlib.sha256(held.numpy()).hexdigest() for name, held in self.storages.items()}
        except RefitError as error:
            return {"error": str(error), "seconds": time.monotonic() - started}
        return {}


class Remote:
    """A member in another process."""

    def __init__(self, wire: Wire) -> None:
        self.name = wire.name
        self.pid = wire.pid
        self._wire = wire

    def tell(self, do: str, **command: Any) -> None:
        self._wire.tell(json.dumps({"do": do, **command}).encode())

    def reply(self) -> dict[str, Any]:
        reply: dict[str, Any] = json.loads(self._wire.reply())
        return reply

    def ask(self, do: str, **command: Any) -> dict[str, Any]:
        self.tell(do, **command)
        return self.reply()

    def kill(self, number: int = signal.SIGKILL) -> None:
        os.kill(self.pid, number)


def save(folder: Path, plan: TransferPlan, layouts: Mapping[str, Layout], *, largest_difference: float = 0.0) -> None:
    """Write what members need to know."""
    for name, described in layouts.items():
        made = msgspec.structs.replace(plan.programs[name], largest_difference=largest_difference)
        (folder / f"{name}.layout").write_bytes(layout.encode(described))
        (folder / f"{name}.program").write_bytes(program.encode(made))


@contextlib.contextmanager
def remotes(folder: Path, names: list[str], prefix: tuple[str, ...] = ()) -> Iterator[dict[str, Remote]]:
    """Start members in processes of their own, behind a command such as ``ip netns exec``; end them all."""
    with contextlib.ExitStack() as stack:
        where = stack.enter_context(wires.listening())
        process = _start(prefix, [str(folder), str(where.path), *names])
        members: list[int] = []
        stack.callback(_end, process, members)
        found = where.accept(names, process, stack)
        members += [wire.pid for wire in found.values()]
        yield {name: Remote(wire) for name, wire in found.items()}


def _start(prefix: tuple[str, ...], words: list[str]) -> subprocess.Popen[bytes] | ForkedChild:
    """Start `main`: in a fork of what has imported all that members need, or in a program where it has to be one."""
    if prefix:
        return subprocess.Popen(
            [*prefix, sys.executable, "-m", __name__, *words],
            cwd=Path(__file__).parents[3],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    out, errors = (os.fdopen(number, "wb", closefd=False) for number in (1, 2))
    return consoles.fork_server().start(__name__, words, out, errors)


def _end(process: subprocess.Popen[bytes] | ForkedChild, members: Sequence[int]) -> None:
    """Wait for the process whose members have no wire any more, and for these; kill them all if one does not end."""
    try:
        process.wait(TIMEOUT_S)
    except subprocess.TimeoutExpired:
        for pid in (*members, process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait(TIMEOUT_S)
        raise


def _serve(name: str, folder: Path, path: str) -> None:
    member = Member(name, folder)
    with wires.connect(path, name) as wire, wire.makefile("rb") as commands:
        for line in commands:
            wire.sendall(json.dumps(member.obey(json.loads(line))).encode() + b"\n")
    member.close()


def main(arguments: Sequence[str]) -> int:
    """Fork a process a member and wait for them all."""
    folder, path, *names = arguments
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    torch.set_num_threads(1)
    pids = []
    for name in names:
        pid = os.fork()
        if not pid:
            _serve(name, Path(folder), path)
            os._exit(0)
        pids.append(pid)
    for pid in pids:
        os.waitpid(pid, 0)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
