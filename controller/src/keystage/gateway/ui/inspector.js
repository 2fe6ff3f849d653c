// The request inspector: a request by its id, or by when it was, and what each stage did then.
import { isFirstReplica, likelyCauses } from "./causes.js";
import { make, reconcile, setHidden, setText } from "./dom.js";
import { clock, count, plural, seconds } from "./format.js";
import { WINDOW_S } from "./history.js";

const MOST = 20; // requests kept
const ROWS = 8;

export class Inspector {
  #requests = [];

  /**
   * @param {HTMLFormElement} form
   * @param {Element} out
   * @param {Element} list requests sent from this page
   * @param {(pipeline: string) => {track: object, stages: object[]} | null} known
   * @param {(beganS: number, toS: number) => object[]} decisions
   */
  constructor(form, out, list, known, decisions) {
    this.form = form;
    this.out = out;
    this.list = list;
    this.known = known;
    this.decisions = decisions;
    this.body = out.querySelector("tbody");
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#look();
    });
    list.addEventListener("click", (event) => {
      const button = event.target.closest("button");
      const request = this.#requests.find(({ id }) => id === button?.dataset.id);
      if (!request) return;
      this.form.elements.id.value = request.id;
      this.show(request);
    });
  }

  /** Keeps a request that was sent from this page, the newest first. */
  add(request) {
    this.#requests = [request, ...this.#requests].slice(0, MOST);
    reconcile(
      this.list,
      this.#requests,
      ({ id }) => id,
      ({ id, trace, pipeline, beganS, toS, firstS, status }) => {
        const button = make("button", { type: "button", class: "link", "data-id": id }, id);
        const first = firstS === null ? "" : `, first token after ${seconds(firstS)}`;
        const text = ` ${clock(beganS)} ${pipeline}: ${status}, ${seconds(toS - beganS)}${first}`;
        return make("li", {}, button, trace ? `${text}, trace ${trace}` : text);
      },
    );
  }

  #look() {
    const fields = this.form.elements;
    const id = fields.id.value.trim();
    const request = id && this.#requests.find((one) => one.id === id || one.trace === id);
    if (request) {
      this.show(request);
      return;
    }
    const beganS = startOf(fields.start.value.trim());
    const lastedS = Number(fields.duration.value);
    if (beganS === null || !(lastedS > 0)) {
      const why = id ? `No request ${id} was sent from this page. ` : "";
      this.#say(`${why}Give its X-Start-Time (of the answer's headers) and how long it took.`);
      return;
    }
    this.show({ id: id || "the request", pipeline: fields.pipeline.value, beganS, toS: beganS + lastedS });
  }

  /** Says where a request may have lost its time. */
  show(request) {
    const { id, pipeline, beganS, toS, firstS = null, timing = "", trace = "" } = request;
    const known = this.known(pipeline);
    const names = new Set((known?.stages ?? []).map((stage) => stage.function).concat(pipeline));
    const decided = this.decisions(-Infinity, toS).filter((decision) => names.has(decision.function));
    const causes = known ? likelyCauses(known.track, known.stages, beganS, toS, decided) : [];
    if (!causes.length) {
      this.#say(
        `Nothing is kept of ${pipeline} at ${clock(beganS)}: this page remembers the ${WINDOW_S / 60} minutes since it ` +
          "was opened. A trace has more.",
      );
      return;
    }
    const [likeliest] = causes;
    const took = `${id} took ${seconds(toS - beganS)} from ${clock(beganS)}`;
    const first = firstS === null ? "" : `, its first token came after ${seconds(firstS)}`;
    const told = (timing ? ` The answer says: ${timing}.` : "") + (trace ? ` Its trace is ${trace}.` : "");
    const verdict = likeliest.score > 0 ? `Likeliest: stage ${likeliest.stage}, ${likeliest.words}.` : "No stage made it wait.";
    this.#say(`${took}${first}.${told} ${verdict}`);
    setHidden(this.out.querySelector(".causes"), false);
    reconcile(
      this.body,
      causes.slice(0, ROWS),
      (cause) => cause.function,
      () => make("tr", {}, make("th", { scope: "row" }), ...Array.from({ length: 5 }, () => make("td"))),
      (row, cause) => {
        const cells = [
          `${cause.stage} ${cause.function}`,
          seconds(cause.wait_s),
          count(cause.queue),
          String(cause.ready),
          String(cause.starting),
          cause.words,
        ];
        cells.forEach((cell, i) => setText(row.children[i], cell));
      },
    );
    // How the likeliest stage came to the number it had: its last change before, and if that ended zero the one to zero.
    const isBefore = ({ at_s: atS }) => atS < beganS;
    const changes = decided.filter(
      (one) => isBefore(one) && one.after !== undefined && one.function === likeliest.function && likeliest.score > 0,
    );
    const meanwhile = decided.filter((decision) => !isBefore(decision));
    const before = changes.slice(changes.length && isFirstReplica(changes.at(-1)) ? -2 : -1);
    const list = this.out.querySelector(".meanwhile");
    reconcile(list, [...before, ...meanwhile], ({ key }) => key, (decision) =>
      make("li", {}, `${clock(decision.at_s)} ${decision.text}`),
    );
    const lastOnes = before.length > 1 ? plural(before.length, "decision") : "decision";
    const last = before.length ? `The last ${lastOnes} on stage ${likeliest.stage} before it, and ` : "";
    setText(this.out.querySelector(".meanwhile-title"), `${last}${plural(meanwhile.length, "decision")} meanwhile`);
  }

  #say(text) {
    setHidden(this.out, false);
    setHidden(this.out.querySelector(".causes"), true);
    setText(this.out.querySelector(".verdict"), text);
  }
}

/** Unix seconds of an X-Start-Time (nanoseconds), of Unix seconds, or of a date. */
export function startOf(text) {
  if (/^\d{18,20}$/.test(text)) return Number(BigInt(text) / 1_000_000n) / 1000;
  if (/^\d{9,11}(\.\d+)?$/.test(text)) return Number(text);
  const ms = Date.parse(text);
  return Number.isFinite(ms) ? ms / 1000 : null;
}
