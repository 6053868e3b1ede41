// The page: sends prompts, shows streamed tokens, and compares outputs with and without speculation.

import { legend, make, stepColumn, tokenDetails, tokenSpan } from "/page/draw.js";
import { Output, differences } from "/page/output.js";
import { ApiError, getJson, streamChat } from "/page/stream.js";

const $ = (id) => document.getElementById(id);
const messages = [];     // {role, content} of the conversation
const views = [];        // one for each output: {output, element, comparison, prefix, columns, at}
let current = null;      // the view whose figures and steps are shown
let running = null;      // AbortController of the open request

// --- server state -----------------------------------------------------------------------------------

async function showVersion() {
  try {
    const version = await getJson("/version");
    $("engine").textContent = `${version.engine} · version ${version.version}`;
  } catch (error) { $("engine").textContent = String(error.message); }
}

async function showHealth() {
  let state = "red", text = "no response";
  try {
    const health = await getJson("/health");
    state = health.status === "ok" ? "ok" : "red";
    text = health.status === "ok" ? "healthy" : `${health.status}${health.reason ? `: ${health.reason}` : ""}`;
  } catch { /* shown as no response */ }
  $("health").dataset.state = state;
  if ($("health-text").textContent !== text) $("health-text").textContent = text;
}

const THEMES = ["auto", "light", "dark"];
const systemTheme = matchMedia("(prefers-color-scheme: dark)");
let theme = localStorage.getItem("theme") ?? "auto";

function applyTheme() {
  document.documentElement.dataset.theme = theme === "auto" ? (systemTheme.matches ? "dark" : "light") : theme;
  $("theme").textContent = `Theme: ${theme}`;
}

$("theme").addEventListener("click", () => {
  theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
  localStorage.setItem("theme", theme);
  applyTheme();
});
systemTheme.addEventListener("change", applyTheme);

// --- requests ---------------------------------------------------------------------------------------

function requestBody() {
  const system = $("system").value.trim();
  const body = {
    messages: system ? [{ role: "system", content: system }, ...messages] : [...messages],
    stream: true, stream_options: { include_usage: true }, logprobs: true, top_logprobs: Number($("top-logprobs").value),
    return_token_ids: true, provenance: true, temperature: Number($("temperature").value),
    max_completion_tokens: Number($("max-tokens").value),
  };
  if ($("seed").value !== "") body.seed = Number($("seed").value);
  if (!$("speculate").checked) body.speculative = false;
  else if ($("drafts").value !== "") body.speculative = { enabled: true, num_speculative_tokens: Number($("drafts").value) };
  return body;
}

async function readStream(body, output, onTokens = () => {}) {
  for await (const event of streamChat(body, $("key").value, running.signal)) onTokens(output.add(event));
  return output;
}

async function send(text) {
  messages.push({ role: "user", content: text });
  $("messages").append(make("li", { class: "message user" }, make("div", { class: "role" }, "You"), text));
  const body = requestBody(), view = addView(new Output());
  await readStream(body, view.output, (tokens) => showTokens(view, tokens));
  messages.push({ role: "assistant", content: view.output.text });
  showFigures(view, true);
  if ($("compare").checked) await compare(view, body);
}

async function compare(view, body) {
  view.comparison.hidden = false;
  view.comparison.className = "comparison";
  view.comparison.textContent = "running again without speculation…";
  const plain = await readStream({ ...body, seed: view.output.seed, speculative: false }, new Output());
  const found = differences(view.output, plain);
  for (const at of found) view.element.children[at]?.classList.add("different");
  const count = view.output.tokens.length;
  const speeds = `${view.output.speed.toFixed(0)} tokens per second with speculation, ${plain.speed.toFixed(0)} without`;
  view.comparison.className = found.length ? "comparison different" : "comparison same";
  view.comparison.textContent = found.length
    ? `${found.length} of ${count} tokens differ without speculation (seed ${view.output.seed}): this is a bug, please report it.`
    : `Identical: ${count} tokens and their logprobs are the same without speculation (seed ${view.output.seed}; ${speeds}).`;
}

async function run(work) {
  running = new AbortController();
  $("send").disabled = true;
  $("stop").disabled = false;
  $("error").hidden = true;
  try { await work(); } catch (error) {
    if (error.name !== "AbortError") showError(error);
  } finally {
    running = null;
    $("send").disabled = false;
    $("stop").disabled = true;
  }
}

function showError(error) {
  if (error instanceof ApiError && error.status === 401) { $("settings").open = true; $("key").focus(); }
  $("error").textContent = error.message;
  $("error").hidden = false;
}

// --- outputs ----------------------------------------------------------------------------------------

