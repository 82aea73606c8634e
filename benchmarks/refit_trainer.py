"""The trainer of a refit without training: a model's memory, and new weights on demand."""

from __future__ import annotations

from typing import Any

import torch
from processes import EndpointService

from tandem.launch.service import ServiceContext
from tandem.refit.weight_client import WeightClient
from tandem.trainer.exposed_weights import weights_of


class Trainer(EndpointService):
    """A trainer's memory: a model whose parameters are shared, and an endpoint."""

    def __init__(self, context: ServiceContext, folder: str) -> None:
        self._model = _model(folder)
        weights = weights_of(dict(self._model.named_parameters()))
        self.layout = weights.layout
        self.weight_client = WeightClient(context, weights)

    def write(self, version: int) -> None:
        """Be the optimizer: change every parameter."""
        with torch.no_grad():
            for name, parameter in self._model.named_parameters():
                parameter.normal_(
                    1.0 if "norm" in name else 0.0, 0.02, generator=torch.Generator().manual_seed(version)
                )

    def expected(self, prompt_ids: list[int]) -> int:
        """Return the token that Hugging Face's own model has for most probable after a prompt."""
        with torch.inference_mode():
            return int(self._model(torch.tensor([prompt_ids])).logits[0, -1].argmax())


def _model(folder: str) -> Any:
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
