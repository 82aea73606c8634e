"""Observers that fail: the run and the other observers go on, and what failed is counted and said."""

from __future__ import annotations

from tandem.coordinator.observers.observer import Observer, ObserverGroup
from tandem.observe.run_folder.journal import StepRecord

RECORD = StepRecord(step=1, version=1, metrics={}, seconds={})


class Failing(Observer):
    """An observer whose methods all fail."""

    def committed(self, record: StepRecord) -> None:
        """Fail as `tandem.observe.health` once did."""
        raise KeyError("num_valid_tokens")

    def noted(self, text: str) -> None:
        """Fail as a console does whose reader is gone."""
        raise BrokenPipeError(32, "Broken pipe")

    def take_news(self) -> list[str]:
        """Fail."""
        raise ValueError("no news\nof two lines")

    def close(self) -> None:
        """Fail."""
        raise OSError("it cannot be closed")


class Counting(Observer):
    """An observer that counts what it is told."""

    def __init__(self) -> None:
        self.num_steps = self.num_lines = 0
        self.is_closed = False

    def committed(self, record: StepRecord) -> None:
        """Count a step."""
        self.num_steps += 1

    def noted(self, text: str) -> None:
        """Count a line."""
        self.num_lines += 1

    def take_news(self) -> list[str]:
        """Return a line."""
        return ["a line"]

    def close(self) -> None:
        """Note that it is closed."""
        self.is_closed = True


def test_an_exception_in_one_observer_is_counted_and_said_and_the_others_are_told() -> None:
    before, after = Counting(), Counting()
    observers = ObserverGroup([before, Failing(), after])
    observers.committed(RECORD)
    assert (before.num_steps, after.num_steps) == (1, 1)
    lines = observers.take_news()
    assert lines.count("a line") == 2
    committed, news = (line for line in lines if line != "a line")
    assert committed.startswith("warning: the observer Failing.committed has failed (KeyError: 'num_valid_tokens', at ")
    assert "test_observers.py:" in committed
    assert "the run goes on" in committed
    assert "Failing.take_news has failed (ValueError: no news of two lines" in news
    for _ in range(99):
        observers.committed(RECORD)
    assert observers.failures.counts["Failing.committed"] == 100
    tenth, hundredth = (line for line in observers.take_news() if "committed" in line)
    assert "10 times so far" in tenth
    assert "100 times so far" in hundredth
    observers.close()
    assert before.is_closed
    assert after.is_closed


def test_a_console_that_fails_on_each_line_is_not_told_of_it_for_ever() -> None:
    observers = ObserverGroup([Failing()])
    num_lines = 0
    for _ in range(50):  # as the loop does: each line of news is a line of the console
        observers.noted("a line of the run")
        for line in observers.take_news():
            num_lines += "noted" in line
            observers.noted(line)
    assert num_lines == 2, "of the first failure and the tenth"
