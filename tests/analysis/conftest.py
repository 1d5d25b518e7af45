import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # test support (`simulate`, `cases`) is imported by plain name


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an empty tracking file: MLflow takes seconds to build its tables."""
    from mlflow.tracking import MlflowClient

    path = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    MlflowClient(tracking_uri=f"sqlite:///{path}").search_experiments()
    return path
