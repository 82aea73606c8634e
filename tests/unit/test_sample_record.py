"""The record of samples: what is written is what is read, by pandas too, and what is damaged says so."""

from __future__ import annotations

import resource
import signal
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from samples_harness import RUN_ID, recorded, sample_of, scored

from tandem.common.errors import SamplesError
from tandem.common.messages import Branch, ImageRef, SampleScored
from tandem.samples.batch import MEDIA, SAMPLES, SampleBatch, media_columns
from tandem.samples.recorded_shards import read_shard, read_step, samples_of, steps
from tandem.samples.routed_experts import COLUMN, as_trained_on
from tandem.samples.sample_files import SHARD, STREAM, UNFINISHED, files, shard_path, unfinished_path
from tandem.samples.sample_record import SCHEMA, RecordedSample, schema_with
from tandem.samples.sample_writing import UnfinishedFile, keys_of, read_unfinished, table_of, write_shard


def write(folder: Path, samples: list[RecordedSample], run_id: str = RUN_ID) -> Path:
    first = samples[0]
    shard = shard_path(folder, first.step, first.rollout)
    write_shard(shard, run_id, table_of(samples))
    return shard


def assert_same(found: RecordedSample, expected: RecordedSample) -> None:
    plain = {name: getattr(expected, name) for name in RecordedSample.__struct_fields__ if name != "arrays"}
    assert {name: getattr(found, name) for name in plain} == plain
    assert found.arrays.columns.keys() == expected.arrays.columns.keys()
    for name, array in expected.arrays.columns.items():
        read = found.arrays.columns[name]
        assert read.dtype == array.dtype
        assert read.tolist() == array.tolist()


FULL = scored(
    1,
    2,
    prompt_length=2,
    response_length=3,
    num_tokens=7,
    branches=(
        Branch(prompt_length=2, num_made=2, num_tokens=4),
        Branch(prompt_length=2, num_made=1, num_tokens=3),
    ),
    oldest_version=2,
    newest_version=3,
    tokens_by_version=(1, 2),
    num_turns=4,
    finish_reason="turns",
    reward=0.1 + 0.2,
    components={"zeta": 1 / 3, "alpha": -2.0},
    correct=True,
    extracted_answer="\N{SNOWMAN}",
    response="ja \N{SNOWMAN}\nnein",
    failure="it has failed",
    timed_out=True,
    dropped=True,
)
ROUTED = {COLUMN: np.arange(7 * 4, dtype=np.uint8).reshape(7, 4)}
BRANCHED = sample_of(7).replace(lengths_S=np.array([4, 3], dtype=np.int32), **ROUTED)


def test_what_is_written_is_what_is_read_in_the_order_of_groups(tmp_path: Path) -> None:
    samples = [
        recorded(FULL, BRANCHED, advantage=0.75),
        recorded(scored(0, 1), sample_of(2)),
        recorded(scored(0, 0), sample_of(2, first_token=9), rollout="rollout-1"),
    ]
    write(tmp_path, samples[:2])
    write(tmp_path, samples[2:])
    write(tmp_path, [recorded(scored(0, 0), sample_of(2), step=7)])
    assert steps(tmp_path) == [7, 12]
    found = read_step(tmp_path, 12, RUN_ID)
    for sample, expected in zip(found, reversed(samples), strict=True):
        assert_same(sample, expected)
    assert read_step(tmp_path, 13) == []
    assert [path.name for path in tmp_path.rglob("*") if path.name.startswith(".")] == []


def test_every_field_of_a_sample_is_a_column_of_its_own() -> None:
    """So that a batch can be computed again from the record."""
    of_roles = {"roles", "role_rewards"}  # of some runs only; `test_roles.py` tries them
    assert set(SampleScored.__struct_fields__) - of_roles <= set(SCHEMA.names)
    arrays = {name.removesuffix("_T") for name in SAMPLES if name.endswith("_T")}
    assert arrays <= set(SCHEMA.names)
    full = {name: getattr(FULL, name) for name in SampleScored.__struct_fields__ if name not in of_roles}
    defaults = {field.name: field.default for field in msgspec.structs.fields(SampleScored)}
    assert not [name for name, value in full.items() if value == defaults[name]], "the test above tries all of them"


def test_pandas_reads_a_shard(tmp_path: Path) -> None:
    path = write(tmp_path, [recorded(FULL, BRANCHED, advantage=0.75), recorded(scored(0, 0), sample_of(2))])
    frame = pd.read_parquet(path)
    assert frame["reward"].tolist() == [FULL.reward, 0.0]
    assert frame["response"][0] == FULL.response
    assert frame["advantage"].isna().tolist() == [False, True]
    assert dict(frame["components"][0]) == FULL.components
    assert frame["token_ids"][0].tolist() == [*range(7)]
    assert frame["step"].tolist() == [12, 12]


