// Markdown as it streams in: paragraphs, headings, lists, quotes, tables, code. Everything else stays text.
//
// Text is read line by line, once. What lies behind is never touched again, so the time an answer takes grows with its
// length only, a selection stays, and nothing flickers. Only the last block, the leaf, is drawn anew as it grows.

import { copyButton } from "./copy.js";
import { make } from "./elements.js";
import { inline } from "./inline.js";

const MAX_DEPTH = 12; // quotes and lists inside of each other; more are text
const MAX_COLUMNS = 100; // of a table; a wider one is text
const FENCE = /^(\s*)(`{3,}|~{3,})([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})(?:\s+|$)/;
const ITEM = /^(\s*)([-*+]|(\d{1,9})[.)])(\s+|$)/;
const QUOTE = /^ {0,3}> ?/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const DELIMITER = /^:?-+:?$/;
// Beginnings of a line that may yet become something else: they wait for the next characters, or for the line's end.
const UNDECIDED = /^(?:[\s>#*+_~`|:=-]|\d{1,9}[.)]?(?=\s|$))*$/;
const FENCE_BEGUN = /^(?:[\s>*+-]|\d{1,9}[.)]\s)*(?:`{3}|~{3})/;
const FENCE_MAYBE = /^\s*(?:`*|~*)\s*$/;

export class MarkdownView {
  #root;
  #containers = []; // the open quotes and list items, the outermost first
  #leaf = null; // the block that takes text
  #rest = ""; // of the last line, what no block has taken yet
  #isBegun = false; // whether the last line's beginning has been read

  constructor(root) {
    this.#root = root;
  }

  append(text) {
    const lines = text.split("\n");
    const last = lines.pop();
    for (const line of lines) {
      this.#take(line, true);
      this.#isBegun = false;
    }
    this.#take(last, false);
    this.#leaf?.draw(true);
  }

