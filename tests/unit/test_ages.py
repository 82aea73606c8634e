"""What `coordinator plan` predicts of ages, against the real scheduler over simulated engines and trainers."""

from __future__ import annotations

import functools
import io
import math
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console
from samples_harness import sample_of
from simulation_harness import Simulated, Simulation

from tandem.config import Config, config_to_json, load_config
from tandem.coordinator.cli import main
from tandem.coordinator.forecast.plan_ages import (
    BYTES_A_TOKEN,
    GivenRates,
    StepRates,
    bound_speedup,
    predict,
    print_ages,
    read_rates,
)
from tandem.observe.run_folder.journal import RefitRecord, StepRecord
from tandem.observe.run_folder.journal_writer import Journal

ROOT = Path(__file__).resolve().parents[2]
DISJOINT = ROOT / "examples" / "plans" / "llama-70b-tp8pp2-to-tp8.yaml"
SAME_GPUS = ROOT / "examples" / "plans" / "llama-8b-fsdp8-to-tp2.yaml"

# --- the model -------------------------------------------------------------------------------------------------------

EVEN = Simulated(training_s=20, refit_s=1, verify_s=1)
"""Generation takes as long as training, and all responses are equally long."""
UNEVEN = Simulated(training_s=10, longest=40, refit_s=4, verify_s=3)
TAILED = Simulated(training_s=20, longest=60, refit_s=1, verify_s=1)
"""The longest response is three times as long as the mean."""
LOADED = Simulated(training_s=40, longest=40, num_places=8, refit_s=1, verify_s=1)
"""Two samples share a place."""
FULL = Simulated(training_s=10, longest=60, num_places=4, refit_s=2, verify_s=1)


@functools.cache
def generation_s(simulated: Simulated) -> float:
    """Simulate synchronous steps; return what generation takes in them."""
    synchronous = Simulation(simulated)
    synchronous.run()
    return synchronous.period_s() - simulated.training_s - simulated.refit_s


def measure(simulated: Simulated) -> tuple[Simulation, StepRates]:
    """Simulate; return that, and the rates that a journal of the synchronous run would have."""
    simulation = Simulation(simulated)
    simulation.run()
    rates = StepRates(
        generation_s=generation_s(msgspec.structs.replace(simulated, age=0, in_flight=False, training_s=1)),
        training_s=simulated.training_s,
        refit_s=simulated.refit_s,
        verify_s=simulated.verify_s,
        longest_over_mean=simulated.longest / simulated.mean_length,
        samples_per_place=simulated.num_groups * simulated.num_samples / (simulated.num_engines * simulated.num_places),
    )
    return simulation, rates


def aged(simulated: Simulated, age: int, *, in_flight: bool = True, **changes: Any) -> Simulated:
    return msgspec.structs.replace(simulated, age=age, in_flight=in_flight, **changes)


