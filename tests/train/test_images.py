"""Records with images train the text model through TRL's own collator, the tower frozen."""

from __future__ import annotations

import shutil
from base64 import b64encode
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
import peft
import pytest
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from infinity.config import SwapConfig
from infinity.config.machine import HostMemory
from infinity.errors import CapacityError, ConfigError
from infinity.modules.reading.configuration import towers
from infinity.tools.plan.data_facts import IMAGES, DataFacts, read_data
from infinity.tools.training import job as job_module
from infinity.tools.training import program
from infinity.tools.training.images import open_processor
from infinity.tools.training.job_data import open_data
from infinity.tools.training.ranks import JobRank
from infinity.tools.training.tokenizers import HuggingFaceTokenizer

from . import plain
from .record_jobs import adapter_job, write
from .test_records import metrics, run
from .test_text_of_images import SIGLIP, TEXT, rope

# Where the template writes "@", the processor of a family has its own mark of an image.
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{% for p in m.content %}{% if p.type == 'image' %}@"
    "{% else %}[begin]{{ p.text }}{% endif %}{% endfor %}<|end|>[stop]{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
PLAIN = TEMPLATE.replace("[begin]", "").replace("[stop]", "")
MARKED = TEMPLATE.replace("[begin]", "{% if m.role == 'assistant' %}{% generation %}").replace(
    "{{ p.text }}", "{{ p.text }}<|end|>{% endgeneration %}{% else %}{{ p.text }}{% endif %}"
).replace("<|end|>[stop]", "")  # fmt: skip
SEES = SIGLIP | {"patch_size": 4}


def tokenizer(*special: str, **named: str) -> Any:
    """Bytes, and the marks of the template and of images."""
    vocabulary = {char: byte for byte, char in bytes_to_unicode().items()}
    backend = Tokenizer(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|end|>",
        pad_token="<|pad|>",
        extra_special_tokens=named,
    )
    turns = ["<|user|>", "<|assistant|>", "<|system|>", *special]
    made.add_special_tokens(
        {"additional_special_tokens": turns}, replace_extra_special_tokens=False
    )
    return made


