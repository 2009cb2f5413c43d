# SPDX-License-Identifier: Apache-2.0
"""A conversation in the words of a tokenizer's chat template, and where its answers lie in them.

A template is a program, which may leave out what it has no place for without a word. So what a
record has is looked for in the text: first by leaving it out, or by putting a mark in its place.
"""

import os
import re
from functools import cached_property
from typing import Any

from deepytorch.recipes.base.config import RecipeError
from deepytorch.recipes.base.fields import CALLS, THOUGHTS
from deepytorch.recipes.base.hub import reason
from deepytorch.recipes.data.conversations import Conversation
from deepytorch.recipes.data.training_template import in_parts, training_template, wants_parts

# Private characters, so no template has them; no letters, which a template may write otherwise.
_MARK = "\ue000{}\ue001"
_ANSWER = _MARK.format("")
_WAY_OUT = "Leave it out of the data, or give the tokenizer a chat template that has a place for it"

Turn = dict[str, Any]


class Chat:
    """A conversation and the template of a tokenizer that has one.

    Its methods raise RecipeError where the template refuses the conversation.
    """

    def __init__(self, conversation: Conversation, tokenizer: Any, *, trained: bool = True) -> None:
        """``trained``: by the template for training, where there is one, not the tokenizer's."""
        self._conversation = conversation
        self._tokenizer = tokenizer
        self._template = training_template(tokenizer) if trained else None
        self._in_parts = wants_parts(tokenizer, self._template)
        self._turns = [message.for_template() for message in conversation.messages]
        self._options = dict(conversation.options)

    @cached_property
    def text(self) -> str:
        """The whole conversation."""
        return self._render(self._turns)

    @property
    def says_what_is_answered(self) -> bool:
        """Whether the template marks itself what the assistant says."""
        return re.search(r"\{%-?\s*generation\b", self._source) is not None

    @cached_property
    def _source(self) -> str:
        if self._template is not None:
            return self._template
        return str(self._tokenizer.get_chat_template(tools=self._options.get("tools")))

    def prompt(self) -> str:
        """Return what stands before an answer that is to be written after these turns."""
        return self._render(self._turns, prompt=True)

    def encoded_by_template(self) -> tuple[list[int], list[bool]]:
        """Token ids, and which of them are answers, as `says_what_is_answered` marks them."""
        found = self._apply(
            self._turns, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        trained = [bool(flag) for flag in found["assistant_masks"]]
        spoken = [i for i, turn in enumerate(self._turns) if turn["role"] == "assistant"]
        if spoken != self._conversation.answers:
            runs = _runs(trained)
            if len(runs) != len(spoken):
                raise RecipeError(
                    "turns of the assistant that are not trained can't be told from the others, "
                    "as the chat template's {% generation %} marks are not one for each turn: "
                    "leave out the weights of turns, or give the tokenizer another chat template"
                )
            for index, (start, end) in zip(spoken, runs, strict=True):
                if index not in self._conversation.answers:
                    trained[start:end] = [False] * (end - start)
        return list(found["input_ids"]), trained

    def answers(self) -> list[tuple[int, int]]:
        """Find where in `text` each answer lies, with the token that ends it."""
        return [self._answer(index) for index in self._conversation.answers]

    def refuse_left_out(self) -> int:
        """RecipeError for what the template leaves out; so many turns' thoughts it may leave out.

        Templates drop what the assistant thought before earlier answers, as they will when the
        trained model is talked with.
        """
        self._refuse_options()
        self._refuse_texts()
        left_out = 0
        for index, turn in enumerate(self._turns):
            for field in turn.keys() - {"role", "content", "tool_call_id"}:
                if field == CALLS:
                    self._refuse_calls(index)
                elif not (field == "name" and turn["role"] == "tool") and self._drops(index, field):
                    if field not in THOUGHTS or self._drops(index, field, to_here=True):
                        raise RecipeError(
                            f'turn {index}: the chat template leaves out "{field}". {_WAY_OUT}'
                        )
                    left_out += 1
        return left_out

    def _refuse_options(self) -> None:
        for name in self._options:
            if name in ("tools", "documents"):
                others = {key: value for key, value in self._options.items() if key != name}
                is_used = self._differs(self._turns, others)
            else:
                # A variable may matter to the model's answers alone, as Qwen3's enable_thinking.
                is_used = re.search(rf"\b{re.escape(name)}\b", self._source) is not None
            if not is_used:
                raise RecipeError(f'the chat template leaves out "{name}". {_WAY_OUT}')

    def _refuse_texts(self) -> None:
        marked = [
            {**turn, "content": _MARK.format(index)} if turn.get("content", "").strip() else turn
            for index, turn in enumerate(self._turns)
        ]
        try:
            text = self._render(marked)
        except RecipeError:
            return  # it reads what is said, and refuses another text in its place
        for index, turn in enumerate(marked):
            if turn is not self._turns[index] and turn["content"] not in text:
                raise RecipeError(
                    f"turn {index}: the chat template leaves out what the {turn['role']} says. "
                    f"{_WAY_OUT}"
                )

    def _refuse_calls(self, index: int) -> None:
        calls = self._turns[index][CALLS]
        for number in range(len(calls)):
            others = calls[:number] + calls[number + 1 :]
            fewer = {**self._turns[index], CALLS: others}
            if not self._differs([*self._turns[:index], fewer, *self._turns[index + 1 :]]):
                raise RecipeError(
                    f'turn {index}: the chat template leaves out call {number} of "{CALLS}". '
                    f"{_WAY_OUT}"
                )

    def _drops(self, index: int, field: str, *, to_here: bool = False) -> bool:
        """Whether the text is the same without a turn's field; ``to_here``: up to this turn."""
        less = {key: value for key, value in self._turns[index].items() if key != field}
        turns = self._turns[: index + 1] if to_here else self._turns
        return not self._differs([*turns[:index], less, *turns[index + 1 :]], whole=turns)

    def _differs(
        self, turns: list[Turn], options: Turn | None = None, whole: list[Turn] | None = None
    ) -> bool:
        text = self.text if whole is None or whole is self._turns else self._render(whole)
        try:
            return self._render(turns, options=options) != text
        except RecipeError:
            return True  # it does not do without

    def _answer(self, index: int) -> tuple[int, int]:
        """Find where an answer lies in the text, with the end token behind it.

        The template may say the same words, so the answer's words are not looked for. A mark in the
        place of the last thing that is said shows where that goes.
        """
        text, turn, after = self.text, self._turns[index], self._turns[index + 1 :]
        marked_turn, said = _with_mark(turn)
        marked = [*self._turns[:index], marked_turn]
        before, _, behind = self._render([*marked, *after]).partition(_ANSWER)
        if CALLS in turn:
            behind = behind.replace(_ANSWER, said)  # a tool's name, which results have too
        for version in (said, said.lstrip("\n"), said.strip()):  # Qwen3's takes newlines off
            if text != before + version + behind:
                continue
            closing = self._render(marked).partition(_ANSWER)[2]
            end = len(before + version)
            if CALLS in turn:
                end += len(_shared(closing.replace(_ANSWER, said), behind).rstrip())
            else:
                end += _end_token(closing, behind, self._tokenizer)
            if turn.keys() <= {"role", "content"}:
                return len(before), end
            return self._start(index, len(before)), end
        # A template that takes answers apart, for thoughts in them, may still say where they begin.
        if index > 0:
            asked, said = self._turns[:index], self._render(self._turns[: index + 1]).rstrip()
            prompt = self._render(asked, prompt=True)
            if prompt != self._render(asked) and said.startswith(prompt) and text.startswith(said):
                return len(prompt), len(said)
        raise RecipeError(
            "the tokenizer's chat template changes what the assistant says "
            f"({(turn.get('content') or '')[:40]!r}), so answers can't be told from questions: add "
            "{% generation %} marks to the template, or set train_on_prompt=true"
        )

    def _start(self, index: int, place: int) -> int:
        """Find where a turn with thoughts or calls begins to be the assistant's own words.

        That is behind the template's prompt for an answer. If the text has none, it is the
        first character that another answer would not have had there.
        """
        turn, asked, after = self._turns[index], self._turns[:index], self._turns[index + 1 :]
        plain = {"role": turn["role"], "content": _ANSWER}
        earliest = 0
        if asked and asked[-1].get("content"):
            told = [*asked[:-1], {**asked[-1], "content": _ANSWER}, turn, *after]
            behind = self._render(told).rpartition(_ANSWER)[2]
            earliest = len(self.text) - len(behind) if self.text.endswith(behind) else 0
        for others in (after, []):  # a template may refuse a result that nobody has called for
            try:
                shared = _shared(self._render([*asked, plain, *others]), self.text)
            except RecipeError:
                continue
            if len(shared) >= earliest:
                place = len(shared)
                break
        header = ""
        if asked:
            prompt, before = self._render(asked, prompt=True), self._render(asked)
            header = prompt[len(before) :] if prompt.startswith(before) else ""
        found = self.text.rfind(header, earliest, place) if header else -1
        return place if found < 0 else found + len(header)

    def _render(
        self, turns: list[Turn], *, prompt: bool = False, options: Turn | None = None
    ) -> str:
        rendered: str = self._apply(
            turns, options=options, tokenize=False, add_generation_prompt=prompt
        )
        return rendered

    def _apply(self, turns: list[Turn], *, options: Turn | None = None, **others: bool) -> Any:
        given = dict(self._options if options is None else options)
        if self._template is not None:
            given["chat_template"] = self._template
        if self._in_parts:
            turns = [
                {**turn, "content": in_parts(turn["content"])} if "content" in turn else turn
                for turn in turns
            ]
        try:
            return self._tokenizer.apply_chat_template(turns, **given, **others)
        except Exception as error:  # a template computes, so anything may go wrong in it
            raise RecipeError(
                f"the tokenizer's chat template refuses the conversation ({reason(error)}): change "
                "or leave out the turn that it refuses, or give the tokenizer another chat template"
            ) from error


def _with_mark(turn: Turn) -> tuple[Turn, str]:
    """The turn with a mark in the place of the last thing it says, and that thing."""
    if CALLS not in turn:
        return {**turn, "content": _ANSWER}, turn["content"]
    *calls, last = turn[CALLS]
    function = {**last["function"], "name": _ANSWER}
    return {**turn, CALLS: [*calls, {**last, "function": function}]}, last["function"]["name"]


def _shared(text: str, other: str) -> str:
    """The beginning that both have."""
    return os.path.commonprefix([text, other])


def _runs(flags: list[bool]) -> list[tuple[int, int]]:
    """Return the runs in which flags are set, from and to."""
    bounds = [
        place
        for place in range(len(flags) + 1)
        if (place < len(flags) and flags[place]) != (place > 0 and flags[place - 1])
    ]
    return list(zip(bounds[::2], bounds[1::2], strict=True))


def _end_token(end_of_turn: str, behind: str, tokenizer: Any) -> int:
    """How many characters the token takes that ends a turn, with the space before it.

    It stands at the end of the last turn too, where the mark of a next one does not.
    """
    closing, rest = end_of_turn.lstrip(), behind.lstrip()
    found = [
        len(token)
        for token in tokenizer.get_added_vocab()
        if closing.startswith(token) and rest.startswith(token)
    ]
    return len(behind) - len(rest) + max(found) if found else 0
