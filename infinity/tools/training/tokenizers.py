"""The tokenizers of `[data]`: bytes, a directory of transformers, and a directory of Kimi.

Kimi K2, K2 Thinking and Kimi Linear have no tokenizer.json. Their files are tiktoken's ranks, one
line for each token (its bytes in base64, and its rank), and a class of Python, which this package
does not run. By default transformers converts such ranks with the split pattern of another model,
so that numbers and Chinese text get other ids. Here it gets Kimi's pattern, and loads the result
with the directory's own names and chat template.

Kimi's class cuts texts of more than 400,000 characters, and runs of more than 25,000 characters
with or without spaces, before it splits them. This tokenizer does not.

Source: `tokenization_kimi.py` of moonshotai/Kimi-K2-Instruct; tiktoken's `load.py` for the file.
"""

from __future__ import annotations

import base64
import binascii
import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from infinity.bounded import read_json
from infinity.errors import ConfigError, refusing
from infinity.modules.reading.configuration import MOST_TOKENS
from infinity.tools.training.settle import tokenizer_of

_RANKS, _FAST, _NAMES = "tiktoken.model", "tokenizer.json", "tokenizer_config.json"
_TEMPLATE = "chat_template.jinja"
Ids = npt.NDArray[np.integer[Any]]
_MOST_ADDED = 1 << 16  # Ids behind the ranks; Kimi has 256.
_CODE = "tokenization_kimi"  # The module that tokenizer_config.json names.


class ByteTokenizer:
    """A tokenizer whose 256 tokens are the UTF-8 bytes."""

    name = "bytes"
    vocab_size = 256
    tokenizer = None  # No files of transformers go with an export.

    def __init__(self) -> None:
        self._fast: Any = None

    def encode_file(self, chunks: Iterator[bytes]) -> Iterator[Ids]:
        """Yields the ids of one file, given as consecutive chunks of its bytes."""
        for chunk in chunks:
            yield np.frombuffer(chunk, dtype=np.uint8)

    def encode(self, text: str) -> list[int]:
        """Returns the bytes of the text in UTF-8."""
        return list(text.encode())

    begin = encode

    def decode(self, ids: Sequence[int]) -> str:
        """Shows ids above 255, which a model may have, as the replacement character."""
        text = b"".join(bytes([i]) if i < 256 else "\ufffd".encode() for i in ids)
        return text.decode(errors="replace")

    def token(self, token_id: int) -> str:
        """Returns the token as messages show it."""
        return repr(bytes([token_id])) if 0 <= token_id < self.vocab_size else "no byte"

    def for_records(self) -> Any:
        """Returns the same tokenizer as an object of transformers. Token 0, which no text has, ends
        and fills records."""
        if self._fast is None:
            from tokenizers import Tokenizer, decoders, models, pre_tokenizers
            from transformers import PreTrainedTokenizerFast
            from transformers.convert_slow_tokenizer import bytes_to_unicode

            vocabulary = {char: byte for byte, char in bytes_to_unicode().items() if byte}
            backend = Tokenizer(models.BPE({"\0": 0} | vocabulary, []))
            backend.pre_tokenizer = pre_tokenizers.ByteLevel(
                add_prefix_space=False, use_regex=False
            )
            backend.decoder = decoders.ByteLevel()
            self._fast = PreTrainedTokenizerFast(
                tokenizer_object=backend, pad_token="\0", eos_token="\0"
            )
        return self._fast


