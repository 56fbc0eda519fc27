#!/usr/bin/env python3
"""Compiles a CUDA source to PTX and refuses instructions that are not IEEE: approximate ones, those that flush subnormal
numbers, and multiplications or additions that the assembler may still fuse (without an explicit rounding)."""
import argparse
import re
import subprocess
import sys

ARITHMETIC = re.compile(r"^\s*((?:@\S+\s+)?)((?:add|sub|mul|mad|fma|div|rcp|sqrt|rsqrt|ex2|lg2|sin|cos|tanh)\.\S*f(?:32|64)\S*)", re.M)


def faults(ptx: str, allowed: list[str]) -> list[str]:
    found = sorted({match.group(2) for match in ARITHMETIC.finditer(ptx)})
    if not found:
        return ["no floating-point instruction was found"]
    return [name for name in found if name not in allowed and (".approx" in name or ".ftz" in name or ".rn" not in name)]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--nvcc", required=True)
    parser.add_argument("--source", required=True)
    parser.add_argument("--include", required=True)
    parser.add_argument("--allow", action="append", default=[], metavar="INSTRUCTION", help="one that the device's library uses inside an exact function")
    parser.add_argument("flags", nargs="*")
    options = parser.parse_args()

    def compiled(flags: list[str]) -> str:
        command = [options.nvcc, "-std=c++20", "-arch=compute_80", "-ptx", f"-I{options.include}", *flags, options.source, "-o", "-"]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    wrong = faults(compiled(options.flags), options.allow)
    if wrong:
        print("not IEEE:", *wrong)
        return 1
    if not faults(compiled([flag for flag in options.flags if not flag.startswith("--f")] + ["--use_fast_math"]), options.allow):
        print("the check passes code that was compiled with --use_fast_math: it sees nothing")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
