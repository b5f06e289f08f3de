"""Workers write a checkpoint together, each a part: it is, to the last bit, what one of them would have written alone,
and what goes wrong with a part is said where it went wrong, and on the chief."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import muster
from muster import _C
from muster.checkpoint import comparing, reading
from muster.writing import Writing
from support.ranks import run_ranks
from support.saving import Job, small_files

WIDTH = 300
"""Of a layer whose weight, of 600 kB, several ranks write."""


def worker(**options: Any) -> muster.Strategy:
    return muster.MultiWorkerMirroredStrategy.from_env(threads_per_replica=1, timeout=60.0, seed=1, **options)


class Net(nn.Module):
    """Has a large weight, in bf16 where it is `low`, buffers, and a weight that is not trained."""

    def __init__(self, *, low: bool) -> None:
        super().__init__()
        self.first = nn.Linear(8, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.middle = nn.Linear(WIDTH, 500, dtype=torch.bfloat16 if low else torch.float32)
        self.last = nn.Linear(500, 3)
        self.last.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.norm(self.first(x))
        y: Tensor = self.last(self.middle(hidden.to(self.middle.weight.dtype)).float())
        return y


class Wide:
    """A model, its optimizer, and an average that its program keeps."""

    def __init__(self, strategy: muster.Strategy, *, low: bool = False) -> None:
        self.strategy = strategy
        torch.manual_seed(0)
        module = Net(low=low)
        self.user = torch.optim.AdamW(module.parameters(), lr=0.01)
        self.model, _ = strategy.prepare(module, self.user)

    def train(self, steps: int) -> Wide:
        def loss(x: Tensor) -> Tensor:
            return self.model(x).square().mean()

        for _ in range(steps):
            self.strategy.step(loss, torch.arange(64.0).view(8, 8) / 64)
        return self

    def bits(self) -> list[bytes]:
        state = self.user.state_dict()["state"]
        moments = [state[number][name] for number in sorted(state) for name in sorted(state[number])]
        tensors = [*self.model.state_dict().values(), *moments]
        return [tensor.detach().flatten().view(torch.uint8).numpy().tobytes() for tensor in tensors]


def saved(folder: Path, sharded: bool, low: bool) -> list[bytes]:
    """Together, and by the chief alone: other ranks do not see its folder, and can make none."""
    with worker(shard_optimizer=sharded) as strategy:
        job = Wide(strategy, low=low).train(2)
        extra = {"average": torch.full((1000,), float(strategy.rank)), "name": "kept"}
        gathered = _C.StrategyCore.whole_state

        def gather_nothing(*args: Any) -> None:
            assert gathered(*args) is None

        _C.StrategyCore.whole_state = gather_nothing  # type: ignore[assignment, method-assign]
        strategy.save(folder / "together", keep=2, **extra)
        _C.StrategyCore.whole_state = gathered  # type: ignore[method-assign]
        strategy.save(folder / "alone" if strategy.is_chief else Path("/dev/null/alone"), **extra)
        return job.bits()


def loaded(folder: Path, low: bool) -> tuple[list[bytes], str]:
    with worker() as strategy:
        job = Wide(strategy, low=low)
        found = strategy.load(folder)
        assert found is not None and strategy.steps == 2
        return job.bits(), found["name"]


@pytest.mark.parametrize(("ranks", "sharded", "low"), [(2, False, False), (3, True, False), (2, True, True)])
def test_what_ranks_write_together_is_what_the_chief_writes_alone(
    ranks: int, sharded: bool, low: bool, tmp_path: Path
) -> None:
    bits, *others = run_ranks(ranks, saved, tmp_path, sharded, low)
    assert all(bits == each for each in others)
    together, alone = (reading.read(tmp_path / name) for name in ("together", "alone"))
    assert {file.name.split("-")[1] for file in together.folder.glob("*.safetensors")} == set(map(str, range(ranks)))
    (file,) = alone.folder.glob("*.safetensors")
    assert file.name.startswith("shard-" if sharded else "worker-0-")
    assert comparing.compare(together, alone).differences == [] and together.metadata == alone.metadata
    sizes = dict.fromkeys(range(ranks), 0)
    for file in together.folder.glob("worker-*.safetensors"):
        sizes[int(file.name.split("-")[1])] += file.stat().st_size
    assert max(sizes.values()) < 0.8 * sum(sizes.values())
    with muster.MirroredStrategy(["cpu"], threads_per_replica=1) as strategy:
        job = Wide(strategy, low=low)
        found = strategy.load(tmp_path / "together")
        assert found is not None and found["name"] == "kept" and torch.equal(found["average"], torch.zeros(1000))
        assert job.bits() == bits
    if not sharded:
        assert run_ranks(3, loaded, tmp_path / "together", low) == [(bits, "kept")] * 3


# --- what goes wrong --------------------------------------------------------------------------------------------------
def said(act: Any) -> str:
    try:
        act()
    except muster.CheckpointError as error:
        return str(error)
    return ""


def with_a_full_disk(folder: Path, full: int) -> list[str]:
    with worker() as strategy:
        job = Wide(strategy).train(1)
        strategy.save(folder)
        assert strategy.load(folder) == {}
        texts = []
        for how in (lambda: strategy.save(folder), lambda: strategy.load(folder)):
            job.train(1)
            if strategy.rank == full:
                with small_files():
                    strategy.save(folder)
                    texts.append(said(how))
            else:
                strategy.save(folder)
                texts.append(said(how))
        assert strategy.load(folder) == {} and strategy.steps == 1
        job.train(1)
        strategy.save(folder)  # and the job goes on
        assert strategy.load(folder) == {} and strategy.steps == 2
        return texts


@pytest.mark.parametrize("full", [0, 1])
def test_a_rank_whose_disk_is_full_is_named_and_the_checkpoint_before_stays(full: int, tmp_path: Path) -> None:
    ranks = run_ranks(2, with_a_full_disk, tmp_path, full)
    for text in ranks[full]:
        assert f"worker-{full}-" in text and "failed on rank" not in text, ranks
    for what, text in zip(("save", "load"), ranks[1 - full], strict=True):
        if full == 1:
            assert text.startswith("worker-1-") and "could not write its part" in text, ranks
        else:
            assert text.startswith(f"{what}() failed on rank 0: ") and "worker-0-" in text, ranks
    assert len(reading.folders_in(tmp_path)) == 2 and not [*tmp_path.glob(".partial-*")]


def killed_while_it_writes(folder: Path) -> str:
    with worker() as strategy:
        job = Wide(strategy).train(1)
        strategy.save(folder)
        assert strategy.load(folder) == {}
        job.train(1)
        if strategy.rank == 1:

            def killed(*_: object) -> None:
                (draft,) = folder.glob(".partial-*")
                (draft / "worker-1-half.safetensors").write_bytes(bytes(100))
                os.kill(os.getpid(), signal.SIGKILL)

            Writing.start = killed  # type: ignore[method-assign]
        strategy.save(folder)
        return said(strategy._saving.writing.finish)


def test_a_rank_that_is_killed_while_it_writes_is_named_at_once_and_the_checkpoint_before_stays(tmp_path: Path) -> None:
    text, nothing = run_ranks(2, killed_while_it_writes, tmp_path, timeout=50)
    assert nothing is None and text.startswith("worker-1-") and "died before it had written its part" in text
    assert [folder.name for folder in reading.folders_in(tmp_path)] == ["snapshot-0000000001"]
    assert not [*tmp_path.glob(".partial-*")]
    assert run_ranks(1, steps_of, tmp_path) == [1]


def steps_of(folder: Path) -> int:
    with muster.MirroredStrategy(["cpu"], threads_per_replica=1) as strategy:
        Wide(strategy)
        strategy.load(folder)
        return strategy.steps


def saved_and_explained(folder: Path) -> list[str]:
    with worker() as strategy:
        Job(strategy).train(1)
        strategy.save(folder)
        strategy._saving.writing.finish()
        texts = [line for line in strategy.explain().splitlines() if line.startswith("checkpoints: ")]
        differs = strategy.rank == 1
        strategy.save(folder, keep=1, value=[torch.zeros(2)] if differs else {"a": 1})
        return [*texts, str(strategy.load(folder))]


def saved_with_a_weight_of_its_own(folder: Path) -> None:
    with worker() as strategy:
        job = Wide(strategy).train(1)
        if strategy.is_chief:
            with torch.no_grad():
                job.model.module.middle.weight.fill_(2)
        strategy.save(folder)


def test_what_the_chief_alone_wrote_into_a_weight_is_saved(tmp_path: Path) -> None:
    run_ranks(2, saved_with_a_weight_of_its_own, tmp_path)
    weight = muster.checkpoint.model_state(tmp_path)["middle.weight"]
    assert torch.equal(weight, torch.full((500, WIDTH), 2.0))


def test_the_chief_alone_says_what_was_written_and_its_values_are_kept(tmp_path: Path) -> None:
    chief, other = run_ranks(2, saved_and_explained, tmp_path)
    assert f"the last one, '{tmp_path / 'snapshot-0000000001'}' (" in chief[0]
    assert chief[1:] == other == [str({"value": {"a": 1}})]
    assert [folder.name for folder in reading.folders_in(tmp_path)] == ["snapshot-0000000002"]
