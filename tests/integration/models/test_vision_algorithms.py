"""Whole runs over pictures, also of later turns: SFT, DPO and distillation have the numbers of plain Hugging Face."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from tandem.config import load_config
from tandem.coordinator.algorithms.data_set import DataSetAlgorithm
from tandem.samples.batch import SampleBatch, media_of
from tandem.samples.images.families import read_settings, undrawable_ids
from tandem.samples.images.reading import decode
from tandem.samples.images.store import ImageFolder
from tandem.samples.images.towers import load_processor, pixels, tower_inputs
from tandem.samples.model_files import load_tokenizer
from tandem.samples.recorded_shards import read_step
from tests.harness.pictured_data import PICTURES, clevr_rows, write_set
from tests.harness.runs.running import coordinator, merged, steps_of, write_config
from tests.harness.vision_models import vision_config, vision_tokenizer, write_vision_files, write_vision_model

TOLERANCE = 1e-5
COLOURS = ("red", "blue")
FAMILIES = ("qwen2_5_vl", "smolvlm")
SEES: dict[str, Any] = {
    "policy": {"model_name": "sees", "new_model": None, "max_total_sequence_length": 256, "logprob_batch_size": 4},
    "env": {"digits": {"class": "digits.Digits"}},
}


class Plain:
    """Hugging Face's own model, which is given the pixels of each sequence, and the run's pictures."""

    def __init__(self, folder: str | Path, run: str, undrawable: Sequence[int]) -> None:
        self._model = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
        self._processor = load_processor("sees")  # a checkpoint's is the same
        self._images = ImageFolder(Path(run).absolute() / "images")
        self._undrawable = list(undrawable)
        self._settings = read_settings(Path("sees"))

    def logprobs(self, token_ids: Sequence[int], digests: Sequence[str]) -> torch.Tensor:
        """Return the log-probabilities ``[T, V]`` of all tokens at each place after the first."""
        family = self._settings.family
        ids_1T = torch.tensor([list(token_ids)])
        inputs: dict[str, Any] = {"input_ids": ids_1T, "attention_mask": torch.ones_like(ids_1T)}
        found = [pixels(family, self._processor, decode(self._images.get(digest))) for digest in digests]
        inputs |= tower_inputs(family, found) if found else {}
        if family.has_mrope and found:
            inputs["mm_token_type_ids"] = (ids_1T == self._settings.image_token_id).long()
        if family.has_image_blocks:
            inputs["token_type_ids"] = (ids_1T == self._settings.image_token_id).long()
        with torch.no_grad():
            logits_TV = self._model(**inputs, use_cache=False).logits[0, :-1]
        logits_TV[:, self._undrawable] = -torch.inf
        return logits_TV.log_softmax(dim=-1)

    def of_batch(self, batch: SampleBatch) -> list[torch.Tensor]:
        """Return the log-probabilities of the tokens that count, for each sequence of a batch."""
        found, offsets = [], batch.offsets()
        for row in range(len(batch)):
            place = slice(offsets[row], offsets[row + 1])
            ids_T, mask_T = batch.token_ids_T[place].tolist(), torch.tensor(batch.loss_mask_T[place])
            logprobs_TV = self.logprobs(ids_T, digests_of(batch, row))
            own_T = logprobs_TV.gather(1, torch.tensor(ids_T[1:])[:, None])[:, 0]
            found.append(own_T[mask_T[1:]])
        return found


def digests_of(batch: SampleBatch, row: int) -> list[str]:
    """Return the digests of a sequence's images."""
    found = media_of(batch, row)
    return [found[start : start + 32].hex() for start in range(0, len(found), 32)]


def up(over: dict[str, Any], *words: str) -> Path:
    path = write_config(merged(SEES, over))
    ended = coordinator("up", path, *words)
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr
    return path


def data_of(path: Path) -> tuple[DataSetAlgorithm, tuple[int, ...]]:
    """Return the data of a run, and the tokens that its models never draw."""
    config = load_config(path)
    tokenizer = load_tokenizer(config)
    return DataSetAlgorithm(config, tokenizer), undrawable_ids(tokenizer, tokenizer.settings.family)  # type: ignore[attr-defined]


