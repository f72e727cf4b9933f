"""Parts of PyTorch and transformers that are not public stand in `infinity/private`, are there in
this release, and are named with what breaks where a release has lost them."""

from __future__ import annotations

import ast
import functools
import inspect
import re
from collections import defaultdict
from importlib import import_module
from pathlib import Path
from typing import Any

import accelerate
import peft
import pytest
import torch
import transformers
from peft.tuners.lora.layer import ParamWrapper
from torch import nn

import infinity
from infinity.errors import UnsupportedError
from infinity.private import PrivatePart, find
from infinity.private import torch as of_torch
from infinity.private import transformers as of_transformers

PACKAGE = Path(infinity.__file__).parent
PARTS: dict[str, PrivatePart] = {**of_torch.PARTS, **of_transformers.PARTS}
LIBRARIES = {"accelerate", "diffusers", "peft", "torch", "transformers", "trl"}
# Python's, and marks of this package on parameters.
OTHERS = {"_current_frames", "_exit", "_getframe", "_is_guarded", "_offloaded_by"}


@functools.cache
def trees() -> list[tuple[str, ast.Module]]:
    named = {str(path.relative_to(PACKAGE)): path for path in sorted(PACKAGE.rglob("*.py"))}
    return [
        (name, ast.parse(path.read_text()))
        for name, path in named.items()
        if not name.startswith(("private/", "testing/"))
    ]


@functools.cache
def imported_parts() -> set[tuple[str, str]]:
    """(module, name) of each part that a module imports."""
    return {
        (node.module or "", alias.name)
        for _, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


# -- Each part -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(PARTS))
def test_a_part_is_in_this_release(name: str) -> None:
    module = of_torch if name in of_torch.PARTS else of_transformers
    assert getattr(module, name) is not None or PARTS[name].has_substitute


@pytest.mark.parametrize("name", list(PARTS))
def test_a_part_that_is_missing_is_named_with_what_breaks(name: str) -> None:
    part = PARTS[name]
    module, _, attributes = part.path.partition(":")
    lost = {name: part._replace(path=f"{module}:{attributes}_lost")}
    if part.has_substitute:
        assert find(lost, {}, name) is None
        return
    package = module.partition(".")[0]
    says = rf"{package} \d+\.\d+\S* has no {re.escape(f'{module}.{attributes}_lost')}, and without"
    with pytest.raises(UnsupportedError, match=f"{says} it {re.escape(part.breaks)}; install"):
        find(lost, {}, name)


def test_a_module_that_is_missing_is_a_part_that_is_missing() -> None:
    with pytest.raises(UnsupportedError, match=r"has no torch\.lost\.a, and without it b"):
        find({"a": PrivatePart("torch.lost:a", "b")}, {}, "a")


@pytest.mark.parametrize("name", list(PARTS))
def test_a_part_is_used(name: str) -> None:
    kind = "torch" if name in of_torch.PARTS else "transformers"
    assert (f"infinity.private.{kind}", name) in imported_parts()


# -- Nothing else ----------------------------------------------------------------------------------


def test_no_other_module_imports_a_part() -> None:
    found = defaultdict(list)
    paths = {tuple(re.split("[.:]", part.path)) for part in PARTS.values()}
    for file, tree in trees():
        for node in ast.walk(tree):
            if not isinstance(node, ast.ImportFrom) or node.module is None:
                continue
            modules = node.module.split(".")
            if modules[0] not in LIBRARIES:
                continue
            for alias in node.names:
                is_private = any(word.startswith("_") for word in [*modules, alias.name])
                if is_private or (*modules, alias.name) in paths:
                    found[file].append(f"{node.module}.{alias.name}")
    assert not found


def test_private_attributes_of_other_packages_are_listed_and_no_others() -> None:
    own, used = set(), defaultdict(set)
    for file, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                own.add(node.name)
            elif isinstance(node, ast.AnnAssign | ast.Assign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                own |= {target.id for target in targets if isinstance(target, ast.Name)}
            elif isinstance(node, ast.Attribute) and re.match("_[a-zA-Z]", node.attr):
                used[node.attr].add(file)
                is_self = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
                if is_self and isinstance(node.ctx, ast.Store):
                    own.add(node.attr)
    listed = of_torch.ATTRIBUTES | of_transformers.ATTRIBUTES
    foreign = {name: files for name, files in used.items() if name not in own | OTHERS}
    assert {name: foreign[name] for name in foreign.keys() - listed} == {}
    assert listed - used.keys() == set()


def test_the_attributes_are_in_this_release() -> None:
    tensor = torch.ones(1, requires_grad=True)
    node = (tensor * 2).grad_fn
    sources = [
        inspect.getsource(transformers.PreTrainedModel), inspect.getsource(transformers.Trainer),
        inspect.getsource(accelerate.Accelerator), inspect.getsource(ParamWrapper),
        inspect.getsource(torch.distributed.distributed_c10d),
        inspect.getsource(torch._dynamo.symbolic_convert),
        inspect.getsource(import_module("transformers.core_model_loading")),
        inspect.getsource(import_module("transformers.modeling_utils")),
        inspect.getsource(import_module("transformers.integrations.moe")),
        inspect.getsource(import_module("trl.trainer.grpo_trainer")),
        inspect.getsource(import_module("diffusers.models.modeling_utils")),
        inspect.getsource(import_module("diffusers.pipelines.flux.pipeline_flux")),
    ]  # fmt: skip
    objects: list[Any] = [
        tensor, node, nn.GRU(1, 1), torch.ops.aten.detach.default, torch.autograd.Variable,
    ]  # fmt: skip
    for name in of_torch.ATTRIBUTES | of_transformers.ATTRIBUTES:
        is_there = any(hasattr(each, name) for each in objects)
        assert is_there or any(name in source for source in sources), name


def test_trainer_has_the_methods_that_an_offloaded_one_overrides() -> None:
    for name in of_transformers.TRAINER_METHODS:
        assert hasattr(transformers.Trainer, name), name


def test_factors_of_an_expert_adapter_are_those_of_peft() -> None:
    """PEFT gives them from 0.21 on, and as a product before."""
    from infinity.modules.tiling.expert_adapters import _factors

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Parameter(torch.randn(4, 6, 10))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.up

    for is_swapped in (False, True):
        torch.manual_seed(0)
        config = peft.LoraConfig(target_parameters=["experts.up"], r=3, init_lora_weights=False)
        model = nn.ModuleDict({"experts": Experts()})
        wrapper = peft.get_peft_model(model, config).base_model.model["experts"]
        wrapper._did_swap_in_out_features = is_swapped
        if is_swapped:
            for table in (wrapper.lora_A, wrapper.lora_B):
                table["default"].weight.data = torch.randn(table["default"].weight.shape)
        left, right, scaling = _factors(wrapper, "default")
        if hasattr(wrapper, "get_delta_factors"):
            expected = wrapper.get_delta_factors("default")
            assert torch.equal(left, expected[0]) and torch.equal(right, expected[1])
            assert scaling == expected[2]
        product = wrapper.get_delta_weight("default")
        torch.testing.assert_close(scaling * left @ right, product)
