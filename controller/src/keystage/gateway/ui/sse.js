// Server-sent events out of a fetched body: what EventSource does, but for POST too, with status and words of a refusal.

/**
 * @param {ReadableStream<Uint8Array>} body
 * @param {() => void} heard called for everything that comes, comments too
 * @yields {{event: string, data: string}}
 */
export async function* eventsOf(body, heard = () => {}) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = []; // pieces of a line whose end is not there yet: one may be megabytes
  let event = "";
  let data = [];
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return; // an event that is not ended by a blank line is none
      heard();
      const lines = value.split("\n");
      if (lines.length > 1) {
        lines[0] = rest.join("") + lines[0];
        rest = [];
      }
      rest.push(lines.pop());
      for (const raw of lines) {
        const line = raw.endsWith("\r") ? raw.slice(0, -1) : raw;
        if (line === "") {
          if (data.length) yield { event: event || "message", data: data.join("\n") };
          event = "";
          data = [];
          continue;
        }
        const colon = line.indexOf(":");
        if (colon === 0) continue;
        const field = colon < 0 ? line : line.slice(0, colon);
        let content = colon < 0 ? "" : line.slice(colon + 1);
        if (content.startsWith(" ")) content = content.slice(1);
        if (field === "event") event = content;
        else if (field === "data") data.push(content);
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
