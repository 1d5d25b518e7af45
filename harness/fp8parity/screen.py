"""What the terminal shows: the plan, the live table of runs, the verdicts in words.

Names and reasons come from outside: they reach rich as `Text`, which has no markup and no emoji codes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from fp8parity.folding import Name, folded
from fp8parity.jobs import RunState
from fp8parity_analysis.report_format import digits_for, margin

if TYPE_CHECKING:
    from fp8parity_analysis.criteria import Criteria
    from fp8parity_analysis.verdict import Contrast, Judgement, Verdict

_GATE_STYLE = {"pass": "green", "fail": "red", "inconclusive": "yellow", "invalid": "magenta"}


def seconds_text(seconds: float | None) -> str:
    """Return a duration as 42 s, 3 min 05 s or 2 h 10 min."""
    if seconds is None:
        return ""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def runs_table(states: Sequence[RunState], finished_before: int) -> Table:
    """Return the live table: the running runs, and how many wait and are done."""
    waiting = sum(s.state == "waiting" for s in states)
    ended = [s for s in states if s.state not in ("running", "starting", "waiting")]
    table = Table(title=f"{finished_before + len(ended)} done, {waiting} waiting", title_justify="left")
    for heading in ("run", "state", "step", "loss", "ETA"):
        table.add_column(heading, justify="left" if heading in ("run", "state") else "right")
    for state in states:
        if state.state in ("running", "starting"):
            loss = "" if state.loss is None else f"{state.loss:.4f}"
            step = f"{state.step}/{state.steps}"
            table.add_row(Name(state.run_id), state.state, step, loss, seconds_text(state.seconds_left))
    return table


@contextlib.contextmanager
def live_runs(console: Console, finished_before: int) -> Iterator[Callable[[list[RunState]], None]]:
    """Give a callback that shows the runs: a live table on a terminal, one line per end of a run elsewhere."""
    if console.is_terminal:
        with Live(console=console, refresh_per_second=4) as live:
            yield lambda states: live.update(runs_table(states, finished_before))
        return
    seen: set[str] = set()

    def lines(states: list[RunState]) -> None:
        total = finished_before + len(states)
        for state in states:
            if state.state not in ("running", "starting", "waiting") and state.run_id not in seen:
                seen.add(state.run_id)
                reason = f": {state.reason}" if state.reason else ""
                number = f"[{finished_before + len(seen)}/{total}]"
                console.print(Text(f"{number} {state.run_id} {state.state}{reason}"))

    yield lines


def show_unfinished(console: Console, states: Sequence[RunState]) -> None:
    """Say which runs left no result and why, runs with the same reason together."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for state in states:
        if state.state not in ("finished", "diverged"):
            why = state.reason.removeprefix("fp8parity: ") or "no reason was given"
            reasons.setdefault((state.state, why), []).append(state.run_id)
    for (ended, why), runs in reasons.items():
        more = f" and {len(runs) - 3} more" if len(runs) > 3 else ""
        console.print(Text(f"{ended}: {', '.join(runs[:3])}{more}: {why}", style="yellow"))


def percent(value: float | None, digits: int) -> str:
    """Return a fraction of the loss as a signed percentage; what rounds to zero has no sign."""
    return "–" if value is None else f"{_signed(value, digits)} %"


def _signed(value: float, digits: int) -> str:
    text = f"{100 * value:+.{digits}f}"
    return text if float(text) else text[1:]


def interval_text(bounds: tuple[float | None, float | None], digits: int) -> str:
    """Return an interval as [-0.10, +0.31] in percent, or a dash."""
    low, high = bounds
    if low is None and high is None:
        return "–"
    shown = ["−∞" if low is None else _signed(low, digits), "∞" if high is None else _signed(high, digits)]
    return f"[{shown[0]}, {shown[1]}]"


