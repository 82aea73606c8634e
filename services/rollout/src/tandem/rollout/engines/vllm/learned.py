"""The layout of any vLLM model, learned from vLLM's own loader.

Checkpoints are made up whose values are numbers: of the tensor, and of the index along each of its dimensions, digit by
digit. vLLM's loader puts them into its parameters. What is then read there says where each element came from, and
`tandem.rollout.engines.vllm.landed_slices` fits slices to it. A checkpoint of random values, loaded as well, proves
them: what the slices copy is what the loader leaves, bit for bit.

A checkpoint has the names and forms that files have, which Transformers makes of a trainer's tensors as it does when it
saves them. So slices are of a trainer's tensors, whatever is renamed, split or fused on the way.

What is computed shows itself, and needs a rule in `COMPUTED`. Digits are from 1 to 255, which all element types of
weights hold exactly; 0 is what no load has written.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import torch

from tandem.common.errors import ModelError
from tandem.common.files import replace_file
from tandem.config.models.hf_config import find_model_class, load_config
from tandem.refit.adapters.huggingface import as_checkpoint
from tandem.refit.digests.task import digest_layout
from tandem.refit.layout import Layout, LayoutBuilder
from tandem.refit.weights import Weights, device_name, host_name
from tandem.rollout.engines.vllm.landed_slices import NO_TENSOR, LandedSlice, fit_slices

_LARGEST_DIGIT = 255
_LAYER = re.compile(r"^(.*?\blayers\.\d+)\.")
_POOL = 1_048_583
"""Random numbers, repeated in larger tensors: a prime, so that no two rows are alike."""
_CHUNK = 2**20
"""Elements that are decoded at once where all are."""
_NAMED = 3
"""Names in a message."""
_FORMAT = 1
"""Number of the format of cached maps."""


Convert: TypeAlias = Callable[[dict[str, torch.Tensor]], Mapping[str, torch.Tensor]]


class ComputedKind(msgspec.Struct, frozen=True):
    """A parameter that vLLM's loader computes from a tensor, element by element."""

    parameter: str
    """Last part of the parameter's name."""
    tensor: str
    """Last part of the tensor's name."""
    compute: Callable[[torch.Tensor], torch.Tensor]
    invert: Callable[[torch.Tensor], torch.Tensor]
    """Function that gives what to compute an element from, so that it becomes a number's negative or the number."""

    def takes(self, parameter: str) -> bool:
        """Return whether a parameter of this name is of this kind."""
        return parameter.rpartition(".")[2] == self.parameter


COMPUTED = (
    # State-space layers: a state decays by exp(A), and checkpoints have A's logarithm (Gu and Dao 2023,
    # arXiv:2312.00752, section 3.6).
    ComputedKind("A", "A_log", compute=lambda logs: -logs.float().exp(), invert=lambda digits: digits.log()),
)


class LearnedMap(msgspec.Struct, frozen=True):
    """Where a worker's parameters come from."""

    slices: dict[str, tuple[LandedSlice, ...]]
    """Slices by parameter; tensors by their place in the sorted names, from 1."""
    computed: dict[str, int]
    """Computed parameters, whose slices are of what they are computed from, with the number of their kind."""


