"""What is found out about a model or data of the user's before training, and what speaks against training them.

Planning imports no torch, so the model is built in a process of its own; its answer is kept under the digest of the
sources, arguments and versions that it depends on, so that a recipe file is planned at once the next time.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

from fp8parity import environment, hf_dataset
from fp8parity.errors import UsageError
from fp8parity.own_sources import FOR_USERS_CODE, sources_of, transformers_version
from fp8parity.own_spec import HfModelSpec, ImportDataSpec, ImportModelSpec, written_by_users
from fp8parity.quiet import QUIET_ENVIRONMENT
from fp8parity.spec import DataSpec, ModelSpec, OwnDataSpec, OwnModelSpec, RunSpec
from fp8parity_analysis.errors import BadInputError
from fp8parity_analysis.json_files import read_json, write_json

CACHE = "FP8PARITY_CACHE"
"""Environment variable that names the folder of answers; default: fp8parity in the user's cache folder."""

TIMEOUT_S = 900.0
"""Longest time that building a model and one forward pass may take."""

_ASKED = ("model_inventory.py", "own_model.py", "own_trace.py", "hf_model.py", "probe_signals.py")
"""Our own files that an answer depends on."""

Problem = tuple[tuple[str, str], str]


def cache_folder() -> Path:
    """Return where answers are kept."""
    named = os.environ.get(CACHE)
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fp8parity"


def resolve(spec: RunSpec, recipe_dir: Path) -> RunSpec:
    """Return the specification with everything found out about a model and data of the user's; others unchanged.

    Raises `UsageError` that begins with the key of the section that it is about, such as `model.target: `.
    """
    changes: dict[str, Any] = {}
    if not isinstance(spec.model, ModelSpec):
        changes["model"] = _resolved_model(spec.model, recipe_dir, spec.train.context)
    if not isinstance(spec.data, DataSpec):
        changes["data"] = _resolved_data(spec.data, recipe_dir)
    return spec.model_copy(update=changes) if changes else spec


def place_of(error: UsageError) -> tuple[tuple[str, str] | None, str]:
    """Return the section and key that an error of `resolve` is about, and its words without them."""
    place, _, words = str(error).partition(": ")
    section, _, key = place.partition(".")
    return (
        ((section, key), words) if section in ("model", "data") and key.isidentifier() else (None, str(error))
    )


def _for_users_only(spec: OwnModelSpec | OwnDataSpec, section: str) -> None:
    for key in type(spec).model_fields:
        if key in spec.model_fields_set and key not in written_by_users(type(spec)):
            raise UsageError(f"{section}.{key}: is found out by fp8parity; remove it")


def _resolved_model(spec: OwnModelSpec, recipe_dir: Path, context: int) -> OwnModelSpec:
    _for_users_only(spec, "model")
    key = "target" if isinstance(spec, ImportModelSpec) else "model_type"
    try:
        if isinstance(spec, ImportModelSpec):
            found = sources_of(spec.target, recipe_dir)
            spec = spec.model_copy(update={"sources": found.files, "packages": found.packages})
        else:
            spec = spec.model_copy(update={"packages": transformers_version()})
        values = _asked(spec, recipe_dir.resolve(), context)
        if "error" in values:
            raise UsageError(str(values["error"]))
    except UsageError as error:
        place, _, rest = str(error).partition(": ")
        named = place in type(spec).model_fields and bool(rest)
        raise UsageError(f"model.{place}: {rest}" if named else f"model.{key}: {error}") from error
    # the answer fills in what the record lacks; the record checks it
    return type(spec).model_validate({**spec.model_dump(), **values})


def _resolved_data(spec: OwnDataSpec, recipe_dir: Path) -> OwnDataSpec:
    _for_users_only(spec, "data")
    if isinstance(spec, ImportDataSpec):
        try:
            found = sources_of(spec.target, recipe_dir)
        except UsageError as error:
            raise UsageError(f"data.target: {error}") from error
        return spec.model_copy(update={"sources": found.files, "packages": found.packages})
    return spec.model_copy(update={"fingerprint": hf_dataset.fingerprint(spec, recipe_dir)})


def _outer_files(spec: OwnModelSpec, root: Path) -> list[tuple[str, ...]]:
    """Return the files that an hf model is read from: configurations by content, weights by place, size and time."""
    if not isinstance(spec, HfModelSpec):
        return []
    given = [root / part for part in (spec.config, spec.weights) if part is not None]
    files = [f for path in given for f in ([path] if path.is_file() else sorted(path.glob("*")))]
    return [_stated(f) for f in files if f.is_file()]


