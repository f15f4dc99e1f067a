// Draws timelines. What a frame draws is bounded by the canvas, not by the number of actions: rows whose actions are
// wider than a few pixels are drawn action by action, others as cells that show how their time is shared between the
// kinds.
const LEAST_WIDTH = 3; // pixels per action, on average, from which a row is drawn action by action
const CELL = 2; // pixels of a cell
const MOST_TRANSFERS = 1500; // actions in view from which on their transfers are left out
const AXIS = 26, GAP = 4, ROW_MOST = 26, ROW_LEAST = 7, ALL_ROWS = 560;

class TimelinePicture {
  constructor(root, data) {
    const find = (id) => root.getElementById(id);
    this.box = find("timeline-view"); this.canvas = find("timeline-canvas");
    this.choice = find("timeline-shown"); this.merge = find("merged");
    this.unit = data.unit; this.kinds = data.kinds; this.grouped = Boolean(data.grouped);
    this.timelines = data.timelines.map(load);
    this.context = this.canvas.getContext("2d");
    this.cells = document.createElement("canvas");
    this.low = Math.min(...this.timelines.map((t) => t.low));
    this.high = Math.max(...this.timelines.map((t) => t.end));
    if (!(this.high > this.low)) this.high = this.low + 1;
    this.from = this.low; this.to = this.high;
    this.selected = null; this.pointed = null; this.cursor = null;
    this.stats = { rects: 0, cells: 0, lines: 0, rows: 0, milliseconds: 0, frames: 0 };
    this.arrange(); this.theme(); this.resize();
  }

  // Which rows are shown: rank by rank, predicted above measured, or, where grouped, one timeline above the other.
  arrange() {
    const shown = this.choice ? this.choice.value : "both";
    const chosen = this.timelines.filter((t) => shown === "both" || t.name === shown);
    this.rows = chosen.flatMap((t) => t.rows.map((row) => ({ t, row })));
    const byRank = (a, b) => a.row.rank - b.row.rank, byTimeline = (a, b) => chosen.indexOf(a.t) - chosen.indexOf(b.t);
    this.rows.sort(this.grouped ? (a, b) => byTimeline(a, b) || byRank(a, b) : (a, b) => byRank(a, b) || byTimeline(a, b));
    const height = Math.max(ROW_LEAST, Math.min(ROW_MOST, Math.floor(ALL_ROWS / Math.max(1, this.rows.length)) - 1));
    let y = 2, before = null;
    for (const item of this.rows) {
      if (before !== null) y += before.row.rank === item.row.rank ? 1 : Math.max(1, Math.min(GAP, height / 4 | 0));
      if (this.grouped && before !== null && before.t !== item.t) y += 2 * GAP;
      item.y = y; item.h = height; y += height; before = item; item.row.item = item;
      item.label = item.row.title + (chosen.length > 1 ? ` ${item.t.name}` : "");
    }
    this.bottom = y + 2;
  }

  theme() {
    const style = getComputedStyle(document.documentElement);
    const color = (name) => style.getPropertyValue("--" + name).trim();
    this.color = Object.fromEntries(["page", "lane", "ink", "soft", "grid", "accent", "bad"].map((n) => [n, color(n)]));
    this.fill = this.kinds.map((kind) => [kind.color, mixed(kind.color, this.color.lane, 0.72)]);
    this.pattern = this.kinds.map((kind, number) => this.fill[number].map((c) => this.makePattern(kind, c)));
    this.pixels = this.kinds.map((kind) => pixel(kind.color));
    this.lanePixel = pixel(this.color.lane);
  }

  makePattern(kind, color) {
    const tile = document.createElement("canvas");
    tile.width = tile.height = 6;
    const c = tile.getContext("2d");
    c.fillStyle = color; c.fillRect(0, 0, 6, 6);
    c.strokeStyle = "rgba(255,255,255,.45)"; c.stroke(new Path2D(kind.mark));
    return this.context.createPattern(tile, "repeat");
  }

