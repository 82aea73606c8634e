"""The engine takes its weights from shared memory by a planned program; the memory is this process's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from engine_harness import make_model, make_programs, reference_logprobs, request, run_all, shared_layout

from tandem.common.errors import RefitError
from tandem.refit.digests.task import digest_layout
from tandem.rollout.engine import Engine
from tandem.rollout.engines.skeleton import weights_of
from tandem.rollout.engines.transformers import TransformersEngine

PROMPT = (2, 7, 1, 8)


def digest_of(model: Any) -> list[int]:
    weights = weights_of(model)
    return digest_layout(weights.layout, weights.storages).tolist()


def held_by(engine: Engine) -> list[int]:
    return engine.digest_task(None).results()[0].tolist()


def empty_engine(folder: Path) -> TransformersEngine:
    return TransformersEngine(folder, num_slots=2, max_total_sequence_length=64, dtype="float32")


@pytest.mark.parametrize("allow_alias", [False, True])
@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_moe"])
def test_weights_arrive_through_shared_memory(architecture: str, allow_alias: bool, tmp_path: Path) -> None:
    model = make_model(architecture, tmp_path)
    engine: Engine = empty_engine(tmp_path)
    num_model_bytes = sum(parameter.nbytes for parameter in model.parameters())
    bound = engine.install(make_programs(shared_layout(model), engine, allow_alias=allow_alias))
    assert engine.version is None
    assert bound.num_bytes == (0 if allow_alias else num_model_bytes)
    assert engine.apply(0, 60.0) == {"trainer-0>rollout-0": bound.num_bytes}
    assert held_by(engine) == digest_of(model)

    with torch.no_grad():  # a training step
        for parameter in model.parameters():
            parameter.mul_(0.5)
    # Aliases see the step at once; copies only when they are applied.
    assert (held_by(engine) == digest_of(model)) == allow_alias
    engine.apply(1, 60.0)
    assert held_by(engine) == digest_of(model)
    made = run_all(engine, [request(0, PROMPT)])[0]
    assert made.versions_T.tolist() == [1] * 12
    assert np.abs(made.logprobs_T - reference_logprobs(model, PROMPT, made.token_ids_T)).max() < 1e-5
    engine.close()


def test_a_restarted_trainer_is_installed_anew_whether_aliased_before_or_not(tmp_path: Path) -> None:
    models = [make_model("qwen3", tmp_path, seed=seed) for seed in range(3)]
    engine = empty_engine(tmp_path)
    for version, (model, allow_alias) in enumerate(zip(models, [True, False, True], strict=True)):
        engine.install(make_programs(shared_layout(model), engine, allow_alias=allow_alias))
        assert engine.version is None
        engine.apply(version, 60.0)
        assert held_by(engine) == digest_of(model)
        made = run_all(engine, [request(version, PROMPT)])[version]
        assert np.abs(made.logprobs_T - reference_logprobs(model, PROMPT, made.token_ids_T)).max() < 1e-5


def test_a_source_that_is_gone_leaves_the_engine_without_a_version(tmp_path: Path) -> None:
    model = make_model("qwen3", tmp_path)
    engine = empty_engine(tmp_path)
    (program,) = make_programs(shared_layout(model), engine, allow_alias=False)
    engine.install([program])
    engine.apply(0, 60.0)
    (transfer,) = program.receives
    gone = tuple(
        msgspec.structs.replace(storage, address=msgspec.structs.replace(storage.address, pid=2**22 + 1))
        for storage in transfer.source_storages
    )
    lost = msgspec.structs.replace(program, receives=(msgspec.structs.replace(transfer, source_storages=gone),))
    with pytest.raises(RefitError, match="trainer-0"):
        engine.install([lost])
    assert engine.version is None
    with pytest.raises(RefitError, match="no whole weight version"):
        engine.step()
