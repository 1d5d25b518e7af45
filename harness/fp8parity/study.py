"""A study directory: the matrix laid out on disk before anything trains. Imports no torch."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fp8parity import environment, own_data
from fp8parity.corpus import corpus_problems
from fp8parity.devices import visible_gpus
from fp8parity.errors import UsageError
from fp8parity.fork import require_same_data, warmup_left
from fp8parity.ledger import STOPPED_EARLY
from fp8parity.matrix import Matrix, PlannedRun, resolve_data_path
from fp8parity.process import LOCK_FILE, start_ticks
from fp8parity.spec import DataSpec
from fp8parity.study_changes import seeds_too_low, what_changed
from fp8parity.token_meta import TokenMeta, read_meta, side_file
from fp8parity.version_gates import version_problems
from fp8parity_analysis import schema
from fp8parity_analysis.criteria import Criteria
from fp8parity_analysis.errors import BadInputError
from fp8parity_analysis.json_files import read_json, write_json

CHECKPOINT_SHARE = 0.01
"""Of a run's time, the most that checkpoints of the default cadence may take: a short run costs little to train again,
a second per checkpoint is a tenth of a one-minute run. A cadence that a recipe file names is kept to."""

_HALF_A_STUDY = re.compile(re.escape(schema.STUDY_FILE) + r"\.\d+\.tmp")
"""How the study file is named while it is written (`json_files.write_json`)."""

_OUR_DATA = re.compile(r"(\d+-)?(own|python-sources)-")
"""How the names of packed token files begin, with a process id while they are written."""


def criteria_of(matrix: Matrix) -> Criteria:
    """Return the recipe file's criteria as the analysis takes them; the warm-up is burn-in for the trajectory."""
    warmup = max(warmup_left(run.spec) for run in matrix.runs)
    return Criteria(**matrix.criteria.model_dump(), burn_in_step=warmup, trend=_kept_axis(matrix))


def _kept_axis(matrix: Matrix) -> tuple[tuple[str, float], ...]:
    """Return (arm, N) in order when the arms are one recipe with three or more N kept in BF16 at both ends."""
    tests = {run.arm: run.spec.precision for run in matrix.runs if run.role == "test"}
    kept = {arm: p.keep_first for arm, p in tests.items() if p.keep_first == p.keep_last}
    one_question = (
        len({run.group for run in matrix.runs}) == 1 and len({p.recipe for p in tests.values()}) == 1
    )
    if not one_question or len(kept) < len(tests) or len(set(kept.values())) < 3:
        return ()
    return tuple((arm, float(n)) for arm, n in sorted(kept.items(), key=lambda item: item[1]))


def launch_digest(criteria: Criteria) -> str:
    """Return the digest that tells *post hoc* criteria; trend and burn-in follow from the arms, nobody chooses them."""
    return replace(criteria, trend=(), burn_in_step=0).digest()


def is_post_hoc(criteria: Criteria, at_launch: str) -> bool:
    """Whether `criteria` differ from those whose digest was written at launch.

    The burn-in follows from the arms' warm-up, as the trend does: an arm that is added later may lengthen it. The
    second form is what launches wrote before that.
    """
    return at_launch not in (launch_digest(criteria), replace(criteria, trend=()).digest())


def criteria_from_json(document: Mapping[str, Any]) -> Criteria:
    """Rebuild criteria that `Criteria.to_json` wrote; `BadInputError` when something else did."""
    try:
        values = dict(document)
        values["looks"] = tuple(values.get("looks", ()))
        values["trend"] = tuple((str(name), float(value)) for name, value in values.get("trend", ()))
        return Criteria(**values)
    except (TypeError, ValueError) as error:
        raise BadInputError(f"{schema.STUDY_FILE}: criteria cannot be read ({error})") from error


def _python_sources_file(spec: DataSpec) -> str:
    text = json.dumps(spec.model_dump(mode="json"), sort_keys=True)
    return f"python-sources-{hashlib.sha256(text.encode()).hexdigest()[:8]}.bin"


def _is_packed(path: Path) -> bool:
    """Whether a token file of our own is whole: one whose side file a kill or a power cut took is packed again."""
    try:
        read_meta(path)
    except UsageError:
        return False
    return True


def _token_file(out: Path, run: PlannedRun, recipe_dir: Path) -> Path:
    """Return the run's token file, packing the interpreter's sources once per study."""
    data = run.spec.data
    if not isinstance(data, DataSpec):
        return own_data.token_file(data, recipe_dir, out / schema.DATA_DIR)
    if data.source == "bin":
        return resolve_data_path(run.spec, recipe_dir)
    path = out / schema.DATA_DIR / _python_sources_file(data)
    if not _is_packed(path):
        from fp8parity.data import pack_python_sources

        pack_python_sources(path, data)
    return path


