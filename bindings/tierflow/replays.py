"""What a turn's forward depended on beside its inputs, so that the backward's recomputation finds the same: random numbers, train() and eval(), adapters that are
switched on, hooks, buffers. What cannot be put back, such as weights that a step has changed, raises. What is not known of is found by comparing results, and said."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from . import _native
from .ambient import other_random_state, put_other_random, put_random, random_state, restored, same_other_random
from .hooks import GONE, ModuleHooks, is_of_a_library, put, refill
from .parameter import StreamedParameter
from .protocols import ModuleTurn

log = logging.getLogger("tierflow")
_SMALL = 1 << 16  # elements of a buffer that is copied ahead of each forward, whether it changed in earlier ones or not
_SAMPLED = 256  # values of a result
_VALUES = (int, float, bool, str, type(None))
_said: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()  # by engine: what was said once


class Members:
    """The modules of a turn, and what of them is looked at in each call, at one time."""

    def __init__(self, module: nn.Module) -> None:
        self.modules = list(module.modules())
        self.inner = self.modules[1:]
        self.buffers = [(m, name) for m in self.modules for name in m._buffers]
        self.switched: list[Any] = [m for m in self.modules if isinstance(getattr(m, "_disable_adapters", None), bool)]  # PEFT's
        self.own = [p for m in self.modules for p in m._parameters.values() if p is not None and not isinstance(p, StreamedParameter)]


@dataclasses.dataclass
class Learned:
    """What forwards in the same modes have shown of a turn."""

    writes: set[int] | None = None  # inputs that the module changes in place, by number; None: no forward yet
    buffers: set[tuple[int, str]] | None = None  # buffers likewise, by id of their module and name
    attributes: set[tuple[int, str]] | None = None  # numbers, words and switches likewise
    draws: bool | None = None  # random numbers that are not torch's
    forwards: int = 0  # how many there were
    looked: bool = False  # at attributes, in a recomputation


class Parts:
    """A turn's Members, gathered anew where a module, parameter or buffer was put into it, and what was learned."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._members: Members | None = None
        self._learned: dict[tuple[bool, ...], Learned] = {}

    def now(self) -> Members:
        if self._members is None:
            self._members = Members(self._module)
            for module in self._members.modules:
                _holders.setdefault(module, weakref.WeakSet()).add(self)
        return self._members

    def learned(self, modes: tuple[bool, ...]) -> Learned:
        if modes not in self._learned:
            self._learned[modes] = Learned()
        return self._learned[modes]

    def outdated(self) -> None:
        self._members = None


_holders: weakref.WeakKeyDictionary[nn.Module, weakref.WeakSet[Parts]] = weakref.WeakKeyDictionary()


def _put_in(module: nn.Module, name: str, value: Any) -> None:
    for parts in _holders.get(module, ()):
        parts.outdated()


def _put_in_buffer(module: nn.Module, name: str, value: Any) -> None:
    if name not in module._buffers:
        _put_in(module, name, value)


nn.modules.module.register_module_module_registration_hook(_put_in)
nn.modules.module.register_module_parameter_registration_hook(_put_in)
nn.modules.module.register_module_buffer_registration_hook(_put_in_buffer)


def version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


