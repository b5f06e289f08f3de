"""Kernels on the device give the CPU's bits."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from muster._C import kernels

pytestmark = pytest.mark.kernels

CPU = torch.device("cpu")
# Around a vector, a tile and several blocks, and the offset of each from a vector's boundary.
SIZES = [1, 3, 4, 5, 31, 1024, 4095, 4096, 4097, 8192, 20_001, 131_072, 200_003]
LARGE = 5_000_011
"""More than the blocks of any launch take at once."""
BITS = {
    torch.float32: torch.int32,
    torch.float64: torch.int64,
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
    torch.uint8: torch.uint8,
}


def stream_of(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def assert_same_bits(found: Tensor, expected: Tensor) -> None:
    """Equal bits; of a NaN, only that it is one."""
    found, expected = found.cpu(), expected.cpu()
    assert found.dtype == expected.dtype
    bits = BITS[found.dtype]
    different = found.view(bits) != expected.view(bits)
    if found.is_floating_point():
        different &= ~(found.isnan() & expected.isnan())
    places = different.nonzero().flatten()
    assert not len(places), f"{len(places)} of {found.numel()} differ, the first at {int(places[0])}"


def off_boundary(values: Tensor, elements: int) -> Tensor:
    """The same values, so many elements after where an allocation starts."""
    room = torch.empty(values.numel() + elements, dtype=values.dtype, device=values.device)
    room[elements:].copy_(values)
    return room[elements:]


@functools.cache
def pool() -> Tensor:
    """Normal numbers of many magnitudes, and some that are not."""
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(2 * LARGE, generator=generator, dtype=torch.float64)
    values *= torch.logspace(-6, 3, 10, dtype=torch.float64)[torch.randint(10, values.shape, generator=generator)]
    values[::97] = 0.0
    values[5::211] = -0.0
    values[7::509] = 1e-42
    return values


def numbers(n: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Some of the pool, by seed."""
    start = seed * 7919 % (len(pool()) - n)
    return pool()[start : start + n].to(dtype, copy=True)


def on(device: torch.device, tensors: list[Tensor], offsets: bool = True) -> list[Tensor]:
    """Copies, every third of them off a vector's boundary."""
    return [
        off_boundary(tensor.to(device, copy=True), 1 if offsets and i % 3 == 2 else 0)
        for i, tensor in enumerate(tensors)
    ]


# --- pack -------------------------------------------------------------------------------------------------------------


def pack_on(
    device: torch.device,
    sources: list[Tensor | None],
    bucket: Tensor,
    calls: list[tuple[bool, float]],
    gate: float | None = None,
    drops: bool = False,
) -> Tensor:
    """The bucket after these calls, its slots one after another with gaps; `drops` leaves every source out."""
    sizes = [1000 if source is None else source.numel() for i, source in enumerate(sources)]
    offsets, end = [], 0
    for i, size in enumerate(sizes):
        end = (end + 15) // 16 * 16 + (1 if i % 5 == 4 else 0)
        offsets.append(end)
        end += size
    moved = bucket[:end].to(device, copy=True)
    copies = [
        None if s is None or drops else off_boundary(s.to(device, copy=True), int(i % 3 == 2))
        for i, s in enumerate(sources)
    ]
    packing = kernels.Packing(copies, offsets, sizes, moved)
    is_open = None if gate is None else torch.tensor([gate], dtype=torch.float64, device=device)
    for accumulate, factor in calls:
        packing.run(accumulate, factor, is_open, stream=stream_of(device))
    return moved


CALLS = [(False, 1.0), (True, 0.3), (True, 1.0), (False, -3.0), (True, 2.0)]


