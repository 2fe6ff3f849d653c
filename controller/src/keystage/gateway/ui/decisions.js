// The decision log in words, the newest first, with a filter.
import { make, reconcile, setHidden, setText } from "./dom.js";
import { clock, NONE, plural } from "./format.js";

const PAGE = 100;

export class Decisions {
  #all = [];
  #shown = PAGE;
  #drawn = "";
  #isFirst = true;

  /**
   * @param {{list: Element, text: HTMLInputElement, kind: HTMLSelectElement, note: Element, more: Element,
   *   announce: (text: string) => void}} parts
   */
  constructor(parts) {
    this.parts = parts;
    const filtered = () => {
      this.#draw();
      parts.announce(parts.note.textContent);
    };
    parts.text.addEventListener("input", filtered);
    parts.kind.addEventListener("change", filtered);
    parts.more.addEventListener("click", () => {
      this.#shown += PAGE;
      this.#draw();
    });
  }

  /** Shows only what names a function. */
  filter(text) {
    this.parts.text.value = text;
    this.#draw();
  }

  /** Takes a report's log; tells which entries are new since the one before. */
  update(report) {
    const before = this.#all[0];
    const all = (report.decisions ?? [])
      .map((decision) => ({ ...decision, key: `${report.controller}/${decision.number}` }))
      .reverse();
    const isSame = before?.key === all[0]?.key && this.#all.length === all.length;
    if (isSame && !this.#isFirst) return [];
    const known = new Set(this.#all.map(({ key }) => key));
    // What was decided before the page was opened is no news.
    const news = this.#isFirst ? [] : all.filter(({ key }) => !known.has(key));
    this.#isFirst = false;
    this.#all = all;
    this.#draw();
    return news;
  }

  /** Entries within a time, the oldest first. */
  between(beganS, toS) {
    return this.#all.filter(({ at_s: atS }) => atS >= beganS && atS <= toS).reverse();
  }

  #draw() {
    const { list, text, kind, note, more } = this.parts;
    const words = text.value.toLowerCase().split(/\s+/).filter(Boolean);
    const found = this.#all.filter((decision) => {
      if (kind.value && decision.kind !== kind.value) return false;
      const hay = `${decision.function} ${decision.kind} ${decision.text}`.toLowerCase();
      return words.every((word) => hay.includes(word));
    });
    const isFiltered = Boolean(words.length || kind.value);
    const shown = found.slice(0, this.#shown);
    reconcile(list, shown, ({ key }) => key, build);
    setHidden(more, shown.length === found.length);
    setText(more, `Show ${Math.min(PAGE, found.length - shown.length)} more`);
    let said = plural(this.#all.length, "decision");
    if (isFiltered) said = `${found.length} of ${said}`;
    if (!this.#all.length) said = "Nothing was decided yet: every function has the replicas it needs.";
    if (said !== this.#drawn) setText(note, (this.#drawn = said));
  }
}

/** Five digits; what is no number comes as null. */
const precise = (value) => (Number.isFinite(value) ? String(Number(value.toPrecision(5))) : NONE);

function build(decision) {
  const at = new Date(decision.at_s * 1000);
  const item = make("li", { class: `decision ${decision.kind}` });
  item.append(
    make("time", { datetime: at.toISOString(), title: at.toLocaleString() }, clock(decision.at_s)),
    make("span", { class: "kind" }, decision.kind.replace("-", " ")),
    make("span", { class: "function" }, decision.function),
    make("p", {}, decision.text),
  );
  const inputs = Object.entries(decision.inputs ?? {});
  if (inputs.length) {
    const list = make("dl", { class: "facts" });
    for (const [name, value] of inputs) {
      list.append(make("div", {}, make("dt", {}, name), make("dd", {}, precise(value))));
    }
    item.append(make("details", {}, make("summary", {}, "its inputs"), list));
  }
  return item;
}
