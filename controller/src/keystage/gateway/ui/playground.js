// The playground: sends one request to a function through the gateway, and shows tokens as they come.
import { setHidden, setText } from "./dom.js";
import { bytes, count, seconds } from "./format.js";
import { eventsOf } from "./sse.js";

const MOST_CHARACTERS = 200_000; // of an answer that are shown

export class Playground {
  #abort = null;
  #pending = "";
  #isDue = false;

  /**
   * @param {HTMLFormElement} form
   * @param {{out: Element, facts: Element, stop: HTMLButtonElement, send: HTMLButtonElement}} parts
   * @param {(path: string) => URL} address of a path of the gateway
   * @param {() => number} nowS on the gateway's clock
   * @param {(request: object) => void} onRequest
   * @param {(text: string) => void} announce
   */
  constructor(form, parts, address, nowS, onRequest, announce) {
    this.form = form;
    this.parts = parts;
    this.address = address;
    this.nowS = nowS;
    this.onRequest = onRequest;
    this.announce = announce;
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#send();
    });
    form.elements.prompt.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
    });
    parts.stop.addEventListener("click", () => this.#abort?.abort());
    form.elements.way.addEventListener("change", () => this.#fit());
    this.#fit();
  }

  #fit() {
    const isPlain = this.form.elements.way.value === "plain";
    for (const field of this.form.querySelectorAll(".of-text")) setHidden(field, isPlain);
  }

  #request() {
    const fields = this.form.elements;
    const name = fields.function.value;
    const prompt = fields.prompt.value;
    const base = `function/${encodeURIComponent(name)}`;
    if (fields.way.value === "plain") return { path: base, body: prompt, type: "application/octet-stream" };
    const common = {
      model: name,
      max_tokens: Number(fields.max_tokens.value),
      temperature: Number(fields.temperature.value),
      stream: true,
      stream_options: { include_usage: true },
    };
    const isChat = fields.way.value === "chat";
    const body = isChat ? { ...common, messages: [{ role: "user", content: prompt }] } : { ...common, prompt };
    const path = `${base}/v1/${isChat ? "chat/completions" : "completions"}`;
    return { path, body: JSON.stringify(body), type: "application/json" };
  }

  async #send() {
    if (this.#abort !== null) return;
    const { out, facts, stop, send } = this.parts;
    const name = this.form.elements.function.value;
    if (!name) {
      setText(facts, "There is no function to send to yet.");
      return;
    }
    const { path, body, type } = this.#request();
    this.#abort = new AbortController();
    send.disabled = true;
    stop.disabled = false;
    out.textContent = "";
    setText(facts, "Sent; waiting for the first token.");
    const beganMs = performance.now();
    const beganS = this.nowS();
    const sinceS = () => (performance.now() - beganMs) / 1000;
    const run = { firstS: null, tokens: 0, ended: "", id: "", trace: "", status: "no answer", timing: "" };
    try {
      const answer = await fetch(this.address(path), {
        method: "POST",
        headers: { "Content-Type": type },
        body,
        signal: this.#abort.signal,
      });
      run.id = answer.headers.get("x-call-id") ?? "";
      run.timing = answer.headers.get("server-timing") ?? "";
      run.trace = (answer.headers.get("traceresponse") ?? "").split("-")[1] ?? "";
      run.status = String(answer.status);
      if (!answer.ok) {
        run.ended = `refused with status ${answer.status}: ${refusal(await answer.text())}`;
      } else if ((answer.headers.get("content-type") ?? "").startsWith("text/event-stream")) {
        await this.#stream(answer.body, run, sinceS);
      } else {
        const kind = (answer.headers.get("content-type") ?? "").split(";")[0];
        const body = await answer.blob();
        const isText = kind === "" || /^text\/|json|xml|x-www-form-urlencoded/.test(kind);
        this.#show(isText ? (await body.text()).slice(0, MOST_CHARACTERS) : `(${kind}, ${bytes(body.size)})`);
        run.ended = "answered whole";
      }
    } catch (error) {
      run.ended = error.name === "AbortError" ? "stopped" : "broke off: the gateway cannot be reached, or ended the answer";
    }
    const lastedS = sinceS();
    this.#abort = null;
    send.disabled = false;
    stop.disabled = true;
    const said = summary(run, lastedS);
    const names = [run.id && `X-Call-Id ${run.id}`, run.trace && `trace ${run.trace}`].filter(Boolean);
    setText(facts, [said, ...names].join(" "));
    this.announce(said);
    if (run.id) this.onRequest({ ...run, pipeline: name, beganS, toS: beganS + lastedS });
  }

  async #stream(body, run, sinceS) {
    for await (const { data } of eventsOf(body)) {
      if (data === "[DONE]") {
        run.ended ||= "complete";
        continue;
      }
      const event = JSON.parse(data);
      if (event.error) {
        run.ended = `broke off: ${event.error.message ?? JSON.stringify(event.error)}`;
        continue;
      }
      if (event.usage) run.tokens = event.usage.completion_tokens;
      for (const choice of event.choices ?? []) {
        const text = choice.text ?? choice.delta?.content ?? "";
        if (text) {
          run.firstS ??= sinceS();
          run.pieces = (run.pieces ?? 0) + 1;
          this.#show(text);
        }
        if (choice.finish_reason) run.ended = `complete (${choice.finish_reason})`;
      }
    }
    run.ended ||= "broke off before its end";
  }

  /** Adds text; at most once a frame, however fast tokens come. */
  #show(text) {
    this.#pending += text;
    if (this.#isDue) return;
    this.#isDue = true;
    const add = () => {
      if (!this.#isDue) return;
      this.#isDue = false;
      const { out } = this.parts;
      const room = MOST_CHARACTERS - out.textContent.length;
      out.append(this.#pending.slice(0, Math.max(0, room)));
      this.#pending = "";
      out.scrollTop = out.scrollHeight;
    };
    requestAnimationFrame(add);
    setTimeout(add, 250); // a page that is not seen has no frames
  }
}

function refusal(text) {
  try {
    const { error } = JSON.parse(text);
    return error.message ?? text;
  } catch {
    return text.trim().slice(0, 500);
  }
}

function summary({ ended, firstS, tokens, pieces }, lastedS) {
  const parts = [`${ended} after ${seconds(lastedS)}`];
  if (firstS !== null) parts.push(`first token after ${seconds(firstS)}`);
  const made = tokens || pieces || 0;
  if (made) parts.push(`${made} tokens`);
  if (made > 1 && firstS !== null) {
    const perTokenS = (lastedS - firstS) / (made - 1);
    parts.push(`${seconds(perTokenS)} each (${count(1 / perTokenS)}/s)`);
  }
  const text = parts.join(", ");
  return `${text[0].toUpperCase()}${text.slice(1)}.`;
}
