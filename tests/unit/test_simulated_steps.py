"""Steps that ``coordinator plan --simulate`` predicts, against closed forms, published sizes and their own page."""

from __future__ import annotations

import hashlib
import json
import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest
from cluster_harness import GRPO

from tandem.common.errors import ConfigError
from tandem.config import Config, load_config
from tandem.config.schema import LinkRates
from tandem.coordinator.cli import main
from tandem.coordinator.forecast.plan_ages import StepRates, predict
from tandem.coordinator.forecast.simulation.gpus import GPU_KINDS, find_rates
from tandem.coordinator.forecast.simulation.lengths import GroupLengths, LengthSource, fit_lengths
from tandem.coordinator.forecast.simulation.roofline import (
    EFFICIENCIES,
    DecodingRate,
    EngineRoofline,
    StepSeconds,
    count_bins,
)
from tandem.coordinator.forecast.simulation.simulate import (
    SimulationOptions,
    StepModel,
    describe_model,
    simulate,
)
from tandem.coordinator.forecast.simulation.splits import search_splits
from tandem.coordinator.forecast.simulation.virtual_time import (
    VirtualRates,
    VirtualRun,
    measure_generation,
)
from tandem.coordinator.scheduler.spec import EngineBalance, RunSpec
from tandem.refit.adapters.vllm import Vllm
from tests.harness.scripts import load_script

