// The arithmetic of the page: attention, its VJP and its JVP, in float64, each line a formula of docs/notation.md.
// A matrix is {rows, cols, data}; a step with heads is an array of matrices.

function matrix(rows, cols, at) {
  const data = new Float64Array(rows * cols);
  if (at) for (let i = 0; i < rows; i++) for (let j = 0; j < cols; j++) data[i * cols + j] = at(i, j);
  return { rows, cols, data };
}

function get(m, i, j) {
  return m.data[i * m.cols + (j || 0)];
}

function product(a, b, turnA, turnB) {
  // a b, with either one transposed
  const n = turnA ? a.cols : a.rows, inner = turnA ? a.rows : a.cols, p = turnB ? b.rows : b.cols;
  const out = matrix(n, p);
  for (let i = 0; i < n; i++) {
    for (let x = 0; x < inner; x++) {
      const left = turnA ? a.data[x * a.cols + i] : a.data[i * a.cols + x];
      if (left === 0) continue;
      if (turnB) for (let j = 0; j < p; j++) out.data[i * p + j] += left * b.data[j * b.cols + x];
      else for (let j = 0; j < p; j++) out.data[i * p + j] += left * b.data[x * b.cols + j];
    }
  }
  return out;
}

function map(m, f) {
  return matrix(m.rows, m.cols, (i, j) => f(m.data[i * m.cols + j], i, j));
}

function rowsum(m) {
  return matrix(m.rows, 1, (i) => {
    let total = 0;
    for (let j = 0; j < m.cols; j++) total += m.data[i * m.cols + j];
    return total;
  });
}

function added(a, b) {
  return map(a, (x, i, j) => x + get(b, i, j));
}

const cap = {
  value: (z, c) => (c === null ? z : c * Math.tanh(z / c)),
  first: (z, c) => (c === null ? 1 : 1 - Math.tanh(z / c) ** 2),
};

// The key head that query head h reads.
function keyHead(x, h) {
  return Math.floor(h / x.group);
}

function visible(x, h) {
  const mask = x.mask ? x.mask[h] : null;
  return (i, j) => (!x.causal || j <= i + x.offset) && (mask === null || get(mask, i, j) !== 0);
}

// The forward pass of one head. `wrong` is a planted mistake, or an empty object.
function forwardHead(x, h, wrong) {
  const q = x.q[h], k = x.k[keyHead(x, h)], v = x.v[keyHead(x, h)];
  const sees = visible(x, h);
  const scale = wrong.scoresUnscaled ? 1 : x.scale;
  const Z = map(product(q, k, false, true), (z) => scale * z); // (F1)
  const S = map(Z, (z, i, j) => (sees(i, j) ? cap.value(z, x.softcap) + (x.bias ? get(x.bias[h], i, j) : 0) : -Infinity)); // (F2)
  const sigma = x.sinks ? x.sinks[h] : -Infinity;
  const L = matrix(S.rows, 1), sink = matrix(S.rows, 1), A = matrix(S.rows, S.cols), blind = [];
  for (let i = 0; i < S.rows; i++) {
    let top = sigma, seen = false;
    for (let j = 0; j < S.cols; j++) {
      if (sees(i, j)) { seen = true; top = Math.max(top, get(S, i, j)); }
    }
    blind.push(!seen);
    if (wrong.noMaximum || top === -Infinity) top = 0;
    let total = Math.exp(sigma - top);
    for (let j = 0; j < S.cols; j++) if (sees(i, j)) total += A.data[i * A.cols + j] = Math.exp(get(S, i, j) - top);
    sink.data[i] = total === 0 ? 0 : Math.exp(sigma - top) / total;
    L.data[i] = total === 0 ? -Infinity : top + Math.log(total); // (F3)
    if (total !== 0) for (let j = 0; j < S.cols; j++) A.data[i * A.cols + j] /= total; // (F4)
  }
  const M = x.keep ? x.keep[h] : null;
  const dropped = M ? map(A, (a, i, j) => a * get(M, i, j)) : A;
  return { Z, S, L, A, M, dropped, sink, blind, sees, O: product(dropped, v) }; // (F5)
}

