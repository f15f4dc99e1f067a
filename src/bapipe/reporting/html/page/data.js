// A timeline's columns, as bapipe.reporting.html.page_data packs them, and where to find things in them.
const BYTES = { u1: Uint8Array, u2: Uint16Array, u4: Uint32Array, i4: Int32Array };

function unpack(text, type) {
  const raw = atob(text), bytes = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) bytes[i] = raw.charCodeAt(i);
  return new BYTES[type](bytes.buffer);
}

// A timeline's columns with times in seconds, and what is found by looking things up.
function load(data) {
  const times = (text) => Float64Array.from(unpack(text, "u4"), (tick) => data.low + tick * data.tick);
  const t = {
    name: data.name, low: data.low, end: data.end, bubble: data.bubble, microbatches: data.microbatches,
    kind: unpack(data.kind, "u1"), stage: unpack(data.stage, "u2"), microbatch: unpack(data.microbatch, "i4"),
    start: times(data.start), finish: times(data.finish), rows: [],
    source: unpack(data.transfers.source, "i4"), fed: unpack(data.transfers.fed, "i4"),
    sent: times(data.transfers.start), arrival: times(data.transfers.arrival),
    waiting: unpack(data.waits.action, "i4"), waitStart: times(data.waits.start), waitEnd: times(data.waits.end),
  };
  const count = t.kind.length;
  let first = 0;
  for (const row of data.rows) {
    t.rows.push({ ...row, first, last: first + row.count });
    first += row.count;
  }
  t.rowOf = new Int32Array(count);
  t.rows.forEach((row, number) => t.rowOf.fill(number, row.first, row.last));
  t.sends = new Int32Array(count).fill(-1);
  t.needs = new Int32Array(count).fill(-1);
  t.waits = new Int32Array(count).fill(-1);
  t.source.forEach((action, index) => { t.sends[action] = index; });
  t.fed.forEach((action, index) => { if (action >= 0) t.needs[action] = index; });
  t.waiting.forEach((action, index) => { t.waits[action] = index; });
  // Time spent by each kind before each action of its row, so that a cell's shares are differences.
  t.present = [...new Set(t.kind)].sort();
  t.before = new Map(t.present.map((kind) => [kind, new Float64Array(count + 1)]));
  for (const row of t.rows) {
    for (const kind of t.present) {
      const sums = t.before.get(kind);
      let sum = 0;
      for (let i = row.first; i < row.last; i++) {
        sums[i] = sum;
        if (t.kind[i] === kind) sum += t.finish[i] - t.start[i];
      }
    }
  }
  t.of = Array.from({ length: t.microbatches }, () => []);
  t.microbatch.forEach((m, action) => { if (m >= 0) t.of[m].push(action); });
  return t;
}

// The first action in [low, high) that ends after a time.
function firstAfter(t, low, high, time) {
  while (low < high) {
    const middle = (low + high) >> 1;
    if (t.finish[middle] > time) high = middle; else low = middle + 1;
  }
  return low;
}
