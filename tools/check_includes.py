"""Includes follow one direction: bindings > runtime > swap > io, with optim beside them; LibTorch stops at runtime.

Also names files beyond 400 lines, without failing.
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
WITHOUT_TORCH = ("io", "optim", "swap")
TORCH = re.compile(r"^(torch|ATen|c10|caffe2|pybind11)/|^Python\.h$")
INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', re.MULTILINE)
SUFFIXES = {".h", ".cpp", ".cu", ".cuh"}


def faults(path, folder):
    for include in INCLUDE.findall(path.read_text(encoding="utf-8")):
        target = include.split("/")[0]
        if target in MAY_INCLUDE and target != folder and target not in MAY_INCLUDE[folder]:
            yield f"{path}: includes {include}, but {folder} may not know {target}"
        if folder in WITHOUT_TORCH and TORCH.match(include):
            yield f"{path}: includes {include}, but {folder} is below LibTorch and Python"


def main():
    found = []
    for folder in MAY_INCLUDE:
        for path in sorted(p for p in pathlib.Path(folder).rglob("*") if p.suffix in SUFFIXES):
            found += faults(path, folder)
            if (lines := path.read_bytes().count(b"\n")) > 400:
                print(f"warning: {path}: {lines} lines; beyond 400 a file is better split")
    print("\n".join(found) if found else "includes: every one points down")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