def test_half_a_character_is_no_reason_to_lose_a_sample(tmp_path: Path) -> None:
    said = msgspec.structs.replace(FULL, response="a\ud83cb")
    write(tmp_path, [recorded(said, sample_of(7))])
    assert read_step(tmp_path, 12)[0].scored.response == "a?b"


def test_a_shard_takes_the_place_of_the_one_before(tmp_path: Path) -> None:
    write(tmp_path, [recorded(scored(0, 0), sample_of(2))])
    write(tmp_path, [recorded(scored(5, 0), sample_of(2))])
    assert [sample.scored.group for sample in read_step(tmp_path, 12)] == [5]


@pytest.mark.parametrize("at", [0.0, 0.3, 0.6, 1.0])
def test_a_shard_with_a_damaged_page_is_named(tmp_path: Path, at: float) -> None:
    path = write(tmp_path, [recorded(scored(0, i), sample_of(50 + i)) for i in range(40)])
    content = bytearray(path.read_bytes())
    footer = int.from_bytes(content[-8:-4], "little")
    content[4 + int(at * (len(content) - footer - 13))] ^= 0xFF
    path.write_bytes(content)
    with pytest.raises(SamplesError, match=f"{path} cannot be read as part of the rollout log: ") as raised:
        read_step(tmp_path, 12)
    assert "\n" not in str(raised.value)


def test_a_bit_that_flips_anywhere_in_a_shard_is_noticed(tmp_path: Path) -> None:
    """In the headers of pages and in the footer too, of which Parquet has no checksums."""
    path = write(tmp_path, [recorded(scored(0, i), sample_of(20 + i)) for i in range(4)])
    content = path.read_bytes()
    for at in range(0, len(content), 5):
        path.write_bytes(content[:at] + bytes([content[at] ^ 1 << at % 8]) + content[at + 1 :])
        with pytest.raises(SamplesError, match=f"{path} "):
            read_shard(path)
    path.write_bytes(content)
    assert read_shard(path).num_rows == 4


def test_a_shard_that_is_cut_off_or_empty_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, [recorded(scored(0, 0), sample_of(2))])
    content = path.read_bytes()
    for size in (0, 3, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:size])
        with pytest.raises(SamplesError, match=f"{path} cannot be read"):
            read_step(tmp_path, 12)


def test_what_is_of_another_run_another_release_or_another_kind_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, [recorded(scored(0, 0), sample_of(2))], run_id="other")
    with pytest.raises(SamplesError, match=f"{path} is of the run other, not {RUN_ID}"):
        read_step(tmp_path, 12, RUN_ID)
    assert len(read_step(tmp_path, 12)) == 1
    pq.write_table(pa.table({"step": [12]}), path)
    with pytest.raises(SamplesError, match=f"{path} is not part of a rollout log"):
        read_step(tmp_path, 12, RUN_ID)
    pq.write_table(pa.table({"step": [12]}).replace_schema_metadata(later()), path)
    with pytest.raises(SamplesError, match=f"{path} has format 6 .* this release reads format 5"):
        read_step(tmp_path, 12, RUN_ID)


def later() -> dict[bytes, bytes]:
    return {b"tandem.run_id": RUN_ID.encode(), b"tandem.format": b"6"}


def test_an_unfinished_file_can_be_read_while_it_grows_and_wherever_it_is_cut_off(tmp_path: Path) -> None:
    path = unfinished_path(tmp_path, 12, "rollout-0")
    file = UnfinishedFile(path, RUN_ID)
    sizes = [path.stat().st_size]
    for group in range(3):
        file.append([recorded(scored(group, i), sample_of(20), command_id=4) for i in range(2)])
        sizes.append(path.stat().st_size)
        assert keys_of(read_unfinished(path, RUN_ID)) == [(4, g, i) for g in range(group + 1) for i in range(2)]
    file.close()
    content = path.read_bytes()
    for size in range(sizes[0], len(content) + 1, 7):
        path.write_bytes(content[:size])
        num_whole = sum(size >= end for end in sizes[1:])
        assert read_unfinished(path).num_rows == 2 * num_whole
    path.write_bytes(content)
    assert_same(samples_of(read_unfinished(path))[0], recorded(scored(0, 0), sample_of(20), command_id=4))


