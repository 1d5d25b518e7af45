"""The command line. Each command calls one function; heavy imports wait until a command needs them."""

from __future__ import annotations

import errno
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from fp8parity.errors import EXIT_INTERRUPTED, EXIT_USAGE, Fp8ParityError
from fp8parity_analysis.schema import SCHEMA_VERSION

app = typer.Typer(
    name="fp8parity",
    help="Does training with this FP8 recipe converge like BF16? Paired runs, calibrated statistics, a verdict.\n\n"
    "Exit codes: 0 pass, 10 fail, 11 inconclusive, 12 invalid comparison, 20 diverged (train), 64 bad input, "
    "75 interrupted (run again to resume).",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
data_app = typer.Typer(help="Token files.", no_args_is_help=True)
app.add_typer(data_app, name="data")

Recipe = Annotated[Path, typer.Argument(help="Recipe file (YAML).", show_default=False)]
# Typer carries its own copy of click, older ones use the installed package; either way this is the base class.
_ClickError: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")

FLAG = ""
"""What --help shows as the type of an option that takes no value."""

AsJson = Annotated[
    bool, typer.Option("--json", metavar=FLAG, help="Print one JSON document and nothing else.")
]


def _print_json(document: Any) -> None:
    sys.stdout.write(json.dumps(document, indent=1, allow_nan=False) + "\n")


@app.command()
def plan(recipe: Recipe, as_json: AsJson = False) -> None:
    """Show what a recipe file would train, what it could detect, and every error it has. Trains nothing."""
    from fp8parity import matrix
    from fp8parity.plan import plan_document

    document = plan_document(matrix.read(recipe))
    if as_json:
        _print_json(document)
        return
    from rich.console import Console

    from fp8parity.screen import plan_table, print_folded

    console = Console()
    console.print(plan_table(document))
    for line in document["words"]:
        print_folded(console, line)


@app.command()
def run(
    recipe: Recipe,
    out: Annotated[
        Path, typer.Option("--out", help="Study directory; made, or continued.", show_default=False)
    ],
    slots: Annotated[
        int | None, typer.Option("--slots", min=1, help="Runs at a time.", show_default="cores or GPUs")
    ] = None,
    any_verdict: Annotated[
        bool,
        typer.Option("--any-verdict", metavar=FLAG, help="Exit 0 for every valid verdict, whatever it says."),
    ] = False,
    mlflow_uri: Annotated[
        str | None,
        typer.Option("--mlflow", metavar="URI", help="Mirror into MLflow meanwhile; local: OUT/mlflow.db."),
    ] = None,
) -> None:
    """Train the matrix, judge it and write the report: the main job. Safe to run again, it resumes."""
    from fp8parity.study_run import run_study

    raise typer.Exit(run_study(recipe, out, slots=slots, any_verdict=any_verdict, mlflow_uri=mlflow_uri))


@app.command()
def status(
    study: Annotated[Path, typer.Argument(help="A study directory, while it runs or after.")],
    watch: Annotated[
        bool, typer.Option("--watch", metavar=FLAG, help="Renew until nothing runs any more.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show where every run of a study stands: state, step, losses, time left, alerts. Changes nothing."""
    from fp8parity.errors import UsageError
    from fp8parity.status import study_status

    if as_json and watch:
        raise UsageError("--json is one document and --watch many; give one of them")
    if as_json:
        _print_json(study_status(study))
        return
    from rich.console import Console

    from fp8parity.status_screen import show

    show(study, Console(), watch=watch)


@app.command()
def train(run_dir: Annotated[Path, typer.Argument(help="A run directory with its spec.json.")]) -> None:
    """Train one run to its end, resuming from its last checkpoint. Exit 0 finished, 20 diverged."""
    from fp8parity.process import importing

    with importing():
        from fp8parity import runner

        runner.import_compiler_for(run_dir)
    raise typer.Exit(runner.train(run_dir))


@app.command()
def judge(
    sources: Annotated[
        list[str],
        typer.Argument(
            help="A study or run directory; .csv, .tsv or .parquet curves; a TensorBoard folder; mlflow:EXPERIMENT."
        ),
    ],
    margin: Annotated[str | None, typer.Option(help="Largest gap called equal, such as 0.25%.")] = None,
    confidence: Annotated[float | None, typer.Option(help="Confidence of the two-sided interval.")] = None,
    endpoint: Annotated[str | None, typer.Option(help="held_out, train or final.")] = None,
    eval_precision: Annotated[str | None, typer.Option(help="bf16, or arm: each arm's own forward.")] = None,
    noise_sd: Annotated[str | None, typer.Option(help="Known run-to-run sd, such as 0.15%.")] = None,
    noise_from: Annotated[
        Path | None, typer.Option(help="An earlier study whose noise floor is the run-to-run sd.")
    ] = None,
    null_matched: Annotated[
        bool, typer.Option("--null-matched", metavar=FLAG, help="Declare that nulls may be pooled.")
    ] = False,
    holm: Annotated[
        bool, typer.Option("--holm", metavar=FLAG, help="Correct the verdicts over the recipes too.")
    ] = False,
    speedup: Annotated[
        float | None, typer.Option(help="FP8's throughput over BF16's; weighed against a gap's token cost.")
    ] = None,
    allow_prefix: Annotated[
        bool,
        typer.Option(
            "--allow-prefix", metavar=FLAG, help="Judge a shorter run on the common prefix, labelled so."
        ),
    ] = False,
    split: Annotated[str | None, typer.Option(help="The held-out set that decides.")] = None,
    preset: Annotated[str | None, typer.Option(help="Tag names of torchtitan, megatron or nemo.")] = None,
    column: Annotated[
        list[str] | None, typer.Option(help="OURS=THEIRS for a column of a table, such as loss=val_loss.")
    ] = None,
    tag: Annotated[
        list[str] | None, typer.Option(help="TAG=SPLIT for a metric, such as validation/loss=held_out.")
    ] = None,
    run_pattern: Annotated[
        str | None,
        typer.Option(help="Regex with (?P<arm>), (?P<seed>) and maybe (?P<replica>) for run names."),
    ] = None,
    tracking_uri: Annotated[str | None, typer.Option(help="MLflow's tracking URI.")] = None,
    as_json: AsJson = False,
) -> None:
    """Judge stored runs or anybody's curves. Trains nothing."""
    from fp8parity.errors import UsageError
    from fp8parity.judging import judge_paths, mapping_of, noise_of_study
    from fp8parity_analysis.import_settings import DEFAULT_RUN_PATTERN, ImportSettings

    if noise_from is not None and noise_sd is not None:
        raise UsageError("--noise-sd and --noise-from are two answers to one question; give one of them")
    judgement = judge_paths(
        sources,
        {
            "margin": margin,
            "confidence": confidence,
            "endpoint": endpoint,
            "eval_precision": eval_precision,
            **({"noise_sd": noise_sd} if noise_from is None else noise_of_study(noise_from)),
            "null_matched": null_matched or None,
            "correction": "holm" if holm else None,
            "speedup": speedup,
            "allow_prefix": allow_prefix or None,
            "split": split,
        },
        ImportSettings(
            columns=mapping_of("column", column or []),
            tags=mapping_of("tag", tag or []),
            preset=preset,
            run_pattern=run_pattern or DEFAULT_RUN_PATTERN,
            tracking_uri=tracking_uri,
        ),
    )
    if as_json:
        _print_json(judgement.to_json())
    else:
        from rich.console import Console

        from fp8parity.screen import show_judgement

        show_judgement(Console(), judgement)
    raise typer.Exit(judgement.exit_code)


@app.command()
def report(
    study: Annotated[Path, typer.Argument(help="A study directory.")],
    emit_followup: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the recipe file that holds the candidate layers in BF16."),
    ] = None,
) -> None:
    """Write verdicts.json and the report again from what is stored. Trains nothing."""
    from fp8parity.judging import judge_study, write_results

    for path in write_results(study, judge_study(study, {}), followup=emit_followup):
        typer.echo(str(path))


@app.command("mlflow")
def mirror_into_mlflow(
    study: Annotated[Path, typer.Argument(help="A study directory, finished or not.")],
    uri: Annotated[
        str | None,
        typer.Option("--uri", help="Tracking address.", show_default="sqlite, mlflow.db in the study"),
    ] = None,
) -> None:
    """Copy a study into MLflow. Repeatable: only what is new is written."""
    from fp8parity_analysis.mlflow_mirror import mirror

    done = mirror(study, uri)
    if done.slow_because:
        typer.echo(f"fp8parity: warning: {done.slow_because}", err=True)
    typer.echo(
        f"{done.uri}: {done.runs} runs in experiment {done.experiment_id}, {done.points_written:,} new points"
    )


@app.command()
def ui(
    study: Annotated[Path, typer.Argument(help="A study directory, finished or not.")],
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Port on loopback.", show_default="a free one")
    ] = None,
    no_browser: Annotated[
        bool, typer.Option("--no-browser", metavar=FLAG, help="Print the link, open nothing.")
    ] = False,
) -> None:
    """Mirror into MLflow, serve it on loopback and open the charts, grouped by recipe."""
    from fp8parity.ui import show

    show(study, port=port, browser=not no_browser, say=lambda words: typer.echo(words))


@app.command()
def nightly(
    recipe: Recipe,
    history: Annotated[
        Path, typer.Option("--history", help="History directory; made, or appended to.", show_default=False)
    ],
    out: Annotated[
        Path | None, typer.Option("--out", help="Tonight's runs.", show_default="HISTORY/nights/DATE")
    ] = None,
    runs: Annotated[
        Path | None, typer.Option("--runs", help="Take the finished runs of this study; train nothing.")
    ] = None,
    webhook: Annotated[str | None, typer.Option(help="POST the night as JSON to this address.")] = None,
) -> None:
    """Run the standing matrix as a new night, judge it against BF16 and against the nights before."""
    from fp8parity.nightly import nightly as one_night

    raise typer.Exit(one_night(recipe, history, out=out, runs=runs, webhook=webhook))


@app.command()
def selftest(
    device: Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")] = "auto",
    recipe: Annotated[
        list[str] | None,
        typer.Option("--recipe", help="RECIPE, RECIPE/BACKEND or RECIPE/BACKEND/master.", show_default="all"),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", metavar=FLAG, help="The short form that `run` does first.")
    ] = False,
    compiled: Annotated[
        bool, typer.Option("--compile", metavar=FLAG, help="One compiled linear per recipe too.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Test whether this machine's FP8 arithmetic is right. Exit 0 right, 12 a fault, named. Trains nothing."""
    from rich.console import Console
    from rich.text import Text

    from fp8parity.quiet import be_quiet

    be_quiet()
    from fp8parity.selftest.screen import show_selftest
    from fp8parity.selftest.session import selftest as test_machine

    screen = Console(stderr=as_json)
    with screen.status("selftest") as status:
        report = test_machine(
            device, recipe or (), quick=quick, compiled=compiled, say=lambda words: status.update(Text(words))
        )
    if as_json:
        _print_json(report.to_json())
    else:
        show_selftest(screen, report)
    raise typer.Exit(report.exit_code)


@app.command()
def schema() -> None:
    """Print the JSON Schema of recipe files, for editors."""
    from fp8parity.json_schema import recipe_schema

    _print_json(recipe_schema())


@data_app.command("pack")
def data_pack(
    source: Annotated[Path, typer.Argument(help=".txt, .jsonl, .parquet, or a folder of text files.")],
    out: Annotated[Path, typer.Option("--out", help="The .bin to write.", show_default=False)],
    tokenizer: Annotated[
        Path | None, typer.Option(help="A tokenizer.json (needs the tokenizers extra).", show_default="bytes")
    ] = None,
    field: Annotated[str, typer.Option(help="Text field of .jsonl and .parquet.")] = "text",
    held_out_fraction: Annotated[float, typer.Option(help="Share of the documents held out.")] = 0.05,
) -> None:
    """Turn text into a token file: whole documents are held out, duplicates removed."""
    from fp8parity.pack import pack

    meta = pack(source, out, tokenizer=tokenizer, field=field, held_out_fraction=held_out_fraction)
    typer.echo(
        f"{out}: {meta.train_tokens:,} training and {meta.n_tokens - meta.train_tokens:,} held-out tokens of "
        f"{meta.documents:,} documents, vocabulary {meta.vocab_size}, sha256 {meta.sha256}"
    )


def _fail(message: str, code: int) -> int:
    for line in message.splitlines():
        sys.stderr.write(f"fp8parity: {line}\n")
    return code


def _refused(message: str, code: int, arguments: list[str]) -> int:
    """Say why nothing was done; a command that was to print one JSON document prints that one."""
    if "--json" in arguments:
        _print_json({"schema_version": SCHEMA_VERSION, "errors": message.splitlines()})
    return _fail(message, code)


def _run_app(arguments: list[str]) -> int:
    from fp8parity_analysis.errors import BadInputError

    try:
        result = app(args=arguments, standalone_mode=False)
        return result if isinstance(result, int) else 0
    except Fp8ParityError as error:
        return _refused(str(error), error.exit_code, arguments)
    except BadInputError as error:
        return _refused(str(error), EXIT_USAGE, arguments)
    except _ClickError as error:
        return _refused(f"{error.format_message()} (see fp8parity --help)", EXIT_USAGE, arguments)
    except (typer.Abort, KeyboardInterrupt):
        return _fail("interrupted; run the same command again to resume", EXIT_INTERRUPTED)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("torch", "torchao", "lightning"):
            raise
        return _fail(
            f"this command trains, and {error.name} is not installed; install fp8parity with the extra train",
            EXIT_USAGE,
        )
    except OSError as error:
        if error.errno != errno.ENOSPC:
            if error.filename is None:
                raise
            return _fail(f"{error.filename}: {error.strerror}; give another path", EXIT_USAGE)
        return _fail(
            f"{error.filename or 'output'}: no space left; free some and run again", EXIT_INTERRUPTED
        )


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit; failures the user can act on are one line each, without a traceback."""
    sys.exit(_run_app(sys.argv[1:] if arguments is None else arguments))
