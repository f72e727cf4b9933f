"""Fixtures for every test. Nothing heavy is imported here: many tests run without torch."""

from __future__ import annotations

import gc
import os
import signal
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.support.exhaustive import thin

# The same examples every time, on machines of every speed; `--hypothesis-profile=search` looks for
# others.
settings.register_profile(
    "suite",
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.register_profile("search", settings.get_profile("suite"), derandomize=False)
settings.load_profile("suite")

# One compute thread, before torch is there to read it: what is computed is tiny, and a parallel region
# costs more than its sums. Equality with several threads is shown by tests that set them.
os.environ["OMP_NUM_THREADS"] = "1"
# Threads that such a test starts sleep between regions: other workers use the cores.
os.environ["OMP_WAIT_POLICY"] = "passive"

# A shell starts what it puts in the background with Ctrl-C ignored, and every child would inherit it.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Tests must never reach out for a model or a tokenizer.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


gc.disable()  # Until all tests are imported: a quarter of that time would be collections.
_num_frozen_modules = 0
_MODULES_TO_FREEZE = 20


def _freeze() -> None:
    """Modules stay: hundreds of thousands of objects that no collection has to look at again. Tests
    collect what engines leave, often, and this makes it cost a hundredth."""
    global _num_frozen_modules
    gc.collect()
    gc.freeze()
    _num_frozen_modules = len(sys.modules)


def _name_data_sets_by_chance() -> None:
    """`datasets` names what `map` makes by a hash of its function with all that this holds: a tenth
    of the time of a test that trains on records, for a cache that nothing here reads."""
    for name in ("datasets.fingerprint", "datasets.arrow_dataset"):
        if name in sys.modules:
            vars(sys.modules[name])["update_fingerprint"] = lambda *_: os.urandom(8).hex()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    thin(item for item in items if "gpu" not in item.path.parts)


def pytest_collection_finish() -> None:
    _name_data_sets_by_chance()
    _freeze()
    gc.enable()


def pytest_runtest_logfinish() -> None:
    """Tests import most of torch, transformers and the package, when the first of them needs it."""
    if len(sys.modules) >= _num_frozen_modules + _MODULES_TO_FREEZE:
        _name_data_sets_by_chance()
        _freeze()


@pytest.fixture
def swap_directory(tmp_path: Path) -> Path:
    """A directory whose parent exists: as `[[tiers.nvme]] path` needs it. Fresh for every test."""
    return tmp_path / "swap"


@pytest.fixture
def without_digests(monkeypatch: pytest.MonkeyPatch) -> None:
    """No step of `infinity train` gets a digest of the state, before which the step makes the
    updates that the next forward would make: their bytes are in another line then."""
    monkeypatch.setattr("infinity.tools.training.program._DIGEST_SHARE", 1e-12)
