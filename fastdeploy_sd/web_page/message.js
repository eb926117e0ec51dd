// One message of the conversation on the screen: its text with the colours of its tokens, its tools, its numbers.

import { button, copy, element, percent, plural, short } from "./dom.js";
import { render } from "./markdown.js";
import { Provenance, SourcedText, classOf, labelOf } from "./sources.js";

const ROLES = { user: "You", assistant: "Model", tool: "Tool" };

/** Shows a message, which is plain data; `actions` are {edit, regenerate, answerCalls}. */
export class MessageView {
  constructor(message, actions) {
    this.message = message;
    this.actions = actions;
    this.provenance = new Provenance(message.steps);
    this.thought = new SourcedText(this.provenance);
    this.said = new SourcedText(this.provenance);
    this.thought.add(message.reasoning ?? "");
    this.said.add(message.content ?? "");
    this.body = element("div", { class: "body" });
    this.thinking = element("details", { class: "thinking", hidden: true }, element("summary", {}, "Thinking"));
    this.thinkingBody = element("div", { class: "body" });
    this.thinking.append(this.thinkingBody);
    this.calls = element("div", { class: "calls" });
    this.foot = element("div", { class: "foot" });
    const name = element("div", { class: "role" }, ROLES[message.role] ?? message.role);
    this.element = element("article", { class: `message ${message.role}` }, name, this.thinking, this.body, this.calls, this.foot);
    this.isOpen = false;
    this.draw();
    this.finish();
  }

  /** Take a chunk of the answer's stream; what it shows comes with the next `draw`. */
  take(choice) {
    const { message } = this;
    for (const step of choice.token_sources ?? []) {
      message.steps.push(step);
      this.provenance.addStep(step);
    }
    const { content, reasoning_content: reasoning, tool_calls: calls } = choice.delta;
    if (reasoning) {
      message.reasoning += reasoning;
      this.thought.add(reasoning);
    }
    if (content) {
      message.content += content;
      this.said.add(content);
    }
    for (const call of calls ?? []) this.takeCall(call);
  }

  takeCall(part) {
    const call = (this.message.calls[part.index] ??= { id: "", name: "", arguments: "" });
    call.id = part.id ?? call.id;
    call.name += part.function?.name ?? "";
    call.arguments += part.function?.arguments ?? "";
  }

  /** Show the text so far. */
  draw() {
    const { message } = this;
    if (message.role === "assistant") {
      render(this.body, this.said.text, (begin, end) => paint(this.said, begin, end));
      render(this.thinkingBody, this.thought.text, (begin, end) => paint(this.thought, begin, end));
      this.thinking.hidden = !this.thought.text;
      if (!this.isOpen && this.thought.text && !this.said.text) this.isOpen = this.thinking.open = true;
    } else {
      this.body.replaceChildren(element("p", {}, message.content));
      for (const file of message.files ?? []) {
        const size = `${plural(file.text.length, "character")}`;
        this.body.append(element("details", { class: "file" }, element("summary", {}, `${file.name} (${size})`), element("pre", {}, file.text)));
      }
    }
    this.drawCalls();
  }

  drawCalls() {
    const shown = (this.message.calls ?? []).map((call) =>
      element("div", { class: "call" }, element("strong", {}, call.name || "?"), element("pre", { tabindex: "0" }, call.arguments)));
    this.calls.replaceChildren(...shown);
  }

  /** Show how the message came to be, and what can be done with it. */
  finish() {
    const { message, actions } = this;
    const row = element("div", { class: "actions" });
    if (message.role === "assistant") {
      row.append(button("Copy", () => copy(message.content)), button("Regenerate", () => actions.regenerate(message)));
    }
    if (message.role === "user") row.append(button("Edit", () => this.edit()));
    const parts = message.role === "assistant" && message.steps.length ? [shareBar(this.provenance), this.numbers()] : [];
    if (message.end && message.end !== "stop") parts.push(element("p", { class: "end" }, ENDS[message.end] ?? message.end));
    if (message.calls?.length && !message.answered) parts.push(this.answerForm());
    this.foot.replaceChildren(...parts, row);
  }

