"""Columns of tokens in a vLLM worker: sampling masks, and the experts that its routers chose.

Experts: a token with cached keys and values, for example in a prompt that several requests share, is not computed
again; the slot that has them has its experts as well. vLLM's own way (``enable_return_routed_experts``) is for GPUs
only.

Shapes: ``N`` tokens of a step, ``S`` slots of the cache, ``T`` tokens of a request; ``L`` layers of the whole model,
``O`` layers of this worker with experts, ``K`` experts a token.

For sampling masks, vLLM's own way (``return_sampling_mask``) needs its second model runner, which CPUs have not.
Workers of tensor parallelism all draw the same tokens; of pipeline stages, the last one draws.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tandem.common.errors import ModelError
from tandem.rollout.engines.sampling import masks_of
from tandem.samples.sampling_masks import MaskFormat, SamplingMasks, Words

ASKED = "tandem_routed_experts"
"""Key of vLLM's ``additional_config`` with the number of layers and the experts of a token."""

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
KEPT = "tandem_sampling_masks"
"""Key of vLLM's ``additional_config`` with the size of the vocabulary."""


class MaskRecord:
    """In the place of the sampler's method that cuts distributions off and draws tokens; with the same arguments."""

    def __init__(self, runner: Any, vocabulary: int) -> None:
        """Note what the sampler of a model runner keeps, for every request."""
        self._runner = runner
        self._format = MaskFormat(vocabulary=vocabulary)
        self._masks: dict[str, list[Words]] = {}
        sampler = runner.sampler.topk_topp_sampler
        self._draw = sampler.forward
        sampler.forward = self

    def __call__(self, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw a token for each request, and note its mask."""
        token_ids_B, logprobs_BV = self._draw(*arguments)
        requests = self._runner.requests
        self._masks = {name: masks for name, masks in self._masks.items() if name in requests}
        masks_B = masks_of(logprobs_BV > -torch.inf, self._format)
        for name, mask in zip(self._runner.input_batch.req_ids, masks_B, strict=True):
            self._masks.setdefault(name, []).append(mask)
        return token_ids_B, logprobs_BV

    def of(self, num_tokens: Mapping[str, int]) -> list[tuple[bytes, bytes]]:
        """Return the masks of this many tokens of each request: their lengths and words; nothing if none are known."""
        encoded_masks = []
        for request, number in num_tokens.items():
            # vLLM may have added something to the request's name.
            names = (name for name in self._masks if name == request or name.startswith(f"{request}-"))
            masks = self._masks.get(next(names, ""), [])
            joined = SamplingMasks.join(masks[:number] if len(masks) >= number else [])
            encoded_masks.append((joined.lengths_T.tobytes(), joined.words_W.tobytes()))
        return encoded_masks


class ExpertRoutes:
    """Expert routing of one worker. Create it before graphs are captured: the graph copies what routers choose."""

    def __init__(self, runner: Any, num_layers: int, top_k: int) -> None:
        """Listen to the routers of a model runner's model. Raises `ModelError` if it has none of vLLM's kind."""
        self._runner = runner
        self._num_layers, self._top_k = num_layers, top_k
        routers = _routers_of(runner.get_model())
        self._layers = tuple(routers)
        num_tokens = runner.vllm_config.scheduler_config.max_num_batched_tokens
        self._chosen_NOK = torch.full((num_tokens, len(routers), top_k), -1, dtype=torch.int32, device=runner.device)
        """Experts chosen for the tokens of the last step."""
        self._kept_SOK: NDArray[np.int16] | None = None
        for place, router in enumerate(routers.values()):
            router.set_capture_fn(functools.partial(self._note, place))

    def keep(self, num_tokens: int) -> None:
        """Keep the routing of the step that has just been computed. Raises `ModelError`."""
        if not num_tokens:
            return
        if self._kept_SOK is None:
            self._kept_SOK = np.full((self._num_slots(), len(self._layers), self._top_k), -1, dtype=np.int16)
        slot_N = self._runner.input_batch.block_table[0].slot_mapping.gpu[:num_tokens].cpu().numpy()
        chosen_NOK = self._chosen_NOK[:num_tokens].cpu().numpy()
        if chosen_NOK.min() < 0:
            raise ModelError("policy.router_replay: vLLM's kernel for experts does not say which it chose")
        self._kept_SOK[slot_N] = chosen_NOK

    def of(self, num_tokens: Mapping[str, int]) -> list[bytes]:
        """Return the routing of this many tokens of each request, ``[T, L, K]`` of int16; -1 for layers of other
        workers."""
        return [self._of(request, number).tobytes() for request, number in num_tokens.items()]

    def _of(self, request: str, num_tokens: int) -> NDArray[np.int16]:
        assert self._kept_SOK is not None, "a step was computed"
        experts_TLK = np.full((num_tokens, self._num_layers, self._top_k), -1, dtype=np.int16)
        position_T = np.arange(num_tokens)
        blocks, size = np.array(self._state(request).block_ids[0]), self._block_size()
        slot_T = blocks[position_T // size] * size + position_T % size
        experts_TLK[:, self._layers] = self._kept_SOK[slot_T]
        return experts_TLK

    def _state(self, request: str) -> Any:
        """Return the runner's state of a request; vLLM may have added something to its name."""
        requests = self._runner.requests
        return next(requests[name] for name in requests if name == request or name.startswith(f"{request}-"))

    def _block_size(self) -> int:
        groups = self._runner.kv_cache_config.kv_cache_groups
        if len(groups) != 1:
            raise ModelError("policy.router_replay: vLLM caches this model's keys in several groups of layers")
        return int(groups[0].kv_cache_spec.block_size)

    def _num_slots(self) -> int:
        return int(self._runner.kv_cache_config.num_blocks) * self._block_size()

    def _note(self, place: int, chosen_NK: torch.Tensor) -> None:
        self._chosen_NOK[: len(chosen_NK), place] = chosen_NK


def _routers_of(model: torch.nn.Module) -> dict[int, Any]:
    """Return the routers of a worker's layers."""
    routers = {}
    for name, module in model.named_modules():
        layer, router = _LAYER.search(f"{name}."), getattr(module, "router", None)
        if layer is not None and hasattr(router, "set_capture_fn"):
            routers[int(layer[1])] = router
    if not routers:
        raise ModelError(
            f"policy.router_replay: vLLM's {type(model).__name__} has no routers that say what they choose"
        )
    return routers
