"""The real vLLM on one GPU, fed in place out of another process's memory through CUDA IPC.

Each test has a process of its own: vLLM takes its environment, and memory that it can give back, once a process.
"""

from __future__ import annotations

import copy
import importlib.util
import multiprocessing
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import torch

from tandem.common.messages import SamplingParameters
from tandem.config.schema.generation import VllmCfg
from tandem.refit import layout
from tandem.refit.installing import quantise
from tandem.refit.planner import plan
from tandem.rollout.engine import EngineCompletion, SequenceRequest
from tandem.rollout.engines.vllm import insides
from tests.simulated_gpu.run import IS_RUNNING

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here"),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(900),
]

MODEL: dict[str, Any] = {  # layers of Qwen3-0.6B
    "model_type": "qwen3",
    "vocab_size": 1021,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": False,
    "initializer_range": 0.05,
    "bos_token_id": None,
    "eos_token_id": None,
}
if IS_RUNNING:
    MODEL |= {"hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 2}
    MODEL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
NUM_SAMPLES, NUM_TOKENS = (2, 4) if IS_RUNNING else (8, 24)
TEST_S = 800
PROMPT = (2, 7, 1, 8)
SETTINGS = VllmCfg(precision="bfloat16", max_model_len=256, gpu_memory_utilization=0.3, enforce_eager=True)


def train(wire: Connection, folder: str) -> None:
    """Hold a bfloat16 model on the GPU: change it, and say what it thinks of tokens, when asked."""
    import transformers

    from tandem.trainer.exposed_weights import weights_of

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**MODEL)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).cuda().eval()
    model.save_pretrained(folder)
    wire.send(layout.encode(weights_of(dict(model.named_parameters())).layout))
    while True:
        try:
            asked, argument = wire.recv()
        except EOFError:
            return
        with torch.no_grad():
            if asked == "step":
                torch.manual_seed(argument)
                for parameter in model.parameters():
                    parameter.add_(0.01 * torch.randn_like(parameter))
                model.save_pretrained(folder)
                torch.cuda.synchronize()
                wire.send(None)
            else:
                found = []
                exact = copy.deepcopy(model).float()
                for judge in (model, exact, in_float8(exact)):
                    logits_TV = judge(torch.tensor([[*PROMPT, *argument]]).cuda()).logits[0, len(PROMPT) - 1 : -1]
                    logprobs_TV = logits_TV.float().log_softmax(-1).cpu()
                    found.append(logprobs_TV.gather(1, torch.tensor(argument)[:, None])[:, 0].numpy())
                wire.send(found)


class Judged(NamedTuple):
    """Log-probabilities of the same tokens and weights."""

    own_T: np.ndarray[Any, Any]
    """In bfloat16."""
    exact_T: np.ndarray[Any, Any]
    """In float32."""
    in_float8_T: np.ndarray[Any, Any]
    """In float32, but for products of float8."""


def in_float8(exact: Any) -> Any:
    """Return a copy with products of float8, as in vLLM: weights in blocks, inputs in groups, but the last layer."""
    model, float8 = copy.deepcopy(exact), torch.float8_e4m3fn

    def rounded(x: torch.Tensor, block: tuple[int, ...]) -> torch.Tensor:
        values, scales = quantise(x, block, float8)
        for dim, size in zip(range(x.dim() - len(block), x.dim()), block, strict=True):
            scales = scales.repeat_interleave(size, dim).narrow(dim, 0, x.shape[dim])
        return values.float() * scales

    for name, layer in model.named_modules():
        if isinstance(layer, torch.nn.Linear) and name != "lm_head":
            layer.weight.data = rounded(layer.weight.data, (128, 128))
            layer.register_forward_pre_hook(lambda _, inputs: (rounded(inputs[0], (128,)),))
    return model


class Trainer:
    """The other process."""

    def __init__(self, wire: Connection) -> None:
        self._wire = wire
        self.layout = layout.decode(self._receive())

    def step(self, seed: int) -> None:
        self._wire.send(("step", seed))
        self._receive()

    def logprobs(self, token_ids: list[int]) -> Judged:
        """Return what it thinks of tokens."""
        self._wire.send(("logprobs", token_ids))
        return Judged(*self._receive())

    def _receive(self) -> Any:
        assert self._wire.poll(300), "the trainer does not answer"
        return self._wire.recv()


@contextmanager
def other_process(tmp_path: Path) -> Iterator[Trainer]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=train, args=(theirs, str(tmp_path / "model")), daemon=True)
    process.start()
    theirs.close()
    try:
        yield Trainer(ours)
    finally:
        ours.close()  # with which it ends
        process.join(30)
        process.kill()


def run_test(name: str, tmp_path: Path) -> None:
    """Run the test that `alone` was given, in this process."""
    insides.prepare_environment(num_threads=1)
    with other_process(tmp_path) as trainer:
        getattr(sys.modules[__name__], name).test(trainer, tmp_path)


def alone(test: Callable[[Trainer, Path], None]) -> Callable[[Path], None]:
    """Have a test run in a process of its own, with a trainer in another."""

    def run(tmp_path: Path) -> None:
        process = multiprocessing.get_context("spawn").Process(target=run_test, args=(test.__name__, tmp_path))
        process.start()
        try:
            process.join(TEST_S)
            assert process.exitcode == 0, "it has said why"
        finally:
            process.kill()
            process.join(30)

    run.__name__, run.test = test.__name__, test  # type: ignore[attr-defined]
    return run


