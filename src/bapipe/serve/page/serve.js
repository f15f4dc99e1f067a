// The knobs, the URL that holds them, and what is shown of the answers. The URL's query is the whole state: the knobs
// of what is shown now (B), and under `pin` the query of what was pinned (A).
"use strict";
const app = (() => {
  const find = (id) => document.getElementById(id);
  const PLAIN = ["precision", "optimizer", "link_bandwidth", "memory_limit", "global_batch", "microbatch", "schedule", "cap", "stages", "strategy", "space"];
  const USUAL = { optimizer: "sgd", strategy: "exact", space: "full" };
  const START = { model: "vgg16", cluster: "4xv100-16" };
  const SEVERAL = "+";
  const WAITS = { number: 250, text: 800 }; // milliseconds after the last key in which more may be typed
  const known = { types: new Map(), aliases: {}, clusters: [] };
  let pinned = null, timer = 0, asking = null, shown = null;

  function options(select, entries, group = null) {
    const place = group ? document.createElement("optgroup") : select;
    if (group) place.label = group;
    for (const [value, words] of entries) {
      const option = document.createElement("option");
      option.value = value; option.textContent = words; place.append(option);
    }
    if (group && entries.length) select.append(place);
  }

  const same = (names) => names.map((name) => [name, name]);

  function fill(choices) {
    options(find("model"), same(choices.own_models), "own");
    options(find("model"), same(choices.models), "built in");
    for (const kind of ["gpu", "fpga", "cpu"]) {
      const names = choices.types.filter((type) => type.kind === kind).map((type) => type.name);
      options(find("kind"), same(names), { gpu: "GPUs", fpga: "FPGAs", cpu: "CPUs" }[kind]);
    }
    options(find("kind"), same(choices.own_clusters), "own cluster files");
    options(find("kind"), [[SEVERAL, "several types…"]], "mixed");
    options(find("precision"), [["", "the default"], ...same(choices.precisions)]);
    options(find("optimizer"), same(choices.optimizers));
    options(find("schedule"), [["", "the best"], ...same(choices.schedules)]);
    options(find("strategy"), same(choices.strategies));
    find("count").max = find("stages").max = choices.most_accelerators;
    find("global_batch").max = find("microbatch").max = find("cap").max = choices.largest_global_batch;
    find("folder-hint").hidden = choices.has_folder;
    for (const type of choices.types) known.types.set(type.name, type);
    known.aliases = choices.aliases; known.clusters = choices.own_clusters;
  }

  // The knobs -> the question, without what is left at its default.
  function read() {
    const question = { model: find("model").value }, kind = find("kind").value;
    if (kind === SEVERAL) question.cluster = find("shorthand").value.trim();
    else question.cluster = known.types.has(kind) ? `${find("count").value || 1}x${kind}` : kind;
    for (const name of PLAIN) {
      const value = find(name).value.trim();
      if (value && value !== USUAL[name]) question[name] = value;
    }
    if (find("split_layers").checked) question.split_layers = "1";
    return question;
  }

  // The question -> the knobs. What a select does not offer is offered then, so that the server can say what it is.
  function write(question) {
    const choose = (select, value) => {
      if (![...select.options].some((option) => option.value === value)) options(select, same([value]));
      select.value = value;
    };
    choose(find("model"), question.model || START.model);
    const cluster = question.cluster || START.cluster, match = /^(?:(\d+)\s*[xX×*]\s*)?([\w.-]+)$/.exec(cluster.trim());
    const name = match && (known.aliases[match[2].toLowerCase()] || match[2].toLowerCase());
    if (known.clusters.includes(cluster)) find("kind").value = cluster;
    else if (match && known.types.has(name)) { find("kind").value = name; find("count").value = match[1] || 1; }
    else { find("kind").value = SEVERAL; find("shorthand").value = cluster; }
    for (const knob of PLAIN) {
      const value = question[knob] || USUAL[knob] || "";
      if (find(knob).tagName === "SELECT") choose(find(knob), value); else find(knob).value = value;
    }
    find("split_layers").checked = ["1", "true"].includes(question.split_layers);
    arrange();
  }

  function arrange() {
    const kind = find("kind").value;
    find("count-row").hidden = !known.types.has(kind);
    find("shorthand-row").hidden = kind !== SEVERAL;
    find("pin").textContent = pinned ? "Unpin A" : "Pin as A";
  }

  const query = (question) => new URLSearchParams(question).toString();
  function address(question) {
    const state = new URLSearchParams(question);
    if (pinned) state.set("pin", query(pinned));
    return "/?" + state;
  }

  function fromAddress() {
    const state = Object.fromEntries(new URLSearchParams(location.search)), pin = state.pin;
    delete state.pin;
    pinned = pin ? Object.fromEntries(new URLSearchParams(pin)) : null;
    write(state);
  }

  async function get(path, signal) {
    let response;
    try { response = await fetch(path, { signal }); } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new Error("the server does not answer; is `bapipe serve` still running?");
    }
    const found = await response.json();
    if (!response.ok) throw new Error(found.error);
    return found;
  }

  function say(words) { find("status").textContent = words; }

  function complain(words) {
    find("error").textContent = words; find("error").hidden = !words;
    if (!words) return;
    bapipe.unmount(); shown = null;
    find("result").replaceChildren(); find("compare").hidden = find("take").hidden = true;
    bapipe.contents(document); say("");
  }

  // Asks for what the knobs say. A plan found fast is shown until the best one is there.
  async function ask() {
    if (asking) asking.abort();
    const turn = asking = new AbortController(), question = read(), begun = performance.now();
    const mine = query(question), other = pinned && query(pinned);
    let done = false;
    find("main").setAttribute("aria-busy", "true");
    say("Planning…");
    const first = other ? get("/api/plan?" + other, turn.signal) : Promise.resolve(null);
    const draft = Promise.all([get("/api/draft?" + mine, turn.signal), first]).then(([found, a]) => {
      if (!found || done || turn !== asking) return;
      show(found, a);
      say("First answer, from data parallelism and 1f1b alone; the whole search goes on…");
    }).catch(() => {}); // what is wrong stands in the plan's own answer
    try {
      const [b, a] = await Promise.all([get("/api/plan?" + mine, turn.signal), first]);
      done = true;
      if (turn !== asking) return;
      complain("");
      show(b, a);
      say(`Planned in ${bapipe.formatTime((performance.now() - begun) / 1000, "s")}.`);
    } catch (error) {
      done = true;
      if (error.name === "AbortError" || turn !== asking) return;
      complain(error.message);
    } finally {
      await draft;
      if (turn === asking) { asking = null; find("main").removeAttribute("aria-busy"); }
    }
  }

  function show(b, a) {
    shown = { a, b };
    find("error").hidden = true;
    find("result").innerHTML = b.sections;
    find("compare").hidden = !a;
    if (a) comparing.render(find("compare-body"), a, b); else find("compare-body").replaceChildren();
    const both = a && comparing.timelines(a, b), data = both || b.data;
    if (both) comparing.choose(find("timeline-controls"));
    take(b);
    document.title = `${b.question.model} on ${b.question.cluster}: BaPipe`;
    if (data) { bapipe.mount(document, data); return; }
    bapipe.unmount(); bapipe.contents(document);
    const words = document.createElement("p"), section = find("timeline");
    words.textContent = `${b.actions} actions are too many for this page; bapipe report draws them from plan.json.`;
    section.replaceChildren(section.querySelector("h2"), words);
  }

  function take(answer) {
    find("take").hidden = answer.draft;
    find("command").textContent = answer.command;
    find("command-where").hidden = ![answer.question.model, answer.question.cluster].some((name) => /\.(json|toml|txt)$/i.test(name));
    find("downloads").replaceChildren(...["plan.json", "cluster.toml", "command.sh", "report.html"].map((name) => {
      const link = document.createElement("a");
      link.href = `/files/${name}?` + query(answer.question); link.download = name;
      link.textContent = name; link.className = "button"; link.id = "download-" + name.replace(".", "-");
      return link;
    }));
  }

  function go(push) {
    clearTimeout(timer); timer = 0;
    const next = address(read());
    if (next !== location.pathname + location.search) history[push ? "pushState" : "replaceState"](null, "", next);
    arrange(); ask();
  }

  function listen() {
    const form = find("knobs");
    form.addEventListener("submit", (event) => { event.preventDefault(); go(true); });
    form.addEventListener("input", (event) => {
      arrange(); clearTimeout(timer);
      timer = setTimeout(() => go(true), WAITS[event.target.type] || 0);
    });
    form.addEventListener("change", () => { if (timer) go(true); }); // Enter, or on to the next knob
    find("pin").addEventListener("click", () => { pinned = pinned ? null : read(); go(true); });
    find("reset").addEventListener("click", () => { pinned = null; write(START); go(true); });
    find("copy").addEventListener("click", async () => {
      try { await navigator.clipboard.writeText(find("command").textContent); say("Copied."); }
      catch { getSelection().selectAllChildren(find("command")); say("The command is selected; copy it with Ctrl+C."); }
    });
    addEventListener("popstate", () => { fromAddress(); ask(); });
    find("fold").open = innerWidth > 900 || !location.search;
  }

  async function start() {
    bapipe.dress(document);
    try { fill(await get("/api/choices")); } catch (error) { complain(error.message); return; }
    listen(); fromAddress(); go(false);
  }

  start();
  return { read, get shown() { return shown; }, get idle() { return asking === null && timer === 0; } };
})();
