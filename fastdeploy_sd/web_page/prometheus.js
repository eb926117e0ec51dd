// Prometheus' text format, as far as a server writes it.

const LINE = /^([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)/;
const LABEL = /([A-Za-z_]\w*)="((?:[^"\\]|\\.)*)"/g;
const ESCAPED = { n: "\n", "\\": "\\", '"': '"' };

/** The samples of one answer of /metrics. */
export class Samples {
  constructor(text) {
    this.byName = new Map();
    for (const line of text.split("\n")) {
      const match = line.startsWith("#") ? null : LINE.exec(line);
      if (!match) continue;
      const labels = {};
      for (const [, name, value] of (match[2] ?? "").matchAll(LABEL)) {
        labels[name] = value.replace(/\\(.)/g, (all, char) => ESCAPED[char] ?? all);
      }
      if (!this.byName.has(match[1])) this.byName.set(match[1], []);
      this.byName.get(match[1]).push({ labels, value: numberOf(match[3]) });
    }
  }

  of(name) {
    return this.byName.get(name) ?? [];
  }

  /** Return the sum of a metric over all engines and other labels, NaN where there is none. */
  sum(name) {
    const found = this.of(name);
    return found.length ? found.reduce((total, { value }) => total + value, 0) : NaN;
  }

  /** Return the sums of a metric by the values of a label. */
  by(name, label) {
    const sums = {};
    for (const { labels, value } of this.of(name)) sums[labels[label]] = (sums[labels[label]] ?? 0) + value;
    return sums;
  }
}

function numberOf(text) {
  return text === "+Inf" ? Infinity : text === "-Inf" ? -Infinity : Number(text);
}

/** Return the value under which a share of a histogram's observations between two answers are, NaN without any. */
export function quantile(before, after, name, share) {
  const old = before.by(`${name}_bucket`, "le");
  const counts = Object.entries(after.by(`${name}_bucket`, "le"))
    .map(([bound, count]) => [numberOf(bound), count - (old[bound] ?? 0)])
    .sort(([a], [b]) => a - b);
  const total = counts.at(-1)?.[1] ?? 0;
  if (total <= 0) return NaN;
  let [low, numBelow] = [0, 0];
  for (const [bound, count] of counts) {
    if (count >= share * total) {
      if (bound === Infinity) return low;
      return low + (bound - low) * ((share * total - numBelow) / Math.max(count - numBelow, 1));
    }
    [low, numBelow] = [bound, count];
  }
  return low;
}
