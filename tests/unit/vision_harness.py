"""Tiny vision models, their engine, and Hugging Face's own forward pass, for the tests of engines."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from engine_harness import refit, sampling
from numpy.typing import NDArray

from tandem.common.messages import ImageRef
from tandem.rollout.engine import SequenceRequest
from tandem.rollout.engines.vision import VisionEngine
from tandem.samples.images.families import expand, grid_of, num_tokens, read_settings, undrawable_ids
from tandem.samples.images.reading import decode, described
from tandem.samples.images.store import ImageFolder
from tandem.samples.images.towers import load_processor, pixels, tower_inputs
from tandem.samples.model_files import load_model_tokenizer
from tandem.samples.tokenizer import Tokenizer
from tests.harness.vision_models import picture, write_vision_model


class Seeing:
    """A tiny vision model, in a folder, with a folder of images beside it."""

    def __init__(self, family: str, folder: Path, seed: int = 0, images: Path | None = None) -> None:
        self.folder = write_vision_model(family, folder / "model", seed)
        self.settings = read_settings(self.folder)
        self.tokenizer: Tokenizer = load_model_tokenizer(self.folder)
        self.undrawable = undrawable_ids(self.tokenizer, self.settings.family)
        self.images = ImageFolder(images or folder / "images")
        self.model = transformers.AutoModelForImageTextToText.from_pretrained(self.folder, dtype=torch.float32).eval()
        self._processor = load_processor(self.folder)

    def engine(self, *, num_slots: int = 8, max_length: int = 512, **changes: Any) -> VisionEngine:
        """Build an engine that holds version 0, the weights of the model."""
        engine = VisionEngine(
            self.folder,
            num_slots=num_slots,
            max_total_sequence_length=max_length,
            dtype="float32",
            read_image=self.images.get,
            undrawable=self.undrawable,
            **changes,
        )
        refit(engine, self.model, 0)
        return engine

    def image(self, width: int, height: int, seed: int) -> ImageRef:
        """Draw a picture, keep it among the images, and return its reference."""
        file = io.BytesIO()
        picture(width, height, seed).save(file, "PNG")
        found, data = described(file.getvalue(), "test")
        self.images.put(found.digest, data)
        grid = grid_of(self.settings, width, height)
        return ImageRef(**found._asdict(), grid=grid, num_tokens=num_tokens(self.settings, grid))

    def tokens(self, text: str, images: Sequence[ImageRef] = ()) -> tuple[int, ...]:
        """Return the tokens of a text after those of images."""
        shown = self.settings.family.part * len(images) + text
        return tuple(self.tokenizer.encode(expand(self.settings, shown, [image.grid for image in images])))

    def request(
        self, number: int, text: str, images: Sequence[ImageRef] = (), *, seed: int | None = None, **changes: Any
    ) -> SequenceRequest:
        """Build a request for a response to images and a text."""
        return SequenceRequest(
            request_id=number,
            prompt_ids=self.tokens(text, images),
            media=tuple(images),
            sampling=sampling(**changes),
            seed=number if seed is None else seed,
        )

    def logprobs(
        self, request: SequenceRequest, token_ids_T: NDArray[np.int32], *, model: Any = None
    ) -> NDArray[np.float32]:
        """Return the log-probabilities of a response by Hugging Face's own forward pass over the whole sequence."""
        logprobs_TV = self.distributions(request, token_ids_T, model=model)
        result: NDArray[np.float32] = logprobs_TV.gather(1, torch.tensor(token_ids_T)[:, None].long())[:, 0].numpy()
        return result

    def distributions(
        self, request: SequenceRequest, token_ids_T: NDArray[np.int32], *, model: Any = None
    ) -> torch.Tensor:
        """Return the log-probabilities of every token at the positions of a response, likewise."""
        ids_1T = torch.tensor([[*request.prompt_ids, *token_ids_T.tolist()]])
        inputs: dict[str, Any] = {"input_ids": ids_1T, "attention_mask": torch.ones_like(ids_1T)}
        family = self.settings.family
        if request.media:
            own = [pixels(family, self._processor, decode(self.images.get(each.digest))) for each in request.media]
            inputs |= tower_inputs(family, own)
            if family.is_qwen:
                inputs["mm_token_type_ids"] = (ids_1T == self.settings.image_token_id).long()
        if family.has_image_blocks:
            inputs["token_type_ids"] = (ids_1T == self.settings.image_token_id).long()
        with torch.no_grad():
            logits_TV = (model or self.model)(**inputs, use_cache=False).logits[0, len(request.prompt_ids) - 1 : -1]
        logits_TV[:, list(self.undrawable)] = -torch.inf
        return (logits_TV / (request.sampling.temperature or 1.0)).log_softmax(dim=-1)

    def count(self, engine: VisionEngine) -> list[int]:
        """Return a list that grows by one with every pass through an engine's tower."""
        passes: list[int] = []
        prefix = self.settings.family.tower_prefix.rstrip(".")
        engine._model.get_submodule(prefix).register_forward_hook(lambda *_: passes.append(1))
        return passes
