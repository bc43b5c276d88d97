"use strict";
// Colours, signs, texts, legends and tables: what all plots of the report share.

// A series is told apart three times over: by colour, by dashes and by marker (bars: by pattern).
const DASHES = ["solid", "dash", "dot", "dashdot", "longdash", "longdashdot"];
const DASH_LENGTHS = ["", "6 3", "2 2", "6 2 2 2", "9 3", "9 2 2 2"];
const MARKERS = ["circle", "square", "diamond", "triangle-up", "cross", "star"];
const MARKER_SHAPES = [
  "M15 3a4 4 0 1 0 .01 0z", "M11.5 3.5h7v7h-7z", "M15 2l5 5-5 5-5-5z", "M15 2l5 9h-10z",
  "M13.5 2h3v3.5h3.5v3h-3.500v3.5h-3v-3.500h-3.500v-3h3.500z", "M15 1.500l1.700 3.800 4.100.4-3.100 2.700.9 4.100-3.600-2.100-3.600 2.100.9-4.100-3.100-2.700 4.100-.4z",
];
const PATTERNS = ["", "/", "x", ".", "-", "+"];
const MAX_SERIES = 6;
const LONGEST_NAME = 60;
const SVG = "http://www.w3.org/2000/svg";

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
}

// plotly.js reads some tags and entities in its texts: names are data, so none may be left.
function plain(text) {
  return clipped(String(text), LONGEST_NAME).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
}

function clipped(text, length) {
  const letters = [...text];
  return letters.length <= length ? text : letters.slice(0, length - 1).join("") + "…";
}

function shown(value, digits = 3) {
  return value === null || value === undefined ? "–" : value.toFixed(digits);
}

function signed(value) {
  return value === null || value === undefined ? "–" : (value >= 0 ? "+" : "") + value.toFixed(3);
}

function percent(value) {
  return value === null || value === undefined ? "–" : (100 * value).toFixed(1) + " %";
}

function ratio(part, whole) {
  return whole ? part / whole : null;
}

function element(tag, attributes = {}, text = null) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== null) made.textContent = text;
  return made;
}

function swatch(entry) {
  const picture = document.createElementNS(SVG, "svg");
  picture.setAttribute("width", "30");
  picture.setAttribute("height", "14");
  picture.setAttribute("aria-hidden", "true");
  const tint = entry.slot === null ? "var(--faint)" : `var(--c${entry.slot % MAX_SERIES})`;
  const slot = (entry.slot === null ? entry.dash : entry.slot) % MAX_SERIES;
  const part = (name, attributes) => {
    const made = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    picture.append(made);
    return made;
  };
  if (entry.kind === "bar") {
    part("rect", { x: 4, y: 1, width: 22, height: 12 }).style.fill = tint;
    if (slot) {
      const sign = part("text", { x: 15, y: 11, "text-anchor": "middle", "font-size": 12, "font-weight": 700 });
      sign.textContent = PATTERNS[slot];
      sign.style.fill = "var(--card)";
    }
    return picture;
  }
  const line = part("line", { x1: 0, x2: 30, y1: 7, y2: 7, "stroke-width": 2, "stroke-dasharray": DASH_LENGTHS[slot] });
  line.style.stroke = tint;
  if (entry.slot !== null) part("path", { d: MARKER_SHAPES[slot] }).style.fill = tint;
  return picture;
}

function fillLegend(list, entries) {
  list.replaceChildren(...entries.map((entry) => {
    const item = element("li");
    item.append(swatch(entry), element("span", {}, entry.text));
    return item;
  }));
  list.hidden = entries.length === 0;
}

function fillTable(box, built, caption) {
  const table = element("table");
  table.append(element("caption", {}, caption));
  const head = element("tr");
  built.head.forEach((name, place) => head.append(element("th", place ? { scope: "col" } : { scope: "col", class: "text" }, name)));
  const body = element("tbody");
  for (const row of built.rows) {
    const line = element("tr");
    row.forEach((cell, place) => line.append(place ? element("td", {}, cell) : element("th", { scope: "row", class: "run text" }, cell)));
    body.append(line);
  }
  const top = element("thead");
  top.append(head);
  table.append(top, body);
  box.replaceChildren(table);
}

function lineStyle(slot, many) {
  const place = slot % MAX_SERIES;
  return {
    mode: "lines+markers",
    line: { color: colour("c" + place), dash: DASHES[place], width: 2 },
    marker: { color: colour("c" + place), symbol: MARKERS[place], size: many ? 5 : 8 },
  };
}

function barStyle(slot) {
  const place = slot % MAX_SERIES;
  const tint = colour("c" + place);
  return { marker: { color: tint, pattern: { shape: PATTERNS[place], bgcolor: tint, fgcolor: colour("card"), size: 7, solidity: 0.3 } } };
}

function axis(title, more = {}) {
  return {
    title: { text: title, standoff: 8, font: { size: 13, color: colour("faint") } },
    automargin: true, fixedrange: true, zeroline: false, linecolor: colour("faint"), gridcolor: colour("grid"),
    tickfont: { size: 12, color: colour("faint") }, ticks: "outside", tickcolor: colour("rule"), ticklen: 4, ...more,
  };
}

function layout(x, y, more = {}) {
  return {
    xaxis: x, yaxis: y, height: 300, showlegend: false, dragmode: false, hovermode: "closest",
    margin: { l: 48, r: 12, t: 10, b: 44 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: 'system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif', size: 12, color: colour("ink") },
    hoverlabel: { bgcolor: colour("card"), bordercolor: colour("faint"), font: { color: colour("ink"), size: 12 }, namelength: -1 },
    ...more,
  };
}

// Marks on an axis of checkpoints, whose places are whole numbers: as many as there is room for.
function checkpointTicks(checkpoints, width) {
  const runs = new Set(checkpoints.map((one) => one.run));
  const texts = checkpoints.map((one) => (runs.size === 1 && one.step !== null ? String(one.step) : clipped(one.label, width < 500 ? 11 : 16)));
  const longest = Math.max(1, ...texts.map((text) => text.length));
  const room = Math.max(2, Math.floor((width - 120) / Math.max(26, Math.min(longest * 7.5 + 14, 46))));
  const every = Math.ceil(checkpoints.length / room);
  const places = checkpoints.map((_, place) => place).filter((place) => place % every === 0);
  const slanted = longest * 7.5 + 14 > (width - 120) / Math.max(1, places.length);
  return { tickmode: "array", tickvals: places, ticktext: places.map((place) => plain(texts[place])), tickangle: slanted ? -40 : 0 };
}
