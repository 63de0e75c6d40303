// The sections above and below the charts.

function maxSteps(run) { return run.raw.config?.train?.max_steps; }

function fillHeader() {
  document.title = runs.map(run => run.name).join(", ") + " – training report";
  document.querySelector("h1").textContent = isOne ? runs[0].name : `${runs.length} runs`;
  const start = runs[0].raw.starts?.at?.(-1);
  const shape = run => {
    const model = run.raw.config?.model, parameters = run.raw.starts?.at?.(-1)?.parameters;
    return [parameters ? compact(parameters) + " parameters" : "",
            model ? `${model.n_layer} layers, ${model.n_embd} wide` : "",
            run.raw.config?.train?.precision ?? ""].filter(Boolean).join(", ");
  };
  byId("subtitle").textContent = isOne
    ? [shape(runs[0]), start?.device ? `on ${start.device}` : ""].filter(Boolean).join(" ")
    : runs.map(run => run.name).join(", ");
  byId("made").textContent = `Written by train_gpt report, ${date(data.generated)}, from ` +
    runs.map(run => run.raw.dir).join(", ") + ".";
}

function fillOverview() {
  const overview = byId("overview");
  if (isOne) {
    const run = runs[0], s = run.raw.summary, max = maxSteps(run);
    const left = max > s.step && s.steps > 0 ? (max - s.step) * s.step_s / s.steps : 0;
    const items = [
      ["Training loss", known(s.loss, value => trim(value, 4)), `at step ${group(s.step)}`],
      ["Best validation loss", known(s.best_val_loss, value => trim(value, 4)),
       s.best_val_step === null ? "not validated" : `at step ${group(s.best_val_step)}`],
      ["Bits per byte", known(s.best_bits_per_byte, value => trim(value, 4)), "lowest on validation"],
      ["Steps", group(s.step), max ? `of ${group(max)}` + (left > 0 ? `, ${duration(left)} left` : "") : ""],
      ["Tokens", known(s.tokens, compact), `in ${duration(s.step_s)}`],
      ["Tokens per second", known(s.tokens_per_s, compact), "median"],
      ["MFU", known(s.mfu, value => trim(value * 100, 3) + " %"), "median"],
      ["Skipped steps", group(s.skipped), s.skipped ? "gradients not finite" : "all updates applied"],
    ].filter(([title, value]) => value !== "–" || title.includes("validation"));
    const figures = items.map(([title, value, more]) => make("div", {}, make("dt", {}, title),
      make("dd", {}, make("div", {class: "value"}, value), make("div", {class: "more"}, more))));
    overview.replaceChildren(make("dl", {class: "figures"}, ...figures));
    return;
  }
  const rows = runs.map(run => {
    const s = run.raw.summary, box = make("input", {type: "checkbox"});
    box.checked = run.isShown;
    box.addEventListener("change", () => {
      if (box.checked) state.hidden.delete(run.index); else state.hidden.add(run.index);
      state.zoom = null;
      drawCharts();
    });
    return [make("label", {class: "run-toggle"}, box, swatch({color: run.color}), run.name),
            group(s.step) + (maxSteps(run) ? ` of ${group(maxSteps(run))}` : ""), known(s.loss),
            known(s.best_val_loss), s.best_val_step === null ? "–" : group(s.best_val_step),
            known(s.best_bits_per_byte, value => trim(value, 4)), known(s.tokens, compact),
            known(s.tokens_per_s, compact), duration(s.step_s), group(s.skipped)];
  });
  const head = ["run", "step", "training loss", "best validation", "at step", "bits per byte", "tokens", "tokens/s",
                "time", "skipped"];
  overview.className = "card";
  overview.replaceChildren(scrolled(table(head, rows)));
}

