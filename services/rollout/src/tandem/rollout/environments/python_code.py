"""Score programs in Python by running them, shut in, on tests."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from tandem.common.errors import RewardError
from tandem.common.messages import Problem
from tandem.common.values import make_plain_object
from tandem.rollout.environments.environment import Score
from tandem.rollout.environments.sandbox.running import SandboxedRun, SandboxLimits, check_machine, run_program

_BLOCK = re.compile(r"^```(?:python|py|python3)?[ \t]*\n(.*?)^```[ \t]*$", re.DOTALL | re.MULTILINE)
_TESTS = "tests"


class InputOutput(msgspec.Struct, frozen=True):
    """A test by what a program reads and what it has to write."""

    input: str
    output: str


class PythonCode:
    """An environment that runs the last block of code of a response.

    A row's tests are in its field ``tests``, or are its reference answer. A test is code that runs after the program,
    such as ``assert add(1, 2) == 3``, or an object with `input` and `output`, texts of the standard streams, which are
    compared line by line without white space at the ends.
    """

    def __init__(
        self,
        *,
        time_s: float = 5.0,
        memory_mb: int = 512,
        disk_mb: int = 32,
        processes: int = 16,
        partial_credit: bool = False,
    ) -> None:
        """Set the limits of each run. Raises `ConfigError` if this machine cannot shut programs in.

        Args:
            time_s: seconds that a run may take.
            memory_mb: memory that each of its processes may take.
            disk_mb: size of all its files.
            processes: processes that it may have at once.
            partial_credit: whether the reward is the share of tests that pass; otherwise all must pass.

        """
        self._limits = SandboxLimits(time_s=time_s, memory_mb=memory_mb, disk_mb=disk_mb, processes=processes)
        self._partial_credit = partial_credit
        check_machine()

    def score(self, problem: Problem, response: str) -> Score:
        """Run the program on all tests. Raises `RewardError` for a problem without any."""
        tests = read_tests(problem)
        blocks = _BLOCK.findall(response)
        if not blocks:
            return Score(0.0, correct=False)
        num_passed = 0
        for test in tests:
            is_passed = self._passes(blocks[-1], test)
            num_passed += is_passed
            if not is_passed and not self._partial_credit:
                break
        share = num_passed / len(tests)
        correct = num_passed == len(tests)
        return Score(share if self._partial_credit else float(correct), correct=correct, components={"passed": share})

    def _passes(self, program: str, test: str | InputOutput) -> bool:
        if isinstance(test, InputOutput):
            run = run_program(program, test.input, self._limits)
            return _ended_well(run) and _lines(run.output) == _lines(test.output)
        # A program that ends by itself before the test has not passed it.
        token = secrets.token_hex(16)
        run = run_program(f"{program}\n\n{test}\n\nprint({token!r})\n", "", self._limits)
        return _ended_well(run) and run.output.rstrip().endswith(token)


def read_tests(problem: Problem) -> Sequence[str | InputOutput]:
    """Return a problem's tests. Raises `RewardError` if it has none, or others."""
    metadata = make_plain_object(problem.metadata)
    value = metadata.get(_TESTS, make_plain_object({_TESTS: problem.answer})[_TESTS])
    values: list[Any] = value if isinstance(value, list) else [value]
    tests: list[str | InputOutput] = []
    for test in values:
        if isinstance(test, str) and test.strip():
            tests.append(test)
        elif isinstance(test, Mapping) and all(isinstance(test.get(name), str) for name in ("input", "output")):
            tests.append(InputOutput(test["input"], test["output"]))
        else:
            raise RewardError(f"problem {problem.problem_id!r} has a test that is neither code nor {{input, output}}")
    if not tests:
        raise RewardError(
            f"problem {problem.problem_id!r} has no tests: neither in its field 'tests' nor as its answer"
        )
    return tests


def _ended_well(run: SandboxedRun) -> bool:
    return run.ending == "exit" and run.exit_code == 0


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.strip().splitlines()]
