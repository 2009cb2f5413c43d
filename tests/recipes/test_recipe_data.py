# SPDX-License-Identifier: Apache-2.0
"""The embedded data, the alpaca reader, the tokenizer and the batches."""

import hashlib
import io
import json
import random
import re
import subprocess
import sys
from urllib.error import HTTPError, URLError

import pyarrow
import pytest
import torch
from pyarrow import parquet

from deepytorch.recipes.base import hub
from deepytorch.recipes.base.config import RecipeError
from deepytorch.recipes.base.run import Process
from deepytorch.recipes.data.batches import EndlessBatches, hold_out
from deepytorch.recipes.data.chat import encode, encode_one, fitting, prompt_of
from deepytorch.recipes.data.conversations import (
    Conversation,
    Message,
    as_conversation,
    read_conversations,
)
from deepytorch.recipes.data.instructions import TextOptions, fill_rows, prepare_data
from deepytorch.recipes.data.text import (
    IGNORED_LABEL,
    Example,
    InstructionPair,
    byte_tokenizer,
    collate,
    standard_library_pairs,
)
from deepytorch.recipes.qwen_lora import chat_tokenizer

DIGEST = """
import hashlib
from deepytorch.recipes.data.text import standard_library_pairs
print(hashlib.sha256(repr(standard_library_pairs()).encode()).hexdigest())
"""


def encode_all(conversations, tokenizer, chosen):
    return fitting(
        [encode_one(conversation, tokenizer, chosen) for conversation in conversations], chosen
    )


def options(max_length, **others):
    return TextOptions(name="test", max_length=max_length, **others)


def chats(pairs):
    return [as_conversation(pair) for pair in pairs]


def endless(examples, *, batch_size, rank=0, world_size=1, seed=0, lengths=None):
    return EndlessBatches(
        len(examples),
        lambda index, epoch: examples[index],
        lambda chosen: collate(chosen, 0),
        batch_size=batch_size,
        rank=rank,
        world_size=world_size,
        seed=seed,
        lengths=lengths,
    )


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


@pytest.fixture(scope="module")
def pairs():
    return standard_library_pairs()


def test_embedded_pairs_are_the_same_in_every_process(pairs):
    # Hash randomisation differs between this interpreter and the new one, as between ranks.
    done = subprocess.run([sys.executable, "-c", DIGEST], capture_output=True, text=True)
    here = hashlib.sha256(repr(pairs).encode()).hexdigest()
    assert done.stdout.strip() == here, done.stderr


