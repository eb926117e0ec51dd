// Who guessed the tokens of an answer: names and colours of the sources, and which characters came from which.

const FAMILIES = {
  target: { label: "plain", tells: "computed by the model, not drafted" },
  ngram: { label: "n-gram", tells: "copied from what followed the same words before" },
  suffix: { label: "suffix", tells: "the usual continuation in this and earlier texts" },
  mtp: { label: "MTP", tells: "drafted by the model's own multi-token prediction layers" },
  head: { label: "draft head", tells: "drafted by a head on the model's hidden state" },
  model: { label: "draft model", tells: "drafted by a smaller model" },
  grammar: { label: "grammar", tells: "the only text that the schema or grammar allows" },
  prediction: { label: "prediction", tells: "taken from the expected answer" },
  other: { label: "other", tells: "drafted elsewhere" },
};
const FAMILY_OF = {
  target: "target", ngram: "ngram", suffix: "suffix", mtp: "mtp", draft_model: "model", grammar: "grammar",
  prediction: "prediction", eagle: "head", eagle3: "head", medusa: "head", hydra: "head", mlp_speculator: "head",
  dflash: "head",
};

/** Return the family of a source, which has its colour. */
export const familyOf = (source) => FAMILY_OF[source] ?? "other";
export const classOf = (source) => `from-${familyOf(source)}`;
export const tellsOf = (source) => FAMILIES[familyOf(source)].tells;

/** Return the name to show for a source: its family's, or its own where one family has several. */
export function labelOf(source) {
  const family = familyOf(source);
  return family === "head" || family === "other" ? source.replaceAll("_", " ") : FAMILIES[family].label;
}

/** The steps of one answer, and from which of them each character that is shown came. */
export class Provenance {
  constructor(steps = []) {
    this.steps = [];
    this.raw = "";
    this.runs = []; // {begin, end, source, step}, of `raw`
    this.cursor = 0;
    for (const step of steps) this.addStep(step);
  }

  /** Take the next step, as the API reports it. */
  addStep(step) {
    for (const run of step.runs) {
      const begin = this.raw.length;
      this.raw += run.text;
      this.runs.push({ begin, end: this.raw.length, source: run.source, step: this.steps.length });
    }
    this.steps.push(step);
  }

  /** Return where a piece of shown text is in `raw`, -1 where it is not; pieces are asked for in their order. */
  place(piece) {
    const begin = piece === "" ? -1 : this.raw.indexOf(piece, this.cursor);
    if (begin >= 0) this.cursor = begin + piece.length;
    return begin;
  }

  /** Return {begin, end, source, step} of the runs that raw[begin:end] touches. */
  runsIn(begin, end) {
    let low = 0;
    for (let high = this.runs.length; low < high; ) {
      const middle = (low + high) >> 1;
      if (this.runs[middle].end <= begin) low = middle + 1;
      else high = middle;
    }
    const found = [];
    for (let i = low; i < this.runs.length && this.runs[i].begin < end; i += 1) {
      const run = this.runs[i];
      if (run.end > begin) found.push({ ...run, begin: Math.max(run.begin, begin), end: Math.min(run.end, end) });
    }
    return found;
  }

  /** Return tokens by source, drafts by source, and the number of tokens, steps and accepted drafts. */
  totals() {
    const tokens = {};
    const drafted = {};
    for (const step of this.steps) {
      for (const run of step.runs) tokens[run.source] = (tokens[run.source] ?? 0) + run.num_tokens;
      for (const [source, count] of Object.entries(step.drafted)) drafted[source] = (drafted[source] ?? 0) + count;
    }
    const sum = (counts) => Object.values(counts).reduce((total, count) => total + count, 0);
    const numTokens = sum(tokens);
    return {
      tokens, drafted, numTokens, numSteps: this.steps.length, numDrafted: sum(drafted),
      numAccepted: numTokens - (tokens.target ?? 0),
    };
  }
}

/** A text of an answer in pieces, each with its place in the provenance. */
export class SourcedText {
  constructor(provenance) {
    this.provenance = provenance;
    this.text = "";
    this.pieces = []; // {begin, end, raw}: text[begin:end] is raw text from `raw` on, -1 = unknown
  }

  add(piece) {
    if (piece === "") return;
    const begin = this.text.length;
    this.text += piece;
    this.pieces.push({ begin, end: this.text.length, raw: this.provenance.place(piece) });
  }

  /** Return [{text, source, step}] of text[begin:end]; source null = unknown. */
  parts(begin, end) {
    const found = [];
    for (const piece of this.pieces) {
      if (piece.end <= begin || piece.begin >= end) continue;
      const from = Math.max(piece.begin, begin);
      const to = Math.min(piece.end, end);
      if (piece.raw < 0) {
        found.push({ text: this.text.slice(from, to), source: null, step: -1 });
        continue;
      }
      const shift = piece.begin - piece.raw;
      for (const run of this.provenance.runsIn(from - shift, to - shift)) {
        found.push({ text: this.text.slice(run.begin + shift, run.end + shift), source: run.source, step: run.step });
      }
    }
    return found;
  }
}
