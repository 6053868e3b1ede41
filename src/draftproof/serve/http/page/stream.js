// Requests of this page to the API: JSON, and one chat request as a stream of events.

export class ApiError extends Error {
  constructor(message, status) { super(message); this.status = status; }
}

function headers(key) {
  const sent = { "Content-Type": "application/json" };
  if (key) sent.Authorization = `Bearer ${key}`;
  return sent;
}

async function errorOf(response) {
  const text = await response.text();
  try { return new ApiError(JSON.parse(text).error.message, response.status); }
  catch { return new ApiError(text || response.statusText, response.status); }
}

export async function getJson(path, key) {
  const response = await fetch(path, { headers: headers(key) });
  if (!response.ok && path !== "/health") throw await errorOf(response);
  return response.json();
}

// Yield the parsed events of a chat request; leaving the loop aborts the request.
export async function* streamChat(body, key, signal) {
  const response = await fetch("/v1/chat/completions", {
    method: "POST", headers: headers(key), body: JSON.stringify(body), signal,
  });
  if (!response.ok) throw await errorOf(response);
  const decoder = new TextDecoder();
  let rest = "";
  for await (const bytes of chunks(response.body)) {
    rest += decoder.decode(bytes, { stream: true });
    const parts = rest.split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trim()).join("\n");
      if (!data) continue;
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new ApiError(event.error.message, 200);
      yield event;
    }
  }
  throw new ApiError("the connection ended before the output was complete", 0);
}

async function* chunks(body) {
  const reader = body.getReader();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      yield value;
    }
  } finally { reader.cancel().catch(() => {}); }
}
