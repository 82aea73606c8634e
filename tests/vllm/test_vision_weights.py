"""Weights of vision models in the real vLLM: with whatever they are, it says what Hugging Face says of pictures."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
import transformers
from engine_harness import run_all
from vision_harness import Seeing

from tandem.common.errors import ModelError
from tandem.config.models.families import VLLM_SEEING
from tandem.refit.adapters.huggingface import is_outside_language
from tandem.refit.digests.comparison import compare
from tandem.refit.digests.task import digest_layout
from tandem.rollout.engines.skeleton import weights_of
from tandem.rollout.engines.vllm import engine as vllm_engine
from tandem.rollout.engines.vllm.insides import InProcessLlm
from tandem.rollout.engines.vllm.workers import EngineWorkers
from tests.harness.vision_models import write_vision_model
from tests.vllm.vllm_harness import all_parameters, live_parameters, refit, train
from tests.vllm.vllm_vision_harness import TOLERANCE, apart, digests_of, held_by, passes_of, questions, running

TWO = {"tensor_parallel_size": 2}


@pytest.mark.parametrize("family", VLLM_SEEING)
def test_logprobs_match_a_forward_over_the_whole_sequence(family: str, tmp_path: Path) -> None:
    seeing = Seeing(family, tmp_path)
    requests = questions(seeing)
    with running(seeing) as engine:
        refit(engine, seeing.model, 0)
        passes = passes_of(engine)
        finished = run_all(engine, requests)
        assert apart(seeing, requests, finished) < TOLERANCE
        images = {image.digest: image.num_tokens for request in requests for image in request.media}
        assert sum(passes) == sum(images.values()), "each image becomes features once"
        swapped = msgspec.structs.replace(requests[0], media=requests[4].media)
        assert apart(seeing, [swapped], finished) > 0.1, "and every one of them matters"


@pytest.mark.parametrize("family", VLLM_SEEING)
def test_greedy_tokens_are_hugging_faces(family: str, tmp_path: Path) -> None:
    seeing = Seeing(family, tmp_path)
    request = seeing.request(0, "how many?", [seeing.image(64, 24, 3), seeing.image(48, 40, 1)], temperature=0.0)
    with running(seeing) as engine:
        refit(engine, seeing.model, 0)
        made = run_all(engine, [request])[0].token_ids_T
    assert made.tolist() == seeing.distributions(request, made).argmax(dim=-1).tolist()


@pytest.mark.parametrize("family", VLLM_SEEING)
@pytest.mark.parametrize("is_tied", [True, False])
def test_a_refit_equals_load_weights(
    family: str, is_tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeing = Seeing(family, tmp_path)
    write_vision_model(family, seeing.folder, tie_word_embeddings=is_tied)
    model = transformers.AutoModelForImageTextToText.from_pretrained(seeing.folder, dtype=torch.float32).eval()
    train(model, seed=0)  # biases are no longer zero, norms no longer one
    model.save_pretrained(seeing.folder)
    loaded: list[dict[str, torch.Tensor]] = []

    def look_first(llm: InProcessLlm) -> EngineWorkers:
        loaded.extend(all_parameters(llm))
        return EngineWorkers(llm)

    with monkeypatch.context() as patch:
        given = vllm_engine.engine_arguments
        patch.setattr(vllm_engine, "engine_arguments", lambda *args: {**given(*args), "load_format": "safetensors"})
        patch.setattr(vllm_engine, "EngineWorkers", look_first)
        with running(seeing) as engine:
            assert not any(held.any() for held in live_parameters(engine).values()), "described, and zero since then"
            refit(engine, model, 0)
            (found,) = all_parameters(engine._llm)
            assert held_by(engine) == digests_of(model)
    (expected,) = loaded
    assert found.keys() == expected.keys()
    for name, held in found.items():
        assert torch.equal(held, expected[name]), name
    assert any(name.endswith("lm_head.weight") for name in found) != is_tied


@pytest.mark.parametrize("family", VLLM_SEEING)
def test_a_changed_tower_changes_the_answers(family: str, tmp_path: Path) -> None:
    seeing = Seeing(family, tmp_path)
    request = seeing.request(0, "how many?", [seeing.image(48, 40, 1)])
    with running(seeing) as engine:
        refit(engine, seeing.model, 0)
        before = run_all(engine, [request])[0]
        with torch.no_grad():  # a training step of the tower alone
            for name, parameter in seeing.model.named_parameters():
                if is_outside_language(name):
                    parameter.mul_(1.5)
        refit(engine, seeing.model, 1)
        assert held_by(engine) == digests_of(seeing.model), "the tower is verified too"
        after = run_all(engine, [request])
        assert apart(seeing, [request], after) < TOLERANCE
        assert np.abs(seeing.logprobs(request, before.token_ids_T) - before.logprobs_T).max() > 0.01
        with torch.no_grad():
            next(seeing.model.parameters()).view(-1)[0] += 1
        assert held_by(engine) != digests_of(seeing.model)


@pytest.mark.parametrize("family", VLLM_SEEING)
def test_recomputed_caches_see_the_images_with_the_new_tower(family: str, tmp_path: Path) -> None:
    seeing = Seeing(family, tmp_path)
    changed = Seeing(family, tmp_path / "changed", seed=1).model
    requests = [seeing.request(0, "how many?", [seeing.image(48, 40, 1)]), seeing.request(1, "nothing")]
    requests += [seeing.request(2, "which?", [seeing.image(64, 24, 3), seeing.image(48, 40, 1)])]
    with running(seeing) as engine:
        refit(engine, seeing.model, 0)
        for request in requests:
            engine.add_request(request)
        for _ in range(4):
            engine.step()
        refit(engine, changed, 1)
        engine.recompute_caches()
        finished = run_all(engine, [])
    for request in requests:
        made = finished[request.request_id]
        num_old = int((made.versions_T == 0).sum())
        assert num_old >= 3
        for model, part in ((seeing.model, slice(num_old)), (changed, slice(num_old, None))):
            expected_T = seeing.logprobs(request, made.token_ids_T, model=model)
            assert np.abs(made.logprobs_T - expected_T)[part].max() < TOLERANCE


def test_sequences_that_go_on_under_new_weights_keep_what_they_saw(tmp_path: Path) -> None:
    seeing = Seeing("qwen2_5_vl", tmp_path)
    changed = Seeing("qwen2_5_vl", tmp_path / "changed", seed=1).model
    request = seeing.request(0, "how many?", [seeing.image(48, 40, 1)])
    with running(seeing) as engine:
        refit(engine, seeing.model, 0)
        engine.add_request(request)
        engine.step()
        refit(engine, changed, 1)
        later = msgspec.structs.replace(request, request_id=1)
        finished = run_all(engine, [later])
        assert apart(seeing, [later], finished, changed) < TOLERANCE, "one that is added later sees anew"
        assert finished[0].versions_T.tolist()[:2] == [0, 1]
        engine.sleep()
        engine.wake()
        assert apart(seeing, [request], run_all(engine, [request]), changed) < TOLERANCE


@pytest.mark.parametrize("family", ["qwen2_5_vl", "idefics3"])
def test_workers_share_a_model(family: str, tmp_path: Path) -> None:
    seeing = Seeing(family, tmp_path)
    requests = questions(seeing)
    with running(seeing, TWO) as engine:
        source = refit(engine, seeing.model, 0)
        assert apart(seeing, requests, run_all(engine, requests)) < TOLERANCE
        held = weights_of(source)
        sent = {"trainer-0": (held.layout, digest_layout(held.layout, held.storages))}
        parts = {
            str(rank): each
            for rank, each in enumerate(zip(engine.layouts(), engine.digest_task(None).results(), strict=True))
        }
        assert compare(sent, {"engine": parts}).differing == {}
        sizes = [{held.name: held.num_bytes for held in layout.storages} for layout in engine.layouts()]
    assert sizes[0] == sizes[1]
    of_tower = sum(size for name, size in sizes[0].items() if "vis" in name or "connector" in name)
    whole = sum(held.nbytes for name, held in seeing.model.named_parameters() if is_outside_language(name))
    assert (of_tower == whole) == seeing.settings.family.is_qwen, "vLLM cuts the towers of the others"


def test_weights_come_from_the_folder_if_asked_for(tmp_path: Path) -> None:
    seeing = Seeing("qwen2_5_vl", tmp_path)
    request = seeing.request(0, "how many?", [seeing.image(48, 40, 1)])
    with running(seeing, with_weights=True) as engine:
        assert apart(seeing, [request], run_all(engine, [request])) < TOLERANCE


def test_what_is_not_built_is_refused(tmp_path: Path) -> None:
    seeing = Seeing("gemma3", tmp_path)
    with pytest.raises(ModelError, match="cannot be given images of gemma3 here, only of qwen2_5_vl"), running(seeing):
        pass
    seeing = Seeing("smolvlm", tmp_path)
    with (
        pytest.raises(ModelError, match="smolvlm, which sees, is not built in float8"),
        running(seeing, {"precision": "fp8"}),
    ):
        pass
