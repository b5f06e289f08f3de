"""Layers that a strategy converts while the Trainer fits."""

from __future__ import annotations

import lightning.pytorch as pl
from lightning.pytorch.plugins.layer_sync import LayerSync
from torch import nn

__all__ = ["ConvertedLayers"]


class ConvertedLayers:
    """What ``sync_batchnorm`` asks of a strategy of Lightning's."""

    _layer_sync: LayerSync | None = None
    _converted: pl.LightningModule | None = None

    model: nn.Module | None

    def convert_layers(self, module: pl.LightningModule) -> None:
        """The layers of `module` are those that the Trainer asked for."""
        if self._layer_sync is not None:
            self._converted = module
            self.model = self._layer_sync.apply(module)

    def revert_layers(self) -> None:
        """They are as they were, also where what followed `convert_layers` failed."""
        module, self._converted = self._converted, None
        if module is not None and self._layer_sync is not None:
            self.model = self._layer_sync.revert(module)
