"""The report of runs: one file that loads nothing, eight panels whatever the algorithm, and runs side by side."""

from __future__ import annotations

import math
from collections.abc import Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tandem.config import build_config, config_to_json
from tandem.coordinator.cli import main
from tandem.coordinator.loop.run import recorded
from tandem.coordinator.scheduler.events import Finish
from tandem.observe.report.charts import ROUNDING, Line, layer_chart, line_chart
from tandem.observe.report.figure import _pyplot, _widen, draw_panels
from tandem.observe.report.panels import panels_of
from tandem.observe.report.report import format_report, write_report
from tandem.observe.report.report_page import page
from tandem.observe.report.side_by_side import configuration_differences, labels, load_runs
from tandem.observe.run_folder.journal import Journal, StepRecord

SECONDS = {"total": 2.0, "generation": 0.5, "policy_training": 1.0, "refit": 0.25}
OF_GRPO = {
    "reward": 0.5,
    "val_accuracy": 0.25,
    "entropy": 2.5,
    "kl": 0.01,
    "approx_kl": 0.0,
    "mean_generation_length": 12.0,
    "truncated_fraction": 0.125,
    "grad_norm": 0.75,
    "clip_fraction": 0.0,
    "token_mult_prob_error": 1.01,
    "num_valid_tokens": 100.0,
    "memory_training_trainer_gb": 2.5,
    "memory_generation_trainer_gb": 3.5,
    "memory_generation_engine_gb": 1.5,
}
MODEL_MADE = "</pre><script>alert('7')</script><img src=http://elsewhere/x>"
PANELS = (
    "reward",
    "held-out accuracy",
    "KL and entropy",
    "lengths and truncation",
    "gradient norm and clipping",
    "log-probability gap, engine to trainer",
    "seconds by phase",
    "memory",
)


def write_run(
    folder: str, metrics: Mapping[str, float] = OF_GRPO, algorithm: str = "grpo", num_steps: int = 6, **over: Any
) -> Path:
    """Write the journal of a run whose metrics grow with the step."""
    settings: dict[str, Any] = {
        "algorithm": algorithm,
        "policy": {"model_name": "model", "train_global_batch_size": 512, **over},
        "data": {"dataset_name": "reasoning_gym", "task": "chain_sum", "rejected_template": "no"},
        "logger": {"log_dir": folder},
    }
    with Journal.create(Path(folder), config_to_json(build_config(settings)), algorithm) as journal:
        for step in range(1, num_steps + 1):
            grown = {name: value * (1 + step / 10) for name, value in metrics.items()}
            journal.commit_step(StepRecord(step=step, version=step, metrics=grown, seconds=SECONDS))
        recorded(journal, lambda: Finish(outcome="finished"))
    return Path(folder)


