"""pydantic-ai: an agent with plain text, its history handed on."""

import asyncio

from conversation import API_KEY, FIRST, MAX_TOKENS, MODEL, SECOND, STOP, base_url, report
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=base_url(), api_key=API_KEY))
agent = Agent(model, model_settings={"temperature": 0, "max_tokens": MAX_TOKENS, "stop_sequences": [STOP]})


async def main() -> None:
    first = await agent.run(FIRST)
    async with agent.run_stream(FIRST) as stream:
        streamed = await stream.get_output()
        history = stream.all_messages()
    seconds = {
        "history": (await agent.run(SECOND, message_history=first.all_messages())).output,
        "streamed history": (await agent.run(SECOND, message_history=history)).output,
    }
    report(first.output, seconds, streamed)


asyncio.run(main())