function fillNotes() {
  const warnings = runs.flatMap(run => run.raw.notes.map(note => note[0].toUpperCase() + note.slice(1) + "."));
  const notes = [];
  for (const run of runs) {
    const group_ = run.train.raw.group, count = run.train.raw.count;
    if (count === 0) notes.push(`${run.name} has no training steps yet.`);
    if (run.train.isThinned) notes.push(`${run.name} has ${group(count)} records: the charts show the mean of every ` +
      `${group_} as a line, and their minimum and maximum as a band. The summary uses all records.`);
    if (run.raw.sample_count > run.raw.samples.length)
      notes.push(`Showing ${run.raw.samples.length} of ${group(run.raw.sample_count)} samples of ${run.name}.`);
    if (run.raw.summary.skipped > run.raw.skipped.length)
      notes.push(`Showing the first ${run.raw.skipped.length} of ${group(run.raw.summary.skipped)} skipped steps.`);
  }
  const boxes = [["note warning", warnings], ["note", notes]].filter(([, texts]) => texts.length > 0);
  byId("notes").replaceChildren(...boxes.map(([kind, texts]) =>
    make("div", {class: kind}, ...texts.map(text => make("p", {}, text)))));
}

// A stacked bar per run, and a table of the same numbers. partsOf: run -> [[name, value]]; `order`: known names, which
// determine the colors.
function fillBars(id, title, partsOf, text, total, order = []) {
  const section = byId(id), all = runs.map(run => partsOf(run));
  if (all.every(parts => parts.length === 0)) return section.replaceChildren();
  const every = [...new Set(all.flatMap(parts => parts.map(([name]) => name)))];
  const ordered = [...new Set([...order, ...every])], color = name => `var(--part-${ordered.indexOf(name) % 10})`;
  const sums = all.map(parts => parts.reduce((sum, [, value]) => sum + value, 0)), largest = Math.max(...sums);
  const bars = all.flatMap((parts, i) => {
    if (parts.length === 0) return [];
    const bar = make("div", {class: "bar", "aria-hidden": "true"}, ...parts.map(([name, value]) => {
      const part = make("span", {title: `${name}: ${text(value)}`});
      part.style.width = `${value / largest * 100}%`;
      part.style.background = color(name);
      return part;
    }));
    const label = make("span", {}, isOne ? total : runs[i].name);
    return [make("div", {class: "bar-label"}, label, make("b", {}, text(sums[i]))), bar];
  });
  const rows = every.map(name => [make("span", {}, swatch({color: color(name)}), name), ...all.flatMap((parts, i) => {
    const value = parts.find(([other]) => other === name)?.[1] ?? NaN, share = value / sums[i];
    return [known(value, text), ...(isOne ? [trim(share * 100, share < 0.1 ? 2 : 3) + " %"] : [])];
  })]);
  const head = isOne ? ["", "", "share"] : ["", ...runs.map(run => run.name)];
  const numbers = make("div", {class: "parts"}, scrolled(table(head, rows)));
  section.replaceChildren(heading(id, title), ...bars, numbers);
}

function timeParts(run) {
  const s = run.raw.summary;
  const parts = phases.filter(([column]) => s.phases[column] > 0)
    .map(([column, name]) => [name, s.phases[column] / 1000]);
  // If a single process ran all steps, the time outside the steps went to validation, samples and checkpoints.
  const isWhole = run.raw.starts?.length === 1 && Number.isFinite(s.first_time ?? NaN);
  const beside = isWhole ? s.last_time - s.first_time - s.step_s : 0;
  if (!(beside > 0.001 * s.step_s) || parts.length === 0) return parts;
  return [...parts, ["validation, samples, checkpoints", beside]];
}

function memoryParts(run) {
  return Object.entries(run.raw.starts?.at?.(-1)?.memory_bytes ?? {}).filter(([, value]) => Number.isFinite(value));
}

function fillSkipped() {
  const rows = runs.flatMap(run => run.raw.skipped.map(([step, tensor]) =>
    [...(isOne ? [] : [run.name]), group(step), [make("code", {}, tensor), "text"]]));
  if (rows.length === 0) return byId("skipped").replaceChildren();
  const list = scrolled(table([...(isOne ? [] : ["run"]), "step", "first tensor whose gradient was not finite"], rows));
  list.style.maxHeight = "22em";
  list.style.overflowY = "auto";
  byId("skipped").replaceChildren(heading("skipped", "Skipped steps"), list);
}

