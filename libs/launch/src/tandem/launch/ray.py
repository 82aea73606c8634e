"""A run on the nodes of a Ray cluster: Ray places, watches and moves its nodes, and carries no data.

This process asks Ray for a placement group, a bundle a node on nodes of their own, and for an actor in each
(`tandem.launch.ray_node`). The first actor runs the coordinator, each other ``coordinator join``. Samples and weights
move between the run's own processes.

    consumes        lines of the nodes' processes, their ends, lost actors, signals.
    produces        lines, starts and restarts of processes, an exit code.
    waits for       news of any node, at most `_LOOK_S` at a time.

A lost node is restarted by Ray where there is room. If it was another than the first, its processes join again. If it
was the first, or the coordinator gave up meanwhile, all processes end and the run is resumed.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from tandem.common import signals
from tandem.common.distribution import version
from tandem.common.errors import BAD_INPUT, FAILED, INTERRUPTED, OK, ConfigError, TandemError
from tandem.config import Config
from tandem.launch.child import select_within
from tandem.launch.nodes import NodeShare, nodes_of
from tandem.launch.ray_node import NodeActor, NodeOrder, NodeOutput, NodeView

_LOOK_S = 0.5
_READ_S = 5.0
"""How long an actor waits for lines before it answers that there are none."""
_CALL_S = 60.0
"""Deadline of a call to an actor that is alive."""
_RETRY_S = 1.0
_END_S = 60.0
"""How long the other nodes may take to end after the coordinator."""
_KILL_S = 30.0
"""How long the nodes may take to end what they run, before Ray kills their actors."""
_WAITING_S = 30.0
"""Interval between two lines that say what is waited for."""
_CONCURRENCY = 4
_PAGE = re.compile(r"page: http://127\.0\.0\.1:(\d+)")
_ANY_PORT = "*"


class RayPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The request to Ray, and the processes of each node."""

    name: str
    """Name of the placement group."""
    bundles: tuple[dict[str, float], ...]
    """Resources of each node, the coordinator's first."""
    nodes: tuple[NodeShare, ...]
    order: NodeOrder
    config_words: tuple[str, ...]
    """Configuration and settings, as on a command line."""
    start_words: tuple[str, ...]
    """How the run begins: ``--resume``, ``--restart``, or neither."""
    options: tuple[str, ...]
    """Further options of ``coordinator up``."""
    port: int
    """Port of the coordinator; 0 for any."""
    max_losses: int
    window_s: float
    """Most nodes that may be lost within this time before the run is given up."""
    wait_s: float
    """How long to wait for nodes."""

    @property
    def needs(self) -> str:
        """The nodes and their resources in words."""
        resources = ", ".join(f"{amount:g} {name}" for name, amount in self.bundles[0].items())
        count = len(self.bundles)
        return f"{count} nodes with {resources} each" if count > 1 else f"a node with {resources}"


def plan_on_ray(
    config: Config,
    source: str,
    overrides: Sequence[str],
    *,
    cpus: float = 1.0,
    resources: Mapping[str, float] | None = None,
    environment: Mapping[str, str] | None = None,
    start_words: Sequence[str] = (),
    options: Sequence[str] = (),
    wait_s: float = 3600.0,
) -> RayPlan:
    """Return what a configuration needs of Ray; `source` and `overrides` are as given.

    Raises:
        ConfigError: some process would be launched by no node, or by two.

    """
    nodes = nodes_of(config)
    gpus = {"GPU": float(config.cluster.gpus_per_node)} if config.cluster.gpus_per_node else {}
    return RayPlan(
        name=f"tandem-{Path(source).stem}",
        bundles=tuple({"CPU": cpus, **gpus, **(resources or {})} for _ in nodes),
        nodes=nodes,
        order=NodeOrder(
            folder=os.getcwd(), config=source, run=config.logger.log_dir, environment=dict(environment or {})
        ),
        config_words=(source, *overrides),
        start_words=tuple(start_words),
        options=tuple(options),
        port=_port_of(config.cluster.address),
        max_losses=config.cluster.max_replacements,
        window_s=config.cluster.replacement_window_s,
        wait_s=wait_s,
    )