def test_embedded_pairs_have_a_long_tail_of_lengths(pairs):
    lengths = sorted(len(pair.prompt() + pair.response) for pair in pairs)
    median, high = lengths[len(lengths) // 2], lengths[int(0.99 * len(lengths))]
    assert len(pairs) > 1000
    assert high > 4 * median
    assert any("`textwrap.dedent(text)`" in pair.instruction for pair in pairs)
    assert len({pair.response for pair in pairs}) == len(pairs)


def test_tokenizer_gives_any_text_back(tokenizer):
    text = "naïve\tλ →\n\x00 </s 你好 "
    ids = tokenizer(text)["input_ids"]
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert len(ids) == 1 + len(text.encode())
    assert tokenizer.pad_token_id != tokenizer.eos_token_id


def test_labels_cover_the_answer_and_its_end_only(tokenizer):
    pair = InstructionPair("Say hello.", "in French", "Bonjour")
    example, truncated, *_ = encode(as_conversation(pair), tokenizer, options(1000))
    answer = [label for label in example.labels if label != IGNORED_LABEL]
    assert not truncated
    assert tokenizer.decode(answer) == "Bonjour</s>"
    assert example.labels[: -len(answer)] == [IGNORED_LABEL] * (len(example.labels) - len(answer))
    prompt = tokenizer.decode(example.input_ids[: -len(answer)], skip_special_tokens=True)
    assert prompt == "### Instruction:\nSay hello.\n\nin French\n\n### Response:\n"
    assert tokenizer(prompt)["input_ids"] == example.input_ids[: -len(answer)]
    assert prompt_of(as_conversation(pair), tokenizer) == "<s>" + prompt


def test_truncation_is_counted_and_prompts_without_answer_are_left_out(tokenizer):
    pairs = [
        InstructionPair("a", "", "short"),
        InstructionPair("b", "", "x" * 500),
        InstructionPair("c" * 500, "", "never reached"),
    ]
    examples, summary = encode_all(chats(pairs), tokenizer, options(100))
    assert [len(example.input_ids) for example in examples][1] == 100
    assert len(examples) == 2
    assert "1 truncated" in summary
    assert "1 left out" in summary
    with pytest.raises(RecipeError, match="max_length=3"):
        encode_all(chats(pairs), tokenizer, options(3))
    # One token alone has none before it to be predicted from: its loss would be none.
    with pytest.raises(RecipeError, match="max_length=1"):
        encode_all(chats(pairs), tokenizer, options(1, train_on_prompt=True))


def test_padding_is_masked_and_not_trained(tokenizer):
    pairs = [InstructionPair("a", "", "b"), InstructionPair("a", "", "longer answer")]
    batch = collate(
        [encode(chat, tokenizer, options(100))[0] for chat in chats(pairs)], tokenizer.pad_token_id
    )
    assert batch.input_ids.shape == batch.labels.shape == batch.attention_mask.shape
    padding = batch.attention_mask == 0
    assert padding[0].sum() == len("longer answer") - 1
    assert (batch.input_ids[padding] == tokenizer.pad_token_id).all()
    assert (batch.labels[padding] == IGNORED_LABEL).all()


def test_ranks_share_an_epoch_and_a_seed_repeats_it(tokenizer, pairs):
    examples, _ = encode_all(chats(pairs[:12]), tokenizer, options(10_000))

    def first_epoch(rank, seed):
        batches = endless(examples, batch_size=3, rank=rank, world_size=2, seed=seed)
        rows = [row for _ in range(2) for row in next(batches).input_ids]
        return {tuple(row[row != tokenizer.pad_token_id].tolist()) for row in rows}

    assert first_epoch(0, 1).isdisjoint(first_epoch(1, 1))
    assert len(first_epoch(0, 1) | first_epoch(1, 1)) == 12
    assert first_epoch(0, 1) == first_epoch(0, 1)
    assert first_epoch(0, 1) != first_epoch(0, 2)


def test_epochs_are_reshuffled(tokenizer, pairs):
    examples, _ = encode_all(chats(pairs[:8]), tokenizer, options(10_000))
    batches = endless(examples, batch_size=8)
    first, second = next(batches).input_ids, next(batches).input_ids
    assert first.shape == second.shape
    assert not torch.equal(first, second)
    assert torch.equal(first.sort(dim=0).values, second.sort(dim=0).values)


def test_too_few_examples_are_an_error(tokenizer, pairs):
    examples, _ = encode_all(chats(pairs[:3]), tokenizer, options(10_000))
    with pytest.raises(RecipeError, match="3 examples are too few for batch_size=2 on 2 processes"):
        endless(examples, batch_size=2, world_size=2)


@pytest.mark.parametrize(
    ("num_examples", "batch_size", "ways"),
    [
        (3, 2, "lower batch_size or add data"),
        (1, 1, "start fewer processes (--nproc-per-node) or add data"),
        (1, 2, "lower batch_size and start fewer processes (--nproc-per-node) or add data"),
    ],
)
def test_the_way_out_of_too_few_examples_is_one(num_examples, batch_size, ways):
    with pytest.raises(RecipeError, match=f"2 processes: {re.escape(ways)}$"):
        endless([None] * num_examples, batch_size=batch_size, world_size=2)


def test_a_tenth_at_most_is_held_out_and_said():
    assert hold_out(range(40), 4) == ([0, 1, 2, 3], list(range(4, 40)), "4 held out")
    kept, trained, told = hold_out(range(30), 100)
    assert (kept, len(trained)) == ([0, 1, 2], 27)
    assert told == "3 held out (held_out=100, but at most a tenth of the data)"
    assert hold_out("ab", 1) == (["a"], ["b"], "1 held out")
    assert hold_out("a", 4) == ([], ["a"], "none held out, as there is only one")


@pytest.fixture
def prepared(tmp_path, capsys):
    """Prepares the data of records; also what is printed of it."""

    def prepare(records, **others):
        path = tmp_path / "data.json"
        path.write_text(json.dumps(records))
        chosen = TextOptions(name="test", data=str(path), **{"batch_size": 1, **others})
        data = prepare_data(chosen, byte_tokenizer(), Process(0, 1, torch.device("cpu")))
        return data, capsys.readouterr().out

    return prepare


def test_a_single_record_is_not_called_left_out(prepared):
    data, said = prepared([{"instruction": "q", "output": "a"}])
    assert data.held_out == []
    assert data.batches.epoch_examples == 1
    assert "none held out, as there is only one" in said
    with pytest.raises(RecipeError, match="no conversation is left out of training"):
        prompt_of(data.sample, byte_tokenizer())


def test_held_out_examples_that_are_left_out_are_counted(prepared):
    order = list(range(30))
    random.Random(42).shuffle(order)
    records = [{"instruction": "q", "output": "a"} for _ in order]
    for number in order[:2]:
        records[number]["instruction"] = "q" * 100
    data, said = prepared(records, max_length=64)
    assert [len(batch.input_ids) for batch in data.held_out] == [1]
    assert "27 examples" in said
    assert "3 held out (held_out=4, but at most a tenth of the data), 2 of these left out" in said
    assert "no loss is computed" not in said
    records[order[2]]["instruction"] = "q" * 100
    data, said = prepared(records, max_length=64)
    assert data.held_out == []
    assert "3 of these left out" in said
    assert "no loss is computed: the prompts of all held-out examples fill max_length=64" in said


def test_examples_with_an_empty_answer_are_left_out_in_every_format(prepared):
    alpaca = [{"instruction": "q", "output": "a"} for _ in range(4)]
    chats = [{"messages": [dict(message) for message in SPOKEN]} for _ in range(4)]
    assert "left out because their prompt alone is longer; 1 held" in prepared(alpaca)[1]
    alpaca[2]["output"] = " \n"
    chats[1]["messages"][2] = {"role": "assistant", "content": ""}
    for records in (alpaca, chats):
        said = prepared(records)[1]
        assert "2 examples" in said
        assert ", 1 because an answer is empty; 1 held out" in said
    empty = [{"instruction": "q", "output": ""}, {"instruction": "q", "output": "\t"}]
    with pytest.raises(RecipeError, match="nothing to learn: in each of its 2 examples an answer"):
        prepared(empty)


def test_rows_are_no_examples(tmp_path):
    few = options(64, packing="fixed", batch_size=1000)
    with pytest.raises(RecipeError, match="rows are too few for batch_size=1000 on 1 processes"):
        prepare_data(few, byte_tokenizer(), Process(0, 1, torch.device("cpu")))


def test_the_largest_batch_is_of_the_longest_examples(tokenizer):
    examples = [Example([7] * length, [7] * length) for length in (3, 9, 2, 8, 5)]
    batches = endless(examples, batch_size=2, lengths=[3, 9, 2, 8, 5])
    assert batches.largest().attention_mask.sum() == 9 + 8
    assert batches.position == 0
    assert endless(examples, batch_size=2).largest().input_ids.shape[0] == 2


def test_alpaca_list_and_lines_are_read(tmp_path):
    records = [
        {"instruction": "Add.", "input": "1 2", "output": "3"},
        {"instruction": "Greet.", "output": "Hi", "source": "ignored"},
    ]
    pairs = [InstructionPair("Add.", "1 2", "3"), InstructionPair("Greet.", "", "Hi")]
    expected = [as_conversation(pair) for pair in pairs]
    whole, lines = tmp_path / "data.json", tmp_path / "data.jsonl"
    whole.write_text(json.dumps(records))
    lines.write_text("\n".join(json.dumps(record) for record in records) + "\n\n")
    for path in (whole, lines):
        read = read_conversations(path)
        assert read.found == expected
        assert read.unknown == ("source",)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("d.json", '{"a": 1}', "JSON list of records, not a dict"),
        ("d.json", "[]", "holds no records"),
        ("d.json", '[{"instruction": "a",\n "output": }]', "not valid JSON at line 2, column 12"),
        ("d.json", '[{"instruction": "a", "output": "b"}, 7]', "record 1: expected an object"),
        ("d.json", '[{"instruction": "a"}]', 'record 0: field "output" is missing'),
        ("d.json", '[{"instruction": 5, "output": "b"}]', 'field "instruction" is a int'),
        ("d.json", '[{"instruction": "  ", "output": "a"}]', 'field "instruction" is empty'),
        ("d.json", "{}\n{}\n", "Extra data (one record a line is read from a file that ends in .j"),
        (
            "d.docx",
            "a,b",
            "must end in .json (a list of records), .jsonl (one record a line)",
        ),
        ("d", "[]", "must end in .json"),
        (
            "D.JSONL",
            '{"instruction": "a", "output": "b"}\n{"instruction": "\\ud83d", "output": "b"}',
            "line 2: field \"instruction\" has half a character, '\\ud83d': mend it",
        ),
        (
            "d.json",
            '[{"instruction": "a", "input": [], "output": "b"}]',
            'field "input" is a list',
        ),
        ("d.jsonl", '{"instruction": "a", "output": "b"}\n\n{"in', "not valid JSON at line 3"),
        ("d.jsonl", '{"instruction": "a", "output": "b"}\n[]', "line 2: expected an object"),
        (
            "d.jsonl",
            '{}\n{"id": ' + "1" * 5000 + "}",
            "cannot be read at line 2: Exceeds the limit",
        ),
        ("d.json", '[{},\n{"id": ' + "1" * 5000 + "}]", "cannot be read at line 2: Exceeds the"),
        (
            "d.jsonl",
            "{}\n" + "[" * 100_000 + "]" * 100_000,
            "cannot be read at line 2: maximum rec",
        ),
    ],
)
def test_bad_alpaca_data_is_named(tmp_path, name, text, message):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(RecipeError) as failure:
        read_conversations(path, "alpaca")
    assert message in str(failure.value)
    assert str(path) in str(failure.value)


