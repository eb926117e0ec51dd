"""pydantic-ai: an agent with plain text, its history handed on, by chat completions and by Responses."""

import asyncio

from conversation import API_KEY, FIRST, MAX_TOKENS, MODEL, SECOND, STOP, base_url, report
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

provider = OpenAIProvider(base_url=base_url(), api_key=API_KEY)
model = OpenAIChatModel(MODEL, provider=provider)
agent = Agent(model, model_settings={"temperature": 0, "max_tokens": MAX_TOKENS, "stop_sequences": [STOP]})
by_responses = Agent(
    OpenAIResponsesModel(MODEL, provider=provider),
    model_settings={"temperature": 0, "max_tokens": MAX_TOKENS, "extra_body": {"stop": STOP}},
)


async def main() -> None:
    first = await agent.run(FIRST)
    async with agent.run_stream(FIRST) as stream:
        streamed = await stream.get_output()
        history = stream.all_messages()
    response = await by_responses.run(FIRST)
    seconds = {
        "responses": (await by_responses.run(SECOND, message_history=response.all_messages())).output,
        "history": (await agent.run(SECOND, message_history=first.all_messages())).output,
        "streamed history": (await agent.run(SECOND, message_history=history)).output,
    }
    report(first.output, seconds, streamed)


asyncio.run(main())
