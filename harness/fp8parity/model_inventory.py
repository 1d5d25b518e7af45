"""What a model of the user's is made of: built with tensors that have no memory, and one forward pass looked at.

`python -m fp8parity.model_inventory RESULT.json < REQUEST.json` does it in a process of its own, so that planning
imports no torch and the user's code cannot disturb it (`model_preflight.resolve`). Fake tensors carry shapes only: a
model of 7 B parameters takes seconds. A model that cannot be built or run so is built for real, on the CPU.
"""

from __future__ import annotations

import contextlib
import json
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils.parametrize import is_parametrized
from torch.utils._python_dispatch import TorchDispatchMode

from fp8parity import own_model
from fp8parity.errors import UsageError
from fp8parity.own_sources import import_target
from fp8parity.own_spec import HfModelSpec, ImportModelSpec, Inventory, LinearFacts
from fp8parity.own_trace import Trace
from fp8parity.probe_signals import blocks_of
from fp8parity.spec import OwnModelSpec

BATCH = 2
SEED = 0


class _Watch(TorchDispatchMode):
    """Notes operators that draw random numbers, and those that copy a number to the host."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.random: dict[str, None] = {}
        self.reads = 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[Any], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Run the operator, noted."""
        if torch.Tag.nondeterministic_seeded in func.tags and _draws(func, args, kwargs or {}):
            self.random.setdefault(str(func.overloadpacket))
        if func is torch.ops.aten._local_scalar_dense.default:
            self.reads += 1
        return func(*args, **(kwargs or {}))


