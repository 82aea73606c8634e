"""The check that each problem has an answer that its environment can compare with."""

from __future__ import annotations

from collections.abc import Iterable

from tandem.common.errors import DataError
from tandem.common.returned import shown
from tandem.common.values import answer_texts
from tandem.config import Config
from tandem.config.checks.data import compares_answers, reads_boxes
from tandem.samples.data_sets.prompts import PromptedProblem

_MAX_SHOWN = 200


def check_answers(config: Config, problems: Iterable[PromptedProblem]) -> None:
    """Raise `DataError` naming the first row whose answer its built-in environment cannot compare with."""
    comparing = {name: reads_boxes(config, name) for name in config.environments if compares_answers(config, name)}
    if not comparing:
        return
    for problem, data, _ in problems:
        name = str(data.environment)
        if name in comparing and not answer_texts(problem.answer, boxes=comparing[name]):
            raise DataError(
                f"{problem.problem_id}: env.{name} compares responses with the answer, which is "
                f"{'null' if problem.answer is None else shown(problem.answer)[:_MAX_SHOWN]} (data.output_key); it "
                "takes a text, a number, a truth value, or a list of them, any of which is right"
            )
