"""Lightning's Trainer and Fabric with Muster's strategies do what they do with Lightning's own."""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning
import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import muster.lightning
from support.jobs import WorkerPool, plain

# --- modules ----------------------------------------------------------------------------------------------------------


class Points(pl.LightningDataModule):
    """Points, and on which side of a plane they lie; 21 of them, so that ranks' batches are uneven."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(21, 6, generator=generator)
        self.data = TensorDataset(x, (x.sum(1) > 0).long())

    def train_dataloader(self) -> Any:
        return DataLoader(self.data, batch_size=4, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(self.data, batch_size=4)

    def predict_dataloader(self) -> Any:
        return DataLoader(self.data, batch_size=4)


class Classifier(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.net(x), y)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("train", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


class Alternating(Classifier):
    """Two optimizers by hand, each over a half of the net; the other half may be frozen meanwhile."""

    def __init__(self, toggles: bool) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.toggles = toggles

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer in self.optimizers():
            if self.toggles:
                self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            self.clip_gradients(optimizer, 0.1)
            optimizer.step()
            if self.toggles:
                self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net[0].parameters(), lr=0.1), torch.optim.Adam(self.net[2].parameters())


class Accumulating(Classifier):
    """Two micro-batches an update, by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer, ends = self.optimizers(), batch_idx % 2 == 1
        with optimizer.toggle_model(sync_grad=ends):
            self.manual_backward(self.loss(batch) / 2)
            if ends:
                optimizer.step()
                optimizer.zero_grad()


class Hooks(Callback):
    """What callbacks see, in their order."""

    def __init__(self) -> None:
        self.seen: dict[str, list[Any]] = {"loss": [], "norm": [], "step": []}

    def on_before_backward(self, trainer: Any, module: Any, loss: Tensor) -> None:
        self.seen["loss"].append(float(loss))

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self.seen["norm"].append(float(nn.utils.get_total_norm(p.grad for p in module.parameters())))

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen["step"].append((trainer.global_step, len(batch[0]), trainer.optimizers[0].param_groups[0]["lr"]))


# --- fitting ----------------------------------------------------------------------------------------------------------


def trainer(strategy: Any, **arguments: Any) -> pl.Trainer:
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return pl.Trainer(accelerator="cpu", strategy=strategy, **{"max_epochs": 2, **quiet, **arguments})


def fitted(
    module: pl.LightningModule, strategy: Any, fit: dict[str, Any] | None = None, sees: bool = True, **arguments: Any
) -> Any:
    """Parameters, what was logged, and what callbacks saw (where one `sees`), after training with a strategy."""
    torch.manual_seed(1)
    hooks = Hooks()
    if module.automatic_optimization and sees:
        arguments["callbacks"] = [*arguments.get("callbacks", []), hooks]
    run = trainer(strategy, **arguments)
    run.fit(module, datamodule=Points(), **(fit or {}))
    logged = {name: value.item() for name, value in run.callback_metrics.items()}
    return plain({"parameters": module.state_dict(), "logged": logged, "seen": hooks.seen, "steps": run.global_step})


def assert_same(ours: Any, theirs: Any, tolerance: float = 0.0) -> None:
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


VARIANTS: dict[str, Any] = {
    "plain": {},
    "bf16": {"precision": "bf16-mixed", "max_epochs": 1},
    "fp64": {"precision": "64-true", "max_epochs": 1},
    "clipped by norm": {"gradient_clip_val": 0.1, "max_epochs": 1},
    "clipped by value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value", "max_epochs": 1},
    "accumulated": {"accumulate_grad_batches": 2},
}

# --- a process a rank -------------------------------------------------------------------------------------------------


@contextmanager
def launched() -> Iterator[None]:
    """As by torchrun, with the variables that a job's processes have."""
    os.environ["TORCHELASTIC_RUN_ID"] = "none"
    warnings.simplefilter("ignore")
    try:
        yield
    finally:
        del os.environ["TORCHELASTIC_RUN_ID"]
        if dist.is_initialized():
            dist.destroy_process_group()


