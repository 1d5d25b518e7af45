from __future__ import annotations

import hashlib
import math

import pytest
import torch
from torch import nn

from fp8parity.model import DecoderLM, initialise, parameters_digest, rope_table, rotate, sharing_twin
from fp8parity.spec import ModelSpec

SPEC = ModelSpec.model_validate({"dim": 32, "n_layers": 3, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 48})


def built(seed: int = 0, **changes: object) -> DecoderLM:
    model = DecoderLM(SPEC.model_copy(update=changes), 64)
    initialise(model, seed)
    return model


def test_causal() -> None:
    model = built()
    tokens = torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(1))
    changed = tokens.clone()
    changed[:, 8:] = (changed[:, 8:] + 1) % 64
    with torch.no_grad():
        a, b = model(tokens), model(changed)
    torch.testing.assert_close(a[:, :8], b[:, :8], rtol=0, atol=0)
    assert (a[:, 8:] != b[:, 8:]).any()


def test_seed_decides_the_weights() -> None:
    assert parameters_digest(built(3)) == parameters_digest(built(3))
    assert parameters_digest(built(3)) != parameters_digest(built(4))


def test_the_digest_is_of_names_shapes_and_bytes() -> None:
    model = nn.Module()
    parts = {
        "scale": torch.tensor(2.0),
        "low": torch.arange(6.0).view(2, 3).bfloat16(),
        "none": torch.empty(0),
    }
    expected = hashlib.sha256()
    for name, value in parts.items():
        model.register_parameter(name, nn.Parameter(value))
        expected.update(f"{name}{tuple(value.shape)}{value.dtype}".encode())
        width = {4: torch.int32, 2: torch.int16}[value.element_size()]
        numbers = [int(number) for number in value.view(width).flatten()]
        expected.update(b"".join(n.to_bytes(value.element_size(), "little", signed=True) for n in numbers))
    assert parameters_digest(model) == expected.hexdigest()


def test_initial_scale() -> None:
    model = DecoderLM(ModelSpec.model_validate({"preset": "0.7m"}), 272)
    initialise(model, 0)
    residual = 0.02 / math.sqrt(2 * 4)
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2:
            assert (parameter == 1).all()
            continue
        wanted = residual if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.02
        # relative standard error of a sample sd is 1 / sqrt(2 n); 6 of them fail once in 1e9
        assert parameter.std().item() == pytest.approx(wanted, rel=6 / math.sqrt(2 * parameter.numel()))


def test_rotation_keeps_norms_and_depends_on_distance_only() -> None:
    cos, sin = rope_table(16, 8, 10_000.0, torch.device("cpu"))
    q, k = torch.randn(1, 1, 1, 8), torch.randn(1, 1, 1, 8)
    rotated_q, rotated_k = (rotate(t.expand(1, 1, 16, 8), cos, sin) for t in (q, k))
    torch.testing.assert_close(rotated_q.norm(dim=-1), q.norm(dim=-1).expand(1, 1, 16))
    products = rotated_q[0, 0] @ rotated_k[0, 0].T
    torch.testing.assert_close(products[3, 1], products[10, 8])


@pytest.mark.parametrize("fused", [False, True])
def test_checkpointing_changes_no_gradient(fused: bool) -> None:
    model = built(fused_qkv=fused, fused_gate_up=fused)
    tokens = torch.randint(0, 64, (2, 12))
    gradients = []
    for recompute in (False, True):
        model.activation_checkpointing = recompute
        model.zero_grad()
        model(tokens).square().mean().backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize("tied", [False, True])
def test_twin_is_the_same_function_of_the_same_parameters(tied: bool) -> None:
    model = built(tied_head=tied)
    twin = sharing_twin(model)
    assert [id(p) for p in twin.parameters()] == [id(p) for p in model.parameters()]
    tokens = torch.randint(0, 64, (1, 8))
    with torch.no_grad():
        assert torch.equal(twin(tokens), model(tokens))
        model.embed.weight.add_(0.1)
        assert torch.equal(twin(tokens), model(tokens))


def test_tied_head_shares_the_embedding() -> None:
    model = built(tied_head=True)
    assert model.head.weight is model.embed.weight
