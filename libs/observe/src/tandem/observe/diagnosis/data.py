"""Checks for data memorised or unreadable, and responses that are cut off, grow or shrink."""

from __future__ import annotations

import re
import statistics
import string
from collections import Counter

from tandem.observe import health
from tandem.observe.diagnosis.evidence import (
    SHORT_RUN,
    DiagnosisFinding,
    RunEvidence,
    change,
    jump,
    select_held_out,
    shorten,
)
from tandem.observe.health import learning_rate_keys

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
MOST_TRUNCATED = 0.5
"""Share of cut-off responses, in the last quarter of a run, from which the run mostly learns from those."""
GROWTH = 2.0
"""Length of grown responses as a multiple of their early length."""
SHRINKAGE = 0.25
"""Length of shrunk responses as a fraction of their early length."""
SHORTEST = 4.0
"""Least early length, in tokens, of responses that can count as shrunk."""
LOW_TEMPERATURE = 0.3
"""Temperature below which samples of a prompt are alike from the start."""
MOST_ALIKE = 0.75
"""Share of groups without spread in the first steps from which samples count as alike."""
MOST_STOPPED = 0.9
"""Share of the first step's samples that a stop string ended."""
_OF_NO_ANSWER = (
    "low entropy",
    "equal rewards",
    "one answer to everything",
    "groups without spread",
    "no gradient",
    "no progress",
)
_LENGTH, _TRUNCATED = "mean_generation_length", "truncated_fraction"


def find_truncated_responses(evidence: RunEvidence) -> DiagnosisFinding | None:
    """Find responses that the token limit cuts off."""
    condition, streak, course = (
        evidence.condition(_TRUNCATED),
        evidence.streak(_TRUNCATED),
        change(evidence, _TRUNCATED),
    )
    if condition is None or course is None or (streak is None and course.late < MOST_TRUNCATED):
        return None
    limit = evidence.config.policy.generation.max_new_tokens
    was_so, rise = evidence.points(_TRUNCATED)[0][1] >= MOST_TRUNCATED, jump(evidence, _TRUNCATED)
    lines = [
        *([str(streak)] if streak is not None else []),
        f"{course if was_so or rise is None else rise}; {MOST_TRUNCATED:g} is the threshold",
        f"policy.generation.max_new_tokens is {limit}",
    ]
    return DiagnosisFinding(
        name="truncated responses",
        what="Most responses are cut off before they end, so that their answers are never seen"
        + (", from the start." if was_so else "."),
        evidence=tuple(lines),
        look_at=condition.look_at,
        certainty="certain" if streak is not None else "likely",
        since=evidence.first_step if was_so else rise.step if rise is not None else course.first_late,
        explains=_OF_NO_ANSWER if was_so else (),
    )


def find_growing_responses(evidence: RunEvidence) -> DiagnosisFinding | None:
    """Find responses that grow without getting better, or up to their limit."""
    length, cut, reward = (change(evidence, name) for name in (_LENGTH, _TRUNCATED, "accuracy"))
    if length is None or cut is None or length.late < GROWTH * length.early:
        return None
    gets_better = reward is not None and reward.late > reward.early
    if cut.late < max(MOST_TRUNCATED, cut.early) and gets_better:
        return None
    onsets = [onset.step for name in (_LENGTH, _TRUNCATED) if (onset := jump(evidence, name)) is not None]
    return DiagnosisFinding(
        name="growing responses",
        what="Responses keep growing, and their answers get no better.",
        evidence=(
            f"{length} tokens; {GROWTH:g} times as long is the threshold",
            str(cut),
            *([str(reward)] if reward is not None else []),
        ),
        look_at=f"{evidence.config.environment_keys}, which may reward length; grpo.reward_shaping, "
        "grpo.overlong_filtering and loss_fn.token_level_loss",
        certainty="likely",
        since=min(onsets, default=evidence.first_step),
        explains=("truncated responses",),
    )


