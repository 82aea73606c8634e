"""Fit the constants of ``coordinator plan --simulate`` to half of the published runs, and judge them.

``python scripts/fit_simulation.py`` prints the tables of docs/planning.md, ``--write`` brings the page up to date, and
``--fit`` fits anew and prints what belongs in `roofline.EFFICIENCIES`.

The half: of each of the three published tables, the rows are sorted by the SHA-256 of their names, and the first half,
rounded up, is fitted on. The rule was written before any error was seen. The others are never read by the fit.
"""

from __future__ import annotations

import hashlib
import math
import os
import random
import re
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from tandem.config import Config, load_config
from tandem.config.schema import LinkRates
from tandem.coordinator.forecast.simulation.gpus import find_rates
from tandem.coordinator.forecast.simulation.lengths import fit_lengths
from tandem.coordinator.forecast.simulation.roofline import EFFICIENCIES, FittedEfficiencies
from tandem.coordinator.forecast.simulation.simulate import (
    SimulatedRun,
    SimulationOptions,
    StepModel,
    simulate_model,
    usual_longest,
)

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "planning.md"
RESULTS = ROOT / "docs" / "results" / "published_steps.json"
_MARKED = re.compile(r"(<!-- table (\w+) -->\n).*?(<!-- /table -->)", re.DOTALL)
_PROMPT = 107
"""Tokens of a prompt: tokens/s/GPU times seconds times GPUs over samples, less the mean response, in six of the v0.6
rows."""
_NUM_SCORED = 2
"""NeMo-RL scores each step by the policy and by the reference."""

Phase = Literal["step_s", "training_s", "refit_s", "generation_s", "logprobs_s"]
PHASES: tuple[Phase, ...] = ("step_s", "generation_s", "logprobs_s", "training_s", "refit_s")
Published = Literal["v0.3", "v0.6", "refits"]


class PublishedRun(msgspec.Struct, frozen=True, kw_only=True):
    """A row of a published table."""

    table: Published
    name: str
    gpu: str
    model: str
    num_gpus: int
    settings: tuple[str, ...]
    """Settings of the row, and what is assumed where it is silent."""
    longest: int = 4096
    tokens: float = 0.0
    """Mean tokens of a sample, its prompt included."""
    measured: Mapping[Phase, float]
    published_tokens: float = 0.0
    """Published tokens/s/GPU."""
    spread: tuple[float, float] | None = None
    """Least and most seconds, if the row gives a range."""

    @property
    def config(self) -> Config:
        """The configuration, as ``coordinator plan`` would read it."""
        settings = (
            f"policy.model_name=examples/models/{self.model}",
            f"policy.max_total_sequence_length={self.longest}",
            f"policy.generation.max_new_tokens={self.longest}",
            f"policy.generation.vllm_cfg.max_model_len={self.longest}",
            f"policy.sequence_packing.train_mb_tokens={self.longest}",
            *self.settings,
        )
        return load_config(ROOT / "examples" / "plans" / "base.yaml", settings, to_run=False)


def _divide(num_gpus: int, engine_tp: int, *, engines: int = 0, per_node: int = 8) -> tuple[str, ...]:
    """Return settings of GPUs: shared ones, or `engines` of them for engines."""
    nodes = f"cluster.num_nodes={num_gpus // per_node}"
    node = f"cluster.gpus_per_node={per_node}"
    tp = f"policy.generation.vllm_cfg.tensor_parallel_size={engine_tp}"
    if not engines:
        shared = ("policy.generation.colocated.enabled=true", f"cluster.rollouts={num_gpus // engine_tp}")
        return (nodes, node, tp, f"cluster.trainers={num_gpus}", *shared)
    apart = (
        "policy.generation.colocated.enabled=false",
        f"policy.generation.colocated.resources.num_nodes={engines // per_node}",
        f"policy.generation.colocated.resources.gpus_per_node={per_node}",
        "policy.generation.vllm_cfg.gpu_memory_utilization=0.8",
    )
    return (
        nodes,
        node,
        tp,
        f"cluster.trainers={num_gpus - engines}",
        f"cluster.rollouts={engines // engine_tp}",
        *apart,
    )