@pytest.mark.parametrize(
    ("dtypes", "bucket_dtype"),
    [
        ([torch.float32], torch.float32),
        ([torch.bfloat16, torch.float16, torch.float32], torch.float32),
        ([torch.float64], torch.float64),
    ],
)
def test_pack(device: torch.device, dtypes: list[torch.dtype], bucket_dtype: torch.dtype) -> None:
    sources: list[Tensor | None] = [
        None if i % 11 == 5 else numbers(n, dtypes[i % len(dtypes)], i) for i, n in enumerate([*SIZES, LARGE, *SIZES])
    ]
    bucket = numbers(LARGE + 2_000_000, bucket_dtype, 99)
    expected = pack_on(CPU, sources, bucket, CALLS)
    assert_same_bits(pack_on(device, sources, bucket, CALLS), expected)
    first = sources[0]
    assert first is not None
    last = first.to(bucket_dtype)
    assert_same_bits(expected[: len(last)], last * -3.0 + last * 2.0)


def test_pack_into_bf16_rounds_once(gpu: torch.device) -> None:
    sources: list[Tensor | None] = [numbers(n, torch.float32, i) for i, n in enumerate(SIZES)]
    bucket = numbers(1_000_000, torch.bfloat16, 98)
    for call in CALLS:
        wide = pack_on(CPU, sources, bucket.float(), [call])
        assert_same_bits(pack_on(gpu, sources, bucket, [call]), wide.bfloat16())


def test_pack_takes_more_tensors_than_one_launch_holds(device: torch.device) -> None:
    sources: list[Tensor | None] = [numbers(2, torch.float32, i) for i in range(kernels.MAX_PACK_SOURCES + 5)]
    bucket = torch.zeros(17 * len(sources))
    expected = pack_on(CPU, sources, bucket, [(False, 1.0)])
    assert_same_bits(pack_on(device, sources, bucket, [(False, 1.0)]), expected)


def test_a_closed_gate_keeps_even_a_nan_out(gpu: torch.device) -> None:
    sources: list[Tensor | None] = [torch.full((n,), math.nan) for n in SIZES]
    bucket = numbers(1_000_000, torch.float32, 97)
    for calls in ([(True, 1.0)], [(False, 1.0)]):
        without = pack_on(CPU, sources, bucket, calls, drops=True)
        assert_same_bits(pack_on(gpu, sources, bucket, calls, gate=0.0), without)
        assert_same_bits(pack_on(gpu, sources, bucket, calls, gate=1.0), pack_on(CPU, sources, bucket, calls))


