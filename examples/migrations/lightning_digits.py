"""A classifier of handwritten digits as Lightning's users write it. What is another: one import, and strategy=.

    python examples/migrations/lightning_digits.py
    python examples/migrations/lightning_digits.py --strategy muster_mirrored --devices 2
    python examples/migrations/lightning_digits.py --strategy muster_ddp --devices 2 --batch-size 32
    muster run --workers 2 --servers 1 examples/migrations/lightning_digits.py --strategy muster_ps --batch-size 32

Replicas of one process print the loss and accuracy of one device, within rounding. Processes print those of
--strategy ddp: Lightning shuffles what it divides between processes, and the batch size is that of each.
"""

import argparse

import lightning as L
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import muster.lightning  # noqa: F401, it registers the strategies


class Digits(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 8, 3),
            nn.MaxPool2d(2),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(72, 32),
            nn.ReLU(),
            nn.Linear(32, 10),
        )

    def training_step(self, batch, batch_idx):
        images, labels = batch
        loss = F.cross_entropy(self.net(images), labels)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        images, labels = batch
        logits = self.net(images)
        self.log("loss", F.cross_entropy(logits, labels), sync_dist=True)
        self.log("accuracy", (logits.argmax(1) == labels).float().mean(), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", default="auto", help="of the Trainer")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=64, help="of each process")
    parser.add_argument("--epochs", type=int, default=5)
    args = parser.parse_args()

    L.seed_everything(42)
    torch.set_num_threads(1)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    trainer = L.Trainer(
        accelerator="cpu", strategy=args.strategy, devices=args.devices, max_epochs=args.epochs, logger=False,
        enable_checkpointing=False, enable_progress_bar=False,
    )  # fmt: skip
    trainer.fit(
        Digits(),
        DataLoader(TensorDataset(images[:1536], labels[:1536]), batch_size=args.batch_size),
        DataLoader(TensorDataset(images[1536:1796], labels[1536:1796]), batch_size=130),
    )
    if trainer.is_global_zero:
        measured = trainer.callback_metrics
        print(f"loss {measured['loss']:.6f}, accuracy {measured['accuracy']:.4f}", flush=True)


if __name__ == "__main__":
    main()
