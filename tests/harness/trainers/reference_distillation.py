"""A plain distillation loop of Hugging Face models, which knows nothing of ranks, micro-batches or padding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from tandem.samples.batch import SampleBatch
from tests.harness.trainers.reference import Numbers, adamw, sequences_of

IMPOSSIBLE = -100.0
"""The logarithm of a probability of zero."""


def distributions_of(model: Any, token_ids: torch.Tensor, temperature: float) -> torch.Tensor:
    """The distributions that tokens 1 to the last of one unpadded sequence were drawn from."""
    logits: torch.Tensor = model(input_ids=token_ids[None]).logits
    return (logits[0, :-1] / temperature).softmax(dim=-1)


def kl(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return (torch.xlogy(one, one) - one * other.log().clamp(min=IMPOSSIBLE)).sum(dim=-1)


def distance(teacher: torch.Tensor, student: torch.Tensor, kind: str, weight: float) -> torch.Tensor:
    """The divergence of whole distributions, one a row."""
    if kind == "jsd":
        middle = weight * teacher + (1 - weight) * student
        return weight * kl(teacher, middle) + (1 - weight) * kl(student, middle)
    share = {"forward": 1.0, "reverse": 0.0, "mixed": weight}[kind]
    return share * kl(teacher, student) + (1 - share) * kl(student, teacher)


def compared(
    teacher: torch.Tensor, student: torch.Tensor, topk: int, zero_outside: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The distributions that are compared: over the teacher's likeliest tokens, or over all."""
    likeliest = teacher.argsort(dim=-1, descending=True)[:, :topk]
    kept = teacher.gather(1, likeliest)
    kept = kept / kept.sum(dim=-1, keepdim=True)
    if zero_outside:
        return torch.zeros_like(teacher).scatter(1, likeliest, kept), student
    own = student.gather(1, likeliest)
    return kept, own / own.sum(dim=-1, keepdim=True)


def distillation_loss(
    student: Any,
    teachers: Sequence[Any],
    batch: SampleBatch,
    loss: Mapping[str, Any],
    *,
    topk: int,
    temperature: float = 1.0,
    teacher_of: Sequence[int] = (),
) -> torch.Tensor:
    """The mean of the counted tokens; sequence i learns from the teacher `teacher_of[i]`, by default the first.

    With ``dynamic_loss_scaling`` the batch is one micro-batch.
    """
    samples = sequences_of(batch)
    count = sum(int(each["mask"].sum()) for each in samples)
    divergence, likelihood = torch.zeros(()), torch.zeros(())
    for row, sample in enumerate(samples):
        model = teachers[teacher_of[row] if teacher_of else 0]
        with torch.no_grad():
            teacher = distributions_of(model, sample["token_ids"], temperature)[sample["mask"]]
        own = distributions_of(student, sample["token_ids"], temperature)[sample["mask"]]
        pair = compared(teacher, own, topk, bool(loss.get("zero_outside_topk")))
        distances = distance(*pair, loss["kl_type"], loss.get("mixed_kl_weight", 0.5))
        nll = -own.gather(1, sample["token_ids"][1:][sample["mask"]][:, None])[:, 0].log()
        divergence, likelihood = divergence + distances.sum() / count, likelihood + nll.sum() / count
    if loss.get("dynamic_loss_scaling"):
        return divergence * (likelihood / divergence).detach() + likelihood
    return loss.get("kl_loss_weight", 1.0) * divergence + loss.get("ce_loss_scale", 0.0) * likelihood


def joint_weights(teachers: Sequence[Any], batch: SampleBatch, loss: Mapping[str, Any]) -> list[float]:
    """The weights of teachers of every sequence where they depend on the batch.

    They are NeMo-RL's formulas (``CrossTokenizerDistillationLossFn`` of its main branch in November 2026, for teachers
    with the student's tokenizer), with the whole batch as its micro-batch: the score of a teacher is a mean over all
    counted tokens, and higher is better.
    """
    means = []
    for model in teachers:
        scores = []
        for sample in sequences_of(batch):
            with torch.no_grad():
                probabilities = distributions_of(model, sample["token_ids"], 1.0)[sample["mask"]]
            match loss.get("sum_weights_metric", "ce"):
                case "ce":
                    scores.append(probabilities.gather(1, sample["token_ids"][1:][sample["mask"]][:, None])[:, 0].log())
                case "entropy":
                    scores.append((probabilities * (probabilities + 1e-10).log()).sum(dim=-1))
                case "max_prob":
                    scores.append(probabilities.amax(dim=-1))
        means.append(torch.cat(scores).mean())
    if loss.get("kd_loss_mode") == "select_teacher":
        return [float(index == int(torch.stack(means).argmax())) for index in range(len(means))]
    return torch.softmax(loss.get("alpha", 1.0) * torch.stack(means), dim=0).tolist()


def joint_distillation_loss(
    student: Any,
    teachers: Sequence[Any],
    batch: SampleBatch,
    loss: Mapping[str, Any],
    *,
    weights: Sequence[float],
    topk: int,
) -> torch.Tensor:
    """The loss of several teachers of every sequence: the sum of their divergences by weight, and the likelihood."""
    parts = [
        weight * distillation_loss(student, [model], batch, {"kl_type": loss["kl_type"]}, topk=topk)
        for weight, model in zip(weights, teachers, strict=True)
    ]
    divergence = torch.stack(parts).sum()
    likelihood = distillation_loss(
        student, teachers[:1], batch, {"kl_type": "forward", "kl_loss_weight": 0.0, "ce_loss_scale": 1.0}, topk=topk
    )
    if loss.get("dynamic_loss_scaling"):
        return divergence * (likelihood / divergence).detach() + likelihood
    return loss.get("kl_loss_weight", 1.0) * divergence + loss.get("ce_loss_scale", 0.0) * likelihood


def plain_distillation(
    folder: Path,
    teachers: Sequence[Path],
    batches: Sequence[SampleBatch],
    loss: Mapping[str, Any],
    *,
    topk: int,
    temperature: float = 1.0,
    teacher_of: Sequence[int] = (),
    decays_vectors: bool = True,
    weights: Sequence[float] = (),
) -> Numbers:
    """One optimizer step a batch, as `distillation_loss` has it.

    With `weights`, or settings of ``loss`` that find them, all teachers teach every sequence.
    """
    student = transformers.AutoModelForCausalLM.from_pretrained(folder)
    models = [transformers.AutoModelForCausalLM.from_pretrained(each) for each in teachers]
    optimizer = adamw(student, decays_vectors=decays_vectors)
    steps = []
    for batch in batches:
        if weights or "sum_weights_metric" in loss or "kd_loss_mode" in loss:
            own = weights or joint_weights(models, batch, loss)
            total = joint_distillation_loss(student, models, batch, loss, weights=own, topk=topk)
        else:
            total = distillation_loss(
                student, models, batch, loss, topk=topk, temperature=temperature, teacher_of=teacher_of
            )
        total.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        steps.append((total.item(), norm.item()))
    weights = {name: parameter.detach() for name, parameter in student.named_parameters()}
    return Numbers(torch.empty(0).numpy(), steps, weights)