  finish() {
    if (!this.#isBegun && this.#rest) this.#take("", true);
    this.#closeLeaf();
    this.#containers = [];
    this.#isBegun = false;
  }

  #take(text, isWhole) {
    if (this.#isBegun) return this.#leaf?.add(text);
    this.#rest += text;
    if (!isWhole && this.#isUndecided(this.#rest)) return;
    const line = this.#rest.replace(/\r$/, "").replace(/^[ \t]+/, (space) => space.replaceAll("\t", "    "));
    this.#rest = "";
    this.#isBegun = true;
    if (this.#leaf?.isCode) this.#codeLine(line, isWhole);
    else this.#textLine(line);
  }

  #isUndecided(line) {
    if (line.length > 200) return false;
    const isQuoted = !this.#containers.some((container) => container.isQuote) || QUOTE.test(line);
    if (this.#leaf?.isCode && isQuoted) return FENCE_MAYBE.test(line.replace(/^[\s>]+/, ""));
    return UNDECIDED.test(line) || FENCE_BEGUN.test(line);
  }

  #codeLine(line, isWhole) {
    let rest = line;
    for (const container of this.#containers) {
      if (!container.isQuote) continue; // code goes on in a list even where its lines are less indented
      if (!QUOTE.test(rest)) {
        this.#closeLeaf();
        return this.#textLine(line);
      }
      rest = rest.replace(QUOTE, "");
    }
    if (isWhole && this.#leaf.isEnd(rest)) this.#closeLeaf();
    else this.#leaf.addLine(rest);
  }

  #textLine(line) {
    if (!line.trim()) {
      this.#closeLeaf();
      const quote = this.#containers.findIndex((container) => container.isQuote);
      if (quote >= 0) this.#containers.length = quote;
      return;
    }
    let [rest, depth] = this.#matched(line);
    const close = () => {
      this.#closeLeaf();
      this.#containers.length = depth;
    };
    for (;;) {
      if (RULE.test(rest)) {
        close();
        return this.#place(make("hr"));
      }
      const isQuote = QUOTE.test(rest);
      const item = !isQuote && this.#itemOf(rest, depth);
      if ((!isQuote && !item) || depth >= MAX_DEPTH) break;
      const sibling = this.#containers[depth];
      close();
      if (isQuote) {
        const element = make("blockquote");
        this.#place(element);
        this.#containers.push({ isQuote, element });
        rest = rest.replace(QUOTE, "");
      } else {
        const list = sibling?.ordered === item.ordered ? sibling.list : this.#place(newList(item));
        this.#containers.push({ ...item, list, element: list.appendChild(make("li")) });
        rest = rest.slice(item.width);
      }
      depth++;
    }
    if (!rest.trim()) return this.#closeLeaf();
    const fence = FENCE.exec(rest);
    const heading = HEADING.exec(rest);
    if (fence) {
      close();
      const [, indent, marks, language] = fence;
      this.#leaf = new CodeLeaf(indent.length + this.#indentOfItems(), marks, language.trim());
      this.#place(this.#leaf.element);
    } else if (heading) {
      close();
      this.#leaf = new TextLeaf(`h${Math.min(6, heading[1].length + 2)}`); // below the page's own headings
      this.#place(this.#leaf.element);
      this.#leaf.add(rest.slice(heading[0].length));
      this.#leaf.isLine = true;
    } else if (this.#leaf?.isTable && depth === this.#containers.length && this.#leaf.takes(rest)) {
      this.#leaf.addRow(rest);
    } else if (this.#leaf?.isText && !this.#leaf.isLine) {
      const table = rest.includes("|") && TableLeaf.below(this.#leaf, rest);
      if (table) this.#leaf = table;
      else this.#leaf.add(`\n${rest}`); // also where it should be indented or marked, and is not
    } else {
      close();
      this.#leaf = new TextLeaf("p");
      this.#place(this.#leaf.element);
      this.#leaf.add(rest.trimStart());
    }
  }

  // Return what is left of the line inside of the open containers that it belongs to, and how many these are.
  #matched(line) {
    let rest = line;
    let depth = 0;
    for (const container of this.#containers) {
      if (container.isQuote) {
        if (!QUOTE.test(rest)) break;
        rest = rest.replace(QUOTE, "");
      } else {
        const indent = rest.length - rest.trimStart().length;
        // Models often indent a list in a list by less than they should.
        const isInside = indent >= container.width || (indent >= container.indent + 2 && ITEM.test(rest));
        if (!isInside) break;
        rest = rest.slice(Math.min(indent, container.width));
      }
      depth++;
    }
    return [rest, depth];
  }

  #itemOf(rest, depth) {
    const found = ITEM.exec(rest);
    if (!found) return null;
    const [, space, mark, number, gap] = found;
    const ordered = number !== undefined;
    const isNext = this.#containers[depth]?.ordered === ordered;
    // "In the year\n1984. ..." is no list.
    if (ordered && Number(number) !== 1 && this.#leaf?.isText && !this.#leaf.isLine && !isNext) return null;
    const width = space.length + mark.length + Math.min(Math.max(gap.length, 1), 4);
    return { ordered, start: Number(number), indent: space.length, width };
  }

  #indentOfItems() {
    return this.#containers.reduce((sum, container) => (container.isQuote ? 0 : sum + container.width), 0);
  }

  #place(element) {
    (this.#containers.at(-1)?.element ?? this.#root).append(element);
    return element;
  }

  #closeLeaf() {
    this.#leaf?.draw(false);
    this.#leaf = null;
  }
}

function newList({ ordered, start }) {
  return ordered ? make("ol", { start }) : make("ul");
}

// Whether an open block that has grown since it was drawn is drawn anew. A long one waits until it has grown by a
// quarter, so that all drawing together takes time in proportion to its length.
const isDue = (length, drawn) => length < 2000 || length > 1.25 * drawn;

// A paragraph or a heading.
class TextLeaf {
  isText = true;
  isLine = false; // whether it ends with its line
  text = "";
  #drawn = 0; // characters, as Markdown; what follows them is shown as it is
  #tail = null;
  #new = "";

  constructor(tag) {
    this.element = make(tag);
  }

  add(text) {
    this.text += text;
    this.#new += text;
  }

