// Two plans compared: their figures with the difference, their stages, their pictures. Text from a plan is only
// ever put in as text; pictures repeat those in the report's own sections.
"use strict";
const comparing = (() => {
  const element = (name, words = "", className = "") => {
    const made = document.createElement(name);
    made.textContent = words;
    if (className) made.className = className;
    return made;
  };

  function exact(words, value) { // as in the report: the words people read, and the exact value
    const made = element("data", words);
    made.value = String(value);
    return made;
  }

  function table(id, heads, rows) {
    const box = element("div", "", "scroll"), made = element("table"), head = element("tr"), body = element("tbody");
    box.tabIndex = 0; box.setAttribute("role", "region"); box.setAttribute("aria-label", `${id} table`);
    made.id = `${id}-table`;
    for (const words of heads) { const cell = element("th", words); cell.scope = "col"; head.append(cell); }
    for (const cells of rows) {
      const row = element("tr");
      cells.forEach((content, place) => {
        const cell = element(place ? "td" : "th");
        if (!place) cell.scope = "row";
        cell.append(content); row.append(cell);
      });
      body.append(row);
    }
    const top = element("thead"); top.append(head); made.append(top, body); box.append(made);
    return box;
  }

  // B beside A: +12 % of what differs; for shares the difference in points.
  function difference(a, b) {
    if (a.value === undefined || b.value === undefined) return element("span", a.words === b.words ? "same" : "differs");
    if (a.value === b.value) return element("span", "same");
    const share = a.key === "gap" || a.key === "bubble";
    const amount = share ? (b.value - a.value) * 100 : a.value > 0 ? (b.value / a.value - 1) * 100 : null;
    if (amount === null) return element("span", "differs");
    const size = Math.abs(amount), digits = size < 0.095 ? 2 : size < 99.5 ? 1 : 0;
    const words = `${amount > 0 ? "+" : "−"}${size.toFixed(digits)} ${share ? "points" : "%"}`;
    if (!a.better) return exact(words, b.value - a.value);
    const better = (b.value < a.value) === (a.better === "less");
    const made = element("span", "", better ? "better" : "");
    made.append(exact(words, b.value - a.value), better ? ", B is better" : ", A is better");
    return made;
  }

  function figures(a, b) {
    const knobs = [...new Set([...Object.keys(a.question), ...Object.keys(b.question)])];
    const turned = knobs.filter((name) => a.question[name] !== b.question[name]).map((name) => [
      `asked: ${name.replaceAll("_", " ")}`, a.question[name] || "–", b.question[name] || "–", "differs",
    ]);
    const shown = (one) => one.value === undefined ? one.words : exact(one.words, one.value);
    const found = a.figures.map((mine, place) => [mine.name, shown(mine), shown(b.figures[place]), difference(mine, b.figures[place])]);
    return table("compare", ["", "A, pinned", "B, now", "B beside A"], [...turned, ...found]);
  }

  function stages(a, b) {
    const shown = (stage) => stage ? `${stage.where}: ${stage.layers}; ${stage.time_words} per micro-batch, ${stage.memory_words}` : "–";
    const rows = Array.from({ length: Math.min(64, Math.max(a.stages.length, b.stages.length)) }, (_, n) => [
      String(n), shown(a.stages[n]), shown(b.stages[n]),
    ]);
    return table("compare-stages", ["stage", "A", "B"], rows);
  }

  function pictures(a, b) {
    const made = element("div", "", "pair");
    const parsed = [a, b].map((answer) => new DOMParser().parseFromString(answer.sections, "text/html"));
    for (const [name, title] of [["balance", "Stage balance"], ["memory", "Memory"], ["alternatives", "Alternatives"]]) {
      parsed.forEach((page, place) => {
        const found = page.querySelector(`#${name} .picture`), column = element("div"), letter = "AB"[place];
        if (!found) return;
        const copy = document.importNode(found, true);
        copy.setAttribute("aria-label", `${name} picture of ${letter}`);
        column.append(element("h3", `${title} of ${letter}`), copy); made.append(column);
      });
    }
    return made;
  }

  // Both timelines over the same time, A above B.
  function timelines(a, b) {
    if (!a.data || !b.data) return null;
    const named = (answer, name) => ({ ...answer.data.timelines[0], name });
    return { ...b.data, grouped: true, timelines: [named(a, "A"), named(b, "B")] };
  }

  function choose(controls) { // which of the two timelines is shown
    const label = element("label", "show "), select = element("select");
    select.id = "timeline-shown";
    for (const [value, words] of [["both", "A and B"], ["A", "A"], ["B", "B"]]) {
      const option = element("option", words); option.value = value; select.append(option);
    }
    label.append(select); controls.insertBefore(label, controls.lastElementChild);
  }

  function render(place, a, b) {
    place.replaceChildren();
    const words = element("p");
    words.append(element("strong", "A: "), a.words, ". ", element("strong", "B: "), b.words, ".");
    const more = element("details"), summary = element("summary", "stages and pictures of both");
    more.open = true; more.append(summary, stages(a, b), pictures(a, b));
    place.append(words, figures(a, b), more);
  }

  return { render, timelines, choose };
})();