class Page(HTMLParser):
    """What a page has in it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: dict[str, set[str]] = {}
        self.titles: list[str] = []
        self.charts = 0
        self._open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self._open.append(tag)
        self.charts += dict(attrs).get("class") == "chart"
        for name, value in attrs:
            self.attributes.setdefault(name, set()).add(str(value))

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] == "h3":
            self.titles.append(data)

    def handle_endtag(self, tag: str) -> None:
        if tag in self._open:
            while self._open.pop() != tag:
                pass


def page_of(*folders: Path) -> tuple[str, Page]:
    text = page(load_runs(folders))
    return text, Page(text)


def test_the_page_is_one_file_that_loads_nothing_and_links_to_nothing() -> None:
    folder = write_run("run")
    with Journal.open(folder) as journal:
        journal.record_event("coordinator", f"validation: 'q' -> {MODEL_MADE!r} (reward 0)")
    text, shown = page_of(folder)
    assert shown.titles == [*PANELS]
    assert shown.charts == 8
    assert not shown.tags & {"script", "img", "link", "a", "iframe", "object", "use", "image"}
    assert not shown.attributes.keys() & {"href", "src", "xlink:href", "srcset", "data", "action", "onclick"}
    assert "url(" not in text
    assert "@import" not in text
    assert "default-src &" not in text
    assert "default-src 'none'; style-src 'unsafe-inline'" in shown.attributes["content"]
    assert "&lt;script&gt;alert(" in text, "what a model made is text"
    for said in ("Results", "finished", "0.55 → 0.8", "Where the time went", "1.000 s (50%)", "5.600"):
        assert said in text, said


def test_eight_panels_are_drawn() -> None:
    (run,) = load_runs([write_run("run")])
    draw_panels([run, run], Path("eight.png"))
    content = Path("eight.png").read_bytes()
    assert content[:4] == b"\x89PNG"
    width, height = (int.from_bytes(content[at : at + 4], "big") for at in (16, 20))
    assert width > 2 * height > 1000


def test_axes_show_no_rounding_and_no_divergence_from_a_reference_that_is_not_held() -> None:
    (run,) = load_runs([write_run("run", {"kl": 0.0, "approx_kl": 0.1, "token_mult_prob_error": 1 + 5e-8})])
    divergence = next(panel for panel in panels_of(["grpo"]) if panel.title == "KL and entropy")
    assert [curve.name for curve in divergence.drawn([run.curves])[1]] == ["approx_kl"]
    pyplot = _pyplot()
    axes = pyplot.figure().subplots()
    axes.plot([1, 2], [1 + 5e-8, 1 - 5e-8])
    _widen(axes)
    low, high = axes.get_ylim()
    assert (low, high) == (pytest.approx(1 - ROUNDING), pytest.approx(1 + ROUNDING))
    assert not axes.yaxis.get_major_formatter().get_useOffset()
    pyplot.close("all")


@pytest.mark.parametrize(
    ("algorithm", "metrics", "instead", "lacks"),
    [
        ("sft", {"loss": 1.0, "entropy": 0.5, "grad_norm": 1.0, "learning_rate": 0.1}, "token accuracy and entropy", 3),
        ("dpo", {"loss": 1.0, "val_accuracy": 0.5, "rewards_chosen_mean": 1.0}, "rewards of chosen and rejected", 4),
        ("grpo", {"reward": 0.5}, "held-out accuracy", 6),
    ],
)
def test_every_algorithm_has_eight_panels_and_those_without_metrics_say_so(
    algorithm: str, metrics: dict[str, float], instead: str, lacks: int
) -> None:
    text, shown = page_of(write_run("run", metrics, algorithm))
    assert len(shown.titles) == 8
    assert instead in shown.titles
    assert shown.titles[-2:] == ["seconds by phase", "memory"]
    assert text.count('<p class="missing">') == lacks
    assert shown.charts == 8 - lacks
    if lacks == 6:
        draw_panels(load_runs([Path("run")]), Path("eight.png"))
        assert Path("eight.png").exists()


def test_runs_of_two_algorithms_share_panels() -> None:
    panels = panels_of(["grpo", "sft", "grpo"])
    assert len(panels) == 8
    assert panels[0].title == "reward / loss"
    assert [curve.name for curve in panels[0].left] == ["reward", "training_reward", "filtered_reward", "loss"]
    assert panels[7].title == "memory"


def test_runs_are_compared_with_what_differs_between_their_configurations(capsys: pytest.CaptureFixture[str]) -> None:
    optimizer = {"name": "torch.optim.AdamW", "kwargs": {"lr": 0.5}}
    write_run("a/run", num_steps=4)
    write_run("b/run", num_steps=3, optimizer=optimizer)
    assert main(["report", "a/run", "b/run", "--out", "both"]) == 0
    told = capsys.readouterr().out
    assert "b/run:" in told
    assert "policy.optimizer.kwargs.lr" in told
    text = Path("both/report.html").read_text()
    shown = Page(text)
    assert shown.charts == 8
    assert "Differences in configuration" in text
    assert "<th>policy.optimizer.kwargs.lr</th>" in text
    assert "log_dir" not in text, "it differs between any two"
    assert "b/run: share cut off (right)" in text
    assert msgspec.json.decode(Path("both/report.json").read_bytes())["num_steps"] == 4
    assert Path("both/report.png").exists()
    assert not Path("a/run/report.html").exists()


def test_the_configuration_of_another_release_is_compared_as_well() -> None:
    write_run("a")
    with Journal.create(Path("b"), b'{"policy": {"model_name": "model", "old": [1]}, "sft": {"x": 1}}', "grpo") as made:
        made.commit_step(StepRecord(step=1, version=1, metrics={"reward": 0.5}, seconds=SECONDS))
    rows = {row.what: row.values for row in configuration_differences(load_runs([Path("a"), Path("b")]))}
    assert rows["policy.old"] == ("-", "[1]")
    assert "policy.model_name" not in rows
    assert "sft.x" not in rows


def test_runs_are_told_apart_by_the_ends_of_their_paths() -> None:
    assert labels([Path("x/a"), Path("x/b")]) == ["a", "b"]
    assert labels([Path("x/run"), Path("y/run")]) == ["x/run", "y/run"]
    assert labels([Path("x/run"), Path("x/run")]) == ["run", "run"]


def test_a_folder_without_a_run_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    write_run("run")
    assert main(["report", "run", "nothing"]) == 1
    assert capsys.readouterr().err.startswith("error: nothing holds no run")
    assert main(["report", "run", "--out", "run/journal.sqlite"]) == 1
    assert capsys.readouterr().err.startswith("error: cannot write the report to run/journal.sqlite: ")


def test_a_long_curve_is_thinned_and_keeps_its_peak() -> None:
    points = [(step, 1.0 + (step == 54_321)) for step in range(100_000)]
    svg = line_chart([Line("loss", points, 0, 0)])
    assert len(svg) < 20_000
    path = next(part for part in svg.split("<path ") if part.startswith('class="c0'))
    heights = {float(place.split(" ")[1]) for place in path.split('d="M')[1].split('"')[0].split("L")}
    assert len(heights) == 2, "the one step that differs is drawn"
    layers = layer_chart(range(100_000), [[1.0] * 100_000, [2.0] * 100_000])
    assert layers.count("<polygon") == 2
    assert len(layers) < 50_000


def test_curves_that_cannot_be_drawn_are_left_out() -> None:
    assert line_chart([Line("loss", [(1, math.nan)], 0, 0)]) == ""
    svg = line_chart([Line("a", [(1, 1.0), (2, math.inf), (3, 1.0 + 1e-9)], 0, 0), Line("b", [(1, 0.0)], 1, 1, True)])
    assert "nan" not in svg
    assert "inf" not in svg
    assert ">1.0000</text>" in svg, "an axis says what differs from what"


def test_a_replay_is_drawn_beside_its_run_and_the_summary_is_its_own() -> None:
    runs = write_report([write_run("replay", {"reward": 0.5}), write_run("run")], Path("replay"), is_brief=True)
    told = format_report(runs[:1], Path("replay"))
    assert told.endswith("6 steps in 12 s; report.html, report.png and report.json in replay")
    assert "val_accuracy" not in told
