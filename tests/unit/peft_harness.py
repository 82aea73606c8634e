"""Models with adapters of PEFT, as trainers hold them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from lora_harness import RANK, SCALE

LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def adapted(model: Any, dtype: torch.dtype, layers: Sequence[str] = LAYERS) -> Any:
    """Return a model with adapters of PEFT on its linear layers; weights in `dtype`, adapters in float32."""
    import peft

    model = model.to(dtype)
    config = peft.LoraConfig(r=RANK, lora_alpha=int(SCALE * RANK), target_modules=[*layers])
    made = peft.get_peft_model(model, config)
    assert {p.dtype for name, p in made.named_parameters() if "lora_" in name} == {torch.float32}
    train(made)
    return made


def train(model: Any) -> None:
    """Change the adapters, in place."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.add_(torch.randn_like(parameter), alpha=0.05)


def parameters_of(model: Any) -> dict[str, torch.Tensor]:
    """Return the parameters by the names that layouts have."""
    return {
        name.removeprefix("base_model.model.").replace(".base_layer", "").replace(".default", ""): parameter
        for name, parameter in model.named_parameters()
    }
