from __future__ import annotations

import logging
import os

import pytest

from fp8parity.quiet import QUIET_ENVIRONMENT, be_quiet


def test_only_what_the_user_cannot_act_on_is_silenced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in QUIET_ENVIRONMENT:
        monkeypatch.setenv(name, "asked otherwise")
    be_quiet()
    be_quiet()
    torchao = logging.getLogger("torchao")
    torchao.warning("Skipping import of cpp extensions due to its variable")
    torchao.warning("FP8 needs a GPU of compute capability 8.9")
    logging.getLogger("torch.utils._pytree").warning(
        "%s is an Enum subclass and is now natively supported", "A class"
    )
    logging.getLogger("torch.utils._pytree").warning("something else")
    assert [record.getMessage() for record in caplog.records] == [
        "FP8 needs a GPU of compute capability 8.9",
        "something else",
    ]
    assert len([f for f in torchao.filters if "_is_other" in str(f)]) == 1
    assert os.environ["TORCHAO_FORCE_SKIP_LOADING_SO_FILES"] == "asked otherwise"
