// Vercel's AI SDK with its provider for servers like OpenAI's: tools in steps, streams, objects. Run with /v1's address.
import assert from "node:assert/strict";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, Output, stepCountIs, streamObject, streamText, tool } from "ai";
import { z } from "zod";

const [baseURL] = process.argv.slice(2);
const provider = createOpenAICompatible({
  name: "raypp",
  baseURL,
  apiKey: "none",
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const common = {
  model: provider.chatModel("tiny"),
  temperature: 0,
  maxOutputTokens: 80,
  maxRetries: 0,
  providerOptions: { raypp: { chat_template_kwargs: { enable_thinking: false } } },
};
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

// and one call in a step, since the smallest of models does not come to an end.
const single = { raypp: { ...common.providerOptions.raypp, parallel_tool_calls: false } };
const steps = { providerOptions: single, tools, stopWhen: stepCountIs(3), prepareStep };
const messages = [{ role: "user", content: "How will the weather be?" }];
const looped = await generateText({ ...common, ...steps, system: "You help.", messages });
assert.equal(looped.steps.length, 3);
assert.equal(looped.steps[0].toolResults.length, 1);
messages.push(...looped.response.messages, { role: "user", content: "And tomorrow?" });

const streamed = streamText({ ...common, ...steps, messages, onError: ({ error }) => { throw error; } });
const parts = [];
for await (const part of streamed.fullStream) parts.push(part.type);
for (const kind of ["tool-input-delta", "tool-call", "tool-result", "finish"]) assert(parts.includes(kind), kind);
assert((await streamed.totalUsage).outputTokens > 0);
messages.push(...(await streamed.response).messages, { role: "user", content: "Thanks." });
await generateText({ ...common, messages });

trip.parse((await generateObject({ ...common, schema: trip, prompt: "Plan a trip." })).object);
const object = streamObject({ ...common, schema: trip, prompt: "Plan a trip.", onError: ({ error }) => { throw error; } });
for await (const part of object.partialObjectStream) assert(part);
trip.parse(await object.object);
const output = await generateText({ ...common, output: Output.object({ schema: trip }), prompt: "Plan a trip." });
trip.parse(output.output);

const text = streamText({ ...common, prompt: "hello", onError: ({ error }) => { throw error; } });
let length = 0;
for await (const part of text.textStream) length += part.length;
assert(length > 0);
const plain = await generateText({ ...common, model: provider.completionModel("tiny"), prompt: "def", providerOptions: {} });
assert(plain.text.length > 0);
await assert.rejects(generateText({ ...common, topP: 7, prompt: "hello" }), { name: "AI_APICallError", statusCode: 400 });