def _megatron(*, tp: int = 1, cp: int = 1, ep: int = 1, pp: int = 1, recomputes: bool = False) -> tuple[str, ...]:
    sizes = {"tensor_model": tp, "context": cp, "expert_model": ep, "pipeline_model": pp}
    return (
        *(f"policy.megatron_cfg.{name}_parallel_size={size}" for name, size in sizes.items()),
        f"policy.megatron_cfg.activation_checkpointing={str(recomputes).lower()}",
        f"policy.megatron_cfg.sequence_parallel={str(tp > 1).lower()}",
        "policy.sequence_packing.enabled=true",
    )


def _stages(first: int, last: int) -> tuple[str, ...]:
    return (
        f"policy.megatron_cfg.num_layers_in_first_pipeline_stage={first}",
        f"policy.megatron_cfg.num_layers_in_last_pipeline_stage={last}",
    )


def _age(steps: int) -> tuple[str, ...]:
    return (
        "grpo.async_grpo.enabled=true",
        f"grpo.async_grpo.max_trajectory_age_steps={steps}",
        "grpo.async_grpo.in_flight_weight_updates=true",
        "policy.generation.vllm_cfg.async_engine=true",
        "loss_fn.use_importance_sampling_correction=true",
    )


def _dtensor(tp: int) -> tuple[str, ...]:
    return (
        "policy.megatron_cfg.enabled=false",
        "policy.dtensor_cfg.enabled=true",
        "policy.optimizer={name: torch.optim.AdamW, kwargs: {lr: 1.0e-6}}",
        f"policy.dtensor_cfg.tensor_parallel_size={tp}",
        "policy.dynamic_batching.enabled=true",
        "policy.dynamic_batching.train_mb_tokens=4096",
        "policy.dynamic_batching.logprob_mb_tokens=16384",
    )


_LARGE = ("grpo.num_prompts_per_step=64", "grpo.num_generations_per_prompt=32", "policy.train_global_batch_size=512")
_SMALL = ("grpo.num_prompts_per_step=32", "grpo.num_generations_per_prompt=16", "policy.train_global_batch_size=512")


def _v03(
    name: str,
    model: str,
    num_gpus: int,
    settings: tuple[str, ...],
    seconds: tuple[float, float, float, float, float],
    tokens: int,
    longest: int = 4096,
) -> PublishedRun:
    """Return a row of v0.3: step, training, refit, generation and log-probabilities in seconds."""
    names: tuple[Phase, ...] = ("step_s", "training_s", "refit_s", "generation_s", "logprobs_s")
    return PublishedRun(
        table="v0.3",
        name=f"v0.3 {name}",
        gpu="H100",
        model=model,
        num_gpus=num_gpus,
        settings=(*_LARGE, *settings),
        longest=longest,
        tokens=tokens,
        measured=dict(zip(names, seconds, strict=True)),
    )


def _v06(
    name: str,
    model: str,
    num_gpus: int,
    settings: tuple[str, ...],
    step_s: float,
    published_tokens: float,
    mean: int,
    longest: int,
    gpu: str = "H100",
) -> PublishedRun:
    return PublishedRun(
        table="v0.6",
        name=f"v0.6 {name}",
        gpu=gpu,
        model=model,
        num_gpus=num_gpus,
        settings=settings,
        longest=longest,
        tokens=mean + _PROMPT,
        measured={"step_s": step_s},
        published_tokens=published_tokens,
    )


def _refit(
    name: str, model: str, division: tuple[str, ...], num_gpus: int, seconds: tuple[float, float], gpu: str
) -> PublishedRun:
    return PublishedRun(
        table="refits",
        name=f"refit {name}",
        gpu=gpu,
        model=model,
        num_gpus=num_gpus,
        settings=division,
        measured={"refit_s": statistics.fmean(seconds)},
        spread=seconds,
    )


_DEEPSEEK = (*_megatron(ep=16, pp=16, recomputes=True), *_stages(3, 2))
_DEEPSEEK_8 = (*_megatron(ep=16, pp=8, recomputes=True), *_stages(7, 6))
_QWEN_235 = (*_megatron(tp=2, cp=2, ep=16, pp=8, recomputes=True), *_stages(11, 11))
_QWEN_235_AGED = (*_megatron(tp=4, ep=16, pp=8, recomputes=True), *_stages(11, 11))
_QWEN_235_4 = (*_megatron(tp=2, cp=2, ep=16, pp=4, recomputes=True), *_stages(23, 23))