@pytest.mark.parametrize(
    ("simulated", "limit"),
    [
        (aged(EVEN, 1), "trainers"),
        (aged(EVEN, 1, training_s=45), "trainers"),
        (aged(EVEN, 1, training_s=5), "engines"),
        (aged(EVEN, 4, training_s=5), "engines"),
        (aged(UNEVEN, 1), "latency"),
        (aged(UNEVEN, 2), "engines"),
        (aged(UNEVEN, 2, training_s=30), "trainers"),
        (aged(TAILED, 1), "latency"),
        (aged(TAILED, 2), "latency"),
        (aged(TAILED, 4), "trainers"),
        (aged(TAILED, 4, training_s=5), "engines"),
        (aged(LOADED, 1), "latency"),
        (aged(LOADED, 2, training_s=20), "engines"),
        (aged(FULL, 1), "engines"),
        (aged(FULL, 2, training_s=100), "trainers"),
        (aged(UNEVEN, 1, num_engines=1, in_flight=False), "engines"),
        (aged(TAILED, 1, num_engines=1, in_flight=False), "engines"),
        (aged(UNEVEN, 2, in_flight=False), "engines"),
        (aged(UNEVEN, 1, training_s=45, in_flight=False), "trainers"),
    ],
)
def test_the_period_is_that_of_the_scheduler(simulated: Simulated, limit: str) -> None:
    simulation, rates = measure(simulated)
    predicted = predict(rates, simulated.age, in_flight=simulated.in_flight)
    assert predicted.limit == limit
    assert predicted.period_s == pytest.approx(simulation.period_s(), rel=0.1)
    synchronous_s = predict(rates, 0, in_flight=True).period_s
    assert predicted.speedup == pytest.approx(synchronous_s / predicted.period_s)
    assert predicted.speedup <= bound_speedup(simulated.age)
    engines_idle, trainers_idle = simulation.idle()
    assert predicted.trainers_idle == pytest.approx(trainers_idle, abs=0.1)
    assert predicted.engines_idle == pytest.approx(engines_idle, abs=0.1)
    if not simulated.in_flight:
        assert predicted.share_by_age is None
        return
    assert predicted.share_by_age is not None
    assert sum(predicted.share_by_age) == pytest.approx(1)
    assert predicted.share_by_age == pytest.approx(simulation.share_by_age(), abs=0.2)


def test_without_updates_in_flight_several_engines_are_no_slower_than_predicted() -> None:
    simulation, rates = measure(aged(TAILED, 1, in_flight=False))
    predicted = predict(rates, 1, in_flight=False)
    assert 0.7 * predicted.period_s < simulation.period_s() < 1.1 * predicted.period_s


def test_closed_forms() -> None:
    even = StepRates(generation_s=20, training_s=15, refit_s=1)
    assert [predict(even, age, in_flight=True).period_s for age in (0, 1, 4)] == pytest.approx([36, 21, 21])
    found = predict(even, 1, in_flight=True)
    assert found.limit == "engines"
    assert found.speedup == pytest.approx(36 / 21)
    assert found.engines_idle == pytest.approx(1 / 21)
    assert found.trainers_idle == pytest.approx(6 / 21)
    # Of the 20 s that a step is generated for, 15 are beside the step before: with the weights that went into that.
    assert found.share_by_age == pytest.approx((0.25, 0.75))
    half_empty = msgspec.structs.replace(even, samples_per_place=0.5, longest_over_mean=4)
    assert half_empty.work_s == 20 / 4  # as if there were no more places than samples
    assert half_empty.predict_generated(0) == 0
    assert half_empty.predict_generated(20) == half_empty.predict_generated(25) == 1
    # Lengths of u^3: (1 - s^(1/3)) of them are longer than s of the longest, and 3 of 4 parts are made so soon.
    steps = [i / 1000 for i in range(1000)]
    assert half_empty.predict_generated(10) == pytest.approx(
        sum((1 - s ** (1 / 3)) / 1000 for s in steps if s < 0.5) * 4, abs=0.01
    )
    # Sixteen samples a place: of the last responses, 8 / 7 means are left in the mean, and 3.2 of the last to end.
    waiting = (3.2 - 8 / 7) * 15 / 16 + 3 / 16
    assert msgspec.structs.replace(half_empty, samples_per_place=16).work_s == pytest.approx(20 * 16 / (16 + waiting))


@pytest.mark.parametrize("age", [1, 2, 4, 8])
def test_no_rates_make_an_age_worth_more_than_it_can_be(age: int) -> None:
    for longest in (1.0, 3.0, 50.0):
        for training_s in (1e-6, 1.0, 30.0):
            for refit_s in (0.0, 5.0):
                rates = StepRates(
                    generation_s=20, training_s=training_s, refit_s=refit_s, longest_over_mean=longest, verify_s=1
                )
                for in_flight in (False, True):
                    found = predict(rates, age, in_flight=in_flight)
                    assert 0 < found.speedup <= age + 1 + 1e-9
                    assert found.period_s >= rates.work_s + refit_s
                    assert found.period_s >= training_s + refit_s
                    assert not math.isnan(found.period_s)
                    assert 0 <= found.engines_idle <= 1
                    assert 0 <= found.trainers_idle <= 1
                    for share in found.share_by_age or ():
                        assert -1e-9 <= share <= 1


