"""A plain loop with PEFT for any loss, which knows nothing of ranks, and what its adapters begin and end with."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import peft
import pytest
import torch
import transformers
from peft.tuners.lora import LoraLayer
from safetensors.torch import save_file

from tandem.samples.batch import SampleBatch
from tests.harness.trainers.reference import logprobs_of, sequences_of
from tests.harness.trainers.trainer_harness import ADAMW

TOLERANCE = 1e-5
RANK, ALPHA = 4, 16
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""The layers that Megatron-Core's fuse."""
Loss = Callable[[Any, SampleBatch], torch.Tensor]
"""Of a model and a batch, with gradient."""


class Start(NamedTuple):
    """What a plain loop and a backend begin with."""

    folder: Path
    """Of the model."""
    adapters: Path
    """Adapters of it in PEFT's format: both matrices other than zero."""
    shares: bool
    """Whether projections that Megatron-Core fuses have one ``lora_A``."""

    def load(self) -> Any:
        """Return PEFT's model, whose adapters are trained."""
        model = transformers.AutoModelForCausalLM.from_pretrained(self.folder)
        with without_warnings():
            adapted = peft.PeftModel.from_pretrained(model, self.adapters, is_trainable=True)
        if self.shares:
            _tie(model)
        return adapted


class Trained(NamedTuple):
    """What training came to."""

    steps: list[tuple[float, float]]
    """Loss and gradient norm of each."""
    adapters: dict[str, torch.Tensor]
    """By PEFT's names."""


@contextmanager
def without_warnings() -> Iterator[None]:
    """PEFT asks for a name that transformers will drop."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        # It looks for a parameter's rank among the names of modules, and warns though it has taken it.
        warnings.filterwarnings("ignore", "The following (rank|alpha)_pattern keys did not match", RuntimeWarning)
        yield


def write_adapters(folder: Path, into: Path, *, shares: bool = False, with_experts: bool = False) -> Start:
    """Write random adapters of all linear layers of the model in a folder, and of experts and routers if asked for."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    head = model.get_output_embeddings()
    linear = [name for name, each in model.named_modules() if isinstance(each, torch.nn.Linear) and each is not head]
    # PEFT would take the feed-forward layers beside routed experts for those, which are one parameter.
    has_experts = any(".experts." in name for name, _ in model.named_parameters())
    beside = [name for name in linear if ".mlp." in name and has_experts]
    if with_experts:  # its word for all layers takes the others
        beside = [name for name in beside if name.endswith((".gate_proj", ".up_proj", ".down_proj"))]
    settings = peft.LoraConfig(
        r=RANK,
        lora_alpha=ALPHA,
        target_modules="all-linear" if with_experts else [name for name in linear if name not in beside],
        target_parameters=[f"{name}.weight" for name in beside],
        task_type="CAUSAL_LM",
    )
    with without_warnings():
        adapted = peft.get_peft_model(model, settings)
    if shares:
        _tie(model)
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.1)
    adapted.save_pretrained(str(into))
    # PEFT leaves a tensor that has two names out under one of them.
    save_file({name: each.clone() for name, each in state_of(adapted).items()}, into / "adapter_model.safetensors")
    return Start(folder, into, shares)


def _tie(model: Any) -> None:
    """Give what Megatron-Core fuses one ``lora_A``."""
    for module in model.modules():
        for names in FUSED:
            if all(isinstance(getattr(module, name, None), LoraLayer) for name in names):
                first, *others = (getattr(module, name).lora_A["default"] for name in names)
                for other in others:
                    other.weight = first.weight


def state_of(adapted: Any) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = peft.get_peft_model_state_dict(adapted)
    return state


def sft_loss(model: Any, batch: SampleBatch) -> torch.Tensor:
    """The mean of the counted tokens, a conversation at a time."""
    loss = torch.zeros(())
    for each in sequences_of(batch):
        loss = loss - logprobs_of(model, each["token_ids"])[each["mask"]].sum()
    return loss / int(batch.loss_mask_T.sum())


def grpo_loss(model: Any, batch: SampleBatch, reference: Any, kl: float) -> torch.Tensor:
    """The mean of the counted tokens of a first step on samples, with a k3 penalty."""
    loss = torch.zeros(())
    for each in sequences_of(batch):
        with torch.no_grad():
            before = logprobs_of(reference, each["token_ids"])
        logprobs = logprobs_of(model, each["token_ids"])
        ratio, difference = (logprobs - logprobs.detach()).exp(), before - logprobs
        penalty = kl * ratio * (difference.exp() - 1 - difference)
        loss = loss + (penalty - ratio * each["advantage"])[each["mask"]].sum()
    return loss / int(batch.loss_mask_T.sum())


def plain_steps(start: Start, batches: Sequence[SampleBatch], loss_of: Loss) -> Trained:
    """Take a step a batch."""
    adapted = start.load()
    trained = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, **ADAMW)
    steps = []
    for batch in batches:
        loss = loss_of(adapted, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        steps.append((loss.item(), norm.item()))
    return Trained(steps, {name: each.detach().clone() for name, each in state_of(adapted).items()})


def assert_same_training(steps: Sequence[tuple[float, float]], checkpoint: Path, start: Start, plain: Trained) -> None:
    """Compare the steps of a rank, and the adapters that PEFT reads from a checkpoint's folder."""
    for (loss, norm), (expected_loss, expected_norm) in zip(steps, plain.steps, strict=True):
        assert loss == pytest.approx(expected_loss, abs=TOLERANCE)
        assert norm == pytest.approx(expected_norm, rel=TOLERANCE)
    model = transformers.AutoModelForCausalLM.from_pretrained(start.folder)
    with without_warnings():
        found = state_of(peft.PeftModel.from_pretrained(model, checkpoint))
    assert found.keys() == plain.adapters.keys()
    for name, expected in plain.adapters.items():
        torch.testing.assert_close(found[name], expected, rtol=0, atol=TOLERANCE, msg=lambda m, n=name: f"{n}: {m}")
