"""The state of the front end: sessions, models, sampling sessions, and what their requests become.

All of it runs in the event loop of the web server. A training request waits until those before it, by the client's
numbers, have come; then it is a call on the desk (`tandem.serving.tinker.calls`), and its answer is a future. What
is wrong with a training request is the answer of its future, not a refusal: the client has given its number, and the
requests after it go on.

The desk says how many models are trained at once. If that is one, a later model of the same key takes its place. In any
other case a further model waits until a session is closed, or silent for `SILENT_S`.

Other modules know what calls gradients become (`tandem.serving.tinker.gradients`), and what becomes of samples
(`tandem.serving.tinker.samplers`).
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from tandem.config import Config
from tandem.config.models import hub
from tandem.config.models.model_sizes import vocabulary_size
from tandem.serving.tinker import calls, gradients, placing, proto, requests, samplers, sampling
from tandem.serving.tinker.futures import FinishedRequest, RequestFutures, RequestSummary, failure
from tandem.serving.tinker.requests import TinkerRefused
from tandem.serving.tinker.states import SavedStates, StateFolder, StateRecord, check_ttl, now

SILENT_S = 120.0
"""Time without a heartbeat after which a session counts as closed; the SDK sends one every ten seconds."""
_GAP_S = 120.0
"""Time without a request of a model after which one that is missing will not come. A body has a minute, and what is
refused for lack of room comes again sooner."""
_MOST_AHEAD = 4096
_MOST_UNFINISHED = 8192
"""Requests in progress of one key."""
_MOST_SESSIONS = 1000
_MOST_KEPT = 1 << 16
"""Models and names of sampler weights that are known, each; the oldest are forgotten."""
_LOST = (
    "its weights are lost, because a trainer was: create the model anew, from what save_weights has saved "
    "(create_training_client_from_state_with_optimizer)"
)

Kept = TypeVar("Kept")


class TinkerSession:
    """A client's session."""

    def __init__(self, session_id: str, owner: str) -> None:
        self.session_id = session_id
        self.owner = owner
        self.last_seen = time.monotonic()
        self.is_closed = False


class ClientModel:
    """A model that a client trains."""

    def __init__(
        self, model_id: str, number: int, session: TinkerSession, attempt: int, metadata: dict[str, Any] | None
    ) -> None:
        self.model_id = model_id
        self.number = number
        """The set of weights that trainers have for it."""
        self.session = session
        self.owner = session.owner
        self.attempt = attempt
        self.metadata = metadata
        self.next_seq = 1
        self.waiting: dict[int, Callable[[], None]] = {}
        """Requests that have come before others with lower numbers."""
        self.why_over = ""
        """Why no more requests are carried out; empty while they are."""
        self.num_saved = 0
        self.last_request = now()
        self.last_came = time.monotonic()


class PublishedWeights(msgspec.Struct, frozen=True):
    """Sampler weights with a name."""

    owner: str
    attempt: int
    weights: calls.PublishedSet
    created_at: str


