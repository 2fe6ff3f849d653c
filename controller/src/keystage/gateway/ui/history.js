// The last five minutes of a pipeline, kept in this page: a report tells one moment only.

export const WINDOW_S = 300;
const POINTS = 512; // more than one a second
const OWN = ["arrival_rps", "latency_s", "desired", "ready", "starting"];
const STAGE = ["queue", "ready", "desired", "starting", "wait_s", "utilisation_ratio"];

const columns = (names) => Object.fromEntries(names.map((name) => [name, new Float32Array(POINTS).fill(NaN)]));
const sum = (stages, name) => stages.reduce((total, stage) => total + (stage[name] ?? 0), 0);

/** One pipeline's. All columns share one ring of times, so that a moment is one index. */
export class Track {
  #times = new Float64Array(POINTS);
  #own = columns(OWN);
  #stages = new Map();
  #newest = new Map(); // by stage: when it was last in a report
  #next = 0;
  #length = 0;

  /** Takes what a report says of the pipeline. */
  push(atS, pipeline) {
    const last = this.#length ? this.#times[this.#at(this.#length - 1)] : -Infinity;
    if (atS < last) this.#length = 0; // another clock tells the time now
    if (atS === last) return;
    const index = this.#next;
    this.#next = (index + 1) % POINTS;
    this.#length = Math.min(POINTS, this.#length + 1);
    this.#times[index] = atS;
    const stages = pipeline.stages ?? [];
    for (const name of ["arrival_rps", "latency_s"]) this.#own[name][index] = pipeline[name] ?? NaN;
    for (const name of ["desired", "ready", "starting"]) this.#own[name][index] = sum(stages, name);
    for (const kept of this.#stages.values()) for (const name of STAGE) kept[name][index] = NaN;
    for (const stage of stages) {
      let kept = this.#stages.get(stage.function);
      if (kept === undefined) {
        kept = columns(STAGE);
        this.#stages.set(stage.function, kept);
      }
      for (const name of STAGE) kept[name][index] = stage[name] ?? (COUNTS.has(name) ? 0 : NaN);
      this.#newest.set(stage.function, atS);
    }
    this.#forget(atS);
  }

  /** Points of one column within a window, oldest first: [[atS, value], ...]. */
  points(name, beganS, toS, stage = null) {
    const column = stage === null ? this.#own[name] : this.#stages.get(stage)?.[name];
    const found = [];
    if (column === undefined) return found;
    for (let i = 0; i < this.#length; i += 1) {
      const at = this.#at(i);
      const atS = this.#times[at];
      if (atS >= beganS && atS <= toS) found.push([atS, column[at]]);
    }
    return found;
  }

  /** Since when a stage has had no ready replica (Unix seconds), as far as is known; null: it has one. */
  outSince(stage) {
    const ready = this.#stages.get(stage)?.ready;
    let sinceS = null;
    for (let i = this.#length - 1; ready !== undefined && i >= 0; i -= 1) {
      const at = this.#at(i);
      if (ready[at] !== 0) break;
      sinceS = this.#times[at];
    }
    return sinceS;
  }

  /** Names of the stages' functions that it knows. */
  get functions() {
    return [...this.#stages.keys()];
  }

  /** Drops stages that are gone for longer than is shown. */
  #forget(atS) {
    for (const [name, lastS] of this.#newest) {
      if (Math.abs(atS - lastS) <= WINDOW_S) continue;
      this.#newest.delete(name);
      this.#stages.delete(name);
    }
  }

  #at(i) {
    return (this.#next - this.#length + i + POINTS) % POINTS;
  }
}

const COUNTS = new Set(["ready", "desired", "starting"]);
