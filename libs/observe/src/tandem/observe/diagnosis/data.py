"""Checks for data that the model has memorised, or cannot read."""

from __future__ import annotations

from tandem.observe import held_out_accuracy
from tandem.observe.diagnosis.evidence import SHORT_RUN, Evidence, change, held_out, shortened
from tandem.observe.diagnosis.finding import Finding
from tandem.observe.health import learning_rate_keys

GAP_OF_ACCURACIES = 0.3
"""Difference of training and held-out accuracy from which problems count as memorised."""
REPEATS = 4
"""Number of times that each problem was drawn in the examined steps, from which few problems are left to learn."""
RISE_OF_LOSS = 0.1
"""Rise of the held-out loss above its minimum, as a fraction, from which data count as memorised."""


def another_tokenizer(evidence: Evidence) -> Finding | None:
    """Find a tokenizer that is not the model's own, if the model hardly answers from the start."""
    policy, accuracy = evidence.config.policy, evidence.points("accuracy")
    name = policy.tokenizer.name
    if not name or name == policy.model_name or len(accuracy) < SHORT_RUN:
        return None
    best = max(value for _, value in accuracy[:SHORT_RUN])
    if best > held_out_accuracy.STILL_LOW:
        return None
    return Finding(
        name="another tokenizer",
        what="The tokenizer is not the model's own, and the model hardly answers with it: it confuses the tokens.",
        evidence=(
            f"policy.tokenizer.name is {shortened(name)}, policy.model_name {shortened(policy.model_name)}",
            f"accuracy was {best:.4g} at best in the first {SHORT_RUN} steps "
            f"({held_out_accuracy.STILL_LOW:g} is the threshold)",
        ),
        look_at="policy.tokenizer.name; null takes the model's own",
        certainty="likely",
        since=evidence.first_step,
        explains=("equal rewards", "groups without spread", "truncated responses", "no gradient", "no progress"),
    )


def repeated_problems(evidence: Evidence) -> Finding | None:
    """Find problems that were drawn again and again, and may be memorised."""
    places = {(row.step, row.group): row.problem_id for row in evidence.samples}
    distinct = len({*places.values()})
    if not distinct or len(places) < REPEATS * distinct:
        return None
    train, held = evidence.points("accuracy"), held_out(evidence, "val_accuracy")
    lines = [
        f"the {len(places)} groups of the examined steps have only {distinct} different problems "
        f"({REPEATS} groups per problem is the threshold)"
    ]
    by_heart = bool(train and held) and train[-1][1] - held[-1][1] >= GAP_OF_ACCURACIES
    if train and held:
        lines.append(f"the last accuracy is {train[-1][1]:.4g} in training, {held[-1][1]:.4g} on held-out problems")
    return Finding(
        name="repeated problems",
        what="The same few problems come again and again"
        + (", and the model has memorised them." if by_heart else "."),
        evidence=tuple(lines),
        look_at="data.num_train, and the source of the data",
        certainty="likely" if by_heart else "possible",
        explains=("no progress",) if by_heart else (),
    )


def overfitting(evidence: Evidence) -> Finding | None:
    """Find a held-out loss that rises while the training loss falls."""
    loss, held = change(evidence, "loss"), held_out(evidence, "val_loss")
    if loss is None or len(held) < 2 or evidence.config.declaration.rolls_out:
        return None
    best_step, best = min(held, key=lambda point: point[1])
    if held[-1][1] < (1 + RISE_OF_LOSS) * best or loss.late >= loss.early:
        return None
    return Finding(
        name="overfitting",
        what="The held-out loss rises while the training loss falls: the model memorises the data.",
        evidence=(str(loss), f"val_loss was {best:.4g} in step {best_step}, and is {held[-1][1]:.4g} at last"),
        look_at=f"{evidence.config.algorithm}.max_num_epochs, {evidence.config.algorithm}.max_num_steps, and data",
        certainty="likely",
        since=best_step + 1,
    )


def no_progress(evidence: Evidence) -> Finding | None:
    """Find held-out accuracy that stays near zero, or does not rise, after many steps."""
    accuracy = held_out(evidence, "val_accuracy")
    said = held_out_accuracy.no_progress(accuracy) if evidence.config.declaration.rolls_out else None
    if said is None:
        return None
    return Finding(
        name="no progress",
        what="The run learned next to nothing.",
        evidence=(said,),
        look_at="SFT before the run (prerequisite, docs/how_much_sft.md), hard data, data.prompt_template, "
        f"{evidence.config.environment_keys}, and {learning_rate_keys(evidence.config)}",
        certainty="likely",
        since=accuracy[-1][0],
    )
