"""What a log of libkernel_log.so comes to: each kernel's share of the time, and when the stream that computes had nothing to do."""

import collections
import gzip
import re
import shutil

IDLE_NS = 20_000  # gaps from this on are listed


def plain(name):
    """A kernel's name without the types that it returns and takes."""
    depth, kept = 0, []
    for letter in re.sub(r"^void |\(anonymous namespace\)::", "", name):
        if letter == "(" and not depth:
            break
        depth += {"<": 1, ">": -1}.get(letter, 0)
        kept.append(letter)
    return "".join(kept)[:120]


def read(path):
    """Names by id; kernels (begin, end, stream, id) and copies (begin, end, stream, kind, bytes), by begin. Lines that are cut off are left out."""
    names, kernels, copies = {}, [], []
    with (gzip.open if str(path).endswith(".gz") else open)(path, "rt") as file:
        for line in file:
            words = line.split()
            if line.startswith("name ") and len(words) >= 3:
                names[int(words[1])] = line.rstrip("\n").split(" ", 2)[2]
            elif line.startswith("kernel ") and len(words) == 5:
                kernels.append((int(words[3]), int(words[4]), int(words[2]), int(words[1])))
            elif line.startswith(("copy ", "fill ")) and len(words) == 6:
                copies.append((int(words[3]), int(words[4]), int(words[2]), f"{words[0]} {words[1]}", int(words[5])))
    return names, sorted(kernels), sorted(copies)


def last_step(kernels, seconds):
    """The kernels of the last so many seconds."""
    end = max(kernel[1] for kernel in kernels)
    return [kernel for kernel in kernels if kernel[0] >= end - seconds * 1e9]


def summary(path, seconds, most=30):
    """Dictionaries to show: of the stream that computes most, of its longest gaps, of each of the `most` kernels that take most, of copies.
    seconds: of a step; what began earlier than that before the last kernel's end is left out. Nothing where the log holds no kernel."""
    names, kernels, copies = read(path)
    if not kernels:
        return []
    kernels = last_step(kernels, seconds)
    begin, end = kernels[0][0], max(kernel[1] for kernel in kernels)
    by_stream = collections.Counter()
    for kernel in kernels:
        by_stream[kernel[2]] += kernel[1] - kernel[0]
    compute = by_stream.most_common(1)[0][0]
    gaps, done, short = [], begin, 0
    for kernel in (kernel for kernel in kernels if kernel[2] == compute):
        gap = kernel[0] - done
        if gap >= IDLE_NS:
            gaps.append((gap, kernel[0], kernel[3]))
        else:
            short += max(0, gap)
        done = max(done, kernel[1])
    span = max(1, end - begin)
    shown = [{"compute_stream": {"seconds": span / 1e9, "busy": by_stream[compute] / span, "in_short_gaps": short / span, "in_long_gaps": sum(gap[0] for gap in gaps) / span, "long_gaps": len(gaps)}}]
    shown += [{"gap_ms": gap / 1e6, "at_s": (at - begin) / 1e9, "before": plain(names.get(name, "?"))} for gap, at, name in sorted(gaps, reverse=True)[:10]]
    totals = collections.defaultdict(lambda: [0, 0])
    for kernel in kernels:
        entry = totals[(kernel[2] != compute, kernel[3])]
        entry[0] += kernel[1] - kernel[0]
        entry[1] += 1
    for (elsewhere, name), (time, count) in sorted(totals.items(), key=lambda item: -item[1][0])[:most]:
        shown.append({"kernel": plain(names.get(name, "?")), "share": time / span, "count": count, "us": time / count / 1e3, **({"beside": True} if elsewhere else {})})
    moved = collections.defaultdict(lambda: [0, 0, 0])
    for copy in copies:
        if copy[0] >= begin:
            entry = moved[(copy[3], copy[2])]
            entry[0] += copy[1] - copy[0]
            entry[1] += 1
            entry[2] += copy[4]
    for (kind, stream), (time, count, size) in sorted(moved.items(), key=lambda item: -item[1][0])[:8]:
        shown.append({"copied": kind, "stream": stream, "share": time / span, "count": count, "bytes": size, "gb_s": size / max(1, time)})
    return shown


def keep(path, to):
    """Copies a log, compressed."""
    with open(path, "rb") as log, gzip.open(to, "wb") as file:
        shutil.copyfileobj(log, file)
