// The pipeline as a row of stages. Only cards that can be seen exist, so that a thousand stages cost what ten do.
import { make, reconcile, setAttribute, setClass, setFill, setHidden, setText } from "./dom.js";
import { count, ordinal, percent, plural, rate, seconds } from "./format.js";

const CARD = 176; // width of a card and the gap after it, as in the style sheet
const BEYOND = 3; // cards on either side that are there already
const DOTS = 14;
const STATES = ["ready", "starting", "draining"];
const CALM = matchMedia("(prefers-reduced-motion: reduce)");

/** `1st key stage`: its place among them. */
const keyWords = ({ rank }) => (Number.isFinite(rank) ? `${ordinal(rank + 1)} key stage` : "key stage");

/** What a card says, as a sentence. */
export function inWords(stage) {
  const parts = [`stage ${stage.stage}, ${stage.function}`];
  if (stage.is_key) parts.push(keyWords(stage));
  parts.push(`${count(stage.queue ?? 0)} waiting`);
  parts.push(`${stage.ready ?? 0} of ${plural(stage.desired ?? 0, "replica")} ready`);
  if (isDown(stage)) parts.push("requests wait");
  if (stage.starting) parts.push(`${stage.starting} starting`);
  if (stage.draining) parts.push(`${stage.draining} draining`);
  if (stage.utilisation_ratio !== undefined) parts.push(`utilisation ${percent(stage.utilisation_ratio)}`);
  if (stage.arrival_cv !== undefined) parts.push(`CV ${count(stage.arrival_cv)}`);
  return parts.join(", ");
}

/** Whether it shall serve and has nothing that does. */
export const isDown = (stage) => !stage.ready && (stage.desired ?? 0) > 0;

/** What is worth a look first: a stage that is down, else the most critical key stage, else the first. */
export function foremost(stages) {
  const down = stages.findIndex((stage) => isDown(stage) && !stage.starting);
  if (down >= 0) return down;
  return Math.max(0, firstKey(stages));
}

/** Index of the most critical key stage, -1 without one. */
export function firstKey(stages) {
  const ranks = stages.map((stage) => (stage.is_key ? (stage.rank ?? 0) : Infinity));
  const least = ranks.reduce((best, rank) => Math.min(best, rank), Infinity);
  return Number.isFinite(least) ? ranks.indexOf(least) : -1;
}

/** Longest queue of a pipeline, that of a full bar; no less than 4, so that one item is no alarm. */
export const fullQueue = (stages) => stages.reduce((most, stage) => Math.max(most, stage.queue ?? 0), 4);

export class StageRow {
  #stages = [];
  #box;
  #cards;
  #overview;
  #onSelect;
  #drawn = false;
  #inSessions = false;

