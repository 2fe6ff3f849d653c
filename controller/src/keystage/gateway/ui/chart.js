// A time line of five minutes as SVG, with a table of the same numbers beside it.
import { make, makeSvg, reconcile, setAttribute, setHidden, setText } from "./dom.js";
import { WINDOW_S } from "./history.js";

const HEIGHT = 132;
const LEFT = 44;
const RIGHT = 8;
const TOP = 8;
const BOTTOM = 20;
const SPOKEN_EVERY_MS = 15_000; // a label that changes every second could not be listened to
const ROW_S = 15;
let made = 0;

/** Least round number that is no less; half of it is whole too where things are counted. */
function ceiling(value, isWhole) {
  if (isWhole && value <= 10) return Math.max(4, 2 * Math.ceil(value / 2));
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  const steps = isWhole ? [1, 2, 4, 6, 8, 10] : [1, 2, 2.5, 5, 10];
  return (steps.find((step) => step * power >= value) ?? 10) * power;
}

export class Chart {
  #lines;
  #svg;
  #width = 600;
  #spokenAtMs = -Infinity;
  #data = null;
  #format;
  #title;

  /**
   * @param {Element} parent
   * @param {{title: string, format: (value: number) => string, whole?: boolean,
   *   lines: {name: string, label: string, look: string, isStep?: boolean}[]}} options
   */
  constructor(parent, { title, format, lines, whole = false }) {
    this.#title = title;
    this.#format = format;
    this.#lines = lines;
    this.whole = whole;
    this.id = `chart-${(made += 1)}`;
    this.#svg = makeSvg("svg", { class: "plot", role: "img", "aria-label": title, height: HEIGHT });
    this.grid = makeSvg("g", { class: "grid" });
    this.marks = makeSvg("line", { class: "objective" });
    this.paths = lines.map((line) => makeSvg("path", { class: `line ${line.look}` }));
    this.cursor = makeSvg("line", { class: "cursor", y1: TOP, y2: HEIGHT - BOTTOM });
    this.#svg.append(this.grid, this.marks, ...this.paths, this.cursor);
    this.values = make("p", { class: "readout" });
    const keys = make("ul", { class: "keys", "aria-hidden": "true" });
    const key = (look, label) => make("li", {}, make("span", { class: `swatch ${look}` }), label);
    if (lines.length > 1) keys.append(...lines.map(({ look, label }) => key(look, label)));
    this.objectiveKey = key("objective", "objective");
    this.objectiveKey.hidden = true;
    keys.append(this.objectiveKey);
    this.body = make("tbody");
    const head = make("tr", {}, make("th", { scope: "col" }, "ago"));
    for (const line of lines) head.append(make("th", { scope: "col" }, line.label));
    this.details = make("details", { class: "numbers" }, make("summary", {}, `${title} as a table`));
    this.details.append(make("table", {}, make("thead", {}, head), this.body));
    this.details.addEventListener("toggle", () => this.#draw());
    const caption = make("figcaption", {}, make("strong", {}, title), keys);
    parent.append(make("figure", { class: "chart" }, caption, this.#svg, this.values, this.details));
    this.#svg.addEventListener("pointermove", (event) => this.#point(event));
    this.#svg.addEventListener("pointerleave", () => this.#unpoint());
    this.cursor.setAttribute("visibility", "hidden");
    new ResizeObserver(([entry]) => {
      this.#width = Math.max(160, entry.contentRect.width);
      this.#draw();
    }).observe(this.#svg);
  }

  /**
   * @param {number} nowS right edge
   * @param {Object<string, [number, number][]>} points by name of their line
   * @param {number | null} objective a level to mark
   */
  update(nowS, points, objective = null) {
    this.#data = { nowS, points, objective };
    this.#draw();
  }

  #x(atS) {
    return LEFT + ((atS - this.#data.nowS + WINDOW_S) / WINDOW_S) * (this.#width - LEFT - RIGHT);
  }

  #draw() {
    if (this.#data === null) return;
    const { nowS, points, objective } = this.#data;
    setAttribute(this.#svg, "viewBox", `0 0 ${this.#width} ${HEIGHT}`);
    let top = objective ?? 0;
    for (const line of this.#lines) for (const [, value] of points[line.name] ?? []) if (value > top) top = value;
    top = ceiling(top, this.whole);
    const y = (value) => HEIGHT - BOTTOM - (value / top) * (HEIGHT - TOP - BOTTOM);
    this.#drawGrid(top, y);
    setAttribute(this.marks, "visibility", objective === null ? "hidden" : "visible");
    setHidden(this.objectiveKey, objective === null);
    if (objective !== null) {
      for (const end of ["y1", "y2"]) setAttribute(this.marks, end, y(objective).toFixed(1));
      setAttribute(this.marks, "x1", LEFT);
      setAttribute(this.marks, "x2", this.#width - RIGHT);
    }
    this.#lines.forEach((line, i) => {
      setAttribute(this.paths[i], "d", this.#path(points[line.name] ?? [], y, line.isStep));
    });
    if (this.pointed === undefined) setText(this.values, `Now: ${this.#said(-1)}`);
    const nowMs = performance.now();
    if (nowMs - this.#spokenAtMs > SPOKEN_EVERY_MS) {
      this.#spokenAtMs = nowMs;
      setAttribute(this.#svg, "aria-label", `${this.#title}, last five minutes. Now ${this.#said(-1)}`);
    }
    if (this.details.open) this.#drawTable(nowS, points);
  }

  #drawGrid(top, y) {
    const levels = [0, top / 2, top];
    const minutes = [5, 4, 3, 2, 1, 0];
    const items = [
      ...levels.map((level) => ({ key: `y${level}`, level })),
      ...minutes.map((minute) => ({ key: `x${minute}`, minute })),
    ];
    const build = ({ level }) =>
      level === undefined
        ? makeSvg("g", {}, makeSvg("text", { class: "tick", y: HEIGHT - 5, "text-anchor": "middle" }))
        : makeSvg("g", {}, makeSvg("line"), makeSvg("text", { class: "tick", x: LEFT - 6, "text-anchor": "end" }));
    reconcile(this.grid, items, ({ key }) => key, build, (node, { level, minute }) => {
      const text = node.lastElementChild;
      if (level === undefined) {
        setText(text, minute ? `−${minute} min` : "now");
        setAttribute(text, "x", (minute ? this.#x(this.#data.nowS - minute * 60) : this.#width - RIGHT - 10).toFixed(1));
        setAttribute(text, "visibility", minute === 5 || (this.#width < 420 && minute % 2) ? "hidden" : "visible");
        return;
      }
      const at = y(level).toFixed(1);
      const line = node.firstElementChild;
      for (const [name, value] of [["x1", LEFT], ["x2", this.#width - RIGHT], ["y1", at], ["y2", at]]) {
        setAttribute(line, name, value);
      }
      setAttribute(text, "y", Number(at) + 4);
      setText(text, level ? this.#format(level) : "0");
    });
  }

  #path(points, y, isStep) {
    let text = "";
    let last = null;
    for (const [atS, value] of points) {
      if (!Number.isFinite(value)) {
        last = null;
        continue;
      }
      const px = this.#x(atS).toFixed(1);
      const py = y(value).toFixed(1);
      // A gap in time is a gap in the line: nobody knows what was there.
      if (last === null || atS - last.atS > 10) text += `M${px} ${py}`;
      else if (isStep) text += `H${px}V${py}`;
      else text += `L${px} ${py}`;
      last = { atS };
    }
    return text;
  }

  #said(index) {
    const parts = this.#lines.map((line) => {
      const points = this.#data.points[line.name] ?? [];
      const value = points.at(index)?.[1];
      const text = Number.isFinite(value) ? this.#format(value) : "not measured";
      return this.#lines.length > 1 ? `${line.label} ${text}` : text;
    });
    return parts.join(", ");
  }

  #point(event) {
    const points = this.#data?.points[this.#lines[0].name] ?? [];
    if (!points.length) return;
    const box = this.#svg.getBoundingClientRect();
    const atS =
      ((event.clientX - box.left - LEFT) / (this.#width - LEFT - RIGHT)) * WINDOW_S + this.#data.nowS - WINDOW_S;
    let nearest = 0;
    points.forEach(([pointS], i) => {
      if (Math.abs(pointS - atS) < Math.abs(points[nearest][0] - atS)) nearest = i;
    });
    this.pointed = nearest;
    const x = this.#x(points[nearest][0]).toFixed(1);
    for (const end of ["x1", "x2"]) this.cursor.setAttribute(end, x);
    this.cursor.setAttribute("visibility", "visible");
    setText(this.values, `${Math.round(this.#data.nowS - points[nearest][0])} s ago: ${this.#said(nearest)}`);
  }

  #unpoint() {
    this.pointed = undefined;
    this.cursor.setAttribute("visibility", "hidden");
    this.#draw();
  }

  #drawTable(nowS, points) {
    const rows = [];
    for (let ago = 0; ago < WINDOW_S; ago += ROW_S) {
      const cells = this.#lines.map((line) => {
        const found = (points[line.name] ?? []).filter(([atS]) => atS > nowS - ago - ROW_S && atS <= nowS - ago);
        const values = found.map(([, value]) => value).filter(Number.isFinite);
        return values.length ? this.#format(values.reduce((a, b) => a + b) / values.length) : "–";
      });
      if (cells.some((cell) => cell !== "–")) rows.push({ ago, cells });
    }
    reconcile(
      this.body,
      rows,
      (row) => String(row.ago),
      (row) =>
        make("tr", {}, make("th", { scope: "row" }, row.ago ? `${row.ago} s` : "now"), ...row.cells.map(() => make("td"))),
      (node, row) => row.cells.forEach((cell, i) => setText(node.children[i + 1], cell)),
    );
  }
}
