"""Forks: runs that start from a BF16 checkpoint of another run. Finds the parent and says why it cannot be one.

A parent keeps named checkpoints (`runtime.keep_checkpoints`) in `kept_checkpoints/`, each with a JSON document beside
it that says which state it is (`KEPT_KEYS`). Everything here reads documents and file digests only. Imports no torch.
"""

from __future__ import annotations

import glob
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fp8parity.errors import UsageError
from fp8parity.own_spec import kind_of
from fp8parity.precision_rules import Problem
from fp8parity.spec import DECODER, DataSpec, ParentState, RunSpec
from fp8parity_analysis import schema
from fp8parity_analysis.errors import BadInputError
from fp8parity_analysis.json_files import read_json

KEPT_KEYS = ("step", "bytes", "file_sha256", *ParentState.model_fields)
"""Keys of the document beside a kept checkpoint: what the fork's hash takes, and what the file must be."""

_FREE_MODEL = (
    *("preset", "init_std", "sources", "packages", "inventory"),
    *("config", "model_type", "overrides", "weights", "weights_sha256"),
)
"""Model settings that say nothing about the shape: a name, how weights were drawn or read that come from the parent
here, where a configuration was found (`resolved_config` is compared), and what was found out about a model of the
user's, whose parameters the worker compares with the parent's one by one."""

_SHARED_TRAIN = ("batch_size", "context", "compute")
"""Batch and context fix what a position in the data means, compute what the weights are stored in."""


SHOWN_STARTS = 4
"""How many parents a plan spells out."""


class _NoParentError(Exception):
    """Carries the setting to blame and the sentence."""

    def __init__(self, key: str, text: str) -> None:
        super().__init__(text)
        self.key = key


def kept_file(run_dir: Path, step: int) -> Path:
    """Return where a run keeps its checkpoint of `step`."""
    return run_dir / schema.KEPT_DIR / f"step-{step:09d}.ckpt"


def side_file(checkpoint: Path) -> Path:
    """Return the document beside a kept checkpoint."""
    return checkpoint.with_suffix(".json")


def kept_steps(run_dir: Path) -> list[int]:
    """Return the steps whose checkpoint a run has kept, in order."""
    found = (run_dir / schema.KEPT_DIR).glob("step-*.json")
    return sorted(
        int(path.stem.removeprefix("step-")) for path in found if path.with_suffix(".ckpt").exists()
    )


def warmup_left(spec: RunSpec) -> int:
    """Return the warm-up steps of the run's own: those that a continued schedule has behind it do not count."""
    return max(0, spec.optim.warmup_steps - spec.schedule_before)


