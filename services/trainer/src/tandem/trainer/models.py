"""Loading of Hugging Face models for training, and new models from a configuration and a seed."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import SequenceClassifierOutputWithPast

from tandem.common.errors import ModelError
from tandem.config.models.hf_config import describe_for_training, describe_text_part, find_model_class, load_config
from tandem.config.models.lora import explain_no_model
from tandem.config.models.model_sizes import local_folder
from tandem.config.schema import ModelConfig
from tandem.config.schema.columns import Head
from tandem.refit.adapters import catalogue
from tandem.refit.adapters.geometry import SCALAR_HEAD

_CLASSIFIERS: dict[Head, Any] = {
    "value": transformers.AutoModelForTokenClassification,
    "score": transformers.AutoModelForSequenceClassification,
}
"""Heads of models that give one number."""
_SCALAR: dict[Head, str] = {"value": "value model", "score": "reward model"}


def load_model(source: str, settings: ModelConfig, dtype: torch.dtype) -> Any:
    """Return the causal language model in folder `source` (or with that Hub name), on the CPU, in `dtype`.

    A folder with a configuration and no weights comes from `settings.new_model`. Its weights are drawn with that
    section's seed, and are the same on every rank. Dropout is off. Raises `ModelError`.
    """
    transformers.utils.logging.disable_progress_bar()
    folder = Path(source)
    if (reason := explain_no_model(folder)) is not None:  # transformers would read them as one of its own models
        raise ModelError(reason)
    if folder.is_dir() and not _has_weights(folder):
        model = _new_model(folder, settings, dtype)
    else:
        model = _pretrained(source, settings, dtype)
    if model.get_output_embeddings() is None:
        raise ModelError(f"{source}: {type(model).__name__} has no output embeddings to predict tokens with")
    return model.eval()


def load_scalar_model(source: str, settings: ModelConfig, dtype: torch.dtype, head: Head) -> Any:
    """Return the value or reward model in folder `source` (or with that Hub name), on the CPU, in `dtype`.

    It is Transformers' token or sequence classifier with one label. Either can begin as the other, or as a language
    model without its output layer. Missing weights of a head begin with zeros, and so do all values (Huang et al. 2024,
    arXiv:2403.17031). `settings` describes a model that has no weights yet. Raises `ModelError`.
    """
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()  # it warns of an untrained head, which is about to be trained
    folder = Path(source)
    if folder.is_dir() and not _has_weights(folder):
        model = _new_scalar_model(folder, settings, dtype, head)
        lacking = {f"{SCALAR_HEAD}.{name}" for name, _ in scalar_head(model).named_parameters()}
    else:
        with _as_model_error(f"cannot load a {_SCALAR[head]} from {source!r}"):
            model, info = _CLASSIFIERS[head].from_pretrained(
                source,
                config=describe_for_training(source, settings, num_labels=1),
                dtype=dtype,
                output_loading_info=True,
                trust_remote_code=False,
                use_safetensors=True,  # the other format is unpickled
            )
        lacking = {name for name in info["missing_keys"] if name.startswith(f"{SCALAR_HEAD}.")}
        _refuse_missing(source, set(info["missing_keys"]) - lacking)
    for name, parameter in scalar_head(model).named_parameters():
        if f"{SCALAR_HEAD}.{name}" in lacking:
            torch.nn.init.zeros_(parameter)
    if head == "score":
        model.forward = functools.partial(_scores_of_positions, model)
    return model.eval()


def _scores_of_positions(model: Any, **inputs: Any) -> SequenceClassifierOutputWithPast:
    """Run a sequence classifier for the scores of all positions. By itself it would return one for each row."""
    return SequenceClassifierOutputWithPast(logits=model.score(model.base_model(**inputs).last_hidden_state))


def scalar_head(model: Any) -> torch.nn.Linear:
    """Return the layer that makes one number from a hidden state. Raises `ModelError`."""
    head = getattr(model, SCALAR_HEAD, None)
    if not isinstance(head, torch.nn.Linear) or head.out_features != 1:
        raise ModelError(f"{type(model).__name__} has no layer {SCALAR_HEAD!r} that makes one number of a hidden state")
    return head


def build_without_weights(
    source: str, dtype: torch.dtype, head: Head = "vocabulary", overrides: Mapping[str, Any] | None = None
) -> Any:
    """Return the model of a checkpoint as its configurations describe it, without memory for weights.

    It has the given `head`, whatever the checkpoint has. Raises `ModelError`.
    """
    try:
        labels = {} if head == "vocabulary" else {"num_labels": 1}
        settings = load_config(source, overrides, **labels)
        kind = _CLASSIFIERS.get(head) or find_model_class(settings)
        with torch.device("meta"):
            model = kind.from_config(settings, dtype=dtype, trust_remote_code=False)
    except Exception as error:  # the library passes on any error of its readers
        raise ModelError(f"cannot read the configuration of {source!r}: {error}".split("\n")[0]) from error
    with suppress(OSError):  # many checkpoints have none
        model.generation_config = transformers.GenerationConfig.from_pretrained(source)
    return model.eval()


def decoder_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the repeated layers. Each is sharded, and recomputed, as a unit."""
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def checkpoint_activations(model: torch.nn.Module) -> None:
    """Recompute each layer's activations in the backward pass. Call this before sharding, to keep its hooks outside."""
    for layer in decoder_layers(model):
        # Dropout is off, so nothing in a layer is random.
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)


