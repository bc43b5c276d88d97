// From the numbers of one set of conditions to the parts of each plot: traces, legend, table and a sentence.
// A builder takes the numbers, what the reader chose and the width in pixels; without data it returns words.

const VALUES = {
  tau: { axis: "tau", title: "tau", of: (data, part, place) => triple(data.tau[part][place], 0) },
  difference: { axis: "tau minus baseline", title: "difference to the baseline", of: differenceOf },
  mean: { axis: "mean tau of prompts", title: "mean over prompts", of: (data, part, place) => single(data.tau[part][place], 3) },
  untied: { axis: "tau without near-ties", title: "tau without near-ties", of: (data, part, place) => single(data.tau[part][place], 4) },
};

function triple(found, first) {
  return found ? { y: found[first], low: found[first + 1], high: found[first + 2] } : null;
}

function single(found, place) {
  return found && found[place] !== null ? { y: found[place], low: null, high: null } : null;
}

function differenceOf(data, part, place) {
  if (place === data.baseline) return data.tau[part][place] ? { y: 0, low: null, high: null } : null;
  return triple(data.difference[part][place], 0);
}

function wordsOf(values, value) {
  const write = values === "difference" ? signed : shown;
  const interval = value.low === null ? "no interval" : `${write(value.low)} to ${write(value.high)}`;
  return { value: write(value.y), interval };
}

function curve(data, state, width, part = state.slice) {
  const kind = VALUES[state.values];
  const runs = [...new Set(data.checkpoints.filter((one) => one.step !== null).map((one) => one.run))];
  const lines = new Map(), levels = [], rows = [];
  data.checkpoints.forEach((one, place) => {
    const value = kind.of(data, part, place);
    if (!value) return;
    const words = wordsOf(state.values, value);
    const counts = data.tau[part][place];
    // A difference is over the prompts that both have.
    const prompts = state.values === "difference" && place !== data.baseline ? data.difference[part][place][3] : counts[5];
    rows.push([one.label, words.value, words.interval, String(prompts), String(counts[6])]);
    const point = { ...value, x: one.step, text: `${plain(one.label)}<br>${kind.title} ${words.value}<br>95 %: ${words.interval}` };
    if (one.step === null) levels.push({ ...point, label: one.label });
    else lines.set(one.run, [...(lines.get(one.run) || []), point]);
  });
  if (!rows.length) return { empty: `Nothing to draw: no checkpoint has a ${kind.title} on ${data.slices[part].title}.` };
  const steps = [...lines.values()].flat().map((point) => point.x);
  const many = data.checkpoints.length > 30;
  const traces = [...lines].map(([run, points]) => {
    const style = lineStyle(runs.indexOf(run), many);
    return {
      type: "scatter", name: plain(run), ...style, x: points.map((point) => point.x), y: points.map((point) => point.y),
      hoverinfo: "text", hovertext: points.map((point) => point.text),
      error_y: {
        type: "data", symmetric: false, thickness: many ? 1 : 1.5, width: many ? 0 : 3, color: style.line.color,
        array: points.map((point) => (point.high === null ? null : point.high - point.y)),
        arrayminus: points.map((point) => (point.low === null ? null : point.y - point.low)),
      },
    };
  });
  const [from, to] = steps.length ? [Math.min(...steps), Math.max(...steps)] : [0, 1];
  const ends = from === to ? [from - 1, to + 1] : [from, to];
  levels.forEach((level, place) => {
    traces.push({
      type: "scatter", mode: "lines", name: plain(level.label), meta: "level", x: ends, y: [level.y, level.y],
      line: { color: colour("faint"), dash: DASHES[(1 + place) % MAX_SERIES], width: 2 }, hoverinfo: "text", hovertext: [level.text, level.text],
    });
  });
  const tops = rows.length ? traces.flatMap((trace) => trace.y.map((y, place) => y + ((trace.error_y && trace.error_y.array[place]) || 0))) : [];
  const fromOne = state.values === "difference" ? { zeroline: true, zerolinecolor: colour("faint") } : { range: [1, 1 + 1.06 * (Math.max(1.05, ...tops) - 1)] };
  const last = rows[rows.length - 1];
  return {
    traces,
    layout: layout(axis("training step", steps.length ? { tickformat: "~s", nticks: Math.max(3, Math.floor(width / 90)) } : { showticklabels: false }), axis(kind.axis, fromOne), { height: 340 }),
    legend: [
      ...[...lines.keys()].map((run) => ({ text: run, slot: runs.indexOf(run), kind: "line" })),
      ...levels.map((level, place) => ({ text: level.label, slot: null, dash: 1 + place, kind: "line" })),
    ],
    head: ["checkpoint", kind.title, "95 % interval", "prompts", "steps"],
    rows,
    sentence: `${kind.title} of ${rows.length} checkpoint(s) on ${data.slices[part].title}; the last in the order of training, ${last[0]}: ${last[1]}, ${last[2]}`,
  };
}

