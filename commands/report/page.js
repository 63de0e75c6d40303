// Helpers to build the page, its state, and the charts.

const data = JSON.parse(document.getElementById("data").textContent);
const runs = data.runs.map((raw, i) => new Run(raw, names()[i], i));
const isOne = runs.length === 1;
const byId = id => document.getElementById(id);

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) if (value !== "") element.setAttribute(name, value);
  element.append(...children);
  return element;
}

// A cell is a text, an element, or [text or element, class]. Columns of numbers are right-aligned.
function table(head, rows) {
  const cell = (tag, content) => Array.isArray(content) ? make(tag, {class: content[1]}, content[0])
    : make(tag, {class: typeof content === "string" && /^[-+–]?\d|^–$/.test(content) ? "number" : ""}, content);
  const body = rows.map(([first, ...rest]) =>
    make("tr", {}, Object.assign(cell("th", first), {scope: "row"}), ...rest.map(content => cell("td", content))));
  const isNumber = i => body.length > 0 && body.every(row => row.children[i]?.classList.contains("number"));
  const heads = head.map((text, i) => make("th", {scope: "col", class: isNumber(i) ? "number" : ""},
                                           make("span", {class: "name", title: text}, text)));
  return make("table", {}, make("thead", {}, make("tr", {}, ...heads)), make("tbody", {}, ...body));
}

function scrolled(content) { return make("div", {class: "table", tabindex: "0"}, content); }

function heading(id, text, ...controls) {
  return make("div", {class: "heading"}, make("h2", {id: id + "-title"}, text), ...controls);
}

// The shortest trailing part of each path that distinguishes the runs.
function names() {
  const paths = data.runs.map(run => run.dir.split("/"));
  for (let parts = 1; ; parts++) {
    const short = paths.map(path => path.slice(-parts).join("/"));
    if (new Set(short).size === new Set(data.runs.map(run => run.dir)).size || parts > 20) return short;
  }
}

function date(seconds) {
  return Number.isFinite(seconds ?? NaN) ? new Date(seconds * 1000).toLocaleString([], {dateStyle: "medium",
    timeStyle: "short"}) : "–";
}

// ---- state that survives a reload

function remember() {
  try { sessionStorage.setItem("view", JSON.stringify({...state, hidden: [...state.hidden], y: scrollY})); } catch {}
}

function recall() {
  const longest = Math.max(...runs.map(run => run.raw.summary.steps));
  state.smoothing = longest >= 200 ? 55 : 0;
  try {
    const saved = JSON.parse(sessionStorage.getItem("view"));
    if (saved) Object.assign(state, saved, {hidden: new Set(saved.hidden)});
  } catch {}
}

// The smoothing length in steps: from 1/10000 to 1/3 of the longest run.
function smoothingSteps() {
  const longest = Math.max(1, ...runs.map(run => run.raw.summary.step));
  return state.smoothing === 0 ? 0 : longest * 10 ** (-4 + 3.5 * state.smoothing / 100);
}

function shownRuns() { return runs.filter(run => run.isShown); }

function xExtent() {
  let low = Infinity, high = -Infinity;
  for (const run of shownRuns()) for (const records of Object.values(run.tables)) {
    const x = run.xOf(records);
    if (x?.length) [low, high] = [Math.min(low, x[0]), Math.max(high, x.at(-1))];
  }
  return low < high ? [low, high] : Number.isFinite(low) ? [low - 1, low + 1] : [0, 1];
}

function setZoom(range) {
  const [from, to] = xExtent();
  if (range) {
    const size = Math.min(range[1] - range[0], to - from), low = Math.max(from, Math.min(range[0], to - size));
    range = size < (to - from) * 0.999 && size > 0 ? [low, low + size] : null;
  }
  state.zoom = range;
  for (const chart of charts) {
    const [min, max] = range ?? [from, to];
    chart.uplot?.setScale("x", {min, max});
    chart.fillTable();
  }
  for (const button of document.querySelectorAll("[data-zoom]")) {
    const share = Number(button.dataset.zoom);
    const isOn = range ? Math.abs(range[1] - to) < 1e-9 * to && Math.abs((to - range[0]) / (to - from) - share) < 1e-6
      : share === 1;
    button.setAttribute("aria-pressed", isOn);
  }
  remember();
}

// ---- charts

// One smoothed line per run for a column, with the raw values faded.
function linesOf(column, {isSmooth = true, ...more} = {}) {
  return shownRuns().flatMap(run => {
    const values = run.train.column(column), x = run.xOf(run.train);
    if (!values || !x) return [];
    const y = isSmooth ? smooth(run.train.steps, values.mean, smoothingSteps()) : values.mean;
    return [{name: isOne ? "" : run.name, color: run.color, x, y, raw: y === values.mean ? null : values.mean,
             band: values.min && isSmooth ? values : null, ...more}];
  });
}

function lossLines() {
  const training = linesOf("loss").map(line => ({...line, name: isOne ? "training" : line.name}));
  const validation = shownRuns().flatMap(run => {
    const values = run.tables.val?.column("loss"), x = values && run.xOf(run.tables.val);
    if (!x) return [];
    const color = isOne ? css("--run-1") : run.color, ring = true;
    return [{name: isOne ? "validation" : run.name + ", validation", color, x, y: values.mean, ring,
             points: x.length <= 60, dash: isOne ? undefined : [6, 4]}];
  });
  return [...training, ...validation];
}