RUNS = (
    _v03("Llama-3.1-8B Megatron", "Llama-3.1-8B", 8, (*_divide(8, 1), *_megatron()), (112, 28, 5, 58, 18), 795),
    _v03("Llama-3.1-8B DTensor", "Llama-3.1-8B", 8, (*_divide(8, 1), *_dtensor(1)), (122, 38, 4, 57, 19), 777),
    _v03(
        "Llama-3.1-70B Megatron",
        "Llama-3.1-70B",
        64,
        (*_divide(64, 4), *_megatron(tp=4, pp=4)),
        (147, 28, 14, 84, 18),
        398,
    ),
    _v03("Llama-3.1-70B DTensor", "Llama-3.1-70B", 64, (*_divide(64, 4), *_dtensor(8)), (230, 97, 15, 82, 28), 395),
    _v03("Qwen3-32B", "Qwen3-32B", 64, (*_divide(64, 4), *_megatron(tp=4, pp=2)), (213, 68, 7, 96, 40), 3283),
    _v03("Qwen3-30B-A3B", "Qwen3-30B-A3B", 64, (*_divide(64, 4), *_megatron(tp=2, ep=8)), (167, 50, 12, 78, 23), 3251),
    _v03(
        "Llama-3.3-70B 16k",
        "Llama-3.1-70B",
        128,
        (*_divide(128, 4), *_megatron(tp=4, pp=4, cp=4)),
        (445, 64, 17, 287, 75),
        749,
        16384,
    ),
    _v06("DeepSeek-V3 256 H100", "DeepSeek-V3", 256, (*_SMALL, *_divide(256, 32), *_DEEPSEEK), 134, 12.1, 701, 1536),
    _v06(
        "DeepSeek-V3 512 H100 one step off",
        "DeepSeek-V3",
        512,
        (*_SMALL, *_divide(512, 32, engines=256), *_DEEPSEEK, *_age(1)),
        64.1,
        12.8,
        710,
        1536,
    ),
    _v06(
        "Qwen3-235B 128 H100", "Qwen3-235B-A22B", 128, (*_SMALL, *_divide(128, 16), *_QWEN_235), 395, 58.9, 5698, 8192
    ),
    _v06(
        "Qwen3-235B 256 H100 one step off",
        "Qwen3-235B-A22B",
        256,
        (*_SMALL, *_divide(256, 8, engines=128), *_QWEN_235_AGED, *_age(1)),
        231,
        58.7,
        5721,
        8192,
    ),
    _v06(
        "Qwen3-30B-A3B 32 H100",
        "Qwen3-30B-A3B",
        32,
        (*_LARGE, *_divide(32, 2), *_megatron(ep=8)),
        192,
        1102,
        3203,
        4096,
    ),
    _v06(
        "Qwen3-30B-A3B 192 H100 eight steps off",
        "Qwen3-30B-A3B",
        192,
        (*_LARGE, *_divide(192, 2, engines=64), *_megatron(ep=8), *_age(8)),
        34.5,
        1025,
        3206,
        4096,
    ),
    _v06(
        "DeepSeek-V3 128 GB200",
        "DeepSeek-V3",
        128,
        (*_SMALL, *_divide(128, 32, per_node=4), *_DEEPSEEK_8, "policy.sequence_packing.enabled=false"),
        108,
        30.2,
        711,
        1536,
        "GB200",
    ),
    _v06(
        "Qwen3-235B 64 GB200",
        "Qwen3-235B-A22B",
        64,
        (*_SMALL, *_divide(64, 8, per_node=4), *_QWEN_235_4),
        286,
        163,
        5709,
        8192,
        "GB200",
    ),
    _refit("Qwen3-4B H100", "Qwen3-4B", (*_divide(16, 8, engines=8), *_megatron()), 16, (0.21, 0.34), "H100"),
    _refit(
        "Qwen3-30B-A3B H100",
        "Qwen3-30B-A3B",
        (*_divide(32, 8, engines=16), *_megatron(ep=8, pp=2)),
        32,
        (0.74, 1.00),
        "H100",
    ),
    _refit("DeepSeek-V3 H100", "DeepSeek-V3", (*_divide(512, 32, engines=256), *_DEEPSEEK), 512, (2.39, 2.83), "H100"),
    _refit(
        "DeepSeek-V3 GB200",
        "DeepSeek-V3",
        (*_divide(512, 32, engines=256, per_node=4), *_DEEPSEEK),
        512,
        (1.93, 2.59),
        "GB200",
    ),
)
"""The rows. What they do not say is from NeMo-RL's own recipes of these runs (parallel sizes of engines, shares of
memory, activations that are recomputed, 128 trainers and 64 engine GPUs of the run eight steps off), or assumed (TP4 of
the 32B's engines; TP4 and PP4 beside CP4)."""


