// One answer of the model: the request, and the message that its stream fills.

import { streamChat } from "../api.js";
import { Output } from "../store/output.js";

// Return the options of a request. The page draws the seed, so that a stopped answer can be repeated, too.
export function requestOptions(settings) {
  const options = {
    ...settings.sampling,
    stream: true, stream_options: { include_usage: true },
    logprobs: true, top_logprobs: settings.alternatives, return_token_ids: true, provenance: true,
    seed: settings.sampling.seed ?? crypto.getRandomValues(new Uint32Array(1))[0],
  };
  if (!settings.speculation) options.speculative = false;
  else if (settings.drafts) options.speculative = { enabled: true, num_speculative_tokens: settings.drafts };
  if (settings.tools.length) Object.assign(options, { tools: settings.tools, tool_choice: settings.toolChoice });
  return { ...options, ...settings.extra };
}

// Return an empty message of the model. `finish`: a finish reason of the API, "stopped" or "error".
export function emptyAnswer(settings) {
  return {
    role: "assistant", content: "", reasoning: "", calls: [], finish: null, error: null, comparison: null,
    request: requestOptions(settings), system: settings.system, output: new Output(),
  };
}

// Fill `message` from the stream of its request; call `onTokens` with the tokens of each event.
export async function fillAnswer(message, messages, signal, onTokens) {
  message.output = new Output();
  for await (const event of streamChat({ ...message.request, messages }, signal)) {
    addDelta(message, event.choices?.[0]);
    onTokens(message.output.add(event));
  }
}

function addDelta(message, choice) {
  if (!choice) return;
  const delta = choice.delta ?? {};
  message.content += delta.content ?? "";
  message.reasoning += delta.reasoning_content ?? delta.reasoning ?? "";
  for (const part of delta.tool_calls ?? []) {
    const call = (message.calls[part.index] ??= { id: "", type: "function", function: { name: "", arguments: "" } });
    if (part.id) call.id = part.id;
    call.function.name += part.function?.name ?? "";
    call.function.arguments += part.function?.arguments ?? "";
  }
  message.finish = choice.finish_reason ?? message.finish;
}

// Generate the output of `message` again without speculation and return it.
export async function repeatWithoutSpeculation(message, messages, signal) {
  const request = { ...message.request, speculative: false };
  const isWhole = ["stop", "length", "tool_calls"].includes(message.finish);
  if (!isWhole) request.max_completion_tokens = message.output.tokens.length;
  const plain = { ...message, calls: [], request };
  await fillAnswer(plain, messages, signal, () => {});
  return plain.output;
}
