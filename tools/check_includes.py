"""Includes follow one direction: bindings > runtime > swap > io, with optim beside them; LibTorch stops at runtime.

Inside runtime the rooms do so too. Every .h, .cpp and .cu of runtime lies in a room, but for tierflow.h, which includes what a C++
author needs. No source includes <ranges>: clang 14, which fuzzing and clang-tidy use, cannot compile the views of libstdc++ 12.
Takes the folder to look at, the current one where none is given. Also names files beyond 400 lines, without failing.
"""

import pathlib
import re
import sys

MAY_INCLUDE = {
    "io": set(),
    "optim": set(),
    "swap": {"io"},
    "runtime": {"swap", "io", "optim"},
    "bindings": {"runtime", "swap", "io", "optim"},
}
# room of runtime: the rooms that it may include
ROOMS = {
    "base": set(),
    "data": {"base"},
    "spec": {"base"},
    "checkpoint": {"base", "spec"},
    "planning": {"base", "spec"},
    "device": {"base"},
    "models": {"base", "spec"},
    "batches": {"base", "data", "models"},
    "optimizer": {"base"},
    "state": {"base", "spec", "checkpoint", "planning"},
    "session": {"base", "spec", "checkpoint", "planning", "device", "models", "state"},
    "stream": {"base", "spec", "checkpoint", "planning", "device", "models", "state"},
    "program": {"base", "data", "spec", "checkpoint", "planning", "device", "models", "batches", "state", "session"},
}
FRONT_DOOR = "tierflow.h"
WITHOUT_TORCH = ("io", "optim", "swap")
ROOMS_WITHOUT_TORCH = ("base", "data", "spec", "checkpoint", "planning")
TORCH = re.compile(r"^(torch|ATen|c10|caffe2|pybind11)/|^Python\.h$")
INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', re.MULTILINE)
SUFFIXES = {".h", ".cpp", ".cu", ".cuh"}


def room_of(parts):
    """The room of runtime/ROOM/..., or None for what lies in runtime itself."""
    return parts[1] if len(parts) > 2 else None


def faults(path, text):
    """path: relative to the top of the tree."""
    folder, room = path.parts[0], room_of(path.parts) if path.parts[0] == "runtime" else None
    if folder == "runtime" and room not in ROOMS and path.name != FRONT_DOOR:
        yield f"{path}: lies in no room of runtime: {', '.join(ROOMS)}"
        return
    for include in INCLUDE.findall(text):
        parts = include.split("/")
        target = parts[0]
        if target in MAY_INCLUDE and target != folder and target not in MAY_INCLUDE[folder]:
            yield f"{path}: includes {include}, but {folder} may not know {target}"
        if target == folder == "runtime" and room is not None and room_of(parts) != room and room_of(parts) not in ROOMS[room]:
            yield f"{path}: includes {include}, but runtime/{room} may not know {room_of(parts) or FRONT_DOOR}"
        if include == "ranges":
            yield f"{path}: includes <ranges>, which clang 14 cannot compile with libstdc++ 12"
        if TORCH.match(include) and (folder in WITHOUT_TORCH or room in ROOMS_WITHOUT_TORCH):
            yield f"{path}: includes {include}, but {folder if room is None else f'runtime/{room}'} is below LibTorch and Python"


def main(arguments):
    top = pathlib.Path(arguments[0] if arguments else ".")
    found = []
    for folder in MAY_INCLUDE:
        for path in sorted(p for p in (top / folder).rglob("*") if p.suffix in SUFFIXES):
            text = path.read_text(encoding="utf-8")
            found += faults(path.relative_to(top), text)
            if (lines := text.count("\n")) > 400:
                print(f"warning: {path.relative_to(top)}: {lines} lines; beyond 400 a file is better split")
    print("\n".join(found) if found else "includes: every one points down")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
