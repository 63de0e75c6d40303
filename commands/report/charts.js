// The runs as data series, and the charts. Everything here depends on `state`, which the controls change.

const state = {x: "step", smoothing: 0, log: false, clip: true, zoom: null, hidden: new Set()};
const charts = [];

// ---- numbers as text

function group(value) { return Math.round(value).toLocaleString("en-US"); }

function compact(value) {
  const size = Math.abs(value);
  for (const [limit, letter] of [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e4, "k"]])
    if (size >= limit) return trim(value / (letter === "k" ? 1e3 : limit), 4) + (letter === "k" ? "k" : letter);
  return Number.isInteger(value) ? group(value) : trim(value, 4);
}

// At most `digits` significant digits, without trailing zeros.
function trim(value, digits) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size < 1e-4 || size >= 1e9) return value.toExponential(digits - 2).replace(/\.?0+e/, "e");
  if (size >= 1e5) return group(value);
  return Number(value.toPrecision(digits)).toLocaleString("en-US", {maximumFractionDigits: 12});
}

function known(value, text = value => trim(value, 5)) { return Number.isFinite(value) ? text(value) : "–"; }

function duration(seconds) {
  if (!Number.isFinite(seconds)) return "–";
  if (seconds < 100) return trim(seconds, 3) + " s";
  const minutes = Math.round(seconds / 60);
  if (minutes < 100) return minutes + " min";
  const hours = Math.floor(minutes / 60);
  if (hours < 48) return `${hours} h ${minutes % 60} min`;
  return `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

function bytes(count) {
  let unit = 0;
  while (count >= 1000 && unit < 5) { count /= 1024; unit++; }
  return trim(count, 3) + " " + ["B", "KiB", "MiB", "GiB", "TiB", "PiB"][unit];
}

const xAxes = {
  step: {title: "step", text: value => "step " + group(value)},
  tokens: {title: "tokens", text: value => compact(value) + " tokens"},
  hours: {title: "hours of training steps", text: value => duration(value * 3600)},
};

// ---- the records of a run

class Table {
  constructor(raw) {
    this.raw = raw ?? {count: 0, group: 1, steps: [], columns: {}};
    this.steps = this.raw.steps;
    this.isThinned = this.raw.group > 1;
    this.axes = {step: this.steps};
  }

  names() { return Object.keys(this.raw.columns); }

  // {mean, min, max}, arrays as long as steps; min and max are null without downsampling. Null: no such column.
  column(name) {
    const values = this.raw.columns[name];
    if (values === undefined) return null;
    if (typeof values === "number") return {mean: this.steps.map(() => values), min: null, max: null};
    return Array.isArray(values) ? {mean: values, min: null, max: null} : values;
  }

  // The coordinate of each point on the selected x axis; null if the run does not have it.
  axis(kind) {
    if (this.axes[kind] === undefined) this.axes[kind] = kind === "tokens" ? this.tokens() : this.hours();
    return this.axes[kind];
  }

  tokens() {
    const column = this.column("tokens");
    return column && column.mean.every(Number.isFinite) ? column.mean : null;
  }

  hours() {
    const column = this.column("step_ms");
    if (!column) return null;
    let sum = 0;
    return column.mean.map((ms, i) => {
      const records = Math.min(this.raw.group, this.raw.count - i * this.raw.group);
      return (sum += (ms ?? 0) * records) / 3.6e6;
    });
  }
}

class Run {
  constructor(raw, name, index) {
    this.raw = raw;
    this.name = name;
    this.index = index;
    this.tables = {};
    for (const kind of Object.keys(raw.tables)) this.tables[kind] = new Table(raw.tables[kind]);
    this.train = this.tables.train ?? new Table();
  }

  get color() { return css(`--run-${this.index % 6}`); }
  get isShown() { return !state.hidden.has(this.index); }

  // The x coordinates of a table's points. Tables other than "train" have only steps; the training records give the
  // other coordinates.
  xOf(table) {
    if (state.x === "step" || table === this.train) return table.axis(state.x);
    const axis = this.train.axis(state.x), steps = this.train.steps;
    if (!axis) return null;
    return table.steps.map(step => axis[Math.min(firstFrom(steps, step), steps.length - 1)]);
  }
}

// The first index whose value is at least `wanted`.
function firstFrom(values, wanted) {
  let low = 0, high = values.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] < wanted) low = middle + 1; else high = middle;
  }
  return low;
}

// The mean of all values, weighted by exp(-distance / steps): an exponential moving average in both directions, so that
// the line has no lag.
function smooth(at, values, steps) {
  if (!(steps > 0)) return values;
  const sums = new Float64Array(values.length), weights = new Float64Array(values.length);
  for (const direction of [1, -1]) {
    let sum = 0, weight = 0, last = 0;
    for (let k = 0, i = direction > 0 ? 0 : values.length - 1; k < values.length; k++, i += direction) {
      if (!Number.isFinite(values[i])) continue;
      const kept = weight > 0 ? Math.exp(-Math.abs(at[i] - last) / steps) : 0;
      sum = sum * kept + values[i];
      weight = weight * kept + 1;
      last = at[i];
      sums[i] += sum;
      weights[i] += weight;
    }
  }
  // Both directions count the value itself: subtract it once.
  return values.map((value, i) => Number.isFinite(value) ? (sums[i] - value) / (weights[i] - 1) : null);
}

// ---- colors

function css(name) { return getComputedStyle(document.documentElement).getPropertyValue(name).trim(); }

function faded(color, share) {
  const [r, g, b] = [1, 3, 5].map(i => parseInt(color.slice(i, i + 2), 16));
  return `rgba(${r}, ${g}, ${b}, ${share})`;
}

// ---- a chart

// A figure with a line of values above the plot and a table of values below. `spec` has: id, title, unit, wide, and
// lines(), which returns [{name, color, x, y, raw, band: {min, max}, dash, points, fill, ring}] for the current state.
// `y` is drawn as a line over `raw` and `band` in a faded color. isLog, canLog: log scale always, or optionally; clip:
// may have outliers; fromZero: always show 0; stacked: `y` are cumulative sums, and `own` are the values.
class Chart {
  constructor(parent, spec) {
    this.spec = spec;
    this.figure = make("figure", {id: spec.id, class: spec.wide ? "wide" : ""});
    this.title = make("h2", {}, spec.title);
    this.unit = make("span", {class: "unit"}, spec.unit ?? "");
    this.readout = make("div", {class: "readout"});
    this.plot = make("div", {class: "plot", tabindex: "0", role: "img"});
    this.values = make("div", {class: "table"});
    const details = make("details", {}, make("summary", {}, "Values"), this.values);
    details.addEventListener("toggle", () => this.fillTable());
    this.details = details;
    this.figure.append(make("figcaption", {}, this.title, this.unit), this.readout, this.plot, details);
    this.plot.addEventListener("keydown", event => this.onKey(event));
    parent.append(this.figure);
    new ResizeObserver(() => this.resize()).observe(this.plot);
    charts.push(this);
  }

  draw() {
    this.uplot?.destroy();
    this.uplot = null;
    this.lines = this.spec.lines().filter(line => line.x && line.x.length > 0);
    this.figure.hidden = this.lines.length === 0;
    if (this.figure.hidden) return;
    const layers = this.layers(), width = this.plot.clientWidth || 300;
    const isLog = this.spec.isLog || state.log && this.spec.canLog;
    const positive = values => isLog ? values.map(value => value > 0 ? value : null) : values;
    const tables = layers.map(layer => [layer.x, positive(layer.y)]);
    const isAligned = tables.every(([x]) => x === tables[0][0]);
    const data = isAligned ? [tables[0][0], ...tables.map(([, y]) => y)] : uPlot.join(tables);
    this.layersDrawn = layers;
    const axis = {stroke: css("--quiet"), grid: {stroke: css("--grid"), width: 1}, ticks: {show: false},
                  font: "12px system-ui, sans-serif"};
    this.uplot = new uPlot({
      width, height: this.height(), pxAlign: false,
      scales: {
        x: {time: false, range: () => state.zoom ?? xExtent()},
        y: {distr: isLog ? 3 : 1, range: (u, min, max) => this.yRange(u, min, max, isLog)},
      },
      axes: [
        {...axis, size: 30, gap: 6, space: 70, values: labels(compact)},
        {...axis, size: (u, texts) => 14 + 7.2 * Math.max(3, ...(texts ?? []).map(text => String(text ?? "").length)),
         values: labels(this.spec.tick ?? compactTick)},
      ],
      series: [{}, ...layers.map(layer => ({
        stroke: layer.stroke, width: layer.width, fill: layer.fill, dash: layer.dash, spanGaps: true,
        points: {show: layer.points ?? false, size: 6, fill: css("--card"), width: 2},
        paths: layer.stepped ? uPlot.paths.stepped({align: 1}) : undefined,
      }))],
      bands: layers.flatMap((layer, i) => layer.bandTo ? [{series: [i + 1, i + 2], fill: layer.bandTo}] : []),
      legend: {show: false},
      cursor: {
        y: false, drag: {x: true, y: false, setScale: false, dist: 4},
        points: {show: (u, i) => this.layersDrawn[i - 1].line ? make("div") : undefined, size: 7},
        sync: {key: "charts", filters: {pub: type => type === "mousemove" || type === "mouseleave"}},
        bind: {dblclick: () => () => { setZoom(null); return null; }},
      },
      hooks: {
        setCursor: [u => this.showValues(u.cursor.idx)],
        setSelect: [u => {
          if (u.select.width < 4) return;
          const ends = [u.select.left, u.select.left + u.select.width].map(left => u.posToVal(left, "x"));
          u.setSelect({left: 0, top: 0, width: 0, height: 0}, false);
          setZoom(ends);
        }],
      },
    }, data, this.plot);
    listenForTouch(this.uplot);
    this.showValues(null);
    this.describe();
    this.fillTable();
  }

  // The layers from back to front: faded values, then lines.
  layers() {
    const back = [], front = [];
    for (const line of this.lines) {
      const behind = {x: line.x, width: 0};
      if (line.band) {
        back.push({...behind, y: line.band.max, bandTo: faded(line.color, 0.22)}, {...behind, y: line.band.min});
      } else if (line.raw) {
        back.push({...behind, y: line.raw, stroke: faded(line.color, 0.28), width: 1});
      }
      front.push({x: line.x, y: line.y, stroke: line.color, width: line.width ?? 2, dash: line.dash,
                  points: line.points, fill: line.fill, stepped: line.stepped, line});
    }
    return [...back, ...front];
  }

  height() { return this.spec.wide ? (innerWidth < 820 ? 260 : 360) : 220; }

  resize() {
    if (this.uplot && Math.abs(this.uplot.width - this.plot.clientWidth) > 1)
      this.uplot.setSize({width: this.plot.clientWidth, height: this.height()});
  }

  // The range of the visible values, without outliers if they are clipped.
  yRange(u, min, max, isLog) {
    if (min === null || min === undefined) return [0, 1];
    if (this.spec.stacked) min = 0;
    if (state.clip && this.spec.clip) {
      const [from, to] = state.zoom ?? xExtent();
      let low = Infinity, high = -Infinity;
      for (const {x, raw, y} of this.lines) {
        const all = (raw ?? y).slice(firstFrom(x, from), firstFrom(x, to) + 1);
        const seen = all.filter(value => Number.isFinite(value) && !(isLog && value <= 0)).sort((a, b) => a - b);
        if (seen.length === 0) continue;
        low = Math.min(low, seen[seen.length > 50 ? Math.floor(seen.length * 0.002) : 0]);
        high = Math.max(high, seen[seen.length > 50 ? Math.ceil(seen.length * 0.98) - 1 : seen.length - 1]);
      }
      if (low <= high) [min, max] = [low, high];
    }
    if (isLog) return [min * 0.95, max * 1.05];
    if (this.spec.fromZero) min = Math.min(min, 0);
    const pad = (max - min || Math.abs(max) || 1) * 0.05;
    return [this.spec.stacked || (this.spec.fromZero && min === 0) ? 0 : min - pad, max + pad];
  }

  // The values at the cursor, or the last ones.
  showValues(index) {
    const u = this.uplot;
    if (!u) return;
    const at = index ?? u.data[0].length - 1;
    const items = [make("span", {class: "quiet"}, index === null || index === undefined
      ? "last" : xAxes[state.x].text(u.data[0][at]))];
    this.layersDrawn.forEach((layer, i) => {
      if (!layer.line) return;
      const values = u.data[i + 1];
      let place = at;
      while (place > 0 && !Number.isFinite(values[place])) place--;
      const value = this.spec.stacked ? layer.line.own[place] : values[place];
      items.push(make("span", {}, swatch(layer.line), make("span", {class: "name"}, layer.line.name), " ",
                      make("b", {}, known(value, this.spec.text))));
    });
    this.readout.replaceChildren(...items);
  }

  describe() {
    const parts = this.lines.map(line => {
      const values = (line.own ?? line.y).filter(Number.isFinite), text = this.spec.text ?? (value => trim(value, 5));
      if (values.length === 0) return `${line.name}: no values`;
      const low = values.reduce((a, b) => Math.min(a, b)), high = values.reduce((a, b) => Math.max(a, b));
      return `${line.name}: from ${text(values[0])} to ${text(values.at(-1))}, range ${text(low)} to ${text(high)}`;
    });
    this.plot.setAttribute("aria-label", `${this.spec.title} by ${xAxes[state.x].title}. ${parts.join("; ")}. ` +
      "Keys: plus and minus to zoom, arrows to pan, 0 to reset.");
  }

  // A table of twenty rows over the visible range, for screen readers.
  fillTable() {
    if (!this.details.open || !this.uplot) return;
    const [from, to] = state.zoom ?? xExtent(), rows = [];
    for (let i = 0; i <= 20; i++) {
      const x = from + (to - from) * i / 20;
      rows.push([compact(x), ...this.lines.map(line => {
        const place = Math.min(firstFrom(line.x, x), line.x.length - 1);
        return known((line.own ?? line.y)[place], this.spec.text);
      })]);
    }
    this.values.replaceChildren(table([xAxes[state.x].title, ...this.lines.map(line => line.name)], rows));
  }

  onKey(event) {
    const full = xExtent(), [from, to] = state.zoom ?? full, size = to - from, middle = (from + to) / 2;
    const actions = {
      "+": () => [middle - size / 4, middle + size / 4], "-": () => [middle - size, middle + size],
      "ArrowLeft": () => [from - size / 5, to - size / 5], "ArrowRight": () => [from + size / 5, to + size / 5],
      "0": () => null, "Escape": () => null,
    };
    if (!actions[event.key] || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    setZoom(actions[event.key]());
  }
}

function labels(text) { return (u, ticks) => ticks.map(tick => tick === null ? "" : text(tick)); }

function compactTick(value) {
  const size = Math.abs(value);
  return size >= 1e4 ? compact(value) : trim(Number(value.toPrecision(10)), 6);
}

function swatch(line) {
  const mark = make("span", {class: line.ring ? "swatch ring" : "swatch"});
  mark.style.background = line.color;
  mark.style.borderColor = line.color;
  return mark;
}

// Touch: a horizontal swipe selects a range to zoom into; a vertical one scrolls the page.
function listenForTouch(u) {
  let start = null;
  const left = event => {
    const box = u.over.getBoundingClientRect();
    return Math.max(0, Math.min(box.width, event.clientX - box.left));
  };
  u.over.addEventListener("pointerdown", event => { if (event.pointerType === "touch") start = left(event); });
  u.over.addEventListener("pointermove", event => {
    if (start === null) return;
    const now = left(event);
    u.setCursor({left: now, top: 10});
    u.setSelect({left: Math.min(start, now), top: 0, width: Math.abs(now - start), height: u.over.clientHeight}, false);
  });
  u.over.addEventListener("pointerup", event => {
    if (start === null) return;
    const ends = [start, left(event)].sort((a, b) => a - b);
    start = null;
    u.setSelect({left: 0, top: 0, width: 0, height: 0}, false);
    if (ends[1] - ends[0] > 12) setZoom(ends.map(end => u.posToVal(end, "x")));
  });
  u.over.addEventListener("pointercancel", () => {
    start = null;
    u.setSelect({left: 0, top: 0, width: 0, height: 0}, false);
  });
}