@contextmanager
def engine(tmp_path: Path, settings: VllmCfg = SETTINGS) -> Iterator[Any]:
    from tandem.rollout.engines.vllm.engine import VllmEngine

    made = VllmEngine(tmp_path / "model", settings)
    try:
        yield made
    finally:
        made.close()


def refit(trainer: Trainer, vllm: Any, version: int) -> None:
    (wanted,) = vllm.layouts()
    program = plan({"trainer-0": trainer.layout}, {"rollout-0": wanted}, allow_alias=False).programs["rollout-0"]
    assert {transfer.transport for transfer in program.receives} == {"cuda_ipc"}
    vllm.install([program])
    vllm.apply(version, 60.0)


def parameters_of(worker: Any) -> dict[str, torch.Tensor]:
    return {name: held.detach().cpu() for name, held in worker.model_runner.get_model().named_parameters()}


def generate(vllm: Any) -> list[EngineCompletion]:
    sampling = SamplingParameters(
        temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=NUM_TOKENS, stop_token_ids=(), stop_strings=()
    )
    for number in range(NUM_SAMPLES):
        vllm.add_request(SequenceRequest(request_id=number, prompt_ids=PROMPT, sampling=sampling, seed=number))
    completions: list[EngineCompletion] = []
    while vllm.num_unfinished:
        completions += vllm.step()
    return completions


def load(wire: Connection, folder: Path) -> None:
    """Have vLLM load a model by itself, and send its parameters."""
    from tandem.rollout.engines.vllm.engine import engine_arguments

    insides.prepare_environment(num_threads=1)
    llm = insides.InProcessLlm({**engine_arguments(folder, SETTINGS, {}), "load_format": "safetensors"})
    (found,) = llm.engine.collective_rpc(parameters_of)
    wire.send({name: tensor.view(torch.uint8).numpy() for name, tensor in found.items()})
    llm.close()


def loaded(folder: Path) -> dict[str, torch.Tensor]:
    """Return the bytes of the parameters of a vLLM that has loaded a model by itself."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=load, args=(theirs, folder))
    process.start()
    theirs.close()
    try:
        return {name: torch.from_numpy(bytes_) for name, bytes_ in ours.recv().items()}
    finally:
        process.join(60)
        process.kill()


@alone
def test_a_refit_equals_load_weights(trainer: Trainer, tmp_path: Path) -> None:
    with engine(tmp_path) as vllm:
        for version in range(2):
            trainer.step(version)
            refit(trainer, vllm, version)
        (found,) = vllm._llm.engine.collective_rpc(parameters_of)
    expected = loaded(tmp_path / "model")
    assert found.keys() == expected.keys()
    for name, held in found.items():
        assert torch.equal(held.view(torch.uint8), expected[name]), name


@alone
def test_log_probabilities_are_the_trainers(trainer: Trainer, tmp_path: Path) -> None:
    with engine(tmp_path) as vllm:
        for version in range(3):
            trainer.step(version)
            refit(trainer, vllm, version)
            off, off_of_trainer = [], []
            for made in generate(vllm):
                assert made.versions_T.tolist() == [version] * len(made.versions_T)
                judged = trainer.logprobs(made.token_ids_T.tolist())
                off.append(np.abs(made.logprobs_T - judged.exact_T))
                off_of_trainer.append(np.abs(judged.own_T - judged.exact_T))
            # bfloat16 keeps 8 bits: it takes the one as far from float32 as the other.
            assert np.mean(off) < 1.5 * np.mean(off_of_trainer), (np.mean(off), np.mean(off_of_trainer))
            assert np.max(off) < 2.5 * np.max(off_of_trainer), (np.max(off), np.max(off_of_trainer))


@alone
def test_sleep_gives_memory_back(trainer: Trainer, tmp_path: Path) -> None:
    with engine(tmp_path) as vllm:
        refit(trainer, vllm, 0)
        before = [(made.request_id, made.token_ids_T.tolist()) for made in generate(vllm)]
        awake, _ = torch.cuda.mem_get_info()
        vllm.sleep()
        asleep, total = torch.cuda.mem_get_info()
        assert asleep - awake > 0.2 * total, "most of the 0.3 that it may take is the key-value cache"
        vllm.wake()
        refit(trainer, vllm, 1)
        assert [(made.request_id, made.token_ids_T.tolist()) for made in generate(vllm)] == before


@pytest.mark.skipif(IS_RUNNING, reason="activations are quantised by a kernel of vLLM's own")
@alone
def test_weights_in_float8_make_similar_tokens(trainer: Trainer, tmp_path: Path) -> None:
    with engine(tmp_path, msgspec.structs.replace(SETTINGS, precision="fp8")) as vllm:
        refit(trainer, vllm, 0)
        assert vllm.misquantised() == ()
        off, off_by_float8 = [], []
        for made in generate(vllm):
            judged = trainer.logprobs(made.token_ids_T.tolist())
            off.append(np.abs(made.logprobs_T - judged.exact_T))
            off_by_float8.append(np.abs(judged.in_float8_T - judged.exact_T))
        assert 0.5 < np.mean(off) / np.mean(off_by_float8) < 1.5, (np.mean(off), np.mean(off_by_float8))
