"""Checks for data that the model has memorised, or cannot read."""

from __future__ import annotations

import re
import statistics
import string
from collections import Counter

from tandem.observe import held_out_accuracy
from tandem.observe.diagnosis.evidence import SHORT_RUN, RunEvidence, change, select_held_out, shorten
from tandem.observe.diagnosis.finding import DiagnosisFinding
from tandem.observe.health_conditions import learning_rate_keys

GAP_OF_ACCURACIES = 0.3
"""Difference of training and held-out accuracy from which problems count as memorised."""
REPEATS = 4
"""Number of times that each problem was drawn in the examined steps, from which few problems are left to learn."""
TOLD_SHARE, LEAST_PROMPTS, LEAST_ANSWERS = 0.9, 8, 3
"""Share of prompts that tell their answer at one place, and least numbers of prompts and different answers, from which
answers are leaked."""
_ANSWER = re.compile(r"answer(?![\w])")
_CALLED = re.compile(r"(?i)(?:\banswer|\bsolution|####)(?: is)?\W{0,4}$")
_LEAD, _SHOWN = 24, 160
"""Characters examined before an answer, and shown of a prompt."""
RISE_OF_LOSS = 0.1
"""Rise of the held-out loss above its minimum, as a fraction, from which data count as memorised."""
OUTLYING = 100.0
"""Multiple of the usual loss from which a step's loss is named."""


def find_another_tokenizer(evidence: RunEvidence) -> DiagnosisFinding | None:
    """Find a tokenizer that is not the model's own, if the model hardly answers from the start."""
    policy, accuracy = evidence.config.policy, evidence.points("accuracy")
    name = policy.tokenizer.name
    if not name or name == policy.model_name or len(accuracy) < SHORT_RUN:
        return None
    best = max(value for _, value in accuracy[:SHORT_RUN])
    if best > held_out_accuracy.STILL_LOW:
        return None
    return DiagnosisFinding(
        name="another tokenizer",
        what="The tokenizer is not the model's own, and the model hardly answers with it: it confuses the tokens.",
        evidence=(
            f"policy.tokenizer.name is {shorten(name)}, policy.model_name {shorten(policy.model_name)}",
            f"accuracy was {best:.4g} at best in the first {SHORT_RUN} steps "
            f"({held_out_accuracy.STILL_LOW:g} is the threshold)",
        ),
        look_at="policy.tokenizer.name; null takes the model's own",
        certainty="likely",
        since=evidence.first_step,
        explains=("equal rewards", "groups without spread", "truncated responses", "no gradient", "no progress"),
    )


def find_leaked_answer(evidence: RunEvidence) -> DiagnosisFinding | None:
    """Find prompts that tell the model the answer."""
    template = evidence.config.data.prompt_template
    in_template = _fills_answer(template)
    if in_template:
        lines, look_at = [f"data.prompt_template is {shorten(template)!r}"], "data.prompt_template"
    else:
        leak_lines = _describe_leak(evidence)
        if leak_lines is None:
            return None
        lines, look_at = leak_lines, "the source of the data, data.prompt_template and data.input_key"
    return DiagnosisFinding(
        name="leaked answer",
        what="Prompts contain the answer: the model learns to copy it, not to find it.",
        evidence=tuple(lines),
        look_at=look_at,
        certainty="certain" if in_template else "likely",
        since=evidence.first_step,
        explains=(
            *("equal rewards", "groups without spread", "no gradient", "low entropy", "repeated problems"),
            *("reward without accuracy", "no progress"),
        ),
    )


def _fills_answer(template: str) -> bool:
    """Return whether a template, which may also name a function, has a place for the answer."""
    try:
        return any(field is not None and _ANSWER.match(field) for _, field, *_ in string.Formatter().parse(template))
    except ValueError:
        return False


def _describe_leak(evidence: RunEvidence) -> list[str] | None:
    """Return how the prompts of the first recorded step tell their answers; None if they do not.

    A task may well have its answer somewhere in the question: in a passage, or among choices. A leak is at the same
    place in every prompt: followed by the same text up to the end, or called the answer.
    """
    row_of_problem = {row.problem_id: row for row in evidence.samples if row.prompt and row.reference_answer}
    if (
        len(row_of_problem) < LEAST_PROMPTS
        or len({row.reference_answer for row in row_of_problem.values()}) < LEAST_ANSWERS
    ):
        return None
    places: Counter[str] = Counter()
    for row in row_of_problem.values():
        answer = rf"(?<![\w.-]){re.escape(row.reference_answer)}(?!\w|\.\d)"
        matches = [*re.finditer(answer, row.prompt)]
        if not matches:
            continue
        if any(_CALLED.search(row.prompt[: each.start()][-_LEAD:]) for each in matches):
            places["called the answer"] += 1
        places[f"before {row.prompt[matches[-1].end() :]!r}" if row.prompt[matches[-1].end() :] else "at the end"] += 1
    ((place, count),) = places.most_common(1) or [("", 0)]
    if count < TOLD_SHARE * len(row_of_problem):
        return None
    row = next(iter(row_of_problem.values()))
    return [
        f"step {row.step}: {count} of {len(row_of_problem)} prompts have their problem's reference answer at one "
        f"place, {shorten(place, 80)} ({TOLD_SHARE:.0%} is the threshold)",
        f"for example {shorten(row.prompt[-_SHOWN:], _SHOWN)!r}, where the answer is "
        f"{shorten(row.reference_answer, 40)!r}",
    ]


