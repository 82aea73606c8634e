"""What training does not change of a model is exported as it was, so that Transformers 4 and vLLM load it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import models
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerFast

from tandem.samples.model_files import load_model_tokenizer
from tandem.samples.tokenizer import Tokenizer
from tandem.samples.unchanged_files import copy_generation_config, read_template
from tandem.trainer.files.policy_files import save_config

# As Transformers 4.51 wrote Qwen3's, with fewer tokens.
TOKENIZER_CONFIG = {
    "added_tokens_decoder": {
        "2": {"content": "<|im_end|>", "lstrip": False, "normalized": False, "rstrip": False, "special": True}
    },
    "additional_special_tokens": ["<|im_end|>"],
    "chat_template": "{% for message in messages %}{{ message.content }}{% endfor %}",
    "eos_token": "<|im_end|>",
    "tokenizer_class": "Qwen2Tokenizer",
}
OTHERS = {
    "special_tokens_map.json": '{"eos_token": "<|im_end|>"}',
    "tekken.json": '{"config": {}}',
    "preprocessor_config.json": "{ }",
    "video_preprocessor_config.json": "{ }",
    "merges.txt": "#version: 0.2\n",
    "generation_config.json": '{"eos_token_id": [1, 2], "temperature": 0.6}',
}
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "head_dim": 32,
    "hidden_size": 64,
    "intermediate_size": 128,
    "model_type": "qwen3",
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "num_key_value_heads": 1,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "vocab_size": 300,
}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Return a model's folder as its authors published it."""
    folder = tmp_path / "source"
    folder.mkdir()
    fast = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    fast.add_special_tokens(["<|im_end|>"])
    fast.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(TOKENIZER_CONFIG))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    for name, text in OTHERS.items():
        (folder / name).write_text(text)
    return folder


def test_the_files_of_a_tokenizer_are_copied(source: Path, tmp_path: Path) -> None:
    load_model_tokenizer(source).save(tmp_path / "export")
    names = {"tokenizer.json", "tokenizer_config.json", *OTHERS} - {"generation_config.json"}
    assert {path.name for path in (tmp_path / "export").iterdir()} == names
    for name in names:
        assert (tmp_path / "export" / name).read_bytes() == (source / name).read_bytes()
    assert copy_generation_config(source, tmp_path / "export")
    copied = tmp_path / "export" / "generation_config.json"
    assert copied.read_text() == OTHERS["generation_config.json"]


@pytest.mark.parametrize("template", ["{{ messages }}", None, {"default": "1", "tool_use": "2"}])
def test_another_chat_template_is_exported_and_all_else_is_copied(
    source: Path, tmp_path: Path, template: str | dict[str, str] | None
) -> None:
    tokenizer = load_model_tokenizer(source)
    tokenizer.hugging_face.chat_template = template
    tokenizer.save(tmp_path / "export")
    assert read_template(tmp_path / "export") == template
    assert AutoTokenizer.from_pretrained(tmp_path / "export").chat_template == template
    written = json.loads((tmp_path / "export" / "tokenizer_config.json").read_text())
    written.pop("chat_template", None)
    assert written == {key: value for key, value in TOKENIZER_CONFIG.items() if key != "chat_template"}


@pytest.mark.parametrize(
    "files",
    [
        {"chat_template.jinja": "1"},
        {"chat_template.json": '{"chat_template": "of a processor"}'},
        {"chat_template.jinja": "1", "additional_chat_templates/tool_use.jinja": "2"},
        {"tokenizer_config.json": json.dumps({"chat_template": [{"name": "default", "template": "1"}]})},
        {"tokenizer_config.json": "{}"},
    ],
)
def test_templates_are_where_transformers_reads_them(source: Path, tmp_path: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text(text)
    tokenizer = load_model_tokenizer(source)
    assert read_template(source) == tokenizer.hugging_face.chat_template
    tokenizer.save(tmp_path / "export")
    assert read_template(tmp_path / "export") == tokenizer.hugging_face.chat_template


def test_the_files_of_a_tokenizer_without_tokenizer_json_are_copied(source: Path, tmp_path: Path) -> None:
    """Such as those of Mistral's releases, which have further vocabularies, or of older models' two files."""
    (source / "tokenizer.json").unlink()
    for name in ("tokenizer.model", "tokenizer.model.v3", "sentencepiece.bpe.model", "vocab.json"):
        (source / name).write_text("{}")
    fast = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    hugging_face = PreTrainedTokenizerFast(tokenizer_object=fast, eos_token="</s>")
    hugging_face.name_or_path = str(source)
    hugging_face.chat_template = TOKENIZER_CONFIG["chat_template"]
    Tokenizer(hugging_face, str(source)).save(tmp_path / "export")
    expected = {path.name for path in source.iterdir()} - {"config.json", "generation_config.json"}
    assert {path.name for path in (tmp_path / "export").iterdir()} == expected
    assert all((tmp_path / "export" / name).read_bytes() == (source / name).read_bytes() for name in expected)


def test_files_in_the_working_directory_are_not_those_of_a_new_tokenizer(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(source)
    fast = tokenizers.Tokenizer(models.WordLevel({"c": 0, "d": 1}, unk_token="c"))
    Tokenizer(PreTrainedTokenizerFast(tokenizer_object=fast, eos_token="d"), "new").save(tmp_path / "export")
    assert AutoTokenizer.from_pretrained(tmp_path / "export").get_vocab() == {"c": 0, "d": 1}


def test_a_new_tokenizer_has_the_names_that_transformers_4_knows(tmp_path: Path) -> None:
    fast = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    wrapped = PreTrainedTokenizerFast(tokenizer_object=fast, eos_token="</s>", extra_special_tokens=["<image>"])
    Tokenizer(wrapped, "new").save(tmp_path / "export")
    written = json.loads((tmp_path / "export" / "tokenizer_config.json").read_text())
    assert written["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert written["additional_special_tokens"] == ["<image>"]
    assert "extra_special_tokens" not in written, "Transformers 4.57 takes it for an object"
    read = AutoTokenizer.from_pretrained(tmp_path / "export")
    assert read.get_vocab() == wrapped.get_vocab()
    assert read.all_special_tokens == wrapped.all_special_tokens


def test_a_configuration_is_its_source_with_what_differs(source: Path, tmp_path: Path) -> None:
    config = AutoConfig.from_pretrained(source)
    config.dtype = "float32"
    config.num_labels = 1
    target = tmp_path / "export"
    assert save_config(config, target) == source
    written = json.loads((target / "config.json").read_text())
    labels = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    assert written == CONFIG | {"torch_dtype": "float32"} | labels
    read = AutoConfig.from_pretrained(target).to_dict()
    assert {**read, "_name_or_path": ""} == {**config.to_dict(), "_name_or_path": ""}


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 5e5},
        {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0, "original_max_position_embeddings": 4096},
    ],
)
def test_a_configuration_without_a_source_has_the_names_of_transformers_4_too(
    tmp_path: Path, rope: dict[str, Any]
) -> None:
    config = AutoConfig.for_model("qwen3", rope_parameters=rope, dtype="bfloat16")
    assert save_config(config, tmp_path) is None
    written = json.loads((tmp_path / "config.json").read_text())
    assert (written["rope_theta"], written["torch_dtype"]) == (5e5, "bfloat16")
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    assert written.get("rope_scaling") == (None if rope["rope_type"] == "default" else scaling)
    read = AutoConfig.from_pretrained(tmp_path)
    assert read.rope_parameters == config.rope_parameters
    assert read.dtype == config.dtype