def find_fitted() -> set[str]:
    """Return the names of the rows that are fitted on."""
    names: set[str] = set()
    for table in ("v0.3", "v0.6", "refits"):
        rows = [run.name for run in RUNS if run.table == table]
        rows.sort(key=lambda name: hashlib.sha256(name.encode()).hexdigest())
        names.update(rows[: (len(rows) + 1) // 2])
    return names


class RunPredictor:
    """Predicts a row again and again, with other efficiencies."""

    def __init__(self, run: PublishedRun) -> None:
        self.run, self.config = run, run.config
        self._model: StepModel | None = None

    def predict(self, fitted: FittedEfficiencies, num_steps: int = 2) -> Mapping[Phase, float]:
        """Return the seconds of the phases that are published."""
        model = self.model_of(fitted, num_steps)
        if self.run.table == "refits":
            return {"refit_s": model.refit_s}
        simulated = simulate_model(model)
        return {phase: getattr(simulated, phase) for phase in self.run.measured}

    def simulate(self, num_steps: int) -> SimulatedRun:
        """Return all that is predicted."""
        return simulate_model(self.model_of(EFFICIENCIES, num_steps))

    def model_of(self, fitted: FittedEfficiencies, num_steps: int) -> StepModel:
        """Return the model of a row."""
        run = self.run
        longest = usual_longest(self.config, _PROMPT)
        options = SimulationOptions(
            gpu=find_rates(run.gpu, None, LinkRates()),
            lengths=fit_lengths((run.tokens or 1000) - _PROMPT, longest, _PROMPT),
            num_steps=num_steps,
            fitted=fitted,
        )
        if self._model is None:
            self._model = StepModel(self.config, options)
        model = self._model.replace(options)
        model.trainer.num_scored = _NUM_SCORED
        return model


def measure_loss(predictors: Sequence[RunPredictor], fitted: FittedEfficiencies) -> float:
    """Return the mean squared logarithm of predictions over measurements, a row counting as much as another."""
    total = 0.0
    for predictor in predictors:
        predicted = predictor.predict(fitted, num_steps=1)
        errors = [math.log(predicted[phase] / value) for phase, value in predictor.run.measured.items()]
        total += statistics.fmean(error * error for error in errors)
    prior = sum(
        math.log(getattr(fitted, name) / getattr(_GUESS, name)) ** 2 for name in FittedEfficiencies.__struct_fields__
    )
    return total / len(predictors) + 2e-3 * prior


_GUESS = FittedEfficiencies(
    memory=0.7,
    products=0.4,
    links=0.6,
    expert_columns=64.0,
    decode_s=4e-3,
    sequence_s=2e-5,
    hop_s=1.5e-5,
    far_hop_s=1e-4,
    layer_s=5e-4,
    expert_s=1e-4,
    refit_s=0.3,
    refit_links=0.4,
    step_s=3.0,
    shared_s_per_gb=0.2,
)
"""Values by hand, which the search is loath to leave far behind."""
_START = msgspec.structs.replace(
    _GUESS, memory=0.72, products=0.42, far_hop_s=2.5e-4, refit_s=0.57, refit_links=0.5, shared_s_per_gb=0.25
)
"""Where it begins: by hand, too, after an earlier search in which all-reduces between nodes were no slower on GB200."""
_FIXED = ("step_s",)
"""Not searched for: 3 s are the median of what the v0.3 rows of the half have between their phases."""
_SHARES = ("memory", "products", "links", "refit_links")


def fit(num_rounds: int = 3) -> FittedEfficiencies:
    """Search coordinate by coordinate, with steps that halve."""
    fitted_names = find_fitted()
    predictors = [RunPredictor(run) for run in RUNS if run.name in fitted_names]
    best = _START
    loss, factor = measure_loss(predictors, best), 1.3
    generator = random.Random(0)
    for number in range(num_rounds):
        names = [name for name in FittedEfficiencies.__struct_fields__ if name not in _FIXED]
        generator.shuffle(names)
        before = loss
        for name in names:
            for step in (factor, 1 / factor):
                value = getattr(best, name) * step
                if name in _SHARES:
                    value = min(value, 0.95)
                trial = msgspec.structs.replace(best, **{name: value})
                trial_loss = measure_loss(predictors, trial)
                if trial_loss < loss:
                    best, loss = trial, trial_loss
                    break
        print(f"round {number + 1}: {loss:.4f}", flush=True)
        if loss > before * 0.99:
            factor = math.sqrt(factor)
    return best


# --- tables ----------------------------------------------------------------------------------------------------------


class PublishedPredictions(msgspec.Struct, frozen=True, kw_only=True):
    """Predictions of all rows, as ``--write`` keeps them for the page."""

    fitted: FittedEfficiencies
    seconds: dict[str, dict[str, float]]
    """Predicted seconds of the published phases, by row."""
    tokens: dict[str, float]
    """Predicted tokens/s/GPU, by row."""


def predict_all(num_steps: int = 4) -> PublishedPredictions:
    """Predict every row."""
    seconds: dict[str, dict[str, float]] = {}
    tokens: dict[str, float] = {}
    for run in RUNS:
        predictor = RunPredictor(run)
        if run.table == "refits":
            seconds[run.name] = {"refit_s": predictor.model_of(EFFICIENCIES, 1).refit_s}
            continue
        simulated = predictor.simulate(num_steps)
        seconds[run.name] = {phase: getattr(simulated, phase) for phase in run.measured}
        tokens[run.name] = simulated.tokens_per_s_per_gpu
    return PublishedPredictions(fitted=EFFICIENCIES, seconds=seconds, tokens=tokens)


def read_predictions() -> PublishedPredictions:
    """Return the predictions that ``--write`` kept."""
    return msgspec.json.decode(RESULTS.read_bytes(), type=PublishedPredictions)


def _format_error(predicted: float, measured: float) -> str:
    return f"{predicted / measured - 1:+.0%}"


def _cell(predictions: PublishedPredictions, run: PublishedRun, phase: Phase) -> str:
    """Return what is predicted, what is published, and the error."""
    predicted, measured = predictions.seconds[run.name][phase], run.measured[phase]
    return f"{predicted:.3g} / {measured:.3g} ({_format_error(predicted, measured)})"


def _half(run: PublishedRun, names: set[str]) -> str:
    return "fitted" if run.name in names else "**held out**"


def _write_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    ruler = ["---"] * 2 + ["---:"] * (len(header) - 2)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, ruler, *rows))


