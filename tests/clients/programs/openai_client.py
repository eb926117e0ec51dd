"""The openai package: a conversation carried on in each of the ways its documentation shows, as Responses too."""

from typing import Any

from conversation import API_KEY, FIRST, MAX_TOKENS, MODEL, SECOND, STOP, base_url, report
from openai import OpenAI

client = OpenAI(base_url=base_url(), api_key=API_KEY, max_retries=0)
options: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": MAX_TOKENS, "stop": STOP}
question: Any = {"role": "user", "content": FIRST}
answer = client.chat.completions.create(messages=[question], **options).choices[0].message

with client.chat.completions.stream(messages=[question], **options) as stream:
    for _ in stream:
        pass
    helped = stream.get_final_completion().choices[0].message

asked: dict[str, Any] = {"messages": [question], "stream": True, "stream_options": {"include_usage": True}}
chunks = client.chat.completions.create(**asked, **options)
streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)

turns = {
    "object": answer,
    "to_dict": answer.to_dict(),
    "model_dump": answer.model_dump(),
    "stream helper": helped,
    "stream helper, dumped": helped.model_dump(),
}
seconds: dict[str, str | None] = {}
usage: dict[str, int] = {}
for way, turn in turns.items():
    history: Any = [question, turn, {"role": "user", "content": SECOND}]
    second = client.chat.completions.create(messages=history, **options)
    assert second.usage is not None
    seconds[way], usage[way] = second.choices[0].message.content, second.usage.prompt_tokens

limits: Any = {"model": MODEL, "temperature": 0, "max_output_tokens": MAX_TOKENS, "extra_body": {"stop": STOP}}
response = client.responses.create(input=FIRST, **limits)
with client.responses.stream(input=FIRST, **limits) as events:
    deltas = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    finished = events.get_final_response()
assert deltas == finished.output_text == response.output_text == answer.content
items = {
    "response": response.output,
    "response, dumped": [item.model_dump() for item in response.output],
    "streamed response": finished.output,
}
for way, output in items.items():
    history = [question, *output, {"role": "user", "content": SECOND}]
    following = client.responses.create(input=history, **limits)
    assert following.usage is not None
    seconds[way], usage[way] = following.output_text, following.usage.input_tokens
report(answer.content, seconds, streamed, usage, models=[model.id for model in client.models.list()])