def test_what_was_said_before_comes_before(tmp_path):
    record = {"instruction": "And 2?", "output": "4", "system": "Double."}
    path = tmp_path / "data.json"
    path.write_text(json.dumps([{**record, "history": [["1?", "2"]]}, record | {"history": None}]))
    last = [Message("user", "And 2?"), Message("assistant", "4")]
    before = [Message("user", "1?"), Message("assistant", "2")]
    first, second = read_conversations(path).found
    assert [*first.messages] == [Message("system", "Double."), *before, *last]
    assert [*second.messages] == [Message("system", "Double."), *last]


@pytest.mark.parametrize("history", [7, ["1?"], [["1?"]], [["1?", 2]], "1?", [{"1?": "2"}]])
def test_a_history_that_is_none_is_refused(tmp_path, history):
    path = tmp_path / "data.json"
    path.write_text(json.dumps([{"instruction": "a", "output": "b", "history": history}]))
    with pytest.raises(RecipeError, match='record 0: field "history" must be a list of pairs'):
        read_conversations(path)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_lines_end_at_line_feeds_alone(tmp_path, encoding):
    # JSON's strings may hold these as they are, though Python ends lines at them.
    texts = [f"a{mark}b" for mark in "\x85\u2028\u2029"]
    records = [
        json.dumps({"instruction": "q", "output": text}, ensure_ascii=False) for text in texts
    ]
    lines, whole = tmp_path / "data.jsonl", tmp_path / "data.json"
    lines.write_bytes("\r\n\n".join(records).encode(encoding))
    whole.write_bytes(f"[{','.join(records)}]".encode(encoding))
    for path in (lines, whole):
        found = read_conversations(path).found
        assert [conversation.messages[1].content for conversation in found] == texts


