from __future__ import annotations

import json
import sys
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fp8parity import model_inventory
from fp8parity.errors import UsageError
from fp8parity.model_inventory import inspect
from fp8parity.own_model import adapt
from fp8parity.own_spec import Inventory, LinearFacts
from fp8parity.probe_signals import blocks_of

from . import own_models as m
from . import trace_models as t

CONTEXT = 8


def facts(model: nn.Module) -> Inventory:
    return inspect(adapt(model), CONTEXT)


def linear(found: Inventory, fqn: str) -> LinearFacts:
    return next(one for one in found.linears if one.fqn == fqn)


def test_linears_in_order_of_execution_with_groups_blocks_and_head() -> None:
    found = facts(m.Model(depth=2))
    names = [f"layers.{i}.{leaf}" for i in (0, 1) for leaf in ("a", "b", "down")]
    assert [one.fqn for one in found.linears] == ["enter", *names, "head"]
    assert [one.order for one in found.linears] == list(range(8))
    # a and b read the same tensor
    assert [one.group for one in found.linears] == [0, 1, 1, 2, 3, 3, 4, 5]
    assert [one.block for one in found.linears] == [None, 0, 0, 0, 1, 1, 1, None]
    assert [one.head for one in found.linears] == [False] * 7 + [True]
    assert (linear(found, "layers.0.a").k, linear(found, "layers.0.a").n) == (32, 64)
    assert linear(found, "enter").bias
    assert not linear(found, "head").bias
    assert (found.vocab_size, found.blocks, found.head) == (m.VOCAB, ("layers.0", "layers.1"), "head")
    assert found.parameters == sum(p.numel() for p in m.Model(depth=2).parameters())


def test_blocks_within_a_dict_of_named_parts() -> None:
    found = facts(m.Named())
    assert found.blocks == tuple(f"transformer.layers.{i}" for i in range(3))
    assert [one.block for one in found.linears] == [None, 0, 0, 0, 1, 1, 1, 2, 2, 2, None]
    # a list within a list is a part of a block
    nested = nn.ModuleList([nn.ModuleList([nn.Linear(2, 2)]), nn.Linear(2, 2)])
    assert list(blocks_of(nn.ModuleDict({"h": nested}))) == ["h.0", "h.1"]


def test_a_model_without_memory_has_the_same_inventory() -> None:
    with FakeTensorMode():
        fake = facts(m.Model())
    assert fake == facts(m.Model())


def test_tied_embedding_and_logits_in_an_object_are_handled() -> None:
    assert facts(m.tied()).head == "head"
    assert facts(m.Wrapped()).vocab_size == m.VOCAB


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (m.NoLogits, "NoLogits returns dict without logits; return a tensor"),
        (m.Flat, r"Flat returns \[16, 272\] for tokens \[2, 8\]"),
        (m.TwoNames, r"layers\.0\.down and layers\.1\.down are one and the same nn\.Linear"),
        (m.OneWeight, r"layers\.0\.down and layers\.1\.down share one weight"),
        (m.Twice, r"Twice: layers\.0\.a runs 2 times in one forward pass"),
        (m.Dropped, r"draws random numbers .*drop \(p=0\.1\)"),
        (m.Counting, "changes the buffers seen"),
        (
            t.Counted,
            r"Counted: its forward pass changes the attributes layers\.1\.calls; .*use local variables",
        ),
        (t.Evaluated, "changes the attributes seen"),
        (t.OwnGenerator, "changes the attributes generator"),
        (t.Remembering, "changes the attributes cache"),
        (t.LayerDrop, "draws random numbers from Python's random"),
        (t.Noisy, r"draws random numbers from numpy\.random"),
        (m.Plain, r"plain attributes \(layers\.1\.table\).*register_buffer\(\.\.\., persistent=False\)"),
        (m.NoLinear, r"NoLinear has no nn\.Linear"),
        (m.half, "parameter embed.weight is bfloat16 on cpu; build the model in float32"),
        (nn.Identity, "Identity has no parameter"),
    ],
)
def test_a_model_that_breaks_a_rule_is_refused_by_name(build: Any, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        facts(build())


def test_attributes_of_every_kind_are_allowed_while_they_stay_the_same() -> None:
    assert facts(t.Tagged()) == facts(m.Model())


def test_fused_attention_without_dropout_draws_nothing_and_with_it_does() -> None:
    q = torch.zeros(1, 2, 8, 16)
    for p, expected in ((0.0, {}), (0.5, True)):
        with model_inventory._Watch() as watch:
            torch.nn.functional.scaled_dot_product_attention(q, q, q, dropout_p=p)
        assert bool(watch.random) is bool(expected)


def test_a_linear_that_is_never_called_is_listed_and_says_so() -> None:
    found = facts(m.Idle())
    assert not linear(found, "attention.out_proj").runs
    assert found.linears[-1].fqn == "attention.out_proj"
    assert found.head == "head"
    assert any("attention.in_proj_weight" in note for note in found.notes)


def test_a_linear_of_a_class_of_its_own_cannot_be_converted() -> None:
    assert linear(facts(m.OwnLinear()), "layers.1.a").refusal.startswith("is a Own with its own forward")


def test_a_linear_with_hooks_cannot_be_converted() -> None:
    found = facts(m.hooked())
    refused = {one.fqn: one.refusal.split(", which")[0] for one in found.linears if one.refusal}
    assert refused == {
        "layers.1.down": "has a forward hook",
        "layers.2.a": "has a forward pre-hook and a backward hook",
    }


def test_a_parametrized_linear_cannot_be_converted() -> None:
    found = facts(m.weight_normed(parametrized=True))
    assert [one.fqn for one in found.linears if one.refusal.startswith("is parametrized")] == [
        f"layers.{i}.down" for i in range(3)
    ]


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
def test_a_weight_that_a_hook_makes_is_refused() -> None:
    reason = (
        r"the weight of layers\.0\.down, layers\.1\.down, .* is no parameter .*use torch\.nn\.utils\.parametr"
    )
    with pytest.raises(UsageError, match=reason):
        facts(m.weight_normed(parametrized=False))


def test_logits_without_a_linear_have_no_head() -> None:
    found = facts(m.Functional())
    assert found.head is None
    assert any("not made by an nn.Linear" in note for note in found.notes)


def test_a_model_that_needs_real_tensors_gets_them_and_its_host_reads_are_told(
    own_root: Any, own_request: Any
) -> None:
    document = model_inventory.respond(own_request("own_models:Reading"))
    found = Inventory.model_validate(document["inventory"])
    assert any("reads 1 values on the host" in note for note in found.notes)
    assert any("shapes were found with real tensors" in note for note in found.notes)
    assert found.model_copy(update={"notes": ()}) == facts(m.Model()).model_copy(update={"notes": ()})


def test_a_tensor_of_the_module_stays_a_real_one(own_root: Any, own_request: Any) -> None:
    document = model_inventory.respond(own_request("own_models:Scaled"))
    found = Inventory.model_validate(document["inventory"])
    assert found.model_copy(update={"notes": ()}) == facts(m.Model()).model_copy(update={"notes": ()})
    assert type(sys.modules["own_models"].SCALE) is torch.Tensor


@pytest.mark.parametrize(
    ("target", "error"),
    [
        ("own_models:failing", "RuntimeError: weights are on another machine"),
        ("own_models:no_module", "target: own_models:no_module returns a str, not an nn.Module"),
    ],
)
def test_what_fails_is_said(own_root: Any, own_request: Any, target: str, error: str) -> None:
    document = model_inventory.respond(own_request(target))
    assert error in document["error"]
    assert json.loads(json.dumps(document)) == document