  draw(isOpen) {
    if (isOpen && !isDue(this.text.length, this.#drawn)) {
      this.#tail.appendData(this.#new);
      this.#new = "";
      return;
    }
    const text = this.isLine && !isOpen ? this.text.replace(/(?:^|\s)#+\s*$/, "") : this.text;
    this.#tail = document.createTextNode("");
    this.#drawn = this.text.length;
    this.#new = "";
    this.element.replaceChildren(inline(text, isOpen), this.#tail);
  }
}

class CodeLeaf {
  isCode = true;
  #indent;
  #end;
  #new = "";
  #isEmpty = true;
  #text = document.createTextNode("");

  constructor(indent, marks, language) {
    this.#indent = indent;
    this.#end = new RegExp(`^\\s*${marks[0]}{${marks.length},}\\s*$`);
    const copy = copyButton("Copy the code", () => this.#text.data);
    const head = make("div", { className: "code-head" }, make("span", { textContent: language }), copy);
    this.element = make("div", { className: "code" }, head, make("pre", {}, make("code", {}, this.#text)));
  }

  isEnd(line) {
    return this.#end.test(line);
  }

  addLine(line) {
    const indent = line.length - line.trimStart().length;
    this.add((this.#isEmpty ? "" : "\n") + line.slice(Math.min(indent, this.#indent)));
    this.#isEmpty = false;
  }

  add(text) {
    this.#new += text;
  }

  draw() {
    this.#text.appendData(this.#new);
    this.#new = "";
  }
}

class TableLeaf {
  isTable = true;
  #body = make("tbody");
  #aligns;
  #hasEdge;
  #row = null; // the last one; it may still grow
  #text = "";
  #drawn = 0; // characters of the row

  // Return the table whose heads are the last line of a paragraph, above a line of delimiters; null: they do not match.
  static below(paragraph, delimiters) {
    const marks = cellsOf(delimiters);
    if (!marks.every((mark) => DELIMITER.test(mark))) return null;
    const start = paragraph.text.lastIndexOf("\n") + 1;
    const head = paragraph.text.slice(start);
    const heads = cellsOf(head);
    if (heads.length !== marks.length || heads.length > MAX_COLUMNS || !head.includes("|")) return null;
    const table = new TableLeaf(heads, marks, head.trimStart().startsWith("|"));
    paragraph.element.after(table.element);
    paragraph.text = paragraph.text.slice(0, Math.max(0, start - 1));
    if (paragraph.text) paragraph.draw(false);
    else paragraph.element.remove();
    return table;
  }

  constructor(heads, marks, hasEdge) {
    this.#hasEdge = hasEdge;
    this.#aligns = marks.map((mark) => (mark.endsWith(":") ? (mark.startsWith(":") ? "center" : "right") : ""));
    const head = make("tr", {}, ...this.#cells("th", heads));
    this.element = make("div", { className: "table" }, make("table", {}, make("thead", {}, head), this.#body));
  }

  takes(line) {
    return !this.#hasEdge || line.trimStart().startsWith("|");
  }

  addRow(line) {
    this.draw(false);
    this.#row = this.#body.appendChild(make("tr"));
    this.#text = line;
    this.#drawn = 0;
  }

  add(text) {
    this.#text += text;
  }

  draw(isOpen) {
    if (!this.#row || (isOpen && !isDue(this.#text.length, this.#drawn))) return;
    this.#drawn = this.#text.length;
    this.#row.replaceChildren(...this.#cells("td", cellsOf(this.#text), isOpen));
    if (!isOpen) this.#row = null;
  }

  #cells(tag, texts, isOpen = false) {
    // No more than there are heads; and none is made up, since one long head could ask for any number in each row.
    const shown = texts.slice(0, this.#aligns.length);
    return shown.map((text, index) => make(tag, { className: this.#aligns[index] }, inline(text, isOpen)));
  }
}

function cellsOf(line) {
  const cells = line.trim().split(/(?<!\\)\|/);
  if (cells[0] === "") cells.shift();
  if (cells.length > 1 && !cells.at(-1).trim()) cells.pop();
  return cells.map((cell) => cell.trim().replaceAll("\\|", "|"));
}
