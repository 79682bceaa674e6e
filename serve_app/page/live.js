// The live picture of the pipeline.

import { byId } from "./elements.js";
import { authorization, errorText, serverEvents } from "./events.js";
import { setHealth, showModel } from "./model.js";

const COHORT_COLOURS = ["#4f8a83", "#d08c4a", "#7d7fb3", "#b3666a", "#7fa35b", "#4f86ad", "#b79a3e", "#946f9e"];
const cohortColour = (cohort) => COHORT_COLOURS[cohort % COHORT_COLOURS.length];

const PLAYBACK_DELAY_US = 500_000; // reports come every tenth of a second: shown a little late, they come smoothly
const KEPT_US = 8_000_000;
const HISTORY_FRAMES = 300;
const LANE = { height: 40, gap: 10, label: 82 };

export const live = {
  spans: [], keys: new Set(), stages: 0, busy: [], offset: 0, window: 0.5, history: [], hover: null,
};

export async function watch() {
  for (;;) {
    try {
      const response = await fetch("live", { headers: authorization() });
      if (!response.ok) throw new Error(await errorText(response));
      for await (const data of serverEvents(response)) takeFrame(JSON.parse(data));
    } catch {
      // the engine is being replaced, or the key is missing: tried again below
    }
    showModel();
    await new Promise((resolve) => setTimeout(resolve, 1500));
  }
}

function takeFrame(frame) {
  if (frame.error) return setHealth("dead", "engine lost");
  showRecoveries(frame.recoveries);
  if (frame.is_recovering) return setHealth("recovering", "engine restarts");
  if (byId("health").dataset.state !== "ok") showModel();
  live.offset = frame.time_us - performance.now() * 1000;
  live.stages = frame.num_stages;
  live.busy = frame.busy;
  for (const span of frame.spans) {
    const key = span[0] + ":" + span[1];
    if (live.keys.has(key)) continue;
    live.keys.add(key);
    live.spans.push(span);
  }
  const oldest = frame.time_us - KEPT_US;
  live.spans = live.spans.filter((span) => span[3] >= oldest || !live.keys.delete(span[0] + ":" + span[1]));
  live.history.push(frame.tokens_per_s);
  if (live.history.length > HISTORY_FRAMES) live.history.shift();
  byId("tokens-per-s").textContent = Math.round(frame.tokens_per_s).toLocaleString("en");
  byId("running").textContent = frame.num_running;
  byId("waiting").textContent = frame.num_waiting;
  byId("kv").textContent = (100 * frame.kv_usage).toFixed(frame.kv_usage < 0.1 ? 1 : 0);
  byId("kv-bar").style.width = `${100 * frame.kv_usage}%`;
  byId("bubble").textContent = frame.bubble === null ? "\u2013" : Math.round(100 * frame.bubble);
  showLegend();
  drawHistory();
}

function showRecoveries({ count, num_carried_over, last }) {
  const note = byId("recoveries");
  note.hidden = !last;
  if (!last) return;
  const times = count === 1 ? "once" : `${count} times`;
  const text = `The engine was started again ${times}; requests that went on: ${num_carried_over}. ` +
    `Last, ${last.paused_s.toFixed(1)} s: ${last.died}`;
  if (note.textContent !== text) note.textContent = text;
}

function showLegend() {
  const cohorts = [...new Set(live.spans.map((span) => span[4]))].sort((a, b) => a - b);
  const shown = cohorts.join();
  if (byId("legend").dataset.cohorts === shown) return;
  byId("legend").dataset.cohorts = shown;
  byId("legend").replaceChildren(
    ...cohorts.map((cohort) => {
      const entry = document.createElement("span");
      const swatch = document.createElement("i");
      swatch.style.background = cohortColour(cohort);
      entry.append(swatch, `cohort ${cohort}`);
      return entry;
    }),
  );
}

function sized(canvas, height) {
  const ratio = window.devicePixelRatio || 1;
  const width = canvas.clientWidth;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return { context, width };
}

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name);
const laneTop = (stage) => stage * (LANE.height + LANE.gap);

