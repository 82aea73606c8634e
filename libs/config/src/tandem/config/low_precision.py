"""Matrix products of fewer bits by Transformer Engine, as ``policy.megatron_cfg`` requests them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from tandem.config.schema import MegatronCfg

DELAYED = "delayed"
"""The recipe of Megatron-Core that is not supported; it is its default for float8."""

_TOKENS = {"tensorwise": 16, "mxfp8": 32, "blockwise": 128, "nvfp4": 128}
"""Divisor of the tokens that a kernel takes, by recipe. An unknown recipe gets the largest.

A weight's gradient is a product along tokens. NeMo-RL has the same divisors for packed rows.
"""
_CAPABILITIES = {"tensorwise": (8, 9), "blockwise": (9, 0), "mxfp8": (10, 0), "nvfp4": (10, 0)}
"""Least compute capability of a GPU, by recipe."""


class LowPrecisionProducts(msgspec.Struct, frozen=True):
    """The matrix products that a section requests."""

    name: str
    """``fp8`` or ``fp4``, the argument of Megatron-Core."""
    format: str
    """Format of the numbers."""
    recipe: str
    """Choice of the scales."""
    has_section: bool
    """Whether a section of their own requests them, as in NeMo-RL, or arguments of Megatron-Core."""

    @property
    def key(self) -> str:
        """Key that requests them, under ``megatron_cfg``."""
        return f"{self.name}_cfg.enabled" if self.has_section else self.name

    @property
    def value(self) -> str:
        """Value of that key, as an error shows it."""
        return "true" if self.has_section else str(self.format)

    @property
    def recipe_key(self) -> str:
        """Key that chooses the scales, under ``megatron_cfg``."""
        return f"{self.name}_cfg.{self.name}_recipe" if self.has_section else f"{self.name}_recipe"

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of Megatron-Core's ``TransformerConfig``. Weights stay in the precision of the model."""
        return {self.name: self.format, f"{self.name}_recipe": self.recipe, f"{self.name}_param": False}

    @property
    def token_divisor(self) -> int:
        """Divisor of the tokens that a rank multiplies at once."""
        return _TOKENS.get(self.recipe, max(_TOKENS.values()))

    @property
    def capability(self) -> tuple[int, int]:
        """Least compute capability of a GPU; (0, 0) if the recipe is the user's own."""
        return _CAPABILITIES.get(self.recipe, (0, 0))


def list_products(megatron: MegatronCfg) -> tuple[LowPrecisionProducts, ...]:
    """Return what a section requests; more than one is a mistake."""
    products = []
    if megatron.fp8_cfg is not None and megatron.fp8_cfg.enabled:
        products.append(LowPrecisionProducts("fp8", megatron.fp8_cfg.fp8, megatron.fp8_cfg.fp8_recipe, True))
    if megatron.fp4_cfg is not None and megatron.fp4_cfg.enabled:
        products.append(LowPrecisionProducts("fp4", megatron.fp4_cfg.fp4, megatron.fp4_cfg.fp4_recipe, True))
    arguments = megatron.forwarded
    for name, default in (("fp8", DELAYED), ("fp4", "nvfp4")):
        if arguments.get(name) is not None:
            products.append(
                LowPrecisionProducts(name, arguments[name], arguments.get(f"{name}_recipe") or default, False)
            )
    return tuple(products)
