"""Hugging Face's Trainer and Accelerate with `muster.DistributedDataParallel` in the place of torch's."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from muster.distributed_data_parallel import DistributedDataParallel
from muster.errors import InvalidArgument

__all__ = ["use"]

T = TypeVar("T")


def use(user: T) -> T:
    """Lets a Trainer, or an Accelerator, wrap its models in `muster.DistributedDataParallel` where it would wrap them
    in torch's, with the same arguments; in a single process nothing changes.

    `user` is a ``transformers.Trainer`` or an object of a subclass, or an ``accelerate.Accelerator``, which has not
    prepared a model yet; it is returned. Raises InvalidArgument for anything else.
    """
    accelerator: Any = getattr(user, "accelerator", user)
    if not callable(getattr(accelerator, "prepare_model", None)):
        raise InvalidArgument(
            f"use() takes a transformers.Trainer or an accelerate.Accelerator; it got a {type(user).__name__}"
        )
    if getattr(accelerator, "_models", None):
        raise InvalidArgument(
            f"this {type(user).__name__} has prepared a model already; call use() before prepare(), train() and "
            "evaluate()"
        )
    accelerator.prepare_model = _with_ours(accelerator.prepare_model)
    if accelerator is not user:
        _follow_new_accelerators(user)
    return user


def _with_ours(prepare_model: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(prepare_model)
    def prepare(model: Any, *args: Any, **kwargs: Any) -> Any:
        # Accelerate looks the class up by this name when it wraps.
        name = "DistributedDataParallel"
        torchs = getattr(torch.nn.parallel, name)
        setattr(torch.nn.parallel, name, DistributedDataParallel)
        try:
            prepared = prepare_model(model, *args, **kwargs)
        finally:
            setattr(torch.nn.parallel, name, torchs)
        wrapped = getattr(prepared, "_orig_mod", prepared)
        if wrapped is not model and isinstance(wrapped, TorchDDP) and not isinstance(wrapped, DistributedDataParallel):
            raise InvalidArgument(
                "this version of accelerate wraps models in torch's DistributedDataParallel in another way than use() "
                "knows; leave use() out, or install accelerate 1.15"
            )
        return prepared

    return prepare


def _follow_new_accelerators(trainer: Any) -> None:
    """A search for hyperparameters gives the Trainer another Accelerator for each trial."""
    create = trainer.create_accelerator_and_postprocess

    @functools.wraps(create)
    def create_with_ours() -> None:
        create()
        trainer.accelerator.prepare_model = _with_ours(trainer.accelerator.prepare_model)

    trainer.create_accelerator_and_postprocess = create_with_ours
