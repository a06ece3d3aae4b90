// What must hold, on the numbers that are shown. Errors are relative to the size of what is summed.

const TOLERANCE = 1e-12;

// Numbers that look random and are the same every time.
function fixedDirection(like, seed) {
  let state = seed;
  return like.map((m) => map(m, () => {
    state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
    return (state / 4294967296) * 2 - 1;
  }));
}

function worstRow(rows, f) {
  let worst = 0;
  for (let i = 0; i < rows; i++) {
    const { off, size } = f(i), error = Math.abs(off) / (size || 1);
    worst = Number.isNaN(error) ? Infinity : Math.max(worst, error);
  }
  return worst;
}

function overRow(m, i, f) {
  let total = 0, size = 0;
  for (let j = 0; j < m.cols; j++) { const a = f(j); total += a; size += Math.abs(a); }
  return { total, size };
}

function checks(x, r) {
  const heads = r.A.map((_, h) => h), rows = r.A[0].rows;
  const over = (f) => Math.max(...heads.map((h) => worstRow(rows, (i) => f(h, i))));
  const seesAny = (h, i) => { const sees = visible(x, h); for (let j = 0; j < r.A[h].cols; j++) if (sees(i, j)) return true; return false; };
  const dL = (h, i) => (x.dlse ? x.dlse[h][i] : 0);
  const found = [];
  const say = (claim, error, tolerance) => found.push({ claim, error, holds: error <= (tolerance || TOLERANCE) });

  say(x.sinks ? "rows of A and the sink sum to 1" : "rows of A sum to 1", over((h, i) => {
    const { total } = overRow(r.A[h], i, (j) => get(r.A[h], i, j));
    const blind = !x.sinks && !seesAny(h, i); // a query that sees nothing has a row of zeros
    return { off: total + (x.sinks ? get(r.sink[h], i) : 0) - (blind ? 0 : 1), size: 1 };
  }));
  say(x.sinks ? "rows of dS sum to sink o delta" : x.dlse ? "rows of dS sum to dL" : "rows of dS sum to 0", over((h, i) => {
    const { total, size } = overRow(r.dS[h], i, (j) => get(r.dS[h], i, j));
    const right = seesAny(h, i) ? dL(h, i) + (x.sinks ? get(r.sink[h], i) * get(r.delta[h], i) : 0) : 0;
    const scaleOf = overRow(r.A[h], i, (j) => get(r.A[h], i, j) * (get(r.dA[h], i, j) || 0)).size;
    return { off: total - right, size: size + scaleOf + Math.abs(right) };
  }));
  say("delta = rowsum(A o dA) = rowsum(O o dO)", over((h, i) => {
    const a = overRow(r.A[h], i, (j) => get(r.A[h], i, j) * get(r.dA[h], i, j));
    const o = overRow(r.O[h], i, (j) => get(r.O[h], i, j) * get(r.dO[h], i, j));
    const delta = get(r.delta[h], i) + dL(h, i);
    return { off: Math.max(Math.abs(a.total - delta), Math.abs(o.total - delta)), size: a.size + o.size + Math.abs(dL(h, i)) };
  }));

  const t = { q: fixedDirection(x.q, 1), k: fixedDirection(x.k, 2), v: fixedDirection(x.v, 3) };
  const fits = ["dK", "dV"].every((name) => r[name].every((m, g) => m !== null && m.rows === r[name[1]][g].rows && m.cols === r[name[1]][g].cols));
  const right = fits ? [inner(r.dQ, t.q), inner(r.dK, t.k), inner(r.dV, t.v)] : null;
  const total = (pairs) => pairs.reduce((a, p) => ({ total: a.total + p.total, size: a.size + p.size }), { total: 0, size: 0 });
  const off = (left) => {
    if (!right) return Infinity;
    const b = total(right), error = Math.abs(left.total - b.total) / (left.size + b.size || 1);
    return Number.isNaN(error) ? Infinity : error;
  };
  const moved = tangent(x, t);
  const asRows = (rowsOf) => rowsOf.map((a) => matrix(a.length, 1, (i) => a[i]));
  const finite = (ms) => ms.map((m) => map(m, (a) => (Number.isFinite(a) ? a : 0)));
  const left = [inner(r.dO, moved.outDot), ...(x.dlse ? [inner(asRows(x.dlse), moved.lseDot)] : [])];
  say("<dO, JVP(t)> = <VJP(dO), t>", off(total(left)));

  const step = 1e-5;
  const lossAt = (sign) => {
    const shift = (ms, ds) => ms.map((m, h) => map(m, (a, i, j) => a + sign * step * get(ds[h], i, j)));
    const y = { ...x, q: shift(x.q, t.q), k: shift(x.k, t.k), v: shift(x.v, t.v) };
    const f = y.q.map((_, h) => forwardHead(y, h, {}));
    const pairs = [inner(x.dout, f.map((a) => a.O)), ...(x.dlse ? [inner(asRows(x.dlse), finite(f.map((a) => a.L)))] : [])];
    return total(pairs);
  };
  const up = lossAt(1), down = lossAt(-1);
  say("VJP = finite differences", off({ total: (up.total - down.total) / (2 * step), size: up.size }), 1e-7);
  return found;
}
