// Vercel's AI SDK with OpenAI's own provider, which asks for responses: tools in steps, streams, objects. Run with /v1's address.
import assert from "node:assert/strict";
import { createOpenAI } from "@ai-sdk/openai";
import { generateObject, generateText, stepCountIs, streamObject, streamText, tool } from "ai";
import { z } from "zod";

const [baseURL] = process.argv.slice(2);
const provider = createOpenAI({ baseURL, apiKey: "none" });
const common = {
  model: provider("tiny"),
  temperature: 0,
  maxOutputTokens: 80,
  maxRetries: 0,
  // Nothing is kept: the SDK then sends whole items, and not their names.
  providerOptions: { openai: { store: false, parallelToolCalls: false } },
};
const onError = ({ error }) => { throw error; };
const trip = z.object({ title: z.string().max(12), kind: z.enum(["walk", "ride"]) });
const tools = {
  getWeather: tool({
    description: "Say what the weather will be.",
    inputSchema: z.object({ city: z.enum(["Wien", "Bern"]), days: z.number().int().min(1).max(7) }),
    execute: async ({ city }) => ({ sky: `rain in ${city}` }),
  }),
};
// A tiny model calls only what it must: the first steps have to call, the last one may not.
const prepareStep = ({ stepNumber }) => ({
  toolChoice: [{ type: "tool", toolName: "getWeather" }, "required", "none"][stepNumber],
});
const steps = { tools, stopWhen: stepCountIs(3), prepareStep };

const messages = [{ role: "user", content: "How will the weather be?" }];
const looped = await generateText({ ...common, ...steps, system: "You help.", messages });
assert.equal(looped.steps.length, 3);
assert.equal(looped.steps[0].toolResults.length, 1);
messages.push(...looped.response.messages, { role: "user", content: "And tomorrow?" });

const streamed = streamText({ ...common, ...steps, messages, onError });
const parts = [];
for await (const part of streamed.fullStream) parts.push(part.type);
for (const kind of ["tool-input-delta", "tool-call", "tool-result", "finish"]) assert(parts.includes(kind), kind);
assert((await streamed.totalUsage).outputTokens > 0);
messages.push(...(await streamed.response).messages, { role: "user", content: "Thanks." });
await generateText({ ...common, messages });

trip.parse((await generateObject({ ...common, schema: trip, prompt: "Plan a trip." })).object);
const object = streamObject({ ...common, schema: trip, prompt: "Plan a trip.", onError });
for await (const part of object.partialObjectStream) assert(part);
trip.parse(await object.object);

const text = streamText({ ...common, prompt: "hello", onError });
let length = 0;
for await (const part of text.textStream) length += part.length;
assert(length > 0);
await assert.rejects(generateText({ ...common, topP: 7, prompt: "hello" }), { name: "AI_APICallError", statusCode: 400 });
