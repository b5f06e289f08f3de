"""NCCL: one rank, which communicates with itself, and two ranks that share the GPU.

NCCL refuses two ranks on one GPU of one host. The ranks of these tests say that each is on a host of its own
(NCCL_HOSTID), and NCCL takes them for two machines that talk over loopback. That shows what it does, not how fast.
"""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch
from rank_jobs import job, take_the_gpu
from small_training import Training, batches, flat, train, train_with, virtual

import muster
from support.ranks import run_ranks

STEPS = 12


@pytest.fixture(autouse=True)
def needs_a_gpu(gpu: torch.device) -> None:
    """Each test's processes use it, and what runs before them in this one."""


def numbers(trained: Any) -> tuple[list[float], list[float]]:
    return trained.losses.tolist(), trained.parameters.tolist()


# --- one rank ---------------------------------------------------------------------------------------------------------


def _train_alone(over_nccl: bool, options: dict[str, Any]) -> tuple[list[float], list[float]]:
    muster._C._comm.set_nccl_alone(over_nccl)
    with muster.MultiWorkerMirroredStrategy.from_env(timeout=60.0, seed=1, **options) as strategy:
        assert strategy.device == torch.device("cuda", 0)
        assert ("NCCL" in strategy.explain()) == over_nccl
        return numbers(train_with(strategy, strategy.device, batches(STEPS, "cuda:0")))


@pytest.mark.parametrize("over_nccl", [False, True])
@pytest.mark.parametrize("options", [{}, {"accumulate": 2}, {"precision": "fp16", "clip_norm": 1.0}], ids=str)
def test_one_rank_learns_as_a_mirrored_replica(gpu: torch.device, over_nccl: bool, options: dict[str, Any]) -> None:
    expected = train(virtual(gpu, 1), batches(STEPS, gpu), **options)
    ((losses, parameters),) = run_ranks(1, _train_alone, over_nccl, options, timeout=100)
    assert losses == expected.losses.tolist()
    assert parameters == expected.parameters.tolist()


def _capture(resets: bool, options: dict[str, Any]) -> tuple[list[float], list[float]]:
    """Parameters after steps, and after as many of which the last are replays."""
    muster._C._comm.set_nccl_alone(True)
    left = []
    data = batches(STEPS + 1, "cuda:0")[:-1]
    for captured in (False, True):
        with job(**options) as strategy:
            training = Training(strategy, torch.device("cuda", 0))
            x, y = (t.clone() for t in data[0])
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for batch in data[:4] if captured else data:
                    x.copy_(batch[0])
                    y.copy_(batch[1])
                    training.step(x, y)
            torch.cuda.synchronize()
            if captured:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
                    training.step(x, y)
                for batch in data[4:]:
                    x.copy_(batch[0])
                    y.copy_(batch[1])
                    graph.replay()
                torch.cuda.synchronize()
                if resets:
                    graph.reset()
            left.append(flat(training.module).tolist())
    return left[0], left[1]


def test_one_rank_captures_its_step() -> None:
    ((taken, replayed),) = run_ranks(1, _capture, True, {}, timeout=100)
    assert taken == replayed


def _communicator(rank: int, size: int, store: Any) -> Any:
    take_the_gpu()
    return muster._C._comm.make_nccl(store, rank, size, torch.device("cuda", 0), timeout=60.0, arena_bytes=1 << 22)


def _use_alone() -> None:
    c = _communicator(0, 1, torch.distributed.HashStore())
    window = c.allocate(1 << 18, torch.float32)
    window.copy_(torch.arange(1 << 18))
    c.all_reduce(window).wait()
    assert torch.equal(window.cpu(), torch.arange(1 << 18, dtype=torch.float32))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        c.all_reduce(window).wait()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
        window.mul_(2)
        c.all_reduce(window).wait()
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(window.cpu(), 8 * torch.arange(1 << 18, dtype=torch.float32))
    graph.reset()

    c.abort("the test ends it")
    with pytest.raises(muster.CommError, match="the test ends it"):
        c.all_reduce(window).wait()


def test_one_rank_starts_registers_captures_and_aborts() -> None:
    run_ranks(1, _use_alone, timeout=100)


# --- two ranks of one GPU ---------------------------------------------------------------------------------------------


def _store() -> tuple[int, int, Any]:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    port = int(os.environ["MASTER_PORT"])
    return rank, size, torch.distributed.TCPStore("127.0.0.1", port, size, rank == 0)


