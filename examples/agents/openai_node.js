// A refund agent on the OpenAI library for Node, behind the sidecar.
//
// npm install && node openai_node.js ada bob
import OpenAI from "openai";
import { randomUUID } from "node:crypto";

const PROXY = process.env.PROXY_URL ?? "http://127.0.0.1:8080";
const MODEL = process.env.MODEL ?? "smollm2-135m";
const KEY = process.env.API_KEY ?? "none";
const ORDERS = { ada: "A7", bob: "B2", eve: "C5" };
const MOST_TURNS = 6;

const client = new OpenAI({ baseURL: `${PROXY}/v1`, apiKey: KEY });

const text = { type: "string" };
const tools = [
  ["find_order", "The id of a customer's last order.", { customer: text }],
  ["refund", "Refund an order.", { order: text }],
].map(([name, description, properties]) => ({
  type: "function",
  function: { name, description, parameters: { type: "object", properties, required: Object.keys(properties) } },
}));

async function work(customer) {
  const session = `ticket-${randomUUID()}`;
  const headers = { "x-sidecar-session": session, "x-sidecar-task": `refund-${customer}` };
  const refunded = [];
  const run = {
    find_order: ({ customer }) => ORDERS[customer] ?? "error: unknown customer",
    refund: ({ order }) => {
      refunded.push(order);
      return `refunded ${order}`;
    },
  };
  const messages = [
    { role: "system", content: "You refund orders. Find the customer's order, then refund it." },
    { role: "user", content: `I am ${customer}. Please refund my last order.` },
  ];
  let said = "gave up";
  for (let turn = 0; turn < MOST_TURNS; turn++) {
    const reply = await client.chat.completions.create({ model: MODEL, messages, tools }, { headers });
    const { message } = reply.choices[0];
    if (!message.tool_calls?.length) {
      said = message.content;
      break;
    }
    messages.push(message);
    for (const call of message.tool_calls) {
      const tool = run[call.function.name];
      const content = tool ? tool(JSON.parse(call.function.arguments)) : "error: no such tool";
      messages.push({ role: "tool", tool_call_id: call.id, content });
    }
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
