"""The base of every section, and the constrained types that sections share.

The docstring under each field is its entry in ``docs/configuration.md``. A docstring that begins with ``New.`` marks
a key that NeMo-RL v0.3 does not have.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta


class ConfigSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """The base of every section of the configuration."""


PositiveInt = Annotated[int, Meta(ge=1)]
NonNegativeInt = Annotated[int, Meta(ge=0)]
PositiveFloat = Annotated[float, Meta(gt=0)]
NonNegativeFloat = Annotated[float, Meta(ge=0)]
Probability = Annotated[float, Meta(ge=0.0, lt=1.0)]
Fraction = Annotated[float, Meta(gt=0.0, le=1.0)]
Seed = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Port = Annotated[int, Meta(ge=1, le=65535)]
NonEmptyStr = Annotated[str, Meta(min_length=1)]
