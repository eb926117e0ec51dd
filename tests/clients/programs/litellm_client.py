"""litellm, as the openai/ and hosted_vllm/ providers."""

from typing import Any

import litellm
from conversation import API_KEY, FIRST, MAX_TOKENS, MODEL, OVERFLOWS, SECOND, STOP, base_url, report

litellm.suppress_debug_info = True
question = {"role": "user", "content": FIRST}


def complete(messages: list[Any], provider: str = "openai", **more: Any) -> Any:
    return litellm.completion(
        model=f"{provider}/{MODEL}",
        api_base=base_url(),
        api_key=API_KEY,
        messages=messages,
        **{"temperature": 0, "max_tokens": MAX_TOKENS, "stop": STOP, **more},
    )


answer = complete([question]).choices[0].message
chunks = complete([question], stream=True)
streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
seconds: dict[str, str] = {}
usage: dict[str, int] = {}
for provider in ("openai", "hosted_vllm"):
    for way, turn in (("object", answer), ("model_dump", answer.model_dump())):
        second = complete([question, turn, {"role": "user", "content": SECOND}], provider)
        name = f"{provider}, {way}"
        seconds[name], usage[name] = second.choices[0].message.content, second.usage.prompt_tokens

# Its fallbacks to models with a larger context hang on this exception.
overflows: list[str] = []
for provider in ("openai", "hosted_vllm"):
    for content, more in OVERFLOWS:
        try:
            complete([{"role": "user", "content": content}], provider, **more)
        except litellm.ContextWindowExceededError as error:
            overflows.append(str(error))
report(answer.content, seconds, streamed, usage, num_overflows=len(overflows))