# --- what is printed -------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def where_models_are_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Examples name their models relative to the repository, and runs are in a folder of the test's."""
    monkeypatch.chdir(ROOT)


def configured(tmp_path: Path, *overrides: str, path: Path = DISJOINT) -> Config:
    return load_config(path, [f"logger.log_dir={tmp_path}", *overrides], to_run=False)


def printed(config: Config, predicted_refit_s: float | None = None, **given: float) -> str:
    written = io.StringIO()
    print_ages(config, GivenRates(**given), predicted_refit_s, Console(file=written, width=120))
    return written.getvalue()


def run_before(config: Config, num_steps: int = 4, folder: Path | None = None) -> None:
    """Have a run of a configuration in its run folder, with a slow first step."""
    lengths = {"mean_generation_length": 100.0, "max_generation_length": 350.0}
    with Journal.create(folder or Path(config.logger.log_dir), config_to_json(config), config.algorithm) as journal:
        for step in range(num_steps + 1):
            slow = 10.0 if step == 1 else 1.0
            seconds = {"generation": 24.0 + step, "policy_training": 12.0, "get_logprobs": 4.0, "refit": 0.5}
            seconds = {name: slow * value for name, value in seconds.items()} if step else {}
            journal.commit_step(
                StepRecord(step=step, version=step, metrics=lengths if step else {}, seconds={**seconds, "total": 50.0})
            )
            journal.record_refit(
                RefitRecord(
                    version=step,
                    engines=("rollout-0",),
                    num_bytes={},
                    seconds={"transfer": 0.5, "verify": 0.25, "commit": 0.05},
                    predicted_s=0.1,
                    bound_s=0.1,
                    digest=1,
                    quarantined={},
                )
            )


def test_rates_are_those_of_the_run_before(tmp_path: Path) -> None:
    config = configured(tmp_path)
    run_before(config)
    found = read_rates(configured(tmp_path, "grpo.async_grpo.enabled=true", "grpo.max_num_steps=7"))
    assert found.rates == pytest.approx(
        {"generation_s": 27, "training_s": 16, "refit_s": 0.5, "verify_s": 0.3, "longest_over_mean": 3.5}
    )
    assert found.source == f"medians of 3 steps of the run in {tmp_path}"
    text = printed(config, predicted_refit_s=9.0)
    assert "from generation 27 s, training 16 s, refit 0.5 s, the longest response 3.5 × the mean: medians" in text
    rates = StepRates(**found.rates, samples_per_place=1.0)
    for age in (1, 2, 4):
        predicted = predict(rates, age, in_flight=True)
        assert re.search(rf"^ *{age} +{predicted.period_s:.3g} s +{predicted.speedup:.2f} +\d+% ", text, re.MULTILINE)
    assert "0 (configured)  43.5 s           1.00  100%" in text


def test_what_is_given_comes_before_what_was_measured(tmp_path: Path) -> None:
    config = configured(tmp_path, "grpo.async_grpo.enabled=true", "grpo.async_grpo.max_trajectory_age_steps=3")
    run_before(configured(tmp_path))
    text = printed(config, training_s=80, longest_over_mean=1)
    assert "from generation 27 s, training 80 s, refit 0.5 s, the longest response 1 × the mean: as given, el" in text
    assert [line.split()[0] for line in text.splitlines()[2:7]] == ["0", "1", "2", "3", "4"]
    assert "3 (configured)  80.8 s           1.33  of one sample the same" in text
    assert "engines finish what they have before each update" in text