def qwen(directory: Path) -> Any:
    """Qwen2.5-VL, whose processor has a part for videos, too: by the files of a published one."""
    words = tokenizer("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
    ids = words.convert_tokens_to_ids
    words.chat_template = PLAIN.replace("@", "<|vision_start|><|image_pad|><|vision_end|>")
    words.save_pretrained(directory)
    transformers.Qwen2VLImageProcessorPil(
        patch_size=4, merge_size=2, temporal_patch_size=2, min_pixels=64, max_pixels=1024
    ).save_pretrained(directory)
    config = transformers.AutoConfig.for_model(
        "qwen2_5_vl", text_config=TEXT | rope(2, 1, 1), vision_config={
            "depth": 2, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2,
            "out_hidden_size": 32, "patch_size": 4, "window_size": 16, "fullatt_block_indexes": [1],
        }, image_token_id=ids("<|image_pad|>"), video_token_id=ids("<|video_pad|>"),
        vision_start_token_id=ids("<|vision_start|>"), vision_end_token_id=ids("<|vision_end|>"),
    )  # fmt: skip
    return transformers.Qwen2_5_VLForConditionalGeneration(config)


def idefics(directory: Path) -> Any:
    words = tokenizer("<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>")
    sees = transformers.Idefics3ImageProcessorPil(
        size={"longest_edge": 32}, max_image_size={"longest_edge": 16}
    )
    transformers.Idefics3Processor(
        sees, words, image_seq_len=4, chat_template=MARKED.replace("@", "<image>")
    ).save_pretrained(directory)
    config = transformers.AutoConfig.for_model(
        "idefics3", text_config=TEXT | {"model_type": "llama"}, vision_config=SEES, scale_factor=2,
        image_token_id=words.convert_tokens_to_ids("<image>"),
    )  # fmt: skip
    return transformers.Idefics3ForConditionalGeneration(config)


def gemma(directory: Path) -> Any:
    begin, end, soft = "<start_of_image>", "<end_of_image>", "<image_soft_token>"
    words = tokenizer(image_token=soft, boi_token=begin, eoi_token=end)
    ids = words.convert_tokens_to_ids
    sees = transformers.Gemma3ImageProcessorPil(size={"height": 16, "width": 16})
    transformers.Gemma3Processor(
        sees, words, image_seq_length=4, chat_template=MARKED.replace("@", begin)
    ).save_pretrained(directory)
    config = transformers.AutoConfig.for_model(
        "gemma3", text_config=TEXT, vision_config=SEES, mm_tokens_per_image=4,
        image_token_index=ids(soft), boi_token_index=ids(begin), eoi_token_index=ids(end),
    )  # fmt: skip
    return transformers.Gemma3ForConditionalGeneration(config)


FAMILIES: dict[str, Callable[[Path], Any]] = {
    "qwen2_5_vl": qwen,
    "idefics3": idefics,
    "gemma3": gemma,
}


def saved(directory: Path, family: str) -> Path:
    torch.manual_seed(3)
    FAMILIES[family](directory).save_pretrained(directory)
    return directory


def pictures(directory: Path, count: int) -> list[str]:
    directory.mkdir()
    drawn, names = np.random.default_rng(0), []
    for number in range(count):
        pixels = drawn.integers(0, 255, (20 + number, 24, 3), dtype=np.uint8)
        names.append(f"{directory.name}/{number}.png")
        Image.fromarray(pixels).save(directory.parent / names[-1])
    return names


def talk(number: int) -> list[dict[str, Any]]:
    return [
        {"role": "user", "content": f"what is {number}?"},
        {"role": "assistant", "content": f"a picture of {number * number}"},
    ]


def job(tmp_path: Path, base: Path, records: list[Any]) -> dict[str, Any]:
    return adapter_job(tmp_path, base, records, length=256, steps=3)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_run_with_images_has_the_bits_of_trl_in_memory(family: str, tmp_path: Path) -> None:
    """Losses, norms and the adapter. Qwen's template has no marks: its answers are completions."""
    base, names = saved(tmp_path / "base", family), pictures(tmp_path / "pictures", 12)
    records = [{"messages": talk(i), "images": [name]} for i, name in enumerate(names)]
    table = job(tmp_path, base, records)
    run(table)
    processor = open_processor(HuggingFaceTokenizer(base))
    model = transformers.AutoModelForImageTextToText.from_pretrained(base)
    beside = "|".join(towers(model))
    torch.manual_seed(5)
    lora = peft.LoraConfig(
        task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"],
        exclude_modules=rf"({beside})(\..*)?",
    )  # fmt: skip
    model = peft.get_peft_model(model, lora)
    shown = [
        record | {"images": [Image.open(tmp_path / record["images"][0])]} for record in records
    ]
    options = {"assistant_only_loss": True}
    if family == "qwen2_5_vl":
        options = {}
        shown = [
            {"prompt": r["messages"][:1], "completion": r["messages"][1:], "images": r["images"]}
            for r in shown
        ]
    data = datasets.Dataset.from_list(shown)
    steps = plain.train(table, model, tmp_path / "plain", data, processor=processor, **options)
    assert metrics(table) == [(loss, norm) for loss, norm, _ in steps]
    found = load_file(tmp_path / "output" / "adapter_model.safetensors")
    expected = peft.get_peft_model_state_dict(model, adapter_name="default")
    assert found.keys() == expected.keys() and found
    for name, value in found.items():
        assert torch.equal(value, expected[name]), name


def test_all_weights_train_but_those_of_the_tower(tmp_path: Path) -> None:
    """The export has the processor, so that it is a model of images again."""
    base, names = saved(tmp_path / "base", "gemma3"), pictures(tmp_path / "pictures", 4)
    records = [{"messages": talk(i), "images": [name]} for i, name in enumerate(names)]
    table = job(tmp_path, base, records)
    del table["adapter"]
    run(table | {"train": {"steps": 1, "batch_size": 2}})
    kind = transformers.AutoModelForImageTextToText
    before, after = kind.from_pretrained(base), kind.from_pretrained(tmp_path / "output")
    beside, values = tuple(f"{name}." for name in towers(before)), dict(before.named_parameters())
    for name, parameter in after.named_parameters():
        assert torch.equal(parameter, values[name]) == name.startswith(beside), name
    assert open_processor(HuggingFaceTokenizer(tmp_path / "output")).image_processor


def facts(table: dict[str, Any]) -> list[tuple[int, str]]:
    """(tokens, digest of them) of each record."""
    config = SwapConfig.load(table)
    assert config.model and config.model.path
    words = HuggingFaceTokenizer(config.model.path)
    rows = open_data(config, words, ExitStack(), vocab_size=512).train
    return list(zip(rows["num_tokens"], rows["sha256"], strict=True))


@pytest.fixture
def asked(tmp_path: Path) -> dict[str, Any]:
    """A job over one record of two images."""
    base, names = saved(tmp_path / "base", "gemma3"), pictures(tmp_path / "pictures", 2)
    table = job(tmp_path, base, [{"messages": talk(3), "images": names}])
    table["train"]["batch_size"] = 1
    return table


def test_every_form_of_naming_images_gives_the_same_tokens(
    tmp_path: Path, asked: dict[str, Any]
) -> None:
    expected, names = facts(asked), ["pictures/0.png", "pictures/1.png"]
    question, answer = talk(3)
    text = {"type": "text", "text": question["content"]}
    urls = [
        f"data:image/png;base64,{b64encode((tmp_path / n).read_bytes()).decode()}" for n in names
    ]
    forms: list[dict[str, Any]] = [
        {"messages": [{"role": "user", "content": [*parts, text]}, answer]} | more
        for parts, more in [
            ([{"type": "image"}] * 2, {"images": names}),
            ([{"type": "image", "image": n} for n in names], {}),
            ([{"type": "image", "path": f"file://{tmp_path / n}"} for n in names], {}),
            ([{"type": "image_url", "image_url": {"url": u}} for u in urls], {}),
            ([{"type": "image", "image": names[0]}, {"type": "image"}], {"image": names[1]}),
        ]
    ] + [
        {"conversations": [
            {"from": "human", "value": f"<image><image>{question['content']}"},
            {"from": "gpt", "value": answer["content"]},
        ], "images": names},
    ]  # fmt: skip
    for form in forms:
        write(tmp_path / "data.jsonl", [form])
        assert facts(asked) == expected, form
    features = datasets.Features({
        "messages": datasets.List({k: datasets.Value("string") for k in question}),
        "images": datasets.List(datasets.Image()),
    })  # fmt: skip
    record = {"messages": talk(3), "images": [str(tmp_path / name) for name in names]}
    rows = datasets.Dataset.from_list([record], features=features)
    rows.to_parquet(tmp_path / "data.parquet")  # Has the bytes of the files.
    rows.save_to_disk(tmp_path / "saved")
    for name in ("data.parquet", "saved"):
        asked["data"]["paths"] = [str(tmp_path / name)]
        assert facts(asked) == expected, name
    shutil.copyfile(tmp_path / names[0], tmp_path / names[1])
    write(tmp_path / "data.jsonl", [{"messages": talk(3), "images": names}])
    asked["data"]["paths"] = [str(tmp_path / "data.jsonl")]
    assert [n for n, _ in facts(asked)] == [n for n, _ in expected]


PLACE = {"type": "image"}


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"images": ["gone.png"]}, r"record 2: images: .*gone.png cannot be read as an image"),
        ({"images": ["data.jsonl"]}, r"record 2: images: .*data.jsonl cannot be read as an image"),
        ({"images": ["cut.png"]}, r"record 2: images: .*cut.png cannot be read as an image: .*trunc"),
        ({"images": ["http://a/b.png"]}, r"record 2: images: http://a/b.png: a run downloads nothing"),
        ({"images": ["data:image/png;base64,?"]}, "record 2: images: expected an image in base64"),
        ({"images": [3]}, "record 2: images: expected the path of a file, or its bytes; got 3"),
        ({"messages": [{"role": "user", "content": [PLACE, PLACE]}, talk(1)[1]]},
         "record 2: images: 1 images and 2 places for them"),
        ({"messages": [talk(1)[0], {"role": "tool", "content": [PLACE]}, talk(1)[1]]},
         "record 2: images: TRL gives none to a tool's message"),
        ({"messages": [talk(1)[0] | {"content": "<start_of_image>?"}, talk(1)[1]]},
         "record 2: the model's processor refuses this record: "),
        ({"messages": [talk(1)[0], talk(1)[1] | {"weight": 0}, talk(1)[1]]}, "record 2: with images every answer"),
        ({"tools": [{"type": "function"}]}, "record 2: tools: .* records with images do not take"),
        ({"videos": ["a.mp4"]}, "record 2: videos: the column changes what is learned"),
        ({"images": ["pictures/0.png"] * 40}, "an image ends behind data.sequence_length=256"),
    ],
)  # fmt: skip
def test_images_that_cannot_be_learned_are_refused_by_their_record(
    record: dict[str, Any], said: str, tmp_path: Path, asked: dict[str, Any]
) -> None:
    (tmp_path / "cut.png").write_bytes((tmp_path / "pictures/0.png").read_bytes()[:900])
    first = {"messages": talk(1), "images": ["pictures/0.png"]}
    write(tmp_path / "data.jsonl", [first, first | record])
    with pytest.raises(ConfigError, match=said):
        facts(asked)


