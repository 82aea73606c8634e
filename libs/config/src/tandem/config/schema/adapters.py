"""Low-rank adapters, as each backend's section has them."""

from __future__ import annotations

from typing import Literal

from tandem.config.schema.base import NonEmptyStr, PositiveFloat, PositiveInt, Probability, Section

Initial = Literal["xavier", "kaiming", "normal", "zero"]
"""How a matrix begins: ``xavier`` is normal, ``kaiming`` uniform as in torch's linear layers, ``normal`` has a standard
deviation of 0.2."""


class Adapters(Section, frozen=True, kw_only=True):
    """Training of low-rank adapters beside the weights (LoRA, Hu et al. 2021, arXiv:2106.09685)."""

    enabled: bool = False
    """Train adapters, and leave the weights as they are."""
    dim: PositiveInt = 8
    """Rank of the adapters."""
    alpha: PositiveFloat = 32.0
    """What they add is multiplied by this over `dim`."""
    dropout: Probability = 0.0
    """Probability of each of their inputs, or outputs, to be left out in training steps."""
    dropout_position: Literal["pre", "post"] = "post"
    """Before or after the adapter."""
    exclude_modules: tuple[NonEmptyStr, ...] = ()
    """Layers that have none, whatever else says that they have: as `target_modules` names them."""
    restore_from: NonEmptyStr | None = None
    """Folder of adapters to begin with, in PEFT's format, of the same rank, layers and scale."""

    @property
    def scale(self) -> float:
        """What the product of the two matrices is multiplied by."""
        return self.alpha / self.dim


class LoraCfg(Adapters, frozen=True, kw_only=True):
    """Training of low-rank adapters beside the weights with DTensor (LoRA, Hu et al. 2021, arXiv:2106.09685)."""

    lora_A_init: Literal["xavier", "kaiming"] = "xavier"
    """How the first of the two matrices begins; the second begins at 0."""
    match_all_linear: bool = True
    """Whether every linear layer but the output layer has one, whatever `target_modules` says."""
    target_modules: tuple[NonEmptyStr, ...] = ()
    """Layers that have one: the last parts of their names (``q_proj``), or whole names with ``*`` for any text. None
    means all that are not excluded or, where none is, ``*_proj``."""
    use_triton: bool = False
    """Accepted: compute them with NeMo-RL's Triton kernels."""

    @property
    def patterns(self) -> tuple[str, ...]:
        """What names the layers that have one, unless they are excluded."""
        if self.match_all_linear or (self.exclude_modules and not self.target_modules):
            return ("*",)
        return self.target_modules or ("*_proj",)

    @property
    def initial(self) -> tuple[Initial, Initial]:
        """How the two matrices begin."""
        return self.lora_A_init, "zero"


class Peft(Adapters, frozen=True, kw_only=True):
    """Training of low-rank adapters beside the weights with Megatron-Core (LoRA, arXiv:2106.09685)."""

    lora_A_init_method: Initial = "xavier"
    """How the first of the two matrices begins."""
    lora_B_init_method: Initial = "zero"
    """How the second begins."""
    lora_dtype: NonEmptyStr | None = None
    """Their element type; null, and ``None``, mean that of the weights."""
    target_modules: tuple[NonEmptyStr, ...] = ()
    """Layers that have one: ``linear_qkv``, ``linear_proj``, ``linear_fc1``, ``linear_fc2``, or whole names in
    Megatron-Core with ``*`` for any text. None means all of these four."""
    a2a_experimental: bool = False
    """Accepted: use NeMo-RL's experimental exchange between ranks."""

    @property
    def patterns(self) -> tuple[str, ...]:
        """What names the layers that have one, unless they are excluded."""
        return self.target_modules or ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")

    @property
    def initial(self) -> tuple[Initial, Initial]:
        """How the two matrices begin."""
        return self.lora_A_init_method, self.lora_B_init_method
