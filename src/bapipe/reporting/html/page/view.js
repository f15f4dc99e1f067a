// A picture that answers: zoom and pan, what lies under the pointer or the keyboard's cursor, and one micro-batch
// followed through all stages.
class TimelineView extends TimelinePicture {
  constructor(root, data) {
    super(root, data);
    this.tip = root.getElementById("tip"); this.readout = root.getElementById("readout");
    this.field = root.getElementById("highlight");
    this.listen(root);
  }

  show(from, to) {
    const whole = this.high - this.low, span = Math.min(whole, Math.max(whole * 1e-6, to - from));
    this.from = Math.min(Math.max(this.low, from), this.high - span);
    this.to = this.from + span;
    this.schedule();
  }

  zoom(factor, x = (this.left + this.right) / 2) {
    const time = this.time(x), span = (this.to - this.from) / factor;
    const share = (time - this.from) / (this.to - this.from);
    this.show(time - share * span, time + (1 - share) * span);
  }

  pan(share) {
    const by = share * (this.to - this.from);
    this.show(this.from + by, this.to + by);
  }

  // The row and the action at a place on the canvas; action -1 in a gap, whose next action is `next`.
  at(x, y) {
    const item = this.rows.find((each) => y >= each.y && y < each.y + each.h);
    if (!item || x < this.left || x > this.right) return null;
    const time = this.time(x), next = firstAfter(item.t, item.row.first, item.row.last, time);
    const inside = next < item.row.last && item.t.start[next] <= time;
    return { item, time, action: inside ? next : -1, next: next < item.row.last ? next : -1 };
  }

  describe(found) {
    const { item, action, next } = found, t = item.t, say = (time) => formatTime(time, this.unit);
    const where = `${item.row.title}${this.timelines.length > 1 ? `, ${t.name}` : ""}`;
    if (action < 0) {
      const previous = (next < 0 ? item.row.last : next) - 1;
      const from = previous >= item.row.first ? t.finish[previous] : this.low, to = next < 0 ? t.end : t.start[next];
      const wait = next >= 0 ? t.waits[next] : -1;
      const cause = wait >= 0 ? `\n${say(t.waitEnd[wait] - t.waitStart[wait])} of it waiting for a transfer` : "";
      return `bubble on ${where}\n${say(from)} to ${say(to)}: idle for ${say(Math.max(0, to - from))}${cause}`;
    }
    const kind = this.kinds[t.kind[action]], m = t.microbatch[action];
    const name = `${t.stage[action]}${kind.letter}${m >= 0 ? m : ""}`;
    const of = m >= 0 ? ` of micro-batch ${m}` : "", length = t.finish[action] - t.start[action];
    const lines = [`${name}: ${kind.name}${of}, stage ${t.stage[action]}`, where,
      `${say(t.start[action])} to ${say(t.finish[action])}: ${say(length)}`];
    const [sends, needs] = [t.sends[action], t.needs[action]];
    if (needs >= 0) lines.push(`input sent ${say(t.sent[needs])}, there ${say(t.arrival[needs])}`);
    if (sends >= 0 && t.arrival[sends] > t.sent[sends]) lines.push(`result on its way for ${say(t.arrival[sends] - t.sent[sends])}`);
    return lines.join("\n");
  }

  select(microbatch) {
    const valid = Number.isInteger(microbatch) && microbatch >= 0 && microbatch < Math.max(...this.timelines.map((t) => t.microbatches));
    this.selected = valid ? microbatch : null;
    if (this.field && document.activeElement !== this.field) this.field.value = valid ? microbatch : "";
    this.box.dataset.selected = valid ? String(microbatch) : "";
    this.schedule();
  }

  point(event) {
    const found = this.at(event.offsetX, event.offsetY);
    this.pointed = found;
    this.tip.hidden = !found;
    if (found) {
      const words = this.describe(found);
      this.tip.textContent = words; this.readout.textContent = words.replaceAll("\n", " · ");
      const wide = this.tip.offsetWidth, x = event.offsetX + 14;
      this.tip.style.left = Math.max(0, x + wide > this.width ? event.offsetX - wide - 14 : x) + "px";
      this.tip.style.top = event.offsetY + 16 + "px";
    }
    this.schedule();
  }

