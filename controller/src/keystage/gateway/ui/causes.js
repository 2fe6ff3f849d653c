// Where a request of a known time may have lost it: what every stage did then, the likeliest cause first.
//
// Pure. What is known of a stage is one moment a second, so causes are likely, not proven: a trace proves. A start that
// is over before the next moment is known by the decision alone.

const EDGE_S = 1.5; // a second before and after: a report tells of the second before it
const UNSEEN_S = 0.5; // what a stage was without replicas between two reports: half the time between them

/** Means of finite numbers; NaN without one. */
const mean = (values) => (values.length ? values.reduce((a, b) => a + b, 0) / values.length : NaN);
const most = (values) => values.reduce((a, b) => (b > a ? b : a), 0);

/**
 * @param {import("./history.js").Track} track of the pipeline
 * @param {{stage: number, function: string}[]} stages in order
 * @param {number} beganS Unix seconds on the controller's clock
 * @param {number} toS
 * @param {object[]} decisions up to then, as a report has them
 * @returns {{stage: number, function: string, queue: number, wait_s: number, out_s: number, starting: number,
 *   ready: number, score: number, words: string}[]} the likeliest first; empty where nothing is known of that time
 */
export function likelyCauses(track, stages, beganS, toS, decisions) {
  const found = [];
  for (const { stage, function: name } of stages) {
    const values = (column, edgeS = EDGE_S) =>
      track
        .points(column, beganS - edgeS, toS + edgeS, name)
        .map(([, value]) => value)
        .filter(Number.isFinite);
    const ready = values("ready");
    if (!ready.length) continue;
    const queue = most(values("queue"));
    const waitS = most(values("wait_s"));
    const starting = most(values("starting"));
    // Replicas are those of the moment that a report tells of: moments outside count only if there is none inside.
    const inside = values("ready", 0);
    const moments = inside.length ? inside : ready;
    const share = moments.filter((count) => count === 0).length / moments.length;
    const isWoken = decisions.some(
      (decision) => decision.function === name && decision.at_s >= beganS - EDGE_S && isFirstReplica(decision),
    );
    const outS = share > 0 ? share * (toS - beganS) : isWoken ? Math.min(UNSEEN_S, toS - beganS) : 0;
    const utilisation = mean(values("utilisation_ratio"));
    found.push({
      stage,
      function: name,
      queue,
      wait_s: waitS,
      out_s: outS,
      starting,
      ready: isWoken ? 0 : Math.min(...ready),
      score: Math.max(outS, waitS),
      words: inWords({ outS, isStarting: starting > 0 || isWoken, isSeen: share > 0, waitS, queue, utilisation }),
    });
  }
  // Sessions of a looping pipeline wait at its entry for all stages at once: their waits are equal.
  return found.sort((a, b) => b.score - a.score || b.out_s - a.out_s || b.queue - a.queue || a.stage - b.stage);
}

/** Whether it is the first replica of a stage that had none: what waits then waits for a cold start. */
export const isFirstReplica = ({ kind, after, inputs }) => kind !== "cores" && after > 0 && inputs?.ready_replicas === 0;

function inWords({ outS, isStarting, isSeen, waitS, queue, utilisation }) {
  if (outS > 0) {
    const why = isStarting ? "cold start: a replica was starting" : "and none was starting";
    return `no replica was ready for ${isSeen ? `about ${outS.toFixed(1)} s` : "less than a second"}, ${why}`;
  }
  if (queue > 0 && utilisation >= 0.9) return `its queue: it was busy to ${Math.round(utilisation * 100)} %`;
  if (queue > 0) return `its queue: up to ${Math.round(queue)} waited`;
  if (waitS > 0) return "requests waited a little";
  return "nothing unusual";
}
