// The openai package of npm: a conversation carried on with the plain message, with that of the stream helper, and as
// Responses.
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
const limits = { model, temperature: 0, max_output_tokens: Number(maxTokens), stop };
const response = await client.responses.create({ ...limits, input: first });
const events = client.responses.stream({ ...limits, input: first });
let deltas = "";
events.on("response.output_text.delta", (event) => (deltas += event.delta));
const finished = await events.finalResponse();
if (deltas !== response.output_text || finished.output_text !== deltas || deltas !== answer.content) {
  throw new Error(`not the same: ${JSON.stringify([deltas, response.output_text, finished.output_text])}`);
}
for (const [way, output] of Object.entries({ response: response.output, "streamed response": finished.output })) {
  const following = await client.responses.create({ ...limits, input: [question, ...output, { role: "user", content: second }] });
  seconds[way] = following.output_text;
  usage[way] = following.usage.input_tokens;
}
const models = [];
for await (const card of client.models.list()) models.push(card.id);
console.log(JSON.stringify({ first: answer.content, seconds, streamed, usage, models }));
