// OpenAI's Codex CLI, which asks for responses: a turn, and a second one that sends the first again. Run with /v1's address.
import assert from "node:assert/strict";
import { spawnSync } from "node:child_process";
import { mkdirSync, writeFileSync } from "node:fs";
import { createRequire } from "node:module";
import { join } from "node:path";

const [baseURL] = process.argv.slice(2);
const home = join(import.meta.dirname, "home");
mkdirSync(home, { recursive: true });
writeFileSync(join(home, "instructions.md"), "You help with programs.");
// A server of tools: what Codex sends of it is a namespace.
const tool = { name: "look", description: "Look for a word.", inputSchema: { type: "object", properties: { word: { type: "string" } } } };
const initialized = { protocolVersion: "2025-06-18", capabilities: { tools: {} }, serverInfo: { name: "words", version: "1" } };
writeFileSync(
  join(home, "words.mjs"),
  `import { createInterface } from "node:readline";
const results = ${JSON.stringify({ initialize: initialized, "tools/list": { tools: [tool] } })};
createInterface({ input: process.stdin }).on("line", (line) => {
  const { id, method } = JSON.parse(line);
  if (id !== undefined) console.log(JSON.stringify({ jsonrpc: "2.0", id, result: results[method] ?? {} }));
});`,
);
// Its own instructions and agents are longer than the context of a tiny model.
writeFileSync(
  join(home, "config.toml"),
  `model = "tiny"
model_provider = "here"
model_instructions_file = "${join(home, "instructions.md")}"
include_environment_context = false
include_permissions_instructions = false
[features]
goals = false
multi_agent = false
[skills.bundled]
enabled = false
[mcp_servers.words]
command = "${process.execPath}"
args = ["${join(home, "words.mjs")}"]
[model_providers.here]
name = "here"
base_url = "${baseURL}"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0
`,
);
const codex = createRequire(import.meta.url).resolve("@openai/codex/bin/codex.js");
const options = { cwd: home, encoding: "utf8", timeout: 120_000, env: { ...process.env, CODEX_HOME: home }, input: "" };
for (const args of [["hello"], ["resume", "--last", "and again"]]) {
  const done = spawnSync(process.execPath, [codex, "exec", "--skip-git-repo-check", "--json", ...args], options);
  if (done.stdout.includes("max_output_tokens")) break; // a tiny model may not come to an end: Codex cannot limit it
  const events = done.stdout.split("\n").filter(Boolean).map((line) => JSON.parse(line).type);
  assert.equal(done.status, 0, done.stdout + done.stderr);
  assert(events.includes("item.completed") && events.at(-1) === "turn.completed", done.stdout);
}