  /**
   * @param {{box: Element, overview: HTMLCanvasElement, onSelect: (index: number) => void}} parts
   */
  constructor({ box, overview, onSelect }) {
    this.#box = box;
    this.#overview = overview;
    this.#onSelect = onSelect;
    this.selected = 0;
    this.#cards = make("div", { class: "cards", role: "presentation" });
    box.append(this.#cards);
    box.addEventListener("scroll", () => this.#later(), { passive: true });
    box.addEventListener("keydown", (event) => this.#key(event));
    box.addEventListener("click", (event) => {
      const card = event.target.closest(".card");
      if (card) this.select(Number(card.dataset.index));
    });
    overview.addEventListener("pointerdown", (event) => {
      const share = event.offsetX / overview.clientWidth;
      this.select(Math.min(this.#stages.length - 1, Math.floor(share * this.#stages.length)));
    });
    new ResizeObserver(() => this.#later()).observe(box);
  }

  /**
   * Shows these.
   *
   * @param {object[]} stages
   * @param {boolean} inSessions whether times of service are those of whole sessions: looping pipelines
   */
  update(stages, inSessions = false) {
    this.#stages = stages;
    this.#inSessions = inSessions;
    this.selected = Math.max(0, Math.min(this.selected, stages.length - 1));
    this.#draw();
  }

  /** Shows those of another pipeline, one of them chosen. */
  change(stages, selected, inSessions) {
    this.#cards.replaceChildren();
    this.#cards.keyed?.clear();
    this.selected = selected;
    this.update(stages, inSessions);
    this.#reveal();
    this.#draw();
  }

  /** Chooses one and brings it into view. */
  select(index) {
    if (!this.#stages.length) return;
    this.selected = Math.max(0, Math.min(index, this.#stages.length - 1));
    this.#reveal();
    this.#draw();
    this.#onSelect(this.selected);
  }

  #reveal() {
    const left = this.selected * CARD;
    const box = this.#box;
    if (left < box.scrollLeft) box.scrollLeft = left;
    else if (left + CARD > box.scrollLeft + box.clientWidth) box.scrollLeft = left + CARD - box.clientWidth;
  }

  #later() {
    if (this.#drawn) return;
    this.#drawn = true;
    requestAnimationFrame(() => {
      this.#drawn = false;
      this.#draw();
    });
  }

  #key(event) {
    if (event.altKey || event.ctrlKey || event.metaKey) return; // the browser's own: back, forward
    const page = Math.max(1, Math.floor(this.#box.clientWidth / CARD));
    const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -1, ArrowDown: 1, PageUp: -page, PageDown: page };
    let to = this.selected + (steps[event.key] ?? 0);
    if (event.key === "Home") to = 0;
    else if (event.key === "End") to = this.#stages.length - 1;
    else if (!(event.key in steps)) return;
    event.preventDefault();
    this.select(to);
  }

  #draw() {
    const stages = this.#stages;
    const box = this.#box;
    const width = `${Math.max(0, stages.length * CARD - 16)}px`;
    if (this.#cards.style.width !== width) this.#cards.style.width = width;
    const first = Math.max(0, Math.floor(box.scrollLeft / CARD) - BEYOND);
    const last = Math.min(stages.length, Math.ceil((box.scrollLeft + box.clientWidth) / CARD) + BEYOND);
    const shown = [];
    for (let i = first; i < last; i += 1) shown.push(i);
    // The chosen one is there even if it is out of sight: who hears the page is told of it.
    if (stages.length && this.selected < first) shown.unshift(this.selected);
    else if (stages.length && this.selected >= last) shown.push(this.selected);
    const full = fullQueue(stages);
    reconcile(
      this.#cards,
      shown,
      (i) => String(i),
      (i) => buildCard(i),
      (card, i) => {
        updateCard(card, stages[i], i, stages.length, i === this.selected, full);
        setText(card.cells["service-label"], this.#inSessions ? "session" : "service");
      },
    );
    setAttribute(box, "aria-activedescendant", stages.length ? `stage-${this.selected}` : null);
    this.#drawOverview(full);
  }

  #drawOverview(full) {
    const canvas = this.#overview;
    const stages = this.#stages;
    const fits = stages.length * CARD - 16 <= this.#box.clientWidth;
    setHidden(canvas, fits);
    if (fits) return;
    const scale = devicePixelRatio || 1;
    const width = Math.round(canvas.clientWidth * scale);
    const height = Math.round(canvas.clientHeight * scale);
    if (canvas.width !== width) canvas.width = width;
    if (canvas.height !== height) canvas.height = height;
    const style = getComputedStyle(canvas);
    const pen = canvas.getContext("2d");
    pen.clearRect(0, 0, width, height);
    const step = width / stages.length;
    const bar = Math.max(1, step - (step > 3 * scale ? scale : 0));
    pen.fillStyle = style.color;
    stages.forEach((stage, i) => {
      const tall = Math.max(scale, ((stage.queue ?? 0) / full) * height);
      if (!stage.is_key) pen.fillRect(i * step, height - tall, bar, tall);
    });
    pen.fillStyle = style.borderTopColor;
    stages.forEach((stage, i) => {
      if (!stage.is_key) return;
      // The most critical one stands out among hundreds.
      const least = stage.rank === 0 ? height : height * 0.25;
      const tall = Math.max(least, ((stage.queue ?? 0) / full) * height);
      pen.fillRect(i * step, height - tall, Math.max(bar, 2 * scale), tall);
    });
    pen.strokeStyle = style.outlineColor;
    pen.lineWidth = scale;
    const from = (this.#box.scrollLeft / CARD) * step;
    pen.strokeRect(from + 0.5, 0.5, Math.max(4, (this.#box.clientWidth / CARD) * step) - 1, height - 1);
  }
}

function buildCard(index) {
  const card = make("div", { class: "card", role: "option", id: `stage-${index}`, "data-index": index });
  card.style.transform = `translateX(${index * CARD}px)`;
  const bar = (name) => make("div", { class: `bar ${name}` }, make("div", { class: "fill" }));
  const line = (label, value) => make("div", { class: "line" }, make("span", {}, label), make("b", { class: value }));
  card.append(
    make("div", { class: "head" }, make("span", { class: "no" }), make("span", { class: "key" })),
    make("div", { class: "name" }, make("bdi")),
    line("queue", "queue-text"),
    bar("queue-bar"),
    make("div", { class: "dots", "aria-hidden": "true" }),
    line("replicas", "replica-text"),
    make("div", { class: "line moving" }, make("span", { class: "starting-text" }), make("span", { class: "draining-text" })),
    line("utilisation", "use-text"),
    bar("use-bar"),
    line("CV", "cv-text"),
    line("service", "service-text"),
  );
  card.cells = Object.fromEntries(
    ["no", "key", "name", "queue-text", "queue-bar", "dots", "replica-text", "use-text", "use-bar", "cv-text"]
      .concat("service-text", "starting-text", "draining-text")
      .map((name) => [name, card.querySelector(`.${name}`)]),
  );
  card.cells["service-label"] = card.cells["service-text"].previousElementSibling;
  return card;
}

function updateCard(card, stage, index, all, isSelected, full) {
  const part = card.cells;
  const changed = card.shown !== undefined && card.shown !== stage.desired;
  card.shown = stage.desired;
  if (changed && !CALM.matches) card.animate([{ outlineColor: "currentColor" }, { outlineColor: "transparent" }], 900);
  setAttribute(card, "aria-selected", isSelected);
  setAttribute(card, "aria-setsize", all);
  setAttribute(card, "aria-posinset", index + 1);
  setAttribute(card, "aria-label", inWords(stage));
  setClass(card, "is-key", Boolean(stage.is_key));
  setClass(card, "is-out", !stage.ready);
  setClass(card, "is-down", isDown(stage));
  setText(part.no, stage.stage);
  setHidden(part.key, !stage.is_key);
  setText(part.key, keyWords(stage));
  setText(part.name.firstElementChild, stage.function);
  setAttribute(part.name, "title", stage.function);
  setText(part["queue-text"], count(stage.queue));
  setFill(part["queue-bar"].firstElementChild, (stage.queue ?? 0) / full);
  setText(part["replica-text"], `${stage.ready ?? 0}/${stage.desired ?? 0}`);
  for (const state of STATES.slice(1)) setText(part[`${state}-text`], stage[state] ? `${count(stage[state])} ${state}` : "");
  const ratio = stage.utilisation_ratio;
  setText(part["use-text"], percent(ratio));
  setFill(part["use-bar"].firstElementChild, ratio ?? 0);
  setClass(part["use-bar"], "is-over", (ratio ?? 0) >= 0.9);
  setText(part["cv-text"], count(stage.arrival_cv));
  setText(part["service-text"], seconds(stage.service_s));
  updateDots(part.dots, stage);
}

function updateDots(parent, stage) {
  const dots = [];
  for (const state of STATES) for (let i = 0; i < (stage[state] ?? 0); i += 1) dots.push(state);
  const most = isDown(stage) ? DOTS / 2 : DOTS; // a row is of words then
  const hidden = dots.length - most;
  const shown = hidden > 0 ? dots.slice(0, most - 1) : dots;
  const text = shown.join(" ") + (hidden > 0 ? hidden : "") + isDown(stage);
  if (parent.shown === text) return;
  parent.shown = text;
  const down = isDown(stage) ? [make("b", { class: "down" }, "none ready")] : [];
  parent.replaceChildren(...down, ...shown.map((state) => make("i", { class: `dot ${state}` })));
  if (hidden > 0) parent.append(make("span", { class: "more" }, `+${hidden + 1}`));
}

/** The same as a table, a hundred stages a page. */
export class StageTable {
  #body;
  #pager;
  #page = 0;
  #stages = [];

  /**
   * @param {{body: Element, pager: Element, onSelect: (index: number) => void}} parts
   */
  constructor({ body, pager, onSelect }) {
    this.#body = body;
    this.#pager = pager;
    this.label = make("span", {});
    const turn = (text, by) => {
      const button = make("button", { type: "button" }, text);
      button.addEventListener("click", () => {
        this.#page += by;
        this.update(this.#stages);
      });
      return button;
    };
    this.buttons = [turn("Previous", -1), turn("Next", 1)];
    pager.append(this.buttons[0], this.label, this.buttons[1]);
    body.addEventListener("click", (event) => {
      const button = event.target.closest("button");
      if (button) onSelect(Number(button.dataset.index));
    });
  }

  /** Shows these. */
  update(stages) {
    this.#stages = stages;
    const pages = Math.max(1, Math.ceil(stages.length / ROWS));
    this.#page = Math.max(0, Math.min(this.#page, pages - 1));
    const from = this.#page * ROWS;
    setHidden(this.#pager, pages === 1);
    this.buttons[0].disabled = this.#page === 0;
    this.buttons[1].disabled = this.#page === pages - 1;
    setText(this.label, `stages ${from} to ${Math.min(stages.length, from + ROWS) - 1} of ${stages.length}`);
    reconcile(
      this.#body,
      stages.slice(from, from + ROWS),
      (stage) => stage.function,
      () => make("tr", {}, make("th", { scope: "row" }), ...COLUMNS.map((cell) => make("td", cell === READY ? { class: "of-replicas" } : {}))),
      (row, stage, i) => {
        const button = row.firstElementChild.firstElementChild ?? make("button", { type: "button", class: "link" });
        if (!button.parentNode) row.firstElementChild.append(button);
        setAttribute(button, "data-index", from + i);
        setText(button, `${stage.stage} ${stage.function}`);
        setClass(row, "is-key", Boolean(stage.is_key));
        setClass(row, "is-down", isDown(stage));
        COLUMNS.forEach((cell, column) => setText(row.children[column + 1], cell(stage)));
      },
    );
  }
}

const ROWS = 100;
const READY = (stage) => `${stage.ready ?? 0}/${stage.desired ?? 0}${isDown(stage) ? " none ready" : ""}`;
const COLUMNS = [
  ({ is_key: isKey, rank }) => [Number.isFinite(rank) ? ordinal(rank + 1) : "", isKey ? "key" : ""].join(" ").trim(),
  (stage) => count(stage.queue),
  (stage) => count(stage.in_flight),
  (stage) => rate(stage.arrival_rps),
  (stage) => count(stage.arrival_cv),
  (stage) => seconds(stage.service_s),
  (stage) => seconds(stage.wait_s),
  (stage) => percent(stage.utilisation_ratio),
  READY,
  (stage) => String(stage.starting ?? 0),
  (stage) => String(stage.draining ?? 0),
  (stage) => stage.reason ?? "",
];
