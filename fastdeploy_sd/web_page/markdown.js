// Markdown -> DOM nodes. The text is untrusted: nothing is ever parsed as HTML, and links are http or https only.
//
// Everything works on places in the whole text, and `paint(begin, end)` returns the nodes of a part of it. So what is
// shown can be marked by where it came from. What is no markdown is shown as it is.

import { button, copy, element } from "./dom.js";

const FENCE = /^ {0,3}(```+|~~~+)\s*([^`\n]*)$/;
const HEADING = /^ {0,3}(#{1,6})\s+/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const QUOTE = /^ {0,3}> ?/;
const ROW = /^\s*\|.*\|\s*$/;
const DASHES = /^\s*\|?(\s*:?-+:?\s*\|)+\s*(:?-+:?)?\s*$/;
const INLINE = /(`+)([^]*?[^`])\1(?!`)|\*\*(?=\S)([^]*?\S)\*\*|\*(?=\S)([^*]*?\S)\*|\[([^\]\n]*)\]\(([^()\s]*(?:\([^()\s]*\)[^()\s]*)*)\)|(https?:\/\/[^\s<>"'`]*[^\s<>"'`.,;:!?)\]*_])/g;
const MAX_DEPTH = 8;
const MAX_INLINE = 10000; // characters of a block; finding pairs of marks takes quadratic time

/** Show a text in a container. Of blocks that are as they were, the elements are kept. */
export function render(container, text, paint) {
  const blocks = blocksOf(linesOf(text, 0, text.length));
  blocks.forEach((block, i) => {
    const name = `${block.kind} ${block.begin} ${block.end} ${text.length > block.end}`;
    const shown = container.children[i];
    if (shown?.dataset.block === name) return;
    const made = blockElement(block, text, paint, 0);
    made.dataset.block = name;
    if (shown) shown.replaceWith(made);
    else container.append(made);
  });
  while (container.children.length > blocks.length) container.lastElementChild.remove();
}

function linesOf(text, begin, end) {
  const lines = [];
  for (let at = begin; at < end; ) {
    const next = text.indexOf("\n", at);
    const stop = next < 0 || next >= end ? end : next;
    lines.push({ begin: at, end: stop, text: text.slice(at, stop) });
    at = stop + 1;
  }
  return lines;
}

/** Return the blocks of some lines: {kind, begin, end, lines, ...}. */
function blocksOf(lines) {
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    if (lines[at].text.trim() === "") {
      at += 1;
      continue;
    }
    const [kind, count, more] = blockAt(lines, at);
    const own = lines.slice(at, at + count);
    blocks.push({ kind, begin: own[0].begin, end: own[own.length - 1].end, lines: own, ...more });
    at += count;
  }
  return blocks;
}

function blockAt(lines, at) {
  const line = lines[at].text;
  const fence = FENCE.exec(line);
  if (fence) return fencedAt(lines, at, fence);
  if (HEADING.test(line)) return ["heading", 1, {}];
  if (RULE.test(line)) return ["rule", 1, {}];
  if (QUOTE.test(line)) return ["quote", countWhile(lines, at, (l) => QUOTE.test(l)), {}];
  if (ITEM.test(line)) return ["list", countWhile(lines, at, (l, i) => i === at || isOfList(lines, i)), {}];
  if (ROW.test(line) && DASHES.test(lines[at + 1]?.text ?? "")) {
    return ["table", countWhile(lines, at, (l, i) => i === at + 1 || ROW.test(l)), {}];
  }
  const isText = (l, i) => i === at || !(l.trim() === "" || FENCE.test(l) || HEADING.test(l) || ITEM.test(l) || QUOTE.test(l));
  return ["text", countWhile(lines, at, isText), {}];
}

function fencedAt(lines, at, fence) {
  const mark = fence[1];
  const isEnd = (l) => l.trim().startsWith(mark) && l.trim().replaceAll(mark[0], "") === "";
  let end = at + 1;
  while (end < lines.length && !isEnd(lines[end].text)) end += 1;
  const isClosed = end < lines.length;
  return ["code", end - at + (isClosed ? 1 : 0), { language: fence[2].trim(), isClosed }];
}

function isOfList(lines, i) {
  const line = lines[i].text;
  if (line.trim() === "") return ITEM.test(lines[i + 1]?.text ?? "") || /^\s{2,}\S/.test(lines[i + 1]?.text ?? "");
  return ITEM.test(line) || /^\s{2,}/.test(line);
}

function countWhile(lines, at, holds) {
  let end = at;
  while (end < lines.length && holds(lines[end].text, end)) end += 1;
  return Math.max(end - at, 1);
}

