// The live page: hears reports, remembers five minutes of them, and draws at most once a frame.
import { Chart } from "./chart.js";
import { Decisions } from "./decisions.js";
import { StageDetail, updateFacts } from "./detail.js";
import { make, reconcile, setAttribute, setHidden, setText } from "./dom.js";
import { Feed } from "./feed.js";
import { clock, count, percent, plural, rate, seconds } from "./format.js";
import { Track, WINDOW_S } from "./history.js";
import { Inspector } from "./inspector.js";
import { Nodes } from "./nodes.js";
import { Playground } from "./playground.js";
import { firstKey, foremost, isDown, StageRow, StageTable } from "./stages.js";

const STALE_S = 5; // as in `observability.api`
const ANNOUNCE_EVERY_MS = 8_000;
const MOST_SPOKEN = 3;
const get = (id) => document.getElementById(id);

// Not the document's base: it may carry credentials, with which nothing can be fetched.
const here = new URL(location.pathname, location.origin);
const address = (path) => new URL(`../${path}`, here);

const state = {
  report: null,
  bornMs: -Infinity, // when the report was made, on this page's steady clock
  feed: { kind: "connecting", text: "", retryAtMs: 0 },
  first: true, // no report came yet since the connection began
  pipeline: new URLSearchParams(location.search).get("pipeline"),
  drawn: null, // name of the pipeline that is drawn
  down: "", // names of stages that were said to be down
  asTable: false,
};
const tracks = new Map();
const LEAST_ATTAINMENT = 0.9; // as in `cli.judging`
const DOWN_S = 2; // without any replica: said after so long, a crash that is mended at once is none
const STARTING_S = 10; // while one starts
const OUTPUT_LINES = 40;
const LINE_CHARACTERS = 2_000;

/** Seconds since the report that is shown was made. */
const ageS = () => (performance.now() - state.bornMs) / 1000;
/** Now, on the controller's clock. */
const nowS = () => (state.report ? state.report.at_s + ageS() : (Date.now() + feed.skewMs) / 1000);
const pipelines = () => state.report?.pipelines ?? [];
const shown = () => pipelines().find(({ pipeline }) => pipeline === state.pipeline) ?? pipelines()[0];

// ------------------------------------------------------------ what is heard

function onReport(report) {
  const before = state.report;
  const isNew = before?.controller !== report.controller || before.number !== report.number;
  // The first one after a connection may be old; the following ones are as old as they took.
  const isFirst = before === null || state.first;
  state.first = false;
  if (isNew) {
    const age = isFirst ? Math.max(0, (Date.now() + feed.skewMs) / 1000 - report.at_s) : 0;
    state.bornMs = performance.now() - age * 1000;
  }
  state.report = report;
  const names = new Set();
  for (const pipeline of report.pipelines ?? []) {
    names.add(pipeline.pipeline);
    if (!tracks.has(pipeline.pipeline)) tracks.set(pipeline.pipeline, new Track());
    tracks.get(pipeline.pipeline).push(report.at_s, pipeline);
  }
  for (const name of tracks.keys()) if (!names.has(name)) tracks.delete(name);
  for (const { text } of decisions.update(report).reverse()) announce(text);
  draw();
}

function onState(next) {
  if (next.kind === "live") state.first = true;
  const isOther = next.kind !== state.feed.kind;
  state.feed = next;
  if (isOther) announce(SPOKEN[next.kind] ?? "", true);
  draw();
}

const SPOKEN = {
  live: "The page is live.",
  away: "The gateway is away. What is shown is old.",
  none: "No controller has reported.",
  denied: "The gateway refused the credentials.",
};

// ------------------------------------------------------------ for who listens

let toSay = [];
let toSpeak = 0;
let spokenAtMs = -Infinity;

/** Says something through the live region: at once what is urgent, else not more often than one can listen. */
function announce(text, isUrgent = false) {
  if (!text) return;
  toSay.push(text);
  if (toSay.length > 1 && !isUrgent) return;
  clearTimeout(toSpeak);
  const waitMs = isUrgent ? 0 : Math.max(0, spokenAtMs + ANNOUNCE_EVERY_MS - performance.now());
  toSpeak = setTimeout(speak, waitMs);
}

function speak() {
  spokenAtMs = performance.now();
  const said = toSay.slice(-MOST_SPOKEN).map((one) => one.replace(/\.$/, ""));
  const rest = toSay.length - said.length;
  if (rest > 0) said.push(`And ${rest} more`);
  setText(get("announcer"), `${said.join(". ")}.`);
  toSay = [];
}

// ------------------------------------------------------------ what is drawn

let isDue = false;
let wasStale = false;