  numbers() {
    const { provenance, message } = this;
    const { tokens, drafted, numTokens, numSteps, numDrafted, numAccepted } = provenance.totals();
    const told = [
      `${plural(numTokens, "token")} in ${plural(numSteps, "step")}: ${short(numTokens / numSteps)} per step`,
      numDrafted ? `${percent(numAccepted / numDrafted)} of ${plural(numDrafted, "draft")} accepted` : "nothing was drafted",
    ];
    if (message.gain) told.push(`${short(message.gain)} times plain decoding`);
    if (message.tokensPerS) told.push(`${short(message.tokensPerS)} tokens/s`);
    const names = [...new Set([...Object.keys(tokens), ...Object.keys(drafted)])].sort((a, b) => (tokens[b] ?? 0) - (tokens[a] ?? 0));
    const rows = names.map((name) => {
      const rate = drafted[name] ? percent((tokens[name] ?? 0) / drafted[name]) : "";
      const swatch = element("span", { class: `swatch ${classOf(name)}`, "aria-hidden": "true" });
      const cells = [tokens[name] ?? 0, drafted[name] ?? "", rate].map((value) => element("td", {}, String(value)));
      return element("tr", {}, element("th", { scope: "row" }, swatch, labelOf(name)), ...cells);
    });
    const head = ["Source", "Tokens", "Drafted", "Accepted"].map((text) => element("th", { scope: "col" }, text));
    const table = element("table", {}, element("thead", {}, element("tr", {}, ...head)), element("tbody", {}, ...rows));
    return element("details", { class: "numbers" }, element("summary", {}, told.join(" \u00b7 ")), table);
  }

  edit() {
    const area = element("textarea", { rows: 4, "aria-label": "Your message" });
    area.value = this.message.content;
    const save = button("Send again", () => this.actions.edit(this.message, area.value), { class: "main" });
    const form = element("div", { class: "edit" }, area, element("div", { class: "row" }, save, button("Cancel", () => this.draw())));
    this.body.replaceChildren(form);
    area.focus();
  }

  answerForm() {
    const areas = this.message.calls.map((call) => element("textarea", { rows: 2, placeholder: `What ${call.name} returns`, "aria-label": `What ${call.name} returns` }));
    const send = button("Send the results", () => this.actions.answerCalls(this.message, areas.map((area) => area.value)), { class: "main" });
    return element("div", { class: "answers" }, ...areas, element("div", { class: "row" }, send));
  }

  /** Return what to say of a step when a pointer is over one of its tokens. */
  tellStep(number, source) {
    const step = this.provenance.steps[number];
    const drafted = Object.values(step.drafted).reduce((sum, count) => sum + count, 0);
    const accepted = step.runs.filter((run) => run.source !== "target").reduce((sum, run) => sum + run.num_tokens, 0);
    const own = step.drafted[source];
    const ofOwn = step.runs.filter((run) => run.source === source).reduce((sum, run) => sum + run.num_tokens, 0);
    return { number: number + 1, drafted, accepted, own, ofOwn, numTokens: step.runs.reduce((sum, run) => sum + run.num_tokens, 0) };
  }
}

const ENDS = {
  length: "The answer ends here, as it has its most tokens.",
  tool_calls: "The model calls tools.",
  stopped: "Stopped.",
  failed: "The answer broke off.",
};

/** Return spans of a part of a text, each with the colour of who guessed it. */
function paint(sourced, begin, end) {
  return sourced.parts(begin, end).map(({ text, source, step }) =>
    source === null ? document.createTextNode(text) : element("span", { class: `token ${classOf(source)}`, "data-step": step, "data-source": source }, text));
}

/** Return a bar with a part per source, as wide as its share of the tokens. */
function shareBar(provenance) {
  const { tokens, numTokens } = provenance.totals();
  const names = Object.keys(tokens).sort((a, b) => tokens[b] - tokens[a]);
  const told = names.map((name) => `${labelOf(name)} ${percent(tokens[name] / numTokens)}`).join(", ");
  const parts = names.map((name) => {
    const part = element("span", { class: `fill ${classOf(name)}` });
    part.style.flexGrow = tokens[name];
    return part;
  });
  return element("div", { class: "share", role: "img", "aria-label": `Tokens by source: ${told}` }, ...parts);
}
