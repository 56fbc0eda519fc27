"""Parameters and gradients that live elsewhere: tensors without memory that know where their values are."""

from __future__ import annotations

import math
import weakref
from typing import Any

import torch
from torch.utils._pytree import tree_map

from . import _native
from .protocols import Values

aten = torch.ops.aten
_SAME_SHAPE = {aten.empty_like.default, aten.zeros_like.default, aten.ones_like.default, aten.full_like.default, aten.rand_like.default,
               aten.randn_like.default, aten.new_empty.default, aten.new_zeros.default, aten.new_ones.default, aten.new_full.default}  # fmt: skip


NO_DATA_PARALLELISM = "streamed models train in one process (no DistributedDataParallel, no FSDP): start it without torchrun, and take more micro-batches a step"
NO_SCALER = "a GradScaler is not committed with the state of a durable model: in bf16 none is needed, so make it with enabled=False"


def _written(func: Any, args: tuple, kwargs: dict) -> list[Any]:
    """The arguments that the operator writes to."""
    schema = func._schema
    if not schema.is_mutable:
        return []
    found: list[Any] = []
    for index, argument in enumerate(schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        found.extend(value if isinstance(value, (list, tuple)) else [value])
    return found


class _Streamed(torch.Tensor):
    """A tensor whose values are the engine's: fetched where an operator reads them."""

    engine: Values
    unit: int
    index: int  # type: ignore[assignment]
    label: str

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[override]
        if func is torch.autograd.grad:
            raise _native.UsageError(
                "torch.autograd.grad towards streamed parameters is not there: their gradients add up where the parameters are; call backward() and read p.grad"
            )
        return torch._C._disabled_torch_function_impl(func, types, args, kwargs or {})

    @classmethod
    def make(cls, engine: Values, unit: int, index: int, name: str, shape: Any, requires_grad: bool = False) -> Any:
        made = torch.Tensor._make_wrapper_subclass(
            cls, torch.Size(shape), dtype=torch.bfloat16, device=engine.device, requires_grad=requires_grad
        )
        made.engine, made.unit, made.index, made.label = engine, unit, index, name
        return made

    def alias(self) -> Any:
        return type(self).make(self.engine, self.unit, self.index, self.label, self.shape)

    def fetch(self) -> torch.Tensor:
        raise NotImplementedError

    def write(self, func: Any, args: tuple, kwargs: dict) -> Any:
        raise NotImplementedError

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[override]
        kwargs = kwargs or {}
        if func in (aten.detach.default, aten.alias.default):
            return args[0].alias()
        if func in _SAME_SHAPE and isinstance(args[0], _Streamed):
            stand_in = torch.empty((), dtype=args[0].dtype, device=args[0].device).expand(args[0].shape)
            return func(stand_in, *args[1:], **kwargs)
        if func.namespace == "c10d":
            raise _native.UsageError(f"torch.distributed cannot reach streamed tensors: {NO_DATA_PARALLELISM}")
        for target in _written(func, args, kwargs):
            if isinstance(target, _Streamed):
                return target.write(func, args, kwargs)
        source = next((x for x in args if isinstance(x, _Streamed)), None)
        args, kwargs = tree_map(lambda x: x.fetch() if isinstance(x, _Streamed) else x, (args, kwargs))
        out = func(*args, **kwargs)
        return out if source is None else FetchedView.where_it_is(func, out, source.label)

    def numpy(self, *args, **kwargs):
        return self.fetch().numpy(*args, **kwargs)

    def __array__(self, *args, **kwargs):
        return self.fetch().__array__(*args, **kwargs)

    def tolist(self):
        return self.fetch().tolist()

    def _no_memory(self, *_: Any) -> Any:
        raise _native.UsageError(
            f"{self.label} has no memory of its own while its module does not run: save a streamed model with save_pretrained() or tierflow.save_checkpoint(), "
            "adapters of an embedding or a head with save_pretrained(..., save_embedding_layers=False), and read values with p + 0 or p.master()"
        )

    data_ptr = untyped_storage = storage = _typed_storage = share_memory_ = _no_memory

    def __reduce_ex__(self, protocol):
        return self.fetch().__reduce_ex__(protocol)


class FetchedView(torch.Tensor):
    """A view of values that were fetched: it reads as any tensor; writing to it would be lost, and raises."""

    label: str
    fetched: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def of(cls, values: torch.Tensor, label: str) -> Any:
        made = torch.Tensor._make_wrapper_subclass(cls, values.shape, strides=values.stride(), dtype=values.dtype, device=values.device)
        made.fetched, made.label = values, label
        return made

    @classmethod
    def where_it_is(cls, func: Any, out: Any, label: str) -> Any:
        """An operator's result, marked where it is a view of what the operator read."""
        if all(r.alias_info is None for r in func._schema.returns):
            return out
        return tree_map(lambda x: cls.of(x, label) if isinstance(x, torch.Tensor) else x, out)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[override]
        kwargs = kwargs or {}
        for target in _written(func, args, kwargs):
            if isinstance(target, FetchedView):
                raise _native.UsageError(f"a view of {target.label} was fetched: what is written to it would be lost; write to the parameter itself, as p[...] = ...")
        source = next((x for x in args if isinstance(x, FetchedView)), None)
        args, kwargs = tree_map(lambda x: x.fetched if isinstance(x, FetchedView) else x, (args, kwargs))
        out = func(*args, **kwargs)
        return out if source is None else cls.where_it_is(func, out, source.label)

    def numpy(self, *args, **kwargs):
        return self.fetched.numpy(*args, **kwargs)

    def __array__(self, *args, **kwargs):
        return self.fetched.__array__(*args, **kwargs)

    def tolist(self):
        return self.fetched.tolist()

    def data_ptr(self):
        return self.fetched.data_ptr()

    def untyped_storage(self):
        return self.fetched.untyped_storage()

    def __reduce_ex__(self, protocol):
        return self.fetched.__reduce_ex__(protocol)

    def __deepcopy__(self, memo):
        return self.fetched.clone()

    def __repr__(self, *, tensor_contents=None):
        return repr(self.fetched)


_before: dict[int, weakref.ref[Any]] = {}  # parameters in whose place streamed ones are, by id


def is_replaced(parameter: Any) -> bool:
    """Whether a streamed parameter took its place."""
    found = _before.get(id(parameter))
    return found is not None and found() is parameter


def note_replaced(parameter: torch.Tensor) -> None:
    number = id(parameter)
    _before[number] = weakref.ref(parameter, lambda _: _before.pop(number, None))


class StreamedParameter(_Streamed):
    """A parameter of a streamed module: bf16, with an fp32 master behind it.

    Inside its module's forward() the module holds the real weight. Elsewhere an operator that reads the parameter fetches it, and one that writes it
    in place (`copy_`, `mul_`, `torch.nn.init`) writes the fp32 master back; inside another module's forward() both raise tierflow.UsageError.
    """

    _is_param = True
    stands_apart = False  # an entry of a state_dict(), .data, .detach(): its copy is a tensor in memory

    def fetch(self) -> torch.Tensor:
        return self.engine.read(self)

    def master(self) -> torch.Tensor:
        """The fp32 master values, on the host."""
        return self.engine.read(self, master=True)

    def write(self, func, args, kwargs):
        """Runs the operator on fp32 masters and stores those that it wrote."""
        masters: dict[tuple[Any, int, int], torch.Tensor] = {}

        def real(x):
            if isinstance(x, StreamedParameter):
                key = (x.engine, x.unit, x.index)
                if key not in masters:
                    masters[key] = x.master()
                return masters[key]
            return x.fetch() if isinstance(x, _Streamed) else x

        func(*tree_map(real, args), **tree_map(real, kwargs))
        for target in _written(func, args, kwargs):
            if isinstance(target, StreamedParameter):
                target.engine.write(target, masters[target.engine, target.unit, target.index])
        return None if isinstance(args[0], (list, tuple)) else self

    def __setitem__(self, where, value):
        if torch.is_grad_enabled() and self.requires_grad:
            raise _native.UsageError(f"{self.label} is trained: write to it under torch.no_grad()")
        master = self.master()
        master[where] = value.master() if isinstance(value, StreamedParameter) else value
        self.engine.write(self, master)

    @property
    def data(self):
        return self.alias()

    @data.setter
    def data(self, value):
        if isinstance(value, StreamedParameter):
            if (value.engine, value.unit, value.index) == (self.engine, self.unit, self.index):
                return
            value = value.master()
        if value.shape != self.shape or not value.is_floating_point():
            raise _native.UsageError(f"{self.label}: .data of a streamed parameter keeps its shape {tuple(self.shape)}; assign such a tensor")
        if value.dtype != self.dtype or value.device != self.device:
            raise _native.UsageError(
                f"{self.label}: a streamed model stays in {self.dtype} on {self.device} (an fp32 master is behind it); leave out .to(), .half(), "
                ".float() and .cuda(), or choose the device in tierflow.plan(device=...)"
            )
        self.engine.write(self, value.float())

    @property
    def grad(self):
        return self.engine.grad(self)

    @grad.setter
    def grad(self, value):
        self.engine.set_grad(self, value)

    def register_hook(self, hook):
        raise _native.UsageError(
            f"{self.label}: a hook on a streamed parameter would never be called, as its gradient adds up elsewhere: scale or read p.grad between backward() and "
            "step(), or hook the module (register_full_backward_hook)"
        )

    register_post_accumulate_grad_hook = register_hook

    def alias(self) -> Any:
        made = super().alias()
        made.stands_apart = True
        return made

    def __deepcopy__(self, memo):
        if self.stands_apart:
            return self.fetch()
        raise _native.UsageError(
            f"{self.label}: a streamed parameter cannot be copied, as its state would have to be twice on the drives: save_pretrained() and load() a model again, or "
            "copy a module that holds it"
        )

    def __repr__(self, *, tensor_contents=None):
        return f"StreamedParameter({self.label!r}, {tuple(self.shape)}, requires_grad={self.requires_grad})"


class StreamedGradient(_Streamed):
    """The gradient of a streamed parameter, summed over the backward passes so far. Its norm is known and scaling it is free; other reads fetch it."""

    life: dict[str, bool]

    def alias(self) -> Any:
        made = super().alias()
        made.life = self.life
        return made

    def key(self) -> tuple[int, int]:
        return self.unit, self.index

    def fetch(self) -> torch.Tensor:
        return self.engine.read_grad(self)

    def norm_value(self) -> torch.Tensor:
        return torch.tensor(self.engine.grad_norm(self), dtype=torch.float64, device=self.device)

    def scale(self, factor: Any) -> None:
        factor = float(factor)
        if not math.isfinite(factor):
            factor = math.nan  # the step is then skipped whole
        self.engine.scale_grad(self, factor)

    def write(self, func, args, kwargs):
        def pairs(values, factors):
            return zip(values, factors if isinstance(factors, (list, tuple)) else [factors] * len(values), strict=True)

        if func in (aten.mul_.Tensor, aten.mul_.Scalar) and torch.as_tensor(args[1]).numel() == 1:
            self.scale(args[1])
        elif func in (aten.div_.Tensor, aten.div_.Scalar) and torch.as_tensor(args[1]).numel() == 1:
            self.scale(1.0 / float(args[1]))
        elif func in (aten._foreach_mul_.Tensor, aten._foreach_mul_.Scalar, aten._foreach_mul_.ScalarList):
            for gradient, factor in pairs(args[0], args[1]):
                gradient.mul_(factor)
        elif func in (aten._foreach_div_.Tensor, aten._foreach_div_.Scalar, aten._foreach_div_.ScalarList):
            for gradient, factor in pairs(args[0], args[1]):
                gradient.div_(factor)
        elif func is aten._amp_foreach_non_finite_check_and_unscale_.default:  # of torch.amp.GradScaler
            ordinary = [gradient for gradient in args[0] if not isinstance(gradient, StreamedGradient)]
            if ordinary:
                func(ordinary, *args[1:])
            for gradient in args[0]:
                if isinstance(gradient, StreamedGradient):
                    if gradient.engine.durable:
                        raise _native.UsageError(NO_SCALER)
                    if not math.isfinite(gradient.engine.grad_norm(gradient)):
                        args[1].fill_(1.0)
                    gradient.scale(args[2])
        elif func in (aten.zero_.default, aten._foreach_zero_.default):
            for gradient in args[0] if isinstance(args[0], (list, tuple)) else [args[0]]:
                gradient.engine.set_grad(gradient, None)
        else:
            raise _native.UsageError(
                f"the gradient of {self.label} can be scaled in place (mul_, div_) and read; {func} would have to rewrite it in storage"
            )
        return None if isinstance(args[0], (list, tuple)) else args[0]

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[override]
        kwargs = kwargs or {}
        order = (args[1] if len(args) > 1 else kwargs.get("ord", 2)) if func in _NORMS else None
        if func is aten.linalg_vector_norm.default and order == 2 and len(args) <= 2 and not kwargs.get("dim"):
            return args[0].norm_value()
        if func is aten._foreach_norm.Scalar and order == 2:
            return [g.norm_value() if isinstance(g, StreamedGradient) else torch.linalg.vector_norm(g, 2) for g in args[0]]
        return super().__torch_dispatch__(func, types, args, kwargs)

    def __repr__(self, *, tensor_contents=None):
        return f"StreamedGradient({self.label!r}, {tuple(self.shape)})"


_NORMS = (aten.linalg_vector_norm.default, aten._foreach_norm.Scalar)


def _refuse_replicas(outer: torch.nn.Module, name: str, inner: torch.nn.Module | None) -> None:
    """As a wrapper of torch.distributed takes a model, before it overwrites masters with another process's bf16 weights."""
    if type(outer).__name__ in ("DistributedDataParallel", "FullyShardedDataParallel") and inner is not None:
        if any(isinstance(p, StreamedParameter) for p in inner.parameters()):
            raise _native.UsageError(f"{type(outer).__name__}: {NO_DATA_PARALLELISM}")


torch.nn.modules.module.register_module_module_registration_hook(_refuse_replicas)
