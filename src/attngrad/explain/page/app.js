// State, controls, keys and links. One object holds everything; `recompute` is the only way numbers change.

const SWITCHES = [
  { id: "causal", label: "causal", hint: () => "" },
  { id: "mask", label: "mask", hint: (d) => (d.given.mask ? "as given" : "last key hidden") },
  { id: "gqa", label: "grouped queries", hint: (d) => (d.q.length > 1 ? (d.k.length < d.q.length ? `${d.q.length} heads, ${d.k.length} of keys` : `${d.q.length} heads, 1 of keys`) : "needs 2 heads") },
  { id: "scale", label: "scale", hint: (d) => short(d.scale, 3) },
  { id: "softcap", label: "softcap", hint: (d) => short(d.softcap, 1) },
];

function fromNested(list) {
  return list.map((m) => matrix(m.length, m.length ? m[0].length : 0, (i, j) => Number(m[i][j])));
}

function start(data) {
  const app = {
    data, rules: data.rules, tokens: data.tokens, limit: data.limit, from: {},
    base: null, on: { ...data.on }, head: data.head, mistake: null, step: 0, cell: null, folded: false,
  };
  load(app);
  return app;
}

function load(app) {
  const d = app.data;
  app.base = { q: fromNested(d.q), k: fromNested(d.k), v: fromNested(d.v), dout: fromNested(d.dout) };
}

// The operands under the switches, in the form that model.js takes.
function operands(app) {
  const { data: d, base, on } = app, heads = base.q.length, native = heads / base.k.length;
  const grouped = native > 1;
  const keys = (m) => (grouped === on.gqa ? m : grouped ? base.q.map((_, h) => m[Math.floor(h / native)]) : [m[0]]);
  const k = keys(base.k), v = keys(base.v);
  return {
    q: base.q, k, v, dout: base.dout, group: heads / k.length, causal: on.causal, offset: d.offset,
    scale: on.scale ? d.scale : 1, softcap: on.softcap ? d.softcap : null, mask: on.mask ? app.mask : null,
    bias: app.bias, sinks: d.sinks, keep: app.keep, dlse: d.dlse,
  };
}

function recompute(app, rebuild) {
  app.x = operands(app);
  app.flags = flagsOf(app.x);
  app.right = compute(app.x, {});
  const mistake = MISTAKES.find((m) => m.id === app.mistake);
  app.shown = mistake ? compute(app.x, mistake.wrong) : app.right;
  const before = app.steps;
  app.steps = ["Q", "K", "V", "Z", "S", "L", "A", "O", "dO", "dV", "dA", "delta", "dS", ...(app.flags.cap ? ["dZ"] : []), "dQ", "dK"];
  if (before && before.length !== app.steps.length && app.step > 0) app.step = Math.max(1, app.steps.indexOf(before[app.step - 1]) + 1);
  if (rebuild) {
    const focus = document.activeElement && document.activeElement.closest ? document.activeElement.closest("td[data-i]") : null;
    const at = focus ? [focus.closest("figure").dataset.name, focus.dataset.i, focus.dataset.j] : null;
    build(app);
    const again = at ? cellAt(...at) : null;
    if (again) focusCell(again);
  }
  paint(app);
  showChecks(app);
  showDamage(app, mistake);
}

function refresh(app, rebuild) {
  recompute(app, rebuild);
  showControls(app);
  showStep(app);
  showSum(app, app.cell);
  drawEdges(app);
  writeHash(app);
  settle();
}

function setInput(app, name, head, i, j, value) {
  const field = EDITABLE[name], native = app.base.q.length / app.base.k.length;
  const own = PER_KEY_HEAD.includes(name) && app.x.k.length !== app.base.k.length ? (app.x.k.length > app.base.k.length ? Math.floor(head / native) : 0) : head;
  const m = app.base[field][own];
  m.data[i * m.cols + j] = value;
  recompute(app, false);
}

// --- what the page says about the numbers ---

function showChecks(app) {
  document.getElementById("checks").replaceChildren(...checks(app.x, app.shown).map((c) => element(
    "li", { class: c.holds ? "holds" : "broken" },
    element("b", { "aria-label": c.holds ? "holds" : "does not hold" }, c.holds ? "\u2713" : "\u2717"),
    pretty(c.claim), element("small", {}, c.error === 0 ? "0" : Number.isFinite(c.error) ? c.error.toExponential(0) : "\u221e"),
  )));
}