def test_missing_data_file_is_named(tmp_path):
    with pytest.raises(RecipeError, match=r"data=.*absent\.json: no such file"):
        read_conversations(tmp_path / "absent.json")


GENERATION = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{{ '\\n' }}{% else %}"
    "{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TURNS = (
    Message("system", "Be short."),
    Message("user", "one"),
    Message("assistant", "one"),  # the same text as the question's
    Message("user", "two"),
    Message("assistant", "two, too"),
)
CHAT = Conversation(TURNS)
SPOKEN = [turn.for_template() for turn in TURNS]


def test_marked_and_unmarked_templates_train_the_same_tokens():
    unmarked, marked = chat_tokenizer(), chat_tokenizer()
    marked.chat_template = GENERATION
    example, *_ = encode(CHAT, unmarked, options(1000))
    assert example == encode(CHAT, marked, options(1000))[0]
    answers = [label for label in example.labels if label != IGNORED_LABEL]
    assert unmarked.decode(answers) == "one<|im_end|>two, too<|im_end|>"
    whole, *_ = encode(CHAT, unmarked, options(1000, train_on_prompt=True))
    assert whole.labels == whole.input_ids == example.input_ids
    assert prompt_of(CHAT, unmarked).endswith("two<|im_end|>\n<|im_start|>assistant\n")