def find_shrinking_responses(evidence: RunEvidence) -> DiagnosisFinding | None:
    """Find responses that have shrunk to next to nothing."""
    length = change(evidence, _LENGTH)
    if length is None or length.early < SHORTEST or length.late > SHRINKAGE * length.early:
        return None
    return DiagnosisFinding(
        name="responses shrink",
        what="Responses have become much shorter: the policy says next to nothing any more.",
        evidence=(f"{length} tokens; {SHRINKAGE:.0%} of what it was is the threshold",),
        look_at=f"{evidence.config.environment_keys}, which may reward brevity, and grpo.reward_shaping",
        certainty="possible",
        since=length.first_late,
    )


def find_low_temperature(evidence: RunEvidence) -> DiagnosisFinding | None:
    """Find a temperature so low that samples of a prompt are alike before training."""
    config, alike = evidence.config, evidence.points("groups_without_spread")
    if not config.declaration.rolls_out or len(alike) < SHORT_RUN:
        return None
    temperature = config.policy.generation.temperature
    share = statistics.median(value for _, value in alike[:SHORT_RUN])
    if temperature > LOW_TEMPERATURE or share < MOST_ALIKE:
        return None
    return DiagnosisFinding(
        name="low temperature",
        what="The temperature is so low that samples of a prompt are alike from the start: there is nothing to "
        "compare.",
        evidence=(
            f"policy.generation.temperature is {temperature:g}; {LOW_TEMPERATURE:g} is the threshold, 1 is usual",
            f"groups_without_spread was {share:.4g} in the first {SHORT_RUN} steps; {MOST_ALIKE:g} is the threshold",
        ),
        look_at="policy.generation.temperature",
        certainty="certain",
        since=evidence.first_step,
        explains=(
            "learning rate too large",
            "low entropy",
            "groups without spread",
            "equal rewards",
            "no gradient",
            "no progress",
        ),
    )


def find_early_stop(evidence: RunEvidence) -> DiagnosisFinding | None:
    """Find stop strings that end nearly every response before its answer."""
    if not evidence.samples or not evidence.config.declaration.rolls_out:
        return None
    strings = evidence.config.policy.generation.stop_strings or ()
    first = [row for row in evidence.samples if row.step == evidence.samples[0].step]
    stopped = [row for row in first if row.response.endswith(tuple(strings))] if strings else []
    right = max((value for _, value in evidence.points("accuracy")), default=0.0)
    if len(stopped) < MOST_STOPPED * len(first) or right > 0:
        return None
    return DiagnosisFinding(
        name="responses stop too early",
        what="A stop string ends nearly every response, and none was ever right: it comes before the answer.",
        evidence=(
            f"step {first[0].step}: {len(stopped)} of {len(first)} samples end with one of {[*strings]!r}, such as "
            f"{shorten(stopped[0].response, 80)!r} ({MOST_STOPPED:.0%} is the threshold)",
        ),
        look_at="policy.generation.stop_strings",
        certainty="likely",
        since=evidence.first_step,
        explains=_OF_NO_ANSWER,
    )


def find_another_tokenizer(evidence: RunEvidence) -> DiagnosisFinding | None:
    """Find a tokenizer that is not the model's own, if the model hardly answers from the start."""
    policy, accuracy = evidence.config.policy, evidence.points("accuracy")
    name = policy.tokenizer.name
    if not name or name == policy.model_name or len(accuracy) < SHORT_RUN:
        return None
    best = max(value for _, value in accuracy[:SHORT_RUN])
    if best > health.STILL_LOW:
        return None
    return DiagnosisFinding(
        name="another tokenizer",
        what="The tokenizer is not the model's own, and the model hardly answers with it: it confuses the tokens.",
        evidence=(
            f"policy.tokenizer.name is {shorten(name)}, policy.model_name {shorten(policy.model_name)}",
            f"accuracy was {best:.4g} at best in the first {SHORT_RUN} steps ({health.STILL_LOW:g} is the threshold)",
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
    course = health.no_progress(accuracy) if evidence.config.declaration.rolls_out else None
    if course is None:
        return None
    if course.endswith(health.FELL):
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