def test_a_model_of_text_and_packing_take_no_images(tmp_path: Path, asked: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"data.packing: .* which TRL does not pack"):
        facts(asked | {"data": asked["data"] | {"packing": True}})
    text = tmp_path / "text"
    tokenizer().save_pretrained(text)
    transformers.LlamaConfig(**TEXT).save_pretrained(text)
    with pytest.raises(ConfigError, match=r"text has no processor of images"):
        facts(asked | {"model": {"path": str(text)}})
    for word in ("tokenizer_config.json", "processor_config.json", "chat_template.jinja"):
        shutil.copyfile(tmp_path / "base" / word, text / word)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**TEXT)).save_pretrained(text)
    with pytest.raises(ConfigError, match=r"LlamaForCausalLM takes no images"):
        run(asked | {"model": {"path": str(text)}})


def test_a_processor_that_mixes_no_records_without_images_is_refused_in_batches(
    tmp_path: Path, asked: dict[str, Any]
) -> None:
    with_two = {"messages": talk(1), "images": ["pictures/0.png", "pictures/1.png"]}
    write(tmp_path / "data.jsonl", [with_two, {"messages": talk(2)}])
    asked["train"]["batch_size"] = 2
    assert len(facts(asked)) == 2
    asked["model"]["path"] = str(saved(tmp_path / "idefics", "idefics3"))
    with pytest.raises(ConfigError, match=r"set schedule.micro_batch = 1"):
        facts(asked)
    assert len(facts(asked | {"schedule": {"micro_batch": 1}})) == 2


