"""Calls: what the web server asks of the loop, and how it is answered.

Two threads meet here. The web server's thread puts calls on the desk (`CallDesk.put`). The loop's thread takes them,
one after the other, and answers each once (`PendingCall.answer`), from its own thread. Neither waits for the other.

Trainers hold sets of weights by number, one at a time, and switch between them. Of ``n`` models, set ``i`` is what
model ``i`` trains, and set ``n`` the first weights. Of each model, ``k`` published versions are kept: those of model
``i`` are sets ``n + 1 + i * k`` to ``n + i * k + k``. A further one takes the place of the one used longest ago.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from tandem.common.messages import LossOfCall
from tandem.observe.run_folder.calls import CallRecord

SCORES, RECALLS = -1, -2
"""Turns of the calls for samples: scores of their prompts, and weights for them."""
INPUTS = ("weights", "advantages", "logprobs")
"""Inputs of losses, a number for each token."""


class GivenSequence(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A sequence, with the inputs of its tokens. All arrays have its length; the first token is never scored."""

    token_ids: NDArray[np.int32]
    targets: NDArray[np.int32]
    """Tokens that are scored: mostly those of the sequence."""
    inputs: dict[str, NDArray[np.float32]]
    """Those that are named in `INPUTS`."""

    @property
    def mask(self) -> NDArray[np.bool_]:
        """True for tokens to score: all but the first."""
        return np.arange(len(self.token_ids)) > 0


