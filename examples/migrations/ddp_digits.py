"""A classifier of handwritten digits as users of DistributedDataParallel write it. One line is another than with
torch's: the import.

    torchrun --standalone --nproc-per-node 2 examples/migrations/ddp_digits.py

Workers on the CPU train over Gloo, those with a GPU each over NCCL. The batch size is that of a worker. Halfway rank 0
saves the model, and all go on from its file. With either class it prints the same losses, within rounding.
"""

import argparse
import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from muster import DistributedDataParallel  # from torch.nn.parallel import DistributedDataParallel


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.hidden = nn.Linear(8 * 3 * 3, 64)
        self.out = nn.Linear(64, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.norm(self.conv(x))), 2)
        return self.out(F.relu(self.hidden(x.flatten(1))))


def datasets():
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    return TensorDataset(images[:1536], labels[:1536]), TensorDataset(images[1536:], labels[1536:])


def mean_over_ranks(value, device):
    total = torch.tensor(value, device=device)
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def train_epoch(model, loader, optimizer, device):
    model.train()
    total = 0.0
    for images, labels in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images.to(device)), labels.to(device))
        loss.backward()
        optimizer.step()
        total += loss.item()
    return mean_over_ranks(total / len(loader), device)


@torch.no_grad()
def evaluate(model, data, device):
    model.eval()
    images, labels = (tensor.to(device) for tensor in data.tensors)
    logits = model(images)
    return F.cross_entropy(logits, labels).item(), (logits.argmax(1) == labels).float().mean().item()


def save_and_load(model, optimizer, path, device):
    if dist.get_rank() == 0:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    dist.barrier()  # the file is whole before anybody reads it
    checkpoint = torch.load(path, map_location=device)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])


def train(args, device):
    train_set, test_set = datasets()
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, batch_size=args.batch_size, sampler=sampler)
    torch.manual_seed(dist.get_rank())  # rank 0's parameters go to all
    model = DistributedDataParallel(Net().to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    for epoch in range(args.epochs):
        if epoch == args.epochs // 2:
            save_and_load(model, optimizer, args.checkpoint, device)
        sampler.set_epoch(epoch)
        train_loss = train_epoch(model, loader, optimizer, device)
        test_loss, accuracy = evaluate(model, test_set, device)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {train_loss:.6f}, test loss {test_loss:.6f}, accuracy {accuracy:.4f}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=32, help="of each worker")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--checkpoint", default=os.path.join(tempfile.gettempdir(), "ddp_digits.pt"))
    args = parser.parse_args()

    torch.set_num_threads(1)
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl")
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    train(args, device)  # the model ends in it: torch's class may wait forever if it ends after its group
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
