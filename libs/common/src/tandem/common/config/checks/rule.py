"""The type of a rule."""

from __future__ import annotations

from collections.abc import Callable

from tandem.common.config.schema import Config

Rule = Callable[[Config], None]
"""Raises `Invalid` if the configuration breaks it."""
