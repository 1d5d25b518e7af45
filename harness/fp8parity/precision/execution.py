"""Proof of what ran: FP8 GEMMs of one training step and one evaluation, per layer, by the profiler.

That a layer was converted says nothing about what executes: `nn.MultiheadAttention` never calls its
`out_proj`, `nn.TransformerEncoderLayer` takes a fused path in evaluation, a recomputation may leave FP8. So
one step is run uncompiled under `torch.profiler`, and every operator that multiplies FP8 codes is attributed
to a layer: in the forward pass by the named range it runs in, in the backward pass by the autograd sequence
number of the node that the layer's forward created. The dtype that each linear computes in is read from its
output. Layers are marked by replacing `forward` on the
instance, not by hooks: hooks would switch the fused path off and change what is observed.
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from fp8parity.casts import GEMMS, Gemm
from fp8parity.precision.bf16 import Fp32AccumulateLinear
from fp8parity.precision.casts_of import casts_of
from fp8parity.precision.profile_events import Event, profiled_events
from fp8parity.precision.reference import SCALED_MM

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

Phase = Literal["train", "eval"]

FP8_GEMM_OPS = (
    "aten::_scaled_mm",
    "aten::_scaled_mm_v2",
    "aten::_scaled_grouped_mm",
    "aten::_scaled_grouped_mm_v2",
    SCALED_MM,
)
"""Operators that multiply FP8 codes: torch's, and the reference backend's."""

_RANGE = "fp8parity.layer/"
_COMPILED = "Torch-Compiled Region"  # the range in which torch runs each piece of compiled code
_DTYPE_NAMES = {"c10::Float8_e4m3fn": "e4m3fn", "c10::Float8_e5m2": "e5m2"}


@dataclass(frozen=True)
class LayerExecution:
    """What one linear did in one phase.

    `calls` of its forward outside and `recomputed` inside a backward pass; FP8 GEMMs by role, with the
    operand formats seen (`left x right`, sorted); whether input and weight wanted a gradient in the last
    call. `computed`: the dtypes that its calls computed in, sorted; empty for a linear with a forward of its own.
    """

    fqn: str
    phase: Phase
    calls: int
    recomputed: int
    fp8: tuple[tuple[Gemm, int], ...]
    formats: tuple[tuple[Gemm, tuple[str, ...]], ...]
    input_wants_grad: bool
    weight_wants_grad: bool
    computed: tuple[str, ...] = ()

    def count(self, gemm: Gemm) -> int:
        """Return how many FP8 GEMMs of this role ran."""
        return dict(self.fp8).get(gemm, 0)


@dataclass(frozen=True)
class ExecutionRecord:
    """Every linear in the order of its first execution, training first; linears that never ran come last.

    `unattributed` counts FP8 GEMMs outside every linear, by operator and phase.
    """

    layers: tuple[LayerExecution, ...]
    unattributed: tuple[tuple[Phase, str, int], ...]

    def layer(self, fqn: str, phase: Phase) -> LayerExecution:
        """Return one linear's record; `KeyError` if the model has no such linear or the phase was not run."""
        for entry in self.layers:
            if (entry.fqn, entry.phase) == (fqn, phase):
                return entry
        raise KeyError(f"{fqn} was not observed in phase {phase}")

    def executed(self, phase: Phase) -> tuple[str, ...]:
        """Return the linears that ran in `phase`, in the order of their first call."""
        return tuple(e.fqn for e in self.layers if e.phase == phase and e.calls)

    def total(self, phase: Phase) -> int:
        """Return the number of FP8 GEMMs of a phase."""
        inside = sum(n for e in self.layers if e.phase == phase for _, n in e.fp8)
        return inside + sum(n for p, _, n in self.unattributed if p == phase)


# --- instrumentation ---------------------------------------------------------------------------------------


@dataclass
class _Seen:
    """What is read at a linear's calls: who wants a gradient in the last one, and the dtypes they computed in."""

    wants: dict[str, tuple[bool, bool]] = field(default_factory=dict)
    computed: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))


