// Which model there is, and whether it lives.

import { byId } from "./elements.js";
import { authorization } from "./events.js";
import { setTakesImages } from "./images.js";

export async function showModel() {
  try {
    const response = await fetch("v1/models", { headers: authorization() });
    if (!response.ok) throw new Error(response.status === 401 ? "API key needed" : "not ready");
    const [model] = (await response.json()).data;
    byId("model").textContent = model.id;
    setTakesImages(model.takes_images);
    setHealth("ok", "ready");
  } catch (error) {
    setHealth("dead", error instanceof TypeError ? "not reachable" : error.message);
  }
}

export function setHealth(state, text) {
  if (byId("health").textContent === text) return; // a reader of the screen hears of changes only
  byId("health").dataset.state = state;
  byId("health").textContent = text;
}

byId("api-key").value = sessionStorage.getItem("raypp-api-key") || "";
byId("api-key").addEventListener("change", () => {
  sessionStorage.setItem("raypp-api-key", byId("api-key").value);
  showModel();
});