def _stated(file: Path) -> tuple[str, ...]:
    if file.suffix == ".json":
        return (file.name, hashlib.sha256(file.read_bytes()).hexdigest())
    stat = file.stat()
    return (str(file.resolve()), str(stat.st_size), str(stat.st_mtime_ns))


def _cache_key(spec: OwnModelSpec, root: Path, context: int) -> str:
    ours = Path(__file__).parent
    parts = {
        "model": spec.model_dump(mode="json"),
        "context": context,
        "files": _outer_files(spec, root),
        "packages": environment.package_versions(),
        "python": platform.python_version(),
        "asked": [hashlib.sha256((ours / name).read_bytes()).hexdigest() for name in _ASKED],
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


@lru_cache(maxsize=64)
def _asked(spec: OwnModelSpec, root: Path, context: int) -> dict[str, Any]:
    """Return the answer of `model_inventory` for a model, from the cache or from a new process.

    An answer that says what is wrong holds for this process, and is asked for again in the next.
    """
    stored = cache_folder() / "models" / f"{_cache_key(spec, root, context)}.json"
    if stored.exists():
        try:
            return dict(read_json(stored))
        except BadInputError:
            pass  # a damaged entry is asked for again and overwritten
    document = _ask({"model": spec.model_dump(mode="json"), "root": str(root), "context": context})
    if "error" in document:
        return document
    try:
        stored.parent.mkdir(parents=True, exist_ok=True)
        write_json(stored, document)
    except OSError:
        pass  # without a writable cache the next plan asks again
    return document


def _ask(request: dict[str, Any]) -> dict[str, Any]:
    # shapes need no GPU, and one thread is enough; the user's code may print what it likes
    environment_of = {
        **os.environ,
        **FOR_USERS_CODE,
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        **QUIET_ENVIRONMENT,
    }
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "answer.json"
        try:
            done = subprocess.run(
                [sys.executable, "-m", "fp8parity.model_inventory", str(result)],
                input=json.dumps(request),
                capture_output=True,
                text=True,
                env=environment_of,
                timeout=TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise UsageError(f"building the model took more than {TIMEOUT_S:.0f} s") from error
        if not result.exists():
            last = (done.stderr.strip().splitlines() or ["no output"])[-1]
            raise UsageError(f"building the model ended with exit code {done.returncode}: {last}")
        return dict(read_json(result))


# --- rules -------------------------------------------------------------------------------------------------------


def model_problems(spec: RunSpec) -> list[Problem]:
    """Return what a model of the user's cannot do that the run asks for, as ((section, key), message)."""
    if isinstance(spec.model, ModelSpec):
        return []
    model, train = spec.model.found, spec.train
    problems: list[Problem] = []
    no_blocks = "the model keeps its blocks in no nn.ModuleList"
    if train.compile == "blocks" and not model.blocks:
        problems.append((("train", "compile"), f"blocks, but {no_blocks}; write compile: off"))
    if spec.precision.unit == "block" and not model.blocks and not spec.precision.is_bf16:
        problems.append((("precision", "unit"), f"block, but {no_blocks}; write unit: gemm"))
    if train.activation_checkpointing and not model.can_checkpoint:
        text = (
            "the model has no method gradient_checkpointing_enable(gradient_checkpointing_kwargs) as transformers' "
            "have; write activation_checkpointing: false, or give it one"
        )
        problems.append((("train", "activation_checkpointing"), text))
    if train.compute == "bf16-true" and model.float_buffers:
        text = (
            f"bf16-true would round the model's buffers {', '.join(model.float_buffers[:3])} to bf16; "
            "write compute: bf16-mixed"
        )
        problems.append((("train", "compute"), text))
    return problems


def conversion_problems(spec: RunSpec, fp8: set[str]) -> list[Problem]:
    """Return which linears of a model of the user's cannot become FP8, each named."""
    if isinstance(spec.model, ModelSpec):
        return []
    problems: list[Problem] = []
    for linear in spec.model.found.linears:
        why = linear.refusal
        if not why and linear.bias and spec.precision.backend == "torchao_blockwise":
            why = "has a bias, which backend torchao_blockwise does not take"
        if linear.fqn in fp8 and why:
            text = f"{linear.fqn} {why}. Keep it in BF16: exclude: ['{linear.fqn}']"
            problems.append((("precision", "exclude"), text))
    return problems