def _draws(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether a random operator really draws: fused attention is one also without dropout."""
    names = [argument.name for argument in func._schema.arguments]
    if "dropout_p" not in names:
        return True
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return float(given.get("dropout_p", 0.0)) > 0.0


@dataclass
class _Pass:
    """What hooks on the linears saw of one forward pass: names in order of call, and groups of common inputs."""

    order: list[str] = field(default_factory=list)
    groups: list[int] = field(default_factory=list)
    last_input: Tensor | None = None
    last_output: Tensor | None = None

    def took(self, fqn: str, x: Tensor, output: Tensor) -> None:
        same = bool(self.groups) and x is self.last_input
        self.groups.append(self.groups[-1] + (not same) if self.groups else 0)
        self.order.append(fqn)
        # kept, so that no later tensor can take the place of one that is gone
        self.last_input, self.last_output = x, output


@contextlib.contextmanager
def _observed(linears: dict[str, nn.Linear]) -> Iterator[_Pass]:
    seen = _Pass()

    def hook(fqn: str) -> Callable[..., None]:
        def took(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Tensor) -> None:
            seen.took(fqn, args[0] if args else kwargs["input"], output)

        return took

    handles = [m.register_forward_hook(hook(n), with_kwargs=True) for n, m in linears.items()]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _shared(model: nn.Module) -> str | None:
    """Return what is said against linears that stand for one another, or None."""
    names: dict[int, list[str]] = {}
    weights: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, nn.Linear):
            names.setdefault(id(module), []).append(name)
            weight = module._parameters.get("weight")
            if weight is not None:  # else it is made anew at each look (parametrizations)
                weights.setdefault(id(weight), []).append(name)
    twice = next((found for found in names.values() if len(found) > 1), None)
    if twice:
        return f"{' and '.join(twice)} are one and the same nn.Linear under several names"
    tied = next((found for found in weights.values() if len(found) > 1), None)
    return f"{' and '.join(tied)} share one weight" if tied else None


_WHY_ONCE = (
    ", so which of its uses the first and last N are, and what one probe of it says, has no answer; give each use its "
    "own nn.Linear (an embedding may be tied to the output head)"
)


def _dropouts(model: nn.Module) -> list[str]:
    kinds = (nn.Dropout, nn.AlphaDropout, nn.FeatureAlphaDropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
    return [f"{n} (p={m.p})" for n, m in model.named_modules() if isinstance(m, kinds) and m.p > 0]


def _run(model: nn.Module, context: int) -> tuple[_Pass, Tensor, _Watch]:
    """Run one forward pass as `model` stands; `UsageError` when it draws random numbers or leaves a trace."""
    linears = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    tokens = torch.zeros((BATCH, context), dtype=torch.int64)
    before = {name: (buffer, buffer._version) for name, buffer in model.named_buffers()}
    trace = Trace(model)
    with _observed(linears) as seen, _Watch() as watch:
        logits = model(tokens)
    name = type(model).__name__
    if watch.random:
        where = ", ".join(_dropouts(model)[:3]) or "not in an nn.Dropout"
        raise UsageError(
            f"{name} draws random numbers in its forward pass ({', '.join(watch.random)}; {where}): a number would "
            "depend on more than seed and step; build it without dropout"
        )
    changed = [
        n
        for n, b in model.named_buffers()
        if n not in before or before[n][0] is not b or before[n][1] != b._version
    ]
    if changed:
        raise UsageError(
            f"{name} changes the buffers {', '.join(changed[:3])} in its forward pass; a pass must leave the model as "
            "it was (no running statistics, no counters)"
        )
    trace.check()
    return seen, logits, watch


def _evaluate(model: nn.Module, context: int) -> None:
    """Run one forward pass as an evaluation does; `UsageError` as `_run`."""
    model.eval()
    with torch.no_grad():
        _run(model, context)
    model.train()


_HOOKS = {
    "_forward_hooks": "forward hook",
    "_forward_pre_hooks": "forward pre-hook",
    "_backward_hooks": "backward hook",
    "_backward_pre_hooks": "backward pre-hook",
}


def _refusal(linear: nn.Linear, parent: nn.Module) -> str:
    if is_parametrized(linear):
        return (
            "is parametrized (torch.nn.utils.parametrize), so its weight is computed from others at each pass"
        )
    hooks = [words for name, words in _HOOKS.items() if getattr(linear, name)]
    if hooks:
        return (
            f"has a {' and a '.join(hooks)}, which may change what its GEMMs take or give, so nothing could be proven "
            "of them; do that in the forward of the module around it"
        )
    if type(linear) is not nn.Linear or "forward" in vars(linear):
        return f"is a {type(linear).__name__} with its own forward, which would be lost"
    if isinstance(parent, nn.TransformerEncoderLayer):
        return "belongs to nn.TransformerEncoderLayer, whose evaluation may take a fused path around it"
    return ""


def inspect(model: nn.Module, context: int) -> Inventory:
    """Return the inventory of an adapted model, by a forward pass over tokens [2, context] in training and evaluation.

    Raises `UsageError`, naming the module, for a model that returns no logits [batch, context, vocabulary], has no
    linear, uses one linear in two places, keeps tensors in plain attributes, draws random numbers or leaves a trace
    (`own_trace`).
    """
    linears = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    if not linears:
        raise UsageError(
            f"{type(model).__name__} has no nn.Linear, so there is no GEMM that a precision recipe could convert"
        )
    made = [n for n, m in linears.items() if "weight" not in m._parameters and not is_parametrized(m)]
    if made:
        raise UsageError(
            f"{type(model).__name__}: the weight of {', '.join(made[:3])} is no parameter but made before each pass "
            "(torch.nn.utils.weight_norm or spectral_norm?), which a conversion would lose; use "
            "torch.nn.utils.parametrizations, and keep it in BF16 by precision.exclude"
        )
    shared = _shared(model)
    if shared:
        raise UsageError(f"{type(model).__name__}: {shared}{_WHY_ONCE}")
    plain = [f"{n}.{k}".lstrip(".") for n, m in model.named_modules() for k in _plain_tensors(m)]
    if plain:
        raise UsageError(
            f"{type(model).__name__} keeps tensors in plain attributes ({', '.join(plain[:3])}), which neither go to "
            "the device with the model nor are watched for changes; write register_buffer(..., persistent=False)"
        )
    seen, logits, watch = _run(model, context)
    _evaluate(model, context)
    repeated = next((fqn for fqn in seen.order if seen.order.count(fqn) > 1), None)
    if repeated:
        times = seen.order.count(repeated)
        raise UsageError(
            f"{type(model).__name__}: {repeated} runs {times} times in one forward pass{_WHY_ONCE}"
        )
    vocab = logits.shape[-1]
    last = seen.order[-1] if seen.order else None
    head = last if last is not None and linears[last].out_features == vocab else None
    blocks = _blocks(model, set(seen.order))
    return Inventory(
        linears=tuple(_facts(model, linears, seen, head, blocks)),
        parameters=sum(p.numel() for p in model.parameters()),
        vocab_size=vocab,
        blocks=blocks,
        float_buffers=tuple(n for n, b in model.named_buffers() if b.is_floating_point()),
        can_checkpoint=callable(getattr(model, "gradient_checkpointing_enable", None)),
        notes=tuple(_notes(model, head, watch)),
    )


def _plain_tensors(module: nn.Module) -> list[str]:
    """Return the attributes that hold a tensor which is neither parameter nor buffer."""
    return [name for name, value in vars(module).items() if isinstance(value, Tensor)]


def _blocks(model: nn.Module, executed: set[str]) -> tuple[str, ...]:
    """Return the members of the outermost module lists in which a linear runs."""
    return tuple(
        name
        for name in blocks_of(model)
        if any(fqn.startswith(f"{name}.") or fqn == name for fqn in executed)
    )


def _facts(
    model: nn.Module, linears: dict[str, nn.Linear], seen: _Pass, head: str | None, blocks: Sequence[str]
) -> Iterator[LinearFacts]:
    """Yield every linear in order of execution, those that never run last."""
    idle = [fqn for fqn in linears if fqn not in seen.order]
    groups = [*seen.groups, *range(len(seen.order), len(linears))]
    for order, (fqn, group) in enumerate(zip([*seen.order, *idle], groups, strict=True)):
        linear = linears[fqn]
        inside = (i for i, name in enumerate(blocks) if fqn.startswith(f"{name}.") or fqn == name)
        yield LinearFacts(
            fqn=fqn,
            k=linear.in_features,
            n=linear.out_features,
            order=order,
            group=group,
            block=None if fqn == head else next(inside, None),
            head=fqn == head,
            runs=fqn not in idle,
            bias=linear.bias is not None,
            refusal=_refusal(linear, model.get_submodule(fqn.rpartition(".")[0])),
        )


def _notes(model: nn.Module, head: str | None, watch: _Watch) -> Iterator[str]:
    known = {id(m.weight) for m in model.modules() if isinstance(m, nn.Linear | nn.Embedding)}
    others = [n for n, p in model.named_parameters() if p.ndim >= 2 and id(p) not in known]
    if others:
        yield (
            f"{len(others)} matrices are no weight of an nn.Linear ({', '.join(others[:3])}); what multiplies by them "
            "stays in BF16 and is not counted in the share of FLOPs"
        )
    if head is None:
        yield "the logits are not made by an nn.Linear; the output head stays in BF16 in any case"
    if watch.reads:
        yield f"the forward pass reads {watch.reads} values on the host, each of which lets a GPU wait"
    yield "attention logits are not probed; that needs fp8parity's own decoder"


def _inspect_spec(spec: OwnModelSpec, root: Path, context: int) -> Inventory:
    """Inspect the model without memory, or, where its code needs real tensors, with some."""
    if isinstance(spec, ImportModelSpec):
        import_target(spec.target, root)  # tensors of the module's own are real ones for both
    try:
        with FakeTensorMode(), torch.device("cpu"):
            return inspect(own_model.adapt(own_model.construct(spec, root, load=False)), context)
    except UsageError:
        raise
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    with own_model.drawing_from(SEED):
        found = inspect(own_model.adapt(own_model.construct(spec, root, load=False)), context)
    note = f"shapes were found with real tensors on the CPU; without memory the model failed ({reason[:120]})"
    return found.model_copy(update={"notes": (*found.notes, note)})


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Return what is to be known of the request's `model`, `root` and `context`: inventory, and an hf model's own."""
    root, context = Path(request["root"]), int(request["context"])
    spec: OwnModelSpec = TypeAdapter(ImportModelSpec | HfModelSpec).validate_python(request["model"])
    found: dict[str, Any] = {}
    if isinstance(spec, HfModelSpec):
        from fp8parity import hf_model

        found["resolved_config"] = hf_model.resolve_config(spec, root, context)
        found["weights_sha256"] = hf_model.weights_digest(hf_model.weight_files(spec, root))
        spec = spec.model_copy(update=found)
    return {**found, "inventory": _inspect_spec(spec, root, context).model_dump(mode="json")}


def _where(error: BaseException) -> str:
    """Return the last place in the traceback, which is where the user's own code, or what it called, failed."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{Path(last.filename).name}:{last.lineno}"


def respond(request: dict[str, Any]) -> dict[str, Any]:
    """Return the answer to a request, or what is wrong with the model under `error`."""
    try:
        return answer(request)
    except UsageError as error:
        return {"error": str(error)}
    except Exception as error:
        traceback.print_exc()
        failed = f"building or running the model failed at {_where(error)}"
        return {"error": f"{failed}: {type(error).__name__}: {error}"}


def main() -> None:
    """Read a request from standard input and write the response to the file named."""
    result = Path(sys.argv[1])
    result.write_text(json.dumps(respond(json.load(sys.stdin))), encoding="utf-8")


if __name__ == "__main__":
    main()