function showDamage(app, mistake) {
  const box = document.getElementById("damage");
  box.hidden = !mistake;
  app.damage = mistake ? damage(app.shown, app.right) : [];
  if (!mistake) { box.replaceChildren(); return; }
  const parts = app.damage.map(({ name, error, shape, expected }) => {
    const text = error === null ? (shape === "none" ? "cannot be computed" : `has shape ${shape}, not ${expected}`) : percent(error);
    const fine = error !== null && error <= 1e-9;
    return element("span", { class: fine ? "fine" : "off", "data-name": name, "data-error": error === null ? "shape" : error }, `${fine ? "\u2713" : "\u2717"} ${name} ${fine ? "" : error === null ? "" : "off by "}${text}`);
  });
  box.replaceChildren(element("code", {}, pretty(mistake.says)), ...parts, element("small", {}, `${pretty(mistake.why)} Right: ${pretty(mistake.right)}. (errata ${mistake.refs})`));
}

function showControls(app) {
  for (const s of SWITCHES) document.getElementById(`switch-${s.id}`).checked = app.on[s.id];
  document.querySelectorAll("#heads button").forEach((b) => b.setAttribute("aria-pressed", String(Number(b.dataset.head) === app.head)));
  document.querySelectorAll("#mistakes button").forEach((b) => b.setAttribute("aria-pressed", String(b.dataset.id === app.mistake)));
}

// --- links: #step=dK&cell=2,1&head=1&on=causal,scale&break=mean ---

function writeHash(app) {
  const parts = [];
  if (app.step > 0) parts.push(`step=${app.steps[app.step - 1]}`);
  if (app.cell) parts.push(`cell=${app.cell.name},${app.cell.i},${app.cell.j}`);
  if (app.head !== app.data.head) parts.push(`head=${app.head}`);
  if (SWITCHES.some((s) => app.on[s.id] !== app.data.on[s.id])) parts.push(`on=${SWITCHES.filter((s) => app.on[s.id]).map((s) => s.id).join(",")}`);
  if (app.mistake) parts.push(`break=${app.mistake}`);
  const hash = parts.length ? `#${parts.join("&")}` : "";
  if (hash !== location.hash) {
    try { history.replaceState(null, "", hash || location.pathname + location.search); } catch (error) { /* a page without an address has no links */ }
  }
}

function readHash(app) {
  const given = Object.fromEntries(location.hash.slice(1).split("&").map((part) => part.split("=")).filter((pair) => pair.length === 2));
  app.on = { ...app.data.on };
  if ("on" in given) for (const s of SWITCHES) app.on[s.id] = given.on.split(",").includes(s.id);
  if (app.base.q.length === 1) app.on.gqa = app.data.on.gqa;
  const head = Number(given.head);
  app.head = Number.isInteger(head) && head >= 0 && head < app.base.q.length && "head" in given ? head : app.data.head;
  app.mistake = MISTAKES.some((m) => m.id === given.break) ? given.break : null;
  recompute(app, true);
  const named = app.steps.indexOf(given.step), number = Number(given.step);
  app.step = named >= 0 ? named + 1 : Number.isInteger(number) && number > 0 && number <= app.steps.length ? number : 0;
  const cell = (given.cell || "").split(",");
  app.cell = cell.length === 3 && app.steps.includes(cell[0]) && cellAt(cell[0], Number(cell[1]), Number(cell[2])) ? { name: cell[0], i: Number(cell[1]), j: Number(cell[2]) } : null;
  refresh(app, false);
  reveal(app);
}

// --- pointer and keys ---

function placeOf(cell) {
  return { name: cell.closest("figure").dataset.name, i: Number(cell.dataset.i), j: Number(cell.dataset.j) };
}

function focusCell(cell) {
  const table = cell.closest("table");
  table.querySelectorAll('td[tabindex="0"]').forEach((other) => other.setAttribute("tabindex", "-1"));
  cell.setAttribute("tabindex", "0");
  cell.focus({ preventScroll: false });
}

