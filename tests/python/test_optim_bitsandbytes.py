"""The 8-bit states beside bitsandbytes' on the same inputs, through the test library of the build."""
import ctypes

import bitsandbytes as bnb
import bitsandbytes.functional as F
import numpy as np
import pytest
import torch

from conftest import BUILD

BLOCK = 256


@pytest.fixture(scope="module")
def optim():
    path = BUILD / "libtierflow_optim_c.so"
    if not path.exists():
        pytest.skip(f"{path} is not built")
    return ctypes.CDLL(str(path))


def aligned(n, dtype):
    raw = np.zeros(n * np.dtype(dtype).itemsize + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + n * np.dtype(dtype).itemsize].view(dtype)


def pointer(array):
    return ctypes.c_void_p(None if array is None else array.ctypes.data)


def encode(optim, values, signed):
    n = values.size
    codes, absmax = aligned(n, np.uint8), aligned(-(-n // BLOCK), np.float32)
    assert optim.optim_encode(pointer(values), pointer(codes), pointer(absmax), ctypes.c_size_t(n), signed) == 0
    return codes, absmax


@pytest.mark.parametrize("signed", [True, False])
def test_map(optim, signed):
    codes = aligned(256, np.uint8)
    codes[:] = np.arange(256)
    absmax, values = np.ones(1, np.float32), np.zeros(256, np.float32)
    assert optim.optim_decode(pointer(codes), pointer(absmax), pointer(values), ctypes.c_size_t(256), signed) == 0
    theirs = F.create_dynamic_map(signed=signed).numpy()
    apart = np.abs(values.view(np.int32).astype(np.int64) - theirs.view(np.int32).astype(np.int64))
    print(f"signed={signed}: largest difference {apart.max()} ulp, {np.count_nonzero(apart)} of 256 values differ")
    assert apart.max() <= 4  # theirs carries the roundings of a float linspace


def inputs(signed, blocks):
    generator = np.random.default_rng(5)
    n = blocks * BLOCK
    values = (generator.standard_normal(n) * np.exp(2 * generator.standard_normal(n)) * 1e-3).astype(np.float32)
    return values if signed else values * values


@pytest.mark.parametrize("signed", [True, False])
def test_codes_are_nearest_in_their_map(optim, signed):
    """Codes differ from the nearest of bitsandbytes' map only where the value lies within rounding of a midpoint."""
    values = inputs(signed, 4000)
    codes, absmax = encode(optim, values, signed)
    levels = F.create_dynamic_map(signed=signed).double().numpy()
    x = values.astype(np.float64) / absmax.repeat(BLOCK)
    nearest = np.searchsorted((levels[1:] + levels[:-1]) / 2, x, side="right")
    different = np.nonzero(codes != nearest)[0]
    print(f"signed={signed}: {different.size} of {values.size} codes differ from the nearest")
    assert different.size < values.size * 1e-4
    mine, other = levels[codes[different]], levels[nearest[different]]
    assert np.all(np.abs(codes[different].astype(int) - nearest[different]) == 1)
    assert np.all(np.abs(x[different] - (mine + other) / 2) <= np.maximum(np.abs(mine - other) * 2.0**-14, np.abs(x[different]) * 2.0**-20))


@pytest.mark.parametrize("signed", [True, False])
def test_codes_beside_their_quantizer(optim, signed):
    """The same absmax, and codes at least as near as theirs (their CPU quantizer looks small values up in uniform bins)."""
    values = inputs(signed, 1000)
    codes, absmax = encode(optim, values, signed)
    table = F.create_dynamic_map(signed=signed)
    theirs, state = F.quantize_blockwise(torch.from_numpy(values), code=table, blocksize=BLOCK)
    assert np.array_equal(absmax, state.absmax.numpy())
    theirs, levels = theirs.numpy(), table.double().numpy()
    x = values.astype(np.float64) / absmax.repeat(BLOCK)
    mine, other = np.abs(levels[codes] - x), np.abs(levels[theirs] - x)
    print(f"signed={signed}: {np.count_nonzero(codes != theirs)} of {values.size} codes differ from their quantizer's; "
          f"mean error ours {mine.mean():.4e}, theirs {other.mean():.4e}")
    assert np.all(mine <= other * (1 + 1e-4) + 1e-12)
    assert mine.mean() <= other.mean()


@pytest.mark.parametrize("signed", [True, False])
def test_states_convert(optim, signed):
    """bitsandbytes reads our codes and absmax as we do."""
    values = inputs(signed, 100)
    codes, absmax = encode(optim, values, signed)
    mine = np.zeros(values.size, np.float32)
    assert optim.optim_decode(pointer(codes), pointer(absmax), pointer(mine), ctypes.c_size_t(values.size), signed) == 0
    state = F.QuantState(absmax=torch.from_numpy(absmax.copy()), code=F.create_dynamic_map(signed=signed), blocksize=BLOCK,
                         dtype=torch.float32)
    theirs = F.dequantize_blockwise(torch.from_numpy(codes.copy()), quant_state=state).numpy()
    apart = np.abs(mine.view(np.int32).astype(np.int64) - theirs.view(np.int32).astype(np.int64))
    print(f"signed={signed}: values read back differ by {apart.max()} ulp at most")
    assert apart.max() <= 4


def trajectory(update, n, steps=200):
    """A noisy quadratic with curvatures over two decades; the same noise for every optimizer; gradients in bf16."""
    generator = torch.Generator().manual_seed(3)
    curvature = torch.logspace(-2, 0, n)[torch.randperm(n, generator=generator)]
    target = torch.randn(n, generator=generator)
    p = torch.zeros(n)
    for step in range(1, steps + 1):
        noise = torch.randn(n, generator=torch.Generator().manual_seed(1000 + step))
        p = update(p, (curvature * (p - target) + 0.1 * noise).bfloat16(), step)
    return p


def resident(make):
    held = {}

    def update(p, g, step):
        if not held:
            held["p"] = torch.nn.Parameter(p.clone())
            held["optimizer"] = make([held["p"]])
        held["p"].grad = g.float()
        held["optimizer"].step()
        return held["p"].detach().clone()

    return update


def ours(optim, n, settings):
    hi, lo, m, v = aligned(n, np.uint16), aligned(n, np.uint16), aligned(n, np.uint8), aligned(n, np.uint8)
    m_absmax, v_absmax = aligned(n // BLOCK, np.float32), aligned(n // BLOCK, np.float32)
    m[:] = 127
    master = np.zeros(n, np.float32)
    gradient = aligned(n, np.uint16)
    size = ctypes.c_size_t(n)

    def update(p, g, step):
        gradient[:] = g.view(torch.int16).numpy().view(np.uint16)
        numbers = [ctypes.c_float(settings[k]) for k in ("lr", "beta1", "beta2", "eps", "weight_decay")]
        assert optim.optim_adamw(*map(pointer, (gradient, hi, lo, m, m_absmax, v, v_absmax)), size, ctypes.c_int64(step), *numbers,
                                 ctypes.c_float(0)) == 0
        optim.optim_join(pointer(hi), pointer(lo), pointer(master), size)
        return torch.from_numpy(master.copy())

    return update


def test_trajectory(optim):
    n = 64 * BLOCK
    settings = dict(lr=1e-2, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01)
    usual = dict(lr=1e-2, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)
    exact = trajectory(resident(lambda p: torch.optim.AdamW(p, **usual)), n)
    theirs = trajectory(resident(lambda p: bnb.optim.AdamW8bit(p, **usual)), n)
    mine = trajectory(ours(optim, n, settings), n)
    distance = lambda p: float((p - exact).norm() / exact.norm())
    print(f"distance from fp32 AdamW after 200 steps: ours {distance(mine):.4f}, bitsandbytes {distance(theirs):.4f}")
    assert distance(mine) <= 1.05 * distance(theirs)
