// One message of the transcript as an element.

import { button, copyButton, fitHeight, make } from "../dom.js";
import { tokenSpan } from "../panel/tokens.js";
import { size } from "./attachments.js";
import { renderMarkdown } from "./markdown.js";
import { areComplete, callCards, resultForm } from "./tool_calls.js";

const NAMES = { user: "You", assistant: "Model", tool: "Result of the tool" };

// Return the element of a message of the user, with an editor behind "Edit".
export function userMessage(message, actions) {
  const files = (message.attachments ?? []).map((file) => make("details", { class: "file" },
    make("summary", {}, `${file.name} (${size(file.text)})`), make("pre", { tabindex: "0" }, file.text)));
  const text = make("div", { class: "text" }, message.content);
  const edit = button("Edit", () => actions.edit(message), { class: "small", "data-action": "edit" });
  const row = make("div", { class: "actions" }, copyButton(() => message.content, "the prompt"), edit);
  return frame(message, actions, ...files, text, row);
}

// Return a form that replaces the text of a message of the user.
export function editor(message, text, onSubmit, onCancel) {
  const area = make("textarea", { "aria-label": "Edit the prompt", rows: "2" });
  area.value = text;
  const form = make("form", { class: "editor" }, area, make("div", { class: "row" },
    make("button", { type: "submit", class: "main" }, "Send"), button("Cancel", onCancel)));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (area.value.trim()) onSubmit(area.value.trim());
  });
  area.addEventListener("input", () => fitHeight(area));
  area.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      form.requestSubmit();
    } else if (event.key === "Escape") {
      event.stopPropagation();
      onCancel();
    }
  });
  return form;
}

export function toolMessage(message, actions) {
  const text = make("pre", { class: "result", tabindex: "0" }, message.content);
  return frame(message, actions, make("p", { class: "quiet" }, message.name), text);
}

function frame(message, actions, ...children) {
  const siblings = actions.siblings(message), at = siblings.indexOf(message);
  const head = make("div", { class: "head" }, make("h3", { class: "role" }, NAMES[message.role]));
  if (siblings.length > 1) {
    const move = (by) => () => actions.show(siblings[at + by]);
    head.append(make("span", { class: "versions", role: "group", "aria-label": "Versions" },
      button("‹", move(-1), { class: "small", "aria-label": "Previous version", disabled: at === 0 }),
      `${at + 1} of ${siblings.length}`,
      button("›", move(1), { class: "small", "aria-label": "Next version", disabled: at === siblings.length - 1 })));
  }
  return make("li", { class: `message ${message.role}`, "data-id": message.id }, head, ...children);
}

// A message of the model; `update` shows new tokens, `finish` the end.
export class AnswerView {
  #drawn = 0;   // token spans
  #isScheduled = false;

  constructor(message, actions) {
    this.message = message;
    this.actions = actions;
    this.reasoning = make("div", { class: "markdown" });
    this.fold = make("details", { class: "reasoning", hidden: true },
      make("summary", {}, "Reasoning"), this.reasoning);
    this.text = make("div", { class: "markdown" });
    this.tokens = make("div", {
      class: "output", tabindex: "0", role: "listbox",
      "aria-label": "Output, token by token: arrow keys move through it",
    });
    this.calls = make("div", { class: "calls" });
    this.results = make("div");   // the form for results of the calls
    this.note = make("p", { class: "note", hidden: true });
    this.comparison = make("p", { class: "comparison", role: "status", hidden: true });
    this.figures = make("p", { class: "quiet figures" });
    this.row = make("div", { class: "actions" });
    this.element = frame(message, actions, this.fold, this.text, this.tokens, this.calls, this.results,
      this.note, this.comparison, this.figures, this.row);
    for (const name of ["pointerover", "click"]) {
      this.tokens.addEventListener(name, (event) => {
        const span = event.target.closest(".t");
        if (span) actions.selectToken(this, Number(span.dataset.at), name === "pointerover");
      });
    }
    this.tokens.addEventListener("keydown", (event) => actions.moveToken(this, event));
  }

  get output() { return this.message.output; }

