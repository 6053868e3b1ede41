// A conversation as a tree of messages. Editing and regenerating add a sibling, so nothing is lost.

import { randomId } from "../dom.js";
import { Output } from "./output.js";

const TITLE_CHARACTERS = 60;

export class Conversation {
  constructor(settings) {
    Object.assign(this, { id: randomId(), title: "", created: Date.now(), updated: Date.now() });
    this.settings = settings;
    this.messages = [];   // {id, parent, role, content, ...}: see generation.js for those of the model
    this.leaf = null;     // id of the last message that is shown
  }

  static from(data) {
    const made = Object.assign(new Conversation(data.settings), data);
    for (const message of made.messages) if (message.output) message.output = Output.from(message.output);
    return made;
  }

  find(id) {
    return this.messages.find((message) => message.id === id) ?? null;
  }

  // Add a message after `parent`, by default the last one that is shown, and show it.
  add(message, parent = this.leaf) {
    const made = { ...message, id: randomId(), parent };
    this.messages.push(made);
    this.leaf = made.id;
    this.updated = Date.now();
    if (!this.title && made.role === "user") {
      this.title = made.content.trim().split("\n")[0].slice(0, TITLE_CHARACTERS) || made.attachments?.[0]?.name || "";
    }
    return made;
  }

  // Remove a message without answers, and show the messages that end at `leaf`.
  remove(message, leaf = message.parent) {
    this.messages = this.messages.filter((other) => other.id !== message.id);
    this.leaf = leaf;
    if (!this.messages.length) this.title = "";
  }

  // Return the messages that are shown, first to last.
  path(leaf = this.leaf) {
    const found = [];
    for (let message = this.find(leaf); message; message = this.find(message.parent)) found.unshift(message);
    return found;
  }

  siblings(message) {
    return this.messages.filter((other) => other.parent === message.parent);
  }

  // Show a sibling and the newest messages after it.
  show(message) {
    let last = message;
    for (;;) {
      const next = this.messages.findLast((other) => other.parent === last.id);
      if (!next) break;
      last = next;
    }
    this.leaf = last.id;
  }
}

// Return the messages of a request: what the API accepts, without reasoning, tokens and notes.
export function apiMessages(path, system) {
  const sent = system.trim() ? [{ role: "system", content: system }] : [];
  for (const message of path) {
    if (message.role === "user") sent.push({ role: "user", content: withAttachments(message) });
    else if (message.role === "tool") {
      sent.push({ role: "tool", tool_call_id: message.callId, content: message.content });
    } else if (message.calls?.length) {
      sent.push({ role: "assistant", content: message.content || null, tool_calls: message.calls });
    } else if (message.output.tokens.length) sent.push({ role: "assistant", content: message.content });
    else sent.pop();   // the page was closed before the answer began: its prompt has none
  }
  return sent;
}

// Return the text of a prompt with its files before it, each in a code fence longer than any inside.
export function withAttachments(message) {
  const files = (message.attachments ?? []).map(({ name, text }) => {
    const longest = Math.max(2, ...[...text.matchAll(/`+/g)].map((run) => run[0].length));
    const fence = "`".repeat(longest + 1);
    return `File ${name}:\n${fence}\n${text.replace(/\n$/, "")}\n${fence}\n\n`;
  });
  return files.join("") + message.content;
}