@torch.no_grad()
def has_linear_head(model: Any) -> bool:
    """Tell whether a model's logits are its last hidden states times the weight of its output layer.

    The model is tried out: its output layer returns an object that is not a tensor, and this very object must come out.
    A model that scales its logits, even by 1, fails.
    """
    head = model.get_output_embeddings()
    if type(head) is not torch.nn.Linear or getattr(head, "bias", None) is not None:
        return False
    sentinel = ("scores, in place of logits",)
    hook = head.register_forward_hook(lambda *_: sentinel)
    try:
        return model(input_ids=torch.zeros((1, 1), dtype=torch.int64), use_cache=False).logits is sentinel
    except (AttributeError, TypeError):
        return False
    finally:
        hook.remove()


def _has_weights(folder: Path) -> bool:
    return any(any(folder.glob(pattern)) for pattern in ("*.safetensors", "pytorch_model*.bin"))


@contextmanager
def _as_model_error(action: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # the library passes on any error of its readers
        raise ModelError(f"{action}: {error}".split("\n")[0]) from error


def _pretrained(source: str, settings: ModelConfig, dtype: torch.dtype) -> Any:
    with _as_model_error(f"cannot load a model from {source!r}"):
        described, renamed = describe_text_part(describe_for_training(source, settings), _names_in(source))
        model, info = find_model_class(described).from_pretrained(
            source,
            config=described,
            key_mapping=renamed or None,
            dtype=dtype,
            output_loading_info=True,
            trust_remote_code=False,
            use_safetensors=True,  # the other format is unpickled
        )
    _refuse_missing(source, info["missing_keys"])
    return model


def _names_in(source: str) -> Collection[str]:
    """Return the names of the tensors in a checkpoint, of a folder or of the Hub's cache; none if it is in neither."""
    folder = local_folder(source)
    return catalogue.read_headers(folder) if folder is not None and any(folder.glob("*.safetensors")) else ()


def _refuse_missing(source: str, names: Iterable[str]) -> None:
    missing = sorted(names)
    if missing:
        raise ModelError(f"the checkpoint in {source!r} lacks {len(missing)} tensors, the first is {missing[0]}")


def _new_model(folder: Path, settings: ModelConfig, dtype: torch.dtype) -> Any:
    if settings.new_model is None:
        raise ModelError(f"there are no weights in {str(folder)!r}, and policy.new_model does not say how to make them")
    with _as_model_error("policy.new_model.config: cannot make a model"):
        described = load_config(str(folder), settings.hf_config_overrides)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(settings.new_model.seed)
            return find_model_class(described).from_config(described, dtype=dtype, trust_remote_code=False)


def _new_scalar_model(folder: Path, settings: ModelConfig, dtype: torch.dtype, head: Head) -> Any:
    """Return a scalar model with the layers of the language model that is made from the same folder."""
    language_model = _new_model(folder, settings, dtype)
    with _as_model_error(f"cannot make a {_SCALAR[head]} of {str(folder)!r}"):
        described = load_config(str(folder), settings.hf_config_overrides, num_labels=1)
        model = _CLASSIFIERS[head].from_config(described, dtype=dtype, trust_remote_code=False)
        model.base_model.load_state_dict(language_model.base_model.state_dict())
    return model
