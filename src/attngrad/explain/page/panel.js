// The panel at the foot of the page: the step in words, and the sum behind the number under the pointer.

const SHOWN_TERMS = 64;

function showStep(app) {
  const name = app.step > 0 ? app.steps[app.step - 1] : null;
  const slider = document.getElementById("step");
  slider.max = app.steps.length;
  slider.value = app.step;
  slider.setAttribute("aria-valuetext", name ? `step ${app.step}: ${name}` : "overview");
  const rule = name ? app.rules[name] : null;
  const title = name ? `${pretty(name)} ${rule.entry ? "= " : ""}${rule.entry ? pretty(choose(rule.formula, app.flags)) : choose(rule.formula, app.flags)}` : "The whole pass";
  const output = document.getElementById("step-name");
  output.replaceChildren(title, element("small", {}, name ? `step ${app.step} of ${app.steps.length}${rule.number ? `, formula ${rule.number}` : ""}` : `${app.steps.length} steps`));
  const [what, why] = name ? WORDS[name] : OVERVIEW;
  document.getElementById("words").replaceChildren(element("p", {}, pretty(what)), element("p", { class: "why" }, pretty(why)));
  const inputs = name ? inputsOf(app, name) : [];
  app.steps.forEach((step, n) => {
    const figure = document.getElementById(`step-${step}`);
    if (!figure) return;
    figure.classList.toggle("later", name !== null && n >= app.step);
    figure.classList.toggle("current", step === name);
    figure.classList.toggle("input", inputs.includes(step));
    if (step === name) figure.setAttribute("aria-current", "step");
    else figure.removeAttribute("aria-current");
  });
  document.getElementById("previous").disabled = app.step === 0;
  document.getElementById("next").disabled = app.step === app.steps.length;
}

function clearMarks() {
  document.querySelectorAll("td.source, td.target").forEach((cell) => cell.classList.remove("source", "target"));
}

function cellAt(name, i, j) {
  return document.querySelector(`#step-${name} td[data-i="${i}"][data-j="${j}"]`);
}

function tokenWords(app, name, i, j) {
  if (!app.tokens) return "";
  const letters = app.rules[name].letters, parts = [];
  if (letters[0] === "i") parts.push(`query \u201c${app.tokens.i[i]}\u201d`);
  if (letters[0] === "j") parts.push(`key \u201c${app.tokens.j[i]}\u201d`);
  if (letters[1] === "j") parts.push(`key \u201c${app.tokens.j[j]}\u201d`);
  return parts.join(", ");
}

function share(value, largest) {
  const bar = element("span", { class: "share", "aria-hidden": "true" }), fill = element("i");
  const width = largest > 0 && Number.isFinite(value) ? (50 * Math.abs(value)) / largest : 0;
  fill.style.width = `${width}%`;
  fill.style[value < 0 ? "right" : "left"] = "50%";
  fill.style.background = `var(--${value < 0 ? "neg" : "pos"})`;
  bar.append(fill);
  return bar;
}