def _collectives() -> None:
    rank, size, store = _store()
    c = _communicator(rank, size, store)
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64):
        for n in (1, 1025, 300_003):
            for op, expected in (("sum", 3), ("max", 2), ("min", 1)):
                tensor = torch.full((n,), rank + 1, dtype=dtype, device="cuda:0")
                c.all_reduce(tensor, op).wait()
                assert tensor.eq(expected).all()
            tensor.fill_(rank)
            c.broadcast(tensor, 1).wait()
            assert tensor.eq(1).all()
        gather = c.all_gather(torch.full((3 + rank, 2), rank, dtype=dtype, device="cuda:0"))
        gather.wait()
        for r, part in enumerate(gather.outputs()):
            assert part.shape == (3 + r, 2)
            assert part.eq(r).all()
        output = torch.zeros(5, dtype=dtype, device="cuda:0")
        c.reduce_scatter(output, torch.arange(10, device="cuda:0").to(dtype)).wait()
        assert output.eq(2 * (torch.arange(5, device="cuda:0") + 5 * rank).to(dtype)).all()
    window = c.allocate(1 << 18, torch.float32)
    window.fill_(rank + 1)
    c.all_reduce(window).wait()
    assert window.eq(3).all()
    window.fill_(rank + 1)
    cut = 70_001
    c.all_reduce(window, runs=[(1, 0, cut), (0, cut, (1 << 18) - cut)]).wait()
    assert (window[:cut] if rank == 1 else window[cut:]).eq(3).all()
    c.barrier().wait()


def test_collectives_of_two_ranks() -> None:
    run_ranks(2, _collectives, timeout=100)


def _train_together(model: str, options: dict[str, Any]) -> tuple[list[float], list[float]]:
    with job(**options) as strategy:
        parts = [tuple(t.tensor_split(2)[strategy.rank] for t in batch) for batch in batches(STEPS, "cuda:0")]
        return numbers(train_with(strategy, strategy.device, [(x, y) for x, y in parts], model=model))


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("linear", {}),
        ("linear", {"accumulate": 2}),
        ("linear", {"precision": "fp16", "clip_norm": 1.0}),
        ("linear", {"shard_optimizer": True}),
        ("wide", {"shard_optimizer": True, "clip_norm": 0.1}),
        ("wide", {"shard_optimizer": True, "accumulate": 2}),
    ],
    ids=str,
)
def test_two_ranks_learn_as_two_virtual_replicas(gpu: torch.device, model: str, options: dict[str, Any]) -> None:
    first, second = run_ranks(2, _train_together, model, options, timeout=100)
    assert first[1] == second[1]
    options = {name: value for name, value in options.items() if name != "shard_optimizer"}  # changes who steps what
    expected = train(virtual(gpu, 2), batches(STEPS, gpu), model=model, **options)
    torch.testing.assert_close(torch.tensor(first[1]), expected.parameters.float(), rtol=1e-5, atol=1e-5)
    # While a window is open, a loss is this worker's.
    closed = slice(options.get("accumulate", 1) - 1, None, options.get("accumulate", 1))
    torch.testing.assert_close(torch.tensor(first[0])[closed], expected.losses.float()[closed], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"shard_optimizer": True, "clip_norm": 0.1}], ids=str)
def test_two_ranks_capture_their_step(options: dict[str, Any]) -> None:
    first, second = run_ranks(2, _capture, True, options, timeout=100)
    assert first == second
    assert first[0] == first[1]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_strategy_closes_while_a_graph_of_it_lives(ranks: int) -> None:
    began = time.perf_counter()
    for taken, replayed in run_ranks(ranks, _capture, False, {}, timeout=100):
        assert taken == replayed
    assert time.perf_counter() - began < 60


def _prepare_different_models() -> list[float]:
    """What a rank has after prepare() of its own initial values, whose memory layouts, types and sizes differ."""
    with job() as strategy:
        torch.manual_seed(strategy.rank)
        module = torch.nn.Sequential(
            torch.nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last),
            torch.nn.BatchNorm2d(8),
            torch.nn.Linear(300, 700, dtype=torch.bfloat16),
        ).cuda()
        module[1].num_batches_tracked.fill_(strategy.rank + 5)
        strategy.prepare(module)
        return [float(t.double().sum()) for t in (*module.parameters(), *module.buffers())]


def test_ranks_begin_with_the_first_ones_parameters() -> None:
    first, second = run_ranks(2, _prepare_different_models, timeout=100)
    assert first == second
    assert first[-1] == 5


def _abort_one() -> str:
    rank, size, store = _store()
    c = _communicator(rank, size, store)
    c.all_reduce(torch.ones(10, device="cuda:0")).wait()
    c.barrier().wait()
    if rank == 0:
        c.abort("rank 0 gives up")
    with pytest.raises(muster.CommError) as caught:
        for _ in range(10):
            c.all_reduce(torch.ones(10, device="cuda:0")).wait()
            c.barrier().wait(2.0)
    return str(caught.value)


def test_an_abort_ends_both_ranks() -> None:
    own, _ = run_ranks(2, _abort_one, timeout=100)
    assert "rank 0 gives up" in own