def list_phases(predictions: PublishedPredictions) -> str:
    """Return the table of the v0.3 rows."""
    names = find_fitted()
    header = ("v0.3", "half", "step s", "generation", "log-probs", "training", "refit")
    rows = [
        [run.name.removeprefix("v0.3 "), _half(run, names), *(_cell(predictions, run, phase) for phase in PHASES)]
        for run in RUNS
        if run.table == "v0.3"
    ]
    return _write_table(header, rows)


def list_steps(predictions: PublishedPredictions) -> str:
    """Return the table of the v0.6 rows."""
    names = find_fitted()
    rows = []
    for run in RUNS:
        if run.table == "v0.6":
            tokens = f"{predictions.tokens[run.name]:,.4g} / {run.published_tokens:,.4g}"
            rows.append([run.name.removeprefix("v0.6 "), _half(run, names), _cell(predictions, run, "step_s"), tokens])
    return _write_table(("v0.6", "half", "step s", "tokens/s/GPU"), rows)


def list_refits(predictions: PublishedPredictions) -> str:
    """Return the table of refits."""
    names = find_fitted()
    rows = []
    for run in RUNS:
        if run.spread is not None:
            spread = f"{run.spread[0]:.2f} to {run.spread[1]:.2f}"
            cell = _cell(predictions, run, "refit_s")
            rows.append([run.name.removeprefix("refit "), _half(run, names), cell, spread])
    return _write_table(("refit", "half", "s, to the middle", "published"), rows)


