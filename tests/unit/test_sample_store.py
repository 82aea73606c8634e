"""The samples that a rollout keeps: until when, how many, and to whom it gives them."""

from __future__ import annotations

import time
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
import zmq
from samples_harness import RUN_ID, TRAINERS, ask, fetch, sample_of

from tandem.common.errors import SamplesError
from tandem.common.messages import MAX_TOKENS_FETCHED, FetchSamples
from tandem.common.wire import encode
from tandem.samples.batch import SampleBatch
from tandem.samples.sample_store import SampleStore


@pytest.fixture
def store() -> Iterator[SampleStore]:
    store = SampleStore("127.0.0.1", RUN_ID, max_tokens=30, trainers=TRAINERS)
    yield store
    store.close()


def tokens(found: SampleBatch | str) -> list[int]:
    assert isinstance(found, SampleBatch), found
    return found.token_ids_T.tolist()


def test_samples_come_in_the_order_asked_as_they_were_put(store: SampleStore) -> None:
    first, second = sample_of(5), sample_of(7, first_token=10)
    store.put((3, 0, 0), first)
    store.put((3, 0, 1), second)
    found = fetch(store.at, [(3, 0, 1), (3, 0, 0)])
    assert isinstance(found, SampleBatch)
    expected = SampleBatch.concatenate([second, first]).columns
    for name, array in found.columns.items():
        np.testing.assert_array_equal(array, expected[name])


def test_a_sample_that_comes_again_stays_as_it_was(store: SampleStore) -> None:
    store.put((3, 0, 0), sample_of(5))
    store.put((3, 0, 0), sample_of(9, first_token=50))
    assert store.num_tokens == 5
    assert tokens(fetch(store.at, [(3, 0, 0)])) == [0, 1, 2, 3, 4]


def test_branches_of_a_sample_come_one_by_one(store: SampleStore) -> None:
    store.put((3, 0, 0), SampleBatch.concatenate([sample_of(5), sample_of(7, first_token=10)]))
    assert store.num_tokens == 12
    assert tokens(fetch(store.at, [(3, 0, 0, 1)])) == [*range(10, 17)]
    both = fetch(store.at, [(3, 0, 0, 1), (3, 0, 0, 0)])
    assert isinstance(both, SampleBatch)
    assert both.lengths_S.tolist() == [7, 5]
    assert fetch(store.at, [(3, 0, 0, 2)]) == "it does not have branch 2 of sample 0 of group 0 of command 3"


def test_what_has_no_room_is_refused_and_what_is_released_makes_some(store: SampleStore) -> None:
    for number in range(6):
        store.put((number, 0, 0), sample_of(5))
    wanted = "tokens: samples that were not trained on yet have 30, policy.generation.max_stored_tokens is 30"
    with pytest.raises(SamplesError, match=f"no room for a sample of 5 {wanted}"):
        store.put((6, 0, 0), sample_of(5))
    assert store.num_tokens == 30
    store.release([0, 1, 99])
    assert store.num_tokens == 20
    store.put((6, 0, 0), sample_of(10))
    assert store.num_tokens == 30


def test_what_is_released_is_gone(store: SampleStore) -> None:
    for group in range(3):
        store.put((4, group, 0), sample_of(5, first_token=group))
    store.release_groups(4, {0, 2})
    assert store.num_tokens == 5
    assert fetch(store.at, [(4, 1, 0), (4, 2, 0)]) == "it does not have sample 0 of group 2 of command 4"
    assert tokens(fetch(store.at, [(4, 1, 0)])) == [1, 2, 3, 4, 5]
    store.release([4])
    assert store.num_tokens == 0
    assert fetch(store.at, [(4, 1, 0)]) == "it does not have sample 0 of group 1 of command 4"


def test_it_gives_to_its_own_run_alone_and_no_more_than_is_meant_to_be_asked_for() -> None:
    store = SampleStore("127.0.0.1", RUN_ID, max_tokens=10 * MAX_TOKENS_FETCHED, trainers=TRAINERS)
    try:
        store.put((1, 0, 0), sample_of(5))
        assert fetch(store.at, [(1, 0, 0)], run_id="another") == (
            "it belongs to run run, but the request is from run another"
        )
        assert fetch(store.at, []) == "the request has no keys"
        many = [(1, 0, 0)] * (MAX_TOKENS_FETCHED // 5 + 1)
        assert "at once" in str(fetch(store.at, many))
        store.put((1, 0, 1), sample_of(MAX_TOKENS_FETCHED + 1))
        assert len(tokens(fetch(store.at, [(1, 0, 1)]))) == MAX_TOKENS_FETCHED + 1, "no sample is too long"
    finally:
        store.close()


@pytest.mark.parametrize(
    "frames",
    [
        [b""],
        [b"\xc1"],
        [b"\x80\x04\x95"],
        [msgspec.msgpack.encode({"type": "FetchSamples", "run_id": RUN_ID, "request_id": 1, "keys": [[1, 2]]})],
        [*encode(FetchSamples(run_id=RUN_ID, request_id=1, keys=((1, 0, 0, 0),))), b"\x91", b"more"],
        [b"\x91" * 100_000],
        [b"\0" * 2**25],
    ],
    ids=["nothing", "no msgpack", "a pickle", "half a key", "frames", "nesting", "too long"],
)
def test_what_is_no_request_is_not_answered_and_harms_nobody(store: SampleStore, frames: list[bytes]) -> None:
    store.put((1, 0, 0), sample_of(5))
    assert ask(store.at, [*frames], wait_s=0.5) is None
    assert len(tokens(fetch(store.at, [(1, 0, 0)]))) == 5


def test_it_closes_at_once_whoever_is_connected(store: SampleStore) -> None:
    other = SampleStore("127.0.0.1", RUN_ID, max_tokens=10, trainers=TRAINERS)
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.connect(other.at.address)
    socket.send(b"half a word")
    begun = time.monotonic()
    other.close()
    assert time.monotonic() - begun < 20.0, "it does not wait for the rest of the word"
    socket.close(linger=0)
    context.term()