class Parents:
    """The parents of one recipe file's forks; every document and file is read once."""

    def __init__(self, recipe_dir: Path) -> None:
        self.recipe_dir = recipe_dir
        self._documents: dict[Path, tuple[dict[str, Any], RunSpec]] = {}
        self._digests: dict[Path, str] = {}

    def problems(self, spec: RunSpec, seed: int, data_sha256: str | None) -> Iterator[Problem]:
        """Yield why `spec`, under `seed`, cannot start where it says, as ((section, key), message).

        `data_sha256` is the digest of the token file, None where it is packed later (`require_same_data` then decides).
        """
        if spec.fork_from is None:
            return
        try:
            run_dir = self._run_dir(spec, seed)
            parent = self._parent(run_dir)
            _require_bf16(spec, run_dir, parent)
            _require_seed(spec, run_dir, parent, seed)
            state = self._state(spec, run_dir, parent)
            self._require_intact(kept_file(run_dir, spec.fork_from.step))
        except _NoParentError as error:
            yield ("fork_from", error.key), str(error)
            return
        yield from _setting_problems(spec, parent)
        if data_sha256 is not None and data_sha256 != state.data_sha256:
            yield ("data", "path"), data_problem(state, data_sha256)
        elif data_sha256 is None and isinstance(spec.data, DataSpec) and spec.data != parent.data:
            text = (
                f"data: is {_told(spec.data)}, but the parent {state.run_id} was trained on {_told(parent.data)}; a "
                "fork goes on in its parent's data: write the parent's data section"
            )
            yield ("data", "source"), text

    def with_parent(self, spec: RunSpec, seed: int) -> RunSpec:
        """Return `spec` under `seed`, with its parent's state when it is a fork; call `problems` before."""
        if spec.fork_from is None:
            return spec.model_copy(update={"seed": seed})
        run_dir = self._run_dir(spec, seed)
        return spec.model_copy(
            update={"seed": seed, "parent": self._state(spec, run_dir, self._parent(run_dir))}
        )

    def checkpoint_of(self, spec: RunSpec) -> Path | None:
        """Return the checkpoint that a run starts from, None unless it is a fork."""
        if spec.fork_from is None:
            return None
        return kept_file(self._run_dir(spec, spec.seed), spec.fork_from.step)

    def _run_dir(self, spec: RunSpec, seed: int) -> Path:
        assert spec.fork_from is not None
        text = spec.fork_from.run.replace("{seed}", str(seed))
        path = self.recipe_dir / text
        if glob.has_magic(text):
            return _matched(path)
        if (path / schema.SPEC_FILE).exists():
            return path
        if (path / schema.STUDY_FILE).exists():
            raise _NoParentError(
                "run",
                f"{path} is a study directory, not a run; write {text}/{schema.RUNS_DIR}/NAME, or the pattern "
                f"{text}/{schema.RUNS_DIR}/*-s{{seed}}-bf16-* for one control run per seed",
            )
        what = f"holds no {schema.SPEC_FILE}" if path.is_dir() else "does not exist"
        raise _NoParentError(
            "run",
            f"{path} {what}; name the directory of a BF16 run (OUT/{schema.RUNS_DIR}/NAME), relative to the recipe "
            "file",
        )

    def _parent(self, run_dir: Path) -> RunSpec:
        if run_dir not in self._documents:
            document = _read(run_dir / schema.SPEC_FILE)
            try:
                spec = RunSpec.model_validate(document.get("spec"))
            except ValidationError as error:
                first = error.errors()[0]
                where = ".".join(map(str, ("spec", *first["loc"])))
                raise _NoParentError(
                    "run",
                    f"{run_dir / schema.SPEC_FILE}: {where}: {first['msg']}; a parent is a run of this program's own, "
                    "of a version whose settings this one knows",
                ) from error
            self._documents[run_dir] = (document, spec)
        return self._documents[run_dir][1]

    def _state(self, spec: RunSpec, run_dir: Path, parent: RunSpec) -> ParentState:
        assert spec.fork_from is not None
        step = spec.fork_from.step
        checkpoint = kept_file(run_dir, step)
        if not checkpoint.exists() or not side_file(checkpoint).exists():
            raise _NoParentError("step", _no_checkpoint(run_dir, parent, step))
        document = _read(side_file(checkpoint))
        missing = [key for key in KEPT_KEYS if key not in document]
        if missing or document["step"] != step or document["spec_hash"] != parent.hash():
            raise _NoParentError(
                "run",
                f"{side_file(checkpoint)} is not the document of step {step} of {run_dir.name}"
                + (f" (it lacks {', '.join(missing)})" if missing else " (it belongs to another run or step)")
                + "; train the parent again, do not copy files into it",
            )
        try:
            return ParentState.model_validate({key: document[key] for key in ParentState.model_fields})
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise _NoParentError(
                "run", f"{side_file(checkpoint)}: {where}: {first['msg']}; train the parent again"
            ) from error

    def _require_intact(self, checkpoint: Path) -> None:
        document = _read(side_file(checkpoint))
        if checkpoint.stat().st_size == document["bytes"]:
            if checkpoint not in self._digests:
                with checkpoint.open("rb") as handle:
                    self._digests[checkpoint] = hashlib.file_digest(handle, "sha256").hexdigest()
            if self._digests[checkpoint] == document["file_sha256"]:
                return
        raise _NoParentError(
            "step",
            f"{checkpoint} is damaged: it is not the file that was kept ({side_file(checkpoint).name} has its size and "
            "digest); take another kept step, or train the parent again",
        )


def data_problem(state: ParentState, data_sha256: str) -> str:
    """Return the sentence about a fork whose tokens are not its parent's."""
    return (
        f"the token file's sha256 is {data_sha256[:16]}..., but the parent {state.run_id} was trained on "
        f"{state.data_sha256[:16]}...; a fork goes on in its parent's data: name the parent's token file"
    )


def fork_words(specs: Sequence[RunSpec]) -> list[str]:
    """Return what a plan says of its forks: where they start, and what their seeds vary; empty without one."""
    steps: dict[str, set[int]] = {}
    seeds: dict[str, set[int]] = {}
    for spec in specs:
        if spec.fork_from is not None and spec.parent is not None:
            steps.setdefault(spec.parent.run_id, set()).add(spec.fork_from.step)
            seeds.setdefault(spec.parent.run_id, set()).add(spec.seed)
    if not steps:
        return []
    told = [f"{run_id} at step {_listed(steps[run_id])} (seed {_listed(seeds[run_id])})" for run_id in steps]
    more = f"; and {len(told) - SHOWN_STARTS} more" if len(told) > SHOWN_STARTS else ""
    lines = [
        f"Forked from {'; '.join(told[:SHOWN_STARTS])}{more}. Steps and tokens here count from the fork."
    ]
    if any(len(found) > 1 for found in seeds.values()):
        lines.append(
            "Seeds that share a parent differ in the order of data after the fork only: their verdict is about that "
            "parent. With {seed} in fork_from.run each seed has a parent of its own."
        )
    return lines


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(numbers)))


