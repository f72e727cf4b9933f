"""Reads a torch.distributed.checkpoint directory into an offloaded model, tensor by tensor.

The writing program, its number of ranks and its sharding may differ: the planner of PyTorch joins
each tensor from its shards. Everything that the metadata shows is checked before the first write.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from infinity.checkpoint.dcp.export_state import defaults_of_torch, in_one_process
from infinity.checkpoint.huggingface.import_weights import refuse_codes
from infinity.checkpoint.run.contents import StateTensor, kept_tensors, put_buffer
from infinity.checkpoint.run.load import fill_state_kind
from infinity.engine.engine import Engine
from infinity.engine.registry import engine_of
from infinity.engine.state_access import StateAccess
from infinity.errors import ConfigError, StorageError, UnsupportedError, corrupt, listed
from infinity.optimizers.offloaded import OffloadedOptimizer
from infinity.state.units import StateKind, moments_of
from infinity.streaming.gradients.sums import in_memory_order

_NAME = "infinity.checkpoint.import_dcp"
# Prefixes of weights in files of other programs; the first one that has all weights is used.
_MODEL_PREFIXES = ("model.", "", "state_dict.", "app.model.", "model.module.")
_OPTIMIZER_PREFIXES = ("optimizer.", "optim.", "app.optim.", "app.optimizer.")


def import_dcp(
    directory: str | os.PathLike[str], model: nn.Module, optimizer: OffloadedOptimizer | None = None
) -> None:
    """Reads weights and, with `optimizer`, moments, step counts and settings into their tiers.

    directory: written by `torch.distributed.checkpoint.save` for `{"model": ..., "optimizer": ...}`
        ("optim" and a bare model too), sharded or not, or by `export_dcp`
    model: offloaded; the same names and shapes, in any precision
    optimizer: the optimizer of infinity for the saved one, with the same groups of parameters

    The fp32 master gets `master.<name>` if the directory has it, else the unrounded value of the
    weight. Beside the host budget, memory holds one tensor and its largest shard. Gradients are
    dropped. All ranks call it. The metadata is read with pickle, as PyTorch does: read only
    directories that you trust.

    Raises ConfigError if names, shapes or groups do not fit, UnsupportedError for moments of eight
    bits, CorruptionError for damaged metadata, all before anything changes. A data file that cannot
    be read raises CorruptionError or StorageError; the model is a mixture then.
    """
    found = _Directory(Path(directory))
    engine = engine_of(model)
    with engine.ranks.collective_section(_NAME):  # An error on any rank comes before any change.
        with engine.at_rest(_NAME):
            pass
        weights = found.find_weights(model)
        buffers = dict(found.find_buffers(model))
        named = None if optimizer is None else found.named_optimizer(optimizer)
        moments = {} if optimizer is None else found.find_moments(engine, optimizer)
    for name, key in weights.items():
        engine.write_parameter(name, found.read(key))
    with torch.no_grad():
        for key, buffer in buffers.items():
            put_buffer(buffer, found.read(key))
    with engine.at_rest(_NAME) as state:
        state.forget_gradients()
        if optimizer is not None:
            _load_moments(state, found, moments)
    if optimizer is not None and named is not None:
        optimizer.restore_named_state(named)


def _load_moments(
    state: StateAccess, found: _Directory, moments: Mapping[tuple[str, str], str]
) -> None:
    """Reads the moments that the directory has; the others become zeros."""

    @functools.lru_cache(maxsize=1)  # A tensor is filled part by part.
    def values_of(tensor: StateTensor) -> torch.Tensor:
        key = moments[tensor.spec.name, tensor.state_kind.value]
        return in_memory_order(found.read(key).float(), tensor.full)

    def fill(tensor: StateTensor, start: int, target: torch.Tensor) -> None:
        start += tensor.start
        target.copy_(values_of(tensor)[start : start + target.numel()])

    for unit, tensors in kept_tensors(state):
        for state_kind in unit.moments.kinds:
            saved = [t for t in tensors if (t.spec.name, state_kind.value) in moments]
            fill_state_kind(state, unit, state_kind, saved, fill)


class _Directory:
    """Finds tensors in the metadata and reads them by key. Holds no tensor."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if not (path / ".metadata").is_file():
            raise ConfigError(
                f"{path} has no .metadata; expected a torch.distributed.checkpoint directory"
            )
        try:
            metadata = FileSystemReader(path).read_metadata()
            if not isinstance(metadata, Metadata):
                raise TypeError(type(metadata).__name__)
        except OSError as error:
            raise StorageError(error.errno or 0, operation="read", path=str(path)) from None
        except Exception as error:  # Damaged bytes may make pickle raise any error.
            raise corrupt(str(path / ".metadata"), f"it cannot be unpickled: {error}") from error
        self._metadata = metadata
        self._items = metadata.state_dict_metadata
        self.model_prefix = ""

    def read(self, key: str) -> torch.Tensor:
        """Returns a fresh, full host tensor in the saved dtype. Raises CorruptionError."""
        value: torch.Tensor = self._load({key: self._empty(key)})[key]
        return value

    def _empty(self, key: str) -> torch.Tensor:
        item = self._items[key]
        assert isinstance(item, TensorStorageMetadata)
        return torch.empty(item.size, dtype=item.properties.dtype, device="cpu")

    def _load(self, wanted: dict[str, Any]) -> dict[str, Any]:
        """Fills the tensors of `wanted`, and gives the other keys the objects that were saved."""
        planner = DefaultLoadPlanner(flatten_state_dict=False)
        reader = FileSystemReader(self.path)
        reader.read_metadata = lambda *_, **__: self._metadata  # type: ignore[method-assign]
        try:
            with in_one_process():
                dcp.load(wanted, storage_reader=reader, planner=planner, no_dist=True)
        except Exception as error:  # Damaged bytes may make torch raise any error.
            what = f"{listed(list(wanted))} cannot be read"
            raise corrupt(str(self.path), f"{what}: {error!r}") from error
        return planner.state_dict

    # -- Weights -----------------------------------------------------------------------------------

    def find_weights(self, model: nn.Module) -> dict[str, str]:
        """Returns the key of every parameter, that of its fp32 master if there is one.

        Raises ConfigError for names, shapes or dtypes that do not fit.
        """
        names: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
        wanted = {group[0]: group for group in names.values()}
        keys_under = {
            prefix: {first: self._one_of(prefix, group) for first, group in wanted.items()}
            for prefix in _MODEL_PREFIXES
        }
        # The first of several with all weights, or with most of them.
        self.model_prefix, keys = min(
            keys_under.items(), key=lambda under: [*under[1].values()].count(None)
        )
        lacks = [first for first, key in keys.items() if key is None]
        if lacks:
            tensors = [key for key in self._items if self._is_tensor(key)]
            raise ConfigError(
                f"{self.path} lacks {listed(lacks)} of the model's "
                f"{len(wanted)} parameters; it has {len(tensors)} tensors, e.g. {tensors[:3]}. "
                "Is it a checkpoint of this model?"
            )
        parameters, found = dict(model.named_parameters()), {}
        for first, key in keys.items():
            assert key is not None
            shape = tuple(parameters[first].shape)
            self._check_shape(key, shape, first)
            dtype = self._items[key].properties.dtype  # type: ignore[union-attr]
            refuse_codes(self.path, first, parameters[first].dtype, [(key, dtype)])
            master = f"master.{first}"
            found[first] = master if self._is_tensor(master) else key
            self._check_shape(found[first], shape, first)
        return found

    def find_buffers(self, model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields (key, buffer) for the buffers that the directory has. Raises ConfigError."""
        for name, buffer in model.named_buffers():
            key = self.model_prefix + name
            if self._is_tensor(key):
                self._check_shape(key, tuple(buffer.shape), name)
                yield key, buffer

    def _one_of(self, prefix: str, names: list[str]) -> str | None:
        keys = [prefix + name for name in names]
        return next((key for key in keys if self._is_tensor(key)), None)

    def _is_tensor(self, key: str) -> bool:
        return isinstance(self._items.get(key), TensorStorageMetadata)

    def _check_shape(self, key: str, shape: tuple[int, ...], name: str) -> None:
        item = self._items[key]
        assert isinstance(item, TensorStorageMetadata)
        if tuple(item.size) != shape:
            raise ConfigError(
                f"{self.path}: {key!r} has the shape {tuple(item.size)}, the model expects "
                f"{shape} for {name!r}"
            )

    # -- Optimizer ---------------------------------------------------------------------------------

    def _optimizer_prefix(self) -> str:
        for prefix in _OPTIMIZER_PREFIXES:
            starts = (f"{prefix}state.", f"{prefix}param_groups.")
            if any(key.startswith(starts) for key in self._items):
                return prefix
        raise ConfigError(
            f"{self.path} has no state of an optimizer under "
            f"{', '.join(p.rstrip('.') for p in _OPTIMIZER_PREFIXES)}; leave `optimizer` out to "
            "bring back the weights alone"
        )

    def find_moments(
        self, engine: Engine, optimizer: OffloadedOptimizer
    ) -> dict[tuple[str, str], str]:
        """Returns the key by (parameter, kind) for parameters that have been updated.

        Raises ConfigError for the state of another optimizer, UnsupportedError for moments of eight
        bits in the model.
        """
        prefix, moments = (
            self._optimizer_prefix(),
            moments_of(engine.config.optimizer, engine.config.precision),
        )
        if moments.is_8bit:
            raise UnsupportedError(
                f"{self.path} has moments in float32, those of the model are of eight bits; set "
                "precision.moments, or leave `optimizer` out"
            )
        kinds = [state_kind.value for state_kind in moments.kinds]
        expected = f"{' and '.join(kinds)}, as infinity.{type(optimizer).__name__} has them"
        found: dict[tuple[str, str], str] = {}
        if not kinds:
            return found
        for group in optimizer.named_state()["groups"]:
            for name in group["params"]:
                keys = {kind: f"{prefix}state.{name}.{kind}" for kind in kinds}
                present = [kind for kind, key in keys.items() if self._is_tensor(key)]
                if present and len(present) < len(keys):
                    raise ConfigError(
                        f"{self.path} has {present[0]} of {name!r} only; expected {expected}"
                    )
                for kind in present:
                    self._check_shape(keys[kind], engine.spec(name).facts.shape, name)
                    found[name, kind] = keys[kind]
        if not found:
            raise ConfigError(
                f"{self.path} has the state of another optimizer, or of other parameters; expected "
                f"{expected}. Leave `optimizer` out to bring back the weights alone"
            )
        return found

    def named_optimizer(self, optimizer: OffloadedOptimizer) -> dict[str, Any]:
        """Returns settings and steps for `OffloadedOptimizer.restore_named_state`.

        Raises ConfigError for other groups of parameters.
        """
        prefix, named = self._optimizer_prefix(), optimizer.named_state()
        groups = self._groups(f"{prefix}param_groups.", named["groups"], optimizer.name)
        optimizer.check_named_state({"name": optimizer.name, "groups": groups})
        for group, own in zip(groups, named["groups"], strict=True):
            for key in group.keys() - own.keys():
                del group[key]
        of_name = {name: f"{prefix}state.{name}." for group in groups for name in group["params"]}
        counts = self._values(f"{start}step" for start in of_name.values())
        steps, begun = {}, []
        for name, start in of_name.items():
            step = int(counts.get(f"{start}step", 0))
            has_momentum = self._is_tensor(start + StateKind.MOMENTUM_BUFFER.value)
            if step or has_momentum:
                steps[name] = step or 1  # torch's SGD does not count.
            if has_momentum:
                begun.append(name)
        return {"name": optimizer.name, "groups": groups, "steps": steps, "begun": begun}

    def _groups(
        self, start: str, own: list[dict[str, Any]], optimizer: str
    ) -> list[dict[str, Any]]:
        """Returns the saved settings of groups, by their numbers or by the names of parameters;
        those of `own` that were not saved are as they are. Raises ConfigError for other groups."""
        saved = {
            key.removeprefix(start).removesuffix(".lr")
            for key in self._items
            if key.startswith(start) and key.endswith(".lr")
        }
        is_numbered, is_other = f"{start}0.params" in self._items, False
        known, found = set[str](), []
        for number, group in enumerate(own):
            names = [str(number)] if is_numbered else group["params"]
            keys = {**group, **defaults_of_torch(optimizer)}
            values = self._values(f"{start}{name}.{key}" for name in names for key in keys)
            settings: dict[str, dict[str, Any]] = {f"{start}{name}": {} for name in names}
            for key, value in values.items():
                at, _, setting = key.rpartition(".")
                settings[at][setting] = value
            first = next(iter(settings.values()), {})
            known.update(names)
            found.append({**group, **first})
            is_other |= any(of_name != first for of_name in settings.values())
            is_other |= found[-1]["params"] != group["params"]
        if saved and (is_other or saved != known):
            sizes = [len(group["params"]) for group in own]
            raise ConfigError(
                f"{self.path} has other groups of parameters than the optimizer's, of {sizes}; "
                "build the optimizer with the groups it was saved with"
            )
        return found

    def _values(self, keys: Iterable[str]) -> dict[str, Any]:
        """Returns numbers, lists and text by key, whether they were stored as bytes or as tensors,
        of those keys that are there."""
        there = [key for key in keys if key in self._items]
        wanted = {key: self._empty(key) if self._is_tensor(key) else None for key in there}
        values = self._load(wanted) if wanted else {}
        for key, value in values.items():
            if self._is_tensor(key):
                values[key] = value.item() if value.numel() == 1 else value.tolist()
        return values
