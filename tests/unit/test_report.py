"""The report of runs: one file that loads nothing, eight panels whatever the algorithm, and runs side by side."""

from __future__ import annotations

import base64
import hashlib
import math
import re
from collections.abc import Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tandem.config import build_config, config_to_json
from tandem.coordinator.cli import main
from tandem.coordinator.loop.run import record_outcome
from tandem.coordinator.scheduler.events import FinishRun
from tandem.observe.report.panels import panels_of
from tandem.observe.report.report import (
    ROUNDING,
    _pyplot,
    _widen,
    draw_panels,
    format_report,
    frozen_page,
    write_report,
)
from tandem.observe.report.side_by_side import configuration_differences, labels, load_runs
from tandem.observe.run_folder.journal import StepRecord
from tandem.observe.run_folder.journal_writer import Journal

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
        record_outcome(journal, lambda: FinishRun(outcome="finished"))
    return Path(folder)


class Page(HTMLParser):
    """What a page has in it: its tags with their attributes, and the runs' data."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: dict[str, str] = {}
        """Texts of inline scripts, by type."""
        self.styles: list[str] = []
        self.feed(text)
        self.runs: list[dict[str, Any]] = msgspec.json.decode(self.scripts["application/json"])

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        tag, attributes = self.tags[-1] if self.tags else ("", {})
        if tag == "script" and data.strip():
            kind = attributes.get("type") or "text/javascript"
            self.scripts[kind] = self.scripts.get(kind, "") + data
        if tag == "style" and data.strip():
            self.styles.append(data)

    def attributes(self, name: str) -> list[str]:
        return [str(attributes[name]) for _, attributes in self.tags if name in attributes]

    def rows(self, title: str) -> dict[str, list[str]]:
        """Return a table of the summary: the values of each run, by row."""
        (table,) = [table for table in self.runs[0]["tables"] if table["title"] == title]
        return dict(table["rows"])


def page_of(*folders: Path) -> tuple[str, Page]:
    text = frozen_page(load_runs(folders))
    return text, Page(text)


def test_the_page_is_one_file_that_loads_nothing_and_links_to_nothing() -> None:
    folder = write_run("run")
    with Journal.open(folder) as journal:
        journal.record_event("coordinator", f"validation: 'q' -> {MODEL_MADE!r} (reward 0)")
    text, shown = page_of(folder)
    assert all(name.startswith(("data:", "#")) for key in ("src", "href") for name in shown.attributes(key))
    assert not {"xlink:href", "srcset", "data", "action", "onclick"} & {
        name for _, attributes in shown.tags for name in attributes
    }
    assert not {"img", "iframe", "object", "use", "image"} & {tag for tag, _ in shown.tags}
    assert "url(" not in "".join(shown.styles)
    assert "@import" not in "".join(shown.styles)
    assert "<script>alert(" not in text, "what a model made is text"
    assert MODEL_MADE in shown.runs[0]["events"][-1]["text"]
    results, seconds = shown.rows("Results"), shown.rows("Where the time went")
    assert results["ended"] == ["finished"]
    assert results["reward, first → last"] == ["0.55 → 0.8"]
    assert seconds["training"] == ["1.000 s (50%)"]
    assert shown.rows("Memory")["generation, trainer"] == ["5.600"]


def test_a_browser_runs_the_scripts_of_the_file_and_nothing_else() -> None:
    text, shown = page_of(write_run("run"))
    (policy,) = [content for content in shown.attributes("content") if "default-src" in content]
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert rules.pop("script-src").split()[0] == "data:"
    assert rules.pop("style-src").count("sha256-") == 2
    assert rules == {"default-src": "'none'", "img-src": "data:", "base-uri": "'none'", "form-action": "'none'"}
    for script in re.findall(r"<script(?: type=\"(?:module|importmap)\")?>(.*?)</script>", text, re.DOTALL):
        assert base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() in policy
    imports = msgspec.json.decode(shown.scripts["importmap"])["imports"]
    for name, url in imports.items():
        module = base64.b64decode(url.partition("base64,")[2]).decode()
        named = {*re.findall(r"^import .*? from \"(.*?)\";$", module, re.MULTILINE)}
        assert named <= imports.keys(), name
    assert "EventSource" not in base64.b64decode(imports["tandem/api.js"].partition("base64,")[2]).decode()


def test_the_page_has_every_curve_of_the_run() -> None:
    _, shown = page_of(write_run("run", OF_GRPO | {"odd": math.nan}))
    (run,) = shown.runs
    assert {metric["name"] for metric in run["metrics"]} == {*OF_GRPO, "odd", *(f"seconds/{name}" for name in SECONDS)}
    reward = run["series"]["reward"]
    assert reward["mean"] == [0.5 * (1 + step / 10) for step in range(1, 7)]
    assert run["places"][reward["at"]] == {"steps": [*range(1, 7)], "tokens": None, "time": [2, 4, 6, 8, 10, 12]}
    assert run["series"]["odd"]["mean"] == [None] * 6
    assert len(run["places"]) == 1, "the places that all curves share are there once"


def test_a_long_curve_is_thinned_and_keeps_its_peak() -> None:
    folder = write_run("run", {"loss": 1.0}, num_steps=0)
    with Journal.open(folder) as journal:
        for step in range(1, 2001):
            metrics = {"loss": 1.0 + (step == 543)}
            journal.commit_step(StepRecord(step=step, version=step, metrics=metrics, seconds={}))
    loss = page_of(folder)[1].runs[0]["series"]["loss"]
    assert len(loss["mean"]) <= 400
    assert max(loss["high"]) == 2.0
    assert max(loss["mean"]) < 2.0


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
    assert [curve.name for curve in divergence.select_drawn([run.curves])[1]] == ["approx_kl"]
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
    runs = load_runs([write_run("run", metrics, algorithm)])
    titles = [panel.title for panel in panels_of([algorithm])]
    assert len(titles) == 8
    assert instead in titles
    assert titles[-2:] == ["seconds by phase", "memory"]
    drawn = [panel.select_drawn([run.curves for run in runs]) for panel in panels_of([algorithm])]
    assert drawn.count(([], [])) == lacks
    if lacks == 6:
        draw_panels(runs, Path("eight.png"))
        assert Path("eight.png").exists()


def test_runs_of_two_algorithms_share_panels() -> None:
    panels = panels_of(["grpo", "sft", "grpo"])
    assert len(panels) == 8
    assert panels[0].title == "reward / loss"
    assert [curve.name for curve in panels[0].left_axis] == ["reward", "training_reward", "filtered_reward", "loss"]
    assert panels[7].title == "memory"


def test_runs_are_compared_with_what_differs_between_their_configurations(capsys: pytest.CaptureFixture[str]) -> None:
    optimizer = {"name": "torch.optim.AdamW", "kwargs": {"lr": 0.5}}
    write_run("a/run", num_steps=4)
    write_run("b/run", num_steps=3, optimizer=optimizer)
    assert main(["report", "a/run", "b/run", "--out", "both"]) == 0
    told = capsys.readouterr().out
    assert "b/run:" in told
    assert "policy.optimizer.kwargs.lr" in told
    shown = Page(Path("both/report.html").read_text())
    assert [run["summary"]["name"] for run in shown.runs] == ["a/run", "b/run"]
    differences = shown.rows("Differences in configuration")
    assert differences["policy.optimizer.kwargs.lr"][1] == "0.5"
    assert not [key for key in differences if "log_dir" in key], "it differs between any two"
    assert [run["series"]["truncated_fraction"]["mean"][0] for run in shown.runs] == [0.1375, 0.1375]
    assert msgspec.json.decode(Path("both/report.json").read_bytes())["num_steps"] == 4
    assert Path("both/report.png").exists()
    assert not Path("a/run/report.html").exists()


def test_the_configuration_of_another_release_is_compared_as_well() -> None:
    write_run("a")
    with Journal.create(Path("b"), b'{"policy": {"model_name": "model", "old": [1]}, "sft": {"x": 1}}', "grpo") as made:
        made.commit_step(StepRecord(step=1, version=1, metrics={"reward": 0.5}, seconds=SECONDS))
    rows = {row.title: row.values for row in configuration_differences(load_runs([Path("a"), Path("b")]))}
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


def test_a_replay_is_drawn_beside_its_run_and_the_summary_is_its_own() -> None:
    runs = write_report([write_run("replay", {"reward": 0.5}), write_run("run")], Path("replay"), is_brief=True)
    told = format_report(runs[:1], Path("replay"))
    assert told.endswith("6 steps in 12 s; report.html, report.png and report.json in replay")
    assert "val_accuracy" not in told