class Moment:
    """What surrounds one forward of a turn. Made ahead of it; ended() follows it."""

    def __init__(self, turn: ModuleTurn, plain: bool) -> None:
        """plain: the module's own code runs, which may change its buffers."""
        self.turn, self.plain = turn, plain
        self.members = members = turn.parts.now()
        self.random: Any = random_state(turn.engine.device)
        self.modes = tuple([m.training for m in members.modules])
        self.learned: Learned = turn.parts.learned(self.modes)
        self.adapters = [(m._disable_adapters, _names(m._active_adapter)) for m in members.switched]
        self.weights = [turn.engine.versions[unit] for unit in turn.units]
        self.own = [version(p) for p in members.own]
        self.others_in_place = turn.others_in_place()
        self.hooks = ModuleHooks(members.modules)
        self.sample: list[torch.Tensor] | None = None  # of the results, in some of the forwards
        self.buffers: list[tuple[nn.Module, str, torch.Tensor, int, torch.Tensor | None]] = []  # and the copy to put back
        self.attributes: list[tuple[nn.Module, str, Any]] = []
        self.names: list[set[str]] = []  # of the attributes of each module, ahead of the first forward
        self.others: Any = None
        if plain and members.buffers:
            self._copy_buffers()
        if plain and self.learned.attributes != set():
            self._copy_attributes()
        if plain and self.learned.draws is not False:
            self.others = other_random_state()
        _say_hooks(turn, members)

    def _copy_buffers(self) -> None:
        learned = self.learned.buffers
        for module, name in self.members.buffers:
            if (buffer := module._buffers.get(name)) is not None:
                copied = learned is None or buffer.numel() <= _SMALL or (id(module), name) in learned
                self.buffers.append((module, name, buffer, version(buffer), buffer.clone() if copied else None))

    def _copy_attributes(self) -> None:
        learned = self.learned.attributes
        if learned is None:
            self.names = [set(vars(module)) for module in self.members.modules]
        for module in self.members.modules:
            for name, value in vars(module).items():
                if _is_looked_at(value) and name != "training" and (learned is None or (id(module), name) in learned):
                    self.attributes.append((module, name, value))

    def rewind(self) -> None:
        """Everything as it was ahead of the forward, which is made once more."""
        put_random(self.random, self.turn.engine.device)
        if self.others is not None:
            put_other_random(self.others)
        for module, name, value in self.attributes:
            put(module.__dict__, name, value)
        for module, name, buffer, _, copy in self.buffers:
            module._buffers[name] = buffer
            if copy is not None:
                buffer.copy_(copy)
        self.buffers = []
        self._copy_buffers()

    def ended(self, outs: list[torch.Tensor]) -> None:
        """After the forward: only what changed in it stays."""
        self.learned.forwards += 1
        if self.plain and self.learned.forwards.bit_count() == 1:
            self.sample = _sampled(outs)
        now = random_state(self.turn.engine.device)
        if torch.equal(self.random[0], now[0]) and (now[1] is None or torch.equal(self.random[1], now[1])):
            self.random = None
        if self.others is not None and self.learned.draws is None:
            self.learned.draws = not same_other_random(self.others, other_random_state())
        if not self.learned.draws:
            self.others = None
        if self.learned.attributes is None and not self.plain:
            return
        if self.learned.attributes is None:
            for module, names in zip(self.members.modules, self.names, strict=True):
                made = [name for name, value in vars(module).items() if name not in names and _is_looked_at(value)]
                self.attributes += [(module, name, GONE) for name in made]
            self.learned.attributes = {(id(module), name) for module, name, value in self.attributes if _another(module.__dict__.get(name, GONE), value)}
        self.attributes = [entry for entry in self.attributes if (id(entry[0]), entry[1]) in self.learned.attributes]
        if not self.buffers:
            return
        learned, changed = self.learned.buffers, set()
        for number, (module, name, buffer, before, copy) in enumerate(self.buffers):
            # Batch normalisation changes its buffers without a new version: values are looked at, once.
            if learned is None:
                assert copy is not None
                same = version(buffer) == before and torch.equal(buffer, copy)
            else:
                same = version(buffer) == before and (id(module), name) not in learned
            if same:
                self.buffers[number] = (module, name, buffer, before, None)
            elif copy is None:
                raise _native.UsageError(
                    f"{self.turn.name}: its buffer {name} changed in this forward and in none before, so it is not there for the backward, which computes the forward "
                    "again: run this forward under torch.no_grad() once, or change the buffer between steps"
                )
            else:
                changed.add((id(module), name))
        self.learned.buffers = changed | (learned or set())

    def _expect_same(self) -> None:
        """Raises UsageError where the recomputation would not be that of the forward."""
        turn, why = self.turn, ""
        now = turn.parts.now()
        if now is not self.members and now.modules != self.members.modules:
            why = "modules in it were replaced or added"
        elif self.weights != [turn.engine.versions[unit] for unit in turn.units]:
            why = "its weights were changed by step() or written"
        elif self.own != [version(p) for p in self.members.own]:
            why = "its parameters that do not stream were changed"
        elif not _same(self.others_in_place, turn.others_in_place()):
            why = "other tensors were put in the place of its parameters, or taken away (torch.func.functional_call)"
        elif self.hooks.other_class():
            why = "the forward() of a class of its modules was replaced"
        if why:
            raise _native.UsageError(
                f"{turn.name}: {why} between a forward and its backward(), which computes the forward again: call backward() before, or make the forward once more after it"
            )

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """For the recomputation everything is as it was; afterwards as it is now. Raises UsageError where that cannot be."""
        self._expect_same()
        swaps, puts = self.hooks.put_back()
        if parametrize._cache_enabled:  # what it holds was computed without a graph
            puts.append((vars(parametrize), "_cache_enabled", 0))
        if tuple([m.training for m in self.members.modules]) != self.modes:
            puts += [(module.__dict__, "training", training) for module, training in zip(self.members.modules, self.modes, strict=True)]
        for layer, (off, active) in zip(self.members.switched, self.adapters, strict=True):
            if layer._disable_adapters is not off:
                puts.append((layer.__dict__, "_disable_adapters", off))
            if _names(layer._active_adapter) != active:
                puts.append((layer.__dict__, "_active_adapter", list(active)))
        for module, name, buffer, before, copy in self.buffers:
            if copy is not None:
                puts.append((module._buffers, name, copy.clone()))
            elif version(buffer) != before:
                raise _native.UsageError(
                    f"{self.turn.name}: its buffer {name} was changed between a forward and its backward(), which computes the forward again: change it before the "
                    "forward, or after the backward"
                )
            elif module._buffers.get(name) is not buffer:
                puts.append((module._buffers, name, buffer))
        puts += [(module.__dict__, name, value) for module, name, value in self.attributes]
        others = other_random_state() if self.others is not None else None
        undo = [(holder, name, holder.get(name, GONE)) for holder, name, _ in puts]
        back = [(hooks, hooks.copy()) for hooks, _ in swaps]
        with restored(self.random, self.turn.engine.device):
            try:
                if others is not None:
                    put_other_random(self.others)
                for hooks, then in swaps:
                    refill(hooks, then)
                for holder, name, value in puts:
                    put(holder, name, value)
                yield
            finally:
                if others is not None:
                    put_other_random(others)
                for holder, name, value in undo:
                    put(holder, name, value)
                for hooks, entries in back:
                    refill(hooks, entries)

    def look(self, outs: list[torch.Tensor]) -> None:
        """After a recomputation, within it: says where it gave something else than the forward, and where the module left a tensor with a graph in an attribute."""
        if self.sample is not None and (apart := _apart(self.sample, _sampled(outs))) and _first(self.turn, "apart"):
            log.warning(
                f"{self.turn.name}: the backward computes the forward again, and the result was another one ({apart:.1%} of it): gradients are of that. What a forward "
                "goes by has to be torch's or numpy's own random numbers, buffers, or numbers in attributes: a generator, list or tensor of your own is not put back (said once)"
            )
        self.sample = None
        if self.learned.looked:
            return
        self.learned.looked = True
        paths = {id(m): path for path, m in self.turn.module.named_modules()}
        for module in self.members.modules:
            for name, value in vars(module).items():
                held = [value] if isinstance(value, torch.Tensor) else value if isinstance(value, (list, tuple)) else value.values() if type(value) is dict else []
                if any(isinstance(tensor, torch.Tensor) and tensor.grad_fn is not None for tensor in held) and _first(self.turn, f"{type(module).__name__}.{name}"):
                    where = ".".join(part for part in (self.turn.name, paths.get(id(module), ""), name) if part)
                    log.warning(
                        f"{where} is a tensor that the module computes: no gradient comes through an attribute; if a loss is made of it, return it from the forward() of "
                        f"{self.turn.name}, and else keep it with .detach() (said once)"
                    )


