"""What is told of a DistributedDataParallel, under the names that torch has for it."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

from torch import nn

__all__ = ["Logger"]


@dataclass(frozen=True)
class LoggingData:
    """As torch's of that name."""

    strs_map: dict[str, str]
    ints_map: dict[str, int]


class Logger:
    """Says what is known when it is asked. Nothing is sampled, so that torch's times of forward and backward, and
    whether a graph could be static, are not among it."""

    def __init__(self, ddp: Any) -> None:
        """Of a DistributedDataParallel that has its reducer."""
        self._ddp = weakref.ref(ddp)
        self._texts: dict[str, str] = {}

    def note_way(self, way: str) -> None:
        """What gradients go through, in words."""
        self._texts["reduced_through"] = way

    def note_hook(self, name: str) -> None:
        """A communication hook was registered."""
        self._texts["comm_hook"] = name

    def _get_ddp_logging_data(self) -> LoggingData:
        ddp = self._ddp()
        if ddp is None:
            return LoggingData({}, {})
        parameters = ddp.reducer.parameters
        sizes = ddp.reducer.hooked.sizes
        texts = {
            "module_name": type(ddp.module).__name__,
            "backend_name": ddp.process_group.name(),
            "dtypes": ", ".join(sorted({str(p.dtype).removeprefix("torch.") for p in parameters})),
            "device_ids": ", ".join(map(str, ddp.device_ids or [])),
            "bucket_sizes": ", ".join(map(str, sizes)),
            **self._texts,
        }
        numbers = {
            "world_size": ddp.process_group.size(),
            "rank": ddp.process_group.rank(),
            "iteration": ddp.reducer.num_averages,
            "num_parameter_tensors": len(parameters),
            "total_parameter_size_bytes": sum(p.numel() * p.element_size() for p in parameters),
            "num_buckets_reduced": len(sizes) if ddp.reducer.hooked.has_hook else 0,
            "bucket_cap_bytes": ddp.bucket_bytes_cap,
            "output_device": -1 if ddp.output_device is None else ddp.output_device,
            "broadcast_buffers": ddp.broadcast_buffers,
            "find_unused_parameters": ddp.find_unused_parameters,
            "gradient_as_bucket_view": ddp.gradient_as_bucket_view,
            "static_graph": ddp.static_graph,
            "has_sync_bn": any(isinstance(module, nn.SyncBatchNorm) for module in ddp.module.modules()),
            "is_multi_device_module": ddp.is_multi_device_module,
        }
        return LoggingData(texts, {name: int(value) for name, value in numbers.items()})

    # --- torch's names ------------------------------------------------------------------------------------------------

    def set_runtime_stats_and_log(self) -> None:
        """Before a forward: nothing is measured."""

    def set_error_and_log(self, error: str) -> None:
        """Before an error is raised, which says the same."""
        self._texts["error"] = error

    def _set_static_graph(self) -> None:
        pass

    def _set_uneven_input_join(self) -> None:
        self._texts["uneven_inputs"] = "join() was entered"