function heat(data, state, width) {
  const kind = VALUES[state.values];
  const parts = data.slices.map((_, part) => part).reverse();
  const z = parts.map((part) => data.checkpoints.map((_, place) => { const value = kind.of(data, part, place); return value ? value.y : null; }));
  const known = z.flat().filter((value) => value !== null);
  if (!known.length) return { empty: `Nothing to draw: no checkpoint has a ${kind.title}.` };
  const write = state.values === "difference" ? signed : shown;
  const reach = Math.max(1e-9, ...known.map(Math.abs));
  const few = data.checkpoints.length <= Math.floor((width - 160) / 46);
  const scale = state.values === "difference"
    ? { colorscale: [[0, "#b35806"], [0.5, "#f7f7f7"], [1, "#2166ac"]], zmin: -reach, zmax: reach }
    : { colorscale: "Cividis" };
  const names = parts.map((part) => clipped(data.slices[part].title, width < 500 ? 14 : 26));
  return {
    traces: [{
      type: "heatmap", z, x: data.checkpoints.map((_, place) => place), y: parts.map((_, row) => row), xgap: few ? 2 : 0, ygap: 2, ...scale,
      hoverinfo: "text", hovertext: parts.map((part, row) => data.checkpoints.map((one, place) => `${plain(one.label)}<br>${plain(data.slices[part].title)}<br>${kind.title} ${write(z[row][place])}`)),
      texttemplate: few ? (state.values === "difference" ? "%{z:+.2f}" : "%{z:.2f}") : "", textfont: { size: 12 },
      colorbar: { thickness: 12, outlinewidth: 0, tickfont: { color: colour("faint"), size: 12 }, len: 1, xpad: 4, nticks: 5 },
    }],
    layout: layout(
      axis("checkpoint", { ...checkpointTicks(data.checkpoints, width), showgrid: false }),
      axis("", { tickmode: "array", tickvals: parts.map((_, row) => row), ticktext: names.map(plain), showgrid: false, ticks: "" }),
      { height: 130 + 30 * parts.length },
    ),
    legend: [],
    head: ["checkpoint", ...data.slices.map((one) => one.title)],
    rows: data.checkpoints.map((one, place) => [one.label, ...parts.map((_, row) => write(z[parts.length - 1 - row][place]))]),
    sentence: `${kind.title} of ${data.checkpoints.length} checkpoint(s) on ${parts.length} parts of the prompts, from ${write(Math.min(...known))} to ${write(Math.max(...known))}`,
  };
}