function fillSamples() {
  // Shows the last sample of each run, or the first, middle and last sample of a single run; sliders select others.
  const places = last => isOne ? [...new Set([0, Math.floor(last / 2), last])] : [last];
  const shown = runs.filter(run => run.raw.samples.length > 0)
    .flatMap(run => places(run.raw.samples.length - 1).map(place => [run, place]));
  const boxes = shown.map(([run, place]) => {
    const samples = run.raw.samples, name = make("b", {}), where = make("span", {class: "quiet"});
    const slider = make("input", {type: "range", min: "0", max: String(samples.length - 1), step: "1",
                                  "aria-label": `sample of ${run.name}`});
    const text = make("div", {class: "sample-text", tabindex: "0"});
    const show = () => {
      const sample = samples[Number(slider.value)];
      where.textContent = `step ${group(sample.step)}, ${Number(slider.value) + 1} of ${samples.length}`;
      const begins = sample.text.startsWith(sample.prompt);
      const rest = begins ? sample.text.slice(sample.prompt.length) : sample.text;
      text.replaceChildren(make("b", {}, sample.prompt), rest);
    };
    slider.value = String(place);
    slider.addEventListener("input", show);
    show();
    name.textContent = run.name;
    const label = isOne ? [] : [make("span", {}, swatch({color: run.color}), name)];
    return make("div", {}, make("div", {class: "sample-head"}, ...label, where, slider), text);
  });
  if (boxes.length === 0) return byId("samples").replaceChildren();
  byId("samples").replaceChildren(heading("samples", "Samples over time"),
                                  make("div", {class: "sample-runs"}, ...boxes));
}

// ---- configuration and environment

function flat(config) {
  const keys = new Map();
  for (const [section, members] of Object.entries(config ?? {}))
    for (const [key, value] of Object.entries(members ?? {})) keys.set(`${section}.${key}`, JSON.stringify(value));
  return keys;
}

function fillConfiguration() {
  const defaults = flat(data.defaults), configs = runs.map(run => flat(run.raw.config));
  if (configs.every(config => config.size === 0)) return byId("configuration").replaceChildren();
  const keys = [...new Set([...defaults.keys(), ...configs.flatMap(config => [...config.keys()])])];
  const isChanged = key => configs.some(config => config.has(key) && config.get(key) !== defaults.get(key));
  const isDifferent = key => new Set(configs.map(config => config.get(key))).size > 1;
  const filters = [["Non-default", isChanged], ...(isOne ? [] : [["Differs between runs", isDifferent]]),
                   ["All", () => true]];
  const content = make("div", {});
  const show = index => {
    buttons.forEach((button, i) => button.setAttribute("aria-pressed", i === index));
    const chosen = keys.filter(filters[index][1]);
    const rows = chosen.map(key => [make("code", {}, key), [make("code", {}, defaults.get(key) ?? "–"), "text quiet"],
      ...configs.map(config => [make("code", {}, config.get(key) ?? "–"),
                                config.get(key) === defaults.get(key) ? "text" : "text changed"])]);
    const made = table(["key", "default", ...runs.map(run => isOne ? "this run" : run.name)], rows);
    [...made.tBodies[0].rows].forEach((row, i) => row.classList.toggle("differs", isDifferent(chosen[i])));
    content.replaceChildren(rows.length ? scrolled(made) : make("p", {class: "quiet"}, "None."));
  };
  const buttons = filters.map(([text], i) => {
    const button = make("button", {type: "button"}, text);
    button.addEventListener("click", () => show(i));
    return button;
  });
  byId("configuration").replaceChildren(
    heading("configuration", "Configuration", make("span", {class: "segments"}, ...buttons)), content);
  show(0);
}

