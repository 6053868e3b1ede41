// The open conversation and the one request in progress. Views listen to its events:
//   "open": other messages are shown; "tokens": new tokens of `detail.message`; "end": its end;
//   "list": titles or the number of conversations changed; "running": a request started or ended.

import { Conversation, apiMessages } from "../store/conversation.js";
import { deleteConversation, loadConversation, saveConversation } from "../store/database.js";
import { differences } from "../store/output.js";
import { emptyAnswer, fillAnswer, repeatWithoutSpeculation } from "./generation.js";

const SAVE_INTERVAL_MS = 2000;

export class Session extends EventTarget {
  conversation = null;
  running = null;   // {controller, conversation, message} of the request in progress

  // `readSettings` returns the settings of the form; `onError` shows an error.
  constructor(readSettings, onError) {
    super();
    this.readSettings = readSettings;
    this.onError = onError;
  }

  #emit(name, detail = null) {
    this.dispatchEvent(new CustomEvent(name, { detail }));
  }

  async #save(conversation) {
    if (!conversation.messages.length) return;
    try {
      await saveConversation(conversation);
      this.#emit("list");
    } catch {
      this.onError(new Error("This browser cannot store the conversation: export it before you close the page."));
    }
  }

  // --- the open conversation ---

  create(settings) {
    this.conversation = new Conversation(settings);
    this.#emit("open");
  }

  async open(id) {
    const isRunning = this.running?.conversation.id === id;
    const found = isRunning ? this.running.conversation : await loadConversation(id);
    if (!found) return;
    this.conversation = found;
    this.#emit("open");
  }

  rename(title) {
    this.conversation.title = title;
    return this.#save(this.conversation);
  }

  // Store the form's values with the conversation.
  keepSettings(values) {
    this.conversation.settings = values;
    return this.#save(this.conversation);
  }

  async delete() {
    if (this.running?.conversation === this.conversation) this.stop();
    const { id, settings } = this.conversation;
    this.conversation.messages = [];   // a request in progress stores nothing any more
    await deleteConversation(id);
    this.create(settings);
    this.#emit("list");
  }

  show(message) {
    this.conversation.show(message);
    this.#emit("open");
    return this.#save(this.conversation);
  }

  // --- requests: each returns whether the model generated anything ---

  send(content, attachments) {
    return this.#answer([{ role: "user", content, attachments }], this.conversation.leaf);
  }

  edit(message, content) {
    return this.#answer([{ role: "user", content, attachments: message.attachments }], message.parent);
  }

  regenerate(message) {
    return this.#answer([], message.parent);
  }

  // Send the results of the tool calls of a message.
  sendResults(message, results) {
    message.results = results;   // of the form, if the request fails
    const added = message.calls.map((call, i) => (
      { role: "tool", callId: call.id, name: call.function.name, content: results[i] }
    ));
    return this.#answer(added, message.id);
  }

  stop() {
    this.running?.controller.abort();
  }

  // Return whether a request is in progress, and show that a second one has to wait.
  isBusy() {
    if (this.running) this.onError(new Error("An answer is still being written: wait for its end, or stop it (Esc)."));
    return this.running !== null;
  }

  // Add messages after `parent` and generate an answer. If it stays empty, everything is as before.
  async #answer(messages, parent) {
    if (this.isBusy()) return false;
    const conversation = this.conversation, before = conversation.leaf;
    let settings;
    try { settings = this.readSettings(); } catch (error) { this.onError(error); return false; }
    const added = [];
    conversation.leaf = parent;
    for (const message of messages) added.push(conversation.add(message));
    const answer = conversation.add(emptyAnswer(settings));
    await this.#run(conversation, answer, (signal) => {
      this.#emit("open");
      this.#save(conversation);
      return this.#stream(conversation, answer, signal);
    });
    if (!answer.output.tokens.length) {
      for (const message of [answer, ...added.reverse()]) conversation.remove(message, before);
      if (this.conversation === conversation) this.#emit("open");
      await this.#save(conversation);
      return false;
    }
    this.#emit("end", answer);
    await this.#save(conversation);
    if (settings.compare && answer.finish !== "error") await this.compare(answer, conversation);
    return true;
  }

  async #stream(conversation, answer, signal) {
    const messages = apiMessages(conversation.path(answer.parent), answer.system);
    let saved = performance.now();
    try {
      await fillAnswer(answer, messages, signal, (tokens) => {
        if (!conversation.messages.length) return;
        this.#emit("tokens", { message: answer, tokens });
        if (performance.now() - saved < SAVE_INTERVAL_MS) return;
        saved = performance.now();
        this.#save(conversation);
      });
    } catch (error) {
      answer.finish = error.name === "AbortError" ? "stopped" : "error";
      answer.error = error.message;
      throw error;
    }
  }

  // Generate an answer again with the same seed, without speculation, and store the differences.
  async compare(answer, conversation = this.conversation) {
    if (this.isBusy()) return;
    await this.#run(conversation, answer, async (signal) => {
      const messages = apiMessages(conversation.path(answer.parent), answer.system);
      this.#emit("comparing", answer);
      const plain = await repeatWithoutSpeculation(answer, messages, signal);
      answer.comparison = { found: differences(answer.output, plain), speed: plain.speed };
    });
    this.#emit("end", answer);
    await this.#save(conversation);
  }

  async #run(conversation, message, work) {
    const controller = new AbortController();
    this.running = { controller, conversation, message };
    this.onError(null);
    this.#emit("running");
    try { await work(controller.signal); } catch (error) {
      if (error.name !== "AbortError") this.onError(error);
    } finally {
      this.running = null;
      this.#emit("running");
    }
  }
}