def test_a_template_that_rewrites_answers_is_an_error():
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content | upper }}{% endfor %}"
    with pytest.raises(RecipeError, match="chat template changes what the assistant says"):
        encode(CHAT, tokenizer, options(1000))
    example, *_ = encode(CHAT, tokenizer, options(1000, train_on_prompt=True))
    assert tokenizer.decode(example.labels) == "BE SHORT.ONEONETWOTWO, TOO"


def test_a_record_that_the_template_refuses_is_named(tmp_path):
    tokenizer = chat_tokenizer()
    refusal = "{{ raise_exception('System role not supported') }}"
    tokenizer.chat_template = (
        "{% if messages[0].role == 'system' %}" + refusal + "{% endif %}" + tokenizer.chat_template
    )
    total = random.randint(2, 30)
    number = random.randrange(total)
    records = [SPOKEN[1:] for _ in range(total)]
    records[number] = SPOKEN
    path = tmp_path / "data.json"
    path.write_text(json.dumps([{"messages": messages} for messages in records]))
    chosen = TextOptions(name="test", data=str(path), seed=random.randrange(99), held_out=1)
    with pytest.raises(RecipeError) as failure:
        prepare_data(chosen, tokenizer, Process(0, 1, torch.device("cpu")))
    place = f"{path}, line 1, record {number}: the tokenizer's"
    assert str(failure.value).startswith(place)
    assert "(System role not supported)" in str(failure.value)


def test_sharegpt_is_read_in_every_spelling(tmp_path):
    spellings = [
        {
            "conversations": [
                {"from": "system", "value": "Be short."},
                {"from": "human", "value": "one"},
                {"from": "gpt", "value": "one"},
                {"from": "human", "value": "two"},
                {"from": "gpt", "value": "two, too"},
            ]
        },
        {"messages": [{"role": turn.role, "content": turn.content} for turn in TURNS]},
    ]
    whole, table = tmp_path / "data.json", tmp_path / "data.parquet"
    whole.write_text(json.dumps(spellings))
    assert read_conversations(whole).found == [CHAT, CHAT]
    parquet.write_table(pyarrow.Table.from_pylist(spellings[1:]), table)
    assert read_conversations(table).found == [CHAT]
    table = table.rename(tmp_path / "DATA.PARQUET")
    assert read_conversations(table).found == [CHAT]
    table.write_bytes(b"PAR1 no more")
    with pytest.raises(RecipeError, match=r"cannot read data=.*DATA\.PARQUET"):
        read_conversations(table)