function blockElement(block, text, paint, depth) {
  const inline = (name, begin, end, attributes) => element(name, attributes ?? {}, ...inlineNodes(text, begin, end, paint, depth));
  const [first] = block.lines;
  switch (block.kind) {
    case "code":
      return codeElement(block, text, paint);
    case "heading": {
      const mark = HEADING.exec(first.text);
      return inline(`h${Math.min(mark[1].length + 2, 6)}`, first.begin + mark[0].length, first.end);
    }
    case "rule":
      return element("hr");
    case "quote":
      return element("blockquote", {}, ...nested(block.lines.map((l) => cut(l, QUOTE.exec(l.text)[0].length)), text, paint, depth));
    case "list":
      return listElement(block.lines, text, paint, depth);
    case "table":
      return tableElement(block.lines, inline);
    default:
      return inline("p", block.begin, block.end);
  }
}

const cut = (line, count) => ({ begin: line.begin + count, end: line.end, text: line.text.slice(count) });

/** Blocks in blocks; a text that nests for ever is shown flat. */
function nested(lines, text, paint, depth) {
  if (depth >= MAX_DEPTH) return lines.map((line) => element("p", {}, ...paint(line.begin, line.end)));
  return blocksOf(lines).map((block) => blockElement(block, text, paint, depth + 1));
}

function codeElement(block, text, paint) {
  const body = block.lines.slice(1, block.isClosed ? -1 : undefined);
  const begin = body.length ? body[0].begin : block.end;
  const end = body.length ? body[body.length - 1].end : block.end;
  const copying = button("Copy", () => copy(text.slice(begin, end)));
  const head = element("div", { class: "code-head" }, element("span", {}, block.language), copying);
  const code = element("code", {}, ...body.flatMap((line, i) => {
    const isLast = i === body.length - 1;
    return paint(line.begin, isLast ? line.end : line.end + 1);
  }));
  return element("div", { class: "code" }, head, element("pre", { tabindex: "0" }, code));
}

function listElement(lines, text, paint, depth) {
  const first = ITEM.exec(lines[0].text);
  const isOrdered = /\d/.test(first[2]);
  const items = [];
  for (const line of lines) {
    const mark = ITEM.exec(line.text);
    if (mark && (mark[1].length <= first[1].length || !items.length)) items.push([cut(line, mark[0].length)]);
    else items[items.length - 1].push(cut(line, Math.min(first[0].length, /^\s*/.exec(line.text)[0].length)));
  }
  const start = isOrdered ? { start: Number.parseInt(first[2], 10) } : {};
  return element(isOrdered ? "ol" : "ul", start, ...items.map((own) => {
    const blocks = nested(own, text, paint, depth);
    const isShort = blocks[0]?.tagName === "P";
    return element("li", {}, ...(isShort ? [...blocks[0].childNodes, ...blocks.slice(1)] : blocks));
  }));
}

function tableElement(lines, inline) {
  const row = (line, name) => element("tr", {}, ...cellsOf(line).map(([begin, end]) => inline(name, begin, end)));
  const head = element("thead", {}, row(lines[0], "th"));
  const body = element("tbody", {}, ...lines.slice(2).map((line) => row(line, "td")));
  return element("div", { class: "table" }, element("table", {}, head, body));
}

function cellsOf(line) {
  const cells = [];
  let begin = line.text.indexOf("|") + 1;
  for (let at = begin; at < line.text.length; at += 1) {
    if (line.text[at] === "|" && line.text[at - 1] !== "\\") {
      cells.push([line.begin + begin, line.begin + at]);
      begin = at + 1;
    }
  }
  return cells;
}

/** Return the nodes of a part of the text with its code, emphasis and links. */
function inlineNodes(text, begin, end, paint, depth) {
  if (depth >= MAX_DEPTH || end - begin > MAX_INLINE) return paint(begin, end);
  const nodes = [];
  const part = text.slice(begin, end);
  let done = 0;
  const inner = (name, from, length, attributes = {}) =>
    element(name, attributes, ...inlineNodes(text, from, from + length, paint, depth + 1));
  for (const match of part.matchAll(INLINE)) {
    const [whole, ticks, code, strong, emphasis, label, target, bare] = match;
    const from = begin + match.index;
    let made;
    if (code !== undefined) made = element("code", {}, ...paint(from + ticks.length, from + ticks.length + code.length));
    else if (strong !== undefined) made = inner("strong", from + 2, strong.length);
    else if (emphasis !== undefined) made = inner("em", from + 1, emphasis.length);
    else if (label !== undefined) made = safeLink(target) && inner("a", from + 1, label.length, safeLink(target));
    else made = safeLink(bare) && element("a", safeLink(bare), ...paint(from, from + bare.length));
    if (!made) continue;
    nodes.push(...paint(begin + done, from), made);
    done = match.index + whole.length;
  }
  nodes.push(...paint(begin + done, end));
  return nodes;
}

/** Return the attributes of a link to another site, null where it is anything but http or https. */
export function safeLink(target) {
  let url;
  try {
    url = new URL(target);
  } catch {
    return null;
  }
  if (url.protocol !== "http:" && url.protocol !== "https:") return null;
  return { href: url.href, target: "_blank", rel: "noopener noreferrer" };
}