  resize() {
    const width = Math.max(200, this.box.clientWidth), height = this.bottom + AXIS;
    const ratio = Math.min(2, window.devicePixelRatio || 1, 30000 / height); // browsers draw no taller canvas
    this.width = width; this.height = height;
    this.canvas.width = Math.round(width * ratio); this.canvas.height = Math.round(height * ratio);
    this.canvas.style.height = height + "px";
    this.context.setTransform(ratio, 0, 0, ratio, 0, 0);
    this.narrow = width < 560;
    this.left = this.narrow ? 30 : 18 + 6.5 * Math.max(...this.rows.map((item) => item.label.length));
    this.right = width - 10;
    this.draw();
  }

  x(time) { return this.left + (time - this.from) / (this.to - this.from) * (this.right - this.left); }
  time(x) { return this.from + (x - this.left) / (this.right - this.left) * (this.to - this.from); }

  schedule() {
    if (this.queued) return;
    this.queued = true;
    requestAnimationFrame(() => { this.queued = false; this.draw(); });
  }

  draw() {
    const begun = performance.now(), c = this.context;
    this.stats = { rects: 0, cells: 0, lines: 0, rows: this.rows.length, milliseconds: 0, frames: this.stats.frames + 1 };
    c.fillStyle = this.color.page; c.fillRect(0, 0, this.width, this.height);
    this.drawAxis();
    c.save();
    c.beginPath(); c.rect(this.left, 0, this.right - this.left, this.bottom); c.clip();
    const room = (this.right - this.left) / LEAST_WIDTH, dense = [], single = [];
    for (const item of this.rows) {
      item.i0 = firstAfter(item.t, item.row.first, item.row.last, this.from);
      item.i1 = item.i0;
      let high = item.row.last;
      for (let low = item.i0; low < high;) { // the first that starts after the view
        const middle = (low + high) >> 1;
        if (item.t.start[middle] >= this.to) high = middle; else low = middle + 1;
      }
      item.i1 = high;
      (item.i1 - item.i0 > room ? dense : single).push(item);
    }
    if (dense.length) this.drawCells(dense);
    for (const item of single) this.drawActions(item);
    if (!dense.length) this.drawTransfers(single);
    this.merged = dense.length > 0;
    if (this.selected !== null) this.drawSelected();
    if (this.pointed) this.outline(this.pointed.item, this.pointed.action, this.color.ink, 2);
    if (this.cursor) this.outline(this.cursor.item, this.cursor.action, this.color.accent, 3);
    c.restore();
    this.stats.milliseconds = performance.now() - begun;
    this.merge.hidden = !this.merged;
  }

  drawAxis() {
    const c = this.context, size = this.rows.length ? Math.min(11, this.rows[0].h + 2) : 11;
    c.font = `${size}px system-ui, sans-serif`; c.textBaseline = "middle"; c.textAlign = "right";
    let written = -99;
    for (const item of this.rows) {
      if (!item.row.reduces) { c.fillStyle = this.color.lane; c.fillRect(this.left, item.y, this.right - this.left, item.h); }
      if (item.y - written < size + 1 && this.rows.length > 24) continue; // labels that would touch are left out
      c.fillStyle = item.t.name === "measured" ? this.color.soft : this.color.ink;
      c.fillText(this.narrow ? String(item.row.rank) : item.label, this.left - 6, item.y + item.h / 2);
      written = item.y;
    }
    c.font = "11px system-ui, sans-serif"; c.textAlign = "center"; c.fillStyle = this.color.soft; c.strokeStyle = this.color.grid;
    c.lineWidth = 1; c.beginPath();
    const found = ticks(this.from, this.to, Math.max(2, (this.right - this.left) / 90));
    // Neighbouring ticks may agree in three digits where the view is far in: say them relative to its start.
    const relative = found.length > 1 && formatTime(found[0], this.unit) === formatTime(found[1], this.unit);
    for (const value of found) {
      const x = this.x(value);
      c.moveTo(x, 0); c.lineTo(x, this.bottom + 4);
      const words = relative ? "+" + formatTime(value - this.from, this.unit) : formatTime(value, this.unit);
      c.fillText(words, Math.min(x, this.width - 20), this.bottom + 14);
    }
    c.stroke();
  }