def write_teacher(folder: Path) -> None:
    """Write a Qwen2.5-VL that is larger than the policy."""
    write_vision_files("qwen2_5_vl", folder)
    config = vision_config("qwen2_5_vl", vision_tokenizer("qwen2_5_vl").get_vocab())
    plain = config.to_dict()
    plain["text_config"] |= {"num_hidden_layers": 5, "intermediate_size": 192, "layer_types": None}
    config = transformers.Qwen2_5_VLConfig.from_dict(plain)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model = transformers.AutoModelForImageTextToText.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.mul_(4)
    model.save_pretrained(folder)


@pytest.mark.parametrize("family", FAMILIES)
def test_sft_in_nemo_rls_form_has_hugging_faces_loss(family: str) -> None:
    write_vision_model(family, Path("sees"))
    write_set("clevr", clevr_rows(8))
    write_set("valA", clevr_rows(4, first=8))
    sft = {
        "algorithm": "sft",
        "sft": {"max_num_steps": 2, "max_num_epochs": 9, "val_period": 2, "val_batches": 1, "val_global_batch_size": 4},
        "data": {
            "dataset_name": None,
            "add_bos": True,
            "add_eos": True,
            "add_generation_prompt": False,
            "train": {"dataset_name": "clevr-cogent", "split": "train", "data_path": "clevr"},
            "validation": {"dataset_name": "clevr-cogent", "split": "valA", "data_path": "valA"},
            "default": {"prompt_file": None, "processor": "sft_processor"},
        },
        "policy": {"train_global_batch_size": 8, "train_micro_batch_size": 4},
    }
    path = up(sft)
    data, undrawable = data_of(path)
    plain = Plain("sees", "run", undrawable)
    before, first, _ = steps_of("run")
    for found, batch in (
        (before.metrics["val_loss"], data.batch(0, "validate")[0]),
        (first.metrics["loss"], data.batch(1, "train")[0]),
    ):
        assert found == pytest.approx(-float(torch.cat(plain.of_batch(batch)).mean()), abs=TOLERANCE)
    assert len(list(Path("run/images").glob("*/*"))) == 12


def write_pairs(folder: Path) -> None:
    """Write questions about pictures, each with its right answer before the wrong one, in three forms."""
    folder.mkdir()
    rows = []
    for number in range(16):
        (folder / f"{number}.png").write_bytes(PICTURES[number])
        right, wrong = COLOURS[:: 1 if number % 2 else -1]
        question, image = f"which colour? {number}", f"{number}.png"
        asked = {"role": "user", "content": question}
        if number % 4 < 2:  # two answers to a text
            rows.append({"prompt": question, "chosen": right, "rejected": wrong, "image": image})
        elif number % 4 == 2:  # two whole conversations
            said = ([asked, {"role": "assistant", "content": text}] for text in (right, wrong))
            rows.append(dict(zip(("chosen", "rejected"), said, strict=True)) | {"images": [image]})
        else:  # NeMo-RL's: ranked completions, with parts in the question
            parts = [{"type": "image", "image": image}, {"type": "text", "text": question}]
            completions = [
                {"rank": rank, "completion": [{"role": "assistant", "content": text}]}
                for rank, text in enumerate((right, wrong))
            ]
            rows.append({"context": [{"role": "user", "content": parts}], "completions": completions})
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))


