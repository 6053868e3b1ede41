// Tool calls of an answer, and a form for their results.

import { fitHeight, make } from "../dom.js";
import { codeBlock } from "./markdown.js";

export function callCards(calls) {
  return calls.filter(Boolean).map((call) => make("section", { class: "call", "aria-label": `Call of ${call.function.name}` },
    make("h4", {}, "Call of ", make("code", {}, call.function.name)),
    codeBlock(indented(call.function.arguments), "json")));
}

// Return whether there are calls whose arguments can be used.
export function areComplete(calls) {
  try { return calls.length > 0 && calls.every((call) => JSON.parse(call.function.arguments)); } catch { return false; }
}

function indented(json) {
  try { return JSON.stringify(JSON.parse(json), null, 2); } catch { return json; }   // not complete yet
}

// Return a form with one field per call; `onSubmit` receives their values.
export function resultForm(message, onSubmit) {
  const fields = message.calls.map((call, i) => {
    const field = make("textarea", {
      rows: "2", required: true, "aria-label": `Result of ${call.function.name}`,
      placeholder: `What ${call.function.name} returned: text or JSON`,
    });
    field.value = message.results?.[i] ?? "";
    field.addEventListener("input", () => fitHeight(field));
    return field;
  });
  const form = make("form", { class: "results" }, ...fields,
    make("div", { class: "row" }, make("button", { type: "submit", class: "main" },
      fields.length === 1 ? "Send the result" : "Send the results")));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    onSubmit(fields.map((field) => field.value));
  });
  return form;
}
