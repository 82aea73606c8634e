"""Checks for rewards that teach nothing, or that rise without the task being learned."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from tandem.observe.diagnosis.evidence import RunEvidence, SampleRow, change, name_steps, select_held_out, shorten
from tandem.observe.diagnosis.finding import DiagnosisFinding

MOST_GROUPS = 0.9
"""Share of groups without spread, in the last quarter of a run, from which almost nothing is learned."""
RISE, FALL = 0.1, 0.1
"""Rise of rewards, and fall of held-out accuracy, from which the reward is not the intended one."""
SAME_SHARE, SAME_PROBLEMS = 0.5, 3
"""Share of a step's samples with the same response, and number of their problems, from which it is a habit."""
BEYOND_ANSWERS = 1.5
"""Least ratio of that share to the share of the most common reference answer: with yes-or-no questions, half of the
responses may well be equal."""
MANY_RIGHT, LEAST_RIGHT = 0.1, 8
"""Share of samples that contain their problem's answer, beyond those that contain another problem's, and their number,
from which rewards can be judged by it."""
_FIRST_STEPS = 3
_OF_A_WRONG_REWARD = (
    "equal rewards",
    "groups without spread",
    "no gradient",
    "low entropy",
    "truncated responses",
    "growing responses",
    "responses shrink",
    "one answer to everything",
    "no progress",
)
WRONG_WAY = 0.5
"""Share of the range of rewards by which right answers must get less for the reward to be the wrong way round."""
_GRADIENT = ("groups without spread", "no gradient", "no progress")


def find_equal_rewards(evidence: RunEvidence) -> DiagnosisFinding | None:
    """Find steps in which all samples have the same reward."""
    streak = evidence.streak("reward_max")
    if streak is None:
        return None
    values = {record.metrics["reward_max"] for record in streak.steps}
    correct = streak.steps[-1].metrics.get("accuracy", 0.0)
    if correct == 1:
        description = "Every response is right: there is nothing left to learn from these problems."
    elif values == {0.0}:
        description = (
            "No response was ever rewarded: the environment never finds what it looks for, or problems are too hard."
        )
    else:
        description = "All responses have the same reward: no sample is better than another, and nothing is learned."
    lines = [str(streak), *_examples(evidence)]
    return DiagnosisFinding(
        name="equal rewards",
        what=description,
        evidence=tuple(lines),
        look_at="data, which may be harder" if correct == 1 else streak.condition.look_at,
        certainty="certain",
        since=evidence.first_step if evidence.is_solved else streak.first,
        explains=(*_GRADIENT, "low entropy") if evidence.is_solved else _GRADIENT,
    )


def _examples(evidence: RunEvidence) -> list[str]:
    """Return an example of an answer from the last recorded step."""
    last = [row for row in evidence.samples if row.response][-1:]
    return [f"for example, in step {row.step}: {shorten(row.response, 80)!r} (reward {row.reward:g})" for row in last]


def find_groups_without_spread(evidence: RunEvidence) -> DiagnosisFinding | None:
    """Find steps in which each group has one reward."""
    name = "groups_without_spread"
    condition, streak, course = evidence.condition(name), evidence.streak(name), change(evidence, name)
    if condition is None or course is None or (streak is None and course.late < MOST_GROUPS):
        return None
    lines = [str(streak)] if streak is not None else []
    since = streak.first if streak is not None else course.first_late
    return DiagnosisFinding(
        name="groups without spread",
        what="The samples of a prompt have the same reward, so that their advantages are 0 and they teach nothing."
        + (" The problems were solved from the start: they are too easy." if evidence.is_solved else ""),
        evidence=(*lines, f"{course}; {MOST_GROUPS:g} is the threshold"),
        look_at=f"{condition.look_at}; grpo.use_dynamic_sampling leaves such groups out",
        certainty="certain" if streak is not None else "likely",
        since=evidence.first_step if evidence.is_solved else since,
        explains=("no gradient", "low entropy", "no progress")
        if evidence.is_solved
        else ("no gradient", "no progress"),
    )


def find_one_answer(evidence: RunEvidence) -> DiagnosisFinding | None:
    """Find a response that is given to every prompt."""
    if not evidence.samples:
        return None
    last = [row for row in evidence.samples if row.step == evidence.samples[-1].step]
    ((response, count),) = Counter(row.response for row in last).most_common(1)
    same_rows = [row for row in last if row.response == response]
    problems = {row.problem_id for row in same_rows}
    threshold = _habitual_share(last)
    if count < threshold * len(last) or len(problems) < SAME_PROBLEMS:
        return None
    worth = sum(row.reward for row in same_rows) / count
    before = [row for row in evidence.samples if row.step == evidence.samples[0].step]
    was = sum(row.reward for row in before) / len(before)
    pays = worth > was and worth >= sum(row.reward for row in last) / len(last)
    return DiagnosisFinding(
        name="one answer to everything",
        what="The policy gives the same response to every prompt"
        + (", and is rewarded for it: the reward does not measure the task." if pays else "."),
        evidence=(
            f"step {last[0].step}: {count} of {len(last)} samples, to {len(problems)} problems, are "
            f"{shorten(response, 80)!r} ({threshold:.0%} is the threshold)",
            f"its mean reward is {worth:.4g}; that of all samples of step {before[0].step} was {was:.4g}",
        ),
        look_at=f"{evidence.config.environment_keys}, loss_fn.reference_policy_kl_penalty and "
        "policy.generation.temperature",
        certainty="likely",
        since=last[0].step if last[0].step == before[0].step else before[0].step + 1,
        explains=("low entropy", "groups without spread", "equal rewards", "responses shrink") if pays else (),
    )


