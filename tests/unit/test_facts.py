"""Numbers in the prose of pages are those of the code."""

from __future__ import annotations

import pkgutil
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
FACTS = [
    ("reliability.md", "tandem.launch.fork_server:_FORK_S", "when a fork takes more than {:.0f} s", 1),
    ("reliability.md", "tandem.common.kept_inputs:MOST_BYTES", "(up to {} GiB in all)", 2**-30),
    ("reliability.md", "tandem.common.messages:LARGEST", "It is {:.0e} for rewards", 1),
    ("security.md", "tandem.common.wire.gatekeeper:_MOST_UNPROVEN", "A socket has {} of them from one address", 1),
    ("security.md", "tandem.common.wire.gatekeeper:_MOST_UNPROVEN", "at most, and {} altogether", 2),
    ("page.md", "tandem.observe.page.address:FIRST_PORT", "on the first free port from {} on", 1),
    ("page.md", "tandem.observe.timeline:MAX_STEPS", "by step: the last {:,}", 1),
    ("diagnose.md", "tandem.observe.diagnosis.evidence:MAX_STEPS_OF_SAMPLES", "of up to {} steps", 1),
    ("tinker.md", "tandem.serving.tinker.service:_MOST_UNFINISHED", "may have {:,} requests in progress", 1),
    ("tinker.md", "tandem.serving.tinker.service:_MOST_SESSIONS", "in progress and {:,} sessions", 1),
    ("protocol.md", "tandem.common.messages:MAX_TOKENS_FETCHED", "at most {} million tokens at a time", 2**-20),
    ("protocol.md", "tandem.common.messages:MAX_IMAGE_BYTES_FETCHED", "for {:.0f} MB at a time", 2**-20),
    ("vision.md", "tandem.common.messages:MAX_IMAGE_BYTES_FETCHED", "{:.0f} MB at most at a time", 2**-20),
]
"""Page, where the number stands in the code, the phrase, and what the number is multiplied by there."""
WORDS = {1.0: "one", 2.0: "two", 12.0: "twelve"}


@pytest.mark.parametrize(("page", "name", "phrase", "factor"), FACTS)
def test_a_page_has_the_number_of_the_code(page: str, name: str, phrase: str, factor: float) -> None:
    number = pkgutil.resolve_name(name) * factor
    text = " ".join((DOCS / page).read_text().split())
    number = int(number) if number == int(number) and ".0" not in phrase else number
    said = {phrase.format(number).replace("e+", "e"), phrase.replace("{}", WORDS.get(number, "?"))}
    assert any(words in text for words in said), said
