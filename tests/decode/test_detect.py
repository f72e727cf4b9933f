"""Contents that configuration and headers must have, and the refusal of every contradiction."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from infinity.codecs import (
    AffineGroups,
    FloatBlocks,
    LogicalTensor,
    Plain,
    TableBlocks,
    detect,
    logical_tensors,
    mxfp4,
    nvfp4,
)
from infinity.codecs.detect import scheme_of
from infinity.errors import ConfigError, UnsupportedError
from tests.support.quantized import LAYOUTS

Headers = dict[str, tuple[str, tuple[int, ...]]]

FP8 = {"quantization_config": LAYOUTS["fp8"].table}
INT4 = {"quantization_config": LAYOUTS["int4"].table}
MXFP4 = {"quantization_config": LAYOUTS["mxfp4"].table}
NF4 = {"quantization_config": LAYOUTS["nf4"].table}

NVFP4 = {"quantization_config": LAYOUTS["nvfp4"].table}
GPTQ = {"quantization_config": {"quant_method": "gptq", **LAYOUTS["gptq"].table}}
AWQ = {"quantization_config": LAYOUTS["awq"].table}
ZEROS = {"quantization_config": LAYOUTS["int4-zeros"].table}
MODELOPT = {"quantization_config": LAYOUTS["modelopt-fp8"].table}

NORM: Headers = {"norm.weight": ("BF16", (64,))}
FP8_HEADERS: Headers = {
    **NORM,
    "a.weight": ("F8_E4M3", (576, 200)),
    "a.weight_scale_inv": ("F32", (5, 2)),
}
INT4_HEADERS: Headers = {
    **NORM,
    "a.weight_packed": ("I32", (48, 12)),
    "a.weight_scale": ("BF16", (48, 3)),
    "a.weight_shape": ("I32", (2,)),
}
MXFP4_HEADERS: Headers = {
    **NORM,
    "e.down_proj_blocks": ("U8", (4, 40, 2, 16)),
    "e.down_proj_scales": ("U8", (4, 40, 2)),
    "e.down_proj_bias": ("BF16", (4, 40)),
}
NF4_STATE = TableBlocks(offset=0.5).state_json((64, 96))
NF4_HEADERS: Headers = {
    **NORM,
    "a.weight": ("U8", (3072, 1)),
    "a.weight.absmax": ("U8", (96,)),
    "a.weight.quant_map": ("F32", (16,)),
    "a.weight.nested_absmax": ("F32", (1,)),
    "a.weight.nested_quant_map": ("F32", (256,)),
    "a.weight.quant_state.bitsandbytes__nf4": ("U8", (len(NF4_STATE),)),
}
NVFP4_HEADERS: Headers = {
    **NORM,
    "a.weight_packed": ("U8", (48, 32)),
    "a.weight_scale": ("F8_E4M3", (48, 4)),
    "a.weight_global_scale": ("F32", (1,)),
    "a.input_global_scale": ("F32", (1,)),
}
MODELOPT_HEADERS: Headers = {
    **NORM,
    "a.weight": ("U8", (48, 32)),
    "a.weight_scale": ("F8_E4M3", (48, 4)),
    "a.weight_scale_2": ("F32", (1,)),
    "a.input_scale": ("F32", ()),
    "a.k_scale": ("F32", (1,)),
}
GPTQ_HEADERS: Headers = {
    **NORM,
    "a.qweight": ("I32", (12, 48)),
    "a.qzeros": ("I32", (3, 6)),
    "a.scales": ("F16", (3, 48)),
    "a.g_idx": ("I32", (96,)),
}
AWQ_HEADERS: Headers = {
    **NORM,
    "a.qweight": ("I32", (96, 6)),
    "a.qzeros": ("I32", (3, 6)),
    "a.scales": ("BF16", (3, 48)),
}
ZEROS_HEADERS: Headers = {**INT4_HEADERS, "a.weight_zero_point": ("I32", (6, 3))}
MLX = {"quantization_config": LAYOUTS["mlx"].table}
MLX_HEADERS: Headers = {
    **NORM,
    "a.weight": ("U32", (48, 16)),
    "a.scales": ("BF16", (48, 2)),
    "a.biases": ("BF16", (48, 2)),
}
QUARK = {"quantization_config": LAYOUTS["quark-int4"].table}
QUARK_HEADERS: Headers = {
    **NORM,
    "a.weight": ("I32", (96, 6)),
    "a.weight_scale": ("BF16", (3, 48)),
    "a.weight_zero_point": ("I32", (3, 6)),
}
INT8 = {"quantization_config": LAYOUTS["llm-int8"].table}
INT8_HEADERS: Headers = {**NORM, "a.weight": ("I8", (48, 96)), "a.SCB": ("F32", (48,))}
CHECKPOINTS = {
    "mlx": (MLX, MLX_HEADERS, "a.weight", AffineGroups(64, layout="MLX"), (48, 128)),
    "quark": (
        QUARK,
        QUARK_HEADERS,
        "a.weight",
        AffineGroups(32, "BF16", 4, "QUARK_SIGNED", True),
        (48, 96),
    ),
    "int8": (INT8, INT8_HEADERS, "a.weight", AffineGroups(96, "F32", 8, "LLM.int8"), (48, 96)),
    "gptq": (
        GPTQ,
        GPTQ_HEADERS,
        "a.weight",
        AffineGroups(32, "F16", 4, "GPTQ", True, True),
        (48, 96),
    ),
    "awq": (AWQ, AWQ_HEADERS, "a.weight", AffineGroups(32, "BF16", 4, "AWQ", True), (48, 96)),
    "zeros": (ZEROS, ZEROS_HEADERS, "a.weight", AffineGroups(has_zeros=True), (48, 96)),
    "nvfp4": (NVFP4, NVFP4_HEADERS, "a.weight", nvfp4(), (48, 64)),
    "modelopt": (MODELOPT, MODELOPT_HEADERS, "a.weight", nvfp4("TIMES"), (48, 64)),
    "fp8": (FP8, FP8_HEADERS, "a.weight", FloatBlocks(), (576, 200)),
    "int4": (INT4, INT4_HEADERS, "a.weight", AffineGroups(), (48, 96)),
    "mxfp4": (MXFP4, MXFP4_HEADERS, "e.down_proj", mxfp4(True), (4, 64, 40)),
    "nf4": (NF4, NF4_HEADERS, "a.weight", TableBlocks(offset=0.5), (64, 96)),
}

OPTIONAL = {
    "norm.weight", "a.weight_shape", "e.down_proj_bias", "a.input_global_scale", "a.input_scale",
    "a.k_scale", "a.g_idx",
}  # fmt: skip


def find(
    config: dict[str, Any], headers: Headers, state: bytes = NF4_STATE
) -> dict[str, LogicalTensor]:
    plain = (torch.arange(96, dtype=torch.int32) // 32).numpy().tobytes()
    is_plain = state is NF4_STATE

    def read(name: str) -> bytes:
        return plain if is_plain and name.endswith("g_idx") else state

    return logical_tensors(config, headers, read=read, where="/model")


def weights(**changes: Any) -> dict[str, Any]:
    """INT4 with other settings of its weights."""
    config = copy.deepcopy(INT4)
    config["quantization_config"]["config_groups"]["group_0"]["weights"].update(changes)
    return config


def quantization(base: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {"quantization_config": {**base["quantization_config"], **changes}}


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_a_quantised_weight_is_one_logical_tensor(kind: str) -> None:
    config, headers, name, codec, shape = CHECKPOINTS[kind]
    found = find(config, headers)
    assert (found[name].codec, found[name].shape) == (codec, shape)
    assert found["norm.weight"] == LogicalTensor(Plain("BF16"), ("norm.weight",), (64,))
    covered = [stored for each in found.values() for stored in (*each.names, *each.aside)]
    assert sorted(covered) == sorted(headers)


@pytest.mark.parametrize("kind", CHECKPOINTS)
@pytest.mark.parametrize("section", ["text_config", "llm_config"])
@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
def test_the_table_may_stand_in_a_part_of_the_configuration(
    kind: str, section: str, key: str
) -> None:
    config, headers, *_ = CHECKPOINTS[kind]
    nested = {section: {key: config["quantization_config"]}, "vision_config": {}}
    assert find(nested, headers) == find(config, headers)


def test_without_a_quantisation_every_tensor_is_plain() -> None:
    found = find({}, FP8_HEADERS)
    assert {name: each.codec for name, each in found.items()} == {
        "norm.weight": Plain("BF16"),
        "a.weight": Plain("F8_E4M3"),
        "a.weight_scale_inv": Plain("F32"),
    }


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_every_missing_part_is_named(kind: str) -> None:
    config, headers, *_ = CHECKPOINTS[kind]
    for name in headers.keys() - OPTIONAL:
        rest = {key: value for key, value in headers.items() if key != name}
        with pytest.raises(ConfigError, match="/model: '[ae]"):
            find(config, rest)


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_every_part_of_another_shape_or_dtype_is_named(kind: str) -> None:
    config, headers, *_ = CHECKPOINTS[kind]
    for name, (dtype, shape) in headers.items():
        if name in OPTIONAL or name.endswith("nf4"):
            continue
        for wrong in [
            (dtype, (*shape[:-1], shape[-1] + 129)),
            (dtype, (*shape, 3)),
            ("F64", shape),
        ]:
            if (kind, name, wrong[0]) == ("fp8", "a.weight", "F64"):
                continue  # A plain weight; its scales are left over, as the test below shows.
            if (kind, name, wrong[1]) == ("int8", "a.weight", (48, 225)):
                continue  # Scales of rows do not know how many columns there are.
            with pytest.raises(ConfigError, match="/model: '[ae]"):
                find(config, {**headers, name: wrong})


@pytest.mark.parametrize("kind", CHECKPOINTS)
@pytest.mark.parametrize("shape", [(), (5,), (0, 0), (3, 7)])
def test_parts_of_any_shape_are_refused_by_name(kind: str, shape: tuple[int, ...]) -> None:
    config, headers, *_ = CHECKPOINTS[kind]
    for name, (dtype, _) in headers.items():
        if name in OPTIONAL or "state" in name:
            continue
        if not shape and name.endswith(("_global_scale", "_scale_2")):
            continue  # One number.
        with pytest.raises(ConfigError, match="/model: '[ae]"):
            find(config, {**headers, name: (dtype, shape)})


def test_groups_that_are_not_full_are_refused_by_name() -> None:
    headers = {"a.weight_packed": ("I32", (4, 37)), "a.weight_scale": ("BF16", (4, 9))}
    with pytest.raises(ConfigError, match=r"'a.weight_scale' has shape \(4, 9\) .*groups of 32"):
        find(INT4, headers)


def test_a_weight_that_is_stored_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="'a.weight' is stored twice"):
        find(INT4, {**INT4_HEADERS, "a.weight": ("BF16", (48, 96))})


def test_scales_without_codes_are_refused() -> None:
    with pytest.raises(ConfigError, match="a.weight_scale_inv"):
        find(FP8, {**FP8_HEADERS, "a.weight": ("BF16", (576, 200))})


@pytest.mark.parametrize("shape", [(4, 2), (5, 1), (576, 200), (2, 5), (), (1,), (10,)])
def test_fp8_scales_must_be_those_of_padded_blocks(shape: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match=r"needs F32 \(5, 2\)"):
        find(FP8, {**FP8_HEADERS, "a.weight_scale_inv": ("F32", shape)})


@pytest.mark.parametrize(("dtype", "names"), [
    ("BF16", ("a.weight_scale_inv",)), ("F8_E8M0", ("a.scale",)), ("F32", ("a.qscale_weight",)),
])  # fmt: skip
def test_fp8_scales_have_several_names_and_dtypes(dtype: str, names: tuple[str]) -> None:
    headers = {"a.weight": ("F8_E4M3", (576, 200)), names[0]: (dtype, (5, 2))}
    found = find(FP8, headers)["a.weight"]
    assert found == LogicalTensor(FloatBlocks(scale=dtype), ("a.weight", names[0]), (576, 200))


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_fp8_may_have_one_scale_per_matrix(shape: tuple[int, ...]) -> None:
    headers = {"a.weight": ("F8_E4M3", (576, 200)), "a.weight_scale_inv": ("F32", shape)}
    found = find(quantization(FP8, weight_block_size=None), headers)["a.weight"]
    assert found.codec == FloatBlocks((0, 0))


def test_packed_fp8_experts_have_a_grid_per_expert() -> None:
    headers = {
        "e.down_proj": ("F8_E4M3", (4, 130, 64)),
        "e.down_proj_scale_inv": ("F32", (4, 2, 1)),
    }
    assert find(FP8, headers)["e.down_proj"].shape == (4, 130, 64)


def test_fp4_experts_of_an_fp8_checkpoint_are_mxfp4() -> None:
    headers = {**FP8_HEADERS, "e.weight": ("I8", (40, 32)), "e.scale": ("F8_E8M0", (40, 2))}
    found = find(FP8, headers)["e.weight"]
    assert found == LogicalTensor(mxfp4(), ("e.weight", "e.scale"), (40, 64))
    with pytest.raises(ConfigError, match="e.scale"):
        find(FP8, {**headers, "e.scale": ("F8_E8M0", (40, 1))})


@pytest.mark.parametrize("kind", ["fp8", "int4", "mxfp4"])
def test_codes_of_another_format_are_refused(kind: str) -> None:
    config, headers, *_ = CHECKPOINTS[kind]
    for dtype in ("I8", "F4", "F8_E5M2"):
        with pytest.raises(ConfigError, match="'b.weight' is"):
            find(config, {**headers, "b.weight": (dtype, (64, 64))})


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"quantization_config": {"bits": 4}}, "None"),
        ({"quantization_config": "fp8"}, "expected a table"),
        ({"quantization_config": {"quant_method": "fp8"}, "text_config": INT4}, "two different"),
        (quantization(FP8, fmt="e5m2"), "e5m2"),
        (quantization(FP8, weight_block_size=[128]), "weight_block_size"),
        (quantization(FP8, weight_block_size=[0, 128]), "weight_block_size"),
        (quantization(FP8, weight_block_size="128"), "weight_block_size"),
        (quantization(FP8, ignore={}), "expected a list of texts as ignore of its .*, got {}"),
        (quantization(AWQ, group_size="x"), "expected an integer as group_size .*, got 'x'"),
        (quantization(GPTQ, dynamic={"a": 1}), "expected a table as dynamic.a of .*, got 1"),
        (quantization(QUARK, layer_quant_config=[1]), r"layer_quant_config of .*, got \[1\]"),
        (quantization(INT4, config_groups={}), "config_groups"),
        (quantization(INT4, config_groups={"group_0": 4}), "group_0"),
        (quantization(INT4, format="marlin-24"), "marlin-24"),
        (quantization(INT4, format="nvfp4-pack-quantized"), "nvfp4"),
        (quantization(MODELOPT, quant_algo="W4A16_AWQ"), "'W4A16_AWQ'"),
        (quantization(MODELOPT, quantized_layers={"a": {"quant_algo": "INT8_SQ"}}), "INT8_SQ"),
        (quantization(MODELOPT, quant_algo="NVFP4", group_size=64), "16 or 32, got 64"),
        (
            {
                "quantization_config": {
                    "quant_method": "quark",
                    "global_quant_config": {"weight": {"dtype": "int4"}},
                }
            },
            "int4",
        ),
        (quantization(QUARK, export={"pack_method": "order"}), "pack_method='order'"),
        (quantization(QUARK, algo_config=[{"name": "rotation", "r1": True, "r4": True}]), "r4"),
        (
            quantization(
                QUARK, global_quant_config={"weight": {"dtype": "fp4", "scale_format": "e5m3"}}
            ),
            "e5m3",
        ),
        ({"quantization_config": {"quant_method": "exl3"}}, "'exl3'"),
        ({"quantization": {"group_size": 64, "bits": 7}}, "MLX with mode='affine', bits=7"),
        ({"quantization": {"group_size": 32, "bits": 4, "mode": "mxfp4"}}, "mode='mxfp4'"),
        (quantization(INT4, sparsity_config={"format": "sparse-24"}), "sparsity_config"),
        (quantization(INT4, transform_config={"config_groups": {}}), "transform_config"),
        (weights(num_bits=9), "9 bits"),
        (weights(type="float"), "float"),
        (weights(strategy="block"), "block"),
        (weights(group_size="20"), "config_groups.group_0.weights.group_size .*, got '20'"),
        *[
            ({"quantization_config": {"bits": 4, "group_size": 128, **table}}, told)
            for table, told in [
                ({"quant_method": "gptq", "bits": 3}, "bits=3.*2 or 4 or 8 bits"),
                ({"quant_method": "gptq", "group_size": 0}, "group_size=0"),
                ({"quant_method": "gptq", "checkpoint_format": "marlin"}, "'marlin'"),
                ({"quant_method": "gptq", "dynamic": {"+:a": {"bits": 5}}}, "bits=5"),
                ({"quant_method": "awq", "version": "gemv"}, "'gemv'"),
                ({"quant_method": "awq", "bits": 8}, "bits=8"),
                (
                    {"quant_method": "auto-round", "packing_format": "auto_round:llm"},
                    "auto_round:llm",
                ),
                ({"quant_method": "auto-round", "data_type": "mx_fp"}, "mx_fp"),
            ]
        ],
        (quantization(NF4, bnb_4bit_quant_type="af4"), "af4"),
    ],
)
def test_a_scheme_without_a_codec_is_named(config: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told) as refused:
        find(config, {**NORM, "a.weight_packed": ("I32", (48, 12))})
    said = str(refused.value)
    assert said.startswith("/model: ")
    assert "'a.weight_packed' (I32)" in said or told in ("expected a table", "two different")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=4,
)
KEYS = sorted({path for _, _, paths in detect.KINDS for path in paths.split()})


@pytest.mark.parametrize("kind", CHECKPOINTS)
@given(data=st.data())
def test_values_of_any_kind_are_read_or_refused(kind: str, data: Any) -> None:
    """In the place of what a writer gives, or where it gives nothing."""
    config, headers, *_ = CHECKPOINTS[kind]
    table = inner = copy.deepcopy(config["quantization_config"])
    *path, last = data.draw(st.sampled_from([*map(tuple, places_in(table)), *KEYS]).map(
        lambda path: path.split(".") if isinstance(path, str) else path
    ))  # fmt: skip
    for key in path:
        if not isinstance(inner.setdefault(key, {}), dict):
            inner[key] = {}
        inner = inner[key]
    inner[last] = data.draw(JSON)
    with suppress(ConfigError):
        assert find({"quantization_config": table}, headers).keys() <= headers.keys() | {
            CHECKPOINTS[kind][2]
        }
    with suppress(ConfigError):
        assert isinstance(scheme_of(table, "m").by_module()(["model.layers.0.mlp"]), str)


def places_in(table: dict[str, Any]) -> Iterator[list[str]]:
    for key, value in table.items():
        yield [key]
        for rest in places_in(value) if isinstance(value, dict) else ():
            yield [key, *rest]


@pytest.mark.parametrize("suffix", ["zero_point", "global_scale"])
def test_parts_that_no_codec_reads_are_refused(suffix: str) -> None:
    with pytest.raises(ConfigError, match=f"a.weight_{suffix}"):
        find(INT4, {**INT4_HEADERS, f"a.weight_{suffix}": ("I32", (6, 3))})


def test_the_group_size_of_files_and_configuration_must_agree() -> None:
    with pytest.raises(ConfigError, match="config.json says 4 bits in groups of 128. Do config"):
        find(weights(group_size=128), INT4_HEADERS)


def test_int4_may_have_one_scale_per_row() -> None:
    headers = {**INT4_HEADERS, "a.weight_scale": ("BF16", (48, 1))}
    shape = torch.tensor([48, 96], dtype=torch.int32).numpy().tobytes()
    found = find(weights(strategy="channel", group_size=None), headers, shape)
    assert found["a.weight"].codec == AffineGroups(96)


@pytest.mark.parametrize(
    ("columns", "codec"),
    [(256, AffineGroups(128)), (128, AffineGroups(64, bits=8))],
)
def test_of_integers_that_fill_as_many_words_the_stored_shape_chooses(
    columns: int, codec: AffineGroups
) -> None:
    config = weights(group_size=128)
    groups = config["quantization_config"]["config_groups"]
    groups["group_1"] = copy.deepcopy(groups["group_0"])
    groups["group_1"]["weights"] |= {"group_size": 64, "num_bits": 8}
    headers = {
        "a.weight_packed": ("I32", (48, 32)),
        "a.weight_scale": ("BF16", (48, 2)),
        "a.weight_shape": ("I32", (2,)),
    }
    shape = torch.tensor([48, columns], dtype=torch.int32).numpy().tobytes()
    found = find(config, headers, shape)["a.weight"]
    assert (found.codec, found.shape) == (codec, (48, columns))


def test_groups_of_modules_may_have_schemes_of_their_own() -> None:
    config = copy.deepcopy(INT4)
    groups = config["quantization_config"]["config_groups"]
    fp8 = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": "128x128"}
    groups["group_1"] = {"format": "float-quantized", "targets": [], "weights": fp8}
    headers = {
        **INT4_HEADERS,
        "b.weight": ("F8_E4M3", (130, 64)),
        "b.weight_scale": ("BF16", (2, 1)),
    }
    found = find(config, headers)
    assert found["a.weight"].codec == AffineGroups()
    assert found["b.weight"].codec == FloatBlocks(scale="BF16", product="BF16")
    with pytest.raises(ConfigError, match="fits no group"):
        find(INT4, headers)


@pytest.mark.parametrize(("strategy", "shape", "block"), [
    ("channel", (130, 1), (1, 0)), ("tensor", (1,), (0, 0)), ("tensor", (), (0, 0)),
])  # fmt: skip
def test_fp8_of_compressed_tensors_has_scales_of_rows_or_matrices(
    strategy: str, shape: tuple[int, ...], block: tuple[int, int]
) -> None:
    config = quantization(
        weights(num_bits=8, type="float", strategy=strategy), format="float-quantized"
    )
    headers = {
        "b.weight": ("F8_E4M3", (130, 64)),
        "b.weight_scale": ("F32", shape),
        "b.input_scale": ("F32", (1,)),
    }
    found = find(config, headers)["b.weight"]
    assert found.codec == FloatBlocks(block) and found.aside == ("b.input_scale",)


def test_codes_of_nf4_may_be_stored_under_another_dtype() -> None:
    headers = {**NF4_HEADERS, "a.weight": ("BF16", (1536, 1))}
    assert find(NF4, headers)["a.weight"].shape == (64, 96)


@pytest.mark.parametrize("change", [
    {"quant_type": "af4"}, {"dtype": "int8"}, {"blocksize": 0}, {"blocksize": 63},
    {"blocksize": "64"}, {"shape": [64, -96]}, {"shape": 6144}, {"nested_offset": "0"},
    {"nested_offset": True}, {"nested_dtype": "float16"}, {"nested_blocksize": 1},
])  # fmt: skip
def test_a_damaged_state_of_nf4_is_refused(change: dict[str, Any]) -> None:
    state = json.dumps({**json.loads(NF4_STATE), **change}).encode()
    with pytest.raises(ConfigError, match="quant_state.bitsandbytes__nf4' is malformed"):
        find(NF4, NF4_HEADERS, state)
    with pytest.raises(ConfigError, match="is malformed"):
        find(NF4, NF4_HEADERS, state[:-1])


def test_a_dtype_that_torch_lacks_is_refused_only_when_it_is_used() -> None:
    found = find({}, {**NORM, "a": ("F6_E2M3", (64,))})
    assert found["norm.weight"].nbytes == 128
    with pytest.raises(UnsupportedError, match="F6_E2M3"):
        assert found["a"].dtype


@pytest.mark.parametrize(("shape", "block"), [
    ((), (0, 0)), ((576,), (1, 0)), ((5, 1, 2, 1), (128, 128)),
])  # fmt: skip
def test_scales_of_modelopt_have_the_shape_of_their_blocks(
    shape: tuple[int, ...], block: tuple[int, int]
) -> None:
    config = quantization(MODELOPT, quant_algo="fp8_pb_wo")  # In lower case, as it writes these.
    headers = {"a.weight": ("F8_E4M3", (576, 200)), "a.weight_scale": ("F32", shape)}
    assert find(config, headers)["a.weight"].codec == FloatBlocks(block)
    with pytest.raises(ConfigError, match="fits no group"):
        find(config, {**headers, "a.weight_scale": ("F32", (7, 2))})


def test_nvfp4_of_modelopt_may_have_groups_of_32_and_its_packed_experts_are_refused() -> None:
    headers = {"a.weight": ("U8", (8, 48)), "a.weight_scale": ("F8_E4M3", (8, 3)),
               "a.weight_scale_2": ("F32", ())}  # fmt: skip
    assert find(MODELOPT, headers)["a.weight"].codec == nvfp4("TIMES", 32)
    packed = {"e.down_proj": ("F8_E4M3", (4, 8, 8)), "e.down_proj_weight_scale": ("F32", ())}
    with pytest.raises(ConfigError, match="'a.pre_quant_scale' multiplies .* without AWQ"):
        find(MODELOPT, {**MODELOPT_HEADERS, "a.pre_quant_scale": ("BF16", (64,))})
    with pytest.raises(ConfigError, match="'e.down_proj_weight_scale' is of experts"):
        find(MODELOPT, headers | packed)


def test_mxfp8_is_a_method_of_its_own() -> None:
    headers = {"a.weight": ("F8_E4M3", (64, 64)), "a.weight_scale_inv": ("U8", (64, 2))}
    found = find({"quantization_config": {"quant_method": "mxfp8"}}, headers)
    assert found["a.weight"].codec == FloatBlocks((1, 32), "U8")


def test_experts_of_fbgemm_have_a_scale_per_column() -> None:
    headers = {
        "e.gate_up_proj": ("F8_E4M3", (4, 64, 64)),
        "e.gate_up_proj_scale": ("F32", (4, 1, 64)),
    }
    found = find({"quantization_config": LAYOUTS["fbgemm"].table}, headers)
    assert found["e.gate_up_proj"].codec == FloatBlocks((0, 1))


def test_scales_of_activations_belong_to_the_weights_of_their_module(
    caplog: pytest.LogCaptureFixture,
) -> None:
    headers = {
        **MODELOPT_HEADERS,
        "a.b.weight": ("F8_E4M3", (8, 8)),
        "a.b.weight_scale": ("F32", ()),
    }
    caplog.set_level("INFO", logger="infinity")
    for _ in range(2):
        found = logical_tensors(MODELOPT, headers, read=bytes, where="/once")
        assert found["a.weight"].aside == ("a.input_scale", "a.k_scale")
    assert caplog.text.count("scales of activations") == 1


@pytest.mark.parametrize("kind", ["gptq", "zeros"])
def test_an_order_of_columns_is_read_and_one_of_groups_that_are_not_there_is_refused(
    kind: str,
) -> None:
    config, headers, name, codec, _ = CHECKPOINTS[kind]
    order = "a.g_idx" if kind == "gptq" else "a.weight_g_idx"
    headers = {**headers, order: ("I32", (96,))}
    config = quantization(config, desc_act=False)  # As where `dynamic` has it for a module.
    plain = torch.arange(96, dtype=torch.int32) // 32
    found = find(config, headers, plain.numpy().tobytes())[name]
    assert (found.codec, order in found.aside) == (codec, True)
    found = find(config, headers, plain.flip(0).numpy().tobytes())[name]
    assert found.codec == replace(codec, has_order=True) and found.names[-1] == order
    for wrong in (plain + 1, plain - 1):
        with pytest.raises(ConfigError, match=f"{order}' names groups"):
            find(config, headers, wrong.numpy().tobytes())
    with pytest.raises(ConfigError, match=f"{order}' is I32 .95,.; expected"):
        find(config, {**headers, order: ("I32", (95,))}, plain.numpy().tobytes())


@pytest.mark.parametrize(("bits", "group", "shapes"), [
    (8, 32, ((24, 48), (3, 12), (3, 48))), (4, -1, ((12, 48), (1, 6), (1, 48))),
])  # fmt: skip
def test_bits_and_groups_of_single_modules_are_found_by_their_shapes(
    bits: int, group: int, shapes: tuple
) -> None:
    parts = zip(("qweight", "qzeros", "scales"), ("I32", "I32", "F16"), shapes, strict=True)
    headers = {f"b.{part}": (dtype, shape) for part, dtype, shape in parts}
    config = quantization(GPTQ, dynamic={"+:b": {"bits": bits, "group_size": group}, "-:c": {}})
    found = find(config, {**GPTQ_HEADERS, **headers})
    assert found["a.weight"].codec == CHECKPOINTS["gptq"][3]
    size = 96 if group == -1 else group
    assert found["b.weight"].codec == AffineGroups(size, "F16", bits, "GPTQ", True, True)
    assert found["b.weight"].shape == (48, 96)


def test_modules_of_mlx_may_have_bits_and_groups_of_their_own() -> None:
    own = {"b": {"bits": 8, "group_size": 32}, "c": False}
    headers = {
        **MLX_HEADERS,
        "b.weight": ("U32", (48, 24)),
        "b.scales": ("BF16", (48, 3)),
        "b.biases": ("BF16", (48, 3)),
        "c.weight": ("BF16", (48, 96)),
    }
    found = find({"quantization": {**MLX["quantization_config"], **own}}, headers)
    assert found["a.weight"].codec == AffineGroups(64, layout="MLX")
    assert (found["b.weight"].codec, found["b.weight"].shape) == (
        AffineGroups(32, bits=8, layout="MLX"),
        (48, 96),
    )
    assert found["c.weight"].codec == Plain("BF16")


def test_codes_of_mlx_without_their_table_are_named() -> None:
    with pytest.raises(ConfigError, match="'a.weight' is U32, as MLX stores codes"):
        find({}, MLX_HEADERS)


HQQ_HEADERS: Headers = {
    "a.W_q": ("U8", (36, 64)),
    "a.scale": ("F16", (72, 1)),
    "a.zero": ("F16", (72, 1)),
    "a.shape": ("I64", (2,)),
    "a.nbits": ("I32", ()),
    "a.axis": ("I32", ()),
    "a.group_size": ("I32", ()),
    "a.compute_dtype": ("U8", (13,)),
}


def find_hqq(headers: Headers = HQQ_HEADERS, **facts: int) -> LogicalTensor:
    numbers = {"nbits": 4, "axis": 1, "group_size": 64, **facts}

    def read(name: str) -> bytes:
        fact = name.removeprefix("a.")
        if fact == "shape":
            return torch.tensor([48, 96]).numpy().tobytes()
        return numbers[fact].to_bytes(4, "little", signed=True)

    config = {"quantization_config": {"quant_method": "hqq"}}
    found = logical_tensors(config, headers, read=read, where="/model")
    assert set(found) == {"a.weight"}
    return found["a.weight"]


def test_small_tensors_of_hqq_say_how_a_weight_is_stored() -> None:
    found = find_hqq()
    assert found.codec == AffineGroups(64, "F16", 4, "HQQ", True)
    assert (found.shape, found.names) == ((48, 96), ("a.W_q", "a.scale", "a.zero"))
    as_floats = {**HQQ_HEADERS, "a.W_q": ("F16", (36, 32))}
    assert find_hqq(as_floats).codec == found.codec
    down = {**HQQ_HEADERS, "a.W_q": ("U8", (32, 72))}
    down |= {"a.scale": ("F16", (1, 72)), "a.zero": ("F16", (1, 72))}
    assert find_hqq(down, axis=0).codec == AffineGroups(64, "F16", 4, "HQQ_DOWN", True)
    with pytest.raises(ConfigError, match="'a.W_q' is quantized by HQQ with nbits=3"):
        find_hqq(nbits=3)
    with pytest.raises(ConfigError, match="'a.W_q' is F6_E2M3"):
        find_hqq(HQQ_HEADERS | {"a.W_q": ("F6_E2M3", HQQ_HEADERS["a.W_q"][1])})
    with pytest.raises(ConfigError, match="'a.zero' is missing"):
        find_hqq({name: fact for name, fact in HQQ_HEADERS.items() if name != "a.zero"})


def test_int8_in_the_order_of_a_kernel_is_refused() -> None:
    headers = {**INT8_HEADERS, "a.weight_format": ("U8", ())}
    assert find(INT8, headers, b"\0")["a.weight"].aside == ("a.weight_format",)
    with pytest.raises(ConfigError, match="'a.weight_format' says that 'a.weight'"):
        find(INT8, headers, b"\1")


def test_a_row_whose_last_word_is_short_has_the_columns_that_its_shape_says() -> None:
    config = weights(num_bits=8, strategy="channel", group_size=None)
    headers = {
        "a.weight_packed": ("I32", (5, 24)),
        "a.weight_scale": ("BF16", (5, 1)),
        "a.weight_shape": ("I64", (2,)),
    }
    shape = torch.tensor([5, 93]).numpy().tobytes()
    assert find(config, headers, shape)["a.weight"].shape == (5, 93)
    with pytest.raises(ConfigError, match="8 bits in groups of full rows"):
        find(config, headers, torch.tensor([5, 92]).numpy().tobytes())
