"""Models with adapters of PEFT, as trainers hold them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lora_harness import RANK, SCALE

from tandem.config.models.lora import is_adapter
from tandem.config.schema.adapters import LoraCfg
from tandem.trainer import lora
from tandem.trainer.files.adapter_files import AdapterDescription, AdapterWriter

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


def adapted_experts(model: Any, dtype: torch.dtype) -> tuple[Any, AdapterDescription]:
    """Return a model as trainers adapt it, with adapters of experts and routers too, and their description."""
    patterns = ("*_proj", "router")
    settings = LoraCfg(enabled=True, dim=RANK, alpha=SCALE * RANK, match_all_linear=False, target_modules=patterns)
    model = model.to(dtype)
    if model.config.model_type != "gpt_oss":
        settings = LoraCfg(enabled=True, dim=RANK, alpha=SCALE * RANK)
    described = lora.inject(model, settings, 0, "base")
    train(model)
    return model, described


def as_peft(model: Any, described: AdapterDescription, base: Any, folder: Path) -> Any:
    """Return PEFT's model with the adapters of a trainer's, by way of the file."""
    import peft

    writer = AdapterWriter(folder, described)
    writer.add({name: each.detach() for name, each in lora.parameters_of(model).items() if is_adapter(name)})
    writer.finish()
    return peft.PeftModel.from_pretrained(base, folder).eval()


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
