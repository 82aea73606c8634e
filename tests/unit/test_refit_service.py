"""The refit service plans for the parts of engines, and judges engines by all of their parts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray
from plan_harness import PRIVATE, SHARED

from tandem.common.errors import RefitError
from tandem.common.messages import CommitVersion, Message, PlanTransfers, TransfersPlanned, VersionCommitted
from tandem.config import build_config
from tandem.refit import layout, program
from tandem.refit.adapters.catalogue import make_shape
from tandem.refit.adapters.deployment import HostNames
from tandem.refit.adapters.huggingface import HuggingFace
from tandem.refit.adapters.vllm import Vllm
from tandem.refit.digests import comparison
from tandem.refit.layout import Layout
from tandem.refit.service import RefitService

MODEL = make_shape(
    {
        "model_type": "qwen3",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 30,  # which fills the first worker's rows but for two, and none of the second's
        "tie_word_embeddings": False,
    },
    "float32",
)
PARTS = ("rollout-0/0", "rollout-0/1", "rollout-1/0", "rollout-1/1")


class Context:
    """Stands where the link to the coordinator would."""

    name = "refit-0"
    config = build_config(
        {
            "grpo": {"num_prompts_per_step": 6, "num_generations_per_prompt": 2},
            "policy": {"model_name": "model", "train_global_batch_size": 12, "train_micro_batch_size": 2},
            "data": {"dataset_name": "reasoning_gym", "task": "chain_sum"},
        }
    )

    def __init__(self) -> None:
        self.replies: list[Message] = []

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        yield

    def reply(self, command_id: int, message: Message) -> None:
        self.replies.append(message)


class Service:
    """The service with a trainer's layout, and those of two engines of two workers."""

    def __init__(self, address: Any = SHARED) -> None:
        self.context = Context()
        self.service = RefitService(self.context)  # type: ignore[arg-type]
        hosts = HostNames("host", per_host=8, has_gpus=False)
        (held,) = HuggingFace(1).layouts(MODEL, hosts)
        storages = tuple(msgspec.structs.replace(storage, address=address) for storage in held.storages)
        self.source = msgspec.structs.replace(held, storages=storages)
        self.wanted = dict(zip(PARTS, Vllm(tp=2, replicas=2).layouts(MODEL, hosts), strict=True))

    def plan(self) -> TransfersPlanned:
        command = PlanTransfers(
            command_id=1,
            deadline_s=1.0,
            sources={"trainer-0": layout.encode(self.source)},
            destinations={part: layout.encode(wanted) for part, wanted in self.wanted.items()},
            allow_alias=True,
        )
        self.service.handle(command, {})
        (planned,) = self.context.replies
        assert isinstance(planned, TransfersPlanned)
        return planned

    def commit(self, digests: dict[str, NDArray[np.uint64]]) -> VersionCommitted:
        self.context.replies.clear()
        encoded = {part: comparison.encode_digests(each) for part, each in digests.items()}
        command = CommitVersion(command_id=2, deadline_s=1.0, version=1, digests=encoded, has_update=False)
        self.service.handle(command, {})
        (committed,) = self.context.replies
        assert isinstance(committed, VersionCommitted)
        return committed


def shares(held: Layout, values: dict[str, int]) -> NDArray[np.uint64]:
    """Return digests in which each element of a tensor counts as much, so that shares are exact."""
    found = np.zeros(len(held.tensors), np.uint64)
    for row, tensor in enumerate(held.pieces.tensor_P.tolist()):
        num = int(held.pieces.shape_PD[row].prod())
        found[tensor] += np.uint64(num * values[held.tensors[tensor].name] % 2**64)
    return found


def test_each_worker_has_a_program_and_every_link_is_its_own() -> None:
    planned = Service().plan()
    assert set(planned.programs) == {"trainer-0", *PARTS}
    assert set(planned.num_bytes) == {f"trainer-0>{part}" for part in PARTS}
    assert planned.transfer_groups == ()
    assert planned.senders == ()


@pytest.mark.parametrize(
    ("address", "mode", "network", "largest"),
    [
        (PRIVATE, "auto", 45.0, 1 / 16),
        (PRIVATE, "auto", 0.1, 1.0),
        (PRIVATE, "off", 0.1, 0.0),
        (SHARED, "auto", 0.1, 0.0),
    ],
)
def test_programs_send_differences_where_they_stream_and_it_pays(
    address: Any, mode: str, network: float, largest: float
) -> None:
    """Not to engines that open the trainer's memory, nor by default; large ones on slow links only."""
    service = Service(address)
    service.service._differences = mode  # type: ignore[assignment]
    service.service._rates = msgspec.structs.replace(service.service._rates, network=network)
    programs = [program.decode(encoded) for encoded in service.plan().programs.values()]
    assert {made.largest_difference for made in programs} == {largest}


def test_an_engine_differs_if_any_of_its_workers_does() -> None:
    service = Service()
    service.plan()
    values = {tensor.name: 3 * index + 7 for index, tensor in enumerate(MODEL.tensors)}
    good = {"trainer-0": shares(service.source, values)}
    good |= {part: shares(wanted, values) for part, wanted in service.wanted.items()}
    assert service.commit(good).differing == {}
    name = "model.layers.1.mlp.gate_proj.weight"
    index = [tensor.name for tensor in service.wanted["rollout-1/1"].tensors].index(name)
    bad = {part: each.copy() for part, each in good.items()}
    bad["rollout-1/1"][index] += np.uint64(1)
    assert service.commit(bad).differing == {"rollout-1": name}
    # One engine alone, as after its replacement.
    assert service.commit({part: good[part] for part in ("trainer-0", "rollout-1/0", "rollout-1/1")}).differing == {}


def test_digests_of_something_else_are_refused() -> None:
    service = Service()
    service.plan()
    values = {tensor.name: 1 for tensor in MODEL.tensors}
    digests = {"trainer-0": shares(service.source, values), "rollout-0": shares(service.wanted["rollout-0/0"], values)}
    with pytest.raises(RefitError, match="digests came from rollout-0, which has no plan"):
        service.commit(digests)


def test_what_cannot_be_read_is_one_line_with_the_name_of_the_part() -> None:
    service = Service()
    good, bad = layout.encode(service.source), b"\x91" * 100_000
    for sources, destinations, named in (
        ({"trainer-0": bad}, {"rollout-0": good}, "trainer-0"),
        ({"trainer-0": good}, {"rollout-0": good[:-1]}, "rollout-0"),
    ):
        command = PlanTransfers(
            command_id=1, deadline_s=1.0, sources=sources, destinations=destinations, allow_alias=True
        )
        with pytest.raises(RefitError, match=f"^{named}: not a layout: "):
            service.service.handle(command, {})
    service.plan()
    for digests, what in (
        ({"trainer-0": bytes(9)}, "trainer-0: 9 bytes are not digests of 8 bytes each"),
        ({"rollout-0/0": bytes(16)}, "no digests came from trainer-0, which has sent the weights"),
    ):
        commit = CommitVersion(command_id=2, deadline_s=1.0, version=1, digests=digests, has_update=False)
        with pytest.raises(RefitError, match=f"^{what}$"):
            service.service.handle(commit, {})


def test_the_workers_of_an_engine_are_in_one_mesh() -> None:
    """So that an engine that is lost is brought back over one, whichever of its workers needs what."""
    service = Service(address=PRIVATE)
    planned = service.plan()
    sharing = [transfer_group for transfer_group in planned.transfer_groups if "rollout-0/0" in transfer_group.members]
    assert [set(transfer_group.members) for transfer_group in sharing] == [{*PARTS, "trainer-0"}]
