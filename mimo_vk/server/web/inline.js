// What stands in a line of Markdown, as nodes: code, emphasis, links.

import { make } from "./dom.js";

const LINK = /!?\[([^[\]]*)\]\(\s*<?([^\s()<>]*(?:\([^\s()]*\)[^\s()<>]*)*)>?(?:\s+"[^"]*")?\s*\)/y;
const ADDRESS = /https?:\/\/[^\s<>"'`]+/y;
const ESCAPED = /\\([!-/:-@[-`{-~])/y;
const TICKS = /`+/y;
const MARKS = { "**": "strong", "__": "strong", "~~": "del", "*": "em", "_": "em" };
const FARTHEST = 5000; // characters to a closing mark
const DEEPEST = 12;
const SCHEMES = new Set(["http:", "https:", "mailto:"]);

/** A text's nodes. Each line but the last ends in a break, as it was written. */
export function inline(text, depth = 0) {
  const out = [];
  let plain = "";
  const push = (...nodes) => {
    if (plain) out.push(...broken(plain));
    plain = "";
    out.push(...nodes);
  };
  for (let at = 0; at < text.length; ) {
    const found = "\\`![hH*_~".includes(text[at]) ? special(text, at, depth) : null;
    if (found === null) {
      plain += text[at];
      at += 1;
    } else {
      if (found.node) push(found.node);
      else plain += found.text;
      at += found.size;
    }
  }
  push();
  return out;
}

/** What begins at a place: {node or text, size}, or null for an ordinary character. */
function special(text, at, depth) {
  const escaped = matched(ESCAPED, text, at);
  if (escaped) return { text: escaped[1], size: 2 };
  const ticks = matched(TICKS, text, at);
  if (ticks) return code(text, at, ticks[0]);
  const link = depth < DEEPEST && matched(LINK, text, at);
  if (link) return { node: linked(link[2], link[1] || link[2]), size: link[0].length };
  const address = depth < DEEPEST && wordBegins(text, at) && matched(ADDRESS, text, at);
  if (address) {
    const shown = trimmed(address[0]);
    return { node: linked(shown, ""), size: shown.length };
  }
  return emphasis(text, at, depth);
}

function matched(pattern, text, at) {
  pattern.lastIndex = at;
  return pattern.exec(text);
}

/** Code ends at as many backticks as it began with; backticks without an end are text. */
function code(text, at, ticks) {
  for (let end = at + ticks.length; (end = text.indexOf(ticks, end)) >= 0; ) {
    const closing = matched(TICKS, text, end)[0];
    if (closing.length === ticks.length) {
      const inside = text.slice(at + ticks.length, end).replaceAll("\n", " ");
      const shown = /^ .*[^ ].* $/.test(inside) ? inside.slice(1, -1) : inside;
      return { node: make("code", {}, shown), size: end + ticks.length - at };
    }
    end += closing.length;
  }
  return { text: ticks, size: ticks.length };
}

function emphasis(text, at, depth) {
  const mark = [text.slice(at, at + 2), text[at]].find((one) => MARKS[one]);
  if (!mark) return null;
  const begins = at + mark.length;
  const unmarked = { text: mark, size: mark.length };
  if (depth >= DEEPEST || /^\s|^$/.test(text.slice(begins, begins + 1))) return unmarked;
  if (mark[0] === "_" && !wordBegins(text, at)) return unmarked;
  if (mark === "*" && /\d/.test(text[at - 1] ?? "")) return unmarked; // 2*3*4 is a product
  for (let end = begins; (end = text.indexOf(mark, end + 1)) >= 0 && end - begins < FARTHEST; ) {
    if (!closes(text, end, mark)) continue;
    const node = make(MARKS[mark], {}, ...inline(text.slice(begins, end), depth + 1));
    return { node, size: end + mark.length - at };
  }
  return unmarked;
}

/** Whether a mark ends an emphasis: a letter stands before it, and it is no part of a longer mark. */
function closes(text, end, mark) {
  const next = text[end + mark.length] ?? "";
  if (/\s|\\/.test(text[end - 1])) return false;
  if (mark.length === 1 && (next === mark || text[end - 1] === mark)) return false;
  if (mark.length === 2 && next === mark[0]) return false; // the inner one of three ends first
  return mark[0] !== "_" || !/[\p{L}\p{N}]/u.test(next);
}

function wordBegins(text, at) {
  return at === 0 || !/[\p{L}\p{N}_]/u.test(text[at - 1]);
}

/** A link, or only its text where it leads anywhere but to the web or to mail. */
function linked(address, label) {
  const nodes = label ? inline(label, DEEPEST) : [address];
  let url;
  try {
    url = new URL(address);
  } catch {
    return make("span", {}, ...nodes);
  }
  if (!SCHEMES.has(url.protocol)) return make("span", {}, ...nodes);
  return make("a", { href: url.href, target: "_blank", rel: "noopener noreferrer" }, ...nodes);
}

/** An address that stands in a sentence, without the sentence's own signs behind it. */
function trimmed(address) {
  let shown = address.replace(/[.,;:!?*_~]+$/, "");
  while (shown.endsWith(")") && !shown.includes("(")) shown = shown.slice(0, -1);
  return shown;
}

function broken(text) {
  const lines = text.split("\n");
  return lines.flatMap((line, i) => (i < lines.length - 1 ? [line, make("br")] : [line]));
}