def fit_as_ranks() -> None:
    with launched():
        for name, arguments in VARIANTS.items():
            ours, theirs = (fitted(Classifier(), s, devices=2, **arguments) for s in ("muster_ddp", "ddp"))
            assert ours["steps"] > 0, name
            assert_same(ours, theirs)
        # Where halves are frozen in turn, torch's wrapper raises.
        theirs = fitted(Alternating(False), "ddp", devices=2)
        assert_same(fitted(Alternating(False), "muster_ddp", devices=2), theirs)
        assert_same(fitted(Alternating(True), "muster_ddp", devices=2), theirs)
        theirs = fitted(Accumulating(), "ddp", devices=2)
        for strategy in ("muster_ddp", muster.lightning.DDPStrategy(static_graph=True)):
            assert_same(fitted(Accumulating(), strategy, devices=2), theirs)


def test_ranks_train_as_with_lightnings_ddp(two_workers: WorkerPool) -> None:
    two_workers.call(fit_as_ranks)


def stopped_and_resumed(strategy: Any, folder: str, checkpoint: str | None = None, **arguments: Any) -> Any:
    """Early stopping ends the first training; the second one goes on from its checkpoint, or another one."""
    saving = ModelCheckpoint(folder, filename="best", monitor="val", save_last=True)
    early = EarlyStopping("val", patience=0, min_delta=1e9)
    first = fitted(
        Classifier(), strategy, callbacks=[saving, early], enable_checkpointing=True, max_epochs=5, **arguments
    )
    second = fitted(
        Classifier(), strategy, {"ckpt_path": checkpoint or f"{folder}/last.ckpt"}, max_epochs=3, **arguments
    )
    return {"first": first, "second": second, "best": saving.best_model_score.item()}


def resume_as_ranks(folder: str) -> None:
    with launched():
        theirs = stopped_and_resumed("ddp", f"{folder}/theirs", devices=2)
        assert theirs["first"]["steps"] == 6  # of two epochs
        assert theirs["second"]["steps"] == 9
        ours = stopped_and_resumed("muster_ddp", f"{folder}/ours", f"{folder}/theirs/last.ckpt", devices=2)
        assert_same(ours, theirs)


def test_ranks_go_on_from_lightnings_checkpoints(two_workers: WorkerPool, tmp_path: Path) -> None:
    two_workers.call(resume_as_ranks, str(tmp_path))


def looped(strategy: str, **arguments: Any) -> Any:
    """A loop of Fabric's."""
    fabric = lightning.Fabric(accelerator="cpu", strategy=strategy, **arguments)
    fabric.launch()
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
    model, optimizer = fabric.setup(module, torch.optim.Adam(module.parameters()))
    loader = fabric.setup_dataloaders(DataLoader(Points().data, batch_size=2, shuffle=True))
    for number, (x, y) in enumerate(loader):
        with fabric.no_backward_sync(model, enabled=number % 2 == 0):
            fabric.backward(F.cross_entropy(model(x), y))
        if number % 2 == 1:
            fabric.clip_gradients(model, optimizer, max_norm=0.1)
            optimizer.step()
            optimizer.zero_grad()
    assert isinstance(fabric.strategy, muster.lightning.FabricDDPStrategy) == (strategy == "muster_ddp")
    return plain(module.state_dict())


def loop_as_ranks() -> None:
    with launched():
        for arguments in ({}, {"precision": "bf16-mixed"}):
            assert_same(*(looped(strategy, devices=2, **arguments) for strategy in ("muster_ddp", "ddp")))


def test_ranks_of_fabric_do_as_with_lightnings_ddp(two_workers: WorkerPool) -> None:
    two_workers.call(loop_as_ranks)


# --- servers ----------------------------------------------------------------------------------------------------------


def fit_all(strategy: str, **arguments: Any) -> Any:
    with launched():
        return {
            name: fitted(Classifier(), strategy, sees=False, **arguments, **more) for name, more in VARIANTS.items()
        }


def test_workers_of_servers_train_as_with_lightnings_ddp(two_workers: WorkerPool) -> None:
    ours, theirs = two_workers.call(fit_all, "muster_ps"), two_workers.call(fit_all, "ddp", devices=2)
    for name in VARIANTS:
        for rank in (0, 1):
            try:
                assert_same(ours[rank][name], theirs[rank][name])
            except AssertionError as e:
                print(name, e)


def test_it_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "lightning"]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "muster.lightning")
    with pytest.raises(ImportError, match=r"needs Lightning.*pip install"):
        importlib.import_module("muster.lightning")