class AddGradients(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Score sequences, and add the gradient of their loss. Answered with `GradientsScored`."""

    sequences: Sequence[GivenSequence]
    loss: LossOfCall
    settings: dict[str, float]
    has_gradient: bool

    @property
    def has_other_targets(self) -> bool:
        """Whether any target, but for the first, which is never scored, is not the token of its place."""
        return any(not np.array_equal(each.targets[1:], each.token_ids[1:]) for each in self.sequences)


class GradientsScored(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The answer to `AddGradients`."""

    loss: float
    logprobs: list[NDArray[np.float32]]
    """Log-probabilities of the tokens of each sequence."""


class TakeStep(msgspec.Struct, frozen=True, kw_only=True):
    """Take a step of AdamW. Answered with the norm of the gradient."""

    learning_rate: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    max_grad_norm: float


class RestoreState(msgspec.Struct, frozen=True, kw_only=True):
    """Go to the weights of a saved state, or to the first ones. Answered with None."""

    folder: str
    """Empty for the first weights."""
    with_optimizer: bool


class SaveState(msgspec.Struct, frozen=True, kw_only=True):
    """Save weights and optimizer to a folder that does not exist. Answered with the bytes written."""

    folder: str


class PublishWeights(msgspec.Struct, frozen=True, kw_only=True):
    """Bring the weights to all engines. Answered with `PublishedSet`, once they are verified."""


class PublishedSet(msgspec.Struct, frozen=True):
    """Weights that were published."""

    number: int
    """The set that they are in, until others take their place there."""
    version: int


class RecallWeights(msgspec.Struct, frozen=True, kw_only=True):
    """Bring weights that were published before back to all engines. Answered with None."""


Call = AddGradients | TakeStep | RestoreState | SaveState | PublishWeights | RecallWeights
Answer = GradientsScored | PublishedSet | float | int | None


class CallFailed(Exception):
    """A call that could not be carried out, with the reason for the client."""

    def __init__(self, reason: str, *, is_users: bool = False) -> None:
        super().__init__(reason)
        self.is_users = is_users
        """Whether the client is to blame."""


class PendingCall(msgspec.Struct, frozen=True, eq=False):
    """A call without an answer."""

    call: Call
    answer: Callable[[Answer | CallFailed], None]
    number: int
    """Set of weights that it is about."""
    turn: int
    """Queue that it waits in: that of a model, `SCORES` or `RECALLS`."""
    model: str = ""
    """Id of the model whose client asks; empty for samples."""


class EngineAdapterSets:
    """The sets that engines hold, where they hold the adapters of several models."""

    def __init__(self) -> None:
        self.versions: dict[int, int] = {}
        """Version by which engines were last given each set."""
        self.num_samples: Counter[int] = Counter()
        """Samples that are being made of each set in a fixed version; changed by the web server's thread alone."""
        self.renewed: set[int] = set()
        """Sets of which a newer version is on its way, or about to be."""


def _nothing() -> None:
    """Do nothing: there is no loop yet."""


class CallDesk:
    """The calls that wait, and what both threads know of the run.

    Calls may come before the run is ready for them, and between two attempts: they wait then. Queues take turns, a call
    each.
    """

    def __init__(self, most_models: int = 1, most_published: int = 1) -> None:
        self.most_models = most_models
        self.most_published = most_published
        """Published versions of each model that are kept."""
        self.base = most_models
        """Set with the weights that the run began with."""
        self.held: EngineAdapterSets | None = None
        """The sets that engines hold; None where they hold one at a time."""
        self._lock = threading.Lock()
        self._waiting: dict[int, deque[PendingCall]] = {}
        """Queues that are not empty, the next turn first."""
        self._why_over: str | None = None
        self.attempt = 0
        """Number of the attempt; each begins with the first weights."""
        self.is_open = False
        """Whether the run takes calls now."""
        self.version = -1
        """Newest version that all engines hold; -1 for none."""
        self.first_version = -1
        """Version with the weights that the run began with."""
        self.holding = self.base
        """Set that engines hold."""
        self.newest: dict[int, int] = {}
        """Version of each set that engines can hold, from when it was published."""
        self.latest: dict[int, int] = {}
        """Set that each model has published last, by the model's number."""
        self.model_ids: dict[int, str] = {}
        """Id of the model that has each number, or had it last; for the web server's thread alone."""
        self._used: dict[int, int] = {}
        """Time at which each published set was used last, in uses of all."""
        self._uses = itertools.count()
        self.is_publishing = False
        """Whether another version is on its way, or about to be."""
        self.renewed: int | None = None
        """Set of which a newer version is on its way, or about to be; None for none."""
        self.is_reserved = False
        """Whether samples that have waited for the version of the engines have not begun yet."""
        self.num_samples = 0
        """Samples that are being made of a fixed version; changed by the web server's thread alone."""
        self.num_following = 0
        """Samples that are being made of the newest version, whichever it is by then; likewise."""
        self.wake: Callable[[], None] = _nothing
        """Way to have the loop look for calls at once."""
        self._ended: deque[CallRecord] = deque()
        """Requests that have ended, for the journal."""

    def published_of(self, model: int) -> range:
        """Return the sets with what a model has published."""
        first = self.most_models + 1 + model * self.most_published
        return range(first, first + self.most_published)

    def model_of(self, number: int) -> int:
        """Return the model that has published a set; that of the first weights counts as a further one."""
        return self.base if number == self.base else (number - self.most_models - 1) // self.most_published

    def place_of_next(self, model: int) -> int:
        """Return the set for what a model publishes next: an empty one, or the one that was used longest ago."""
        return min(self.published_of(model), key=lambda number: self._used.get(number, -1))

    def note_use(self, number: int) -> None:
        """Note that a published set is used."""
        self._used[number] = next(self._uses)

    def note_published(self, published: PublishedSet) -> None:
        """Note what has just been published, in the place of what was there."""
        self.newest[published.number] = published.version
        self.latest[self.model_of(published.number)] = published.number
        self.note_use(published.number)

    def put(
        self,
        call: Call,
        answer: Callable[[Answer | CallFailed], None],
        number: int = 0,
        turn: int | None = None,
        model: str = "",
    ) -> None:
        """Have the loop carry a call out, in its turn: by default, that of the model.

        It is answered at once if the run is over.
        """
        pending = PendingCall(call, answer, number, number if turn is None else turn, model)
        with self._lock:
            reason = self._why_over
            if reason is None:
                self._waiting.setdefault(pending.turn, deque()).append(pending)
        if reason is not None:
            answer(CallFailed(reason))
        else:
            self.wake()

    def next(self) -> list[PendingCall]:
        """Return the next call of each queue, in the order of their turns. They stay."""
        with self._lock:
            return [queue[0] for queue in self._waiting.values()]

    def take(self, turn: int) -> PendingCall:
        """Return the next call of a queue, whose next turn is after those of all others."""
        with self._lock:
            queue = self._waiting.pop(turn)
            pending = queue.popleft()
            if queue:
                self._waiting[turn] = queue
            return pending

    def record(self, ended: CallRecord) -> None:
        """Keep the record of a request that has ended until the loop takes it."""
        self._ended.append(ended)

    def take_records(self) -> list[CallRecord]:
        """Return the records that have come since the last time."""
        return [self._ended.popleft() for _ in range(len(self._ended))]

    def open(self, version: int) -> None:
        """Take calls: engines hold this version."""
        with self._lock:
            self.version = self.first_version = version
            self.holding, self.newest, self.latest, self._used = self.base, {self.base: version}, {}, {}
            self.is_publishing, self.is_open = False, True
            if self.held is not None:
                self.held.versions = {self.base: version}

    def close(self, reason: str, *, is_over: bool = False) -> None:
        """End an attempt: fail the calls that wait. Later ones wait for the next attempt, unless the run is over."""
        with self._lock:
            queues, self._waiting = self._waiting, {}
            self.version = self.first_version = -1
            self.newest, self.latest, self.renewed = {}, {}, None
            if self.held is not None:
                self.held.versions, self.held.renewed = {}, set()
            self.is_publishing = self.is_reserved = self.is_open = False
            self.attempt += 1
            if is_over:
                self._why_over = reason
        for pending in itertools.chain(*queues.values()):
            pending.answer(CallFailed(reason))