# --- reduction --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
def test_tree_sum(device: torch.device, dtype: torch.dtype, count: int) -> None:
    for n in [*SIZES, LARGE]:
        sources = [numbers(n, dtype, n + r) for r in range(count)]
        expected = torch.empty(n, dtype=dtype)
        kernels.tree_sum(sources, [expected])
        moved = [s.to(device, copy=True) for s in sources]
        results = [moved[0], torch.empty_like(moved[0])]
        kernels.tree_sum(moved, results, stream=stream_of(device))
        for result in results:
            assert_same_bits(result, expected)
        if count == 3:
            wide = [s.double() if dtype == torch.float64 else s.float() for s in sources]
            assert_same_bits(expected, ((wide[0] + wide[1]) + wide[2]).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_peer_reduce_of_virtual_ranks(device: torch.device, dtype: torch.dtype, count: int) -> None:
    signals = torch.zeros(count * kernels.PEER_SIGNALS_BYTES, dtype=torch.uint8, device=device)
    blocks = 4
    for n in [1, 5, 4097, 1_000_003]:
        buffers = [numbers(n, dtype, n + r) for r in range(count)]
        moved = [b.to(device, copy=True) for b in buffers]
        # Rounds on end: a barrier that lets a rank through too early shows when the next one writes.
        for _ in range(4):
            kernels.tree_sum(buffers, buffers)
            kernels.peer_reduce(moved, signals, blocks, stream=stream_of(device))
        for result in moved:
            assert_same_bits(result, buffers[0])


# --- statistics and the end of a window -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_grad_stats(device: torch.device, dtype: torch.dtype) -> None:
    gradients = [numbers(n, dtype, n) for n in [*SIZES, LARGE]]
    gradients.append(torch.full((5000,), math.inf, dtype=dtype))
    expected = kernels.Statistics(gradients)
    expected.run()
    statistics = kernels.Statistics(on(device, gradients))
    statistics.run(stream=stream_of(device))
    assert_same_bits(statistics.partials, expected.partials)
    norm = torch.cat(gradients[:-1]).double().square().sum()
    torch.testing.assert_close(expected.partials[:-2].sum(), norm, rtol=1e-12, atol=0)


@dataclass(frozen=True)
class Window:
    """What ends one, on the CPU."""

    partials: Tensor
    tail: Tensor
    used: Tensor
    steps: Tensor
    scale: Tensor | None
    options: tuple[float, float, float, float, int] = (0.5, 4.0, 2.0, 0.5, 3)
    slots: int = 2

    def end(self, device: torch.device) -> tuple[dict[str, float], Tensor, Any, Tensor]:
        """Scalars, steps, scale and report after finish_window and count_steps on a device."""
        scalars = kernels.make_scalars(unit=8.0).to(device)
        steps = self.steps.to(device, copy=True)
        used = self.used.to(device)
        scale = None if self.scale is None else self.scale.to(device, copy=True)
        report = torch.zeros(kernels.report_bytes(self.slots), dtype=torch.uint8, device=device)
        kernels.finish_window(
            self.partials.to(device),
            self.tail.to(device),
            used,
            steps,
            self.options,
            scalars,
            scale,
            report,
            self.slots,
            sums=torch.empty(kernels.norm_sums_bytes, dtype=torch.uint8, device=device),
            stream=stream_of(device),
        )
        kernels.count_steps(steps, used, scalars, stream=stream_of(device))
        kernels.count_steps(steps, None, scalars, stream=stream_of(device))
        state = None if scale is None else kernels.read_loss_scale(scale)
        # Past the two flags a report has room that means nothing.
        fields = report.cpu()
        return kernels.read_scalars(scalars), steps.cpu(), state, torch.cat([fields[:34], fields[40:]])


def some_window(num_partials: int) -> Window:
    used = torch.full((300,), 2.0, dtype=torch.float64)
    used[3::7] = 0
    return Window(
        partials=numbers(num_partials, torch.float64, num_partials).abs(),
        tail=torch.tensor([24, 31.5, 3, 0, 0, 0, 3, 0, 5.0, 24.0, -7.0, 12.0], dtype=torch.float64),
        used=used,
        steps=torch.arange(300.0),
        scale=kernels.make_loss_scale(1024.0, 2),
    )


def tail_with(window: Window, field: int, value: float) -> Window:
    tail = window.tail.clone()
    tail[field] = value
    return replace(window, tail=tail)


def windows() -> list[Window]:
    window = some_window(300)
    infinite = replace(window, partials=torch.cat([window.partials, torch.tensor([math.inf]).double()]))
    return [
        *(some_window(n) for n in (0, 1, 255, 256, 257, 5000, 100_003)),
        replace(window, scale=None),
        tail_with(window, 7, 1.0),
        infinite,
        tail_with(infinite, 0, 0.0),
        tail_with(window, 0, 0.0),
        tail_with(window, 0, math.nan),
        tail_with(window, 3, 1.0),
    ]


@pytest.mark.parametrize("which", range(len(windows())))
def test_the_end_of_a_window(device: torch.device, which: int) -> None:
    window = windows()[which]
    scalars, steps, scale, report = window.end(device)
    expected, expected_steps, expected_scale, expected_report = window.end(CPU)
    for name, value in expected.items():
        assert scalars[name] == value or (math.isnan(scalars[name]) and math.isnan(value)), name
    assert_same_bits(steps, expected_steps)
    assert scale == expected_scale
    assert_same_bits(report, expected_report)


def test_the_end_of_a_window_is_what_its_formula_says() -> None:
    window = some_window(300)
    scalars, steps, scale, _ = window.end(CPU)
    norm = math.sqrt(float(window.partials.sum())) / (24 / 8 * 1024)
    assert scalars["norm"] == pytest.approx(norm)
    assert scalars["divisor"] == 24 / 8 * 1024
    assert scalars["clip"] == pytest.approx(min(0.5 / (norm + 1e-6), 1.0))
    assert scale == (2048.0, 0)
    assert steps.tolist() == [p + (1 if p % 7 == 3 else 3) for p in range(300)]


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_apply_means(device: torch.device, clips: bool, dtype: torch.dtype) -> None:
    for options in ({"divisor": 3.0, "clip": 0.25}, {"divisor": 3.0, "finite": False}, {"dropped": True}):
        sizes = [*SIZES, LARGE]
        values = [numbers(n, dtype, n) for n in sizes]
        low = [
            None if i % 4 == 0 else torch.zeros(n, dtype=torch.bfloat16 if i % 2 else torch.float16)
            for i, n in enumerate(sizes)
        ]
        moved = on(device, values)
        moved_low = [None if t is None else t.to(device) for t in low]
        scalars = kernels.make_scalars(**options)
        kernels.apply_means(list(zip(values, low, strict=True)), scalars, clips)
        kernels.apply_means(
            list(zip(moved, moved_low, strict=True)), scalars.to(device), clips, stream=stream_of(device)
        )
        for found, expected in zip(moved, values, strict=True):
            assert_same_bits(found, expected)
        for rounded, expected_low in zip(moved_low, low, strict=True):
            if rounded is not None and expected_low is not None:
                assert_same_bits(rounded, expected_low)


# --- losses -----------------------------------------------------------------------------------------------------------


def losses(device: torch.device, dtype: torch.dtype, weights: list[float | None]) -> list[Tensor]:
    """Tail, gates, seeds and report of a window with one micro-batch for each weight; None: an empty part."""
    slots = 3
    scalars = kernels.make_scalars(unit=4.0).to(device)
    scale = kernels.make_loss_scale(256.0, 0).to(device)
    tail = torch.full((8 + 2 * slots,), math.nan, dtype=torch.float64, device=device)
    report = torch.zeros(kernels.report_bytes(slots), dtype=torch.uint8, device=device)
    left = []
    for i, weight in enumerate(weights):
        loss = None if weight is None else torch.tensor(1.0 + i / 3, dtype=dtype, device=device)
        metrics = [
            (torch.tensor(0.5 + i, dtype=torch.float32, device=device), 2),
            (torch.tensor(7 * i, dtype=torch.int64, device=device), 0),
        ]
        gate = torch.full((1,), math.nan, dtype=torch.float64, device=device)
        seed = None if loss is None else torch.full((1,), math.nan, dtype=dtype, device=device)
        kernels.note_loss(
            loss,
            torch.tensor(weight, device=device) if weight is not None and i % 2 else None,
            0.0 if weight is None else weight,
            i % 3 != 2,
            i == 0,
            slots,
            metrics,
            scalars,
            scale,
            tail,
            gate,
            seed,
            report,
            stream=stream_of(device),
        )
        left += [gate] if seed is None else [gate, seed]
    return [t.cpu() for t in [tail, *left, torch.cat([report[:34], report[40:]])]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "weights", [[8.0, 5.0, 3.0], [0.0, 2.0, None], [None, None], [3.0, math.nan], [1.0, -1.0], [2.0, math.inf]]
)
def test_note_loss(device: torch.device, dtype: torch.dtype, weights: list[float | None]) -> None:
    for found, expected in zip(losses(device, dtype, weights), losses(CPU, dtype, weights), strict=True):
        assert_same_bits(found, expected)


def test_a_loss_is_noted_as_its_formula_says() -> None:
    tail, gate, seed, *_ = losses(CPU, torch.float32, [8.0, 6.0])
    assert tail[:3].tolist() == [14.0, 8.0 + 6.0 * float(torch.tensor(1.0 + 1 / 3)), 2.0]
    assert tail[8:].tolist() == [6.0 * 7, 14.0, 0.0, 0.0, 8.0 * 0.5 + 6.0 * 1.5, 14.0]
    assert gate.tolist() == [8 / 4] and seed.tolist() == [256.0]


# --- optimizer steps --------------------------------------------------------------------------------------------------

ROWS: dict[str, list[list[float]]] = {
    "adam": [[1e-3, 0.9, 0.999, 1e-8, 1e-2, 1, 0, 0], [2e-3, 0.8, 0.99, 1e-6, 0.1, 0, 1, 1]],
    "sgd": [[0.1, 0.9, 0.1, 1e-2, 0, 0], [0.2, 0.8, 0.0, 0.0, 1, 1], [0.1, 0.0, 0.0, 0.0, 0, 0]],
    "adagrad": [[0.1, 0.01, 1e-10, 1e-2, 0], [0.2, 0.0, 1e-8, 0.0, 1]],
}


def step_on(
    device: torch.device,
    algorithm: str,
    dtype: torch.dtype,
    options: dict[str, Any],
    keep: bool,
    sizes: Sequence[int] = SIZES,
) -> list[Tensor]:
    """Everything that a step of parameters of all sizes may write."""
    segments, written = [], []
    for i, n in enumerate(sizes):
        gradient, parameter, *states = on(
            device,
            [
                numbers(n, dtype, 7 * n),
                numbers(n, dtype, 7 * n + 1),
                *(numbers(n, dtype, 7 * n + 2 + s).abs() for s in range(3)),
            ],
            offsets=i % 4 == 3,
        )
        low = None
        if i % 4 != 1:
            low = parameter.to(torch.bfloat16 if i % 8 < 4 else torch.float16)
            low[1::3] /= 3  # written since the last step
            written.append(low)
        step = None if i % 13 == 0 else torch.tensor([float(1 + i * i)], device=device)
        used = None if i % 5 == 0 else torch.tensor([0.0 if i % 5 == 3 else 2.0], dtype=torch.float64, device=device)
        segments.append((gradient, parameter, low, states, step, used, i % len(ROWS[algorithm])))
        written += [gradient, parameter, *states]
    scalars = kernels.make_scalars(**options).to(device)
    kernels.Steps(algorithm, segments, ROWS[algorithm]).run(scalars, keep, stream=stream_of(device))
    return [tensor.cpu() for tensor in written]


@pytest.mark.parametrize("algorithm", list(ROWS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("keep", [False, True])
def test_optimizer_steps(device: torch.device, algorithm: str, dtype: torch.dtype, keep: bool) -> None:
    for options in ({"divisor": 3.0}, {"divisor": 1024.0, "clip": 0.25}, {"finite": False}, {"dropped": True}):
        found = step_on(device, algorithm, dtype, options, keep)
        for one, expected in zip(found, step_on(CPU, algorithm, dtype, options, keep), strict=True):
            assert_same_bits(one, expected)


def test_a_step_of_more_than_the_blocks_take_at_once(device: torch.device) -> None:
    sizes = [5, LARGE, 4097]
    found = step_on(device, "adam", torch.float32, {"divisor": 3.0}, False, sizes)
    for one, expected in zip(found, step_on(CPU, "adam", torch.float32, {"divisor": 3.0}, False, sizes), strict=True):
        assert_same_bits(one, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_step_stores_its_parameters_in_copies_too(device: torch.device, dtype: torch.dtype) -> None:
    def step(where: torch.device) -> list[Tensor]:
        segments, copies = [], []
        for i, n in enumerate(SIZES):
            tensors = [numbers(n, dtype, 7 * n), numbers(n, dtype, 7 * n + 1), *(numbers(n, dtype, 5).abs(),) * 2]
            gradient, parameter, *states = on(where, tensors, offsets=i % 4 == 3)
            low = parameter.to(torch.bfloat16 if i % 2 else torch.float16) if i % 3 else None
            segments.append((gradient, parameter, low, states, torch.ones(1, device=where), None, 0))
            target = parameter if low is None else low
            copies.append(on(where, [torch.zeros_like(target, device=CPU) for _ in range(2)], offsets=i % 4 == 1))
        scalars = kernels.make_scalars(divisor=3.0).to(where)
        kernels.Steps("adam", segments, ROWS["adam"], copies).run(scalars, False, stream=stream_of(where))
        stepped = [parameter if low is None else low for _, parameter, low, *_ in segments]
        for target, own in zip(stepped, copies, strict=True):
            for copy in own:
                assert_same_bits(copy.cpu(), target.cpu())
        return [tensor.cpu() for tensor in stepped]

    for one, expected in zip(step(device), step(CPU), strict=True):
        assert_same_bits(one, expected)


OPTIMIZERS: dict[str, tuple[list[float], int, Callable[[Tensor], torch.optim.Optimizer]]] = {
    "adam": (ROWS["adam"][0], 2, lambda p: torch.optim.AdamW([p], lr=1e-3, weight_decay=1e-2)),
    "sgd": (ROWS["sgd"][1], 1, lambda p: torch.optim.SGD([p], lr=0.2, momentum=0.8, nesterov=True, maximize=True)),
    "adagrad": (ROWS["adagrad"][0], 1, lambda p: torch.optim.Adagrad([p], lr=0.1, lr_decay=0.01, weight_decay=1e-2)),
}


@pytest.mark.parametrize("algorithm", list(OPTIMIZERS))
def test_optimizers_follow_torch(device: torch.device, algorithm: str) -> None:
    row, num_states, make = OPTIMIZERS[algorithm]
    generator = torch.Generator().manual_seed(2)
    parameter = torch.randn(10_001, generator=generator, dtype=torch.float64).to(device)
    expected = parameter.clone().requires_grad_()
    optimizer = make(expected)
    states = [torch.zeros_like(parameter) for _ in range(num_states)]
    for t in range(1, 6):
        gradient = torch.randn(10_001, generator=generator, dtype=torch.float64).to(device)
        expected.grad = gradient.clone()
        optimizer.step()
        step = torch.tensor([float(t)], device=device)
        segment = (gradient * 3.0, parameter, None, states, step, None, 0)
        kernels.Steps(algorithm, [segment], [row]).run(
            kernels.make_scalars(divisor=3.0).to(device), stream=stream_of(device)
        )
    torch.testing.assert_close(parameter, expected.detach(), rtol=1e-9, atol=1e-12)


# --- memory of several devices ----------------------------------------------------------------------------------------


def test_copies_are_mended_where_they_differ(gpu: torch.device) -> None:
    sizes = [1, 7, LARGE, 4097, 0]
    tensors = [numbers(n, torch.float32, n).to(gpu) for n in sizes]
    tensors.append(numbers(4097, torch.float32, 9).to(gpu, torch.bfloat16)[1:])
    copies = [tensor.clone() for tensor in tensors]
    tensors[2][LARGE - 1] += 1
    tensors[3].neg_()
    copies[2][5] += 1
    copies[5][4095] += 1
    kernels.mend_copies([tensors, copies])
    for one, expected in zip(copies, tensors, strict=True):
        assert_same_bits(one.cpu(), expected.cpu())


def test_memory_over_devices_is_as_any_other_to_torch(gpu: torch.device) -> None:
    """On one device, several mappings in one range: what several devices have."""
    assert kernels.enable_peer_access([str(gpu)])
    page = 2 << 20
    warm = torch.zeros(4, device=gpu)  # what loads kernels takes memory, too
    assert not warm.any() and (warm * 2).clone().cpu().numel() == 4
    free, _ = torch.cuda.mem_get_info(gpu)
    parts = [(str(gpu), 3 * page), (str(gpu), 100), (str(gpu), page + 12)]
    memory = kernels.zeros_over(parts, [str(gpu)])
    assert memory.device == gpu
    assert memory.numel() == 4 * page + 112
    assert not memory.any()
    values = memory.view(torch.float32)
    values.copy_(torch.arange(values.numel(), dtype=torch.float32))  # from the host, over all mappings
    assert_same_bits((values * 2).cpu(), torch.arange(values.numel(), dtype=torch.float32) * 2)
    assert_same_bits(values.clone().cpu(), values.cpu())
    del values, memory
    torch.cuda.synchronize(gpu)
    torch.cuda.empty_cache()
    if "PYTEST_XDIST_WORKER" not in os.environ:  # it is the whole device's
        assert torch.cuda.mem_get_info(gpu)[0] >= free - page


# --- reduction and step in one launch ---------------------------------------------------------------------------------

TILE: int = kernels.TILE
TAIL_FIELDS = 8
LOW = [None, torch.bfloat16, torch.float16]


@dataclass(frozen=True)
class Place:
    """Where one parameter lies."""

    n: int
    gradient: int
    parameter: int
    kind: int  # of LOW
    partial: int

    @property
    def tiles(self) -> int:
        return -(-self.n // TILE)


def places_of(sizes: Sequence[int]) -> tuple[list[Place], int, list[int], int]:
    """And how many elements gradients, parameters of each kind and partials have."""
    places: list[Place] = []
    gradients, parameters, partials = 0, [0, 0, 0], 0
    for p, n in enumerate(sizes):
        kind = (0, 1, 0, 2)[p % 4]
        # Two of them start off a vector's boundary.
        gradients = -(-gradients // 16) * 16 + (2 if p == 6 else 0)
        parameters[kind] = -(-parameters[kind] // 16) * 16 + (1 if p in (4, 5) else 0)
        place = Place(n, gradients, parameters[kind], kind, partials)
        places.append(place)
        gradients += n
        parameters[kind] += n
        partials += place.tiles
    return places, gradients, parameters, partials


def reduce_and_step(
    device: torch.device,
    algorithm: str,
    dtype: torch.dtype,
    count: int,
    keep: bool,
    infinite: bool = False,
    rows: list[list[float]] | None = None,
    clip_norm: float = 0.7,
) -> dict[str, list[Tensor]]:
    """What virtual ranks hold after three windows, of which the second may not be finite."""
    places, num_gradients, num_parameters, num_partials = places_of([*SIZES[:10], 20_001, 3, 9000])
    rows = ROWS[algorithm] if rows is None else rows
    masters = [numbers(place.n, dtype, 11 * p).to(device) for p, place in enumerate(places)]
    states = [[numbers(m.numel(), dtype, s + i).abs().to(device) for s in range(3)] for i, m in enumerate(masters)]
    ranks: list[tuple[Any, ...]] = []
    runs: list[list[tuple[Any, ...]]] = []
    own: list[Tensor] = []
    for r in range(count):
        gradients = torch.zeros(num_gradients, dtype=dtype, device=device)
        parameters = [
            numbers(max(n, 1), dtype, kind).to(dtype if LOW[kind] is None else LOW[kind]).to(device)
            for kind, n in enumerate(num_parameters)
        ]
        partials = torch.zeros(num_partials, dtype=torch.float64, device=device)
        tail, tail_sum = (torch.zeros(TAIL_FIELDS + len(places), dtype=torch.float64, device=device) for _ in range(2))
        steps = torch.full((len(places),), 4.0, device=device)
        scalars = kernels.make_scalars(unit=4.0).to(device)
        scale = kernels.make_loss_scale(64.0, 0).to(device)
        ranks.append((gradients, parameters, partials, tail, tail_sum, steps, scalars, scale))
        runs.append([])
        for p, place in enumerate(places):
            share = (r + p) % count
            first = place.tiles * share // count * TILE
            last = min(place.tiles * (share + 1) // count * TILE, place.n)
            if first >= last:
                continue
            master = None if place.kind == 0 else masters[p][first:last]
            place_of_run = (place.gradient + first, place.parameter + first, place.kind, last - first)
            tile = place.partial + first // TILE
            runs[-1].append((*place_of_run, tile, p, p % len(rows), master, [s[first:last] for s in states[p]]))
            own.append(gradients[place.gradient + first : place.gradient + last])
    options = (clip_norm, 1.0, 2.0, 0.5, 2)
    together = kernels.ReduceSteps(algorithm, ranks, runs, rows, TAIL_FIELDS, options, blocks=4)
    for window in range(3):
        for r, (gradients, _, _, tail, *_) in enumerate(ranks):
            gradients.copy_(numbers(num_gradients, dtype, 100 * window + r))
            if infinite and window == 1 and r == count - 1:
                gradients[places[3].gradient] = math.inf
            fields = [3.0 + r, 1.5 * r, 1, 0, 0, 0, 1, 0]
            used = [0.0 if window == 1 and p == 5 else 1.0 for p in range(len(places))]
            tail.copy_(torch.tensor(fields + used, dtype=torch.float64))
        together.run(keep, stream=stream_of(device))
    parameters_of = [[rank[1][kind] for rank in ranks] for kind in range(3)]
    found = {
        "parameters": parameters_of[0],
        "bf16": parameters_of[1],
        "f16": parameters_of[2],
        "partials": [rank[2] for rank in ranks],
        "tails": [rank[4] for rank in ranks],
        "steps": [rank[5] for rank in ranks],
        "scalars": [torch.tensor(list(kernels.read_scalars(rank[6]).values()), dtype=torch.float64) for rank in ranks],
        "scales": [torch.tensor(kernels.read_loss_scale(rank[7]), dtype=torch.float64) for rank in ranks],
        "masters": masters,
        "states": [state for each in states for state in each],
        "gradients": own,
    }
    return {name: [tensor.cpu() for tensor in tensors] for name, tensors in found.items()}


@pytest.mark.parametrize("algorithm", list(ROWS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_reduction_and_step_of_virtual_ranks(
    device: torch.device, algorithm: str, dtype: torch.dtype, count: int
) -> None:
    for keep, infinite in ((False, False), (True, True)):
        found = reduce_and_step(device, algorithm, dtype, count, keep, infinite)
        for name, expected in reduce_and_step(CPU, algorithm, dtype, count, keep, infinite).items():
            for one, other in zip(found[name], expected, strict=True):
                assert_same_bits(one, other)
        for name in ("parameters", "bf16", "f16", "partials", "tails", "steps", "scalars", "scales"):
            for one in found[name]:
                assert_same_bits(one, found[name][0])


def test_ranks_step_by_what_their_formula_says(device: torch.device) -> None:
    plain = [[0.1, 0.0, 0.0, 0.0, 0, 0]]
    before = numbers(places_of([*SIZES[:10], 20_001, 3, 9000])[2][0], torch.float64, 0)
    after = reduce_and_step(device, "sgd", torch.float64, 2, False, rows=plain, clip_norm=0.0)["parameters"][0]
    places, num_gradients, *_ = places_of([*SIZES[:10], 20_001, 3, 9000])
    scale = 64.0
    for window in range(3):
        total = sum(numbers(num_gradients, torch.float64, 100 * window + r) for r in range(2))
        assert isinstance(total, Tensor)
        for p, place in enumerate(places):
            if place.kind == 0 and not (window == 1 and p == 5):
                step = total[place.gradient : place.gradient + place.n] / (7 / 4 * scale)
                before[place.parameter : place.parameter + place.n] -= 0.1 * step
        scale *= 2 if window == 1 else 1
    torch.testing.assert_close(after, before, rtol=1e-12, atol=1e-12)


def test_a_wrong_table_is_refused() -> None:
    with pytest.raises(ValueError, match="past its bucket"):
        kernels.Packing([torch.ones(4)], [1], [4], torch.zeros(4))
    with pytest.raises(ValueError, match="at least 5"):
        kernels.Packing([torch.ones(4)], [0], [5], torch.zeros(8))
    with pytest.raises(ValueError, match="group"):
        kernels.Steps("adam", [(torch.ones(1), torch.ones(1), None, [], None, None, 1)], [ROWS["adam"][0]])
