"""The pool of blocks that programs are built from, and the network of a program.

Every block maps features (rows, 8) and ids (rows, 4) of 0 to 5 to features (rows, 8), row by row unless it says
otherwise. A script shows a block by its source, so that a class here uses nothing of this file but its bases.
"""

# mypy: disable-error-code="no-any-return,no-untyped-call"

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint


class Dense(nn.Module):
    """Linear, with or without bias."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, bias)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return F.gelu(self.linear(x))


class Conv1d(nn.Module):
    def __init__(self, groups: int = 1, padding_mode: Any = "circular") -> None:
        super().__init__()
        self.conv = nn.Conv1d(2, 2, 3, padding=1, groups=groups, padding_mode=padding_mode)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return torch.tanh(self.conv(x.view(-1, 2, 4))).flatten(1)


class Conv2d(nn.Module):
    """A convolution whose weight may be channels-last."""

    def __init__(self, channels_last: bool = False) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 3, padding=1)
        if channels_last:
            self.conv.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.conv(x.view(-1, 2, 2, 2)).flatten(1)


class Conv3d(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv3d(1, 1, 3, padding=1)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.conv(x.view(-1, 1, 2, 2, 2)).flatten(1)


class TransposedConv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.ConvTranspose1d(4, 2, 2, stride=2)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.conv(x.view(-1, 4, 2)).flatten(1)


class BatchNorm(nn.Module):
    """Statistics over the rows of a call."""

    def __init__(self, momentum: float | None = 0.1, affine: bool = True) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8, momentum=momentum, affine=affine)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        # One row has no variance, and torch refuses it: a part may be that small.
        return self.norm(x) if len(x) > 1 or not self.norm.training else x


class SyncBatchNorm(nn.Module):
    """Statistics over the rows of all replicas; without a strategy, BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.SyncBatchNorm(8)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        if type(self.norm) is nn.SyncBatchNorm:
            # torch's needs a process group, or a GPU.
            norm = self.norm
            if norm.training and norm.num_batches_tracked is not None:
                norm.num_batches_tracked.add_(1)
            return F.batch_norm(
                x, norm.running_mean, norm.running_var, norm.weight, norm.bias, norm.training, 0.1, norm.eps
            )
        return self.norm(x)


class Norm(nn.Module):
    """The norms of single samples."""

    def __init__(self, kind: str = "layer") -> None:
        super().__init__()
        self.norm: nn.Module = {
            "layer": lambda: nn.LayerNorm(8),
            "group": lambda: nn.GroupNorm(2, 4),
            "instance": lambda: nn.InstanceNorm1d(2, affine=True),
            "tracked": lambda: nn.InstanceNorm1d(2, affine=True, track_running_stats=True),
            "rms": lambda: nn.RMSNorm(8),
            "response": lambda: nn.LocalResponseNorm(2),
        }[kind]()
        self.shape = {"layer": (8,), "group": (4, 2), "rms": (8,)}.get(kind, (2, 4))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.norm(x.view(-1, *self.shape)).flatten(1)


class Attention(nn.Module):
    def __init__(self, causal: bool = False) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.causal = causal

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        x = x.view(-1, 2, 4)
        mask = torch.ones(2, 2, dtype=torch.bool).triu(1) if self.causal else None
        return self.attention(x, x, x, attn_mask=mask, need_weights=False)[0].flatten(1)


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.layer(x.view(-1, 2, 4)).flatten(1)


class Recurrent(nn.Module):
    def __init__(self, kind: str = "LSTM", layers: int = 1, bidirectional: bool = False) -> None:
        super().__init__()
        width = 1 if bidirectional else 2
        self.net = getattr(nn, kind)(2, width, layers, batch_first=True, bidirectional=bidirectional)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.net(x.view(-1, 4, 2))[0].flatten(1)


class Cell(nn.Module):
    """A recurrent cell that is called several times in a forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(2, 8)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        state = torch.zeros_like(x)
        for part in x.view(-1, 4, 2).unbind(1):
            state = self.cell(part, state)
        return state


class Embedding(nn.Module):
    def __init__(self, sparse: bool = False, padding: bool = False, tables: int = 6) -> None:
        super().__init__()
        self.table = nn.Embedding(tables, 8, padding_idx=0 if padding else None, sparse=sparse)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.table(ids).mean(1)


class FrequencyScaled(nn.Module):
    """An embedding whose gradients are divided by how often an id occurs in the call."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 8, scale_grad_by_freq=True)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.table(ids).mean(1)


class Bag(nn.Module):
    def __init__(self, mode: str = "mean", sparse: bool = False) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(6, 8, mode=mode, sparse=sparse)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.bag(ids)


class Slope(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.slope = nn.PReLU(8)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.slope(x)


class BilinearForm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.form = nn.Bilinear(4, 4, 8)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return torch.tanh(self.form(*x.chunk(2, 1)))


class Tied(nn.Module):
    """One parameter in two modules."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(8, 8, bias=False)
        self.decoder = nn.Linear(8, 8)
        self.decoder.weight = self.encoder.weight

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.decoder(torch.tanh(self.encoder(x)))


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.linear.weight.requires_grad_(False)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.linear(x)


class Unused(nn.Module):
    """Parameters that no call uses."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(8, 8)
        self.spare = nn.Linear(8, 3)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.used(x)


class Experts(nn.Module):
    """Each row goes to the expert that its first id names; one that no row names is not called."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        for number, expert in enumerate(self.experts):
            mine = ids[:, :1] % 3 == number
            if mine.any():
                x = torch.where(mine, expert(x), x)
        return x


class ComplexPhase(nn.Module):
    """Real parameters behind a complex product; `conjugate` gives gradients with the negative bit."""

    def __init__(self, conjugate: bool = False) -> None:
        super().__init__()
        self.re = nn.Parameter(torch.tensor(0.7))
        self.im = nn.Parameter(torch.tensor(0.2))
        self.conjugate = conjugate

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        phase = torch.complex(self.re, self.im)
        return (x * (phase.conj() if self.conjugate else phase)).real


class ComplexLinear(nn.Module):
    """A complex parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4, dtype=torch.complex128) / 4)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        z = torch.complex(*x.to(torch.float64).chunk(2, 1)) @ self.weight
        return torch.cat([z.real, z.imag], 1).to(x.dtype)


