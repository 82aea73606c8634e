"""NeMo-RL's judge of mathematics: `math_metric` of math-verify with its settings, given as much time as it takes."""

from __future__ import annotations

from unittest import mock

import math_verify
from math_verify.metric import math_metric

_LATEX = math_verify.LatexExtractionConfig()
_METRIC = math_metric((_LATEX,), (math_verify.ExprExtractionConfig(), _LATEX))


def judge(reference: str, response: str) -> float:
    """Return what nemo_rl/environments/math_environment.py (`HFVerifyWorker`, v0.7) rewards a response with.

    The library gives each expression some seconds, by an alarm that a busy machine hears too soon.
    """
    with mock.patch("signal.alarm", return_value=0):
        try:
            return _METRIC([rf"\boxed{{{reference}}}"], [response])[0]
        except ValueError:  # no reference was found; NeMo-RL's worker catches it
            return 0.0
