// The tab "Server": queue, speed, acceptance and pages, read from /metrics while the tab is shown.

import { getHealth, getJson, getText } from "../api.js";
import { $ } from "../dom.js";

const INTERVAL_MS = 2000;
const HEALTH_INTERVAL_MS = 5000;
const NUM_POINTS = 60;
const WIDTH = 300, HEIGHT = 60;   // of the chart, in its own units

// Return the sum over labels of every sample of a Prometheus text, by name without prefix.
export function parseMetrics(text) {
  const found = {};
  for (const line of text.split("\n")) {
    const match = /^draftproof:(\w+)(?:\{[^}]*\})? (\S+)/.exec(line);
    if (match) found[match[1]] = (found[match[1]] ?? 0) + Number(match[2]);
  }
  return found;
}

export class ServerView {
  #last = null;     // {time, values} of the previous reading
  #speeds = [];     // tokens per second of the last readings
  #timer = null;

  start() {
    this.#timer ??= setInterval(() => this.#read(), INTERVAL_MS);
    this.#read();
  }

  stop() {
    clearInterval(this.#timer);
    this.#timer = this.#last = null;
  }

  async #read() {
    if (document.hidden) return;
    try {
      this.#show(parseMetrics(await getText("metrics")));
      $("server-error").textContent = "";
    } catch (error) {
      $("server-error").textContent = error.message;
    }
  }

  #show(values) {
    const time = performance.now(), last = this.#last;
    this.#last = { time, values };
    // tokens of streams are counted as they come, those of other requests at their end
    const streamed = (all) => (all.inter_token_latency_seconds_count ?? 0) + (all.time_to_first_token_seconds_count ?? 0);
    if (last) {
      const speed = Math.max(0, streamed(values) - streamed(last.values)) / ((time - last.time) / 1000);
      this.#speeds = [...this.#speeds, speed].slice(-NUM_POINTS);
      this.#drawChart();
      $("s-speed").textContent = speed.toFixed(speed < 10 ? 1 : 0);
    }
    $("s-running").textContent = values.num_requests_running;
    $("s-waiting").textContent = values.num_requests_waiting;
    const drafted = values.spec_decode_num_draft_tokens_total, verified = values.spec_decode_num_drafts_total;
    const accepted = values.spec_decode_num_accepted_tokens_total;
    $("s-rate").textContent = drafted ? `${(100 * accepted / drafted).toFixed(0)} %` : "–";
    $("s-length").textContent = verified ? (1 + accepted / verified).toFixed(2) : "–";
    $("s-tokens").textContent = (values.generation_tokens_total ?? 0).toLocaleString("en");
    const queried = values.prefix_cache_queries_total;
    $("s-cache").textContent = queried ? `${(100 * values.prefix_cache_hits_total / queried).toFixed(0)} %` : "–";
    this.#drawPages(values.kv_pages, values.kv_pages_used, values.kv_pages_cached);
  }

  #drawChart() {
    const most = Math.max(...this.#speeds), top = Math.max(1, most), step = WIDTH / (NUM_POINTS - 1);
    const begin = NUM_POINTS - this.#speeds.length;
    const points = this.#speeds.map((speed, i) => (
      `${((begin + i) * step).toFixed(1)},${(HEIGHT - 2 - (HEIGHT - 4) * speed / top).toFixed(1)}`));
    $("s-line").setAttribute("points", points.join(" "));
    $("s-top").textContent = `at most ${most.toFixed(0)}`;
  }

  #drawPages(all, used, cached) {
    $("s-pages").textContent = `${used} used, ${cached} cached, ${all - used - cached} free of ${all}`;
    $("s-pages-used").setAttribute("width", all ? 100 * used / all : 0);
    $("s-pages-cached").setAttribute("x", all ? 100 * used / all : 0);
    $("s-pages-cached").setAttribute("width", all ? 100 * cached / all : 0);
  }
}

// Show the engine and its health in the header.
export async function startHealth() {
  getJson("version").then(({ engine, version }) => {
    $("engine").textContent = $("engine").title = engine;
    $("version").textContent = `Draftproof ${version}: ${engine}`;
  }, (error) => { $("engine").textContent = error.message; });
  const read = async () => {
    if (document.hidden) return;
    const health = await getHealth().catch(() => ({ status: "no response" }));
    $("health").dataset.state = health.status === "ok" ? "ok" : "bad";
    const text = health.status === "ok" ? "healthy" : `${health.status}${health.reason ? `: ${health.reason}` : ""}`;
    if ($("health-text").textContent !== text) $("health-text").textContent = text;
  };
  setInterval(read, HEALTH_INTERVAL_MS);
  document.addEventListener("visibilitychange", read);
  await read();
}