function draw() {
  if (isDue) return;
  isDue = true;
  requestAnimationFrame(() => {
    isDue = false;
    drawStatus();
    drawAll();
  });
}

function drawStatus() {
  const { kind, text, retryAtMs } = state.feed;
  const isStale = kind === "live" && state.report !== null && ageS() > STALE_S;
  setAttribute(document.body, "data-state", isStale ? "stale" : kind);
  if (isStale && !wasStale) announce("The report is old: the controller may be gone.", true);
  wasStale = isStale;
  const leftS = Math.max(0, Math.ceil((retryAtMs - performance.now()) / 1000));
  const again = Number.isFinite(retryAtMs) && retryAtMs ? ` Trying again ${leftS ? `in ${leftS} s` : "now"}.` : "";
  const old = state.report ? ` What is shown is ${seconds(Math.max(1, Math.round(ageS())))} old.` : "";
  const said = {
    connecting: ["connecting", "", ""],
    live: ["live", "", ""],
    stale: ["old", "The report is old.", `The last one came ${seconds(Math.round(ageS()))} ago: the controller may be gone.`],
    away: ["gateway away", "The gateway is away.", `${text}${again}${old}`],
    none: ["no report", state.report ? "The controller is gone." : "", state.report ? `${text}.${again}${old}` : ""],
    denied: ["refused", "The credentials were refused.", "Try now, or load the page again, to enter others."],
  }[isStale ? "stale" : kind];
  setText(get("status"), said[0]);
  const about = said[0] === "live" ? "" : `${said[0]} · `;
  const title = `${about}${shown() ? `${shown().pipeline} · ` : ""}Keystage`;
  if (document.title !== title) document.title = title;
  setHidden(get("notice"), !said[1]);
  setText(get("notice-title"), said[1]);
  setText(get("notice-text"), said[2]);
  setHidden(get("retry"), kind === "live" || kind === "connecting");
  setHidden(get("none"), !(kind === "none" && state.report === null));
}

function drawAll() {
  const report = state.report;
  if (report === null) return;
  const pipeline = shown();
  setHidden(get("empty"), pipeline !== undefined);
  setHidden(get("full"), pipeline === undefined);
  setHidden(get("time"), pipeline === undefined);
  setHidden(get("log"), false);
  setHidden(get("machines"), false);
  setText(get("version"), report.version ?? "");
  setText(get("controller"), report.controller);
  setAttribute(document.body, "data-report", report.number);
  setHidden(get("trouble"), !report.trouble);
  setText(get("trouble").querySelector("span"), report.trouble ?? "");
  drawNames(report, pipeline);
  if (pipeline !== undefined) drawPipeline(pipeline);
  drawElsewhere(pipeline);
  nodes.update(report.nodes ?? []);
  drawFunctions(report.functions ?? []);
}

function drawNames(report, pipeline) {
  const names = pipelines().map((one) => one.pipeline);
  fill(get("pipelines"), names);
  fill(inspectForm.elements.pipeline, names);
  const others = (report.functions ?? []).map((one) => one.function);
  fill(playForm.elements.function, [...new Set([...names, ...others])]);
  setHidden(get("pick"), names.length < 2);
  if (pipeline && get("pipelines").value !== pipeline.pipeline) get("pipelines").value = pipeline.pipeline;
}

/** Options of a select; a choice that is still there stays. */
function fill(select, names) {
  reconcile(select, names, (name) => name, (name) => make("option", { value: name }, name));
}