// The backward pass of one head, before the sum over a group.
function backwardHead(x, h, f, wrong) {
  const q = x.q[h], k = x.k[keyHead(x, h)], v = x.v[keyHead(x, h)], given = x.dout[h];
  const dO = map(given, (g, i) => (f.blind[i] ? 0 : g));
  let dA = product(dO, v, false, true); // (R2)
  if (f.M) dA = map(dA, (g, i, j) => g * get(f.M, i, j));
  const delta = rowsum(map(dO, (g, i, j) => g * get(f.O, i, j))); // (R3)
  if (x.dlse) for (let i = 0; i < delta.rows; i++) delta.data[i] -= x.dlse[h][i];
  const right = () => map(f.A, (a, i, j) => (f.sees(i, j) ? a * (get(dA, i, j) - get(delta, i)) : 0)); // (R4)
  const dS = wrong.dS ? wrong.dS({ A: f.A, dA, delta, sees: f.sees }) : right();
  const dZ = map(dS, (g, i, j) => (f.sees(i, j) || wrong.dS ? g * cap.first(get(f.Z, i, j), x.softcap) : 0)); // (R7)
  const scale = wrong.gradientsUnscaled ? 1 : x.scale;
  const dQ = map(product(dZ, k), (g) => scale * g); // (R8)
  const seenQ = map(q, (a, i) => (f.blind[i] ? 0 : a));
  let dK = map(product(dZ, seenQ, true, false), (g) => scale * g); // (R9)
  if (wrong.dKTransposed) dK = map(product(seenQ, dZ, true, false), (g) => scale * g);
  let dV = product(f.dropped, dO, true, false); // (R1)
  if (wrong.dVUnturned) dV = f.A.cols === dO.rows ? product(f.dropped, dO) : null;
  return { dO: given, dA, delta, dS, dZ, dQ, dK, dV };
}

const PER_KEY_HEAD = ["K", "V", "dK", "dV"];

// Every step of every head: result.dS[h], and result.dK[key head], summed over its group.
function compute(x, wrong) {
  wrong = wrong || {};
  const out = { Q: x.q, K: x.k, V: x.v };
  for (const name of ["Z", "S", "L", "A", "O", "sink", "M", "dO", "dA", "delta", "dS", "dZ", "dQ"]) out[name] = [];
  out.dK = new Array(x.k.length).fill(undefined);
  out.dV = new Array(x.k.length).fill(undefined);
  for (let h = 0; h < x.q.length; h++) {
    const f = forwardHead(x, h, wrong), b = backwardHead(x, h, f, wrong), g = keyHead(x, h);
    for (const name of ["Z", "S", "L", "A", "O", "sink", "M"]) out[name].push(f[name]);
    for (const name of ["dO", "dA", "delta", "dS", "dZ", "dQ"]) out[name].push(b[name]);
    for (const name of ["dK", "dV"]) {
      if (b[name] === null || out[name][g] === null) out[name][g] = null;
      else out[name][g] = out[name][g] === undefined ? b[name] : added(out[name][g], b[name]);
    }
  }
  return out;
}

function inner(a, b) {
  let total = 0, size = 0;
  for (let h = 0; h < a.length; h++) {
    for (let n = 0; n < a[h].data.length; n++) {
      const term = a[h].data[n] * b[h].data[n];
      total += term;
      size += Math.abs(term);
    }
  }
  return { total, size };
}

// The JVP of all heads along (q_dot, k_dot, v_dot): out_dot and lse_dot.
function tangent(x, t) {
  const outDot = [], lseDot = [];
  for (let h = 0; h < x.q.length; h++) {
    const g = keyHead(x, h), f = forwardHead(x, h, {});
    const zDot = map(added(product(t.q[h], x.k[g], false, true), product(x.q[h], t.k[g], false, true)), (z) => x.scale * z); // (T1)
    const sDot = map(zDot, (z, i, j) => (f.sees(i, j) ? cap.first(get(f.Z, i, j), x.softcap) * z : 0)); // (T2)
    const lDot = rowsum(map(f.A, (a, i, j) => a * get(sDot, i, j))); // (T3)
    const pDot = map(f.A, (a, i, j) => a * (get(sDot, i, j) - get(lDot, i)) * (f.M ? get(f.M, i, j) : 1)); // (T4)
    outDot.push(added(product(pDot, x.v[g]), product(f.dropped, t.v[g]))); // (T5)
    lseDot.push(lDot);
  }
  return { outDot, lseDot };
}