class TinkerService:
    """The front end. Methods raise `TinkerRefused`."""

    def __init__(
        self,
        desk: calls.CallDesk,
        config: Config,
        engines: sampling.SamplingEngines,
        states: StateFolder,
        most_tokens: int,
    ) -> None:
        self._desk = desk
        self._config = config
        self._states = states
        self.saved = SavedStates(states)
        self._limits = gradients.ClientLimits(
            max_length=config.policy.max_total_sequence_length,
            vocabulary=vocabulary_size(config.policy),
            most_tokens=most_tokens,
        )
        adapters = config.policy.adapters
        self.num_engines = config.cluster.rollouts
        self.lora_rank: int | None = None if adapters is None else adapters.dim
        self.base_model, self._tokenizer = _names(config.policy.model_name)
        self.futures = RequestFutures(desk.record)
        self._sessions: dict[str, TinkerSession] = {}
        self._models: dict[str, ClientModel] = {}
        self._published: dict[str, PublishedWeights] = {}
        self._trained: dict[int, ClientModel] = {}
        """The models that are trained, by number."""
        self.samplers = samplers.ClientSamplers(desk, engines, self.futures, self._limits, self._put, self._check_room)
        self._loop = asyncio.get_running_loop()

    # --- sessions ----------------------------------------------------------------------------------------------------

    def capabilities(self) -> dict[str, Any]:
        """Describe the one model."""
        model = {
            "model_name": self.base_model,
            "max_context_length": self._limits.max_length,
            "trainable": True,
            "sampleable": True,
        }
        return {"supported_models": [model]}

    def create_session(self, owner: str, body: requests.CreateSession) -> dict[str, Any]:
        """Begin a session."""
        requests.check_version(body.sdk_version)
        self._expire()
        if sum(not each.is_closed for each in self._sessions.values() if each.owner == owner) >= _MOST_SESSIONS:
            raise TinkerRefused(f"{_MOST_SESSIONS} sessions of this key are open", 429)
        session = TinkerSession(f"session-{secrets.token_hex(8)}", owner)
        self._sessions[session.session_id] = session
        return {"type": "create_session", "session_id": session.session_id}

    def beat(self, owner: str, session_id: str) -> dict[str, Any]:
        """Note that a session's client is alive."""
        session = self._sessions.get(session_id)
        if session is None or session.owner != owner or session.is_closed:
            raise TinkerRefused(f"there is no session {session_id!r}, or it is closed", 410)
        session.last_seen = time.monotonic()
        self._expire()
        return {"type": "session_heartbeat"}

    def finish_session(self, owner: str, session_id: str) -> None:
        """Close a session, and let others train."""
        self._close(self._session(owner, session_id), "its session is closed")

    def _session(self, owner: str, session_id: str) -> TinkerSession:
        session = self._sessions.get(session_id)
        if session is None or session.owner != owner:
            raise TinkerRefused(f"there is no session {session_id!r}", 404)
        if session.is_closed:
            raise TinkerRefused(f"session {session_id!r} is closed")
        session.last_seen = time.monotonic()
        return session

    def _expire(self) -> None:
        for session in [*self._sessions.values()]:
            silent_s = time.monotonic() - session.last_seen
            if not session.is_closed and silent_s > SILENT_S:
                self._close(session, f"its session was silent for {SILENT_S:g} s")

    def _close(self, session: TinkerSession, reason: str) -> None:
        session.is_closed = True
        del self._sessions[session.session_id]
        for model in self._models.values():
            if model.session is session:
                self._end(model, reason)

    def _end(self, model: ClientModel, reason: str) -> None:
        """Carry out no more requests of a model."""
        model.why_over = model.why_over or reason
        if self._trained.get(model.number) is model:
            del self._trained[model.number]
        waiting, model.waiting = model.waiting, {}
        for seq in waiting:
            self._fail(f"{model.model_id}:{seq}", f"{model.model_id}: {model.why_over}")

    # --- models ------------------------------------------------------------------------------------------------------

    def create_model(self, owner: str, body: requests.CreateModel) -> dict[str, Any]:
        """Begin to train the base model anew."""
        session = self._session(owner, body.session_id)
        self._check_base(body.base_model)
        self._check_optimizer(body.optimizer_config)
        rank = 0 if body.lora_config is None else body.lora_config.rank
        if rank != (self.lora_rank or 0):
            server_rank = self.lora_rank or 0
            weights = f"adapters of rank {server_rank}" if server_rank else "all weights"
            raise TinkerRefused(f"lora_config.rank: {rank}; this server trains {weights}: ask for rank={server_rank}")
        return self._create(
            session, body.model_seq_id, body.user_metadata, calls.RestoreState(folder="", with_optimizer=False)
        )

    def load_weights(self, owner: str, body: requests.LoadWeights) -> dict[str, Any]:
        """Load a saved state into a model, or into a new one."""
        if body.weights_access_token:
            raise TinkerRefused("weights_access_token: weights of other keys are not served")
        if body.model_id is not None and body.seq_id is not None:
            model = self._model(owner, body.model_id)
            reply = {"type": "load_weights", "path": body.path, "model_id": model.model_id}

            def find() -> calls.Call:
                return self._find_state(owner, body)

            about = RequestSummary(kind="load_weights", model=model.model_id)
            return self._queue_request(model, body.seq_id, about, find, lambda answer: _json(reply))
        if body.session_id is None or body.model_seq_id is None:
            raise TinkerRefused("model_id with seq_id, or session_id with model_seq_id, is needed")
        session = self._session(owner, body.session_id)
        if body.base_model is not None:
            self._check_base(body.base_model)
        if body.optimizer_config is not None:
            self._check_optimizer(body.optimizer_config)
        return self._create(session, body.model_seq_id, body.user_metadata, self._find_state(owner, body), body.path)

    def _find_state(self, owner: str, body: requests.LoadWeights) -> calls.RestoreState:
        record, folder = self._states.find(body.path, owner)
        if record.base_model != self.base_model or record.lora_rank != self.lora_rank:
            raise TinkerRefused(f"{body.path}: was saved of {record.base_model}, trained otherwise than here")
        return calls.RestoreState(folder=str(folder), with_optimizer=body.optimizer)

    def _create(
        self,
        session: TinkerSession,
        number: int,
        metadata: dict[str, Any] | None,
        call: calls.RestoreState,
        path: str | None = None,
    ) -> dict[str, Any]:
        model_id = f"{session.session_id}:train:{number}"
        request_id = f"{model_id}:0"
        if model_id not in self._models:
            number = self._free_number(session.owner, model_id)
            model = ClientModel(model_id, number, session, self._desk.attempt, metadata)
            self._trained[number] = model
            self._desk.model_ids[number] = model_id
            _keep(self._models, model_id, model)
            reply: dict[str, Any] = {"model_id": model_id}
            reply |= {"type": "create_model"} if path is None else {"type": "load_weights", "path": path}
            about = RequestSummary(kind="create_model" if path is None else "load_weights", model=model_id)
            self.futures.begin(request_id, session.owner, about)

            def answered(answer: calls.Answer | calls.CallFailed) -> None:
                if isinstance(answer, calls.CallFailed):
                    self._end(model, str(answer))
                    self._fail(request_id, str(answer), is_users=answer.is_users)
                else:
                    model.attempt = self._desk.attempt
                    self.futures.finish(request_id, _json(reply))

            self._put(call, answered, number, model_id=model_id)
        return {"request_id": request_id, "model_id": model_id}

    def _free_number(self, owner: str, model_id: str) -> int:
        """Return the number of a new model. Raises `TinkerRefused` if there are as many as may be."""
        self._expire()
        max_models = self._desk.most_models
        for model in [*self._trained.values()]:
            if model.attempt != self._desk.attempt:
                self._end(model, _LOST)
            elif max_models == 1 and model.owner != owner:
                raise TinkerRefused(
                    "a model of another key is being trained, and this server trains one at a time: ask again later"
                )
            elif max_models == 1:
                self._end(model, f"{model_id} has taken its place: this server trains one model at a time")
        if len(self._trained) >= max_models:
            num_own = sum(model.owner == owner for model in self._trained.values())
            raise TinkerRefused(
                f"{len(self._trained)} models are being trained, {num_own} of them of this key, and this server trains "
                f"{max_models} at a time: ask again later, or close a session",
                429,
            )
        return next(number for number in range(max_models) if number not in self._trained)

    def info(self, owner: str, model_id: str) -> dict[str, Any]:
        """Describe a model."""
        model = self._model(owner, model_id)
        return {
            "type": "get_info",
            "model_id": model.model_id,
            "model_name": self.base_model,
            "model_data": {"model_name": self.base_model, "tokenizer_id": self._tokenizer},
            "is_lora": self.lora_rank is not None,
            "lora_rank": self.lora_rank,
        }

    def _model(self, owner: str, model_id: str) -> ClientModel:
        model = self._models.get(model_id)
        if model is None or model.owner != owner:
            raise TinkerRefused(f"there is no model {model_id!r}", 404)
        model.session.last_seen = time.monotonic()
        model.last_request = now()
        return model

    def _check_base(self, name: str) -> None:
        if name not in (self.base_model, self._config.policy.model_name):
            raise TinkerRefused(f"base_model: {name!r} is not served; this server has {self.base_model!r}")

    @staticmethod
    def _check_optimizer(settings: requests.TinkerOptimizerConfig) -> None:
        if settings.type != "adamw":
            raise TinkerRefused(f"optimizer_config: {settings.type!r} is not served; only adamw is")

    # --- training ----------------------------------------------------------------------------------------------------

    def gradient(self, owner: str, body: proto.GradientRequest) -> dict[str, Any]:
        """Add a gradient, or score only."""
        model = self._model(owner, body.model_id)
        about = RequestSummary(
            kind="forward" if body.is_forward else "forward_backward",
            model=model.model_id,
            num_sequences=len(body.data),
            num_tokens=sum(len(each.token_ids) + 1 for each in body.data),
        )
        return self._queue_request(
            model, body.seq_id, about, partial(gradients.gradient_call, body, self._limits), gradients.scored_result
        )

    def step(self, owner: str, body: requests.OptimStep) -> dict[str, Any]:
        """Step the optimizer."""
        model = self._model(owner, body.model_id)

        def stepped(answer: calls.Answer) -> FinishedRequest:
            return _json({"metrics": {"grad_norm": answer}})

        about = RequestSummary(kind="optim_step", model=model.model_id)
        return self._queue_request(model, body.seq_id, about, partial(gradients.step_call, body.adam_params), stepped)

    def save(self, owner: str, body: requests.SaveWeights | requests.SaveExternal) -> dict[str, Any]:
        """Save weights and optimizer, or weights to be downloaded."""
        model = self._model(owner, body.model_id)
        model.num_saved += 1
        name = body.path or f"{model.num_saved:06d}"
        is_external = isinstance(body, requests.SaveExternal)
        states, kind = (self.saved.external, "save_weights_external") if is_external else (self._states, "save_weights")

        def begin() -> calls.Call:
            check_ttl(body.ttl_seconds)
            if isinstance(body, requests.SaveExternal) and body.age_encryption_recipients:
                raise TinkerRefused("age_encryption_recipients: are not served")
            folder = states.folder_for(model.model_id, name)
            if folder.exists():
                if isinstance(body, requests.SaveExternal) or not body.overwrite:
                    raise TinkerRefused(f"path: {name!r} is saved already; overwrite=True of save_weights replaces it")
                states.delete(f"tinker://{model.model_id}/{states.kind}/{name}", owner)
            return calls.SaveState(folder=str(folder))

        def saved(answer: calls.Answer) -> FinishedRequest:
            assert isinstance(answer, int), "the bytes"
            record = StateRecord(
                owner=owner,
                model_id=model.model_id,
                name=name,
                base_model=self.base_model,
                lora_rank=self.lora_rank,
                created_at=now(),
                num_bytes=states.strip(model.model_id, name) if is_external else answer,
                user_metadata=body.user_metadata if isinstance(body, requests.SaveWeights) else None,
                expires_at=None if body.ttl_seconds is None else now(body.ttl_seconds),
                kind=states.kind,
            )
            states.write(record)
            return _json({"type": kind, "path": record.path, "size_bytes": record.num_bytes})

        return self._queue_request(model, body.seq_id, RequestSummary(kind=kind, model=model.model_id), begin, saved)

    def save_for_sampler(self, owner: str, body: requests.SaveForSampler) -> dict[str, Any]:
        """Bring the weights to the engines."""
        model = self._model(owner, body.model_id)

        def begin() -> calls.Call:
            if body.path is None and body.sampling_session_seq_id is None:
                raise TinkerRefused("path or sampling_session_seq_id is needed")
            return calls.PublishWeights()

        def published(answer: calls.Answer) -> FinishedRequest:
            assert isinstance(answer, calls.PublishedSet), "as asked for"
            if body.path is not None:
                path = f"tinker://{model.model_id}/sampler_weights/{body.path}"
                _keep(self._published, path, PublishedWeights(owner, self._desk.attempt, answer, now()))
                return _json({"type": "save_weights_for_sampler", "path": path})
            sampler_id = f"{model.session.session_id}:sample:{body.sampling_session_seq_id}"
            weights = answer if body.kind == "snapshot" else placing.LatestWeights(model.number, model.model_id)
            self.samplers.add(placing.SamplingSession(sampler_id, owner, self._desk.attempt, weights, None))
            return _json({"type": "save_weights_for_sampler", "sampling_session_id": sampler_id})

        about = RequestSummary(kind="save_weights_for_sampler", model=model.model_id)
        return self._queue_request(model, body.seq_id, about, begin, published)

    # --- sampling ----------------------------------------------------------------------------------------------------

    def create_sampler(self, owner: str, body: requests.CreateSamplingSession) -> dict[str, Any]:
        """Begin a sampling session of published weights, or of the base model."""
        session = self._session(owner, body.session_id)
        weights = calls.PublishedSet(self._desk.base, self._desk.first_version)
        if not self._desk.is_open:
            raise TinkerRefused("the run is starting: ask again later", 503)
        if body.model_path is not None:
            published = self._published.get(body.model_path)
            if published is None or published.owner != owner:
                raise TinkerRefused(
                    f"model_path: there are no sampler weights {body.model_path[:200]!r}: save_weights_for_sampler "
                    "makes them",
                    404,
                )
            weights = published.weights
            if not self._is_kept(published):
                raise TinkerRefused(
                    f"model_path: {body.model_path[:200]!r}: {placing.describe_replaced(self._desk, weights.version)}"
                )
        else:
            self._check_base(body.base_model or "")
        sampler_id = f"{session.session_id}:sample:{body.sampling_session_seq_id}"
        self.samplers.add(placing.SamplingSession(sampler_id, owner, self._desk.attempt, weights, body.model_path))
        return {"type": "create_sampling_session", "sampling_session_id": sampler_id}

    def _is_kept(self, published: PublishedWeights) -> bool:
        weights = published.weights
        return published.attempt == self._desk.attempt and weights.version == self._desk.newest.get(weights.number)

    def sampler(self, owner: str, sampler_id: str) -> dict[str, Any]:
        """Describe a sampling session."""
        sampler = self.samplers.get(owner, sampler_id)
        return {"sampler_id": sampler_id, "base_model": self.base_model, "model_path": sampler.path}

    # --- saved states ------------------------------------------------------------------------------------------------

    def weights_info(self, owner: str, path: str) -> dict[str, Any]:
        """Describe saved weights, or sampler weights."""
        if path not in self._published or self._published[path].owner != owner:
            self.saved.find(path, owner)
        return {"base_model": self.base_model, "is_lora": self.lora_rank is not None, "lora_rank": self.lora_rank}

    def checkpoints(self, owner: str, model_id: str | None = None) -> list[dict[str, Any]]:
        """List saved weights and sampler weights."""
        listed = self.saved.of(owner, model_id)
        for path, published in self._published.items():
            its_model = path.removeprefix("tinker://").partition("/")[0]
            if published.owner == owner and model_id in (None, its_model) and self._is_kept(published):
                name = path.rpartition("/")[2]
                listed.append(
                    {
                        "checkpoint_id": f"sampler_weights/{name}",
                        "checkpoint_type": "sampler",
                        "time": published.created_at,
                        "tinker_path": path,
                        "public": False,
                    }
                )
        return listed

    def delete_checkpoint(self, owner: str, model_id: str, checkpoint_id: str) -> None:
        """Delete saved weights."""
        path = f"tinker://{model_id}/{checkpoint_id}"
        if path in self._published and self._published[path].owner == owner:
            del self._published[path]
            return
        self.saved.delete(owner, model_id, checkpoint_id)

    def training_runs(self, owner: str) -> list[dict[str, Any]]:
        """List the models of this server's time."""
        return [self._run_of(model) for model in self._models.values() if model.owner == owner]

    def training_run(self, owner: str, model_id: str) -> dict[str, Any]:
        """Describe a model."""
        return self._run_of(self._model(owner, model_id))

    def _run_of(self, model: ClientModel) -> dict[str, Any]:
        return {
            "training_run_id": model.model_id,
            "base_model": self.base_model,
            "model_owner": model.owner,
            "is_lora": self.lora_rank is not None,
            "lora_rank": self.lora_rank,
            "corrupted": model.attempt != self._desk.attempt,
            "user_metadata": model.metadata,
            "last_request_time": model.last_request,
        }

    # --- futures -----------------------------------------------------------------------------------------------------

    async def result(self, owner: str, request_id: str, timeout_s: float) -> FinishedRequest | None:
        """Wait for a result; None if it takes longer."""
        future = self.futures.get(request_id, owner)
        if future is None:
            if self.futures.is_dropped(request_id, owner):
                raise TinkerRefused(f"the result of {request_id!r} was dropped: too many came after it", 410)
            raise TinkerRefused(f"there is no request {request_id!r}", 404)
        try:
            async with asyncio.timeout(timeout_s):
                await future.is_done.wait()
        except TimeoutError:
            return None
        return future.result

    def _queue_request(
        self,
        model: ClientModel,
        seq: int,
        about: RequestSummary,
        begin: Callable[[], calls.Call],
        result: Callable[[calls.Answer], FinishedRequest],
    ) -> dict[str, Any]:
        """Carry a request out once all before it have begun; return its future."""
        request_id = f"{model.model_id}:{seq}"
        reply = {"request_id": request_id, "model_id": model.model_id}
        if self.futures.get(request_id, model.owner) is not None or self.futures.is_dropped(request_id, model.owner):
            return reply  # it came before
        model.last_came = time.monotonic()
        if not model.next_seq <= seq <= model.next_seq + _MOST_AHEAD:
            raise TinkerRefused(f"seq_id: {seq}, and the next request of {model.model_id} is {model.next_seq}")
        # Those that wait for this one do not keep it out.
        after = [f"{model.model_id}:{number}" for number in model.waiting] if seq == model.next_seq else []
        self._check_room(model.owner, about, after)
        self.futures.begin(request_id, model.owner, about)
        if model.why_over:
            self._fail(request_id, f"{model.model_id}: {model.why_over}", is_users=True)
            return reply
        model.waiting[seq] = partial(self._begin, model, request_id, begin, result)
        if seq != model.next_seq:
            self._loop.call_later(_GAP_S, self._give_up_gap, model, seq)
        while (start := model.waiting.pop(model.next_seq, None)) is not None:
            model.next_seq += 1
            start()
        return reply

    def _give_up_gap(self, model: ClientModel, seq: int) -> None:
        """Fail the requests that wait for one which the client could not send; the model goes on after them.

        They are not carried out without it: they may be the rest of its batch, and the step with its gradient.
        """
        if seq not in model.waiting:
            return
        left_s = model.last_came + _GAP_S - time.monotonic()
        if left_s > 0:
            self._loop.call_later(left_s, self._give_up_gap, model, seq)
            return
        reason = f"not carried out: request {model.next_seq} of {model.model_id}, which is before it, has not come"
        waiting, model.waiting = model.waiting, {}
        model.next_seq = max(waiting) + 1
        for number in waiting:
            self._fail(f"{model.model_id}:{number}", reason, is_users=True)

    def _begin(
        self,
        model: ClientModel,
        request_id: str,
        begin: Callable[[], calls.Call],
        result: Callable[[calls.Answer], FinishedRequest],
    ) -> None:
        if model.attempt != self._desk.attempt:
            self._fail(request_id, f"{model.model_id}: {_LOST}")
            return
        try:
            call = begin()
        except TinkerRefused as error:
            self._fail(request_id, str(error), is_users=True)
            return

        def answered(answer: calls.Answer | calls.CallFailed) -> None:
            if isinstance(answer, calls.CallFailed):
                if isinstance(call, calls.RestoreState):  # some tensors may be those of the state, and others not
                    self._end(model, f"its weights are undefined since this failed: {answer}")
                self._fail(request_id, str(answer), is_users=answer.is_users)
                return
            try:
                self.futures.finish(request_id, result(answer))
            except OSError as error:
                self._fail(request_id, f"cannot save it: {error.strerror}")

        self._put(call, answered, model.number, model_id=model.model_id)

    def _put(
        self,
        call: calls.Call,
        answered: Callable[[calls.Answer | calls.CallFailed], None],
        number: int,
        turn: int | None = None,
        model_id: str = "",
    ) -> None:
        """Put a call on the desk; it is answered in this thread."""
        self._desk.put(call, partial(self._hand_over, answered), number, turn, model_id)

    def _hand_over(
        self, answered: Callable[[calls.Answer | calls.CallFailed], None], answer: calls.Answer | calls.CallFailed
    ) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(answered, answer)

    def _check_room(self, owner: str, about: RequestSummary, after: Sequence[str] = ()) -> None:
        """Raise `TinkerRefused` if a key has too much in progress, without the requests `after`."""
        if about.num_tokens:
            num_tokens = self.futures.num_tokens.get(owner, 0) - self.futures.tokens_of(after)
            if num_tokens and num_tokens + about.num_tokens > self._limits.most_tokens:
                raise TinkerRefused(
                    f"{num_tokens} tokens of this key are in progress, these would be {about.num_tokens} more, and it "
                    f"may have {self._limits.most_tokens}: ask again later",
                    429,
                )
        if self.futures.num_unfinished.get(owner, 0) >= _MOST_UNFINISHED:
            raise TinkerRefused(f"{_MOST_UNFINISHED} requests of this key are in progress: ask again later", 429)

    def _fail(self, request_id: str, reason: str, *, is_users: bool = False) -> None:
        self.futures.finish(request_id, failure(reason, is_users=is_users))


def _names(model: str) -> tuple[str, str]:
    """Return what clients call a model, and where they find its tokenizer: by its name, if it is of the Hub."""
    of_hub = hub.find_cached_name(model)
    if of_hub is not None:
        return of_hub.repo, of_hub.repo
    return Path(model).name, str(Path(model).absolute())


def _keep(entries: dict[str, Kept], name: str, value: Kept) -> None:
    """Add to what is known, and forget the oldest if that is too much."""
    entries[name] = value
    if len(entries) > _MOST_KEPT:
        del entries[next(iter(entries))]


def _json(body: dict[str, Any]) -> FinishedRequest:
    return FinishedRequest(msgspec.json.encode(body))
