"""Layers are built of what their specifications name, in whichever form a release of Megatron-Core writes them."""

from __future__ import annotations

import functools
import types
import warnings
from typing import Any

import pytest

pytest.importorskip("megatron.core")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Megatron-Core's imports use what torch has deprecated
    from megatron.core.transformer.attention import SelfAttention
    from megatron.core.transformer.multi_latent_attention import MLASelfAttention
    from megatron.core.transformer.spec_utils import ModuleSpec

    from tandem.trainer.backends.megatron import releases


def test_submodules_are_found_in_specifications_and_in_calls() -> None:
    submodules = object()
    assert releases.submodules_of(ModuleSpec(module=SelfAttention, submodules=submodules)) is submodules
    assert releases.submodules_of(functools.partial(SelfAttention, submodules=submodules)) is submodules


@pytest.mark.parametrize("chooses", [False, True])
def test_latent_attention_has_the_norms_of_its_specification(chooses: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the release chooses norms by itself or not."""
    monkeypatch.delattr(MLASelfAttention, "_resolve_qk_norm_config", raising=False)
    if chooses:
        monkeypatch.setattr(MLASelfAttention, "_resolve_qk_norm_config", lambda self, submodules: {}, raising=False)
    latent, plain = ModuleSpec(module=MLASelfAttention), ModuleSpec(module=SelfAttention)
    for attention in (latent, plain):
        releases.keep_norms(attention)
    assert plain.module is SelfAttention
    if not chooses:
        assert latent.module is MLASelfAttention
        return
    parts: dict[str, Any] = {
        name: object()
        for name in ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj", "q_layernorm", "kv_layernorm")
    }
    named = types.SimpleNamespace(**parts, linear_proj=object())
    assert latent.module._resolve_qk_norm_config(None, named) == parts
