"""Text to tokens and back, and the character-level tokenizer of a model made from scratch. No torch here."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tandem.common.config import Config
from tandem.common.config.schema import NewModel
from tandem.common.errors import ConfigError, DataError, ModelError, nearest

_PAD, _BOS, _EOS = "<pad>", "<bos>", "<eos>"
_CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'user' %}{{ bos_token }}{% endif %}"
    "{{ message['content'] }}{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)
"""What the user says follows the beginning-of-sequence token, and the answer follows that: there is nothing else to
learn for a small model."""


class Tokenizer:
    """A Hugging Face tokenizer, reduced to what Tandem asks of it."""

    def __init__(self, hugging_face: Any, where: str) -> None:
        self._hugging_face = hugging_face
        self._where = where

    @property
    def eos_id(self) -> int:
        """The token that ends a response. Raises `ModelError` if the tokenizer has none."""
        eos_id = self._hugging_face.eos_token_id
        if eos_id is None:
            raise ModelError(f"the tokenizer in {self._where} has no end-of-sequence token")
        return int(eos_id)

    @property
    def bos_id(self) -> int | None:
        """The token that begins a sequence, if there is one."""
        bos_id = self._hugging_face.bos_token_id
        return None if bos_id is None else int(bos_id)

    def encode_chat(self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool) -> list[int]:
        """Return the tokens of a conversation by the chat template; plain text if the tokenizer has no template.

        Raises `DataError` for text that the tokenizer cannot represent.
        """
        if self._hugging_face.chat_template is None:
            return self.encode("".join(message["content"] for message in messages))
        text = self._hugging_face.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=add_generation_prompt
        )
        return self.encode(text)

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, adding none. Raises `DataError` for a character the tokenizer does not know."""
        tokens = self._hugging_face(text, add_special_tokens=False)["input_ids"]
        if self._hugging_face.unk_token_id is None and self.decode(tokens, skip_special_tokens=False) != text:
            known = set(self._hugging_face.get_vocab())
            unknown = sorted({character for character in text if character not in known})
            # Tokenizers that merge characters may normalise text; only a character that is lost is an error.
            if unknown and all(len(token) == 1 or token.startswith("<") for token in known):
                raise DataError(f"the tokenizer in {self._where} does not know the characters {''.join(unknown)!r}")
        return [int(token) for token in tokens]

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of tokens."""
        return str(
            self._hugging_face.decode(
                list(tokens), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
            )
        )

    def save(self, folder: Path) -> None:
        """Write the tokenizer's files beside a model's weights."""
        self._hugging_face.save_pretrained(folder)


def load_tokenizer(config: Config) -> Tokenizer:
    """Load ``policy.tokenizer``. Raises `ModelError` if the folder holds none."""
    # Half a second, and not needed for --help. AutoTokenizer would import torch.
    from transformers import PreTrainedTokenizerFast

    where = config.policy.tokenizer.name
    try:
        hugging_face = PreTrainedTokenizerFast.from_pretrained(where)
    except Exception as error:  # the library raises whatever its readers raise
        raise ModelError(
            f"policy.tokenizer.name: cannot load a tokenizer from {where!r}: {error}".split("\n")[0]
        ) from error
    if config.policy.tokenizer.chat_template is not None:
        hugging_face.chat_template = config.policy.tokenizer.chat_template
    return Tokenizer(hugging_face, where)


def write_new_model(folder: Path, new_model: NewModel) -> None:
    """Write ``config.json`` and a character-level tokenizer to `folder`, whole or not at all; the weights come later.

    Every character of ``new_model.characters`` is one token, beside padding, beginning and end of sequence. Raises
    `ConfigError` if transformers does not know the model type or refuses the configuration.
    """
    characters = sorted(set(new_model.characters))
    vocabulary = {token: index for index, token in enumerate([_PAD, _BOS, _EOS, *characters])}
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        _write_config(temporary, new_model.config, len(vocabulary))
        _write_tokenizer(temporary, vocabulary)
        os.rename(temporary, folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _write_config(folder: Path, settings: Mapping[str, Any], vocab_size: int) -> None:
    # Importing AutoConfig would import torch; the trainer, which has it, refuses settings that the model type lacks.
    from transformers.models.auto.auto_mappings import CONFIG_MAPPING_NAMES

    model_type = settings.get("model_type")
    if model_type not in CONFIG_MAPPING_NAMES:
        hint = nearest(str(model_type), CONFIG_MAPPING_NAMES)
        raise ConfigError(f"policy.new_model.config.model_type: transformers has no model type {model_type!r}{hint}")
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    (folder / "config.json").write_text(json.dumps(dict(settings) | {"vocab_size": vocab_size} | ids, indent=2) + "\n")


def _write_tokenizer(folder: Path, vocabulary: Mapping[str, int]) -> None:
    from tokenizers import Regex, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Fast
    from transformers import PreTrainedTokenizerFast

    fast = Fast(models.WordLevel(vocab=dict(vocabulary), unk_token=_PAD))
    fast.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    fast.decoder = decoders.Fuse()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=fast, pad_token=_PAD, bos_token=_BOS, eos_token=_EOS)
    wrapped.chat_template = _CHAT_TEMPLATE
    wrapped.save_pretrained(folder)
