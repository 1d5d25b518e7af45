"""Signals of a model's health beside its casts: logits, block outputs, gradient norms.

    head_logits_max        largest |logit| of the output head
    head_logsumexp_mean    mean over tokens of logsumexp(logits): the log partition function that a z-loss holds down
    attention_logits_max   largest q k / sqrt(head width) over pairs that attend (Wortsman et al., arXiv 2309.14322)
    block_output_rms       root mean square of a decoder block's output
    grad_norm              L2 norm of a linear's weight gradient, summed over the micro-batches as training does

Everything stays on the device; several micro-batches merge to what one large one would give.
"""

from __future__ import annotations

import math
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fp8parity.model import Attention, rotate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

HEAD_NAMES = ("head", "lm_head", "output")
"""Names under which the output head is found when none is given."""

QUERY_ROWS = 512
SCORES = 2**26
"""Attention logits are made in pieces of at most this many numbers."""

LOGIT_ROWS = 2048


def modules_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return every module once by its FQN, where one that `torch.compile` returned counts as the one inside it."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        found[".".join(part for part in name.split(".") if part != "_orig_mod")] = module
    return found


def head_of(model: nn.Module, name: str | None) -> str | None:
    """Return the FQN of the output head, None when none has a usual name; `KeyError` if `name` is wrong."""
    modules = modules_of(model)
    if name is not None:
        if name not in modules:
            raise KeyError(f"the model has no module {name!r}; it has {', '.join(list(modules)[1:6])}, ...")
        return name
    return next((known for known in HEAD_NAMES if isinstance(modules.get(known), nn.Linear)), None)


def _is_list(module: nn.Module) -> bool:
    if isinstance(module, nn.ModuleDict):
        return all(key.isdecimal() for key in module)
    return isinstance(module, nn.ModuleList)


