"""Exports are read by Transformers 4.57.3 as they are here: the same tokens, prompts and logits.

`tox -e families` installs it apart; `TANDEM_TRANSFORMERS_4` names the folder.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers

from tandem.samples.model_files import load_model_tokenizer
from tandem.samples.tokenizer import Tokenizer
from tandem.trainer.backends.dtensor import DTensorBackend
from tandem.trainer.files.policy_files import save_config
from tests.harness import families, older_transformers
from tests.harness.model_types.measuring import make_tiny
from tests.harness.trainers import trainer_harness
from tests.harness.trainers.trainer_harness import make_config

PACKAGES = os.environ.get("TANDEM_TRANSFORMERS_4", "")
pytestmark = pytest.mark.skipif(not Path(PACKAGES, "transformers").is_dir(), reason="Transformers 4 is not installed")
TYPES = (
    *("llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "gemma3_text", "phi3", "olmo2", "smollm3", "granite"),
    *("qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3", "glm4_moe", "olmoe", "ernie4_5_moe"),
    *("lfm2", "falcon_h1", "qwen3_next"),
)
"""Types of both releases: dense, with experts, and with states."""
NAMES = ("qwen3", "gemma4", "gptoss", "llama3_1", "deepseekv3", "phi3", "glm4moe", "nemotron_3_nano", "lfm2")
"""Families of each tokenizer: with and without a first token, and with markers of their own."""


@pytest.fixture(scope="module")
def rank_server() -> None:
    """Start the process that ranks are forked from before a test could count it among what the test left behind."""
    trainer_harness.start_server()


def read_older(folders: list[Path]) -> dict[str, Any]:
    """Return what Transformers 4 reads in folders."""
    command = [sys.executable, older_transformers.__file__, *map(str, folders)]
    environment = {**os.environ, "PYTHONPATH": PACKAGES, "HF_HUB_OFFLINE": "1"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1500, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    read: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    assert read["release"].startswith("4.")
    return read


@pytest.mark.timeout(1800)
def test_tokenizers_of_releases_stay_as_they_were(tmp_path: Path) -> None:
    """Transformers 5 reads some of them otherwise itself, such as Llama 2's, DeepSeek-V3's and Gemma 3's."""
    names = sorted({family.tokenizer for family in families.FAMILIES})
    for name in names:
        shutil.copytree(Path(os.environ["TANDEM_FAMILIES"], name), tmp_path / name)
        load_model_tokenizer(tmp_path / name).save(tmp_path / f"{name}-export")
        for folder in (tmp_path / name, tmp_path / f"{name}-export"):
            (folder / "messages.json").write_text(json.dumps(older_transformers.MESSAGES))
    read = read_older([tmp_path / f"{name}{suffix}" for name in names for suffix in ("", "-export")])
    for name in names:
        assert read[str(tmp_path / f"{name}-export")] == read[str(tmp_path / name)], name


@pytest.mark.timeout(1800)
def test_tokenizers_made_here_make_the_same_tokens(tmp_path: Path) -> None:
    expected = {}
    for family in (family for family in families.FAMILIES if family.name in NAMES):
        folder, messages = tmp_path / family.name, families.as_read(family, older_transformers.MESSAGES)
        Tokenizer(families.hugging_face(family), family.name).save(folder)
        (folder / "messages.json").write_text(json.dumps(messages))
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        expected[str(folder)] = older_transformers.read_tokenizer(tokenizer, messages)
    assert len(expected) == len(NAMES)
    read = read_older([Path(folder) for folder in expected])
    for folder, outcome in expected.items():
        assert read[folder] == outcome, Path(folder).name


def export_models(rank: int, folder: Path) -> dict[str, Any]:
    """Export a tiny model of each type as a trainer does; return the logits here by folder."""
    logits = {}
    for model_type in TYPES:
        source = make_tiny(model_type, folder / f"{model_type}-source")
        config = transformers.AutoConfig.from_pretrained(source)
        config.name_or_path = ""
        save_config(config, source)  # in the form that releases have, which is that of Transformers 4
        DTensorBackend(make_config(source), checkpoint=None).save(folder / model_type).num_bytes.result()
        policy = folder / model_type / "policy"
        model = transformers.AutoModelForCausalLM.from_pretrained(policy, dtype="float32")
        logits[str(policy)] = older_transformers.read_logits(model)
    return logits


@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("rank_server")
def test_models_have_the_same_logits(tmp_path: Path) -> None:
    (expected,) = trainer_harness.run_ranks(1, export_models, tmp_path, deadline_s=1500)
    read = read_older([Path(folder) for folder in expected])
    differences = {
        Path(folder).parent.name: np.abs(np.array(read[folder]) - np.array(logits)).max()
        for folder, logits in expected.items()
    }
    assert differences.keys() == {*TYPES}
    assert {model_type: value for model_type, value in differences.items() if not value < 1e-5} == {}
