#!/usr/bin/env python3
"""A volume over two drives of known speed: loop devices that a cgroup throttles, equally and 1:3. Needs root.

    sudo benchmarks/storage/throttled.py --program build/tierflow --dir /mnt/nvme [--limit 200] [--size 256] [--rounds 3]

Prints one JSON object a line for each pair of limits (MB/s) and each of read, write and mixed: what each drive gives alone, what the volume over
both gives, and the share of their sum. The limit is the cgroup's (io.max, or blkio.throttle of version 1); where the machine offers
neither, it says so and measures nothing. Medians over the rounds."""
import argparse
import contextlib
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

BLKIO = pathlib.Path("/sys/fs/cgroup/blkio")
UNIFIED = pathlib.Path("/sys/fs/cgroup")


def sh(*words):
    return subprocess.run([str(w) for w in words], check=True, capture_output=True, text=True).stdout.strip()


class CannotThrottle(Exception):
    pass


class Throttle:
    """A cgroup whose processes may move `limits[device]` bytes a second, either way, from and to each device."""

    def __init__(self, limits):
        try:
            self.make(limits)
        except OSError as error:
            raise CannotThrottle(str(error)) from error

    def make(self, limits):
        name = f"tierflow-bench-{os.getpid()}"
        if (BLKIO / "blkio.throttle.read_bps_device").exists() or (BLKIO / "tasks").exists():
            self.group = BLKIO / name
            self.group.mkdir()
            self.procs = self.group / "cgroup.procs"
            for device, limit in limits.items():
                for side in "read", "write":
                    (self.group / f"blkio.throttle.{side}_bps_device").write_text(f"{device} {limit}")
        elif (UNIFIED / "cgroup.controllers").exists() and "io" in (UNIFIED / "cgroup.controllers").read_text().split():
            (UNIFIED / "cgroup.subtree_control").write_text("+io")
            self.group = UNIFIED / name
            self.group.mkdir()
            self.procs = self.group / "cgroup.procs"
            for device, limit in limits.items():
                (self.group / "io.max").write_text(f"{device} rbps={limit} wbps={limit}")
        else:
            raise OSError("no cgroup here limits a device's bandwidth")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.group.rmdir()

    def run(self, words):
        def join():
            self.procs.write_text(str(os.getpid()))

        done = subprocess.run(words, preexec_fn=join, capture_output=True, text=True)
        if done.returncode != 0:
            sys.exit(done.stderr)
        return [json.loads(line) for line in done.stdout.splitlines()]


def unmount(mount):
    """A ring that a process left behind keeps its files open for a moment after the process has ended."""
    for attempt in range(50):
        if subprocess.run(["umount", str(mount)], stderr=None if attempt == 49 else subprocess.DEVNULL).returncode == 0:
            return
        time.sleep(0.1)


@contextlib.contextmanager
def loop_drive(folder, name, size):
    """An ext4 on a loop device: its mount point and its device number."""
    image, mount = folder / f"{name}.img", folder / name
    with contextlib.ExitStack() as undo:
        with open(image, "wb") as file:
            os.posix_fallocate(file.fileno(), 0, size)
        undo.callback(image.unlink)
        device = sh("losetup", "--find", "--show", "--direct-io=on", image)
        undo.callback(sh, "losetup", "--detach", device)
        sh("mkfs.ext4", "-q", "-F", "-E", "lazy_itable_init=0,lazy_journal_init=0", device)
        mount.mkdir()
        undo.callback(mount.rmdir)
        sh("mount", device, mount)
        undo.callback(unmount, mount)
        number = os.stat(device).st_rdev
        yield mount, f"{os.major(number)}:{os.minor(number)}"


def measure(args, limits, folder):
    size = args.size << 20
    with contextlib.ExitStack() as stack:
        drives = [stack.enter_context(loop_drive(folder, f"drive{i}", size * 5 // 4 + (96 << 20))) for i in range(2)]
        throttle = stack.enter_context(Throttle({number: int(limit * 1e6) for (_, number), limit in zip(drives, limits)}))
        words = [args.program, "bench", "storage", "--json", "--engine", args.engine, "--dir", ",".join(str(mount) for mount, _ in drives),
                 "--size", str(size), "--seconds", str(args.seconds)]
        rounds = [throttle.run(words) for _ in range(args.rounds)]
    for phase in "read", "write", "mixed":
        alone, both, shares = [[], []], [], []
        for first, second, volume in rounds:
            one, two, sum_of = (line[f"{phase}_gb_s"] * 1e3 for line in (first, second, volume))
            alone[0].append(one)
            alone[1].append(two)
            both.append(sum_of)
            shares.append(sum_of / (one + two))
        one, two = map(statistics.median, alone)
        print(json.dumps({"limits_mb_s": limits, "phase": phase, "engine": args.engine, "alone_mb_s": [round(one, 1), round(two, 1)],
                          "volume_mb_s": round(statistics.median(both), 1), "times_the_faster": round(statistics.median(both) / max(one, two), 2),
                          "share_of_sum": round(statistics.median(shares), 3)}), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", required=True)
    parser.add_argument("--dir", required=True)
    parser.add_argument("--limit", type=int, default=200, help="MB/s of each drive; unequal: a half and three halves of it")
    parser.add_argument("--size", type=int, default=256, help="MiB of the volume")
    parser.add_argument("--seconds", type=float, default=3, help="of each measurement, at least")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--engine", default="io_uring")
    args = parser.parse_args()
    if os.geteuid() != 0:
        sys.exit("throttled.py needs root, for loop devices and cgroups; nothing was measured")
    with tempfile.TemporaryDirectory(dir=args.dir) as name:
        for limits in ([args.limit, args.limit], [args.limit // 2, args.limit * 3 // 2]):
            try:
                measure(args, limits, pathlib.Path(name))
            except CannotThrottle as error:
                sys.exit(f"the drives cannot be throttled here ({error}); nothing was measured")


if __name__ == "__main__":
    main()
