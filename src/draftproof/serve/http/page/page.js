// The page: asks, listens, draws, and checks that speculation changed nothing.

import { Answer, differing } from "/page/answer.js";
import { legend, make, stepColumn, tokenCard, tokenSpan } from "/page/draw.js";
import { Refused, chat, get } from "/page/stream.js";

const $ = (id) => document.getElementById(id);
const turns = [];        // {role, content} of the conversation
const views = [];        // one for each answer: {answer, said, verdict, prefix}
let current = null;      // the view whose figures and steps are shown
let running = null;      // AbortController of what is under way

// --- what is known before anybody asks --------------------------------------------------------------

async function greet() {
  try {
    const about = await get("/version");
    $("engine").textContent = `${about.engine} · version ${about.version}`;
  } catch (error) { $("engine").textContent = String(error.message); }
}

async function feel() {
  let state = "red", text = "no answer";
  try {
    const health = await get("/health");
    state = health.status === "ok" ? "ok" : "red";
    text = health.status === "ok" ? "healthy" : `${health.status}${health.reason ? `: ${health.reason}` : ""}`;
  } catch { /* the text says it */ }
  $("health").dataset.state = state;
  if ($("health-text").textContent !== text) $("health-text").textContent = text;
}

const THEMES = ["auto", "light", "dark"];
const system = matchMedia("(prefers-color-scheme: dark)");
let theme = localStorage.getItem("theme") ?? "auto";

function paint() {
  document.documentElement.dataset.theme = theme === "auto" ? (system.matches ? "dark" : "light") : theme;
  $("theme").textContent = `Theme: ${theme}`;
}

$("theme").addEventListener("click", () => {
  theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
  localStorage.setItem("theme", theme);
  paint();
});
system.addEventListener("change", paint);

// --- asking -----------------------------------------------------------------------------------------

function wish(messages, changes) {
  const asked = {
    messages, stream: true, stream_options: { include_usage: true }, logprobs: true, top_logprobs: Number($("beside").value),
    return_token_ids: true, provenance: true, temperature: Number($("temperature").value),
    max_completion_tokens: Number($("most").value),
  };
  if ($("seed").value !== "") asked.seed = Number($("seed").value);
  if (!$("speculate").checked) asked.speculative = false;
  else if ($("drafts").value !== "") asked.speculative = { enabled: true, num_speculative_tokens: Number($("drafts").value) };
  return { ...asked, ...changes };
}

function conversation() {
  const opening = $("system").value.trim();
  return opening ? [{ role: "system", content: opening }, ...turns] : [...turns];
}

async function listen(asked, answer, tell = () => {}) {
  for await (const event of chat(asked, $("key").value, running.signal)) tell(answer.take(event));
  return answer;
}

async function ask(text) {
  turns.push({ role: "user", content: text });
  $("turns").append(make("li", { class: "turn user" }, make("div", { class: "who" }, "You"), text));
  const messages = conversation(), view = open(new Answer());
  const asked = wish(messages, {});
  await listen(asked, view.answer, (brought) => show(view, brought));
  turns.push({ role: "assistant", content: view.answer.text });
  figures(view, true);
  if ($("prove").checked) await prove(view, asked);
}

async function prove(view, asked) {
  view.verdict.hidden = false;
  view.verdict.className = "verdict";
  view.verdict.textContent = "asking again without speculation…";
  const plain = await listen({ ...asked, seed: view.answer.seed, speculative: false }, new Answer());
  const wrong = differing(view.answer, plain);
  for (const at of wrong) view.said.children[at]?.classList.add("off");
  const count = view.answer.tokens.length;
  const speeds = `${view.answer.speed.toFixed(0)} tokens a second with speculation, ${plain.speed.toFixed(0)} without`;
  view.verdict.className = wrong.length ? "verdict different" : "verdict same";
  view.verdict.textContent = wrong.length
    ? `${wrong.length} of ${count} tokens differ without speculation (seed ${view.answer.seed}): this must not be, please report it.`
    : `Nothing differs: ${count} tokens and their logprobs are the same without speculation (seed ${view.answer.seed}; ${speeds}).`;
}

async function run(work) {
  running = new AbortController();
  $("send").disabled = true;
  $("stop").disabled = false;
  $("problem").hidden = true;
  try { await work(); } catch (error) {
    if (error.name !== "AbortError") complain(error);
  } finally {
    running = null;
    $("send").disabled = false;
    $("stop").disabled = true;
  }
}

function complain(error) {
  if (error instanceof Refused && error.status === 401) { $("settings").open = true; $("key").focus(); }
  $("problem").textContent = error.message;
  $("problem").hidden = false;
}

// --- showing ----------------------------------------------------------------------------------------

