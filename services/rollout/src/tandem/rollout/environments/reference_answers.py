"""Score reference answers as responses, for ``coordinator check --show``.

``python -m tandem.rollout.environments.reference_answers ORDER ANSWER``: custom code may do anything, so it runs in a
process of its own, and each score is a line of the file ANSWER as soon as it is known.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from tandem.common import kept_inputs
from tandem.common.errors import ConfigError
from tandem.common.messages import Problem
from tandem.common.values import answer_texts, text_of
from tandem.config import Config, config_from_json
from tandem.config.checks.data import compares_answers, reads_boxes
from tandem.rollout.environments.environment import Score, Step, is_async, is_multi_turn
from tandem.rollout.environments.making import make_environment
from tandem.rollout.environments.outcomes import Failure, ScoringCall, outcome_of, step_of
from tandem.samples.chat_templates import Messages
from tandem.samples.reference_scores import ReferenceScore, decode_order

_BEST = 1.0
"""Reward at which no other way to write an answer is tried."""
_Scored = Callable[[Problem], ReferenceScore]


def scorer_of(config: Config, name: str) -> _Scored:
    """Return the function that scores the reference answer of a problem in an entry of ``env``."""
    try:
        environment = make_environment(config.of_environment(name))
    except ConfigError as error:
        reason = str(error)
        return lambda problem: ReferenceScore(failure=reason, is_environment_made=False)
    if is_multi_turn(environment):
        return lambda problem: ReferenceScore(failure="it plays several turns, so no single response has a score")
    step = step_of(environment)
    call = _waiting(step) if is_async(environment) else step
    module = (config.env[name].class_path or "").rpartition(".")[0]

    def score(problem: Problem) -> ReferenceScore:
        texts = _texts(config, name, problem)
        if not texts:
            return ReferenceScore(failure="the problem has no reference answer")
        scores = [_best_of(call, problem, _spellings(config, name, text), module) for text in texts]
        for line in _last_lines(config, name, texts):
            alone = _best_of(call, problem, _spellings(config, name, line), module)
            scores.append(msgspec.structs.replace(alone, part="the last line alone: the reference answer has several"))
        return min(scores, key=lambda scored: (not scored.failure, scored.correct, scored.reward))

    return score


def _texts(config: Config, name: str, problem: Problem) -> tuple[str, ...]:
    """Return the right answers as texts; each of them should be worth the best."""
    if compares_answers(config, name):
        return answer_texts(problem.answer, boxes=reads_boxes(config, name))
    return () if problem.answer is None else (text_of(problem.answer),)


def _last_lines(config: Config, name: str, texts: Sequence[str]) -> Iterator[str]:
    """Yield the last line of each answer of several lines, which `math` reads as one expression, as NeMo-RL does.

    Responses end in a box with one line, such as the result of a whole solution. So what the answer is worth as it
    stands says nothing. Lines that are part of one formula, such as those of a matrix, are not yielded.
    """
    if name not in ("math", "math_multi_reward") or not compares_answers(config, name):
        return
    for text in texts:
        lines = text.strip().splitlines()
        line = lines[-1].strip()
        pairs = (("{", "}"), ("\\begin", "\\end"), ("(", ")"), ("[", "]"))
        if len(lines) > 1 and all(line.count(begin) == line.count(end) for begin, end in pairs):
            yield line


def _spellings(config: Config, name: str, text: str) -> Iterator[str]:
    """Yield responses that give an answer in the ways that prompts ask for."""
    after = config.env[name].kwargs.get("answer_after")
    if isinstance(after, str):
        yield f"{after}{text}"
    yield text
    yield f"\\boxed{{{text}}}"
    yield f"Answer: {text}"
    yield f"<answer>{text}</answer>"
    yield f"<think>\n</think>\n<answer>{text}</answer>"


def _best_of(step: Step, problem: Problem, responses: Iterator[str], module: str) -> ReferenceScore:
    """Return the score of the response that is worth most; the failure, if the environment fails on one."""
    best: ReferenceScore | None = None
    for response in responses:
        conversation = [{"role": "assistant", "content": response, "text": response}]
        outcome = outcome_of(ScoringCall(0, problem, conversation), step, is_multi_turn=False, module=module)
        if isinstance(outcome, Failure):
            return ReferenceScore(response=response, failure=outcome.what)
        assert isinstance(outcome, Score), "it is not asked about turns"
        score = ReferenceScore(reward=outcome.reward, correct=outcome.correct, response=response)
        if best is None or (score.correct, score.reward) > (best.correct, best.reward):
            best = score
        if best.correct and best.reward == _BEST:  # above it, there are parts that may be lacking
            break
    assert best is not None, "there is a way to write it"
    return best


def _waiting(step: Step) -> Step:
    """Return a step that waits for a coroutine."""

    async def wait(problem: Problem, conversation: Messages) -> object:
        return await step(problem, conversation)  # type: ignore[misc]

    return lambda problem, conversation: asyncio.run(wait(problem, conversation))  # type: ignore[return-value]


def main(order_file: Path, answer_file: Path) -> None:
    """Carry out an order."""
    order = decode_order(order_file.read_bytes())
    config, scorers = config_from_json(order.config), dict[str, _Scored]()
    with answer_file.open("wb") as answers:
        for answer in order.answers:
            if answer.environment not in scorers:
                scorers[answer.environment] = scorer_of(config, answer.environment)
            answers.write(msgspec.json.encode(scorers[answer.environment](answer.problem)) + b"\n")
            answers.flush()


if __name__ == "__main__":
    kept_inputs.install()
    main(Path(sys.argv[1]), Path(sys.argv[2]))
