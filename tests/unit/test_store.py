"""Versions go through a store: written once, read from the nearest whole one, and never wrong, whatever the store does.

A folder is the store here; what goes wrong in it is done to its files.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from lora_harness import CONFIG, LoraRefit

from tandem.common.errors import ConfigError
from tandem.refit.adapters.catalogue import make_shape
from tandem.refit.adapters.deployment import ParallelDeployment
from tandem.refit.adapters.dtensor import DTensor
from tandem.refit.adapters.megatron import Megatron
from tandem.refit.adapters.vllm import Vllm
from tandem.refit.store import manifest as format_
from tandem.refit.store import published
from tandem.refit.store.manifest import DamagedObject, VersionManifest, check_manifest, seal, unseal
from tandem.refit.store.mirror import StoreMirror
from tandem.refit.store.objects import ObjectMissing, ObjectStore
from tandem.refit.store.publisher import StoreAccess, StorePublisher
from tests.harness.stores import KEY, RUN, StoreRefit, await_fact, failing, linked_folder, through_folder

FLOAT32, BFLOAT16 = make_shape(CONFIG, "float32"), make_shape(CONFIG, "bfloat16")
FSDP, REPLICATED = DTensor(shard=3), Megatron(tp=2, dp=2)
TP2 = Vllm(tp=2)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have several chunks in a part, and several parts in a version, of a small model."""
    monkeypatch.setattr(published, "CHUNK_BYTES", 1 << 10)
    monkeypatch.setattr("tandem.refit.store.publisher.PART_BYTES", 1 << 12)
    monkeypatch.setattr("tandem.refit.store.publisher._ASKED_POLL_S", 0.1)
    monkeypatch.setattr("tandem.refit.store.mirror._ASK_AFTER_S", 0.2)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return linked_folder(tmp_path / "store")


@pytest.fixture
def refit(store: Path) -> Iterator[StoreRefit]:
    """Return two trainers and an engine of two workers, which hold version 0."""
    with through_folder(store, BFLOAT16, DTensor(shard=2), TP2) as started:
        started.publish(0)
        started.take(0)
        started.await_written()
        yield started


def versions_of(refit: StoreRefit, trainer: int = 0) -> list[int]:
    names = [name.split("/") for name in refit.objects()]
    return sorted(int(n[3]) for n in names if n[1].startswith(f"trainer-{trainer}-") and n[2] == format_.VERSIONS)


def manifest_of(refit: StoreRefit, version: int, trainer: int = 0) -> tuple[str, VersionManifest]:
    (name,) = (n for n in refit.objects() if f"/trainer-{trainer}-" in n and n.endswith(f"/versions/{version}"))
    return name, unseal(KEY, name, refit.access.objects.read(name, 1 << 20), VersionManifest)[0]


@pytest.mark.parametrize("trainers", [FSDP, REPLICATED], ids=["fsdp", "replicated"])
@pytest.mark.parametrize("wanted", [FLOAT32, BFLOAT16], ids=["float32", "bfloat16"])
def test_every_version_arrives_as_it_was(tmp_path: Path, trainers: ParallelDeployment, wanted: Any) -> None:
    with through_folder(tmp_path, FLOAT32, trainers, TP2, wanted) as refit:
        assert {link.transport for link in refit.plan.links} == {"store"}
        assert not refit.plan.transfer_groups, "engines depend on no other process"
        for version, share in enumerate((1.0, 0.03, 0.0, 0.5, 1.0, 0.007, 0.03)):
            refit.train(share)
            refit.publish(version)
            refit.take(version)
            assert not refit.verdict().differing
            refit.await_written()


def test_each_element_is_written_once_however_many_trainers_hold_it(tmp_path: Path) -> None:
    with through_folder(tmp_path, FLOAT32, REPLICATED, TP2, BFLOAT16) as refit:
        refit.publish(0)
        refit.await_written()
        written = sum(manifest_of(refit, 0, rank)[1].num_written for rank in range(4))
        num_elements = sum(math.prod(tensor.shape) for tensor in BFLOAT16.tensors)
        assert 2 * num_elements <= written <= 2.1 * num_elements, "in the engine's type; slices begin at eighths"