function open(answer) {
  const prefix = `a${views.length}`;
  const said = make("div", { class: "said", tabindex: "0", role: "listbox", "aria-label": "Answer, token by token: arrow keys walk through it" });
  const verdict = make("p", { class: "verdict", role: "status" });
  verdict.hidden = true;
  const view = { answer, said, verdict, prefix, columns: 0, at: -1 };
  $("turns").append(make("li", { class: "turn" }, make("div", { class: "who" }, "Model"), said, verdict));
  said.addEventListener("pointerover", (event) => point(view, event));
  said.addEventListener("click", (event) => point(view, event));
  said.addEventListener("keydown", (event) => walk(view, event));
  views.push(view);
  turnTo(view);
  return view;
}

function turnTo(view) {
  if (current === view) return;
  current = view;
  view.columns = 0;
  $("strip").replaceChildren();
  figures(view, true);
}

function show(view, brought) {
  const first = view.answer.tokens.length - brought.length;
  view.said.append(...brought.map((token, i) => tokenSpan(token, first + i, view.prefix)));
  figures(view, false);
}

let due = false;
function figures(view, now) {
  if (view !== current) return;
  if (!now) {
    if (due) return;
    due = true;
    requestAnimationFrame(() => { due = false; figures(view, true); });
    return;
  }
  const answer = view.answer;
  $("f-length").textContent = answer.length ? answer.length.toFixed(2) : "–";
  $("f-speed").textContent = answer.speed ? answer.speed.toFixed(0) : "–";
  $("f-drafts").textContent = answer.drafted ? `${answer.accepted} of ${answer.drafted}` : "none made";
  $("f-first").textContent = answer.first ? `${(answer.first - answer.asked).toFixed(0)} ms` : "–";
  const steps = answer.done, whole = answer.finish ? steps.length : Math.max(0, answer.steps.length - 1);
  for (; view.columns < whole; view.columns++) $("strip").append(stepColumn(answer, answer.steps[view.columns], view.columns));
  $("strip").scrollLeft = $("strip").scrollWidth;
  $("strip").setAttribute("aria-label", steps.length
    ? `${steps.length} steps, ${answer.tokens.length} tokens, ${answer.accepted} of ${answer.drafted} drafts stood` : "No steps yet");
  legend($("legend"));
}

function choose(view, at) {
  turnTo(view);
  const spans = view.said.children;
  if (at < 0 || at >= spans.length) return;
  for (const old of document.querySelectorAll(".chosen")) {
    old.classList.remove("chosen");
    if (old.role === "option") old.setAttribute("aria-selected", "false");
  }
  view.at = at;
  spans[at].classList.add("chosen");
  spans[at].setAttribute("aria-selected", "true");
  view.said.setAttribute("aria-activedescendant", spans[at].id);
  const column = $("strip").children[view.answer.tokens[at].step];
  column?.classList.add("chosen");
  $("token").replaceChildren(...tokenCard(view.answer, at));
  document.body.classList.add("chosen");   // on a phone the card lies over the page until it is closed
}

function point(view, event) {
  const span = event.target.closest(".t");
  if (span) choose(view, Number(span.dataset.at));
}

function walk(view, event) {
  const last = view.answer.tokens.length - 1, step = view.answer.tokens[view.at]?.step;
  const moves = {
    ArrowRight: () => view.at + 1, ArrowLeft: () => Math.max(0, view.at - 1), Home: () => 0, End: () => last,
    // down and up: to the next and the last step
    ArrowDown: () => view.answer.tokens.findIndex((token) => token.step > (step ?? -1)),
    ArrowUp: () => view.answer.tokens.findIndex((token) => token.step === Math.max(0, (step ?? 1) - 1)),
  };
  if (!moves[event.key]) return;
  event.preventDefault();
  const at = moves[event.key]();
  if (at >= 0) choose(view, Math.min(at, last));
}

$("strip").addEventListener("click", (event) => {
  const column = event.target.closest(".step");
  if (column && current) choose(current, current.answer.steps[Number(column.dataset.step)].tokens[0]);
});

// --- wiring -----------------------------------------------------------------------------------------

$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("prompt").value.trim();
  if (!text || running) return;
  $("prompt").value = "";
  run(() => ask(text));
});
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); $("ask").requestSubmit(); }
});
$("stop").addEventListener("click", () => running?.abort());
$("clear").addEventListener("click", () => {
  running?.abort();
  turns.length = views.length = 0;
  current = null;
  for (const id of ["turns", "strip"]) $(id).replaceChildren();
  $("token").replaceChildren(make("p", { class: "quiet" }, "None chosen."));
  for (const id of ["f-length", "f-speed", "f-drafts", "f-first"]) $(id).textContent = "–";
  $("prompt").focus();
});
$("close").addEventListener("click", () => document.body.classList.remove("chosen"));
document.addEventListener("keydown", (event) => { if (event.key === "Escape") document.body.classList.remove("chosen"); });
$("options").addEventListener("submit", (event) => event.preventDefault());
$("key").value = sessionStorage.getItem("key") ?? "";
$("key").addEventListener("change", () => sessionStorage.setItem("key", $("key").value));

paint();
legend($("legend"));
greet();
feel();
setInterval(feel, 5000);
