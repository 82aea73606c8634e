"""The part of ``coordinator plan`` about asynchronous steps: what each age of samples costs and gains.

The rates of a synchronous step come from the command line, and else from the journal of a run of the same
configuration. If they are unknown, the plan says so, and prints what it can without them.

A synchronous step takes G seconds of generation (from the first prompt to the last sample), T of training and R of
refit. The verification of the engines' weights takes A, beside the next generation.

    period(0) = max(G, A) + T + R

Within G, engines do W seconds of work with all of their places taken; the rest is waiting for the longest responses.
Let w samples share a place (w >= 1), and let the longest response be r times as long as the mean.

    W = G w / (w + x + (r - 1 - x) / w),    x = min(r - 1, r (0.8 - r / (4 r - 2))).

If all begin at once (w = 1), the places wait r - 1 mean lengths on average. If many have gone before, each place is
somewhere within its last response. With lengths as below, r r / (4 r - 2) are left of these on average, and about 0.8 r
of the one that ends last.

Let lengths be distributed like powers of a uniform variable. Then this fraction of a step's tokens is generated t
seconds after its generation began, where q = G / W - 1 and s = t / G.

    made(t) = (1 + q) s - q s ^ (1 + 1 / q).

With an age of k, a step's prompts are drawn k steps before it is in progress, as soon as engines are refitted. From
then on, the step takes at least as long as it would alone. It takes longer if engines must first finish earlier draws,
and k refits interrupt them meanwhile. The period is thus the slowest of three cycles.

    period(k) = max(engines, trainers, latency)

- engines: W + R if weights are updated in flight, since a refit alone interrupts engines.
- engines: G + R if they are not, since each version waits until engines have nothing in flight.
- trainers: T + R + A, since trainers step again once engines have their weights, and they their digests.
- latency: (G + B + T) / (k + 1) + R.

B is the rest of the k steps before, drawn P = period(k) seconds apart.

    B = W (1 - made(P - R)) + W (1 - made(2 (P - R))) + ...

The latency is why an age of k makes training at most k + 1 times as fast, whatever the rates. The model leaves out that
steps differ, that concurrent work slows down, validation, and checkpoints. Without updates in flight it is cautious: of
several engines, those without long responses go on before the others.

The age of the weights that generate a token follows, in flight, from when it is generated. A step's generation begins B
after its draw, or, if engines are the limit, so late that it ends just in time. Weights become one step younger after
each period. If engines and trainers take nearly as long, chance decides how far engines run ahead. Not in flight, a
sample keeps the weights that it began with.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Literal

import msgspec
from rich.console import Console
from rich.table import Table

from tandem.common.errors import ConfigError, listed
from tandem.config import Config, config_from_json, differences
from tandem.config.dump import list_length_and_validation
from tandem.observe.run_folder.journal import RefitRecord, StepRecord, read_journal
from tandem.observe.run_folder.journal_file import JOURNAL_NAME

AGES = (0, 1, 2, 4)
"""Ages that are shown beside the configured one."""
BYTES_A_TOKEN = 13
"""Bytes that an engine keeps of a sample's token: its id, a byte of loss mask, a log-probability, a version."""
_FREE = (
    "prerequisite",
    *(f"{name}.{key}" for name in ("grpo", "ppo") for key in (f"async_{name}", "seed")),
    *list_length_and_validation("grpo"),
    *list_length_and_validation("ppo"),
    "data.num_train",
    "data.num_validation",
    "checkpointing",
    "logger",
    "eval",
)
"""Keys, or whole sections, that do not affect the rates of a synchronous step."""
_MOST_NAMED = 3
_NEEDED = {"generation_s", "training_s"}
"""Rates that a prediction needs."""
_GB = 1e9
_EVEN = 0.01
"""Unevenness of lengths below which they count as equal."""
_HALVINGS = 60
"""Halvings of the interval that holds the period."""

Limit = Literal["nothing overlaps", "engines", "trainers", "latency"]


