// The settings of a conversation: a form from one table, and the values that a request needs.

import { apiKey } from "../api.js";
import { $, make } from "../dom.js";

// field of the API, label, attributes of the input; an empty field is not sent: the server's default holds
const SAMPLING = [
  ["temperature", "Temperature", { min: 0, max: 2, step: 0.1 }],
  ["max_completion_tokens", "Maximum tokens", { min: 1, step: 1 }],
  ["seed", "Seed", { min: 0, step: 1, placeholder: "random" }],
  ["top_p", "Top p", { min: 0.01, max: 1, step: 0.01 }],
  ["top_k", "Top k", { min: -1, step: 1 }],
  ["min_p", "Min p", { min: 0, max: 1, step: 0.01 }],
  ["presence_penalty", "Presence penalty", { min: -2, max: 2, step: 0.1 }],
  ["frequency_penalty", "Frequency penalty", { min: -2, max: 2, step: 0.1 }],
  ["repetition_penalty", "Repetition penalty", { min: 0.1, step: 0.05 }],
];
const OTHERS = ["system", "alternatives", "drafts", "tools", "tool-choice", "extra"];
const SWITCHES = ["speculation", "compare"];
const DEFAULTS = { max_completion_tokens: "1024", alternatives: "5", "tool-choice": "auto", speculation: true };

export class SettingsForm {
  // `onChange` receives the values of the form after a change by the user.
  constructor(onChange) {
    $("sampling").append(...SAMPLING.flatMap(([name, label, attributes]) => [
      make("label", { for: name }, label),
      make("input", { id: name, type: "number", placeholder: "default", ...attributes }),
    ]));
    $("options").addEventListener("submit", (event) => event.preventDefault());
    $("options").addEventListener("change", () => {
      localStorage.setItem("settings", JSON.stringify(this.values));
      this.#check();
      onChange(this.values);
    });
    $("options").addEventListener("input", () => this.#summarize());
    $("key").value = apiKey.get();
    $("key").addEventListener("input", () => apiKey.set($("key").value));
    this.values = this.lastUsed();
  }

  // Return the values of the last conversation that changed them.
  lastUsed() {
    return JSON.parse(localStorage.getItem("settings") ?? JSON.stringify(DEFAULTS));
  }

  get values() {
    const found = {};
    for (const id of [...SAMPLING.map(([name]) => name), ...OTHERS]) found[id] = $(id).value;
    for (const id of SWITCHES) found[id] = $(id).checked;
    return found;
  }

  set values(values) {
    for (const id of [...SAMPLING.map(([name]) => name), ...OTHERS]) $(id).value = values[id] ?? "";
    for (const id of SWITCHES) $(id).checked = Boolean(values[id]);
    if (!$("tool-choice").value) $("tool-choice").value = "auto";
    this.#check();
    this.#summarize();
  }

  // Return the settings of a request; throw an error that names a field with a wrong value.
  read() {
    const sampling = {};
    for (const [name, label] of SAMPLING) {
      if (!$(name).validity.valid && $(name).validity.badInput) throw new Error(`${label} is not a number.`);
      if ($(name).value !== "") sampling[name] = Number($(name).value);
    }
    return {
      sampling,
      system: $("system").value,
      alternatives: Number($("alternatives").value || 0),
      drafts: Number($("drafts").value || 0),
      tools: readJson("tools", "Tools", []),
      toolChoice: $("tool-choice").value,
      extra: readJson("extra", "Other options", {}),
      speculation: $("speculation").checked,
      compare: $("compare").checked,
    };
  }

  #check() {
    for (const [id, label, empty] of [["tools", "Tools", []], ["extra", "Other options", {}]]) {
      let problem = "";
      try { readJson(id, label, empty); } catch (error) { problem = error.message; }
      $(`${id}-error`).textContent = problem;
      $(id).setAttribute("aria-invalid", String(problem !== ""));
    }
  }

  // Show the main settings below the prompt.
  #summarize() {
    const { values } = this, parts = [];
    parts.push(values.temperature === "" ? "default temperature" : `temperature ${values.temperature}`);
    parts.push(values.max_completion_tokens === "" ? "no token limit" : `up to ${values.max_completion_tokens} tokens`);
    parts.push(values.seed === "" ? "random seed" : `seed ${values.seed}`);
    if (!values.speculation) parts.push("no speculation");
    if (values.system.trim()) parts.push("system prompt");
    if (values.tools.trim()) parts.push("tools");
    $("summary").textContent = parts.join(" · ");
  }
}

// Return the JSON of a text area; it must be of the type of `empty`.
function readJson(id, label, empty) {
  const text = $(id).value.trim();
  if (!text) return empty;
  let value;
  try { value = JSON.parse(text); } catch (error) { throw new Error(`${label}: not valid JSON: ${error.message}`); }
  const isRight = value !== null && typeof value === "object" && Array.isArray(value) === Array.isArray(empty);
  if (!isRight) throw new Error(`${label}: expected a JSON ${Array.isArray(empty) ? "list" : "object"}.`);
  return value;
}
