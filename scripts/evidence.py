"""Print the tables of docs/evidence.md, read off benchmarks/results; with ``--write``, bring the page up to date.

A table stands between ``<!-- table NAME -->`` and ``<!-- /table -->``, where `NAME` is one of `TABLES`.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "evidence.md"
RESULTS = ROOT / "benchmarks" / "results"
_MARKED = re.compile(r"(<!-- table (\w+) -->\n).*?(<!-- /table -->)", re.DOTALL)

Figures = Mapping[str, Any]
"""What a benchmark has noted of itself: numbers, and further such mappings."""


def figures(file: str, benchmark: str = "") -> Figures:
    """Return what the first benchmark of a file whose name begins so has noted."""
    entries: Sequence[Mapping[str, Any]] = _read(file)["benchmarks"]
    return next(entry["extra_info"] for entry in entries if entry["name"].startswith(benchmark))


def _read(file: str) -> Mapping[str, Any]:
    content: Mapping[str, Any] = json.loads((RESULTS / f"{file}.json").read_text())
    return content


def origin(file: str) -> str:
    """Return the line below a table: where its numbers are, on which processor they were measured, and when."""
    content = _read(file)
    day = datetime.fromisoformat(content["datetime"])
    processor = content["machine_info"]["cpu"]["brand_raw"]
    loads = [entry["extra_info"]["load"] for entry in content["benchmarks"] if "load" in entry["extra_info"]]
    load = f", load {median(load[0] for load in loads):.0f}" if loads else ""
    return f"[`{file}.json`](../benchmarks/results/{file}.json): {processor}, {day:%-d %B %Y}{load}."


def table(header: str, rows: Sequence[Sequence[str]], file: str) -> str:
    """Return a table whose columns but the first are numbers, with the line about its origin."""
    titles = header.split(" | ")
    ruler = f"|---|{'---:|' * (len(titles) - 1)}"
    lines = [f"| {' | '.join(cells)} |".replace("|  |", "| |") for cells in (titles, *rows)]
    return "\n".join([lines[0], ruler, *lines[1:], "", origin(file)])


def _training_speed() -> str:
    noted = figures("training_speed")
    times = noted["times as fast as hugging face, medians of the rounds' ratios"]
    share = noted["share of the bound, matrix products, medians of the rounds' ratios"]["whole step"]
    names = {
        "dtensor": "DTensor",
        "megatron": "Megatron-Core, without Transformer Engine",
        "hugging face": "plain loop over the Hugging Face model",
    }
    rows = [
        [name, f"{times['forward and backward'][key]:.3f}", f"{times['whole step'][key]:.3f}", f"{share[key]:.2f}"]
        for key, name in names.items()
    ]
    header = "times as fast as the plain loop | forward and backward | with clipping and AdamW | of the bound"
    return table(header, rows, "training_speed")


def _long_context() -> str:
    names = {"dtensor": "DTensor", "megatron": "Megatron-Core", "trl": "TRL 1.16", "hugging face": "plain loop"}
    rows = []
    for entry in sorted(_read("long_context")["benchmarks"], key=lambda entry: entry["extra_info"]["tokens"]):
        noted = entry["extra_info"]
        plans = noted["the plan's prediction, bytes"]
        for way, measured in sorted(noted["measured"].items(), key=lambda item: [*names].index(item[0])):
            peak, tandem = measured["peak bytes"], noted["measured"]["dtensor"]["peak bytes"]
            plan = f"{plans[way] / 2**20:,.0f}" if way in plans else ""
            rows.append(
                [
                    f"{noted['tokens']:,} tokens, {names[way]}",
                    f"{peak / 2**20:,.0f}",
                    plan,
                    f"{peak / tandem:.1f}",
                    f"{measured['processor seconds']:.0f}",
                ]
            )
    header = " | peak, MiB | of the plan | times DTensor's peak | processor seconds"
    return table(header, rows, "long_context")


def _step() -> str:
    noted = figures("step")
    seconds, share = noted["median step seconds"], noted["share of the bound, matrix products"]
    rows = [
        ["TRL 1.16", f"{seconds['trl']:.2f}", "1", f"{share['trl, whole step']:.2f}"],
        ["Tandem", f"{seconds['tandem']:.2f}", f"{noted['trl over tandem']:.2f}", f"{share['tandem, whole step']:.2f}"],
    ]
    return table(" | seconds of a step | times as fast | of the bound", rows, "step")


def _packing() -> str:
    noted = figures("packing")
    names = {"padded": "padded, 8 rows of like lengths", "dynamic": "dynamic batching", "packed": "packed"}
    rows = [
        [
            name,
            f"{noted['tokens computed'][key]:,}",
            f"{noted['share of padding'][key]:.1%}",
            f"{noted['speed-up over padded'][key]:.2f}",
        ]
        for key, name in names.items()
    ]
    return table(" | tokens computed | padding | times as fast", rows, "packing")


def _saving() -> str:
    seconds = figures("saving")["median seconds"]
    names = {"written at once": "written at once", "written aside": "copied, and written while training continues"}
    rows = [[name, f"{seconds[key]:.3f}"] for key, name in names.items()]
    return table("a checkpoint of 496 MB | seconds that training waits", rows, "saving")


def _checkpoint_check() -> str:
    seconds = figures("checkpoint_check")["median seconds of processors"]
    names = {"believed": "without the check", "checked": "with it"}
    rows = [[name, f"{seconds[key]:.3f}"] for key, name in names.items()]
    return table("building a trainer from 496 MB | seconds of processors", rows, "checkpoint_check")


def _router_replay() -> str:
    names = {
        "[none]": "nothing",
        "[weights": "each weight differs by about 0.1 %",
        "[engine": "the engine computes in bfloat16",
    }
    rows = []
    for key, name in names.items():
        noted = figures("router_replay", f"test_with_replay_they_agree{key}")
        own, replayed = noted["token_mult_prob_error, own routes"], noted["token_mult_prob_error, replayed"]
        largest = [noted[f"largest, {routes}"] for routes in ("own routes", "replayed")]
        rows.append([name, f"{own:.5f}", f"{replayed:.5f}", f"{largest[0]:.3f}", f"{largest[1]:.3f}"])
    header = "between engine and trainer | own routes | replayed | largest factor, own routes | replayed"
    return table(header, rows, "router_replay")


def _refit_shm() -> str:
    noted = figures("refit_shm", "test_refit_over_shared_memory[512 MB-1-1]")
    names = {
        "tandem, not verified": "Tandem, not verified",
        "tandem, verified in full beside": "Tandem, the default: verified while engines generate",
        "tandem, until verified in samples": "Tandem, until verified in samples",
        "tandem, until verified in full": "Tandem, until verified in full",
        "memcpy": "memcpy inside one process",
        "torch.multiprocessing": "torch.multiprocessing: shared tensors, then copied",
        "gloo broadcast, 64 MB buckets": "gloo broadcast, 64 MB buckets",
        "gloo broadcast, each tensor": "gloo broadcast, a tensor at a time",
        "safetensors, tmpfs": "a safetensors file in tmpfs",
        "safetensors, disk": "a safetensors file on disk",
    }
    rates = noted["median GB/s"]
    rows = [
        [name, f"{noted['median seconds'][key]:.3f}", f"{rates[key]:.1f}", f"{rates[key] / rates['memcpy']:.2f}"]
        for key, name in names.items()
    ]
    return table("512 MB from one process to another | seconds | GB/s | of memcpy", rows, "refit_shm")


def _refit_reshard() -> str:
    rows = []
    for key, mapping in {"TP2": "TP2 × PP2 to TP4", "EP4": "EP4 to TP2", "FSDP4": "FSDP4 to TP2"}.items():
        noted = figures("refit_reshard", f"test_resharding[{key}")
        seconds = noted["median seconds"]
        ours, whole = seconds["tandem"], seconds["gathered, broadcast whole"]
        megabytes = [
            noted[f"bytes {way}"] / 1e6 for way in ("from trainers to engines", "gathered and broadcast whole")
        ]
        times = f"{noted['times as fast as gathered, broadcast whole, medians']['tandem']:.1f} ×"
        sizes = [f"{size:.1f}" for size in megabytes]
        rows.append([mapping, f"{1e3 * ours:.0f} ms", f"{1e3 * whole:.0f} ms", times, *sizes])
    header = "resharding 143 MB over gloo | Tandem | whole tensors, broadcast | times as fast | MB sent | MB, broadcast"
    return table(header, rows, "refit_reshard")


def _refit_lora() -> str:
    noted = figures("refit_lora")
    names = {
        "all": "all weights, shared memory",
        "adapters, base copied": "adapters, base copied",
        "adapters, base in place": "adapters, base read in place",
        "all, streamed": "all weights, streamed within the host",
        "adapters, streamed": "adapters, streamed within the host",
    }
    rows = [
        [
            name,
            f"{noted['moved'][key] / 1e6:.1f}",
            f"{1e3 * noted['median seconds'][key]:.0f}",
            f"{1e3 * min(noted['seconds'][key]):.0f}",
        ]
        for key, name in names.items()
    ]
    return table("way, on one host | MB moved | median, ms | best, ms", rows, "refit_lora")


def _store() -> str:
    rows = []
    for benchmark, where in (
        ("test_through_a_store", "a folder, one machine"),
        ("test_through_s3_over_links[1.0]", "S3, links of 1 GB/s"),
        ("test_through_s3_over_links[0.1]", "S3, links of 0.1 GB/s"),
    ):
        for share, by_way in figures("store", benchmark)["by share"].items():
            best = {way: {what: min(values) for what, values in of.items()} for way, of in by_way.items()}
            stream, store = best["stream"], best["store"]
            rows.append(
                [
                    f"{where}, {share} changed",
                    *(f"{way['bytes'] / 1e6:.1f}" for way in (stream, store)),
                    *(f"{way['seconds']:.2f}" for way in (stream, store)),
                ]
            )
    return table(" | MB streamed | MB read from the store | seconds streamed | through the store", rows, "store")


def _digest() -> str:
    noted = figures("digest", "test_digests[512 MB, 90 tensors-float32]")
    names = {
        "memcpy": "memcpy, for comparison",
        "tandem_sampled": "`sampled`",
        "tandem_as_bfloat16": "`full`, for engines in bfloat16",
        "tandem": "`full`",
    }
    rows = [
        [name, f"{noted['median seconds'][key]:.3f}", f"{noted['median GB/s'][key]:.1f}"] for key, name in names.items()
    ]
    return table("512 MB of float32 in 90 tensors | seconds | GB/s", rows, "digest")


def _vllm() -> str:
    rows = []
    for key, name in {"equal": "64 prompts × 64 tokens", "ragged": "64 prompts × 8 to 64 tokens"}.items():
        noted = figures("vllm", f"test_tokens_per_second[{key}]")
        rates = [f"{noted['median tokens/s'][engine]:,.0f}" for engine in ("vLLM", "embedded")]
        rows.append([f"{name}, tokens a second", *rates])
    seconds = figures("vllm", "test_start")["median seconds"]
    starts = [f"{seconds[engine]['import'] + seconds[engine]['start']:.1f}" for engine in ("vllm", "embedded")]
    return table(" | vLLM | embedded", [*rows, ["start, seconds", *starts]], "vllm")


def _new_weights() -> str:
    times = figures("vllm", "test_new_weights")["times as fast as memcpy, medians"]
    names = {
        "in place": "refit in place",
        "vLLM's load_weights": "vLLM's own `load_weights`",
        "aliased": "refit that reads in place what vLLM does not fuse, and copies 268 MB",
    }
    rows = [[name, f"{times[key]:.2f} ×"] for key, name in names.items()]
    return table("new weights in vLLM, 405 MB | of memcpy", rows, "vllm")


def _asynchronous() -> str:
    noted = figures("async")
    seconds, rates = noted["median seconds of a step"], noted["samples a second"]
    rows = [
        [way, f"{seconds[way]:.2f}", f"{rates[way]:.1f}", f"{rates[way] / rates['synchronous']:.2f}"]
        for way in ("synchronous", "asynchronous")
    ]
    return table(" | seconds of a step | samples a second | times as many", rows, "async")


def _async_rollouts() -> str:
    seconds = figures("async_rollouts")["median seconds"]
    names = {
        "async_engine": "`async_engine`",
        "turn by turn": "each turn of all samples before any is answered",
        "waits": "the engine that waits for environments",
    }
    rows = [[name, f"{seconds[key]:.2f}"] for key, name in names.items()]
    return table("64 samples of four turns, an environment of 50 ms | seconds", rows, "async_rollouts")


def _images() -> str:
    ranks = figures("images")["ranks"]["8 ranks"]
    names = {"encoded, processed by each rank": "encoded, as here", "pixel values": "pixel values"}
    rows = [
        [
            name,
            f"{ranks[key]['bytes to all ranks'] / 1e6:,.0f}",
            f"{ranks[key]['seconds of processor time of the server']:.2f}",
            f"{ranks[key]['seconds of processor time of a rank, median']:.2f}",
        ]
        for key, name in names.items()
    ]
    return table("512 images to 8 ranks | MB | processor seconds of the sender | of a rank", rows, "images")


def _tinker() -> str:
    noted = figures("tinker")
    names = {
        "forward_backward": "`forward_backward`, 32 sequences of 256 tokens",
        "sample": "`sample`, 16 samples of 64 tokens",
    }
    share = "all else, share of the model's, median"
    rows = [
        [
            name,
            f"{median(noted[key]['seconds of the model']):.2f} s",
            f"{noted[key]['milliseconds of all else, median']:.1f} ms",
            f"{noted[key][share]:.1%}",
        ]
        for key, name in names.items()
    ]
    return table("call | the model's work | all else | share", rows, "tinker")


def _tinker_models() -> str:
    seconds = figures("tinker_models")["seconds"]
    names = {
        "one model, one by one": "one model, one call after the other",
        "two models in turns": "two models in turns, as many calls",
        "one model at once, twice": "one model, all at once",
        "two models at once": "two models, all at once",
    }
    ways = ("held together", "merged in turns")
    rows = [[name, *(f"{1e3 * median(seconds[way][key]):.0f}" for way in ways)] for key, name in names.items()]
    return table("samples, milliseconds | held together | merged in turns", rows, "tinker_models")


def _curve() -> str:
    noted = figures("curve")
    rows = [[way, f"{noted[f'{way}: GB/s']:.1f}"] for way in ("plain", "encrypted")]
    return table("samples fetched | GB/s", rows, "curve")


TABLES: Mapping[str, Callable[[], str]] = {
    "training_speed": _training_speed,
    "long_context": _long_context,
    "step": _step,
    "packing": _packing,
    "saving": _saving,
    "checkpoint_check": _checkpoint_check,
    "router_replay": _router_replay,
    "refit_shm": _refit_shm,
    "refit_reshard": _refit_reshard,
    "refit_lora": _refit_lora,
    "store": _store,
    "digest": _digest,
    "vllm": _vllm,
    "new_weights": _new_weights,
    "async": _asynchronous,
    "async_rollouts": _async_rollouts,
    "images": _images,
    "tinker": _tinker,
    "tinker_models": _tinker_models,
    "curve": _curve,
}


def names_of_tables(page: str) -> Iterator[str]:
    """Yield the names of the tables that a page has."""
    for match in _MARKED.finditer(page):
        yield match[2]


def with_tables(page: str) -> str:
    """Return a page with fresh tables."""
    return _MARKED.sub(lambda match: f"{match[1]}{TABLES[match[2]]()}\n{match[3]}", page)


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        PAGE.write_text(with_tables(PAGE.read_text()))
    else:
        print("\n\n".join(build() for build in TABLES.values()))
