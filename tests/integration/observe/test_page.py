"""The page of real runs: what they leave for it, and its process beside them."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tandem.observe.page.reader import RunReader
from tandem.observe.timeline import FlameBar, LaneSpan, ProcessLane, TimelineView, flame, timeline
from tests.harness.runs.held_runs import go_on, hold
from tests.harness.runs.running import (
    TIMEOUT_S,
    Command,
    all_gone,
    coordinator,
    steps_of,
    titled,
    wait_until,
    write_config,
)

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


def lane_of(view: TimelineView, process: str) -> ProcessLane:
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
    frames = flame(run, 2, RunReader(run).step_seconds)
    above: list[FlameBar] = []
    for frame in frames:
        above = above[: frame.depth]
        assert len(above) == frame.depth
        if above:
            assert above[-1].start <= frame.start < frame.end <= above[-1].end
        above.append(frame)
    assert [frame.name for frame in frames if frame.depth == 0] == ["step 2"]
    assert {frame.process for frame in frames if frame.depth == 2} >= {"trainer-1", "rollout-0"}
    assert flame(run, 99, RunReader(run).step_seconds) == []


def test_how_a_run_ended_is_in_its_folder(run: Path) -> None:
    summary = RunReader(run).summary(0)
    assert (summary.state, summary.last_step, summary.num_steps) == ("finished", 3, 3)


class Page:
    """The page of a run, as a browser on this machine sees it."""

    def __init__(self, run: Command) -> None:
        self.url = run.wait_for(r"page: (http://127\.0\.0\.1:\d+)\n")[1]
        assert self.get("/api/runs")[0]["state"] == "running"  # by now it has its own name
        (self.process,) = titled(run.children(), "page ")

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(f"{self.url}{path}", timeout=60.0) as answer:
            return json.loads(answer.read())

    def changes(self) -> Iterator[dict[str, Any]]:
        """Yield what the stream says."""
        with urllib.request.urlopen(f"{self.url}/api/stream", timeout=60.0) as stream:
            for line in stream:
                if line.startswith(b"data: "):
                    yield json.loads(line.removeprefix(b"data: "))


def test_the_page_beside_a_run_moves_with_it_and_is_started_again_when_it_dies() -> None:
    config = write_config({"grpo": {"max_num_steps": 1000}, "logger": {"page": "auto"}})
    with Command("coordinator", "up", config) as run:
        page = Page(run)
        assert not any("torch" in mapped.path for mapped in page.process.memory_maps())
        last_steps = set[int]()
        for change in page.changes():
            last_steps.add(change["last_step"] or 0)
            if len(last_steps) == 4:
                break
        assert {*page.get("/api/runs/0/series?names=reward")["reward"]["step"]} >= last_steps - {0}
        live = page.get("/api/runs/0/live")
        assert (live["num_steps"], len(live["engines"]), len(live["trainers"])) == (1000, 1, 1)
        assert [lane["process"] for lane in page.get("/api/runs/0/timeline")["lanes"]][:2] == [
            "coordinator",
            "trainer-0",
        ]
        for times in (1, 2, 3):
            page.process.kill()
            run.wait_for(rf"(?:(?s:.*)the page was killed by SIGKILL; it is started again){{{times}}}")
            page = Page(run)
            assert page.get("/api/runs/0/live")["num_steps"] == 1000, "at the same address"
        page.process.kill()
        run.wait_for(r"the page was killed by SIGKILL; the run goes on without")
        reached = len(steps_of())
        wait_until(
            lambda: len(steps_of()) > reached, lambda: "another step", died=lambda: run.process.poll() is not None
        )
        run.signal(signal.SIGINT)
        assert run.wait() == 130
        assert run.output().count("the page was killed") == 4
    assert RunReader(Path("run")).summary(0).state == "interrupted"


def test_the_page_beside_a_run_says_how_that_ended_before_it_ends() -> None:
    config = write_config({"grpo": {"max_num_steps": 4}, "logger": {"page": "auto"}})
    hold()
    with Command("coordinator", "up", config) as run:
        page = Page(run)
        changes = page.changes()
        next(changes)
        go_on()
        *_, last = changes
        assert run.wait() == 0
    assert (last["state"], last["last_step"]) == ("finished", 4)
    assert all_gone([page.process], TIMEOUT_S) == []


def test_the_page_ends_with_a_coordinator_that_is_killed() -> None:
    config = write_config({"grpo": {"max_num_steps": 1000}, "logger": {"page": "auto"}})
    with Command("coordinator", "up", config) as run:
        page = Page(run)
        run.process.kill()
        assert all_gone([page.process], TIMEOUT_S) == []
    assert RunReader(Path("run")).summary(0).state == "ended"


def test_a_port_that_is_taken_is_one_line_before_anything_starts() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ended = coordinator("up", write_config(), f"logger.page={port}")
    assert ended.returncode == 2
    assert ended.stderr.count("\n") == 1
    assert (
        f"error: logger.page: the page cannot listen on 127.0.0.1, port {port}: Address already in use" in ended.stderr
    )
    assert not Path("run/journal.sqlite").exists()


def test_view_shows_runs_that_ended_until_it_is_asked_to_end(run: Path) -> None:
    shutil.copytree(run, "copy")
    with Command("coordinator", "view", run, "copy") as view:
        url = view.wait_for(r"page: (http://127\.0\.0\.1:\d+)\n")[1]
        with urllib.request.urlopen(f"{url}/api/runs", timeout=60.0) as answer:
            runs = json.loads(answer.read())
        assert [(run["name"], run["state"], run["last_step"]) for run in runs] == [
            ("run", "finished", 3),
            ("copy", "finished", 3),
        ]
        with urllib.request.urlopen(f"{url}/api/runs/0/samples/3/0/0", timeout=60.0) as answer:
            sample = json.loads(answer.read())
        made = [token["text"] for token in sample["tokens"] if token["made_by_policy"]]
        assert len(made) == sample["response_length"]
        assert "".join(made).startswith(sample["response"].strip()), "by the tokenizer of the newest checkpoint"
        with urllib.request.urlopen(f"{url}/api/stream", timeout=60.0) as stream:
            assert stream.readline().startswith(b"data: ")
            view.signal(signal.SIGINT)
            assert view.wait() == 0
    assert view.output().count("\n") == 1, view.output()


def test_view_elsewhere_than_on_loopback_needs_a_token(run: Path) -> None:
    with Command("coordinator", "view", run, "--host", "0.0.0.0", "--token", "open sesame") as view:
        port, token = view.wait_for(r"page: http://[^:]+:(\d+)/\?token=(.+)\n").groups()
        assert token == "open%20sesame"
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/api/runs", timeout=60.0)
        keeps_cookies = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
        with keeps_cookies.open(f"http://127.0.0.1:{port}/api/runs?token={token}", timeout=60.0) as answer:
            assert json.loads(answer.read())[0]["name"] == "run"
        view.signal(signal.SIGTERM)
        assert view.wait() == 0


def test_view_of_a_folder_without_a_run_is_one_line() -> None:
    Path("empty").mkdir()
    ended = coordinator("view", "empty")
    assert (ended.returncode, ended.stderr) == (
        1,
        f"error: {Path('empty').absolute()} holds no run: there is no journal.sqlite in it\n",
    )