class StepRates(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of a synchronous step, and how evenly its engines are used."""

    generation_s: float
    training_s: float
    """Training, with the log-probabilities before it."""
    refit_s: float = 0.0
    verify_s: float = 0.0
    """Seconds from the refit until digests agree."""
    longest_over_mean: float = 1.0
    """A step's longest response as a multiple of the mean."""
    samples_per_place: float = 1.0
    """A step's samples as a multiple of what engines run at once.

    Less than one counts as one: the engines' speed with more to do than they ever had is unknown.
    """

    @property
    def work_s(self) -> float:
        """Seconds of generation if no engine waited for the longest responses: W."""
        waves, longest = max(1.0, self.samples_per_place), self.longest_over_mean
        at_once = longest - 1.0
        after_many = min(at_once, longest * (0.8 - longest / (4.0 * longest - 2.0)))
        return self.generation_s * waves / (waves + after_many + (at_once - after_many) / waves)

    def predict_generated(self, seconds: float) -> float:
        """Return the fraction of a step's tokens that is generated `seconds` after its generation began."""
        share = min(max(seconds / self.generation_s, 0.0), 1.0)
        unevenness = self.generation_s / self.work_s - 1.0
        if unevenness < _EVEN:
            return share
        power: float = share ** (1.0 + 1.0 / unevenness)
        return (1.0 + unevenness) * share - unevenness * power

    def predict_backlog_s(self, period_s: float, num_steps: int) -> float:
        """Return the remaining work of engines for earlier steps: B.

        The steps began one period after the other, the last of them one period ago.
        """
        return self.work_s * sum(1.0 - self.predict_generated(step * period_s) for step in range(1, num_steps + 1))


class AgePrediction(msgspec.Struct, frozen=True, kw_only=True):
    """The costs and gains of an age."""

    age: int
    period_s: float
    """Seconds of a step."""
    speedup: float
    """Speed as a multiple of synchronous training's."""
    limit: Limit
    """Slowest cycle."""
    share_by_age: tuple[float, ...] | None
    """Fraction of tokens by the age of the weights that generate them: 0 first, `age` last; None if not predicted."""
    engines_idle: float
    """Unused fraction of the engines' capacity."""
    trainers_idle: float
    """Unused fraction of the time."""


def predict(rates: StepRates, age: int, *, in_flight: bool) -> AgePrediction:
    """Predict steps with samples of an age; `in_flight` says whether engines are updated while they generate."""
    synchronous_s = max(rates.generation_s, rates.verify_s) + rates.training_s + rates.refit_s
    period_s, limit = _slowest(rates, age, in_flight) if age else (synchronous_s, "nothing overlaps")
    return AgePrediction(
        age=age,
        period_s=period_s,
        speedup=synchronous_s / period_s,
        limit=limit,
        share_by_age=_share_by_age(rates, age, period_s, limit) if in_flight or age == 0 else None,
        engines_idle=max(0.0, 1.0 - rates.work_s / period_s),
        trainers_idle=max(0.0, 1.0 - rates.training_s / period_s),
    )


def bound_speedup(age: int) -> int:
    """Return the upper bound of the speedup for an age, whatever the rates."""
    return age + 1


def _slowest(rates: StepRates, age: int, in_flight: bool) -> tuple[float, Limit]:
    """Return the period of an age above 0, and its slowest cycle."""

    def cycles(period_s: float) -> dict[Limit, float]:
        generation_s = rates.generation_s + rates.predict_backlog_s(period_s - rates.refit_s, age)
        return {
            "engines": (rates.work_s if in_flight else rates.generation_s) + rates.refit_s,
            "trainers": rates.training_s + rates.refit_s + rates.verify_s,
            "latency": (generation_s + rates.training_s) / (age + 1) + rates.refit_s,
        }

    # A longer period leaves less work of earlier steps: exactly one period is as long as its cycles.
    low_s = max(cycles(math.inf).values())
    high_s = max(cycles(low_s).values())
    for _ in range(_HALVINGS):
        middle_s = (low_s + high_s) / 2
        low_s, high_s = (middle_s, high_s) if max(cycles(middle_s).values()) > middle_s else (low_s, middle_s)
    cycle_seconds = cycles(high_s)
    return high_s, max(cycle_seconds, key=lambda name: cycle_seconds[name])


def _share_by_age(rates: StepRates, age: int, period_s: float, limit: Limit) -> tuple[float, ...]:
    """Return the fraction of tokens by age, 0 first, with weights updated in flight."""
    between_s = period_s - rates.refit_s
    spare_s = (age + 1) * between_s - rates.training_s - rates.generation_s
    begins_s = spare_s if limit == "engines" else rates.predict_backlog_s(between_s, age)
    generated_shares = [0.0, *(rates.predict_generated((step + 1) * between_s - begins_s) for step in range(age)), 1.0]
    return tuple(after - before for before, after in reversed([*pairwise(generated_shares)]))


class GivenRates(msgspec.Struct, frozen=True, kw_only=True):
    """The `StepRates` that the user gives; None for those to be found out."""

    generation_s: float | None = None
    training_s: float | None = None
    refit_s: float | None = None
    longest_over_mean: float | None = None


NOT_GIVEN = GivenRates()


class MeasuredRates(msgspec.Struct, frozen=True, kw_only=True):
    """The `StepRates` that the run folder yields."""

    rates: Mapping[str, float] = {}
    source: str
    """Source of the rates, or why some or all are unknown."""


def print_ages(config: Config, given_rates: GivenRates, predicted_refit_s: float | None, console: Console) -> None:
    """Print the costs and gains of each age; `predicted_refit_s` stands in where no refit was measured."""
    explicit_rates = {name: value for name, value in msgspec.structs.asdict(given_rates).items() if value is not None}
    if config.is_colocated and not {*explicit_rates} >= _NEEDED:
        console.print(
            "  synchronous: generation and training take turns on their devices "
            "(policy.generation.colocated.enabled: true)"
        )
        return
    measured = read_rates(config)
    known_rates = {**measured.rates, **explicit_rates}
    if not {*known_rates} >= _NEEDED:
        _print_unknown(config, measured, console)
        return
    if predicted_refit_s is not None:
        known_rates.setdefault("refit_s", predicted_refit_s)
    rates = rates_of(config, known_rates)
    in_flight = config.updates_in_flight or not config.max_trajectory_age_steps
    updates = "weights are updated in flight" if in_flight else "engines finish what they have before each update"
    console.print(f"asynchronous steps by age, predicted; {updates}")
    console.print(_table(config, [predict(rates, age, in_flight=in_flight) for age in _ages(config)]))
    console.print(f"  {_source(rates, explicit_rates, measured, predicted_refit_s)}", style="dim", soft_wrap=True)
    if (age := _find_first_without_room(config)) is not None:
        console.print(
            f"  from age {age} on engines may wait for room, if responses are as long as they may be: "
            "policy.generation.max_stored_tokens",
            soft_wrap=True,
        )


def rates_of(config: Config, known_rates: Mapping[str, float]) -> StepRates:
    """Return the known rates, completed with the sizes of a configuration."""
    return StepRates(
        **known_rates, samples_per_place=_samples(config) / (config.policy.generation.width * config.cluster.rollouts)
    )


def read_rates(config: Config) -> MeasuredRates:
    """Return the rates of the run in the run folder. Raise `RunFolderError` if its journal cannot be read."""
    folder = Path(config.logger.log_dir)
    if not (folder / JOURNAL_NAME).exists():
        return MeasuredRates(source=f"{folder} holds no run")
    with read_journal(folder) as journal:
        recorded, steps, refits = journal.config_json, journal.steps(), journal.refits()
    try:
        ran = config_from_json(recorded)
    except ConfigError:
        return MeasuredRates(source=f"the run in {folder} is of another release")
    if ran.algorithm != config.algorithm:
        return MeasuredRates(source=f"the run in {folder} is of {ran.algorithm}")
    if differing := differences(ran, config, besides=_FREE):
        more = f" and {len(differing) - _MOST_NAMED} more" if len(differing) > _MOST_NAMED else ""
        return MeasuredRates(source=f"the run in {folder} differs in {', '.join(differing[:_MOST_NAMED])}{more}")
    trained = [step for step in steps if step.step > 0]
    trained = trained[1:] or trained  # the first includes setup
    if not trained:
        return MeasuredRates(source=f"the run in {folder} has trained no step")
    source = f"medians of {len(trained)} step{'s' * (len(trained) > 1)} of the run in {folder}"
    rates = _medians(trained, refits)
    if ran.max_trajectory_age_steps:
        # The seconds of a phase are the time waited for it, not the time it took.
        del rates["generation_s"]
        return MeasuredRates(rates=rates, source=f"{source}, whose generation time is not known: it is asynchronous")
    return MeasuredRates(rates=rates, source=source)


def _medians(steps: Sequence[StepRecord], refits: Sequence[RefitRecord]) -> dict[str, float]:
    """Return the rates of synchronous steps."""

    def median(*names: str) -> float:
        return statistics.median(sum(step.seconds.get(name, 0.0) for name in names) for step in steps)

    lengths = [(step.metrics["max_generation_length"], step.metrics["mean_generation_length"]) for step in steps]
    proofs = [refit.seconds.get("verify", 0.0) + refit.seconds.get("commit", 0.0) for refit in refits]
    return {
        "generation_s": median("generation"),
        "training_s": median("policy_training", "get_logprobs", "value_training", "value_inference"),
        "refit_s": median("refit"),
        "verify_s": statistics.median(proofs) if proofs else 0.0,
        "longest_over_mean": statistics.median(longest / mean for longest, mean in lengths),
    }


def _ages(config: Config) -> list[int]:
    return sorted({*AGES, config.max_trajectory_age_steps})


def _samples(config: Config) -> int:
    """Return the number of samples that are generated at once for a step."""
    section = config.rollout_section
    return section.num_prompts_per_batch * section.num_generations_per_prompt


def _count_stored_tokens(config: Config, age: int) -> int:
    """Return the most tokens that engines keep: for the step in progress, and those that are generated ahead."""
    return (age + 1) * _samples(config) * config.policy.max_total_sequence_length


def _find_first_without_room(config: Config) -> int | None:
    """Return the lowest age at which engines may run out of room."""
    room = config.policy.generation.max_stored_tokens * config.cluster.rollouts
    return next((age for age in _ages(config) if _count_stored_tokens(config, age) > room), None)


# --- for people ------------------------------------------------------------------------------------------------------


def _print_unknown(config: Config, measured: MeasuredRates, console: Console) -> None:
    """Print that no rates are known, and what is known without them."""
    ages = [age for age in _ages(config) if age]
    console.print(
        f"  asynchronous: rates are not known: {measured.source}; give --generation-s and --training-s",
        soft_wrap=True,
    )
    sizes = (f"{_count_stored_tokens(config, age) * BYTES_A_TOKEN / _GB:.2g}" for age in ages)
    console.print(
        f"  with ages of {listed(ages)}, at most {listed(map(bound_speedup, ages))} times as fast, and at most "
        f"{listed(sizes)} GB of samples kept",
        soft_wrap=True,
    )


def _table(config: Config, predictions: Sequence[AgePrediction]) -> Table:
    """Return a table with a row for each age."""
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    columns = ("age", "step", "times as fast", "tokens by age 0, 1, ...", "engines idle", "trainers idle", "GB kept")
    for column in (*columns, "limited by"):
        table.add_column(column, justify="left" if column in ("limited by", columns[3]) else "right", no_wrap=True)
    for prediction in predictions:
        table.add_row(
            f"{prediction.age} (configured)"
            if prediction.age == config.max_trajectory_age_steps
            else f"{prediction.age}",
            f"{prediction.period_s:.3g} s",
            f"{prediction.speedup:.2f}",
            "of one sample the same" if prediction.share_by_age is None else _shares(prediction.share_by_age),
            f"{prediction.engines_idle:.0%}",
            f"{prediction.trainers_idle:.0%}",
            f"{_count_stored_tokens(config, prediction.age) * BYTES_A_TOKEN / _GB:.2g}",
            prediction.limit,
        )
    return table


def _shares(share_by_age: Sequence[float]) -> str:
    return " ".join(f"{share:.0%}" for share in share_by_age)


def _source(
    rates: StepRates, explicit_rates: Mapping[str, float], measured: MeasuredRates, predicted_refit_s: float | None
) -> str:
    """Describe the sources of the predictions."""
    sources = [*(["as given"] if explicit_rates else []), *([measured.source] if measured.rates else [])]
    known_rates, refit, longest = {**measured.rates, **explicit_rates}, "", ""
    if "refit_s" not in known_rates:
        refit = " (not known)" if predicted_refit_s is None else " (as predicted below)"
    if "longest_over_mean" not in known_rates:
        longest = " (not known: --longest-over-mean)"
    return (
        f"from generation {rates.generation_s:.3g} s, training {rates.training_s:.3g} s, refit {rates.refit_s:.3g} s"
        f"{refit}, the longest response {rates.longest_over_mean:.3g} × the mean{longest}: {', else '.join(sources)}"
    )
