"""What functions compute with, to tell whether a script that is started again gives the same ones."""

from __future__ import annotations

import dis
import functools
import hashlib
import json
import types
from collections.abc import Iterable, Mapping
from typing import Any

_PLAIN = (bool, int, float, str, type(None))
_LARGE = 1000  # a container with more, and one so deep within others, is told by its type and length
_DEEP = 20


def digest_of(value: Any) -> str:
    """Of described(): equal in two processes where the function is the same."""
    return hashlib.sha256(json.dumps(described(value), default=repr).encode()).hexdigest()


def described(value: Any) -> Any:
    """What a function computes with, as JSON: its code, its default values, and what it takes from around it. Of that, plain values and functions of its own
    module are looked into; of modules, classes and objects, the plain values of the attributes that the code names; of an object that is called, what its class
    does then. Under another version of Python the code may be another."""
    return _Description().of(value, frozenset())


class _Description:
    def __init__(self) -> None:
        self._seen: dict[int, tuple[int, Any]] = {}  # each is described once, and lives as long as this
        self._depth = 0
        self._module: str | None = None  # of the first function

    def of(self, value: Any, names: frozenset[str]) -> Any:
        """names: those in the code that the value is taken from."""
        if isinstance(value, _PLAIN):
            return value
        if isinstance(value, (bytes, complex)):
            return repr(value)
        if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
            return repr(value.item())
        if id(value) in self._seen:
            return f"{self._seen[id(value)][0]} of these"
        self._seen[id(value)] = (len(self._seen), value)
        if isinstance(value, (list, tuple, set, frozenset, dict)) and (len(value) > _LARGE or self._depth > _DEEP):
            return f"a {type(value).__qualname__} of {len(value)}"
        self._depth += 1
        try:
            return self._of_object(value, names)
        finally:
            self._depth -= 1

    def _of_object(self, value: Any, names: frozenset[str]) -> Any:
        if isinstance(value, types.FunctionType) and value.__module__ == (self._module or value.__module__):
            return self._of_function(value)
        if isinstance(value, types.MethodType):
            return {"method": self.of(value.__func__, names), "of": self.of(value.__self__, _names(getattr(value.__func__, "__code__", None)))}
        if isinstance(value, functools.partial):
            return {"partial": self.of(value.func, names), "arguments": self._each(value.args, names), "keywords": self._named(value.keywords, names)}
        if isinstance(value, (list, tuple)):
            return self._each(value, names)
        if isinstance(value, (set, frozenset)):
            return self._each(sorted(value, key=repr), names)
        if isinstance(value, dict):
            return self._named(value, names)
        if (wrapped := getattr(value, "__wrapped__", None)) is not None:
            return {"wraps": self.of(wrapped, names)}
        if isinstance(value, (types.FunctionType, types.BuiltinFunctionType)):
            return f"{value.__module__}.{value.__qualname__}"
        if isinstance(value, type):
            return {f"{value.__module__}.{value.__qualname__}": self._plain_of(value, names)}
        what = value.__name__ if isinstance(value, types.ModuleType) else f"a {type(value).__module__}.{type(value).__qualname__}"
        call = getattr(type(value), "__call__", None)
        if not isinstance(value, types.ModuleType) and isinstance(call, types.FunctionType):
            return {what: self._plain_of(value, names | _names(call.__code__)), "called": self.of(call, names)}
        return {what: self._plain_of(value, names)}

    def _plain_of(self, value: Any, names: frozenset[str]) -> dict[str, Any]:
        own = getattr(value, "__dict__", {})
        return {name: own[name] for name in sorted(names & own.keys()) if isinstance(own[name], _PLAIN)}

    def _of_function(self, function: types.FunctionType) -> dict[str, Any]:
        self._module = function.__module__
        codes, names = _codes(function.__code__), _names(function.__code__)
        cells = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
        return {
            "code": [[code.co_code.hex(), *code.co_names, *code.co_freevars] for code in codes],
            "constants": self._each((each for code in codes for each in code.co_consts if each not in codes), names),
            "defaults": self._each([function.__defaults__, function.__kwdefaults__], names),
            "closure": self._each(cells, names),
            "globals": self._named({name: function.__globals__[name] for name in _globals(codes) if name in function.__globals__}, names),
        }

    def _each(self, values: Iterable[Any], names: frozenset[str]) -> list[Any]:
        return [self.of(value, names) for value in values]

    def _named(self, values: Mapping[Any, Any], names: frozenset[str]) -> dict[str, Any]:
        return {str(key): self.of(values[key], names) for key in sorted(values, key=str)}


def _is_filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def _codes(code: types.CodeType) -> list[types.CodeType]:
    """It, and those of the functions and comprehensions in it."""
    return [code, *(inner for constant in code.co_consts if isinstance(constant, types.CodeType) for inner in _codes(constant))]


def _globals(codes: list[types.CodeType]) -> set[str]:
    return {step.argval for code in codes for step in dis.get_instructions(code) if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")}


def _names(code: types.CodeType | None) -> frozenset[str]:
    return frozenset(name for each in _codes(code) for name in each.co_names) if code is not None else frozenset()
