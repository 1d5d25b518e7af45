"""Models of a user, tiny: copied beside a recipe file by tests, each builder breaking at most one rule."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB = 272


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(width, 2 * width), nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.a(x)) * self.b(x))


class Model(nn.Module):
    def __init__(self, width: int = 32, depth: int = 3, vocab: int = VOCAB) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.enter = nn.Linear(width, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(depth))
        self.head = nn.Linear(width, vocab, bias=False)

    def hidden(self, tokens: Tensor) -> Tensor:
        x = self.enter(self.embed(tokens))
        for layer in self.layers:
            x = layer(x)
        return x

    def forward(self, tokens: Tensor) -> Any:
        return self.head(self.hidden(tokens))


SCALE = torch.full((1,), 2.0)


class Scaled(Model):
    """Uses a tensor of the module's own, which exists before any model does."""

    def forward(self, tokens: Tensor) -> Any:
        return super().forward(tokens) * SCALE


class Plain(Model):
    """Keeps a tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1].table = torch.ones(3)


class Named(Model):
    """Its parts are the entries of a ModuleDict, as nanoGPT's are."""

    def __init__(self) -> None:
        super().__init__()
        names = ("embed", "enter", "layers")
        self.transformer = nn.ModuleDict({name: self._modules.pop(name) for name in names})

    def hidden(self, tokens: Tensor) -> Tensor:
        x = self.transformer["enter"](self.transformer["embed"](tokens))
        for layer in self.transformer["layers"]:
            x = layer(x)
        return x


def build(**kwargs: Any) -> nn.Module:
    return Model(**kwargs)


def tied() -> nn.Module:
    model = Model()
    nn.init.normal_(model.embed.weight, std=0.02)
    model.head.weight = model.embed.weight
    return model


class Wrapped(Model):
    def forward(self, tokens: Tensor) -> Any:
        return SimpleNamespace(logits=super().forward(tokens))


class NoLogits(Model):
    def forward(self, tokens: Tensor) -> Any:
        return {"loss": super().forward(tokens).mean()}


class Flat(Model):
    def forward(self, tokens: Tensor) -> Any:
        return super().forward(tokens).flatten(0, 1)


class TwoNames(Model):
    def __init__(self) -> None:
        super().__init__()
        self.layers[1].down = self.layers[0].down


class OneWeight(Model):
    def __init__(self) -> None:
        super().__init__()
        self.layers[1].down.weight = self.layers[0].down.weight


class Twice(Model):
    def forward(self, tokens: Tensor) -> Any:
        return self.head(self.layers[0](self.hidden(tokens)))


class Dropped(Model):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.1)

    def forward(self, tokens: Tensor) -> Any:
        return self.head(self.drop(self.hidden(tokens)))


class Counting(Model):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, tokens: Tensor) -> Any:
        self.seen += 1
        return super().forward(tokens)


class Reading(Model):
    """Copies a number to the host, as a model may; fake tensors have none."""

    def forward(self, tokens: Tensor) -> Any:
        return super().forward(tokens) if int(tokens.max()) < VOCAB else None


class Own(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


class OwnLinear(Model):
    def __init__(self) -> None:
        super().__init__()
        self.layers[1].a = Own(32, 64)


def hooked() -> nn.Module:
    """Multiply what a linear gives, in a hook; another linear's hooks only look."""
    model = Model()
    model.layers[1].down.register_forward_hook(lambda module, args, output: 4.0 * output)
    model.layers[2].a.register_full_backward_hook(lambda module, grad_in, grad_out: None)
    model.layers[2].a.register_forward_pre_hook(lambda module, args: None)
    return model


def weight_normed(*, parametrized: bool) -> nn.Module:
    model = Model()
    for layer in model.layers:
        if parametrized:
            nn.utils.parametrizations.weight_norm(layer.down)
        else:
            nn.utils.weight_norm(layer.down)
    return model


class Idle(Model):
    """nn.MultiheadAttention multiplies by its weights without calling its linear; one matrix is a bare parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(32, 2, batch_first=True)

    def forward(self, tokens: Tensor) -> Any:
        x = self.hidden(tokens)
        return self.head(x + self.attention(x, x, x, need_weights=False)[0])


class Functional(Model):
    """The head is no module: logits by the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        del self.head

    def forward(self, tokens: Tensor) -> Any:
        return F.linear(self.hidden(tokens), self.embed.weight)


class NoBlocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.one, self.two = nn.Embedding(VOCAB, 32), nn.Linear(32, 32), nn.Linear(32, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.two(F.gelu(self.one(self.embed(tokens))))


class NoLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.embed(tokens)


class Buffered(Model):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(32))


def half() -> nn.Module:
    return Model().bfloat16()


def no_module() -> Any:
    return "a model"


def failing() -> nn.Module:
    raise RuntimeError("weights are on another machine")
