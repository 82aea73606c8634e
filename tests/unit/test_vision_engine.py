"""The embedded engine of vision models computes what Hugging Face computes, and each image once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from engine_harness import refit, run_all
from vision_harness import Seeing

from tandem.common.errors import DataError
from tandem.refit.adapters.huggingface import is_outside_language
from tandem.refit.digests.task import digest_layout
from tandem.rollout.engine import EngineCompletion, SequenceRequest
from tandem.rollout.engines.skeleton import weights_of
from tandem.rollout.engines.vision import EncoderCache, VisionEngine
from tests.harness.vision_models import FAMILIES

TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Seeing:
    """A model of the family with positions of three numbers."""
    return Seeing("qwen2_5_vl", tmp_path_factory.mktemp("qwen"))


def apart(
    seeing: Seeing, requests: list[SequenceRequest], finished: dict[int, EngineCompletion], model: Any = None
) -> float:
    """Return how far log-probabilities are from Hugging Face's, at most."""
    worst = 0.0
    for request in requests:
        made = finished[request.request_id]
        expected_T = seeing.logprobs(request, made.token_ids_T, model=model)
        worst = max(worst, float(np.abs(made.logprobs_T - expected_T).max()))
    return worst


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_match_a_forward_over_the_whole_sequence(family: str, tmp_path: Path) -> None:
    seeing = Seeing(family, tmp_path)
    first, second, wide = seeing.image(48, 40, 1), seeing.image(48, 40, 2), seeing.image(64, 24, 3)
    engine = seeing.engine(num_slots=5)
    passes = seeing.count(engine)
    # More requests than slots, so that prompts join beside tokens of others; some see nothing.
    requests = [
        *(seeing.request(number, "how many?", [first], max_new_tokens=4 + number) for number in range(4)),
        seeing.request(4, "how many?", [second]),
        seeing.request(5, "no picture at all", max_new_tokens=5),
        seeing.request(6, "which is wider?", [wide, first], temperature=0.8),
        seeing.request(7, "and now?", [first, first, second], temperature=1.3),
        seeing.request(8, "hello"),
    ]
    finished = run_all(engine, requests)
    assert apart(seeing, requests, finished) < TOLERANCE
    assert len(passes) == 3
    assert not engine._slots.views


def test_a_group_shares_one_pass_over_its_image(seeing: Seeing) -> None:
    engine = seeing.engine(num_slots=4)
    passes = seeing.count(engine)
    image = seeing.image(40, 40, 4)
    run_all(engine, [seeing.request(number, "how many?", [image]) for number in range(4)])
    assert passes == [1]
    run_all(engine, [seeing.request(9, "what colour?", [image])])
    assert passes == [1], "its features are kept"


def test_two_pictures_of_one_size_are_two_prompts(seeing: Seeing) -> None:
    engine = seeing.engine()
    images = [seeing.image(48, 40, 1), seeing.image(48, 40, 2)]
    requests = [seeing.request(number, "how many?", [image], seed=7) for number, image in enumerate(images)]
    assert requests[0].prompt_ids == requests[1].prompt_ids
    finished = run_all(engine, requests)
    assert apart(seeing, requests, finished) < TOLERANCE
    swapped = [msgspec.structs.replace(requests[row], media=requests[1 - row].media) for row in range(2)]
    assert apart(seeing, swapped, finished) > 0.1


@pytest.mark.parametrize("family", ["qwen2_5_vl", "smolvlm"])
def test_later_turns_may_show_more_images(family: str, tmp_path: Path) -> None:
    seeing = Seeing(family, tmp_path)
    engine = seeing.engine()
    passes = seeing.count(engine)
    first, second = seeing.image(48, 40, 1), seeing.image(40, 48, 2)
    before = seeing.request(0, "how many?", [first])
    made = run_all(engine, [before])[0]
    later = seeing.tokens("and here?", [second])
    after = msgspec.structs.replace(
        before,
        request_id=1,
        prompt_ids=(*before.prompt_ids, *made.token_ids_T.tolist(), *later),
        media=(first, second),
    )
    assert apart(seeing, [after], run_all(engine, [after])) < TOLERANCE
    assert passes == [1, 1]


