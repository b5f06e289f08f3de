"""A program: what a grammar derives, as data, and the Python text that it stands for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Term:
    """A name and its arguments: a block, an optimizer or an event."""

    name: str
    options: tuple[tuple[str, Any], ...] = ()

    def get(self, option: str, default: Any = None) -> Any:
        """An argument."""
        return dict(self.options).get(option, default)

    def arguments(self) -> str:
        """As in a call."""
        return ", ".join(f"{name}={value!r}" for name, value in self.options)


def term(name: str, **options: Any) -> Term:
    """A Term."""
    return Term(name, tuple(options.items()))


@dataclass(frozen=True)
class Block:
    """A block of the network; `again`: "" or how it is computed again in backward."""

    module: Term
    again: str = ""


@dataclass(frozen=True)
class Program:
    """A training. `early` events come before the strategy prepares the network, `events` after."""

    seed: int
    dtype: str
    blocks: tuple[Block, ...]
    loss: str
    optimizers: tuple[Term, ...]
    schedules: tuple[tuple[int, str], ...]
    options: tuple[tuple[str, Any], ...]
    early: tuple[Term, ...]
    events: tuple[Term, ...]
    compiled: bool = False
    autocast: bool = False

    @property
    def accumulate(self) -> int:
        """Calls of a window."""
        return int(dict(self.options).get("accumulate", 1))

    def option(self, name: str, default: Any = None) -> Any:
        """An option of the strategy."""
        return dict(self.options).get(name, default)

    def events_of(self, name: str, **options: Any) -> list[Term]:
        """The events of a name that have these arguments."""
        return [
            event
            for event in (*self.early, *self.events)
            if event.name == name and all(event.get(key) == value for key, value in options.items())
        ]

    def has_block(self, name: str, **options: Any) -> bool:
        """Whether the network has such a block."""
        return any(
            block.module.name == name and all(block.module.get(key) == value for key, value in options.items())
            for block in self.blocks
        )

    def smaller(self) -> Iterator[Program]:
        """Programs with one thing less, larger cuts first."""
        events = self.events
        size = len(events)
        while size >= 1:
            for start in range(0, len(events), size):
                yield replace(self, events=events[:start] + events[start + size :])
            size //= 2
        for number in range(len(self.early)):
            yield replace(self, early=self.early[:number] + self.early[number + 1 :])
        for number in range(len(self.blocks)):
            yield replace(self, blocks=self.blocks[:number] + self.blocks[number + 1 :])
        if self.schedules:
            yield replace(self, schedules=())
        if len(self.optimizers) > 1:
            only = Term(
                self.optimizers[0].name, tuple(pair for pair in self.optimizers[0].options if pair[0] != "share")
            )
            rest = tuple(Term(e.name, tuple(p for p in e.options if p[0] != "only")) for e in events)
            yield replace(
                self, optimizers=(only,), events=rest, schedules=tuple(s for s in self.schedules if s[0] == 0)
            )
        for name, _ in self.options:
            yield replace(self, options=tuple(pair for pair in self.options if pair[0] != name))
        for number, block in enumerate(self.blocks):
            for simpler in ([replace(block, again="")] if block.again else []) + [
                replace(block, module=cut) for cut in _without_an_option(block.module)
            ]:
                yield replace(self, blocks=(*self.blocks[:number], simpler, *self.blocks[number + 1 :]))
        for number, optimizer in enumerate(self.optimizers):
            for cut in _without_an_option(optimizer, keep=("lr", "share")):
                yield replace(self, optimizers=(*self.optimizers[:number], cut, *self.optimizers[number + 1 :]))
        if self.loss != "mse":
            yield replace(self, loss="mse")
        if self.compiled:
            yield replace(self, compiled=False)
        if self.autocast:
            yield replace(self, autocast=False)
        if any(event.name == "step" and event.get("rows") != 6 for event in events):
            yield replace(
                self,
                events=tuple(
                    Term(e.name, tuple((k, 6 if k == "rows" else v) for k, v in e.options)) if e.name == "step" else e
                    for e in events
                ),
            )

    def text(self) -> str:
        """A function of a job that makes the training; its names are those of modules, training and events."""
        lines = [f"# Program {self.seed}.", "def program(make_job: Callable[[], Job], noise: float = 0.0) -> Training:"]
        lines += [f"    torch.set_default_dtype(torch.{self.dtype})", f"    torch.manual_seed({self.seed})"]
        lines.append("    blocks = OrderedDict()")
        for number, block in enumerate(self.blocks):
            made = f"{block.module.name}({block.module.arguments()})"
            if block.again:
                made = f"Checkpointed({made}, reentrant={block.again == 'reentrant'})"
            lines.append(f'    blocks["b{number}"] = {made}')
        lines.append("    net = Net(blocks)")
        if self.compiled:
            # Parts have other sizes than batches, and replicas of one process share the limit.
            lines += ["    torch._dynamo.reset()", "    torch._dynamo.config.recompile_limit = 256"]
            lines.append("    torch._dynamo.config.skip_nnmodule_hook_guards = False")
            lines.append('    net.compile(backend="eager")')
        lines.append("    optimizers = [")
        lines += [f'        make_optimizer(net, "{o.name}", {o.arguments()}),' for o in self.optimizers]
        lines.append("    ]")
        early = ", ".join(f"lambda t: {event.name}(t, {event.arguments()})" for event in self.early)
        lines.append(
            f"    t = Training(make_job, net, optimizers, {list(self.schedules)!r}, loss={self.loss!r}, "
            f"seed={self.seed}, noise=noise, autocast={self.autocast}, early=[{early}])"
        )
        for event in self.events:
            lines.append(f"    {event.name}(t{', ' if event.options else ''}{event.arguments()})")
        return "\n".join([*lines, "    t.finish()", "    return t", ""])


def _without_an_option(given: Term, keep: tuple[str, ...] = ()) -> list[Term]:
    return [
        Term(given.name, tuple(pair for pair in given.options if pair[0] != name))
        for name, _ in given.options
        if name not in keep
    ]
