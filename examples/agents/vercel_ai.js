// A refund agent on the AI SDK of Vercel, behind the sidecar.
//
// npm install && node vercel_ai.js ada bob
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, stepCountIs, tool } from "ai";
import { randomUUID } from "node:crypto";
import { z } from "zod";

const PROXY = process.env.PROXY_URL ?? "http://127.0.0.1:8080";
const MODEL = process.env.MODEL ?? "smollm2-135m";
const KEY = process.env.API_KEY ?? "none";
const ORDERS = { ada: "A7", bob: "B2", eve: "C5" };

const sidecar = createOpenAICompatible({ name: "sidecar", baseURL: `${PROXY}/v1`, apiKey: KEY });

async function work(customer) {
  const session = `ticket-${randomUUID()}`;
  const refunded = [];
  const tools = {
    find_order: tool({
      description: "The id of a customer's last order.",
      inputSchema: z.object({ customer: z.string() }),
      execute: async ({ customer }) => ORDERS[customer] ?? "error: unknown customer",
    }),
    refund: tool({
      description: "Refund an order.",
      inputSchema: z.object({ order: z.string() }),
      execute: async ({ order }) => {
        refunded.push(order);
        return `refunded ${order}`;
      },
    }),
  };
  let said;
  try {
    const result = await generateText({
      model: sidecar(MODEL),
      system: "You refund orders. Find the customer's order, then refund it.",
      prompt: `I am ${customer}. Please refund my last order.`,
      tools,
      stopWhen: stepCountIs(6),
      headers: { "x-sidecar-session": session, "x-sidecar-task": `refund-${customer}` },
    });
    said = result.text || "gave up";
  } catch (error) {
    said = String(error); // the agent's own failures
  }
  await report(session, refunded.join() === ORDERS[customer]);
  return said;
}

async function report(session, success) {
  const reply = await fetch(`${PROXY}/sidecar/v1/outcomes`, {
    method: "POST",
    headers: { "content-type": "application/json", authorization: `Bearer ${KEY}` },
    body: JSON.stringify({ session_id: session, success }),
  });
  if (!reply.ok) throw new Error(await reply.text());
}

for (const customer of process.argv.slice(2)) console.log(await work(customer));
