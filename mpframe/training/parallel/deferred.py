"""A model whose tensors get their values later, one block at a time.

In a `Deferred` context a large tensor that is made on the CPU has a shape and no memory (torch's
FakeTensor), and the ops that write it are recorded. `fill` runs these ops again for the tensors of
a block, the same kernels in the same order. So the values are, bit for bit, those of a construction
without it. In between a model runs on shapes, and an op that needs a value raises an error.

A random op draws its numbers into scratch memory at once, so that later draws stay the same. Its
record holds the generator's state from before. An op that cannot wait, such as `item()`, gets the
values of its inputs for a moment.
"""

import mmap
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.jit import ScriptModule
from torch.utils._python_dispatch import TorchDispatchMode

from mpframe.core.tree import call_with, map_tensors, tensors_in

LARGE = 2**16  # values; a smaller tensor is made with them

# They read no values, and draw as many numbers as there are.
_DRAW_NAMES = "uniform_ normal_ random_ exponential_ cauchy_ log_normal_ geometric_"
_DRAWS = frozenset(_DRAW_NAMES.split())

Storages = dict[int, torch.UntypedStorage]  # for tensors without values, by their `_address`


class Deferred(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Context manager in which large tensors are made without values, until they are filled."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._shapes = FakeTensorMode(allow_non_fake_inputs=True)
        # Calls that write storages, each with the addresses of those that it reads.
        self._records: list[tuple[Callable[[Storages], None], set[int]]] = []
        self._writers: defaultdict[int, list[int]] = defaultdict(list)  # by address, their numbers
        self._aliases: list[Tensor] = []  # While they live, no other storage has the same address.

    def construct(self, make: Callable[[], nn.Module]) -> nn.Module:
        """Return the model that `make` makes, without the values of its large tensors."""
        with warnings.catch_warnings(), self:
            # torch's copy.deepcopy asks for it.
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
            return make()

    def lacks_values(self, tensor: Tensor) -> bool:
        """Return whether a tensor was made here, and is not filled."""
        return isinstance(tensor, FakeTensor) or self._is_recorded(tensor)

    def take_values(self, model: nn.Module) -> None:
        """Take the values of all parameters, of small ones as well, until they are filled."""
        taken: dict[Tensor, Any] = {}
        for module in model.modules():
            for name, value in module._parameters.items():
                if value is None or self.lacks_values(value) or isinstance(module, ScriptModule):
                    continue
                if value not in taken:
                    taken[value] = self._shapes.from_tensor(value)
                    vars(taken[value]).update(vars(value))
                    self._keep(taken[value], value.untyped_storage())
                module._parameters[name] = taken[value]

    @torch.no_grad()
    def fill(self, *modules: nn.Module) -> dict[Tensor, nn.Parameter]:
        """Give all tensors of these modules their values, on the CPU.

        Returns each parameter that had none, with the one that has replaced it.
        """
        filled: dict[Tensor, Any] = {}
        fill = partial(self._fill, filled, dict[int, torch.UntypedStorage]())
        for part in (part for module in modules for part in module.modules()):
            for home in (part._parameters, part._buffers, vars(part)):
                for name, value in home.items():
                    if any(map(self.lacks_values, _tensors(value))):
                        home[name] = map_tensors(fill, value)
        return {old: new for old, new in filled.items() if isinstance(old, nn.Parameter)}

    def _fill(self, filled: dict[Tensor, Any], storages: Storages, tensor: Tensor) -> Tensor:
        """Return a tensor with its values, which is made once."""
        if not self.lacks_values(tensor):
            return tensor
        if tensor not in filled:
            if _address(tensor) not in storages:
                storages.update(self._replay([tensor]))
            values = self._with_memory(tensor, storages)
            if isinstance(tensor, nn.Parameter):
                values = nn.Parameter(values, tensor.requires_grad)
            of_torch = vars(self._shapes.from_tensor(torch.empty(0, device="cpu"))).keys()
            users = vars(tensor).keys() - of_torch - {"_is_param"}
            vars(values).update({name: vars(tensor)[name] for name in users})
            filled[tensor] = values
        return filled[tensor]  # type: ignore[no-any-return]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = list(tensors_in((args, kwargs)))
        on_cpu = torch.device(kwargs.get("device") or "cpu").type == "cpu"
        if any(map(self.lacks_values, inputs)) or (on_cpu and not inputs):
            if func.overloadpacket is torch.ops.aten.set_:
                raise NotImplementedError(f"{func} moves a tensor without values")
            result = self._defer(func, args, kwargs)
            return self._run_now(func, args, kwargs) if result is NotImplemented else result
        return func(*args, **kwargs)

    def _defer(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an op on shapes, and record it if it writes. NotImplemented if it cannot wait."""
        name, written = func.overloadpacket.__name__, _written(func, args, kwargs)
        inputs = [t for t in tensors_in((args, kwargs)) if self.lacks_values(t)]
        draws = torch.Tag.nondeterministic_seeded in func.tags
        if not all(map(self._is_recorded, (*inputs, *written))):
            return NotImplemented  # It writes memory that others may read at once.
        if draws and inputs and name not in _DRAWS:
            return NotImplemented
        before = [map_tensors(self._alias, list(args)), map_tensors(self._alias, kwargs)]
        try:
            with self._shapes:
                result = func(*args, **kwargs)
        except Exception:  # With values it works, or says the same.
            return NotImplemented
        results = list(tensors_in(result))
        made = [None if self._is_recorded(t) else t.detach() for t in results]
        fresh = [tensor for tensor in made if tensor is not None]
        if not all(map(_can_wait, results)) or not (written or results):
            return NotImplemented
        if fresh and any(place.alias_info for place in func._schema.returns):
            return NotImplemented  # It is to share memory, and does not.
        if written or fresh:
            if not written and max(tensor.numel() for tensor in fresh) < LARGE:
                return NotImplemented
            self._add(self._calling(func, before, made, draws), inputs, written, fresh)
        return result  # A view shows its place by itself.

    def _run_now(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an op with the values that its inputs have now."""
        inputs = [t for t in tensors_in((args, kwargs)) if self.lacks_values(t)]
        storages = self._replay(inputs)
        values = {id(t): self._with_memory(t, storages) for t in inputs}
        result = call_with(lambda t: values.get(id(t), t), func, args, kwargs)
        for tensor in filter(self._is_recorded, _written(func, args, kwargs)):
            self._keep(tensor, storages[_address(tensor)])
        inputs_by_values = {id(values[id(t)]): t for t in inputs}
        moved = {storage._cdata for storage in storages.values()}
        for tensor in tensors_in(result):
            if _address(tensor) in moved and id(tensor) not in inputs_by_values:
                raise NotImplementedError(f"{func} returns a part of a tensor without values")
        return map_tensors(lambda t: inputs_by_values.get(id(t), t), result)

    def _calling(self, func: Any, arguments: Any, made: Any, draws: bool) -> Any:
        """Draw an op's numbers, and return what runs it again, for the memory of what it writes."""
        if draws:
            generator = arguments[1].get("generator") or torch.default_generator
            state = generator.get_state()
            call_with(lambda t: _lay_out(_allocate(t), t), func, *arguments)

        def run(storages: Storages) -> None:
            if draws:
                now = generator.get_state()
                generator.set_state(state)
            result = call_with(lambda t: self._with_memory(t, storages), func, *arguments)
            if draws:
                generator.set_state(now)
            for tensor, values in zip(made, tensors_in(result), strict=True):
                if tensor is not None and _layout(tensor) == _layout(values):
                    storages[_address(tensor)] = values.untyped_storage()
                elif tensor is not None:
                    self._with_memory(tensor, storages).copy_(values)

        return run

    def _add(
        self, run: Any, read: list[Tensor], written: list[Tensor], fresh: list[Tensor]
    ) -> None:
        for address in set(map(_address, [*written, *fresh])):
            self._writers[address].append(len(self._records))
        self._records.append((run, set(map(_address, read))))
        self._aliases += fresh

    def _keep(self, tensor: Tensor, storage: torch.UntypedStorage) -> None:
        """Record that a tensor has the values of this memory now."""

        def run(storages: Storages) -> None:
            storages[_address(tensor)] = storage.clone()  # type: ignore[no-untyped-call]

        self._add(run, [], [], [tensor.detach()])

    def _replay(self, tensors: Iterable[Tensor]) -> Storages:
        """Return memory with the values that tensors have now."""
        wanted = {_address(tensor) for tensor in tensors if self._is_recorded(tensor)}
        found: set[int] = set()
        left, seen = list(wanted), set(wanted)
        while left:
            numbers = self._writers[left.pop()]
            found.update(numbers)
            for number in numbers:
                left += self._records[number][1] - seen
                seen |= self._records[number][1]
        storages: Storages = {}
        for number in sorted(found):
            self._records[number][0](storages)
        return {address: storages[address] for address in wanted}

    def _alias(self, tensor: Tensor) -> Tensor:
        """Return a tensor as it is now, for a record: of one with values, a copy."""
        return tensor.detach() if self._is_recorded(tensor) else tensor.clone()

    def _is_recorded(self, tensor: Tensor) -> bool:
        return _address(tensor) in self._writers

    def _with_memory(self, tensor: Tensor, storages: Storages) -> Tensor:
        """Return a plain tensor in the memory of one without values, or one with values itself."""
        storage, address = tensor.untyped_storage(), _address(tensor)
        if address in self._writers:
            if address not in storages:
                storages[address] = _allocate(tensor)
            storage = storages[address]
        elif not isinstance(tensor, FakeTensor):  # One may have got memory by `.data`.
            return tensor
        return _lay_out(storage, tensor)


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the tensors that an op writes, as its schema says."""
    places = func._schema.arguments
    named = {**dict(zip((place.name for place in places), args, strict=False)), **kwargs}
    writes = (place for place in places if place.alias_info and place.alias_info.is_write)
    return [tensor for place in writes for tensor in tensors_in(named.get(place.name))]


def _address(tensor: Tensor) -> int:
    """Return a number that a tensor and its views have in common, 0 if it is sparse or lazy."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError, ValueError):
        return 0


def _allocate(tensor: Tensor) -> torch.UntypedStorage:
    """Return memory for a tensor and its views, which goes back to the system when it is free."""
    size = max(1, tensor.untyped_storage().nbytes())
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE)
    return torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()


def _lay_out(storage: torch.UntypedStorage, tensor: Tensor) -> Tensor:
    """Return a plain tensor at the place of another one, in other memory."""
    plain = torch.empty(0, dtype=tensor.dtype, device="cpu")
    return plain.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset()


def _can_wait(tensor: Tensor) -> bool:
    """Return whether a place in a storage is all that there is to know of a result."""
    fake = isinstance(tensor, FakeTensor) and tensor.device.type == "cpu"
    plain = tensor.layout is torch.strided and not tensor.is_quantized
    return fake and plain and not (tensor.is_conj() or tensor.is_neg())


def _tensors(value: Any) -> list[Tensor]:
    """Return the tensors that an attribute is, or has in a list, tuple or dict."""
    inner = value.values() if type(value) is dict else value
    values = inner if type(value) in (list, tuple, dict) else [value]
    return [tensor for tensor in values if isinstance(tensor, Tensor)]
