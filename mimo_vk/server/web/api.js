// Requests to the server that this page came from. The key is kept here, in memory, and nowhere else.

let key = "";
let askForKey = async () => false;

/** Use a key from now on. */
export function setKey(text) {
  key = text;
}

/** ``ask(message)`` is called when the server wants a key; it resolves to whether one was given. */
export function onKeyNeeded(ask) {
  askForKey = ask;
}

/** The server's refusal, in its own words. */
export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** An answer to a GET, or to a POST of ``body``. Refused; TypeError where no server answers; AbortError. */
export async function request(path, { body, signal } = {}) {
  for (;;) {
    const response = await send(path, body, signal);
    if (response.ok) return response;
    const refused = await refusal(response);
    if (refused.status !== 401 || !(await askForKey(refused.message))) throw refused;
  }
}

function send(path, body, signal) {
  const headers = {};
  if (key) headers.authorization = `Bearer ${String.fromCharCode(...new TextEncoder().encode(key))}`; // as UTF-8
  if (body === undefined) return fetch(path, { headers, signal });
  headers["content-type"] = "application/json";
  return fetch(path, { method: "POST", headers, body: JSON.stringify(body), signal });
}

async function refusal(response) {
  try {
    return new Refused(response.status, (await response.json()).error.message);
  } catch {
    return new Refused(response.status, `${response.status} ${response.statusText}`);
  }
}

/** The objects of an event stream. Refused where the stream ends in an error, or without its end. */
export async function* events(path, body, signal) {
  const response = await request(path, { body: { ...body, stream: true }, signal });
  for await (const line of lines(response.body)) {
    if (line === "data: [DONE]") return;
    if (!line.startsWith("data: ")) continue; // a comment keeps the connection alive
    const event = JSON.parse(line.slice(6));
    if (event.error) throw new Refused(500, event.error.message);
    yield event;
  }
  throw new Refused(500, "the answer broke off");
}

async function* lines(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n");
    rest = parts.pop();
    yield* parts;
  }
}

/** What to tell a person of an error. */
export function explained(error) {
  if (error instanceof Refused) return error.message;
  if (error instanceof TypeError) return "The server can't be reached.";
  return String(error);
}