export function drawLanes() {
  const stages = Math.max(live.stages, 1);
  const { context, width } = sized(byId("lanes"), laneTop(stages) - LANE.gap);
  const end = performance.now() * 1000 + live.offset - PLAYBACK_DELAY_US;
  const start = end - live.window * 1e6;
  const xOf = (time) => LANE.label + ((time - start) / (end - start)) * (width - LANE.label);
  const [ground, text, faint] = [colour("--ground"), colour("--text"), colour("--faint")];
  context.textBaseline = "middle";
  for (let stage = 0; stage < stages; stage++) {
    const top = laneTop(stage);
    context.fillStyle = ground;
    context.beginPath();
    context.roundRect(LANE.label, top, width - LANE.label, LANE.height, 6);
    context.fill();
    context.font = "600 13px system-ui, sans-serif";
    context.fillStyle = text;
    context.fillText(`stage ${stage}`, 0, top + LANE.height / 2 - 8);
    context.font = "12px system-ui, sans-serif";
    context.fillStyle = faint;
    context.fillText(`${Math.round(100 * (live.busy[stage] || 0))} % busy`, 0, top + LANE.height / 2 + 9);
  }
  const shown = live.spans.filter((span) => span[3] >= start && span[2] <= end);
  drawTrips(context, shown, xOf, (end - start) / (width - LANE.label));
  context.save();
  context.beginPath();
  context.rect(LANE.label, 0, width - LANE.label, laneTop(stages));
  context.clip();
  for (const span of shown) {
    const [stage, , from, to, cohort, rows, tokens] = span;
    const left = xOf(from);
    context.globalAlpha = tokens > rows ? 1 : 0.82;
    context.fillStyle = cohortColour(cohort);
    context.beginPath();
    context.roundRect(left, laneTop(stage) + 4, Math.max(xOf(to) - left - 0.5, 1), LANE.height - 8, 3);
    context.fill();
  }
  context.restore();
  showTip(shown, start, end, width);
  byId("lanes").dataset.spans = shown.length;
  requestAnimationFrame(drawLanes);
}

function drawTrips(context, shown, xOf, usPerPixel) {
  // A step's way from stage to stage, as long as single steps can be told apart.
  if (usPerPixel > 1500) return;
  const ends = new Map(shown.map((span) => [span[0] + ":" + span[1], span]));
  context.globalAlpha = 0.5;
  context.lineWidth = 1;
  for (const span of shown) {
    const before = ends.get(span[0] - 1 + ":" + span[1]);
    if (!before) continue;
    context.strokeStyle = cohortColour(span[4]);
    context.beginPath();
    context.moveTo(xOf(before[3]), laneTop(before[0]) + LANE.height - 4);
    context.lineTo(xOf(span[2]), laneTop(span[0]) + 4);
    context.stroke();
  }
  context.globalAlpha = 1;
}

function showTip(shown, start, end, width) {
  const tip = byId("tip");
  const at = live.hover;
  const time = at && start + ((at.x - LANE.label) / (width - LANE.label)) * (end - start);
  const isInLane = (stage) => at.y >= laneTop(stage) && at.y <= laneTop(stage) + LANE.height;
  const span = at && shown.find((s) => s[2] <= time && time <= s[3] && isInLane(s[0]));
  tip.hidden = !span;
  if (!span) return;
  const [, step, from, to, cohort, rows, tokens] = span;
  const duration = ((to - from) / 1000).toFixed(1);
  tip.textContent = `step ${step}, cohort ${cohort}\n${rows} rows, ${tokens} tokens, ${duration} ms`;
  tip.style.left = `${Math.min(at.x + 12, width - 190)}px`;
  tip.style.top = `${at.y + 12}px`;
}

export function drawHistory() {
  const { context, width } = sized(byId("history"), 72);
  const top = Math.max(10, ...live.history);
  const xOf = (index) => width - ((live.history.length - 1 - index) / (HISTORY_FRAMES - 1)) * width;
  const yOf = (value) => 70 - (value / top) * 62;
  context.beginPath();
  live.history.forEach((value, index) => context.lineTo(xOf(index), yOf(value)));
  context.strokeStyle = colour("--accent");
  context.lineWidth = 1.5;
  context.stroke();
  context.lineTo(width, 72);
  context.lineTo(xOf(0), 72);
  context.globalAlpha = 0.12;
  context.fillStyle = colour("--accent");
  context.fill();
  context.globalAlpha = 1;
  context.font = "11px system-ui, sans-serif";
  context.fillStyle = colour("--faint");
  context.fillText(Math.round(top).toLocaleString("en"), 0, 9);
}

byId("lanes").addEventListener("mousemove", (event) => (live.hover = { x: event.offsetX, y: event.offsetY }));
byId("lanes").addEventListener("mouseleave", () => (live.hover = null));
for (const button of document.querySelectorAll("[data-window]")) {
  button.addEventListener("click", () => {
    live.window = Number(button.dataset.window);
    for (const other of document.querySelectorAll("[data-window]")) {
      other.setAttribute("aria-pressed", String(other === button));
    }
  });
}
