// The chat route, as the page calls it. In: messages and sampling fields. Out: an async iterator of the stream's chunks.

import { keyHeaders } from "./key.js";

/** What the server, or the way to it, has answered instead; `param` names the field at fault where there is one. */
export class ChatError extends Error {
  constructor(message, param = null) {
    super(message);
    this.param = param;
  }
}

/** The chunks of one answer, parsed. Throws a ChatError, or an AbortError once `signal` is aborted. */
export async function* chatChunks(request, signal) {
  const response = await post({ ...request, stream: true, stream_options: { include_usage: true } }, signal);
  if (!response.ok) throw await errorOf(response);
  for await (const data of events(response.body, signal)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ChatError(chunk.error.message, chunk.error.param);
    yield chunk;
  }
  throw new ChatError("the server closed the connection before the answer was complete");
}

async function post(body, signal) {
  const headers = { "Content-Type": "application/json", ...keyHeaders() };
  try {
    return await fetch("v1/chat/completions", { method: "POST", headers, body: JSON.stringify(body), signal });
  } catch (error) {
    throw asChatError(error, signal);
  }
}

async function errorOf(response) {
  try {
    const { message, param } = (await response.json()).error;
    return new ChatError(message, param);
  } catch {
    return new ChatError(`the server answered ${response.status} ${response.statusText}`);
  }
}

/** The data of each server-sent event; the server sends one data line per event. */
async function* events(body, signal) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let pending = "";
  try {
    while (true) {
      const { done, value } = await reader.read();
      if (done) return;
      const parts = (pending + value).split("\n\n");
      pending = parts.pop();
      for (const part of parts) if (part.startsWith("data: ")) yield part.slice("data: ".length);
    }
  } catch (error) {
    throw asChatError(error, signal);
  } finally {
    reader.cancel().catch(() => {}); // of a stream that has failed there is nothing to cancel
  }
}

function asChatError(error, signal) {
  return signal.aborted ? error : new ChatError("the connection to the server is lost");
}
