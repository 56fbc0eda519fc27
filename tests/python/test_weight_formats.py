"""Stored weights beside bitsandbytes' 4-bit and torch's fp8, byte by byte."""
import itertools
import math
import subprocess

import bitsandbytes.functional as F
import numpy as np
import pytest
import torch

from conftest import BUILD

PROBE = BUILD / "weight_probe"
SHAPES = [(64,), (1,), (63,), (130, 7), (256, 384), (33, 65), (3, 64, 96), (641, 512)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ANY_DEVICE = torch._C.DispatchKey.CompositeExplicitAutograd  # where bitsandbytes has no kernel for the device
CASES = list(zip(SHAPES, itertools.cycle(DTYPES))) + [((256, 384), dtype) for dtype in DTYPES]


@pytest.fixture(autouse=True)
def uncompiled():
    with torch.compiler.set_stance("force_eager"):
        yield


def probe(name, shape, given, *more):
    done = subprocess.run([PROBE, name, *map(str, shape), *more], input=given, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def quantised(name, weight):
    return probe(name, weight.shape, weight.float().numpy().tobytes())


def dense(name, shape, stored):
    return torch.frombuffer(bytearray(probe(name, shape, stored, "back")), dtype=torch.bfloat16).reshape(shape)


def sections(stored, *sizes):
    """Each begins at a multiple of four bytes, and they fill the whole."""
    at = 0
    for size in sizes:
        yield stored[at : at + size]
        at += (size + 3) // 4 * 4
    assert at == len(stored)


def weight(shape, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator) * 0.02
    values *= 1 + 9 * (torch.rand(shape, generator=generator) > 0.999)  # a few outliers
    return values.to(dtype)


def same_bits(ours, theirs):
    return torch.equal(ours.flatten().view(torch.int16), theirs.flatten().view(torch.int16))


def assert_read_alike(name, shape, stored, codes, state):
    ours = dense(name, shape, stored)
    state.dtype = torch.bfloat16
    absmax = F.dequantize_blockwise(state.absmax, state.state2) + state.offset if state.nested else state.absmax
    theirs = torch.ops.bitsandbytes.dequantize_4bit.default._op_dk(ANY_DEVICE, codes, absmax, 64, "nf4", shape, torch.bfloat16)
    assert same_bits(ours, theirs)
    if shape[-1] % 64 == 0:  # their kernel for the CPU begins blocks anew in each row
        assert same_bits(ours, F.dequantize_4bit(codes, state))


@pytest.mark.parametrize("shape,dtype", CASES)
def test_nf4(shape, dtype):
    w = weight(shape, dtype)
    codes, state = F.quantize_4bit(w, quant_type="nf4", compress_statistics=False)
    blocks = -(-w.numel() // 64)
    stored = quantised("nf4", w)
    ours, absmax = sections(stored, -(-w.numel() // 2), 4 * blocks)
    assert ours == codes.numpy().tobytes()
    assert absmax == state.absmax.numpy().tobytes()
    assert_read_alike("nf4", shape, stored, codes, state)


def nested(values):
    """bitsandbytes' code of blocks of 256 as it defines it for any device: the nearest entry of the map. Its kernel for
    the CPU takes the entry nearest to one of 65536 steps from -1 to 1, which near 0 is another one."""
    return torch.ops.bitsandbytes.quantize_blockwise.default._op_dk(ANY_DEVICE, values, F.create_dynamic_map(), 256)


@pytest.mark.parametrize("shape,dtype", CASES + [((4096, 700), torch.bfloat16)])
def test_nf4_double(shape, dtype):
    w = weight(shape, dtype)
    codes, state = F.quantize_4bit(w, quant_type="nf4", compress_statistics=True)
    absmax = F.quantize_4bit(w, quant_type="nf4", compress_statistics=False)[1].absmax
    blocks = -(-w.numel() // 64)
    stored = quantised("nf4-double", w)
    ours, q, nested_absmax, offset = sections(stored, -(-w.numel() // 2), blocks, 4 * -(-blocks // 256), 4)
    assert ours == codes.numpy().tobytes()

    # The mean of torch depends on how many threads add up; ours is the exact mean, rounded once.
    mean = np.float32(math.fsum(absmax.tolist()) / blocks)
    assert np.frombuffer(offset, np.float32) == mean
    assert state.offset.item() == pytest.approx(mean, rel=1e-6)

    codes_of_absmax, scales = nested(absmax - torch.tensor(mean))
    assert q == codes_of_absmax.numpy().tobytes()
    assert nested_absmax == scales.numpy().tobytes()

    state.absmax, state.state2.absmax, state.offset = codes_of_absmax, scales, torch.tensor(mean)
    assert state.state2.code.equal(F.create_dynamic_map())
    assert_read_alike("nf4-double", shape, stored, codes, state)


@pytest.mark.parametrize("shape,dtype", CASES)
def test_their_own_double_quantisation_is_read_alike(shape, dtype):
    w = weight(shape, dtype)
    codes, state = F.quantize_4bit(w, quant_type="nf4", compress_statistics=True)
    stored = b""
    for section in (codes, state.absmax, state.state2.absmax, state.offset):
        stored += section.numpy().tobytes()
        stored += bytes(-len(stored) % 4)
    assert_read_alike("nf4-double", shape, stored, codes, state)


def test_maps():
    # The last bits of their dynamic map are those that torch gives where the processor can fuse multiply and add.
    theirs = torch.cat([F.get_4bit_type("nf4", device="cpu"), F.create_dynamic_map()])
    assert probe("maps", (), b"") == theirs.numpy().tobytes()


@pytest.mark.parametrize("name", ["nf4", "nf4-double"])
def test_values_between_two_codes(name):
    """Ties, and the floats beside them."""
    code = F.get_4bit_type("nf4", device="cpu")
    edges = (code[:-1] + code[1:]) / 2
    values = torch.cat([edges, torch.nextafter(edges, edges + 1), torch.nextafter(edges, edges - 1), code, torch.ones(3)])
    w = torch.cat([values, values[:33] * 0.5, torch.zeros(64), torch.full((64,), 1e-39), torch.zeros(7)])
    codes, state = F.quantize_4bit(w, quant_type="nf4")
    stored = quantised(name, w)
    assert stored[: codes.numel()] == codes.numpy().tobytes()
    if name == "nf4":
        assert stored[-4 * state.absmax.numel() :] == state.absmax.numpy().tobytes()


def test_short_blocks_divide():
    """bitsandbytes multiplies whole blocks by an inverse and divides the short one at the end: of the values beside the
    edges between codes, these are some where that gives another code."""
    code = F.get_4bit_type("nf4", device="cpu")
    edges = (code[:-1] + code[1:]) / 2
    absmax = torch.rand(1000, 1, generator=torch.Generator().manual_seed(1)) + 0.5
    values = absmax * edges
    differ = torch.bucketize(values / absmax, edges) != torch.bucketize(values * (1 / absmax), edges)
    row = differ.any(1).nonzero()[0, 0]
    block = torch.cat([absmax[row], values[row]])
    w = torch.cat([block, torch.zeros(48), block])
    codes = F.quantize_4bit(w, quant_type="nf4")[0].numpy().tobytes()
    assert codes[:8] != codes[32:]
    assert quantised("nf4", w)[:40] == codes

    # The same of the absmax: the number of each block is in all its elements.
    code = F.create_dynamic_map()
    edges = (code[:-1] + code[1:]) / 2
    absmax = torch.rand(20000, 100, generator=torch.Generator().manual_seed(1))
    apart = absmax - absmax.double().mean(1, keepdim=True).float()
    largest = apart.abs().amax(1, keepdim=True)
    differ = torch.bucketize(apart / largest, edges) != torch.bucketize(apart * (1 / largest), edges)
    row = differ.any(1).nonzero()[0, 0]
    q = list(sections(quantised("nf4-double", absmax[row].repeat_interleave(64)), 3200, 100, 4, 4))[1]
    assert q == nested(apart[row])[0].numpy().tobytes()


@pytest.mark.parametrize("shape", [(256, 384), (33, 65), (1,)])
def test_int8(shape):
    w = weight(shape, torch.bfloat16).float()
    stored = quantised("int8", w)
    blocks = -(-w.numel() // 256)
    codes, absmax = sections(stored, w.numel(), 4 * blocks)
    padded = torch.zeros(blocks * 256)
    padded[: w.numel()] = w.flatten()
    largest = padded.view(-1, 256).abs().amax(1)
    expected = (padded.view(-1, 256) / largest[:, None] * 127).round().to(torch.int8)
    assert absmax == largest.numpy().tobytes()
    assert codes == expected.flatten()[: w.numel()].numpy().tobytes()
    back = (expected.float() * (largest / 127)[:, None]).flatten()[: w.numel()].to(torch.bfloat16)
    assert same_bits(dense("int8", shape, stored), back)


def test_fp8():
    rows, columns = 130, 259
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 256, (rows, columns), dtype=torch.uint8, generator=generator)
    codes[0, :256] = torch.arange(256)
    scales = torch.rand(2, 3, generator=generator).bfloat16().float()
    stored = codes.numpy().tobytes() + bytes(-codes.numel() % 4) + scales.numpy().tobytes()
    wide = scales.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    products = codes.view(torch.float8_e4m3fn).float() * wide
    # Of two numbers as near, the larger: what a store makes of the same products.
    theirs = ((products.view(torch.int32) + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)
    ours = dense("fp8", (rows, columns), stored)
    assert torch.equal(ours.isnan(), theirs.isnan()) and ours[0, [0x7F, 0xFF]].isnan().all()
    assert same_bits(ours.nan_to_num(), theirs.nan_to_num())