class LearnedParameters:
    """A worker's parameters with the map that was learned of them."""

    def __init__(self, tensors: Mapping[str, tuple[int, ...]], learned_map: LearnedMap) -> None:
        self.map = learned_map
        self._tensors = dict(sorted(tensors.items()))
        self._origins: dict[str, torch.Tensor] = {}
        """Tensors that parameters are computed from, by the names of these."""
        self._proof: list[int] = []
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._loaded: frozenset[str] = frozenset()
        self._attributes: set[str] = set()
        self._derived: set[str] = set()

    def keep_proof(self, model: Any, live: Mapping[str, torch.Tensor], origins: Mapping[str, torch.Tensor]) -> None:
        """Remember what was loaded into a model to prove the map, and what computed parameters were computed from."""
        self._attributes = _list_attributes(model)
        self._origins = dict(origins)
        self._loaded = frozenset(live)
        self._shapes = {name: tuple(live[name].shape) for name in self.map.slices}
        layout, storages = self._describe(live)
        self._proof = digest_layout(layout, storages).tolist()

    def note_derived(self, model: Any, *packed_layers: Any) -> None:
        """Note what vLLM has made of the weights of a model, just after it has processed them.

        What it made of `packed_layers` is made anew after each refit.
        """
        ids = {id(layer) for layer in packed_layers}
        packed_names = tuple(f"{name}." for name, module in model.named_modules() if id(module) in ids)
        derived = _list_attributes(model) - self._attributes
        self._derived = {name for name in derived if not name.startswith(packed_names)}

    def weights(self, parameters: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor]) -> Weights:
        """Return the parameters as weights of this worker, all zero.

        Args:
            parameters: what kernels read, by name, after vLLM has processed what it loaded.
            buffers: all of the model's, of which a loader may write some.

        Raises:
            ModelError: vLLM has rearranged what it loaded, or has computed something from it.

        """
        live = {**buffers, **parameters}
        derived = sorted({*(parameters.keys() - self._loaded), *self._derived})
        if derived:
            raise ModelError(f"vLLM makes {_list(derived)} of what it has loaded, and no refit would make it anew")
        for name, shape in self._shapes.items():
            actual = tuple(live[name].shape) if name in live else None
            if actual != shape:
                became = "is gone" if actual is None else f"becomes {actual}"
                raise ModelError(f"vLLM rearranges {name} after it has loaded it: {shape} {became}")
            if not live[name].is_contiguous():
                raise ModelError(f"vLLM has {name} with strides {live[name].stride()}, which no refit writes")
        layout, storages = self._describe(live)
        digests = digest_layout(layout, storages).tolist()
        changed = [
            tensor.name
            for tensor, now, before in zip(layout.tensors, digests, self._proof, strict=True)
            if now != before
        ]
        if changed:
            raise ModelError(f"vLLM rearranges {_list(changed)} after it has loaded it, so that no refit can write it")
        for name in self._shapes:
            live[name].data.zero_()
        for origin in self._origins.values():
            origin.zero_()
        return Weights(as_checkpoint(layout), storages)

    def compute(self, live: Mapping[str, torch.Tensor]) -> None:
        """Compute the parameters that are not copied from what refits have written."""
        for name, kind in self.map.computed.items():
            live[name].data.copy_(COMPUTED[kind].compute(self._origins[name]))

    def _describe(self, live: Mapping[str, torch.Tensor]) -> tuple[Layout, dict[str, torch.Tensor]]:
        """Return the layout of all tensors, also those of other workers, with the memory that it speaks of."""
        homes = {name: self._origins.get(name, live[name]) for name in self.map.slices}
        names = list(self._tensors)
        dtypes: dict[int, torch.dtype] = {}
        for parameter, slices in self.map.slices.items():
            for landed in slices:
                if dtypes.setdefault(landed.tensor, homes[parameter].dtype) != homes[parameter].dtype:
                    raise ModelError(f"vLLM has {names[landed.tensor - 1]} in two element types")
        builder = LayoutBuilder(host_name(), device_name(next(iter(live.values())).device))
        for number, (name, shape) in enumerate(self._tensors.items(), start=1):
            builder.tensor(name, shape, str(dtypes.get(number, torch.float32)).removeprefix("torch."))
        for parameter, slices in self.map.slices.items():
            size = homes[parameter].element_size()
            storage = builder.storage(parameter, homes[parameter].numel() * size)
            for landed in slices:
                strides = [step * size for step in landed.strides]
                builder.add(landed.tensor - 1, landed.box, storage, landed.offset * size, strides)
        return builder.build(), homes


@contextlib.contextmanager
def learn_layout(vllm_config: Any, rank: int) -> Iterator[list[LearnedParameters | ModelError]]:
    """Have the layout of a model that is loaded in this block without weights be learned; give it, or why not.

    Afterwards the model has random values, which vLLM then processes as it does a checkpoint's.
    """
    with learn_by(vllm_config.model_config, functools.partial(_learn, vllm_config=vllm_config, rank=rank)) as learned:
        yield learned


