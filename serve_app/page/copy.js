// Buttons that copy text.

import { make } from "./elements.js";

const SHOWN_MS = 1500;

async function copyText(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  // Browsers give the clipboard to secure pages only. Over plain HTTP from another machine the older way works.
  const focused = document.activeElement;
  const area = make("textarea", { value: text, readOnly: true, className: "unseen" });
  document.body.append(area);
  area.select();
  const isCopied = document.execCommand("copy");
  area.remove();
  focused?.focus();
  if (!isCopied) throw new Error("the browser refused to copy");
}

export function copyButton(label, textOf) {
  const button = make("button", { type: "button", className: "small copy", textContent: "Copy", ariaLabel: label });
  const show = (text) => Object.assign(button, { textContent: text, ariaLabel: text === "Copy" ? label : text });
  button.addEventListener("click", async () => {
    try {
      await copyText(textOf());
      show("Copied");
    } catch {
      show("Not copied");
    }
    setTimeout(() => show("Copy"), SHOWN_MS);
  });
  return button;
}
