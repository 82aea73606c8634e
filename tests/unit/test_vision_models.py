"""The tiny vision models are whole: a seed tells their weights, and a picture changes what they say."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from tandem.samples.images.chat import VisionTokenizer
from tandem.samples.images.families import read_settings
from tandem.samples.images.reading import described
from tandem.samples.markers import marker
from tandem.samples.model_files import load_model_tokenizer
from tests.harness.vision_models import FAMILIES, encoded, image_processor, picture, write_vision_model


@pytest.mark.parametrize("family", FAMILIES)
def test_a_picture_changes_the_answer_and_every_weight_is_trained(family: str, tmp_path: Path) -> None:
    folder = write_vision_model(family, tmp_path / "a")
    again = write_vision_model(family, tmp_path / "b")
    other = write_vision_model(family, tmp_path / "c", seed=1)
    weights = [(each / "model.safetensors").read_bytes() for each in (folder, again, other)]
    assert weights[0] == weights[1] != weights[2]

    model = transformers.AutoModelForImageTextToText.from_pretrained(folder)
    settings, processor = read_settings(folder), image_processor(folder)
    tokenizer = VisionTokenizer(load_model_tokenizer(folder), folder)
    logits = []
    for seed in (1, 2):
        image = picture(56, 44, seed)
        text = f"{marker(*described(encoded(image), 'here')[0])}How many?"
        token_ids = tokenizer.encode_chat([{"role": "user", "content": text}], add_generation_prompt=True)
        ids = torch.tensor([token_ids])
        pixels = dict(processor(images=[image], return_tensors="pt"))
        pixels.pop("num_crops", None)
        kinds = (ids == settings.image_token_id).long()
        named = {"mm_token_type_ids": kinds} if settings.family.is_qwen else {}
        if settings.family.has_image_blocks:
            named = {"token_type_ids": kinds}
        logits.append(model(input_ids=ids, **pixels, **named).logits[0, -1])
    assert (logits[0] - logits[1]).abs().max() > 1e-3
    logits[0].square().sum().backward()
    assert not [name for name, weight in model.named_parameters() if weight.grad is None or not weight.grad.any()]
