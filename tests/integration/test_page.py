"""The page of real runs: what they leave for it, and its process beside them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.coordinator.page.reader import RunReader
from tandem.coordinator.page.timeline import Frame, Lane, LaneSpan, TimelineView, flame, timeline
from tests.integration.harness import coordinator, steps_of, write_config

# What a step's seconds are called, and the spans that they are of.
PHASES = {
    "generation": ("generating",),
    "refit": ("refitting",),
    "validation": ("validating",),
    "checkpointing": ("saving",),
}
CLOCK_S = 1e-3


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run of three steps with two trainers and two engines, which tests only read."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("page"))
        two_of_each = ("cluster.trainers=2", "cluster.rollouts=2", "policy.train_micro_batch_size=4")
        ended = coordinator("up", write_config(), *two_of_each)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return Path("run").absolute()


def lane_of(view: TimelineView, process: str) -> Lane:
    (lane,) = [lane for lane in view.lanes if lane.process == process]
    return lane


def seconds_of(spans: list[LaneSpan], what: tuple[str, ...], start: float, end: float) -> float:
    """Return for how long a process did this between two moments."""
    return sum(max(0.0, min(end, s.end) - max(start, s.start)) for s in spans if s.what in what)


def test_a_runs_timeline_is_what_its_seconds_tell(run: Path) -> None:
    view = timeline(run, 10, None)
    assert [step.step for step in view.steps] == [0, 1, 2, 3]
    coordinators = lane_of(view, "coordinator").spans
    for step, record in zip(view.steps[1:], steps_of(run), strict=True):
        assert step.end - step.start == pytest.approx(record.seconds["total"])
        assert step.end == pytest.approx(record.committed_at, abs=2.0), "it is written a moment later"
        for phase, what in PHASES.items():
            found = seconds_of(coordinators, what, step.start, step.end)
            assert found == pytest.approx(record.seconds.get(phase, 0.0), abs=CLOCK_S), (step.step, phase)
        training = record.seconds["policy_training"] + record.seconds["get_logprobs"]
        found = seconds_of(coordinators, ("training",), step.start, step.end)
        assert found == pytest.approx(training, abs=CLOCK_S)
        for name in ("trainer-0", "trainer-1"):
            # A rank works, or waits for the samples of its share, while the coordinator counts training.
            spans = lane_of(view, name).spans
            worked = seconds_of(spans, ("training", "log-probabilities"), step.start, step.end)
            assert 0 < worked <= training + CLOCK_S
        for name in ("rollout-0", "rollout-1"):
            generated = seconds_of(lane_of(view, name).spans, ("generating",), step.start, step.end)
            assert 0 < generated <= record.seconds["generation"] + CLOCK_S


def test_every_process_has_a_lane_without_gaps(run: Path) -> None:
    view = timeline(run, 10, None)
    processes = ["coordinator", "trainer-0", "trainer-1", "rollout-0", "rollout-1", "refit-0"]
    assert [lane.process for lane in view.lanes] == processes
    first, last = view.steps[0].start, view.steps[-1].end
    for lane in view.lanes[1:]:
        assert lane.spans[0].start == pytest.approx(first, abs=0.01)
        reached = first
        for span in lane.spans:
            assert span.start <= reached + 0.01, f"{lane.process} does nothing, and does not wait"
            reached = max(reached, span.end)
        assert reached == pytest.approx(last, abs=0.01)
    found = {span.what for lane in view.lanes for span in lane.spans}
    assert found >= {"starting", "generating", "training", "refitting", "verifying", "saving", "validating", "waiting"}


def test_a_flame_is_nested(run: Path) -> None:
    frames = flame(RunReader(run), 2)
    above: list[Frame] = []
    for frame in frames:
        above = above[: frame.depth]
        assert len(above) == frame.depth
        if above:
            assert above[-1].start <= frame.start < frame.end <= above[-1].end
        above.append(frame)
    assert [frame.name for frame in frames if frame.depth == 0] == ["step 2"]
    assert {frame.process for frame in frames if frame.depth == 2} >= {"trainer-1", "rollout-0"}
    assert flame(RunReader(run), 99) == []


def test_how_a_run_ended_is_in_its_folder(run: Path) -> None:
    summary = RunReader(run).summary(0)
    assert (summary.state, summary.last_step, summary.num_steps) == ("finished", 3, 3)
