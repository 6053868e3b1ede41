// One output as data: tokens, steps and counters.

export class Output {
  constructor() {
    this.tokens = [];   // {id, text, name, logprob, top, provenance, step}
    this.steps = [{ tokens: [], drafts: 0 }];
    this.seed = null;
    this.finish = null;
    this.usage = null;
    this.metrics = null;
    this.started = performance.now();
    this.first = null;
    this.last = null;
  }

  // Add one event of the stream; return its tokens.
  add(event) {
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
    const logprobs = choice.logprobs?.content ?? [];
    const text = choice.delta?.content ?? "";
    const added = ids.map((id, i) => ({
      id,
      // the text of a chunk belongs to its only token; of several tokens each has its own string
      text: ids.length === 1 ? text : (logprobs[i]?.token ?? ""),
      name: logprobs[i]?.token ?? text,
      logprob: logprobs[i]?.logprob ?? null,
      top: logprobs[i]?.top_logprobs ?? [],
      provenance: choice.provenance?.[i] ?? "plain",
      step: this.steps.length - 1,
    }));
    const step = this.steps[this.steps.length - 1];
    for (const token of added) {
      step.tokens.push(this.tokens.length);
      this.tokens.push(token);
    }
    if (choice.step_end && added.length) {
      step.drafts = choice.num_draft ?? 0;
      this.steps.push({ tokens: [], drafts: 0 });
    }
    return added;
  }

  get completeSteps() { return this.steps.filter((step) => step.tokens.length); }
  get text() { return this.tokens.map((token) => token.text).join(""); }
  get acceptanceLength() { return this.completeSteps.length ? this.tokens.length / this.completeSteps.length : 0; }
  get drafted() { return this.steps.reduce((sum, step) => sum + step.drafts, 0); }
  get accepted() { return this.tokens.filter((token) => token.provenance.startsWith("accepted")).length; }
  get speed() {
    const seconds = (this.last - this.first) / 1000;
    return seconds > 0 ? (this.tokens.length - 1) / seconds : 0;
  }
}

// Return the indices of tokens whose id, logprob or alternatives differ between two outputs.
export function differences(one, other) {
  const found = [];
  for (let i = 0; i < Math.max(one.tokens.length, other.tokens.length); i++) {
    const a = one.tokens[i], b = other.tokens[i];
    if (!a || !b || a.id !== b.id || a.logprob !== b.logprob || JSON.stringify(a.top) !== JSON.stringify(b.top)) found.push(i);
  }
  return found;
}
