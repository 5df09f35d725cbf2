// The block map: every KV block as a cell, in order of id. In: the `blocks` of /live. Out: a canvas on which only cells
// that have changed are painted again, the same in words, and a table of the requests that hold blocks.

import { Palette } from "./palette.js";

const MAX_CELL = 14;
const MIN_CELL = 3;
const MAX_HEIGHT = 340;
const MOVES = { ArrowLeft: () => -1, ArrowRight: () => 1, ArrowUp: (columns) => -columns, ArrowDown: (columns) => columns };

const count = (number, noun) => `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;

export class BlockMap {
  #canvas = document.getElementById("map");
  #context = this.#canvas.getContext("2d");
  #palette = new Palette();
  #blocks = null;
  /** Per cell: index of the request that holds it or -1, how many sequences do, whether it is cached. */
  #owners = new Int32Array(0);
  #references = new Int32Array(0);
  #cached = new Uint8Array(0);
  /** Per cell: what is painted, as one number; -1 where nothing is. */
  #painted = new Int32Array(0);
  #width = 0;
  #size = 0;
  #columns = 1;
  /** The cell that is pointed at, or -1. */
  #cursor = -1;

  constructor() {
    new ResizeObserver(([{ contentRect }]) => {
      this.#width = contentRect.width;
      this.#layOut();
    }).observe(this.#canvas.parentElement);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.#layOut());
    for (const kind of ["pointermove", "pointerdown"]) {
      this.#canvas.addEventListener(kind, (event) => this.#pointAt(event));
    }
    this.#canvas.addEventListener("keydown", (event) => this.#move(event));
  }

  /** Show `blocks`; `ownId` is what /live calls this page's own request. */
  show(blocks, ownId) {
    if (!blocks) return;
    const hadCells = this.#owners.length;
    this.#blocks = blocks;
    this.#unpack(blocks.runs);
    this.#palette.keep(blocks.requests.map((request) => request.id));
    if (this.#owners.length !== hadCells) this.#layOut();
    else this.#paint();
    this.#describe();
    this.#list(ownId);
    if (this.#cursor >= 0) this.#describeCell();
  }

  #unpack(runs) {
    const length = runs.reduce((sum, [cells]) => sum + cells, 0);
    if (length !== this.#owners.length) {
      this.#owners = new Int32Array(length);
      this.#references = new Int32Array(length);
      this.#cached = new Uint8Array(length);
      this.#cursor = -1;
    }
    let start = 0;
    for (const [cells, owner, references, cached] of runs) {
      this.#owners.fill(owner, start, start + cells);
      this.#references.fill(references, start, start + cells);
      this.#cached.fill(cached, start, start + cells);
      start += cells;
    }
  }

  /** The largest cells with which the map stays low enough, then all of it painted anew. */
  #layOut() {
    const width = this.#width;
    const cells = this.#owners.length;
    if (!width || !cells) return;
    const heightOf = (size) => Math.ceil(cells / Math.floor(width / size)) * size;
    this.#size = MAX_CELL;
    while (this.#size > MIN_CELL && heightOf(this.#size) > MAX_HEIGHT) this.#size -= 1;
    this.#columns = Math.floor(width / this.#size);
    const scale = window.devicePixelRatio || 1;
    const shown = [Math.min(this.#columns, cells) * this.#size, heightOf(this.#size)];
    [this.#canvas.style.width, this.#canvas.style.height] = shown.map((pixels) => `${pixels}px`);
    [this.#canvas.width, this.#canvas.height] = shown.map((pixels) => Math.round(pixels * scale));
    this.#context.scale(scale, scale);
    this.#palette.readScheme();
    this.#painted = new Int32Array(cells).fill(-1);
    this.#paint();
  }

  #paint() {
    const requests = this.#blocks.requests;
    for (let cell = 0; cell < this.#painted.length; cell++) {
      const owner = this.#owners[cell];
      const slot = owner < 0 ? 0 : 1 + this.#palette.slot(requests[owner].id);
      const isShared = this.#references[cell] > 1;
      const look = ((slot * 2 + isShared) * 2 + this.#cached[cell]) * 2 + (cell === this.#cursor);
      if (look === this.#painted[cell]) continue;
      this.#painted[cell] = look;
      this.#paintCell(cell, slot ? this.#palette.colour(slot - 1) : this.#palette.free, isShared);
    }
  }

  #paintCell(cell, colour, isShared) {
    const context = this.#context;
    const x = (cell % this.#columns) * this.#size;
    const y = Math.floor(cell / this.#columns) * this.#size;
    const side = this.#size - (this.#size > MIN_CELL ? 1 : 0.5);
    context.clearRect(x, y, this.#size, this.#size);
    context.fillStyle = colour;
    context.fillRect(x, y, side, side);
    if (this.#cached[cell]) {
      context.fillStyle = this.#palette.shade;
      context.fillRect(x, y + side / 2, side, side / 2);
    }
    if (isShared) {
      context.fillStyle = this.#palette.mark;
      const dot = Math.max(side / 3, 1);
      context.fillRect(x + (side - dot) / 2, y + side / 4 - dot / 2, dot, dot);
    }
    if (cell === this.#cursor) {
      context.strokeStyle = this.#palette.outline;
      context.lineWidth = 2;
      context.strokeRect(x + 1, y + 1, side - 2, side - 2);
    }
  }

  #describe() {
    const { num_blocks, num_used, num_shared, num_cached } = this.#blocks;
    const shown = this.#owners.length;
    document.getElementById("map-text").textContent =
      `${count(num_blocks, "block")}: ${num_used.toLocaleString("en")} held, ${num_shared.toLocaleString("en")} of them ` +
      `shared; ${(num_blocks - num_used).toLocaleString("en")} free. ` +
      `${num_cached.toLocaleString("en")} are kept for prompts that begin alike.` +
      (shown < num_blocks ? ` The map shows the first ${shown.toLocaleString("en")}.` : "");
  }

  #list(ownId) {
    const rows = this.#blocks.requests.map((request) => {
      const row = document.createElement("tr");
      const name = document.createElement("th");
      name.scope = "row";
      const key = document.createElement("i");
      key.className = "key";
      key.style.backgroundColor = this.#palette.colour(this.#palette.slot(request.id));
      const choices = request.num_sequences > 1 ? ` × ${request.num_sequences}` : "";
      name.append(key, `${request.id}${choices}${request.id === ownId ? " (this chat)" : ""}`);
      row.append(name);
      for (const value of [request.num_tokens, request.num_cached_tokens, request.num_blocks]) {
        row.insertCell().textContent = value.toLocaleString("en");
      }
      return row;
    });
    const table = document.getElementById("requests");
    table.tBodies[0].replaceChildren(...rows);
    table.hidden = !rows.length;
  }

  #pointAt(event) {
    const { left, top } = this.#canvas.getBoundingClientRect();
    const column = Math.floor((event.clientX - left) / this.#size);
    const row = Math.floor((event.clientY - top) / this.#size);
    if (column >= 0 && column < this.#columns) this.#select(row * this.#columns + column);
  }

  #move(event) {
    const step = MOVES[event.key]?.(this.#columns);
    if (!step) return;
    event.preventDefault();
    this.#select(this.#cursor < 0 ? 0 : this.#cursor + step);
  }

  #select(cell) {
    if (cell === this.#cursor || cell < 0 || cell >= this.#owners.length) return;
    this.#cursor = cell;
    this.#paint();
    this.#describeCell();
  }

  #describeCell() {
    const cell = this.#cursor;
    const owner = this.#owners[cell];
    const holder = owner < 0 ? "free" : `held by request ${this.#blocks.requests[owner].id}`;
    const shared = this.#references[cell] > 1 ? `, shared by ${this.#references[cell]} sequences` : "";
    const cached = this.#cached[cell] ? ", kept for prompts that begin alike" : "";
    const text = `Block ${cell + 1}: ${holder}${shared}${cached}.`;
    const line = document.getElementById("map-cell");
    if (line.textContent !== text) line.textContent = text; // a screen reader says each change
  }
}
