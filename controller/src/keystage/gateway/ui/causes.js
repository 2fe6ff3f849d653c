// Where a request of a known time may have lost it: what every stage did then, the likeliest cause first.
//
// Pure. What is known of a stage is one moment a second, so causes are likely, not proven: a trace proves.

const EDGE_S = 1.5; // a second before and after: a report tells of the second before it

/** Means of finite numbers; NaN without one. */
const mean = (values) => (values.length ? values.reduce((a, b) => a + b, 0) / values.length : NaN);
const most = (values) => values.reduce((a, b) => (b > a ? b : a), 0);

/**
 * @param {import("./history.js").Track} track of the pipeline
 * @param {{stage: number, function: string}[]} stages in order
 * @param {number} beganS Unix seconds on the controller's clock
 * @param {number} toS
 * @returns {{stage: number, function: string, queue: number, wait_s: number, out_s: number, starting: number,
 *   ready: number, score: number, words: string}[]} the likeliest first; empty where nothing is known of that time
 */
export function likelyCauses(track, stages, beganS, toS) {
  const found = [];
  for (const { stage, function: name } of stages) {
    const values = (column) =>
      track
        .points(column, beganS - EDGE_S, toS + EDGE_S, name)
        .map(([, value]) => value)
        .filter(Number.isFinite);
    const ready = values("ready");
    if (!ready.length) continue;
    const queue = most(values("queue"));
    const waitS = most(values("wait_s"));
    const starting = most(values("starting"));
    const share = ready.filter((count) => count === 0).length / ready.length;
    const outS = share * (toS - beganS);
    const utilisation = mean(values("utilisation_ratio"));
    found.push({
      stage,
      function: name,
      queue,
      wait_s: waitS,
      out_s: outS,
      starting,
      ready: Math.min(...ready),
      score: Math.max(outS, waitS),
      words: inWords({ outS, starting, waitS, queue, utilisation }),
    });
  }
  return found.sort((a, b) => b.score - a.score || b.queue - a.queue || a.stage - b.stage);
}

function inWords({ outS, starting, waitS, queue, utilisation }) {
  if (outS > 0) {
    const why = starting > 0 ? "cold start: a replica was starting" : "and none was starting";
    return `no replica was ready for about ${outS.toFixed(1)} s, ${why}`;
  }
  if (queue > 0 && utilisation >= 0.9) return `its queue: it was busy to ${Math.round(utilisation * 100)} %`;
  if (queue > 0) return `its queue: up to ${Math.round(queue)} waited`;
  if (waitS > 0) return "requests waited a little";
  return "nothing unusual";
}
