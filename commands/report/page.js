"use strict";
// The tables and charts of the page. The element #data contains the runs.

const data = JSON.parse(document.getElementById("data").textContent);
const runs = data.runs;
const colors = ["#3b82f6", "#ea6a12", "#22a06b", "#c04bd0", "#b7860b", "#0e9aa7"];  // visible on white and on black
const charts = [];
const hidden = new Set();  // labels of lines that are switched off in the legends

function byId(id) {
  return document.getElementById(id);
}

function make(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

// ---- numbers as text; an unknown value is an empty text

const compact = new Intl.NumberFormat("en", {notation: "compact", maximumSignificantDigits: 4});

function number(value, digits = 5) {
  if (!Number.isFinite(value)) return "";
  return Math.abs(value) >= 1e5 ? compact.format(value) : String(Number(value.toPrecision(digits)));
}

function whole(value) {
  return Number.isFinite(value) ? value.toLocaleString("en") : "";
}

function withUnit(value, unit, digits = 3) {
  return Number.isFinite(value) ? `${number(value, digits)} ${unit}` : "";
}

function duration(seconds) {
  const units = [[86400, "days"], [3600, "hours"], [60, "minutes"]];
  const [size, name] = units.find(([size]) => seconds >= 2 * size) ?? [1, "seconds"];
  return withUnit(seconds / size, name);
}

// ---- tables

// A row is a name and texts. Rows for which isMarked(texts) are highlighted.
function table(head, rows, isMarked = () => false) {
  const body = rows.map(([name, ...texts]) => make(
    "tr", isMarked(texts) ? {class: "differs"} : {},
    make("th", {scope: "row"}, name), ...texts.map(text => make("td", {}, text || "–"))));
  const heads = head.map(text => make("th", {scope: "col"}, text));
  return make("table", {}, make("thead", {}, make("tr", {}, ...heads)), make("tbody", {}, ...body));
}

// The names of the facts that any run has.
function namesOf(facts) {
  return Object.keys(facts[0]).filter(name => facts.some(texts => texts[name]));
}

function results({summary, config}) {
  const best = number(summary.best_val_loss);
  const steps = config.train?.max_steps;
  return {
    "step": whole(summary.step) + (steps ? ` of ${whole(steps)}` : ""),
    "training loss": number(summary.loss),
    "validation loss": number(summary.val_loss),
    "best validation loss": best && `${best} (step ${whole(summary.best_val_step)})`,
    "best bits per byte": number(summary.best_bits_per_byte),
    "tokens": number(summary.tokens),
    "tokens/s (median)": number(summary.tokens_per_s),
    "MFU (median)": withUnit(summary.mfu * 100, "%"),
    "time in steps": duration(summary.step_s),
  };
}

function environment(run) {
  const start = run.starts?.at?.(-1) ?? {};
  const memory = Object.values(start.memory_bytes ?? {}).reduce((sum, bytes) => sum + bytes, 0);
  return {
    "skipped updates": run.skipped.length > 0 ? skippedText(run) : "",
    "rollbacks": rollbacks(run).map(([from, to]) => `from step ${whole(from)} to ${whole(to - 1)}`).join(", "),
    "parameters": number(start.parameters),
    "planned memory of a rank": withUnit(memory / 2 ** 20 || NaN, "MiB"),
    "device": String(start.device ?? ""),
    "ranks": whole(start.ranks),
    "host": String(start.host ?? ""),
    "program revision": String(start.revision ?? ""),
  };
}

function skippedText(run) {
  const first = run.skipped.slice(0, 5).map(([step, tensor]) => `${whole(step)} (${tensor})`).join(", ");
  const more = run.summary.skipped > 5 ? ", ..." : "";
  return `${whole(run.summary.skipped)}: at step ${first}${more}`;
}

// [last step before the rollback, first repeated step] of each rollback.
function rollbacks(run) {
  const from = column(run, "rollback", "from_step")?.mean ?? [];
  return from.map((step, i) => [step, run.tables.rollback.steps[i]]);
}

function fillResults() {
  const facts = runs.map(results);
  const names = namesOf(facts);
  const rows = runs.map((run, i) => [run.dir, ...names.map(name => facts[i][name])]);
  byId("results").append(table(["run", ...names], rows));
}

function fillEnvironment() {
  const facts = runs.map(environment);
  const rows = namesOf(facts).map(name => [name, ...facts.map(texts => texts[name])]);
  if (rows.length === 0) return;
  byId("environment").append(make("h2", {}, "Environment"), table(["", ...runs.map(run => run.dir)], rows));
}

// The keys that differ from their default in any run.
function fillConfiguration() {
  const flat = config => new Map(Object.entries(config).flatMap(([section, members]) =>
    Object.entries(members ?? {}).map(([key, value]) => [`${section}.${key}`, JSON.stringify(value)])));
  const configs = runs.map(run => flat(run.config));
  const defaults = flat(data.defaults);
  const keys = [...new Set(configs.flatMap(config => [...config.keys()]))];
  const rows = keys.map(key => [key, defaults.get(key), ...configs.map(config => config.get(key))])
    .filter(([key, ...texts]) => texts.some(text => text && text !== texts[0]));
  if (rows.length === 0) return;
  const isMarked = ([, ...texts]) => new Set(texts).size > 1;
  byId("configuration").append(make("h2", {}, "Configuration"),
                               table(["", "default", ...runs.map(run => run.dir)], rows, isMarked));
}

function fillSamples() {
  for (const run of runs.filter(run => run.samples.length > 0)) {
    const samples = run.samples.map(({step, text}) =>
      make("details", {}, make("summary", {}, `step ${whole(step)}`), make("pre", {}, text)));
    samples.at(-1).open = true;
    byId("samples").append(make("details", {}, make("summary", {}, `Samples of ${run.dir}`), ...samples));
  }
}

function fillNotes() {
  const notes = runs.flatMap(run => run.notes);
  const merged = runs.filter(run => run.tables.train.group > 1).map(run => make("p", {class: "quiet"},
    `${run.dir} has ${whole(run.tables.train.count)} records: the charts show the mean of every ` +
    `${run.tables.train.group} as a line, and their minimum and maximum as a band.`));
  byId("notes").append(...notes.map(note => make("p", {class: "note"}, note)), ...merged);
}

// ---- the lines of the charts

// The values of a column as {mean, min, max}; min and max only if neighboring records are merged.
function column(run, kind, name) {
  const table = run.tables[kind];
  const values = table?.columns[name];
  if (typeof values === "number") return {mean: table.steps.map(() => values)};
  return Array.isArray(values) ? {mean: values} : values;
}

function hours(run) {
  const {count, group} = run.tables.train;
  let sum = 0;
  return (column(run, "train", "step_ms")?.mean ?? []).map((ms, i) => {
    sum += ms * Math.min(group, count - i * group);
    return sum / 3.6e6;
  });
}

// The positions of steps on the selected x axis. Only training records have tokens, times and learning rates. Without
// positions on the axis of rates if the rate ever falls, as after a warm-up.
function positions(run, steps) {
  const axis = byId("x-axis").value;
  if (axis === "step") return steps;
  const axes = axis === "hours" ? hours(run) : column(run, "train", axis)?.mean ?? [];
  if (axis === "lr" && axes.some((rate, i) => rate <= axes[i - 1])) return [];
  const trained = run.tables.train.steps;
  if (steps === trained) return axes;
  return steps.map(step => axes[trained.findIndex(other => other >= step)] ?? axes.at(-1));
}

// A line per run that has the column.
function linesOf(kind, name) {
  return runs.flatMap((run, i) => {
    const values = column(run, kind, name);
    const x = values ? positions(run, run.tables[kind].steps) : [];
    if (x.length === 0 || !x.every(Number.isFinite)) return [];
    return [{run, kind, label: run.dir, color: colors[i % colors.length], x, ...values}];
  });
}

function lossLines() {
  const validation = linesOf("val", "loss").map(line => ({...line, label: line.label + ", validation"}));
  const look = runs.length === 1 ? {color: colors[1]} : {dash: [6, 4]};
  return [...linesOf("train", "loss"), ...validation.map(line => ({...line, ...look}))];
}

// The exponential moving average over about 1 % of the training records.
function smooth(line) {
  if (!byId("smooth").checked || line.kind !== "train") return line.mean;
  const share = Math.min(1, 100 / line.mean.length);
  let average = NaN;
  return line.mean.map(value => {
    if (!Number.isFinite(value)) return null;
    average = Number.isNaN(average) ? value : average + share * (value - average);
    return average;
  });
}

// ---- charts

// Vertical lines: dotted where an update was skipped, dashed where a rollback returned to.
function drawMarks(chart, lines) {
  const {ctx, bbox} = chart;
  ctx.save();
  for (const {run, color} of lines.filter(line => line.kind === "train" && !hidden.has(line.label))) {
    ctx.strokeStyle = color;
    const marks = [[[2, 4], run.skipped.map(([step]) => step)], [[8, 4], rollbacks(run).map(([, to]) => to)]];
    for (const [dash, steps] of marks) {
      ctx.setLineDash(dash);
      for (const x of positions(run, steps)) {
        const left = chart.valToPos(x, "x", true);
        if (left < bbox.left || left > bbox.left + bbox.width) continue;
        ctx.beginPath();
        ctx.moveTo(left, bbox.top);
        ctx.lineTo(left, bbox.top + bbox.height);
        ctx.stroke();
      }
    }
  }
  ctx.restore();
}

// The series, their values and bands. The invisible maximum and minimum of a band precede their line.
function seriesOf(lines) {
  const series = [{label: byId("x-axis").value, value: (u, value) => number(value) || "–"}];
  const tables = [];
  const bands = [];
  const text = (u, value) => number(value) || "–";
  for (const line of lines) {
    const show = !hidden.has(line.label);
    const edge = {label: "", class: "band", stroke: "transparent", points: {show: false}, show};
    if (line.min) {
      bands.push({series: [series.length, series.length + 1], fill: line.color + "40"});
      series.push({...edge}, {...edge});
      tables.push([line.x, line.max, line.min]);
    }
    series.push({label: line.label, stroke: line.color, width: 1.5, dash: line.dash, value: text, show});
    tables.push([line.x, smooth(line)]);
  }
  return {series, bands, data: uPlot.join(tables)};
}

// Called when a legend switches a line on or off, in this chart or in another one.
function toggle(chart, i, {show}) {
  const {label, class: kind} = chart.series[i];
  if (show === undefined || kind === "band") return;
  if (show) hidden.delete(label);
  else hidden.add(label);
  if (chart.series[i - 1].class !== "band") return;
  chart.setSeries(i - 1, {show});
  chart.setSeries(i - 2, {show});
}

function widthOf(figure) {
  const {paddingLeft, paddingRight} = getComputedStyle(figure);
  return figure.clientWidth - parseFloat(paddingLeft) - parseFloat(paddingRight);
}

function addChart(title, unit, lines, height) {
  if (lines.length === 0) return;
  const figure = make("figure", {"aria-label": title, class: height > 250 ? "wide" : ""},
                      make("h2", {}, title), " ", make("span", {class: "quiet"}, unit));
  byId("charts").append(figure);
  const {data, ...series} = seriesOf(lines);
  const axis = {stroke: "#808790", grid: {stroke: "#80808030", width: 1}, ticks: {show: false},
                values: (u, ticks) => ticks.map(tick => number(tick))};
  const sameLabel = (own, other, i) => own.series.findIndex(line => line.label === other.series[i].label);
  const same = (own, other) => own === other;
  charts.push(new uPlot({
    ...series,
    width: widthOf(figure),
    height,
    scales: {x: {time: false, distr: byId("x-axis").value === "lr" ? 3 : 1}, y: {distr: byId("log").checked ? 3 : 1}},
    axes: [{...axis, size: 30}, {...axis, size: 60}],
    cursor: {y: false, sync: {key: "charts", setSeries: true, scales: ["x", null], match: [same, same, sameLabel]}},
    hooks: {draw: [chart => drawMarks(chart, lines)], setSeries: [toggle]},
  }, data, figure));
}

const known = [
  ["Validation", "bits per byte", "val", "bits_per_byte"],
  ["Gradient norm", "before clipping", "train", "grad_norm"],
  ["Learning rate", "", "train", "lr"],
  ["Throughput", "tokens per second", "train", "tokens_per_s"],
  ["Model FLOPs utilization", "share of the GPUs' peak", "train", "mfu"],
];

// All other columns, except those that never change and are the same in all runs.
function otherColumns() {
  const all = runs.flatMap(run => Object.entries(run.tables).flatMap(([kind, table]) =>
    Object.keys(table.columns).map(name => JSON.stringify([kind, name]))));
  const omitted = ["loss", "tokens", "time", "epoch", ...known.map(([, , , name]) => name)];
  return [...new Set(all)].map(text => JSON.parse(text)).filter(([kind, name]) => {
    const values = runs.map(run => run.tables[kind]?.columns[name]).filter(value => value !== undefined);
    const isConstant = values.every(value => value === values[0]) && typeof values[0] === "number";
    return !isConstant && kind !== "rollback" && !omitted.includes(name) && !name.endsWith("_stderr");
  });
}

function drawCharts() {
  for (const chart of charts.splice(0)) chart.destroy();
  byId("charts").replaceChildren();
  addChart("Loss", "nats per token", lossLines(), 340);
  for (const [title, unit, kind, name] of known) addChart(title, unit, linesOf(kind, name), 220);
  for (const [kind, name] of otherColumns())
    addChart(kind === "train" ? name : `${kind}: ${name}`, "", linesOf(kind, name), 220);
}

document.title = runs.map(run => run.dir).join(", ") + " – training report";
byId("made").textContent = "Written by train_gpt report, " + new Date(data.generated * 1000).toLocaleString() + ".";
fillNotes();
fillResults();
fillSamples();
fillConfiguration();
fillEnvironment();
drawCharts();
byId("toolbar").addEventListener("change", drawCharts);
addEventListener("resize", () => {
  for (const chart of charts) chart.setSize({width: widthOf(chart.root.parentElement), height: chart.height});
});