def _is_looked_at(value: Any) -> bool:
    return type(value) in _VALUES or type(value) is torch.Tensor


def _another(now: Any, then: Any) -> bool:
    return now is not then and (type(now) is not type(then) or type(now) is torch.Tensor or now != then)


def _same(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True))


def _sampled(outs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Some values of each result."""
    flat = [out.detach().reshape(-1) for out in outs if out.is_floating_point() and out.numel() and out.layout == torch.strided and not out.is_nested]
    return [each[:: max(1, each.numel() // _SAMPLED)].clone() for each in flat]


def _apart(then: list[torch.Tensor], now: list[torch.Tensor]) -> float:
    """How far results are from those of the forward, by more than other kernels explain; 0: they are as good as the same."""
    most = 0.0
    for a, b in zip(then, now, strict=len(then) == len(now)):
        if a.shape != b.shape or torch.equal(a, b):
            continue
        apart = ((a.double() - b.double()).norm() / a.double().norm()).item()
        if apart > (1e-4 if a.dtype in (torch.float32, torch.float64) else 1e-2) and apart > most:
            most = apart
    return most


def _first(turn: ModuleTurn, what: str) -> bool:
    """Whether this is said of the model for the first time."""
    said = _said.setdefault(turn.engine, set())
    return what not in said and not said.add(what)  # type: ignore[func-returns-value]


def _names(active: Any) -> list[str]:
    return [active] if isinstance(active, str) else list(active)


def _say_hooks(turn: ModuleTurn, members: Members) -> None:
    for module in members.inner:
        if module._forward_hooks:
            for hook in module._forward_hooks.values():
                if not is_of_a_library(hook) and _first(turn, "hook"):
                    log.warning(
                        f"{turn.name} has a forward hook on a module inside of it ({type(module).__name__}): it runs in the forward and again in the recomputation, and no "
                        "gradient comes through what it keeps; return that from the module, or hook what takes the turn (said once)"
                    )