def _habitual_share(rows: Sequence[SampleRow]) -> float:
    """Return the share of samples with one response that makes it a habit, given how few answers the problems have."""
    ((answer, count),) = Counter(row.reference_answer for row in rows).most_common(1)
    return max(SAME_SHARE, min(1.0, BEYOND_ANSWERS * count / len(rows))) if answer else SAME_SHARE


def find_reward_without_accuracy(evidence: RunEvidence) -> DiagnosisFinding | None:
    """Find rewards that rise while held-out accuracy falls."""
    reward, val_points = change(evidence, "reward"), select_held_out(evidence, "val_accuracy")
    if reward is None or len(val_points) < 2:
        return None
    best_step, best = max(val_points, key=lambda point: point[1])
    if reward.late - reward.early < RISE or best - val_points[-1][1] < FALL:
        return None
    return DiagnosisFinding(
        name="reward without accuracy",
        what="Rewards rise in training while accuracy on held-out problems falls: the reward can be had without "
        "solving them, or the training problems are memorised.",
        evidence=(
            str(reward),
            f"val_accuracy was {best:.4g} in step {best_step}, and is {val_points[-1][1]:.4g} at last",
        ),
        look_at=f"{evidence.config.environment_keys}, data.num_train, and coordinator samples for what is rewarded",
        certainty="likely",
        since=evidence.first_step,
        explains=_OF_A_WRONG_REWARD,
    )


def find_against_the_answers(evidence: RunEvidence) -> DiagnosisFinding | None:
    """Find rewards that do not go to responses with the reference answer, in the first recorded steps."""
    steps = sorted({row.step for row in evidence.samples})[:_FIRST_STEPS]
    rows = [row for row in evidence.samples if row.step in steps and row.reference_answer and not row.failure]
    right = [row for row in rows if _has(row.response, row.reference_answer)]
    wrong = [row for row in rows if not _has(row.response, row.reference_answer)]
    if len(right) < LEAST_RIGHT or not wrong:
        return None
    # Another problem's answer in a response is chance.
    chance = sum(_has(row.response, next_.reference_answer) for row, next_ in zip(rows, _shift(rows), strict=True))
    if len(right) - chance < MANY_RIGHT * len(rows):
        return None
    worth, wrong_worth = (sum(row.reward for row in each) / len(each) for each in (right, wrong))
    highest = max(row.reward for row in rows)
    lowest = min(row.reward for row in rows)
    unrewarded = lowest == highest == 0
    if not unrewarded and (lowest == highest or wrong_worth - worth < WRONG_WAY * (highest - lowest)):
        return None
    return DiagnosisFinding(
        name="right answers unrewarded" if unrewarded else "reward against the answers",
        what="Responses have the right answer, but the environment never rewards them: it expects another form."
        if unrewarded
        else "Responses with the right answer get less than those without it: the reward is the wrong way round.",
        evidence=(
            f"{name_steps(steps[0], steps[-1])}: {len(right)} of {len(rows)} samples have their problem's reference "
            f"answer, {chance} that of another problem",
            f"the mean reward of these is {worth:.4g}, of the others {wrong_worth:.4g}; for example "
            f"{shorten(right[0].response, 80)!r}, where the answer is {shorten(right[0].reference_answer, 40)!r}",
        ),
        look_at=f"{evidence.config.environment_keys}, and coordinator samples for what is rewarded",
        certainty="certain" if not unrewarded else "likely",
        since=evidence.first_step,
        explains=(*_OF_A_WRONG_REWARD, "reward without accuracy"),
    )


def _has(response: str, answer: str) -> bool:
    """Return whether a response contains an answer as a separate word or number."""
    return re.search(rf"(?<![\w.-]){re.escape(answer)}(?![\w]|\.\d)", response) is not None


def _shift(rows: list[SampleRow]) -> list[SampleRow]:
    """Return for each sample one of another problem, with another answer if possible."""
    ordered = [*rows[len(rows) // 2 :], *rows[: len(rows) // 2]]
    return [
        next((each for each in (shifted_row, *ordered) if each.reference_answer != row.reference_answer), shifted_row)
        for row, shifted_row in zip(rows, ordered, strict=True)
    ]
