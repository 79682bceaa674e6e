// What the reader has set for the next requests. An empty field leaves the choice to the server and the model.

import { byId } from "./elements.js";

export function settingFields() {
  const fields = {};
  const numbers = { temperature: "temperature", "max-tokens": "max_tokens", seed: "seed" };
  for (const [id, name] of Object.entries(numbers)) if (byId(id).value !== "") fields[name] = Number(byId(id).value);
  const tools = byId("tools").value.trim();
  if (tools) fields.tools = listOf(tools);
  return fields;
}

function listOf(text) {
  let value;
  try {
    value = JSON.parse(text);
  } catch (error) {
    throw new Error(`Settings: Tools is no JSON (${error.message}). Expected: a list as in OpenAI's API.`);
  }
  return Array.isArray(value) ? value : [value];
}

byId("settings-form").addEventListener("submit", (event) => event.preventDefault());
