"""The record of calls: files that say what was called, notice damage, and stay within their limit."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from run_harness import Run

from tandem.common.errors import RunFolderError
from tandem.coordinator.tinker.replay import read_records
from tandem.observe.run_folder.journal import read_journal
from tandem.serving.tinker import call_files, recording
from tandem.serving.tinker.call_files import CallComparison, CallHead, GradientDone, RecordEnd, RestoreDone, StepDone
from tandem.serving.tinker.calls import (
    INPUTS,
    AddGradients,
    Answer,
    CallFailed,
    GivenSequence,
    GradientsScored,
    PublishWeights,
    RestoreState,
    SaveState,
    TakeStep,
)
from tandem.serving.tinker.recording import ModelRecords, RecordingDesk

STEP = TakeStep(learning_rate=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.0, max_grad_norm=0.0)
FIRST = RestoreState(folder="", with_optimizer=False)


def gradient(lengths: Sequence[int] = (3, 2), *, others: bool = False, value: float = 0.5) -> AddGradients:
    """Return a gradient of sequences with these lengths."""
    sequences = []
    for place, size in enumerate(lengths):
        tokens = np.arange(size, dtype=np.int32) + place
        inputs = {name: np.zeros(size, dtype=np.float32) for name in INPUTS}
        inputs["weights"] += np.float32(value)
        targets = tokens[::-1].copy() if others else tokens
        sequences.append(GivenSequence(token_ids=tokens, targets=targets, inputs=inputs))
    return AddGradients(sequences=sequences, loss="cross_entropy", settings={"a": 0.1}, has_gradient=True)


def scored(call: AddGradients, loss: float = 0.25) -> GradientsScored:
    """Return an answer to a gradient."""
    logprobs = [-np.ones(len(each.token_ids), dtype=np.float32) for each in call.sequences]
    return GradientsScored(loss=loss, logprobs=logprobs)


class Server:
    """A desk with a record, and the loop that answers its calls."""

    def __init__(self, most_bytes: int = 10**9) -> None:
        self.run = Run("run")
        self.said: list[str] = []
        self.record = ModelRecords(Path("run"), most_bytes, self.said.append)
        self.desk = RecordingDesk(4, 1, self.record)

    def call(self, model: str, call: Any, answer: Answer | CallFailed, number: int = 0) -> None:
        """Carry out a call of a model."""
        given: list[Any] = []
        self.desk.put(call, given.append, number, model=model)
        self.desk.take(number).answer(answer)
        assert given == [answer], "the client gets it"

    def close(self) -> dict[str, list[Any]]:
        """End the record; return the calls of each model."""
        self.record.close()
        found = {}
        for path in sorted(Path("run", call_files.FOLDER).glob("*")):
            head, calls = call_files.read(path, run_id())
            found[head.model] = [*calls]
        return found


def run_id() -> str:
    with read_journal(Path("run")) as journal:
        return journal.run_id


@pytest.mark.parametrize("others", [False, True])
@pytest.mark.parametrize("value", [0.5, 0.0, -0.0])
def test_a_gradient_is_read_as_it_was_called(others: bool, value: float) -> None:
    call = gradient(others=others, value=value)
    done = call_files.gradient_done(3, call, scored(call))
    again = call_files.call_of(done)
    assert (again.loss, again.settings, again.has_gradient) == (call.loss, call.settings, True)
    for one, other in zip(again.sequences, call.sequences, strict=True):
        for name in ("token_ids", "mask", "targets"):
            assert getattr(one, name).tobytes() == getattr(other, name).tobytes()
            assert getattr(one, name).dtype == getattr(other, name).dtype
        assert {name: array.tobytes() for name, array in one.inputs.items()} == {
            name: array.tobytes() for name, array in other.inputs.items()
        }
    assert (done.targets is None) is not others
    assert done.logprobs == call_files.digest_of(scored(call))


def test_calls_of_models_are_recorded_in_their_order_and_nothing_else_is() -> None:
    server = Server()
    call = gradient()
    forward = AddGradients(sequences=call.sequences, loss="cross_entropy", settings={}, has_gradient=False)
    for model, number in (("a", 0), ("b", 1)):
        server.call(model, FIRST, None, number)
    server.call("a", call, scored(call))
    server.call("b", forward, scored(call), 1)
    server.call("", call, scored(call), 2)  # of a sample
    server.call("b", PublishWeights(), 7, 1)
    server.call("a", call, CallFailed("not finite"))
    server.call("a", STEP, 1.5)
    server.call("b", STEP, 2.5, 1)
    found = server.close()
    assert [type(each).__name__ for each in found["a"]] == ["RestoreDone", "GradientDone", "GradientDone", "StepDone"]
    assert [each.error for each in found["a"]] == ["", "", "not finite", ""]
    assert (found["a"][1].loss, found["a"][3].norm, found["a"][3].step) == (0.25, 1.5, STEP)
    assert [type(each) for each in found["b"]] == [RestoreDone, StepDone]
    assert server.said == []
    folder = Path("run", "calls")
    assert folder.stat().st_mode & 0o777 == 0o700
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in folder.iterdir())


def test_what_a_lost_trainer_has_taken_along_is_not_recorded() -> None:
    server = Server()
    server.call("a", FIRST, None)
    server.desk.put(STEP, lambda answer: None, 0, model="a")
    taken = server.desk.take(0)
    server.desk.close("a trainer was lost")
    taken.answer(CallFailed("a trainer was lost"))
    assert len(server.close()["a"]) == 1


def test_a_full_record_loses_models_that_are_over_first() -> None:
    call = gradient((100,))
    size = len(call_files.encode(call_files.gradient_done(0, call, scored(call))))
    server = Server(most_bytes=4 * size)
    for model in ("a", "b"):  # b takes the place of a
        server.call(model, FIRST, None)
        for _ in range(2):
            server.call(model, call, scored(call))
    for _ in range(3):
        server.call("b", call, scored(call))
    server.call("c", FIRST, None)
    server.call("c", call, scored(call))
    found = server.close()
    assert [*found] == ["c"]
    assert [type(each) for each in found["c"]] == [RestoreDone, GradientDone]
    (said,) = server.said
    assert "the record of b has ended" in said
    assert "as --record says" in said


def test_the_record_of_a_model_that_is_trained_is_not_deleted() -> None:
    call = gradient((100,))
    size = len(call_files.encode(call_files.gradient_done(0, call, scored(call))))
    server = Server(most_bytes=4 * size)
    for number, model in enumerate("ab"):
        server.call(model, FIRST, None, number)
        server.call(model, call, scored(call), number)
    for _ in range(5):
        server.call("b", call, scored(call), 1)
    found = server.close()
    assert [type(each) for each in found["a"]] == [RestoreDone, GradientDone]
    assert isinstance(found["b"][-1], RecordEnd)


def test_a_record_that_ends_says_so_in_its_file() -> None:
    call = gradient((100,))
    size = len(call_files.encode(call_files.gradient_done(0, call, scored(call))))
    server = Server(most_bytes=3 * size)
    server.call("a", FIRST, None)
    for _ in range(9):
        server.call("a", call, scored(call))
    (calls,) = server.close().values()
    assert isinstance(calls[-1], RecordEnd)
    assert len(calls) < 6
    (record,) = read_records(Path("run"), run_id())
    assert "as --record says" in record.why_over
    assert [each.index for each in record.calls()] == [*range(len(calls) - 1)]
    assert len(server.said) == 1


def test_a_slow_disk_ends_the_record_and_keeps_no_client_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "_MOST_TOKENS_BEHIND", 8)
    gate = threading.Event()
    write = recording.os.write
    monkeypatch.setattr(recording.os, "write", lambda *given: gate.wait(60.0) and write(*given))
    server = Server()
    server.call("a", FIRST, None)
    call = gradient()
    for _ in range(3):
        server.call("a", call, scored(call))
    gate.set()
    calls = server.close()["a"]
    assert isinstance(calls[-1], RecordEnd)
    assert "too slow" in calls[-1].why


def test_a_run_without_a_folder_to_write_to_goes_on() -> None:
    server = Server()
    Path("run", "calls").write_text("in the way")
    server.call("a", FIRST, None)
    server.call("a", STEP, 1.0)
    server.record.close()
    (said,) = server.said
    assert "the record of a has ended" in said


def small_file() -> bytes:
    call = gradient()
    frames = [
        CallHead(run_id="of a run", model="a", began_at=1.0),
        RestoreDone(index=0, folder="", with_optimizer=False, state=""),
        call_files.gradient_done(1, call, scored(call)),
        StepDone(index=2, step=STEP, norm=1.5),
    ]
    return b"".join(map(call_files.encode, frames))


WHOLE = small_file()


def read(content: bytes) -> list[Any]:
    Path("a.calls").write_bytes(content)
    _, calls = call_files.read(Path("a.calls"), "of a run")
    return [*calls]


@given(st.integers(0, len(WHOLE) * 8 - 1))
def test_no_bit_changes_unnoticed(place: int) -> None:
    changed = bytearray(WHOLE)
    changed[place // 8] ^= 1 << place % 8
    with pytest.raises(RunFolderError) as raised:
        read(bytes(changed))
    assert "\n" not in str(raised.value)
    assert "a.calls" in str(raised.value)


@given(st.integers(0, len(WHOLE)))
def test_a_file_that_is_cut_off_has_the_calls_before(size: int) -> None:
    whole = read(WHOLE)
    if size < len(next(split(WHOLE))):
        with pytest.raises(RunFolderError, match="no file of calls"):
            read(WHOLE[:size])
        return
    calls = read(WHOLE[:size])
    assert [each.index for each in calls] == [each.index for each in whole][: len(calls)]


def test_frames_that_are_missing_or_of_another_run_are_refused() -> None:
    frames = [*split(WHOLE)]
    with pytest.raises(RunFolderError, match="call 1 is missing"):
        read(b"".join([*frames[:2], *frames[3:]]))
    with pytest.raises(RunFolderError, match="call 0 is missing"):
        read(frames[0] + WHOLE)
    with pytest.raises(RunFolderError, match="no file of calls"):
        read(b"".join(frames[1:]))
    Path("a.calls").write_bytes(WHOLE)
    with pytest.raises(RunFolderError, match="is of the run of a run, and the journal is of another"):
        call_files.read(Path("a.calls"), "another")


def split(content: bytes) -> Iterator[bytes]:
    while content:
        size = 16 + int.from_bytes(content[:4], "little")
        yield content[:size]
        content = content[size:]


def test_arrays_that_do_not_fit_are_refused() -> None:
    call = gradient()
    good = call_files.gradient_done(0, call, scored(call))
    for name, value in (("lengths", b""), ("lengths", bytes(8)), ("token_ids", bytes(8)), ("targets", bytes(4))):
        fields = {field: getattr(good, field) for field in good.__struct_fields__} | {name: value}
        with pytest.raises(ValueError, match=r"sequences|numbers for"):
            call_files.call_of(GradientDone(**fields))


def test_a_state_has_the_digest_of_its_tensors() -> None:
    folder = Path("state").absolute()
    folder.mkdir()
    call = SaveState(folder=str(folder))
    assert call_files.digest_of_state(call) == ""
    parts = {
        "manifest-00000.json": '{"policy/a.safetensors": {"tensors": {"w": "1"}, "size": 1}}',
        "manifest-00001.json": '{"optimizer/b.safetensors": {"tensors": {"w": "2"}, "size": 1}}',
    }
    for name, text in parts.items():
        (folder / name).write_text(text)
    digest = call_files.digest_of_state(call)
    assert digest
    (folder / "manifest-00001.json").write_text(parts["manifest-00001.json"].replace('"2"', '"3"'))
    assert call_files.digest_of_state(RestoreState(folder=call.folder, with_optimizer=True)) not in ("", digest)
    (folder / "manifest-00001.json").write_text("[")
    assert call_files.digest_of_state(call) == ""


def test_a_comparison_says_what_differs_first() -> None:
    call = gradient()
    done = call_files.gradient_done(0, call, scored(call))
    step = StepDone(index=1, step=STEP, norm=float("nan"))
    comparison = CallComparison("a", "")
    comparison.compare_gradient(done, scored(call), "")
    comparison.compare_step(step, float("nan"), "")
    assert comparison.describe(Path("run"), ()) == "a: 1 gradient and 1 step: equal to the bit to those of run"
    comparison.compare_gradient(done, scored(call, loss=math.nextafter(0.25, 1.0)), "")
    assert not comparison.is_equal
    said = comparison.describe(Path("run"), ("cluster.trainers",))
    assert "2 of 3 are equal" in said
    assert "as cluster.trainers changed" in said
    assert "call 0, a gradient: its loss is 0.25000000000000006, and was 0.25" in said
    other = CallComparison("a", "the record is full")
    other.compare_step(StepDone(index=1, step=STEP, norm=1.0), None, "a trainer was lost")
    assert other.has_failed
    assert "it has failed: a trainer was lost" in other.describe(Path("run"), ())
    assert "its record ends there: the record is full" in other.describe(Path("run"), ())
