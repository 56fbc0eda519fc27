"""One lane alone, as far as torch itself can take it: the bounds that a streamed step is judged by. One JSON line a measurement.

copies             host memory to the device and back, pinned and not, one or two copies in flight, and both directions at once
overlap            a copy beside a matrix product: what each loses
products           bf16 matrix products of the models' shapes
weight_gradients   a product added to an fp32 sum: whole, in tiles of rows as the program cuts them, in aligned tiles, and in one call
attention          each backend of scaled_dot_product_attention, forward and backward
kernels            elementwise operations, as rates of the bytes that they have to move, beside a copy on the device"""

import argparse
import sys

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from timing import Clock, show

MIB = 1 << 20


def host(size, pinned=True):
    return torch.ones(size, dtype=torch.uint8, pin_memory=pinned)


def in_flight(moves, streams, depth, turns):
    """`moves[i]` in turn on its stream, at most `depth` of each stream not yet done when the next is given."""
    done = {stream: [] for stream in streams}
    for _ in range(turns):
        for (to, source), stream in zip(moves, streams):
            if len(done[stream]) >= depth:
                done[stream].pop(0).synchronize()
            with torch.cuda.stream(stream):
                to.copy_(source, non_blocking=True)
                done[stream].append(stream.record_event())


def copies(clock):
    up, down = torch.cuda.Stream(), torch.cuda.Stream()
    for mib in (1, 16, 64, 256):
        size = mib * MIB
        a, b, c, d = host(size), torch.empty(size, dtype=torch.uint8, device="cuda"), torch.ones(size, dtype=torch.uint8, device="cuda"), host(size)
        ways = {"up": ([(b, a)], [up]), "down": ([(d, c)], [down]), "both": ([(b, a), (d, c)], [up, down])}
        turns = max(4, 2048 // mib)
        for way, (moves, streams) in ways.items():
            for depth in (1, 2):
                in_flight(moves, streams, depth, 4)
                best = min(clock.once(lambda m=moves, s=streams, n=depth: in_flight(m, s, n, turns), 1) for _ in range(2))
                show(copy=way, mib=mib, depth=depth, gb_s=size * len(moves) * turns / best / 1e9)
    size = 256 * MIB
    pageable, device = host(size, pinned=False), torch.empty(size, dtype=torch.uint8, device="cuda")
    show(copy="up, not pinned", mib=256, gb_s=size / clock.seconds(lambda: device.copy_(pageable)) / 1e9)
    show(copy="down, not pinned", mib=256, gb_s=size / clock.seconds(lambda: pageable.copy_(device)) / 1e9)


def lasting(stream, work, turns):
    """Events before and after so many turns on that stream."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.stream(stream):
        begin.record()
        for _ in range(turns):
            work()
        end.record()
    return begin, end


def overlap(clock):
    size, n = 64 * MIB, 8192
    a, b = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product = torch.empty_like(a)
    here, there = torch.ones(size, dtype=torch.uint8, device="cuda"), host(size)

    def multiply():
        torch.mm(a, b, out=product)

    alone = clock.seconds(multiply)
    for way, work in (("down", lambda: there.copy_(here, non_blocking=True)), ("up", lambda: here.copy_(there, non_blocking=True))):
        copy = clock.seconds(work)
        for priority in (0, -1):
            compute, stream = torch.cuda.current_stream(), torch.cuda.Stream(priority=priority)
            # The longer one runs beside the whole of the shorter one.
            found = {}
            for longer in ("product", "copy"):
                copy_turns, product_turns = int((0.3 if longer == "product" else 1.2) / copy) + 1, int((1.2 if longer == "product" else 0.3) / alone) + 1
                torch.cuda.synchronize()
                copying, computing = lasting(stream, work, copy_turns), lasting(compute, multiply, product_turns)
                torch.cuda.synchronize()
                if longer == "product":
                    found["gb_s_beside"] = size * copy_turns / copying[0].elapsed_time(copying[1]) / 1e6
                else:
                    found["tflops_beside"] = 2 * n**3 * product_turns / computing[0].elapsed_time(computing[1]) / 1e9
            show(copy=way, stream_priority=priority, gb_s_alone=size / copy / 1e9, tflops_alone=2 * n**3 / alone / 1e12, **found)


def shapes(clock):
    """Tokens, and the weights' shapes, of the large models."""
    if clock.tiny:
        return (32,), [("tiny", 64, 128)]
    return (2048, 8192), [("8B gate", 14336, 4096), ("8B down", 4096, 14336), ("8B q", 4096, 4096), ("8B k", 1024, 4096), ("1B gate", 8192, 2048)]


def random(clock, *shape, dtype=torch.bfloat16):
    return torch.randn(*shape, device=clock.device, dtype=torch.float32).mul_(0.05).to(dtype)


def products(clock):
    all_tokens, weights = shapes(clock)
    for size in (256,) if clock.tiny else (4096, 8192):
        a, b = random(clock, size, size), random(clock, size, size)
        clock.measure({"product": f"{size} square"}, lambda a=a, b=b, n=size: {"tflops": 2 * n**3 / clock.seconds(lambda: a @ b) / 1e12})
    for tokens in all_tokens:
        for name, out, width in weights:
            x, w, d = random(clock, tokens, width), random(clock, out, width), random(clock, tokens, out)
            flops = 2 * tokens * out * width
            clock.measure({"product": name, "tokens": tokens}, lambda x=x, w=w, d=d, f=flops: {"forward_tflops": f / clock.seconds(lambda: F.linear(x, w)) / 1e12,
                                                                                             "input_gradient_tflops": f / clock.seconds(lambda: d @ w) / 1e12})


def added_in_tiles(total, d, x, tile):
    for row in range(0, total.shape[0], tile):
        count = min(tile, total.shape[0] - row)
        total[row : row + count] += torch.mm(d[:, row : row + count].t(), x)


def weight_gradients(clock):
    all_tokens, weights = shapes(clock)
    for tokens in all_tokens:
        for name, out, width in weights:
            d, x, total = random(clock, tokens, out), random(clock, tokens, width), torch.zeros(out, width, device=clock.device)
            rows = max(64, (1 << 22) // width)
            # torch's addmm of bf16 into fp32 is CUDA's alone.
            ways = {f"tiles of {rows} rows, as the program cuts": lambda d=d, x=x, t=total, r=rows: added_in_tiles(t, d, x, r),
                    "tiles of a multiple of 128 rows": lambda d=d, x=x, t=total, r=rows: added_in_tiles(t, d, x, (r + 127) // 128 * 128),
                    "whole": lambda d=d, x=x, t=total: t.add_(torch.mm(d.t(), x)),
                    **({"one call, added in fp32": lambda d=d, x=x, t=total: torch.addmm(t, d.t(), x, out_dtype=torch.float32, out=t)} if clock.cuda else {})}
            for way, work in ways.items():
                def timed(work=work, flops=2 * tokens * out * width):
                    seconds = clock.seconds(work)
                    return {"ms": 1e3 * seconds, "tflops": flops / seconds / 1e12}

                clock.measure({"weight_gradient": name, "tokens": tokens, "way": way}, timed)


def attention(clock):
    dim, heads, kv = (16, 4, 2) if clock.tiny else (128, 32, 8)
    backends = [SDPBackend.MATH] if clock.tiny else [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
    for length in (64,) if clock.tiny else (2048, 4096, 16384, 65536):
        batch = 1 if clock.tiny else max(1, 8192 // length)
        q, k, v = (random(clock, batch, n, length, dim).requires_grad_() for n in (heads, kv, kv))
        d = random(clock, batch, heads, length, dim)
        flops = 2 * batch * heads * length**2 * dim  # of a causal forward: half of two products
        for backend in backends:
            for deterministic in (False, True):
                def timed(backend=backend, q=q, k=k, v=v, d=d, flops=flops):
                    with sdpa_kernel(backend):
                        forward = clock.seconds(lambda: F.scaled_dot_product_attention(q.detach(), k.detach(), v.detach(), is_causal=True, enable_gqa=True))
                        both = clock.seconds(lambda: torch.autograd.grad(F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True), (q, k, v), d))
                    return {"forward_ms": 1e3 * forward, "both_ms": 1e3 * both, "forward_tflops": flops / forward / 1e12, "both_tflops": 3.5 * flops / both / 1e12}

                torch.use_deterministic_algorithms(deterministic)  # one that only warns leaves attention as it was
                clock.measure({"attention": backend.name, "length": length, "deterministic": deterministic}, timed, may_refuse=True)
    torch.use_deterministic_algorithms(False)
    clock.failed = clock.measured == 0


def kernels(clock):
    rows, hidden, inner = (32, 64, 128) if clock.tiny else (16384, 4096, 14336)
    x, y, weight = random(clock, rows, hidden), random(clock, rows, hidden), random(clock, hidden)
    gate, up = random(clock, rows, inner), random(clock, rows, inner)
    wide, half = torch.randn(rows * hidden, device=clock.device), random(clock, rows, hidden // 2)
    total = torch.zeros_like(wide)
    bits = torch.empty(rows * hidden, device=clock.device, dtype=torch.bfloat16)
    logits = random(clock, rows // 16, 512 if clock.tiny else 128256)
    labels = torch.zeros(rows // 16, device=clock.device, dtype=torch.long)

    def norm():
        w = x.float()
        return weight * (w * torch.rsqrt(w.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)

    def turn():
        low, high = x.chunk(2, -1)
        return torch.cat((low * half - high * half, high * half + low * half), -1)

    n = rows * hidden
    copied = 2 * x.numel() * x.element_size() / clock.seconds(lambda: y.copy_(x))
    show(kernel="copy on the device", gb_s=copied / 1e9)
    # Bytes are those that one fused kernel would have to move.
    for name, size, work in (("norm, as the program computes it", 4 * n, norm), ("norm, torch's own", 4 * n, lambda: F.rms_norm(x, (hidden,), weight, 1e-5)),
                             ("residual added", 6 * n, lambda: x + y), ("rotation", 4 * n, turn), ("gated", 6 * rows * inner, lambda: F.silu(gate) * up),
                             ("loss", 2 * logits.numel(), lambda: F.cross_entropy(logits.float(), labels)), ("gradient to bf16", 6 * n, lambda: bits.copy_(wide)),
                             ("sum in fp32", 10 * n, lambda: total.add_(bits))):
        def timed(size=size, work=work):
            seconds = clock.seconds(work)
            return {"ms": 1e3 * seconds, "gb_s": size / seconds / 1e9, "of_a_copy": size / seconds / copied}

        clock.measure({"kernel": name}, timed)


LANES = {"copies": copies, "overlap": overlap, "products": products, "weight_gradients": weight_gradients, "attention": attention, "kernels": kernels}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lane", choices=LANES)
    parser.add_argument("--device", required=True, choices=["cpu", "cuda"])
    args = parser.parse_args()
    torch.manual_seed(0)
    clock = Clock(args.device)
    LANES[args.lane](clock)
    return int(clock.failed)


if __name__ == "__main__":
    sys.exit(main())
