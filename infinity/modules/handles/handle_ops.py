"""Operations on handles: each fetches the bytes, computes, and releases them.

Handle operations serve code that reads a weight outside the module that owns it (a tied head, a
penalty on weights, a print), code that changes it there (an average of weights, a merged adapter, a
clipped gradient), and initialisation rules of a model that never fits in memory.

Note [Detecting writes]
  The function runs on the parameter itself. The version that PyTorch counts shows afterwards
  whether the function has changed it. Only the function's name tells of a write beforehand: then a
  copy of the parameter is kept, so that elements that do not change keep their fp32 value to the
  bit.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from infinity.errors import CapacityError, InfinityError, ParameterNotResident, UnsupportedError
from infinity.modules.autograd.forward_nodes import nodes_since
from infinity.modules.autograd.grads import ParamGrads
from infinity.modules.autograd.hooks import BackwardCalls, ModuleCall
from infinity.modules.autograd.outputs import detach_from_parameters
from infinity.modules.autograd.param import OffloadedParam, increment_versions
from infinity.modules.autograd.uses import UnitUses
from infinity.modules.handles.edits import WeightEdits
from infinity.modules.handles.handle import (
    Handle,
    find_handles,
    is_value_of,
    plain_value,
    refuse_swap,
    replace_handles,
)
from infinity.modules.handles.mirrors import mirrored
from infinity.modules.interrupts import UNINTERRUPTED
from infinity.observe import Counters
from infinity.private.torch import DisableTorchFunctionSubclass, get_sequence_nr
from infinity.tiers.host import HostPool

_log = logging.getLogger("infinity")

# Units that initialisation keeps attached at the same time, so that its views stay valid a while.
_INITIALISING_UNITS = 2


@dataclass(slots=True)
class _Lent:
    """The tensor that stands in the place of a handle while a function runs."""

    handle: Handle
    tensor: torch.Tensor
    is_target: bool  # Needed because some functions over lists change no version.
    version: int = field(init=False)

    def __post_init__(self) -> None:
        self.version = self.tensor._version

    @property
    def was_changed(self) -> bool:
        return self.is_target or self.tensor._version != self.version


class HandleOps:
    """The owner of every handle of one engine, and of the mirrors of their bytes. A handle stands
    for one parameter, or for the tiles of one.

    `setting` is the section in which all ranks set weights; `reset` releases what an interrupted
    pass has left in use.
    """

    def __init__(
        self, engine: object, pool: HostPool, counters: Counters, uses: UnitUses,
        edits: WeightEdits, backwards: BackwardCalls, grads: ParamGrads, reset: Callable[[], None],
        setting: Callable[..., AbstractContextManager[None]],
    ) -> None:  # fmt: skip
        self._engine = engine  # A handle keeps its engine alive.
        self._counters = counters
        self._pool = pool
        self._reset = reset
        self._setting_on_ranks = setting
        self._param_table = uses.param_table
        self._uses = uses
        self._edits = edits
        self._backwards = backwards
        self._grads = grads
        self._warned: set[str] = set()
        self._initialising: list[int] | None = None  # Units in use by initialisation, oldest first.
        self._check_first: Callable[[int], None] = lambda unit: None
        for param in uses.param_table.params:
            param.handle.owner = self

    def param_of(self, tensor: torch.Tensor) -> OffloadedParam:
        """Returns the parameter of a handle or compute parameter."""
        param = self._param_table.find(tensor)
        if param is None or self._uses.is_closed:
            raise ParameterNotResident(
                getattr(tensor, "name_in_model", "a parameter"),
                "its engine is closed, or the handle is of another model",
            )
        return param

    def _params(self, handle: Handle) -> list[OffloadedParam]:
        return [param for param, _ in self._param_table.parts(handle.name_in_model)]

    def is_tiled(self, handle: Handle) -> bool:
        """Whether the handle stands for tiles."""
        return handle.name_in_model in self._param_table.tiled

    def tiles_of(self, handle: Handle) -> list[Handle]:
        """Returns the handles of the tiles that a handle stands for, or that of the parameter."""
        return [param.handle for param in self._params(handle)]

    def module_handle(self, name: str) -> Handle:
        """Returns the handle in the modules, for a handle that `.data` or `.grad` returned."""
        return self._param_table.handle(name)

    def set_trainable(self, handle: Handle, is_trainable: bool) -> None:
        """Sets requires_grad of a handle. A parameter that was frozen at offload may become
        trainable, as an adapter does that is activated for evaluation; its gradient is refused."""
        for param in self._params(handle):
            param.compute.requires_grad_(is_trainable)
            with DisableTorchFunctionSubclass():
                param.handle.requires_grad_(is_trainable)
        with DisableTorchFunctionSubclass():
            handle.requires_grad_(is_trainable)

    def shown(self, handle: Handle) -> torch.Tensor | None:
        """Returns the parameter that modules show in the place of the handle now, if they do."""
        if self.is_tiled(handle):
            return None
        param = self._param_table.named(handle.name_in_model)
        return param.compute if param.in_unit.is_shown else None

    def leaves_of(self, handle: Handle) -> list[torch.Tensor]:
        """Returns the parameters that accumulate the handle's gradients, in order of rows."""
        return [param.compute for param in self._params(handle)]

    def increment_version(self, handle: Handle) -> None:
        """Makes a graph that saved the old value raise in its backward."""
        increment_versions(self._params(handle))

    # -- Gradients -------------------------------------------------------------------------------

    def gradient_of(self, handle: Handle) -> torch.Tensor | None:
        """Returns the gradient as a handle; None without one."""
        stamp = self.stamp(handle.name_in_model, is_gradient=True)
        if stamp is None:
            return None
        gradient = Handle.make(self, handle.name_in_model, handle, is_gradient=True)
        self.module_handle(handle.name_in_model).note_alias(gradient)
        gradient.number = stamp[0]
        return gradient

    def put_gradient(self, handle: Handle, value: torch.Tensor, *, is_other: bool) -> None:
        """Makes `value` the gradient. `is_other`: a new one, and not a change of the former."""
        self._refuse_closed(handle.name_in_model)
        for param, rows in self._param_table.parts(handle.name_in_model):
            self._grads.put(param, value[rows], is_other=is_other)

    def take_gradient(self, handle: Handle, gradient: torch.Tensor) -> None:
        """Adds a gradient that autograd has delivered to the handle itself."""
        for param, rows in self._param_table.parts(handle.name_in_model):
            self._grads.take(param, gradient[rows])

    def forget_gradient(self, handle: Handle) -> None:
        """Drops the gradient."""
        for param in self._params(handle):
            self._grads.forget(param)

    def zero_gradient(self, handle: Handle) -> None:
        """Fills the gradient with zeros."""
        for param in self._params(handle):
            self._grads.zero(param)

    def _refuse_closed(self, name: str) -> None:
        if self._uses.is_closed:
            raise ParameterNotResident(name, "its engine is closed")

    # -- Computing -------------------------------------------------------------------------------

    def compute_with(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        changes: Sequence[Handle],
    ) -> Any:
        """Runs an operation on handles outside their module: fetch, compute, release. `changes`:
        the handles that the function writes to, according to its signature.

        Handles of other models fetch their own bytes when the function reaches them.
        """
        handles = find_handles((args, kwargs))
        for handle in handles:
            if handle.kept is None and handle.owner.is_tiled(handle):
                if handle.owner is not self:
                    return handle.owner.compute_with(function, args, kwargs, changes=changes)
                return self._with_rows(handle.name_in_model, function, args, kwargs, changes)
        own = {id(h): h for h in handles if h.owner is self and h.kept is None}
        params = {key: self._param_behind(handle) for key, handle in own.items()}
        changed = [h for h in changes if id(h) in own and not h.is_gradient]
        read = [params[key] for key, handle in own.items() if not handle.is_gradient]
        units = list(dict.fromkeys(param.unit.index for param in read))
        self._uses.refuse_transforms(units)
        self._note_fault([param.name for param in read], function)
        first = get_sequence_nr()
        if self._initialising is not None:
            self._keep(self._initialising, units)
        set_units = [params[id(h)].unit.index for h in changed]
        with self._setting(set_units, self._uses.using(units, read)):
            if self._initialising is None:
                self._edits.lend_params(params[id(h)] for h in changed)
            lent = {key: self._lend(h, changes) for key, h in own.items()}

            def real(handle: Handle) -> torch.Tensor:
                if handle.kept is not None:
                    return handle.kept
                return lent[id(handle)].tensor if id(handle) in lent else handle

            try:
                answer = function(
                    *replace_handles(args, real), **replace_handles(dict(kwargs), real)
                )
            finally:
                if self._initialising is None:
                    self._take_changes(lent.values())
                for loan in lent.values() if self._initialising is not None else ():
                    if loan.handle.is_data and loan.was_changed:  # No version counts these.
                        self._param_behind(loan.handle).changes += 1
                        self._param_behind(loan.handle).note_replaced()
            if self._initialising is not None:
                by_compute = {id(loan.tensor): params[key].handle for key, loan in lent.items()}
                return by_compute.get(id(answer), answer)
            return self._shown(ModuleCall(units, read), answer, first, lent.values())

    def _with_rows(
        self,
        name: str,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        changes: Sequence[Handle],
    ) -> Any:
        """Runs `function` on a copy of all rows of a tiled parameter, and writes changed rows back
        to the tiles. Handles of other parameters fetch their bytes when the function reaches
        them."""
        lent: dict[int, _Lent] = {}

        def real(handle: Handle) -> torch.Tensor:
            if handle.kept is not None:
                return handle.kept
            if handle.owner is not self or handle.name_in_model != name:
                return handle
            if id(handle) not in lent:
                lent[id(handle)] = self._lend(handle, changes)
            return lent[id(handle)].tensor

        answer = function(*replace_handles(args, real), **replace_handles(dict(kwargs), real))
        for loan in lent.values():
            handle, copy = loan.handle, loan.tensor
            if loan.was_changed:
                if copy.requires_grad and torch.is_grad_enabled() and not handle.is_data:
                    raise RuntimeError(
                        "a leaf Variable that requires grad is being used in an in-place operation."
                    )
                values = copy.detach().contiguous().view(-1).view(torch.uint8)
                self.write_bytes(name, 0, values, is_gradient=handle.is_gradient)
                if answer is copy:
                    return handle
            answer = mirrored(answer, loan.tensor, handle, is_copy=True)
        return answer

    def _param_behind(self, handle: Handle) -> OffloadedParam:
        if handle.is_gradient or handle.is_data:
            self._refuse_closed(handle.name_in_model)
            return self._param_table.named(handle.name_in_model)
        return self.param_of(handle)

    def _setting(
        self, units: list[int], uses: AbstractContextManager[None]
    ) -> AbstractContextManager[None]:
        """Guards a change of weights within `uses`, which every rank makes alike. A change inside a
        forward is local to its rank."""
        is_local = not units or self._initialising is not None or self._uses.passes.is_in_forward
        return uses if is_local else self._setting_on_ranks(units, uses)

    def _lend(self, handle: Handle, changes: Sequence[Handle]) -> _Lent:
        if handle.is_gradient:
            tensor = self._read_gradient(handle)
        elif self.is_tiled(handle):
            rows = self._param_table.tiled[handle.name_in_model].read()
            tensor = rows.detach() if handle.is_data else rows
        else:
            param = self._param_behind(handle)
            tensor = param.place.detach() if handle.is_data else param.compute
        return _Lent(handle, tensor, any(handle is changed for changed in changes))

    def _take_changes(self, lent: Iterable[_Lent]) -> None:
        """Makes the changes of a function the state of its parameters."""
        for loan in lent:
            if not loan.was_changed:
                continue
            param = self._param_behind(loan.handle)
            if loan.handle.is_gradient:
                self._grads.put(param, loan.tensor)
                continue
            param.changes += 1
            self._edits.expect([param.unit.index])
            if param.compute.grad_fn is not None:
                param.compute.detach_()
                raise UnsupportedError(
                    f"{param.name!r} would become the result of an operation that needs a "
                    "gradient, and a parameter is none; change it under torch.no_grad()"
                )

    def _shown(self, call: ModuleCall, answer: Any, first: int, lent: Iterable[_Lent]) -> Any:
        """Returns the result in a form that the caller may keep."""
        for loan in lent:
            if answer is loan.tensor and loan.was_changed:
                return loan.handle
            answer = mirrored(answer, loan.tensor, loan.handle, is_copy=loan.handle.is_gradient)
        # Copies views of memory that will be released, and fetches the units again in the backward
        # of the result.
        answer = detach_from_parameters(answer, self._param_table.is_parameter_memory)
        self._backwards.watch(call, nodes_since(first, answer))
        return answer

    @torch.inference_mode(False)  # A copy that is made in it has no version.
    def _read_gradient(self, handle: Handle) -> torch.Tensor:
        name = handle.name_in_model
        params = [param for param, _ in self._param_table.parts(name)]
        with self._uses.lock:  # Another thread may drop it, and add the next one.
            stamp = self.stamp(name, is_gradient=True)
            if stamp is None or stamp[0] != handle.number:
                raise InfinityError(
                    f"the gradient of {name!r} is not there any more: it was dropped (zero_grad) "
                    "after `.grad` was taken. Clone a gradient that is to be kept"
                )
            parts = [part for part in map(self._grads.read, params) if part is not None]
        return _joined([part.to(handle.device) for part in parts])

    def _note_fault(self, names: list[str], function: Callable[..., Any]) -> None:
        if self._initialising is not None:
            return
        self._counters.add("faults", len(names))
        fresh = [name for name in names if name not in self._warned]
        if fresh:
            self._warned.update(fresh)
            _log.info(
                "%s used outside the module that owns it, by %s; fetched for this operation",
                ", ".join(fresh),
                getattr(function, "__name__", function),
            )

    # -- Mirrors ---------------------------------------------------------------------------------

    def stamp(self, name: str, *, is_gradient: bool) -> tuple[int, ...] | None:
        """Returns a value that changes with the bytes. Its first number identifies the gradient.
        None if there is no gradient."""
        found: list[tuple[int, ...]] = []
        for param, _ in self._param_table.parts(name):
            own = (0, param.compute._version, param.changes)
            stamp = self._grads.stamp(param) if is_gradient else own
            if stamp is None:
                return None
            found.append(stamp)
        return sum(stamp[0] for stamp in found), *(n for stamp in found for n in stamp[1:])

    def read_bytes(self, name: str, start: int, into: torch.Tensor, *, is_gradient: bool) -> None:
        """Copies the bytes from `start` on into `into`: uint8, flat."""
        for param, place, part in self._ranges(name, start, into, is_gradient=is_gradient):
            self._read_bytes(param, place, part, is_gradient=is_gradient)

    def _read_bytes(
        self, param: OffloadedParam, place: slice, into: torch.Tensor, *, is_gradient: bool
    ) -> None:
        if is_gradient:
            gradient = self._grads.read(param)
            assert gradient is not None
            into.copy_(_bytes_of(gradient, param)[place])
            return
        self._refuse_closed(param.name)
        with self._uses.using([param.unit.index], [param]):
            into.copy_(_bytes_of(param.compute, param)[place])

    def write_bytes(
        self, name: str, start: int, values: torch.Tensor, *, is_gradient: bool
    ) -> None:
        """Copies `values` to the bytes from `start` on: uint8, flat."""
        is_tiled = name in self._param_table.tiled
        for param, place, part in self._ranges(name, start, values, is_gradient=is_gradient):
            if is_tiled:
                before = torch.empty_like(part)
                self._read_bytes(param, place, before, is_gradient=is_gradient)
                if torch.equal(before, part):
                    continue  # This tile is not written.
            self._write_bytes(param, place, part, is_gradient=is_gradient)

    def _write_bytes(
        self, param: OffloadedParam, place: slice, values: torch.Tensor, *, is_gradient: bool
    ) -> None:
        self._refuse_closed(param.name)
        if is_gradient:
            gradient = self._grads.read(param)
            assert gradient is not None
            _bytes_of(gradient, param)[place] = values
            self._grads.put(param, gradient)
            return
        unit = param.unit.index
        with self._setting([unit], self._uses.using([unit], [param])), torch.no_grad():
            self._edits.lend_params([param])
            _bytes_of(param.compute, param)[place] = values
            increment_versions([param])

    def _ranges(
        self, name: str, start: int, content: torch.Tensor, *, is_gradient: bool
    ) -> Iterator[tuple[OffloadedParam, slice, torch.Tensor]]:
        """Yields every parameter with some of the content, the place there, and that part."""
        stop, first = start + content.numel(), 0
        for param, _ in self._param_table.parts(name):
            end = first + param.spec.numel * (4 if is_gradient else param.compute.element_size())
            low, high = max(start, first), min(stop, end)
            if low < high:
                yield param, slice(low - first, high - first), content[low - start : high - start]
            first = end

    # -- Parameters by name ------------------------------------------------------------------------

    def read_gradient(self, name: str) -> torch.Tensor | None:
        """Returns a copy of the gradient summed so far (fp32, on the host), or None."""
        params = [param for param, _ in self._param_table.parts(name)]
        parts = [part for part in map(self._grads.read, params) if part is not None]
        return _joined(parts) if len(parts) == len(params) else None

    def read(self, name: str, *, master: bool = False) -> torch.Tensor:
        """Returns a copy on the host: in the compute dtype, or (`master`) the fp32 master value."""
        return _joined(
            [self._read(param, master=master) for param, _ in self._param_table.parts(name)]
        )

    def _read(self, param: OffloadedParam, *, master: bool) -> torch.Tensor:
        with self._uses.lock:
            with self._uses.using([param.unit.index], [param]):
                copy = param.compute.detach().to("cpu", copy=True)
            is_wide = master and copy.is_floating_point()
            return self._edits.read_wide(param, copy) if is_wide else copy

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Replaces the value of a parameter and its master. Any dtype; the shape of the
        parameter."""
        tensor = plain_value(tensor)
        shape = tuple(self.module_handle(name).shape)
        if tuple(tensor.shape) != shape:
            raise InfinityError(f"{name!r} has shape {shape}, got {tuple(tensor.shape)}")
        for param, rows in self._param_table.parts(name):
            setting = self._setting_on_ranks([param.unit.index])
            with UNINTERRUPTED, self._uses.lock, torch.no_grad(), setting:
                self._reset()
                self._edits.write_one(param, tensor[rows])

    def take_loaded(
        self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *unused: Any
    ) -> None:
        """Writes the values of a `load_state_dict` call to their tiers, before the module sees
        them. The module then finds its own handles in the dict and copies nothing."""
        for attribute, tensor in module._parameters.items():
            value = state_dict.get(prefix + attribute)
            if not isinstance(tensor, Handle) or not isinstance(value, torch.Tensor):
                continue
            if torch.__future__.get_swap_module_params_on_conversion():
                refuse_swap(tensor)
            if value.shape == tensor.shape:
                if not is_value_of(value, tensor):
                    self.write(tensor.name_in_model, value)
                state_dict[prefix + attribute] = tensor

    def give_state(
        self,
        is_here: Callable[[], bool],
        module: nn.Module,
        state_dict: dict[str, Any],
        prefix: str,
        *unused: Any,
    ) -> None:
        """Puts handles into a `state_dict()` in the place of what the pass of another thread shows:
        the values would leave with the pass."""
        for attribute, tensor in module._parameters.items():
            value = state_dict.get(prefix + attribute)
            param = None if tensor is None else self._param_table.find(tensor)
            if param is None or not isinstance(value, torch.Tensor):
                continue
            if self._param_table.is_parameter_memory(value) and not is_here():
                is_param = isinstance(value, nn.Parameter)  # `keep_vars`.
                value = param.handle if is_param else param.handle.make_data(is_state=True)
                state_dict[prefix + attribute] = value

    # -- Initialisation --------------------------------------------------------------------------

    @contextmanager
    def initialising(self, check: Callable[[int], None]) -> Iterator[None]:
        """Allows in-place changes of handles for the time of a `with` block. Views stay valid until
        the next unit is used, or the one after it if memory allows. Changed units are written to
        their tiers. `check(unit)` is called when a unit is released, and may raise."""
        assert self._initialising is None
        self._initialising, self._check_first = [], check
        try:
            yield
        finally:
            kept, self._initialising = self._initialising, None
            for unit in kept:
                self._release_unit(unit)

    def _keep(self, kept: list[int], units: list[int]) -> None:
        """Keeps units in use and releases earlier ones, because the budget is that of training,
        which keeps no unit for later."""
        coming = [unit for unit in units if unit not in kept]
        while coming and kept and not self._may_call([*kept, *coming]):
            # First the unit without a master: taking a master over needs memory.
            self._release_unit(kept.pop(kept.index(min(kept, key=self._has_master))))
        coming = [unit for unit in units if unit not in kept]
        try:
            self._uses.enter(coming, is_of_pass=False)
        except CapacityError:
            if not kept:
                raise
            while kept:
                self._release_unit(kept.pop(kept.index(min(kept, key=self._has_master))))
            coming = units
            self._uses.enter(coming, is_of_pass=False)
        kept.extend(coming)

    def _may_call(self, units: list[int]) -> bool:
        """Whether to keep all of these units in use. In little memory, two units with masters could
        not be taken over beside each other."""
        is_safe = not self._pool.is_tight or sum(map(self._has_master, units)) < 2
        return len(units) <= _INITIALISING_UNITS and is_safe

    def _has_master(self, unit: int) -> bool:
        return any(p.unit.master_dtype is not None for p in self._param_table.of_unit(unit))

    def _release_unit(self, unit: int) -> None:
        self._edits.expect([unit])
        self._uses.leave([unit])
        self._check_first(unit)


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    """Joins the values of tiles. A parameter without tiles has one, which may have no dimension."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _bytes_of(tensor: torch.Tensor, param: OffloadedParam) -> torch.Tensor:
    """Returns the dense memory of a parameter or its gradient: uint8, flat."""
    return tensor.detach().as_strided((param.spec.numel,), (1,)).view(torch.uint8)
