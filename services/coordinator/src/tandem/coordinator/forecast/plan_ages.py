"""The part of ``coordinator plan`` about asynchronous steps: what each age would cost and gain.

The rates of a synchronous step come from the command line, and else from the journal of a run of the same
configuration. `tandem.coordinator.forecast.ages` predicts from them. If they are unknown, the plan says so, and prints
what it can without them.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from tandem.common.errors import ConfigError, listed
from tandem.config import Config, config_from_json, differences
from tandem.config.dump import list_length_and_validation
from tandem.coordinator.forecast.ages import AgePrediction, StepRates, bound_speedup, predict
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