class HuggingFaceTokenizer:
    """The tokenizer of a local directory. `tokenizer` is the object of transformers."""

    def __init__(self, path: Path) -> None:
        from transformers import AutoTokenizer

        if not path.is_dir():
            raise ConfigError(f"data.tokenizer: {path} is no directory")
        # A broken directory makes transformers raise any exception.
        with refusing(f"data.tokenizer: {path} cannot be loaded", Exception):
            if is_kimi(path):
                self.tokenizer = load_kimi(path)
            else:
                self.tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
            vocabulary = self.tokenizer.get_vocab()
        if not vocabulary:  # Some releases of transformers load ids of 2^32 - 1 as no tokens.
            raise ConfigError(f"data.tokenizer: {path} has no tokens; expected a vocabulary")
        last = max(vocabulary, key=vocabulary.__getitem__)
        largest = vocabulary[last]
        if largest >= MOST_TOKENS:
            raise ConfigError(
                f"data.tokenizer: {path} gives {last!r} the id {largest}; expected ids below "
                f"{MOST_TOKENS}. Use the model's own tokenizer"
            )
        self.name = str(path)
        self.vocab_size = max(len(self.tokenizer), largest + 1)

    def encode_file(self, chunks: Iterator[bytes]) -> Iterator[Ids]:
        """Yields the ids of a file, line by line, and the end-of-text token at its end."""
        for text in _complete_lines(chunks):
            yield np.asarray(self.encode(text), dtype=np.int64)
        if self.tokenizer.eos_token_id is not None:
            yield np.asarray([self.tokenizer.eos_token_id], dtype=np.int64)

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text, without special tokens."""
        with refusing_texts(self.name):
            ids = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return list(ids)

    def begin(self, text: str) -> list[int]:
        """Returns the ids of a text that a model is to continue: behind the special tokens that the
        tokenizer puts before a text, unless it has them, and without those at its end."""
        own = self.encode(text)
        ids = list(self.tokenizer(text, verbose=False)["input_ids"])
        lengths = range(len(ids) - len(own) + 1)
        before = next((ids[:n] for n in lengths if ids[n : n + len(own)] == own), [])
        return own if own[: len(before)] == before else before + own

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of the ids."""
        return str(self.tokenizer.decode(list(ids)))

    def token(self, token_id: int) -> str:
        """Returns the token as messages show it."""
        if not 0 <= token_id < MOST_TOKENS:
            return "none"
        return repr(self.tokenizer.convert_ids_to_tokens(token_id))

    def for_records(self) -> Any:
        """Returns the object of transformers."""
        return self.tokenizer


# Both convert text to ids that are less than `vocab_size`.
Tokenizer: TypeAlias = ByteTokenizer | HuggingFaceTokenizer


def open_tokenizer(which: Path | str) -> Tokenizer:
    """Opens the settled `data.tokenizer`: "bytes", or a local Hugging Face directory."""
    assert which != "auto", "training.settle has not been asked"
    return ByteTokenizer() if which == "bytes" else HuggingFaceTokenizer(Path(which))


@contextmanager
def refusing_texts(name: str) -> Iterator[None]:
    """Turns the exception for a text that the tokenizer `name` cannot encode into a ConfigError.
    The library in Rust raises no kind of its own."""
    try:
        yield
    except Exception as error:
        if type(error) is not Exception:
            raise
        raise ConfigError(
            f"data.tokenizer: {name} cannot encode a text: {error}. Use the model's own tokenizer, "
            "or texts whose words it has"
        ) from error


def open_same(tokenizer: Tokenizer, directory: Path, key: str) -> Any:
    """Returns the tokenizer in a directory, as an object of transformers. Raises ConfigError, which
    begins with `key`, for another one than `tokenizer`. One without a tokenizer has bytes."""
    other = open_tokenizer(tokenizer_of(directory).value).for_records()
    if other.get_vocab() != tokenizer.for_records().get_vocab():
        raise ConfigError(
            f"{key}: {directory} has another tokenizer than {tokenizer.name}; expected the same "
            "tokens with the same ids"
        )
    return other


def _complete_lines(chunks: Iterator[bytes]) -> Iterator[str]:
    """Yields text in chunks that end with a line, so that no chunk cuts a character or a word.

    A character cut by the limit becomes the replacement character. A line longer than a chunk stays
    in one chunk.
    """
    rest = b""
    for chunk in chunks:
        rest += chunk
        end = rest.rfind(b"\n") + 1
        if end:
            yield rest[:end].decode(errors="replace")
            rest = rest[end:]
    if rest:
        yield rest.decode(errors="replace")


# -- Kimi ------------------------------------------------------------------------------------------

# What splits a text before bytes are merged. Chinese characters stand apart from other letters; a
# number has at most three digits.
_LETTERS_BUT_HAN = r"\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]"
_UPPER, _LOWER = rf"[\p{{Lu}}\p{{Lt}}{_LETTERS_BUT_HAN}]", rf"[\p{{Ll}}{_LETTERS_BUT_HAN}]"
_CONTRACTED = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTED}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTED}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)


def is_kimi(directory: Path) -> bool:
    """Whether the directory has ranks and names Kimi's class, and has no fast tokenizer."""
    has_files = (directory / _RANKS).is_file() and (directory / _NAMES).is_file()
    if not has_files or (directory / _FAST).exists():
        return False
    return _CODE in json.dumps(_names(directory).get("auto_map"))