def list_errors(predictions: PublishedPredictions) -> str:
    """Return the table of median errors."""
    names = find_fitted()
    kinds: dict[str, tuple[Published | None, tuple[Phase, ...]]] = {
        "steps, both tables": (None, ("step_s",)),
        "steps of v0.3": ("v0.3", ("step_s",)),
        "steps of v0.6": ("v0.6", ("step_s",)),
        "generation": ("v0.3", ("generation_s",)),
        "log-probabilities": ("v0.3", ("logprobs_s",)),
        "training": ("v0.3", ("training_s",)),
        "refits on shared GPUs": ("v0.3", ("refit_s",)),
        "refits between GPUs": ("refits", ("refit_s",)),
        "all": (None, PHASES),
    }
    rows = []
    for name, (table, phases) in kinds.items():
        cells = []
        for is_fitted in (True, False):
            errors = measure_errors(predictions, names, phases, table, is_fitted=is_fitted)
            cells.append(f"{statistics.median(errors):.0%} of {len(errors)}, at most {max(errors):.0%}")
        rows.append([name, *cells])
    return _write_table(("median error of", "fitted half", "held-out half"), rows)


def measure_errors(
    predictions: PublishedPredictions,
    names: set[str],
    phases: Sequence[Phase],
    table: Published | None = None,
    *,
    is_fitted: bool,
) -> list[float]:
    """Return the relative errors of phases in one half."""
    return [
        abs(predictions.seconds[run.name][phase] / run.measured[phase] - 1)
        for run in RUNS
        if (run.name in names) is is_fitted and table in (None, run.table)
        for phase in phases
        if phase in run.measured
    ]


def list_pairs(predictions: PublishedPredictions) -> str:
    """Return the table of splits of the same model: shared GPUs, and GPUs apart."""
    rows = []
    by_name = {run.name: run for run in RUNS}
    for together, apart in PAIRS:
        cells = []
        for ratio in (
            by_name[apart].published_tokens / by_name[together].published_tokens,
            predictions.tokens[apart] / predictions.tokens[together],
        ):
            cells.append(f"{ratio:.2f}")
        rows.append([together.removeprefix("v0.6 "), apart.removeprefix("v0.6 "), *cells])
    return _write_table(("on shared GPUs", "apart", "times the tokens/s/GPU, published", "predicted"), rows)


PAIRS = (
    ("v0.6 DeepSeek-V3 256 H100", "v0.6 DeepSeek-V3 512 H100 one step off"),
    ("v0.6 Qwen3-235B 128 H100", "v0.6 Qwen3-235B 256 H100 one step off"),
    ("v0.6 Qwen3-30B-A3B 32 H100", "v0.6 Qwen3-30B-A3B 192 H100 eight steps off"),
)
TABLES = {"phases": list_phases, "steps": list_steps, "refits": list_refits, "errors": list_errors, "pairs": list_pairs}


def fill_page(page: str, predictions: PublishedPredictions) -> str:
    """Return a page with its tables brought up to date."""
    return _MARKED.sub(lambda match: f"{match[1]}{TABLES[match[2]](predictions)}\n{match[3]}", page)


def main(arguments: Sequence[str]) -> None:
    """Fit, print, or write."""
    os.chdir(ROOT)
    if "--fit" in arguments:
        print(fit())
        return
    predictions = predict_all()
    if "--write" in arguments:
        RESULTS.write_bytes(msgspec.json.format(msgspec.json.encode(predictions)) + b"\n")
        PAGE.write_text(fill_page(PAGE.read_text(), predictions))
    for list_table in TABLES.values():
        print(list_table(predictions), end="\n\n")


if __name__ == "__main__":
    main(sys.argv[1:])