@pytest.mark.parametrize("others", [{}, {"instruction": None, "input": None, "output": None}])
@pytest.mark.parametrize("field", ["conversations", "messages"])
def test_what_a_table_fills_with_null_hides_nothing(tmp_path, field, others):
    first = [{"from": None, "value": None, **message} for message in SPOKEN]
    second = [
        {"from": turn.role, "value": turn.content, "role": None, "content": None} for turn in TURNS
    ]
    empty = {"conversations": None, "messages": None, **others}
    path = tmp_path / "data.json"
    path.write_text(json.dumps([{**empty, field: turns} for turns in (first, second)]))
    assert read_conversations(path).found == [CHAT, CHAT]
    path.write_text(json.dumps([{**empty, "instruction": "a", "output": "b"}]))
    pair = (Message("user", "a"), Message("assistant", "b"))
    assert read_conversations(path).found == [Conversation(pair)]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"messages": [{"role": "user", "content": "\ud83d"}]}, 'turn 0: "content" has half a ch'),
        ({"conversations": []}, 'needs a list "conversations" or "messages"'),
        ({"messages": [3]}, "turn 0: expected an object, found a int"),
        (
            {"messages": [{"role": "robot", "content": ""}]},
            "turn 0: \"role\" is 'robot'; known: sy",
        ),
        ({"messages": [{"role": ["user"], "content": ""}]}, "turn 0: \"role\" is ['user']; known"),
        ({"messages": [{"role": "user", "content": 3}]}, 'turn 0: "content" must be a text'),
        ({"conversations": [{"from": "gpt"}]}, 'turn 0: "value" must be a text, not a None'),
        ({"messages": [{"content": "hi"}]}, 'turn 0: "from" is None; known: '),
        ({"messages": [{"role": "user", "content": "hi"}]}, "no turn of the assistant"),
    ],
)
def test_wrong_conversations_name_file_and_line(tmp_path, record, message):
    good = {"messages": [{"role": "assistant", "content": "hi"}]}
    lines, whole = tmp_path / "d.jsonl", tmp_path / "d.json"
    lines.write_text(f"{json.dumps(good)}\n\n{json.dumps(record)}\n")
    whole.write_text(f"[\n{json.dumps(good)},\n\n{json.dumps(record)}]")
    for path, where in ((lines, "line 3"), (whole, "line 4, record 1")):
        with pytest.raises(RecipeError) as failure:
            read_conversations(path)
        assert f"{path}, {where}" in str(failure.value)
        assert message in str(failure.value)


@pytest.mark.parametrize(
    ("answer", "online"),
    [(None, True), (HTTPError("u", 503, "busy", None, None), True), (URLError("no"), False)],
)
def test_offline_is_found_out_once_and_said(answer, online, monkeypatch, tmp_path, capsys):
    asked = []

    def urlopen(request, timeout):
        asked.append(request)
        if answer is not None:
            raise answer
        return io.BytesIO()

    monkeypatch.setattr(hub.urllib.request, "urlopen", urlopen)
    hub.is_online.cache_clear()
    assert hub.loading_options(str(tmp_path)) == {}  # a folder asks nobody
    assert not asked
    for _ in range(2):
        found = hub.loading_options("some/model")
        assert found == ({} if online else {"local_files_only": True})
    assert len(asked) == 1
    assert ("offline" in capsys.readouterr().out) == (not online)
    hub.is_online.cache_clear()


def test_a_batch_order_continues_at_its_position():
    whole = endless_numbers()
    expected = [next(whole) for _ in range(7)]
    continued = endless_numbers()
    continued.position = 3
    assert [next(continued) for _ in range(4)] == expected[3:]
    assert continued.position == 7
    assert expected[:2] != expected[2:4]  # the next epoch's order


def endless_numbers():
    return EndlessBatches(
        7,
        lambda index, epoch: (index, epoch),
        list,
        batch_size=3,
        rank=0,
        world_size=1,
        seed=1,
    )


def test_rows_are_filled_with_every_example_once():
    chance = random.Random(5)
    examples = [Example([number] * chance.randint(1, 90), []) for number in range(400)]
    rows = fill_rows(examples, 100)
    sizes = [sum(len(example.input_ids) for example in row) for row in rows]
    assert max(sizes) <= 100
    assert sorted(example.input_ids[0] for row in rows for example in row) == list(range(400))
    assert sum(sizes) / (100 * len(rows)) > 0.95
    assert rows == fill_rows(examples, 100)


def test_filled_rows_need_training_without_padding():
    with pytest.raises(RecipeError, match="packing=fixed trains rows without padding"):
        options(100, packing="fixed", padding_free="off")
    arms = {packing: options(100, packing=packing) for packing in ("none", "batch", "fixed")}
    found = {
        name: (arm.padding_free_of(False), arm.padding_free_of(True)) for name, arm in arms.items()
    }
    assert found == {"none": ("off", "off"), "batch": ("off", "auto"), "fixed": ("auto", "auto")}