function edit(app, cell, first) {
  const place = placeOf(cell);
  if (!(place.name in EDITABLE) || cell.firstElementChild) return;
  const old = Number(cell.dataset.value);
  const input = element("input", { type: "text", inputmode: "decimal", autocomplete: "off", "aria-label": `${place.name} row ${place.i} column ${place.j}` });
  input.value = first === undefined ? String(old) : first;
  cell.replaceChildren(input);
  input.focus();
  if (first === undefined) input.select();
  let done = false;
  const close = (keep) => {
    if (done) return;
    const value = Number(input.value.trim().replace("\u2212", "-").replace(",", "."));
    const good = input.value.trim() !== "" && Number.isFinite(value);
    if (keep && !good) { input.setAttribute("aria-invalid", "true"); input.title = "A number, please"; input.focus(); return; }
    done = true;
    cell.replaceChildren();
    if (keep) setInput(app, place.name, headOf(app, place.name), place.i, place.j, value);
    else paint(app);
    app.cell = place;
    showSum(app, place);
    focusCell(cell);
  };
  input.addEventListener("keydown", (event) => {
    event.stopPropagation();
    if (event.key === "Enter") { event.preventDefault(); close(true); }
    if (event.key === "Escape") close(false);
  });
  input.addEventListener("blur", () => { if (input.getAttribute("aria-invalid") !== "true") close(input.value.trim() !== "" && Number.isFinite(Number(input.value))); });
}

const MOVES = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };

function cellKeys(app, event, cell) {
  const { name, i, j } = placeOf(cell), table = cell.closest("table");
  let next = null;
  if (event.key in MOVES) next = cellAt(name, i + MOVES[event.key][0], j + MOVES[event.key][1]);
  else if (event.key === "Home") next = cell.parentElement.querySelector("td");
  else if (event.key === "End") next = [...cell.parentElement.querySelectorAll("td")].pop();
  else if (event.key === "Enter" || event.key === "F2") { event.preventDefault(); edit(app, cell); return true; }
  else if (event.key === "Escape") { app.cell = null; cell.blur(); refresh(app, false); return true; }
  else if (/^[-0-9.]$/.test(event.key) && name in EDITABLE) { event.preventDefault(); edit(app, cell, event.key); return true; }
  else return false;
  event.preventDefault();
  if (next && table.contains(next)) focusCell(next);
  return true;
}

function goTo(app, step) {
  app.step = Math.max(0, Math.min(app.steps.length, step));
  showStep(app);
  drawEdges(app);
  writeHash(app);
  reveal(app);
}

// Scroll to the step, clear of the panel below.
function reveal(app) {
  const figure = app.step > 0 ? document.getElementById(`step-${app.steps[app.step - 1]}`) : null;
  document.documentElement.style.scrollPaddingBottom = `${document.getElementById("dock").offsetHeight + 8}px`;
  if (figure) figure.scrollIntoView({ block: "nearest", inline: "nearest" });
}

