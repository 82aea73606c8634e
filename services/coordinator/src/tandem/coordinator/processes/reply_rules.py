"""The rules of replies: how each must match its request; ``docs/protocol.md`` lists them.

Here are those that a step of every run has. Those that are rarer are in `occasional_rules` and `setting_up_rules`, and
`reply_table` has all of them.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable

from tandem.common.errors import WireError
from tandem.common.messages import (
    DigestsReported,
    Generate,
    Generated,
    Refitted,
    SampleScored,
    SamplesFinished,
    SamplesRecorded,
    Trained,
    VersionCommitted,
)
from tandem.common.worker_shards import process_of
from tandem.coordinator.processes.episode_checks import check_episode
from tandem.coordinator.processes.reply_checks import (
    Asked,
    all_among,
    check_digests,
    check_whole,
    finite,
    fits,
    measured,
    must,
    same,
    some,
)


def trained(asked: Asked, reply: Trained) -> None:
    """`step` and `version` are those of the command. `metrics` are finite numbers, from a model group's first trainer.

    `gpus` are readings that `tandem.observe.exporters.nvml` makes.
    """
    same(asked, reply, "step")
    must(reply.version == asked.command.step, "version", reply.version, f"the step, {asked.command.step}")
    speakers = asked.limits.speakers
    is_empty = asked.name in speakers or not reply.metrics
    must(is_empty, "metrics", reply.metrics, f"empty: {' and '.join(sorted(speakers))} has them")
    finite(reply.metrics)
    if reply.gpus:
        measured(reply.gpus)


def samples_finished(asked: Asked, reply: SamplesFinished) -> None:
    """`step` and `purpose` are those of the command; each sample was asked for, and is in a message once.

    Its prompt has the requested length; its response is within the limits of the command, of
    `policy.max_total_sequence_length` and of `grpo.max_rollout_turns`. Its versions are among those that the engine has
    held since it got the command, and its tokens are counted by version. Only validation samples have text.
    """
    same(asked, reply, "step", "purpose")
    check_samples(asked, reply.samples)
    versions = asked.state.versions
    held = versions[bisect.bisect_left(versions, asked.oldest_version) :]
    for row, sample in enumerate(reply.samples):
        for field in ("oldest_version", "newest_version"):
            if getattr(sample, field) not in held:
                fits(False, row, field, sample, f"one that the engine held then: {some(held)}")
        oldest, newest = sample.oldest_version, sample.newest_version
        fits(oldest <= newest, row, "oldest_version", sample, "at most the newest, {}", newest)
        counts = sample.tokens_by_version
        made = sample.response_length
        is_counted = len(counts) == newest - oldest + 1 and sum(counts) == made
        fits(is_counted, row, "tokens_by_version", sample, "those of the response, {}, by version", made)
        has_text = bool(sample.response) and reply.purpose == "train"
        fits(not has_text, row, "response", sample, "empty: only validation has text")
        if (sample.group, sample.sample) not in asked.arrived:  # a command that is sent again is answered again
            asked.arrived.add((sample.group, sample.sample))
            asked.num_tokens += made


def check_samples(asked: Asked, samples: Iterable[SampleScored]) -> None:
    """Compare the sizes of each sample with its request."""
    command: Generate = asked.command
    limits, groups = asked.limits, {group.group: group for group in command.groups}
    seen: set[tuple[int, int]] = set()
    for row, sample in enumerate(samples):
        group = groups.get(sample.group)
        if group is None:
            raise WireError(f"samples[{row}].group: {sample.group}, must be one that was asked for")
        prompt, made, turns = len(group.prompt_ids), sample.response_length, sample.num_turns
        fits(sample.sample < len(group.seeds), row, "sample", sample, "below {}", len(group.seeds))
        fits((sample.group, sample.sample) not in seen, row, "sample", sample, "in the message once")
        seen.add((sample.group, sample.sample))
        if limits.plays and made:
            check_episode(asked, row, sample)
            continue
        fits(not sample.branches, row, "branches", sample, "none: no agent has asked for anything")
        fits(turns >= 1 or limits.plays or bool(sample.failure), row, "num_turns", sample, "at least 1")
        fits(sample.prompt_length == prompt, row, "prompt_length", sample, "{}, as asked for", prompt)
        fits(turns <= limits.max_turns, row, "num_turns", sample, "at most {}", limits.max_turns)
        most = min(turns * command.sampling.max_new_tokens, limits.max_tokens - prompt)
        fits(turns <= made <= most, row, "response_length", sample, "from {} to {}", turns, most)
        length = sample.num_tokens
        fits(length <= limits.max_tokens, row, "num_tokens", sample, "at most {}", limits.max_tokens)
        # An environment inserts text between two responses.
        is_all = length == prompt + made if turns <= 1 else length >= prompt + made
        fits(is_all, row, "num_tokens", sample, "that of the prompt, {}, and what follows, {}", prompt, made)
        can_end = sample.finish_reason != "turns" or turns == limits.max_turns
        fits(can_end, row, "finish_reason", sample, "another after {} of {}", turns, limits.max_turns)


def generated(asked: Asked, reply: Generated) -> None:
    """`step` and `purpose` are those of the command. All `num_samples` samples were sent, with `num_tokens` tokens.

    `gpus` are readings that `tandem.observe.exporters.nvml` makes.
    """
    same(asked, reply, "step", "purpose")
    check_whole(asked, reply, sum(len(group.seeds) for group in asked.command.groups))
    must(reply.num_tokens == asked.num_tokens, "num_tokens", reply.num_tokens, f"{asked.num_tokens}, as were sent")
    if reply.gpus:
        measured(reply.gpus)


def samples_recorded(asked: Asked, reply: SamplesRecorded) -> None:
    """`step` is that of the command. Written and missing samples add up to those asked for."""
    same(asked, reply, "step")
    wanted = sum(len(group.advantages) for group in asked.command.groups)
    must(reply.num_missing <= wanted, "num_missing", reply.num_missing, f"at most {wanted}, as asked for")
    rest = wanted - reply.num_missing
    must(reply.num_samples == rest, "num_samples", reply.num_samples, f"{rest}, all but the missing ones")


def refitted(asked: Asked, reply: Refitted) -> None:
    """`version` is that of the command. `num_bytes` are of links with this process at one end."""
    same(asked, reply, "version")
    for link in reply.num_bytes:
        ends = [process_of(end) for end in link.split(">")]
        must(len(ends) == 2 and asked.name in ends, "num_bytes", link, f"a link of {asked.name}")
    if asked.name in asked.command.only or not asked.command.only:
        asked.state.version = reply.version


def verified(asked: Asked, reply: DigestsReported) -> None:
    """`version` is that of the command. `digests` are of every worker shard, 8 bytes for each tensor of its layout."""
    same(asked, reply, "version")
    check_digests(asked, reply.digests)


def version_committed(asked: Asked, reply: VersionCommitted) -> None:
    """`version` is that of the command. `differing` are engines with digests in the command."""
    same(asked, reply, "version")
    if reply.differing:
        processes = {process_of(part) for part in asked.command.digests}
        all_among("differing", reply.differing, {name for name in processes if not name.startswith("trainer-")})
