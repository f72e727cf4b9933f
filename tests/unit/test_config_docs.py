"""The reference, the JSON Schema and the examples agree with the schema."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from infinity.config import SwapConfig, render
from infinity.config.problems import known_keys

ROOT = Path(__file__).resolve().parents[2]


def test_reference_is_up_to_date() -> None:
    """Else: infinity config schema --markdown > docs/CONFIG.md."""
    assert (ROOT / "docs" / "CONFIG.md").read_text() == render.to_markdown()


def test_reference_describes_every_key() -> None:
    reference = render.to_markdown()
    for table, keys in known_keys(SwapConfig).items():
        title = f"[[{table[:-2]}]]" if table.endswith("[]") else f"[{table}]"
        is_described = not table or table.startswith("adapters")  # Those are as [adapter].
        assert is_described or f"## `{title}`" in reference
        for key in keys:
            is_section = f"{table}.{key}".lstrip(".") in known_keys(SwapConfig)
            assert is_section or f"* **`{key}`** (" in reference, (table, key)


def test_json_schema_describes_every_key_and_refuses_others() -> None:
    schema = render.json_schema()
    sections: list[dict[str, Any]] = [schema, *schema["$defs"].values()]
    tables = known_keys(SwapConfig)
    # Tables of the same keys are one section of the schema.
    assert len(sections) == len({tuple(keys) for keys in tables.values()})
    for section in sections:
        assert section["description"] and section["additionalProperties"] is False
        for key, node in section["properties"].items():
            assert "description" in node or "$ref" in json.dumps(node), key


def test_json_schema_writes_defaults_as_a_file_would() -> None:
    definitions = render.json_schema()["$defs"]
    assert definitions["Io"]["properties"]["stripe"]["default"] == "4MiB"
    assert definitions["HostTier"]["properties"]["capacity"]["default"] == "auto"


def test_examples_are_valid_and_equal_in_toml_and_yaml() -> None:
    toml = SwapConfig.load(ROOT / "examples" / "swap.toml")
    assert SwapConfig.load(ROOT / "examples" / "swap.yaml") == toml
    toml.require("model", "data", "train")
