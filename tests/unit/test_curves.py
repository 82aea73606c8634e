"""Curves of the page: the file they are read from, the journal that counts, and buckets against numpy."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from page_harness import commit, make_run

from tandem.observe.page import series
from tandem.observe.page.reader import RunReader
from tandem.observe.page.series import PageSteps, RunCurves, make_buckets
from tandem.observe.run_folder.curves import CURVES_NAME, CurvesFile, read_curves
from tandem.observe.run_folder.journal import StepRecord, read_journal

NAMES = ("reward", "loss", "val_accuracy", "seconds/total", "seconds/nothing")


def history() -> list[StepRecord]:
    with read_journal(Path("run")) as journal:
        return journal.steps()


def curves_of(names: Sequence[str] = NAMES) -> dict[str, tuple[list[int], list[float]]]:
    """Return all that there is, as who has read nothing before sees it; not a number is told from nothing."""
    found = RunCurves(RunReader(Path("run"))).series(names, 10**6, None, None)
    return {name: (each.step, [-1e9 if math.isnan(v) else v for v in each.mean]) for name, each in found.items()}


@pytest.mark.parametrize("num_recorded", [0, 1, 7, 12])
def test_the_file_and_the_journal_say_the_same_whatever_the_file_has(num_recorded: int) -> None:
    make_run(num_steps=12).close()
    of_journal = curves_of()
    assert len(of_journal["val_accuracy"][0]) == 6
    file = CurvesFile(Path("run"), history()[:num_recorded])
    assert curves_of() == of_journal
    for record in history()[num_recorded + 2 :]:  # two are missing
        file.append(record)
    file.close()
    assert curves_of() == of_journal


def test_with_the_file_the_journal_is_not_read_for_a_metric(monkeypatch: pytest.MonkeyPatch) -> None:
    with make_run(num_steps=4) as journal:
        of_journal = curves_of()
        file = CurvesFile(Path("run"), history())
        curves = RunCurves(RunReader(Path("run")))
        names = {each.name for each in curves.names()}
        assert names >= {"reward", "val_accuracy", "seconds/total"}
        with monkeypatch.context() as patch:
            real = series._read_from_journal

            def only_what_is_missing(*asked: object, **more: object) -> object:
                assert not len(asked[2]), "steps that are in the file"  # type: ignore[arg-type]
                return real(*asked, **more)  # type: ignore[arg-type]

            patch.setattr(series, "_read_from_journal", only_what_is_missing)
            assert curves_of() == of_journal
        commit(journal, 5)
        assert curves.series(["reward"], 100, None, None)["reward"].step == [1, 2, 3, 4, 5], "of which one is missing"
        file.append(history()[-1])
        file.close()
        assert {each.name for each in curves.names()} == names


def test_steps_that_were_done_over_again_are_none() -> None:
    with make_run(num_steps=4) as journal:
        CurvesFile(Path("run"), history()).close()
        journal.forget_after(2)
        journal.commit_step(StepRecord(step=3, version=3, metrics={"reward": 9.0}, seconds={}))
        assert curves_of(["reward"])["reward"] == ([1, 2, 3], [0.1, 0.2, 9.0])
        CurvesFile(Path("run"), history()).close()
        assert curves_of(["reward"])["reward"] == ([1, 2, 3], [0.1, 0.2, 9.0])


@pytest.mark.parametrize("most", [2, 256])
def test_steps_are_taken_from_the_file_where_they_are_the_journals(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """Also of a run that was resumed twice, and whose file therefore has rows that count no more."""
    monkeypatch.setattr(series, "_MOST_COMPARED", most)
    with make_run(num_steps=9) as journal:
        file = CurvesFile(Path("run"), history())
        for again, last in ((5, 8), (3, 10)):
            journal.forget_after(again)
            for step in range(again + 1, last + 1):
                commit(journal, step)
                file.append(history()[-1])
        commit(journal, 11)  # the file does not have it yet
        known, none = PageSteps(), PageSteps()
        with RunReader(Path("run")).journal() as connection:
            table = read_curves(Path("run"))
            known._take(connection, table)  # type: ignore[arg-type]
            assert known.steps.tolist() == [*range(1, 11)]
            assert not known.update(connection, table)
            none.update(connection, None)
        for name in ("ids", "steps", "committed_at"):
            assert getattr(known, name).tolist() == getattr(none, name).tolist()
        assert none.steps.tolist() == [*range(1, 12)]
        file.close()


@pytest.mark.parametrize("column", [0, 1])
@pytest.mark.parametrize("place", [0, 4, 8])
def test_steps_of_a_file_that_says_otherwise_are_the_journals(column: int, place: int) -> None:
    make_run(num_steps=9).close()
    CurvesFile(Path("run"), history()).close()
    of_journal = curves_of()
    path = Path("run", CURVES_NAME)
    table = read_curves(Path("run"))
    assert table is not None
    rows = np.array(table._rows)
    rows[place, column] += 0.25
    path.write_bytes(path.read_bytes()[: -rows.nbytes] + rows.tobytes())
    assert curves_of() == of_journal


def test_what_was_cut_off_or_damaged_is_written_anew() -> None:
    make_run(num_steps=4).close()
    of_journal = curves_of()
    CurvesFile(Path("run"), history()).close()
    path = Path("run", CURVES_NAME)
    whole = path.read_bytes()
    for damaged in (whole[:-5], whole[:20], b"", b"[1, 2]\n", b"\xff" * 3000, whole[:-1000]):
        path.write_bytes(damaged)
        assert curves_of() == of_journal
        CurvesFile(Path("run"), history()).close()
        table = read_curves(Path("run"))
        assert table is not None
        assert table.columns(["reward"], np.arange(4))["reward"][0].tolist() == [0.1, 0.2, 0.3, 0.4]
    path.write_bytes(whole + b"part of a row")
    file = CurvesFile(Path("run"), history())
    file.close()
    assert path.read_bytes() == whole


def test_names_are_known_of_a_long_run_without_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(series, "_SPARSE", 5)
    monkeypatch.setattr(series, "_CHUNK", 7)
    make_run(num_steps=60).close()
    curves = RunCurves(RunReader(Path("run")))
    assert {each.name for each in curves.names()} >= {"reward", "val_accuracy", "seconds/total"}
    assert curves.series(["reward"], 100, None, None)["reward"].step == [*range(1, 61)]


def test_no_more_is_kept_than_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(series, "_MAX_BYTES", 0.0)
    make_run(num_steps=4).close()
    curves = RunCurves(RunReader(Path("run")))
    for name, _ in itertools.product(("reward", "loss"), range(2)):
        assert [*curves.series([name], 10, None, None)] == [name]
        assert [*curves._columns] == [name]


@pytest.mark.parametrize("points", [1, 2, 10, 99, 100, 101, 800])
@pytest.mark.parametrize("every", [1, 7])
def test_buckets_are_what_numpy_says(points: int, every: int) -> None:
    random = np.random.default_rng(points)
    steps = np.sort(random.choice(5000, 1000, replace=False)) * every + 3
    values = random.normal(size=1000)
    values[random.choice(1000, 300, replace=False)] = math.nan
    values[200:260] = math.nan
    found = make_buckets(steps, values, points)
    assert len(found.step) <= points
    widths = [2**power for power in range(20) if len({*(steps // 2**power).tolist()}) == len(found.step)]
    width = next(w for w in widths if int(steps[-1]) // w - int(steps[0]) // w + 1 <= points)
    for bucket, at, mean, low, high in zip(
        np.unique(steps // width), found.step, found.mean, found.low, found.high, strict=True
    ):
        inside = values[steps // width == bucket]
        assert at in steps[steps // width == bucket]
        if np.isnan(inside).all():
            assert math.isnan(mean)
            assert math.isnan(low)
            assert math.isnan(high)
            continue
        assert mean == pytest.approx(np.nanmean(inside))
        assert (low, high) == (np.nanmin(inside), np.nanmax(inside))


def test_as_many_points_as_asked_for_are_left_as_they_are() -> None:
    steps, values = np.arange(1, 101), np.linspace(0, 1, 100)
    assert make_buckets(steps, values, 100).step == steps.tolist()
    assert make_buckets(steps, values, 100).mean == values.tolist()


def test_what_comes_later_changes_the_last_bucket_only() -> None:
    steps, values = np.arange(1, 1001), np.sin(np.arange(1000))
    before, after = make_buckets(steps[:990], values[:990], 200), make_buckets(steps, values, 200)
    assert before.mean[:-1] == after.mean[: len(before.mean) - 1]


def test_metrics_that_come_late_are_seen_by_those_who_have_read_before() -> None:
    with make_run(num_steps=6) as journal:
        file = CurvesFile(Path("run"), history())
        curves = RunCurves(RunReader(Path("run")))
        before = curves.series(["reward", "val_pass_k"], 100, None, None)
        assert (before["reward"].step, "val_pass_k" in before) == ([1, 2, 3, 4, 5, 6], False)
        journal.record_late(3, {"val_pass_k": 0.75, "reward": 99.0}, "step 3: evaluated")
        file.amend(journal.step(3))
        commit(journal, 7)
        file.append(history()[-1])
        for asked in (curves, RunCurves(RunReader(Path("run")))):
            found = asked.series(["reward", "val_pass_k"], 100, None, None)
            assert (found["val_pass_k"].step, found["val_pass_k"].mean) == ([3], [0.75])
            assert found["reward"].step == [1, 2, 3, 4, 5, 6, 7]
            assert found["reward"].mean[:6] == before["reward"].mean, "what a step has stays"
            assert "val_pass_k" in {each.name for each in asked.names()}
        file.close()
        with_file = curves_of()
        Path("run", CURVES_NAME).unlink()
        assert curves_of() == with_file, "the file is a copy of the journal"
        assert journal.values_of("val_pass_k") == {3: 0.75}
        journal.forget_after(2)
        assert journal.values_of("val_pass_k") == {}
