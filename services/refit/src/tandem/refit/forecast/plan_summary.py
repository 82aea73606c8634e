"""The plan summary beside refits: ranks, batches, memory, and keys without effect."""

from __future__ import annotations

from collections.abc import Iterator

from tandem.config import Config, notices
from tandem.config.models import lora
from tandem.config.unsupported import refusal
from tandem.refit.forecast.sides import Side

_GB = 1e9


def ranks_of_training(config: Config) -> str:
    """Return the number of trainers, and of data-parallel shards of a batch."""
    num, shares = config.cluster.trainers, config.data_parallel_size
    cut = f", {num // shares} to each of {shares} data-parallel shards" if num > shares > 1 else ""
    beside = [f"{size} of the {model}" for model, size in config.processes_of.items() if model != "policy"]
    rest = f", and beside them {' and '.join(beside)}" if beside else ""
    return f"{num} trainer rank{'s' if num > 1 else ''}{cut}{rest}"


def steps(config: Config) -> Iterator[str]:
    """Describe what one step computes: optimizer steps, and each rank's micro-batches."""
    if config.evaluates:
        yield _validation(config)
        return
    policy, share = config.policy, -(-config.policy.train_global_batch_size // config.data_parallel_size)
    things, num = f"{config.declaration.unit}s", config.num_optimizer_steps
    if config.declaration.rolls_out:
        section, whole = config.rollout_section, config.units_per_step
        prompts, generations = section.num_prompts_per_step, section.num_generations_per_prompt
        yield f"{prompts:,} prompts × {generations} samples = {whole:,} sequences, {_count(num, 'optimizer step')}"
        if section.use_dynamic_sampling:
            drawn, most = section.num_prompts_per_batch, section.dynamic_sampling_max_gen_batches
            yield f"of each {drawn:,} prompts drawn, those with differing rewards are used; at most {most:,} draws"
    else:
        yield f"{policy.train_global_batch_size:,} {things}, 1 optimizer step"
    micro_batches = _micro_batches(config, share, policy.train_micro_batch_size)
    yield f"of each, a rank trains on {share:,} {things}: {micro_batches}"
    beside = config.declaration.trains[:-1]
    scored = " and the ".join(model for model in config.scored_by(num) if model not in beside)
    if scored:
        whole = share * num // config.num_passes
        batches = _micro_batches(config, whole, policy.logprob_batch_size, scoring=True)
        yield f"before that, log-probabilities of the {scored}: {batches}"
    if beside:
        yield f"the same for the {' and the '.join(beside)} model, by its own batch sizes"


def _validation(config: Config) -> str:
    """Describe what a run without steps computes."""
    section, generation = config.rollout_section, config.policy.generation
    num = section.num_val_generations_per_prompt
    temperature = generation.temperature if section.val_temperature is None else section.val_temperature
    return (
        f"no step: validation on at most {section.max_val_samples:,} problems × {_count(num, 'sample')}, temperature "
        f"{temperature:g}, with the model as it is"
    )


def _micro_batches(config: Config, num: int, size: int, *, scoring: bool = False) -> str:
    packing, dynamic = config.policy.sequence_packing, config.policy.dynamic_batching
    longest = config.policy.max_total_sequence_length
    if not packing.enabled and not dynamic.enabled:
        return f"{_count(-(-num // size), 'micro-batch')} of {size}"
    section = packing if packing.enabled else dynamic
    tokens = section.logprob_mb_tokens if scoring else section.train_mb_tokens
    most = -(-num // max(1, tokens // longest))
    kind = "packed rows" if packing.enabled else "micro-batches"
    return f"at most {most:,} {kind} of at most {tokens:,} tokens"


def memory(config: Config, trainers: Side) -> str:
    """Describe the largest trainer's memory when its optimizer begins: closed forms for Adam's moments."""
    rest, experts, adapters = _most_weights(trainers)
    frozen = 0
    if config.policy.adapters is not None:  # frozen weights have neither gradients nor optimizer state
        frozen, rest, experts = rest + experts, adapters, 0
    weights = gradients = rest + experts
    policy, megatron = config.policy, config.policy.megatron_cfg
    state = 2.0 * weights
    # On DTensor, trained weights are in float32 whatever the precision of the passes; other weights are in that one.
    held = 2 if policy.precision == "bfloat16" else 4
    trained = held if megatron.enabled else 4
    if megatron.enabled:
        is_half = policy.precision == "bfloat16"
        # Half precision has copies in float32 of weights and, unless gradients are reduced in it, of gradients.
        item_size, bytes_of_state = (2, 16) if is_half else (4, 8)
        if is_half and megatron.distributed_data_parallel_config.get("grad_reduce_in_fp32"):
            gradients, bytes_of_state = weights * 2, 12
        a_stage = config.cluster.trainers // megatron.pipeline_model_parallel_size
        shares = a_stage // megatron.tensor_model_parallel_size
        shares_E = a_stage // (megatron.expert_model_parallel_size * megatron.expert_tensor_parallel_size)
        if not megatron.optimizer.get("use_distributed_optimizer", True):
            shares = shares_E = 1
        state = bytes_of_state / item_size * (rest / shares + experts / shares_E)
    kept = {"weights": weights, "gradients": gradients, "optimizer": state}
    if config.policy.adapters is not None:  # without its adapters it is its own reference
        kept = {"frozen weights": frozen, "adapters": weights, "gradients": gradients, "optimizer": state}
    elif config.needs_reference and "reference" not in config.processes_of:
        kept["reference model"] = weights * held // trained
    if "teacher" in config.holds and "teacher" not in config.processes_of:
        kept["teacher"] = weights * held // trained
    for model in config.declaration.trains[:-1]:  # assumed to have the policy's size
        if model not in config.processes_of:
            kept[f"{model} model and its optimizer"] = weights + gradients + state
    listed = ", ".join(f"{name} {size / _GB:,.2f}" for name, size in kept.items())
    where = " (in host memory)" if policy.dtensor_cfg.cpu_offload and not megatron.enabled else ""
    return f"{sum(kept.values()) / _GB:,.2f} GB a trainer{where}, without activations: {listed}"


def _most_weights(side: Side) -> tuple[int, int, int]:
    """Return the bytes of the rank with the most weights: those of experts, of adapters and of the rest."""
    deployment = side.deployment
    ranks = {deployment.place(rank): rank for rank in range(deployment.num_ranks)}.values()
    found = []
    for rank in ranks:
        sizes = [0, 0, 0]
        for storage in deployment.parameters(side.model, rank).storages:
            kind = 2 if lora.is_adapter(storage.name) else int(".experts." in storage.name)
            sizes[kind] += storage.num_bytes
        found.append((sizes[0], sizes[1], sizes[2]))
    return max(found, key=sum)


def in_vain(config: Config) -> Iterator[str]:
    """Yield what is unsupported, and which keys have no effect."""
    unsupported = refusal(config)
    if unsupported:
        yield unsupported
    yield from notices(config)


def _count(num: int, noun: str) -> str:
    return f"{num:,} {noun}" + ("" if num == 1 else "es" if noun.endswith("ch") else "s")
