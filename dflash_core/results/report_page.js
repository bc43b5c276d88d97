// The page: unpacks plotly.js, draws what is on show, and follows the controls.

const CONFIG = { displayModeBar: false, doubleClick: false, scrollZoom: false, showTips: false };

async function unpackLibrary() {
  const packed = Uint8Array.from(atob(document.getElementById("plotly-packed").textContent.trim()), (letter) => letter.charCodeAt(0));
  const unpacked = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const script = element("script");
  script.textContent = await new Response(unpacked).text();
  document.head.append(script);
  if (!window.Plotly) throw new Error("the plotting library did not start");
}

function drawInto(box, built, title) {
  box.setAttribute("aria-label", built.empty || `${title}: ${built.sentence}`);
  box.hidden = Boolean(built.empty);
  if (built.empty) return;
  Plotly.react(box, built.traces, { ...built.layout, width: box.clientWidth, ...(box.dataset.height ? { height: Number(box.dataset.height) } : {}) }, CONFIG);
}

function finish(figure, built) {
  const words = figure.querySelector(".empty");
  if (words) {
    words.hidden = !built.empty;
    words.textContent = built.empty || "";
  }
  const legend = figure.querySelector(".legend");
  if (legend) fillLegend(legend, built.empty ? [] : built.legend);
  const details = figure.querySelector("details.numbers");
  details.hidden = Boolean(built.empty);
  figure.built = built;
  fillNumbers(figure);
}

// Tables are made when they are opened: a hundred checkpoints have many.
function fillNumbers(figure) {
  const details = figure.querySelector("details.numbers");
  if (details.open && figure.built && !figure.built.empty) {
    fillTable(details.querySelector("div"), figure.built, figure.querySelector("h3, h4").textContent);
  }
}

function drawParts(figure, data, state) {
  const grid = figure.querySelector(".parts");
  const tables = [];
  data.slices.forEach((part, place) => {
    if (!place) return;
    let box = grid.children[place - 1];
    if (!box) {
      box = element("div");
      box.append(element("h4", {}, part.title), element("div", { class: "plot", role: "img", "data-height": "230" }), element("p", { class: "empty", hidden: "" }));
      grid.append(box);
    }
    const plot = box.querySelector(".plot");
    const built = curve(data, state, plot.clientWidth || 300, place);
    drawInto(plot, built, part.title);
    box.querySelector(".empty").hidden = !built.empty;
    box.querySelector(".empty").textContent = built.empty || "";
    if (!built.empty) tables.push({ title: part.title, built });
  });
  const rows = tables.flatMap(({ title, built }) => built.rows.map(([label, ...rest]) => [label, title, ...rest]));
  const [checkpoint, ...others] = tables.length ? tables[0].built.head : ["checkpoint"];
  finish(figure, tables.length ? { head: [checkpoint, "prompts of", ...others], rows, legend: [] } : { empty: "none" });
}

class ConditionsSet {
  constructor(root, data) {
    this.root = root;
    this.data = data;
    this.state = { values: "tau", slice: 0, survival: "survival", slots: new Map() };
    data.chosen.forEach((place) => this.choose(place));
    for (const control of root.querySelectorAll("[data-control]")) this.follow(control);
    for (const details of root.querySelectorAll("details.numbers")) {
      details.addEventListener("toggle", () => fillNumbers(details.closest("figure")));
    }
    this.readControls();
  }

  // A browser may restore what was chosen before a reload.
  readControls() {
    for (const control of this.root.querySelectorAll("select[data-control]")) this.take(control);
    const ticked = [...this.root.querySelectorAll("[data-control=checkpoint]:checked")].map((box) => Number(box.value));
    for (const place of [...this.state.slots.keys()]) if (!ticked.includes(place)) this.state.slots.delete(place);
    ticked.forEach((place) => this.choose(place));
    this.limit();
    this.odds();
  }

  take(control) {
    this.state[control.dataset.control] = control.dataset.control === "slice" ? Number(control.value) : control.value;
  }

