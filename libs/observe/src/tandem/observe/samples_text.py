"""``coordinator samples RUN``: recorded samples as text, styled on a terminal."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from rich.console import Console
from rich.text import Text

from tandem.common.messages import Purpose
from tandem.common.texts import visible
from tandem.observe.samples import SampleSelection
from tandem.samples.batch import list_media
from tandem.samples.markers import marked_in
from tandem.samples.markers import shown as text_with_labels
from tandem.samples.sample_record import RecordedSample
from tandem.samples.tokenizer import Tokenizer

if TYPE_CHECKING:
    from tandem.samples.media import MediaTexts

_MARKER = re.compile(r"<\|[^<>|\s]{1,40}\|>|<｜[^<>｜\s]{1,60}｜>|\[/?[A-Z_]{2,20}\]|</?[a-z_]{1,20}>")
"""Pattern of special tokens, as tokenizers of chat models write them."""
_ROLES = {
    "system": "yellow",
    "developer": "yellow",
    "user": "cyan",
    "inst": "cyan",
    "assistant": "green",
    "model": "green",
    "tool": "magenta",
    "ipython": "magenta",
}
"""Colours of the roles in a conversation."""
_ROLE = re.compile(rf"\W*({'|'.join(_ROLES)})\b", re.IGNORECASE)
_MARKER_STYLE, _HEADING_STYLE = "dim italic", "bold"
_GAPS = ((0.02, ""), (0.1, "green"), (0.5, "yellow"), (float("inf"), "bold red"))
"""Styles of tokens, by their largest gap of log-probabilities."""


class SampleTextPart(NamedTuple):
    """A part of a sample after the prompt, from one side."""

    is_policy: bool
    """Whether the policy generated it, rather than the environment."""
    text: str


def parts_of(
    sample: RecordedSample, tokenizer: Tokenizer | None, texts: MediaTexts | None = None
) -> list[SampleTextPart]:
    """Return the parts after a sample's prompt, with special tokens; without a tokenizer, one part without them.

    `texts` decodes what has more than text.
    """
    mask_T = sample.arrays.loss_mask_T[sample.scored.prompt_length :]
    if tokenizer is None or not len(mask_T):
        return [SampleTextPart(True, sample.scored.response)]
    ids_T = sample.arrays.token_ids_T[sample.scored.prompt_length :]
    edges = [0, *(np.flatnonzero(np.diff(mask_T)) + 1).tolist(), len(mask_T)]
    if texts is not None:
        return _split_with_media(sample, texts, edges)
    return [
        SampleTextPart(bool(mask_T[first]), tokenizer.decode(ids_T[first:end].tolist(), skip_special_tokens=False))
        for first, end in itertools.pairwise(edges)
    ]


def _split_with_media(sample: RecordedSample, texts: MediaTexts, edges: list[int]) -> list[SampleTextPart]:
    """Return the parts between these places after the prompt, with markers for media."""
    first_T = sample.scored.prompt_length
    ids_T, mask_T = sample.arrays.token_ids_T[first_T:], sample.arrays.loss_mask_T[first_T:]
    digests = list_media(sample.arrays)[len(marked_in(sample.prompt)) :]
    parts = []
    for first, end in itertools.pairwise(edges):
        text = texts.text_of(ids_T[first:end].tolist(), digests)
        digests = digests[len(marked_in(text)) :]
        parts.append(SampleTextPart(bool(mask_T[first]), text))
    return parts


def chat_text(text: str) -> Text:
    """Return a text with styles for special tokens and for the parts of each role."""
    text = text_with_labels(text)
    shown, style, last = Text(), "", 0
    for marker in _MARKER.finditer(text):
        shown.append(visible(text[last : marker.start()]), style)
        shown.append(visible(marker.group()), _MARKER_STYLE)
        last = marker.end()
        if role := _ROLE.match(marker.group()) or _ROLE.match(text, last):
            style = "" if marker.group().startswith(("</", "[/")) else _ROLES[role.group(1).lower()]
    shown.append(visible(text[last:]), style)
    return shown


def print_samples(
    selection: SampleSelection,
    console: Console,
    purpose: Purpose,
    tokenizer: Tokenizer | None,
    trainer_logprobs: dict[tuple[int, int], np.ndarray] | None = None,
    texts: MediaTexts | None = None,
) -> None:
    """Print samples, one below the other; with `trainer_logprobs` also the tokens of each.

    `texts` decodes what has more than text.
    """
    for sample in selection.samples:
        lines = [
            *_head(sample),
            *_format_conversation(sample, tokenizer, texts),
            *_format_properties(sample, purpose),
        ]
        if trainer_logprobs is not None and tokenizer is not None:
            key = sample.scored.group, sample.scored.sample
            lines += [*_tokens(sample, tokenizer, trainer_logprobs.get(key), is_coloured=console.is_terminal)]
        for line in lines:
            console.print(line, soft_wrap=True)
        console.print()
    console.print(Text(_count(selection, purpose), "dim"), soft_wrap=True)


def _count(selection: SampleSelection, purpose: Purpose) -> str:
    """Describe how many samples are shown, and of how many."""
    kind = "validation samples" if purpose == "validate" else "samples"
    which = "" if selection.num_chosen == selection.num_samples else f"{selection.num_chosen} chosen of the "
    num_left = selection.num_chosen - len(selection.samples)
    more = f", {num_left} of them not shown: see --limit" if num_left else ""
    return f"{which}{selection.num_samples} {kind} of step {selection.step}{more}"


def _head(sample: RecordedSample) -> Iterator[Text]:
    scored = sample.scored
    yield Text(f"━━ step {sample.step}, group {scored.group}, sample {scored.sample}", _HEADING_STYLE)
    yield _field("problem", sample.problem_id)


def _format_conversation(
    sample: RecordedSample, tokenizer: Tokenizer | None, texts: MediaTexts | None
) -> Iterator[Text]:
    """Yield the parts of the conversation, each with its role."""
    yield Text("prompt", _HEADING_STYLE)
    yield _indent(chat_text(sample.prompt))
    num_turns = sample.scored.num_turns
    turn = itertools.count(1)
    for part in parts_of(sample, tokenizer, texts):
        which = f" {next(turn)} of {num_turns}" if part.is_policy and num_turns > 1 and tokenizer is not None else ""
        yield Text(f"response{which}" if part.is_policy else "environment", _HEADING_STYLE)
        yield _indent(chat_text(part.text))


def _format_properties(sample: RecordedSample, purpose: Purpose) -> Iterator[Text]:
    """Yield the properties of a sample."""
    scored = sample.scored
    if sample.answer:
        yield _field("reference", sample.answer)
    verdict = "correct" if scored.correct else "not correct"
    components = "".join(f", {name} {value:g}" for name, value in scored.components.items())
    yield _field("reward", f"{scored.reward:g} ({verdict}){components}")
    if sample.advantage is not None:
        yield _field("advantage", f"{sample.advantage:.4g}")
    elif purpose == "train":
        yield _field("advantage", "none: it was not trained on")
    yield _field("weights", versions_in_words(sample))
    ends = {
        "stop": "the policy stopped",
        "length": "no room for more tokens",
        "turns": "grpo.max_rollout_turns were taken",
    }
    lengths = f"{scored.prompt_length} tokens of prompt, {scored.response_length} generated"
    turns = f", {scored.num_turns} turns" if scored.num_turns > 1 else ""
    took = f"{sample.rollout} in {sample.finished_at - sample.started_at:.1f} s"
    yield _field("ended", f"{scored.finish_reason}: {ends[scored.finish_reason]}; {lengths}{turns}; by {took}")
    if scored.failure:
        verb = "timed out" if scored.timed_out else "failed"
        dropped = "; the sample is dropped" if scored.dropped else ""
        yield _field("failure", f"the environment {verb}: {scored.failure}{dropped}", "red")


def versions_in_words(sample: RecordedSample) -> str:
    """Describe which versions of the weights generated a sample's tokens."""
    counts = [
        (sample.scored.oldest_version + index, count)
        for index, count in enumerate(sample.scored.tokens_by_version)
        if count
    ]
    if len(counts) == 1:
        return f"version {counts[0][0]}"
    return ", ".join(f"version {version} ({count} tokens)" for version, count in counts)


