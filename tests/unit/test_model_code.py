"""A model's folder that has code of its own, or pickled weights: neither is run, whoever reads the folder."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from engine_harness import make_model

from tandem.common.errors import ModelError
from tandem.config import build_config
from tandem.rollout.engines.skeleton import load_skeleton
from tandem.trainer.models import build_without_weights, load_model

CODE = """
from pathlib import Path
from transformers import PretrainedConfig

Path({mark!r}).touch()

class Config(PretrainedConfig):
    model_type = "its_own"
"""
READERS: dict[str, Callable[[Path], object]] = {
    "trainer": lambda folder: build_without_weights(str(folder), torch.float32),
    "engine": lambda folder: load_skeleton(folder, 32, torch.float32),
}


@pytest.mark.parametrize("reader", READERS)
def test_code_in_a_models_folder_does_not_run(tmp_path: Path, reader: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr("builtins.input", lambda *words: asked.append(words) or "y")
    mark = tmp_path / "it ran"
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "its_own.py").write_text(CODE.format(mark=str(mark)))
    config = {"model_type": "its_own", "auto_map": {"AutoConfig": "its_own.Config"}, "architectures": ["Its"]}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError) as refused:
        READERS[reader](folder)
    assert "\n" not in str(refused.value)
    assert asked == [], "whether to run it is no question for a console"
    assert not mark.exists()


class Touches:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[Path]]:
        return Path.touch, (self._path,)


def test_pickled_weights_are_not_read(tmp_path: Path) -> None:
    make_model("llama", tmp_path)
    for path in tmp_path.glob("*.safetensors"):
        path.unlink()
    mark = tmp_path / "it was read"
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps({"lm_head.weight": Touches(mark)}))
    policy = {"model_name": str(tmp_path), "max_total_sequence_length": 64}
    data = {"dataset_name": "jsonl", "train_data_path": "train.jsonl"}
    config = build_config({"sft": {}, "policy": policy, "data": data})
    with pytest.raises(ModelError, match="safetensors"):
        load_model(str(tmp_path), config.policy, torch.float32)
    assert not mark.exists()
