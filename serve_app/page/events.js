// How the page talks to the server.

import { byId } from "./elements.js";

export function authorization() {
  const key = byId("api-key").value.trim();
  return key ? { Authorization: `Bearer ${key}` } : {};
}

// Server-sent events over fetch: unlike EventSource it can send a key, and be aborted.

export async function* serverEvents(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      rest += value;
      const events = rest.split("\n\n");
      rest = events.pop();
      for (const event of events) if (event.startsWith("data: ")) yield event.slice(6);
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

export async function errorText(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the server answered ${response.status}`;
  }
}
