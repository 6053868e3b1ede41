// Requests of the page to the server: JSON, text, and one chat request as a stream of events.
// Paths are relative, so that the page works behind a proxy with a path of its own.

export class ApiError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

// The key stays in this tab: another person at this browser does not get it with the conversations.
export const apiKey = {
  get: () => sessionStorage.getItem("key") ?? "",
  set: (value) => sessionStorage.setItem("key", value),
};

function headers() {
  const sent = { "Content-Type": "application/json" };
  if (apiKey.get()) sent.Authorization = `Bearer ${apiKey.get()}`;
  return sent;
}

async function send(path, options) {
  try {
    return await fetch(path, { headers: headers(), ...options });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server does not respond. Check that it is running, then try again.", 0);
  }
}

async function errorOf(response) {
  const text = await response.text();
  try {
    return new ApiError(JSON.parse(text).error.message, response.status);
  } catch {
    return new ApiError(text.slice(0, 300) || response.statusText, response.status);
  }
}

export async function getText(path) {
  const response = await send(path, {});
  if (!response.ok) throw await errorOf(response);
  return response.text();
}

export async function getJson(path) {
  return JSON.parse(await getText(path));
}

// Return the state that /health reports; an unhealthy server answers with 503 and its state.
export async function getHealth() {
  return (await send("health", {})).json();
}

// Yield the parsed events of a chat request. Leaving the loop aborts the request.
export async function* streamChat(body, signal) {
  const response = await send("v1/chat/completions", { method: "POST", body: JSON.stringify(body), signal });
  if (!response.ok) throw await errorOf(response);
  const decoder = new TextDecoder();
  let rest = "";
  for await (const bytes of chunks(response.body)) {
    rest += decoder.decode(bytes, { stream: true });
    const parts = rest.split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const lines = part.split("\n").filter((line) => line.startsWith("data:"));
      const data = lines.map((line) => line.slice(5).trim()).join("\n");
      if (!data) continue;   // a comment that keeps the connection open
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new ApiError(event.error.message, 200);
      yield event;
    }
  }
  throw new ApiError("The connection ended before the output was complete.", 0);
}

async function* chunks(body) {
  const reader = body.getReader();
  try {
    for (;;) {
      const { done, value } = await read(reader);
      if (done) return;
      yield value;
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

async function read(reader) {
  try {
    return await reader.read();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The connection to the server was lost.", 0);
  }
}