function addView(output) {
  const prefix = `output${views.length}`;
  const element = make("div", { class: "output", tabindex: "0", role: "listbox", "aria-label": "Output, token by token: arrow keys move through it" });
  const comparison = make("p", { class: "comparison", role: "status" });
  comparison.hidden = true;
  const view = { output, element, comparison, prefix, columns: 0, at: -1 };
  $("messages").append(make("li", { class: "message" }, make("div", { class: "role" }, "Model"), element, comparison));
  element.addEventListener("pointerover", (event) => onPointer(view, event));
  element.addEventListener("click", (event) => onPointer(view, event));
  element.addEventListener("keydown", (event) => onKey(view, event));
  views.push(view);
  selectView(view);
  return view;
}

function selectView(view) {
  if (current === view) return;
  current = view;
  view.columns = 0;
  $("strip").replaceChildren();
  showFigures(view, true);
}

function showTokens(view, tokens) {
  const first = view.output.tokens.length - tokens.length;
  view.element.append(...tokens.map((token, i) => tokenSpan(token, first + i, view.prefix)));
  showFigures(view, false);
}

let isScheduled = false;   // an update of the figures with the next frame
function showFigures(view, now) {
  if (view !== current) return;
  if (!now) {
    if (isScheduled) return;
    isScheduled = true;
    requestAnimationFrame(() => { isScheduled = false; showFigures(view, true); });
    return;
  }
  const output = view.output;
  $("f-length").textContent = output.acceptanceLength ? output.acceptanceLength.toFixed(2) : "–";
  $("f-speed").textContent = output.speed ? output.speed.toFixed(0) : "–";
  $("f-drafts").textContent = output.drafted ? `${output.accepted} of ${output.drafted}` : "no drafts";
  $("f-first").textContent = output.first ? `${(output.first - output.started).toFixed(0)} ms` : "–";
  const steps = output.completeSteps, count = output.finish ? steps.length : Math.max(0, output.steps.length - 1);
  for (; view.columns < count; view.columns++) $("strip").append(stepColumn(output, output.steps[view.columns], view.columns));
  $("strip").scrollLeft = $("strip").scrollWidth;
  $("strip").setAttribute("aria-label", steps.length
    ? `${steps.length} steps, ${output.tokens.length} tokens, ${output.accepted} of ${output.drafted} drafts accepted` : "No steps yet");
  legend($("legend"));
}

function selectToken(view, at) {
  selectView(view);
  const spans = view.element.children;
  if (at < 0 || at >= spans.length) return;
  for (const old of document.querySelectorAll(".selected")) {
    old.classList.remove("selected");
    if (old.role === "option") old.setAttribute("aria-selected", "false");
  }
  view.at = at;
  spans[at].classList.add("selected");
  spans[at].setAttribute("aria-selected", "true");
  view.element.setAttribute("aria-activedescendant", spans[at].id);
  $("strip").children[view.output.tokens[at].step]?.classList.add("selected");
  $("token").replaceChildren(...tokenDetails(view.output, at));
  document.body.classList.add("selected");   // on a phone the details cover the page until they are closed
}

function onPointer(view, event) {
  const span = event.target.closest(".t");
  if (span) selectToken(view, Number(span.dataset.at));
}

function onKey(view, event) {
  const tokens = view.output.tokens, last = tokens.length - 1, step = tokens[view.at]?.step;
  const moves = {
    ArrowRight: () => view.at + 1, ArrowLeft: () => Math.max(0, view.at - 1), Home: () => 0, End: () => last,
    // down and up: to the next and the previous step
    ArrowDown: () => tokens.findIndex((token) => token.step > (step ?? -1)),
    ArrowUp: () => tokens.findIndex((token) => token.step === Math.max(0, (step ?? 1) - 1)),
  };
  if (!moves[event.key]) return;
  event.preventDefault();
  const at = moves[event.key]();
  if (at >= 0) selectToken(view, Math.min(at, last));
}

$("strip").addEventListener("click", (event) => {
  const column = event.target.closest(".step");
  if (column && current) selectToken(current, current.output.steps[Number(column.dataset.step)].tokens[0]);
});

// --- events -----------------------------------------------------------------------------------------

$("request").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("prompt").value.trim();
  if (!text || running) return;
  $("prompt").value = "";
  run(() => send(text));
});
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); $("request").requestSubmit(); }
});
$("stop").addEventListener("click", () => running?.abort());
$("clear").addEventListener("click", () => {
  running?.abort();
  messages.length = views.length = 0;
  current = null;
  for (const id of ["messages", "strip"]) $(id).replaceChildren();
  $("token").replaceChildren(make("p", { class: "quiet" }, "None selected."));
  for (const id of ["f-length", "f-speed", "f-drafts", "f-first"]) $(id).textContent = "–";
  $("prompt").focus();
});
$("close").addEventListener("click", () => document.body.classList.remove("selected"));
document.addEventListener("keydown", (event) => { if (event.key === "Escape") document.body.classList.remove("selected"); });
$("options").addEventListener("submit", (event) => event.preventDefault());
$("key").value = sessionStorage.getItem("key") ?? "";
$("key").addEventListener("change", () => sessionStorage.setItem("key", $("key").value));

applyTheme();
legend($("legend"));
showVersion();
showHealth();
setInterval(showHealth, 5000);
