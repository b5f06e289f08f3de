"""What may happen in a training, one function each."""

from __future__ import annotations

import contextlib
import copy
import io
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev
from torch.optim import swa_utils

from differential.training import Planned, Training
from support.failures import FailsInBackward


def step(t: Training, rows: int, fail: str = "", only: int | None = None) -> None:
    """A micro-batch. The replica that has its first row may fail: in forward, in backward, or with NaN."""

    def forward(x: Tensor, ids: Tensor, fails: bool) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16) if t.autocast else contextlib.nullcontext():
            out: Tensor = t.model(x, ids)
        out = out.to(x.dtype)
        if fails and fail == "forward":
            raise Planned("in forward")
        if fails and fail == "backward":
            out = FailsInBackward.apply(out, Planned("in backward"))  # type: ignore[no-untyped-call]
        return out * float("nan") if fails and fail == "nan" else out

    def fn(x: Tensor, ids: Tensor, y: Tensor, row: Tensor) -> Any:
        fails = bool(fail) and int(row[0]) == 0
        return t.loss(lambda a, b: forward(a, b, fails), x, ids, y)

    try:
        result = t.job.step(fn, *t.batch(rows), optimizers=None if only is None else [t.optimizers[only]])
    except Exception as error:
        t.note_error(error)
        return
    t.note("stepped", result.stepped)
    if not result.stepped:
        return
    t.note("skipped", result.skipped)
    t.note("loss", float(result.loss))
    t.note("norm", float(result.norm))
    for name, value in sorted(result.metrics.items()):
        t.note(f"metric {name}", float(value))
    for schedule in t.schedules:
        if isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau):
            schedule.step(float(result.loss))
        else:
            schedule.step()


def evaluate(t: Training, rows: int) -> None:
    """Outputs in evaluation mode."""
    t.model.eval()
    x, ids, _, _ = t.batch(rows)
    t.note("outputs", t.job.run(lambda x, ids: t.model(x, ids), x, ids).detach().clone())
    t.model.train()


def look(t: Training) -> None:
    """Parameters and buffers in the middle."""
    t.look("middle")


def freeze(t: Training, parameter: int) -> None:
    """A parameter is no longer trained."""
    if sum(p.requires_grad for p in t.parameters()) > 1:
        t.parameter(parameter).requires_grad_(False)


def unfreeze(t: Training, parameter: int) -> None:
    """A parameter is trained again."""
    chosen = t.parameter(parameter)
    if chosen.is_floating_point() or chosen.is_complex():
        chosen.requires_grad_(True)


def add_group(t: Training, lr: float) -> None:
    """What the first optimizer left out becomes a group of it."""
    known = {id(p) for optimizer in t.optimizers for group in optimizer.param_groups for p in group["params"]}
    rest = [p for p in t.parameters() if id(p) not in known]
    if rest:
        t.optimizers[0].add_param_group({"params": rest, "lr": lr})


def set_rate(t: Training, group: int, factor: float) -> None:
    """Another learning rate, by hand."""
    groups = t.optimizers[0].param_groups
    groups[group % len(groups)]["lr"] *= factor


def set_decay(t: Training, group: int, value: float) -> None:
    """Another weight decay, by hand."""
    groups = t.optimizers[0].param_groups
    groups[group % len(groups)]["weight_decay"] = value


def scale_parameter(t: Training, parameter: int, way: str) -> None:
    """A parameter is written between steps: in place, through data, or by copy_."""
    chosen = t.parameter(parameter)
    with torch.no_grad():
        if way == "in place":
            chosen.mul_(0.9)
        elif way == "data":
            chosen.data.mul_(0.9)
        elif way == "replaced data":
            chosen.data = chosen.data * 0.9
        else:
            chosen.copy_(chosen * 0.9)


def write_buffer(t: Training, buffer: int) -> None:
    """A floating buffer is written between steps."""
    floating = [b for b in t.net.buffers() if b.is_floating_point() or b.is_complex()]
    if floating:
        with torch.no_grad():
            floating[buffer % len(floating)].mul_(0.5).add_(0.125)


