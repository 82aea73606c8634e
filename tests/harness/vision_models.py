"""Tiny vision models, of every family: weights drawn from a seed, a character-level tokenizer, and what reads images.

Heads have 32 dimensions, so that vLLM's build for CPUs takes them. A picture is at most some dozen features.
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

FAMILIES = ("qwen2_5_vl", "qwen3_vl", "gemma3", "smolvlm", "idefics3")
TOKENS_PER_IMAGE = 16
"""Features of an image of Gemma 3, and of each crop of SmolVLM and Idefics3."""

_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 .,:?!<>|_-\n"
_QWEN = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_CROPS = (
    "<fake_token_around_image>",
    "<image>",
    "<end_of_utterance>",
    "<global-img>",
    *(f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)),
)
SPECIAL: dict[str, tuple[str, ...]] = {
    "qwen2_5_vl": _QWEN,
    "qwen3_vl": _QWEN,
    "gemma3": ("<start_of_image>", "<end_of_image>", "<image_soft_token>"),
    "smolvlm": _CROPS,
    "idefics3": _CROPS,
}
_NAMED: dict[str, Any] = {
    "qwen2_5_vl": {
        "image_token": "<|image_pad|>",
        "video_token": "<|video_pad|>",
        "vision_bos_token": "<|vision_start|>",
        "vision_eos_token": "<|vision_end|>",
    },
    "gemma3": {
        "image_token": "<image_soft_token>",
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
    },
}
_NAMED["qwen3_vl"] = _NAMED["qwen2_5_vl"]
_PART = {
    "qwen2_5_vl": "<|vision_start|><|image_pad|><|vision_end|>",
    "qwen3_vl": "<|vision_start|><|image_pad|><|vision_end|>",
    "gemma3": "<start_of_image>",
    "smolvlm": "<image>",
    "idefics3": "<image>",
}
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}:{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for p in m['content'] %}{% if p['type'] == 'image' %}PART{% else %}{{ p['text'] }}{% endif %}{% endfor %}"
    "{% endif %}{{ '\n' }}{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
_QWEN_PROCESSOR = {
    "patch_size": 4,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
}
_CROPS_PROCESSOR = {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32}, "do_image_splitting": True}
PROCESSORS: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {
        **_QWEN_PROCESSOR,
        "image_processor_type": "Qwen2VLImageProcessor",
        "min_pixels": 16 * 16,
        "max_pixels": 64 * 64,
    },
    "qwen3_vl": {
        **_QWEN_PROCESSOR,
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "size": {"shortest_edge": 16 * 16, "longest_edge": 64 * 64},
    },
    "gemma3": {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 32, "width": 32}},
    "smolvlm": {"image_processor_type": "SmolVLMImageProcessor", **_CROPS_PROCESSOR},
    "idefics3": {"image_processor_type": "Idefics3ImageProcessor", **_CROPS_PROCESSOR},
}
"""The ``preprocessor_config.json`` of each, under the names that published models have."""


def vision_tokenizer(family: str, template: str = TEMPLATE) -> Any:
    """Return the Transformers tokenizer of a family: its special tokens, and one token for each character."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    texts = ["<pad>", "<s>", "</s>", *SPECIAL[family], *_LETTERS]
    made = Tokenizer(models.WordLevel({text: index for index, text in enumerate(texts)}, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    made.decoder = decoders.Fuse()
    made.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL[family]])
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        extra_special_tokens=_NAMED.get(family, list(SPECIAL[family])),
        chat_template=template.replace("PART", _PART[family]),
    )