def _port_of(address: str) -> int:
    """Return the port of `cluster.address`, 0 for any; its host is that of the node that Ray chooses."""
    port = address.rpartition(":")[2]
    return 0 if port == _ANY_PORT else int(port)


def run_on_ray(plan: RayPlan, address: str, say: Callable[[str], None]) -> int:
    """Run a plan on the Ray cluster at an address, to its end; return the exit code.

    Raises:
        TandemError: Ray is not installed, no cluster answers, or it has no room in time.

    """
    with _connected(address) as ray:
        run = _RayRun(ray, plan, say)
        with signals.hear_signals(run.hear_signal):
            try:
                return run.run()
            finally:
                run.close()


@contextlib.contextmanager
def _connected(address: str) -> Iterator[Any]:
    """Connect to Ray; yield the module."""
    if "://" in address:
        raise ConfigError(
            f"--address {address}: not supported; run this on a node of the cluster with auto or HOST:PORT, "
            "or from elsewhere by `ray job submit -- coordinator ray CONFIG`"
        )
    try:
        import ray
    except ImportError as error:
        raise TandemError(f"coordinator ray needs Ray: pip install 'tandem-rl[ray]' ({error})") from error
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, RuntimeError, ValueError, TypeError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise TandemError(f"--address {address}: no Ray cluster there: {reason}") from error
    for number, handler in before.items():  # Ray has its own, which would end this process
        signal.signal(number, handler)
    try:
        yield ray
    finally:
        ray.shutdown()


class _Node:
    """One node of the run."""

    def __init__(self, share: NodeShare, actor: Any) -> None:
        self.share = share
        self.actor = actor
        self.view: NodeView | None = None
        """The node as it was when it was placed; None while Ray places it."""
        self.call: Any = None
        """The call whose answer is awaited."""
        self.call_at = 0.0
        """Time of the next call, if none is awaited."""
        self.position = 0
        """Number of lines read."""
        self.has_started = False
        """Whether its process has been started in this life of the actor."""
        self.code: int | None = None
        """Exit code of its process; None while it runs."""

    @property
    def name(self) -> str:
        """Name in what is printed."""
        return f"node {self.share.number}"

    @property
    def is_first(self) -> bool:
        """Whether the coordinator is here."""
        return self.share.number == 0

    def reset(self) -> None:
        """Forget its process."""
        self.position, self.has_started, self.code, self.call = 0, False, None, None


