// compatcanary, which checks chats, tools, forms and responses. Run with /v1's address.
import assert from "node:assert/strict";
import { spawnSync } from "node:child_process";
import { join } from "node:path";

const [baseURL] = process.argv.slice(2);
const cli = join(import.meta.dirname, "node_modules", "compatcanary", "src", "cli.js");
const args = [cli, "scan", "--base-url", baseURL, "--model", "tiny-vl", "--profile", "modern"];
const options = { encoding: "utf8", timeout: 120_000 };
let failed = [];
// A toy model may write until the context ends in place of a call: what fails at every try is a fault of the server.
for (let numTries = 0; numTries < 5; numTries++) {
  const { stdout, stderr } = spawnSync(process.execPath, [...args, "--format", "json", "--timeout", "60"], options);
  assert(stdout.startsWith("{"), stderr);
  const found = JSON.parse(stdout).results.filter(({ status }) => status !== "pass");
  failed = numTries ? failed.filter(({ id }) => found.some((one) => one.id === id)) : found;
  if (!failed.length) break;
}
assert.deepEqual(failed, []);
