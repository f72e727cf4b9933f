"""Images of records, and what the model's processor makes of them.

A record names its images in a column (`images` or `image`) or in the parts of its messages. It
becomes TRL's form: messages whose content is a list of parts, one of them {"type": "image"} for
each image, and the images in the order of these. TRL's collator makes the batches while the run
trains. Before it starts, each record has passed the same collator once, in a child process, so that
a run does not end at an image that is missing.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import logging
import os
import resource
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from infinity.errors import ConfigError, refusing
from infinity.tools.training.bounded_call import call_bounded
from infinity.tools.training.chat import Template, Writer, map_records, open_template, values_of
from infinity.tools.training.conversation import Message
from infinity.tools.training.data_files import rows_at_once, stamp_of
from infinity.tools.training.tokenizers import Tokenizer

_log = logging.getLogger("infinity")

COLUMNS = ("images", "image")
Image = dict[str, Any]  # `bytes` of a file, or its `path`; the other one is None.

_TAG = "<image>"  # Where an image stands in a text: LLaVA, LLaMA-Factory, ms-swift.
_MESSAGES = ("messages", "prompt", "completion")
_COUNTS = (
    "num_images", "num_tokens", "largest_id", "num_learned", "nbytes", "reading_nbytes",
)  # fmt: skip


def has_images(row: dict[str, Any]) -> bool:
    """Whether a row of a file names an image, in a column or in a message."""
    turns = row.get("messages") or row.get("prompt") or ()
    contents = [t.get("content") for t in turns if isinstance(t, dict)]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return any(row.get(name) for name in COLUMNS) or any(
        isinstance(part, dict) and part.get("type") in ("image", "image_url") for part in parts
    )


def place_images(record: dict[str, Any], columns: Any, folder: Path, at: str) -> list[Image]:
    """Gives the messages of a record with images lists of parts; returns the images in their order.

    columns: the record in its file, in `folder`, where relative paths begin
    Raises ConfigError unless each image has one place: a part of a message, `<image>` in a text,
    or, if there is neither, the beginning of the first message of the user.
    """
    listed: Any = next((columns[name] for name in COLUMNS if columns.get(name)), [])
    waiting = list(listed) if isinstance(listed, list) else [listed]
    lists = {name: value for name, value in record.items() if isinstance(value, list)}
    talk = list(chain.from_iterable(lists.values()))
    if not waiting and not any(_image_parts(message) for message in talk):
        return []
    if not set(lists) <= set(_MESSAGES) or not talk:
        raise ConfigError(f"{at}: images: expected messages, or a prompt and a completion of these")
    for message in talk:
        if "weight" in message:
            raise ConfigError(f"{at}: with images every answer is learned; expected no marks of it")
        if isinstance(message.get("content"), str):
            message["content"] = list(_split(message["content"], has_tags=bool(waiting)))
    parts = [part for message in talk for part in _image_parts(message)]
    if not parts:
        asked = next((message for message in talk if message["role"] == "user"), None)
        if asked is None:
            raise ConfigError(f"{at}: images: no message of a user could be about them")
        parts = [{"type": "image"} for _ in waiting]
        asked["content"] = parts + asked["content"]
    if any(
        _image_parts(m) for m in talk if m["role"] == "tool" or m in lists.get("completion", ())
    ):
        raise ConfigError(f"{at}: images: TRL gives none to a tool's message or a completion")
    num_places = sum("image" not in part for part in parts)
    if num_places != len(waiting):
        raise ConfigError(
            f"{at}: images: {len(waiting)} images and {num_places} places for them; expected as "
            f'many parts {{"type": "image"}}, or {_TAG} in the texts, as images'
        )
    return [
        located(part.pop("image") if "image" in part else waiting.pop(0), folder, f"{at}: images")
        for part in parts
    ]


def _image_parts(message: Message) -> list[Message]:
    content = message.get("content")
    return [p for p in content if p["type"] == "image"] if isinstance(content, list) else []


def _split(text: str, *, has_tags: bool) -> Iterator[Message]:
    first, *rest = text.split(_TAG) if has_tags else [text]
    if first or not rest:
        yield {"type": "text", "text": first}
    for later in rest:
        yield {"type": "image"}
        if later:
            yield {"type": "text", "text": later}


def located(value: Any, folder: Path, at: str) -> Image:
    """Returns an image of a record: a path from `folder`, bytes, or a table of one of both. Raises
    ConfigError."""
    if isinstance(value, dict):  # Of Parquet, or OpenAI's `image_url`.
        value = next((value[key] for key in ("bytes", "path", "url") if value.get(key)), None)
    if isinstance(value, str) and value.startswith("data:"):
        with refusing(f"{at}: expected an image in base64", binascii.Error):
            value = base64.b64decode(value.partition(",")[2], validate=True)
    if isinstance(value, bytes) and value:
        return {"bytes": value, "path": None}
    if not isinstance(value, str) or not value or "\0" in value:
        raise ConfigError(f"{at}: expected the path of a file, or its bytes; got {value!r:.80}")
    path = value.removeprefix("file://")
    if "://" in path:
        raise ConfigError(f"{at}: {value:.200}: a run downloads nothing; expected a file")
    return {"bytes": None, "path": os.path.normpath(folder / path)}


# -- The processor ---------------------------------------------------------------------------------


def open_processor(tokenizer: Tokenizer) -> Any:
    """Returns the processor of the tokenizer's directory, with the tokenizer's own padding.

    A run has no videos, so where torchvision is missing the processor has no part for these. Raises
    ConfigError for a directory without one, and for one that cannot be loaded.
    """
    from transformers import AutoConfig, AutoProcessor, ProcessorMixin
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING
    from transformers.utils import is_torchvision_available

    path, options = tokenizer.name, {"local_files_only": True, "trust_remote_code": False}
    if tokenizer.tokenizer is None:
        raise ConfigError("data.tokenizer: bytes have no processor of images; expected a model's")
    # A broken directory makes transformers raise any exception.
    with refusing(f"data.tokenizer: no processor of {path} can be loaded", Exception):
        kind: Any = AutoProcessor
        if not is_torchvision_available():
            kind = PROCESSOR_MAPPING.get(type(AutoConfig.from_pretrained(path, **options)), kind)
        names: list[str] = getattr(kind, "get_attributes", list)()
        if "video_processor" in names:
            names.remove("video_processor")
            kind = type(kind.__name__, (kind,), {"get_attributes": classmethod(lambda _: names)})
        processor = kind.from_pretrained(path, **options)
    if not isinstance(processor, ProcessorMixin) or not hasattr(processor, "image_processor"):
        raise ConfigError(
            f"data.tokenizer: {path} has no processor of images; expected the directory of a model "
            "that takes images, with its preprocessor_config.json, or records without images"
        )
    if not processor.chat_template:
        raise ConfigError(f"data.tokenizer: the processor of {path} has no chat template")
    own = processor.tokenizer  # As TRL sets it.
    own.pad_token = own.pad_token or own.eos_token
    return processor


def learned_images(
    dataset: Any, kind: str, processor: Any, place: str, *, assistant_only: bool,
    length: int | None, batch_size: int = 1,
) -> Any:  # fmt: skip
    """Returns the records as TRL's collator takes them, with the facts of their tokens
    (`num_tokens`, `largest_id`, `sha256`), of images (`images_sha256`) and of memory (`nbytes` in a
    batch, `reading_nbytes`); those of which nothing is learned are left out.

    length: most tokens of a record
    batch_size: records of a micro-batch
    Where the template marks no answers, a conversation with one answer becomes a completion. Raises
    ConfigError that names the first record that cannot be learned.
    """
    import datasets
    from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

    is_chat = kind == "conversations"
    template = open_template(processor, assistant_only=assistant_only and is_chat)
    if not template.takes_parts:
        raise ConfigError(
            f"data.tokenizer: the chat template of {place} takes no parts of messages"
        )
    if is_chat and assistant_only and not template.has_marks:
        dataset, is_chat = _as_completions(dataset, place), False
    collate = DataCollatorForVisionLanguageModeling(
        processor,
        completion_only_loss=assistant_only and not is_chat,
        assistant_only_loss=assistant_only and is_chat,
        chat_template=template.text,
    )
    # Files that change are other results in the cache of `datasets`.
    images = (chunk.flatten().field("path") for chunk in dataset.data.column("images").chunks)
    paths = (Path(path) for part in images for path in part.to_pylist() if path)
    stamps = [stamp_of(path) for path in paths if path.exists()]
    facts = {name: datasets.Value("int64") for name in _COUNTS}
    read = partial(_read, template=template, collate=collate, length=length, stamps=stamps)
    facts |= dict.fromkeys(("sha256", "images_sha256"), datasets.Value("string"))
    found = map_records(dataset, facts, read, place)
    found = found.filter(lambda count: count > 0, input_columns="num_learned")
    if len(found) < len(dataset):
        _log.warning(
            "%s: of %d records nothing would be learned within data.sequence_length; they were "
            "left out", place, len(dataset) - len(found),
        )  # fmt: skip
    kept = dataset.select(found["record"])
    count = rows_at_once(dataset.data.nbytes, len(dataset.data))
    features = kept.features | {"images": datasets.List(datasets.Image())}
    kept = kept.cast(datasets.Features(features), batch_size=count, writer_batch_size=count)
    have = [count > 0 for count in found["num_images"]]
    if batch_size > 1 and len({*have}) > 1:
        _refuse_mixed(kept, [have.index(False), have.index(True)], collate, place)
    return datasets.concatenate_datasets(
        [kept, found.remove_columns(["record", "num_learned", "num_images"])], axis=1
    )


def digest_of_images(dataset: Any) -> str:
    """Returns a digest of the content of all images of `learned_images`."""
    return hashlib.sha256("".join(dataset["images_sha256"]).encode()).hexdigest()


def most_nbytes(dataset: Any, count: int) -> int:
    """Returns the host memory of `count` records of `learned_images` at most, one being read."""
    return int(count * max(dataset["nbytes"]) + max(dataset["reading_nbytes"]))


def _refuse_mixed(dataset: Any, rows: list[int], collate: Any, place: str) -> None:
    """Raises ConfigError if a batch of these two records, in either order, cannot be made: some
    processors take no record without images beside one with images."""

    def call(pair: list[int], _: Callable[[int], None]) -> None:
        torch.set_num_threads(1)
        try:
            collate([dataset[row] for row in pair])
        except Exception as error:
            raise ConfigError(
                f"data.paths: {place}: the model's processor makes no batch of a record with "
                "images and one without; set schedule.micro_batch = 1, or leave these out: "
                f"{str(error).splitlines()[0]}"
            ) from error

    list(call_bounded(call, [rows, rows[::-1]], place_of=lambda _: f"data.paths: {place}"))


def _as_completions(dataset: Any, place: str) -> Any:
    import datasets

    def split(text: str, number: int) -> dict[str, Any]:
        messages = json.loads(text) if isinstance(text, str) else text
        *asked, last = messages
        if last["role"] != "assistant" or any(m["role"] == "assistant" for m in asked) or not asked:
            raise ConfigError(
                f"data.paths: {place}: record {number + 1}: the chat template does not mark what "
                "the assistant says; with images, expected one answer, at the end, or a template "
                "with {% generation %}, or data.assistant_only_loss = false"
            )
        return {"prompt": asked, "completion": [last]}

    made = dataset.select_columns("messages").map(
        split, input_columns="messages", with_indices=True, remove_columns="messages",
        features=datasets.Features(dict.fromkeys(("prompt", "completion"), datasets.Json())),
    )  # fmt: skip
    return datasets.concatenate_datasets([made, dataset.remove_columns("messages")], axis=1)


def _read(
    row: dict[str, Any], at: str, renew: Callable[[int], None], *, template: Template, collate: Any,
    length: int | None, stamps: Any,
) -> list[dict[str, Any]]:  # fmt: skip
    """Reads a record as the run will, in a child process, and returns the facts of its tokens.

    stamps: those of the files of images, which tell results in the cache apart
    Raises ConfigError for what cannot be read.
    """
    del stamps
    torch.set_num_threads(1)  # The threads of the parent are not in the child.
    record = values_of(row)
    lists = {name: record[name] for name in _MESSAGES if name in record}
    Writer(collate.processor, template, renew).checked(list(chain(*lists.values())), {}, at)
    used_nbytes = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    images = [decoded(image, at) for image in record["images"]]
    renew(sum(3 * image.width * image.height for image in images))
    # Processors and templates raise whatever their authors chose.
    with refusing(f"{at}: the model's processor refuses this record", Exception):
        made = collate([lists | {"images": images}])
    peak_nbytes = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    digests = hashlib.sha256()
    for image in record["images"]:
        digests.update(hashlib.sha256(content_of(image, at)).digest())
    ids, labels = made["input_ids"][0], made["labels"][0]
    most = len(ids) if length is None else length
    marks = {*collate.processor.image_token_ids}
    marks.add(getattr(collate.processor.tokenizer, "image_token_id", None))
    if marks & {*ids[most:].tolist()}:
        raise ConfigError(
            f"{at}: the record has {len(ids)} tokens, and an image ends behind "
            f"data.sequence_length={most}; raise that, or use fewer or smaller images"
        )
    return [{
        "num_images": len(images),
        "num_tokens": min(len(ids), most),
        "largest_id": int(ids.max()),
        "num_learned": int((labels[1:most] != -100).sum()),
        "nbytes": sum(value.nbytes for value in made.values() if isinstance(value, torch.Tensor)),
        "reading_nbytes": max(0, peak_nbytes - used_nbytes),  # Of the largest one so far.
        "sha256": hashlib.sha256(torch.stack([ids, labels]).numpy().tobytes()).hexdigest(),
        "images_sha256": digests.hexdigest(),
    }]  # fmt: skip


def content_of(image: Image, at: str) -> bytes:
    """Returns the bytes of the image's file. Raises ConfigError."""
    if image["bytes"] is not None:
        return bytes(image["bytes"])
    with refusing(f"{at}: {image['path']} cannot be read", OSError):
        return Path(image["path"]).read_bytes()


def decoded(image: Image, at: str) -> Any:
    """Returns an image as PIL has it. Raises ConfigError."""
    import datasets

    what = image["path"] or f"{len(image['bytes'])} bytes"
    # Readers of images raise many kinds for a damaged file.
    with refusing(f"{at}: images: {what} cannot be read as an image", Exception):
        return datasets.Image().decode_example(image)