@pytest.mark.parametrize("counts", [(1, 2), (0, 3), (3, 0), (0, 0)])
def test_media_of_an_agents_branches_stay_with_their_branch(tmp_path: Path, counts: tuple[int, int]) -> None:
    refs = [
        ImageRef(digest=f"{number:064x}", width=8, height=8, grid=(1, 2, number), num_tokens=1) for number in range(3)
    ]
    one, two = sample_of(4), sample_of(3)
    own = [one.replace(**media_columns([refs[: counts[0]]])), two.replace(**media_columns([refs[: counts[1]]]))]
    expected = recorded(FULL, SampleBatch.concatenate(own))
    (found,) = samples_of(read_shard(write(tmp_path, [expected]), RUN_ID))
    assert_same(found, expected)
    assert found.arrays.num_images_S.tolist() == [*counts]


def test_media_of_a_model_that_sees_are_recorded(tmp_path: Path) -> None:
    """By digest and grid, in files that keep growing and in shards; other files stay as they are."""
    refs = [
        ImageRef(digest=f"{number:064x}", width=8, height=8, grid=(1, 2, number), num_tokens=1) for number in (1, 2)
    ]
    samples = [
        recorded(scored(0, place), sample_of(20).replace(**media_columns([images])), command_id=4)
        for place, images in enumerate([refs, [], refs[1:]])
    ]
    path = unfinished_path(tmp_path, 12, "rollout-0")
    file = UnfinishedFile(path, RUN_ID, schema_with({"images": True}))
    file.append(samples)
    file.close()
    write_shard(shard_path(tmp_path, 12, "rollout-0"), RUN_ID, read_unfinished(path, RUN_ID))
    for found in (samples_of(read_unfinished(path, RUN_ID)), read_step(tmp_path, 12, RUN_ID)):
        for sample, wanted in zip(found, samples, strict=True):
            for name in MEDIA:
                assert sample.arrays.columns[name].tolist() == wanted.arrays.columns[name].tolist()
            kept = as_trained_on(sample.arrays, None)
            assert {*kept.columns} == {*SAMPLES, *MEDIA}


def test_an_unfinished_file_that_did_not_begin_holds_nothing_and_another_is_named(tmp_path: Path) -> None:
    path = tmp_path / "step-00000012.rollout-0.ab.arrows"
    path.write_bytes(b"")
    assert read_unfinished(path).num_rows == 0
    path.write_bytes(b"something else, and long enough to be mistaken")
    with pytest.raises(SamplesError, match=f"{path} cannot be read as part of the rollout log"):
        read_unfinished(path)
    theirs = unfinished_path(tmp_path, 12, "rollout-0")
    UnfinishedFile(theirs, "other").close()
    with pytest.raises(SamplesError, match="is of the run other, not run"):
        read_unfinished(theirs, RUN_ID)


def test_only_files_of_the_record_are_taken_for_such(tmp_path: Path) -> None:
    write(tmp_path, [recorded(scored(0, 0), sample_of(2))])
    for name in ("step-x.rollout-0.parquet", "notes.parquet", ".step-00000012.rollout-0.parquet.ab", "step-1.parquet"):
        (tmp_path / name).write_bytes(b"")
    UnfinishedFile(unfinished_path(tmp_path, 3, "rollout-1"), RUN_ID).close()
    assert [(file.step, file.rollout) for file in files(tmp_path, SHARD)] == [(12, "rollout-0")]
    unfinished = files(tmp_path / UNFINISHED, STREAM)
    assert [(file.step, file.rollout) for file in unfinished] == [(3, "rollout-1")]


@pytest.fixture
def small_files() -> Iterator[None]:
    """Let the kernel refuse to write more than so much to a file, as a full disk does."""
    before, heard = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (65536, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, heard)


@pytest.mark.usefixtures("small_files")
def test_what_has_no_room_leaves_what_was_there(tmp_path: Path) -> None:
    path = write(tmp_path, [recorded(scored(0, 0), sample_of(2))])
    noise = np.random.default_rng(0).integers(2**31, size=20_000).astype(np.int32)
    large = sample_of(20_000).replace(token_ids_T=noise)
    with pytest.raises(OSError, match="File too large"):
        write(tmp_path, [recorded(scored(1, 0), large)])
    assert [sample.scored.group for sample in read_step(tmp_path, 12)] == [0]
    found = [found for found in tmp_path.rglob("*") if found.is_file()]
    assert found == [path], "no part of the one that did not fit"
    unfinished = unfinished_path(tmp_path, 13, "rollout-0")
    file = UnfinishedFile(unfinished, RUN_ID)
    with pytest.raises(OSError, match="File too large"):
        file.append([recorded(scored(1, 0), large)])
    file.close()
    assert read_unfinished(unfinished).num_rows == 0


def test_a_part_of_the_columns_can_be_read(tmp_path: Path) -> None:
    path = write(tmp_path, [recorded(scored(4, 0), sample_of(2))])
    table = read_shard(path, RUN_ID, ["group", "step"])
    assert table.to_pylist() == [{"step": 12, "group": 4}]
