# SPDX-License-Identifier: Apache-2.0
"""Every field of instruction data is trained as it says, or refused by name: none is dropped."""

import json

import pyarrow
import pytest
import torch
from pyarrow import parquet

from deepytorch.recipes.base.config import RecipeError
from deepytorch.recipes.base.run import Process
from deepytorch.recipes.data.chat import encode, prompt_of
from deepytorch.recipes.data.conversations import read_conversations
from deepytorch.recipes.data.instructions import TextOptions, prepare_data
from deepytorch.recipes.data.text import IGNORED_LABEL, byte_tokenizer
from deepytorch.recipes.qwen_lora import chat_tokenizer

# Tools, calls, names and thoughts have a place; as Qwen3's, it drops thoughts before a question.
ABLE = """{%- for tool in tools or [] %}[TOOL {{ tool | tojson }}]{% endfor %}
{%- for document in documents or [] %}[DOCUMENT {{ document.text }}]{% endfor %}
{%- set ns = namespace(asked=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.asked = loop.index0 %}{% endif %}
{%- endfor %}
{%- for m in messages %}{{ '<|im_start|>' + m.role + (' ' + m.name if m.name else '') + '\\n' }}
{%- if m.reasoning_content and loop.index0 > ns.asked %}<think>{{ m.reasoning_content }}</think>
{%- endif %}{{ m.content }}{% for call in m.tool_calls or [] %}<call>{{ call.function.name }}
{{- call.function.arguments | tojson }}</call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
# The assistant's words are marked, and nothing but system, user and assistant has a place.
MARKED = (
    "{% for m in messages %}{% if m.role in ('system', 'user') %}<|im_start|>{{ m.content }}"
    "{% elif m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
    "{% endif %}{% endfor %}"
)
TOOL = {"name": "clock", "description": "The time.", "parameters": {"type": "object"}}
CALL = {"name": "clock", "arguments": {"zone": "UTC"}}
ASKED = {"role": "user", "content": "q"}
SAID = {"role": "assistant", "content": "a"}


def able():
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = ABLE
    return tokenizer


def marked():
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = MARKED
    return tokenizer


@pytest.fixture
def read(tmp_path):
    """Writes one record to a file and reads it."""

    def read(record, data_format="auto"):
        path = tmp_path / "data.jsonl"
        path.write_text(json.dumps(record))
        (found,) = read_conversations(path, data_format).found
        return found

    return read


def texts(conversation, tokenizer, **others):
    """The whole text, and the parts of it that are trained."""
    options = TextOptions(name="test", max_length=10_000, **others)
    example = encode(conversation, tokenizer, options).example
    runs, before = [], IGNORED_LABEL
    for label in example.labels:
        if label != IGNORED_LABEL:
            runs = runs if before != IGNORED_LABEL else [*runs, []]
            runs[-1].append(label)
        before = label
    return tokenizer.decode(example.input_ids), [tokenizer.decode(run) for run in runs]


SYSTEMS = [
    {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
    {"messages": [ASKED, SAID]},
    {"messages": [{"role": "system", "content": "IN LATIN"}, ASKED, SAID]},
    {"instruction": "q", "output": "a"},
    {"prompt": [ASKED], "completion": [SAID]},
]


@pytest.mark.parametrize("record", SYSTEMS)
@pytest.mark.parametrize("field", ["system", "system_prompt"])
@pytest.mark.parametrize("make_tokenizer", [byte_tokenizer, chat_tokenizer, able, marked])
def test_what_the_system_says_beside_the_turns_comes_first(read, record, field, make_tokenizer):
    tokenizer = make_tokenizer()
    conversation = read({**record, field: "IN LATIN"})
    text, trained = texts(conversation, tokenizer)
    assert text.count("IN LATIN") == 1
    assert text.index("IN LATIN") < text.index("q")
    assert trained == ["a" + tokenizer.eos_token]
    assert "IN LATIN" in prompt_of(conversation, tokenizer) or make_tokenizer is marked


def test_the_system_of_a_file_is_in_what_is_trained(tmp_path):
    turns = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
    path = tmp_path / "data.jsonl"
    path.write_text(f"{json.dumps({'conversations': turns, 'system': 'IN LATIN'})}\n" * 8)
    chosen = TextOptions(name="test", data=str(path), batch_size=2)
    tokenizer = byte_tokenizer()
    batch = next(prepare_data(chosen, tokenizer, Process(0, 1, torch.device("cpu"))).batches)
    for row in batch.input_ids:
        assert tokenizer.decode(row).startswith("<s>IN LATIN\n\n### Instruction:\nq")


@pytest.mark.parametrize(
    "tools",
    [
        {"tools": [{"type": "function", "function": TOOL}]},
        {"tools": [TOOL]},
        {"tools": json.dumps([TOOL])},
        {"tools": [{"function": {**TOOL, "parameters": json.dumps(TOOL["parameters"])}}]},
        {"functions": [TOOL]},
    ],
)
@pytest.mark.parametrize("record", [SYSTEMS[0], SYSTEMS[1], SYSTEMS[3], SYSTEMS[4]])
def test_tools_are_given_to_the_chat_template(read, record, tools):
    conversation = read({**record, **tools})
    schema = {"type": "function", "function": TOOL}
    assert conversation.options == {"tools": [schema]}
    text, trained = texts(conversation, able())
    assert text.startswith(f"[TOOL {json.dumps(schema)}]")
    assert trained == ["a<|im_end|>"]
    for tokenizer, why in (
        (chat_tokenizer(), 'the chat template leaves out "tools"'),
        (marked(), 'the chat template leaves out "tools"'),
        (byte_tokenizer(), '"tools" has no place in a text without a chat template'),
    ):
        with pytest.raises(RecipeError, match=why):
            texts(conversation, tokenizer)


@pytest.mark.parametrize(
    "call",
    [
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": CALL}]},
        {"role": "assistant", "tool_calls": json.dumps([CALL])},
        {"role": "assistant", "content": "", "function_call": CALL},
        {"from": "function_call", "value": json.dumps(CALL)},
        {"from": "gpt", "value": None, "tool_calls": [{**CALL, "arguments": '{"zone": "UTC"}'}]},
    ],
)
@pytest.mark.parametrize("role", ["tool", "observation", "function", "ipython"])
def test_calls_of_tools_are_trained_and_their_results_are_not(read, call, role):
    result = {"role": role, "content": "clock: 12", "name": "clock", "tool_call_id": "1"}
    conversation = read({"messages": [ASKED, call, result, SAID]})
    text, trained = texts(conversation, able())
    assert trained == ['<call>clock{"zone": "UTC"}</call><|im_end|>', "a<|im_end|>"]
    assert "<|im_start|>tool clock\nclock: 12" in text
    for tokenizer, why in (
        (chat_tokenizer(), 'turn 1: the chat template leaves out call 0 of "tool_calls"'),
        (marked(), "turn 2: the chat template leaves out what the tool says"),
        (byte_tokenizer(), 'turn 1: "tool_calls" has no place in a text without a chat template'),
    ):
        with pytest.raises(RecipeError, match=why):
            texts(conversation, tokenizer)


def test_each_of_several_calls_needs_its_place(read):
    calls = [CALL, {"name": "date", "arguments": {}}]
    conversation = read({"messages": [ASKED, {"role": "assistant", "tool_calls": calls}]})
    assert texts(conversation, able())[1] == [
        '<call>clock{"zone": "UTC"}</call><call>date{}</call><|im_end|>'
    ]
    first_alone = able()
    first_alone.chat_template = ABLE.replace("m.tool_calls or []", "(m.tool_calls or [])[:1]")
    with pytest.raises(RecipeError, match='turn 1: the chat template leaves out call 1 of "tool_'):
        texts(conversation, first_alone)


def test_thoughts_are_trained_where_the_template_keeps_them(read):
    thoughtful = {**SAID, "reasoning_content": "so"}
    kept = read({"messages": [ASKED, thoughtful]})
    assert texts(kept, able())[1] == ["<think>so</think>a<|im_end|>"]
    later = read({"messages": [ASKED, thoughtful, ASKED, thoughtful]})
    assert texts(later, able())[1] == ["a<|im_end|>", "<think>so</think>a<|im_end|>"]
    whole = TextOptions(name="test", max_length=10_000)
    assert [encode(chat, able(), whole).num_thoughts for chat in (kept, later)] == [0, 1]
    for field in ("reasoning_content", "thinking", "reasoning"):
        conversation = read({"messages": [ASKED, {**SAID, field: "so"}]})
        with pytest.raises(RecipeError, match=f'turn 1: the chat template leaves out "{field}"'):
            texts(conversation, chat_tokenizer())
        with pytest.raises(RecipeError, match=f'turn 1: "{field}" has no place in a text'):
            texts(conversation, byte_tokenizer())


def test_names_documents_and_variables_are_given_to_the_template(read):
    named = read({"messages": [{**ASKED, "name": "Bob"}, SAID]})
    assert "<|im_start|>user Bob\nq" in texts(named, able())[0]
    with pytest.raises(RecipeError, match='turn 0: the chat template leaves out "name"'):
        texts(named, chat_tokenizer())
    documents = read({"messages": [ASKED, SAID], "documents": [{"text": "D"}]})
    assert texts(documents, able())[0].startswith("[DOCUMENT D]")
    with pytest.raises(RecipeError, match='the chat template leaves out "documents"'):
        texts(documents, chat_tokenizer())
    variables = read({"messages": [ASKED, SAID], "chat_template_kwargs": {"mood": "calm"}})
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = "{{ mood }}" + tokenizer.chat_template
    assert texts(variables, tokenizer)[0].startswith("calm<|im_start|>user")
    with pytest.raises(RecipeError, match='the chat template leaves out "mood"'):
        texts(variables, chat_tokenizer())


@pytest.mark.parametrize("role", ["system", "developer", "tool"])
def test_a_turn_that_the_template_drops_is_refused(read, role):
    conversation = read({"messages": [ASKED, {"role": role, "content": "q"}, SAID]})
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages if m.role in ('user', 'assistant') %}<|im_start|>{{ m.content }}"
        "<|im_end|>{% endfor %}"
    )
    with pytest.raises(RecipeError, match=f"turn 1: the chat template leaves out what the {role}"):
        texts(conversation, tokenizer)


@pytest.mark.parametrize("field", ["weight", "loss_weight", "train", "training", "loss"])
@pytest.mark.parametrize("make_tokenizer", [byte_tokenizer, chat_tokenizer, able, marked])
def test_answers_are_trained_by_their_weight(read, field, make_tokenizer):
    tokenizer = make_tokenizer()
    off, on = (0, 1) if "weight" in field else (False, True)
    first = {"role": "assistant", "content": "first"}
    answers = [{**first, field: off}, {**SAID, field: on}]
    conversation = read({"messages": [{**ASKED, field: off}, answers[0], ASKED, answers[1]]})
    text, trained = texts(conversation, tokenizer)
    assert "first" in text
    assert trained == ["a" + tokenizer.eos_token]
    with pytest.raises(RecipeError, match="train_on_prompt=true trains all of them"):
        texts(conversation, tokenizer, train_on_prompt=True)
    with pytest.raises(RecipeError, match="no turn of the assistant is trained"):
        read({"messages": [ASKED, answers[0]]})


def test_of_prompt_and_completion_the_completion_is_trained(read):
    record = {"prompt": "Once upon", "completion": " a time"}
    assert texts(read(record), byte_tokenizer()) == ("<s>Once upon a time</s>", [" a time</s>"])
    assert texts(read(record), chat_tokenizer())[0] == "<s>Once upon a time<|im_end|>"
    assert prompt_of(read(record), byte_tokenizer()) == "<s>Once upon"
    turns = {"prompt": [ASKED, SAID, ASKED], "completion": [{**SAID, "content": "b"}]}
    for tokenizer in (chat_tokenizer(), marked(), byte_tokenizer()):
        assert texts(read(turns), tokenizer)[1] == ["b" + tokenizer.eos_token]
        assert texts(read({**turns, "system": "S"}), tokenizer)[1] == ["b" + tokenizer.eos_token]
        whole, (trained,) = texts(read(turns), tokenizer, train_on_prompt=True)
        assert whole == trained


def test_parts_of_a_text_are_one_text(read):
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    conversation = read({"messages": [{**ASKED, "content": parts}, {**SAID, "content": parts}]})
    assert [message.content for message in conversation.messages] == ["one two", "one two"]


REFUSED = [
    ({"images": ["a.png"]}, '"images" is not honoured, as texts alone are trained'),
    ({"audios": ["a.wav"]}, '"audios" is not honoured'),
    ({"chosen": {"from": "gpt"}, "rejected": {}}, '"chosen" is not honoured'),
    ({"kto_tag": False}, '"kto_tag" is not honoured'),
    ({"weight": 0.5}, '"weight" is not honoured, as all records weigh as much'),
    ({"parallel_tool_calls": False}, '"parallel_tool_calls" is not honoured'),
    ({"assistant_masks": [0, 1]}, '"assistant_masks" is not honoured'),
    ({"tools": "a clock"}, 'field "tools" is a text, but not JSON'),
    ({"tools": {"name": "clock"}}, 'field "tools" must be a list of tools'),
    ({"tools": [{"description": "clock"}]}, 'field "tools" has a tool without a "name"'),
    ({"documents": ["D"]}, 'field "documents" must be a list of documents'),
    ({"chat_template_kwargs": {"tokenize": True}}, 'field "chat_template_kwargs" must be an obj'),
    ({"system": 7}, 'field "system" must be a text, not a int'),
    (
        {"system": "S", "system_prompt": "T"},
        '"system" and "system_prompt" mean the same and have diff',
    ),
]


@pytest.mark.parametrize(("others", "message"), REFUSED)
@pytest.mark.parametrize("record", [SYSTEMS[0], SYSTEMS[3], SYSTEMS[4]])
def test_what_a_record_can_not_have_is_refused_by_name(read, record, others, message):
    with pytest.raises(RecipeError) as failure:
        read({**record, **others})
    assert message in str(failure.value)
    assert "data.jsonl, line 1: " in str(failure.value)


@pytest.mark.parametrize(
    ("turn", "message"),
    [
        ({**SAID, "weight": 0.5}, 'turn 1: "weight" is 0.5, but a turn is trained (1, true) or no'),
        ({**SAID, "weight": "0"}, "turn 1: \"weight\" is '0', but"),
        ({**SAID, "weight": 0, "train": True}, 'turn 1: "train" says otherwise than another'),
        ({**ASKED, "train": True}, 'turn 1: "train" is True, but only turns of the assistant'),
        ({**SAID, "train_detail": [{"begin_offset": 0}]}, 'turn 1: "train_detail" is not honoured'),
        ({**SAID, "refusal": "No."}, 'turn 1: "refusal" is not honoured, as the answer is read'),
        ({**SAID, "prefix": True}, 'turn 1: "prefix" is not honoured'),
        ({**ASKED, "images": ["a.png"]}, 'turn 1: "images" is not honoured'),
        ({**ASKED, "tool_calls": [CALL]}, 'turn 1: "tool_calls" has no place in a turn of the us'),
        ({**ASKED, "reasoning_content": "so"}, 'turn 1: "reasoning_content" has no place in a tur'),
        ({**SAID, "tool_calls": [{"function": {}}]}, 'turn 1: "tool_calls" has a call without'),
        ({**SAID, "tool_calls": [CALL], "function_call": CALL}, "at once: leave one out"),
        (
            {**SAID, "function_call": {**CALL, "arguments": "now"}},
            "arguments of clock is a text, b",
        ),
        ({**SAID, "value": "b"}, '"value" and "content" mean the same and have different values'),
        ({"from": "function_call", "value": "now"}, 'turn 1: "value" is a text, but not JSON'),
        ({**ASKED, "content": [{"type": "image_url"}]}, "part 0: \"type\" is 'image_url', but"),
        (
            {**SAID, "content": [{"type": "text", "text": "a", "train": False}]},
            'part 0: it has "train", but',
        ),
    ],
)
def test_what_a_turn_can_not_have_is_refused_by_name(read, turn, message):
    with pytest.raises(RecipeError) as failure:
        read({"messages": [ASKED, turn, SAID]})
    assert message in str(failure.value)
    assert "data.jsonl, line 1, turn 1: " in str(failure.value)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"words": "Once"}, "no format that is known. It needs"),
        ({"prompt": "Once", "chosen": " a", "rejected": " b"}, "no format that is known"),
        ({"messages": [ASKED, SAID], "instruction": "q"}, "fields of alpaca and of sharegpt: say"),
        (
            {"messages": [ASKED, SAID], "conversations": [SAID]},
            '"conversations" and "messages" mean the same and have different values',
        ),
        ({"prompt": "a", "completion": [SAID]}, 'field "completion" is a list; "prompt" and'),
        ({"prompt": "a", "completion": "b", "label": True}, '"label" is not honoured'),
        ({"prompt": "a", "completion": "b", "tools": [TOOL]}, '"tools" has no place beside'),
        ({"prompt": "a", "completion": "b", "system": "S"}, '"system" has no place beside'),
        (
            {"system": "S", "messages": [{"role": "system", "content": "T"}, ASKED, SAID]},
            "the system says something beside the turns and something else in the first",
        ),
    ],
)
def test_records_that_could_mean_two_things_are_refused(read, record, message):
    with pytest.raises(RecipeError) as failure:
        read(record)
    assert message in str(failure.value)


def test_empty_fields_ask_for_nothing(read, tmp_path):
    empty = {"system": "", "tools": "[]", "images": [], "chosen": None, "weight": 1}
    empty |= {"parallel_tool_calls": True, "documents": [], "chat_template_kwargs": {}}
    turn = {**SAID, "weight": 1, "tool_calls": [], "name": "", "refusal": None, "prefix": False}
    plain = read({"messages": [ASKED, SAID]})
    assert read({**empty, "messages": [ASKED, turn]}) == plain
    table = tmp_path / "data.parquet"
    rows = [
        {"messages": [ASKED, SAID], "tools": []},
        {
            "messages": [ASKED, {"role": "assistant", "tool_calls": [{"function": CALL}]}],
            "tools": [TOOL, {"name": "date", "returns": {"type": "string"}}],
        },
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), table)
    first, second = read_conversations(table).found
    assert first == plain
    tools = [tool["function"] for tool in second.options["tools"]]
    assert tools == [TOOL, {"name": "date", "returns": {"type": "string"}}]  # no nulls


def test_fields_that_no_format_knows_are_told_once(tmp_path, capsys):
    path = tmp_path / "data.jsonl"
    turns = [{**ASKED, "views": 3}, {**SAID, "id": "x"}]
    records = [{"messages": turns, "source": "web", "id": n, "label": "calm"} for n in range(8)]
    path.write_text("\n".join(map(json.dumps, records)))
    chosen = TextOptions(name="test", data=str(path))
    prepare_data(chosen, byte_tokenizer(), Process(0, 1, torch.device("cpu")))
    said = "left out    fields that no format of data knows: source, id, label; views, id of turns"
    assert capsys.readouterr().out.replace("\n", " ").count(said) == 1
