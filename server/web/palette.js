// The map's colours. In: the ids of the running requests, and the style sheet's colours. Out: a colour for each request
// that stays its own while it runs, and differs from its neighbours'.

const GOLDEN_ANGLE = 137.508;
const FIRST_HUE = 212;

export class Palette {
  /** Request id to slot; the slot of a request that has ended is given away again. */
  #slots = new Map();
  #isDark = false;

  /** Forget all requests but these, and give the new ones a slot. */
  keep(ids) {
    const current = new Set(ids);
    for (const id of this.#slots.keys()) if (!current.has(id)) this.#slots.delete(id);
    const taken = new Set(this.#slots.values());
    let next = 0;
    for (const id of current) {
      if (this.#slots.has(id)) continue;
      while (taken.has(next)) next += 1;
      taken.add(next);
      this.#slots.set(id, next);
    }
  }

  slot(id) {
    return this.#slots.get(id);
  }

  /** Slots that follow each other lie far apart on the colour wheel, however many there are. */
  colour(slot) {
    const hue = Math.round(FIRST_HUE + slot * GOLDEN_ANGLE) % 360;
    return `hsl(${hue} 70% ${this.#isDark ? 60 : 55}%)`;
  }

  /** Take the style sheet's colours, which follow the colour scheme. */
  readScheme() {
    const style = getComputedStyle(document.documentElement);
    this.#isDark = matchMedia("(prefers-color-scheme: dark)").matches;
    this.free = style.getPropertyValue("--cell-free");
    this.shade = style.getPropertyValue("--cell-shade");
    this.mark = style.getPropertyValue("--cell-mark");
    this.outline = style.getPropertyValue("--text");
  }
}
