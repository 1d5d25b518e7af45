"""Causal language models of Hugging Face transformers, from a configuration or from weights on this machine's disk.

Nothing is downloaded: the hub is switched off before transformers is imported, and only local files are named. Only
this module imports transformers.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fp8parity.errors import UsageError
from fp8parity.own_spec import HfModelSpec
from fp8parity.problems import nearest

os.environ["HF_HUB_OFFLINE"] = os.environ["TRANSFORMERS_OFFLINE"] = "1"

if TYPE_CHECKING:
    from transformers import PretrainedConfig

ATTENTION = "sdpa"
"""transformers' name of torch's fused attention, the same in every arm."""

_NOT_NUMBERS = ("transformers_version", "_name_or_path", "architectures", "dtype", "id2label", "label2id")
"""Entries of a configuration that describe a file or a classifier, not a language model."""

WEIGHT_FILES = ("*.safetensors", "*.bin")


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise UsageError(
            f"kind: hf needs the package transformers ({error}); install fp8parity with the extra hf"
        ) from error
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


def _config_file(spec: HfModelSpec, root: Path) -> Path:
    given = root / str(spec.config or spec.weights)
    file = given / "config.json" if given.is_dir() else given
    if not file.is_file():
        raise UsageError(
            f"{file}: there is no such configuration; nothing is downloaded, so name a local folder"
        )
    return file


def _given_config(spec: HfModelSpec, root: Path) -> dict[str, Any]:
    if spec.model_type is not None:
        return {"model_type": spec.model_type}
    file = _config_file(spec, root)
    try:
        values: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UsageError(f"{file}: cannot be read as JSON ({error})") from error
    if "model_type" not in values:
        raise UsageError(f"{file}: names no model_type, so transformers cannot tell the architecture")
    if "auto_map" in values:
        raise UsageError(
            f"{file}: auto_map asks for code from outside transformers, which is never run; build such a model in a "
            "function of yours and write kind: import"
        )
    return values


def _check_type(model_type: str) -> None:
    from transformers.models.auto import modeling_auto

    known = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if model_type not in known:
        # the hundreds of names are no help; the nearest is
        hint = nearest(model_type, known).partition("known: ")[0]
        raise UsageError(
            f"model_type: transformers {_transformers().__version__} has no causal language model {model_type!r}; "
            f"{hint}write one such as gpt2 or llama"
        )


def _config(values: dict[str, Any]) -> PretrainedConfig:
    auto: Any = _transformers().AutoConfig
    config: PretrainedConfig = auto.for_model(**values)
    # the loop trains: no cache of keys and values, and an output that says what it holds
    config.use_cache = False
    config.return_dict = True
    return config


def _plain(config: PretrainedConfig) -> dict[str, Any]:
    values = {key: value for key, value in config.to_dict().items() if key not in _NOT_NUMBERS}
    same: dict[str, Any] = json.loads(json.dumps(values, sort_keys=True))
    return same


def resolve_config(spec: HfModelSpec, root: Path, context: int) -> dict[str, Any]:
    """Return the whole configuration as JSON values: the given one, the overrides, transformers' own defaults.

    Raises `UsageError` for an architecture or a key that transformers does not have, for dropout, and for fewer
    positions than `context`.
    """
    given = _given_config(spec, root)
    _check_type(str(given["model_type"]))
    default = _config({"model_type": given["model_type"]})
    known = {*default.to_dict(), *getattr(default, "attribute_map", {}), *given}
    for key in spec.overrides:
        if key not in known:
            raise UsageError(
                f"overrides: {key} is no value of the configuration of {given['model_type']}; "
                f"{nearest(key, sorted(known))}"
            )
    try:
        values = _plain(_config({**given, **spec.overrides}))
        again = _plain(_config(values))
    except Exception as error:  # each architecture checks its values with exceptions of its own
        raise UsageError(f"overrides: transformers refuses this configuration: {error}") from error
    if again != values:
        changed = sorted(key for key in {*again, *values} if again.get(key) != values.get(key))
        raise UsageError(f"config: {', '.join(changed)} of {given['model_type']} cannot be read back exactly")
    _check_dropout(values)
    positions = values.get("max_position_embeddings", values.get("n_positions"))
    if isinstance(positions, int) and positions < context:
        key = "max_position_embeddings" if "max_position_embeddings" in values else "n_positions"
        raise UsageError(
            f"overrides: {key} is {positions}, train.context is {context}; write overrides: {{{key}: {context}}}"
        )
    return values


def _check_dropout(config: dict[str, Any]) -> None:
    """Refuse dropout by its keys, so that the remedy can be pasted; `model_inventory` looks at what is executed."""
    on = [
        key
        for key, value in config.items()
        if ("drop" in key)
        and isinstance(value, int | float)
        and not isinstance(value, bool)
        and value > 0
        and "summary" not in key
        and "classifier" not in key
    ]
    if on:
        zero = ", ".join(f"{key}: 0.0" for key in on)
        raise UsageError(
            f"overrides: {', '.join(f'{key} is {config[key]}' for key in on)}: dropout makes a number depend on more "
            f"than seed and step; write overrides: {{{zero}}}"
        )


def weight_files(spec: HfModelSpec, root: Path) -> list[Path]:
    """Return the files of the weights folder, sorted; `UsageError` when it holds none."""
    if spec.weights is None:
        return []
    folder = root / spec.weights
    files = sorted(path for pattern in WEIGHT_FILES for path in folder.glob(pattern))
    if not files:
        raise UsageError(
            f"{folder}: holds no {' or '.join(WEIGHT_FILES)}; name a folder that save_pretrained wrote"
        )
    return files


def weights_digest(files: list[Path]) -> str | None:
    """Return one sha256 over the names and contents of the weight files, None without any."""
    if not files:
        return None
    digest = hashlib.sha256()
    for path in files:
        with path.open("rb") as handle:
            digest.update(path.name.encode() + hashlib.file_digest(handle, "sha256").digest())
    return digest.hexdigest()


def build(spec: HfModelSpec, root: Path, *, load: bool = True) -> nn.Module:
    """Build the model of a resolved specification on the CPU, its `Conv1D` turned into `nn.Linear`.

    Random weights come from torch's generator as it stands. `load` reads the weights, if there are any; without it
    the model has the right shapes only.
    """
    transformers = _transformers()
    config = _config(spec.resolved_config)
    auto: Any = transformers.AutoModelForCausalLM
    if spec.weights is not None and load:
        model = _loaded(auto, config, root / spec.weights)
    else:
        model = auto.from_config(config, attn_implementation=ATTENTION, dtype=torch.float32)
    convert_conv1d(model)
    built: nn.Module = model
    return built


def _loaded(auto: Any, config: PretrainedConfig, folder: Path) -> Any:
    try:
        model, info = auto.from_pretrained(
            folder,
            config=config,
            dtype=torch.float32,
            attn_implementation=ATTENTION,
            local_files_only=True,
            output_loading_info=True,
        )
    except (OSError, RuntimeError, ValueError) as error:
        raise UsageError(f"weights: {folder} cannot be loaded: {error}") from error
    missing = sorted({*info["missing_keys"], *map(str, info["mismatched_keys"])})
    if missing:
        raise UsageError(
            f"weights: {folder} lacks {', '.join(missing[:3])}{', ...' if len(missing) > 3 else ''}, which would be "
            "drawn at random; name weights of this configuration"
        )
    return model


def convert_conv1d(model: nn.Module) -> tuple[str, ...]:
    """Turn transformers' `Conv1D` (GPT-2), a linear with its weight transposed, into `nn.Linear`; returns their names.

    x @ W + b with W [in, out] is what `nn.Linear` computes with the weight W^T [out, in]: the same numbers are
    multiplied. Only then are they linears that a precision recipe can convert.
    """
    from transformers.pytorch_utils import Conv1D

    found = [(name, module) for name, module in model.named_modules() if type(module) is Conv1D]
    for name, conv in found:
        owner, _, leaf = name.rpartition(".")
        n_in, n_out = conv.weight.shape
        with torch.device("meta"):
            linear = nn.Linear(n_in, n_out)
        linear.weight = nn.Parameter(conv.weight.detach().t().contiguous())
        linear.bias = nn.Parameter(conv.bias.detach())
        linear.train(conv.training)
        setattr(model.get_submodule(owner), leaf, linear)
    return tuple(name for name, _ in found)
