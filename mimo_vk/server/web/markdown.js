// Markdown to elements. HTML in it is text like any other, pictures are links, and links lead to the web or to mail.

import { make } from "./dom.js";
import { inline } from "./inline.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^\s`]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})(?:\s+(.*))?$/;
const RULE = /^ {0,3}(?:(?:\* *){3,}|(?:- *){3,}|(?:_ *){3,})$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])( +|$)/;
const TABLE_RULE = /^ {0,3}\|?(?: *:?-+:? *\|)*(?: *:?-+:? *)\|?\s*$/;
const DEEPEST = 12; // of quotes and lists within each other; what lies deeper is text

/** Shows a text that grows: blocks that did not change keep their elements. */
export class MarkdownView {
  constructor(parent) {
    this.parent = parent;
    this.shown = []; // [kind and source, element]
  }

  show(text) {
    const found = blocks(text.split("\n"));
    let same = 0;
    while (same < this.shown.length && same < found.length && this.shown[same][0] === nameOf(found[same])) same += 1;
    for (const [, element] of this.shown.splice(same)) element.remove();
    for (const block of found.slice(same)) {
      const element = built(block, 0);
      this.parent.append(element);
      this.shown.push([nameOf(block), element]);
    }
  }
}

function nameOf(block) {
  return `${block.kind} ${block.closed ?? ""}\n${block.lines.join("\n")}`;
}

/** Lines as blocks: {kind, lines, ...}. */
function blocks(lines) {
  const out = [];
  for (let at = 0; at < lines.length; ) {
    const block = fence(lines, at) ?? table(lines, at) ?? quote(lines, at) ?? list(lines, at) ?? single(lines, at);
    at += block.size;
    if (block.kind === "p" && out.at(-1)?.kind === "p") out.at(-1).lines.push(...block.lines);
    else out.push(block); // one of no kind is a blank line, which ends a paragraph
  }
  return out.filter((block) => block.kind);
}

function single(lines, at) {
  const line = lines[at];
  if (!line.trim()) return { kind: "", lines: [], size: 1 };
  if (RULE.test(line)) return { kind: "hr", lines: [line], size: 1 };
  if (HEADING.test(line)) return { kind: "heading", lines: [line], size: 1 };
  return { kind: "p", lines: [line], size: 1 };
}

function fence(lines, at) {
  const found = FENCE.exec(lines[at]);
  if (!found) return null;
  const end = new RegExp(`^ {0,3}${found[1][0]}{${found[1].length},}\\s*$`);
  let last = at + 1;
  while (last < lines.length && !end.test(lines[last])) last += 1;
  const body = lines.slice(at + 1, last);
  return { kind: "code", lines: body, language: found[2], closed: last < lines.length, size: last - at + 1 };
}

function table(lines, at) {
  if (at + 1 >= lines.length || !lines[at].includes("|") || !TABLE_RULE.test(lines[at + 1])) return null;
  if (cells(lines[at]).length !== cells(lines[at + 1]).length) return null;
  return taken("table", lines, at, (line) => line.includes("|"));
}

function quote(lines, at) {
  return QUOTE.test(lines[at]) ? taken("quote", lines, at, (line) => QUOTE.test(line)) : null;
}

/** A list: its items, what is indented below them, and blank lines between. */
function list(lines, at) {
  const first = ITEM.exec(lines[at]);
  if (!first || RULE.test(lines[at])) return null;
  const numbered = /\d/.test(first[2]);
  const goesOn = (line) => {
    const item = ITEM.exec(line);
    if (item) return !RULE.test(line) && /\d/.test(item[2]) === numbered;
    return /^(?: {2,}|\t)/.test(line);
  };
  const belongs = (i) => i < lines.length && goesOn(lines[i]);
  let end = at + 1;
  while (belongs(end) || (end < lines.length && !lines[end].trim() && belongs(end + 1))) end += 1;
  const start = Number.parseInt(first[2], 10);
  return { kind: numbered ? "ol" : "ul", lines: lines.slice(at, end), start, size: end - at };
}

function taken(kind, lines, at, belongs) {
  let end = at + 1;
  while (end < lines.length && belongs(lines[end])) end += 1;
  return { kind, lines: lines.slice(at, end), size: end - at };
}

/** A block's element. */
function built(block, depth) {
  const { kind, lines } = block;
  if (kind === "hr") return make("hr");
  if (kind === "heading") return heading(lines[0]);
  if (kind === "code") return code(block);
  if (kind === "table") return tableElement(lines);
  if (kind === "p" || depth >= DEEPEST) return paragraph(lines);
  if (kind === "quote") return within(make("blockquote"), lines.map((line) => line.replace(QUOTE, "")), depth);
  const items = make(kind);
  if (kind === "ol" && block.start !== 1) items.start = block.start;
  for (const item of itemsOf(lines)) items.append(within(make("li"), item, depth));
  return items;
}

function within(parent, lines, depth) {
  const inside = blocks(lines);
  const tight = inside.filter((block) => block.kind === "p").length === 1;
  for (const block of inside) {
    if (parent.tagName === "LI" && tight && block.kind === "p") parent.append(...inline(block.lines.join("\n")));
    else parent.append(built(block, depth + 1));
  }
  return parent;
}

/** A list's lines, item by item, without marks and indents. */
function itemsOf(lines) {
  const items = [];
  let width = 0;
  for (const line of lines) {
    const found = ITEM.exec(line);
    if (found && (!items.length || found[1].length < width)) {
      width = found[0].length || 2;
      items.push([line.slice(found[0].length)]);
    } else {
      const indent = /^\s*/.exec(line)[0].length;
      items.at(-1).push(line.slice(Math.min(indent, width)));
    }
  }
  return items;
}

function paragraph(lines) {
  return make("p", {}, ...inline(lines.map((line) => line.trim()).join("\n")));
}

/** Headings of an answer stand below the page's own. */
function heading(line) {
  const [, marks, text] = HEADING.exec(line);
  return make(`h${Math.min(6, marks.length + 1)}`, {}, ...inline((text ?? "").replace(/\s#+\s*$/, "")));
}

function code({ lines, language }) {
  const pre = make("pre", { tabIndex: 0 }, make("code", {}, lines.join("\n")));
  if (language) pre.setAttribute("aria-label", `code: ${language}`);
  return pre;
}

function tableElement(lines) {
  const aligned = cells(lines[1]).map((cell) => {
    if (!cell.endsWith(":")) return "";
    return cell.startsWith(":") ? "center" : "right";
  });
  const row = (line, tag) =>
    make("tr", {}, ...aligned.map((side, i) => {
      const cell = make(tag, { className: side }, ...inline(cells(line)[i] ?? ""));
      if (tag === "th") cell.scope = "col";
      return cell;
    }));
  const body = lines.slice(2).map((line) => row(line, "td"));
  const whole = make("table", {}, make("thead", {}, row(lines[0], "th")), make("tbody", {}, ...body));
  return make("div", { className: "wide", tabIndex: 0 }, whole);
}

function cells(line) {
  const inner = line.trim().replace(/^\|/, "").replace(/(?<!\\)\|$/, "");
  return inner.split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
}