@pytest.mark.parametrize("family", FAMILIES)
def test_of_a_tower_s_output_only_the_features_are_kept(family: str, tmp_path: Path) -> None:
    seeing = Seeing(family, tmp_path)
    engine = seeing.engine()
    image = seeing.image(48, 40, 1)
    run_all(engine, [seeing.request(0, "how many?", [image], max_new_tokens=1)])
    kept = engine._features.find(image.digest)
    assert {*kept.keys()} <= {"pooler_output", "deepstack_features"}
    levels = 1 + len(kept.get("deepstack_features") or ())
    assert engine._features.num_bytes == image.num_tokens * 64 * 4 * levels


@pytest.mark.parametrize("family", FAMILIES)
def test_recomputed_caches_see_the_images_with_the_new_tower(family: str, tmp_path: Path) -> None:
    seeing = Seeing(family, tmp_path)
    engine = seeing.engine()
    requests = [seeing.request(0, "how many?", [seeing.image(48, 40, 1)]), seeing.request(1, "nothing")]
    requests += [seeing.request(2, "which?", [seeing.image(64, 24, 3), seeing.image(48, 40, 1)])]
    for request in requests:
        engine.add_request(request)
    for _ in range(4):
        engine.step()
    changed = Seeing(family, tmp_path / "changed", seed=1).model
    refit(engine, changed, 1)
    engine.recompute_caches()
    finished: dict[int, EngineCompletion] = {}
    while engine.num_unfinished:
        finished |= {each.request_id: each for each in engine.step()}
    for request in requests:
        made = finished[request.request_id]
        assert made.versions_T.tolist() == [0] * 4 + [1] * 8
        for model, part in ((seeing.model, slice(4)), (changed, slice(4, None))):
            expected_T = seeing.logprobs(request, made.token_ids_T, model=model)
            assert np.abs(made.logprobs_T - expected_T)[part].max() < TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
def test_a_changed_tower_changes_the_answers(family: str, tmp_path: Path) -> None:
    seeing = Seeing(family, tmp_path)
    engine = seeing.engine()
    request = seeing.request(0, "how many?", [seeing.image(48, 40, 1)])
    before = run_all(engine, [request])[0]
    prefixes = (seeing.settings.family.tower_prefix, seeing.settings.family.projector_prefix)
    with torch.no_grad():  # a training step of the tower alone
        for name, parameter in seeing.model.named_parameters():
            if name.startswith(prefixes):
                parameter.mul_(1.5)
    assert len(engine._features) == 1
    refit(engine, seeing.model, 1)
    assert not len(engine._features)
    assert held_by(engine) == digest_of(seeing.model), "the tower is verified too"
    after = run_all(engine, [msgspec.structs.replace(request, request_id=1)])[1]
    assert apart(seeing, [msgspec.structs.replace(request, request_id=1)], {1: after}) < TOLERANCE
    assert np.abs(seeing.logprobs(request, before.token_ids_T) - before.logprobs_T).max() > 0.01


def digest_of(model: Any) -> list[int]:
    weights = weights_of(model)
    return digest_layout(weights.layout, weights.storages).tolist()


def held_by(engine: VisionEngine) -> list[int]:
    return engine.digest_task(None).results()[0].tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_trainers_and_engines_have_the_same_names_and_digests_notice_a_tower(family: str, tmp_path: Path) -> None:
    seeing = Seeing(family, tmp_path)
    engine = seeing.engine()
    (layout,) = engine.layouts()
    assert {tensor.name for tensor in layout.tensors} == {name for name, _ in seeing.model.named_parameters()}
    assert held_by(engine) == digest_of(seeing.model)
    towers = [tensor.name for tensor in layout.tensors if is_outside_language(tensor.name)]
    own = seeing.settings.family
    assert towers == [tensor.name for tensor in layout.tensors if not tensor.name.startswith(own.language_prefix)]
    with torch.no_grad():
        seeing.model.get_parameter(towers[0]).view(-1)[0] += 1
    assert held_by(engine) != digest_of(seeing.model)


