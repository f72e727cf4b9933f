"""Records in the forms of other programs: what is learned of them, and what is refused."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import datasets
import pytest

from infinity.errors import ConfigError
from infinity.tools.training.records import load_records, mark_conversations
from infinity.tools.training.tokenizers import ByteTokenizer
from tests.support.exhaustive import covering, sampled

from .record_jobs import rows_of, small_job, write

# Writes whatever a message has. Without marks for TRL: what the assistant says is marked here.
TOOLS = (
    "{% if tools %}[tools]{% for t in tools %}{{ t | tojson }}{% endfor %};{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.reasoning_content }}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<{{ c.function.name }} {{ c.function.arguments | tojson "
    "if c.function.arguments is not string else c.function.arguments }}>{% endfor %};{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
# Knows two roles only, and no tools.
TWO_ROLES = (
    "{% for m in messages %}{% if m.role == 'user' %}[user]{{ m.content }};"
    "{% elif m.role == 'assistant' %}[assistant]{{ m.content }};{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
ASK = {"role": "user", "content": "a"}
SAY = {"role": "assistant", "content": "B"}
CALL = {"name": "f", "arguments": {"x": 1}}
TOOL = {"name": "f", "parameters": {"type": "object"}}
SHOWN_TOOL = '[tools]{"name": "f", "parameters": {"type": "object"}};'


@pytest.fixture
def table(tmp_path: Path) -> dict[str, Any]:
    return small_job(tmp_path)


def learned(tmp_path: Path, table: dict[str, Any], record: Any, template: str = TOOLS) -> Any:
    write(tmp_path / "data.jsonl", [record])
    return rows_of(table, template)[0]


def turns(*pairs: tuple[str, Any]) -> list[dict[str, Any]]:
    return [{"from": role, "value": value} for role, value in pairs]


@pytest.mark.parametrize(
    ("record", "text", "said"),
    [
        (
            {"instruction": "a", "input": "", "output": "B", "system": "S",
             "history": [["q", "A"], ["r", "C"]]},
            "[system]S;[user]q;[assistant]A;[user]r;[assistant]C;[user]a;[assistant]B;",
            "A;C;B;",
        ),
        ({"instruction": "a", "output": "B", "history": [], "system": ""},
         "[user]a;[assistant]B;", "B;"),
        ({"conversations": turns(("human", "a"), ("gpt", "B")), "system": "S"},
         "[system]S;[user]a;[assistant]B;", "B;"),
        ({"conversations": turns(("system", "S"), ("human", "a"), ("gpt", "B"))},
         "[system]S;[user]a;[assistant]B;", "B;"),
        (
            {"conversations": turns(
                ("human", "a"), ("function_call", '{"name": "f", "arguments": {"x": 1}}'),
                ("observation", "7"), ("gpt", "B")), "tools": '[{"name": "f", "parameters": '
                '{"type": "object"}}]'},
            SHOWN_TOOL + '[user]a;[assistant]<f {"x": 1}>;[tool]7;[assistant]B;',
            '<f {"x": 1}>;B;',
        ),
        ({"conversations": turns(("human", "a"), ("tool", "7"), ("gpt", "B")), "tools": "[]"},
         "[user]a;[tool]7;[assistant]B;", "B;"),
        ({"messages": [ASK, SAY], "system": "S", "tools": [TOOL]},
         SHOWN_TOOL + "[system]S;[user]a;[assistant]B;", "B;"),
        ({"messages": [{"role": "system", "content": "S"}, ASK, SAY], "system": "S"},
         "[system]S;[user]a;[assistant]B;", "B;"),
        (
            {"messages": [ASK, {"role": "assistant", "content": None,
                                "function_call": {"name": "f", "arguments": '{"x":  1}'}},
                          {"role": "function", "name": "f", "content": "7"}, SAY],
             "functions": [TOOL], "parallel_tool_calls": False},
            '[tools]{"type": "function", "function": {"name": "f", "parameters": {"type": '
            '"object"}}};[user]a;[assistant]<f {"x":  1}>;[tool]7;[assistant]B;',
            '<f {"x":  1}>;B;',
        ),
        (
            {"messages": [ASK, {"role": "tool_call", "content": '{"name": "f", "arguments": {}}'},
                          {"role": "tool_response", "content": "7"}, SAY]},
            "[user]a;[assistant]<f {}>;[tool]7;[assistant]B;", "<f {}>;B;",
        ),
        (
            {"messages": [ASK, SAY | {"reasoning_content": "so ", "metadata": {"id": 3},
                                      "refusal": None, "tool_calls": []}]},
            "[user]a;[assistant]so B;", "so B;",
        ),
        ({"conversations": turns(("System", "S"), ("User", "a"), ("Assistant", "B")), "mask": "User"},
         "[system]S;[user]a;[assistant]B;", "B;"),
        ({"messages": [ASK | {"content": [{"type": "text", "text": "a"}, {"text": "b"}]}, SAY]},
         "[user]ab;[assistant]B;", "B;"),
    ],
    ids=["alpaca", "alpaca-empty", "sharegpt-column", "sharegpt-role", "sharegpt-tools", "tool",
         "messages", "twice", "openai-functions", "swift", "reasoning", "capitals", "parts"],
)  # fmt: skip
def test_a_record_of_another_program_is_learned_as_it_is_meant(
    tmp_path, table, record, text, said
) -> None:
    assert learned(tmp_path, table, record) == [(text, said)]


FIRST = SAY | {"content": "A"}
LONG = "[user]a;[assistant]A;[user]a;[assistant]B;"


MASKS = {
    "mask": [("weight", 0), ("loss", False), ("train", False), ("training", 0), ("weight", 0.0)],
    "is_last": [False, True],
    "is_marked": [False, True],
}
PAIRS = [tuple(case.values()) for case in covering(MASKS)]


@pytest.mark.parametrize(tuple(MASKS), sampled(product(*MASKS.values()), PAIRS.__contains__))
def test_a_masked_message_is_read_and_not_learned(
    tmp_path, table, mask, is_last, is_marked
) -> None:
    key, off = mask
    on = type(off)(1)
    marks = [on, off] if is_last else [off, on]
    record = {"messages": [ASK, FIRST | {key: marks[0]}, ASK, SAY | {key: marks[1]}]}
    template = TOOLS
    if is_marked:
        template = (
            "{% for m in messages %}[{{ m.role }}]{% if m.role == 'assistant' %}{% generation %}"
            "{{ m.content }};{% endgeneration %}{% else %}{{ m.content }};{% endif %}{% endfor %}"
            "{% if add_generation_prompt %}[assistant]{% endif %}"
        )
    expected = [(LONG, "A;" if is_last else "B;")]
    assert learned(tmp_path, table, record, template) == expected


def test_a_masked_message_may_be_the_last_of_a_template_that_forgets(tmp_path, table) -> None:
    forgetting = (
        "{% for m in messages %}[{{ m.role }}]{{ '*' if m.role == 'assistant' and loop.last }}"
        "{{ m.content }};{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    record = {"messages": [ASK, FIRST, ASK, SAY | {"weight": 0}]}
    assert learned(tmp_path, table, record, forgetting) == [("[user]a;[assistant]*A;", "*A;")]


def test_messages_of_which_none_is_learned_and_labels_are_left_out_with_a_warning(
    tmp_path, table, caplog
) -> None:
    write(tmp_path / "data.jsonl", [
        {"messages": [ASK, SAY | {"weight": 0}]}, {"messages": [ASK, SAY]},
    ])  # fmt: skip
    assert len(rows_of(table, TOOLS)[0]) == 1
    assert "1 conversations have no assistant to learn from" in caplog.text
    write(tmp_path / "data.jsonl", [{"text": "good", "label": 1}])
    assert rows_of(table)[0] == [("good\0", "good\0")]
    assert 'label is left out; train.method = "classify" learns it' in caplog.text


PAIR = {"chosen": "B", "rejected": "C"}
ANSWERS = {"chosen": [SAY], "rejected": [SAY | {"content": "C"}]}


@pytest.mark.parametrize(
    "record",
    [
        PAIR | {"instruction": "a", "input": ""},
        {"conversations": turns(("human", "a")), "chosen": turns(("gpt", "B"))[0],
         "rejected": turns(("gpt", "C"))[0]},
        ANSWERS | {"messages": [ASK]},
        PAIR | {"messages": [ASK]},
        {"chosen": [ASK, SAY], "rejected": [ASK, SAY | {"content": "C"}]},
        {"chosen": [ASK, SAY], "rejected": [ASK, SAY | {"content": "C"}], "prompt": "a"},
        ANSWERS | {"prompt": "a"},
    ],
    ids=["alpaca", "sharegpt", "messages", "texts", "implicit", "ultrafeedback", "asked"],
)  # fmt: skip
def test_preferences_of_another_program_keep_their_prompt(tmp_path, record) -> None:
    shown = []
    for each in (record, ANSWERS | {"prompt": [ASK]}):
        found = load_records([write(tmp_path / "data.jsonl", [each])])
        tokenizer = ByteTokenizer().for_records()
        tokenizer.chat_template = TOOLS
        made = mark_conversations(found, tokenizer, "", assistant_only=True, kind="preferences")
        shown.append({name: bytes(made[0][name]).decode() for name in sorted(made.column_names)})
    assert shown[0] == shown[1]
    assert shown[0] == {
        "prompt_ids": "[user]a;[assistant]", "chosen_ids": "B;", "rejected_ids": "C;",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"messages": [ASK, SAY | {"content": None}]}, r"messages\[1\].content: expected text; got null"),
        ({"messages": [ASK, {"role": "assistant"}]}, r"messages\[1\].content: expected text; got null"),
        ({"messages": [ASK | {"content": None}, SAY]}, r"messages\[0\].content: expected text"),
        ({"conversations": turns(("human", "a"), ("gpt", None))}, r"conversations\[1\].content: expe"),
        ({"instruction": "a", "output": None}, "output: expected text; got null"),
        ({"instruction": None, "output": "B"}, "instruction: expected text; got null"),
        ({"prompt": "a", "completion": None}, "completion: expected text; got null"),
        ({"messages": [ASK, SAY | {"weight": 0.5}]}, r"messages\[1\].weight: expected true or 1"),
        ({"messages": [ASK, SAY | {"weight": 0, "loss": True}]}, "weight and loss contradict"),
        ({"messages": [ASK | {"train": True}, SAY]}, r"messages\[0\].train: expected false"),
        ({"messages": [ASK, SAY | {"loss_scale": 2}]}, r"messages\[1\].loss_scale: expected a mes"),
        ({"messages": [ASK, SAY | {"masked": True}]}, r"messages\[1\].masked: expected a message"),
        ({"messages": [ASK, SAY | {"refusal": "no"}]}, r"messages\[1\].refusal: expected a message"),
        ({"messages": [ASK, SAY], "weight": 0.5}, "weight: the column changes what is learned"),
        ({"messages": [ASK, SAY], "history": [["q", "A"]]}, "history: the column changes"),
        ({"messages": [ASK, SAY], "label": False}, "label: the column changes"),
        ({"messages": [ASK, SAY], "kto_tag": 0}, "kto_tag: the column changes"),
        ({"messages": [ASK, SAY], "documents": [{"text": "d"}]}, "documents: the column changes"),
        ({"text": "a", "system": "S"}, "system: the column changes what is learned, and texts do"),
        ({"prompt": "a", "completion": "B", "system": "S"}, "system: the column changes"),
        ({"prompt": "a", "completion": "B", "tools": [TOOL]}, "tools: the column changes"),
        ({"input_ids": [1], "weight": 0}, "weight: the column changes"),
        ({"messages": [{"role": "system", "content": "T"}, ASK, SAY], "system": "S"},
         "system: the first message is another system prompt"),
        ({"instruction": "a", "output": "B", "history": [["q"]]}, r"history\[0\]: expected a quest"),
        ({"instruction": "a", "output": "B", "history": [["q", None]]}, r"history\[0\]: expected text"),
        ({"messages": [ASK, SAY], "tools": "{oops"}, "tools: expected JSON"),
        ({"messages": [ASK, SAY], "tools": ["f"]}, "tools: expected a list of objects"),
        ({"conversations": turns(("human", "a"), ("function_call", "f(1)"))}, "value: expected JSON"),
        ({"conversations": turns(("human", "a"), ("function_call", "[3]"))}, "expected a call"),
        ({"messages": [ASK, {"role": "assistant", "tool_calls": [{"function": {}}]}]},
         r"messages\[1\].tool_calls\[0\]: expected a call with the name"),
        ({"messages": [ASK | {"content": [{"type": "video", "video": "x"}]}, SAY]},
         r"messages\[0\].content\[0\]: expected .*got 'video'"),
        ({"messages": [ASK, {"role": "tool", "content": ["a", "b"]}, SAY]}, r"content\[0\]: expected"),
        ({"messages": [ASK, SAY | {"reasoning_content": {"a": 1}}]}, "reasoning_content: expected t"),
        ({"messages": [ASK | {"content": {"a": 1}}, SAY]}, r"content: expected text; got an object"),
        ({"prompt": [ASK], "completion": [SAY | {"weight": 0}]}, r"completion\[0\]: it is not to be"),
        ({"messages": [{"content": "a", "value": "b", "role": "user"}, SAY]}, "value and content"),
        ({"chosen": [ASK, SAY], "rejected": [ASK, SAY], "prompt": "b"}, "prompt: chosen and rejected"),
        ({"chosen": [ASK, SAY], "rejected": [ASK, SAY], "system": "S"}, "system: the column"),
        ({"chosen": "a", "rejected": "b", "prompt": "c", "history": [["a", "b"]]}, "history: the col"),
    ],
)  # fmt: skip
def test_what_cannot_be_learned_as_meant_is_refused_by_record_and_field(
    tmp_path, record, said
) -> None:
    path = write(tmp_path / "data.jsonl", [record])
    with pytest.raises(ConfigError, match=f"data.jsonl: record 1: .*{said}"):
        load_records([path])


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"messages": [{"role": "system", "content": "S"}, ASK, SAY]}, r"messages\[0\]: role 'system'"),
        ({"messages": [ASK, {"role": "tool", "content": "7"}, SAY]}, r"messages\[1\]: role 'tool'"),
        ({"messages": [ASK, {"role": "critic", "content": "7"}, SAY]}, r"messages\[1\]: role 'critic'"),
        ({"messages": [ASK, SAY], "tools": [TOOL]}, "tools"),
        ({"messages": [ASK, SAY | {"tool_calls": [{"function": CALL}]}]}, r"messages\[1\].tool_calls"),
        ({"messages": [ASK, SAY | {"reasoning_content": "so"}]}, r"messages\[1\].reasoning_content"),
        ({"messages": [ASK | {"name": "Ann"}, SAY]}, r"messages\[0\].name"),
    ],
)  # fmt: skip
def test_what_the_template_does_not_write_is_refused(tmp_path, table, record, said) -> None:
    with pytest.raises(ConfigError, match=f"record 1: {said}: the chat template does not write it"):
        learned(tmp_path, table, record, TWO_ROLES)


def test_a_system_message_that_is_the_default_of_the_template_is_written(tmp_path, table) -> None:
    """As Qwen's templates have it."""
    template = (
        "{% if messages[0].role != 'system' %}[system]S;{% endif %}"
        "{% for m in messages %}[{{ m.role }}]{{ m.content }};{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    record = {"messages": [{"role": "system", "content": "S"}, ASK, SAY]}
    assert learned(tmp_path, table, record, template) == [("[system]S;[user]a;[assistant]B;", "B;")]


def test_parts_stay_parts_under_a_template_that_takes_them(tmp_path, table) -> None:
    template = (
        "{% for m in messages %}[{{ m.role }}]{% if m.content is string %}{{ m.content }}"
        "{% else %}{% for p in m.content %}({{ p.text }}){% endfor %}{% endif %};{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    record = {"messages": [ASK | {"content": parts}, SAY]}
    assert learned(tmp_path, table, record, template) == [("[user](a)(b);[assistant]B;", "B;")]


def test_texts_become_parts_under_a_template_that_takes_nothing_else(tmp_path, table) -> None:
    """As those of models that see, which write no content that is a text."""
    template = (
        "{% for m in messages %}[{{ m.role }}]{% if m.content is not string %}"
        "{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %};{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    found = learned(tmp_path, table, {"messages": [ASK, SAY]}, template)
    assert found == [("[user]a;[assistant]B;", "B;")]


def test_old_reasoning_may_be_left_out_and_the_last_may_not(tmp_path, table) -> None:
    """Templates of reasoning models write the reasoning of the last answer only."""
    template = (
        "{% for m in messages %}[{{ m.role }}]{% if loop.last and show %}"
        "{{ m.reasoning_content }}{% endif %}{{ m.content }};{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    thought = SAY | {"reasoning_content": "so "}
    shown = {"chat_template_kwargs": {"show": True}}
    found = learned(tmp_path, table, {"messages": [ASK, thought]} | shown, template)
    assert found == [("[user]a;[assistant]so B;", "so B;")]
    old = {"messages": [ASK, thought, ASK, SAY]} | shown
    assert learned(tmp_path, table, old, template)[-1] == (
        "[user]a;[assistant]B;[user]a;[assistant]B;", "B;",
    )  # fmt: skip
    with pytest.raises(ConfigError, match=r"record 1: messages\[1\].reasoning_content: the chat"):
        learned(tmp_path, table, {"messages": [ASK, thought]}, template)


def test_a_mask_keeps_what_the_marks_of_a_template_learn_of_the_others(tmp_path, table) -> None:
    """The marks may begin before the answer, or behind what the prompt of an answer ends with."""
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}[assistant]<>"
        "{{ m.content }};{% endgeneration %}{% else %}[{{ m.role }}]{{ m.content }};{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}[assistant]<{% endif %}"
    )
    record = {"messages": [ASK, FIRST | {"weight": 0}, ASK, SAY]}
    assert learned(tmp_path, table, record, template) == [
        ("[user]a;[assistant]<>A;[user]a;[assistant]<>B;", "[assistant]<>B;")
    ]


def test_a_prompt_that_ends_otherwise_before_its_answer_is_told(tmp_path, table, caplog) -> None:
    template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }};{% endfor %}"
        "{% if add_generation_prompt %}[assistant]<think>{% endif %}"
    )
    record = {"prompt": [ASK], "completion": [SAY]}
    assert learned(tmp_path, table, record, template) == [("[user]a;[assistant]B;", "B;")]
    assert "record 1: the template writes the end of the prompt otherwise" in caplog.text
    assert "'<think>' is left out" in caplog.text


