"""vLLM's worker with a `WorkerPart` of the weight plane, in the rollout process or in one of vLLM's.

Only vLLM imports this, by the name in `insides.WORKER`.

Repairs of vLLM on a CPU each replace a function by one that differs only where that one is wrong: experts of other
workers, biases of routers, rotations of heads.
"""

from __future__ import annotations

import contextlib
import functools
import glob
import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.platforms import current_platform

from tandem.common import signals
from tandem.common.errors import ModelError, TandemError
from tandem.common.process_lifetime import die_with
from tandem.config.models.families import VLLM_TABLES
from tandem.rollout.engines.vllm import float8, insides, part, speculation
from tandem.rollout.engines.vllm.learned import LearnedParameters, learn_layout
from tandem.rollout.engines.vllm.packed import keep_parameters


@functools.cache
def repair_models() -> None:
    """Have routers and rotary embeddings compute what they compute on a GPU."""
    _add_router_bias()
    _rotate_heads()


def _add_router_bias() -> None:
    """Have routers with a softmax choose by the scores and the bias that the model adds to them (ERNIE 4.5).

    vLLM's router for CPUs drops the bias where experts are in no groups.
    """
    from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter

    compute = CPURouter._compute_routing

    def compute_with_bias(router: Any, hidden: torch.Tensor, logits_TE: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        bias_E = router.e_score_correction_bias
        is_dropped = router.scoring_func == "softmax" and not router.use_grouped_topk
        if bias_E is None or not is_dropped or router.custom_routing_function is not None:
            return compute(router, hidden, logits_TE, *args, **kwargs)
        scores_TE = logits_TE.float().softmax(dim=-1)
        ids_TK = (scores_TE + bias_E).topk(router.top_k, dim=-1).indices
        weights_TK = scores_TE.gather(1, ids_TK)
        if router.renormalize:
            weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True)
        return weights_TK * router.routed_scaling_factor, ids_TK.to(torch.int32)

    CPURouter._compute_routing = compute_with_bias


def _rotate_heads() -> None:
    """Have rotary embeddings rotate queries of shape [tokens, heads, elements] (latent attention of DeepSeek).

    vLLM's kernel for CPUs takes the distance between heads for that between tokens.
    """
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    forward = RotaryEmbedding.forward_cpu

    def forward_heads(
        layer: Any, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        rotate = forward if query.dim() == 2 else type(layer).forward_native
        rotated: tuple[torch.Tensor, torch.Tensor | None] = rotate(layer, positions, query, key)
        return rotated

    RotaryEmbedding.forward_cpu = forward_heads


@functools.cache
def map_experts() -> None:
    """Have a worker's experts skip tokens of other workers' experts.

    vLLM's kernel for CPUs takes a token's global expert numbers for its own, and reads beyond its weights.
    """
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    apply = CPUUnquantizedExperts.apply

    def apply_own(
        experts: Any,
        *,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        expert_map: torch.Tensor | None,
        **kwargs: Any,
    ) -> None:
        if expert_map is not None:
            local_ids = expert_map[topk_ids.long()]  # -1: an expert of another worker
            topk_weights = topk_weights.masked_fill(local_ids < 0, 0.0)
            topk_ids = local_ids.clamp(min=0).to(topk_ids.dtype)
        apply(experts, topk_weights=topk_weights, topk_ids=topk_ids, expert_map=None, **kwargs)

    CPUUnquantizedExperts.apply = apply_own


class WorkerReply(msgspec.Struct, frozen=True):
    """The result of a part, or its error: vLLM would turn an exception into a string."""

    value: Any = None
    error: TandemError | None = None


if current_platform.is_cpu():
    from vllm.v1.worker import cpu_worker
    from vllm.v1.worker.cpu_worker import CPUWorker as VllmWorker

    speculation.spare_llvmlite()
else:
    from vllm.v1.worker.gpu_worker import Worker as VllmWorker


class SliceWorker(VllmWorker):  # type: ignore[misc]
    """A worker that loads its slice of the model with real parameters, and answers for them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Construct vLLM's worker; see there."""
        parent = multiprocessing.parent_process()
        if parent is not None and parent.pid is not None:
            die_with(parent.pid)  # vLLM's own way waits for a step to end, which it may never do
            signals.leave_to_coordinator()  # or to the engine, which ends its workers by closing a pipe
        super().__init__(*args, **kwargs)
        if insides.UNDRAWABLE in self.vllm_config.additional_config:
            from tandem.rollout.engines.vllm.pictures import serve

            serve(self.model_config.hf_config.model_type)

    def init_device(self) -> None:
        """Initialise the device as vLLM's worker does."""
        if not current_platform.is_cpu():
            super().init_device()
            return
        with _name_shared_memory(Path(self.distributed_init_method.removeprefix("file://"))):
            super().init_device()

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the model as vLLM's worker does, with parameters that refits can write."""
        if not current_platform.is_cpu():
            with self._learn_drafter() as drafter, self._learn() as learned:
                super().load_model(*args, **kwargs)
            draw_at_once(self.model_runner)
            self.part = self._part_kind(drafter)(
                self.model_runner, (), self.rank, next(iter(learned), None), sleeper=self
            )
            return
        if self.model_config.quantization:
            float8.install_cpu_kernels()
        repair_models()
        if self.parallel_config.enable_expert_parallel:
            map_experts()
        if self.vllm_config.speculative_config is not None:
            speculation.mend_for_cpus()
            if self.vllm_config.speculative_config.method == "ngram":
                speculation.start_numba()
        with keep_parameters() as packed, self._learn_drafter() as drafter, self._learn() as learned:
            super().load_model(*args, **kwargs)
        runner = self.model_runner
        self.part = self._part_kind(drafter)(runner, packed, self.rank, next(iter(learned), None))
        if not get_pp_group().is_first_rank:
            # The input of a stage. vLLM allocates it in a warm-up, which it skips on a CPU.
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
            )

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """Execute the model as vLLM's worker does."""
        output = super().execute_model(scheduler_output, *args, **kwargs)
        if self.part.routes is not None:
            self.part.routes.keep(scheduler_output.total_num_scheduled_tokens)
        return output

    def _learn(self) -> contextlib.AbstractContextManager[Sequence[LearnedParameters | ModelError]]:
        """Return a block that learns the layout of what is loaded in it, for a family without a table."""
        has_table = self.model_config.hf_config.model_type in VLLM_TABLES
        return contextlib.nullcontext(()) if has_table else learn_layout(self.vllm_config, self.rank)

    @contextlib.contextmanager
    def _learn_drafter(self) -> Iterator[Sequence[LearnedParameters | ModelError]]:
        """Have what drafts read its own weights in this block, or its layout be learned, if refits bring them."""
        with speculation.draft_with_weights(self.vllm_config):
            if insides.DRAFTS not in self.vllm_config.additional_config:
                yield ()
                return
            from tandem.rollout.engines.vllm.drafter import learn_drafter

            with learn_drafter(self.vllm_config, self.rank) as learned:
                yield learned

    def _part_kind(self, drafter: Sequence[LearnedParameters | ModelError]) -> Callable[..., part.WorkerPart]:
        if drafter:
            from tandem.rollout.engines.vllm.drafter import DraftingPart

            return functools.partial(DraftingPart, drafter=drafter[0])
        if insides.ADAPTERS not in self.vllm_config.additional_config:
            return part.WorkerPart
        from tandem.rollout.engines.vllm.adapter_part import AdapterPart

        return AdapterPart

    def ask_part(self, method: str, *args: Any) -> WorkerReply:
        """Call a method of the part."""
        try:
            return WorkerReply(value=getattr(self.part, method)(*args))
        except TandemError as error:
            return WorkerReply(error=error)