def find_repeated_problems(evidence: RunEvidence) -> DiagnosisFinding | None:
    """Find problems that were drawn again and again, and may be memorised."""
    places = {(row.step, row.group): row.problem_id for row in evidence.samples}
    distinct = len({*places.values()})
    if not distinct or len(places) < REPEATS * distinct:
        return None
    train, val_points = evidence.points("accuracy"), select_held_out(evidence, "val_accuracy")
    lines = [
        f"the {len(places)} groups of the examined steps have only {distinct} different problems "
        f"({REPEATS} groups per problem is the threshold)"
    ]
    by_heart = bool(train and val_points) and train[-1][1] - val_points[-1][1] >= GAP_OF_ACCURACIES
    if train and val_points:
        lines.append(
            f"the last accuracy is {train[-1][1]:.4g} in training, {val_points[-1][1]:.4g} on held-out problems"
        )
    return DiagnosisFinding(
        name="repeated problems",
        what="The same few problems come again and again"
        + (", and the model has memorised them." if by_heart else "."),
        evidence=tuple(lines),
        look_at="data.num_train, and the source of the data",
        certainty="likely" if by_heart else "possible",
        explains=("no progress",) if by_heart else (),
    )


def find_overfitting(evidence: RunEvidence) -> DiagnosisFinding | None:
    """Find a held-out loss that rises while the training loss falls."""
    loss, val_points = change(evidence, "loss"), select_held_out(evidence, "val_loss")
    if loss is None or len(val_points) < 2 or evidence.config.declaration.rolls_out:
        return None
    best_step, best = min(val_points, key=lambda point: point[1])
    if val_points[-1][1] < (1 + RISE_OF_LOSS) * best or loss.late >= loss.early:
        return None
    return DiagnosisFinding(
        name="overfitting",
        what="The held-out loss rises while the training loss falls: the model memorises the data.",
        evidence=(str(loss), f"val_loss was {best:.4g} in step {best_step}, and is {val_points[-1][1]:.4g} at last"),
        look_at=f"{evidence.config.algorithm}.max_num_epochs, {evidence.config.algorithm}.max_num_steps, and data",
        certainty="likely",
        since=best_step + 1,
    )


def _largest_loss(evidence: RunEvidence) -> tuple[str, ...]:
    """Name the loss that is out of all proportion to those of the other steps, if there is one."""
    losses = [(record.step, record.metrics["loss"]) for record in evidence.steps if "loss" in record.metrics]
    if len(losses) < SHORT_RUN:
        return ()
    step, largest = max(losses, key=lambda pair: abs(pair[1]))
    usual = statistics.median(abs(value) for _, value in losses)
    return (
        (f"the loss was {largest:,.4g} in step {step}, and {usual:.3g} in the median",)
        if (abs(largest) > OUTLYING * max(usual, 1e-3))
        else ()
    )


def find_no_progress(evidence: RunEvidence) -> DiagnosisFinding | None:
    """Find held-out accuracy that stays near zero, or does not rise, after many steps."""
    accuracy = select_held_out(evidence, "val_accuracy")
    course = held_out_accuracy.no_progress(accuracy) if evidence.config.declaration.rolls_out else None
    if course is None:
        return None
    if course.endswith(held_out_accuracy.FELL):
        return DiagnosisFinding(
            name="no progress",
            what="The run got worse: held-out accuracy fell.",
            evidence=(course, *_largest_loss(evidence)),
            look_at=f"{learning_rate_keys(evidence.config)}, loss_fn, policy.max_grad_norm, and the steps before it",
            certainty="likely",
            since=accuracy[-1][0],
        )
    return DiagnosisFinding(
        name="no progress",
        what="The run learned next to nothing.",
        evidence=(course,),
        look_at="SFT before the run (prerequisite, docs/how_much_sft.md), hard data, data.prompt_template, "
        f"{evidence.config.environment_keys}, and {learning_rate_keys(evidence.config)}",
        certainty="likely",
        since=accuracy[-1][0],
    )