  // Moves the keyboard's cursor to another row or to a neighbouring action, and brings it into view.
  move(rows, actions) {
    const place = this.cursor ? this.rows.indexOf(this.cursor.item) : -1;
    const number = place < 0 ? 0 : Math.min(this.rows.length - 1, Math.max(0, place + rows)), item = this.rows[number];
    if (!item || item.row.count === 0) return;
    let action;
    if (!this.cursor || rows !== 0) {
      const time = this.cursor ? (this.cursor.item.t.start[this.cursor.action]) : this.from;
      action = firstAfter(item.t, item.row.first, item.row.last, time);
    } else action = this.cursor.action + actions;
    action = Math.min(item.row.last - 1, Math.max(item.row.first, action));
    this.cursor = { item, action };
    const [start, finish] = [item.t.start[action], item.t.finish[action]], span = this.to - this.from;
    if (finish > this.to || start < this.from) this.show(start - span / 2, start + span / 2);
    this.readout.textContent = this.describe({ item, action, next: action }).replaceAll("\n", " · ");
    this.select(item.t.microbatch[action] >= 0 ? item.t.microbatch[action] : null);
  }

  listen(root) {
    const box = this.box, on = (id, action) => root.getElementById(id).addEventListener("click", action);
    on("zoom-in", () => this.zoom(1.6)); on("zoom-out", () => this.zoom(1 / 1.6)); on("zoom-all", () => this.show(this.low, this.high));
    if (this.choice) this.choice.addEventListener("change", () => { this.cursor = this.pointed = null; this.arrange(); this.resize(); });
    this.field.addEventListener("input", () => this.select(this.field.value === "" ? null : Number(this.field.value)));
    const pointers = new Map();
    let moved = 0;
    box.addEventListener("pointerdown", (event) => {
      pointers.set(event.pointerId, event.offsetX); moved = 0;
      box.setPointerCapture(event.pointerId); box.classList.add("dragging");
    });
    box.addEventListener("pointermove", (event) => {
      const before = pointers.get(event.pointerId), rect = this.canvas.getBoundingClientRect(), x = event.clientX - rect.left;
      if (before === undefined) { this.point({ offsetX: x, offsetY: event.clientY - rect.top }); return; }
      const others = [...pointers].filter(([id]) => id !== event.pointerId).map(([, place]) => place);
      pointers.set(event.pointerId, x); moved += Math.abs(x - before);
      if (others.length) {
        const [was, is] = [Math.abs(before - others[0]), Math.abs(x - others[0])];
        if (was > 8 && is > 8) this.zoom(is / was, (x + others[0]) / 2);
      } else this.pan((before - x) / (this.right - this.left));
    });
    const release = (event) => {
      if (!pointers.delete(event.pointerId)) return;
      if (!pointers.size) box.classList.remove("dragging");
      if (event.type === "pointerup" && moved < 4) {
        const rect = this.canvas.getBoundingClientRect();
        const place = { offsetX: event.clientX - rect.left, offsetY: event.clientY - rect.top };
        const found = this.at(place.offsetX, place.offsetY), m = found && found.action >= 0 ? found.item.t.microbatch[found.action] : -1;
        this.point(place); this.select(m >= 0 && m !== this.selected ? m : null);
      }
    };
    box.addEventListener("pointerup", release); box.addEventListener("pointercancel", release);
    box.addEventListener("pointerleave", () => { this.pointed = null; this.tip.hidden = true; this.schedule(); });
    box.addEventListener("wheel", (event) => {
      const x = event.clientX - this.canvas.getBoundingClientRect().left;
      if (event.ctrlKey || event.metaKey) { event.preventDefault(); this.zoom(Math.exp(-event.deltaY / 300), x); }
      else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
        event.preventDefault(); this.pan((event.deltaX || event.deltaY) / (this.right - this.left));
      }
    }, { passive: false });
    const keys = {
      ArrowLeft: () => this.pan(-0.15), ArrowRight: () => this.pan(0.15), ArrowUp: () => this.move(-1, 0), ArrowDown: () => this.move(1, 0),
      "+": () => this.zoom(1.6), "=": () => this.zoom(1.6), "-": () => this.zoom(1 / 1.6), "0": () => this.show(this.low, this.high),
      Home: () => this.show(this.low, this.low + this.to - this.from), End: () => this.show(this.high - this.to + this.from, this.high),
      ",": () => this.move(0, -1), ".": () => this.move(0, 1),
      Escape: () => { this.cursor = null; this.select(null); },
    };
    box.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey || !keys[event.key]) return;
      event.preventDefault(); keys[event.key]();
    });
    this.observer = new ResizeObserver(() => { if (this.box.clientWidth !== this.width) this.resize(); });
    this.observer.observe(box);
    this.legend(root.getElementById("timeline-legend"));
  }
}
