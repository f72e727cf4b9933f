"""Tiny models for tests, benches and examples: each shows one way in which real code uses
parameters.

The models are plain PyTorch, without transformers and without the engine. No class needs arguments,
each is deterministic under `torch.manual_seed` before construction, and each `forward` takes
keyword tensors and returns a value from which a loss can be made. `inputs(seed)` of each class
returns the keyword arguments of one call. The docstring of a class names its habit.
"""

from __future__ import annotations

from tests.support.models.blocks import (
    Autocast,
    Conditional,
    DecoderBlock,
    Dropout,
    Frozen,
    Layouts,
    MixedDtypes,
    Mlp,
    OddShapes,
    TinyDecoder,
    TinyModel,
    Unused,
    ZeroGradient,
)
from tests.support.models.structure import (
    CalledSideways,
    Checkpointed,
    CustomFunction,
    InnerGradient,
    InPlace,
    KeywordTensors,
    NestedLists,
    ParentReads,
    PassesThrough,
    Recursive,
    ReturnsParameter,
    StructuredOutputs,
    TiedAcross,
    UsedTwice,
)
from tests.support.models.torch_modules import (
    Attention,
    ConvNet,
    Embeddings,
    HookedWeightNorm,
    Parametrized,
    Recurrent,
)

__all__ = [
    "ALL",
    "Attention",
    "Autocast",
    "CalledSideways",
    "Checkpointed",
    "Conditional",
    "ConvNet",
    "CustomFunction",
    "DecoderBlock",
    "Dropout",
    "Embeddings",
    "Frozen",
    "HookedWeightNorm",
    "InPlace",
    "InnerGradient",
    "KeywordTensors",
    "Layouts",
    "MixedDtypes",
    "Mlp",
    "NestedLists",
    "OddShapes",
    "Parametrized",
    "ParentReads",
    "PassesThrough",
    "Recurrent",
    "Recursive",
    "ReturnsParameter",
    "StructuredOutputs",
    "TiedAcross",
    "TinyDecoder",
    "TinyModel",
    "Unused",
    "UsedTwice",
    "ZeroGradient",
]

ALL: dict[str, type[TinyModel]] = {
    cls.__name__: cls
    for cls in (
        Mlp, TinyDecoder, UsedTwice, TiedAcross, ParentReads, ReturnsParameter, CalledSideways,
        Recursive, Unused, Conditional, ZeroGradient, Frozen, NestedLists, StructuredOutputs,
        KeywordTensors, PassesThrough, InPlace, CustomFunction, InnerGradient, Checkpointed,
        ConvNet, Recurrent, Attention, Parametrized, HookedWeightNorm, Embeddings, OddShapes,
        Layouts, MixedDtypes, Autocast, Dropout,
    )
}  # fmt: skip
"""Every tiny model by name; a test that wants "any module" runs over this table."""
