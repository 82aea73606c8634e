"""Engines that load a folder's weights themselves compute what those do that get them by refit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine_harness import ARCHITECTURES, make_engine, make_model, random_prompts, request, run_all
from safetensors.torch import load_file, save_file

from tandem.common.errors import ModelError, RefitError
from tandem.rollout.engines.transformers import TransformersEngine


def loaded(folder: Path) -> TransformersEngine:
    return TransformersEngine(folder, num_slots=8, max_total_sequence_length=64, dtype="float32", with_weights=True)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_same_tokens_as_by_refit(architecture: str, tmp_path: Path) -> None:
    model = make_model(architecture, tmp_path)
    model.save_pretrained(tmp_path)
    asked = [request(number, prompt) for number, prompt in enumerate(random_prompts(8))]
    engine, other = loaded(tmp_path), make_engine(tmp_path, model)
    found, expected = run_all(engine, asked), run_all(other, asked)
    assert engine.version == 0
    for number, completion in expected.items():
        assert found[number].token_ids_T.tolist() == completion.token_ids_T.tolist()
        assert found[number].logprobs_T.tolist() == completion.logprobs_T.tolist()
    engine.close()
    other.close()
    with pytest.raises(RefitError):
        engine.step()


def test_what_requests_have_made_so_far(tmp_path: Path) -> None:
    model = make_model("llama", tmp_path)
    engine = make_engine(tmp_path, model, num_slots=2)
    for number in range(3):
        engine.add_request(request(number, (1, 2, number), max_new_tokens=4))
    for _ in range(3):
        assert engine.step() == []
    made = engine.made({0: 0, 1: 2, 2: 0, 7: 0})
    assert made.keys() == {0, 1}, "the third waits for a slot"
    assert [len(made[0].token_ids_T), len(made[1].token_ids_T)] == [3, 1]
    (first, second) = engine.step()
    for number, completion in ((0, first), (1, second)):
        start = 2 * number
        assert completion.token_ids_T[start:3].tolist() == made[number].token_ids_T.tolist()
        assert completion.logprobs_T[start:3].tolist() == made[number].logprobs_T.tolist()
        assert completion.versions_T[start:3].tolist() == made[number].versions_T.tolist()


def test_weights_that_are_not_there_are_named(tmp_path: Path) -> None:
    model = make_model("llama", tmp_path)
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        loaded(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match="safetensors"):
        loaded(tmp_path)
    model.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    missing = tensors.pop("model.layers.1.mlp.up_proj.weight")
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"model\.layers\.1\.mlp\.up_proj\.weight is missing"):
        loaded(tmp_path)
    save_file({**tensors, "model.layers.1.mlp.up_proj.weight": missing[1:].clone()}, path, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"model\.layers\.1\.mlp\.up_proj\.weight is mismatched"):
        loaded(tmp_path)
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(ModelError, match=r"\w"):
        loaded(tmp_path)