  // One cell of a few pixels per stretch of time: the kinds' shares of it as heights from below.
  drawCells(items) {
    const columns = Math.ceil((this.right - this.left) / CELL), height = this.bottom;
    if (this.cells.width !== columns || this.cells.height !== height) {
      this.cells.width = columns; this.cells.height = height;
    }
    const paint = this.cells.getContext("2d"), image = paint.createImageData(columns, height);
    const pixels = new Uint32Array(image.data.buffer), step = (this.to - this.from) / columns;
    for (const item of items) {
      const t = item.t, kinds = t.present, before = kinds.map((kind) => t.before.get(kind));
      const spent = new Float64Array(kinds.length), last = new Float64Array(kinds.length);
      let i = item.i0;
      for (let column = -1; column < columns; column++) {
        const until = this.from + (column + 1) * step;
        // Gallop: the edge is near where the previous one was.
        let reach = 1;
        while (i + reach < item.i1 && t.finish[i + reach] <= until) reach *= 2;
        i = firstAfter(t, i, Math.min(item.i1, i + reach), until);
        const inside = i < item.row.last && t.start[i] < until;
        for (let k = 0; k < kinds.length; k++) {
          let sum = i < item.row.last ? before[k][i] : before[k][i - 1] + (t.kind[i - 1] === kinds[k] ? t.finish[i - 1] - t.start[i - 1] : 0);
          if (inside && t.kind[i] === kinds[k]) sum += until - t.start[i];
          spent[k] = sum - last[k]; last[k] = sum;
        }
        if (column < 0) continue;
        let y = item.y + item.h, level = 0;
        for (let k = 0; k < kinds.length; k++) {
          level += spent[k] / step * item.h;
          const top = item.y + item.h - Math.min(item.h, Math.round(level));
          for (; y > top; y--) pixels[(y - 1) * columns + column] = this.pixels[kinds[k]];
        }
        for (; y > item.y; y--) pixels[(y - 1) * columns + column] = item.row.reduces ? 0 : this.lanePixel;
        this.stats.cells++;
      }
    }
    paint.putImageData(image, 0, 0);
    this.context.imageSmoothingEnabled = false;
    this.context.drawImage(this.cells, this.left, 0, columns * CELL, height);
  }

  drawActions(item) {
    const c = this.context, t = item.t;
    c.textBaseline = "middle"; c.textAlign = "left"; c.font = `${Math.min(11, item.h - 2)}px system-ui, sans-serif`;
    for (let i = item.i0; i < item.i1; i++) {
      const x = this.x(t.start[i]), width = Math.max(0.6, this.x(t.finish[i]) - x);
      const left = Math.max(x, this.left - 10), seen = Math.min(x + width, this.right + 10) - left;
      const kind = t.kind[i], odd = t.microbatch[i] > 0 ? t.microbatch[i] & 1 : 0;
      c.fillStyle = width >= 7 ? this.pattern[kind][odd] : this.fill[kind][odd];
      c.fillRect(left, item.y, Math.max(0.6, seen - (width > 4 ? 0.7 : 0)), item.h);
      this.stats.rects++;
      if (t.waits[i] >= 0) this.drawWait(item, t.waits[i]);
      if (item.h >= 10 && seen > 11) { // F12, or where that has no room, 12
        const number = t.microbatch[i] >= 0 ? String(t.microbatch[i]) : "", whole = this.kinds[kind].letter + number;
        const words = whole.length * 7.5 + 4 < seen ? whole : number, room = words.length * 7.5 + 4;
        if (words && room <= seen) {
          c.fillStyle = this.fill[kind][odd]; c.fillRect(left + 2, item.y + 2, room, item.h - 4);
          c.fillStyle = odd ? this.inkOn(kind) : this.kinds[kind].ink; c.fillText(words, left + 4, item.y + item.h / 2 + 0.5);
        }
      }
    }
  }

  inkOn(kind) { // the lighter odd fill over a dark lane may need the other ink
    const [r, g, b] = [1, 3, 5].map((i) => parseInt(this.fill[kind][1].slice(i, i + 2), 16));
    return 0.299 * r + 0.587 * g + 0.114 * b > 128 ? "#000000" : "#ffffff";
  }

  drawWait(item, wait) {
    const c = this.context, t = item.t, x = this.x(t.waitStart[wait]), width = this.x(t.waitEnd[wait]) - x;
    if (width < 0.5) return;
    c.fillStyle = this.color.soft; c.fillRect(x, item.y + item.h / 2 - 1.5, width, 3);
    this.stats.rects++;
  }

