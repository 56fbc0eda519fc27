"""How long the program takes to build again after a change to one file: each is touched in turn, and ccache does not help.

    .venv/bin/python tools/rebuild_time.py [--build build] [FILE ...]        (those of runtime/session where none is given)

A line for each file: seconds of the clock, and of the processor, which other programs change less. The build folder is brought
up to date first."""

import argparse
import os
import pathlib
import resource
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).parents[1]


def build(folder):
    """Seconds of the clock and of the processor until the program and its library are up to date."""
    before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    command = ["cmake", "--build", folder, "--target", "tierflow_program", "tierflow_train"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "CCACHE_DISABLE": "1"})
    if done.returncode != 0:
        sys.exit(done.stdout + done.stderr)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.monotonic() - begun, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default=ROOT / "build", type=pathlib.Path)
    parser.add_argument("files", nargs="*", type=pathlib.Path)
    args = parser.parse_args()
    files = [file.resolve() for file in args.files] or sorted(file for file in (ROOT / "runtime/session").iterdir() if file.suffix == ".cpp")
    if missing := [str(file) for file in files if not file.is_file()]:
        sys.exit(f"no such file: {', '.join(missing)}")
    build(args.build)
    for file in files:
        os.utime(file)
        wall, processor = build(args.build)
        print(f"{wall:6.1f} s {processor:6.1f} s  {os.path.relpath(file, ROOT)}", flush=True)


if __name__ == "__main__":
    main()
