"""Low-rank adapters, as each backend's section has them: known, and not built."""

from __future__ import annotations

from typing import Literal

from tandem.common.config.schema.base import NonEmptyStr, NonNegativeFloat, PositiveFloat, PositiveInt, Section


class Adapters(Section, frozen=True, kw_only=True):
    """Training of low-rank adapters beside the weights (LoRA, Hu et al. 2021, arXiv:2106.09685)."""

    enabled: bool = False
    """Train adapters, and leave the weights as they are."""
    dim: PositiveInt = 8
    """Rank of the adapters."""
    alpha: PositiveFloat = 32.0
    """What they add is multiplied by this over `dim`."""
    dropout: NonNegativeFloat = 0.0
    """Probability of each of their inputs, or outputs, to be left out."""
    dropout_position: Literal["pre", "post"] = "post"
    """Before or after the adapter."""
    exclude_modules: tuple[NonEmptyStr, ...] = ()
    """Names of layers that have none."""
    restore_from: NonEmptyStr | None = None
    """Folder of adapters to begin with."""


class LoraCfg(Adapters, frozen=True, kw_only=True):
    """Training of low-rank adapters beside the weights with DTensor (LoRA, Hu et al. 2021, arXiv:2106.09685)."""

    lora_A_init: NonEmptyStr = "xavier"
    """How the first of the two matrices begins; the second begins at 0."""
    match_all_linear: bool = True
    """Whether every linear layer has one, whatever `target_modules` says."""
    target_modules: tuple[NonEmptyStr, ...] = ()
    """Names of the layers that have one, with ``*`` for any text."""
    use_triton: bool = True
    """Compute them with NeMo-RL's Triton kernels."""


class Peft(Adapters, frozen=True, kw_only=True):
    """Training of low-rank adapters beside the weights with Megatron-Core (LoRA, arXiv:2106.09685)."""

    lora_A_init_method: NonEmptyStr = "xavier"
    """How the first of the two matrices begins."""
    lora_B_init_method: NonEmptyStr = "zero"
    """How the second begins."""
    lora_dtype: NonEmptyStr | None = None
    """Their element type; null, and ``None``, mean that of the weights."""
    target_modules: tuple[NonEmptyStr, ...] = ()
    """Names of the layers that have one, with ``*`` for any text; none means every linear layer."""
    a2a_experimental: bool = False
    """Use NeMo-RL's experimental exchange between ranks."""
