"""langchain-openai: messages in, messages out, by chat completions and by Responses."""

from typing import Any

from conversation import API_KEY, FIRST, MAX_TOKENS, MODEL, OVERFLOWS, SECOND, STOP, base_url, report
from langchain_core.messages import AIMessageChunk, HumanMessage
from langchain_openai import ChatOpenAI
from langchain_openai.chat_models.base import OpenAIContextOverflowError

options: dict[str, Any] = {"temperature": 0, "max_tokens": MAX_TOKENS, "stop": [STOP], "max_retries": 0}
model = ChatOpenAI(base_url=base_url(), api_key=API_KEY, model=MODEL, **options)
question = HumanMessage(FIRST)
answer = model.invoke([question])
chunks: list[AIMessageChunk] = list(model.stream([question]))
whole = chunks[0]
for chunk in chunks[1:]:
    whole += chunk
seconds: dict[str, str] = {}
usage: dict[str, int] = {}
for way, turn in (("message", answer), ("streamed message", whole)):
    second = model.invoke([question, turn, HumanMessage(SECOND)])
    seconds[way], usage[way] = second.content, second.usage_metadata["input_tokens"]

by_responses: dict[str, Any] = {"use_responses_api": True, "extra_body": {"stop": STOP}, "include": None}
model = ChatOpenAI(base_url=base_url(), api_key=API_KEY, model=MODEL, **{**options, "stop": None}, **by_responses)
response = model.invoke([question])
assert response.text == answer.content
second = model.invoke([question, response, HumanMessage(SECOND)])
seconds["response"], usage["response"] = second.text, second.usage_metadata["input_tokens"]

# Agents shorten the conversation on this exception.
overflows: list[str] = []
for with_responses in (False, True):
    for content, more in OVERFLOWS:
        limited = {"base_url": base_url(), "api_key": API_KEY, "model": MODEL, "max_retries": 0, **more}
        try:
            ChatOpenAI(**limited, use_responses_api=with_responses).invoke([HumanMessage(content)])
        except OpenAIContextOverflowError as error:
            overflows.append(str(error))
report(answer.content, seconds, whole.content, usage, num_overflows=len(overflows))