  // Show new tokens with the next frame. Long texts are rendered less often.
  update() {
    if (this.#isScheduled) return;
    this.#isScheduled = true;
    const draw = () => {
      this.#isScheduled = false;
      if (!this.actions.isRunning(this.message)) return;   // `finish` has drawn everything
      const began = performance.now();
      this.draw();
      this.pauseMs = Math.min(1000, 5 * (performance.now() - began));
    };
    setTimeout(() => requestAnimationFrame(draw), this.pauseMs ?? 0);
  }

  draw() {
    const { content, reasoning, finish } = this.message;
    this.element.classList.toggle("running", this.actions.isRunning(this.message));
    const isTokens = this.actions.showsTokens();
    this.tokens.hidden = !isTokens;
    this.text.hidden = isTokens;
    this.fold.hidden = isTokens || !reasoning;
    if (isTokens) this.#drawTokens();
    else {
      this.text.replaceChildren(renderMarkdown(content));
      if (reasoning) this.reasoning.replaceChildren(renderMarkdown(reasoning));
      this.fold.firstChild.textContent = finish || content ? "Reasoning" : "Reasoning…";
    }
    this.calls.replaceChildren(...callCards(this.message.calls));
    this.#drawFigures();
    this.actions.drawn(this);
  }

  #drawTokens() {
    const fresh = this.output.tokens.slice(this.#drawn);
    this.tokens.append(...fresh.map((token, i) => tokenSpan(token, this.#drawn + i, this.message.id)));
    this.#drawn += fresh.length;
    for (const at of this.message.comparison?.found ?? []) this.tokens.children[at]?.classList.add("different");
  }

  #drawFigures() {
    const { tokens, speed, acceptanceLength, drafted, accepted } = this.output;
    const parts = [`${tokens.length} ${tokens.length === 1 ? "token" : "tokens"}`];
    if (speed) parts.push(`${speed.toFixed(speed < 10 ? 1 : 0)} per second`);
    if (drafted) parts.push(`${accepted} of ${drafted} drafts accepted`, `${acceptanceLength.toFixed(2)} tokens per step`);
    this.figures.textContent = parts.join(" · ");
  }

  // Show what is known at the end of the answer: notes, results of tools, comparison, actions.
  finish() {
    this.draw();
    const { message, actions } = this;
    const note = endNote(message);
    this.note.hidden = !note;
    this.note.textContent = note;
    this.note.classList.toggle("error", message.finish === "error");
    const needsResults = areComplete(message.calls) && actions.isLast(message);
    const form = needsResults ? [resultForm(message, (results) => actions.sendResults(message, results))] : [];
    this.results.replaceChildren(...form);
    this.#drawComparison();
    const compare = button("Check without speculation", () => actions.compare(message),
      { class: "small", "data-action": "compare", title: "Generate it again with the same seed and compare every bit" });
    this.row.replaceChildren(
      copyButton(() => message.content || JSON.stringify(message.calls, null, 2), "the answer"),
      button("Regenerate", () => actions.regenerate(message), { class: "small", "data-action": "regenerate" }),
      button("Details", () => actions.details(this), { class: "small", "data-action": "details" }),
      ...(message.request.speculative === false ? [] : [compare]));
  }

  comparing() {
    this.comparison.hidden = false;
    this.comparison.className = "comparison";
    this.comparison.textContent = "Generating it again without speculation…";
  }

  #drawComparison() {
    const { comparison } = this.message;
    this.comparison.hidden = !comparison;
    if (!comparison) return;
    this.comparison.className = `comparison ${comparison.found.length ? "different" : "same"}`;
    this.comparison.textContent = differenceText(this.message);
  }
}

// Return why an answer ended, if it is not complete.
export function endNote(message) {
  const count = message.output.tokens.length;
  const limit = message.request.max_completion_tokens;
  if (message.finish === "length") {
    return count === limit
      ? `Cut off: the answer reached the limit of ${limit} tokens. Raise “Maximum tokens” in the settings and regenerate.`
      : "Cut off: the conversation reached the model's maximum length.";
  }
  if (message.finish === "stopped") return "Stopped. What was written is part of the conversation.";
  if (message.finish === "error") return `The answer is not complete: ${message.error}`;
  return message.finish ? "" : "The page was closed before the answer was complete.";
}

function differenceText(message) {
  const { found, speed } = message.comparison, { seed } = message.request, output = message.output;
  if (found.length) {
    return `${found.length} of ${output.tokens.length} tokens differ without speculation (seed ${seed}): this is a bug, please report it.`;
  }
  return `Identical: ${output.tokens.length} tokens and their logprobs are the same without speculation (seed ${seed}; `
    + `${output.speed.toFixed(0)} tokens per second with speculation, ${speed.toFixed(0)} without).`;
}
