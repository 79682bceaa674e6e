// Claude Code, which asks for messages: a turn that offers a tool, and a second one behind it. Run with /v1's address.
import assert from "node:assert/strict";
import { spawnSync } from "node:child_process";
import { existsSync } from "node:fs";
import { join } from "node:path";

const [baseURL] = process.argv.slice(2);
const claude = join(import.meta.dirname, "node_modules", "@anthropic-ai", "claude-code", "bin", "claude.exe");
assert(existsSync(claude));
const env = {
  ...process.env,
  ANTHROPIC_BASE_URL: baseURL.replace(/\/v1$/, ""),
  ANTHROPIC_API_KEY: "none",
  CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC: "1",
  CLAUDE_CODE_MAX_OUTPUT_TOKENS: "200",
};
// Its own instructions and all of its tools are longer than the context of a tiny model.
const common = ["--model", "tiny", "--tools", "Read", "--system-prompt", "You help.", "--output-format", "json"];
for (const args of [["-p", "hello"], ["--continue", "-p", "and again"]]) {
  const options = { cwd: import.meta.dirname, encoding: "utf8", timeout: 120_000, env, input: "" };
  const done = spawnSync(claude, [...args, ...common], options);
  assert.equal(done.status, 0, done.stdout + done.stderr);
  const result = JSON.parse(done.stdout);
  assert(!result.is_error && result.usage.output_tokens > 0, done.stdout);
}
