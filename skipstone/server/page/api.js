// Requests to this server. Knows nothing of the page.

export let key = "";
export function setKey(value) { key = value; }

function headers(more) {
  return { ...(key ? { authorization: `Bearer ${key}` } : {}), ...more };
}

/** An answer that is no success; `status` is the HTTP status, or 0 when there was no answer. */
export class ApiError extends Error {
  constructor(message, status) { super(message); this.status = status; }
}

async function send(path, body, options = {}) {
  const request = { headers: headers(options.headers), signal: options.signal };
  if (body !== undefined) {
    request.method = "POST";
    request.headers["content-type"] = "application/json";
    request.body = JSON.stringify(body);
  }
  let answer;
  try {
    answer = await fetch(path.slice(1), request); // relative: the page may lie below a proxy's path
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("the server cannot be reached", 0);
  }
  if (!answer.ok) {
    const text = await answer.text();
    let message = text;
    try { message = JSON.parse(text).error.message; } catch { /* a proxy's page */ }
    throw new ApiError(message || `HTTP ${answer.status}`, answer.status);
  }
  return answer;
}

export async function call(path, body, signal) {
  return (await send(path, body, { signal })).json();
}

/** The events of a stream, decoded; comments are passed over. */
export async function* events(path, body, signal) {
  const answer = await send(path, body, { signal, headers: { accept: "text/event-stream" } });
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "", ended = false;
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) { ended = true; return; }
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        if (!part.startsWith("data: ")) continue;
        const data = part.slice(6);
        if (data === "[DONE]") continue;
        const event = JSON.parse(data);
        if (event.error) throw new ApiError(event.error.message, 200);
        yield event;
      }
    }
  } finally {
    if (!ended) reader.cancel().catch(() => {});
  }
}
