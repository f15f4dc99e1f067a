// The page around the timeline: its contents, theme and print.
function contents(root) {
  const list = root.getElementById("contents");
  list.textContent = "";
  for (const section of root.querySelectorAll("main section:not([hidden])")) {
    const link = document.createElement("a"), entry = document.createElement("li");
    link.href = "#" + section.id; link.textContent = section.querySelector("h2").textContent;
    entry.append(link); list.append(entry);
  }
}

// Theme and print for the whole page: once, whatever is drawn in it later.
function dress(root) {
  if (api.dressed) return;
  api.dressed = true;
  const page = document.documentElement, dark = matchMedia("(prefers-color-scheme: dark)");
  const repaint = () => {
    if (!api.view) return;
    api.view.theme(); api.view.legend(root.getElementById("timeline-legend")); api.view.draw();
  };
  dark.addEventListener("change", repaint);
  root.getElementById("theme").addEventListener("click", () => {
    const now = page.dataset.theme || (dark.matches ? "dark" : "light");
    page.dataset.theme = now === "dark" ? "light" : "dark";
    repaint();
  });
  let chosen;
  addEventListener("beforeprint", () => { chosen = page.dataset.theme; page.dataset.theme = "light"; repaint(); });
  addEventListener("afterprint", () => {
    if (chosen) page.dataset.theme = chosen; else delete page.dataset.theme;
    repaint();
  });
}

// Draws the data into the sections that stand in the page; mounting again takes the place of what was drawn before.
function mount(root, data) {
  unmount();
  dress(root); contents(root);
  api.view = new TimelineView(root, data);
  return api.view;
}

function unmount() {
  if (api.view) api.view.observer.disconnect();
  api.view = null;
}

const api = { mount, unmount, dress, contents, formatTime, ticks, firstAfter, view: null, dressed: false };