  drawTransfers(items) {
    let count = 0;
    for (const item of items) count += item.i1 - item.i0;
    if (count > MOST_TRANSFERS) return;
    const c = this.context;
    c.strokeStyle = this.color.ink; c.lineWidth = 1; c.globalAlpha = 0.45;
    for (const back of [false, true]) {
      c.setLineDash(back ? [3, 2] : []); c.beginPath();
      for (const item of items) {
        const t = item.t, ours = (transfer) => transfer >= 0 && (t.kind[t.source[transfer]] !== 0) === back;
        for (let i = item.i0; i < item.i1; i++) {
          if (ours(t.sends[i])) this.transferLine(t, t.sends[i]);
          // What arrives was drawn with its sender, unless that is out of view.
          if (ours(t.needs[i]) && t.finish[t.source[t.needs[i]]] <= this.from) this.transferLine(t, t.needs[i]);
        }
      }
      c.stroke();
    }
    c.setLineDash([]); c.globalAlpha = 1;
  }

  transferLine(t, transfer) {
    if (t.arrival[transfer] <= t.sent[transfer] || t.fed[transfer] < 0) return;
    const from = this.itemOf(t, t.source[transfer]), to = this.itemOf(t, t.fed[transfer]);
    const down = to.y > from.y;
    this.context.moveTo(this.x(t.sent[transfer]), from.y + (down ? from.h : 0));
    this.context.lineTo(this.x(t.arrival[transfer]), to.y + (down ? 0 : to.h));
    this.stats.lines++;
  }

  itemOf(t, action) { return t.rows[t.rowOf[action]].item; }

  drawSelected() {
    const c = this.context;
    c.fillStyle = this.color.page; c.globalAlpha = 0.72; c.fillRect(this.left, 0, this.right - this.left, this.bottom);
    c.globalAlpha = 1; c.strokeStyle = this.color.ink; c.lineWidth = 1.4; c.beginPath();
    const marks = [];
    for (const t of new Set(this.rows.map((item) => item.t))) {
      for (const action of t.of[this.selected] || []) {
        if (t.finish[action] < this.from || t.start[action] > this.to) continue;
        marks.push([this.itemOf(t, action), action]);
        if (t.sends[action] >= 0) this.transferLine(t, t.sends[action]);
      }
    }
    c.stroke();
    for (const [item, action] of marks) {
      const x = this.x(item.t.start[action]), width = Math.max(2, this.x(item.t.finish[action]) - x);
      c.fillStyle = this.pattern[item.t.kind[action]][0]; c.fillRect(x, item.y, width, item.h);
      if (width > 5) c.strokeRect(x, item.y, width, item.h);
      this.stats.rects++;
    }
  }

  outline(item, action, color, thick) {
    if (action < 0) return;
    const c = this.context, x = this.x(item.t.start[action]);
    c.strokeStyle = color; c.lineWidth = thick;
    c.strokeRect(x, item.y, Math.max(2, this.x(item.t.finish[action]) - x), item.h);
  }

  legend(place) {
    const present = new Set(this.timelines.flatMap((t) => t.present));
    const entries = this.kinds.map((kind, number) => [kind, number]).filter(([, number]) => present.has(number));
    const sample = (words, paint) => {
      const span = document.createElement("span"), canvas = document.createElement("canvas");
      canvas.width = 36; canvas.height = 24; canvas.style.width = "18px"; canvas.style.height = "12px";
      const c = canvas.getContext("2d"); c.scale(2, 2); paint(c);
      span.append(canvas, words); place.append(span);
    };
    place.textContent = "";
    for (const [kind, number] of entries) sample(`${kind.letter} ${kind.name}`, (c) => { c.fillStyle = this.pattern[number][0]; c.fillRect(0, 0, 18, 12); });
    sample("bubble", (c) => { c.fillStyle = this.color.lane; c.fillRect(0, 0, 18, 12); });
    sample("waiting for a transfer", (c) => { c.fillStyle = this.color.lane; c.fillRect(0, 0, 18, 12); c.fillStyle = this.color.soft; c.fillRect(0, 4.5, 18, 3); });
    sample("transfer (dashed: backward)", (c) => { c.strokeStyle = this.color.ink; c.beginPath(); c.moveTo(1, 1); c.lineTo(17, 11); c.stroke(); });
  }
}
