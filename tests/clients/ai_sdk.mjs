// Checks of the Vercel AI SDK: generateText, streamText, tools, generateObject, embeddings.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { embed, generateObject, generateText, Output, stepCountIs, streamObject, streamText, tool } from "ai";
import { z } from "zod";
import { API_KEY, assert, BASE_URL, isWeatherCall, MODEL, QUESTION, runChecks, weather } from "./checks.mjs";

const options = { name: "draftproof", baseURL: BASE_URL, apiKey: API_KEY };
const provider = createOpenAICompatible({ ...options, supportsStructuredOutputs: true, includeUsage: true });
const model = provider(MODEL);
const schema = z.object({ city: z.enum(["Paris", "Rome", "Lima"]), unit: z.enum(["celsius", "fahrenheit"]) });
const short = { model, prompt: QUESTION, temperature: 0, maxOutputTokens: 24, maxRetries: 0 };
const long = { ...short, maxOutputTokens: 200 };
const tools = { get_weather: tool({ description: "Return the weather.", inputSchema: schema, execute: weather }) };
const strictTools = { get_weather: tool({ inputSchema: schema, execute: weather, strict: true }) };

async function text() {
  const done = await generateText(short);
  assert(done.usage.outputTokens <= 24);
  return done.text;
}

async function stream() {
  const done = streamText({ ...short, onError: ({ error }) => console.error(error) });
  let found = "";
  for await (const piece of done.textStream) found += piece;
  assert(found === (await text()));
  return found;
}

async function toolsRequired() {
  const done = await generateText({ ...long, tools, toolChoice: "required" });
  assert(isWeatherCall(done.toolCalls[0].input));
  return done.toolResults[0].output;
}

async function toolsStrict() {
  const done = await generateText({ ...long, tools: strictTools, toolChoice: "required" });
  assert(isWeatherCall(done.toolCalls[0].input));
  return done.toolResults[0].output;
}

async function toolsStream() {
  const toolChoice = { type: "tool", toolName: "get_weather" };
  const done = streamText({ ...long, tools, toolChoice, onError: ({ error }) => console.error(error) });
  const calls = await done.toolCalls;
  assert(isWeatherCall(calls[0].input));
  return (await done.toolResults)[0].output;
}

async function toolsLoop() {
  const prepareStep = ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "none" });
  const done = await generateText({ ...long, tools, stopWhen: stepCountIs(2), prepareStep });
  assert(done.steps.length === 2 && done.steps[0].toolResults.length > 0);
  return done.text;
}

async function toolsAuto() {
  return (await generateText({ ...short, tools })).finishReason;
}

async function object() {
  const done = await generateObject({ ...long, schema });
  assert(isWeatherCall(done.object));
  return done.object;
}

async function objectStream() {
  const done = streamObject({ ...long, schema, onError: ({ error }) => console.error(error) });
  let last;
  for await (const partial of done.partialObjectStream) last = partial;
  assert(isWeatherCall(last));
  return last;
}

async function outputObject() {
  const done = await generateText({ ...long, output: Output.object({ schema }) });
  assert(isWeatherCall(done.output));
  return done.output;
}

async function objectWithoutSchema() {
  const plain = createOpenAICompatible(options)(MODEL); // sends json_object; the prompt has the schema
  const done = await generateObject({ ...long, model: plain, output: "no-schema" });
  assert(typeof done.object === "object");
  return done.object;
}

async function completion() {
  return (await generateText({ ...short, model: provider.completionModel(MODEL), maxOutputTokens: 8 })).text;
}

async function embeddings() {
  return (await embed({ model: provider.textEmbeddingModel(MODEL), value: "a cat" })).embedding.length;
}

await runChecks(
  ["ai", "@ai-sdk/openai-compatible"],
  [text, stream, toolsRequired, toolsStrict, toolsStream, toolsLoop, toolsAuto]
    .concat([object, objectStream, outputObject, objectWithoutSchema, completion, embeddings]),
);
