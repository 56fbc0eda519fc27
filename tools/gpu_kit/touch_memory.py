"""Writes to --gib GiB of memory once and gives it back: a virtual machine may hand memory out only as it is used, and then slowly.
Waits where the machine has none free yet; ends with what it got. One JSON line."""

import argparse
import concurrent.futures
import ctypes
import json
import mmap
import os
import time

GIB = 1 << 30
LEFT = 3 * GIB // 2  # is always left to the machine


def memory(field):
    with open("/proc/meminfo") as file:
        return next((int(line.split()[1]) * 1024 for line in file if line.startswith(field + ":")), 0)


def touch(size):
    chunk = mmap.mmap(-1, size)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            chunk.madvise(mmap.MADV_HUGEPAGE)
        except OSError:
            pass  # a kernel without huge pages
    ctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(chunk)), 1, size)  # without the interpreter's lock
    return chunk


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, required=True)
    parser.add_argument("--patience", type=float, default=15, help="seconds to wait for memory that is not there yet")
    args = parser.parse_args()
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # where memory runs out, this process goes
    before, begin, held, last = memory("MemTotal"), time.monotonic(), [], time.monotonic()
    size, threads = min(GIB, int(args.gib * GIB)), min(16, os.cpu_count() or 1)
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        while len(held) * size < args.gib * GIB and time.monotonic() - last < args.patience:
            room = (memory("MemAvailable") - LEFT) // size
            count = min(threads, room, int(args.gib * GIB) // size - len(held))
            if count < 1:
                time.sleep(0.2)
                continue
            held += pool.map(touch, [size] * count)
            last = time.monotonic()
            print(f"{len(held) * size / GIB:.1f} GiB, {time.monotonic() - begin:.1f} s", flush=True)
    print(json.dumps({"touched_gib": round(len(held) * size / GIB, 2), "seconds": round(time.monotonic() - begin, 2), "memory_total_before": before, "memory_total": memory("MemTotal")}))
    return 0 if held else 1


if __name__ == "__main__":
    raise SystemExit(main())
