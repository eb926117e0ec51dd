// The openai package of npm: a conversation carried on with the plain message and with that of the stream helper.
import OpenAI from "openai";

const [url, model, first, second, maxTokens, stop] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const options = { model, temperature: 0, max_tokens: Number(maxTokens), stop };
const question = { role: "user", content: first };
const answer = (await client.chat.completions.create({ ...options, messages: [question] })).choices[0].message;

const helper = client.chat.completions.stream({ ...options, messages: [question] });
const helped = (await helper.finalChatCompletion()).choices[0].message;

let streamed = "";
for await (const chunk of await client.chat.completions.create({ ...options, messages: [question], stream: true })) {
  streamed += chunk.choices[0]?.delta?.content ?? "";
}

const seconds = {};
const usage = {};
for (const [way, turn] of Object.entries({ message: answer, "stream helper": helped })) {
  const messages = [question, turn, { role: "user", content: second }];
  const completion = await client.chat.completions.create({ ...options, messages });
  seconds[way] = completion.choices[0].message.content;
  usage[way] = completion.usage.prompt_tokens;
}
const models = [];
for await (const card of client.models.list()) models.push(card.id);
console.log(JSON.stringify({ first: answer.content, seconds, streamed, usage, models }));
