"use strict";
(() => {
  const texts = JSON.parse(document.getElementById("texts").textContent);
  const body = document.querySelector("#calls tbody");
  const rows = [...body.querySelectorAll("tr[data-call]")];
  const bars = [...document.querySelectorAll(".lanes rect")];
  const filters = [...document.querySelectorAll("[data-filter]")];
  const find = document.getElementById("find");

  const add = (parent, name, text, cls) => {
    const made = document.createElement(name);
    if (text) made.textContent = text;
    if (cls) made.className = cls;
    parent.appendChild(made);
    return made;
  };

  const tint = (fate) => fate.startsWith("path ") ? "p" + Number(fate.slice(5)) % 5 : "free";

  const tell = (cell, call) => {
    const said = add(cell, "div", "", "said");
    const pieces = texts[call];
    if (!pieces.length) add(said, "b", "Its text is not in this page.");
    for (const [fate, num, left, ...parts] of pieces) {
      const name = fate === "context" ? "new context" : `sampled, ${fate}`;
      add(said, "b", `${name} · ${num.toLocaleString("en")} ${num === 1 ? "token" : "tokens"}`);
      parts.forEach((part, place) => {
        if (place) add(said, "em", `\n… ${left.toLocaleString("en")} tokens left out …\n`);
        add(said, fate === "context" ? "span" : "mark", part, fate === "context" ? "" : tint(fate));
      });
    }
  };

  const close = (row) => {
    row.classList.remove("on");
    if (row.nextElementSibling?.classList.contains("text")) row.nextElementSibling.remove();
  };
  const toggle = (row) => {
    if (row.classList.contains("on")) return close(row);
    row.classList.add("on");
    const below = document.createElement("tr");
    below.className = "text";
    const cell = add(below, "td");
    cell.colSpan = row.children.length;
    tell(cell, Number(row.dataset.call));
    row.after(below);
  };

  const light = (test) => bars.forEach((bar) => bar.classList.toggle("on", test(Number(bar.dataset.call))));

  const filter = () => {
    const word = find.value.toLowerCase();
    let shown = 0;
    const kept = new Set();
    for (const row of rows) {
      const fits = filters.every((f) => !f.value || (f.dataset.filter === "fate"
        ? row.dataset.fate.split("|").includes(f.value) : row.dataset[f.dataset.filter] === f.value))
        && (!word || texts[Number(row.dataset.call)].some((piece) => piece.slice(3).some((p) => p.toLowerCase().includes(word))));
      if (!fits) close(row);
      row.hidden = !fits;
      shown += fits;
      if (fits) kept.add(Number(row.dataset.call));
    }
    document.getElementById("shown").textContent = `${shown.toLocaleString("en")} of ${rows.length.toLocaleString("en")} calls`;
    bars.forEach((bar) => bar.classList.toggle("dim", !kept.has(Number(bar.dataset.call))));
    document.querySelectorAll("[data-path]").forEach((b) => b.classList.toggle("on", `path ${b.dataset.path}`
      === document.querySelector("[data-filter=fate]").value));
  };

  const number = (text) => {
    const value = parseFloat(text.replace(/[#,×v]/g, ""));
    return Number.isNaN(value) ? -1 : value;
  };
  let sorted = "0", up = true;
  const sort = (head) => {
    const column = Number(head.dataset.column);
    up = sorted === head.dataset.column ? !up : true;
    sorted = head.dataset.column;
    rows.forEach(close);
    const value = (row) => row.children[column].textContent;
    const numeric = head.classList.contains("num");
    rows.sort((a, b) => (numeric ? number(value(a)) - number(value(b)) : value(a).localeCompare(value(b))) * (up ? 1 : -1));
    body.append(...rows);
  };

  body.addEventListener("click", (event) => {
    const row = event.target.closest("tr[data-call]");
    if (row) { toggle(row); light((call) => call === Number(row.dataset.call) && row.classList.contains("on")); }
  });
  body.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && event.target.matches("tr[data-call]")) toggle(event.target);
  });
  document.querySelectorAll("#calls th").forEach((head) => head.addEventListener("click", () => sort(head)));
  filters.forEach((f) => f.addEventListener("change", filter));
  find.addEventListener("input", filter);
  document.querySelector(".draw").addEventListener("click", (event) => {
    const bar = event.target.closest("rect");
    if (!bar) return;
    const row = document.getElementById(`call-${bar.dataset.call}`);
    if (!row.classList.contains("on")) toggle(row);
    light((call) => call === Number(bar.dataset.call));
    row.scrollIntoView({ block: "center" });
  });
  const hint = document.getElementById("hint");
  document.querySelector(".draw").addEventListener("mouseover", (event) => {
    const call = event.target.closest("rect")?.dataset.call;
    const cells = call === undefined ? [] : [...document.getElementById(`call-${call}`).children].map((c) => c.textContent);
    hint.textContent = cells.length ? `${cells[0]} · ${cells[1]} · ${cells[2]} · ${cells[7]} tokens sampled under ${cells[9]} `
      + `after a prompt of ${cells[6]} · ${cells[10]}` : "";
  });
  document.querySelectorAll("[data-path]").forEach((button) => button.addEventListener("click", () => {
    const choice = document.querySelector("[data-filter=fate]");
    const wanted = `path ${button.dataset.path}`;
    choice.value = choice.value === wanted ? "" : wanted;
    filter();
  }));
})();