def load_kimi(directory: Path) -> Any:
    """Returns the tokenizer of a directory that `is_kimi`, as an object of transformers.

    Raises ConfigError for files that are not what Kimi's class reads.
    """
    from transformers import AutoTokenizer

    names = _names(directory)
    ranks = _read_ranks(directory / _RANKS)
    added = _added(names, len(ranks), directory)
    backend = _backend(ranks, added)
    for index, (content, _) in enumerate(added, start=len(ranks)):
        if backend.token_to_id(content) != index:
            raise ConfigError(
                f"data.tokenizer: {directory / _NAMES} calls token {index} {content!r}, which is "
                f"token {backend.token_to_id(content)} already; the files are of two models"
            )
    kept = {
        key: value for key, value in names.items() if key not in ("auto_map", "tokenizer_class")
    }
    with tempfile.TemporaryDirectory() as made:
        backend.save(str(Path(made, _FAST)))
        kept["tokenizer_class"] = "PreTrainedTokenizerFast"
        Path(made, _NAMES).write_text(json.dumps(kept))
        if (directory / _TEMPLATE).is_file():
            Path(made, _TEMPLATE).write_bytes((directory / _TEMPLATE).read_bytes())
        tokenizer = AutoTokenizer.from_pretrained(made, local_files_only=True)
    tokenizer.name_or_path = str(directory)
    return tokenizer


def _names(directory: Path) -> dict[str, Any]:
    table = read_json(directory / _NAMES, is_strict=False)
    return table if isinstance(table, dict) else {}


def _read_ranks(path: Path) -> dict[bytes, int]:
    """Returns the rank of each token. Ranks are all numbers from 0 on."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        what = f"data.tokenizer: line {number} of {path} is no token and its rank"
        with refusing(what, ValueError, binascii.Error, remedy="; download the file again"):
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
    if sorted(ranks.values()) != list(range(len(ranks))) or not all(
        bytes([byte]) in ranks for byte in range(256)
    ):
        raise ConfigError(
            f"data.tokenizer: expected {path} to have all 256 bytes, and all ranks below its "
            f"{len(ranks)} tokens; a part is missing: download the file again"
        )
    return ranks


def _added(names: dict[str, Any], num_ranks: int, directory: Path) -> list[tuple[str, bool]]:
    """Returns the tokens behind the ranks with whether they are special, by their ids: those that
    have names, and what reserves the ids between them."""
    named: dict[int, tuple[str, bool]] = {}
    what = f"data.tokenizer: {directory / _NAMES} names no tokens (added_tokens_decoder)"
    kinds = (KeyError, AttributeError, TypeError, ValueError)
    with refusing(what, *kinds, remedy="; download it again"):
        for key, token in names["added_tokens_decoder"].items():
            named[int(key)] = str(token["content"]), bool(token.get("special", True))
    if named and min(named) < num_ranks:
        raise ConfigError(
            f"data.tokenizer: {directory / _NAMES} has a name for token {min(named)}, and "
            f"{_RANKS} has {num_ranks} tokens already; the files are of two models"
        )
    if named and max(named) >= num_ranks + _MOST_ADDED:
        raise ConfigError(
            f"data.tokenizer: {directory / _NAMES} has a name for token {max(named)}; expected ids "
            f"below {num_ranks + _MOST_ADDED}; download it again"
        )
    every = range(num_ranks, max(named, default=num_ranks - 1) + 1)
    return [named.get(index, (f"<|reserved_token_{index}|>", True)) for index in every]


def _backend(ranks: dict[bytes, int], added: list[tuple[str, bool]]) -> Any:
    """Returns the tokenizer of the tokenizers library. Two tokens are merged if their bytes are a
    token, in the order of the ranks of these."""
    from tokenizers import AddedToken
    from transformers.convert_slow_tokenizer import TikTokenConverter

    converter: Any = TikTokenConverter(pattern=PATTERN)
    converter.load_tiktoken_bpe = lambda _: ranks  # Its own needs the package tiktoken.
    backend = converter.converted()
    for content, is_special in added:
        named = [AddedToken(content, normalized=False, special=is_special)]
        (backend.add_special_tokens if is_special else backend.add_tokens)(named)
    return backend