function drawPipeline(pipeline) {
  const stages = pipeline.stages ?? [];
  const track = tracks.get(pipeline.pipeline);
  const now = nowS();
  setText(get("pipeline-title"), pipeline.pipeline);
  const isLooping = pipeline.execution === "looping";
  drawDown(stages, track, now);
  drawToKey(stages);
  setText(get("service-head"), isLooping ? "session service" : "service");
  setText(get("wait-head"), isLooping ? "session wait" : "wait");
  setHidden(get("missing"), !pipeline.missing);
  setText(get("missing"), pipeline.missing ? `Its numbers stay as they are: ${pipeline.missing}` : "");
  const total = (name) => stages.reduce((sum, stage) => sum + (stage[name] ?? 0), 0);
  const byRank = (a, b) => (a.rank ?? Infinity) - (b.rank ?? Infinity) || a.stage - b.stage;
  const keys = stages.filter((stage) => stage.is_key).sort(byRank).map((stage) => stage.stage);
  const objective = pipeline.deadline_s === undefined ? "" : ` of ${seconds(pipeline.deadline_s)}`;
  const bounds = [["", pipeline.deadline_s], ["TTFT ", pipeline.ttft_s], ["TPOT ", pipeline.tpot_s]];
  const aims = bounds.filter(([, boundS]) => boundS !== undefined).map(([what, boundS]) => what + seconds(boundS));
  const within = aims.length ? ` within ${aims.join(", ")}` : "";
  updateFacts(get("summary"), [
    ["arrivals", rate(pipeline.arrival_rps)],
    ["latency", `${seconds(pipeline.latency_s)}${objective}`, pipeline.latency_s > pipeline.deadline_s],
    ["SLO attainment", `${percent(pipeline.attainment_ratio)}${within}`, pipeline.attainment_ratio < LEAST_ATTAINMENT],
    ["key stages", keys.length ? keys.slice(0, 8).join(", ") + (keys.length > 8 ? " …" : "") : "none"],
    ["replicas ready", `${total("ready")} of ${total("desired")}`],
    ["stages", `${stages.length}, ${pipeline.execution}`],
  ]);
  if (state.drawn !== pipeline.pipeline && stages.length) {
    state.drawn = pipeline.pipeline;
    row.change(stages, foremost(stages), isLooping);
  }
  if (state.asTable) table.update(stages);
  else row.update(stages, isLooping);
  detail.update(stages[row.selected], track, now, isLooping);
  const points = (name) => track.points(name, now - WINDOW_S, now);
  arrivals.update(now, { arrival_rps: points("arrival_rps") });
  latency.update(now, { latency_s: points("latency_s") }, pipeline.deadline_s ?? null);
  replicas.update(now, { desired: points("desired"), ready: points("ready"), starting: points("starting") });
}

/** Stages that serve nobody, and have not for a while. */
function downOf(stages, track, now) {
  return stages.filter((stage) => {
    if (!isDown(stage)) return false;
    const sinceS = track.outSince(stage.function) ?? now;
    return now - sinceS >= (stage.starting ? STARTING_S : DOWN_S);
  });
}

/** Says that a pipeline which is not shown has stages that serve nobody. */
function drawElsewhere(pipeline) {
  const now = nowS();
  const others = pipelines()
    .filter((one) => one !== pipeline)
    .map((one) => ({ name: one.pipeline, down: downOf(one.stages ?? [], tracks.get(one.pipeline), now) }))
    .filter(({ down }) => down.length > 0);
  setHidden(get("elsewhere"), others.length === 0);
  if (others.length === 0) return;
  const [{ name, down }] = others;
  const more = others.length > 1 ? ` ${plural(others.length - 1, "pipeline")} more.` : "";
  setText(get("elsewhere").querySelector("span"), `${name}: stage ${down[0].stage} has no ready replica.${more}`);
  const button = get("elsewhere").querySelector("button");
  setText(button, `Show ${name}`);
  setAttribute(button, "data-pipeline", name);
}

/** Says which stages serve nobody, and for how long. */
function drawDown(stages, track, now) {
  const down = downOf(stages, track, now);
  const names = down.slice(0, 8).map(({ stage }) => stage).join(", ") + (down.length > 8 ? " …" : "");
  const said = down.length === 1 ? `Stage ${names} has` : `Stages ${names} have`;
  setHidden(get("down"), down.length === 0);
  if (down.length === 0) {
    if (state.down) announce("Every stage has a ready replica again.");
    state.down = "";
    return;
  }
  const longestS = Math.max(...down.map((stage) => now - (track.outSince(stage.function) ?? now)));
  const starting = down.reduce((total, stage) => total + (stage.starting ?? 0), 0);
  const rest = starting ? `${starting} starting` : "none is starting";
  setText(get("down").firstElementChild, `${said} had no ready replica for ${seconds(Math.round(longestS))}, ${rest}: requests wait.`);
  const button = get("down").querySelector("button");
  setText(button, `Show stage ${down[0].stage}`);
  setAttribute(button, "data-index", stages.indexOf(down[0]));
  if (state.down !== names) announce(`${said} no ready replica.`, true);
  state.down = names;
}

/** A way to the most critical key stage, which may be far out of sight. */
function drawToKey(stages) {
  const first = stages[firstKey(stages)];
  setHidden(get("to-key"), first === undefined);
  if (first !== undefined) setText(get("to-key"), `Go to key stage ${first.stage}`);
}

function drawFunctions(functions) {
  setHidden(get("others"), functions.length === 0);
  reconcile(
    get("functions"),
    functions.slice(0, 500),
    (one) => one.function,
    () => make("tr", {}, make("th", { scope: "row" }), make("td"), make("td"), make("td")),
    (node, one) => {
      const cells = [one.function, `${one.ready ?? 0}/${one.desired ?? 0}`, String(one.starting ?? 0), one.reason ?? ""];
      cells.forEach((cell, i) => setText(node.children[i], cell));
    },
  );
}

