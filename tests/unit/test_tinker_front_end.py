"""The Tinker API without its SDK: protobuf, the desk, saved states, API keys, and the losses of single calls."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tandem.common.errors import ConfigError
from tandem.coordinator.tinker.driving import load
from tandem.serving.tinker import proto, requests
from tandem.serving.tinker.access import add_key, read_keys
from tandem.serving.tinker.calls import (
    RECALLS,
    CallDesk,
    CallFailed,
    PublishedSet,
    PublishWeights,
    RecallWeights,
    SaveState,
)
from tandem.serving.tinker.futures import FinishedRequest, RequestFutures, RequestSummary
from tandem.serving.tinker.gradients import ClientLimits, gradient_call
from tandem.serving.tinker.placing import LatestWeights, SamplingSession
from tandem.serving.tinker.requests import TinkerRefused
from tandem.serving.tinker.sampling import SamplingEngines
from tandem.serving.tinker.service import TinkerService
from tandem.serving.tinker.states import StateFolder, StateRecord, now
from tandem.trainer.calls.calls import LOSSES


def field(number: int, value: int | bytes) -> bytes:
    """Return a field as protobuf's documentation of its encoding has it: a tag, and a number or bytes of a length."""
    is_number = isinstance(value, int)
    content = varint(value) if isinstance(value, int) else varint(len(value)) + value
    return varint(number << 3 | (0 if is_number else 2)) + content


def varint(value: int) -> bytes:
    """Return a number in groups of seven bits, the lowest first; all but the last have the highest bit set."""
    groups = [value >> shift & 0x7F for shift in range(0, max(1, value.bit_length()), 7)]
    return bytes([*(group | 0x80 for group in groups[:-1]), groups[-1]])


def tensor(values: Any, dtype: str, *shape: int) -> bytes:
    """Return a dense tensor."""
    sizes = b"".join(map(varint, shape or (len(values),)))
    return field(1, np.array(values, dtype).tobytes()) + field(3, 1 if dtype == "f4" else 2) + field(4, sizes)


def entry(name: str, value: bytes) -> bytes:
    """Return an entry of a map."""
    return field(1, name.encode()) + field(2, value)


def request(*data: bytes) -> bytes:
    """Return a request with these sequences."""
    head = field(1, b"model") + field(2, 300) + b"".join(field(3, each) for each in data) + field(4, b"ppo")
    number = struct.pack("<Bd", 1 << 3 | 1, 0.5)
    return head + field(7, entry("clip_low_threshold", number)) + field(6, 1)


TARGETS = field(2, entry("target_tokens", tensor([5, 6], "i8")))
TOKENS = field(1, field(1, field(1, np.array([4, 5], "<i4").tobytes())))


def test_a_request_is_read_as_it_was_written() -> None:
    weights = field(2, entry("weights", tensor([0.5, -1], "f4")))
    read = proto.read_gradient_request(request(TOKENS + TARGETS + weights))
    assert (read.model_id, read.seq_id, read.loss, read.is_forward, read.problem) == ("model", 300, "ppo", True, "")
    assert read.settings == {"clip_low_threshold": 0.5}
    (datum,) = read.data
    assert datum.token_ids.tolist() == [4, 5]
    assert datum.inputs["target_tokens"].tolist() == [5, 6]
    assert datum.inputs["weights"].tolist() == [0.5, -1]


@pytest.mark.parametrize(
    ("datum", "why"),
    [
        (field(1, field(2, b"image")), "images and audio are not served"),
        (field(2, entry("weights", tensor([1, 2], "f4", 1, 2))), "several targets at a position are not served"),
        (field(2, entry("weights", field(2, b""))), "sparse tensors"),
        (field(2, entry("weights", tensor([1, 2], "f4", 3))), "has 2 numbers, and its shape says 3"),
        (field(2, entry("weights", field(3, 4))), "must be float32 or int64"),
        (b"\x0a\x7f", "is cut off"),
        (field(1, field(1, field(1, b"abc"))), "no whole tokens"),
        (field(1, b""), "a chunk is empty"),
        (field(2, entry("weights", tensor([1, 2], "f4") + field(7, 1))), "weights: an unknown field 7"),
        (field(9, b""), "an unknown field 9"),
    ],
)
def test_what_is_wrong_with_a_request_is_said_and_its_number_is_known(datum: bytes, why: str) -> None:
    read = proto.read_gradient_request(request(TOKENS + TARGETS, datum))
    assert read.seq_id == 300
    assert read.problem.startswith("data[1]: ")
    assert why in read.problem


