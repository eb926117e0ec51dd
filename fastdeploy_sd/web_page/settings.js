// The settings of a chat, and the fields of a request that follow from them. An empty setting leaves its field out.

import { element } from "./dom.js";
import { keep, kept } from "./store.js";

const NUMBERS = [
  { name: "temperature", label: "Temperature", min: 0, max: 2, step: 0.1 },
  { name: "top_p", label: "Top-p", min: 0, max: 1, step: 0.05 },
  { name: "top_k", label: "Top-k", min: 0, step: 1 },
  { name: "min_p", label: "Min-p", min: 0, max: 1, step: 0.01 },
  { name: "max_tokens", label: "Most tokens", min: 1, step: 1 },
  { name: "seed", label: "Seed", min: 0, step: 1 },
  { name: "repetition_penalty", label: "Repetition penalty", min: 0.1, max: 2, step: 0.05 },
  { name: "presence_penalty", label: "Presence penalty", min: -2, max: 2, step: 0.1 },
  { name: "frequency_penalty", label: "Frequency penalty", min: -2, max: 2, step: 0.1 },
];
const TEXTS = [
  { name: "system", label: "System prompt", rows: 3 },
  { name: "stop", label: "Stop texts, one a line", rows: 2 },
  { name: "prediction", label: "Expected answer (drafts are taken from it)", rows: 3 },
  { name: "schema", label: "JSON schema of the answer", rows: 4, isCode: true },
  { name: "tools", label: "Tools, as the API's JSON list", rows: 4, isCode: true },
];

// At the first visit: the same answer whenever it is generated again, with drafts and without.
const FIRST = { temperature: "0", max_tokens: "1024" };

/** Raised for a setting that is no JSON or of another form. */
export class SettingError extends Error {}

/** The panel; its values are kept. */
export class Settings {
  constructor(panel) {
    this.values = kept("settings", FIRST);
    this.drafting = element("select", { id: "set-drafting", onchange: () => this.take("drafting", this.drafting.value) });
    const fields = element("div", { class: "numbers" }, ...NUMBERS.map((field) => this.number(field)));
    panel.replaceChildren(
      element("h2", {}, "Settings"),
      this.text(TEXTS[0]),
      element("label", { for: "set-drafting" }, "Drafting", this.drafting),
      element("p", { class: "hint" }, "Drafting changes the speed and the colours, and no token of an answer."),
      fields,
      element("p", { class: "hint" }, "An empty field is the server's default."),
      ...TEXTS.slice(1).map((field) => this.text(field)),
    );
    this.offer([]);
  }

  /** Offer the drafting methods that the server has. */
  offer(methods) {
    const names = methods.filter((name) => name !== "naive");
    const choices = [["", "as the server is set"], ["off", "off: plain decoding"], ...names.map((name) => [name, name])];
    this.drafting.replaceChildren(...choices.map(([value, text]) => element("option", { value }, text)));
    this.drafting.value = choices.some(([value]) => value === this.values.drafting) ? this.values.drafting : "";
  }

  number({ name, label, ...limits }) {
    const input = element("input", {
      id: `set-${name}`, type: "number", ...limits, placeholder: "default", oninput: () => this.take(name, input.value),
    });
    input.value = this.values[name] ?? "";
    return element("label", { for: input.id }, label, input);
  }

  text({ name, label, rows, isCode }) {
    const area = element("textarea", {
      id: `set-${name}`, rows, class: isCode ? "code-text" : null, spellcheck: isCode ? "false" : null,
      oninput: () => this.take(name, area.value),
    });
    area.value = this.values[name] ?? "";
    return element("label", { for: area.id }, label, area);
  }

  take(name, value) {
    this.values[name] = value;
    keep("settings", this.values);
  }

  get system() {
    return (this.values.system ?? "").trim();
  }

  /** Return the fields of a request; raises SettingError. */
  fields() {
    const body = {};
    for (const { name, label } of NUMBERS) {
      const text = this.values[name] ?? "";
      if (text === "") continue;
      body[name] = Number(text);
      if (!Number.isFinite(body[name])) throw new SettingError(`${label}: expected a number, got ${text}`);
    }
    const { stop, prediction, schema, tools, drafting } = this.values;
    const lines = (stop ?? "").split("\n").filter((line) => line !== "");
    if (lines.length) body.stop = lines;
    if (prediction) body.prediction = { type: "content", content: prediction };
    if (schema?.trim()) body.response_format = formatOf(parsed(schema, "JSON schema"));
    if (tools?.trim()) body.tools = toolsOf(parsed(tools, "Tools"));
    if (this.drafting.value === "off") body.speculation = { enabled: false };
    else if (this.drafting.value && drafting) body.speculation = { method: this.drafting.value };
    return body;
  }
}

function parsed(text, label) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new SettingError(`${label}: expected JSON: ${error.message}`);
  }
}

function formatOf(value) {
  if (value === null || typeof value !== "object") throw new SettingError("JSON schema: expected an object");
  const isWhole = ["json_schema", "json_object", "text"].includes(value.type);
  return isWhole ? value : { type: "json_schema", json_schema: { name: "answer", schema: value } };
}

function toolsOf(value) {
  if (!Array.isArray(value)) throw new SettingError("Tools: expected a list");
  return value;
}
