"""The factory of vLLM's engine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem.config.installed.vllm_arguments import refits_drafter
from tandem.rollout.engines.factory import EngineFactory, EngineMedia
from tandem.rollout.engines.vllm import insides
from tandem.samples.routed_experts import replayed_experts
from tandem.samples.sampling_masks import masks_of_run

if TYPE_CHECKING:
    from tandem.config import Config
    from tandem.config.schema.generation import VllmCfg
    from tandem.rollout.engine import Engine
    from tandem.serving.server_process import ServingHandover


class VllmFactory:
    """Builds vLLM's engine, of a text model or of one that sees, with one set of adapters or several."""

    def prepare_process(self, num_threads: int) -> None:
        """Set what vLLM, torch and OpenMP read once."""
        insides.prepare_environment(num_threads)

    def build(self, config: Config, media: EngineMedia | None) -> Engine:
        """Return the engine of a run."""
        policy, generation = config.policy, config.policy.generation
        # External requests are few, and do not wait for all waiting samples.
        extra = {"scheduling_policy": "priority"} if generation.takes_external_requests and generation.is_async else {}
        settings: dict[str, Any] = {
            "extra": {**extra, **generation.vllm_kwargs},
            "experts": replayed_experts(config),
            "mask_format": masks_of_run(config),
            "config_overrides": policy.engine_config_overrides,
        }
        folder = Path(policy.model_name)
        if generation.num_adapter_sets > 1:
            from tandem.rollout.engines.vllm.adapters import AdaptersVllmEngine

            return AdaptersVllmEngine(folder, generation.vllm_cfg, num_sets=generation.num_adapter_sets, **settings)
        if policy.mtp.num_layers and refits_drafter(policy):
            from tandem.rollout.engines.vllm.drafter import DraftingVllmEngine

            return DraftingVllmEngine(folder, generation.vllm_cfg, num_layers=policy.mtp.num_kept, **settings)
        return _make(folder, generation.vllm_cfg, media, settings)

    def load(self, serving: ServingHandover, media: EngineMedia | None) -> Engine:
        """Return an engine with the weights of a model folder."""
        extra = {"max_num_seqs": serving.max_batch_size, **serving.vllm_kwargs}
        settings = {"extra": extra, "with_weights": True}
        return _make(Path(serving.model_folder), serving.vllm_cfg, media, settings)


def _make(
    folder: Path,
    vllm_cfg: VllmCfg,
    media: EngineMedia | None,
    settings: dict[str, Any],
) -> Engine:
    if media is not None:
        from tandem.rollout.engines.vllm.pictures import SeeingVllmEngine

        return SeeingVllmEngine(folder, vllm_cfg, **media, **settings)
    from tandem.rollout.engines.vllm.engine import VllmEngine

    return VllmEngine(folder, vllm_cfg, **settings)


FACTORY: EngineFactory = VllmFactory()
