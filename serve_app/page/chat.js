// The chat: messages, images, streaming answers.
"use strict";

const chat = { messages: [], images: [], abort: null, takesImages: false };

function showText(element, text) {
  // Code fences become blocks; everything is text, nothing a model writes is ever markup.
  element.replaceChildren();
  text.split("```").forEach((piece, index) => {
    if (index % 2 === 0) return element.append(piece);
    const block = document.createElement("pre");
    block.textContent = piece.replace(/^[\w+-]*\n/, "");
    element.append(block);
  });
}

function addMessage(role, text, images = []) {
  byId("hint").hidden = true;
  const element = document.createElement("div");
  element.className = `message ${role}`;
  showText(element, text);
  for (const url of images.slice().reverse()) {
    const image = document.createElement("img");
    image.src = url;
    image.alt = "attached image";
    element.prepend(image);
  }
  byId("messages").append(element);
  element.scrollIntoView({ block: "end" });
  return element;
}

function addNote(element, text) {
  const note = document.createElement("span");
  note.className = "note";
  note.textContent = text;
  element.append(note);
}

function contentOf(text, images) {
  if (!images.length) return text;
  return [...images.map((url) => ({ type: "image_url", image_url: { url } })), { type: "text", text }];
}

function requestBody() {
  const body = {
    messages: chat.messages,
    stream: true,
    stream_options: { include_usage: true },
    temperature: Number(byId("temperature").value),
    max_tokens: Math.max(1, Math.round(Number(byId("max-tokens").value)) || 256),
  };
  if (byId("seed").value !== "") body.seed = Math.round(Number(byId("seed").value));
  return body;
}

async function send() {
  const text = byId("prompt").value.trim();
  if ((!text && !chat.images.length) || chat.abort) return;
  const images = chat.images;
  chat.messages.push({ role: "user", content: contentOf(text, images) });
  addMessage("user", text, images);
  byId("prompt").value = "";
  chat.images = [];
  showAttachments();
  const element = addMessage("assistant", "");
  element.classList.add("streaming");
  setBusy(new AbortController());
  const answer = { text: "", usage: null, reason: null };
  const started = performance.now();
  try {
    await receiveAnswer(element, answer);
    const seconds = (performance.now() - started) / 1000;
    const count = answer.usage ? answer.usage.completion_tokens : 0;
    addNote(element, `${count} tokens in ${seconds.toFixed(1)} s${answer.reason === "length" ? ", cut off" : ""}`);
    chat.messages.push({ role: "assistant", content: answer.text });
  } catch (error) {
    if (error.name === "AbortError") {
      addNote(element, "stopped");
      chat.messages.push({ role: "assistant", content: answer.text });
    } else {
      if (!answer.text) element.textContent = error.message;
      else addNote(element, error.message);
      element.classList.add("failed");
      chat.messages.pop(); // what could not be answered is no part of the conversation
    }
  } finally {
    element.classList.remove("streaming");
    setBusy(null);
  }
}

async function receiveAnswer(element, answer) {
  const response = await fetch("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json", ...authorization() },
    body: JSON.stringify(requestBody()),
    signal: chat.abort.signal,
  });
  if (!response.ok) throw new Error(await errorText(response));
  for await (const data of serverEvents(response)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Error(chunk.error.message);
    if (chunk.usage) answer.usage = chunk.usage;
    for (const choice of chunk.choices) {
      answer.text += choice.delta.content || "";
      answer.reason = choice.finish_reason || answer.reason;
    }
    showText(element, answer.text);
    byId("messages").scrollTop = byId("messages").scrollHeight;
  }
  throw new Error("the connection ended before the answer did");
}

function setBusy(abort) {
  chat.abort = abort;
  byId("send").hidden = abort !== null;
  byId("stop").hidden = abort === null;
  if (abort === null) byId("prompt").focus();
}

function showAttachments() {
  const shelf = byId("attachments");
  shelf.hidden = chat.images.length === 0;
  shelf.replaceChildren(
    ...chat.images.map((url, index) => {
      const figure = document.createElement("figure");
      const image = document.createElement("img");
      image.src = url;
      image.alt = `image ${index + 1}`;
      const remove = document.createElement("button");
      remove.type = "button";
      remove.textContent = "\u00d7";
      remove.setAttribute("aria-label", `Remove image ${index + 1}`);
      remove.addEventListener("click", () => {
        chat.images.splice(index, 1);
        showAttachments();
      });
      figure.append(image, remove);
      return figure;
    }),
  );
}

function readImage(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}

async function attach(files) {
  const images = [...files].filter((file) => file.type.startsWith("image/"));
  chat.images.push(...(await Promise.all(images.map(readImage))));
  showAttachments();
}

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
byId("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  }
});
byId("prompt").addEventListener("paste", (event) => attach(event.clipboardData.files));
byId("stop").addEventListener("click", () => chat.abort && chat.abort.abort());
byId("clear").addEventListener("click", () => {
  if (chat.abort) chat.abort.abort();
  chat.messages = [];
  byId("messages").replaceChildren(byId("hint"));
  byId("hint").hidden = false;
});
byId("images").addEventListener("change", (event) => {
  attach(event.target.files);
  event.target.value = "";
});
byId("settings-form").addEventListener("submit", (event) => event.preventDefault());
byId("api-key").addEventListener("change", () => {
  sessionStorage.setItem("raypp-api-key", byId("api-key").value);
  showModel();
});
byId("api-key").value = sessionStorage.getItem("raypp-api-key") || "";