class Fourier(nn.Module):
    """A real filter in the frequency domain."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(5))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return torch.fft.irfft(torch.fft.rfft(x) * self.filter, n=8)


class Parametrized(nn.Module):
    """weight_norm, spectral_norm (whose power iteration writes buffers) or orthogonal."""

    def __init__(self, kind: str = "weight_norm") -> None:
        super().__init__()
        self.linear = getattr(parametrizations, kind)(nn.Linear(8, 8))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.linear(x)


class Pruned(nn.Module):
    """A mask as a buffer, and a weight that is computed in a forward pre-hook."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        prune.l1_unstructured(self.linear, "weight", amount=0.3)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.linear(x)


class Buffers(nn.Module):
    """Buffers of many types, some of them written in every training pass."""

    count: Tensor
    mean: Tensor
    single: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        for dtype in (torch.bool, torch.uint8, torch.int8, torch.int32, torch.float16, torch.bfloat16):
            self.register_buffer("of_" + str(dtype).removeprefix("torch."), torch.ones(3, dtype=dtype))
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("single", torch.zeros(8, dtype=torch.float32))
        self.register_buffer("hidden", torch.zeros(2), persistent=False)
        self.register_buffer("nothing", None)
        self.register_buffer("empty", torch.zeros(0))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.count += 1
                self.mean.lerp_(x.mean(0).to(self.mean.dtype), 0.2)
                self.single = self.single * 0.75 + x.mean(0).float() * 0.25
        return x * self.scale


class ComplexBuffer(nn.Module):
    """A complex buffer that every training pass writes."""

    phase: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.register_buffer("phase", torch.polar(torch.ones(8), torch.arange(8.0)).to(torch.complex128))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        if self.training:
            self.phase.mul_(1j)
        return x * self.scale * self.phase.real.to(x.dtype)


class Shapes(nn.Module):
    """Parameters of no dimension, of no elements, of one element, and one that is not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.one = nn.Parameter(torch.ones(1, 1))
        self.transposed = nn.Parameter(torch.randn(4, 2).t())
        self.table = nn.ParameterDict({"a": torch.ones(8), "b": torch.zeros(8)})
        self.rows = nn.ParameterList([torch.ones(8)])

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        y = (x.view(-1, 2, 4) * self.transposed).flatten(1) * self.scalar * self.one + self.empty.sum()
        return y * self.table["a"] + self.table["b"] * self.rows[0]


class MixedTypes(nn.Module):
    """Parameters of another type than the rest of the network."""

    def __init__(self, dtype: str = "float32") -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, dtype=getattr(torch, dtype))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.linear(x.to(self.linear.weight.dtype)).to(x.dtype)


class Dropped(nn.Module):
    """Dropout, of one kind or another."""

    def __init__(self, kind: str = "Dropout", p: float = 0.3) -> None:
        super().__init__()
        self.dropout = getattr(nn, kind)(p)
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.linear(self.dropout(x.view(-1, 2, 4)).flatten(1))


class Functional(nn.Module):
    """A forward pass through functional_call and vmap, over a stack of what the module holds."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.scales = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        def scaled(scale: Tensor) -> Tensor:
            parameters = {"weight": self.inner.weight * scale, "bias": self.inner.bias}
            return functional_call(self.inner, parameters, (x,))

        result: Tensor = vmap(scaled)(self.scales).mean(0)
        return result


class Force(nn.Module):
    """Minus the gradient of an energy with respect to the input: training it is a double backward."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        with torch.enable_grad():
            inputs = x if x.requires_grad else x.detach().requires_grad_(True)
            (gradient,) = torch.autograd.grad(self.energy(inputs).sum(), inputs, create_graph=True)
        return -gradient


class TensorHook(nn.Module):
    """A hook on an activation's gradient; `linear` in the gradient or not."""

    def __init__(self, linear: bool = True) -> None:
        super().__init__()
        self.linear_layer = nn.Linear(8, 8)
        self.linear = linear

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        y = self.linear_layer(x)
        if y.requires_grad:
            y.register_hook((lambda g: g * 0.5) if self.linear else (lambda g: g.clamp(-0.01, 0.01)))
        return torch.tanh(y)


class Checkpointed(nn.Module):
    """A block that is computed again in backward."""

    def __init__(self, block: nn.Module, reentrant: bool = False) -> None:
        super().__init__()
        self.block = block
        self.reentrant = reentrant

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return checkpoint(self.block, x, ids, use_reentrant=self.reentrant)


class Net(nn.Module):
    """Blocks one after another, each beside a way around it."""

    def __init__(self, blocks: OrderedDict[str, nn.Module]) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.Sequential(blocks)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = (x + block(x, ids)) * 0.7
        return x


def pool() -> dict[str, Any]:
    """The blocks by name."""
    found = {
        name: value
        for name, value in globals().items()
        if isinstance(value, type) and issubclass(value, nn.Module) and value.__module__ == __name__
    }
    return {name: block for name, block in found.items() if name not in ("Net", "Checkpointed")}