def require_same_data(spec: RunSpec, data_sha256: str) -> None:
    """Raise `UsageError` when a fork's tokens are not its parent's."""
    if spec.parent is not None and spec.parent.data_sha256 != data_sha256:
        raise UsageError(f"data: {data_problem(spec.parent, data_sha256)}")


def _read(path: Path) -> dict[str, Any]:
    try:
        return read_json(path)
    except BadInputError as error:
        raise _NoParentError("run", f"{error}; train the parent again") from error


def _matched(pattern: Path) -> Path:
    """Return the one control run that a pattern matches: replicas of it and FP8 runs are no candidates."""
    found = [Path(path) for path in sorted(glob.glob(str(pattern)))]
    runs = [path for path in found if (path / schema.SPEC_FILE).exists()]
    controls = [path for path in runs if _read(path / schema.SPEC_FILE).get("role") == "control"]
    if len(controls) == 1:
        return controls[0]
    if not controls:
        raise _NoParentError(
            "run",
            f"{pattern} matches no BF16 control run ({len(found)} paths, {len(runs)} runs); name one, relative to the "
            "recipe file",
        )
    shown = ", ".join(path.name for path in controls[:3]) + (", ..." if len(controls) > 3 else "")
    raise _NoParentError(
        "run",
        f"{pattern} matches {len(controls)} control runs ({shown}); write more of the name, or {{seed}} "
        "where the seed stands",
    )


def _require_bf16(spec: RunSpec, run_dir: Path, parent: RunSpec) -> None:
    if not parent.precision.is_bf16:
        raise _NoParentError(
            "run",
            f"{run_dir.name} is an FP8 run ({parent.precision.recipe}), so both arms would start from a state that FP8 "
            "has made; name the BF16 control of its seed",
        )


def _require_seed(spec: RunSpec, run_dir: Path, parent: RunSpec, seed: int) -> None:
    assert spec.fork_from is not None
    if "{seed}" in spec.fork_from.run and parent.seed != seed:
        raise _NoParentError(
            "run",
            f"{spec.fork_from.run} gives {run_dir.name} for seed {seed}, but that run has seed {parent.seed}; write "
            "the pattern so that {seed} stands where the run's own seed does (such as *-s{seed}-bf16-*)",
        )


def _no_checkpoint(run_dir: Path, parent: RunSpec, step: int) -> str:
    if step > parent.train.steps:
        return f"{step} is beyond the {parent.train.steps} steps of {run_dir.name}; take an earlier step"
    kept = kept_steps(run_dir)
    has = f"it kept {', '.join(map(str, kept))}" if kept else "it kept none"
    return (
        f"{run_dir.name} has no kept checkpoint of step {step} ({has}); take a kept step, or add it to "
        "runtime.keep_checkpoints of the parent's recipe file and train the parent (again, if it is past that step: "
        "delete its run directory first)"
    )


def _setting_problems(spec: RunSpec, parent: RunSpec) -> Iterator[Problem]:
    """Yield every setting in which a fork must be what its parent is and is not."""
    if type(spec.model) is not type(parent.model):
        ours, theirs = (kind_of(model, DECODER) for model in (spec.model, parent.model))
        text = f"model.kind: {ours}, but the parent's model is of kind {theirs}; a fork goes on with its parent's model"
        yield ("model", "kind"), text
        return
    for section, keys in (
        ("model", [key for key in type(spec.model).model_fields if key not in _FREE_MODEL]),
        ("train", list(_SHARED_TRAIN)),
    ):
        for key in keys:
            ours, theirs = getattr(getattr(spec, section), key), getattr(getattr(parent, section), key)
            if ours != theirs:
                text = (
                    f"{section}.{key}: {ours}, but the parent was trained with {theirs}; a fork goes on with its "
                    f"parent's weights and batches: write {key}: {theirs}"
                )
                yield (section, key), text


def _told(section: Any) -> str:
    values: Mapping[str, Any] = section.model_dump(mode="json", exclude_defaults=True)
    return ", ".join(f"{key}: {value}" for key, value in values.items()) or f"source: {section.source}"
