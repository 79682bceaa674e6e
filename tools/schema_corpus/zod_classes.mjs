// Print the JSON schemas that zod makes of ordinary types. See make.py.
import { z } from "zod";
import * as z3 from "zod/v3";
import { zodToJsonSchema } from "zod-to-json-schema";

const write = (source, name, schema) => console.log(JSON.stringify({ source, name, schema }));

const types = (z) => {
  const Address = z.object({ street: z.string(), city: z.string(), zip: z.string().regex(/^\d{5}(-\d{4})?$/), country: z.string().length(2) });
  const Money = z.object({ amount: z.number().min(0).multipleOf(0.01), currency: z.enum(["EUR", "USD", "GBP"]) });
  const Item = z.object({ sku: z.string().min(3).max(20), quantity: z.number().int().positive(), price: Money, note: z.string().optional() });
  const Category = z.object({ name: z.string(), get children() { return z.array(Category); } });
  const Event = z.discriminatedUnion("type", [
    z.object({ type: z.literal("click"), x: z.number().int(), y: z.number().int() }),
    z.object({ type: z.literal("key"), key: z.string().max(8), modifiers: z.array(z.enum(["ctrl", "shift", "alt"])).default([]) }),
    z.object({ type: z.literal("scroll"), delta: z.number() }),
  ]);
  const made = {
    user: z.object({ id: z.string().uuid(), email: z.string().email(), name: z.string().min(1), age: z.number().int().min(0).max(150).optional(), role: z.enum(["admin", "user"]).default("user") }),
    strictUser: z.object({ id: z.number().int(), tags: z.array(z.string()).min(1).max(5) }).strict(),
    looseUser: z.object({ id: z.number().int() }).passthrough(),
    address: Address,
    order: z.object({ id: z.string(), customer: z.object({ name: z.string(), address: Address, billing: Address.nullable() }), items: z.array(Item).nonempty(), total: Money, placed: z.string().datetime() }),
    event: Event,
    events: z.array(Event),
    record: z.record(z.string(), z.number()),
    recordOfEnum: z.record(z.string().regex(/^[a-z]+$/), z.object({ on: z.boolean() })),
    tuple: z.tuple([z.string(), z.number(), z.boolean()]),
    tupleRest: z.tuple([z.string()]).rest(z.number()),
    union: z.union([z.string(), z.number(), z.null()]),
    intersection: z.intersection(z.object({ a: z.string() }), z.object({ b: z.number() })),
    extended: Address.extend({ kind: z.literal("home"), since: z.string().date() }),
    partial: Address.partial(),
    picked: Address.pick({ city: true, zip: true }),
    literals: z.object({ version: z.literal(2), mode: z.literal("fast"), beta: z.literal(true), none: z.null() }),
    nested: z.object({ matrix: z.array(z.array(z.number()).length(3)).length(3) }),
    url: z.object({ url: z.string().url(), method: z.enum(["GET", "POST"]), headers: z.record(z.string(), z.string()).optional(), body: z.unknown().optional() }),
    step: z.object({ steps: z.array(z.object({ explanation: z.string(), output: z.string() })), final_answer: z.string() }),
    calendar: z.object({ name: z.string(), date: z.string(), participants: z.array(z.string()) }),
    sentiment: z.object({ label: z.enum(["positive", "negative", "neutral"]), score: z.number().gte(0).lte(1) }),
    exclusive: z.object({ ratio: z.number().gt(0).lt(1), port: z.number().int().gte(1).lte(65535) }),
    any: z.object({ data: z.any() }),
    set: z.object({ startsWith: z.string().startsWith("sk-"), endsWith: z.string().endsWith(".txt"), includes: z.string().includes("@") }),
    ip: z.object({ code: z.string().regex(/^[A-Z]{2}\d{4}$/), slug: z.string().regex(/^[a-z0-9]+(?:-[a-z0-9]+)*$/) }),
    weather: z.object({ location: z.string().describe("City"), unit: z.enum(["c", "f"]).optional() }),
    search: z.object({ query: z.string().min(1), limit: z.number().int().min(1).max(100).default(10), filters: z.object({ from: z.string().optional(), to: z.string().optional() }).optional() }),
  };
  return [made, Category];
};

const [made, Category] = types(z);
for (const [name, type] of [...Object.entries(made), ["category", Category]]) {
  write("zod", `${name} draft-2020-12`, z.toJSONSchema(type));
  write("zod", `${name} draft-7 input`, z.toJSONSchema(type, { target: "draft-7", io: "input" }));
}
const [made3] = types(z3.z);
for (const [name, type] of Object.entries(made3)) write("zod-to-json-schema", name, zodToJsonSchema(type));
