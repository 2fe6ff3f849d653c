// Nodes: memory of their GPUs and host, and whose parameters they keep.
import { make, reconcile, setAttribute, setFill, setHidden, setText } from "./dom.js";
import { bytes, count, plural } from "./format.js";

const MOST = 200; // nodes that are shown
const NAMES = 12; // functions named per place

export class Nodes {
  constructor(list, note) {
    this.list = list;
    this.note = note;
  }

  update(nodes) {
    const hidden = nodes.length - MOST;
    setHidden(this.note, nodes.length > 0 && hidden <= 0);
    setText(this.note, nodes.length ? `${plural(hidden, "node")} more are not shown.` : "No node has told what it has.");
    reconcile(this.list, nodes.slice(0, MOST), (node) => node.node, build, update);
  }
}

function build(node) {
  const card = make("li", { class: "node" }, make("h3", {}, node.node));
  card.gpus = make("ul", { class: "gpus" });
  card.host = make("p", { class: "host" });
  card.memory = cached("in memory");
  card.disk = cached("on disk");
  card.append(card.gpus, card.host, card.memory, card.disk);
  return card;
}

function cached(where) {
  const line = make("p", { class: "cached" }, make("span", {}, `Parameters ${where}: `), make("b"));
  return line;
}

function update(card, node) {
  const gpus = (node.gpus ?? []).map((gpu, index) => ({ ...gpu, index }));
  setHidden(card.gpus, gpus.length === 0);
  reconcile(
    card.gpus,
    gpus,
    (gpu) => String(gpu.index),
    (gpu) => {
      const bar = make("div", { class: "bar gpu-bar", "aria-hidden": "true" }, make("div", { class: "fill" }));
      return make("li", {}, make("span", { class: "gpu" }, `GPU ${gpu.index}`), bar, make("span", { class: "gpu-text" }));
    },
    (item, gpu) => {
      const used = gpu.total_bytes - gpu.free_bytes;
      setFill(item.children[1].firstElementChild, gpu.total_bytes ? used / gpu.total_bytes : 0);
      const text = `${bytes(used)} of ${bytes(gpu.total_bytes)}, ${plural(gpu.replicas ?? 0, "replica")}`;
      setText(item.children[2], text);
    },
  );
  const gpuText = gpus.length ? "" : "No GPU. ";
  setText(
    card.host,
    `${gpuText}${count(node.cores_free ?? 0)} cores free, ${bytes(node.memory_free_bytes ?? 0)} of memory for parameters`,
  );
  name(card.memory, node.in_memory ?? []);
  name(card.disk, node.on_disk ?? []);
}

function name(line, functions) {
  const rest = functions.length - NAMES;
  const text = functions.slice(0, NAMES).join(", ") + (rest > 0 ? ` and ${rest} more` : "");
  setText(line.lastElementChild, text || "none");
  setAttribute(line, "title", rest > 0 ? functions.join(", ") : null);
}
