// Which model there is and whether it lives; and the start of everything. No libraries, nothing from elsewhere.
"use strict";

async function showModel() {
  try {
    const response = await fetch("v1/models", { headers: authorization() });
    if (!response.ok) throw new Error(response.status === 401 ? "API key needed" : "not ready");
    const [model] = (await response.json()).data;
    byId("model").textContent = model.id;
    chat.takesImages = model.takes_images;
    byId("attach").toggleAttribute("data-unsupported", !model.takes_images);
    byId("attach").title = model.takes_images ? "Attach an image" : "This model takes no images";
    setHealth("ok", "ready");
  } catch (error) {
    setHealth("dead", error instanceof TypeError ? "not reachable" : error.message);
  }
}

function setHealth(state, text) {
  byId("health").dataset.state = state;
  byId("health").textContent = text;
}

showModel();
drawHistory();
requestAnimationFrame(drawLanes);
watch();