// One series per chosen checkpoint. `of` returns the values, the text of each point, and its cells in the table.
function detail(data, state, width, options) {
  const chosen = [...state.slots].filter(([place]) => data.tau[state.slice][place] || options.everywhere);
  if (!state.slots.size) return { empty: "No checkpoint is chosen: tick one above." };
  const series = chosen.map(([place, slot]) => ({ place, slot, label: data.checkpoints[place].label, ...(options.of(place) || { y: [] }) })).filter((one) => one.y.some((y) => y !== null));
  if (!series.length) return { empty: options.none || `Nothing to draw: the chosen checkpoints have no steps on ${data.slices[state.slice].title}.` };
  const traces = series.map((one) => ({
    type: options.bars ? "bar" : "scatter", name: plain(one.label), x: one.x, y: one.y,
    ...(options.bars ? barStyle(one.slot) : lineStyle(one.slot, one.x.length > 40)),
    hoverinfo: "text", hovertext: one.y.map((y, place) => `${plain(one.label)}<br>${options.at} ${plain(one.x[place])}: ${options.write(y)}${one.notes ? "<br>" + plain(one.notes[place]) : ""}`),
  }));
  const xs = [...new Set(series.flatMap((one) => one.x))];
  if (xs.every((x) => typeof x === "number")) xs.sort((a, b) => a - b);
  const cell = (one, x) => { const at = one.x.indexOf(x); return at < 0 ? ["–", "–"] : [options.write(one.y[at]), one.notes ? one.notes[at] : null]; };
  return {
    traces,
    layout: layout(options.xaxis(width, xs), options.yaxis, options.layout || {}),
    legend: series.map((one) => ({ text: one.label, slot: one.slot, kind: options.bars ? "bar" : "line" })),
    head: [options.at, ...series.flatMap((one) => (one.notes ? [one.label, `${one.label}: counted`] : [one.label]))],
    rows: xs.map((x) => [String(x), ...series.flatMap((one) => (one.notes ? cell(one, x) : [cell(one, x)[0]]))]),
    sentence: `${options.title} on ${options.everywhere ? "all prompts" : data.slices[state.slice].title}: ${series.map((one) => { const known = one.y.filter((y) => y !== null); return `${one.label} from ${options.write(known[0])} to ${options.write(known[known.length - 1])}`; }).join("; ")}`,
  };
}

function wholeNumbers(title) {
  return (width, xs) => axis(title, xs.length <= Math.max(4, width / 26) ? { tickmode: "array", tickvals: xs, ticktext: xs.map(String) } : { nticks: Math.max(3, Math.floor(width / 60)), tickformat: "d" });
}

function categories(title) {
  return (width, xs) => axis(title, { type: "category", categoryorder: "array", categoryarray: xs, tickangle: xs.length * 58 > width - 70 ? -40 : 0 });
}

function survival(data, state, width) {
  const isShare = state.survival === "survival";
  return detail(data, state, width, {
    title: isShare ? "Survival" : "Conditional acceptance", at: "draft position", write: percent, xaxis: wholeNumbers("draft position"),
    yaxis: axis(isShare ? "share of steps" : "share of those that got that far", { range: [0, 1.03], tickformat: ".0%" }),
    of: (place) => {
      const counts = data.survived[state.slice][place];
      if (!counts) return null;
      const before = counts.map((_, p) => (p && !isShare ? counts[p - 1] : data.tau[state.slice][place][6]));
      return { x: counts.map((_, p) => p + 1), y: counts.map((count, p) => ratio(count, before[p])), notes: counts.map((count, p) => `${count} of ${before[p]}`) };
    },
  });
}

function histogram(data, state, width) {
  return detail(data, state, width, {
    title: "Tokens emitted per step", at: "tokens", bars: true, write: percent, xaxis: wholeNumbers("tokens emitted by the step"),
    yaxis: axis("share of steps", { tickformat: ".0%", rangemode: "tozero" }), layout: { barmode: "group", bargap: 0.2 },
    of: (place) => {
      const counts = data.emitted[state.slice][place];
      if (!counts) return null;
      const all = counts.reduce((sum, count) => sum + count, 0);
      return { x: counts.map((_, k) => k + 1), y: counts.map((count) => ratio(count, all)), notes: counts.map((count) => `${count} of ${all} steps`) };
    },
  });
}

function binned(name, title, at) {
  return (data, state, width) => detail(data, state, width, {
    title, at, write: shown, xaxis: categories(at), yaxis: axis("tau"),
    of: (place) => {
      const counts = data[name].counts[state.slice][place];
      return counts && { x: data[name].bins, y: counts.map(([steps, tokens]) => ratio(tokens, steps)), notes: counts.map(([steps, tokens]) => `${tokens} tokens in ${steps} steps`) };
    },
  });
}

function ofExtra(data, name, place) {
  return (data.extras[name] || []).filter((entry) => entry[0] === place);
}

