// The conversation: what was said, what is being said, and what the user may do with it.

import { stream } from "./api.js";
import { button, byId, element } from "./dom.js";
import { MessageView } from "./message.js";
import { SettingError } from "./settings.js";
import { keep, kept } from "./store.js";

const MAX_FILE_BYTES = 512 * 1024;
const EXAMPLES = [
  "Write a Python class for a stack. Then show the same class with type hints.",
  "Write a JSON list of five cities with name, country and population.",
  "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):",
];

/** The chat; `model` returns the chosen model's name, and `told` is given the sources after each answer. */
export class Chat {
  constructor(settings, model, told) {
    this.settings = settings;
    this.model = model;
    this.told = told;
    this.messages = kept("messages", []);
    this.views = new Map();
    this.files = [];
    this.controller = null;
    this.box = byId("messages");
    byId("ask").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    byId("text").addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.send();
    });
    byId("stop").addEventListener("click", () => this.controller?.abort());
    byId("new").addEventListener("click", () => this.restart([]));
    byId("choose").addEventListener("click", () => byId("attach").click());
    byId("attach").addEventListener("change", () => this.attach());
    this.showAll();
  }

  /** Go on with these messages; what is being generated is stopped. */
  restart(messages) {
    this.controller?.abort();
    this.messages = messages;
    this.notice("");
    this.showAll();
  }

  showAll() {
    this.views.clear();
    this.box.replaceChildren();
    if (!this.messages.length) this.box.append(this.welcome());
    for (const message of this.messages) this.show(message);
    this.changed();
  }

  welcome() {
    const examples = EXAMPLES.map((text) => button(text, () => {
      byId("text").value = text;
      this.send();
    }));
    return element("div", { class: "welcome" }, element("p", {}, "Ask the model something, and see how each token came to be."), ...examples);
  }

  show(message) {
    const view = new MessageView(message, {
      edit: (edited, text) => this.edit(edited, text),
      regenerate: (old) => this.regenerate(old),
      answerCalls: (calling, results) => this.answerCalls(calling, results),
    });
    this.views.set(view.element, view);
    this.box.append(view.element);
    this.box.scrollTop = this.box.scrollHeight;
    return view;
  }

  changed() {
    keep("messages", this.messages);
  }

  notice(text) {
    byId("notice").textContent = text;
    byId("notice").hidden = !text;
  }

  send() {
    const text = byId("text").value;
    if (this.controller || (!text.trim() && !this.files.length)) return;
    byId("text").value = "";
    this.add({ role: "user", content: text, files: this.files });
    this.files = [];
    this.showFiles();
    this.generate();
  }

  add(message) {
    if (!this.messages.length) this.box.replaceChildren();
    this.messages.push(message);
    this.changed();
    return this.show(message);
  }

  edit(message, text) {
    this.restart([...this.messages.slice(0, this.messages.indexOf(message)), { ...message, content: text }]);
    this.generate();
  }

  regenerate(message) {
    this.restart(this.messages.slice(0, this.messages.indexOf(message)));
    this.generate();
  }

  answerCalls(message, results) {
    message.answered = true;
    message.calls.forEach((call, i) => this.add({ role: "tool", content: results[i], callId: call.id }));
    this.showAll();
    this.generate();
  }

  /** Have the model answer what was said so far. */
  async generate() {
    let body;
    try {
      body = this.body();
    } catch (error) {
      if (!(error instanceof SettingError)) throw error;
      this.notice(error.message);
      return;
    }
    const controller = (this.controller = new AbortController());
    this.busy(true);
    this.notice("");
    const message = { role: "assistant", content: "", reasoning: "", calls: [], steps: [] };
    const view = this.add(message);
    try {
      await this.read(body, view, controller.signal);
    } catch (error) {
      message.end = controller.signal.aborted ? "stopped" : "failed";
      if (!controller.signal.aborted) this.notice(error.message);
    }
    if (this.controller === controller) {
      this.controller = null;
      this.busy(false);
    }
    this.follow(() => {
      view.draw();
      view.finish();
    });
    if (this.messages.includes(message)) this.changed();
    this.told(this.sources());
  }

  /** Return who guessed tokens of the conversation. */
  sources() {
    const steps = this.messages.flatMap((message) => message.steps ?? []);
    return new Set(steps.flatMap((step) => step.runs.map((run) => run.source)));
  }

  async read(body, view, signal) {
    const { message } = view;
    let begin = 0;
    let numBefore = 0;
    for await (const chunk of stream("v1/chat/completions", body, signal)) {
      if (chunk.error) throw new Error(chunk.error.message);
      const [choice] = chunk.choices;
      if (!choice) continue;
      view.take(choice);
      if (!begin && choice.token_sources?.length) {
        begin = performance.now();
        numBefore = view.provenance.totals().numTokens;
      }
      if (choice.finish_reason) message.end = choice.finish_reason;
      if (choice.speculate_metrics?.gain) message.gain = choice.speculate_metrics.gain;
      this.drawSoon(view);
    }
    const seconds = (performance.now() - begin) / 1000;
    const numAfter = view.provenance.totals().numTokens - numBefore;
    if (seconds > 0 && numAfter > 0) message.tokensPerS = numAfter / seconds; // all may have come at once
  }

  /** Show a view's text with the next frame; where no frame comes, as in a hidden tab, its end does. */
  drawSoon(view) {
    if (this.isDrawing) return;
    this.isDrawing = true;
    requestAnimationFrame(() => {
      this.isDrawing = false;
      this.follow(() => view.draw());
    });
  }

  /** Show more of the text and follow it, unless the user has scrolled away from its end. */
  follow(draw) {
    const { box } = this;
    const isAtEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 40;
    draw();
    if (isAtEnd) box.scrollTop = box.scrollHeight;
  }

  body() {
    const system = this.settings.system ? [{ role: "system", content: this.settings.system }] : [];
    return {
      model: this.model(),
      messages: [...system, ...this.messages.map(sent)],
      stream: true,
      return_token_sources: true,
      ...this.settings.fields(),
    };
  }

  busy(isBusy) {
    byId("stop").hidden = !isBusy;
    byId("send").hidden = isBusy;
    this.box.setAttribute("aria-busy", String(isBusy));
  }

  async attach() {
    const input = byId("attach");
    for (const file of input.files) {
      try {
        this.files.push({ name: file.name, text: await textOf(file) });
      } catch (error) {
        this.notice(`${file.name}: ${error.message}`);
      }
    }
    input.value = "";
    this.showFiles();
  }

  showFiles() {
    const drop = (file) => () => {
      this.files = this.files.filter((other) => other !== file);
      this.showFiles();
    };
    byId("files").replaceChildren(...this.files.map((file) =>
      element("span", { class: "chip" }, file.name, button("\u00d7", drop(file), { "aria-label": `Remove ${file.name}` }))));
  }
}

