"""An adapter over a base in each published format has the bits of one over its decoded weights."""

from __future__ import annotations

from pathlib import Path

import pytest

import infinity
from tests.support.bits import assert_same
from tests.support.quantized import LAYOUTS

from .in_place import CASES, Base, config_of, over, train

# Those of CASES are bases of test_in_place_pairs.py.
FORMATS = sorted(set(LAYOUTS) - {layout for _, layout in CASES.values()} - {"bf16"})


@pytest.mark.parametrize("layout", FORMATS)
def test_a_step_over_a_base_in_its_own_files_is_that_of_plain_pytorch(
    layout: str, tmp_path: Path
) -> None:
    base = Base(f"llama/{layout}", tmp_path, num_steps=1, num_batches=1)
    before = base.digest()
    with over(base, config_of(tmp_path)) as (model, engine):
        assert any(unit.stored is not None for unit in engine.store.units)
        seen = train(model, infinity.AdamW(model, lr=1e-2), steps=range(1), num_batches=1)
    assert_same(base.expected, seen, is_ordered=False)
    assert base.digest() == before