@given(st.binary(max_size=300))
def test_any_bytes_are_read_or_refused(body: bytes) -> None:
    for each in (body, request(body), request(TOKENS + field(2, body))):
        with contextlib.suppress(proto.MalformedMessage):
            proto.read_gradient_request(each)


def test_calls_wait_for_an_attempt_and_fail_with_it() -> None:
    desk, answers = CallDesk(), list[Any]()
    desk.put(PublishWeights(), answers.append)
    assert not desk.is_open
    desk.open(3)
    assert (desk.version, desk.first_version, [each.call for each in desk.next()]) == (3, 3, [PublishWeights()])
    desk.take(0).answer(4)
    desk.put(PublishWeights(), answers.append)
    attempt = desk.attempt
    desk.close("lost")
    assert desk.attempt == attempt + 1
    desk.put(PublishWeights(), answers.append)
    assert len(answers) == 2, "the third waits for the next attempt"
    desk.close("over", is_over=True)
    desk.put(PublishWeights(), answers.append)
    assert answers[0] == 4
    assert [str(each) for each in answers[1:]] == ["lost", "over", "over"]
    assert all(isinstance(each, CallFailed) for each in answers[1:])


def test_models_take_turns_and_the_calls_of_each_stay_in_their_order() -> None:
    desk = CallDesk(3)
    for model, folder in ((0, "a"), (0, "b"), (0, "c"), (2, "d"), (2, "e")):
        desk.put(SaveState(folder=folder), lambda answer: None, model)
    taken = [desk.take(desk.next()[0].turn).call for _ in range(3)]
    desk.put(RecallWeights(), lambda answer: None, desk.published_of(2)[0], RECALLS)
    taken += [desk.take(desk.next()[0].turn).call for _ in range(3)]
    assert taken == [*(SaveState(folder=folder) for folder in "adbec"), RecallWeights()]
    assert not desk.next()
    desk.open(1)
    assert (desk.holding, desk.newest) == (3, {3: 1})


def test_the_published_version_that_was_used_longest_ago_makes_room() -> None:
    desk = CallDesk(2, 3)
    desk.open(0)
    assert [[*desk.published_of(model)] for model in range(2)] == [[3, 4, 5], [6, 7, 8]]
    assert [desk.model_of(number) for number in (2, 3, 5, 6, 8)] == [2, 0, 0, 1, 1]
    reference, *others = (PublishedSet(desk.place_of_next(1), version) for version in (1,))
    desk.note_published(reference)
    for version in range(2, 9):
        desk.note_use(reference.number)
        others.append(PublishedSet(desk.place_of_next(1), version))
        desk.note_published(others[-1])
    assert {each.number for each in others} == {7, 8}, "the reference is sampled from, and stays"
    assert desk.newest == {2: 0, 6: 1, 7: 8, 8: 7}
    assert desk.latest == {1: 7}
    assert desk.place_of_next(0) == 3, "what another model publishes takes nothing of this one's"
    of = {version: SamplingSession("s", "me", 0, PublishedSet(7, version), None) for version in (6, 8)}
    of[8].check(desk)
    with pytest.raises(CallFailed, match=r"version 6 are not kept any more: .* keeps 3 published versions of a model"):
        of[6].check(desk)
    follows = SamplingSession("s", "me", 0, LatestWeights(1, "session:train:0"), None)
    desk.model_ids[1] = "session:train:0"
    follows.check(desk)
    assert follows.number_in(desk) == 7
    desk.model_ids[1] = "another:train:0"
    with pytest.raises(CallFailed, match="another model is in the place of its own"):
        follows.check(desk)


