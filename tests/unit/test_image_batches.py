"""Images of a batch: they lie end to end as tokens do, go with their sequences, and tell prompts apart."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from tandem.common.errors import WireError
from tandem.common.messages import ImageRef
from tandem.samples.batch import MEDIA, TOKENS, SampleBatch, build_given_table, media_columns, media_of
from tandem.samples.markers import MarkedImage, marked_in, marker, shown, split_at_markers
from tandem.trainer.batching.images import check_images


def image(number: int) -> ImageRef:
    digest = hashlib.sha256(bytes([number])).hexdigest()
    return ImageRef(digest=digest, width=8 * number, height=16, grid=(1, 2, number), num_tokens=number)


def batch_of(*images: tuple[ImageRef, ...], tokens: tuple[int, ...] = (5, 6, 7)) -> SampleBatch:
    num = len(images)
    return SampleBatch(
        lengths_S=np.full(num, len(tokens), np.int32),
        token_ids_T=np.tile(np.array(tokens, np.int32), num),
        loss_mask_T=np.tile(np.arange(len(tokens)) == len(tokens) - 1, num),
        advantages_S=np.ones(num, np.float32),
        rewards_S=np.zeros(num, np.float32),
        **media_columns(images),
    )


def digests_of(batch: SampleBatch) -> list[list[str]]:
    return [
        [media_of(batch, row)[start : start + 32].hex() for start in range(0, 32 * int(count), 32)]
        for row, count in enumerate(batch.num_images_S)
    ]


def test_images_go_with_their_sequences() -> None:
    one, two, three = image(1), image(2), image(3)
    batch = batch_of((one, two), (), (three,))
    assert digests_of(batch) == [[one.digest, two.digest], [], [three.digest]]
    assert digests_of(batch.take([2, 0])) == [[three.digest], [one.digest, two.digest]]
    assert digests_of(batch.take(slice(1, 3))) == [[], [three.digest]]
    assert batch.take([2]).image_grids_IX.tolist() == [[1, 2, 3]]
    joined = SampleBatch.concatenate([batch.take([2]), batch.take([1, 0])])
    assert digests_of(joined) == [[three.digest], [], [one.digest, two.digest]]


def test_equal_tokens_with_other_images_are_another_prompt() -> None:
    one, two = image(1), image(2)
    assert build_given_table(batch_of((one,), (two,), (one,))).prompt_S.tolist() == [0, 1, 0]


def test_grids_of_families_with_fewer_numbers_are_padded() -> None:
    crops = ImageRef(digest="0" * 64, width=1, height=1, grid=(2, 3), num_tokens=4)
    fixed = ImageRef(digest="1" * 64, width=1, height=1, num_tokens=4)
    assert media_columns([(crops, fixed)])["image_grids_IX"].tolist() == [[2, 3, 0], [0, 0, 0]]


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("num_images_S", np.array([-1, 1], np.int32), "num_images_S: -1, must be at least 0"),
        ("num_images_S", np.array([1, 2], np.int32), "does not fit num_images_S, which add up to 3"),
        ("image_digests_IX", np.zeros((2, 31), np.uint8), "image_digests_IX: 31 numbers an image, must be 32"),
        ("image_grids_IX", np.full((2, 3), -1, np.int32), "image_grids_IX: -1, must be at least 0"),
    ],
)
def test_impossible_images_are_refused(name: str, value: np.ndarray, told: str) -> None:
    columns = batch_of((image(1),), (image(2),)).only((*TOKENS, *MEDIA)).columns | {name: value}
    with pytest.raises(WireError) as caught:
        check_images(SampleBatch.parse_frames(columns, (*TOKENS, *MEDIA)))
    assert told in str(caught.value)


def test_markers_stand_in_a_text() -> None:
    first, second = marker("a" * 64, 640, 480), marker("b" * 64, 1, 2)
    text = f"{first}What is it? {second}{first} Say."
    assert split_at_markers(text) == [
        MarkedImage("a" * 64, 640, 480),
        "What is it? ",
        MarkedImage("b" * 64, 1, 2),
        MarkedImage("a" * 64, 640, 480),
        " Say.",
    ]
    assert [each.digest[0] for each in marked_in(text)] == ["a", "b", "a"]
    assert split_at_markers("no picture ⟦image⟧") == ["no picture ⟦image⟧"]
    assert shown(text) == "[image 640×480 aaaaaa]What is it? [image 1×2 bbbbbb][image 640×480 aaaaaa] Say."
