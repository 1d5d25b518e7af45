"""The chart page of MLflow that people are sent to: which charts, grouped by recipe, as one link."""

from __future__ import annotations

import json
from typing import Any

VIEW_KEY = "fp8parity"
VIEW_TAG = f"mlflow.sharedViewState.{VIEW_KEY}"
"""MLflow's own *share view* keeps a page's state in an experiment tag; the link names the key."""

_SECTIONS = (
    ("gap", "Gap to BF16, %", ("pair/gap_percent",)),
    ("held_out", "Held-out loss", ("held_out/bf16", "held_out/arm")),
    ("train", "Training", ("train/loss", "train/grad_norm", "train/lr", "train/step_time")),
)


def _line(metric: str, section: str) -> dict[str, Any]:
    return {
        "uuid": f"fp8-{metric}",
        "type": "LINE",
        "runsCountToCompare": 500,
        "metricSectionId": f"fp8-{section}",
        "deleted": False,
        "isGenerated": False,
        "metricKey": metric,
        "selectedMetricKeys": [metric],
        "lineSmoothness": 0,
        "xAxisScaleType": "linear",
        "scaleType": "linear",
        "range": {},
        "xAxisKey": "step",
        "selectedXAxisMetricKey": "",
        "yAxisKey": "metric",
        "yAxisExpressions": [],
        "ignoreOutliers": False,
        "useGlobalXaxisKey": True,
        "useGlobalLineSmoothing": True,
    }


def view_state() -> str:
    """Return the page's state as MLflow's share link stores it (JSON, below the 5000 characters of a tag)."""
    state = {
        "groupBy": {
            "aggregateFunction": "average",
            "groupByKeys": [
                {"mode": "param", "groupByData": "recipe"},
                {"mode": "tag", "groupByData": "fp8.verdict"},
            ],
        },
        "useGroupedValuesInCharts": True,
        "runsHiddenMode": "SHOWALL",
        "orderByKey": "attributes.start_time",
        "orderByAsc": False,
        "hideEmptyCharts": True,
        "isAccordionReordered": True,
        "compareRunSections": [
            {"uuid": f"fp8-{key}", "name": name, "display": True, "isReordered": True, "columns": columns}
            for (key, name, _), columns in zip(_SECTIONS, (1, 2, 2), strict=True)
        ],
        "compareRunCharts": [_line(metric, key) for key, _, metrics in _SECTIONS for metric in metrics],
        "selectedColumns": [
            "params.`recipe`",
            "tags.`fp8.verdict`",
            "tags.`fp8.gate`",
            "params.`seed`",
        ],
    }
    return json.dumps(state, separators=(",", ":"))


def chart_path(experiment_id: str) -> str:
    """Return the part of the link behind the server's address.

    `workflowType` keeps the page in its machine-learning dress. No link keeps MLflow's Assistant closed: it opens by
    itself once per browser on loopback (3.17: `mlflow.assistant.fab.autoOpenedOnFirstLoad` in the browser's storage).
    """
    return (
        f"/#/experiments/{experiment_id}/runs?compareRunsMode=CHART&workflowType=machine_learning"
        f"&viewStateShareKey={VIEW_KEY}"
    )


def table_path(experiment_id: str) -> str:
    """Return the link to the table of runs with the verdict tags as columns."""
    return chart_path(experiment_id).replace("compareRunsMode=CHART", "compareRunsMode=TABLE")