def test_a_request_that_never_comes_fails_those_that_wait_for_it_and_the_model_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.serving.tinker.service._GAP_S", 0.05)
    monkeypatch.chdir(tmp_path)
    new = {"characters": "01", "config": {"model_type": "qwen3", "num_hidden_layers": 2}}
    Path("tinker.yaml").write_text(yaml.safe_dump({"policy": {"model_name": "model", "new_model": new}}))
    config = load("tinker.yaml", ())
    desk = CallDesk()

    async def scenario() -> None:
        service = TinkerService(desk, config, SamplingEngines(tmp_path, 32, 1.0), StateFolder(tmp_path), 1000)
        session = service.create_session("me", requests.CreateSession(sdk_version="0.38.0"))["session_id"]
        asked = requests.CreateModel(session_id=session, model_seq_id=0, base_model="model")
        model = service.create_model("me", asked)["model_id"]
        desk.take(0).answer(None)
        await asyncio.sleep(0)

        def step(seq: int) -> str:
            body = requests.OptimStep(model_id=model, seq_id=seq, adam_params=requests.AdamParams())
            return str(service.step("me", body)["request_id"])

        waiting = [step(2), step(3)]  # the SDK could not send the first
        assert desk.next() == []
        for name in waiting:
            result = await service.result("me", name, 60.0)
            assert result is not None
            assert "request 1 of" in result.why_failed
            assert "has not come" in result.why_failed
        assert desk.next() == [], "they were not carried out"
        with pytest.raises(TinkerRefused, match="seq_id: 1, and the next request of"):
            step(1)
        after = step(4)
        desk.take(0).answer(0.5)
        result = await service.result("me", after, 60.0)
        assert result is not None
        assert not result.why_failed

    asyncio.run(scenario())


@pytest.mark.parametrize("loss", ["importance_sampling", "ppo", "cispo", "dro", "cross_entropy"])
@pytest.mark.parametrize("name", ["mask", "weights", "advantages"])
def test_an_input_that_a_loss_does_not_take_is_refused(loss: str, name: str) -> None:
    inputs = {"cross_entropy": ("weights",)}.get(loss, ("logprobs", "advantages"))
    values: Any = {"target_tokens": np.array([5, 6]), **{each: np.ones(2, dtype=np.float32) for each in inputs}}
    limits = ClientLimits(max_length=8, vocabulary=17, most_tokens=100)

    def call(**more: Any) -> Any:
        datum = proto.TrainingDatum(token_ids=np.array([4, 5], dtype=np.int32), inputs={**values, **more})
        body = proto.GradientRequest(
            model_id="model", seq_id=1, data=(datum,), loss=loss, settings={}, is_forward=False
        )
        return gradient_call(body, limits)

    assert call().loss == loss
    if name not in inputs:
        with pytest.raises(TinkerRefused, match=rf"data\[0\].{name}: {loss} takes target_tokens and {inputs[0]}"):
            call(**{name: np.ones(2, dtype=np.float32)})


def test_old_results_are_dropped_when_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.serving.tinker.futures._MOST_BYTES", 10)

    async def check() -> None:
        futures = RequestFutures(lambda record: None)
        for name in ("a", "b"):
            futures.begin(name, "me", RequestSummary())
            futures.finish(name, FinishedRequest(b"x" * 8))
            futures.finish(name, FinishedRequest(b"another"))
        assert futures.get("a", "me") is None
        assert futures.is_dropped("a", "me")
        assert not futures.is_dropped("a", "another")
        assert futures.get("b", "another") is None
        kept = futures.get("b", "me")
        assert kept is not None
        assert kept.result == FinishedRequest(b"x" * 8), "once"
        assert futures.num_unfinished == {"me": 0}

    asyncio.run(check())


def test_ends_of_a_batch_are_told_until_they_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.serving.tinker.futures._MOST_FINISHED", 3)

    async def scenario() -> None:
        futures = RequestFutures(lambda record: None)
        assert await futures.ends("a", 0, 0.0) == ({}, 0)
        for number in range(3):
            futures.begin(f"a{number}", "me", RequestSummary(), "a")
        futures.begin("b0", "me", RequestSummary(), "b")
        waiting = asyncio.create_task(futures.ends("a", 0, 60.0))
        await asyncio.sleep(0)
        futures.finish("b0", FinishedRequest(b"other"))
        await asyncio.sleep(0)
        assert not waiting.done()
        futures.finish("a1", FinishedRequest(b"one"))
        ended, seen = await waiting
        assert ended == {"a1": FinishedRequest(b"one")}
        assert await futures.ends("a", 0, 0.0) == (ended, seen), "an answer may be lost on its way"
        assert await futures.ends("a", seen, 0.0) == ({}, seen)
        futures.finish("a0", FinishedRequest(b"zero"))
        futures.drop_seen("b0", "a")
        assert futures.get("b0", "me") is not None, "it is of another batch"
        futures.drop_seen("a1", "a")
        futures.drop_seen("a2", "a")
        assert futures.is_dropped("a1", "me")
        futures.finish("a2", FinishedRequest(b"two"))
        for number in range(3):
            futures.begin(f"c{number}", "me", RequestSummary())
            futures.finish(f"c{number}", FinishedRequest(b"more"))
        ended, seen = await futures.ends("a", seen, 0.0)
        assert ended == {"a0": None, "a2": None}, "their results are dropped, and their client learns it"
        assert await futures.ends("a", seen, 0.0) == ({}, seen)
        assert not futures._batches.keys() - {"b"}

    asyncio.run(scenario())


