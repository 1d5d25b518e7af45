from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fp8parity import own_model, precision
from fp8parity.errors import UsageError
from fp8parity.layer_policy import resolve
from fp8parity.model import parameters_digest
from fp8parity.model_inventory import inspect, respond
from fp8parity.own_model import adapt, logits_of, plain_twin
from fp8parity.own_sources import sources_of
from fp8parity.own_spec import ImportModelSpec
from fp8parity.shapes import linear_shapes
from fp8parity.spec import PrecisionSpec

from . import own_models as m


def resolved(root: Path, target: str = "own_models:build", **kwargs: Any) -> ImportModelSpec:
    spec = ImportModelSpec(kind="import", target=target, kwargs=kwargs)
    found = sources_of(target, root)
    answer = respond({"model": spec.model_dump(mode="json"), "root": str(root), "context": 8})
    return ImportModelSpec.model_validate(
        {**spec.model_dump(), "sources": found.files, "packages": found.packages, **answer}
    )


def test_the_seed_alone_decides_the_weights_and_nothing_global_is_changed(own_root: Path) -> None:
    spec = resolved(own_root)
    torch.manual_seed(5)
    states = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()  # type: ignore[index]  # noqa: NPY002
    first = parameters_digest(own_model.build(spec, 0, own_root))
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1:] == (np.random.get_state()[1].tolist(), random.getstate())  # type: ignore[index]  # noqa: NPY002
    torch.manual_seed(6)
    assert parameters_digest(own_model.build(spec, 0, own_root)) == first
    assert parameters_digest(own_model.build(spec, 1, own_root)) != first


def test_bf16_true_rounds_the_weights_that_fp32_has(own_root: Path) -> None:
    spec = resolved(own_root)
    whole = own_model.build(spec, 0, own_root)
    torch.set_default_dtype(torch.bfloat16)
    try:
        rounded = own_model.build(spec, 0, own_root)
    finally:
        torch.set_default_dtype(torch.float32)
    for a, b in zip(whole.parameters(), rounded.parameters(), strict=True):
        assert torch.equal(a.bfloat16(), b)


def test_a_changed_source_or_another_model_at_the_second_call_is_refused(own_root: Path) -> None:
    spec = resolved(own_root)
    other = spec.model_copy(update={"inventory": resolved(own_root, depth=2).inventory})
    with pytest.raises(UsageError, match=r"layers\.2\.a, .* is not as it was"):
        own_model.build(other, 0, own_root)
    (own_root / "own_models.py").write_text("# changed\n")
    with pytest.raises(UsageError, match="own_models changed since the study was laid out"):
        own_model.build(spec, 0, own_root)


@pytest.mark.parametrize("backend", ["torchao_float8", "reference"])
def test_the_twin_is_plain_and_shares_every_parameter_and_buffer(backend: str) -> None:
    torch.manual_seed(0)
    model = adapt(m.Buffered())
    control = plain_twin(model)
    spec = PrecisionSpec.model_validate({"recipe": "rowwise", "backend": backend})
    own = ImportModelSpec(kind="import", target="a:b", inventory=inspect(model, 8))
    precision.apply(model, resolve(linear_shapes(own, m.VOCAB), spec), spec)
    twin = plain_twin(model)
    assert {type(x) for x in twin.modules() if isinstance(x, nn.Linear)} == {nn.Linear}
    shared = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, tensor in (*twin.named_parameters(), *twin.named_buffers()):
        assert tensor is shared[name]
    tokens = torch.randint(0, m.VOCAB, (2, 8))
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        assert torch.equal(twin(tokens), control(tokens))
        assert not torch.equal(model(tokens), twin(tokens))


def test_compiled_blocks_and_hooks_of_the_twin_are_its_own() -> None:
    model = adapt(m.Wrapped())
    for layer in model.layers:
        layer.compile()
    twin = plain_twin(model)
    assert all(layer._compiled_call_impl is None for layer in twin.layers)
    assert twin(torch.zeros(1, 4, dtype=torch.int64)).shape == (1, 4, m.VOCAB)


def test_logits_are_checked_at_every_call() -> None:
    tokens = torch.zeros(2, 4, dtype=torch.int64)
    good = torch.zeros(2, 4, 7)
    assert logits_of(nn.Identity(), (tokens,), good) is good
    with pytest.raises(UsageError, match=r"Identity returns \[2, 3, 7\] for tokens \[2, 4\]"):
        logits_of(nn.Identity(), (tokens,), good[:, :3])