def test_differences_are_as_small_as_what_changed_and_a_late_engine_needs_few_versions(refit: StoreRefit) -> None:
    whole = manifest_of(refit, 0)[1]
    assert whole.is_whole
    for version in (1, 2, 5):
        refit.train(0.03)
        refit.publish(version)
        refit.await_written()
    difference = manifest_of(refit, 5)[1]
    assert difference.parent_version == 2
    assert difference.num_bytes < 0.2 * whole.num_bytes
    refit.start_engine("rollout-0")
    refit.take(5)  # one from the whole version, one from version 0
    assert not refit.verdict().differing
    assert manifest_of(refit, 2)[1].parent_version == 1


def test_what_no_version_needs_is_removed(refit: StoreRefit) -> None:
    most = 0
    for version in range(1, 20):
        refit.train(0.01)
        refit.publish(version)
        refit.await_written()
        most = max(most, len(refit.objects()))
        needed = {
            f"{manifest_of(refit, v)[0].rpartition('/versions/')[0]}/parts/{part.digest}"
            for v in versions_of(refit)
            for part in manifest_of(refit, v)[1].parts
        }
        assert {name for name in refit.objects() if "/trainer-0-" in name and "/parts/" in name} == needed
    assert len(versions_of(refit)) <= 8, "the newest and the one before, with what they build on: whole ones each four"
    assert most < 100
    refit.take(19)
    assert not refit.verdict().differing
    refit.close()
    assert refit.objects() == []