def vision_config(family: str, vocabulary: dict[str, int], **text_fields: Any) -> Any:
    """Return the Transformers configuration of a family's tiny model; `text_fields` are of its language model."""
    import transformers

    text: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 1024,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": True,
        "vocab_size": len(vocabulary),
        **text_fields,
    }
    is_tied = text["tie_word_embeddings"]
    tower: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "patch_size": 4}
    layers = {"num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 32}
    if family in ("qwen2_5_vl", "qwen3_vl"):
        rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
        tower |= {"num_heads": 2, "out_hidden_size": 64, "spatial_merge_size": 2, "temporal_patch_size": 2}
        ids = {
            "image_token_id": vocabulary["<|image_pad|>"],
            "video_token_id": vocabulary["<|video_pad|>"],
            "vision_start_token_id": vocabulary["<|vision_start|>"],
            "vision_end_token_id": vocabulary["<|vision_end|>"],
            "tie_word_embeddings": is_tied,
        }
        if family == "qwen2_5_vl":
            tower |= {"depth": 2, "window_size": 16, "fullatt_block_indexes": [1], "tokens_per_second": 2}
            return transformers.Qwen2_5_VLConfig(
                text_config={**text, "rope_parameters": rope}, vision_config=tower, **ids
            )
        rope["mrope_interleaved"] = True
        tower |= {"depth": 3, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}
        return transformers.Qwen3VLConfig(
            text_config={**text, "head_dim": 32, "rope_parameters": rope}, vision_config=tower, **ids
        )
    if family == "gemma3":
        text |= {
            "head_dim": 32,
            "sliding_window": 24,
            "query_pre_attn_scalar": 32,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        }
        # Published ones have no head in their towers either: it would get no gradient.
        tower |= {"model_type": "siglip_vision_model", "vision_use_head": False, **layers}
        return transformers.Gemma3Config(
            text_config=text,
            vision_config=tower,
            mm_tokens_per_image=TOKENS_PER_IMAGE,
            boi_token_index=vocabulary["<start_of_image>"],
            eoi_token_index=vocabulary["<end_of_image>"],
            image_token_index=vocabulary["<image_soft_token>"],
            tie_word_embeddings=is_tied,
        )
    kind = transformers.SmolVLMConfig if family == "smolvlm" else transformers.Idefics3Config
    return kind(
        text_config={**text, "model_type": "llama"},
        vision_config={**tower, **layers},
        scale_factor=2,
        image_token_id=vocabulary["<image>"],
        pad_token_id=0,
        tie_word_embeddings=is_tied,
    )


def write_vision_files(family: str, folder: Path, template: str = TEMPLATE, **text_fields: Any) -> Path:
    """Write everything of a tiny model but its weights: enough to count tokens. Returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = vision_tokenizer(family, template)
    tokenizer.save_pretrained(folder)
    vision_config(family, tokenizer.get_vocab(), **text_fields).save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSORS[family], indent=2))
    return folder


def write_vision_model(family: str, folder: Path, seed: int = 0, template: str = TEMPLATE, **text_fields: Any) -> Path:
    """Write a whole tiny model with weights drawn from the seed. Returns the folder.

    `text_fields` replace fields of its language model's configuration.

    Weights are larger than new ones: those are so small that a wrong position or mask would hardly show. Gemma 3's
    projector would begin with zeros, and the model would see nothing.
    """
    import torch
    import transformers

    write_vision_files(family, folder, template, **text_fields)
    config = transformers.AutoConfig.from_pretrained(folder)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.AutoModelForImageTextToText.from_config(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.mul_(4)
                if parameter.dim() > 1 and not parameter.any():
                    parameter.normal_(std=0.1)
    model.save_pretrained(folder)
    return folder


def image_processor(folder: Path) -> Any:
    """Return the image processor of Transformers for a folder: the one that computes pixels with PIL."""
    from transformers import AutoImageProcessor

    return AutoImageProcessor.from_pretrained(folder)


def whole_processor(family: str, folder: Path, processor: Any) -> Any:
    """Return the whole processor of a family, made without what its constructor asks for videos."""
    import transformers

    names = {
        "qwen2_5_vl": "Qwen2_5_VLProcessor",
        "qwen3_vl": "Qwen3VLProcessor",
        "gemma3": "Gemma3Processor",
        "smolvlm": "SmolVLMProcessor",
        "idefics3": "Idefics3Processor",
    }
    kind = getattr(transformers, names[family])
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    if family == "gemma3":
        return kind(image_processor=processor, tokenizer=tokenizer, image_seq_length=TOKENS_PER_IMAGE)
    if family == "idefics3":
        return kind(image_processor=processor, tokenizer=tokenizer, image_seq_len=TOKENS_PER_IMAGE)
    made = kind.__new__(kind)
    made.image_processor, made.tokenizer = processor, tokenizer
    if family == "smolvlm":
        made.fake_image_token, made.image_token = "<fake_token_around_image>", "<image>"
        made.global_image_token, made.image_seq_len = "<global-img>", TOKENS_PER_IMAGE
    else:
        made.image_token = "<|image_pad|>"
    return made


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    """Return a picture as the bytes of a file."""
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def picture(width: int = 48, height: int = 40, seed: int = 0) -> Image.Image:
    """Return a picture of one to four bars on white; seeds give different ones of the same size."""
    made = Image.new("RGB", (width, height), "white")
    draw = ImageDraw.Draw(made)
    colours = ("red", "green", "blue", "black")
    for bar in range(1 + seed % 4):
        left = 4 + 11 * bar
        draw.rectangle((left, 6, left + 7, 20 + seed), fill=colours[(seed + bar) % 4])
    return made
