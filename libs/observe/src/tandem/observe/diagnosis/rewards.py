"""Checks for rewards that teach nothing or mislead, and for an environment that fails or is slow."""

from __future__ import annotations

import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence

from tandem.observe.diagnosis.evidence import (
    Certainty,
    DiagnosisFinding,
    RunEvidence,
    SampleRow,
    change,
    name_steps,
    select_held_out,
    shorten,
)

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
FAILURE_SHARES: tuple[tuple[float, Certainty], ...] = ((0.5, "certain"), (0.1, "likely"), (0.02, "possible"))
"""Share of samples that the environment failed on, with the certainty that this is the cause."""
SLOW_SHARE = 0.5
"""Share of a step, without validation, for which samples wait for the environment."""
_LEAST_SAMPLES, _LEAST_STEPS, _TOGETHER_S = 4, 3, 0.05
"""Least samples of one length that an engine started together, least steps with such, longest time between starts."""
_ENVIRONMENT = re.compile(r"environment '")
_QUOTED = re.compile(r"(environment '[^']*')|'[^']*'|\"[^\"]*\"")


def find_failing_environment(evidence: RunEvidence) -> DiagnosisFinding | None:
    """Find samples that the environment could not score."""
    config, ending = evidence.config, evidence.ending
    if not config.declaration.rolls_out:
        return None
    texts = Counter(_cause(row.failure) for row in evidence.samples if row.failure)
    lines = [f"{count} recorded samples: {text}" for text, count in texts.most_common(2)]
    is_agent = config.agent is not None
    who, part = ("agent", "command") if is_agent else ("environment", "class")
    keys = f"{config.environment_keys}: its {part}, timeout_s and on_error"
    if ending is not None and ending.outcome == "failed" and _ENVIRONMENT.search(ending.reason):
        return DiagnosisFinding(
            name=f"failing {who}",
            what=f"The {who} failed on {'an episode' if is_agent else 'a response'}, which ended the run.",
            evidence=(shorten(ending.reason, 600), *lines),
            look_at=f"{keys} (zero and drop let the run go on)",
            certainty="certain",
            explains=("run failed",),
        )
    points = evidence.points("environment_failures")
    failed = sum(value for _, value in points)
    late = sum(value for _, value in evidence.points("environment_timeouts"))
    size = config.rollout_section.num_prompts_per_step * config.rollout_section.num_generations_per_prompt
    share = min(1.0, failed / max(1, size * len(evidence.steps)))
    certainty = next((certainty for least, certainty in FAILURE_SHARES if share >= least), None)
    if certainty is None:
        return None
    return DiagnosisFinding(
        name=f"failing {who}",
        what=f"The {who} {'failed on' if is_agent else 'could not score'} {share:.0%} of the samples"
        + (", mostly because it took too long." if late > failed / 2 else "."),
        evidence=(
            f"{failed:.0f} failures in {name_steps(points[0][0], points[-1][0])}, {late:.0f} of them timeouts "
            f"({FAILURE_SHARES[-1][0]:.0%} of all samples is the threshold)",
            *lines,
        ),
        look_at=f"{keys}, and logs/rollout-0.log",
        certainty=certainty,
        since=points[0][0],
        explains=("equal rewards", "groups without spread", "no gradient", "no progress"),
    )


def find_slow_environment(evidence: RunEvidence) -> DiagnosisFinding | None:
    """Find an environment that scores one response after another, which takes most of a step.

    An engine generates samples of equal length that it started together in equal times; any difference is spent in the
    environment. That holds only if no sample waits for a free slot in the engine, which is not recorded.
    """
    config = evidence.config
    if not config.declaration.rolls_out or config.agent is not None or config.max_trajectory_age_steps:
        return None
    records = {record.step: record for record in evidence.steps}
    waits = []
    for step in sorted({row.step for row in evidence.samples} & records.keys()):
        at_once = Counter(row.rollout for row in evidence.samples if row.step == step)
        if max(at_once.values()) > config.policy.generation.width:
            continue
        begun: dict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)
        for row in evidence.samples:
            if row.step == step:
                begun[row.rollout, row.response_length].append((row.started_at, row.finished_at))
        alike = [each for each in begun.values() if max(each)[0] - min(each)[0] <= _TOGETHER_S]
        ends = [[end for _, end in each] for each in alike if len(each) >= _LEAST_SAMPLES]
        seconds = records[step].seconds
        total = seconds.get("total", 0.0) - seconds.get("validation", 0.0)
        if ends and total > 0:
            waits.append((step, max(max(each) - min(each) for each in ends), total))
    slow = [step for step, wait, total in waits if wait >= SLOW_SHARE * total]
    if len(slow) < max(_LEAST_STEPS, len(waits) / 2):
        return None
    wait, total = (statistics.median(each[column] for each in waits if each[0] in slow) for column in (1, 2))
    return DiagnosisFinding(
        name="slow environment",
        what="Most of a step is spent in the environment: generated samples wait to be scored.",
        evidence=(
            f"{len(slow)} of {len(waits)} steps, step {slow[0]} the first: samples of one length that started "
            f"together ended up to {wait:.3g} s apart; a step takes "
            f"{total:.3g} s without validation ({SLOW_SHARE:.0%} is the threshold)",
        ),
        look_at=f"{evidence.config.environment_keys}: its class and num_workers",
        certainty="possible" if config.policy.generation.kind.is_on_gpus else "likely",
        since=slow[0],
        explains=("slow engine", "became slow"),
    )


def drop_restated(evidence: RunEvidence, findings: Sequence[DiagnosisFinding]) -> list[DiagnosisFinding]:
    """Leave out findings that only repeat that an agent fails: it gives no reward, and nothing else is wrong."""
    agent = next((each for each in findings if each.name == "failing agent" and each.certainty == "certain"), None)
    return [each for each in findings if agent is None or each.name not in agent.explains or each.since < agent.since]


def _cause(failure: str) -> str:
    """Return a failure without the parts that differ between samples."""
    return shorten(_QUOTED.sub(lambda match: match[1] or "…", failure), 300)


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
    right = [row for row in rows if holds_answer(row.response, row.reference_answer)]
    wrong = [row for row in rows if not holds_answer(row.response, row.reference_answer)]
    if len(right) < LEAST_RIGHT or not wrong:
        return None
    # Another problem's answer in a response is chance.
    chance = sum(
        holds_answer(row.response, next_.reference_answer) for row, next_ in zip(rows, _shift(rows), strict=True)
    )
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


def holds_answer(response: str, answer: str) -> bool:
    """Return whether a response contains an answer as a separate word or number."""
    return re.search(rf"(?<![\w.-]){re.escape(answer)}(?![\w]|\.\d)", response) is not None


def _shift(rows: list[SampleRow]) -> list[SampleRow]:
    """Return for each sample one of another problem, with another answer if possible."""
    ordered = [*rows[len(rows) // 2 :], *rows[: len(rows) // 2]]
    return [
        next((each for each in (shifted_row, *ordered) if each.reference_answer != row.reference_answer), shifted_row)
        for row, shifted_row in zip(rows, ordered, strict=True)
    ]
