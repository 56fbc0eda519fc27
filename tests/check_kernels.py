#!/usr/bin/env python3
"""Compares what the compiler gave each CUDA kernel (registers, shared memory, stack) with tests/kernels.toml, by cuobjdump. Takes the objects
of all .cu files; those that are not .cu are passed over."""

import argparse
import pathlib
import re
import subprocess
import sys
import tomllib

KERNEL = re.compile(r"_cu_[0-9a-f]{8}(?:_\d+)?(\d+)")  # in the name of a kernel in an unnamed namespace, before its own
USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")


def name_of(mangled):
    """The kernel's own name, without what it is a template of."""
    match = KERNEL.search(mangled)
    return mangled[match.end() : match.end() + int(match[1])] if match else mangled


def usage(dump):
    """Of each kernel: the most that any architecture and any instance of it takes, and on which architectures it was found."""
    found, architecture, kernel = {}, "", ""
    for line in dump.splitlines():
        if match := re.match(r"arch = (\w+)", line):
            architecture = match[1]
        elif match := re.match(r"\s*Function (\S+):", line):
            kernel = name_of(match[1])
        elif (match := USAGE.search(line)) and kernel:
            registers, stack, shared, local = map(int, match.groups())
            found.setdefault(kernel, []).append({"architecture": architecture, "registers": registers, "shared": shared, "spilled": stack + local})
            kernel = ""
    return found


def faults(table, found):
    for kernel in sorted(table.keys() | found.keys()):
        if kernel not in found:
            yield f"{kernel}: stands in the table and in no object"
            continue
        if kernel not in table:
            yield f"{kernel}: stands in no table; it takes {max(one['registers'] for one in found[kernel])} registers"
            continue
        for one in found[kernel]:
            for what, unit in (("registers", "registers"), ("shared", "bytes of shared memory")):
                if one[what] > table[kernel][what]:
                    yield f"{kernel} on {one['architecture']}: {one[what]} {unit}, and the table allows {table[kernel][what]}"
            if one["spilled"]:
                yield f"{kernel} on {one['architecture']}: {one['spilled']} bytes on the stack"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--cuobjdump", required=True, help="the program; empty where there is none")
    parser.add_argument("objects", nargs="*")
    options = parser.parse_args()
    objects = [pathlib.Path(one) for one in options.objects if one.endswith(".cu.o")]
    if not objects:
        print("SKIPPED: this build has no CUDA: there are no kernels")
        return 77
    if not pathlib.Path(options.cuobjdump).is_file():
        print("SKIPPED: no cuobjdump here: neither the CUDA toolkit nor a triton wheel brought it")
        return 77
    tables = tomllib.loads((pathlib.Path(__file__).parent / "kernels.toml").read_text(encoding="utf-8"))
    wrong = []
    for at in objects:
        source = at.name.removesuffix(".cu.o")
        dump = subprocess.run([options.cuobjdump, "--dump-resource-usage", at], check=True, capture_output=True, text=True).stdout
        found = usage(dump)
        wrong += [f"{source}.cu: {fault}" for fault in faults(tables.get(source, {}), found)]
        for kernel, all_of_it in sorted(found.items()):
            registers = [one["registers"] for one in all_of_it]
            architectures = len({one["architecture"] for one in all_of_it})
            print(f"{source}.cu: {kernel}: {min(registers)} to {max(registers)} registers on {architectures} architectures")
    print(*wrong, sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