def test_tokens_that_stand_for_images_are_never_drawn(seeing: Seeing) -> None:
    engine = seeing.engine(num_slots=16)
    requests = [seeing.request(number, "a", temperature=5.0, max_new_tokens=40) for number in range(16)]
    drawn = {token for each in run_all(engine, requests).values() for token in each.token_ids_T.tolist()}
    assert len(drawn) > 60, "almost every other token is"
    assert not drawn & {*seeing.undrawable}


def test_features_are_kept_within_bounds_and_needed_ones_are_made_again(seeing: Seeing) -> None:
    images = [seeing.image(48, 40, seed) for seed in range(1, 4)]
    engine = seeing.engine(max_feature_bytes=2 * images[0].num_tokens * 64 * 4)
    passes = seeing.count(engine)
    requests = [seeing.request(number, "how many?", [image]) for number, image in enumerate(images)]
    assert apart(seeing, requests, run_all(engine, requests)) < TOLERANCE
    assert len(passes) == 3
    assert len(engine._features) == 2
    run_all(engine, [msgspec.structs.replace(requests[2], request_id=5)])
    assert len(passes) == 3
    run_all(engine, [msgspec.structs.replace(requests[0], request_id=6)])
    assert len(passes) == 4
    engine.sleep()
    assert not engine._features.num_bytes


def test_an_output_larger_than_the_cache_is_not_kept() -> None:
    class Output:
        def __init__(self, size: int) -> None:
            self.pooler_output = torch.zeros(size)

    cache = EncoderCache(max_bytes=100)
    cache.put("a", Output(26))
    assert "a" not in cache
    cache.put("b", Output(25))
    cache.put("b", Output(25))
    assert "b" in cache
    assert cache.num_bytes == 100


def test_images_that_cannot_be_read_are_refused_by_name(seeing: Seeing) -> None:
    engine = seeing.engine()
    image = seeing.image(48, 40, 9)
    request = seeing.request(0, "how many?", [image])
    wrong = msgspec.structs.replace(image, grid=(1, 4, 4))
    cases = [
        (msgspec.structs.replace(request, media=()), "has 30 image tokens, its 0 images need 0"),
        (msgspec.structs.replace(request, media=(image, image)), "has 30 image tokens, its 2 images need 60"),
        (
            msgspec.structs.replace(request, prompt_ids=seeing.tokens("x", [wrong]), media=(wrong,)),
            r"is divided into \(1, 10, 12\), its reference says \(1, 4, 4\)",
        ),
    ]
    for bad, why in cases:
        with pytest.raises(DataError, match=why):
            engine.add_request(bad)
    path = seeing.images.path(image.digest)
    data = path.read_bytes()
    path.write_bytes(data[:-20])
    engine = seeing.engine()
    with pytest.raises(DataError, match=f"is not image {image.digest[:12]}"):
        engine.add_request(request)
    path.unlink()
    with pytest.raises(DataError, match=f"image {image.digest[:12]} is not in"):
        engine.add_request(request)
    path.write_bytes(data)
    assert not engine.num_unfinished
    assert not engine._slots.views
    assert apart(seeing, [request], run_all(engine, [request])) < TOLERANCE


def test_a_request_that_leaves_is_forgotten(seeing: Seeing) -> None:
    engine = seeing.engine(num_slots=1)
    image = seeing.image(48, 40, 5)
    for number in range(2):
        engine.add_request(seeing.request(number, "how many?", [image]))
    engine.step()
    assert engine.abort(1) is not None
    assert engine.abort(0) is not None
    assert engine.abort(0) is None
    assert not engine._slots.views
    assert not len(engine._views)
    assert not len(engine._pictures)


def test_weights_come_from_the_folder_if_asked_for(seeing: Seeing) -> None:
    engine = VisionEngine(
        seeing.folder,
        num_slots=2,
        max_total_sequence_length=128,
        dtype="float32",
        read_image=seeing.images.get,
        undrawable=seeing.undrawable,
        with_weights=True,
    )
    request = seeing.request(0, "how many?", [seeing.image(48, 40, 1)])
    assert apart(seeing, [request], run_all(engine, [request])) < TOLERANCE