@pytest.mark.parametrize("family", FAMILIES)
def test_dpo_over_pairs_with_images_has_hugging_faces_numbers(family: str) -> None:
    write_vision_model(family, Path("sees"))
    write_pairs(Path("data"))
    dpo = {
        "algorithm": "dpo",
        "dpo": {
            "max_num_steps": 3,
            "max_num_epochs": 9,
            "val_period": 3,
            "val_batches": 1,
            "val_global_batch_size": 8,
            "sft_loss_weight": 0.1,
            "preference_average_log_probs": False,
            "sft_average_log_probs": False,
        },
        "policy": {"train_global_batch_size": 8, "train_micro_batch_size": 2},
        "data": {"train_data_path": "data/pairs.jsonl", "num_train": None, "num_validation": 4},
        "checkpointing": {"save_period": 3},
    }
    path = up(dpo, "cluster.trainers=2")
    data, undrawable = data_of(path)
    before, first, *_, last = steps_of("run")
    plain = Plain("sees", "run", undrawable)
    batch = data.batch(1, "train")[0]
    assert {len(digests_of(batch, row)) for row in range(len(batch))} == {1}
    sums = torch.stack([each.sum() for each in plain.of_batch(batch)])
    assert first.metrics["preference_loss"] == pytest.approx(math.log(2), abs=TOLERANCE)
    assert first.metrics["sft_loss"] == pytest.approx(-float(sums[0::2].mean()), rel=TOLERANCE)
    assert before.metrics["val_loss"] > math.log(2)
    # After three steps the reference is the model of the beginning, pictures and all.
    held_out = data.batch(0, "validate")[0]
    after = Plain("run/checkpoints/step_3/policy", "run", undrawable)
    rewards = torch.stack(
        [one.sum() - other.sum() for one, other in zip(after.of_batch(held_out), plain.of_batch(held_out), strict=True)]
    )
    assert last.metrics["val_rewards_chosen_mean"] == pytest.approx(float(rewards[0::2].mean()), abs=1e-4)
    assert last.metrics["val_rewards_rejected_mean"] == pytest.approx(float(rewards[1::2].mean()), abs=1e-4)
    assert abs(float(rewards.mean())) > 1e-3, "it has moved"


def divergence(teacher: Plain, student: Plain, ids: Sequence[int], mask: Any, digests: Sequence[str]) -> torch.Tensor:
    """Return KL(teacher | student) at each token that counts, over the five tokens that are the teacher's likeliest."""
    teacher_TV, student_TV = (model.logprobs(ids, digests) for model in (teacher, student))
    top_TN, places_TN = teacher_TV.topk(5, dim=-1)
    top_TN, other_TN = top_TN.log_softmax(dim=-1), student_TV.gather(1, places_TN).log_softmax(dim=-1)
    return (top_TN.exp() * (top_TN - other_TN)).sum(dim=-1)[torch.tensor(mask)[1:]]


def test_distillation_of_a_larger_teacher_has_hugging_faces_loss() -> None:
    write_vision_model("qwen2_5_vl", Path("sees"))
    write_teacher(Path("teacher"))
    distillation = {
        "algorithm": "distillation",
        "distillation": {
            "num_prompts_per_step": 4,
            "num_generations_per_prompt": 2,
            "max_num_steps": 2,
            "topk_logits_k": 5,
            "val_period": 0,
            "seed": 7,
        },
        "loss_fn": {"kl_type": "forward", "zero_outside_topk": False},
        "teacher": {"model_name": "teacher", "logprob_batch_size": 4},
        "policy": {"train_global_batch_size": 8, "train_micro_batch_size": 4},
        "data": {"dataset_name": "shapes", "task_params": {"size": 32}, "num_train": 16, "num_validation": 0},
    }
    path = up(distillation, "cluster.trainers=2", "cluster.rollouts=2")
    tokenizer = load_tokenizer(load_config(path))
    undrawable = undrawable_ids(tokenizer, tokenizer.settings.family)  # type: ignore[attr-defined]
    student, teacher = Plain("sees", "run", undrawable), Plain("teacher", "run", undrawable)
    found = []
    for sample in read_step(Path("run/samples"), 1):
        arrays = sample.arrays
        digests = [bytes(row).hex() for row in arrays.image_digests_IX]
        assert len(digests) == 1
        found.append(divergence(teacher, student, arrays.token_ids_T.tolist(), arrays.loss_mask_T, digests))
    assert len(found) == 8
    first = next(step for step in steps_of("run") if step.step == 1)
    assert first.metrics["loss"] == pytest.approx(float(torch.cat(found).mean()), abs=TOLERANCE)


