"""The DTensor backend for a policy whose multi-token prediction layers are trained with it.

Transformers leaves these layers of a checkpoint in its files. Here they are built of the family's own decoder layer
(DeepSeek-V3, arXiv:2412.19437, section 2.2): the layer ``d`` predicts from a token the ``d``-th after the next one. It
reads what the layer before it, or at first the policy, says of that token, and the embedding of the ``d``-th token
after it. Embedding and output layer are the policy's own. They run while the policy's output layer does, where all of
its sharded parameters are whole, and only in passes with gradient.

Shapes: ``B`` rows, ``T`` positions, ``H`` hidden dimensions; ``K`` valid tokens; ``D`` layers' predictions.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
import transformers
from safetensors import safe_open
from transformers.masking_utils import create_causal_mask

from tandem.common.errors import ModelError
from tandem.common.numeric import RecentSteps
from tandem.config import Config
from tandem.config.installed.vllm_arguments import refits_drafter
from tandem.config.models import mtp_layers
from tandem.config.models.model_sizes import local_folder
from tandem.config.models.mtp_layers import LayerNames
from tandem.config.schema.columns import Model
from tandem.config.schema.policy import MtpConfig
from tandem.refit.adapters import catalogue
from tandem.refit.weights import Weights
from tandem.trainer import exposed_weights
from tandem.trainer.backend import LossOfMicroBatch, OptimizerStep
from tandem.trainer.backends.building import ModelBuilder
from tandem.trainer.backends.dtensor import DTensorBackend, DTensorHeldModel, norm_of, scale_down
from tandem.trainer.files import checkpoints, policy_files
from tandem.trainer.losses.mtp import MtpScores
from tandem.trainer.micro_batches import MicroBatch
from tandem.trainer.scorers.scorer import TokenScorer
from tandem.trainer.scores import Scores
from tandem.trainer.scoring import placed, score_tokens


class MtpLayer(torch.nn.Module):
    """One layer: two norms, a projection of both, a decoder layer, and the norm before the output layer."""

    def __init__(self, block: torch.nn.Module, norm: torch.nn.Module, config: Any, dtype: torch.dtype) -> None:
        super().__init__()
        size = config.hidden_size

        def make_norm() -> Any:
            return type(norm)(size, eps=config.rms_norm_eps).to(dtype)

        self.enorm, self.hnorm = make_norm(), make_norm()
        self.eh_proj = torch.nn.Linear(2 * size, size, bias=False, dtype=dtype)
        self.block = block
        self.norm = make_norm()

    def forward(self, hidden_BTH: torch.Tensor, embedded_BTH: torch.Tensor, **inputs: Any) -> torch.Tensor:
        """Return what the output layer reads, ``[B, T, H]``; `inputs` are those of a decoder layer."""
        concatenated_BTE = torch.cat([self.enorm(embedded_BTH), self.hnorm(hidden_BTH)], dim=-1)
        output: torch.Tensor = self.norm(self.block(self.eh_proj(concatenated_BTE), **inputs))
        return output


class MtpLayers(torch.nn.Module):
    """The layers of a policy, as a module of its model, without the parts that they share with it."""

    def __init__(self, layers: list[MtpLayer], names: list[LayerNames], config: Any, settings: MtpConfig) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(layers)
        self.config, self.settings, self.names = config, settings, names
        """Configuration that the decoder layers read, of the training, and the names of each layer's tensors."""

    def predict(self, model: Any, hidden_BTH: torch.Tensor, inputs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
        """Yield what the output layer reads for each of the predictions, ``[B, T, H]``.

        Args:
            model: the policy, which has these layers.
            hidden_BTH: what its output layer reads.
            inputs: the inputs of its forward pass.

        """
        layer_inputs = dict(inputs)
        ids_BT, position_ids = layer_inputs.pop("input_ids"), layer_inputs.pop("position_ids", None)
        if position_ids is None:
            position_ids = torch.arange(ids_BT.shape[1], device=ids_BT.device)[None]
        self.config._attn_implementation = model.config.get_text_config()._attn_implementation
        decoder = model.base_model
        rotated = decoder.rotary_emb(hidden_BTH, position_ids)
        mask = create_causal_mask(self.config, hidden_BTH, None, None, position_ids)
        for depth in range(1, self.settings.num_layers + 1):
            # What comes after the end of a sequence is read only from positions whose predictions are not used.
            embedded_BTH = model.get_input_embeddings()(ids_BT.roll(-depth, dims=1))
            if self.settings.detach_heads:
                embedded_BTH = embedded_BTH.detach()
            layer = self.layers[0 if self.settings.use_repeated_layer else depth - 1]
            hidden_BTH = layer(
                hidden_BTH,
                embedded_BTH,
                attention_mask=mask,
                position_embeddings=rotated,
                position_ids=position_ids,
                **layer_inputs,
            )
            yield hidden_BTH

    def describe(self, model: Any, number: int, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return a layer's whole tensors by their names in checkpoints; `tensors` has them by those in the layer."""
        return self.names[number].rename(tensors, functools.partial(policy_files.convert_names, model))


def attach_layers(model: Any, source: str, settings: MtpConfig, dtype: torch.dtype) -> None:
    """Give a whole model the layers in a checkpoint's folder, or that of a name on the Hub. Raises `ModelError`."""
    folder = local_folder(source)
    places = {} if folder is None or not any(folder.glob("*.safetensors")) else catalogue.read_places(folder)
    num_layers = settings.num_kept
    names = [_find_names(number, model.config.get_text_config(), places) for number in range(num_layers)]
    described = [each for each in names if each is not None]
    if len(described) < num_layers:
        raise ModelError(
            f"policy.mtp.num_layers: {settings.num_layers}, but {source} has {len(described)} layers of multi-token "
            "prediction"
        )
    tensors = [_read_layer(layer, places) for layer in described]
    small = _load_blocks(model, described, tensors, dtype)
    layers = [MtpLayer(block, model.base_model.norm, small.config, dtype) for block in small.base_model.layers]
    mtp = MtpLayers(layers, described, small.config, settings)
    with torch.no_grad():
        for number, (layer, name, of_layer) in enumerate(zip(layers, described, tensors, strict=True)):
            parameters = dict(layer.named_parameters())
            for part, of_checkpoint in name.parts.items():
                parameters[part].copy_(of_layer[of_checkpoint])
            written = mtp.describe(model, number, layer.state_dict()).keys()
            if differing := sorted(written ^ (of_layer.keys() - name.shared.keys())):
                raise ModelError(f"{source}: an export would not have {differing[0]} as it is there")
    model.add_module(mtp_layers.ATTRIBUTE, mtp.eval())


def _find_names(number: int, config: Any, places: Mapping[str, catalogue.TensorPlace]) -> LayerNames | None:
    """Return the names of a layer with the copies that there are; None if the checkpoint has no such layer."""
    names = mtp_layers.name_layer(number, config)
    if names is None or names.parts["eh_proj.weight"] not in places:
        return None
    shared = {name: module for name, module in names.shared.items() if name in places}
    return msgspec.structs.replace(names, shared=shared)


def _read_layer(names: LayerNames, places: Mapping[str, catalogue.TensorPlace]) -> dict[str, torch.Tensor]:
    """Return a layer's tensors, by their names in the checkpoint. Raises `ModelError`."""
    names_of_layer = [name for name in places if name.startswith(names.block) or name in names.parts.values()]
    if missing := [name for name in names.parts.values() if name not in places]:
        raise ModelError(f"the checkpoint lacks {missing[0]}")
    tensors = {}
    for name in names_of_layer:
        with safe_open(places[name].path, framework="pt") as file:
            tensors[name] = file.get_tensor(name)
    return tensors


def _load_blocks(
    model: Any, names: Sequence[LayerNames], tensors: Sequence[Mapping[str, torch.Tensor]], dtype: torch.dtype
) -> Any:
    """Return a small model with the decoder layers, read as Transformers reads the policy's. Raises `ModelError`."""
    config = mtp_layers.describe_blocks(model.config.get_text_config(), len(names))
    state = {"model.norm.weight": tensors[0][names[0].parts["norm.weight"]]}
    for number, (name, of_layer) in enumerate(zip(names, tensors, strict=True)):
        outside = {*name.parts.values(), *name.shared}
        for key, tensor in of_layer.items():
            if key not in outside:
                state[f"model.layers.{number}.{key.removeprefix(name.block)}"] = tensor
    try:
        small, info = type(model).from_pretrained(
            None, config=config, state_dict=state, dtype=dtype, output_loading_info=True
        )
    except Exception as error:  # the library passes on any error of its readers
        raise ModelError(f"cannot load the layers of multi-token prediction: {error}".split("\n")[0]) from error
    lacking = [name for name in (*info["missing_keys"], *info["unexpected_keys"]) if ".layers." in name]
    if lacking or info["mismatched_keys"]:
        different = next(iter(lacking or info["mismatched_keys"]))
        raise ModelError(f"the layers of multi-token prediction are not like the model's: {different} differs")
    return small


class MtpScorer(TokenScorer):
    """The policy's scores of tokens and, in training steps, those of its multi-token prediction layers."""

    predicts = False
    """Whether these layers score, too."""

    def __init__(self, model: Any, *args: Any, **kwargs: Any) -> None:
        """Begin, as `TokenScorer` does. Raises `ModelError` if the model changes its logits."""
        super().__init__(model, *args, **kwargs)
        if self._gives_logits:
            raise ModelError(f"policy.mtp: {type(model).__name__} changes its logits")
        self._hidden_BTH: torch.Tensor | None = None
        self._read: dict[str, Any] = {}
        self._predictions: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __call__(self, batch: MicroBatch) -> Any:
        """Return the scores of the policy, or `MtpScores` in a training step."""
        scores = super().__call__(batch)
        predictions, self._predictions, self._hidden_BTH = self._predictions, [], None
        if not predictions:
            return scores
        logprobs_BTD, is_likeliest_BTD = (
            placed(torch.stack(each, dim=1), batch.loss_mask_BT) for each in zip(*predictions, strict=True)
        )
        return MtpScores(scores[0], scores, logprobs_BTD, is_likeliest_BTD)

    def _inputs(self, batch: MicroBatch) -> tuple[dict[str, Any], torch.Tensor]:
        self._read, predictor_K = super()._inputs(batch)
        return self._read, predictor_K

    def _pick(self, module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...] | None:
        self._hidden_BTH = inputs[0]
        return super()._pick(module, inputs)

    def _score(self, head: Any, forward: Any, hidden: torch.Tensor) -> torch.Tensor | Scores:
        scores = super()._score(head, forward, hidden)
        if self._task is not None and self._hidden_BTH is not None and self.predicts:
            self._predictions = list(self._predict(head.weight, self._hidden_BTH))
        return scores

    def _predict(
        self, weight_VH: torch.Tensor, hidden_BTH: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield for each layer the log-probabilities of the valid tokens, and which of them are its likeliest."""
        mtp, task = self.model.mtp, self._task
        assert task is not None, "the policy's own scores are made with it"
        if mtp.settings.detach_heads:
            hidden_BTH, weight_VH = hidden_BTH.detach(), weight_VH.detach()
        position_ids = self._read.get("position_ids")
        width = hidden_BTH.shape[1]
        position_K = task.predictor_K % width if position_ids is None else position_ids[0, task.predictor_K]
        for depth, states_BTH in enumerate(mtp.predict(self.model, hidden_BTH, self._read), start=1):
            is_there_K = position_K >= depth
            states_KH = states_BTH.flatten(0, 1).index_select(0, task.predictor_K[is_there_K] - depth)
            scores = score_tokens(states_KH, weight_VH, task.target_K[is_there_K], temperature=1.0)
            yield placed(scores[0], is_there_K), placed(scores[2], is_there_K)


class MtpBuilder(ModelBuilder):
    """Builds a policy with its multi-token prediction layers."""

    token_scorer = MtpScorer

    def __init__(self, *args: Any) -> None:
        """Prepare to build. Prompts are not shared: the token after a prompt is another in each sample."""
        super().__init__(*args)
        self._settings = msgspec.structs.replace(self._settings, share_prompts=False)

    def load(self, source: str, dtype: torch.dtype) -> Any:
        """Return the whole model of a folder or name, with its layers. Raises `ModelError`."""
        transformers.utils.logging.set_verbosity_error()  # it warns of these layers, and of the embedding they share
        model = super().load(source, dtype)
        attach_layers(model, source, self._config.policy.mtp, dtype)
        return model


class MtpHeldModel(DTensorHeldModel):
    """A policy with its multi-token prediction layers, whose parameters are among the policy's."""

    builder_class = MtpBuilder

    def __init__(self, name: Model, config: Config, *args: Any, **kwargs: Any) -> None:
        """Build the model, as `DTensorHeldModel` does."""
        super().__init__(name, config, *args, **kwargs)
        self._of_layers = {name: each for name, each in self.parameters.items() if name.startswith(mtp_layers.PREFIX)}
        model: Any = self.model
        self._shared = {
            mtp_layers.EMBEDDING: model.get_input_embeddings().weight,
            mtp_layers.HEAD: model.get_output_embeddings().weight,
        }
        self._clips_apart = config.policy.mtp.detach_heads
        if self._clips_apart:
            self._clipped = {name: each for name, each in self.parameters.items() if name not in self._of_layers}

    def train_step(
        self, micro_batches: Sequence[MicroBatch], loss: LossOfMicroBatch, *, refuses_outliers: bool = False
    ) -> OptimizerStep:
        """Take an optimizer step of the policy and these layers. Raises `NotFiniteError` or `OutlierError`."""
        scorer: MtpScorer = self._scorer  # type: ignore[assignment]
        scorer.predicts = True
        try:
            return super().train_step(micro_batches, loss, refuses_outliers=refuses_outliers)
        finally:
            scorer.predicts = False

    def take_step(
        self,
        loss: float,
        max_grad_norm: float | None,
        *,
        largest: float = sys.float_info.max,
        compared: RecentSteps | None = None,
    ) -> OptimizerStep:
        """Clip the gradients, those of detached layers apart, step, and forget them.

        Raises `NotFiniteError` or `OutlierError`, as `DTensorHeldModel.take_step` does.
        """
        if self._clips_apart:
            gradients = [each.grad for each in self._of_layers.values() if each.grad is not None]
            norm = norm_of(gradients)
            if max_grad_norm is not None:
                scale_down(gradients, norm, max_grad_norm)
            loss = loss if norm.isfinite() else math.nan
        return super().take_step(loss, max_grad_norm, largest=largest, compared=compared)

    def state(self) -> checkpoints.ModelState:
        """Return the contents of a checkpoint, with the layers by the names that they came with."""
        return super().state()._replace(tensors=self._gather())

    def _gather(self) -> Iterator[Mapping[str, torch.Tensor]]:
        """Yield all tensors on rank 0, a layer at a time. Collective."""
        trunk = {name: each for name, each in self.parameters.items() if name not in self._of_layers}
        for tensors in policy_files.gathered(self.model, trunk):
            yield {name: each for name, each in tensors.items() if not name.startswith(mtp_layers.PREFIX)}
        mtp: MtpLayers = self.model.mtp  # type: ignore[assignment]
        for number, names in enumerate(mtp.names):
            prefix = f"{mtp_layers.PREFIX}layers.{number}."
            tensors = {
                name.removeprefix(prefix): self._copy_whole(tensor)
                for name, tensor in (self._of_layers | self.buffers).items()
                if name.startswith(prefix)
            }
            copies = {name: self._copy_whole(self._shared[part]) for name, part in names.shared.items()}
            yield {**mtp.describe(self.model, number, tensors), **copies} if dist.get_rank() == 0 else {}

    def _copy_whole(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a whole tensor, on rank 0 in CPU memory of its own. Collective."""
        gathered = exposed_weights.gather_whole(tensor)
        return gathered.to("cpu", copy=True) if dist.get_rank() == 0 else gathered


class MtpBackend(DTensorBackend):
    """One rank of the DTensor backend, whose policy has multi-token prediction layers.

    Engines get the policy alone, unless they draft with these layers.
    """

    def _hold(self, name: Model, number: int, checkpoint: Path | None) -> DTensorHeldModel:
        if name != "policy":
            return super()._hold(name, number, checkpoint)
        return MtpHeldModel(name, self._config, self._ranks[name], checkpoint=checkpoint, number=number)

    def weights(self) -> Weights:
        """Return the shards of the policy that this rank holds, with those of its layers if engines draft with them."""
        if refits_drafter(self._config.policy):
            return super().weights()
        tensors = self.policy.parameters | self.policy.buffers
        exposed = {name: each for name, each in tensors.items() if not name.startswith(mtp_layers.PREFIX)}
        return exposed_weights.weights_of(exposed, self._config.policy.adapters)
