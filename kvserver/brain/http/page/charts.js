// Figures over time, drawn as SVG, read out under the pointer and by arrow keys.

/** One figure. series: [{name, class, of}] from the bottom up; of(seen) is a bin's value, null when there is none. */
class Chart {
  constructor(id, series, { stacked, limit, words }) {
    Object.assign(this, { series, stacked, limit, words, figure: $(id), at: null, bins: [] });
    this.svg = this.figure.querySelector(".plot svg");
    for (const [name, value] of [["viewBox", `0 0 ${BINS} 100`], ["preserveAspectRatio", "none"]])
      this.svg.setAttribute(name, value);
    for (const y of [25, 50, 75]) shape(this.svg, "line", { class: "grid", x1: 0, x2: BINS, y1: y, y2: y });
    this.paths = series.map((one) => shape(this.svg, "path", { class: `${one.class} ${stacked ? "bars" : "line"}` }));
    this.cursor = shape(this.svg, "rect", { class: "cursor", y: 0, width: 1, height: 100, visibility: "hidden" });
    this.legend = series.map((one) => this.entry(one));
    this.svg.addEventListener("pointermove", (event) => {
      const box = this.svg.getBoundingClientRect();
      this.point(Math.floor((BINS * (event.clientX - box.left)) / box.width));
    });
    this.svg.addEventListener("pointerleave", () => this.point(null));
    this.svg.addEventListener("blur", () => this.point(null));
    this.svg.addEventListener("keydown", (event) => {
      const moves = { ArrowLeft: -1, ArrowRight: 1 };
      if (event.key === "Escape") this.point(null);
      if (!(event.key in moves)) return;
      event.preventDefault();
      this.point((this.at ?? BINS) + moves[event.key]);
    });
  }

  entry(one) {
    const item = element(this.figure.querySelector(".legend"), "li", "");
    const swatch = shape(item, "svg", { viewBox: "0 0 20 12", "aria-hidden": "true" });
    if (this.stacked) shape(swatch, "rect", { class: `${one.class} bars`, x: 2, y: 0, width: 14, height: 12, rx: 2 });
    else shape(swatch, "path", { class: `${one.class} line`, d: "M0 6H20" });
    element(item, "span", "").textContent = one.name;
    return { item, value: element(item, "b", "") };
  }

  /** Reads out one bin; null: all of them. */
  point(at) {
    this.at = at === null ? null : Math.min(Math.max(at, 0), BINS - 1);
    if (samples.length) this.read();
  }

  draw(seconds) {
    this.bins = bins(seconds);
    this.seen = lately(seconds);
    const values = this.series.map((one) => this.bins.map((bin) => (bin.seen.seconds > 0 ? one.of(bin.seen) : null)));
    const top = this.limit(Math.max(0, ...values.flat().filter((value) => value !== null)));
    put(this.figure.querySelector(".top"), this.words(top));
    const under = new Array(BINS).fill(0);
    this.paths.forEach((path, which) => {
      const heights = values[which].map((value) => (value === null ? null : (100 * value) / top));
      path.setAttribute("d", this.stacked ? bars(heights, under) : steps(heights));
    });
    this.series.forEach((one, which) => (this.legend[which].item.hidden = one.hidden?.() ?? false));
    this.read();
  }

  read() {
    const bin = this.at === null ? null : this.bins[this.at];
    const seen = bin ? bin.seen : this.seen;
    this.cursor.setAttribute("visibility", bin ? "visible" : "hidden");
    this.cursor.setAttribute("x", this.at ?? 0);
    const when = bin ? `${clock(bin.ms)} to ${clock(bin.until)}` : `the last ${duration(this.seen.seconds)}`;
    put(this.figure.querySelector(".when"), when);
    const said = this.series.map((one, which) => {
      const value = seen.seconds > 0 ? one.of(seen) : null;
      put(this.legend[which].value, value === null ? "–" : this.words(value));
      return `${one.name} ${this.legend[which].value.textContent}`;
    });
    const title = this.figure.querySelector("h2").textContent;
    this.svg.setAttribute("aria-label", `${title}, ${when}: ${said.join(", ")}. Arrow keys read out one time.`);
  }
}

/** One bar a bin, on top of what is under it; adds them to that. */
function bars(heights, under) {
  return heights
    .map((height, at) => {
      if (!height) return "";
      const low = 100 - under[at];
      under[at] += height;
      return `M${at + 0.06} ${low}V${low - height}h.88V${low}z`;
    })
    .join("");
}

/** A step a bin; nothing where nothing is known. */
function steps(heights) {
  return heights
    .map((height, at) => {
      if (height === null) return "";
      const y = 98.5 - 0.97 * height;
      return `${at > 0 && heights[at - 1] !== null ? `V${y}` : `M${at} ${y}`}H${at + 1}`;
    })
    .join("");
}

function roundUp(value) {
  const power = 10 ** Math.floor(Math.log10(Math.max(value, 1000)));
  return power * [1, 1.5, 2, 3, 4, 5, 6, 8, 10].find((step) => step * power >= value * 0.999);
}
