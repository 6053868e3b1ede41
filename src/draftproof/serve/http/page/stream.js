// The API as this page uses it: one chat request, read as it comes.

export class Refused extends Error {
  constructor(message, status) { super(message); this.status = status; }
}

function headers(key) {
  const sent = { "Content-Type": "application/json" };
  if (key) sent.Authorization = `Bearer ${key}`;
  return sent;
}

async function refusal(reply) {
  const text = await reply.text();
  try { return new Refused(JSON.parse(text).error.message, reply.status); }
  catch { return new Refused(text || reply.statusText, reply.status); }
}

export async function get(path, key) {
  const reply = await fetch(path, { headers: headers(key) });
  if (!reply.ok && path !== "/health") throw await refusal(reply);
  return reply.json();
}

// Yields the parsed events of a chat request; leaving the loop ends the request.
export async function* chat(wish, key, signal) {
  const reply = await fetch("/v1/chat/completions", {
    method: "POST", headers: headers(key), body: JSON.stringify(wish), signal,
  });
  if (!reply.ok) throw await refusal(reply);
  const decoder = new TextDecoder();
  let rest = "";
  for await (const bytes of chunks(reply.body)) {
    rest += decoder.decode(bytes, { stream: true });
    const parts = rest.split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trim()).join("\n");
      if (!data) continue;
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Refused(event.error.message, 200);
      yield event;
    }
  }
  throw new Refused("the connection ended in the middle of the answer", 0);
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
