// The conversation: questions, their answers, and what is sent of both.

import { Answer } from "./answer.js";
import { byId, make } from "./elements.js";
import { authorization, errorText, serverEvents } from "./events.js";
import { hasImages, takeImages } from "./images.js";
import { settingFields } from "./settings.js";

let turns = []; // { question, answer, isAnswered }
let abort = null; // of the request that is being answered

// What could not be answered is no part of the conversation, apart from the last question.
export function conversation() {
  const last = turns.at(-1);
  return turns.flatMap((turn) => {
    if (turn.isAnswered) return [turn.question, turn.answer.message];
    return turn === last ? [turn.question] : [];
  });
}

function contentOf(text, images) {
  if (!images.length) return text;
  const parts = images.map((url) => ({ type: "image_url", image_url: { url } }));
  return text ? [...parts, { type: "text", text }] : parts;
}

function send() {
  const text = byId("prompt").value.trim();
  if ((!text && !hasImages()) || abort) return;
  const images = takeImages();
  byId("prompt").value = "";
  byId("hint").hidden = true;
  const shown = images.map((url, index) => make("img", { src: url, alt: `attached image ${index + 1}` }));
  const words = make("div", { className: "plain", textContent: text });
  byId("messages").append(make("article", { className: "message user", ariaLabel: "Question" }, ...shown, words));
  byId("messages").scrollTop = byId("messages").scrollHeight;
  turns.push({ question: { role: "user", content: contentOf(text, images) } });
  ask(turns.at(-1));
}

async function ask(turn) {
  turn.isAnswered = false;
  const answer = (turn.answer = new Answer(byId("messages")));
  const own = new AbortController();
  setBusy(own);
  const retry = () => {
    if (abort) return;
    answer.element.remove();
    ask(turn);
  };
  const started = performance.now();
  try {
    const { usage, reason } = await receive(answer, own.signal);
    const seconds = ((performance.now() - started) / 1000).toFixed(1);
    const ending = reason === "length" ? ", cut off" : "";
    turn.isAnswered = true;
    answer.finish(`${usage ? usage.completion_tokens : 0} tokens in ${seconds} s${ending}`, retry);
  } catch (error) {
    const isStopped = own.signal.aborted;
    turn.isAnswered = isStopped && !answer.isEmpty;
    answer.finish(isStopped ? "stopped" : error.message, retry, !isStopped);
  } finally {
    if (abort === own) setBusy(null);
  }
}

async function receive(answer, signal) {
  const body = { messages: conversation(), stream: true, stream_options: { include_usage: true }, ...settingFields() };
  const response = await fetch("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json", ...authorization() },
    body: JSON.stringify(body),
    signal,
  });
  if (!response.ok) throw new Error(await errorText(response));
  let usage = null;
  let reason = null;
  for await (const data of serverEvents(response)) {
    if (data === "[DONE]") return { usage, reason };
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Error(chunk.error.message);
    usage = chunk.usage || usage;
    for (const choice of chunk.choices) {
      answer.take(choice.delta);
      reason = choice.finish_reason || reason;
    }
  }
  throw new Error("the connection ended before the answer did");
}

function setBusy(controller) {
  abort = controller;
  const isBusy = abort !== null;
  const hadFocus = [byId("stop"), byId("send"), document.body].includes(document.activeElement);
  byId("messages").ariaBusy = String(isBusy); // an answer is read out when it is whole
  byId("send").hidden = isBusy;
  byId("stop").hidden = !isBusy;
  if (hadFocus) byId("prompt").focus(); // the button that had it is gone
}

const stop = () => abort?.abort();

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
byId("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
byId("stop").addEventListener("click", stop);
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  if (abort) stop();
  else if (byId("settings").open) {
    byId("settings").open = false;
    byId("settings").querySelector("summary").focus();
  }
});
byId("clear").addEventListener("click", () => {
  stop();
  turns = [];
  byId("messages").replaceChildren(byId("hint"));
  byId("hint").hidden = false;
  byId("prompt").focus();
});
