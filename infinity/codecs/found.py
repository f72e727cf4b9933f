"""The logical tensors of a checkpoint, as they are found in its headers."""

from __future__ import annotations

import fnmatch
import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import torch

from infinity.codecs.part import Codec, Shape, StoredPart, parts_of, stored_nbytes
from infinity.codecs.plain import Plain
from infinity.codecs.rounding import FLOAT_DTYPES
from infinity.errors import ConfigError

# Name to (dtype as safetensors calls it, shape).
Headers = Mapping[str, tuple[str, Shape]]

_WEIGHT_SUFFIXES = ("weight", "_packed", "_blocks", "gate_up_proj", "down_proj")
_CODE_DTYPES = (
    "U8", "I8", "I32", "U32", "F4", "F6_E2M3", "F6_E3M2", "F8_E4M3", "F8_E5M2", "F8_E8M0",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class LogicalTensor:
    """One logical tensor of a checkpoint.

    names: of the stored tensors, in the order of `codec.parts(shape)`
    shape: of the logical tensor
    aside: names of tensors that belong to it and that decoding does not need
    """

    codec: Codec
    names: tuple[str, ...]
    shape: Shape
    aside: tuple[str, ...] = ()

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the logical tensor. Raises UnsupportedError if torch does not have it."""
        return self.codec.dtype

    @property
    def nbytes(self) -> int:
        """The bytes of the stored tensors that decoding needs."""
        return stored_nbytes(self.codec, self.shape)


class FoundTensors:
    """The headers of a checkpoint, and the logical tensors that were found in them so far.

    where: begins every message
    read: returns the bytes of a stored tensor
    """

    def __init__(self, headers: Headers, where: str, read: Callable[[str], bytes]) -> None:
        self.headers = headers
        self.where = where
        self.read = read
        self.logical: dict[str, LogicalTensor] = {}
        self._used: set[str] = set()

    def add(
        self,
        name: str,
        codec: Codec,
        shape: Shape,
        names: Sequence[str],
        *,
        parts: Sequence[StoredPart] | None = None,
        aside: Sequence[str] = (),
    ) -> None:
        """Adds a logical tensor.

        names: of its stored tensors, in the order of the codec's parts
        parts: their dtypes and shapes, if the writer has others than the codec for the same bytes
        aside: further tensors that belong to it; those that are not there are left out

        Raises ConfigError if a stored tensor is missing, or has another dtype or shape.
        """
        for part, stored in zip(parts or self.parts(name, codec, shape), names, strict=True):
            self._check(codec, part, stored)
        if name in self.logical or not self._used.isdisjoint(names):
            raise self.error(f"{name!r} is stored twice")
        others = tuple(other for other in aside if other in self.headers)
        self.logical[name] = LogicalTensor(codec, tuple(names), shape, others)
        self._used.update(names, others)

    def _check(self, codec: Codec, part: StoredPart, name: str) -> None:
        if name not in self.headers:
            raise self.error(
                f"{name!r} is missing, without which a weight in {codec.format} cannot be decoded; "
                "copy the checkpoint again, or use one that is complete"
            )
        dtype, shape = self.headers[name]
        if (dtype, shape) != (part.dtype, part.shape):
            raise self.error(
                f"{name!r} is {dtype} {shape}; {codec.format} needs {part.dtype} {part.shape}. Do "
                "config.json and the files belong together?"
            )

    def parts(self, name: str, codec: Codec, shape: Shape) -> tuple[StoredPart, ...]:
        """Returns `codec.parts(shape)`. Raises ConfigError, with the name, as that does."""
        try:
            return parts_of(codec, shape)
        except ConfigError as error:
            raise self.error(f"{name!r}: {error}") from None

    def matrix(self, name: str) -> Shape:
        """Returns the shape of a stored tensor. Raises ConfigError if it is no matrix."""
        shape = self.headers[name][1]
        if len(shape) < 2:
            raise self.error(f"{name!r} has shape {shape}; codes are those of matrices")
        return shape

    def scales(self, name: str, dtypes: Iterable[str] = FLOAT_DTYPES) -> tuple[str, Shape]:
        """Returns (dtype, shape) of scales. Raises ConfigError without them, for other dtypes."""
        dtype, shape = self.headers.get(name, ("", ()))
        if dtype not in dtypes:
            came = f"is {dtype}" if dtype else "is missing"
            raise self.error(f"{name!r} {came}; expected scales of {', '.join(dtypes)}")
        return dtype, shape

    def unused(self, suffix: str) -> list[str]:
        """Returns the names with this end that belong to no logical tensor yet."""
        return [name for name in self.headers if name.endswith(suffix) and name not in self._used]

    def is_used(self, name: str) -> bool:
        """Whether a stored tensor belongs to a logical one already."""
        return name in self._used

    def put_aside(self, suffixes: tuple[str, ...]) -> bool:
        """Gives tensors with these ends to a logical tensor of their module, or of one inside it.
        Returns whether there are any."""
        names = [n for n in self.headers if n.endswith(suffixes) and n not in self._used]
        owners: dict[str, str] = {}
        for name in self.logical if names else ():
            module = name
            while module := module.rpartition(".")[0]:
                owners.setdefault(module, name)
        for name in names:
            owner = owners.get(name.rpartition(".")[0])
            if owner is not None:
                logical = self.logical[owner]
                self.logical[owner] = replace(logical, aside=(*logical.aside, name))
                self._used.add(name)
        return bool(names)

    def refuse_leftovers(self, suffixes: tuple[str, ...], format_name: str) -> None:
        """Raises ConfigError for codes, scales and the like that belong to no logical tensor."""
        for name, (dtype, _) in self.headers.items():
            if name in self._used:
                continue
            if name.endswith(suffixes):
                raise self.error(
                    f"{name!r} belongs to no weight that {format_name} can decode here; copy the "
                    "checkpoint again, or use one that is complete"
                )
            if dtype in _CODE_DTYPES and name.endswith(_WEIGHT_SUFFIXES):
                raise self.error(
                    f"{name!r} is {dtype}: codes whose scales are missing, or of another format "
                    f"than {format_name}"
                )

    def add_plain(self) -> None:
        """Adds every tensor that belongs to no logical tensor yet as one of its own.

        Raises ConfigError for one that is also quantised.
        """
        for name, (dtype, shape) in self.headers.items():
            if name in self._used:
                continue
            if name in self.logical:
                raise self.error(f"{name!r} is stored twice: quantised and as numbers")
            self.logical[name] = LogicalTensor(Plain(dtype), (name,), shape)

    def error(self, text: str) -> ConfigError:
        """Returns an error that begins with `where`."""
        return ConfigError(f"{self.where}: {text}")


def no_codec(where: str, told: str, known: str) -> ConfigError:
    """Returns the error of a format without a codec: `told` is the writer, and what it says."""
    return ConfigError(
        f"{where}: its weights are quantized by {told}; a codec exists for {known}. Use such a "
        "checkpoint, or the bfloat16 one of the model"
    )


@dataclass(frozen=True, slots=True)
class Scheme:
    """The facts about quantised weights in a configuration.

    find: adds all of one kind of checkpoint. Raises ConfigError as `logical_tensors`
    formats: patterns of modules, each with a format by its name in plans, "" for numbers. The first
        that fits counts. None at all where only the files say how large weights are
    is_exact: a name is of one module, not of those inside it, too
    """

    find: Callable[[FoundTensors], None]
    formats: Sequence[tuple[str, str]] = ()
    is_exact: bool = False

    def by_module(self) -> Callable[[Iterable[str]], str]:
        """Returns what gives the format of a module, by any of its names."""
        names: dict[str, int] = {}
        patterns: list[tuple[int, re.Pattern[str]]] = []
        for number, (pattern, _) in enumerate(self.formats):
            is_glob = any(sign in pattern for sign in "*?[")
            if pattern.startswith("re:") or is_glob:
                text = fnmatch.translate(f"{pattern}*") if pattern[:3] != "re:" else pattern[3:]
                with suppress(re.error, OverflowError, RecursionError):
                    patterns.append((number, re.compile(text)))
            else:
                names.setdefault(pattern, number)

        def format_of(modules: Iterable[str]) -> str:
            known = {module: module.split(".") for module in modules}
            fits = [n for n, pattern in patterns if any(map(pattern.match, known))]
            fits += [names[module] for module in known if module in names]
            for parts in known.values() if not self.is_exact else ():
                spans = itertools.combinations(range(len(parts) + 1), 2)
                fits += [names[n] for a, b in spans if (n := ".".join(parts[a:b])) in names]
            return self.formats[min(fits)][1] if fits else ""

        return format_of
