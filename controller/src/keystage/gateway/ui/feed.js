// The connection to the gateway's events: connects, hears, and connects again with growing pauses.
import { eventsOf } from "./sse.js";

const FIRST_PAUSE_MS = 500;
const LONGEST_PAUSE_MS = 15_000;
const LONGEST_PAUSE_WITHOUT_REPORT_MS = 3_000;
const SILENCE_MS = 40_000; // the gateway says something every 15 s

/**
 * States: `connecting`, `live`, `none` (no controller has reported), `denied`, `away`.
 */
export class Feed {
  #url;
  #onReport;
  #onState;
  #wake = () => {};
  #abort = new AbortController();

  /**
   * @param {URL} url
   * @param {(report: object) => void} onReport
   * @param {(state: {kind: string, text: string, retryAtMs: number}) => void} onState
   */
  constructor(url, onReport, onState) {
    this.#url = url;
    this.#onReport = onReport;
    this.#onState = onState;
    this.skewMs = 0; // the gateway's clock less this one's
  }

  /** Runs for ever. */
  async start() {
    addEventListener("online", () => this.retry());
    addEventListener("pagehide", () => this.#abort.abort());
    addEventListener("pageshow", (shown) => shown.persisted && this.retry());
    let failures = 0;
    this.#tell("connecting", "Connecting to the gateway.");
    for (;;) {
      const { kind, text, reports } = await this.#once();
      failures = reports ? 1 : failures + 1;
      const most = kind === "none" ? LONGEST_PAUSE_WITHOUT_REPORT_MS : LONGEST_PAUSE_MS;
      let pauseMs = Math.min(most, FIRST_PAUSE_MS * 2 ** (failures - 1)) * (0.8 + 0.4 * Math.random());
      // Asking again would open the browser's question for credentials again and again: a person asks.
      if (kind === "denied") pauseMs = Infinity;
      this.#tell(kind, text, performance.now() + pauseMs);
      if (await this.#pause(pauseMs)) failures = 0;
    }
  }

  /** Tries now instead of at the end of the pause. */
  retry() {
    this.#wake(true);
  }

  #tell(kind, text, retryAtMs = 0) {
    this.#onState({ kind, text, retryAtMs });
  }

  #pause(ms) {
    return new Promise((resolve) => {
      const timer = Number.isFinite(ms) ? setTimeout(resolve, ms, false) : 0;
      this.#wake = (asked) => {
        clearTimeout(timer);
        resolve(asked);
      };
    });
  }

  /** One connection, from its beginning to its end: why it ended, and how many reports it brought. */
  async #once() {
    this.#abort = new AbortController();
    let reports = 0;
    let silent = 0;
    const heard = () => {
      clearTimeout(silent);
      silent = setTimeout(() => this.#abort.abort(), SILENCE_MS);
    };
    heard();
    try {
      const answer = await fetch(this.#url, { signal: this.#abort.signal, cache: "no-store" });
      if (!answer.ok) {
        const text = (await answer.text()).trim().slice(0, 400);
        if (answer.status === 401) return { kind: "denied", text, reports };
        if (answer.status === 503) return { kind: "none", text, reports };
        return { kind: "away", text: `The gateway answered with status ${answer.status}: ${text}`, reports };
      }
      for await (const { event, data } of eventsOf(answer.body, heard)) {
        if (event === "clock") {
          this.skewMs = JSON.parse(data).now_s * 1000 - Date.now();
        } else if (event === "report") {
          const report = JSON.parse(data);
          if (!reports) this.#tell("live", "");
          reports += 1;
          try {
            this.#onReport(report);
          } catch (error) {
            console.error(error); // a fault of this page, no fault of the connection
          }
        }
      }
      return { kind: "away", text: "The gateway ended the connection.", reports };
    } catch (error) {
      const broken = reports ? "The connection broke off." : "It does not answer.";
      return { kind: "away", text: error.name === "AbortError" ? "It said nothing for 40 s." : broken, reports };
    } finally {
      clearTimeout(silent);
    }
  }
}