/** Return a message as the API takes it. */
function sent({ role, content, files, calls, callId }) {
  if (role === "tool") return { role, content, tool_call_id: callId };
  const texts = (files ?? []).map(({ name, text }) => `File ${name}:\n${fenceOf(text)}\n${text}\n${fenceOf(text)}`);
  const message = { role, content: [...texts, content].filter((part) => part !== "").join("\n\n") };
  if (calls?.length) {
    message.tool_calls = calls.map((call) => ({ id: call.id, type: "function", function: { name: call.name, arguments: call.arguments } }));
  }
  return message;
}

/** Return the text of a file; raises Error where it has none. */
async function textOf(file) {
  const [most, size] = [MAX_FILE_BYTES, file.size].map((bytes) => Math.ceil(bytes / 1024));
  if (size > most) throw new Error(`expected at most ${most} KiB, got ${size}`);
  const bytes = new Uint8Array(await file.arrayBuffer());
  if (bytes.includes(0)) throw new Error("expected a text, got a binary file");
  try {
    return new TextDecoder("utf-8", { fatal: true }).decode(bytes);
  } catch {
    throw new Error("expected a text in UTF-8");
  }
}

/** Return a fence that the text does not have. */
function fenceOf(text) {
  const longest = Math.max(2, ...(text.match(/`+/g) ?? []).map((run) => run.length));
  return "`".repeat(longest + 1);
}
