"""Nothing that a test measures is kept for the user's own runs."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def own_costs(tmp_path_factory, monkeypatch):
    monkeypatch.setattr("headsmith.inference.costs.cache_folder", lambda: tmp_path_factory.mktemp("costs"))
