"""A rank's share of a batch, fetched from real stores over real sockets."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from samples_harness import RUN_ID, TRAINERS, sample_of

from tandem.common import messages
from tandem.common.errors import WireError
from tandem.common.messages import FetchSamples, Goodbye, Listener, SamplesFetched
from tandem.common.wire import Frames, MessageCodec, encode
from tandem.samples.batch import SampleBatch
from tandem.samples.batch_sharding import NO_PROMPT
from tandem.samples.sample_store import SampleStore
from tandem.trainer import fetching
from tandem.trainer.fetching import SampleFetcher, SampleFormat
from tests.harness import members
from tests.harness.members import MEMBER, open_hub
from tests.harness.ports import refusing_port

LENGTHS = [5, 9, 6, 7, 8, 5]
PROMPT = 2
VOCABULARY = 60


@pytest.fixture
def stores() -> Iterator[list[SampleStore]]:
    """Two rollouts, of which the second has every other one of six samples."""
    stores = [SampleStore("127.0.0.1", RUN_ID, max_tokens=10**7, trainers=TRAINERS) for _ in range(2)]
    for row, length in enumerate(LENGTHS):
        stores[row % 2].put((11 + row % 2, row // 2, row % 2), sample_of(length, prompt_length=PROMPT))
    yield stores
    for store in stores:
        store.close()


def table_of(**changes: Any) -> SampleBatch:
    """Six samples of three groups; ranks 0 and 1 take turns by pairs."""

    def column(*values: int) -> Any:
        return np.array(values, dtype=np.int32)

    table = SampleBatch(
        lengths_S=column(*LENGTHS),
        num_valid_S=column(*(length - PROMPT for length in LENGTHS)),
        prompt_S=column(0, 0, 2, 2, 4, 4),
        prompt_lengths_S=column(*[PROMPT] * 6),
        rank_S=column(0, 0, 1, 1, 0, 0),
        advantages_S=np.arange(6, dtype=np.float32),
        rewards_S=np.arange(6, dtype=np.float32) / 2,
        source_S=column(0, 1, 0, 1, 0, 1),
        command_S=np.array([11, 12] * 3, dtype=np.int64),
        group_S=column(0, 0, 1, 1, 2, 2),
        sample_S=column(0, 1, 0, 1, 0, 1),
        branch_S=column(*[0] * 6),
    )
    return table.replace(**changes)


@pytest.fixture
def fetcher() -> Iterator[SampleFetcher]:
    with contextlib.closing(SampleFetcher(RUN_ID, SampleFormat(vocabulary=VOCABULARY), MEMBER)) as made:
        yield made


def sources_of(stores: list[SampleStore]) -> dict[str, Listener]:
    return {f"rollout-{number}": store.at for number, store in enumerate(stores)}


def test_a_share_is_what_the_table_says(fetcher: SampleFetcher, stores: list[SampleStore]) -> None:
    table = table_of(num_valid_S=np.array([3, 0, 4, 5, 6, 3], dtype=np.int32))
    share, missing = fetcher.fetch(1, table, table.rows_of(0), sources_of(stores), 10.0)
    assert missing == {}
    assert share is not None
    assert share.lengths_S.tolist() == [5, 9, 8, 5]
    assert share.advantages_S.tolist() == [0, 1, 4, 5]
    assert share.rewards_S.tolist() == [0, 0.5, 2, 2.5]
    assert share.num_valid().tolist() == [3, 0, 6, 3], "the second is masked whole"
    expected = SampleBatch.concatenate([sample_of(length, prompt_length=PROMPT) for length in [5, 9, 8, 5]])
    np.testing.assert_array_equal(share.token_ids_T, expected.token_ids_T)
    np.testing.assert_array_equal(share.generation_logprobs_T, expected.generation_logprobs_T)


def test_a_rank_without_sequences_asks_nobody(fetcher: SampleFetcher) -> None:
    table = table_of()
    share, missing = fetcher.fetch(1, table, table.rows_of(2), {"rollout-0": "tcp://127.0.0.1:1"}, 10.0)
    assert (missing, None if share is None else len(share)) == ({}, 0)


def test_what_is_gone_is_named_and_what_came_is_kept_for_the_same_step(
    fetcher: SampleFetcher, stores: list[SampleStore]
) -> None:
    table = table_of()
    rows, sources = table.rows_of(0), sources_of(stores)
    stores[1].release([12])
    share, missing = fetcher.fetch(1, table, rows, sources, 10.0)
    assert share is None
    assert missing == {"rollout-1": "it does not have sample 1 of group 0 of command 12"}
    # They were made again, by another order of the first rollout, which has lost what it had made before.
    stores[0].release([11])
    for row in (1, 5):
        stores[0].put((13, row // 2, 1), sample_of(LENGTHS[row], prompt_length=PROMPT))
    again = table_of(source_S=np.zeros(6, dtype=np.int32), command_S=np.array([11, 13, 11, 12, 11, 13], dtype=np.int64))
    share, missing = fetcher.fetch(1, again, rows, {"rollout-0": sources["rollout-0"]}, 10.0)
    assert missing == {}
    assert share is not None
    assert share.lengths_S.tolist() == [5, 9, 8, 5]
    share, missing = fetcher.fetch(2, again, rows, {"rollout-0": sources["rollout-0"]}, 10.0)
    assert share is None, "of another step nothing is kept"
    assert list(missing) == ["rollout-0"]


def test_connections_stay_open_while_the_rollouts_are_the_same(
    fetcher: SampleFetcher, stores: list[SampleStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    connected: list[list[str]] = []

    class Counted(fetching.CallerConnections):
        def __init__(self, listeners: dict[str, Listener], *others: Any, **settings: Any) -> None:
            connected.append(sorted(listeners))
            super().__init__(listeners, *others, **settings)

    monkeypatch.setattr(fetching, "CallerConnections", Counted)
    table, sources = table_of(), sources_of(stores)
    for step in (1, 2, 3):
        share, missing = fetcher.fetch(step, table, table.rows_of(0), sources, 10.0)
        assert (share is None, missing) == (False, {})
    assert connected == [["rollout-0", "rollout-1"]]
    # The second is replaced by another, which is elsewhere and has the same.
    moved = SampleStore("127.0.0.1", RUN_ID, max_tokens=10**7, trainers=TRAINERS)
    try:
        for row in (1, 3, 5):
            moved.put((12, row // 2, 1), sample_of(LENGTHS[row], prompt_length=PROMPT))
        share, missing = fetcher.fetch(4, table, table.rows_of(0), {**sources, "rollout-1": moved.at}, 10.0)
    finally:
        moved.close()
    assert (share is None, missing) == (False, {})
    assert len(connected) == 2


def test_many_tokens_come_in_several_requests(
    fetcher: SampleFetcher, stores: list[SampleStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    requests: list[int] = []
    find = SampleStore._find_samples

    def counting(store: SampleStore, request: FetchSamples) -> SampleBatch:
        requests.append(len(request.keys))
        return find(store, request)

    monkeypatch.setattr(SampleStore, "_find_samples", counting)
    monkeypatch.setattr(messages, "MAX_TOKENS_FETCHED", 14)
    table = table_of(rank_S=np.zeros(6, dtype=np.int32))
    share, _ = fetcher.fetch(1, table, table.rows_of(0), sources_of(stores), 10.0)
    assert share is not None
    assert share.lengths_S.tolist() == LENGTHS
    assert sorted(requests) == [1, 1, 2, 2], "5 and 6, then 8; 9, then 7 and 5"


def test_a_rollout_that_is_not_there_is_given_up_soon(
    fetcher: SampleFetcher, stores: list[SampleStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetching, "_PATIENCE_S", 0.5)
    table = table_of()
    with refusing_port() as port:
        sources = sources_of(stores) | {"rollout-1": members.at(f"tcp://127.0.0.1:{port}")}
        begun = time.monotonic()
        share, missing = fetcher.fetch(1, table, table.rows_of(0), sources, 60.0)
    assert time.monotonic() - begun < 30.0
    assert share is None
    assert missing == {"rollout-1": f"nobody answers at tcp://127.0.0.1:{port}"}


def test_an_address_that_is_none_is_missing_too(fetcher: SampleFetcher) -> None:
    table = table_of()
    share, missing = fetcher.fetch(
        1, table, table.rows_of(0), {"a": members.at("nonsense"), "b": members.at("tcp://x")}, 1.0
    )
    assert share is None
    assert missing.keys() == {"a", "b"}


def answered(answer: Callable[[FetchSamples], Frames | None], *, timeout_s: float = 10.0) -> dict[str, str]:
    """Fetch what one rollout has, in whose place `answer` answers; return what is missing."""
    hub, is_over = open_hub(), threading.Event()
    codec: MessageCodec[FetchSamples] = MessageCodec(FetchSamples)

    def serve() -> None:
        while not is_over.is_set():
            for peer, frames in hub.receive(0.05):
                reply = answer(codec.decode(frames).message)
                if reply is not None:
                    hub.send(peer, reply)
        hub.close()

    thread = threading.Thread(target=serve)
    thread.start()
    table = table_of(source_S=np.zeros(6, dtype=np.int32))
    try:
        with contextlib.closing(SampleFetcher(RUN_ID, SampleFormat(vocabulary=VOCABULARY), MEMBER)) as fetcher:
            share, missing = fetcher.fetch(1, table, table.rows_of(1), {"rollout-0": hub.at}, timeout_s)
    finally:
        is_over.set()
        thread.join()
    assert (share is None) == bool(missing)
    return missing


def right(**changes: Any) -> SampleBatch:
    """What rank 1 is to get, but for these changes."""
    arrays = SampleBatch.concatenate([sample_of(length, prompt_length=PROMPT) for length in LENGTHS[2:4]])
    return arrays.replace(**changes)


def with_samples(arrays: SampleBatch) -> Callable[[FetchSamples], Frames]:
    return lambda request: encode(SamplesFetched(request_id=request.request_id), arrays.columns)


def test_what_is_as_announced_is_taken() -> None:
    assert answered(with_samples(right())) == {}


def changed(name: str, place: int, value: Any) -> SampleBatch:
    array = getattr(right(), name).copy()
    array[place] = value
    return right(**{name: array})


def unmade(name: str, place: int) -> Any:
    """Return an array in which the policy has not made one token."""
    array = getattr(right(), name).copy()
    array[place] = -1 if name == "versions_T" else 0
    return array


TOKENS, MASK, LOGPROBS, VERSIONS = "token_ids_T", "loss_mask_T", "generation_logprobs_T", "versions_T"
NAN, INF = float("nan"), float("inf")
WRONG: dict[str, tuple[SampleBatch, str]] = {
    "another sample": (sample_of(6), "lengths_S: not the lengths that were announced"),
    "shifted": (right(lengths_S=np.array([7, 6], dtype=np.int32)), "lengths_S: not the lengths"),
    "lengths too long": (changed("lengths_S", 1, 500), f"{TOKENS}: 13 numbers, does not fit lengths_S"),
    "negative length": (changed("lengths_S", 1, -5), "lengths_S: -5 for sequence 1, must be at least 1"),
    "a token less made": (changed(MASK, 1, True), f"{VERSIONS}: -1 for token 1"),
    "NaN": (changed(LOGPROBS, 5, NAN), f"{LOGPROBS}: nan for token 5, of sequence 0, must be finite and at most 0"),
    "impossible": (changed(LOGPROBS, 5, -INF), f"{LOGPROBS}: -inf for token 5"),
    "positive": (changed(LOGPROBS, 5, 0.5), f"{LOGPROBS}: 0.5 for token 5"),
    "in a prompt": (changed(LOGPROBS, 0, -1.0), f"{LOGPROBS}: -1.0 for token 0, of sequence 0, must be 0 where"),
    "no version": (changed(VERSIONS, 5, -1), f"{VERSIONS}: -1 for token 5, of sequence 0, must be a version"),
    "version of a prompt": (changed(VERSIONS, 0, 3), f"{VERSIONS}: 3 for token 0"),
    "no such token": (changed(TOKENS, 4, VOCABULARY), f"{TOKENS}: {VOCABULARY} for token 4"),
    "negative token": (changed(TOKENS, 4, -1), f"{TOKENS}: -1 for token 4"),
    "tokens as floats": (right(token_ids_T=right().token_ids_T.astype(np.float32)), f"{TOKENS}: is float32"),
    "byte order": (right(token_ids_T=right().token_ids_T.astype(">i4")), f"{TOKENS}: is >i4"),
    "two dimensions": (right(token_ids_T=right().token_ids_T.reshape(1, -1)), f"{TOKENS}: is int32 (1, 13)"),
    "bytes for booleans": (right(loss_mask_T=(right().loss_mask_T * np.uint8(7)).view(np.bool_)), f"{MASK}: holds"),
    "longer prompt": (
        right(**{name: unmade(name, 2) for name in (MASK, LOGPROBS, VERSIONS)}),
        f"{MASK}: not the prompts",
    ),
    "fewer counted": (
        right(**{name: unmade(name, 4) for name in (MASK, LOGPROBS, VERSIONS)}),
        f"{MASK}: not the numbers of tokens",
    ),
}


@pytest.mark.parametrize(("arrays", "why"), WRONG.values(), ids=WRONG)
def test_what_is_not_as_announced_is_missing(arrays: SampleBatch, why: str) -> None:
    missing = answered(with_samples(arrays))
    assert missing["rollout-0"].startswith(f"it sent what is not asked for: {why}")


ANY_ARRAY = st.one_of(
    st.lists(st.integers(-3, 60), max_size=15).map(lambda values: np.array(values, np.int32)),
    st.lists(st.floats(width=32), max_size=15).map(lambda values: np.array(values, np.float32)),
    st.lists(st.booleans(), max_size=15).map(lambda values: np.array(values, np.bool_)),
    st.binary(min_size=13, max_size=13).map(lambda raw: np.frombuffer(raw, np.bool_)),
    st.binary(min_size=52, max_size=52).map(lambda raw: np.frombuffer(raw, np.int32)),
    st.binary(min_size=8, max_size=8).map(lambda raw: np.frombuffer(raw, np.int32)),
    st.just(np.zeros((2, 11), np.int32)),
    st.just(np.zeros((), np.int64)),
)
NAMES = [*right().columns]
SPOTS = st.tuples(st.sampled_from(NAMES), st.integers(0, 12), st.integers(-(2**31), 2**31 - 1))


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.sampled_from([*NAMES, "more"]), ANY_ARRAY, max_size=2), st.lists(SPOTS, max_size=4))
def test_whatever_arrays_come_they_are_right_or_a_wire_error(
    others: dict[str, Any], spots: list[tuple[str, int, int]]
) -> None:
    came = {**right().columns, **others}
    for name, at, bits in spots:
        array = came[name]
        if array.ndim == 1 and array.itemsize == 4 and at < len(array):
            came[name] = array.copy()
            came[name].view(np.int32)[at] = bits
    with contextlib.suppress(WireError):
        SampleFormat(vocabulary=VOCABULARY).read(came, table_of().take(np.array([2, 3])))


def test_samples_of_a_group_must_have_its_prompt() -> None:
    table = table_of(prompt_S=np.array([0, 0, 2, 2, 4, 4], dtype=np.int32))
    one, other = (sample_of(length, prompt_length=PROMPT, first_token=place) for place, length in enumerate((6, 7)))
    assert table.prompt_S[2] == table.prompt_S[3] != NO_PROMPT
    missing = answered(with_samples(SampleBatch.concatenate([one, other])))
    assert missing == {"rollout-0": "the prompt of a sample is not that of its group"}


@pytest.mark.parametrize(
    "frames",
    [[b"\xc1"], [b"\x80\x04."], encode(SamplesFetched(request_id=0)), encode(Goodbye(reason=""))],
    ids=["no msgpack", "a pickle", "no arrays", "another message"],
)
def test_what_is_no_answer_is_missing(frames: Frames) -> None:
    missing = answered(lambda _: frames)
    assert missing["rollout-0"].startswith("it sent what is not asked for")


def test_an_answer_to_an_earlier_request_counts_for_nothing() -> None:
    old = encode(SamplesFetched(request_id=7), sample_of(6).columns)
    missing = answered(lambda _: old, timeout_s=1.0)
    assert missing == {"rollout-0": "it has not sent them within 1 s"}


def test_a_rollout_that_never_answers_is_missing_at_the_deadline() -> None:
    begun = time.monotonic()
    assert answered(lambda _: None, timeout_s=1.0) == {"rollout-0": "it has not sent them within 1 s"}
    assert time.monotonic() - begun < 20.0


def test_a_request_whose_connection_breaks_is_made_again(fetcher: SampleFetcher) -> None:
    hub = open_hub()
    address, asked = hub.address, []
    codec: MessageCodec[FetchSamples] = MessageCodec(FetchSamples)

    def serve() -> None:
        """Hear a request, vanish, come back at the same address, and answer it there."""
        while not asked:
            asked.extend(codec.decode(frames).message for _, frames in hub.receive(0.1))
        hub.close()
        again = open_hub(address)
        while len(asked) < 2:
            for peer, frames in again.receive(0.1):
                asked.append(codec.decode(frames).message)
                again.send(peer, with_samples(right())(asked[-1]))
        again.close()

    thread = threading.Thread(target=serve)
    thread.start()
    table = table_of(source_S=np.zeros(6, dtype=np.int32))
    share, missing = fetcher.fetch(1, table, table.rows_of(1), {"rollout-0": members.at(address)}, 20.0)
    thread.join()
    assert missing == {}
    assert share is not None
    assert asked[0] == asked[1]
