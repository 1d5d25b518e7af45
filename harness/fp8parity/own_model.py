"""A model of the user's, built so that a run of it is like any other: from the seed, in fp32, returning logits."""

from __future__ import annotations

import contextlib
import copy
import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fp8parity.errors import UsageError
from fp8parity.own_sources import check_unchanged, import_target, transformers_version
from fp8parity.own_spec import HfModelSpec, ImportModelSpec
from fp8parity.precision.casts_of import casts_of
from fp8parity.spec import OwnModelSpec

LOGITS = "return a tensor [batch, context, vocabulary], or an object with it as .logits"


def logits_of(module: nn.Module, args: tuple[Any, ...], output: Any) -> Tensor:
    """Return the logits of a forward pass, whatever holds them: a forward hook of every model of the user's.

    Raises `UsageError` when there are none, or when they have not the shape [*tokens, vocabulary].
    """
    logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    name = type(module).__name__
    if not isinstance(logits, Tensor):
        raise UsageError(f"{name} returns {type(output).__name__} without logits; {LOGITS}")
    tokens: Tensor = args[0]
    if logits.ndim != 3 or logits.shape[:2] != tokens.shape:
        raise UsageError(f"{name} returns {list(logits.shape)} for tokens {list(tokens.shape)}; {LOGITS}")
    return logits


@contextlib.contextmanager
def drawing_from(seed: int) -> Iterator[None]:
    """Let every global generator start from the seed, on the CPU and in fp32, and put them back afterwards."""
    python, numpy, dtype = random.getstate(), np.random.get_state(), torch.get_default_dtype()  # noqa: NPY002
    try:
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            torch.set_default_dtype(torch.float32)
            random.seed(seed)
            np.random.seed(seed)  # noqa: NPY002 -- a builder may draw from the global generator
            torch.default_generator.manual_seed(seed)
            yield
    finally:
        torch.set_default_dtype(dtype)
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002


def construct(spec: OwnModelSpec, root: Path, *, load: bool = True) -> nn.Module:
    """Build the module as it comes, from the generators as they stand; `load` reads weights from disk."""
    if isinstance(spec, HfModelSpec):
        from fp8parity import hf_model

        return hf_model.build(spec, root, load=load)
    model = import_target(spec.target, root)(**spec.kwargs)
    if not isinstance(model, nn.Module):
        raise UsageError(f"target: {spec.target} returns a {type(model).__name__}, not an nn.Module")
    return model


def _check_parameters(model: nn.Module) -> None:
    parameters = dict(model.named_parameters())
    if not parameters:
        raise UsageError(f"{type(model).__name__} has no parameter, so there is nothing to train")
    for name, parameter in parameters.items():
        if parameter.dtype != torch.float32 or parameter.device.type != "cpu":
            dtype = str(parameter.dtype).removeprefix("torch.")
            raise UsageError(
                f"parameter {name} is {dtype} on {parameter.device}; build the model in float32 on the CPU, "
                "train.compute and train.device put it where it trains"
            )


def adapt(model: nn.Module) -> nn.Module:
    """Check the parameters, switch to training, and let the model return its logits; returns the same module.

    A hook and no wrapper: the names of the user's layers stay what they are.
    """
    _check_parameters(model)
    model.train()
    model.register_forward_hook(logits_of)
    return model


def build(spec: OwnModelSpec, seed: int, root: Path) -> nn.Module:
    """Build the model of a run: the seed alone decides its weights, in every arm and on every device.

    `root` is the recipe file's folder. Raises `UsageError` when sources, packages or weights are not those that the
    study was laid out with, and for a model that breaks a rule.
    """
    _check_same(spec, root)
    dtype = torch.get_default_dtype()
    with drawing_from(seed):
        model = adapt(construct(spec, root))
    _check_inventory(model, spec)
    return model.to(dtype) if dtype != torch.float32 else model


def _check_same(spec: OwnModelSpec, root: Path) -> None:
    if isinstance(spec, ImportModelSpec):
        check_unchanged(spec.target, root, spec.sources, spec.packages)
        return
    from fp8parity import hf_model

    digest = hf_model.weights_digest(hf_model.weight_files(spec, root))
    if digest != spec.weights_sha256:
        raise UsageError(f"weights: the files in {spec.weights} changed since the study was laid out")
    found = transformers_version()
    if found != spec.packages:
        raise UsageError(f"kind: hf: this study was laid out with {spec.packages}, here is {found}")


def _check_inventory(model: nn.Module, spec: OwnModelSpec) -> None:
    """Compare the linears with those that the plan was made of: building twice must give the same model."""
    have = {n: (m.in_features, m.out_features) for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    planned = {linear.fqn: (linear.k, linear.n) for linear in spec.found.linears}
    different = sorted(name for name in {*have, *planned} if have.get(name) != planned.get(name))
    if different:
        raise UsageError(
            f"{spec.label}: {', '.join(different[:3])} is not as it was when the study was laid out; the function must "
            "return the same model at every call"
        )


def plain_twin(model: nn.Module) -> nn.Module:
    """Return a copy whose linears are plain, and whose parameters and buffers are the very ones of `model`.

    It evaluates every arm in the same BF16 arithmetic; what the optimizer changes, it changes too.
    """
    shared: dict[int, Any] = {id(t): t for t in itertools.chain(model.parameters(), model.buffers())}
    twin = copy.deepcopy(model, shared)
    for name, module in list(twin.named_modules()):
        if isinstance(module, nn.Linear) and casts_of(module) is not None:
            owner, _, leaf = name.rpartition(".")
            setattr(twin.get_submodule(owner), leaf, _plain(module))
    return twin


def _plain(linear: nn.Linear) -> nn.Linear:
    with torch.device("meta"):
        plain = nn.Linear(linear.in_features, linear.out_features, bias=linear.bias is not None)
    plain._parameters.update(linear._parameters)
    return plain.train(linear.training)


def enable_checkpointing(model: nn.Module) -> None:
    """Let the blocks be recomputed, by the model's own method as transformers names it."""
    enable: Any = model.gradient_checkpointing_enable
    enable(gradient_checkpointing_kwargs={"use_reentrant": False})