@pytest.mark.parametrize(("beside_mib", "ranks"), [(0.001, 1), (1000, 1), (1000, 1000)])
def test_images_of_a_step_have_memory_beside_the_arena(
    beside_mib: float, ranks: int, asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On all ranks of a node. An evaluation has no more images than records."""
    memory = HostMemory(int((24 + beside_mib) * 2**20 / 0.95))
    monkeypatch.setattr(job_module, "host_memory", lambda: memory)
    rank = JobRank(topology=SimpleNamespace(node_count=ranks) if ranks > 1 else None)
    monkeypatch.setattr(program, "job_rank", lambda _: nullcontext(rank))
    asked["data"]["eval_paths"] = asked["data"]["paths"]
    asked["train"] |= {"eval_every": 1, "eval_batches": 10**6}
    fails = pytest.raises(CapacityError, match="and the images of a step: .*; lower tiers.host")
    with nullcontext() if beside_mib > ranks else fails:
        run(asked)


def test_a_run_whose_images_have_changed_is_not_continued(
    tmp_path: Path, asked: dict[str, Any]
) -> None:
    """Another image of the same size has the same tokens."""
    asked["checkpoint"] = {"every": 1}
    run(asked)
    asked["train"]["steps"] += 1
    picture = tmp_path / "pictures" / "1.png"
    pixels = np.asarray(Image.open(picture))
    Image.fromarray(255 - pixels).save(picture)
    with pytest.raises(ConfigError, match="the SHA-256 of the images is"):
        run(asked, resume=True)
    Image.fromarray(pixels).save(picture)
    asked["data"]["eval_paths"], asked["train"]["eval_every"] = asked["data"]["paths"], 1
    run(asked, resume=True)  # A run without evaluation may get one.
    asked["train"]["steps"] += 1
    write(tmp_path / "other.jsonl", [{"messages": talk(1), "images": ["pictures/0.png"]}] * 4)
    asked["data"]["eval_paths"] = [str(tmp_path / "other.jsonl")]
    with pytest.raises(ConfigError, match="is of another run, .* SHA-256 of the held-out data is"):
        run(asked, resume=True)


def test_several_answers_need_marks_of_the_template(tmp_path: Path, asked: dict[str, Any]) -> None:
    asked["model"]["path"] = str(saved(tmp_path / "qwen", "qwen2_5_vl"))
    write(tmp_path / "data.jsonl", [{"messages": talk(1) * 2, "images": ["pictures/0.png"]}])
    with pytest.raises(ConfigError, match=r"record 1: the chat template does not mark"):
        facts(asked)
    asked["data"]["assistant_only_loss"] = False
    assert len(facts(asked)) == 1


def test_new_gives_records_with_images_the_tokens_that_they_need(
    tmp_path: Path, asked: dict[str, Any]
) -> None:
    ((count, _),) = facts(asked)
    words, data = HuggingFaceTokenizer(tmp_path / "base"), tmp_path / "data.jsonl"
    assert read_data([data], words) == DataFacts(IMAGES, 1, count, count, is_exact=True)
    with pytest.raises(ConfigError, match="raise that, or use fewer or smaller images"):
        read_data([data], words, length=8)