function wire(app) {
  const flow = document.getElementById("flow");
  flow.addEventListener("pointerover", (event) => {
    const cell = event.target.closest("td[data-i]");
    if (cell && event.pointerType !== "touch") showSum(app, placeOf(cell));
  });
  flow.addEventListener("pointerleave", () => showSum(app, app.cell));
  flow.addEventListener("focusin", (event) => {
    const cell = event.target.closest("td[data-i]");
    if (!cell || event.target !== cell) return;
    app.cell = placeOf(cell);
    showSum(app, app.cell);
    if (app.step === 0) drawEdges(app);
    writeHash(app);
  });
  flow.addEventListener("click", (event) => {
    const cell = event.target.closest("td[data-i]");
    if (cell && !cell.firstElementChild) focusCell(cell);
  });
  flow.addEventListener("dblclick", (event) => {
    const cell = event.target.closest("td[data-i]");
    if (cell) edit(app, cell);
  });
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const cell = event.target.closest ? event.target.closest("td[data-i]") : null;
    if (cell && event.target === cell && cellKeys(app, event, cell)) return;
    if (event.target.tagName === "INPUT" && event.target.type !== "checkbox" && event.target.type !== "range") return;
    if (event.key === "]") goTo(app, app.step + 1);
    else if (event.key === "[") goTo(app, app.step - 1);
    else if (event.target === document.body && event.key === "ArrowRight") goTo(app, app.step + 1);
    else if (event.target === document.body && event.key === "ArrowLeft") goTo(app, app.step - 1);
  });
  const slider = document.getElementById("step");
  slider.addEventListener("input", () => goTo(app, Number(slider.value)));
  document.getElementById("previous").addEventListener("click", () => goTo(app, app.step - 1));
  document.getElementById("next").addEventListener("click", () => goTo(app, app.step + 1));
  document.getElementById("fold").addEventListener("click", (event) => {
    const folded = document.getElementById("dock").classList.toggle("folded");
    event.currentTarget.setAttribute("aria-expanded", String(!folded));
  });
  document.getElementById("reset").addEventListener("click", () => {
    load(app);
    Object.assign(app, { on: { ...app.data.on }, head: app.data.head, mistake: null, step: 0, cell: null });
    refresh(app, true);
  });
  document.getElementById("theme").addEventListener("click", () => setTheme(app, document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
  window.addEventListener("hashchange", () => readHash(app));
  window.addEventListener("resize", () => { fit(app); drawEdges(app); });
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  dark.addEventListener("change", () => setTheme(app, dark.matches ? "dark" : "light"));
  document.documentElement.dataset.theme = dark.matches ? "dark" : "light";
  let before = ["light", 0]; // paper is white
  window.addEventListener("beforeprint", () => { before = [document.documentElement.dataset.theme, app.step]; app.step = 0; showStep(app); setTheme(app, "light"); });
  window.addEventListener("afterprint", () => { app.step = before[1]; showStep(app); setTheme(app, before[0]); });
}

function setTheme(app, theme) {
  document.documentElement.dataset.theme = theme;
  paint(app);
}

function controls(app) {
  const d = app.data, toggles = document.getElementById("toggles");
  for (const s of SWITCHES) {
    const box = element("input", { type: "checkbox", id: `switch-${s.id}`, disabled: s.id === "gqa" && d.q.length < 2 });
    box.addEventListener("change", () => { app.on[s.id] = box.checked; refresh(app, true); });
    toggles.append(element("label", {}, box, s.label, element("small", {}, s.hint(d))));
  }
  if (d.q.length > 1) {
    const heads = document.getElementById("heads");
    heads.append(element("span", {}, "head"));
    d.q.forEach((_, h) => {
      const button = element("button", { type: "button", "data-head": h }, String(h));
      button.addEventListener("click", () => { app.head = h; refresh(app, true); });
      heads.append(button);
    });
  }
  for (const m of MISTAKES) {
    const button = element("button", { type: "button", "data-id": m.id, title: `${pretty(m.says)} (errata ${m.refs})` }, m.label);
    button.addEventListener("click", () => { app.mistake = app.mistake === m.id ? null : m.id; refresh(app, true); });
    document.getElementById("mistakes").append(button);
  }
  const sizes = { i: ["queries", d.q[0].length], j: ["keys", d.k[0].length], d: ["features", Math.max(d.q[0][0].length, d.v[0][0].length)] };
  for (const [letter, [name, n]] of Object.entries(sizes)) {
    if (n <= app.limit) continue;
    const box = element("input", { type: "number", min: 0, max: n - app.limit, value: 0, step: 1, "aria-label": `First of the ${name} shown` });
    box.addEventListener("change", () => {
      const first = Math.max(0, Math.min(n - app.limit, Math.floor(Number(box.value) || 0)));
      box.value = first;
      app.from[letter] = first;
      if (letter === "d") app.from.e = first;
      refresh(app, true);
    });
    document.getElementById("windows").append(element("span", {}, `${name} from`), box);
  }
  if (d.notice) {
    const notice = document.getElementById("notice");
    notice.textContent = d.notice;
    notice.hidden = false;
  }
}

function plain(result) {
  const out = {};
  for (const [name, heads] of Object.entries(result)) {
    out[name] = heads.map((m) => (m ? Array.from({ length: m.rows }, (_, i) => Array.from(m.data.subarray(i * m.cols, (i + 1) * m.cols))) : null));
  }
  return out;
}

const app = start(JSON.parse(document.getElementById("data").textContent));
app.mask = fromNested(app.data.mask);
app.bias = app.data.bias ? fromNested(app.data.bias) : null;
app.keep = app.data.keep ? fromNested(app.data.keep) : null;
controls(app);
wire(app);
readHash(app);
// For consoles and tests: the numbers that the page shows, and the right ones.
window.attngrad = Object.freeze({
  shown: () => plain(app.shown), right: () => plain(app.right), checks: () => checks(app.x, app.shown), damage: () => app.damage,
  state: () => ({ on: { ...app.on }, head: app.head, step: app.steps[app.step - 1] || null, mistake: app.mistake, cell: app.cell }),
});
