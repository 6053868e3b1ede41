// Answers, steps and tokens as elements. Text goes in as text, never as markup.

const SOURCES = [];   // proposers in the order in which they were met: the first three have a look of their own

export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "class") element.className = value;
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

export function look(from) {
  if (!from.startsWith("accepted")) return from;
  const source = from.split(":")[1] ?? "";
  if (!SOURCES.includes(source)) SOURCES.push(source);
  return ["accepted", "accepted second", "accepted third"][Math.min(SOURCES.indexOf(source), 2)];
}

const WORDS = { plain: "the model's own, no draft", recovered: "in place of a draft that fell", bonus: "after drafts that all stood" };

export function words(from) {
  return from.startsWith("accepted") ? `a draft of ${from.split(":")[1] ?? "the drafter"} that stood` : (WORDS[from] ?? from);
}

export function legend(list) {
  const kinds = [...SOURCES.map((source) => `accepted:${source}`), "recovered", "bonus", "plain"];
  const named = kinds.map((kind) => make("li", {}, make("span", { class: `t ${look(kind)}` }, kind.replace("accepted:", "accepted, "))));
  list.replaceChildren(...named);
}

export function tokenSpan(token, at, prefix) {
  const span = make("span", { class: `t ${look(token.from)}`, id: `${prefix}-${at}`, "data-at": at, role: "option", "aria-selected": "false" }, token.text);
  if (!token.text) span.classList.add("empty");
  else if (!token.text.trim() && token.text.includes("\n")) span.classList.add("line");   // else nobody could point at it
  return span;
}

export function stepColumn(answer, step, at) {
  const column = make("div", { class: "step", "data-step": at });
  const from = step.tokens.map((i) => answer.tokens[i].from);
  const stood = from.filter((kind) => kind.startsWith("accepted")).length;
  for (let i = 0; i < stood; i++) column.append(make("i", { class: "stood" }));
  for (let i = stood; i < step.drafts; i++) column.append(make("i", { class: "fell" }));
  const own = from[from.length - 1];
  if (own && !own.startsWith("accepted")) column.append(make("i", { class: `own ${own}` }));
  column.title = `step ${at + 1}: ${step.drafts} drafts, ${stood} stood, ${step.tokens.length} tokens`;
  return column;
}

function shown(text) {
  return JSON.stringify(text).slice(1, -1).replaceAll('\\"', '"').replaceAll("\\\\", "\\");
}

// What is known of one token: its logprob, and its rivals as bars of their probabilities.
export function tokenCard(answer, at) {
  const token = answer.tokens[at], step = answer.steps[token.step];
  const about = make("p", { class: "about" },
    `Token ${at + 1} of ${answer.tokens.length}, id ${token.id}: ${words(token.from)}. Step ${token.step + 1}, ${step.drafts} drafts.`);
  const lines = token.top.map((line) => ({ name: line.token, logprob: line.logprob, it: line.token === token.name && line.logprob === token.logprob }));
  if (!lines.some((line) => line.it)) lines.push({ name: token.name, logprob: token.logprob, it: true });
  const rows = lines.map((line) => {
    const share = line.logprob === null ? 0 : Math.exp(line.logprob);
    const bar = make("div");
    bar.style.width = `${Math.max(0.5, share * 100)}%`;
    return make("tr", line.it ? { class: "it" } : {},
      make("th", { scope: "row" }, shown(line.name)),
      make("td", { class: "bar" }, bar),
      make("td", {}, `${(share * 100).toFixed(share < 0.1 ? 2 : 1)} %`),
      make("td", {}, line.logprob === null ? "–" : line.logprob.toFixed(4)));
  });
  const table = make("table", {}, make("caption", { class: "hidden" }, "The token and its alternatives: share and logprob"), make("tbody", {}, ...rows));
  return [about, table];
}
