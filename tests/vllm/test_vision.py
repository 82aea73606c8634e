"""Pictures before the real vLLM: which prompt has which, what cannot be read, and what is never drawn."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from engine_harness import run_all, write_byte_tokenizer
from vision_harness import Seeing

from tandem.common.errors import DataError, ModelError
from tandem.rollout.engine import SequenceRequest
from tandem.rollout.engines.vllm.pictures import SeeingVllmEngine, largest
from tandem.samples.images.families import num_tokens
from tests.vllm.vllm_harness import refit, tiny_model
from tests.vllm.vllm_vision_harness import TOLERANCE, apart, running


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Seeing:
    """A model of the family with positions of three numbers."""
    return Seeing("qwen2_5_vl", tmp_path_factory.mktemp("qwen"))


@pytest.fixture(scope="module")
def filled(seeing: Seeing) -> Iterator[SeeingVllmEngine]:
    """One engine for all tests that leave its weights alone."""
    with running(seeing) as engine:
        refit(engine, seeing.model, 0)
        yield engine


def test_two_pictures_of_one_size_are_two_prompts(seeing: Seeing, filled: SeeingVllmEngine) -> None:
    images = [seeing.image(48, 40, 1), seeing.image(48, 40, 2)]
    requests = [seeing.request(number, "how many?", [image], seed=7) for number, image in enumerate(images)]
    assert requests[0].prompt_ids == requests[1].prompt_ids
    assert apart(seeing, requests, run_all(filled, requests)) < TOLERANCE
    # Also when the keys and values of the other one are cached, whole blocks of which have no image token.
    again = [msgspec.structs.replace(request, request_id=9 - request.request_id) for request in requests]
    assert apart(seeing, again, run_all(filled, again)) < TOLERANCE


def test_later_turns_may_show_more_images(seeing: Seeing, filled: SeeingVllmEngine) -> None:
    first, second = seeing.image(48, 40, 1), seeing.image(40, 48, 2)
    before = seeing.request(0, "how many?", [first])
    made = run_all(filled, [before])[0]
    later = seeing.tokens("and here?", [second])
    after = msgspec.structs.replace(
        before,
        request_id=1,
        prompt_ids=(*before.prompt_ids, *made.token_ids_T.tolist(), *later),
        media=(first, second),
    )
    assert apart(seeing, [after], run_all(filled, [after])) < TOLERANCE


def test_tokens_that_stand_for_images_are_never_drawn(seeing: Seeing, filled: SeeingVllmEngine) -> None:
    requests = [seeing.request(number, "a", temperature=2.0, max_new_tokens=60) for number in range(32)]
    finished = run_all(filled, requests)
    drawn = {token for each in finished.values() for token in each.token_ids_T.tolist()}
    assert len(drawn) > 60, "almost every other token is"
    assert not drawn & {*seeing.undrawable}
    assert apart(seeing, requests, finished) < TOLERANCE


def test_images_that_cannot_be_read_are_refused_by_name(seeing: Seeing, filled: SeeingVllmEngine) -> None:
    image = seeing.image(48, 40, 9)
    request = seeing.request(0, "how many?", [image])
    wrong = msgspec.structs.replace(image, grid=(1, 4, 4), num_tokens=num_tokens(seeing.settings, (1, 4, 4)))
    of_another = msgspec.structs.replace(request, prompt_ids=seeing.tokens("x", [wrong]), media=(wrong,))
    cases: list[tuple[SequenceRequest, type[Exception], str]] = [
        (msgspec.structs.replace(request, media=()), DataError, "has 30 image tokens, its 0 images need 0"),
        (msgspec.structs.replace(request, media=(image,) * 2), DataError, "has 30 image tokens, its 2 images need 60"),
        (of_another, ModelError, rf"tower makes 30 tokens of image 1 \({image.digest[:12]}\), the prompt has 4"),
    ]
    for bad, kind, why in cases:
        with pytest.raises(kind, match=why):
            filled.add_request(bad)
    path, missing = seeing.images.path(image.digest), seeing.image(48, 40, 10)
    filled._prepared.clear()
    data = path.read_bytes()
    path.write_bytes(data[:-20])
    with pytest.raises(DataError, match=f"is not image {image.digest[:12]}"):
        filled.add_request(request)
    path.write_bytes(data)
    seeing.images.path(missing.digest).unlink()
    with pytest.raises(DataError, match=f"image {missing.digest[:12]} is not in"):
        filled.add_request(seeing.request(1, "how many?", [missing]))
    assert not filled.num_unfinished
    assert apart(seeing, [request], run_all(filled, [request])) < TOLERANCE


def test_a_prompt_has_what_vllm_computed(seeing: Seeing, filled: SeeingVllmEngine) -> None:
    request = seeing.request(0, "which?", [seeing.image(64, 24, 3), seeing.image(48, 40, 1)])
    filled.add_request(request)
    (found,) = filled._llm.engine.output_processor.request_states.values()
    assert tuple(found.prompt_token_ids) == request.prompt_ids
    filled.abort(0)


def test_an_engine_of_text_executes_nothing_of_images(tmp_path: Path) -> None:
    model = tiny_model("qwen3", tmp_path / "model")
    model.save_pretrained(tmp_path / "model")
    write_byte_tokenizer(tmp_path / "model")
    code = (
        "import sys\n"
        "from tandem.rollout.engines.vllm import insides\n"
        "insides.prepare_environment(num_threads=1)\n"
        "from pathlib import Path\n"
        "from engine_harness import request, run_all\n"
        "from tandem.config.schema.generation import VllmCfg\n"
        "from tandem.rollout.engines.factory import find_factory\n"
        "from tandem.serving.server_process import ServingHandover\n"
        "folder = Path(sys.argv[1])\n"
        "serving = ServingHandover(\n"
        "    model_folder=str(folder), name='tiny', engine='vllm', max_length=128, vocabulary=256, max_batch_size=4,\n"
        "    precision='float32', num_threads=1, deadline_s=60,\n"
        "    vllm_cfg=VllmCfg(precision='float32', max_model_len=128), vllm_kwargs={'kv_cache_memory_bytes': 2**26},\n"
        ")\n"
        "made = find_factory('vllm').load(serving, None)\n"
        "print(len(run_all(made, [request(0, (1, 2, 3))])))\n"
        "made.close()\n"
        "print([name for name in sys.modules if name.endswith('.vllm.pictures')])\n"
    )
    paths = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "model")],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.stdout.splitlines()[-2:] == ["1", "[]"], done.stdout + done.stderr


def test_the_largest_image_is_measured_and_fits(seeing: Seeing, filled: SeeingVllmEngine) -> None:
    side, size = largest(seeing.settings, 512)
    assert size == seeing.image(side, side, 1).num_tokens <= seeing.settings.max_pixels / 8**2
    assert largest(seeing.settings, 10)[1] <= 10
    (budget,) = filled._llm.engine.collective_rpc(lambda worker: worker.model_runner.mm_budget)
    assert budget.mm_max_toks_per_item == {"image": size}
    (modality, item), *_ = budget.get_dummy_encoder_profile_inputs()
    (model,) = filled._llm.engine.collective_rpc(lambda worker: worker.model_runner.get_model())
    with torch.no_grad():
        (features,) = model.embed_multimodal(
            pixel_values=item["pixel_values"].data, image_grid_thw=item["image_grid_thw"].data[None]
        )
    assert (modality, len(features)) == ("image", size)