def test_distillation_over_recorded_answers_has_hugging_faces_loss() -> None:
    write_vision_model("qwen2_5_vl", Path("sees"))
    write_teacher(Path("teacher"))
    write_set("clevr", clevr_rows(12))
    recorded = {
        "algorithm": "off_policy_distillation",
        "off_policy_distillation": {"max_num_steps": 1, "topk_logits_k": 5, "val_period": 0, "val_batches": 1},
        "loss_fn": {"kl_type": "forward"},
        "teacher": {"model_name": "teacher", "logprob_batch_size": 4},
        "policy": {"train_global_batch_size": 8, "train_micro_batch_size": 4},
        "data": {
            "dataset_name": None,
            "num_validation": 0,
            "train": {"dataset_name": "clevr-cogent", "data_path": "clevr"},
        },
    }
    path = up(recorded)
    data, undrawable = data_of(path)
    student, teacher = Plain("sees", "run", undrawable), Plain("teacher", "run", undrawable)
    batch = data.batch(1, "train")[0]
    offsets, found = batch.offsets(), []
    for row in range(len(batch)):
        place = slice(offsets[row], offsets[row + 1])
        digests = digests_of(batch, row)
        found.append(divergence(teacher, student, batch.token_ids_T[place].tolist(), batch.loss_mask_T[place], digests))
    first = next(step for step in steps_of("run") if step.step == 1)
    assert first.metrics["loss"] == pytest.approx(float(torch.cat(found).mean()), abs=TOLERANCE)
    assert np.isfinite(first.metrics["grad_norm"])


def test_a_teacher_that_gives_advantages_sees_the_pictures_too() -> None:
    write_vision_model("qwen2_5_vl", Path("sees"))
    write_teacher(Path("teacher"))
    opd = {
        "grpo": {
            "max_num_steps": 1,
            "val_period": 0,
            "num_prompts_per_step": 8,
            "num_generations_per_prompt": 1,
            "adv_estimator": {"name": "opd"},
        },
        "on_policy_distillation": {"enabled": True, "teacher_model_by_agent_name": {"digits": "teacher"}},
        "policy": {"train_global_batch_size": 8, "train_micro_batch_size": 4},
        "data": {"dataset_name": "shapes", "task_params": {"size": 32}, "num_train": 16, "num_validation": 0},
    }
    path = up(opd)
    tokenizer = load_tokenizer(load_config(path))
    undrawable = undrawable_ids(tokenizer, tokenizer.settings.family)  # type: ignore[attr-defined]
    student, teacher = Plain("sees", "run", undrawable), Plain("teacher", "run", undrawable)
    ahead = []
    for sample in read_step(Path("run/samples"), 1):
        arrays = sample.arrays
        digests = [bytes(row).hex() for row in arrays.image_digests_IX]
        places_T = torch.tensor(arrays.token_ids_T[1:]).long()[:, None]
        own_T, teachers_T = (
            model.logprobs(arrays.token_ids_T.tolist(), digests).gather(1, places_T)[:, 0]
            for model in (student, teacher)
        )
        ahead.append((own_T - teachers_T)[torch.tensor(arrays.loss_mask_T)[1:]])
    first = next(step for step in steps_of("run") if step.step == 1)
    assert first.metrics["teacher_kl"] == pytest.approx(float(torch.cat(ahead).mean()), abs=TOLERANCE)


def test_a_teacher_that_does_not_see_is_refused_before_anything_starts() -> None:
    write_vision_model("qwen2_5_vl", Path("sees"))
    write_vision_model("smolvlm", Path("teacher"))
    over = {
        "algorithm": "distillation",
        "distillation": {"max_num_steps": 1},
        "teacher": {"model_name": "teacher"},
        "data": {"dataset_name": "shapes", "task_params": {"size": 32}, "num_train": 16, "num_validation": 4},
    }
    ended = coordinator("up", write_config(merged(SEES, over)))
    assert ended.returncode != 0
    assert "smolvlm, but policy.model_name is qwen2_5_vl: both must see, and in the same way" in ended.stderr
    assert not Path("run").exists()


