// An answer as data: its tokens, the steps that brought them, and what can be counted.

export class Answer {
  constructor() {
    this.tokens = [];   // {text, id, logprob, top, from, step}
    this.steps = [{ tokens: [], drafts: 0 }];
    this.seed = null;
    this.finish = null;
    this.usage = null;
    this.metrics = null;
    this.asked = performance.now();
    this.first = null;
    this.last = null;
  }

  // Takes one event of the stream; returns the tokens it brought.
  take(event) {
    if (event.usage) this.usage = event.usage;
    if (event.metrics) this.metrics = event.metrics;
    const choice = event.choices[0];
    if (!choice) return [];
    if (choice.seed !== undefined && choice.seed !== null) this.seed = choice.seed;
    if (choice.finish_reason) this.finish = choice.finish_reason;
    const ids = choice.token_ids ?? [];
    if (ids.length) {
      this.last = performance.now();
      this.first ??= this.last;
    }
    const lines = choice.logprobs?.content ?? [];
    const text = choice.delta?.content ?? "";
    const brought = ids.map((id, i) => ({
      id,
      // with one token a chunk its text is the chunk's; otherwise each token has its own
      text: ids.length === 1 ? text : (lines[i]?.token ?? ""),
      name: lines[i]?.token ?? text,
      logprob: lines[i]?.logprob ?? null,
      top: lines[i]?.top_logprobs ?? [],
      from: choice.provenance?.[i] ?? "plain",
      step: this.steps.length - 1,
    }));
    const step = this.steps[this.steps.length - 1];
    for (const token of brought) {
      step.tokens.push(this.tokens.length);
      this.tokens.push(token);
    }
    if (choice.step_end && brought.length) {
      step.drafts = choice.num_draft ?? 0;
      this.steps.push({ tokens: [], drafts: 0 });
    }
    return brought;
  }

  get done() { return this.steps.filter((step) => step.tokens.length); }
  get text() { return this.tokens.map((token) => token.text).join(""); }
  get length() { return this.done.length ? this.tokens.length / this.done.length : 0; }
  get drafted() { return this.steps.reduce((sum, step) => sum + step.drafts, 0); }
  get accepted() { return this.tokens.filter((token) => token.from.startsWith("accepted")).length; }
  get speed() {
    const seconds = (this.last - this.first) / 1000;
    return seconds > 0 ? (this.tokens.length - 1) / seconds : 0;
  }
}

// Where two answers differ: the tokens whose id, logprob or alternatives are not the same.
export function differing(one, other) {
  const at = [];
  for (let i = 0; i < Math.max(one.tokens.length, other.tokens.length); i++) {
    const a = one.tokens[i], b = other.tokens[i];
    if (!a || !b || a.id !== b.id || a.logprob !== b.logprob || JSON.stringify(a.top) !== JSON.stringify(b.top)) at.push(i);
  }
  return at;
}