def save(t: Training) -> None:
    """Model and optimizers, as bytes."""
    file = io.BytesIO()
    torch.save([t.model.state_dict(), [optimizer.state_dict() for optimizer in t.optimizers]], file)
    file.seek(0)
    t.saved = torch.load(file, weights_only=True)


def load_model(t: Training) -> None:
    """What was saved last."""
    if t.saved is not None:
        t.model.load_state_dict(t.saved[0])


def load_optimizers(t: Training) -> None:
    """What was saved last, as often as nothing of the groups has changed."""
    if t.saved is not None:
        for optimizer, state in zip(t.optimizers, t.saved[1], strict=True):
            shape = [len(group["params"]) for group in optimizer.param_groups]
            if shape == [len(group["params"]) for group in state["param_groups"]]:
                optimizer.load_state_dict(copy.deepcopy(state))


def reset_state(t: Training, way: str) -> None:
    """The optimizer begins anew: everywhere, of one parameter, or with its moments zero."""
    optimizer = t.optimizers[0]
    if way == "clear":
        optimizer.state.clear()
    elif way == "pop":
        for parameter in list(optimizer.state)[:1]:
            optimizer.state.pop(parameter)
    else:
        for values in optimizer.state.values():
            for name, value in values.items():
                if isinstance(value, Tensor) and name not in ("step", "mu_product", "eta", "mu"):
                    if way == "zero":
                        value.zero_()
                    else:
                        values[name] = torch.zeros_like(value)


def average(t: Training) -> None:
    """An exponential moving average of the parameters takes a step."""
    for name, parameter in t.net.named_parameters():
        value = parameter.detach().clone()
        t.averages[name] = t.averages[name].lerp(value, 0.5) if name in t.averages else value


def look_at_averages(t: Training) -> None:
    """The outputs of the average."""
    if t.averages:
        x, ids, _, _ = t.batch(5)
        t.model.eval()
        with torch.no_grad():
            t.note("of averages", functional_call(t.net, t.averages, (x, ids)))
        t.model.train()


def use_averages(t: Training) -> None:
    """The average becomes the parameters."""
    with torch.no_grad():
        for name, parameter in t.net.named_parameters():
            if name in t.averages:
                parameter.copy_(t.averages[name])


def hook_forward(t: Training, block: int) -> None:
    """A forward hook on a block, which changes its output."""
    t.handles.append(t.block(block).register_forward_hook(lambda module, args, out: out * 0.9))


def hook_forward_before(t: Training, block: int) -> None:
    """A forward pre-hook on a block, which changes its input."""
    t.handles.append(t.block(block).register_forward_pre_hook(lambda module, args: (args[0] * 0.9, *args[1:])))


def hook_backward(t: Training, block: int) -> None:
    """A full backward hook on a block, which changes the gradient of its input."""

    def halve(module: nn.Module, of_input: Any, of_output: Any) -> Any:
        return (of_input[0] * 0.5, *of_input[1:])

    t.handles.append(t.block(block).register_full_backward_hook(halve))


def hook_parameter(t: Training, parameter: int, linear: bool = True) -> None:
    """A hook on a parameter's gradient."""
    chosen = t.parameter(parameter)
    if chosen.requires_grad:
        hook = (lambda g: g * 0.5) if linear else (lambda g: g.clamp(-0.01, 0.01))
        t.handles.append(chosen.register_hook(hook))  # type: ignore[no-untyped-call]


def hook_accumulated(t: Training, parameter: int) -> None:
    """A hook on a parameter that sees its gradient accumulated."""
    chosen = t.parameter(parameter)

    def halve(accumulated: Tensor) -> None:
        assert accumulated.grad is not None
        accumulated.grad.mul_(0.5)

    if chosen.requires_grad:
        t.handles.append(chosen.register_post_accumulate_grad_hook(halve))  # type: ignore[no-untyped-call]