function showSum(app, place) {
  clearMarks();
  const box = document.getElementById("sum");
  document.getElementById("dock").classList.toggle("busy", Boolean(place));
  if (place && !(shownMatrix(app, place.name) && cellAt(place.name, place.i, place.j))) place = null;
  if (!place) {
    box.replaceChildren(element("p", { class: "said" }, "Hover or focus a number: the sum behind it comes here, and its row and column light up."));
    return;
  }
  const { name, i, j } = place, head = headOf(app, name);
  const shown = get(shownMatrix(app, name), i, j), rightM = app.right[name][head];
  const cell = cellAt(name, i, j);
  if (cell) cell.classList.add("target");
  const vector = app.rules[name].letters.length === 1, index = vector ? `${i}` : `${i},${j}`;
  const fits = shapeOf(shownMatrix(app, name)) === shapeOf(rightM), parts = [];
  if (!fits) {
    const shapes = `${shapeOf(shownMatrix(app, name))}, not ${shapeOf(rightM)}`;
    box.replaceChildren(element("p", { class: "planted" }, `Planted: ${name} has the wrong shape, ${shapes}. No sum of the right one stands here.`));
    return;
  }
  const right = get(rightM, i, j);
  if (app.mistake !== null && shown !== right && !(Math.abs(shown - right) <= 1e-9 * Math.max(1, Math.abs(right)))) {
    parts.push(element("p", { class: "planted" }, `Planted: ${short(shown, 6)}. Right is ${short(right, 6)}:`));
  }
  const e = expand(app.x, app.right, app.rules, app.flags, name, head, i, j);
  const said = [tokenWords(app, name, i, j), e.note].filter(Boolean).join("; ");
  parts.push(element("p", { class: "head", "data-total": e.total, "data-value": e.value }, element("b", {}, `${pretty(name)}[${index}]`), e.text ? ` = ${pretty(e.text)} = ` : " = ", element("b", {}, short(e.value, 6))));
  if (said) parts.push(element("p", { class: "said" }, said));
  if (e.terms.length) parts.push(termTable(e));
  for (const term of e.terms) {
    for (const f of term.factors) {
      if (f.at && f.at.head === headOf(app, f.at.name)) {
        const source = cellAt(f.at.name, f.at.row, f.at.column);
        if (source) source.classList.add("source");
      }
    }
  }
  if (name in EDITABLE) parts.push(dragger(app, name, head, i, j, e.value));
  box.replaceChildren(...parts);
}

function termTable(e) {
  const largest = Math.max(...e.terms.map((t) => Math.abs(t.value)).filter(Number.isFinite), 0);
  const body = element("tbody");
  const row = (sign, labels, numbers, value) => {
    const cells = [element("td", {}, sign), element("td", {}, labels), element("td", { class: "n" }, numbers), element("td", {}, numbers ? "=" : ""), element("td", { class: "n" }, short(value, 4))];
    return element("tr", {}, ...cells, element("td", {}, share(value, largest)));
  };
  for (const t of e.terms.slice(0, SHOWN_TERMS)) {
    const labels = t.factors.map((f) => pretty(f.label)).join(" \u00b7 ");
    body.append(row(t.sign < 0 ? "\u2212" : "+", labels, t.factors.map((f) => short(f.value, 4)).join(" \u00b7 "), t.value));
  }
  if (e.terms.length > SHOWN_TERMS) body.append(element("tr", {}, element("td", { colspan: 6 }, `and ${e.terms.length - SHOWN_TERMS} more`)));
  const sum = e.terms.reduce((a, t) => a + t.value, 0);
  const last = { scale: `scale ${short(e.factor, 4)} \u00b7 ${short(sum, 4)}`, log: `m ${short(e.factor, 4)} + log ${short(sum, 4)}`, exp: `exp ${short(sum, 4)}`, "": "" }[e.outer];
  if (e.outer || e.terms.length > 1) {
    body.append(element("tr", { class: "total" }, element("td", {}), element("td", {}, e.outer ? "" : "sum"), element("td", { class: "n" }, last), element("td", {}, "="), element("td", { class: "n" }, short(e.total, 6)), element("td", {})));
  }
  return element("table", { class: "terms" }, body);
}

function dragger(app, name, head, i, j, value) {
  const range = element("input", { type: "range", min: Math.min(-3, Math.floor(value) - 1), max: Math.max(3, Math.ceil(value) + 1), step: "0.01", "aria-label": `Move ${name} row ${i} column ${j}` });
  range.value = value;
  const shown = element("output", {}, short(value, 2));
  range.addEventListener("input", () => {
    setInput(app, name, head, i, j, Number(range.value));
    shown.textContent = short(Number(range.value), 2);
    const number = document.querySelector("#sum .head b:last-child");
    if (number) number.textContent = short(Number(range.value), 6);
  });
  return element("label", { class: "dragger" }, "drag it", range, shown);
}
