// The tab "Output": figures, steps and one token of an answer.

import { $, make } from "../dom.js";
import { legendItems, stepColumn, tokenDetails } from "./tokens.js";

export class Inspector {
  #view = null;      // the AnswerView that is shown
  #at = -1;          // the selected token
  #columns = 0;      // steps that are drawn

  // `openTab` shows the panel with this tab.
  constructor(openTab) {
    this.openTab = openTab;
    $("strip").addEventListener("click", (event) => {
      const column = event.target.closest(".step");
      if (column) this.selectToken(this.#view, this.#view.output.steps[Number(column.dataset.step)].tokens[0]);
    });
  }

  // Show the figures of an answer; null: of none.
  show(view) {
    if (this.#view === view && view) return;
    this.#view = view;
    this.#at = -1;
    this.#columns = 0;
    $("strip").replaceChildren();
    $("token").replaceChildren(make("p", { class: "quiet" },
      "None selected. Switch on “Tokens” above the conversation, then point at one or use the arrow keys."));
    if (view) this.update(view);
    else for (const id of ["f-length", "f-speed", "f-drafts", "f-first", "f-prompt"]) $(id).textContent = "–";
    $("legend").replaceChildren(...legendItems());
  }

  open(view) {
    this.show(view);
    this.openTab();
  }

  // Draw the steps and figures that are new, if `view` is shown.
  update(view) {
    if (view !== this.#view) return;
    const { output, message } = view;
    $("f-length").textContent = output.acceptanceLength ? output.acceptanceLength.toFixed(2) : "–";
    $("f-speed").textContent = output.speed ? output.speed.toFixed(output.speed < 10 ? 1 : 0) : "–";
    $("f-drafts").textContent = output.drafted ? `${output.accepted} of ${output.drafted}` : "no drafts";
    $("f-first").textContent = output.firstMs === null ? "–" : `${output.firstMs.toFixed(0)} ms`;
    const usage = output.usage;
    const cached = usage?.prompt_tokens_details?.cached_tokens ?? 0;
    $("f-prompt").textContent = usage ? `${usage.prompt_tokens}${cached ? ` (${cached} cached)` : ""}` : "–";
    $("f-seed").textContent = message.request.seed;
    const steps = output.completeSteps;
    const count = message.finish ? steps.length : Math.max(0, output.steps.length - 1);
    for (; this.#columns < count; this.#columns++) {
      $("strip").append(stepColumn(output, output.steps[this.#columns], this.#columns));
    }
    $("strip").scrollLeft = $("strip").scrollWidth;
    $("strip").setAttribute("aria-label", steps.length
      ? `${steps.length} steps, ${output.tokens.length} tokens, ${output.accepted} of ${output.drafted} drafts accepted`
      : "No steps yet");
    $("legend").replaceChildren(...legendItems());
  }

  // Select a token. A pointer that moves over it neither opens the panel nor scrolls.
  selectToken(view, at, isHovered = false) {
    if (isHovered) this.show(view);
    else this.open(view);
    const spans = view.tokens.children;
    if (at < 0 || at >= spans.length) return;
    for (const old of document.querySelectorAll(".t.selected, .step.selected")) {
      old.classList.remove("selected");
      if (old.role === "option") old.setAttribute("aria-selected", "false");
    }
    this.#at = at;
    spans[at].classList.add("selected");
    spans[at].setAttribute("aria-selected", "true");
    if (!isHovered) spans[at].scrollIntoView({ block: "nearest" });
    view.tokens.setAttribute("aria-activedescendant", spans[at].id);
    const column = $("strip").children[view.output.tokens[at].step];
    column?.classList.add("selected");
    if (column) $("strip").scrollLeft = column.offsetLeft - $("strip").clientWidth / 2;
    $("token").replaceChildren(...tokenDetails(view.output, at));
    if (!isHovered) $("token").scrollIntoView({ block: "nearest" });
  }

  // Move the selection with the arrow keys; up and down go to the previous and the next step.
  moveToken(view, event) {
    this.show(view);
    const { tokens } = view.output, at = this.#at, last = tokens.length - 1, step = tokens[at]?.step;
    const moves = {
      ArrowRight: () => at + 1, ArrowLeft: () => Math.max(0, at - 1), Home: () => 0, End: () => last,
      ArrowDown: () => tokens.findIndex((token) => token.step > (step ?? -1)),
      ArrowUp: () => tokens.findIndex((token) => token.step === Math.max(0, (step ?? 1) - 1)),
    };
    if (!moves[event.key]) return;
    event.preventDefault();
    const next = moves[event.key]();
    if (next >= 0) this.selectToken(view, Math.min(next, last));
  }
}
