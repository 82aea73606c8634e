"""Causes that a run's record shows only beside what it could not be otherwise: dropout, reference, leaked answers."""

from __future__ import annotations

from typing import Any

import pytest
from diagnosis_harness import Metrics, config_of, evidence_of, found_in, sample

from tandem.config import Config
from tandem.observe.diagnosis import _sort_findings
from tandem.observe.diagnosis.evidence import RunEvidence


def first(evidence: RunEvidence) -> str:
    found = _sort_findings([*found_in(evidence).values()])
    return found[0].name if found else ""


# --- dropout --------------------------------------------------------------------------------------------------------


def adapting(dropout: float) -> Config:
    return config_of(policy={"dtensor_cfg": {"lora_cfg": {"enabled": True, "dropout": dropout}}})


APART: list[Metrics] = [{"token_mult_prob_error": value} for value in (1.0, 1.02, 1.1, 1.3, 1.7, 2.5, 4.0, 9.0)]


def test_dropout_with_which_trainers_come_to_score_another_policy_is_the_first_cause() -> None:
    evidence = evidence_of(*APART, config=adapting(0.9))
    found = found_in(evidence)
    assert first(evidence) == "dropout"
    assert found["dropout"].certainty == "likely"
    assert found["dropout"].look_at == "policy.dtensor_cfg.lora_cfg.dropout"
    explained = {each.name: each.explained_by for each in _sort_findings([*found.values()])}
    assert explained["engine and trainer disagree"] == "dropout"
    assert "dropout" not in found_in(evidence_of(*APART, config=adapting(0.0)))
    assert "dropout" not in found_in(evidence_of(*APART)), "no adapters"


def test_usual_dropout_is_no_cause_and_much_of_it_without_a_sign_is_a_possible_one() -> None:
    assert found_in(evidence_of(*[{}] * 8, config=adapting(0.1))) == {}
    assert found_in(evidence_of(*[{}] * 8, config=adapting(0.5)))["dropout"].certainty == "possible"


def test_a_disagreement_from_the_first_step_on_is_not_of_dropout() -> None:
    apart: list[Metrics] = [{"token_mult_prob_error": 1.5}] * 8
    assert [*found_in(evidence_of(*apart, config=adapting(0.1)))] == ["engine and trainer disagree"]


# --- reference ------------------------------------------------------------------------------------------------------

AWAY: list[Metrics] = [*[{"kl": 0.03}] * 6, *[{"kl": 3.0}] * 6]


def test_a_reference_that_is_far_from_the_untrained_policy_is_another_model() -> None:
    config = config_of(policy={"train_global_batch_size": 512})
    far: list[Metrics] = [{"kl": 2.0, "approx_kl": 0.0}, *[{"kl": 2.1}] * 5]
    found = found_in(evidence_of(*far, config=config))["wrong reference"]
    assert (found.certainty, found.since) == ("certain", 1)
    several = config_of(grpo={"num_prompts_per_step": 64}, policy={"train_global_batch_size": 128})
    assert found_in(evidence_of(*far, config=several))["wrong reference"].certainty == "likely"
    epochs: list[Metrics] = [{"kl": 2.0, "approx_kl": 0.01}, *[{"kl": 2.1}] * 5]
    assert found_in(evidence_of(*epochs, config=config))["wrong reference"].certainty == "likely"
    moved: list[Metrics] = [{"kl": 2.0, "approx_kl": 1.5}, *[{"kl": 2.1}] * 5]
    assert "wrong reference" not in found_in(evidence_of(*moved, config=config)), "the policy went there itself"


def test_a_reference_that_went_away_as_the_run_was_resumed_is_the_first_cause() -> None:
    evidence = evidence_of(*AWAY, num_begun=2)
    assert first(evidence) == "wrong reference"
    found = found_in(evidence)["wrong reference"]
    assert (found.certainty, found.since) == ("likely", 7)
    assert found.evidence[0].startswith("kl went from 0.03 nats a token in step 6 to 3 in step 7")
    lost = ("trainer-0 is lost: killed by SIGKILL; another is launched in its place",)
    assert "wrong reference" in found_in(evidence_of(*AWAY, events=lost))


@pytest.mark.parametrize(
    ("why", "steps", "over"),
    [
        ("nothing loaded it again", AWAY, {}),
        ("the policy moved", [*AWAY[:6], *[{"kl": 3.0, "entropy": 3.0}] * 6], {"num_begun": 2}),
        ("it came back", [*AWAY[:6], {"kl": 3.0}, *AWAY[:6]], {"num_begun": 2}),
        ("it went slowly", [{"kl": 0.05 * step} for step in range(12)], {"num_begun": 2}),
    ],
)
def test_a_distance_that_the_policy_may_have_gone_itself_is_no_sign(
    why: str, steps: list[Metrics], over: dict[str, Any]
) -> None:
    assert "wrong reference" not in found_in(evidence_of(*steps, **over)), why


# --- leaked answers -------------------------------------------------------------------------------------------------


def asked(*prompts: tuple[str, str]) -> RunEvidence:
    rows = [
        sample(1, "x", problem_id=str(number), group=number, prompt=prompt, reference_answer=answer)
        for number, (prompt, answer) in enumerate(prompts)
    ]
    return evidence_of({}, samples=tuple(rows))


NUMBERS = range(11, 31)


def test_prompts_that_end_with_the_answer_or_call_it_so_are_found() -> None:
    ended = asked(*[(f"{number} + 0 = {number}<|im_end|>\n<|im_start|>assistant\n", str(number)) for number in NUMBERS])
    found = found_in(ended)["leaked answer"]
    assert found.certainty == "likely"
    assert "20 of 20 prompts have their problem's reference answer at one place, before" in found.evidence[0]
    called = asked(
        *[(f"Answer: {number}. What is half of {number * 2}, in {number % 3}?", str(number)) for number in NUMBERS]
    )
    assert "called the answer" in found_in(called)["leaked answer"].evidence[0]


def test_prompts_that_have_the_answer_where_a_task_may_have_it_are_well() -> None:
    passages = [(f"In {n} people came, {n * 7} in the year after. When did {n * 3} come?", str(n)) for n in NUMBERS]
    letters = "ABCD"
    choices = [
        (f"{n}? A) {n + 1} B) {n + 2} C) {n + 3} D) {n + 4}\nAnswer with a letter.", letters[n % 4]) for n in NUMBERS
    ]
    sums = [(f"{n} + {n % 3} - 0", str(n + n % 3)) for n in NUMBERS]
    yes = [(f"Is {n} even? Say yes, no or maybe.", ("yes", "no", "maybe")[n % 3]) for n in NUMBERS]
    for prompts in (passages, choices, sums, yes):
        assert "leaked answer" not in found_in(asked(*prompts)), prompts[0]
    assert "leaked answer" not in found_in(asked(*[("2 = 2", "2")] * 20)), "there is but one answer"


@pytest.mark.parametrize("template", ["{question} = {answer}", "{question} ({answer!s})"])
def test_a_template_that_fills_in_the_answer_is_certain(template: str) -> None:
    data = {
        "dataset_name": "reasoning_gym",
        "task": "chain_sum",
        "prompt_template": template,
        "rejected_template": "no",
    }
    for algorithm in ("grpo", "sft"):
        found = found_in(evidence_of({}, config=config_of(algorithm, data=data)))["leaked answer"]
        assert (found.certainty, found.look_at) == ("certain", "data.prompt_template")
    data["prompt_template"] = "{question} {{answer}} {answer_length}"
    assert "leaked answer" not in found_in(evidence_of({}, config=config_of(data=data)))
