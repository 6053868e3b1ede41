// Export of a conversation: Markdown of what is shown, JSON of everything.

import { make } from "../dom.js";
import { withAttachments } from "./conversation.js";

const NAMES = { user: "You", assistant: "Model", tool: "Result of the tool" };

export function toMarkdown(conversation) {
  const parts = [`# ${conversation.title}`];
  if (conversation.settings.system?.trim()) parts.push(`## System prompt\n\n${conversation.settings.system}`);
  for (const message of conversation.path()) {
    parts.push(`## ${NAMES[message.role]}`);
    if (message.reasoning) parts.push(`<details><summary>Reasoning</summary>\n\n${message.reasoning}\n\n</details>`);
    const text = withAttachments(message);
    if (text) parts.push(message.role === "tool" ? fenced(text) : text);
    for (const call of message.calls ?? []) {
      parts.push(`Call of \`${call.function.name}\`:`, fenced(call.function.arguments, "json"));
    }
  }
  return `${parts.join("\n\n")}\n`;
}

function fenced(text, language = "") {
  return `\`\`\`${language}\n${text}\n\`\`\``;
}

export function toJson(conversation) {
  return JSON.stringify({ format: "draftproof-conversation-1", ...conversation }, null, 1);
}

export function download(name, type, text) {
  const link = make("a", { href: URL.createObjectURL(new Blob([text], { type })), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

export function fileName(conversation, extension) {
  const name = conversation.title.toLowerCase().replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "");
  return `${name || "conversation"}.${extension}`;
}