// ------------------------------------------------------------ parts

const inspectForm = get("inspect-form");
const playForm = get("play-form");
const decisions = new Decisions({
  list: get("decisions"),
  text: get("log-text"),
  kind: get("log-kind"),
  note: get("log-note"),
  more: get("log-more"),
  announce,
});
const detail = new StageDetail(get("detail"), (name) => {
  decisions.filter(name);
  get("log").scrollIntoView();
  get("log").focus({ preventScroll: true });
}, readOutput);
const row = new StageRow({ box: get("row"), overview: get("overview"), onSelect: draw });
const table = new StageTable({
  body: get("rows"),
  pager: get("pager"),
  onSelect: (index) => {
    row.selected = index;
    draw();
  },
});
const nodes = new Nodes(get("nodes"), get("nodes-note"));
const arrivals = new Chart(get("charts"), {
  title: "Arrivals",
  format: rate,
  lines: [{ name: "arrival_rps", label: "arrivals", look: "arrivals" }],
});
const latency = new Chart(get("charts"), {
  title: "Latency",
  format: seconds,
  lines: [{ name: "latency_s", label: "latency", look: "latency" }],
});
const replicas = new Chart(get("charts"), {
  title: "Replicas",
  format: count,
  whole: true,
  lines: [
    { name: "desired", label: "desired", look: "desired", isStep: true },
    { name: "ready", label: "ready", look: "ready", isStep: true },
    { name: "starting", label: "starting", look: "starting", isStep: true },
  ],
});
const inspector = new Inspector(
  inspectForm,
  get("found"),
  get("requests"),
  (name) => {
    const pipeline = pipelines().find((one) => one.pipeline === name);
    return pipeline ? { track: tracks.get(name), stages: pipeline.stages ?? [] } : null;
  },
  (beganS, toS) => decisions.between(beganS, toS),
);
new Playground(
  playForm,
  { out: get("answer"), facts: get("play-facts"), stop: get("stop"), send: get("send") },
  address,
  nowS,
  (request) => inspector.add(request),
  announce,
);
const feed = new Feed(address("system/keystage/events"), onReport, onState);

function show(asTable) {
  state.asTable = asTable;
  setHidden(get("picture"), asTable);
  setHidden(get("table"), !asTable);
  setAttribute(get("as-table"), "aria-pressed", asTable);
  setAttribute(get("as-picture"), "aria-pressed", !asTable);
  draw();
}

/** Newest lines that a function printed, as the gateway keeps them. */
async function readOutput(name) {
  const url = address("system/logs");
  url.search = new URLSearchParams({ name, tail: OUTPUT_LINES, follow: "false" });
  try {
    const answer = await fetch(url, { cache: "no-store" });
    const text = await answer.text();
    if (!answer.ok) return `The gateway answered with status ${answer.status}: ${text.trim().slice(0, 400)}`;
    const lines = text.split("\n").filter(Boolean).map((line) => JSON.parse(line));
    const said = lines.map((line) => `${clock(Date.parse(line.timestamp) / 1000)} ${line.instance}: ${line.text.slice(0, LINE_CHARACTERS)}`);
    return said.join("\n") || "It printed nothing that is kept.";
  } catch (error) {
    return `Its output cannot be read: ${error.message}.`;
  }
}

get("down").querySelector("button").addEventListener("click", ({ target }) => row.select(Number(target.dataset.index)));
get("to-key").addEventListener("click", () => row.select(firstKey(shown()?.stages ?? [])));
get("as-table").addEventListener("click", () => show(true));
get("as-picture").addEventListener("click", () => show(false));
get("retry").addEventListener("click", () => feed.retry());
function choose(pipeline) {
  state.pipeline = pipeline;
  const query = new URLSearchParams(location.search);
  query.set("pipeline", state.pipeline);
  window.history.replaceState(null, "", `?${query}${location.hash}`);
  draw();
}

get("pipelines").addEventListener("change", (event) => choose(event.target.value));
get("elsewhere").querySelector("button").addEventListener("click", ({ target }) => choose(target.dataset.pipeline));
document.addEventListener("themechange", draw);
setText(
  get("commands"),
  [
    "keystage split smollm2 --stages 4",
    `faas-cli login --gateway ${location.origin} --password-stdin < .keystage/credentials/basic-auth-password`,
    `faas-cli deploy --gateway ${location.origin} -f .keystage/bundles/smollm2/stack.yml`,
  ].join("\n"),
);
setInterval(drawStatus, 1000);
feed.start();
