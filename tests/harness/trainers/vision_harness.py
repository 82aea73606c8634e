"""Batches of tiny vision models, and plain Hugging Face with pixels to compare trainers with."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
import transformers
from PIL import Image

from tandem.common.messages import ImageRef
from tandem.config import Config
from tandem.config.models.vision_families import VISION
from tandem.samples.batch import SampleBatch, media_columns
from tandem.samples.images.families import expand, grid_of, num_tokens, read_settings, undrawable_ids
from tandem.samples.images.rows import image_folder
from tandem.samples.images.towers import load_processor, pixels, tower_inputs
from tandem.samples.model_files import load_tokenizer
from tests.harness.trainers.trainer_harness import make_config
from tests.harness.vision_models import picture


class Sequence_(NamedTuple):
    """A sequence of a batch: its pictures, the text around them, and the answer."""

    pictures: tuple[tuple[int, int, int], ...]
    """Width, height and seed of each."""
    question: str
    answer: str


SEQUENCES = (
    # Two prompts that differ in nothing but the picture, and each with two answers.
    Sequence_(((24, 16, 1),), "How many?", "two red"),
    Sequence_(((24, 16, 1),), "How many?", "3"),
    Sequence_(((24, 16, 2),), "How many?", "one"),
    Sequence_(((24, 16, 2),), "How many?", "four blue!"),
    Sequence_(((48, 40, 3), (16, 24, 5)), "Which of the two?", "left"),
    Sequence_(((48, 40, 3), (16, 24, 5)), "Which of the two?", "the right one"),
    Sequence_((), "No picture.", "so be it"),
    Sequence_((), "No picture.", "why"),
)


def vision_config(model: Path, runs: Path, *, algorithm: str = "grpo", **policy: Any) -> Config:
    """Return a configuration whose run's images are in a folder of `runs`."""
    config = make_config(model, algorithm=algorithm, **{"max_total_sequence_length": 512, **policy})
    return msgspec.structs.replace(config, logger=msgspec.structs.replace(config.logger, log_dir=str(runs)))


def encoded(width: int, height: int, seed: int) -> bytes:
    file = io.BytesIO()
    picture(width, height, seed).save(file, format="PNG")
    return file.getvalue()


def seeing_batch(config: Config, sequences: Sequence[Sequence_] = SEQUENCES, *, seed: int = 0) -> SampleBatch:
    """Return a batch of sequences, whose pictures are put into the run's folder."""
    random = np.random.default_rng(seed)
    settings = read_settings(Path(config.policy.tokenizer.name))
    tokenizer = transformers.AutoTokenizer.from_pretrained(config.policy.tokenizer.name)
    folder = image_folder(config)
    token_ids, masks, images = [], [], []
    for sequence in sequences:
        own = []
        for size in sequence.pictures:
            data = encoded(*size)
            digest = hashlib.sha256(data).hexdigest()
            folder.put(digest, data)
            grid = grid_of(settings, *size[:2])
            own.append(
                ImageRef(
                    digest=digest,
                    width=size[0],
                    height=size[1],
                    grid=grid,
                    num_tokens=num_tokens(settings, grid),
                )
            )
        content = [*({"type": "image"} for _ in own), {"type": "text", "text": sequence.question}]
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
        )
        prompt = tokenizer(expand(settings, text, [each.grid for each in own]), add_special_tokens=False)
        answer = tokenizer(sequence.answer, add_special_tokens=False)
        token_ids.append([*prompt["input_ids"], *answer["input_ids"]])
        masks.append(np.arange(len(token_ids[-1])) >= len(prompt["input_ids"]))
        images.append(own)
    mask_T = np.concatenate(masks)
    logprobs_T = np.where(mask_T, random.normal(-3.0, 0.3, len(mask_T)), 0.0).astype(np.float32)
    return SampleBatch(
        lengths_S=np.array([len(each) for each in token_ids], dtype=np.int32),
        token_ids_T=np.concatenate(token_ids).astype(np.int32),
        loss_mask_T=mask_T,
        generation_logprobs_T=logprobs_T,
        advantages_S=random.normal(0.0, 1.0, len(token_ids)).astype(np.float32),
        rewards_S=np.zeros(len(token_ids), dtype=np.float32),
        **media_columns(images),
    )


class PlainVision:
    """Hugging Face's own model, which is given pixels whole, one sequence at a time, by its tokens."""

    def __init__(self, config: Config, batch: SampleBatch, sequences: Sequence[Sequence_] = SEQUENCES) -> None:
        folder = Path(config.policy.model_name)
        self.model: Any = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
        family = VISION[self.model.config.model_type]
        # Tokens of pictures are never drawn.
        undrawable = torch.tensor(undrawable_ids(load_tokenizer(config), family))
        self.model.lm_head.register_forward_hook(lambda _, __, logits: logits.index_fill(-1, undrawable, -1e30))
        processor = load_processor(folder)
        self._family, self._images = family, {}
        offsets = batch.offsets()
        for row, sequence in enumerate(sequences):
            found = [
                pixels(family, processor, Image.open(io.BytesIO(encoded(*size))).convert("RGB"))
                for size in sequence.pictures
            ]
            key = batch.token_ids_T[offsets[row] : offsets[row + 1]].astype(np.int64).tobytes()
            assert key not in self._images, "sequences are told apart by their tokens"
            self._images[key] = tower_inputs(family, found) if found else {}

    def __call__(self, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        inputs = dict(self._images[input_ids[0].numpy().tobytes()])
        if self._family.has_mrope and inputs:
            inputs["mm_token_type_ids"] = (input_ids == self.model.config.image_token_id).long()
        if self._family.has_image_blocks:
            inputs["token_type_ids"] = (input_ids == self.model.config.image_token_id).long()
        return self.model(input_ids=input_ids, attention_mask=torch.ones_like(input_ids), **inputs, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)
