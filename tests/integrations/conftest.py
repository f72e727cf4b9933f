"""What the integrations' tests share."""

from __future__ import annotations

import pytest

from infinity.modules.accumulate import purity


@pytest.fixture
def trusted_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Classes of the tests count as known ones, whose micro-batches a default may let take turns."""
    monkeypatch.setattr(purity, "_TRUSTED", purity._TRUSTED | {__name__.partition(".")[0]})