def test_a_process_that_comes_after_another_removes_what_that_left(refit: StoreRefit) -> None:
    for mirror in refit.mirrors.values():
        mirror.close()
    again = StorePublisher(refit.access, 4, refit.said.append)
    own = refit.sources["trainer-0"]
    other = msgspec.structs.replace(own, host="another boot")
    again.bind("trainer-0", other, refit.trainers["trainer-0"].live, refit.plan.programs["trainer-0"].verification)
    again.publish(0)
    await_fact(lambda: again.is_idle() and len({n.split("/")[1] for n in refit.objects()}) == 2, refit.objects)
    again.close()


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path) -> None:
    contents = bytearray(path.read_bytes())
    contents[len(contents) // 2] ^= 1
    path.write_bytes(contents)


def swell(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"more")


@pytest.mark.parametrize("harm", [Path.unlink, truncate, flip, swell])
@pytest.mark.parametrize("kind", ["parts", "versions"])
@pytest.mark.parametrize("share", [1.0, 0.03], ids=["whole", "difference"])
def test_what_is_lost_or_damaged_is_written_again(
    refit: StoreRefit, store: Path, harm: Callable[[Path], None], kind: str, share: float
) -> None:
    """The engine asks for it by the store, and holds nothing else meanwhile."""
    for mirror in refit.mirrors.values():
        mirror.close()  # else it may have read the version before the harm
    refit.train(share)
    refit.publish(1)
    refit.await_written()
    name, made = manifest_of(refit, 1)
    if kind == "parts":
        name = f"{name.rpartition('/versions/')[0]}/parts/{made.parts[0].digest}"
    harm(store / name)
    refit.start_engine("rollout-0")
    refit.take(1, "rollout-0")
    refit.start_engine("rollout-1")
    refit.take(1, "rollout-1")
    assert not refit.verdict().differing
    assert any("is asked for" in line for line in refit.said)
    refit.train(0.03)
    refit.publish(2)
    refit.take(2)
    assert not refit.verdict().differing


def test_a_store_that_is_down_is_waited_for(refit: StoreRefit, store: Path) -> None:
    """A file in the folder's place fails every call; trainer and engine go on where they were."""
    with failing(store):
        refit.train(0.03)
        refit.publish(1)
        for mirror in refit.mirrors.values():
            mirror.want(1)
        await_fact(lambda: len([line for line in refit.said if "tried again" in line]) > 1, lambda: refit.said)
        assert not any(mirror.is_held(1) for mirror in refit.mirrors.values())
    refit.take(1)
    assert not refit.verdict().differing


def test_a_version_that_nobody_waited_for_is_left_out(refit: StoreRefit, store: Path) -> None:
    """The store is slower than the steps: the next version is whole, and there is none between."""
    with failing(store):
        for version in (1, 2, 3):
            refit.train(0.03)
            refit.publish(version)
    refit.take(3)
    refit.await_written()
    assert not refit.verdict().differing
    assert manifest_of(refit, 3)[1].is_whole
    assert versions_of(refit) == [0, 3]


def test_an_old_note_or_manifest_is_not_taken_for_a_new_one(refit: StoreRefit, store: Path) -> None:
    """A store that shows what was there before only delays: the version and its parent are in what is signed."""
    name, _ = manifest_of(refit, 0)
    old = {path: (store / path).read_bytes() for path in (name, f"{name.rpartition('/versions/')[0]}/newest")}
    refit.train(0.03)
    refit.publish(1)
    refit.await_written()
    new_name, _ = manifest_of(refit, 1)
    new = (store / new_name).read_bytes()
    refit.mirrors["rollout-0"].close()
    for path, contents in old.items():
        (store / path).write_bytes(contents)
    (store / new_name).write_bytes(old[name])
    refit.start_engine("rollout-0")
    mirror = refit.mirrors["rollout-0"]
    mirror.want(1)
    await_fact(lambda: "is torn, or was not written" in mirror.trouble, lambda: mirror.trouble)
    (store / new_name).write_bytes(new)
    refit.take(1)
    assert not refit.verdict().differing


def test_what_is_signed_by_another_key_is_nothing(refit: StoreRefit) -> None:
    name, made = manifest_of(refit, 0)
    forged, _ = seal(b"another key" * 3, name, made)
    with pytest.raises(DamagedObject, match="not written by a process of this run"):
        unseal(KEY, name, forged, VersionManifest)
    sealed, _ = seal(KEY, name, made)
    with pytest.raises(DamagedObject, match="not written by a process of this run"):
        unseal(KEY, name.replace("versions/0", "versions/1"), sealed, VersionManifest)
    with pytest.raises(DamagedObject, match="versions/0: "):
        unseal(KEY, name, seal(KEY, name, {"version": 0})[0], VersionManifest)


def altered(made: VersionManifest, chunk: int, **fields: Any) -> VersionManifest:
    chunks = [*made.chunks]
    chunks[chunk] = msgspec.structs.replace(chunks[chunk], **fields)
    return msgspec.structs.replace(made, chunks=tuple(chunks))


LIES: dict[str, Callable[[VersionManifest], VersionManifest]] = {
    "of another version": lambda made: msgspec.structs.replace(made, version=7),
    "of another run": lambda made: msgspec.structs.replace(made, run="other"),
    "of another trainer": lambda made: msgspec.structs.replace(made, writer="trainer-9-00"),
    "a parent that comes later": lambda made: msgspec.structs.replace(made, parent="0" * 64, parent_version=1),
    "seconds that are no number": lambda made: msgspec.structs.replace(made, seconds=math.nan),
    "storages of another size": lambda made: msgspec.structs.replace(made, storages=(8,)),
    "no storages": lambda made: msgspec.structs.replace(made, storages=()),
    "more storages": lambda made: msgspec.structs.replace(made, storages=(*made.storages, 8)),
    "no chunks": lambda made: msgspec.structs.replace(made, chunks=()),
    "a chunk missing": lambda made: msgspec.structs.replace(made, chunks=made.chunks[1:]),
    "a chunk twice": lambda made: msgspec.structs.replace(made, chunks=(made.chunks[0], *made.chunks)),
    "no parts": lambda made: msgspec.structs.replace(made, parts=()),
    "a chunk in a part that is none": lambda made: altered(made, 0, part=10**9),
    "a chunk behind its part": lambda made: altered(made, 0, offset=2**61),
    "an absurd chunk": lambda made: altered(made, 0, num_bytes=2**39),
    "an odd chunk": lambda made: altered(made, 0, num_bytes=made.chunks[0].num_bytes - 1),
    "absurd changes": lambda made: altered(made, 0, num_changed=2**40),
    "a difference in a whole version": lambda made: altered(made, 0, kind=0),
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_a_manifest_that_lies_is_refused_before_anything_is_read(
    refit: StoreRefit, lie: Callable[[VersionManifest], VersionManifest]
) -> None:
    _, made = manifest_of(refit, 0)
    sizes = dict(enumerate(made.storages))
    check_manifest(made, RUN, made.writer, 0, sizes)
    with pytest.raises(DamagedObject):
        check_manifest(lie(made), RUN, made.writer, 0, sizes)


def test_a_refused_manifest_changes_no_mirror(refit: StoreRefit, store: Path) -> None:
    """Signed by the run's key, as by a process that is damaged: positions outside of a chunk are noticed as well."""
    refit.train(0.03)
    refit.publish(1)
    refit.await_written()
    for mirror in refit.mirrors.values():
        mirror.close()
    name, made = manifest_of(refit, 1)
    chunk = next(index for index, each in enumerate(made.chunks) if each.num_changed > 1)
    lying = altered(made, chunk, num_changed=made.chunks[chunk].num_changed - 1)
    (store / name).write_bytes(seal(KEY, name, lying)[0])
    refit.start_engine("rollout-0")
    mirror = refit.mirrors["rollout-0"]
    mirror.want(1)
    await_fact(lambda: "positions that its message has not" in mirror.trouble, lambda: mirror.trouble)
    refit.start_engine("rollout-1")
    refit.take(1)  # it was asked for, and written again
    assert not refit.verdict().differing


def test_adapters_change_and_the_base_is_written_once(tmp_path: Path) -> None:
    refit = LoraRefit(DTensor(shard=2), TP2, BFLOAT16)
    wanted = {name: msgspec.structs.replace(each, host="elsewhere") for name, each in refit.wanted.items()}
    refit.plan = published.plan_with_store(refit.sources, wanted, allow_alias=False, alias_frozen=True)
    access = StoreAccess(ObjectStore(f"file://{tmp_path}"), KEY, RUN)
    said: list[str] = []
    publishers, mirrors = {}, {}
    for name, weights in refit.trainers.items():
        program = refit.plan.programs[name]
        weights.install([program])
        publishers[name] = StorePublisher(access, 2, said.append)
        publishers[name].bind(name, refit.sources[name], weights.live, program.verification)
    for name, weights in refit.engines.items():
        mirrors[name] = StoreMirror(access, name, lambda: None, said.append)
        weights.install(mirrors[name].redirect([refit.plan.programs[name]]))
    try:
        for version in range(5):
            refit.train()
            for publisher in publishers.values():
                publisher.publish(version)
            for mirror in mirrors.values():
                mirror.want(version)
            await_fact(lambda at=version: all(m.is_held(at) for m in mirrors.values()), lambda: said)  # type: ignore[misc]
            refit.refit(version, ("rollout-0", "rollout-1") if version == 0 else ("another",))
            assert not refit.verdict().differing
            refit.assert_holds(torch.bfloat16)
            for publisher in publishers.values():
                await_fact(publisher.is_idle, lambda: said)
        written = [int(line.split(", ")[1].split()[0]) for line in said if " bytes in " in line]
        assert min(written[:2]) > 2 * max(written[2:]), "whole versions, too, are of the adapters alone from then on"
    finally:
        for each in (*mirrors.values(), *publishers.values()):
            each.close()


def test_a_protocol_that_is_not_installed_is_named() -> None:
    with pytest.raises(ConfigError, match=r"refit\.store nowhere://bucket"):
        ObjectStore("nowhere://bucket")


def test_an_object_that_is_not_there_is_told_from_a_store_that_fails(tmp_path: Path) -> None:
    objects = ObjectStore(f"file://{tmp_path}")
    objects.write("a/b", b"123456")
    assert objects.read("a/b", 3) == b"1234", "one more than allowed: it is longer than it says"
    with pytest.raises(ObjectMissing):
        objects.read("a/c", 3)
    assert objects.list_folders("nowhere") == []
    objects.remove("a/c")
