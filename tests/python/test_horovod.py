"""muster.horovod: Horovod's collective operations, with its names, defaults and results."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import muster.horovod as hvd
from muster.horovod import HorovodInternalError
from support.jobs import WorkerPool

DTYPES = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32,
          torch.float64]  # fmt: skip


def job(body: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """`body(*args)` in a job."""
    hvd.init(**options)
    try:
        return body(*args)
    finally:
        hvd.shutdown()


def raised(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """The error that a call raises, as text."""
    try:
        fn(*args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def ranks() -> tuple[Any, ...]:
    return (
        hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size(),
        hvd.is_homogeneous(), hvd.is_initialized(),
    )  # fmt: skip


def test_ranks_are_those_of_the_launcher(two_workers: WorkerPool) -> None:
    assert two_workers.call(job, ranks) == [(rank, 2, rank, 2, 0, 1, True, True) for rank in (0, 1)]


def reductions() -> None:
    r, n = hvd.rank(), hvd.size()
    for dtype in DTYPES:
        for shape in [(), (0,), (1,), (3, 4), (2, 0, 3)]:
            x = torch.full(shape, r + 1).to(dtype)
            results = {
                hvd.Sum: n * (n + 1) // 2, hvd.Min: 1, hvd.Max: n, hvd.Product: 2 if n == 2 else 6,
            }  # fmt: skip
            for op, expected in results.items():
                y = hvd.allreduce(x, op=op)
                assert y.dtype == dtype and y.shape == x.shape
                assert torch.equal(y, torch.full(shape, expected).to(dtype))
                assert torch.equal(x, torch.full(shape, r + 1).to(dtype))
            mean = hvd.allreduce(x)
            assert mean.dtype == dtype and mean.shape == x.shape
            assert torch.equal(mean, torch.full(shape, (n + 1) / 2).to(dtype))


def test_reductions_of_every_dtype_and_shape(two_workers: WorkerPool) -> None:
    two_workers.call(job, reductions)


def scaled_sums_of_low_precision() -> None:
    r, n = hvd.rank(), hvd.size()
    given = [torch.randn(2000, generator=torch.Generator().manual_seed(rank)) for rank in range(n)]
    for dtype in (torch.float16, torch.bfloat16):
        parts = [each.to(dtype) for each in given]
        total = torch.zeros(2000)
        for part in parts:
            total += part.float()
        assert torch.equal(hvd.allreduce(parts[r]), (total / n).to(dtype))
        assert torch.equal(hvd.grouped_allreduce([parts[r], parts[r]])[1], (total / n).to(dtype))
        assert torch.equal(hvd.allreduce(parts[r], op=hvd.Sum, postscale_factor=0.3), (total * 0.3).to(dtype))
        large = torch.full((4,), 60000.0).to(dtype)
        assert torch.equal(hvd.allreduce(large), large)
        assert torch.equal(hvd.reducescatter(large.repeat(n)), large)
    assert torch.equal(
        hvd.allreduce(torch.full((4,), 60000.0), compression=hvd.Compression.fp16), torch.full((4,), 6e4)
    )


def test_scaled_sums_of_low_precision_are_rounded_once(two_workers: WorkerPool, three_workers: WorkerPool) -> None:
    two_workers.call(job, scaled_sums_of_low_precision)
    three_workers.call(job, scaled_sums_of_low_precision)


def test_they_go_through_a_process_group_where_ranks_share_no_host(three_workers: WorkerPool) -> None:
    assert three_workers.call(on_two_hosts, reductions) == [
        (0, 2, 0, 2, False), (1, 2, 0, 1, False), (0, 1, 1, 2, False),
    ]  # fmt: skip


def on_two_hosts(body: Callable[[], None]) -> Any:
    """Ranks 0 and 1 on one host, the others on another, as far as their launcher says."""
    os.environ["HOROVOD_HOSTNAME"] = "a" if int(os.environ["RANK"]) < 2 else "b"
    os.environ["LOCAL_RANK"] = str(int(os.environ["RANK"]) % 2)
    try:
        return job(lambda: (body(), places())[1])
    finally:
        del os.environ["HOROVOD_HOSTNAME"]


def places() -> tuple[Any, ...]:
    return hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size(), hvd.is_homogeneous()


def scaled() -> None:
    r = hvd.rank()
    x = torch.tensor([1.0, 2.0]) * (r + 1)
    assert hvd.allreduce(x, op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.5).tolist() == [3.0, 6.0]
    assert hvd.allreduce(x, prescale_factor=2.0).tolist() == [3.0, 6.0]
    # Integers go towards zero.
    assert hvd.allreduce(torch.tensor([2 * r - 4, 5 + 2 * r, 3])).tolist() == [-3, 6, 3]
    assert hvd.allreduce(torch.tensor([-1 - r, 1 + r, r])).tolist() == [-1, 1, 0]
    assert hvd.allreduce(torch.tensor([3 + r]), op=hvd.Sum, postscale_factor=0.5).tolist() == [3]
    # fp16 on the way, and the dtype of before at its end.
    third = torch.full((3,), 1 / 3, dtype=torch.float64)
    for compression, expected in ((hvd.Compression.fp16, third.half().double()), (hvd.Compression.none, third)):
        y = hvd.allreduce(third, compression=compression)
        assert torch.equal(y, expected) and y.dtype == torch.float64
    assert hvd.allreduce(torch.tensor([3]), compression=hvd.Compression.fp16).dtype == torch.int64
    # Low precision is added in fp32, and rounded once.
    assert hvd.allreduce(torch.tensor(2048.0 if r else 1.0).half(), op=hvd.Sum, postscale_factor=1.0).item() == 2048.0
    flags = torch.tensor([bool(r), False])
    assert hvd.allreduce(flags, op=hvd.Sum).tolist() == [True, False]
    assert hvd.allreduce(flags, op=hvd.Min).tolist() == [False, False]
    assert "bool has no average" in raised(hvd.allreduce, flags)
    assert "complex64" in raised(hvd.allreduce, torch.zeros(2, dtype=torch.complex64))
    assert "float8_e5m2" in raised(hvd.allreduce, torch.zeros(2, dtype=torch.float8_e5m2))
    assert "give a string" in raised(hvd.allreduce, torch.zeros(2), name=3)
    assert "finite" in raised(hvd.allreduce, x, prescale_factor=float("inf"))


def test_factors_averages_and_compression(two_workers: WorkerPool) -> None:
    two_workers.call(job, scaled)


def old_names() -> None:
    x = torch.tensor([1.0 + hvd.rank()])
    with pytest.warns(DeprecationWarning, match="op=Sum"):
        assert hvd.allreduce(x, average=False).item() == 3.0
    with pytest.warns(DeprecationWarning, match="op=Average"):
        assert hvd.allreduce(x, True).item() == 1.5
    assert "not both" in raised(hvd.allreduce, x, average=True, op=hvd.Sum)
    assert "Average" in raised(hvd.allreduce, x, op=7)
    assert (hvd.Average, hvd.Sum, hvd.Adasum, hvd.Min, hvd.Max, hvd.Product) == (0, 1, 2, 3, 4, 5)


def test_average_is_deprecated(two_workers: WorkerPool) -> None:
    two_workers.call(job, old_names)


def in_place() -> None:
    r = hvd.rank()
    x = torch.tensor([1.0, 2.0]) * (r + 1)
    assert hvd.allreduce_(x, op=hvd.Sum) is x and x.tolist() == [3.0, 6.0]
    strided = torch.arange(6.0).view(2, 3).t()
    assert hvd.allreduce_(strided, op=hvd.Sum) is strided
    assert torch.equal(strided, 2 * torch.arange(6.0).view(2, 3).t())
    parameter = torch.nn.Parameter(torch.full((2,), float(r)))
    assert hvd.broadcast_(parameter, 1) is parameter and parameter.tolist() == [1.0, 1.0]
    several = [torch.full((2,), float(r)), torch.tensor(r), torch.zeros(0), torch.tensor([r], dtype=torch.float64)]
    results = hvd.grouped_allreduce_(several, op=hvd.Sum)
    assert all(a is b for a, b in zip(results, several, strict=True))
    assert [t.tolist() for t in several] == [[1.0, 1.0], 1, [], [1.0]]
    assert [t.tolist() for t in hvd.grouped_allreduce(several, op=hvd.Average)] == [[1.0, 1.0], 1, [], [1.0]]
    assert hvd.grouped_allreduce([]) == []


def test_in_place_and_grouped(two_workers: WorkerPool) -> None:
    two_workers.call(job, in_place)


def large() -> None:
    generator = torch.Generator().manual_seed(0)
    everyones = [torch.randn(5 * 1024 * 1024 + 3, generator=generator) for _ in range(2)]
    mine = everyones[hvd.rank()]
    small = [torch.full((1000,), float(hvd.rank() + i)) for i in range(200)]
    handles = [hvd.allreduce_async(mine, op=hvd.Sum), *(hvd.allreduce_async_(t, op=hvd.Sum) for t in small)]
    first, *rest = [hvd.synchronize(handle) for handle in handles]
    assert torch.equal(first, everyones[0] + everyones[1])
    assert all(torch.equal(t, torch.full((1000,), 2.0 * i + 1)) for i, t in enumerate(rest))


def test_tensors_larger_than_the_buffer(two_workers: WorkerPool) -> None:
    two_workers.call(job, large)


def orders() -> None:
    r = hvd.rank()
    names = [f"x{i}" for i in range(20)]
    mine = names if r == 0 else [*reversed(names)]
    handles = {name: hvd.allreduce_async(torch.tensor([float(name[1:])]), name=name, op=hvd.Sum) for name in mine}
    assert {name: hvd.synchronize(handles[name]).item() for name in names} == {n: 2.0 * int(n[1:]) for n in names}
    assert hvd.synchronize(handles["x0"]) is None
    # What the other rank has not asked for yet is not done, whatever else is.
    if r == 0:
        late = hvd.allreduce_async(torch.zeros(1), name="late")
        hvd.barrier()
        assert not hvd.poll(late)
        later = hvd.allreduce_async(torch.zeros(1), name="later")
        hvd.barrier()
        assert hvd.synchronize(late).item() == 0.0 and hvd.poll(late)
        hvd.barrier()
        assert not hvd.poll(later)
        hvd.barrier()
        hvd.synchronize(later)
    else:
        hvd.barrier()
        hvd.barrier()
        hvd.allreduce(torch.zeros(1), name="late")
        hvd.barrier()
        hvd.barrier()
        hvd.allreduce(torch.zeros(1), name="later")
    # Kinds have names of their own.
    a = hvd.allreduce_async(torch.ones(1), name="same")
    b = hvd.allgather_async(torch.ones(1), name="same")
    assert len(hvd.synchronize(b)) == 2 and hvd.synchronize(a).item() == 1.0


def test_operations_come_in_any_order(two_workers: WorkerPool) -> None:
    two_workers.call(job, orders)


def from_threads() -> None:
    results: dict[int, float] = {}

    def reduce(i: int) -> None:
        for k in range(20):
            results[i] = hvd.allreduce(torch.tensor([float(i + hvd.rank())]), name=f"{i}.{k}", op=hvd.Sum).item()

    threads = [threading.Thread(target=reduce, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {i: 2.0 * i + 1 for i in range(4)}


def test_several_threads_at_once(two_workers: WorkerPool) -> None:
    two_workers.call(job, from_threads)


def twice() -> None:
    if hvd.rank() == 0:
        handle = hvd.allreduce_async(torch.ones(1), name="twice")
        error = raised(hvd.allreduce_async, torch.ones(1), name="twice")
        assert error.startswith("InvalidOperation: allreduce 'twice'") and "under way" in error
        hvd.barrier()
        assert hvd.synchronize(handle).item() == 1.0
    else:
        hvd.barrier()
        hvd.allreduce(torch.ones(1), name="twice")
    assert hvd.allreduce(torch.ones(1), name="twice").item() == 1.0


def test_a_name_under_way_is_refused(two_workers: WorkerPool) -> None:
    two_workers.call(job, twice)


def disagreements() -> list[str]:
    r = hvd.rank()
    x = torch.zeros(2 + r, 3)
    texts = [
        raised(hvd.allreduce, x, name="shape"),
        raised(hvd.allreduce, torch.zeros(3, dtype=torch.int32 if r else torch.int64), name="dtype"),
        raised(hvd.allreduce, torch.zeros(3), name="op", op=hvd.Sum if r else hvd.Max),
        raised(hvd.allreduce, torch.zeros(3), name="factor", prescale_factor=1.0 + r),
        raised(hvd.broadcast, torch.zeros(3), r, name="root"),
        raised(hvd.broadcast_, x, 0, name="broadcast"),
        raised(hvd.allgather, torch.zeros(2, 3 + r), name="rows"),
        raised(hvd.allgather, torch.zeros(2) if r else torch.zeros(2, 1), name="dims"),
        raised(hvd.allgather, torch.tensor(1.0), name="scalar"),
        raised(hvd.reducescatter, x, name="scatter"),
        raised(hvd.alltoall, torch.zeros(2, 3 + r), name="all"),
        raised(hvd.grouped_allreduce, [torch.zeros(1)] * (1 + r), name="group"),
    ]
    assert hvd.allreduce(torch.ones(1), name="shape").item() == 1.0
    return texts


def test_ranks_that_disagree_all_hear_of_it(two_workers: WorkerPool) -> None:
    names = ["shape", "dtype", "op", "factor", "root", "broadcast", "rows", "dims", "scalar", "scatter", "all", "group"]
    first, second = two_workers.call(job, disagreements)
    assert first == second
    for name, text in zip(names, first, strict=True):
        assert text.startswith("InvalidOperation: ") and f"'{name}'" in text, text
        assert "0 dimensions" in text if name == "scalar" else "ranks disagree: rank 0 asked for " in text
    assert "float32 [2, 3]" in first[0] and "float32 [3, 3]" in first[0]
    assert issubclass(HorovodInternalError, RuntimeError)


def gathered() -> None:
    r, n = hvd.rank(), hvd.size()
    for dtype in [*DTYPES, torch.bool]:
        x = torch.full((r + 1, 2), r).to(dtype)
        expected = torch.cat([torch.full((i + 1, 2), i) for i in range(n)]).to(dtype)
        y = hvd.allgather(x, name="x")
        assert torch.equal(y, expected) and y.dtype == dtype
    assert hvd.allgather(torch.zeros(0, 2)).shape == (0, 2)
    assert hvd.allgather(torch.full((r, 2), 5.0)).tolist() == [[5.0, 5.0]] * (n * (n - 1) // 2)
    assert hvd.allgather(torch.zeros(2, 0)).shape == (2 * n, 0)
    assert hvd.allgather(torch.arange(6).view(2, 3).t()[:2]).shape == (2 * n, 2)
    a, b = hvd.grouped_allgather([torch.full((r,), 1.0), torch.tensor([[r]])])
    assert a.shape == (n * (n - 1) // 2,) and b.tolist() == [[i] for i in range(n)]


def test_allgather_of_uneven_rows(two_workers: WorkerPool, three_workers: WorkerPool) -> None:
    two_workers.call(job, gathered)
    three_workers.call(on_two_hosts, gathered)


def broadcasts() -> None:
    r, n = hvd.rank(), hvd.size()
    for root in range(n):
        for dtype in [*DTYPES, torch.bool]:
            for shape in [(), (0,), (3, 2)]:
                x = torch.full(shape, r).to(dtype)
                y = hvd.broadcast(x, root)
                assert torch.equal(y, torch.full(shape, root).to(dtype)) and y.dtype == dtype
                assert torch.equal(x, torch.full(shape, r).to(dtype))
    assert "not among [0, 1" in raised(hvd.broadcast, torch.zeros(1), n)


def test_broadcast(two_workers: WorkerPool, three_workers: WorkerPool) -> None:
    two_workers.call(job, broadcasts)
    three_workers.call(on_two_hosts, broadcasts)


def exchanged() -> None:
    r, n = hvd.rank(), hvd.size()
    for dtype in [*DTYPES, torch.bool]:
        x = torch.arange(n).repeat_interleave(2).view(-1, 1).expand(-1, 3).to(dtype)
        y = hvd.alltoall(x)
        assert isinstance(y, Tensor)
        assert torch.equal(y, torch.full((2 * n, 3), r).to(dtype)) and y.dtype == dtype
    # Rank i sends i + j rows, of 10 i + j, to rank j.
    rows = torch.cat([torch.full((r + j,), 10.0 * r + j) for j in range(n)])
    counts = [r + j for j in range(n)]
    y, received = hvd.alltoall(rows, splits=torch.tensor(counts))
    assert y.tolist() == [10.0 * i + r for i in range(n) for _ in range(i + r)]
    assert received.tolist() == [i + r for i in range(n)] and received.dtype == torch.int64
    assert hvd.alltoall(rows, splits=counts)[1].dtype == torch.int32
    nothing, zeros = hvd.alltoall(torch.zeros(0, 4), splits=[0] * n)
    assert nothing.shape == (0, 4) and zeros.tolist() == [0] * n
    # Rank 0 sends nothing and gets nothing.
    own = torch.full((2 if r == n - 1 else 0, 4), float(r))
    kept, _ = hvd.alltoall(own, splits=[0] * (n - 1) + [len(own)])
    assert torch.equal(kept, own)
    assert "equally" in raised(hvd.alltoall, torch.zeros(n + 1))
    assert "rows" in raised(hvd.alltoall, torch.zeros(n), splits=[n + 1] + [0] * (n - 1))
    assert "rows" in raised(hvd.alltoall, torch.zeros(n), splits=[n])


def test_alltoall(two_workers: WorkerPool, three_workers: WorkerPool) -> None:
    two_workers.call(job, exchanged)
    three_workers.call(on_two_hosts, exchanged)


def scattered() -> None:
    r, n = hvd.rank(), hvd.size()
    x = torch.arange(4.0 * n - 2).view(-1, 2) + r  # as many rows as 2 n - 1: the last rank gets one less
    total = sum(torch.arange(4.0 * n - 2).view(-1, 2) + i for i in range(n))
    mine = slice(2 * r, min(2 * r + 2, 2 * n - 1))
    assert torch.equal(hvd.reducescatter(x, op=hvd.Sum), total[mine])
    assert torch.allclose(hvd.reducescatter(x), total[mine] / n)
    assert torch.equal(hvd.reducescatter(x, op=hvd.Sum, prescale_factor=2.0, postscale_factor=2.0), 4 * total[mine])
    a, b = hvd.grouped_reducescatter([x, torch.ones(n, dtype=torch.int64)], op=hvd.Sum)
    assert torch.equal(a, total[mine]) and b.tolist() == [n]
    assert hvd.reducescatter(torch.zeros(0, 2)).shape == (0, 2)
    assert hvd.reducescatter(torch.ones(1)).shape == (1 if r == 0 else 0,)
    assert hvd.reducescatter(x, compression=hvd.Compression.fp16).dtype == torch.float32
    assert "Average or Sum" in raised(hvd.reducescatter, x, op=hvd.Min)


def test_reducescatter(two_workers: WorkerPool, three_workers: WorkerPool) -> None:
    two_workers.call(job, scattered)
    three_workers.call(on_two_hosts, scattered)


def sparse() -> None:
    r = hvd.rank()
    x = torch.sparse_coo_tensor([[r, r + 1]], [[1.0, 2.0], [3.0, 4.0]], (3, 2))
    dense = sum(
        torch.sparse_coo_tensor([[i, i + 1]], [[1.0, 2.0], [3.0, 4.0]], (3, 2)).to_dense() for i in range(hvd.size())
    )
    assert torch.equal(hvd.sparse_allreduce_async(x, "a", hvd.Sum)().to_dense(), dense)
    assert torch.equal(hvd.sparse_allreduce_async(x, "b", hvd.Average)().to_dense(), dense / hvd.size())
    empty = torch.sparse_coo_tensor(torch.zeros(1, 0), torch.zeros(0, 2), (3, 2)) if r else x
    assert hvd.sparse_allreduce_async(empty, "c", hvd.Sum)().to_dense().sum() == 10.0
    assert "Sum and Average" in raised(hvd.sparse_allreduce_async, x, "d", hvd.Min)
    assert "sparse" in raised(hvd.allreduce, x)


def test_sparse_allreduce(two_workers: WorkerPool) -> None:
    two_workers.call(job, sparse)


def adasum() -> None:
    r = hvd.rank()
    east, north = torch.tensor([2.0, 0.0]), torch.tensor([0.0, 3.0])
    assert hvd.allreduce(north if r else east, op=hvd.Adasum).tolist() == [2.0, 3.0]  # nothing in common: a sum
    assert hvd.allreduce(east, op=hvd.Adasum).tolist() == [2.0, 0.0]  # all in common: once
    a, b = torch.tensor([1.0, 2.0]), torch.tensor([3.0, -1.0])
    expected = (1 - 1 / 5 / 2) * a + (1 - 1 / 10 / 2) * b  # a·b = 1, a·a = 5, b·b = 10
    for dtype in (torch.float16, torch.float32, torch.float64):
        y = hvd.allreduce((b if r else a).to(dtype), op=hvd.Adasum)
        assert torch.allclose(y.float(), expected, rtol=1e-3) and y.dtype == dtype
    zero = hvd.allreduce(torch.zeros(2) if r else a, op=hvd.Adasum)
    assert zero.tolist() == a.tolist()


def test_adasum(two_workers: WorkerPool, three_workers: WorkerPool) -> None:
    two_workers.call(job, adasum)
    assert "power of 2" in three_workers.call(job, adasum_refused)[0]


def adasum_refused() -> str:
    return raised(hvd.allreduce, torch.ones(1), op=hvd.Adasum)


def gradients() -> None:
    r, n = hvd.rank(), hvd.size()
    x = torch.tensor([1.0 + r, 2.0], requires_grad=True)
    weight = torch.tensor([1.0, 10.0]) * (r + 1)
    total = torch.tensor([3.0, 30.0])  # of all ranks' weights

    def gradient(y: Tensor, w: Tensor) -> Any:
        (g,) = torch.autograd.grad((y * w).sum(), x)
        return g.tolist()

    assert gradient(hvd.allreduce(x, op=hvd.Sum), weight) == total.tolist()
    assert gradient(hvd.allreduce(x), weight) == (total / n).tolist()
    assert gradient(hvd.allreduce(x, op=hvd.Sum, prescale_factor=2.0), weight) == (2 * total).tolist()
    assert gradient(hvd.grouped_allreduce([x, x * 2], op=hvd.Sum)[1], weight) == (2 * total).tolist()
    rows = torch.arange(2.0 * n) + 100 * r
    mean = (torch.arange(2.0 * n) + 50)[2 * r : 2 * r + 2]
    assert gradient(hvd.allgather(x), rows) == mean.tolist()
    assert gradient(hvd.grouped_allgather([x[: 2 - r], x])[1], rows) == mean.tolist()
    uneven = hvd.allgather(x[: 2 - r])
    assert gradient(uneven, torch.tensor([1.0, 2.0, 3.0])) == ([1.0, 2.0] if r == 0 else [3.0, 0.0])
    assert gradient(hvd.broadcast(x, 1), weight) == ([0.0, 0.0] if r == 0 else (total / n).tolist())
    assert gradient(hvd.alltoall(x), weight) == ([1.0, 2.0] if r == 0 else [10.0, 20.0])
    received, _ = hvd.alltoall(x, splits=[1 + r, 1 - r])
    assert gradient(received, torch.ones(len(received)) * (r + 1)) == ([1.0, 2.0] if r == 0 else [1.0, 1.0])
    scattered = torch.tensor([r + 1.0])
    assert gradient(hvd.reducescatter(x, op=hvd.Sum), scattered) == [2.0, 4.0]
    assert gradient(hvd.reducescatter(x), scattered) == [1.0, 2.0]
    assert gradient(hvd.grouped_reducescatter([x], op=hvd.Sum)[0], scattered) == [2.0, 4.0]
    assert "no gradient" in raised(gradient, hvd.allreduce(x, op=hvd.Max), weight)
    # And through the gradient itself.
    y = hvd.allreduce(x * x, op=hvd.Sum).sum()
    (g,) = torch.autograd.grad(y, x, create_graph=True)
    (second,) = torch.autograd.grad(g.sum(), x)
    assert second.tolist() == [4.0, 4.0]


def test_gradients_flow_through(two_workers: WorkerPool) -> None:
    two_workers.call(job, gradients)


def joined() -> list[Any]:
    r = hvd.rank()
    sums = [hvd.allreduce(torch.full((2,), r + 1.0), name=f"batch{i}", op=hvd.Sum)[0].item() for i in range(r + 1)]
    if r == 2:
        sums.append(hvd.allreduce(torch.tensor([6]), name="mean").item())
        sums.append([t.item() for t in hvd.grouped_allreduce([torch.tensor(6.0), torch.tensor([6])], name="group")])
        sums.append(raised(hvd.allgather, torch.zeros(1), name="rows"))
        sums.append(raised(hvd.allreduce, torch.zeros(1), name="least", op=hvd.Min))
    last = hvd.join()
    again = hvd.allreduce(torch.tensor([r]), op=hvd.Sum).item()
    return [sums, last, again, hvd.join() in (0, 1, 2)]


def test_join_gives_zeros(three_workers: WorkerPool) -> None:
    first, second, third = three_workers.call(job, joined)
    assert first == [[6.0], 2, 3, True]
    assert second == [[6.0, 5.0], 2, 3, True]
    sums, *rest = third
    assert sums[:5] == [6.0, 5.0, 3.0, 2, [2.0, 2]] and rest == [2, 3, True]
    assert "a rank has joined" in sums[5] and "'rows'" in sums[5]
    assert "a rank has joined" in sums[6] and "'least'" in sums[6]


def joined_without_names() -> list[Any]:
    r = hvd.rank()
    sums = []
    for epoch in range(2):
        for _ in range(2 + r + epoch):
            hvd.allreduce(torch.ones(2))
        if r == 2:
            hvd.barrier()
        left = hvd.allreduce_async(torch.ones(2), op=hvd.Sum) if r == 2 else None
        hvd.join()
        if left is not None:
            hvd.synchronize(left)
        hvd.barrier()
        sums.append(hvd.allreduce(torch.tensor(r), op=hvd.Sum).item())
    return sums


def test_operations_without_names_match_after_join(three_workers: WorkerPool) -> None:
    assert three_workers.call(job, joined_without_names, timeout=40) == [[3, 3]] * 3


def waits() -> float:
    if hvd.rank() == 0:
        time.sleep(0.5)
    begun = time.monotonic()
    hvd.barrier()
    return time.monotonic() - begun


def test_barrier(two_workers: WorkerPool) -> None:
    assert two_workers.call(job, waits)[1] > 0.2


def in_sets() -> list[Any]:
    r = hvd.rank()
    pair = hvd.add_process_set([2, 0])
    rest = hvd.add_process_set(hvd.ProcessSet([1]))
    assert (pair.process_set_id, rest.process_set_id) == (1, 2) and pair.ranks == [0, 2]
    assert pair.included() == (r != 1) and pair.size() == 2
    assert "already" in raised(hvd.add_process_set, [0, 2])
    assert "already" in raised(hvd.add_process_set, [0, 1, 2])
    assert "ranks from 0 to 2" in raised(hvd.add_process_set, [0, 3])
    found: list[Any] = []
    x = torch.tensor([r + 1.0], requires_grad=True)
    if pair.included():
        found.append(pair.rank())
        y = hvd.allreduce(x, process_set=pair)
        found.append(y.item())
        found.append(torch.autograd.grad(y.sum(), x)[0].item())
        found.append(hvd.allgather(torch.full((r + 1,), r), process_set=pair).tolist())
        found.append(hvd.broadcast(torch.tensor(r), 2, process_set=pair).item())
        found.append(hvd.alltoall(torch.tensor([r, r + 10]), process_set=pair).tolist())
        found.append(hvd.reducescatter(torch.tensor([r, r + 1]), op=hvd.Sum, process_set=pair).tolist())
        found.append(hvd.broadcast_object({"rank": r}, 2, process_set=pair))
        found.append(raised(hvd.broadcast, torch.zeros(1), 1, process_set=pair))
        hvd.barrier(pair)
        found.append("Adasum" in raised(hvd.allreduce, torch.ones(1), op=hvd.Adasum, process_set=pair))
    else:
        found.append(raised(pair.rank))
        found.append(raised(hvd.allreduce, x, process_set=pair))
        found.append(hvd.allreduce(x, process_set=rest).item())
    assert not hvd.remove_process_set(hvd.global_process_set)
    assert hvd.remove_process_set(pair) and pair.process_set_id is None and pair.size() is None
    assert not hvd.remove_process_set(pair)
    assert "no process set" in raised(hvd.allreduce, x, process_set=pair)
    again = hvd.add_process_set([0, 2])
    assert again.process_set_id == 3
    if again.included():
        hvd.barrier(again)
    return found


def test_process_sets(three_workers: WorkerPool) -> None:
    first, second, third = three_workers.call(job, in_sets, process_sets="dynamic")
    for r, found in ((0, first), (2, third)):
        refused = found.pop(8)
        assert "not among [0, 2]" in refused
        assert found == [
            r // 2, 2.0, 1.0, [0, 2, 2, 2], 2, [0, 2] if r == 0 else [10, 12], [2] if r == 0 else [4], {"rank": 2}, True
        ]  # fmt: skip
    assert "rank 1 is not in process set 1" in second[0] and "rank 1 is not in process set 1" in second[1]
    assert second[2] == 2.0


def overlapping_job() -> None:
    """A ring of pairs; each rank is in two of them, and uses them in another order than its neighbours."""
    os.environ.pop("HOROVOD_DYNAMIC_PROCESS_SETS", None)
    sets = [hvd.ProcessSet([i, (i + 1) % 3]) for i in range(3)]
    hvd.init(process_sets=sets)
    try:
        r = hvd.rank()
        order = (r, (r - 1) % 3) if r != 1 else ((r - 1) % 3, r)
        handles = [
            hvd.allreduce_async(torch.tensor([1.0 + r]), name=f"x{k}", op=hvd.Sum, process_set=sets[i])
            for k in range(10) for i in order
        ]  # fmt: skip
        expected = {sets[0].process_set_id: 3.0, sets[1].process_set_id: 5.0, sets[2].process_set_id: 4.0}
        assert [hvd.synchronize(h).item() for h in handles] == [expected[sets[i].process_set_id] for i in order] * 10
        assert "process_sets='dynamic'" in raised(hvd.add_process_set, [0])
    finally:
        hvd.shutdown()


def test_process_sets_that_overlap(three_workers: WorkerPool) -> None:
    three_workers.call(overlapping_job)


def objects() -> None:
    r, n = hvd.rank(), hvd.size()
    thing = {"rank": r, "values": list(range(1000 * (r + 1)))}
    assert hvd.broadcast_object(thing, 1)["rank"] == 1
    assert hvd.broadcast_object(thing if r == 0 else None, name="other") == {"rank": 0, "values": list(range(1000))}
    assert hvd.broadcast_object_fn(1, "made")(r) == 1
    assert [o["rank"] for o in hvd.allgather_object(thing)] == list(range(n))
    assert hvd.allgather_object(None) == [None] * n


def test_objects(two_workers: WorkerPool) -> None:
    two_workers.call(job, objects)


def in_inference_mode() -> None:
    r, n = hvd.rank(), hvd.size()
    mean, total = (n + 1) / 2, n * (n + 1) / 2
    with torch.inference_mode():
        assert hvd.allreduce_(torch.full((3,), r + 1.0)).tolist() == [mean] * 3
        strided = torch.full((2, 3), r + 1.0).t()
        assert hvd.allreduce_(strided) is strided and strided.tolist() == [[mean] * 2] * 3
        assert hvd.allreduce_(torch.tensor([r + 1.0]), op=hvd.Product).item() == (2 if n == 2 else 6)
        grouped = [torch.full((2,), r + 1.0), torch.tensor([r + 1])]
        assert [each.tolist() for each in hvd.grouped_allreduce_(grouped, op=hvd.Sum)] == [[total] * 2, [total]]
        assert hvd.broadcast_(torch.tensor([r]), 1).item() == 1
        assert hvd.broadcast_object({"rank": r}) == {"rank": 0}
        assert hvd.allgather_object(r) == list(range(n))
    assert hvd.allreduce(torch.ones(1)).item() == 1.0


def test_tensors_of_inference_mode_are_written(two_workers: WorkerPool) -> None:
    two_workers.call(job, in_inference_mode)


def repeated() -> None:
    with pytest.raises(ValueError, match=r"allreduce_ 'wide' of a tensor whose elements share memory.*clone"):
        hvd.allreduce_(torch.ones(1).expand(3), name="wide")
    with pytest.raises(ValueError, match=r"broadcast_ 'wide' of a tensor whose elements share memory"):
        hvd.broadcast_(torch.ones(2, 1).expand(2, 3), 0, name="wide")
    assert hvd.allreduce(torch.ones(1).expand(3)).tolist() == [1.0] * 3  # which is only read
    assert hvd.allreduce_(torch.ones(3, 0).expand(3, 0)).shape == (3, 0)
    assert hvd.allreduce_(torch.ones(1).expand(1)).tolist() == [1.0]


def test_what_cannot_be_written_in_place_is_refused_before_the_job_fails(two_workers: WorkerPool) -> None:
    two_workers.call(job, repeated)


def kept_tensors() -> list[bool]:
    """Whether what was given, written and returned lives on while the engine waits for the next operation."""
    given = torch.ones(1000)
    written = torch.ones(1000)
    returned = hvd.allreduce(given)
    handles = [hvd.allreduce_async_(written), hvd.allreduce_async(given)]
    for handle in handles:
        hvd.synchronize(handle)
    known = [weakref.ref(each) for each in (given, written, returned)]
    del given, written, returned
    deadline = time.monotonic() + 5
    while any(each() is not None for each in known) and time.monotonic() < deadline:
        time.sleep(0.01)
    return [each() is not None for each in known]


def test_tensors_end_with_their_operation(two_workers: WorkerPool) -> None:
    assert two_workers.call(job, kept_tensors) == [[False] * 3] * 2
