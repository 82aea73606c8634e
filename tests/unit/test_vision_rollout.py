"""The rollout service with a vision model: images of prompts and of later turns, and those that cannot be read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from rollout_harness import Rollout
from vision_harness import Seeing

from tandem.common.errors import WireError
from tandem.common.messages import ImageRef, Problem, PromptGroup
from tandem.samples.markers import marker

TOLERANCE = 1e-5


class SeeingRollout(Rollout):
    """A rollout service with a tiny vision model."""

    template = "default"
    seeing: Seeing

    def _make_model(self, folder: Path, **changes: Any) -> Any:
        self.seeing = Seeing("qwen2_5_vl", folder, images=folder / "run/images")
        return self.seeing.model

    def shown(self, number: int, image: ImageRef | None, seeds: list[int], then: ImageRef | None = None) -> PromptGroup:
        """Return a group whose prompt shows an image, and whose environment shows one then."""
        first, later = (
            ("" if each is None else marker(each.digest, each.width, each.height)) for each in (image, then)
        )
        messages = [{"role": "user", "content": f"{first}how many?"}]
        return PromptGroup(
            group=number,
            problem=Problem(problem_id=f"p{number}", question="", answer="", metadata={"shows": later}),
            prompt_ids=tuple(self.tokenizer.encode_chat(messages, add_generation_prompt=True)),
            media=self.tokenizer.media_in(messages),
            seeds=tuple(seeds),
        )


@pytest.fixture
def rollout(tmp_path: Path) -> Iterator[SeeingRollout]:
    rollout = SeeingRollout(tmp_path, "tests.harness.showing.Shows", total=256, on_error="zero")
    yield rollout
    rollout.service.close()


def test_samples_carry_their_images_and_those_of_later_turns(rollout: SeeingRollout) -> None:
    seeing = rollout.seeing
    first, second = seeing.image(48, 40, 1), seeing.image(40, 48, 2)
    samples = rollout.run(
        rollout.shown(0, first, [1, 2]), rollout.shown(1, first, [3], second), rollout.shown(2, None, [4])
    )
    for (group, _), (sample, arrays) in samples.items():
        assert sample.reward == 1.0
        images = [[first], [first, second], []][group]
        assert [bytes(row).hex() for row in arrays.image_digests_IX] == [image.digest for image in images]
        assert sample.num_turns == 1 + (group == 1)
        request = msgspec.structs.replace(
            seeing.request(0, "", images), prompt_ids=tuple(arrays.token_ids_T[:1].tolist())
        )
        logprobs_T = np.concatenate([[0.0], seeing.logprobs(request, arrays.token_ids_T[1:])])
        made_T = arrays.loss_mask_T
        assert np.abs(logprobs_T - arrays.generation_logprobs_T)[made_T].max() < TOLERANCE


def test_samples_whose_images_cannot_be_read_fail_by_name_and_the_others_go_on(rollout: SeeingRollout) -> None:
    seeing = rollout.seeing
    there, gone, damaged = (seeing.image(48, 40, seed) for seed in range(3))
    seeing.images.path(gone.digest).unlink()
    seeing.images.path(damaged.digest).write_bytes(b"something else")
    samples = rollout.run(
        rollout.shown(0, gone, [1, 2]), rollout.shown(1, there, [3], damaged), rollout.shown(2, there, [4, 5])
    )
    for number in range(2):
        failed, arrays = samples[0, number]
        assert f"image {gone.digest[:12]} is not in" in failed.failure
        assert (failed.num_turns, failed.response_length, failed.reward) == (0, 0, 0.0)
        assert failed.dropped
        assert not arrays.loss_mask_T.any()
        assert samples[2, number][0].reward == 1.0
    failed, arrays = samples[1, 0]
    assert f"is not image {damaged.digest[:12]}" in failed.failure
    assert (failed.num_turns, failed.dropped) == (1, False)
    assert [bytes(row).hex() for row in arrays.image_digests_IX] == [there.digest], "its last turn is taken back"
    assert failed.response_length == arrays.loss_mask_T.sum() > 0


def test_such_a_sample_ends_the_run_if_that_is_asked_for(tmp_path: Path) -> None:
    rollout = SeeingRollout(tmp_path, "tests.harness.showing.Shows", total=256, on_error="fail")
    gone = rollout.seeing.image(48, 40, 1)
    rollout.seeing.images.path(gone.digest).unlink()
    assert f"image {gone.digest[:12]} is not in" in rollout.error(rollout.shown(0, gone, [1]))
    rollout.service.close()


def test_image_tokens_that_are_not_those_of_the_images_are_refused(rollout: SeeingRollout) -> None:
    group = rollout.shown(0, rollout.seeing.image(48, 40, 1), [1])
    for images, needed in (((), 0), ((*(group.media or ()), *(group.media or ())), 60)):
        what = rf"^Generate.groups\[0\].images: the prompt has 30 image tokens, its images need {needed}$"
        with pytest.raises(WireError, match=what):
            rollout.start(msgspec.structs.replace(group, media=images))
    assert rollout.run(group)


def test_a_text_model_refuses_images(tmp_path: Path) -> None:
    rollout = Rollout(tmp_path, "tests.harness.showing.Shows")
    image = ImageRef(digest="ab" * 32, width=1, height=1, grid=(1, 2, 2), num_tokens=1)
    group = msgspec.structs.replace(rollout.group(0, [1]), media=(image,))
    with pytest.raises(WireError, match=r"^Generate.groups\[0\].images: the model does not see$"):
        rollout.start(group)
    rollout.service.close()
