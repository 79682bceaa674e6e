// Markdown inside of a block: bold, italic, code, links. Everything else stays text.

import { make } from "./elements.js";

// A mark without an end is text, whatever comes after it. As few may wait as any sane text needs: each end looks
// through them, and elements must not nest without bound.
const MAX_OPEN = 16;

const TOKENS = new RegExp(
  [
    /\\[!-/:-@[-`{-~]/, // a mark that is meant as a character
    /`+/,
    /\*+/,
    /_+/,
    /!?\[/,
    /\]\((?<target>[^()\s<>]*(?:\([^()\s]*\)[^()\s<>]*)*)(?:\s+"[^"]*")?\s*\)/,
    /\]\([^()\s]*$/, // a link whose end has not come yet
    /<(?<plain>https?:\/\/[^\s<>]+)>/,
    /\bhttps?:\/\/[^\s<>"`*[\]|]+/,
  ]
    .map((pattern) => pattern.source)
    .join("|"),
  "gi",
);
const WORD = /[\p{L}\p{N}_]/u;
const SPACE = /\s/;

// Return the text as a fragment. isOpen: more may follow; what is bold or code so far is shown as if it ended here,
// so that marks do not flash up while an answer streams.
export function inline(text, isOpen = false) {
  const parts = []; // strings and elements; a mark is one string
  const openers = []; // marks that wait for their end: { mark, at }, at being an index into parts
  const missing = new Set(); // lengths of runs of ` that do not come again
  let end = 0;

  const open = (mark) => {
    if (openers.length < MAX_OPEN) openers.push({ mark, at: parts.length });
    parts.push(mark);
  };
  const close = (index, wrap) => {
    const [, ...children] = parts.splice(openers[index].at);
    openers.length = index;
    parts.push(wrap(children));
  };

  TOKENS.lastIndex = 0;
  for (let found; (found = TOKENS.exec(text)); ) {
    const [token] = found;
    const start = found.index;
    if (start > end) parts.push(text.slice(end, start));
    end = start + token.length;
    if (token[0] === "\\") parts.push(token[1]);
    else if (token[0] === "`") {
      const after = missing.has(token.length) ? -1 : endOfCode(text, end, token.length);
      if (after < 0) missing.add(token.length);
      if (after >= 0) {
        parts.push(make("code", { textContent: codeText(text.slice(end, after - token.length)) }));
        end = after;
      } else if (isOpen && token.length <= 2) {
        parts.push(make("code", { textContent: text.slice(end) }));
        end = text.length;
      } else parts.push(token);
    } else if (token[0] === "*" || token[0] === "_") emphasis(token, text[start - 1], text[end]);
    else if (token.endsWith("[")) open(token);
    else if (token[0] === "]") link(token, found.groups.target);
    else if (found.groups.plain) parts.push(anchor(found.groups.plain, [found.groups.plain]) ?? token);
    else {
      const url = withoutPunctuation(token);
      parts.push(anchor(url, [url]) ?? url);
      end = start + url.length;
    }
    TOKENS.lastIndex = end;
  }
  parts.push(text.slice(end));
  for (let index = openers.length - 1; isOpen && index >= 0; index--) {
    if (openers[index].mark === "**") close(index, (children) => make("strong", {}, ...children));
  }
  const fragment = document.createDocumentFragment();
  for (const part of parts) if (part !== "") fragment.append(part);
  return fragment;

  function emphasis(run, before = " ", after = " ") {
    const isInWord = run[0] === "_"; // snake_case is no emphasis
    const canOpen = !SPACE.test(after) && !(isInWord && WORD.test(before));
    const canClose = !SPACE.test(before) && !(isInWord && WORD.test(after));
    for (let left = run.length; left > 0; ) {
      const fits = ({ mark }) => mark[0] === run[0] && mark.length <= left;
      const index = canClose ? openers.findLastIndex(fits) : -1;
      if (index >= 0) {
        const { length } = openers[index].mark;
        close(index, (children) => make(length === 2 ? "strong" : "em", {}, ...children));
        left -= length;
      } else {
        const mark = run.slice(0, Math.min(left, 2));
        if (canOpen && openers.length < MAX_OPEN) open(mark);
        else parts.push(mark);
        left -= mark.length;
      }
    }
  }

  function link(token, target) {
    const index = openers.findLastIndex(({ mark }) => mark.endsWith("["));
    if (index < 0) return parts.push(token);
    const isImage = openers[index].mark === "!["; // it would be fetched from elsewhere: it stays text
    if (target === undefined) {
      if (isOpen && !isImage) parts[openers[index].at] = "";
      else parts.push(token);
      openers.length = index;
      return;
    }
    const children = parts.slice(openers[index].at + 1);
    const isNested = children.some((part) => part.tagName === "A" || part.querySelector?.("a"));
    const inner = isNested ? children.map((part) => part.textContent ?? part) : children;
    const made = isImage ? null : anchor(target, inner);
    if (made) close(index, () => made);
    else parts.push(token);
    openers.length = index;
  }
}

// Return where code that begins at `from` is over, behind its closing run of `length` marks; -1: it has none.
function endOfCode(text, from, length) {
  for (let at = from; (at = text.indexOf("`", at)) >= 0; ) {
    let after = at;
    while (text[after] === "`") after++;
    if (after - at === length) return after;
    at = after;
  }
  return -1;
}

function codeText(text) {
  // One space on each side keeps ` apart from the marks.
  return text.startsWith(" ") && text.endsWith(" ") && text.trim() ? text.slice(1, -1) : text;
}

function anchor(target, children) {
  let url;
  try {
    url = new URL(target); // whole addresses only: a relative one would lead to this server
  } catch {
    return null;
  }
  if (url.protocol !== "https:" && url.protocol !== "http:") return null;
  const properties = { href: url.href, title: url.href, target: "_blank", rel: "noopener noreferrer" };
  return make("a", properties, ...children);
}

function withoutPunctuation(url) {
  const hasBracket = url.includes("(");
  let end = url.length;
  while (".,;:!?'_".includes(url[end - 1]) || (url[end - 1] === ")" && !hasBracket)) end--;
  return url.slice(0, end);
}