function sweep(data, state, width) {
  return detail(data, state, width, {
    title: "Tau by block size", at: "block size", everywhere: true, write: shown, xaxis: wholeNumbers("block size"), yaxis: axis("tau"),
    none: "The chosen checkpoints were evaluated at one block size only.",
    of: (place) => {
      const found = ofExtra(data, "sweep", place);
      if (!found.length || !data.tau[0][place]) return null;
      const points = [...found.map((entry) => [entry[1], entry[3], entry[2]]), [data.block_size, data.tau[0][place][0], "evaluated"]];
      points.sort((a, b) => a[0] - b[0]);
      return { x: points.map((p) => p[0]), y: points.map((p) => p[1]), notes: points.map((p) => p[2]) };
    },
  });
}

function trees(data, state, width) {
  return detail(data, state, width, {
    title: "Tau by tree budget", at: "drafted tokens in the tree", everywhere: true, write: shown, xaxis: categories("drafted tokens in the tree"), yaxis: axis("tau"),
    none: "No trees were measured for the chosen checkpoints.",
    of: (place) => {
      const found = ofExtra(data, "trees", place);
      if (!found.length || !data.tau[0][place]) return null;
      return { x: ["0", ...found.map((entry) => String(entry[1]))], y: [data.tau[0][place][0], ...found.map((entry) => entry[2])] };
    },
  });
}

function recall(data, state, width) {
  const place = [...state.slots.keys()].find((one) => ofExtra(data, "recall", one).length);
  if (place === undefined) return { empty: "No recall was measured for the chosen checkpoints." };
  const entries = ofExtra(data, "recall", place);
  const ks = [...new Set(entries.map((entry) => entry[2]))].sort((a, b) => a - b);
  const positions = [...new Set(entries.map((entry) => entry[1]))].sort((a, b) => a - b);
  const at = (position, k) => { const found = entries.find((entry) => entry[1] === position && entry[2] === k); return found ? ratio(found[5], found[6]) : null; };
  return {
    traces: ks.map((k, slot) => ({ type: "scatter", name: `k = ${k}`, x: positions, y: positions.map((p) => at(p, k)), ...lineStyle(slot, false), hoverinfo: "text", hovertext: positions.map((p) => `k = ${k}, position ${p}: ${percent(at(p, k))}`) })),
    layout: layout(wholeNumbers("draft position")(width, positions), axis("recall", { range: [0, 1.03], tickformat: ".0%" })),
    legend: ks.map((k, slot) => ({ text: `k = ${k}`, slot, kind: "line" })),
    head: ["draft position", ...ks.map((k) => `k = ${k}`)],
    rows: positions.map((p) => [String(p), ...ks.map((k) => percent(at(p, k)))]),
    sentence: `Recall by draft position of ${data.checkpoints[place].label}, for k from ${ks[0]} to ${ks[ks.length - 1]}`,
  };
}

function cost(data, state, width) {
  const { names, seconds, total } = data.stages;
  if (!names.length) return { empty: "No stage was timed." };
  const places = data.checkpoints.map((_, place) => place);
  return {
    traces: names.map((name, stage) => ({
      type: "bar", name: plain(name), x: places, y: seconds.map((row) => row[stage]), ...barStyle(stage), hoverinfo: "text",
      hovertext: places.map((place) => `${plain(data.checkpoints[place].label)}<br>${plain(name)}: ${shown(seconds[place][stage], 1)} s`),
    })),
    layout: layout(axis("checkpoint", { ...checkpointTicks(data.checkpoints, width), showgrid: false }), axis("seconds", { rangemode: "tozero" }), { barmode: "stack", bargap: 0.25 }),
    legend: names.map((name, slot) => ({ text: name, slot, kind: "bar" })),
    head: ["checkpoint", ...names.map((name) => `${name}, s`), "all, s"],
    rows: places.map((place) => [data.checkpoints[place].label, ...seconds[place].map((value) => shown(value, 1)), shown(total[place], 1)]),
    sentence: `Seconds by stage of ${places.length} checkpoint(s): ${names.join(", ")}`,
  };
}

const BUILDERS = {
  curve, heat, survival, histogram, sweep, trees, recall, cost,
  answer: binned("answer", "Tau by position in the answer", "position in the answer"),
  context: binned("context", "Tau by context length", "context length"),
};
