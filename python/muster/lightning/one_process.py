"""What Lightning asks of strategies whose replicas are threads of one process."""

from __future__ import annotations

from muster.errors import InvalidArgument

__all__ = ["OneProcess"]


class OneProcess:
    """A strategy of one process, on one node."""

    @property
    def num_nodes(self) -> int:
        """1. Another number, of the Trainer or Fabric, is refused."""
        return 1

    @num_nodes.setter
    def num_nodes(self, nodes: int) -> None:
        if nodes != 1:
            raise InvalidArgument(
                f"muster_mirrored has its replicas in one process, and num_nodes is {nodes}; use strategy='muster_ddp' "
                "for several nodes"
            )

    _num_nodes = num_nodes  # Fabric's name for it