def hook_step_before(t: Training, does: str = "nothing") -> None:
    """A step pre-hook, which may decay the parameters, change the gradients, or raise the first time."""
    calls = 0

    def hook(optimizer: Any, args: Any, options: Any) -> None:
        nonlocal calls
        calls += 1
        if does == "raise" and calls == 1:
            raise Planned("in a step hook")
        with torch.no_grad():
            for parameter in t.parameters():
                if does == "decay":
                    parameter.mul_(0.99)
                if does == "gradient" and parameter.grad is not None and not parameter.grad.is_sparse:
                    parameter.grad.add_(parameter.to(parameter.grad.dtype), alpha=0.1)

    t.handles.append(t.optimizers[0].register_step_pre_hook(hook))


def hook_step_after(t: Training) -> None:
    """A step post-hook, which keeps the parameters within bounds."""

    def hook(optimizer: Any, args: Any, options: Any) -> None:
        with torch.no_grad():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.is_floating_point():
                        parameter.clamp_(-0.5, 0.5)

    t.handles.append(t.optimizers[0].register_step_post_hook(hook))


def unhook(t: Training) -> None:
    """All hooks go."""
    for handle in t.handles:
        handle.remove()
    t.handles.clear()


def set_attribute(t: Training, block: int) -> None:
    """A plain attribute of a block's modules changes."""
    for module in t.block(block).modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            module.p = 0.6
        if isinstance(module, (nn.LayerNorm, nn.GroupNorm, nn.BatchNorm1d)):
            module.eps = 0.1


def evaluate_block(t: Training, block: int) -> None:
    """One block stays in evaluation mode while the others train."""
    t.block(block).eval()


def train_all(t: Training) -> None:
    """All blocks are in training mode."""
    t.model.train()


def differentiate(t: Training) -> None:
    """A Jacobian with respect to the parameters, between steps."""
    x, ids, _, _ = t.batch(2)
    if any(hasattr(m, "reentrant") or isinstance(m, (nn.RNNBase, nn.RNNCellBase)) for m in t.net.modules()):
        return  # torch.func does not know them
    t.model.eval()
    values = {name: p.detach() for name, p in t.net.named_parameters()}
    of_bias = jacrev(lambda bias: functional_call(t.net, {**values, "first.bias": bias}, (x, ids)))
    t.note("jacobian", of_bias(values["first.bias"]))
    t.model.train()


def differentiate_model(t: Training) -> None:
    """Gradients by torch.autograd.grad of the raw network in evaluation mode, between steps."""
    x, ids, y, _ = t.batch(3)
    if any(getattr(m, "reentrant", False) for m in t.net.modules()):
        return  # torch refuses it
    t.model.eval()
    trained = [p for p in t.parameters() if p.requires_grad]
    gradients = torch.autograd.grad((t.net(x, ids) * y).sum(), trained, allow_unused=True)
    for gradient in gradients:
        if gradient is not None:
            t.note("gradient", gradient.to_dense() if gradient.is_sparse else gradient)
    t.model.train()


def clear_gradients(t: Training) -> None:
    """zero_grad by hand."""
    t.model.zero_grad()
    for optimizer in t.optimizers:
        optimizer.zero_grad()


def restart(t: Training) -> None:
    """The strategy is closed, and training goes on under another one of its kind."""
    t.restart()


def average_model(t: Training) -> None:
    """torch's own average of the model takes a step, and is looked at."""
    if not t.can_be_copied():
        return
    if t.averaged is None:
        t.averaged = swa_utils.AveragedModel(t.net, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.5))  # type: ignore[no-untyped-call]
    t.averaged.update_parameters(t.net)
    for name, value in t.averaged.module.named_parameters():
        t.note(f"averaged {name}", value)


def look_at_copy(t: Training) -> None:
    """A deep copy of the model is the user's own."""
    if not t.can_be_copied():
        return
    clone = copy.deepcopy(t.model)
    x, ids, _, _ = t.batch(3)
    clone.eval()
    with torch.no_grad():
        t.note("of copy", clone(x, ids))
        for parameter in clone.parameters():
            parameter.zero_()


def draw(t: Training) -> None:
    """Random numbers between steps change nothing."""
    torch.rand(3)


EVENTS = {
    name: value
    for name, value in globals().items()
    if callable(value) and getattr(value, "__module__", "") == __name__ and not isinstance(value, type)
}
