// One stage: its numbers, its last five minutes, its replicas, and why it has as many as it has.
import { Chart } from "./chart.js";
import { make, reconcile, setAttribute, setClass, setHidden, setText } from "./dom.js";
import { count, NONE, ordinal, percent, plural, rate, seconds } from "./format.js";
import { WINDOW_S } from "./history.js";

const FACTS = [
  ["waiting", (stage) => count(stage.queue)],
  ["in service", (stage) => count(stage.in_flight)],
  ["arrivals", (stage) => rate(stage.arrival_rps)],
  ["CV of arrivals", (stage) => count(stage.arrival_cv)],
  ["service time", (stage) => seconds(stage.service_s)],
  ["wait", (stage) => seconds(stage.wait_s)],
  ["its share of the objective", (stage) => seconds(stage.share_s)],
  ["utilisation", (stage) => percent(stage.utilisation_ratio)],
  ["place in the ranking", (stage) => (Number.isFinite(stage.rank) ? ordinal(stage.rank + 1) : NONE)],
];

/** Labels and values, and whether a value is beyond its bound, as a description list that is changed in place. */
export function updateFacts(list, facts) {
  reconcile(
    list,
    facts,
    ([label]) => label,
    ([label]) => make("div", {}, make("dt", {}, label), make("dd")),
    (node, [, value, isBad = false]) => {
      setText(node.lastElementChild, value);
      setClass(node, "is-bad", isBad);
    },
  );
}

/** What a stage without a ready replica does to requests; empty for one that has some, or shall have none. */
function standing({ ready = 0, starting = 0, desired = 0 }) {
  if (ready) return "";
  if (starting) return `Cold start: no replica is ready, ${starting} starting; requests wait for it. `;
  return desired ? "No replica is ready and none is starting; requests wait. Its output may say why. " : "";
}

/** Sessions of a looping pipeline are measured at its entry, over all stages at once. */
const OF_SESSIONS = { "service time": "service time of a session", wait: "wait of a session" };

export class StageDetail {
  /**
   * @param {Element} root
   * @param {(name: string) => void} onDecisions
   * @param {(name: string) => Promise<string>} readOutput newest lines of a function's output
   */
  constructor(root, onDecisions, readOutput) {
    this.root = root;
    this.title = root.querySelector("h3");
    this.reason = root.querySelector(".reason");
    this.facts = root.querySelector("dl");
    this.replicas = root.querySelector(".replicas tbody");
    this.more = root.querySelector(".replicas-more");
    const charts = root.querySelector(".charts");
    this.queue = new Chart(charts, {
      title: "Queue of this stage",
      format: count,
      whole: true,
      lines: [{ name: "queue", label: "waiting", look: "arrivals" }],
    });
    this.numbers = new Chart(charts, {
      title: "Replicas of this stage",
      format: count,
      whole: true,
      lines: [
        { name: "desired", label: "desired", look: "desired", isStep: true },
        { name: "ready", label: "ready", look: "ready", isStep: true },
      ],
    });
    root.querySelector(".its-decisions").addEventListener("click", () => onDecisions(this.stage.function));
    this.output = root.querySelector(".output");
    this.reader = root.querySelector(".its-output");
    this.reader.addEventListener("click", () => this.#read(readOutput));
  }

  /** Shows the newest lines, or hides them. */
  async #read(readOutput) {
    if (!this.output.hidden) return this.#hideOutput();
    const name = this.stage.function;
    this.outputOf = name;
    setText(this.output, "Reading.");
    setHidden(this.output, false);
    setAttribute(this.reader, "aria-expanded", true);
    const text = await readOutput(name);
    if (this.outputOf !== name) return;
    setText(this.output, text);
    this.output.scrollTop = this.output.scrollHeight;
  }

  #hideOutput() {
    this.outputOf = undefined;
    setHidden(this.output, true);
    setAttribute(this.reader, "aria-expanded", false);
  }

  /**
   * @param {object | undefined} stage
   * @param {import("./history.js").Track} track
   * @param {number} nowS
   * @param {boolean} inSessions whether times are those of whole sessions
   */
  update(stage, track, nowS, inSessions) {
    setHidden(this.root, stage === undefined);
    if (stage === undefined) return;
    this.stage = stage;
    if (this.outputOf !== undefined && this.outputOf !== stage.function) this.#hideOutput();
    setText(this.title, `Stage ${stage.stage}: ${stage.function}`);
    setClass(this.root, "is-key", Boolean(stage.is_key));
    setText(this.reason, `${standing(stage)}${stage.reason ?? ""}`.trim() || "No reason is told.");
    updateFacts(this.facts, FACTS.map(([label, value]) => [(inSessions && OF_SESSIONS[label]) || label, value(stage)]));
    const replicas = stage.replicas ?? [];
    reconcile(
      this.replicas,
      replicas,
      (replica) => replica.replica,
      () => make("tr", {}, make("th", { scope: "row" }), make("td"), make("td"), make("td")),
      (row, replica) => {
        setText(row.children[0], replica.replica);
        setAttribute(row, "data-state", replica.state);
        const since = replica.since_s === undefined || replica.since_s === null ? "" : ` for ${seconds(replica.since_s)}`;
        setText(row.children[1], replica.state + since);
        setText(row.children[2], replica.node || "–");
        setText(row.children[3], replica.gpus?.length ? replica.gpus.join(", ") : "–");
      },
    );
    const all = (stage.ready ?? 0) + (stage.starting ?? 0) + (stage.draining ?? 0);
    const hidden = Math.max(0, all - replicas.length);
    setText(this.more, hidden ? `and ${plural(hidden, "replica")} more` : all ? "" : "It has no replica.");
    const from = nowS - WINDOW_S;
    const points = (name) => track.points(name, from, nowS, stage.function);
    this.queue.update(nowS, { queue: points("queue") });
    this.numbers.update(nowS, { desired: points("desired"), ready: points("ready") });
  }
}