@contextlib.contextmanager
def _name_shared_memory(meeting: Path) -> Iterator[None]:
    """Have the workers that meet by this file share memory of a name that no other engine has, and that goes at once.

    vLLM names it after the file, which here is a descriptor: another engine's may have the same number.
    """
    join = cpu_worker.init_worker_distributed_environment

    def join_by_own_name(*args: Any, **kwargs: Any) -> None:
        os.environ["VLLM_DIST_IDENT"] = f"tandem-{meeting.parts[2]}-{meeting.stat().st_ino}"
        join(*args, **kwargs)
        for group in (get_tp_group(), get_pp_group()):
            _forget_names(group)

    cpu_worker.init_worker_distributed_environment = join_by_own_name
    try:
        yield
    finally:
        cpu_worker.init_worker_distributed_environment = join


def _forget_names(group: Any) -> None:
    """Remove the names of memory that the workers of a group share: all have opened it, and a kill would leave them."""
    name = getattr(getattr(group.device_communicator, "dist_module", None), "group_name", None)
    for segment in Path("/dev/shm").glob(f"{glob.escape(name)}_*") if name else ():
        segment.unlink(missing_ok=True)


class TokenDraws:
    """In the place of the sampler's method that filters logits and draws tokens; with the same arguments.

    Each request has a seed, so that its tokens do not depend on what else runs. vLLM then fills the noise of each
    request by a kernel of its own, at every step. Its kernel for Gumbel noise, which it has for another model runner,
    takes the seeds of all requests at once. The noise of a token is a hash of the request's seed, of the position, and
    of the token's number in the vocabulary, so nothing has to be kept between steps.

    On a CPU vLLM takes one number from each request's generator, and computes the noise by one kernel from these.

    Shapes: ``B`` requests of a step, ``V`` tokens of the vocabulary.
    """

    def __init__(self, runner: Any) -> None:
        self._runner = runner  # its batch is made anew once the size of the cache is known
        self._device: torch.device = runner.device
        self._rows = torch.arange(runner.max_num_reqs, device=self._device)
        self._ones = torch.ones(runner.max_num_reqs, device=self._device)

    def __call__(
        self,
        logits_BV: torch.Tensor,
        generators: Mapping[int, torch.Generator],
        top_k_B: torch.Tensor | None,
        top_p_B: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a token of each request, and the log-probabilities that it was drawn from."""
        from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
        from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample

        logits_BV = apply_top_k_top_p(logits_BV, top_k_B, top_p_B)
        num = logits_BV.shape[0]
        seeds_B, positions_B = self._seeds(num, generators)
        token_ids_B = gumbel_sample(
            logits_BV,
            expanded_idx_mapping=self._rows[:num],
            temperature=self._ones,  # by which logits are divided already: it is not zero, so tokens are drawn
            seed=seeds_B,
            pos=positions_B,
            apply_temperature=False,
            is_drafting=False,
        )
        return token_ids_B, logits_BV.log_softmax(dim=-1, dtype=torch.float32)

    def _seeds(self, num: int, generators: Mapping[int, torch.Generator]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the seed and the number of tokens of each request. One without a generator is greedy, or a warm-up."""
        seeds_positions_2B = np.zeros((2, num), np.int64)
        for row, generator in generators.items():
            seeds_positions_2B[0, row] = np.uint64(generator.initial_seed() % 2**64).astype(np.int64)
        seeds_positions_2B[1] = self._runner.input_batch.num_tokens_no_spec[:num]
        seeds_B, positions_B = torch.from_numpy(seeds_positions_2B).to(self._device)
        return seeds_B, positions_B


def draw_at_once(runner: Any) -> None:
    """Have a model runner's sampler draw the tokens of all requests by one kernel."""
    runner.sampler.topk_topp_sampler.forward = TokenDraws(runner)