def test_states_are_found_by_their_owner_alone() -> None:
    states = StateFolder(Path("states"))
    for name in ("..", "a/b", "", "x.unfinished", ".hidden"):
        with pytest.raises(TinkerRefused, match="must be letters"):
            states.folder_for("session-1:train:0", name)
    folder = states.folder_for("session-1:train:0", "one")
    folder.mkdir()
    record = StateRecord(
        owner="me",
        model_id="session-1:train:0",
        name="one",
        base_model="base",
        lora_rank=None,
        created_at="2026-11-26T06:00:00+00:00",
        num_bytes=7,
    )
    with pytest.raises(TinkerRefused, match="no saved weights"):
        states.find(record.path, "me")  # it has no record yet
    states.write(record)
    assert states.find(record.path, "me") == (record, folder)
    assert states.of("me") == states.of("me", record.model_id) == [record]
    assert states.of("another") == states.of("me", "session-2:train:0") == []
    for path, owner in ((record.path, "another"), ("tinker://../weights/one", "me"), ("tinker://x/weights/..", "me")):
        with pytest.raises(TinkerRefused, match="no saved weights"):
            states.delete(path, owner)
    with pytest.raises(TinkerRefused, match="held by engines only"):
        states.find("tinker://session-1:train:0/sampler_weights/one", "me")
    states.delete(record.path, "me")
    assert not folder.exists()
    states.folder_for(record.model_id, "one").mkdir()
    states.write(msgspec.structs.replace(record, expires_at=now(3600)))
    assert len(states.of("me")) == 1
    states.write(msgspec.structs.replace(record, expires_at=now(-1)))
    assert states.of("me") == []
    assert not folder.exists(), "it has expired"


def test_keys_are_hashed_and_their_file_is_the_owners() -> None:
    path = Path("keys.json")
    with pytest.raises(ConfigError, match="there is no key yet"):
        read_keys(path)
    first, other, second = add_key(path, "me"), add_key(path, "you"), add_key(path, "me")
    keys = read_keys(path)
    assert [keys.owner_of(key) for key in (first, second, other, "", "tml-")] == [None, "me", "you", None, None]
    assert not any(key in path.read_text() for key in (first, second, other))
    late = add_key(path, "late")
    assert keys.owner_of(late) == "late", "it was added while the server ran"
    third = add_key(path, "me")
    assert [keys.owner_of(key) for key in (second, third, other)] == [None, "me", "you"]
    whole = path.read_bytes()
    for content in (b"{", b"[]"):  # half written, or no file of keys: what was read before stays
        path.write_bytes(content)
        assert keys.owner_of(third) == "me"
    path.unlink()
    assert keys.owner_of(third) == "me"
    path.write_bytes(whole)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="a key's name"):
        add_key(path, "../me")
    path.chmod(0o640)
    with pytest.raises(ConfigError, match=r"keys\.json"):
        read_keys(path)


def test_another_release_of_the_sdk_is_told_which_to_install() -> None:
    requests.check_version("0.38.4")
    with pytest.raises(TinkerRefused, match=r"the client is tinker 0\.39\.0: pip install tinker==0\.38\.0"):
        requests.check_version("0.39.0")


def test_clipped_losses_have_a_gradient_where_they_should() -> None:
    ratio = torch.tensor([0.5, 1.0, 2.0, 0.5, 2.0])
    inputs = {"logprobs": torch.full((5,), -1.0), "advantages": torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0])}
    settings = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
    gradients = {}
    for name in ("ppo", "cispo"):
        logprobs = (ratio.log() - 1.0).requires_grad_()
        LOSSES[name](logprobs, inputs, settings).sum().backward()  # type: ignore[index]
        assert logprobs.grad is not None
        gradients[name] = logprobs.grad.tolist()
    assert gradients["ppo"] == pytest.approx([-0.5, -1.0, 0.0, 0.0, 2.0])
    assert gradients["cispo"] == pytest.approx([-0.8, -1.0, -1.2, 0.8, 1.2])