def _tokens(
    sample: RecordedSample, tokenizer: Tokenizer, trainer_T: np.ndarray | None, *, is_coloured: bool
) -> Iterator[Text]:
    """Yield the policy's tokens: coloured as one text, or else one per line."""
    arrays = sample.arrays
    policy_tokens = np.flatnonzero(arrays.loss_mask_T)
    engine_K = arrays.generation_logprobs_T[policy_tokens]
    trainer_K = np.full(len(policy_tokens), np.nan, np.float32) if trainer_T is None else trainer_T[policy_tokens]
    gap_K = engine_K - trainer_K
    texts = [
        tokenizer.decode([token], skip_special_tokens=False) for token in arrays.token_ids_T[policy_tokens].tolist()
    ]
    yield Text("tokens", _HEADING_STYLE)
    if is_coloured:
        shown = Text()
        for text, gap in zip(texts, gap_K.tolist(), strict=True):
            shown.append(visible(text), next((style for largest_gap, style in _GAPS if abs(gap) <= largest_gap), ""))
        yield _indent(shown)
    else:
        yield Text(f"  {'position':>8} {'token':>8} {'version':>8} {'engine':>9} {'trainer':>9} {'gap':>9}  text")
        rows = zip(policy_tokens.tolist(), engine_K.tolist(), trainer_K.tolist(), gap_K.tolist(), texts, strict=True)
        for place, engine, trainer, gap, text in rows:
            numbers = "".join(f" {'-' if np.isnan(value) else f'{value:.4f}':>9}" for value in (engine, trainer, gap))
            token, version = arrays.token_ids_T[place], arrays.versions_T[place]
            yield Text(f"  {place:>8} {token:>8} {version:>8}{numbers}  {text!r}")
    yield _field("gap", _gap_in_words(gap_K, texts))


def _gap_in_words(gap_K: np.ndarray, texts: list[str]) -> str:
    places = np.flatnonzero(np.isfinite(gap_K))
    if not len(places):
        return "unknown: the trainer's log-probabilities of this sample are not recorded"
    largest = places[np.abs(gap_K[places]).argmax()]
    return (
        f"engine minus trainer, log-probabilities: mean absolute gap {np.abs(gap_K[places]).mean():.4f}, "
        f"largest {gap_K[largest]:+.4f} at {texts[largest]!r}"
    )


def _field(name: str, text: str, style: str = "") -> Text:
    return Text.assemble((f"{name:<10} ", _HEADING_STYLE), (visible(text), style))


def _indent(text: Text) -> Text:
    """Return a text with indented lines."""
    return Text("\n").join(Text("  ").append_text(line) for line in text.split("\n", allow_blank=True))
