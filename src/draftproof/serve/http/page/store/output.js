// One output as data: tokens with their logprobs, steps, counters. Times are milliseconds since the request.

export class Output {
  #decoder = new TextDecoder();
  #began = performance.now();

  tokens = [];   // {id, text, name, logprob, top, provenance, step}
  steps = [{ tokens: [], drafts: 0 }];
  usage = null;
  metrics = null;
  firstMs = null;
  lastMs = null;

  static from(data) {
    return Object.assign(new Output(), data);
  }

  // Add one event of the stream; return its tokens.
  add(event) {
    if (event.usage) this.usage = event.usage;
    if (event.metrics) this.metrics = event.metrics;
    const choice = event.choices?.[0];
    const ids = choice?.token_ids ?? [];
    if (!ids.length) return [];
    this.lastMs = performance.now() - this.#began;
    this.firstMs ??= this.lastMs;
    const added = ids.map((id, i) => this.#token(choice, id, i));
    const step = this.steps[this.steps.length - 1];
    for (const token of added) {
      step.tokens.push(this.tokens.length);
      this.tokens.push(token);
    }
    if (choice.step_end) {
      step.drafts = choice.num_draft ?? 0;
      this.steps.push({ tokens: [], drafts: 0 });
    }
    return added;
  }

  // The text of a token is decoded from its bytes: reasoning, markers and tool calls have tokens, too.
  #token(choice, id, i) {
    const row = choice.logprobs?.content?.[i];
    const bytes = row?.bytes;
    return {
      id,
      text: bytes ? this.#decoder.decode(new Uint8Array(bytes), { stream: true }) : (choice.delta?.content ?? ""),
      name: row?.token ?? "",
      logprob: row?.logprob ?? null,
      top: (row?.top_logprobs ?? []).map(({ token, logprob }) => ({ token, logprob })),
      provenance: choice.provenance?.[i] ?? "plain",
      step: this.steps.length - 1,
    };
  }

  get completeSteps() { return this.steps.filter((step) => step.tokens.length); }
  get drafted() { return this.steps.reduce((sum, step) => sum + step.drafts, 0); }
  get accepted() { return this.tokens.filter((token) => token.provenance.startsWith("accepted")).length; }
  get acceptanceLength() {
    return this.completeSteps.length ? this.tokens.length / this.completeSteps.length : 0;
  }
  get speed() {
    const seconds = (this.lastMs - this.firstMs) / 1000;
    return seconds > 0 ? (this.tokens.length - 1) / seconds : 0;
  }
}

// Return the indices of tokens whose id, logprob or alternatives differ between two outputs.
export function differences(one, other) {
  const found = [];
  for (let i = 0; i < Math.max(one.tokens.length, other.tokens.length); i++) {
    const [a, b] = [one.tokens[i], other.tokens[i]];
    const isEqual = a && b && a.id === b.id && a.logprob === b.logprob
      && JSON.stringify(a.top) === JSON.stringify(b.top);
    if (!isEqual) found.push(i);
  }
  return found;
}
