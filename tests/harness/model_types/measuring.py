"""One type of model through every column of the table, beside plain Transformers and PEFT.

A column is ``yes``, or why not: in the product's words where it refuses. A number that differs, or an error that is
nobody's message, is a defect, and is told apart from a refusal.
"""

from __future__ import annotations

import copy
import functools
import io
import re
import traceback
import warnings
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
import transformers
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from tandem.common.errors import TandemError
from tandem.config import Config
from tandem.config.checks.megatron import check_architecture_is_megatrons
from tandem.config.models.families import VLLM
from tandem.config.schema import NewModel
from tandem.rollout.engines.transformers import TransformersEngine
from tandem.samples.model_files import write_new_model
from tandem.trainer.backends.dtensor import DTensorBackend
from tandem.trainer.lora import linear_layers
from tests.harness.model_types.shrinking import shrink
from tests.harness.trainers.megatron_harness import config_for, make
from tests.harness.trainers.reference import plain_grpo
from tests.harness.trainers.reference_lora import sft_loss
from tests.harness.trainers.trainer_harness import (
    ADAMW,
    CHARACTERS,
    VOCABULARY,
    make_config,
    make_groups,
    train_on,
)
from tests.unit.engine_harness import make_programs, reference_logprobs, request, run_all, shared_layout

TOLERANCE = 1e-5
"""Of losses, log-probabilities and weights, absolutely, and of gradient norms relatively."""
BATCH = make_groups(4, 4, seed=0)
TEMPERATURE, KL = 0.7, 0.1
BY_TOKENS = {"enabled": True, "train_mb_tokens": 64, "logprob_mb_tokens": 64, "sequence_length_round": 8}
ROWS: dict[str, dict[str, Any]] = {
    "padded": {"share_prompts": False},
    "packed": {"sequence_packing": BY_TOKENS},
    "shared": {"share_prompts": True},
}
"""Settings of the policy by the column of what its rows hold."""
COLUMNS = (*ROWS, "export", "engine", "lora", "megatron", "vllm")
YES, REFUSED, DEFECT = "yes", "refused: ", "defect: "


class DifferenceError(Exception):
    """A number that is not that of plain Transformers or PEFT."""


def make_tiny(model_type: str, folder: Path) -> Path:
    """Write a random model of a type with its tokenizer, whose attention is far from even."""
    write_new_model(folder, NewModel(config={"model_type": "llama"}, characters=CHARACTERS, seed=0))
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(shrink(model_type), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.05 if parameter.dim() == 1 else 0.15))
        has_indexers = any("Indexer" in type(module).__name__ for module in model.modules())
        for module in model.modules():
            if isinstance(module, torch.nn.Embedding) and module.padding_idx is not None and not has_indexers:
                module.weight[module.padding_idx] = 0.0  # as Transformers makes it; to an indexer all keys would tie
        for name, buffer in model.named_buffers():
            if name in model.state_dict() and name.endswith(("bias", "biases")):  # what a router adds to its scores
                buffer.add_(torch.randn_like(buffer) * 0.05)
    model.save_pretrained(folder)
    return folder