def blocks_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return the members of the model's outermost module lists by FQN: its decoder blocks.

    A `ModuleDict` is one when its keys are numbers, as torchtitan keeps layers; with names it may hold a whole
    decoder, embedding and blocks and norm.
    """
    found: dict[str, nn.Module] = {}
    modules = modules_of(model)
    for name, module in modules.items():
        inside = any(name == outer or name.startswith(outer + ".") for outer in found)
        if _is_list(module) and not inside:
            members = ((f"{name}.{leaf}", child) for leaf, child in module.named_children())
            found |= {fqn: modules.get(fqn, child) for fqn, child in members}
    return found


class Signals:
    """Values of one probe by (signal, FQN), each a pair of float64 device numbers and how they become one."""

    def __init__(self) -> None:
        self._peaks: dict[tuple[str, str], Tensor] = {}
        self._means: dict[tuple[str, str], tuple[Tensor, int]] = {}

    def peak(self, signal: str, fqn: str, value: Tensor) -> None:
        """Keep the largest of the values given."""
        wide, key = value.detach().double(), (signal, fqn)
        self._peaks[key] = torch.maximum(self._peaks[key], wide) if key in self._peaks else wide

    def add(self, signal: str, fqn: str, total: Tensor, count: int) -> None:
        """Add a sum over `count` numbers."""
        old, n = self._means.get((signal, fqn), (torch.zeros_like(total, dtype=torch.float64), 0))
        self._means[signal, fqn] = (old + total.detach().double(), n + count)

    def values(self) -> dict[tuple[str, str], Tensor]:
        """Return peaks and means, each float64 [] on the device; the rms of a block is the root of its mean."""
        means = {key: total / max(count, 1) for key, (total, count) in self._means.items()}
        return self._peaks | {
            (signal, fqn): value.sqrt() if signal == "block_output_rms" else value
            for (signal, fqn), value in means.items()
        }


def attention_logits_max(q: Tensor, k: Tensor) -> Tensor:
    """Return the largest causal q k / sqrt(D) of q [B, H, T, D] and k [B, G, T, D], G dividing H, as float [].

    Multiplied in the dtype of q and k, on a CPU in fp32.
    """
    batch, heads, context, width = q.shape
    if q.device.type == "cpu":
        q, k = q.float(), k.float()
    k = k.repeat_interleave(heads // k.shape[1], dim=1)
    rows = min(context, QUERY_ROWS)
    together = max(1, SCORES // (heads * rows * context))
    largest = q.new_full((), -math.inf, dtype=torch.float32)
    for start in range(0, context, rows):
        end = min(context, start + rows)
        future = torch.ones((end - start, end), dtype=torch.bool, device=q.device).triu(start + 1)
        for first in range(0, batch, together):
            part = slice(first, first + together)
            scores = q[part, :, start:end] @ k[part, :, :end].transpose(-1, -2)
            largest = torch.maximum(largest, scores.masked_fill(future, -math.inf).amax().float())
    return largest / math.sqrt(width)


class SignalTaps:
    """Hooks for the signals of the forward pass, attached for one probe."""

    def __init__(self, model: nn.Module, head: str | None) -> None:
        self.signals = Signals()
        self.recomputing = False
        self._model = model
        self._head = head
        self._projected: dict[int, Tensor] = {}

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Put hooks on head, blocks and the attention modules of our own decoder; removed at the end."""
        handles = [module.register_forward_hook(self._guarded(take)) for module, take in self._takes()]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self._projected.clear()

    def _takes(self) -> Iterator[tuple[nn.Module, Callable[[nn.Module, Any, Tensor], None]]]:
        if self._head is not None:
            yield modules_of(self._model)[self._head], self._take_head
        for fqn, block in blocks_of(self._model).items():
            yield block, self._take_block(fqn)
        for fqn, module in modules_of(self._model).items():
            if type(module) is Attention:
                for name in ("qkv_proj",) if module.fused else ("q_proj", "k_proj"):
                    yield module.get_submodule(name), self._keep
                yield module, self._take_attention(fqn)

    def _guarded(self, take: Callable[[nn.Module, Any, Tensor], None]) -> Any:
        def took(module: nn.Module, args: Any, output: Any) -> None:
            value = output[0] if isinstance(output, tuple) and output else output
            # a pass without gradient, of a teacher or a metric, is none of training's
            if not self.recomputing and torch.is_grad_enabled() and isinstance(value, Tensor):
                with torch.no_grad():
                    take(module, args, value.detach())

        return took

    def _take_head(self, module: nn.Module, args: Any, logits: Tensor) -> None:
        assert self._head is not None
        rows = logits.reshape(-1, logits.shape[-1])
        for part in rows.split(LOGIT_ROWS):
            wide = part.float()
            self.signals.peak("head_logits_max", self._head, wide.abs().amax())
            total = wide.logsumexp(-1).sum(dtype=torch.float64)
            self.signals.add("head_logsumexp_mean", self._head, total, part.shape[0])

    def _take_block(self, fqn: str) -> Callable[[nn.Module, Any, Tensor], None]:
        def take(module: nn.Module, args: Any, output: Tensor) -> None:
            norm = torch.linalg.vector_norm(output, dtype=torch.float32)
            self.signals.add("block_output_rms", fqn, norm.double().square(), output.numel())

        return take

    def _keep(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self._projected[id(module)] = output

    def _take_attention(self, fqn: str) -> Callable[[nn.Module, Any, Tensor], None]:
        def take(module: nn.Module, args: Any, output: Tensor) -> None:
            assert isinstance(module, Attention)
            _, cos, sin = args
            q, k = (rotate(t, cos, sin) for t in self._queries_and_keys(module))
            self.signals.peak("attention_logits_max", fqn, attention_logits_max(q, k))

        return take

    def _queries_and_keys(self, module: Attention) -> tuple[Tensor, Tensor]:
        """Return q [B, H, T, D] and k [B, G, T, D] of the last call, before the rotation."""
        if module.fused:
            both = self._projected.pop(id(module.qkv_proj))
            sizes = (module.n_heads * module.head_dim, module.n_kv_heads * module.head_dim)
            q, k, _ = both.split((*sizes, sizes[1]), dim=-1)
        else:
            q, k = self._projected.pop(id(module.q_proj)), self._projected.pop(id(module.k_proj))
        batch, context, _ = q.shape
        halves = (t.reshape(batch, context, -1, module.head_dim).transpose(1, 2) for t in (q, k))
        return next(halves), next(halves)


def gradient_norms(linears: Mapping[str, nn.Linear], grads: Mapping[int, Tensor]) -> Signals:
    """Return `grad_norm` of each linear whose weight has a gradient; `grads` is by id of the weight."""
    signals = Signals()
    for fqn, linear in linears.items():
        grad = grads.get(id(linear.weight))
        if grad is not None:
            signals.peak("grad_norm", fqn, torch.linalg.vector_norm(grad, dtype=torch.float32))
    return signals
