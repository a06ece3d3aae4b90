// The sum behind one number: the entry formulas of rules.py, read and evaluated here.

function choose(template, flags) {
  return template.replace(/\{(\w+)\?([^:}]*):([^}]*)\}/g, (_, flag, yes, no) => (flags[flag] ? yes : no));
}

// "scale sum_i dS[ij] Q[id]" as {outer, products: [{sign, over, factors: [{f, name, letters}]}]}.
function parseEntry(entry) {
  const words = entry.split(/\s+/).filter(Boolean);
  const outer = ["scale", "log", "exp"].includes(words[0]) ? words.shift() : "";
  const products = [];
  let sign = 1, over = "", factors = [];
  for (const word of [...words, "+"]) {
    if (word === "+" || word === "-") {
      if (factors.length) products.push({ sign, over, factors });
      sign = word === "+" ? 1 : -1;
      over = "";
      factors = [];
    } else if (word.startsWith("sum_")) {
      over = word.slice(4);
    } else {
      const [, f, name, letters] = /^(?:(cap'{0,2}|exp)\()?(\w+)\[(\w*)\]\)?$/.exec(word);
      factors.push({ f: f || "", name, letters });
    }
  }
  return { outer, products };
}

// The function around a sum, with its brackets: exp(S[0,1] - L[0]).
function wrapped(text) {
  return text.replace(/^(exp|log) (.*)$/, "$1($2)");
}

const SET_WHERE_HIDDEN = ["S", "A", "dS", "dZ"];

function flagsOf(x) {
  return {
    cap: x.softcap !== null, bias: !!x.bias, sinks: !!x.sinks, keep: !!x.keep, dlse: !!x.dlse, group: x.group > 1,
    hidden: x.q.some((q, h) => { const sees = visible(x, h); for (let i = 0; i < q.rows; i++) for (let j = 0; j < x.k[0].rows; j++) if (!sees(i, j)) return true; return false; }),
  };
}

// Entry (i, j) of step `name` at head h: {text, outer, terms: [{sign, factors: [{label, value, at}], value}], total, note}.
function expand(x, r, rules, flags, name, h, i, j) {
  const rule = rules[name], key = PER_KEY_HEAD.includes(name);
  const env = { h: key ? h * x.group : h };
  [...rule.letters].forEach((letter, n) => { env[letter] = n === 0 ? i : j; });
  const entry = choose(rule.entry, flags);
  const bound = (letters) => [...letters].map((c) => (rule.letters.includes(c) ? env[c] : c)).join(",");
  const text = wrapped(entry.replace(/\[(\w*)\]/g, (_, letters) => (letters === "h" ? "" : `[${bound(letters)}]`)));
  const value = get(r[name][h], i, j);
  if (!entry) return { text: "", outer: "", terms: [], total: value, value, note: "given" };
  const sees = (e) => visible(x, e.h)(e.i, e.j);
  if (rule.letters === "ij" && SET_WHERE_HIDDEN.includes(name) && !sees(env)) {
    return { text, outer: "", terms: [], total: value, value, note: `hidden: query ${i} may not see key ${j}` };
  }
  if (name === "dA" && !r.A[h].data.subarray(i * r.A[h].cols, (i + 1) * r.A[h].cols).some((_, n) => visible(x, h)(i, n))) {
    return { text, outer: "", terms: [], total: value, value, note: `query ${i} sees nothing` };
  }
  const size = { i: x.q[0].rows, j: x.k[0].rows, d: x.q[0].cols, e: x.v[0].cols };
  const { outer, products } = parseEntry(entry);
  const several = key && x.group > 1;
  const heads = several ? Array.from({ length: x.group }, (_, n) => env.h + n) : [env.h];
  const terms = [];
  let dropped = 0;
  for (const p of products) {
    for (const head of heads) {
      for (let n = 0; n < (p.over ? size[p.over] : 1); n++) {
        const place = { ...env, h: head };
        if (p.over) place[p.over] = n;
        if (p.factors.some((f) => f.letters === "ij" && SET_WHERE_HIDDEN.includes(f.name) && !sees(place))) { dropped++; continue; }
        const factors = p.factors.map((f) => factorAt(x, r, f, place, several));
        terms.push({ sign: p.sign, factors, value: p.sign * factors.reduce((a, f) => a * f.value, 1) });
      }
    }
  }
  let factor = x.scale;
  if (outer === "log") {
    factor = Math.max(...terms.map((t) => t.factors[0].argument));
    if (!Number.isFinite(factor)) factor = 0;
    for (const t of terms) {
      const f = t.factors[0];
      f.value = t.value = Math.exp(f.argument - factor);
      f.label = f.label.replace(/\)$/, " - m)");
    }
  }
  let total = terms.reduce((a, t) => a + t.value, 0);
  if (outer === "scale") total *= factor;
  if (outer === "log") total = total > 0 ? factor + Math.log(total) : -Infinity;
  if (outer === "exp") total = Math.exp(total);
  const note = dropped ? `${dropped} masked ${dropped > 1 ? "terms, all 0" : "term, which is 0"}, left out` : "";
  return { text, outer, factor, terms, total, value, note };
}

function factorAt(x, r, { f, name, letters }, env, several) {
  if (name === "sigma") {
    const argument = x.sinks[env.h];
    return { label: f ? `${f}(sigma)` : "sigma", value: f === "exp" ? Math.exp(argument) : argument, argument, at: null };
  }
  const head = PER_KEY_HEAD.includes(name) ? keyHead(x, env.h) : env.h;
  const [row, column] = [env[letters[0]], letters.length > 1 ? env[letters[1]] : 0];
  let argument;
  if (name === "bias") argument = get(x.bias[head], row, column);
  else if (name === "dL") argument = x.dlse[head][row];
  else argument = get(r[name][head], row, column);
  const shown = `${name}[${several && !PER_KEY_HEAD.includes(name) ? `h${head}; ` : ""}${[...letters].map((c) => env[c]).join(",")}]`;
  const at = { name, head, row, column };
  if (f === "exp") return { label: `exp(${shown})`, value: Math.exp(argument), argument, at };
  if (f === "cap") return { label: `cap(${shown})`, value: cap.value(argument, x.softcap), argument, at };
  if (f === "cap'") return { label: `cap'(${shown})`, value: cap.first(argument, x.softcap), argument, at };
  return { label: shown, value: argument, argument, at };
}
