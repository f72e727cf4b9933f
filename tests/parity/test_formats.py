"""An adapter over a base in each published format has the bits of one over its decoded weights."""

from __future__ import annotations

from pathlib import Path

import pytest

import infinity
from tests.support.bits import assert_same
from tests.support.exhaustive import sampled
from tests.support.offloading import small_tiers
from tests.support.quantized import LAYOUTS, tiny_causal_lm, write_quantized

from .in_place import CASES, Base, config_of, over, train

# Those of CASES are bases of test_in_place_pairs.py.
MODELS = {layout: model for model, layout in CASES.values()}
FORMATS = sorted(set(LAYOUTS) - set(MODELS) - {"bf16"})


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


@pytest.mark.parametrize("tile", [0, "64KiB"])
@pytest.mark.parametrize("layout", sampled(LAYOUTS, {"fp8", "metal"}.__contains__))
def test_a_copy_in_fp32_has_the_bits_of_reads_in_place(
    layout: str, tile: int | str, tmp_path: Path
) -> None:
    """FP8 with scales in fp32 has weights of more digits than bf16, in which others read it."""
    write_quantized(tiny_causal_lm(MODELS.get(layout, "llama")), tmp_path / "base", layout)
    values = []
    for frozen in ("copy", "checkpoint"):
        model = infinity.from_pretrained(
            tmp_path / "base",
            {
                "tiers": small_tiers(tmp_path / "swap", "32MiB"),
                "placement": {"frozen": frozen},
                "schedule": {"tile": tile},
                "precision": {"compute": "float32"},
            },
            is_frozen=True,
        )
        with infinity.engine_of(model) as engine:
            values.append({n: engine.read_parameter(n) for n in engine.parameter_names()})
    assert_same(values[0], values[1])
