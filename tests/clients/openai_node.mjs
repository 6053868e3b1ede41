// Checks of the openai package for JavaScript: chat, streams, runTools, zod, responses, embeddings.
import OpenAI from "openai";
import { zodFunction, zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";
import { API_KEY, assert, BASE_URL, isWeatherCall, MODEL, QUESTION, runChecks, WEATHER, weather } from "./checks.mjs";

const client = new OpenAI({ baseURL: BASE_URL, apiKey: API_KEY, maxRetries: 0 });
const messages = [{ role: "user", content: QUESTION }];
const short = { model: MODEL, temperature: 0, max_completion_tokens: 24 };
const long = { ...short, max_completion_tokens: 200 };
const named = { type: "function", function: { name: "get_weather" } };
const Weather = z.object({ city: z.enum(["Paris", "Rome", "Lima"]), unit: z.enum(["celsius", "fahrenheit"]) });

function runnable(results) {
  const run = (call) => {
    results.push(weather(call));
    return results.at(-1);
  };
  const own = { name: "get_weather", description: "Return the weather.", parameters: WEATHER, parse: JSON.parse };
  return { type: "function", function: { ...own, function: run } };
}

async function chat() {
  const done = await client.chat.completions.create({ messages, ...short });
  return done.choices[0].message.content;
}

async function stream() {
  const runner = client.chat.completions.stream({ messages, ...short });
  let text = "";
  runner.on("content", (delta) => (text += delta));
  assert((await runner.finalContent()) === text);
  assert(text === (await chat()));
  return text;
}

async function runTools() {
  const results = [];
  const tools = [runnable(results)];
  const runner = client.chat.completions.runTools({ messages, tools, tool_choice: named, ...long });
  await runner.done();
  assert(results.length === 1 && runner.messages.at(-1).role === "tool");
  return results;
}

async function runToolsStream() {
  const results = [];
  const tools = [runnable(results)];
  const runner = client.chat.completions.runTools({ messages, tools, tool_choice: named, stream: true, ...long });
  await runner.done();
  assert(results.length === 1);
  return results;
}

async function runToolsLoop() {
  const results = [];
  const tools = [runnable(results)];
  const limit = { maxChatCompletions: 2 };
  const runner = client.chat.completions.runTools({ messages, tools, tool_choice: "required", ...long }, limit);
  await runner.done();
  assert(results.length >= 2); // the second request contains the first call and its result
  return results;
}

async function runToolsAuto() {
  const runner = client.chat.completions.runTools({ messages, tools: [runnable([])], stop: " ", ...long });
  return runner.finalContent();
}

async function parse() {
  const response_format = zodResponseFormat(Weather, "weather");
  const done = await client.chat.completions.parse({ messages, response_format, ...long });
  assert(isWeatherCall(done.choices[0].message.parsed));
  return done.choices[0].message.parsed;
}

async function parseTool() {
  const tools = [zodFunction({ name: "get_weather", parameters: Weather })];
  const done = await client.chat.completions.parse({ messages, tools, tool_choice: "required", ...long });
  assert(isWeatherCall(done.choices[0].message.tool_calls[0].function.parsed_arguments));
  return done.choices[0].message.tool_calls[0].function.parsed_arguments;
}

async function responses() {
  const own = { model: MODEL, temperature: 0, max_output_tokens: 24 };
  const first = await client.responses.create({ input: QUESTION, ...own });
  const second = await client.responses.create({ input: "And in Rome?", previous_response_id: first.id, ...own });
  assert(first.output_text && second.output_text);
  return [first.output_text, second.output_text];
}

async function responsesStream() {
  const own = { model: MODEL, temperature: 0, max_output_tokens: 24, input: QUESTION };
  const events = client.responses.stream(own);
  let text = "";
  events.on("response.output_text.delta", (event) => (text += event.delta));
  assert((await events.finalResponse()).output_text === text);
  assert((await client.responses.create(own)).output_text === text);
  return text;
}

async function responsesParse() {
  const text = { format: zodTextFormat(Weather, "weather") };
  const done = await client.responses.parse({ model: MODEL, temperature: 0, input: QUESTION, text });
  assert(isWeatherCall(done.output_parsed));
  return done.output_parsed;
}

async function embeddings() {
  const done = await client.embeddings.create({ model: MODEL, input: ["a cat", "a dog"] });
  assert(done.data.length === 2);
  return done.data[0].embedding.length;
}

await runChecks(
  ["openai"],
  [chat, stream, runTools, runToolsStream, runToolsLoop, runToolsAuto, parse, parseTool]
    .concat([responses, responsesStream, responsesParse, embeddings]),
);
