"""Checks of replies to what is asked now and then: to restore, evaluate, copy, or call a trainer."""

from __future__ import annotations

import math

from tandem.common.messages import (
    Evaluated,
    Generated,
    GradientAdded,
    OptimizerStepped,
    SamplesFinished,
    SamplesMissing,
    WeightsCopied,
)
from tandem.coordinator.processes.reply_checks import (
    UnansweredRequest,
    all_among,
    check_branches,
    check_digests,
    check_whole,
    finite,
    fits,
    must,
    same,
)


def samples_missing(request: UnansweredRequest, reply: SamplesMissing) -> None:
    """`step` is that of the command. `rollouts` are sources of the command."""
    same(request, reply, "step")
    all_among("rollouts", reply.rollouts, {*request.command.sources})


def evaluated(request: UnansweredRequest, reply: Evaluated) -> None:
    """`step` is that of the command. `metrics` are finite numbers."""
    same(request, reply, "step")
    finite(reply.metrics)


def gradient_added(request: UnansweredRequest, reply: GradientAdded) -> None:
    """`loss` is a finite number, and `logprobs` are whole numbers of 4 bytes."""
    must(math.isfinite(reply.loss), "loss", reply.loss, "a finite number")
    must(len(reply.logprobs) % 4 == 0, "logprobs", f"{len(reply.logprobs)} bytes", "numbers of 4 bytes")


def optimizer_stepped(request: UnansweredRequest, reply: OptimizerStepped) -> None:
    """`grad_norm` is a finite number."""
    must(math.isfinite(reply.grad_norm), "grad_norm", reply.grad_norm, "a finite number")


def samples_restored(request: UnansweredRequest, reply: SamplesFinished) -> None:
    """`step` is that of the command; each sample's group was asked for, and it is in a message once.

    No group has more samples than it should. None is longer than `policy.max_total_sequence_length`, and none has text.
    """
    same(request, reply, "step")
    must(reply.purpose == "train", "purpose", reply.purpose, "train")
    groups = {group for keys in request.command.files.values() for _, group in keys}
    seen: set[tuple[int, int]] = set()
    for row, sample in enumerate(reply.samples):
        fits(sample.group in groups, row, "group", sample, "one that was asked for")
        fits(
            sample.sample < request.command.num_samples, row, "sample", sample, "below {}", request.command.num_samples
        )
        fits((sample.group, sample.sample) not in seen, row, "sample", sample, "in the message once")
        max_tokens = request.limits.max_tokens
        if sample.branches:
            check_branches(request.limits, row, sample)
        else:
            fits(sample.num_tokens <= max_tokens, row, "num_tokens", sample, "at most {}", max_tokens)
        length = sample.prompt_length + sample.response_length
        fits(length <= sample.num_tokens, row, "num_tokens", sample, "at least {}", length)
        fits(sample.oldest_version <= sample.newest_version, row, "oldest_version", sample, "at most the newest")
        fits(not sample.response, row, "response", sample, "empty: only validation has text")
        seen.add((sample.group, sample.sample))
    request.arrived |= seen


def all_restored(request: UnansweredRequest, reply: Generated) -> None:
    """`step` is that of the command. All `num_samples` samples were sent, and no token was generated for them."""
    same(request, reply, "step")
    must(reply.purpose == "train", "purpose", reply.purpose, "train")
    check_whole(request, reply, request.command.num_samples * sum(map(len, request.command.files.values())))
    must(reply.num_tokens == 0, "num_tokens", reply.num_tokens, "0: none was made")


def weights_copied(request: UnansweredRequest, reply: WeightsCopied) -> None:
    """`version` is that of the command. `digests` are as in an `DigestsReported` if they were asked for, else empty."""
    same(request, reply, "version")
    if request.command.with_digests:
        check_digests(request, reply.digests)
    else:
        must(not reply.digests, "digests", len(reply.digests), "none, since they were not asked for")
