"""What tests of `tandem.train` share: rows, the tiny configuration without them, and reward functions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.harness.runs.running import SUMS, TINY, merged

ROWS = [{"question": row["input"], "answer": int(row["output"]), "level": index % 3} for index, row in enumerate(SUMS)]


def config(folder: str | Path = "run", **over: Any) -> dict[str, Any]:
    """Return the tiny configuration, which says nothing of data and environments but how many there are."""
    base = {key: value for key, value in TINY.items() if key != "env"}
    base["data"] = {"num_train": 64, "num_validation": 16, "prompt_template": "{question}="}
    base = merged(base, {"policy": {"model_name": str(Path(folder).with_name("model"))}})
    return merged(merged(base, {"logger": {"log_dir": str(folder)}}), over)


def digits(prompt: str, response: str) -> float:
    """Digits are worth something wherever they are."""
    assert prompt in {row["question"] for row in ROWS}
    return sum(character.isdigit() for character in response) / (len(response) + 1)


async def right(prompts: list[str], completions: list[str], answer: list[int], **columns: Any) -> list[bool]:
    """In the shape of TRL's functions."""
    assert set(columns) == {"question", "level"}
    assert columns["question"] == prompts
    return [completion.strip() == str(number) for completion, number in zip(completions, answer, strict=True)]
