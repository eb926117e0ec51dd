"""instructor in the mode that needs no support of the server: JSON in the text, asked for in the prompt.

The demo model writes no such JSON, so instructor asks once more with the answer and what was wrong with it: its own
second turn. Reports the messages of every attempt and the answer to it.
"""

import json
from typing import Any

import instructor
from conversation import API_KEY, FIRST, MAX_TOKENS, MODEL, STOP, base_url
from openai import OpenAI
from pydantic import BaseModel


class Function(BaseModel):
    name: str
    body: str


client = instructor.from_openai(
    OpenAI(base_url=base_url(), api_key=API_KEY, max_retries=0), mode=instructor.Mode.MD_JSON
)
attempts: list[dict[str, Any]] = []
failures: list[str] = []


def begin_attempt(*_: object, **kwargs: Any) -> None:
    attempts.append({"messages": [dict(message) for message in kwargs["messages"]]})


client.on("completion:kwargs", begin_attempt)
client.on("completion:response", lambda response: attempts[-1].update(answer=response.choices[0].message.content))
client.on("completion:error", lambda error: failures.append(repr(error)))
try:
    client.chat.completions.create(
        model=MODEL,
        response_model=Function,
        max_retries=1,
        temperature=0,
        max_tokens=MAX_TOKENS,
        stop=STOP,
        messages=[{"role": "user", "content": FIRST}],
    )
except Exception as error:
    failures.append(type(error).__name__)
print(json.dumps({"attempts": attempts, "failures": failures}, default=repr))
