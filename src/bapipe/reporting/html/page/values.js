// Times, ticks and colours as they are shown.
function formatTime(value, unit) {
  if (value === 0) return "0";
  if (unit !== "s") return String(Number(value.toPrecision(6)));
  const rounded = Number(value.toPrecision(3)), size = Math.abs(rounded);
  const [factor, suffix] = [[1, "s"], [1e-3, "ms"], [1e-6, "µs"], [1e-9, "ns"]].find(([f]) => size >= f) || [1e-9, "ns"];
  const shown = size / factor >= 1000 ? (value / factor).toFixed(0) : Number((rounded / factor).toPrecision(3));
  return `${shown} ${suffix}`;
}

function ticks(low, high, most) {
  const span = high - low;
  let step = 10 ** Math.floor(Math.log10(span / most));
  for (const factor of [1, 2, 5, 10, 20]) {
    if (span / (step * factor) <= most) { step *= factor; break; }
  }
  const found = [];
  for (let i = Math.ceil(low / step); i * step <= high + step * 1e-9; i++) found.push(i * step);
  return found;
}

function mixed(color, other, share) {
  const parts = (text) => [1, 3, 5].map((i) => parseInt(text.slice(i, i + 2), 16));
  const [a, b] = [parts(color), parts(other)];
  return "#" + a.map((v, i) => Math.round(v * share + b[i] * (1 - share)).toString(16).padStart(2, "0")).join("");
}

function pixel(color) { // as one number of an ImageData, little-endian
  const [r, g, b] = [1, 3, 5].map((i) => parseInt(color.slice(i, i + 2), 16));
  return (255 << 24 | b << 16 | g << 8 | r) >>> 0;
}