@contextlib.contextmanager
def learn_by(
    of_config: Any, learn: Callable[[Any], LearnedParameters]
) -> Iterator[list[LearnedParameters | ModelError]]:
    """Have `learn` be asked of the model with a configuration of vLLM's that is loaded in this block; give its answer.

    `learn` may raise `ModelError`, which is given then.
    """
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    fill = DummyModelLoader.load_weights
    learned: list[LearnedParameters | ModelError] = []

    def learn_and_fill(loader: Any, model: Any, model_config: Any) -> None:
        if model_config is not of_config:
            fill(loader, model, model_config)
            return
        try:
            with torch.no_grad():
                learned.append(learn(model))
        except ModelError as error:  # which another process would say nothing of
            learned.append(error)
            fill(loader, model, model_config)

    DummyModelLoader.load_weights = learn_and_fill
    try:
        yield learned
    finally:
        DummyModelLoader.load_weights = fill


def _learn(model: Any, vllm_config: Any, rank: int) -> LearnedParameters:
    """Return what a worker's parameters hold, from the cache if it is proven. Raises `ModelError`."""
    from transformers.core_model_loading import revert_weight_conversion

    settings = vllm_config.model_config
    overrides = {} if callable(settings.hf_overrides) else dict(settings.hf_overrides)
    skeleton = make_skeleton(Path(settings.model), overrides)
    tensors = tensors_of(skeleton)
    probe = LoaderProbe(model, tensors, functools.partial(revert_weight_conversion, skeleton))
    learned_map, proof = learn_map(probe, cache_path(vllm_config, skeleton.config, rank))
    learned = LearnedParameters(tensors, learned_map)
    learned.keep_proof(model, *proof)
    return learned


def learn_map(
    probe: LoaderProbe, path: Path
) -> tuple[LearnedMap, tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]]:
    """Return the map of a model with what `LoaderProbe.prove` says of it, from a file of the cache if that is proven.

    Raises `ModelError`.
    """
    learned_map = _read_map(path)
    proof = None
    if learned_map is not None:
        with contextlib.suppress(RuntimeError, IndexError):  # the file is of another model, or damaged
            proof = probe.prove(learned_map)
    if learned_map is None or proof is None:
        learned_map = probe.learn(by_lines=True)
        proof = probe.prove(learned_map)
        if proof is None:  # lines do not say everything: read every element
            learned_map = probe.learn(by_lines=False)
            proof = probe.prove(learned_map)
        if proof is None:
            raise ModelError("vLLM's loader does more than to copy a checkpoint's elements, so no refit can write them")
        _write_map(path, learned_map)
    return learned_map, proof


def cache_path(vllm_config: Any, config: Any, rank: int, drafts: str = "") -> Path:
    """Return where the map of this configuration, these releases and parallel sizes is kept, or that of what drafts."""
    import transformers
    import vllm

    parallel = vllm_config.parallel_config
    key = {
        "format": _FORMAT,
        "config": config.to_json_string(use_diff=False),
        "vllm": vllm.__version__,
        "transformers": transformers.__version__,
        "dtype": str(vllm_config.model_config.dtype),
        "tensor_parallel": parallel.tensor_parallel_size,
        "pipeline_parallel": parallel.pipeline_parallel_size,
        "expert_parallel": parallel.enable_expert_parallel,
        "rank": rank,
        **({"drafts": drafts} if drafts else {}),
    }
    name = hashlib.blake2b(msgspec.json.encode(key), digest_size=16).hexdigest()
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "tandem" / "vllm_layouts" / f"{name}.msgpack"


def _read_map(path: Path) -> LearnedMap | None:
    try:
        return msgspec.msgpack.decode(path.read_bytes(), type=LearnedMap)
    except (OSError, msgspec.MsgspecError):
        return None


