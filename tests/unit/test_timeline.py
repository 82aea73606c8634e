"""The timeline: spans of commands and phases, kept by step, and what of them the page shows."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import msgspec
import pytest
from page_harness import make_run

from tandem.common.messages import Evaluated, Generate, Generated, MemoryUse, Refit, SamplingParameters, Train, Trained
from tandem.coordinator.observers import timeline as recording
from tandem.coordinator.observers.timeline import TimelineWriter
from tandem.coordinator.scheduler.requests import RunPhase
from tandem.observe.page.reader import RunReader
from tandem.observe.timeline import TIMELINE_NAME, flame, read_timeline, timeline

MEMORY = MemoryUse(peak=1, held=1)
SAMPLING = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "max_new_tokens": 5,
    "stop_token_ids": (),
    "stop_strings": (),
}


@pytest.fixture
def recorded() -> TimelineWriter:
    return TimelineWriter(Path.cwd(), 1)


def train(command_id: int, step: int = 1) -> Train:
    return Train(command_id=command_id, deadline_s=9.0, step=step, sources={})


def trained(command_id: int, **seconds: float) -> Trained:
    return Trained(
        command_id=command_id,
        step=1,
        version=1,
        metrics={},
        seconds=seconds,
        compute_s=4.0,
        waited_s=1.0,
        has_update=True,
        memory=MEMORY,
    )


def test_a_rank_waits_for_samples_scores_them_and_trains(recorded: TimelineWriter) -> None:
    recorded.sent("trainer-0", train(1), 10.0)
    recorded.answered("trainer-0", trained(1, policy_training=3.0, logprobs=1.0, reference_logprobs=1.0), 18.0)
    recorded.commit(1, 10.0, 20.0)
    (step,) = read_timeline(Path.cwd(), 5, None)
    assert [(span.what, round(span.end - span.start, 6)) for span in step.spans] == [
        ("waiting", 3.0),
        ("log-probabilities", 2.0),
        ("training", 3.0),
    ]
    assert step.spans[-1].detail == "own work 4 s, waiting for other ranks 1 s"
    recorded.close()


def test_what_was_before_a_step_is_no_part_of_it(recorded: TimelineWriter) -> None:
    for phase, now in (
        (RunPhase.JOINING, 1.0),
        (RunPhase.BUILDING, 3.0),
        (RunPhase.GENERATING, 5.0),
        (RunPhase.TRAINING, 8.0),
    ):
        recorded.enter(phase, now)
    recorded.commit(1, 4.0, 9.0)
    before, step = read_timeline(Path.cwd(), 5, None)
    assert (before.step, step.step) == (0, 1)
    assert before.end == step.start == pytest.approx(step.end - 4.0)
    assert [span.what for span in before.spans] == ["starting", "starting"]
    assert [(span.what, span.process) for span in step.spans] == [
        ("generating", "coordinator"),
        ("training", "coordinator"),
    ]
    recorded.close()


def test_commands_that_nobody_waits_for_end_where_they_were_given_up(recorded: TimelineWriter) -> None:
    recorded.sent("rollout-0", Refit(command_id=1, deadline_s=9.0, version=2), 10.0)
    recorded.sent("rollout-1", Refit(command_id=2, deadline_s=9.0, version=2), 10.0)
    recorded.give_up({2}.__contains__, 12.0)
    recorded.commit(1, 5.0, 13.0)
    ((span,),) = [step.spans for step in read_timeline(Path.cwd(), 5, None)]
    assert (span.process, span.what, span.detail, span.step) == ("rollout-0", "refitting", "given up", 2)
    recorded.close()


def test_a_cancellation_is_no_span(recorded: TimelineWriter) -> None:
    sampling = msgspec.convert(SAMPLING, SamplingParameters)
    command = Generate(
        command_id=1, deadline_s=9.0, cancel_before=1, step=1, purpose="train", sampling=sampling, groups=()
    )
    recorded.sent("rollout-0", command, 1.0)
    reply = Generated(command_id=1, step=1, purpose="train", num_samples=0, num_tokens=0, seconds={}, memory=MEMORY)
    recorded.answered("rollout-0", reply, 2.0)
    recorded.commit(1, 5.0, 3.0)
    assert [step.spans for step in read_timeline(Path.cwd(), 5, None)] == [[]]
    recorded.close()


def test_the_newest_steps_stay(recorded: TimelineWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "MAX_STEPS", 5)
    for step in range(1, 21):
        recorded.commit(step, 1.0, float(step))
    recorded.close()
    assert [step.step for step in read_timeline(Path.cwd(), 100, None)] == [16, 17, 18, 19, 20]
    assert [step.step for step in read_timeline(Path.cwd(), 2, 18)] == [17, 18]


def test_a_resumed_run_forgets_what_it_does_again(recorded: TimelineWriter) -> None:
    for step in (1, 2, 3):
        recorded.commit(step, 1.0, float(step))
    recorded.close()
    again = TimelineWriter(Path.cwd(), 2)
    again.commit(2, 1.0, 50.0)
    again.close()
    assert [step.step for step in read_timeline(Path.cwd(), 5, None)] == [1, 2]
    assert again.take_news() == []


def test_a_file_that_cannot_be_read_is_made_anew() -> None:
    Path(TIMELINE_NAME).write_bytes(b"no database" * 1000)
    assert read_timeline(Path.cwd(), 5, None) == []
    again = TimelineWriter(Path.cwd(), 1)
    again.commit(1, 1.0, 50.0)
    again.close()
    assert [step.step for step in read_timeline(Path.cwd(), 5, None)] == [1]


def test_a_disk_that_refuses_is_said_once_and_stops_nothing(recorded: TimelineWriter) -> None:
    with sqlite3.connect(TIMELINE_NAME) as other:
        other.execute("DROP TABLE steps")
    other.close()
    for step in (1, 2):
        recorded.commit(step, 1.0, float(step))
    notes = recorded.take_news()
    assert len(notes) == 1
    assert "the timeline is not recorded any further: no such table" in notes[0]


def test_lanes_are_full_of_waiting_and_cut_to_the_steps(recorded: TimelineWriter) -> None:
    recorded.sent("rollout-0", Refit(command_id=1, deadline_s=9.0, version=1), 8.0)
    recorded.sent("rollout-10", Refit(command_id=2, deadline_s=9.0, version=1), 12.0)
    recorded.sent("rollout-9", Refit(command_id=3, deadline_s=9.0, version=1), 12.0)
    for command_id, now in ((1, 14.0), (2, 16.0), (3, 16.0)):
        reply = Evaluated(command_id=command_id, step=1, metrics={})
        recorded.answered("rollout-0", reply, now)
    recorded.commit(1, 10.0, 20.0)
    recorded.close()
    view = timeline(Path.cwd(), 1, None)
    start = view.steps[0].start
    assert [lane.process for lane in view.lanes] == ["rollout-0", "rollout-9", "rollout-10"]
    lanes = [[(s.what, round(s.start - start, 6), round(s.end - start, 6)) for s in lane.spans] for lane in view.lanes]
    assert lanes[0] == [("refitting", 0, 4), ("waiting", 4, 10)]
    assert lanes[1] == [("waiting", 0, 2), ("refitting", 2, 6), ("waiting", 6, 10)]


def test_without_a_timeline_a_flame_is_what_the_seconds_tell() -> None:
    make_run().close()
    whole, generating, training = flame(Path("run"), 2, RunReader(Path("run")).step_seconds)
    assert (whole.name, generating.name, training.name) == ("step 2", "generating", "training")
    assert whole.end - whole.start == pytest.approx(2.0)
    assert generating.end == training.start
    assert timeline(Path("run"), 10, None).steps == []
