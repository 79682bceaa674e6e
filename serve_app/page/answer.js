// One answer on the page: its thoughts, its text, its tool calls, and what can be done with it.

import { copyButton } from "./copy.js";
import { make } from "./elements.js";
import { MarkdownView } from "./markdown.js";

export class Answer {
  message = { role: "assistant", content: "" }; // as the next request sends it back
  element = make("article", { className: "message assistant streaming", ariaLabel: "Answer" });
  #box;
  #body = make("div", { className: "text" });
  #text = new MarkdownView(this.#body);
  #thoughts = null;
  #calls = [];
  #new = ""; // text that is not shown yet
  #frame = 0;

  // box: what the answer stands in. It scrolls along as long as its end is in view.
  constructor(box) {
    this.#box = box;
    this.element.append(this.#body);
    box.append(this.element);
  }

  get isEmpty() {
    return !this.message.content && !this.message.tool_calls;
  }

  // Take what is new: the delta of a chunk.
  take(delta) {
    if (delta.reasoning_content) {
      this.message.reasoning_content = (this.message.reasoning_content || "") + delta.reasoning_content;
      this.#thoughts ??= new Thoughts(this.element);
      this.#thoughts.new += delta.reasoning_content;
    }
    if (delta.content) {
      this.message.content += delta.content;
      this.#new += delta.content;
    }
    for (const piece of delta.tool_calls || []) this.#takeCall(piece);
    // Chunks come faster than a screen shows them.
    if (!this.#frame) this.#frame = requestAnimationFrame(() => this.#draw());
  }

  // End it: with a line below it, and a way to ask again.
  finish(note, retry, isFailed = false) {
    this.#draw(true);
    this.element.classList.remove("streaming");
    this.element.classList.toggle("failed", isFailed);
    const again = make("button", { type: "button", className: "small retry", textContent: "Retry" });
    again.addEventListener("click", retry);
    const buttons = this.message.content ? [copyButton("Copy the answer", () => this.message.content), again] : [again];
    const line = make("span", { className: "note", textContent: note });
    this.#following(() => this.element.append(make("div", { className: "answer-foot" }, line, ...buttons)));
  }

  #takeCall({ index, id, function: { name, arguments: text } = {} }) {
    this.message.tool_calls ??= [];
    if (!this.#calls[index]) {
      this.#calls[index] = new Call(this.element);
      this.message.tool_calls[index] = { id, type: "function", function: { name: "", arguments: "" } };
    }
    const call = this.message.tool_calls[index].function;
    call.name += name || "";
    call.arguments += text || "";
    this.#calls[index].add(name || "", text || "");
  }

  #draw(isOver = false) {
    cancelAnimationFrame(this.#frame);
    this.#frame = 0;
    this.#following(() => {
      this.#thoughts?.draw(isOver || !this.isEmpty);
      this.#text.append(this.#new);
      this.#new = "";
      if (isOver) this.#text.finish();
    });
  }

  #following(change) {
    const { scrollHeight, scrollTop, clientHeight } = this.#box;
    change();
    if (scrollHeight - scrollTop - clientHeight < 60) this.#box.scrollTop = this.#box.scrollHeight;
  }
}

// Open while the model thinks, folded when it answers, unless the reader has folded or opened it.
class Thoughts {
  new = "";
  #started = performance.now();
  #isTouched = false;
  #isOver = false;
  #summary = make("summary", { textContent: "Thinking" });
  #body = make("div", { className: "text" });
  #text = new MarkdownView(this.#body);
  #element = make("details", { className: "thoughts", open: true }, this.#summary, this.#body);

  constructor(parent) {
    this.#summary.addEventListener("click", () => (this.#isTouched = true));
    parent.prepend(this.#element);
  }

  draw(isOver) {
    this.#text.append(this.new);
    this.new = "";
    if (!isOver || this.#isOver) return;
    this.#isOver = true;
    this.#text.finish();
    this.#summary.textContent = `Thoughts, ${((performance.now() - this.#started) / 1000).toFixed(1)} s`;
    if (!this.#isTouched) this.#element.open = false;
  }
}

class Call {
  #name = make("code");
  #arguments = document.createTextNode("");

  constructor(parent) {
    const summary = make("summary", {}, "Tool call ", this.#name);
    parent.append(make("details", { className: "call" }, summary, make("pre", {}, this.#arguments)));
  }

  add(name, text) {
    this.#name.append(name);
    this.#arguments.appendData(text);
  }
}
