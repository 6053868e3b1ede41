// Tokens, their colours and their details as elements.

import { make } from "../dom.js";

const SOURCES = [];   // proposers in order of appearance: the first three have styles of their own
const DESCRIPTIONS = {
  plain: "sampled without a draft", recovered: "in place of a rejected draft",
  bonus: "after drafts that were all accepted",
};

function tokenClass(provenance) {
  if (!provenance.startsWith("accepted")) return provenance;
  const source = provenance.split(":")[1] ?? "";
  if (!SOURCES.includes(source)) SOURCES.push(source);
  return ["accepted", "accepted second", "accepted third"][Math.min(SOURCES.indexOf(source), 2)];
}

function describe(provenance) {
  if (!provenance.startsWith("accepted")) return DESCRIPTIONS[provenance] ?? provenance;
  return `an accepted draft of ${provenance.split(":")[1] ?? "the proposer"}`;
}

function drafts(step) {
  return step.drafts === 1 ? "1 draft" : `${step.drafts} drafts`;
}

export function legendItems() {
  const kinds = [...SOURCES.map((source) => `accepted:${source}`), "recovered", "bonus", "plain"];
  return kinds.map((kind) => make("li", {},
    make("span", { class: `t ${tokenClass(kind)}` }, kind.replace("accepted:", "accepted, "))));
}

export function tokenSpan(token, at, prefix) {
  const span = make("span", {
    class: `t ${tokenClass(token.provenance)}`, id: `${prefix}-${at}`, "data-at": at,
    role: "option", "aria-selected": "false",
  }, token.text);
  // otherwise there is no visible area to point at
  if (!token.text) span.classList.add("empty");
  else if (!token.text.trim() && token.text.includes("\n")) span.classList.add("line");
  return span;
}

export function stepColumn(output, step, at) {
  const column = make("div", { class: "step", "data-step": at });
  const kinds = step.tokens.map((i) => output.tokens[i].provenance);
  const accepted = kinds.filter((kind) => kind.startsWith("accepted")).length;
  for (let i = 0; i < accepted; i++) column.append(make("i", { class: "accepted" }));
  for (let i = accepted; i < step.drafts; i++) column.append(make("i", { class: "rejected" }));
  const sampled = kinds[kinds.length - 1];
  if (sampled && !sampled.startsWith("accepted")) column.append(make("i", { class: `sampled ${sampled}` }));
  column.title = `step ${at + 1}: ${drafts(step)}, ${accepted} accepted`;
  return column;
}

function escaped(text) {
  return JSON.stringify(text).slice(1, -1).replaceAll('\\"', '"').replaceAll("\\\\", "\\");
}

// Return the details of one token: its logprob, and the alternatives with bars of their probabilities.
export function tokenDetails(output, at) {
  const token = output.tokens[at], step = output.steps[token.step];
  const about = make("p", { class: "about" }, `Token ${at + 1} of ${output.tokens.length}, id ${token.id}: `
    + `${describe(token.provenance)}. Step ${token.step + 1}, ${drafts(step)}.`);
  const lines = token.top.map((line) => (
    { ...line, isSampled: line.token === token.name && line.logprob === token.logprob }));
  if (!lines.some((line) => line.isSampled)) lines.push({ token: token.name, logprob: token.logprob, isSampled: true });
  const table = make("table", {},
    make("caption", { class: "hidden" }, "The token and its alternatives: probability and logprob"),
    make("tbody", {}, ...lines.map(alternativeRow)));
  return [about, table];
}

function alternativeRow({ token, logprob, isSampled }) {
  const probability = logprob === null ? 0 : Math.exp(logprob);
  const bar = make("div");
  bar.style.width = `${Math.max(0.5, probability * 100)}%`;
  return make("tr", isSampled ? { class: "sampled" } : {},
    make("th", { scope: "row" }, escaped(token), isSampled ? make("span", { class: "hidden" }, " (sampled)") : null),
    make("td", { class: "bar" }, bar),
    make("td", {}, `${(probability * 100).toFixed(probability < 0.1 ? 2 : 1)} %`),
    make("td", {}, logprob === null ? "–" : logprob.toFixed(4)));
}
