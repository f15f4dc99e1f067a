// A time cursor over both timelines: played, or moved by hand. It says what each plan has done by then.
const PLAYED = 8000; // milliseconds in which the longer plan is played
const UNITS = ["B", "kB", "MB", "GB", "TB"];

function formatBytes(bytes) {
  const power = bytes > 0 ? Math.min(UNITS.length - 1, Math.floor(Math.log10(bytes) / 3)) : 0;
  return `${(bytes / 1000 ** power).toPrecision(3)} ${UNITS[power]}`;
}

class Player {
  constructor(root, view, data) {
    this.view = view; this.memory = data.memory; this.samples = data.samples;
    this.button = root.getElementById("play"); this.range = root.getElementById("scrub"); this.now = root.getElementById("now");
    this.still = matchMedia("(prefers-reduced-motion: reduce)");
    this.line = document.createElement("div");
    this.line.className = "playhead"; view.box.append(this.line);
    this.items = view.timelines.map(() => this.now.appendChild(document.createElement("li")));
    this.playing = false; this.time = view.low;
    // Whatever redraws the timelines moves the cursor with them.
    const draw = view.draw.bind(view);
    view.draw = () => { draw(); this.place(); };
    this.button.addEventListener("click", () => (this.playing ? this.stop() : this.play()));
    this.range.addEventListener("input", () => { this.stop(); this.go(this.at(Number(this.range.value) / 1000)); });
    this.still.addEventListener("change", () => this.stop());
    this.go(view.low);
  }

  at(share) { return this.view.low + share * (this.view.high - this.view.low); }

  go(time) {
    this.time = Math.min(this.view.high, Math.max(this.view.low, time));
    const share = (this.time - this.view.low) / (this.view.high - this.view.low);
    this.range.value = String(Math.round(1000 * share));
    this.range.setAttribute("aria-valuetext", formatted(this.time, this.view.unit));
    this.view.timelines.forEach((timeline, number) => { this.items[number].textContent = this.words(timeline, number); });
    this.place();
  }

  place() {
    const { view, line } = this, x = view.x(this.time);
    line.hidden = x < view.left - 1 || x > view.right + 1;
    line.style.left = `${x}px`; line.style.height = `${view.bottom}px`;
  }

  // Micro-batches whose last backward has ended, ranks that are idle, and bytes on the fullest rank.
  words(t, number) {
    const left = new Array(t.microbatches).fill(0);
    for (let i = 0; i < t.kind.length; i++) if (t.microbatch[i] >= 0 && t.finish[i] > this.time) left[t.microbatch[i]]++;
    const done = left.filter((count) => count === 0).length;
    const ranks = t.rows.filter((row) => !row.reduces);
    const idle = ranks.filter((row) => {
      const next = bapipe.firstAfter(t, row.first, row.last, this.time);
      return next >= row.last || t.start[next] > this.time;
    }).length;
    const { times, bytes } = this.memory[number];
    let place = 0;
    while (place + 1 < times.length && times[place + 1] <= this.time) place++;
    const over = this.time >= t.end ? "done" : `${idle} of ${ranks.length} ranks idle`;
    return `${t.name} at ${formatted(this.time, this.view.unit)}: ${done} of ${t.microbatches} micro-batches done, ${over}, ` +
      `${formatBytes(bytes[place])} on the fullest rank`;
  }

  play() {
    if (this.still.matches) return;
    this.playing = true; this.button.textContent = "Pause"; this.button.setAttribute("aria-pressed", "true");
    if (this.time >= this.view.high) this.time = this.view.low;
    const begin = performance.now(), from = this.time, rate = (this.view.high - this.view.low) / PLAYED;
    const frame = (now) => {
      if (!this.playing) return;
      this.go(from + Math.max(0, now - begin) * rate);
      if (this.time >= this.view.high) this.stop(); else requestAnimationFrame(frame);
    };
    requestAnimationFrame(frame);
  }

  stop() {
    this.playing = false; this.button.textContent = "Play"; this.button.setAttribute("aria-pressed", "false");
  }
}

const formatted = (time, unit) => bapipe.formatTime(time, unit);
