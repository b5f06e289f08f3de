"""A program as a script that needs torch and muster alone."""

from __future__ import annotations

import inspect
import re

from differential import events, jobs, modules, training
from differential.program import Program
from support.failures import FailsInBackward

_HEADER = '''"""{title}

Run it under plain torch, `python {file} torch`, under `mirrored-2`, or with torchrun under `workers-2`, and compare
what it prints; `servers-2x1` takes the addresses of parameter servers from MUSTER_SERVERS.
"""

import contextlib
import copy
import io
import os
import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap
from torch.nn.utils import parametrizations, prune
from torch.optim import lr_scheduler, swa_utils
from torch.utils.checkpoint import checkpoint

import muster
from muster.batch import part_sizes, split
'''

_MAIN = """
if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.set_printoptions(precision=17)
    servers = os.environ.get("MUSTER_SERVERS", "").split()
    for label, value in program(lambda: make_job(sys.argv[1], servers, **{options!r})).record:
        print(label, value, sep=": ")
"""


def script(program: Program, title: str = "", file: str = "program.py") -> str:
    """The text of a module whose argument names the job to run under."""
    used = {event.name for event in (*program.early, *program.events)}
    blocks = {block.module.name for block in program.blocks}
    if any(block.again for block in program.blocks):
        blocks.add("Checkpointed")
    parts = [
        _HEADER.format(title=title or f"Program {program.seed} of tests/differential.", file=file),
        *(inspect.getsource(item) for item in (jobs.Stepped, jobs.TorchJob, jobs.StrategyJob)),
        "Job = TorchJob | StrategyJob\n",
        inspect.getsource(jobs.make_job),
        *(inspect.getsource(getattr(modules, name)) for name in sorted(blocks)),
        *(
            inspect.getsource(item)
            for item in (modules.Net, training.Planned, FailsInBackward, training.make_optimizer,
                         training.make_schedule, training.Training)
        ),
        *(inspect.getsource(event) for name, event in events.EVENTS.items() if name in used),
        program.text(),
        _MAIN.format(options=dict(program.options)),
    ]  # fmt: skip
    text = "\n\n".join(part.strip("\n") for part in parts) + "\n"
    # Annotations are not looked up in the order of the text.
    return re.sub(r'(\n"""\n\n)', r"\1from __future__ import annotations\n\n", text, count=1)