// The time of a step by phase, stacked; drawn from the highest to the lowest.
const phases = [["compute_ms", "compute"], ["optimizer_ms", "optimizer"], ["comm_ms", "waiting for ranks"],
                ["data_ms", "waiting for data"]];
function phaseLines(run) {
  const x = run.xOf(run.train);
  if (!x || !run.isShown) return [];
  let below = null;
  const lines = [];
  phases.forEach(([column, name], i) => {
    const values = run.train.column(column);
    if (!values || values.mean.every(value => !value)) return;
    const own = smooth(run.train.steps, values.mean, smoothingSteps());
    const y = own.map((value, k) => (value ?? 0) + (below ? below[k] : 0)), color = css(`--part-${i}`);
    lines.push({name, color, x, y, own, width: 1, fill: color});
    below = y;
  });
  return lines.reverse();
}

// The accuracies of one file of questions.
const accuracies = ["acc", "acc_norm", "acc_per_token"];
function addQuestions(add, file, percent) {
  const lines = () => shownRuns().flatMap(run => (isOne ? accuracies : ["acc_norm", "acc"]).flatMap(name => {
    const records = run.tables.questions, values = records?.column(`${file}/${name}`), x = values && run.xOf(records);
    if (!x || !values.mean.some(Number.isFinite)) return [];
    const color = isOne ? css(`--run-${accuracies.indexOf(name)}`) : run.color;
    return [{name: isOne ? name : run.name, color, x, y: values.mean, points: x.length <= 60}];
  }).slice(0, isOne ? 3 : 1));
  const unit = isOne ? "fraction of correct answers" : "acc_norm, or acc";
  add({id: "questions-" + file, title: "Questions of " + file, unit, text: percent, tick: percent, lines});
}

const special = new Set(["loss", "lr", "grad_norm", "loss_scale", "tokens", "step_ms", "tokens_per_s", "mfu",
                         "comm_bytes", "time", ...phases.map(([column]) => column)]);

const titles = {power_w: ["Power", "W, all ranks"], gpu_temperature_c: ["GPU temperature", "°C"],
                sm_clock_mhz: ["SM clock", "MHz"]};

function makeCharts() {
  const parent = byId("charts"), percent = value => trim(value * 100, 4) + " %";
  const add = spec => new Chart(parent, spec);
  add({id: "loss", title: "Loss", unit: "nats per token", wide: true, clip: true, canLog: true, lines: lossLines});
  const bits = () => shownRuns().flatMap(run => {
    const values = run.tables.val?.column("bits_per_byte"), x = values && run.xOf(run.tables.val);
    return x ? [{name: isOne ? "" : run.name, color: run.color, x, y: values.mean, points: x.length <= 60}] : [];
  });
  add({id: "bits", title: "Validation", unit: "bits per byte", clip: true, canLog: true, lines: bits});
  add({id: "norm", title: "Gradient norm", unit: "before clipping", clip: true, canLog: true, fromZero: true,
       lines: () => linesOf("grad_norm")});
  add({id: "rate", title: "Learning rate", fromZero: true, lines: () => linesOf("lr", {isSmooth: false})});
  add({id: "speed", title: "Throughput", unit: "tokens per second", clip: true, fromZero: true, text: compact,
       lines: () => linesOf("tokens_per_s")});
  add({id: "mfu", title: "Model FLOPs utilization", unit: "share of the GPU's peak", clip: true, fromZero: true,
       text: percent, tick: percent, lines: () => linesOf("mfu")});
  for (const run of runs)
    add({id: "phases-" + run.index, title: isOne ? "Time of a step" : "Time of a step, " + run.name,
         unit: "ms, by phase", stacked: true, clip: true, lines: () => phaseLines(run)});
  if (runs.some(run => run.raw.skipped.length > 0 || typeof run.train.raw.columns.loss_scale !== "number"))
    add({id: "scale", title: "Loss scale", unit: "log scale", isLog: true, text: compact,
         lines: () => linesOf("loss_scale", {isSmooth: false, stepped: true})});
  // All other recorded columns, by name.
  const others = new Set(runs.flatMap(run => run.train.names()).filter(name => !special.has(name)));
  for (const name of others) {
    const [title, unit] = titles[name] ?? [name];
    add({id: "other-" + name, title, unit, clip: true, lines: () => linesOf(name)});
  }
  const kinds = runs.flatMap(run => Object.entries(run.tables).filter(([kind]) => kind !== "train").flatMap(
    ([kind, records]) => records.names().filter(name => name !== "time" && !(kind === "val" && name in {loss: 1,
      bits_per_byte: 1})).map(name => JSON.stringify([kind, name]))));
  for (const pair of new Set(kinds)) {
    const [kind, name] = JSON.parse(pair);
    if (kind === "questions") {
      if (name.endsWith("/acc")) addQuestions(add, name.slice(0, -4), percent);
      continue;
    }
    add({id: `other-${kind}-${name}`, title: `${kind}: ${name}`, clip: true, lines: () => shownRuns().flatMap(run => {
      const values = run.tables[kind]?.column(name), x = values && run.xOf(run.tables[kind]);
      return x ? [{name: isOne ? "" : run.name, color: run.color, x, y: values.mean, points: x.length <= 60}] : [];
    })});
  }
}

function drawCharts() {
  for (const chart of charts) chart.draw();
  // A last chart that is alone in its row gets the full width.
  const small = charts.filter(chart => !chart.figure.hidden && !chart.spec.wide);
  small.forEach((chart, i) => {
    chart.figure.classList.toggle("alone", i === small.length - 1 && i % 2 === 0);
    chart.resize();
  });
  setZoom(state.zoom);
}