class _RayRun:
    """The nodes of a run, and the loop over their news."""

    def __init__(self, ray: Any, plan: RayPlan, say: Callable[[str], None]) -> None:
        self._ray = ray
        self._plan = plan
        self._say = say
        self._group: Any = None
        self._nodes: list[_Node] = []
        self._signals: list[int] = []
        """Signals to pass on to the coordinator."""
        self._num_signals = 0
        self._lost_at: list[float] = []
        """Times at which nodes were lost."""
        self._has_lost_since = False
        """Whether a node has been lost since the coordinator was started."""
        self._run_id_before: str | None = None
        self._num_starts = 0
        self._address = ""
        self._coordinator_key = ""
        self._missing_since: float | None = None
        self._said_at = 0.0
        self._order = _order_for(ray, plan.order)

    def hear_signal(self, number: int) -> None:
        """Take a request to end."""
        self._signals.append(number)
        self._num_signals += 1

    def run(self) -> int:
        """Place the nodes, run the processes, and return the exit code."""
        if not self._place():
            self._say("interrupted before the run had begun")
            return INTERRUPTED
        while True:
            code = self._run_once()
            if code is not None:
                return code

    def close(self) -> None:
        """End all processes, and give Ray its nodes back."""
        self._stop_all()
        for node in self._nodes:
            with contextlib.suppress(Exception):  # Ray may be gone
                self._ray.kill(node.actor)
        if self._group is not None:
            with contextlib.suppress(Exception):
                self._ray.util.remove_placement_group(self._group)

    def _place(self) -> bool:
        """Wait for the placement group and create its actors; return False if asked to end meanwhile."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        plan = self._plan
        self._group = self._ray.util.placement_group(
            [dict(bundle) for bundle in plan.bundles], strategy="STRICT_SPREAD", name=plan.name
        )
        since = said_at = time.monotonic()
        is_first = True
        while not self._group.wait(_LOOK_S):
            now = time.monotonic()
            if self._signals:
                return False
            if now - since > plan.wait_s:
                raise TandemError(
                    f"Ray has not placed {plan.needs} within {plan.wait_s:g} s: {self._describe_cluster()}"
                )
            if (is_first and now - since > 2.0) or now - said_at > _WAITING_S:
                self._say(f"waiting for {plan.needs}: {self._describe_cluster()}")
                is_first, said_at = False, now
        actor_class = self._ray.remote(NodeActor)
        for share, bundle in zip(plan.nodes, plan.bundles, strict=True):
            actor = actor_class.options(
                num_cpus=bundle["CPU"],
                num_gpus=bundle.get("GPU", 0.0),
                resources={name: amount for name, amount in bundle.items() if name not in ("CPU", "GPU")},
                max_restarts=-1,  # this process counts, and gives up
                max_concurrency=_CONCURRENCY,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, share.number),
            ).remote()
            self._nodes.append(_Node(share, actor))
        return True

    def _describe_cluster(self) -> str:
        """Describe the nodes that Ray has, by what is free on them."""
        alive = [node for node in self._ray.nodes() if node["Alive"]]
        names = self._plan.bundles[0]
        able = [node for node in alive if all(node["Resources"].get(name, 0) >= names[name] for name in names)]
        free = self._ray.available_resources()
        amounts = ", ".join(f"{free.get(name, 0):g} {name}" for name in names)
        return f"the cluster has {len(alive)} nodes, {len(able)} of them large enough, and {amounts} free"

    def _run_once(self) -> int | None:
        """Run the processes until the coordinator ends, or its node is lost; None to resume."""
        self._missing_since, self._said_at = time.monotonic(), time.monotonic()
        while not all(node.view for node in self._nodes):
            if self._signals:
                return INTERRUPTED
            if code := self._look():
                return code
        if problem := self._find_problem():
            raise TandemError(problem)
        self._has_lost_since = False
        try:
            self._begin()
        except self._ray.exceptions.RayActorError:  # the next round finds out which node is lost
            self._stop_all()
            for node in self._nodes:
                node.view = None
            return None
        first = self._nodes[0]
        while first.code is None:
            if code := self._look():
                return code
            if first.view is None:
                self._stop_all()
                return None
            self._pass_on_signals()
        return self._judge(first.code)

    def _begin(self) -> None:
        """Start the coordinator, and what joins it."""
        first, plan = self._nodes[0], self._plan
        reserved = self._ask(first.actor.reserve.remote(self._order, plan.port))
        self._address, self._coordinator_key = reserved.address, reserved.coordinator_key
        run_id = first.view.run_id if first.view is not None else None
        if self._num_starts == 0:
            self._run_id_before = run_id
            start_words: tuple[str, ...] = plan.start_words
        else:
            view = self._ask(first.actor.inspect.remote(self._order))
            has_begun = view.run_id is not None and view.run_id != self._run_id_before
            start_words = ("--resume",) if has_begun or "--resume" in plan.start_words else plan.start_words
        self._num_starts += 1
        setting = f"cluster.address={self._address}"
        words = ["up", *plan.config_words, setting, "--supervise", *plan.options, *start_words]
        self._start(first, words, b"")
        for node in self._nodes[1:]:
            self._join(node)

    def _join(self, node: _Node) -> None:
        """Have a node join the run; if it is lost meanwhile, it does so once Ray has placed it again."""
        number = str(node.share.number)
        words = ["join", *self._plan.config_words, "--node", number, "--coordinator", self._address]
        try:
            self._start(node, words, self._keys_for(node))
        except self._ray.exceptions.RayActorError:
            node.reset()
            node.view = None

    def _keys_for(self, node: _Node) -> bytes:
        """Return the keys with which a node joins; none if it sees the run folder, which has them."""
        if self._ask(node.actor.sees_keys.remote(self._order, self._coordinator_key)):
            return b""
        if node.share.trainers:
            raise TandemError(
                f"{node.name} ({_describe_place(node)}) does not see the run folder: logger.log_dir "
                f"({self._order.run}) must be on a file system that all nodes with trainers see, for their checkpoints"
            )
        return bytes(self._ask(self._nodes[0].actor.read_keys.remote(self._order)))

    def _start(self, node: _Node, words: Sequence[str], keys: bytes) -> None:
        node.reset()
        self._ask(node.actor.start.remote(self._order, list(words), keys))
        node.has_started = True

    def _ask(self, call: Any) -> Any:
        """Return the answer to a short call. Raises `RayActorError` if the node is lost, and `TandemError`."""
        try:
            return self._ray.get(call, timeout=_CALL_S)
        except self._ray.exceptions.GetTimeoutError:
            raise TandemError(f"a node has not answered within {_CALL_S:g} s") from None
        except self._ray.exceptions.RayTaskError as error:
            raise TandemError(str(error.cause).strip().splitlines()[0]) from error

    def _look(self) -> int | None:
        """Wait for news of any node, and act on them; return an exit code if the run is to be given up."""
        now = time.monotonic()
        for node in self._nodes:
            if node.call is not None or now < node.call_at:
                continue
            if node.view is None:
                node.call = node.actor.inspect.remote(self._order)
            elif node.has_started and node.code is None:
                node.call = node.actor.read.remote(node.position, _READ_S)
        calls = {node.call: node for node in self._nodes if node.call is not None}
        if not calls:
            time.sleep(_LOOK_S)
            return None
        ready, _ = self._ray.wait([*calls], timeout=_LOOK_S)
        for call in ready:
            node, calls[call].call = calls[call], None
            try:
                answer = self._ask(call)
            except self._ray.exceptions.RayActorError:
                if code := self._take_failure(node):
                    return code
                continue
            if isinstance(answer, NodeOutput):
                if code := self._take_output(node, answer):
                    return code
            else:
                self._take_view(node, answer)
        return self._wait_for_nodes()

    def _take_failure(self, node: _Node) -> int | None:
        """Decide whether a node that has not answered is lost; return an exit code if too many are."""
        node.call_at = time.monotonic() + _RETRY_S
        return None if node.view is None or self._is_unchanged(node) else self._lose(node)

    def _is_unchanged(self, node: _Node) -> bool:
        """Tell whether a node whose call has failed answers another: then only the connection was lost."""
        with contextlib.suppress(self._ray.exceptions.RayError):
            view = self._ray.get(node.actor.inspect.remote(self._order), timeout=_READ_S)
            return node.view is not None and view.incarnation == node.view.incarnation
        return False

    def _lose(self, node: _Node) -> int | None:
        """Take note that a node is lost; return an exit code if too many are."""
        self._say(f"{node.name} ({_describe_place(node)}) is lost; Ray places it again")
        node.view = None
        node.reset()
        self._missing_since = self._said_at = time.monotonic()
        return self._count_loss()

    def _count_loss(self) -> int | None:
        """Count a loss; return an exit code if there are too many."""
        now = time.monotonic()
        self._has_lost_since = True
        self._lost_at = [*select_within(self._plan.window_s, now, self._lost_at), now]
        if len(self._lost_at) > self._plan.max_losses:
            self._say(f"error: more nodes were lost than cluster.max_replacements ({self._plan.max_losses})")
            return FAILED
        return None

    def _wait_for_nodes(self) -> int | None:
        """Say which nodes are waited for, and give up in the end."""
        missing = [node for node in self._nodes if node.view is None]
        if not missing:
            self._missing_since = None
            return None
        now = time.monotonic()
        self._missing_since = self._missing_since or now
        names = ", ".join(node.name for node in missing)
        if now - self._missing_since > self._plan.wait_s:
            self._say(f"error: Ray has not placed {names} within {self._plan.wait_s:g} s: {self._describe_cluster()}")
            return FAILED
        if now - self._said_at > _WAITING_S:
            self._said_at = now
            self._say(f"waiting for {names}: {self._describe_cluster()}")
        return None

    def _take_view(self, node: _Node, view: NodeView) -> None:
        """Take in where a node is; have it join if the run is under way."""
        node.view = view
        self._say(f"{node.name} is on {_describe_place(node)}: {node.share.description}")
        if self._num_starts and not node.is_first and self._nodes[0].has_started:
            if problem := self._find_problem():
                raise TandemError(problem)
            self._join(node)

    def _take_output(self, node: _Node, output: NodeOutput) -> int | None:
        """Print what a node's process has printed, and note its end; return an exit code to give up."""
        assert node.view is not None
        if output.incarnation != node.view.incarnation:
            return self._lose(node)
        for line in output.lines:
            self._say(self._name_page(node, line) if node.is_first else f"{node.name}: {line}")
        node.position, node.code = output.position, output.code
        if output.code and not node.is_first:
            self._say(f"{node.name}: coordinator join has {_describe_end(output.code)}")
            if output.code < 0 and not self._num_signals:
                if code := self._count_loss():
                    return code
                self._join(node)
        return None

    def _name_page(self, node: _Node, line: str) -> str:
        """Add to the page's line how to reach it from here."""
        match = _PAGE.match(line)
        if match is None or node.view is None or node.view.host == socket.gethostname():
            return line
        port = match[1]
        return f"{line} on {_describe_place(node)}; from elsewhere: ssh -L {port}:127.0.0.1:{port} {node.view.address}"

    def _pass_on_signals(self) -> None:
        """Ask the coordinator to end as this process was asked to; the third request ends all at once."""
        while self._signals:
            number = self._signals.pop(0)
            if self._num_signals > 2:
                raise KeyboardInterrupt
            with contextlib.suppress(self._ray.exceptions.RayError):
                self._ray.get(self._nodes[0].actor.send_signal.remote(number), timeout=_CALL_S)

    def _judge(self, code: int) -> int | None:
        """Decide what follows the coordinator's end: an exit code, or None to resume the run."""
        if code in (OK, BAD_INPUT, INTERRUPTED) or self._num_signals:
            self._await_others(_END_S)
            return code if code >= 0 else INTERRUPTED
        self._stop_all()
        if code < 0:
            self._say(f"the coordinator has {_describe_end(code)}; the run is resumed")
            return self._count_loss()
        if not self._has_lost_since:
            return code
        self._say(f"the coordinator has {_describe_end(code)} after a node was lost; the run is resumed")
        return None

    def _await_others(self, seconds: float) -> None:
        """Give the other nodes time to hear of the run's end."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self._num_signals < 3:
            if all(node.code is not None or node.view is None for node in self._nodes):
                return
            self._look()

    def _stop_all(self) -> None:
        """End the processes of all nodes that are there."""
        calls = []
        for node in self._nodes:
            if node.view is not None:
                with contextlib.suppress(Exception):
                    calls.append(node.actor.stop.remote())
            node.reset()
        if calls:
            with contextlib.suppress(Exception):  # a node that is gone has ended them
                self._ray.wait(calls, num_returns=len(calls), timeout=_KILL_S)

    def _find_problem(self) -> str:
        """Return why the nodes cannot run this, or nothing."""
        for node in self._nodes:
            if node.view is None:
                continue
            place = f"{node.name} ({_describe_place(node)})"
            if node.view.version != version():
                return f"{place} has Tandem {node.view.version}, and this command is of {version()}"
            if node.view.missing:
                return f"{place} does not see {node.view.missing}: all nodes must, under the same path"
        return ""


def _order_for(ray: Any, order: NodeOrder) -> NodeOrder:
    """Return the order for this cluster: where Ray copies a working directory to its nodes, each works in its own.

    Raises `ConfigError` for a run folder within that copy, which no other node sees.
    """
    if not ray.get_runtime_context().runtime_env.get("working_dir"):
        return order
    if not Path(order.run).is_absolute():
        raise ConfigError(
            f"logger.log_dir: {order.run}, but each node has a copy of the working directory; name a folder that all "
            "nodes see by its whole path"
        )
    return msgspec.structs.replace(order, folder="")


def _describe_place(node: _Node) -> str:
    return f"{node.view.address}, {node.view.host}" if node.view is not None else "nowhere yet"


def _describe_end(code: int) -> str:
    return f"been killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
