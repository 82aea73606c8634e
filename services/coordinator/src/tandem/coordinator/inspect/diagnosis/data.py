"""Data that come again and again, until they are known by heart."""

from __future__ import annotations

from tandem.coordinator.inspect.diagnosis.evidence import Evidence, change, held_out
from tandem.coordinator.inspect.diagnosis.finding import Finding

GAP_OF_ACCURACIES = 0.3
"""By which training is better than what is held out, from which on problems are known by heart."""
REPEATS = 4
"""Times that each problem was drawn in the steps that are looked at, from which on few problems are left to learn."""
RISE_OF_LOSS = 0.1
"""By which share the held-out loss rises above its best, from which on data are learned by heart."""


def repeated_problems(evidence: Evidence) -> Finding | None:
    """Find problems that were drawn again and again, and are known by heart."""
    places = {(row.step, row.group): row.problem_id for row in evidence.samples}
    distinct = len({*places.values()})
    if not distinct or len(places) < REPEATS * distinct:
        return None
    train, held = evidence.points("accuracy"), held_out(evidence, "val_accuracy")
    lines = [
        f"{len(places)} groups of the steps that are looked at have {distinct} problems between them "
        f"({REPEATS} groups a problem is the threshold)"
    ]
    by_heart = bool(train and held) and train[-1][1] - held[-1][1] >= GAP_OF_ACCURACIES
    if train and held:
        lines.append(f"accuracy at last is {train[-1][1]:.4g} in training, {held[-1][1]:.4g} on held-out problems")
    return Finding(
        name="repeated problems",
        what="The same few problems come again and again" + (", and are known by heart." if by_heart else "."),
        evidence=tuple(lines),
        look_at="data.num_train, and where data comes from",
        certainty="likely" if by_heart else "possible",
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
        what="The loss on held-out data rises while that of training falls: the data are learned by heart.",
        evidence=(str(loss), f"val_loss was {best:.4g} in step {best_step}, and is {held[-1][1]:.4g} at last"),
        look_at=f"{evidence.config.algorithm}.max_num_epochs, {evidence.config.algorithm}.max_num_steps, and data",
        certainty="likely",
        since=best_step + 1,
    )