  // A checkpoint keeps its colour while it is chosen.
  choose(place) {
    if (this.state.slots.has(place) || this.state.slots.size >= MAX_SERIES) return;
    const taken = new Set(this.state.slots.values());
    this.state.slots.set(place, [0, 1, 2, 3, 4, 5].find((slot) => !taken.has(slot)));
  }

  limit() {
    const full = this.state.slots.size >= MAX_SERIES;
    for (const box of this.root.querySelectorAll("[data-control=checkpoint]")) box.disabled = full && !box.checked;
  }

  odds() {
    const box = this.root.querySelector("[data-control=odds]");
    if (box) this.root.classList.toggle("odds", box.checked);
  }

  follow(control) {
    const kind = control.dataset.control;
    if (kind === "odds") {
      control.addEventListener("change", () => this.odds());
    } else if (kind === "reset") {
      control.addEventListener("click", () => this.reset());
    } else if (kind === "checkpoint") {
      control.addEventListener("change", () => {
        if (control.checked) this.choose(Number(control.value));
        else this.state.slots.delete(Number(control.value));
        this.limit();
        this.draw(["survival", "histogram", "answer", "context", "sweep", "trees", "recall"]);
      });
    } else {
      control.addEventListener("change", () => {
        this.take(control);
        this.draw({ values: ["curve", "parts", "heat"], survival: ["survival"], slice: ["curve", "survival", "histogram", "answer", "context"] }[kind]);
      });
    }
  }

  reset() {
    this.state.slots.clear();
    this.data.chosen.forEach((place) => this.choose(place));
    for (const box of this.root.querySelectorAll("[data-control=checkpoint]")) box.checked = this.state.slots.has(Number(box.value));
    this.limit();
    this.draw();
  }

  draw(names = null) {
    if (this.root.hidden) return;
    for (const figure of this.root.querySelectorAll("figure[data-plot]")) {
      const name = figure.dataset.plot;
      if (names && !names.includes(name)) continue;
      if (name === "parts") {
        drawParts(figure, this.data, this.state);
        continue;
      }
      const box = figure.querySelector(".plot");
      const built = BUILDERS[name](this.data, this.state, figure.clientWidth - 32);
      box.hidden = false;
      drawInto(box, built, figure.querySelector("h3, h4").textContent);
      finish(figure, built);
    }
  }
}

function showConditions(sets) {
  const choice = document.getElementById("which-conditions");
  if (!choice) return;
  const apply = () => {
    for (const root of document.querySelectorAll(".conditions-set")) root.hidden = choice.value !== "all" && root.dataset.set !== choice.value;
    for (const set of sets) set.draw();
  };
  const goTo = () => {
    const found = /^#section-(\d+)$/.exec(location.hash);
    if (!found) return;
    choice.value = choice.value === "all" ? "all" : found[1];
    apply();
    document.getElementById(location.hash.slice(1)).focus();
  };
  choice.addEventListener("change", apply);
  addEventListener("hashchange", goTo);
  apply();
  goTo();
}

async function start() {
  const page = document.documentElement;
  page.classList.add("scripted");
  try {
    const all = JSON.parse(document.getElementById("report-data").textContent);
    await unpackLibrary();
    const roots = [...document.querySelectorAll(".conditions-set")];
    const sets = roots.map((root, place) => new ConditionsSet(root, all[place])).filter((set) => set.root.querySelector("figure"));
    showConditions(sets);
    const drawAll = () => sets.forEach((set) => set.draw());
    drawAll();
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
    let waiting = null, width = innerWidth;
    addEventListener("resize", () => {
      clearTimeout(waiting);
      if (innerWidth !== width) waiting = setTimeout(() => { width = innerWidth; drawAll(); }, 150);
    });
    page.dataset.drawn = "yes";
  } catch (problem) {
    page.classList.remove("scripted");
    page.dataset.drawn = "no";
    const words = document.getElementById("problem");
    words.hidden = false;
    words.textContent = `The plots cannot be drawn in this browser (${problem.message}); the tables below hold the same numbers of all prompts.`;
  }
}

start();