def _check_corpus(run: PlannedRun, path: Path, meta: TokenMeta) -> None:
    """Fail before the first process starts when the corpus is too short; runner.py checks again with the tokens.

    `matrix.expand` has checked a token file of the user's; others are packed only now.
    """
    require_same_data(run.spec, meta.sha256)
    if run.parent_checkpoint is not None:
        require_same_split(run.parent_checkpoint, meta)
    for (section, key), message in corpus_problems(run.spec, meta, path):
        raise UsageError(f"{section}.{key}: {message}")


def require_same_split(parent_checkpoint: Path, meta: TokenMeta) -> None:
    """Raise `UsageError` when a fork's tokens are read or split in another way than its parent's were, if known."""
    run_dir = parent_checkpoint.parent.parent
    other = meta.unlike(read_json(run_dir / schema.SPEC_FILE).get(schema.DATA_SPLIT))
    if other:
        raise UsageError(
            f"data: {other} when the parent {run_dir.name} was trained; a fork goes on in its parent's data: put its "
            "side file back"
        )


def _check_same_tokens(run: PlannedRun, out: Path, path: Path, meta: TokenMeta) -> None:
    """Fail before the first process starts when the run was trained, or half trained, on other tokens."""
    begun = _begun_with(out / schema.RUNS_DIR / run.run_id)
    trained, other_split = begun.get("data_sha256"), meta.unlike(begun.get(schema.DATA_SPLIT))
    if trained == meta.sha256 and other_split:
        raise UsageError(
            f"{side_file(path)}: {other_split} when {run.run_id} of this study was trained; put that file back, or use "
            " another --out directory"
        )
    if trained not in (None, meta.sha256):
        raise UsageError(
            f"{path}: its sha256 is {meta.sha256[:16]}..., but {run.run_id} of this study was trained on "
            f"{str(trained)[:16]}...; put that file back, or use another --out directory"
        )


def _begun_with(run_dir: Path) -> dict[str, Any]:
    """Return the document that says which tokens a run has begun with; empty when it has not begun."""
    manifest, stream = run_dir / schema.MANIFEST_FILE, run_dir / schema.CURVE_STREAM
    if manifest.exists():
        return read_json(manifest)
    if stream.exists() and stream.stat().st_size > 0:
        return read_json(run_dir / schema.SPEC_FILE)
    return {}


def _is_left_by_us(entry: Path) -> bool:
    """Whether `entry` is what a first run leaves that ended before the study file was there: it may be run again."""
    if entry.name == schema.DATA_DIR and entry.is_dir():
        return all(_OUR_DATA.match(path.name) for path in entry.iterdir())
    return entry.name == LOCK_FILE or bool(_HALF_A_STUDY.fullmatch(entry.name))


def _check_same_study(matrix: Matrix, out: Path) -> dict[str, Any] | None:
    """Return the study already in `out`, or raise `UsageError` when it is another one."""
    path = out / schema.STUDY_FILE
    if not path.exists():
        if out.exists() and not all(_is_left_by_us(entry) for entry in out.iterdir()):
            raise UsageError(f"{out}: is not empty and holds no fp8parity study; use another --out directory")
        return None
    study = read_json(path)
    unknown = sorted(set(study.get("runs", ())) - {run.run_id for run in matrix.runs})
    if study.get("name") != matrix.name and not unknown:
        raise UsageError(
            f"{out}: holds study {study.get('name')!r} with the same runs, and {matrix.recipe_path} is called "
            f"{matrix.name!r} (name defaults to the file's name); write name: {study.get('name')} in it to continue "
            "that study, or use another --out directory"
        )
    if unknown:
        shown = ", ".join(unknown[:2]) + (", ..." if len(unknown) > 2 else "")
        raise UsageError(
            f"{out}: holds study {study.get('name')!r} with {len(unknown)} runs that {matrix.recipe_path} does not "
            f"describe ({shown}): {what_changed(_stored_specs(out, study['runs']), unknown, matrix.runs)}"
        )
    if matrix.criteria.looks or matrix.criteria.anytime:
        low = seeds_too_low(_stored_specs(out, study.get("runs", ())), matrix.runs)
        if low:
            raise UsageError(f"{matrix.recipe_path}: seeds: {low}")
    return study


