"""What `docs/hub.md` shows is a configuration."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from tandem.config import build_config

PAGE = Path(__file__).parents[2] / "docs" / "hub.md"


def test_the_example_is_read_as_it_stands() -> None:
    (example,) = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    config = build_config({"algorithm": "grpo", "env": {"math": {}}, **yaml.safe_load(example)})
    assert config.policy.tokenizer.name == config.policy.model_name == "Qwen/Qwen3-0.6B@main"
    assert (config.data.dataset_name, config.data.revision, config.data.commit) == ("openai/gsm8k", "main", None)
