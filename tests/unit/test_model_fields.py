"""The fields of model configurations, beside what transformers' own classes say."""

from __future__ import annotations

import subprocess
import sys

import pytest
from transformers import AutoConfig

from tandem.config.installed.model_fields import list_model_fields


@pytest.mark.parametrize(
    "model_type", ["llama", "mistral", "gemma3_text", "qwen2", "qwen3", "qwen3_moe", "gpt2", "deepseek_v3", "olmoe"]
)
def test_every_field_of_the_class_is_known(model_type: str) -> None:
    made = AutoConfig.for_model(model_type)
    missing = set(made.to_dict()) - list_model_fields(model_type)
    assert not {field for field in missing if not field.startswith("_")}


@pytest.mark.parametrize("deprecated", ["rope_theta", "rope_scaling", "torch_dtype", "num_labels", "output_attentions"])
def test_deprecated_names_are_known(deprecated: str) -> None:
    assert deprecated in list_model_fields("qwen3")


def test_no_name_is_known_but_those() -> None:
    for name in ("hidden_sise", "n_embd", "yarn", "num_experts"):
        assert name not in list_model_fields("qwen3")
    assert "n_embd" in list_model_fields("gpt2")
    assert "num_experts" in list_model_fields("qwen3_moe")
    assert list_model_fields("no_such_model") == frozenset()


def test_nothing_imports_torch() -> None:
    look = (
        "import sys; from tandem.config.installed.model_fields import list_model_fields;"
        "print('rope_theta' in list_model_fields('qwen3'), 'torch' in sys.modules)"
    )
    assert (
        subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True).stdout
        == "True False\n"
    )