def _output_tells_dtype(module: nn.Module) -> bool:
    """Whether the output has the dtype that the GEMM computes in: a forward of the user's own may cast it."""
    if isinstance(module, Fp32AccumulateLinear) or casts_of(module) is not None:
        return True
    return type(module).forward is nn.Linear.forward and "forward" not in vars(module)


@contextmanager
def _marked(linears: Mapping[str, nn.Module], seen: _Seen) -> Iterator[None]:
    """Run every linear's forward in a profiler range of its name; undone at the end."""

    def marked(fqn: str, module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        tells = _output_tells_dtype(module)

        def run(*args: Any, **kwargs: Any) -> Any:
            grads = [torch.is_grad_enabled() and isinstance(t, Tensor) and t.requires_grad
                     for t in ((*args, *kwargs.values())[0], module.weight)]  # fmt: skip
            seen.wants[fqn] = (grads[0], grads[1])
            with record_function(_RANGE + fqn):
                output = forward(*args, **kwargs)
            if tells:
                seen.computed[fqn].add(str(output.dtype).removeprefix("torch."))
            return output

        return run

    before = {fqn: vars(module).get("forward") for fqn, module in linears.items()}
    for fqn, module in linears.items():
        module.forward = marked(fqn, module, module.forward)
    try:
        yield
    finally:
        for fqn, module in linears.items():
            del module.forward
            patched = before[fqn]
            if patched is not None:
                module.forward = patched


# --- reading a profile -------------------------------------------------------------------------------------


def _range_of(event: Event) -> str | None:
    """Return the layer whose forward the event runs in, unless a backward node lies between."""
    for ancestor in event.ancestors:
        if ancestor.name.startswith(_RANGE):
            return ancestor.name[len(_RANGE) :]
        if ancestor.is_backward:
            return None
    return None


def _sequence_owners(events: Sequence[Event]) -> dict[tuple[int, int], str]:
    """Map (forward thread, autograd sequence number) to the layer that created the node."""
    owners: dict[tuple[int, int], str] = {}
    for event in events:
        if event.sequence >= 0 and not event.is_backward:
            fqn = _range_of(event)
            if fqn is not None:
                owners[event.thread, event.sequence] = fqn
    return owners


def _formats(event: Event) -> str:
    return " x ".join([_DTYPE_NAMES[d] for d in event.dtypes if d in _DTYPE_NAMES][:2])


def _matrix_shapes(event: Event) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return left and right as a plain product [P, C], [C, Q]."""
    shapes = event.shapes
    if event.name == SCALED_MM:  # its right operand has the reduced axis last
        return shapes[0], shapes[3][::-1]
    return shapes[0], shapes[1]


def _backward_gemms(events: Sequence[Event], weight: tuple[int, int]) -> list[tuple[Gemm, Event]]:
    """Name the FP8 GEMMs of one backward node; `weight` is [N, K].

    The reference labels its own. torch's are told apart by their shapes: grad_input is [M, N] @ [N, K] and
    grad_weight [N, M] @ [M, K]. With M = N both fit, and the order decides: every implementation does
    grad_input first.
    """
    named: list[tuple[Gemm, Event]] = []
    for event in events:
        if event.name == SCALED_MM:
            named.append((GEMMS[event.scalar(7)], event))
            continue
        left, right = _matrix_shapes(event)
        is_input, is_weight = (left[1], right[1]) == weight, (left[0], right[1]) == weight
        first = not any(gemm == "grad_input" for gemm, _ in named)
        named.append(("grad_input" if is_input and (first or not is_weight) else "grad_weight", event))
    return named


@dataclass
class _Tally:
    """Counts of one phase while a profile is read."""

    order: dict[str, None]
    calls: dict[str, int]
    recomputed: dict[str, int]
    gemms: dict[str, list[tuple[Gemm, str]]]
    stray: dict[str, int]


def _read(events: Sequence[Event], weights: dict[str, tuple[int, int]]) -> _Tally:
    owners = _sequence_owners(events)
    tally = _Tally({}, defaultdict(int), defaultdict(int), defaultdict(list), defaultdict(int))
    nodes: dict[Event, tuple[str, list[Event]]] = {}
    for event in events:
        if event.name.startswith(_RANGE):
            fqn = event.name[len(_RANGE) :]
            tally.order.setdefault(fqn)
            (tally.calls if event.backward_node is None else tally.recomputed)[fqn] += 1
        elif event.name in FP8_GEMM_OPS:
            _attribute(event, owners, nodes, tally)
    for fqn, inside in nodes.values():
        tally.gemms[fqn] += [(g, _formats(e)) for g, e in _backward_gemms(inside, weights[fqn])]
    return tally


def _attribute(
    event: Event,
    owners: dict[tuple[int, int], str],
    nodes: dict[Event, tuple[str, list[Event]]],
    tally: _Tally,
) -> None:
    """Give one FP8 GEMM to the layer it belongs to; those of a backward node wait for their siblings."""
    fqn, node = _range_of(event), event.backward_node
    if fqn is not None:
        tally.gemms[fqn].append(("output", _formats(event)))
        return
    owner = None if node is None else owners.get((node.forward_thread, node.sequence))
    if node is None or owner is None:
        tally.stray[event.name] += 1
    else:
        nodes.setdefault(node, (owner, []))[1].append(event)


# --- the two observations ----------------------------------------------------------------------------------


def observe(
    model: nn.Module, train_step: Callable[[], object], evaluate: Callable[[], object] | None = None
) -> ExecutionRecord:
    """Run a training step, and an evaluation, uncompiled under the profiler; return what each linear did.

    `train_step` does the forward and backward passes of all micro-batches and no optimizer step; gradients
    it leaves are the caller's to discard. `evaluate` switches to evaluation itself. Cost: a few times an
    eager step.
    """
    linears = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    layers: list[LayerExecution] = []
    stray: list[tuple[Phase, str, int]] = []
    phases: list[tuple[Phase, Callable[[], object]]] = [("train", train_step)]
    phases += [("eval", evaluate)] if evaluate is not None else []
    for phase, step in phases:
        seen = _Seen()
        with torch.compiler.set_stance("force_eager"), _marked(linears, seen):
            events = profiled_events(step)
        tally = _read(events, {n: (m.out_features, m.in_features) for n, m in linears.items()})
        order = [*tally.order, *(n for n in linears if n not in tally.order)]
        layers += [_layer(fqn, phase, tally, seen) for fqn in order]
        stray += [(phase, name, n) for name, n in sorted(tally.stray.items())]
    return ExecutionRecord(tuple(layers), tuple(stray))


def _layer(fqn: str, phase: Phase, tally: _Tally, seen: _Seen) -> LayerExecution:
    gemms = tally.gemms.get(fqn, [])
    counts = tuple((g, sum(1 for s, _ in gemms if s == g)) for g in GEMMS)
    formats = tuple((g, tuple(sorted({f for s, f in gemms if s == g}))) for g in GEMMS)
    calls, recomputed = tally.calls.get(fqn, 0), tally.recomputed.get(fqn, 0)
    wants, computed = seen.wants.get(fqn, (False, False)), tuple(sorted(seen.computed.get(fqn, ())))
    return LayerExecution(fqn, phase, calls, recomputed, counts, formats, *wants, computed)


@dataclass(frozen=True)
class StepCount:
    """What a step executed over all layers: FP8 GEMMs, and calls of code that the compiler made."""

    fp8_gemms: int
    compiled_regions: int


def count_step(step: Callable[[], object]) -> StepCount:
    """Run `step` as it stands, compiled or not, and count what it executes."""
    names = [event.name for event in profiled_events(step)]
    gemms = sum(name in FP8_GEMM_OPS for name in names)
    return StepCount(gemms, sum(name.startswith(_COMPILED) for name in names))
