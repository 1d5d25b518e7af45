from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers", reason="needs the extra hf")

from fp8parity import hf_model
from fp8parity.errors import UsageError
from fp8parity.model_inventory import inspect, respond
from fp8parity.own_model import adapt
from fp8parity.own_spec import HfModelSpec

GPT2: dict[str, Any] = {
    "vocab_size": 272, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 16,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
LLAMA: dict[str, Any] = {
    "vocab_size": 272, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1,
}  # fmt: skip
OVERRIDES = {"gpt2": GPT2, "llama": LLAMA}


def spec(model_type: str = "gpt2", **overrides: Any) -> HfModelSpec:
    values = {**OVERRIDES[model_type], **overrides}
    values = {key: value for key, value in values.items() if value is not None}
    return HfModelSpec.model_validate({"kind": "hf", "model_type": model_type, "overrides": values})


def built(model: HfModelSpec, root: Path = Path(), seed: int = 0) -> nn.Module:
    config = hf_model.resolve_config(model, root, 16)
    torch.manual_seed(seed)
    return adapt(hf_model.build(model.model_copy(update={"resolved_config": config}), root))


def test_conv1d_becomes_an_equal_linear() -> None:
    from transformers.pytorch_utils import Conv1D

    torch.manual_seed(0)
    holder = nn.ModuleDict({"conv": Conv1D(24, 16)})
    with torch.no_grad():
        holder["conv"].bias.normal_()
    before = holder["conv"]
    x = torch.randn(4, 16, dtype=torch.float64, requires_grad=True)
    expected = before.double()(x)
    gradient = torch.autograd.grad(expected.square().sum(), [x, before.weight])
    before.float()
    assert hf_model.convert_conv1d(holder) == ("conv",)
    linear = holder["conv"]
    assert type(linear) is nn.Linear
    assert torch.equal(linear.weight, before.weight.t())
    y = linear.double()(x)
    # the same products; only the order of the sums may differ, far below the 53 bits of a double
    torch.testing.assert_close(y, expected, rtol=1e-14, atol=1e-14)
    again = torch.autograd.grad(y.square().sum(), [x, linear.weight])
    torch.testing.assert_close(again[0], gradient[0], rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(again[1], gradient[1].t(), rtol=1e-13, atol=1e-13)


def test_gpt2_has_its_linears_in_order_and_a_tied_head() -> None:
    model = built(spec())
    found = inspect(model, 16)
    leaves = ["attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"]
    expected = [f"transformer.h.{i}.{leaf}" for i in (0, 1) for leaf in leaves]
    assert [one.fqn for one in found.linears] == [*expected, "lm_head"]
    assert (found.head, found.blocks) == ("lm_head", ("transformer.h.0", "transformer.h.1"))
    assert [one.block for one in found.linears] == [0] * 4 + [1] * 4 + [None]
    assert model.lm_head.weight is model.transformer.wte.weight
    assert (found.linears[0].k, found.linears[0].n) == (32, 96)


def test_llama_groups_what_reads_the_same_input() -> None:
    found = inspect(built(spec("llama")), 16)
    first = [(one.fqn.rpartition(".")[2], one.group) for one in found.linears if one.block == 0]
    assert first == [
        ("q_proj", 0), ("k_proj", 0), ("v_proj", 0), ("o_proj", 1), ("gate_proj", 2), ("up_proj", 2), ("down_proj", 3)
    ]  # fmt: skip
    assert "model.rotary_emb.inv_freq" in found.float_buffers


def test_the_configuration_is_whole_and_reads_back() -> None:
    config = hf_model.resolve_config(spec(), Path(), 16)
    assert (config["n_embd"], config["layer_norm_epsilon"], config["use_cache"]) == (32, 1e-5, False)
    assert json.loads(json.dumps(config)) == config
    assert not set(config) & set(hf_model._NOT_NUMBERS)


def test_a_folder_says_the_same_as_its_overrides(tmp_path: Path) -> None:
    from transformers import GPT2Config

    GPT2Config(**GPT2).save_pretrained(tmp_path / "small")
    given = HfModelSpec.model_validate({"kind": "hf", "config": "small"})
    assert hf_model.resolve_config(given, tmp_path, 16) == hf_model.resolve_config(spec(), tmp_path, 16)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (spec(n_layers=3), "overrides: n_layers is no value of the configuration of gpt2; did you mean 'n_layer'"),
        (spec(attn_pdrop=None), r"attn_pdrop is 0\.1: dropout .*write overrides: \{attn_pdrop: 0\.0\}"),
        (spec(n_positions=8), r"n_positions is 8, train\.context is 16; write overrides: \{n_positions: 16\}"),
        (HfModelSpec(kind="hf", model_type="gpt-2"), "has no causal language model 'gpt-2'; did you mean 'gpt2'"),
        (HfModelSpec(kind="hf", config="nowhere"), "there is no such configuration; nothing is downloaded"),
    ],
)  # fmt: skip
def test_a_configuration_that_breaks_a_rule_is_refused_by_name(model: HfModelSpec, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        hf_model.resolve_config(model, Path(), 16)


def test_code_from_elsewhere_is_never_run(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"model_type": "gpt2", "auto_map": {"AutoModelForCausalLM": "x.Y"}}'
    )
    with pytest.raises(UsageError, match="auto_map asks for code from outside transformers"):
        hf_model.resolve_config(HfModelSpec(kind="hf", config="config.json"), tmp_path, 16)


def test_weights_from_a_folder_are_those_that_were_saved(tmp_path: Path) -> None:
    import transformers

    torch.manual_seed(3)
    saved = transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2))
    saved.save_pretrained(tmp_path / "weights")
    given = HfModelSpec.model_validate({"kind": "hf", "weights": "weights"})
    model = built(given, tmp_path)
    assert torch.equal(model.transformer.h[1].mlp.c_fc.weight, saved.transformer.h[1].mlp.c_fc.weight.t())
    answer = respond({"model": given.model_dump(mode="json"), "root": str(tmp_path), "context": 16})
    assert answer["weights_sha256"] == hf_model.weights_digest(hf_model.weight_files(given, tmp_path))
    assert answer["inventory"]["vocab_size"] == 272


def test_weights_that_lack_a_layer_are_refused(tmp_path: Path) -> None:
    import transformers

    saved = transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2))
    state = {k: v for k, v in saved.state_dict().items() if "h.1.mlp" not in k}
    saved.save_pretrained(tmp_path, state_dict=state)
    given = HfModelSpec.model_validate({"kind": "hf", "weights": "."})
    with pytest.raises(UsageError, match=r"lacks transformer\.h\.1\.mlp.*which would be drawn at random"):
        built(given, tmp_path)


def test_a_folder_without_weights_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"holds no \*\.safetensors or \*\.bin"):
        hf_model.weight_files(HfModelSpec(kind="hf", weights="."), tmp_path)