def _stored_specs(out: Path, run_ids: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the `spec.json` of the runs that have one, by run id."""
    paths = {run_id: out / schema.RUNS_DIR / run_id / schema.SPEC_FILE for run_id in run_ids}
    return {run_id: read_json(path) for run_id, path in paths.items() if path.exists()}


def _check_versions(matrix: Matrix) -> None:
    """Refuse known bad pairs of versions for every run at once, before the first process starts."""
    versions = environment.package_versions()
    gpus = bool(visible_gpus())
    found = {
        problem: None
        for run in matrix.runs
        for problem in version_problems(
            versions, run.spec, "cuda" if gpus and run.spec.train.device != "cpu" else "cpu"
        )
    }
    if found:
        raise UsageError("\n".join(found))


def lay_out(matrix: Matrix, out: Path) -> list[Path]:
    """Write study file, recipe copy, token files and one `spec.json` per run; return the run directories in order.

    Safe to call again: finished and interrupted runs are kept, new seeds or arms are added. The criteria of the
    first call stay recorded as `criteria_at_launch`. Raises `UsageError` when `out` holds another study or other
    packages, when a seed is added below those that declared looks have taken, when a corpus is too short, or is not the
    one that a run has begun with.
    """
    study = _check_same_study(matrix, out)
    environment.check_packages(out)
    _check_versions(matrix)
    out.mkdir(parents=True, exist_ok=True)
    for left in out.iterdir():
        if _HALF_A_STUDY.fullmatch(left.name):
            left.unlink()  # whoever wrote it was killed: the directory is ours alone (`lock`)
    recipe_dir = matrix.recipe_path.parent
    files = {run.run_id: _token_file(out, run, recipe_dir) for run in matrix.runs}
    metas = {path: read_meta(path) for path in set(files.values())}
    for run in matrix.runs:
        path = files[run.run_id]
        _check_corpus(run, path, metas[path])
        _check_same_tokens(run, out, path, metas[path])
    criteria = criteria_of(matrix)
    recipe = matrix.recipe_path.read_bytes()
    write_json(
        out / schema.STUDY_FILE,
        {
            "schema_version": schema.SCHEMA_VERSION,
            "name": matrix.name,
            "description": matrix.description,
            "recipe_file": str(matrix.recipe_path),
            "recipe_sha256": hashlib.sha256(recipe).hexdigest(),
            "criteria": criteria.to_json(),
            "criteria_digest": criteria.digest(),
            "criteria_at_launch": study["criteria_at_launch"] if study else launch_digest(criteria),
            "created_at": study["created_at"] if study else datetime.now(UTC).isoformat(timespec="seconds"),
            "runs": [run.run_id for run in matrix.runs],
            **_kept_stops(study, criteria),
        },
    )
    (out / schema.RECIPE_COPY).write_bytes(recipe)
    return [_lay_out_run(run, out, matrix, files[run.run_id], metas) for run in matrix.runs]


def _kept_stops(study: Mapping[str, Any] | None, criteria: Criteria) -> dict[str, Any]:
    """Return the stops that still hold: whoever changes the criteria or the rule wants the runs that were left out."""
    if study is None or criteria.early_stop is None or STOPPED_EARLY not in study:
        return {}
    digest = criteria.digest()
    return {STOPPED_EARLY: [entry for entry in study[STOPPED_EARLY] if entry.get("criteria") == digest]}


def _lay_out_run(
    run: PlannedRun, out: Path, matrix: Matrix, token_file: Path, metas: Mapping[Path, TokenMeta]
) -> Path:
    run_dir = out / schema.RUNS_DIR / run.run_id
    path = run_dir / schema.SPEC_FILE
    if path.exists() and (run_dir / schema.MANIFEST_FILE).exists():
        return run_dir  # the file says how the run was trained and probed: nothing changes that any more
    run_dir.mkdir(parents=True, exist_ok=True)
    data_path = os.path.relpath(token_file.resolve(), run_dir.resolve())
    every = matrix.runtime.checkpoint_every or max(1, run.spec.train.steps // 10)
    recipe_dir = os.path.relpath(matrix.recipe_path.parent.resolve(), run_dir.resolve())
    document = run.to_json(matrix.name, data_path, every, recipe_dir)
    document["data_sha256"] = metas[token_file].sha256
    document[schema.DATA_SPLIT] = metas[token_file].reading
    if matrix.runtime.checkpoint_every is None:
        document["checkpoint_share"] = CHECKPOINT_SHARE
    if run.role == schema.Role.CONTROL and matrix.runtime.keep_checkpoints:
        document["keep_checkpoints"] = list(matrix.runtime.keep_checkpoints)
    if run.parent_checkpoint is not None:
        document["parent_checkpoint"] = os.path.relpath(run.parent_checkpoint.resolve(), run_dir.resolve())
    if not path.exists() or read_json(path) != document:
        write_json(path, document)
    return run_dir


@contextmanager
def lock(out: Path) -> Iterator[None]:
    """Hold the study directory; `UsageError` when another launcher has it. The kernel frees it with the process.

    The file says who holds it, so that `status` knows that somebody packs data or tests the arithmetic.
    """
    out.mkdir(parents=True, exist_ok=True)
    with (out / LOCK_FILE).open("a") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise UsageError(
                f"{out}: another fp8parity run is working on this directory; wait for it"
            ) from error
        handle.truncate(0)
        pid = os.getpid()
        handle.write(json.dumps({"pid": pid, "born": start_ticks(pid), "host": socket.gethostname()}))
        handle.flush()
        try:
            yield
        finally:
            handle.truncate(0)