def verdict_table(judgement: Judgement) -> Table:
    """Return one row per recipe: outcome, gap with interval, seeds; it fits 80 columns."""
    criteria = judgement.criteria
    loss = {"train": "training loss", "final": "last held-out loss"}.get(criteria.endpoint, "held-out loss")
    title = f"FP8 against BF16: {loss}, margin {margin(criteria.margin)}"
    digits = digits_for(criteria.margin)
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    levels = _levels(judgement)
    interval = "interval" if " and " in levels else f"{levels} interval".strip()
    for heading in ("recipe", "outcome", "gap", interval, "seeds", "nulls"):
        left = heading in ("recipe", "outcome")
        table.add_column(
            heading, justify="left" if left else "right", no_wrap=heading != "recipe", overflow="fold"
        )
    for verdict in judgement.verdicts:
        outcome = Text(verdict.outcome.value, style=_GATE_STYLE[verdict.gate.value])
        table.add_row(
            Name(verdict.recipe),
            outcome.append("*" if verdict.provisional else ""),
            percent(verdict.gap, digits),
            interval_text(verdict.interval, digits),
            str(verdict.n_seeds),
            str(verdict.n_null_pairs),
        )
    notes = ["* provisional"] if any(verdict.provisional for verdict in judgement.verdicts) else []
    if interval == "interval" and levels:
        notes.append(f"intervals of {levels}: each recipe's is below")
    table.caption = "\n".join(notes) or None
    return table


def _levels(judgement: Judgement) -> str:
    """Return the levels of the intervals in the table, empty without an interval."""
    from fp8parity_analysis.wording import levels  # scipy takes its time to import

    return levels(item.alpha for item in judgement.verdicts if item.interval != (None, None))


def _print_words(console: Console, verdict: Verdict) -> None:
    console.print(Text(f"\n{verdict.recipe}", style="bold"))
    from fp8parity_analysis.wording import is_note

    lines = [
        *(("", reason) for reason in verdict.reasons),
        *(("", warning) for warning in verdict.warnings if is_note(warning)),
        *(("yellow", f"warning: {w}") for w in verdict.warnings if not is_note(w)),
    ]
    for style, line in lines:
        grid = Table.grid(padding=(0, 1))
        grid.add_row(" •", Text(folded(line, console.width - 4), style=style))
        console.print(grid, highlight=False)


def _contrast_words(contrast: Contrast, criteria: Criteria) -> str:
    from fp8parity_analysis.estimate import look_of
    from fp8parity_analysis.wording import level

    look, digits = look_of(contrast.n_seeds, criteria), digits_for(criteria.margin)
    seeds = f"{contrast.n_seeds} seed{'' if contrast.n_seeds == 1 else 's'}"
    if look.waiting_for is not None:
        interval = f"no interval before the look at {look.waiting_for} seeds"
    elif contrast.interval == (None, None):
        interval = "no interval"
    else:
        interval = f"{level(look.alpha)} interval {interval_text(contrast.interval, digits)}"
    return f"{contrast.a} against {contrast.b}: {percent(contrast.gap, digits)}, {interval}, {seeds}"


def show_judgement(console: Console, judgement: Judgement) -> None:
    """Print the table, then each verdict in words, then the contrasts."""
    if judgement.post_hoc:
        console.print("[yellow]post hoc: the criteria were changed after the runs were launched[/yellow]")
    console.print(verdict_table(judgement))
    for verdict in judgement.verdicts:
        _print_words(console, verdict)
    for contrast in judgement.contrasts:
        console.print()
        print_folded(console, _contrast_words(contrast, judgement.criteria))


def print_folded(console: Console, words: str) -> None:
    """Print a sentence whose numbers keep their unit beside them."""
    console.print(Text(folded(words, console.width)))


def plan_table(document: dict[str, Any]) -> Table:
    """Return the plan's runs grouped by cell and arm; no name is cut."""
    title = f"{document['study']}: {document['runs']} runs, {document['pairs']} pairs"
    table = Table(
        title=Text(title, style="table.title"),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        caption="FP8: share of the GEMMs' FLOPs",
        caption_justify="left",
    )
    for heading in ("cell", "arm", "runs", "steps", "tokens per run", "FP8"):
        left = heading in ("cell", "arm")
        table.add_column(heading, justify="left" if left else "right", no_wrap=not left)
    for arm in document["arms"]:
        table.add_row(
            Name(arm["group"]),
            Name(arm["arm"]),
            str(arm["runs"]),
            str(arm["steps"]),
            f"{arm['tokens_per_run']:,}",
            f"{100 * arm['fp8_flop_share']:.0f} %",
        )
    return table