def test_an_asynchronous_run_does_not_tell_generation(tmp_path: Path) -> None:
    config = configured(tmp_path, "grpo.async_grpo.enabled=true")
    run_before(config)
    assert "generation_s" not in read_rates(config).rates
    text = printed(config)
    assert f"of the run in {tmp_path}, whose generation time is not known: it is asynchronous; give --gen" in text
    assert "training 16 s" in printed(config, generation_s=20)


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (["policy.train_micro_batch_size=2"], "differs in policy.train_micro_batch_size"),
        (["cluster.rollouts=4"], "differs in cluster.rollouts"),
        (["loss_fn.reference_policy_kl_penalty=0.5"], "differs in loss_fn.reference_policy_kl_penalty"),
    ],
)
def test_a_run_of_another_configuration_tells_nothing(tmp_path: Path, overrides: list[str], why: str) -> None:
    run_before(configured(tmp_path))
    text = printed(configured(tmp_path, *overrides))
    assert f"rates are not known: the run in {tmp_path} {why}" in text


def test_what_is_known_without_rates(tmp_path: Path) -> None:
    text = printed(configured(tmp_path))
    assert f"rates are not known: {tmp_path} holds no run; give --generation-s and --training-s" in text
    assert "with ages of 1, 2 and 4, at most 2, 3 and 5 times as fast, and at most" in text
    samples = configured(tmp_path).units_per_step * configured(tmp_path).policy.max_total_sequence_length
    assert f"{2 * samples * 13 / 1e9:.2g}, {3 * samples * 13 / 1e9:.2g} and" in text


def test_memory_is_that_of_the_arrays() -> None:
    sample = sample_of(8)
    by_token = [array for name, array in sample.columns.items() if name.endswith("_T")]
    assert len(by_token) == 4
    assert sum(array.nbytes for array in by_token) == 8 * BYTES_A_TOKEN


def test_engines_without_room_are_told_of(tmp_path: Path) -> None:
    config = configured(tmp_path)
    samples = config.units_per_step * config.policy.max_total_sequence_length
    room = f"policy.generation.max_stored_tokens={samples}"
    text = printed(configured(tmp_path, room), generation_s=20, training_s=10)
    assert "from age 2 on engines may wait for room" in text  # two engines: two steps' samples
    assert "wait for room" not in printed(config, generation_s=20, training_s=10)


def test_what_takes_turns_has_no_ages_unless_rates_are_given(tmp_path: Path) -> None:
    config = configured(tmp_path, path=SAME_GPUS)
    run_before(config)
    text = printed(config)
    assert text.count("\n") == 1
    assert "take turns on their devices (policy.generation.colocated.enabled: true)" in text
    assert "trainers idle" in printed(config, generation_s=20, training_s=10)


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", str(DISJOINT), f"logger.log_dir={tmp_path}"]
    assert main([*words, "--generation-s", "60", "--training-s", "45"]) == 0
    text = capsys.readouterr().out
    assert (
        "refit 0.392 s (as predicted below), the longest response 1 × the mean (not known: --longest-over-mean)" in text
    )
    assert text.splitlines()[-1].startswith("planned in")
    for option, value, must in (
        ("--generation-s", "0", "'0' is not a number above 0"),
        ("--training-s", "nan", "'nan' is not a number above 0"),
        ("--refit-s", "fast", "'fast' is not a number above 0"),
        ("--longest-over-mean", "0.5", "'0.5' is not a number from 1 on"),
    ):
        with pytest.raises(SystemExit, match="2"):
            main([*words, option, value])
        assert f"argument {option}: {must}" in capsys.readouterr().err


def test_the_page_quotes_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "asynchronous.md").read_text()
    block = page.partition("## What an age costs")[2].partition("```console\n")[2].partition("```")[0]
    command, *lines = block.splitlines()
    assert main(command.split()[2:]) == 0
    assert "\n".join(lines) in "\n".join(line.rstrip() for line in capsys.readouterr().out.splitlines())
