// The list of conversations that this browser stores, and the title bar of the open one.

import { $, button, make } from "../dom.js";
import { listConversations } from "../store/database.js";
import { download, fileName, toJson, toMarkdown } from "../store/export.js";

export class ConversationList {
  // `onOpen` is called after a conversation was chosen, `onNew` to begin one.
  constructor(session, onOpen, onNew) {
    this.session = session;
    this.onOpen = onOpen;
    session.addEventListener("list", () => this.draw());
    session.addEventListener("open", () => this.draw());
    session.addEventListener("running", () => this.draw());
    $("search").addEventListener("input", () => this.draw());
    $("new").addEventListener("click", onNew);
    $("conversations").addEventListener("keydown", (event) => this.#move(event));
    $("title").addEventListener("change", () => session.rename($("title").value.trim()));
    $("export-markdown").addEventListener("click", () => this.#export("md", "text/markdown", toMarkdown));
    $("export-json").addEventListener("click", () => this.#export("json", "application/json", toJson));
    $("delete").addEventListener("click", async () => {
      if (!confirm(`Delete “${session.conversation.title || "this conversation"}” from this browser?`)) return;
      await session.delete();
      $("prompt").focus();
    });
  }

  async draw() {
    const { conversation, running } = this.session;
    const isEmpty = !conversation?.messages.length;
    for (const id of ["export-markdown", "export-json", "delete", "title"]) $(id).disabled = isEmpty;
    if (document.activeElement !== $("title")) $("title").value = conversation?.title ?? "";
    const wanted = $("search").value.trim().toLowerCase();
    const all = await listConversations().catch(() => []);
    const shown = all.filter(({ title }) => title.toLowerCase().includes(wanted));
    const focused = document.activeElement?.closest?.("#conversations button")?.dataset.id;
    $("conversations").replaceChildren(...shown.map(({ id, title }) => {
      const isRunning = running?.conversation.id === id;
      const item = button(title || "Untitled", () => this.#open(id), {
        "data-id": id, title, "aria-current": id === conversation?.id ? "true" : null, class: isRunning ? "running" : null,
      });
      return make("li", {}, item);
    }));
    $("no-conversations").hidden = shown.length > 0;
    $("no-conversations").textContent = wanted ? "Nothing found." : "Conversations are stored in this browser only.";
    if (focused) $("conversations").querySelector(`[data-id="${focused}"]`)?.focus();
  }

  async #open(id) {
    await this.session.open(id);
    this.onOpen();
  }

  // Move the focus through the list with the arrow keys.
  #move(event) {
    const buttons = [...$("conversations").querySelectorAll("button")];
    const at = buttons.indexOf(document.activeElement);
    const next = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: buttons.length - 1 }[event.key];
    if (at < 0 || next === undefined) return;
    event.preventDefault();
    buttons[Math.max(0, Math.min(buttons.length - 1, next))].focus();
  }

  #export(extension, type, write) {
    const { conversation } = this.session;
    download(fileName(conversation, extension), type, write(conversation));
  }
}
