"""A reward model: a Hugging Face sequence classifier with one output, the worth of a conversation.

It runs in a worker process. A reward must not depend on what is scored beside it, or a run could not be repeated to the
bit; but sums of floating-point numbers depend on the shape of the computation. So each conversation's own length alone
decides the shape of its pass. Conversations of similar length are padded to one length, beyond the longest of them, and
a batch that is not full is filled up. Within one shape, a row's numbers depend on nothing but the row.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from tandem.common.errors import ConfigError, DataError, TandemError
from tandem.common.messages import Problem
from tandem.common.user_code import line
from tandem.config.models.model_sizes import find_max_positions, local_folder
from tandem.config.placement import VISIBLE, VISIBLE_TO_REWARD_MODELS
from tandem.config.schema import EnvironmentConfig as Settings
from tandem.rollout.environments.environment import Score
from tandem.samples.model_files import load_reward_model_tokenizer
from tandem.samples.tokenizer import Messages

_SHORTEST = 16
"""Smallest step in which lengths are padded; long conversations use an eighth of the next power of two."""


class RewardModel:
    """A scorer of conversations, `batch_size` at a time."""

    def __init__(self, name: str, settings: Settings, num_threads: int) -> None:
        """Load the model, and score something. Raises `TandemError`."""
        self._key = f"env.{name}"
        self._correct_from = settings.correct_from
        self.batch_size = settings.batch_size
        self._tokenizer = load_reward_model_tokenizer(self._key, settings)
        torch.set_num_threads(num_threads)
        if VISIBLE_TO_REWARD_MODELS in os.environ:
            os.environ[VISIBLE] = json.loads(os.environ[VISIBLE_TO_REWARD_MODELS])[name]
        self._device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
        self._model: Any = _load(self._key, settings).to(self._device).eval()
        config = self._model.config
        self._pad_id: int | None = config.get_text_config().pad_token_id
        positions = find_max_positions(config.to_dict())
        # A position beyond every conversation is padding, see `shape_of`.
        limits = (settings.max_model_len, None if positions is None else positions - 1)
        self._longest = min((limit for limit in limits if limit is not None), default=None)
        self._positions = positions
        self.score_together([[0]])  # fails now if it cannot work, and pays for a slow first pass

    def encode(self, problem: Problem, conversation: Messages) -> list[int]:
        """Return the tokens of prompt and conversation. Raises `DataError` if they cannot be scored."""
        answers = [{"role": message["role"], "content": message["content"]} for message in conversation]
        # As in the training of a reward model: it reads its number at the token that ends the last turn.
        token_ids = [*self._tokenizer.encode_conversation([*problem.prompt, *answers]).token_ids]
        if not token_ids:
            raise DataError("the conversation has no tokens")
        if self._longest is not None and len(token_ids) > self._longest:
            raise DataError(
                f"the conversation has {len(token_ids)} tokens, and the reward model scores no more than "
                f"{self._longest} ({self._key}.max_model_len)"
            )
        return token_ids

    def shape_of(self, num_tokens: int) -> int:
        """Return the length to which a conversation is padded; there is always some padding.

        Without padding transformers omits the mask, and then computes differently.
        """
        step = max(_SHORTEST, (1 << num_tokens.bit_length()) // 8)
        padded = (num_tokens // step + 1) * step
        return padded if self._positions is None else min(padded, self._positions)

    def score_together(self, rows: Sequence[Sequence[int]]) -> list[Score]:
        """Score token sequences of one shape, at most `batch_size`."""
        length = self.shape_of(len(rows[0]))
        token_ids_BT = torch.full((self.batch_size, length), self._pad_id or 0)
        mask_BT = torch.zeros(self.batch_size, length, dtype=torch.long)
        mask_BT[:, 0] = 1  # filler rows get one token, or their numbers would be NaN
        for index, row in enumerate(rows):
            token_ids_BT[index, : len(row)] = torch.tensor(row)
            mask_BT[index, : len(row)] = 1
        with torch.inference_mode():
            outputs = self._outputs(rows, token_ids_BT.to(self._device), mask_BT.to(self._device))
        return [Score(reward, correct=reward >= self._correct_from) for reward in outputs]

    def _outputs(self, rows: Sequence[Sequence[int]], token_ids_BT: torch.Tensor, mask_BT: torch.Tensor) -> list[float]:
        model = self._model
        if not hasattr(model, "score"):
            logits_B1 = model(input_ids=token_ids_BT, attention_mask=mask_BT).logits
            return [float(logits_B1[index, 0]) for index in range(len(rows))]
        # A decoder's classifier reads the last token that is not padding, and finds it by the padding token's id. A
        # model need not have that id, and a conversation may end with it.
        hidden_BTH = model.base_model(input_ids=token_ids_BT, attention_mask=mask_BT, use_cache=False).last_hidden_state
        return [
            float(model.score(hidden_BTH[index, self._last(row)])[0]) for index, row in enumerate(rows)
        ]  # row by row: one product over all would have its own order of sums for each row

    def _last(self, row: Sequence[int]) -> int:
        """Return the position at which the state is read: the one that transformers reads for this row alone."""
        return max((index for index, token in enumerate(row) if token != self._pad_id), default=0)


def _load(key: str, settings: Settings) -> PreTrainedModel:
    """Load the classifier. Raises `ConfigError` if its folder has none."""
    folder = local_folder(str(settings.model_name))
    if folder is None:
        raise ConfigError(f"{key}.model_name: {settings.model_name!r} does not exist")
    transformers.utils.logging.disable_progress_bar()
    try:
        model, info = AutoModelForSequenceClassification.from_pretrained(
            folder,
            dtype=getattr(torch, settings.precision),
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except TandemError:
        raise
    except Exception as error:  # the library raises whatever its readers raise
        raise ConfigError(f"{key}.model_name: cannot load {settings.model_name!r}: {line(str(error))}") from error
    if model.num_labels != 1:
        raise ConfigError(f"{key}.model_name: {settings.model_name!r} has {model.num_labels} labels, must have one")
    if info["missing_keys"]:
        missing = min(info["missing_keys"])
        raise ConfigError(f"{key}.model_name: {settings.model_name!r} has no weights for {missing}")
    loaded: PreTrainedModel = model
    return loaded
