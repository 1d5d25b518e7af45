"""Models of a user whose forward pass leaves a trace, or seems to: in Python, where no tensor shows it."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .own_models import Model


class Counted(Model):
    """Scales its logits by a count of its training passes that only Python sees."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1].calls = 0

    def forward(self, tokens: Tensor) -> Any:
        self.layers[1].calls += self.training
        return super().forward(tokens) * (1 - 0.9 ** self.layers[1].calls)


class Evaluated(Model):
    """Remembers what it was evaluated on."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def forward(self, tokens: Tensor) -> Any:
        if not self.training:
            self.seen.append({"shape": tuple(tokens.shape)})
        return super().forward(tokens)


class LayerDrop(Model):
    """Leaves layers out by Python's generator."""

    def hidden(self, tokens: Tensor) -> Tensor:
        x = self.enter(self.embed(tokens))
        for layer in self.layers:
            x = x if self.training and random.random() < 0.5 else layer(x)
        return x


class Noisy(Model):
    """Scales its logits by numpy's global generator."""

    def forward(self, tokens: Tensor) -> Any:
        return super().forward(tokens) * float(np.random.rand())  # noqa: NPY002


class OwnGenerator(Model):
    """Scales its logits by a generator of its own, at the same object all the time."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = np.random.default_rng(0)

    def forward(self, tokens: Tensor) -> Any:
        return super().forward(tokens) * float(self.generator.random())


class Remembering(Model):
    """Keeps a tensor of a pass in a container."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = SimpleNamespace(keys={})

    def forward(self, tokens: Tensor) -> Any:
        self.cache.keys["last"] = self.hidden(tokens)
        return self.head(self.cache.keys["last"])


class Tagged(Model):
    """Has plain attributes of every kind, and none of them changes."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes = {"width": [32, (1, 2.5)], "names": {"a", "b"}, "nan": float("nan")}
        self.options, self.generator, self.activation = SimpleNamespace(on=True), random.Random(0), F.gelu
        self.others = [self.layers[0], np.ones(3), torch.ones(2)]