def test_records_of_two_kinds_are_refused_by_the_first_that_differs(tmp_path) -> None:
    path = write(tmp_path / "data.jsonl", [{"text": "a"}, {"prompt": "a", "completion": "b"}])
    with pytest.raises(
        ConfigError, match="record 2: it holds completions, .* expected texts, text"
    ):
        load_records([path])


def test_all_forms_of_conversations_may_stand_in_one_file(tmp_path) -> None:
    path = write(tmp_path / "data.jsonl", [
        {"messages": [ASK, SAY]}, {"instruction": "a", "output": "B"},
        {"conversations": turns(("human", "a"), ("gpt", "B"))},
    ])  # fmt: skip
    assert load_records([path])["messages"][:] == [[ASK, SAY]] * 3


def test_a_mask_needs_that_only_the_assistant_is_learned(tmp_path, table) -> None:
    table["data"]["assistant_only_loss"] = False
    record = {"messages": [ASK, SAY | {"weight": 0}]}
    with pytest.raises(ConfigError, match="record 1: .* need data.assistant_only_loss = true"):
        learned(tmp_path, table, record)


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def call(name: str, **arguments: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", "content": None, "tool_calls": [{"function": function}]}


@pytest.mark.parametrize("form", ["parquet", "saved", "json"])
@pytest.mark.parametrize("is_marked", [True, False])
def test_tools_and_calls_have_the_keys_that_their_record_gave_them(
    tmp_path, table, form, is_marked
) -> None:
    """Arrow gives every tool the keys of all others, as nulls."""
    records = [
        {"messages": [ASK, call("weather", city="Oslo")], "tools": [tool("weather", city={"type": "string"})]},
        {"messages": [ASK, call("add", x=1, y=[2, 3])], "tools": [tool("add", x={"type": "integer"})]},
        {"messages": [ASK, SAY | {"reasoning_content": "so "}], "tools": None},
    ]  # fmt: skip
    template = TOOLS
    if is_marked:
        template = TOOLS.replace("]{{ m.reasoning", "]{% generation %}{{ m.reasoning").replace(
            ";{% endfor %}{% if add", ";{% endgeneration %}{% endfor %}{% if add"
        )
    write(tmp_path / "data.jsonl", records)
    expected = rows_of(table, template)[0]
    assert '<weather {"city": "Oslo"}>' in expected[0][1]
    saved = datasets.Dataset.from_list(records)
    path = tmp_path / f"data.{form}"
    if form == "json":
        saved.to_json(path, lines=False)
    else:
        (saved.to_parquet if form == "parquet" else saved.save_to_disk)(path)
    table["data"]["paths"] = [str(path)]
    found = rows_of(table, template)[0]
    if form == "json":  # The nulls stand in the file: they are the user's.
        assert '"city": "Oslo"' in found[0][1]
        return
    assert found == expected


def test_a_null_that_stands_in_json_stays(tmp_path, table) -> None:
    record = {"messages": [ASK, SAY], "tools": [tool("f", x={"default": None})]}
    assert '"x": {"default": null}' in learned(tmp_path, table, record)[0][0]
    features = datasets.Features({
        "messages": datasets.List(datasets.Json()), "tools": datasets.List(datasets.Json()),
    })  # fmt: skip
    saved = datasets.Dataset.from_list([record], features=features)
    for form, save in (("parquet", saved.to_parquet), ("saved", saved.save_to_disk)):
        save(tmp_path / f"data.{form}")
        table["data"]["paths"] = [str(tmp_path / f"data.{form}")]
        assert '"x": {"default": null}' in rows_of(table, TOOLS)[0][0][0]
