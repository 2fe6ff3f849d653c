// Numbers in words. A number that was not measured is a dash.

export const NONE = "–";

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

/** A number with as many digits as tell something. */
export function count(value) {
  if (!isNumber(value)) return NONE;
  if (Math.abs(value) >= 10_000) return `${trim((value / 1000).toFixed(1))}k`;
  if (Number.isInteger(value) || Math.abs(value) >= 100) return String(Math.round(value));
  return trim(value.toFixed(Math.abs(value) >= 10 ? 1 : 2));
}

/** A rate a second. */
export const rate = (value) => (isNumber(value) ? `${count(value)}/s` : NONE);

/** Seconds, as ms, s, min or h. */
export function seconds(value) {
  if (!isNumber(value)) return NONE;
  if (value < 0.001) return value <= 0 ? "0 ms" : "< 1 ms";
  if (value < 0.0995) return `${trim((value * 1000).toFixed(1))} ms`;
  if (value < 0.9995) return `${Math.round(value * 1000)} ms`;
  if (value < 100) return `${trim(value.toFixed(2))} s`;
  if (value < 3600) return `${Math.round(value / 60)} min`;
  return `${trim((value / 3600).toFixed(1))} h`;
}

/** A ratio as per cent. */
export const percent = (value) => (isNumber(value) ? `${Math.round(value * 100)} %` : NONE);

/** Bytes in binary units. */
export function bytes(value) {
  if (!isNumber(value)) return NONE;
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  let left = value;
  while (left >= 1024 && unit < units.length - 1) {
    left /= 1024;
    unit += 1;
  }
  return `${unit && left < 100 ? trim(left.toFixed(1)) : Math.round(left)} ${units[unit]}`;
}

/** A time of day, hours to seconds. */
export function clock(atS) {
  const at = new Date(atS * 1000);
  return [at.getHours(), at.getMinutes(), at.getSeconds()].map((part) => String(part).padStart(2, "0")).join(":");
}

/** `1st`, `2nd`, `11th`, `23rd`. */
export function ordinal(value) {
  const last = value % 100 >= 11 && value % 100 <= 13 ? 0 : value % 10;
  return `${value}${{ 1: "st", 2: "nd", 3: "rd" }[last] ?? "th"}`;
}

/** `1 replica`, `2 replicas`. */
export const plural = (value, one, many = `${one}s`) => `${value} ${value === 1 ? one : many}`;

const trim = (text) => (text.includes(".") ? text.replace(/\.?0+$/, "") : text);
