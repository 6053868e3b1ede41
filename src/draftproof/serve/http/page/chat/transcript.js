// The messages of the open conversation. The end stays in view while the reader is at the end.

import { $, announce, fitHeight } from "../dom.js";
import { AnswerView, editor, endNote, toolMessage, userMessage } from "./message.js";

const NEAR_END_PIXELS = 80;
const MAX_ANNOUNCED_CHARACTERS = 2000;

export class Transcript {
  views = new Map();   // AnswerView by id of the message
  #follows = true;

  constructor(session, inspector) {
    this.session = session;
    this.actions = {
      edit: (message) => this.edit(message),
      show: (message) => session.show(message),
      siblings: (message) => session.conversation.siblings(message),
      isLast: (message) => session.conversation.leaf === message.id,
      isRunning: (message) => session.running?.message === message,
      regenerate: (message) => session.regenerate(message),
      compare: (message) => session.compare(message),
      sendResults: (message, results) => session.sendResults(message, results),
      showsTokens: () => $("show-tokens").checked,
      selectToken: (view, at, isHovered) => inspector.selectToken(view, at, isHovered),
      moveToken: (view, event) => inspector.moveToken(view, event),
      details: (view) => inspector.open(view),
      drawn: (view) => { inspector.update(view); this.#follow(); },
    };
    this.inspector = inspector;
    session.addEventListener("open", () => this.draw());
    session.addEventListener("tokens", (event) => this.views.get(event.detail.message.id)?.update());
    session.addEventListener("comparing", (event) => this.views.get(event.detail.id)?.comparing());
    session.addEventListener("end", (event) => this.#finish(event.detail));
    const scroller = $("scroller");
    scroller.addEventListener("scroll", () => {
      const rest = scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight;
      this.#follows = rest < NEAR_END_PIXELS;
      $("to-end").hidden = this.#follows;
    });
    $("to-end").addEventListener("click", () => this.scrollToEnd());
    $("show-tokens").checked = localStorage.getItem("show-tokens") === "true";
    $("show-tokens").addEventListener("change", () => {
      localStorage.setItem("show-tokens", $("show-tokens").checked);
      for (const view of this.views.values()) view.draw();
    });
  }

  draw() {
    const path = this.session.conversation.path();
    this.views.clear();
    $("messages").replaceChildren(...path.map((message) => this.#element(message)));
    const last = [...this.views.values()].at(-1);
    this.inspector.show(last ?? null);
    this.scrollToEnd();
  }

  #element(message) {
    if (message.role === "user") return userMessage(message, this.actions);
    if (message.role === "tool") return toolMessage(message, this.actions);
    const view = new AnswerView(message, this.actions);
    this.views.set(message.id, view);
    if (this.actions.isRunning(message)) view.draw();
    else view.finish();
    return view.element;
  }

  #finish(message) {
    this.views.get(message.id)?.finish();
    this.#follow();
    const text = message.content || message.calls.map((call) => `Call of ${call.function.name}`).join(", ");
    announce(`Answer: ${text.slice(0, MAX_ANNOUNCED_CHARACTERS)} ${endNote(message)}`);
  }

  // Put an editor in place of a prompt. After a failed request the editor is open again with its text.
  edit(message, text = message.content) {
    const item = $("messages").querySelector(`[data-id="${message.id}"]`);
    const old = [...item.querySelectorAll(".text, .actions")];
    const cancel = () => {
      form.remove();
      for (const element of old) element.hidden = false;
      item.querySelector("[data-action=edit]").focus();
    };
    const form = editor(message, text, async (changed) => {
      if (this.session.isBusy()) return;
      if (!await this.session.edit(message, changed)) this.edit(message, changed);
    }, cancel);
    for (const element of old) element.hidden = true;
    item.append(form);
    const area = form.querySelector("textarea");
    fitHeight(area);
    area.focus();
  }

  // Open the editor of the last prompt.
  editLast() {
    const last = this.session.conversation.path().findLast((message) => message.role === "user");
    if (last) this.edit(last);
  }

  #follow() {
    if (this.#follows) this.scrollToEnd();
  }

  scrollToEnd() {
    $("scroller").scrollTop = $("scroller").scrollHeight;
    this.#follows = true;
    $("to-end").hidden = true;
  }
}