def _write_map(path: Path, learned_map: LearnedMap) -> None:
    """Keep a map for the next engine of this kind; where that cannot be, it learns again."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, msgspec.msgpack.encode(learned_map))


class ParameterViews:
    """Views of parameters that modules keep beside them, such as the weights of a convolution as a matrix.

    A refit may have a parameter read a trainer's memory, where these views would not follow it.
    """

    def __init__(self, model: Any) -> None:
        """Find the views in a model of vLLM's."""
        homes = {each.untyped_storage().data_ptr(): each for each in model.parameters() if each.numel()}
        self._views = [
            (module, name, home, view.shape, view.stride(), view.storage_offset() - home.storage_offset())
            for module in model.modules()
            for name, view in [*vars(module).items(), *vars(module)["_buffers"].items()]
            if isinstance(view, torch.Tensor)
            and view.numel()
            and (home := homes.get(view.untyped_storage().data_ptr())) is not None
        ]

    def follow(self) -> None:
        """Have every view read where its parameter is now."""
        for module, name, home, shape, strides, offset in self._views:
            setattr(module, name, home.data.as_strided(shape, strides, home.storage_offset() + offset))


class LandedNumbers:
    """The numbers that landed in a parameter, digit by digit, decoded where they are read.

    They are 0 where none was loaded, and negative where what is there is no number.
    """

    def __init__(self, decode: Callable[[torch.Tensor], torch.Tensor], first: int = 1) -> None:
        """Take what makes digits of what a parameter holds, and the least number that was loaded."""
        self._decode, self._first = decode, first
        self._digits: list[torch.Tensor] = []
        """Values of the parameter after each load, least digits first."""

    def append(self, value: torch.Tensor) -> None:
        """Add the next digit: what a parameter holds, which is copied."""
        self._digits.append(value.clone(memory_format=torch.contiguous_format))

    @property
    def shape(self) -> torch.Size:
        """The parameter's shape."""
        return self._digits[0].shape

    def __getitem__(self, region: Any) -> torch.Tensor:
        """Return the numbers of a region, as int32."""
        return self._join([value[region] for value in self._digits])

    def distinct(self) -> list[int]:
        """Return every number that there is, in ascending order."""
        if all(bool((value == value.flatten()[0]).all()) for value in self._digits):
            return self[(slice(0, 1),) * len(self.shape)].flatten().tolist()[:1]
        counts = torch.zeros(0, dtype=torch.int64)
        flat = [value.flatten() for value in self._digits]
        for first in range(0, len(flat[0]), _CHUNK):
            number_N = self._join([value[first : first + _CHUNK] for value in flat])
            more = torch.bincount(number_N.long().cpu() + 1)
            longer, shorter = (more, counts) if len(more) > len(counts) else (counts, more)
            longer[: len(shorter)] += shorter
            counts = longer
        return (counts.nonzero().flatten() - 1).tolist()

    def _join(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        digits = [self._decode(value) for value in values]
        number_S = torch.where(digits[0] > 0, 1, digits[0])
        scale = 1
        for digit_S in digits:
            is_number = (number_S > 0) & (digit_S > 0)
            is_neither = (number_S == NO_TENSOR) & (digit_S == NO_TENSOR)
            number_S = torch.where(is_number, number_S + (digit_S - 1) * scale, -1)
            number_S[is_neither] = NO_TENSOR
            scale *= _LARGEST_DIGIT
        return number_S + (self._first - 1) if self._first != 1 else number_S


class LoaderProbe:
    """vLLM's loader of one worker, asked by checkpoints that are made up."""

    def __init__(self, model: Any, shapes: Mapping[str, tuple[int, ...]], convert: Convert) -> None:
        """Take a model of vLLM's whose weights have not been loaded.

        Args:
            model: the model.
            shapes: of a trainer's tensors.
            convert: function that makes tensors of a checkpoint of some of them, by name.

        """
        self._model, self._convert = model, convert
        self._shapes = dict(sorted(shapes.items()))
        parameters = dict(model.named_parameters())
        memory = {each.untyped_storage().data_ptr() for each in parameters.values()}
        buffers = {
            name: buffer
            for name, buffer in model.named_buffers()
            if buffer.is_floating_point() and buffer.numel() and buffer.untyped_storage().data_ptr() not in memory
        }
        self._buffers = {name: each.clone() for name, each in buffers.items()}
        self._live: dict[str, torch.Tensor] = {
            **{name: value for name, value in parameters.items() if value.is_floating_point() and value.numel()},
            **buffers,
        }
        self._kinds = {name: number for name in parameters for number, kind in enumerate(COMPUTED) if kind.takes(name)}
        self._is_initialised: set[str] = set()
        self._is_contiguous = False

    def learn(self, *, by_lines: bool) -> LearnedMap:
        """Return where the worker's parameters come from, from lines through them, for `prove` to say whether that is
        right, or from every element. Raises `ModelError` for what is computed without a rule."""
        slices: dict[str, tuple[LandedSlice, ...]] = {}
        computed: list[str] = []
        numbers = {name: number for number, name in enumerate(self._shapes, start=1)}
        for tensors, parameters in self._find_groups():
            for name, landed in self._learn_group(tensors, parameters, by_lines=by_lines):
                if landed is None:
                    computed.append(name)
                elif landed:
                    slices[name] = tuple(
                        msgspec.structs.replace(each, tensor=numbers[tensors[each.tensor - 1]]) for each in landed
                    )
        if computed:
            raise ModelError(f"vLLM computes {_list(sorted(computed))} from the checkpoint, and no rule says how")
        self._restore(slices)
        return LearnedMap(slices, {name: kind for name, kind in self._kinds.items() if name in slices})

    def prove(self, learned_map: LearnedMap) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]] | None:
        """Load random values; return all parameters, with what computed ones are computed from, or None if the map
        does not give the same, bit for bit."""
        names = list(self._shapes)
        for name, parameter in self._live.items():
            if name not in self._buffers or name in learned_map.slices:
                parameter.data.zero_()
        if not learned_map.slices.keys() <= self._live.keys():
            return None
        waits_for = {
            name: {_group_of(names[landed.tensor - 1]) for landed in slices}
            for name, slices in learned_map.slices.items()
        }
        origins: dict[str, torch.Tensor] = {}
        copies: dict[str, torch.Tensor] = {}
        for group in dict.fromkeys(map(_group_of, names)):
            values = {name: self._random(name) for name in names if _group_of(name) == group}
            self._load(values)
            for name in [name for name, groups in waits_for.items() if group in groups]:
                live = self._live[name].data
                copy = copies.setdefault(name, torch.zeros_like(live))
                for landed in learned_map.slices[name]:
                    value = values.get(names[landed.tensor - 1])
                    if value is not None:
                        landed.view(copy).copy_(value[landed.box.region])
                waits_for[name].discard(group)
                if waits_for[name]:
                    continue
                del copies[name]
                kind = learned_map.computed.get(name)
                if kind is not None:
                    origins[name], copy = copy, COMPUTED[kind].compute(copy).to(copy.dtype)
                if not torch.equal(_bits(copy), _bits(live)):
                    return None
        self._restore(learned_map.slices)
        return self._live, origins

    def _find_groups(self) -> list[tuple[list[str], list[str]]]:
        """Return tensors whose elements lie in the same parameters, with these: those of a layer, mostly."""
        groups = list(dict.fromkeys(map(_group_of, self._shapes)))
        numbers = {name: number for number, name in enumerate(groups, start=1)}
        landed = self._read_digits(
            list(self._shapes), list(self._live), lambda name: torch.tensor(numbers[_group_of(name)]), len(groups)
        )
        members_of = {name: {name} for name in groups}
        parameters: dict[str, list[str]] = {}
        unclear: list[str] = []
        for name in list(landed):
            distinct = landed.pop(name).distinct()
            if distinct[0] < 0:
                unclear.append(name)
            sources = [groups[number - 1] for number in distinct if number > 0]
            if not sources:
                continue
            first, *further = sources
            parameters.setdefault(first, []).append(name)
            for group in further:
                members_of[first] |= members_of[group]
            for group in list(members_of[first]):
                members_of[group] = members_of[first]
        return [
            (
                [name for name in self._shapes if _group_of(name) in members],
                [*dict.fromkeys([name for member in members for name in parameters.get(member, ())] + unclear)],
            )
            for members in {id(members): members for members in members_of.values()}.values()
        ]

    def _learn_group(
        self, tensors: Sequence[str], parameters: Sequence[str], *, by_lines: bool
    ) -> Iterator[tuple[str, list[LandedSlice] | None]]:
        """Yield the slices of each parameter that holds any of the tensors; None where it is computed."""
        if not parameters:
            return
        numbers = {name: number for number, name in enumerate(tensors, start=1)}
        number_of = self._read_digits(tensors, parameters, lambda name: torch.tensor(numbers[name]), len(tensors))
        num_dims = {numbers[name]: len(self._shapes[name]) for name in tensors}
        index_of: dict[str, list[LandedNumbers]] = {name: [] for name in parameters}
        for dim in range(max(num_dims.values())):
            landed = self._read_digits(
                tensors,
                parameters,
                functools.partial(self._places, dim),
                max((self._shapes[name][dim] for name in tensors if dim < len(self._shapes[name])), default=1),
                first=0,
            )
            for name, index_S in landed.items():
                index_of[name].append(index_S)
        for name in parameters:
            yield name, _fit(number_of.pop(name), index_of.pop(name), num_dims, by_lines=by_lines)

    def _read_digits(
        self,
        tensors: Sequence[str],
        parameters: Sequence[str],
        number: Callable[[str], torch.Tensor],
        largest: int,
        first: int = 1,
    ) -> dict[str, LandedNumbers]:
        """Load numbers in the place of tensors, digit by digit; return what lands in each parameter.

        Args:
            tensors: those to load.
            parameters: those to read.
            number: function that gives a tensor's numbers, from 1 on, of a shape that broadcasts to its own.
            largest: of all numbers.
            first: what 1 is read as.

        """
        landed = {name: LandedNumbers(functools.partial(self._decode, name), first) for name in parameters}
        scale = 1
        while True:
            for name in parameters:
                self._live[name].data.zero_()
            self._load(
                {
                    name: ((number(name) - 1) // scale % _LARGEST_DIGIT + 1).float().expand(self._shapes[name])
                    for name in tensors
                },
                has_digits=True,
            )
            for name in parameters:
                landed[name].append(self._live[name].data)
            scale *= _LARGEST_DIGIT
            if scale >= largest:
                return landed

    def _decode(self, name: str, value_S: torch.Tensor) -> torch.Tensor:
        """Return the digits that are values of a parameter, as int32; -1 where there is none."""
        value_S = value_S.float()
        if name in self._kinds:
            value_S = value_S.abs()
            value_S = torch.where((value_S - value_S.round()).abs() < 1e-2, value_S.round(), value_S)
        digit_S = value_S.round()
        is_digit = (digit_S == value_S) & (digit_S >= 0) & (digit_S <= _LARGEST_DIGIT)
        return torch.where(is_digit, digit_S, -1).int()

    def _load(self, values: Mapping[str, torch.Tensor], *, has_digits: bool = False) -> None:
        """Have vLLM load these tensors. Raises `ModelError` if its loader refuses one."""
        if has_digits:
            values = {name: self._encode(name, value) for name, value in values.items()}
        try:
            checkpoint = self._convert(dict(values))
            loaded = self._model.load_weights(iter(checkpoint.items()))
        except (KeyError, ValueError, AttributeError, AssertionError, RuntimeError, TypeError) as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            raise ModelError(f"vLLM's loader of {type(self._model).__name__} refuses a checkpoint: {reason}") from error
        self._is_initialised |= set(loaded or ())

    def _encode(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """Return digits as what a computed parameter makes the same digits of, if the tensor is for one."""
        for kind in {COMPUTED[number] for number in self._kinds.values()}:
            if name.rpartition(".")[2] == kind.tensor:
                return kind.invert(value)
        return value

    def _places(self, dim: int, name: str) -> torch.Tensor:
        """Return indices along a tensor's dimension, from 1 on, of a shape that broadcasts; 1 where it has none."""
        shape = self._shapes[name]
        if dim >= len(shape):
            return torch.ones((1,) * len(shape), dtype=torch.int64)
        sizes = [-1 if axis == dim else 1 for axis in range(len(shape))]
        return torch.arange(1, shape[dim] + 1).reshape(sizes)

    def _random(self, name: str) -> torch.Tensor:
        """Return random values for a tensor, always the same."""
        shape = self._shapes[name]
        pool = _random_pool()
        first = zlib.crc32(name.encode()) % _POOL
        num = int(torch.Size(shape).numel())
        return pool.roll(-first).repeat(-(-num // _POOL))[:num].reshape(shape)

    def _restore(self, written: Mapping[str, object]) -> None:
        """Put back the buffers that no load writes, and check that every parameter has something."""
        for name, value in self._buffers.items():
            if name not in written:
                self._live[name].data.copy_(value)
        unwritten = sorted(self._live.keys() - self._buffers.keys() - set(written) - self._is_initialised)
        if unwritten:
            raise ModelError(f"vLLM's loader leaves {_list(unwritten)} as it is, and no refit would write it")


def tensors_of(skeleton: Any) -> dict[str, tuple[int, ...]]:
    """Return the shapes of what a trainer of this model holds: parameters, tied ones once, and buffers that are
    saved."""
    saved = skeleton.state_dict().keys()
    tensors = dict(skeleton.named_parameters())
    tensors |= {name: buffer for name, buffer in skeleton.named_buffers() if name in saved}
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def make_skeleton(model_folder: Path, overrides: Mapping[str, Any]) -> Any:
    """Return Transformers' model of a folder without memory for its weights. Raises `ModelError`."""
    from transformers.initialization import no_init_weights

    try:
        config = load_config(str(model_folder), overrides)
        with torch.device("meta"), no_init_weights():
            skeleton = find_model_class(config).from_config(config, trust_remote_code=False)
        skeleton.tie_weights()
    except (ValueError, KeyError, OSError, ImportError) as error:
        raise ModelError(f"{model_folder}: Transformers cannot build it: {' '.join(str(error).split())}") from error
    return skeleton


def _fit(
    number_S: LandedNumbers, indices_DS: Sequence[LandedNumbers], num_dims: Mapping[int, int], *, by_lines: bool
) -> list[LandedSlice] | None:
    """Return the slices of a parameter; None where it is computed."""
    if by_lines:
        with contextlib.suppress(KeyError):  # something computed, or an element of no tensor: what it is, all say
            slices = fit_slices(number_S, indices_DS, num_dims, by_lines=True)
            if all(min(landed.start, default=0) >= 0 for landed in slices):
                return slices
    numbers, indices = number_S[...], [index_S[...] for index_S in indices_DS]
    is_copied = (numbers >= 0) & (numbers <= len(num_dims))
    for index in indices:
        is_copied &= (index >= 0) | (numbers == NO_TENSOR)
    return fit_slices(numbers, indices, num_dims) if bool(is_copied.all()) else None


@functools.cache
def _random_pool() -> torch.Tensor:
    return torch.randn(_POOL, generator=torch.Generator("cpu").manual_seed(0), device="cpu", dtype=torch.float32)


def _group_of(name: str) -> str:
    match = _LAYER.match(name)
    return match[1] if match else ""


def _bits(value: torch.Tensor) -> torch.Tensor:
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return value.view(kinds[value.element_size()])


def _list_attributes(model: Any) -> set[str]:
    """Return the tensors that a model's modules, and what computes their attention, have besides parameters."""
    return {
        f"{name}.{attribute}"
        for name, module in model.named_modules()
        for holder in (module, getattr(module, "impl", None))
        if holder is not None
        for attribute, value in vars(holder).items()
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.numel() > 1
    }


def _list(names: Sequence[str]) -> str:
    """Return some names for a message."""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