function fillEnvironment() {
  const facts = run => {
    const start = run.raw.starts?.at?.(-1) ?? {}, s = run.raw.summary;
    return [["directory", run.raw.dir], ["program revision", start.revision], ["device", start.device],
            ["ranks", start.ranks], ["CPU threads per rank", start.threads || undefined], ["host", start.host],
            ["parameters", start.parameters && group(start.parameters)],
            ["FLOPs per token", start.flops_per_token && trim(start.flops_per_token, 4)],
            ["started", run.raw.starts?.[0]?.time && date(run.raw.starts[0].time)],
            ["last record", s.last_time && date(s.last_time)],
            ["starts", run.raw.starts?.length > 1 && run.raw.starts.map(other =>
              `after step ${group(other.step)}: ranks ${other.ranks}, ${other.host}, ${date(other.time)}`).join("; ")],
            ["checkpoints", run.raw.checkpoints.length > 0 && "step " + run.raw.checkpoints.map(group).join(", ")]];
  };
  const all = runs.map(run => facts(run));
  const rows = all[0].map(([name], i) => [name, ...all.map(list => [String(list[i][1] || "–"), "text"])])
    .filter(row => row.slice(1).some(([text]) => text !== "–"));
  byId("environment").replaceChildren(heading("environment", "Environment"),
                                      scrolled(table(["", ...runs.map(run => isOne ? "this run" : run.name)], rows)));
}

// ---- controls

function connectControls() {
  const axis = byId("x-axis");
  for (const option of axis.options) option.disabled = !runs.some(run => run.train.axis(option.value));
  if (axis.querySelector(`[value="${state.x}"]`)?.disabled !== false) state.x = "step";
  axis.value = state.x;
  axis.addEventListener("change", () => { state.x = axis.value; state.zoom = null; drawCharts(); });
  const slider = byId("smoothing");
  const showSmoothing = () => {
    const steps = smoothingSteps();
    byId("smoothing-text").textContent = steps === 0 ? "off"
      : steps < 1 ? "< 1 step" : `~ ${compact(Math.round(steps))} steps`;
  };
  slider.value = state.smoothing;
  let frame = 0;
  slider.addEventListener("input", () => {
    state.smoothing = Number(slider.value);
    showSmoothing();
    cancelAnimationFrame(frame);
    frame = requestAnimationFrame(drawCharts);
  });
  showSmoothing();
  for (const name of ["log", "clip"]) {
    byId(name).checked = state[name];
    byId(name).addEventListener("change", event => { state[name] = event.target.checked; drawCharts(); });
  }
  for (const button of document.querySelectorAll("[data-zoom]"))
    button.addEventListener("click", () => {
      const [from, to] = xExtent();
      setZoom([to - (to - from) * Number(button.dataset.zoom), to]);
    });
  if (matchMedia("(pointer: coarse)").matches) byId("help").textContent = "Swipe sideways to zoom.";
  const theme = byId("theme");
  theme.value = storedTheme();
  const showTheme = () => { applyTheme(theme.value); drawCharts(); };
  theme.addEventListener("change", () => {
    try { localStorage.setItem("theme", theme.value); } catch {}
    showTheme();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", showTheme);
}

// With report --watch, the page reloads itself and keeps its state.
function keepLive() {
  if (!data.refresh_s) return;
  const button = byId("live");
  let isLive = true;
  const show = () => {
    button.textContent = isLive ? `● live, every ${data.refresh_s} s` : "paused";
    button.setAttribute("aria-pressed", isLive);
  };
  button.hidden = false;
  button.addEventListener("click", () => { isLive = !isLive; show(); });
  show();
  setInterval(() => {
    if (!isLive || document.hidden) return;
    remember();
    location.reload();
  }, data.refresh_s * 1000);
}

recall();
fillHeader();
fillOverview();
fillNotes();
connectControls();
makeCharts();
drawCharts();
fillBars("time", "Time by phase", timeParts, duration, "training time", phases.map(([, name]) => name));
fillBars("memory", "Memory by category", memoryParts, bytes, "planned for one rank");
fillSkipped();
fillSamples();
fillConfiguration();
fillEnvironment();
keepLive();
if (state.y) scrollTo(0, state.y);