def load(folder: Path) -> Any:
    """Return plain Transformers' model of a folder, without a cache, for which Dory's rows may be too long."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    model.config.use_cache = False
    return model


def measure(rank: int, model_type: str, folder: Path) -> dict[str, str]:
    """Return every column of a type."""
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()
    measured = MeasuredType(make_tiny(model_type, folder / "model"), folder)
    outcomes = {column: find_outcome(functools.partial(measured.train, column), model_type) for column in ROWS}
    for column in COLUMNS[len(ROWS) :]:
        trains = outcomes["padded"] == YES or column != "export"
        outcomes[column] = find_outcome(getattr(measured, column), model_type) if trains else outcomes["padded"]
    return outcomes


def find_outcome(action: Callable[[], None], model_type: str) -> str:
    """Return ``yes``, or why not."""
    try:
        action()
    except TandemError as error:
        return REFUSED + shorten(str(error), model_type)
    except DifferenceError as error:
        return DEFECT + str(error)
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(last.filename).name}:{last.lineno}"
        return f"{DEFECT}{type(error).__name__} in {place}: {str(error).splitlines()[0][:160] if str(error) else ''}"
    return YES


def shorten(message: str, model_type: str) -> str:
    """Return the reason alone of a message that says where and which model."""
    for beginning in (
        r".* cannot take packed rows: ",
        r".*policy\.share_prompts has no effect: \w+ cannot share: ",
        r".* cannot be trained: ",
        rf".*the embedded engine cannot run {re.escape(model_type)}: ",
        r".*the embedded engine cannot run this architecture: ",
    ):
        message = re.sub(rf"^{beginning}", "", message, flags=re.DOTALL)
    return " ".join(message.split())


def check(difference: Any, name: str, tolerance: float = TOLERANCE) -> None:
    """Raise `DifferenceError` where a difference is too large, or is not a number."""
    if not float(difference) <= tolerance:
        raise DifferenceError(f"{name} by {float(difference):.1g}")


class MeasuredType:
    """A tiny model of one type, and what it was trained to."""

    def __init__(self, folder: Path, scratch: Path) -> None:
        """Train it in a plain loop."""
        self._folder, self._scratch = folder, scratch
        self._plain = load(folder)
        self._steps = plain_grpo(self._plain, [BATCH], size=4, temperature=TEMPERATURE, kl=KL)
        self._backend: DTensorBackend | None = None

    def _config(self, **policy: Any) -> Config:
        return make_config(
            self._folder,
            loss={"reference_policy_kl_penalty": KL},
            temperature=TEMPERATURE,
            train_global_batch_size=4,
            train_micro_batch_size=4,
            **policy,
        )

    def train(self, column: str) -> None:
        """Take two optimizer steps, with log-probabilities of the policy before them and of a reference."""
        config = self._config(**ROWS[column])
        with redirect_stdout(io.StringIO()) as printed:
            backend = DTensorBackend(config, checkpoint=None)
        if column == "shared" and not backend.shares_prompts:
            raise TandemError(printed.getvalue())
        metrics = train_on(backend, BATCH, config).metrics
        losses, norms = zip(*self._steps, strict=True)
        check(abs(metrics["loss"] - np.mean(losses)), "the loss differs")
        check(abs(metrics["grad_norm"] / np.mean(norms) - 1), "the gradient norm differs", 10 * TOLERANCE)
        self._compare({name: whole(tensor) for name, tensor in backend.policy.parameters.items()})
        if column == "padded":
            self._backend = backend

    def _compare(self, parameters: dict[str, torch.Tensor]) -> None:
        expected = dict(self._plain.named_parameters())
        if parameters.keys() != expected.keys():
            raise DifferenceError(f"other parameters: {sorted(parameters.keys() ^ expected.keys())[:2]}")
        for name, tensor in parameters.items():
            check((tensor - expected[name]).abs().max(), f"{name} differs")

    def export(self) -> None:
        """Save the trained model, and read all of it with plain Transformers."""
        assert self._backend is not None, "it trains"
        self._backend.save(self._scratch / "saved").num_bytes.result()
        kind = transformers.AutoModelForCausalLM
        loaded, info = kind.from_pretrained(self._scratch / "saved" / "policy", output_loading_info=True)
        others = sorted(map(str, [*info["missing_keys"], *info["unexpected_keys"], *info["mismatched_keys"]]))
        if others:
            raise DifferenceError(f"other tensors: {others[:2]}")
        self._compare(dict(loaded.named_parameters()))

    def engine(self) -> None:
        """Refit an engine with what was trained; its log-probabilities against a pass over the whole sequence."""
        engine = TransformersEngine(self._folder, num_slots=3, max_total_sequence_length=32, dtype="float32")
        saved = self._scratch / "saved" / "policy"
        trained = load(saved if saved.is_dir() else self._folder)
        layout = shared_layout(copy.deepcopy(trained)) if self._backend is None else self._backend.weights().layout
        engine.install(make_programs(layout, engine))
        engine.apply(0, 60.0)
        random = np.random.default_rng(0)
        # One alone, then more than there are slots, so that some join late, and slots move.
        prompts = [tuple(random.integers(3, VOCABULARY, length).tolist()) for length in (1, 19, 7, 12, 3)]
        requests = [request(index, prompt, max_new_tokens=4 + 2 * index) for index, prompt in enumerate(prompts)]
        completions = run_all(engine, requests[1:2]) | run_all(engine, [requests[0], *requests[2:]])
        for index, prompt in enumerate(prompts):
            expected_T = reference_logprobs(trained, prompt, completions[index].token_ids_T)
            check(np.abs(completions[index].logprobs_T - expected_T).max(), "log-probabilities differ")

    def lora(self) -> None:
        """Take a step of SFT with adapters of every linear layer, beside PEFT's layers in a plain loop."""
        model = load(self._folder)
        model.requires_grad_(False)
        adapters, linear = {"dim": 4, "alpha": 16}, linear_layers(model)
        if not linear:  # which is refused
            DTensorBackend(
                make_config(self._folder, algorithm="sft", dtensor_cfg={"lora_cfg": {**adapters, "enabled": True}}),
                checkpoint=None,
            )
        settings = peft.LoraConfig(
            r=adapters["dim"],
            lora_alpha=adapters["alpha"],
            target_modules=[f"model.{name}" for name in linear],
            task_type="CAUSAL_LM",
        )
        holder = torch.nn.Module()  # PEFT renames layers of models that it knows
        holder.model = model
        peft.inject_adapter_in_model(settings, holder)
        trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
        torch.manual_seed(5)
        for parameter in trained.values():
            torch.nn.init.normal_(parameter, std=0.1)
        into = self._scratch / "adapters"
        settings.save_pretrained(str(into))
        tensors = {f"base_model.model.{name.replace('.default', '')}": each.detach() for name, each in trained.items()}
        save_file({name: each.clone() for name, each in tensors.items()}, into / "adapter_model.safetensors")
        loss = sft_loss(model, BATCH)
        loss.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(trained.values(), 1.0)
        torch.optim.AdamW(trained.values(), **ADAMW).step()

        # Adapters of routed experts and of routers are compared in tests/integration/trainer/test_lora.py.
        chosen = {"match_all_linear": False, "target_modules": linear}
        lora = {**adapters, **chosen, "enabled": True, "restore_from": str(into)}
        config = make_config(self._folder, algorithm="sft", dtensor_cfg={"lora_cfg": lora})
        backend = DTensorBackend(config, checkpoint=None)
        metrics = train_on(backend, BATCH, config).metrics
        check(abs(metrics["loss"] - loss.item()), "the loss differs")
        check(abs(metrics["grad_norm"] / norm.item() - 1), "the gradient norm differs", 10 * TOLERANCE)
        for name, parameter in trained.items():
            found = backend.policy.parameters[name.replace(".default", "")]
            check((whole(found) - parameter).abs().max(), f"{name} differs")

    def megatron(self) -> None:
        """Take two optimizer steps of Megatron-Core, in which norms and biases have no weight decay."""
        check_architecture_is_megatrons(self._config(megatron_cfg={"enabled": True}))
        plain = load(self._folder)
        steps = plain_grpo(plain, [BATCH], size=4, temperature=TEMPERATURE, kl=KL, decays_vectors=False)
        config = config_for(self._folder, 1, {}, train_global_batch_size=4)
        backend = make(config)
        metrics = train_on(backend, BATCH, config).metrics
        losses, norms = zip(*steps, strict=True)
        check(abs(metrics["loss"] - np.mean(losses)), "the loss differs")
        check(abs(metrics["grad_norm"] / np.mean(norms) - 1), "the gradient norm differs", 10 * TOLERANCE)

    def vllm(self) -> None:
        """Look whether the product has tables of the type's parameters in vLLM; nothing is measured."""
        if self._plain.config.model_type not in VLLM:
            raise TandemError("its loader is asked")


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that is not sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