ROOT = Path(__file__).resolve().parents[2]
PLANS = ROOT / "examples" / "plans"
DISJOINT = PLANS / "llama-70b-tp8pp2-to-tp8.yaml"
IN_FLIGHT = ("grpo.async_grpo.enabled=true", "grpo.async_grpo.in_flight_weight_updates=true")


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Examples name their models relative to the repository."""
    monkeypatch.chdir(ROOT)


# --- virtual time ----------------------------------------------------------------------------------------------------


class FlatEngine(msgspec.Struct, frozen=True):
    """Decoding steps of a constant, and so much for each cached token; prompts take a second for each token."""

    fixed_s: float = 1.0
    cached_s: float = 0.0
    prefilled_s: float = 0.0
    max_tokens: float = math.inf

    def decode(self, num_sequences: int) -> DecodingRate:
        return DecodingRate(self.fixed_s, self.cached_s)

    def prefill_s(self, num_tokens: int) -> float:
        return num_tokens * self.prefilled_s


FLAT = FlatEngine()
NUM_GROUPS, NUM_SAMPLES, NUM_ENGINES = 4, 3, 2
NUM_PLACES = NUM_GROUPS * NUM_SAMPLES // NUM_ENGINES
"""An engine has its share of a step at once, and no more."""


def spec_of(*, age: int = 0, in_flight: bool = True, num_steps: int = 12, num_engines: int = NUM_ENGINES) -> RunSpec:
    forever = msgspec.structs.replace(GRPO.deadlines, **dict.fromkeys(GRPO.deadlines.__struct_fields__, 1e9))
    return msgspec.structs.replace(
        GRPO,
        expected={"trainer": 1, "rollout": num_engines, "refit": 1},
        last_step=num_steps,
        num_groups=NUM_GROUPS,
        validate_every=0,
        validate_at_start=False,
        save_every=0,
        is_verified=False,
        max_trajectory_age_steps=age,
        updates_in_flight=in_flight and age > 0,
        balance=EngineBalance(width=NUM_PLACES, timeout_s=None),
        deadlines=forever,
        max_replacements=10**9,
    )


def run(
    spec: RunSpec,
    lengths: Sequence[int] = (20,) * NUM_SAMPLES,
    *,
    training_s: float = 0.0,
    logprobs_s: float = 0.0,
    engine: FlatEngine = FLAT,
    num_places: int = NUM_PLACES,
    **rates: Any,
) -> VirtualRun:
    virtual = VirtualRun(
        spec,
        VirtualRates(
            engine=engine,
            num_places=num_places,
            train=lambda lengths: StepSeconds(logprobs_s, training_s),
            **rates,
        ),
        lambda step, group: GroupLengths(5, tuple(lengths)),
        100,
    )
    virtual.run()
    return virtual


def period_s(virtual: VirtualRun, num_first: int = 4) -> float:
    steps = virtual.steps
    return (steps[-3].ended_at - steps[num_first].ended_at) / (len(steps) - 3 - num_first)


def test_a_synchronous_step_is_the_sum_of_its_phases() -> None:
    virtual = run(spec_of(), training_s=7, logprobs_s=2, refit_s=3, between_s=1)
    assert len(virtual.steps) == 12
    for step in virtual.steps[1:]:
        assert step.by_phase["generation"] == pytest.approx(20)
        assert step.by_phase["training"] == pytest.approx(7 + 2 + 1)
        assert step.by_phase["refit"] == pytest.approx(3)
        assert step.by_phase["total"] == pytest.approx(33)
        assert step.num_tokens == NUM_GROUPS * NUM_SAMPLES * 25
    assert {*virtual.tokens_by_age} == {0}


def test_generation_ends_with_the_longest_response() -> None:
    virtual = run(spec_of(), (10, 20, 60))
    assert virtual.steps[3].by_phase["generation"] == pytest.approx(60)
    assert virtual.steps[3].longest_over_mean == pytest.approx(2)
    engine = virtual.engines["rollout-0"]
    # Of three sequences in two groups: 2 (10 + 20 + 60) seconds of places within 60.
    assert engine.place_s / engine.busy_s == pytest.approx(2 * 90 / 60)


def test_sequences_without_a_place_wait_for_one() -> None:
    # Two groups of three for each engine, on two places: three rounds of 20 s.
    assert run(spec_of(), num_places=2).steps[3].by_phase["generation"] == pytest.approx(60)


def test_cached_tokens_slow_an_engine_down() -> None:
    # Six sequences of 5 and 20 tokens: 20 steps, with 6 (5 + 0), 6 (5 + 1), ... cached tokens, as an integral.
    engine = FlatEngine(1.0, 0.01, prefilled_s=0.5)
    expected = 20 + 0.01 * (6 * 5 * 20 + 6 * 20 * 20 / 2) + 2 * 5 * 0.5  # a prompt of each of two groups
    assert run(spec_of(), engine=engine).steps[3].by_phase["generation"] == pytest.approx(expected)
    assert measure_generation(engine, 64, [GroupLengths(5, (20,) * 3)] * 2) == pytest.approx(expected)


def test_a_full_cache_holds_up_the_youngest() -> None:
    lengths = [GroupLengths(0, (20,)) for _ in range(4)]
    assert measure_generation(FlatEngine(), 64, lengths) == pytest.approx(20)
    # Of 40 tokens, four have ten each at 10 s, then three 13.3 at 13.3 s; two of them end at 20 s. The others had made
    # 13 and 10 tokens, and go on together.
    assert measure_generation(FlatEngine(max_tokens=40), 64, lengths) == pytest.approx(30)
    # A sequence takes 200 seconds of tokens, so that 20 tokens of room are enough for 40 s at least.
    assert 40 <= measure_generation(FlatEngine(max_tokens=20), 64, lengths) <= 80


@pytest.mark.parametrize(("training", "expected"), [(30.0, 30.0), (20.0, 20.0), (5.0, 20.0)])
def test_an_age_of_one_takes_the_longer_of_generation_and_training(training: float, expected: float) -> None:
    virtual = run(spec_of(age=1, num_steps=24), training_s=training)
    assert period_s(virtual) == pytest.approx(expected, rel=1e-6)
    assert virtual.tokens_by_age.keys() <= {0, 1}
    assert sum(virtual.tokens_by_age.values()) == 24 * NUM_GROUPS * NUM_SAMPLES * 20


@pytest.mark.parametrize("age", [1, 2, 4])
@pytest.mark.parametrize("training", [8.0, 35.0])
def test_ages_are_those_of_the_closed_form(age: int, training: float) -> None:
    virtual = run(spec_of(age=age, num_steps=40), training_s=training, refit_s=2)
    expected = predict(StepRates(generation_s=20, training_s=training, refit_s=2), age, in_flight=True)
    assert period_s(virtual, 12) == pytest.approx(expected.period_s, rel=0.05)


def test_weights_taken_in_flight_divide_a_response() -> None:
    virtual = run(spec_of(age=1, num_steps=24), training_s=20, refit_s=1)
    assert virtual.tokens_by_age[0] > 0
    assert virtual.tokens_by_age[1] > 0
    whole = run(spec_of(age=1, in_flight=False, num_steps=24), training_s=20, refit_s=1)
    assert period_s(whole) >= 20


def test_lost_engines_are_replaced_and_cost_time() -> None:
    calm = run(spec_of(num_steps=30), training_s=10)
    losing = run(spec_of(num_steps=30), training_s=10, losses_per_hour=60, notice_s=5, replace_s=30)
    assert losing.num_losses > 2
    assert len(losing.steps) == 30
    lost_s = (losing.steps[-1].ended_at - calm.steps[-1].ended_at) / losing.num_losses
    assert 0 < lost_s < 5 + 30 + 20 + 30
    again = run(spec_of(num_steps=30), training_s=10, losses_per_hour=60, notice_s=5, replace_s=30)
    assert [step.ended_at for step in again.steps] == [step.ended_at for step in losing.steps]


# --- rates -----------------------------------------------------------------------------------------------------------

PERFECT = msgspec.structs.replace(
    EFFICIENCIES,
    memory=1.0,
    products=1.0,
    links=1.0,
    expert_columns=0.0,
    decode_s=0.0,
    sequence_s=0.0,
    hop_s=0.0,
    far_hop_s=0.0,
    layer_s=0.0,
    expert_s=0.0,
    refit_s=0.0,
    refit_links=1.0,
    step_s=0.0,
    shared_s_per_gb=0.0,
)
H100 = find_rates("H100", None, LinkRates())


def configured(*overrides: str, path: Path = DISJOINT) -> Config:
    return load_config(path, overrides, to_run=False)


def test_the_work_of_models_is_what_their_makers_say() -> None:
    def work(name: str) -> Any:
        stages = "policy.megatron_cfg.pipeline_model_parallel_size=1"
        return describe_model(configured(f"policy.model_name=examples/models/{name}", stages))

    llama, qwen = work("Llama-3.1-8B"), work("Qwen3-235B-A22B")
    deepseek = describe_model(configured(path=PLANS / "deepseek-v3-pp16ep16-to-tp32dp8.yaml"))
    assert llama.num_parameters == 8_030_261_248  # of its model card's index of weights
    assert llama.cache_bytes == 128 * 1024  # 2 x 32 layers x 8 heads x 128 elements x 2 bytes
    assert qwen.num_parameters == pytest.approx(235e9, rel=0.01)
    embeddings = 151936 * 4096
    assert qwen.flops_per_token / 2 + embeddings == pytest.approx(22e9, rel=0.02)  # "A22B"
    assert deepseek.num_parameters == pytest.approx(671e9, rel=0.01)
    assert deepseek.flops_per_token / 2 + 129280 * 7168 == pytest.approx(37e9, rel=0.03)
    assert deepseek.cache_bytes == 61 * 576 * 2  # arXiv:2412.19437: latent of 512, and 64 with positions


def test_a_decoding_step_reads_the_weights_and_the_cache() -> None:
    work = describe_model(configured("policy.model_name=examples/models/Llama-3.1-8B"))
    engine = EngineRoofline(work, Vllm(tp=1), H100, PERFECT, 0.9)
    rate = engine.decode(1)
    weights = 2 * (8_030_261_248 - 128256 * 4096)
    assert rate.fixed_s == pytest.approx(weights / 3350e9)
    assert rate.cached_s == pytest.approx(131072 / 3350e9)
    many = engine.decode(100_000)
    assert many.fixed_s == pytest.approx(100_000 * weights / 989e12)  # products now limit it: 2 for each parameter
    assert engine.max_tokens == pytest.approx((0.9 * 80e9 - 2 * 8_030_261_248) / 131072)
    half = EngineRoofline(work, Vllm(tp=2), H100, PERFECT, 0.9).decode(1)
    assert half.cached_s == pytest.approx(rate.cached_s / 2)
    assert half.fixed_s == pytest.approx(rate.fixed_s / 2, rel=0.01)


def test_experts_are_read_as_tokens_choose_them() -> None:
    work = describe_model(configured("policy.model_name=examples/models/Qwen3-30B-A3B"))
    assert work.count_experts_read(1) == pytest.approx(work.num_routed * 8 / 128)
    assert work.count_experts_read(10_000) == pytest.approx(work.num_routed)


def test_training_takes_six_operations_a_parameter() -> None:
    shared = PLANS / "llama-8b-fsdp8-to-tp2.yaml"
    settings = ("policy.dtensor_cfg.enabled=false", "policy.megatron_cfg.enabled=true")
    config = configured(*settings, "policy.sequence_packing.enabled=true", path=shared)
    options = SimulationOptions(gpu=H100, lengths=fit_lengths(700, 1900, 100), fitted=PERFECT)
    model = StepModel(config, options)
    lengths = [1000] * 512
    seconds = model.trainer.step(lengths)
    num = 8_030_261_248 - 128256 * 4096
    pairs = 512 * 1000 * 1000 / 2 * 4 * 32 * 4096  # two products of queries, keys and values, of 32 layers
    flops = 6 * num * 512_000 + 3 * pairs
    # Then gradients in float32 and weights in bfloat16 over NVLink, and 20 bytes a parameter of AdamW.
    exchanged = 6 * 8_030_261_248 / 450e9 + 20 * 8_030_261_248 / 8 / 3350e9
    assert seconds.training_s == pytest.approx(flops / 8 / 989e12 + exchanged)
    assert seconds.logprobs_s == pytest.approx(len(config.scored_by(1)) * flops / 3 / 8 / 989e12, rel=1e-6)


def test_pipelines_have_bubbles() -> None:
    options = SimulationOptions(gpu=H100, lengths=fit_lengths(700, 1900, 100), fitted=PERFECT)
    packed = "policy.sequence_packing.enabled=true"
    one, two = (StepModel(configured(packed, f"cluster.trainers={num}"), options) for num in (16, 32))
    lengths = [4096] * 512
    # 128 rows of 16,384 tokens in 2 stages take 129 turns; on twice the GPUs, half of the rows 65.
    ratio = one.trainer.step(lengths).logprobs_s / two.trainer.step(lengths).logprobs_s
    assert ratio == pytest.approx(129 / 65)


def test_rows_fill_as_well_as_they_can() -> None:
    assert count_bins([1024] * 8, 4096) == 2
    assert count_bins([3000] * 8, 4096) == 8  # no two of them share a row
    assert count_bins([10], 4096) == 1


def test_lengths_have_the_given_mean() -> None:
    for mean, longest in ((100.0, 4000), (700.0, 1400), (3900.0, 4000), (4.0, 10), (5.0, 5)):
        source = fit_lengths(mean, longest, 50)
        drawn = [n for group in range(400) for n in source.draw(1, group, 16, 0).responses]
        assert max(drawn) <= longest
        assert sum(drawn) / len(drawn) == pytest.approx(mean, rel=0.07)
        assert source.draw(3, 4, 8, 5) == source.draw(3, 4, 8, 5)
    assert {*fit_lengths(30, 100, 5, spread=0.0, runaways=0.0).draw(1, 1, 8, 0).responses} == {30}
    with pytest.raises(ConfigError, match="--mean-length: 11 tokens are not between 1 and 10"):
        fit_lengths(11, 10, 5)


def test_recorded_groups_are_drawn_whole() -> None:
    groups = (GroupLengths(3, (1, 2)), GroupLengths(4, (8, 9)))
    source = LengthSource(recorded=groups, longest=9, source="a run")
    assert {source.draw(1, group, 2, 0) for group in range(40)} == {*groups}
    assert source.mean_response == 5
    assert {*source.draw(1, 1, 6, 0).responses} <= {1, 2, 8, 9}


def test_kinds_of_gpus_state_their_sources() -> None:
    for kind in GPU_KINDS.values():
        assert "data sheet" in kind.source
        assert kind.memory_gb_s > kind.peer_gb_s > kind.network_gb_s > 0


def test_measured_rates_replace_those_of_data_sheets(tmp_path: Path) -> None:
    report = {
        "host": "n1",
        "findings": [{"name": "CUDA", "status": "ok", "says": "torch computes on 8 GPUs (NVIDIA H200)", "advice": ""}],
        "links": {"same_gpu": 2000.0, "peer_gpu": 400.0},
        "needed_but_missing": [],
    }
    path = tmp_path / "doctor.json"
    path.write_text(json.dumps(report))
    rates = find_rates(None, str(path), LinkRates())
    assert rates.kind.name == "H200"
    assert "measured: memory 2000 GB/s, NVLink 400 GB/s" in rates.source
    work = describe_model(configured())
    engine = EngineRoofline(work, Vllm(tp=4), rates, EFFICIENCIES, 0.9)
    assert engine.decode(1).cached_s == pytest.approx(work.cache_bytes / (4 * 2 * 2000e9))
    report["findings"] = []
    path.write_text(json.dumps(report))
    with pytest.raises(ConfigError, match="names no known GPU"):
        find_rates(None, str(path), LinkRates())
    report["links"] = {"network": -1.0}
    path.write_text(json.dumps(report))
    with pytest.raises(ConfigError, match=r"links.network: -1.0 is not a rate"):
        find_rates("H100", str(path), LinkRates())


# --- whole configurations --------------------------------------------------------------------------------------------


def test_a_step_is_made_of_what_rooflines_say() -> None:
    lengths = LengthSource(prompt=100, mean=500, longest=500, median=500, source="alike")
    options = SimulationOptions(gpu=H100, lengths=lengths, num_steps=2)
    model = StepModel(configured(), options)
    simulated = simulate(configured(), options)
    trained = model.trainer.step([600] * 512)
    assert simulated.training_s == pytest.approx(trained.training_s)
    assert simulated.logprobs_s == pytest.approx(trained.logprobs_s)
    assert simulated.refit_s == pytest.approx(model.refit_s)
    generation_s = measure_generation(model.engine, model.num_places, [GroupLengths(100, (500,) * 8)] * 32)
    assert simulated.generation_s == pytest.approx(generation_s)
    parts = (simulated.generation_s, simulated.logprobs_s, simulated.training_s, simulated.refit_s)
    assert simulated.step_s == pytest.approx(sum(parts) + EFFICIENCIES.step_s)
    assert simulated.tokens_per_s_per_gpu == pytest.approx(512 * 600 / simulated.step_s / 32)
    assert simulated.trainers_idle == pytest.approx(1 - (trained.training_s + trained.logprobs_s) / simulated.step_s)


def test_the_best_split_is_the_fastest_that_fits() -> None:
    options = SimulationOptions(
        gpu=find_rates("H200", None, LinkRates()), lengths=fit_lengths(300, 900, 100), num_steps=1
    )
    settings = (*IN_FLIGHT, "policy.megatron_cfg.activation_checkpointing=true", "grpo.num_prompts_per_step=16")
    settings = (*settings, "policy.train_global_batch_size=128")
    config = configured(*settings)
    search = search_splits(config, lambda more: configured(*settings, *more), 32, options)
    seconds = [split.run.step_s for split in search.splits]
    assert seconds == sorted(seconds)
    best = search.best
    assert best is not None
    assert best.memory_gb is not None
    assert best.memory_gb < 141
    assert all(not split.fits for split in search.splits[: search.splits.index(best)])
    assert all(split.num_trainers + (0 if split.is_shared else split.num_engine_gpus) <= 32 for split in search.splits)
    again = simulate(configured(*settings, *best.settings), options)  # the settings lead to what is promised
    assert again.step_s == pytest.approx(best.run.step_s)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpus", "8"], "--gpus: needs --simulate"),
        (["--simulate", "--training-s", "4"], "--training-s: rates of steps, which --simulate predicts"),
        (["--simulate", "--gpu", "V100"], "--gpu: 'V100' is not one of A100, H100, H200, GB200"),
        (["--simulate", "--mean-length", "9000"], "--mean-length: 9000 tokens are not between 1 and 2048"),
        (["--simulate", "--prompt-length", "5000"], "--prompt-length: 5000 tokens leave no room"),
        (["--simulate", "--doctor", "nothing.json"], "--doctor: nothing.json is not a report"),
        (["--simulate", "--gpus", "3"], "--gpus: no split of 3 GPUs can be"),
        (["--simulate", "policy.generation.vllm_cfg.tensor_parallel_size=1"], "an engine of 1 H100 has no room"),
    ],
)
def test_what_cannot_be_is_one_error(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = ["--steps", "1", "--losses-per-hour", "0"] if "--simulate" in words else []
    assert main(["plan", str(DISJOINT), f"logger.log_dir={tmp_path}", *words, *steps]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert message in error


@pytest.mark.parametrize(
    ("name", "message"), [("arithmetic", "rates of CPUs are unknown"), ("arithmetic_sft", "generates nothing")]
)
def test_what_has_no_rates_is_refused(name: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", f"examples/{name}.yaml", "--simulate"]) == 2
    assert message in capsys.readouterr().err


def test_the_command_prints_a_table_or_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["grpo.num_prompts_per_step=8", "policy.train_global_batch_size=64", f"logger.log_dir={tmp_path}"]
    words = ["plan", str(DISJOINT), *small, *IN_FLIGHT, "--simulate", "--steps", "2", "--mean-length", "300"]
    assert main(words) == 0
    text = capsys.readouterr().out
    for part in (
        "as configured (age 1)",
        "responses all alike",
        "age 0",
        "age 4",
        "a lost engine costs",
        "as if on H100",
    ):
        assert part in text
    assert "lengths: assumed: log-normal with a spread of 0.6" in text
    assert main([*words, "--json", "--gpu", "H200"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["run"]["step_s"] > 0
    assert report["gpu"].startswith("H200: NVIDIA H200 SXM data sheet")
    assert sum(report["run"]["share_by_age"]) == pytest.approx(1)
    assert report["search"] is None


def test_a_plain_plan_imports_nothing_of_it() -> None:
    code = (
        "import sys; from tandem.coordinator.cli import main; main(['plan', sys.argv[1]]);"
        "sys.exit(any('forecast.simulation' in name for name in sys.modules))"
    )
    subprocess.run([sys.executable, "-c", code, str(DISJOINT)], check=True, stdout=subprocess.DEVNULL)


# --- the page --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("fit_simulation")


def test_the_tables_are_those_of_the_predictions(script: ModuleType) -> None:
    predictions = script.read_predictions()
    assert predictions.fitted == EFFICIENCIES, "python scripts/fit_simulation.py --write"
    page = script.PAGE.read_text()
    assert script.fill_page(page, predictions) == page
    assert {*predictions.seconds} == {run.name for run in script.RUNS}


@pytest.mark.parametrize("name", ["refit Qwen3-4B H100", "refit Qwen3-30B-A3B H100", "v0.6 DeepSeek-V3 256 H100"])
def test_predictions_are_those_of_this_code(script: ModuleType, name: str) -> None:
    predictions = script.read_predictions()
    run = next(run for run in script.RUNS if run.name == name)
    predicted = script.RunPredictor(run).predict(EFFICIENCIES, 4)
    assert predicted == pytest.approx(predictions.seconds[name], rel=1e-6)


def test_the_fitted_half_is_by_the_hash_of_names(script: ModuleType) -> None:
    fitted = script.find_fitted()
    assert len(fitted) == 4 + 4 + 2
    for table in ("v0.3", "v0.6", "refits"):
        names = {run.name for run in script.RUNS if run.table == table}
        digests = {name: hashlib.sha256(name.encode()).hexdigest() for name in names}
        assert max(digests[name] for name in names & fitted) < min(digests[name] for name in names - fitted)


def test_the_page_quotes_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "planning.md").read_text()
    command, *lines = page.partition("```console\n")[2].partition("```")[0].splitlines()
    assert main(command.split()[2:]) == 0
    assert "\n".join(lines) == "\n".join(line.rstrip() for line in capsys.readouterr().out.splitlines())
