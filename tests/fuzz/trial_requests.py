"""Makes random requests whose answers depend on their bodies alone: every sampling feature, form and kind of prompt.

Every request has a seed. Prompts are long against a small cache, answers are short. What a request says of drafting,
and whether it is streamed, is up to the caller: neither may change its answer.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from tests.fuzz.schema_maker import SchemaMaker
from tests.fuzz.soak_load import CHAT, COMPLETIONS, Ask

# Consecutive requests, which are sent at once, and most of whose prompts begin alike.
GROUP = 16
MAX_PROMPT_TOKENS = 400
MAX_TOKENS = 48
_EOS_ID = 2  # of the demo model and of SmolLM2; any other id elsewhere
_CODE = (
    "def add(first, second):\n    return first + second\n",
    "for index, value in enumerate(values):\n    print(index, value)\n",
    "class Node:\n    def __init__(self, value, parent=None):\n"
    "        self.value = value\n        self.parent = parent\n",
    "if not path.exists():\n    raise FileNotFoundError(path)\n",
    'with open(name, encoding="utf-8") as file:\n    lines = file.read().splitlines()\n',
    "int main(int argc, char **argv) {\n    return argc > 1 ? atoi(argv[1]) : 0;\n}\n",
    "SELECT name, COUNT(*) FROM orders WHERE total > 100 GROUP BY name ORDER BY 2 DESC;\n",
    '{"id": 17, "name": "lamp", "tags": ["red", "small"], "price": 12.5, "stock": null}\n',
    "result = [item.strip() for item in text.split(',') if item.strip()]\n",
)
_PROSE = (
    "The river was high after three days of rain, and the ferry did not run. ",
    "She read the letter twice, folded it, and put it back into the drawer. ",
    "What is the capital of France, and how many people live there? ",
    "In the morning the market opened late; the fish was late too. ",
    "He asked for tea. They had no tea. He asked for coffee instead. ",
    "First, heat the oven to 180 degrees. Then mix the flour, the sugar and the eggs. ",
    "Straße, naïve, façade, Ångström, Владимир вышел из дома рано утром. ",
)
_CJK = (
    "今日は天気がいいので、散歩に行きましょう。",
    "北京是中华人民共和国的首都。",
    "나는 아침에 커피를 마신다. ",
    "第一章、はじめに。「これは何ですか」と彼は聞いた。",
)
_EMOJI = ("🙂🙃", "👩‍👩‍👧‍👦 family ", "🇫🇷🇯🇵", "👍🏽 ok ", "🙂 héllo ﬁn ", "e\u0301a\u0308 ")
# Kind -> its pieces, and about how many tokens a character of them has at most.
_TEXTS: dict[str, tuple[tuple[str, ...], float]] = {
    "code": (_CODE, 0.5),
    "prose": (_PROSE, 0.5),
    "cjk": (_CJK, 3.0),
    "emoji": (_EMOJI, 4.0),
}
_IDS = "ids"  # the other kind of prompt
_STOPS = ("e", "the", "\n", "\n\n", ".", ", ", "    ", "return", "ing ", "。", "は", "🙂", "é", "a b c", "}", '"')
_WORDS = ("the", " the", "self", "return", "\n", " and", "。", "🙂", "value", " is", "I", "print")
_REGEXES = (r"[a-z ]{3,30}", r"\d{3}-\d{4}", r"(yes|no|perhaps)( indeed)?", r"[ぁ-ん]{2,6}", r"([A-Z][a-z]+ ){1,3}end")
_CHOICES = (["positive", "negative", "neutral"], ["yes", "yes, but"], ["はい", "いいえ"], ["a", "ab", "abc"])
_GRAMMARS = (
    'start: sum\nsum: NUMBER | sum ("+" | "-") NUMBER\nNUMBER: /[0-9]{1,3}/',
    'start: "(" start ")" | "x"',
    r"start: /[a-z]{2,6}( [a-z]{2,6}){1,9}/",
    'start: "{\\"answer\\": " ("true" | "false") "}"',
)
_SCHEMAS: tuple[dict[str, Any], ...] = (
    {"type": "object", "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
     "required": ["name", "age"], "additionalProperties": False},
    {"type": "array", "items": {"enum": ["red", "green", "blue", None]}, "minItems": 1, "maxItems": 6},
    {"$ref": "#/$defs/node", "$defs": {"node": {"type": "object", "properties": {
        "value": {"type": "integer"}, "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]}},
        "required": ["value", "next"], "additionalProperties": False}}},
    {"anyOf": [{"type": "boolean"}, {"type": "string", "pattern": "^[a-z]{1,8}$"}, {"type": "number"}]},
)  # fmt: skip
_TOOLS: tuple[dict[str, Any], ...] = (
    {"name": "get_weather", "description": "The weather of a city.", "parameters": {"type": "object", "properties": {
        "city": {"type": "string", "maxLength": 10}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["city"], "additionalProperties": False}},
    {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}},
                                   "required": ["a", "b"]}},
    {"name": "now"},
)  # fmt: skip


class RequestMaker:
    """Makes request number i of a seed."""

    def __init__(self, seed: int, number: int) -> None:
        self._number = number
        self._rng = random.Random(f"trial {seed}:{number}")
        self._schema_maker = SchemaMaker(seed, number)
        # Of all requests of the group: what they share, a prefix cache finds, and it leaves room for others to grow.
        self._group_rng = random.Random(f"group {seed}:{number // GROUP}")
        self._is_sharing = self._rng.random() < 0.6
        self._kind = (self._group_rng if self._is_sharing else self._rng).choice([*_TEXTS, "code", "prose", _IDS])

    def make(self) -> Ask:
        """Return the request."""
        rng = self._rng
        is_chat = self._kind != _IDS and rng.random() < 0.5
        body: dict[str, Any] = {"model": "m", "return_token_ids": True, "collect_metrics": True}
        body |= self._sampling() | self._lengths()
        forms: list[Callable[[], dict[str, Any]]] = [self._structured]
        if is_chat:
            forms += [self._tools]
        if rng.random() < 0.25:
            body |= rng.choice(forms)()
            for name in ("ignore_eos", "min_tokens"):  # the grammar says where the output ends
                body.pop(name, None)
        if is_chat:
            if rng.random() < 0.5:
                body |= {"logprobs": True, "top_logprobs": rng.choice([0, 1, 5, 20])}
            return Ask(self._number, CHAT, body | self._messages())
        if rng.random() < 0.5:
            body["logprobs"] = rng.choice([0, 1, 5, 20])
        if rng.random() < 0.3:
            body["echo"] = True
        return Ask(self._number, COMPLETIONS, body | {"prompt": self._prompt()})

    def _maybe(self, chance: float) -> bool:
        return self._rng.random() < chance

    def _some(self, things: tuple[Any, ...], most: int) -> list[Any]:
        return self._rng.sample(things, self._rng.randint(1, most))

    def _sampling(self) -> dict[str, Any]:
        rng = self._rng
        drawn: dict[str, tuple[float, Callable[[], Any]]] = {
            "top_p": (0.3, lambda: rng.choice([0.1, 0.5, 0.9, 0.99])),
            "top_k": (0.3, lambda: rng.choice([1, 2, 20, 500])),
            "min_p": (0.2, lambda: rng.choice([0.01, 0.05, 0.3])),
            "repetition_penalty": (0.2, lambda: rng.choice([0.8, 1.1, 1.5])),
            "presence_penalty": (0.2, lambda: rng.uniform(-1, 2)),
            "frequency_penalty": (0.2, lambda: rng.uniform(-1, 2)),
            "logit_bias": (0.2, lambda: {str(i): rng.choice([-100, -3, 2, 6]) for i in self._token_ids()}),
            "bad_words": (0.2, lambda: self._some(_WORDS, 3)),
            "stop": (0.3, lambda: self._some(_STOPS, 3)),
            "stop_token_ids": (0.2, self._token_ids),
            "include_stop_str_in_output": (0.1, lambda: True),
        }
        chosen = {name: draw() for name, (chance, draw) in drawn.items() if self._maybe(chance)}
        temperature = rng.choice([0.0, 0.0, 0.3, 0.7, 1.0, 1.5])
        return {"temperature": temperature, "seed": rng.randrange(1 << 40)} | chosen

    def _token_ids(self) -> list[int]:
        own = [self._rng.randrange(3, 600) for _ in range(self._rng.randint(1, 6))]
        return [*own, _EOS_ID] if self._maybe(0.5) else own

    def _lengths(self) -> dict[str, Any]:
        rng = self._rng
        max_tokens = rng.choice([1, 4, 8, 12, 16, 20, 24, 24, 32, MAX_TOKENS])
        lengths: dict[str, Any] = {"max_tokens": max_tokens, "n": rng.choice([1] * 8 + [2, 3])}
        if self._maybe(0.2):
            lengths["min_tokens"] = rng.randint(0, max_tokens)
        if self._maybe(0.4):
            lengths["ignore_eos"] = True
        return lengths

    def _schema(self) -> Any:
        return self._schema_maker.make() if self._maybe(0.5) else self._rng.choice(_SCHEMAS)

    def _structured(self) -> dict[str, Any]:
        rng = self._rng
        makers: list[Callable[[], dict[str, Any]]] = [
            lambda: {"response_format": {"type": "json_object"}},
            lambda: {
                "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": self._schema()}}
            },
            lambda: {"guided_json": self._schema()},
            lambda: {"guided_regex": rng.choice(_REGEXES)},
            lambda: {"guided_choice": rng.choice(_CHOICES)},
            lambda: {"guided_grammar": rng.choice(_GRAMMARS)},
        ]
        return rng.choice(makers)()

    def _tools(self) -> dict[str, Any]:
        tools = self._some(_TOOLS, len(_TOOLS))
        named = {"type": "function", "function": {"name": tools[0]["name"]}}
        fields = {
            "tools": [{"type": "function", "function": tool} for tool in tools],
            "tool_choice": self._rng.choice(["auto", "required", "required", named]),
        }
        return fields | ({"parallel_tool_calls": self._rng.choice([True, False])} if self._maybe(0.5) else {})

    def _text(self, rng: random.Random, num_tokens: int) -> str:
        """A text of its kind, of about so many tokens: pieces in any order, or one piece over and over."""
        pieces, tokens_per_char = _TEXTS[self._kind]
        if rng.random() < 0.3:
            pieces = (rng.choice(pieces),)
        num_chars = max(int(num_tokens / tokens_per_char), 1)
        parts: list[str] = []
        while sum(map(len, parts)) < num_chars:
            parts.append(rng.choice(pieces))
        return "".join(parts)[:num_chars]

    def _ids(self, rng: random.Random, num_tokens: int) -> list[int]:
        """Random token ids, or a phrase of a few over and over."""
        length = num_tokens if rng.random() < 0.5 else rng.randint(3, 12)
        phrase = [rng.randrange(3, 4000) for _ in range(length)]
        return (phrase * num_tokens)[:num_tokens]

    def _prompt(self) -> Any:
        make: Callable[[random.Random, int], Any] = self._ids if self._kind == _IDS else self._text
        if not self._is_sharing:
            return make(self._rng, self._rng.choice([4, 20, 60, 100, 100, 130, 180, 250, MAX_PROMPT_TOKENS]))
        beginning = make(self._group_rng, self._group_rng.choice([60, 150, 250]))
        return beginning + make(self._rng, self._rng.choice([1, 8, 20, 40, 80]))

    def _messages(self) -> dict[str, Any]:
        text = self._prompt()
        messages = [{"role": "user", "content": text}]
        if self._maybe(0.3):
            messages = [{"role": "user", "content": self._text(self._rng, 20)},
                        {"role": "assistant", "content": self._text(self._rng, 30)}, *messages]  # fmt: skip
        if self._maybe(0.3):
            messages = [{"role": "system", "content": "Answer in one sentence."}, *messages]
        if not self._maybe(0.3):
            return {"messages": messages}
        expected = self._rng.choice(
            [text[: len(text) // 2], self._text(self._rng, 60), "I'm sorry, I can't help with that."]
        )
        return {"messages": messages, "prediction": {"type": "content", "content": expected}}
