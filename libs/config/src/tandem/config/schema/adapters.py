"""Low-rank adapters, with the keys of each backend."""

from __future__ import annotations

from functools import cached_property
from typing import Literal

from tandem.config.schema.base import ConfigSection, NonEmptyStr, PositiveFloat, PositiveInt, Probability

Initial = Literal["xavier", "kaiming", "normal", "zero"]
"""Initialisation of a matrix: ``xavier`` is normal, ``kaiming`` uniform as in torch's linear layers, ``normal`` has
a standard deviation of 0.2."""


class AdaptersConfig(ConfigSection, frozen=True, kw_only=True):
    """Training of low-rank adapters beside the weights (LoRA, Hu et al. 2021, arXiv:2106.09685)."""

    enabled: bool = False
    """Train adapters and freeze the weights."""
    dim: PositiveInt = 8
    """Rank of the adapters."""
    alpha: PositiveFloat = 32.0
    """Scale of the adapters' output, divided by `dim`."""
    dropout: Probability = 0.0
    """Dropout probability of the adapters' inputs or outputs in training."""
    dropout_position: Literal["pre", "post"] = "post"
    """Position of dropout: before or after the adapter."""
    exclude_modules: tuple[NonEmptyStr, ...] = ()
    """Layers without adapters, overriding all other keys; named as in `target_modules`."""
    restore_from: NonEmptyStr | None = None
    """Folder of initial adapters, in PEFT's format, of the same rank, layers and scale. The reference of a loss is the
    model with them: the policy that training starts from."""

    @cached_property
    def scale(self) -> float:
        """Factor of the product of the two matrices."""
        return self.alpha / self.dim


class LoraCfg(AdaptersConfig, frozen=True, kw_only=True):
    """Training of low-rank adapters beside the weights with DTensor (LoRA, Hu et al. 2021, arXiv:2106.09685)."""

    lora_A_init: Literal["xavier", "kaiming"] = "xavier"
    """Initialisation of the first of the two matrices; the second starts at 0."""
    match_all_linear: bool = True
    """Whether every linear layer except the output layer has an adapter, routers and routed experts included as with
    PEFT's ``all-linear``, overriding `target_modules`."""
    target_modules: tuple[NonEmptyStr, ...] = ()
    """Layers with an adapter: the last parts of their names (``q_proj``), or whole names with ``*`` for any text.
    Routed experts: their projections, or ``*.experts.gate_up_proj``. ``all-linear``: as `match_all_linear`. Empty: all
    layers that are not excluded or, if none is, ``*_proj``."""
    use_triton: bool = False
    """Accepted: compute adapters with NeMo-RL's Triton kernels."""

    @cached_property
    def takes_all(self) -> bool:
        """Whether the layers with an adapter are those of PEFT's ``all-linear``, before exclusion."""
        return self.match_all_linear or "all-linear" in self.target_modules

    @cached_property
    def patterns(self) -> tuple[str, ...]:
        """Patterns of the layers with an adapter, before exclusion."""
        if self.takes_all or (self.exclude_modules and not self.target_modules):
            return ("*",)
        return self.target_modules or ("*_proj",)

    @cached_property
    def initial(self) -> tuple[Initial, Initial]:
        """Initialisation of the two matrices."""
        return self.lora_A_init, "zero"


class PeftConfig(AdaptersConfig, frozen=True, kw_only=True):
    """Training of low-rank adapters beside the weights with Megatron-Core (LoRA, arXiv:2106.09685)."""

    lora_A_init_method: Initial = "xavier"
    """Initialisation of the first of the two matrices."""
    lora_B_init_method: Initial = "zero"
    """Initialisation of the second matrix."""
    lora_dtype: NonEmptyStr | None = None
    """Element type of the adapters; null and ``None`` mean that of the weights."""
    target_modules: tuple[NonEmptyStr, ...] = ()
    """Layers with an adapter: ``linear_qkv``, ``linear_proj``, ``linear_fc1``, ``linear_fc2``, or whole names in
    Megatron-Core with ``*`` for any text. Empty: all of these four."""
    a2a_experimental: bool = False
    """Accepted: use NeMo-RL's experimental exchange between ranks."""

    @cached_property
    def patterns(self) -> tuple[str, ...]:
        """Patterns of the layers with an adapter, before exclusion."""
        return self.target_modules or ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")

    @cached_property
    def initial(self) -> tuple[Initial, Initial]:
        """Initialisation of the two matrices."""
        return self.lora_A_init_method, self.lora_B_init_method
