// Matrices on the page: built once for a layout, painted again whenever a number moves.

const LANES = {
  forward: [["Q", "K", "V"], ["Z", "S", "A"], ["O", "L"]],
  backward: [["dQ", "dK", "dV"], ["dZ", "dS", "dA"], ["dO", "delta"]],
};
const EDITABLE = { Q: "q", K: "k", V: "v", dO: "dout" };

function element(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

// The part of a matrix that is shown: first row and column, and how many.
function windowOf(app, letters, m) {
  const first = (letter) => (letter ? app.from[letter] || 0 : 0);
  const count = (n, start) => Math.max(0, Math.min(app.limit, n - start));
  const row = Math.min(first(letters[0]), Math.max(0, m.rows - 1)), column = Math.min(first(letters[1]), Math.max(0, m.cols - 1));
  return { row, column, rows: count(m.rows, row), columns: count(m.cols, column), cut: m.rows > app.limit || m.cols > app.limit };
}

function headOf(app, name) {
  return PER_KEY_HEAD.includes(name) ? keyHead(app.x, app.head) : app.head;
}

function shownMatrix(app, name) {
  return app.shown[name][headOf(app, name)];
}

function build(app) {
  for (const [side, lanes] of Object.entries(LANES)) {
    const section = document.getElementById(side);
    section.querySelectorAll(".lane").forEach((lane) => lane.remove());
    for (const names of lanes) {
      const lane = element("div", { class: "lane" });
      for (const name of names) lane.append(app.steps.includes(name) ? figureOf(app, name) : ghostOf(app, name));
      section.append(lane);
    }
  }
  document.getElementById("flow").classList.add("fresh");
  fit(app);
}

// New cells have their colours at once; what changes afterwards fades. Called when everything is painted.
function settle() {
  const flow = document.getElementById("flow");
  void flow.offsetWidth; // the styles are computed before transitions are allowed
  flow.classList.remove("fresh");
}

// Without a softcap dZ is dS; its place stays, so that each gradient stands opposite its matrix.
function ghostOf(app, name) {
  const ghost = element("figure", { class: "ghost", "data-like": "Z" }, element("span", {}, `${name} = dS`, element("br"), "no softcap"));
  return ghost;
}

// Cells as wide as lets every lane fit on its side, within what can be read.
function fit(app) {
  const flow = document.getElementById("flow"), two = window.matchMedia("(min-width: 1081px)").matches;
  const side = two ? (flow.clientWidth - 16) / 2 : flow.clientWidth;
  const longest = app.tokens ? Math.max(...app.tokens.i.concat(app.tokens.j).map((t) => t.length)) : 2;
  const edge = 18 + Math.min(60, 6.4 * longest + 4);
  const largest = window.innerHeight > 1000 && two ? 58 : 46;
  LANES.forward.forEach((_, n) => {
    let cell = largest;
    for (const lanes of Object.values(LANES)) {
      const columns = lanes[n].map((name) => windowOf(app, app.rules[name].letters, app.right[name][0]).columns);
      const total = columns.reduce((a, count) => a + count, 0);
      cell = Math.min(cell, (side - 10 * (columns.length - 1) - edge * columns.length) / total - 1.2);
    }
    if (cell < 29) cell = 34; // too narrow to read: let the lane wrap
    for (const name of Object.keys(LANES)) {
      const style = document.querySelectorAll(`#${name} .lane`)[n].style;
      style.setProperty("--cell", `${Math.floor(cell)}px`);
      style.setProperty("--font", `${Math.min(14, Math.max(9.3, cell / 3.45)).toFixed(1)}px`);
      style.setProperty("--row", `${Math.max(22, Math.round(cell / 2))}px`);
      style.setProperty("--pad", `${cell > 38 ? 4 : cell > 32 ? 2 : 0}px`);
    }
  });
  const like = document.getElementById("step-Z");
  document.querySelectorAll("figure.ghost").forEach((ghost) => { ghost.style.width = `${like.getBoundingClientRect().width}px`; });
}

function figureOf(app, name) {
  const rule = app.rules[name], m = shownMatrix(app, name);
  const full = pretty(choose(rule.formula, app.flags));
  const formula = rule.entry ? `= ${full.split(",")[0]}` : name === "dO" ? "given" : rule.formula;
  const caption = element("figcaption", {}, element("b", {}, pretty(name)), element("span", { class: "formula", title: full }, formula));
  if (name in EDITABLE) caption.append(element("span", { class: "can-edit", title: "Enter or double-click a number to edit it" }, "\u270e"));
  caption.append(element("span", { class: "badge" }));
  const figure = element("figure", { id: `step-${name}`, "data-name": name, class: rule.letters.length === 1 ? "vector" : false }, caption);
  if (m === null) {
    figure.append(element("p", { class: "none" }, "cannot be computed"));
    return figure;
  }
  const swapped = name === "dK" && m.rows !== app.right.dK[0].rows; // planted: the transpose
  const letters = swapped ? [...rule.letters].reverse().join("") : rule.letters;
  const view = windowOf(app, letters, m);
  const label = (letter, n) => (app.tokens && letter in app.tokens ? app.tokens[letter][n] : String(n));
  const named = (letter) => app.tokens && letter in app.tokens;
  const table = element("table", { role: "grid", "aria-label": `${name}, ${m.rows} by ${m.cols}`, "data-row": view.row, "data-column": view.column });
  if (letters.length > 1) {
    const names = Array.from({ length: view.columns }, (_, n) => element("th", { scope: "col", title: label(letters[1], view.column + n) }, label(letters[1], view.column + n)));
    table.append(element("thead", {}, element("tr", {}, element("th", {}), ...names)));
  } else {
    table.append(element("thead", {}, element("tr", {}, element("th", {}), element("th", {}, "\u00a0"))));
  }
  const body = element("tbody");
  for (let i = view.row; i < view.row + view.rows; i++) {
    const row = element("tr", { role: "row" }, element("th", { scope: "row", title: named(letters[0]) ? label(letters[0], i) : false }, label(letters[0], i)));
    for (let j = view.column; j < view.column + view.columns; j++) {
      row.append(element("td", { role: "gridcell", tabindex: i === view.row && j === view.column ? "0" : "-1", "data-i": i, "data-j": j, class: name in EDITABLE ? "edit" : "" }));
    }
    body.append(row);
  }
  table.append(body);
  figure.append(element("div", { class: "scroll" }, table));
  if (view.cut) figure.append(element("small", { class: "cut" }, `rows ${view.row} to ${view.row + view.rows - 1} of ${m.rows}, columns ${view.column} to ${view.column + view.columns - 1} of ${m.cols}`));
  return figure;
}

function isHidden(app, name, i, j) {
  return ["S", "A", "dS", "dZ"].includes(name) && !visible(app.x, app.head)(i, j);
}

// The colours of the theme: [red, green, blue] of what is below zero, zero and above.
function palette() {
  const style = getComputedStyle(document.documentElement);
  const read = (name) => { const hex = style.getPropertyValue(name).trim().slice(1); return [0, 2, 4].map((n) => parseInt(hex.slice(n, n + 2), 16)); };
  return { neg: read("--neg"), zero: read("--zero"), pos: read("--pos") };
}

function heat(colours, value, t) {
  const end = value < 0 ? colours.neg : colours.pos, share = t ** 0.85;
  return colours.zero.map((zero, n) => Math.round(zero + share * (end[n] - zero)));
}

// Whether white reads better than black on a colour: by relative luminance, where both contrast alike at 0.179.
function wantsWhite(rgb) {
  const [r, g, b] = rgb.map((x) => x / 255).map((x) => (x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b < 0.179;
}

function paint(app) {
  const colours = palette();
  for (const name of app.steps) {
    const m = shownMatrix(app, name), figure = document.getElementById(`step-${name}`), right = app.right[name][headOf(app, name)];
    if (!figure || m === null) { if (figure) figure.querySelector(".badge").textContent = "\u2717"; continue; }
    let largest = 0;
    for (const a of m.data) if (Number.isFinite(a)) largest = Math.max(largest, Math.abs(a));
    const same = m.rows === right.rows && m.cols === right.cols;
    let bound = 0;
    for (const a of right.data) if (Number.isFinite(a)) bound = Math.max(bound, Math.abs(a));
    let wrong = 0;
    for (const cell of figure.querySelectorAll("td")) {
      if (cell.firstElementChild) continue; // being edited
      const i = +cell.dataset.i, j = +cell.dataset.j, value = get(m, i, j);
      const hidden = isHidden(app, name, i, j) && !(value !== 0 && Number.isFinite(value));
      const t = Number.isFinite(value) && largest > 0 ? Math.abs(value) / largest : 0;
      cell.classList.toggle("hidden", hidden);
      const colour = heat(colours, value, t);
      cell.style.backgroundColor = hidden ? "" : `rgb(${colour.join(" ")})`;
      cell.style.color = hidden ? "" : wantsWhite(colour) ? "#fff" : "#000";
      cell.textContent = hidden ? "\u00b7" : short(Math.abs(value) <= 1e-14 * largest ? 0 : value); // rounding is no number to read
      cell.dataset.value = value;
      const off = same ? Math.abs(value - get(right, i, j)) : Infinity;
      const bad = app.mistake !== null && !(off <= 1e-9 * (bound || 1)) && !(value === get(right, i, j));
      cell.classList.toggle("wrong", bad);
      if (bad) wrong++;
    }
    const badge = figure.querySelector(".badge");
    const error = app.mistake === null ? 0 : relativeError(app.shown[name], app.right[name]);
    badge.textContent = error === null ? `\u2717 ${shapeOf(m)}, not ${shapeOf(right)}` : error > 1e-9 || (wrong && !Number.isFinite(error)) ? `\u2717 off by ${percent(error)}` : "";
    figure.classList.toggle("off", badge.textContent !== "");
    const pen = figure.querySelector(".can-edit");
    if (pen) pen.hidden = badge.textContent !== "";
  }
}

// Curves from each matrix to what is made of it.
function drawEdges(app) {
  const svg = document.getElementById("edges"), flow = document.getElementById("flow").getBoundingClientRect();
  svg.replaceChildren(...["", "active"].map((kind) => arrow(kind)));
  const active = app.step > 0 ? app.steps[app.step - 1] : app.cell ? app.cell.name : null;
  svg.classList.toggle("busy", active !== null);
  for (const name of app.steps) {
    for (const from of inputsOf(app, name)) {
      const a = document.getElementById(`step-${from}`), b = document.getElementById(`step-${name}`);
      if (!a || !b) continue;
      const p = a.getBoundingClientRect(), q = b.getBoundingClientRect();
      const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
      path.setAttribute("d", curve(p, q, flow));
      if (name === active) path.setAttribute("class", "active");
      path.setAttribute("marker-end", `url(#arrow-${name === active ? "active" : ""})`);
      svg.append(path);
    }
  }
}

function arrow(kind) {
  const create = (tag) => document.createElementNS("http://www.w3.org/2000/svg", tag);
  const marker = create("marker"), tip = create("path");
  for (const [name, value] of Object.entries({ id: `arrow-${kind}`, class: kind, viewBox: "0 0 6 6", refX: "5", refY: "3", markerWidth: "6", markerHeight: "6", orient: "auto" })) marker.setAttribute(name, value);
  tip.setAttribute("d", "M0,0 L6,3 L0,6 Z");
  marker.append(tip);
  return marker;
}

function curve(p, q, origin) {
  const cx = (r) => r.left + r.width / 2 - origin.left, cy = (r) => r.top + r.height / 2 - origin.top;
  const dx = cx(q) - cx(p), dy = cy(q) - cy(p);
  if (Math.abs(dy) > Math.min(p.height, q.height) / 2 && Math.abs(dx) < 700) { // mostly up or down
    const down = dy > 0, y1 = (down ? p.bottom : p.top) - origin.top, y2 = (down ? q.top : q.bottom) - origin.top, bend = (y2 - y1) / 2;
    return `M${cx(p)},${y1} C${cx(p)},${y1 + bend} ${cx(q)},${y2 - bend} ${cx(q)},${y2}`;
  }
  const forward = dx > 0, x1 = (forward ? p.right : p.left) - origin.left, x2 = (forward ? q.left : q.right) - origin.left, bend = (x2 - x1) / 2;
  return `M${x1},${cy(p)} C${x1 + bend},${cy(p)} ${x2 - bend},${cy(q)} ${x2},${cy(q)}`;
}

function inputsOf(app, name) {
  const words = (app.rules[name].entry ? choose(app.rules[name].formula, app.flags) : "").match(/[A-Za-z]\w*/g) || [];
  return [...new Set(words)].filter((word) => word !== name && app.steps.includes(word));
}