SHOWS = '''
import io
from PIL import Image, ImageDraw
from tandem.rollout.environments import Score, Turn

class Shows:
    """A first answer is answered by a picture of its own, as Pillow has it or as bytes; the second ends the sample."""

    def step(self, problem, conversation):
        if len(conversation) > 1:
            return Score(reward=float(len(conversation[-1]["content"])), correct=True)
        picture = Image.new("RGB", (40, 24), ("red", "blue")[len(conversation[0]["content"]) % 2])
        ImageDraw.Draw(picture).rectangle([4, 4, 12, 12 + len(problem.answer)], fill="white")
        if problem.answer.isdigit():
            written = io.BytesIO()
            picture.save(written, "PNG")
            picture = written.getvalue()
        shown = {"type": "image", "image": picture}
        return Turn([{"role": "user", "content": [shown, {"type": "text", "text": "and here?"}]}], reward=0.5)

class ShowsLater(Shows):
    """The same, asynchronously."""

    async def step(self, problem, conversation):
        return super().step(problem, conversation)

class Breaks(Shows):
    """Pictures that cannot be read."""

    def step(self, problem, conversation):
        return Turn([{"role": "user", "content": [{"type": "image", "image": b"no picture"}]}])
'''


@pytest.mark.parametrize(("family", "kind"), [("qwen2_5_vl", "Shows"), ("gemma3", "ShowsLater"), ("smolvlm", "Shows")])
def test_an_environment_shows_images_in_later_turns(family: str, kind: str) -> None:
    write_vision_model(family, Path("sees"))
    Path("pictures.py").write_text(SHOWS)
    turns = {
        "grpo": {"max_num_steps": 2, "val_period": 0, "max_rollout_turns": 2},
        "policy": {"generation": {"max_new_tokens": 4}},
        "data": {"dataset_name": "shapes", "task_params": {"size": 32}, "num_train": 16, "num_validation": 0},
        "env": {"shows": {"class": f"pictures.{kind}", "num_workers": 2}},
    }
    path = write_config(merged(merged(SEES, {"env": None}), turns))
    ended = coordinator("up", path)
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr
    tokenizer = load_tokenizer(load_config(path))
    plain = Plain("sees", "run", undrawable_ids(tokenizer, tokenizer.settings.family))  # type: ignore[attr-defined]
    samples = read_step(Path("run/samples"), 1)
    assert len(samples) == 16
    for sample in samples:
        arrays = sample.arrays
        assert sample.scored.num_turns == 2
        digests = [bytes(row).hex() for row in arrays.image_digests_IX]
        assert len({*digests}) == 2, "the prompt's and the reply's"
        logprobs_TV = plain.logprobs(arrays.token_ids_T.tolist(), digests)
        own_T = logprobs_TV.gather(1, torch.tensor(arrays.token_ids_T[1:]).long()[:, None])[:, 0]
        made_T = torch.tensor(arrays.loss_mask_T)[1:]
        found_T = torch.tensor(arrays.generation_logprobs_T)[1:]
        assert float((own_T - found_T)[made_T].abs().max()) < TOLERANCE
    for step in steps_of("run"):
        assert step.metrics["token_mult_prob_error"] == pytest.approx(1.0, abs=1e-4)


def test_an_image_that_cannot_be_read_is_the_environments_failure() -> None:
    write_vision_model("smolvlm", Path("sees"))
    Path("pictures.py").write_text(SHOWS)
    over = {
        "grpo": {"max_num_steps": 1, "val_period": 0, "max_rollout_turns": 2},
        "policy": {"generation": {"max_new_tokens": 4}},
        "data": {"dataset_name": "shapes", "task_params": {"size": 32}, "num_train": 16, "num_validation": 0},
        "env": {"shows": {"class": "pictures.Breaks"}},
    }
    path = write_config(merged(merged(SEES, {"env": None}), over))
    ended = coordinator("up", path)
    assert ended.returncode == 1
    assert "environment 'shows': a Turn: the image is no PNG, JPEG, WEBP or GIF" in ended.stderr
    ended = coordinator("up", path, "env.shows.on_error=zero", "logger.log_dir=zero")
    assert ended.returncode == 0, ended.stderr
    assert all(sample.scored.failure and not sample.scored.reward for sample in read_step(Path("zero/samples"), 1))
