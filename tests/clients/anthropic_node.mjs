// Checks of @anthropic-ai/sdk against /v1/messages: text, streams, tools, token counts.
import Anthropic from "@anthropic-ai/sdk";
import { API_KEY, assert, isWeatherCall, MODEL, QUESTION, runChecks, URL_ROOT, WEATHER, weather } from "./checks.mjs";

const client = new Anthropic({ baseURL: URL_ROOT, apiKey: API_KEY, maxRetries: 0 });
const messages = [{ role: "user", content: QUESTION }];
const short = { model: MODEL, max_tokens: 24, temperature: 0 };
const tool = { name: "get_weather", description: "Return the weather.", input_schema: WEATHER };
const long = { model: MODEL, max_tokens: 200, temperature: 0, messages, tools: [tool] };

async function message() {
  const done = await client.messages.create({ messages, ...short });
  assert(["end_turn", "max_tokens"].includes(done.stop_reason));
  return done.content[0].text;
}

async function stream() {
  const events = client.messages.stream({ messages, ...short });
  let text = "";
  events.on("text", (delta) => (text += delta));
  assert((await events.finalText()) === text);
  assert(text === (await message()));
  return text;
}

async function tools() {
  const first = await client.messages.create({ ...long, tool_choice: { type: "any" } });
  const call = first.content.find((block) => block.type === "tool_use");
  assert(first.stop_reason === "tool_use" && isWeatherCall(call.input));
  const result = { type: "tool_result", tool_use_id: call.id, content: weather(call.input) };
  const turns = [{ role: "assistant", content: first.content }, { role: "user", content: [result] }];
  const answer = await client.messages.create({ messages: [...messages, ...turns], tools: [tool], ...short });
  return [call.input, answer.content];
}

async function toolsStream() {
  const events = client.messages.stream({ ...long, tool_choice: { type: "tool", name: "get_weather" } });
  const last = await events.finalMessage();
  const call = last.content.find((block) => block.type === "tool_use");
  assert(isWeatherCall(call.input));
  return call.input;
}

async function countTokens() {
  return (await client.messages.countTokens({ model: MODEL, messages })).input_tokens;
}

await runChecks(["@anthropic-ai/sdk"], [message, stream, tools, toolsStream, countTokens]);
