// Places the texts and numbers of a view model, again at each event of the page's stream. It makes
// no markup: texts are textContent.
"use strict";
(function () {
  const main = document.querySelector("main");
  const all = (query, from) => Array.from((from || document).querySelectorAll(query));
  const one = (query, from) => (from || document).querySelector(query);
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const SVG = "http://www.w3.org/2000/svg";

  function put(node, text) { if (node && node.textContent !== text) node.textContent = text; }
  function make(tag, name, text) {
    const node = document.createElement(tag);
    if (name) node.className = name;
    if (text !== undefined) node.textContent = text;
    return node;
  }

  function cell(item) {
    const node = make("td", item.tone);
    if (item.bar !== undefined) {
      const box = document.createElementNS(SVG, "svg"), rect = document.createElementNS(SVG, "rect");
      box.setAttribute("class", "bar");
      for (const [k, v] of [["width", `${100 * item.bar}%`], ["height", "100%"], ["rx", "2"]]) rect.setAttribute(k, v);
      box.append(rect);
      node.append(box);
    }
    node.append(make("span", "", item.text));
    return node;
  }

  const shown = new Map();  // what each part shows, so that only what changed is touched
  function changed(key, value) {
    const text = JSON.stringify(value);
    if (shown.get(key) === text) return false;
    shown.set(key, text);
    return true;
  }

  function table(key, made) {
    const box = one(`[data-table="${key}"]`);
    if (!box || !changed(`table ${key}`, made)) return;
    const head = make("tr"), body = one("tbody", box);
    for (const text of made.headers) { const th = make("th", "", text); th.scope = "col"; head.append(th); }
    one("thead", box).replaceChildren(head);
    body.replaceChildren(...made.rows.map((row) => {
      const line = make("tr");
      line.append(...row.map(cell));
      return line;
    }));
    put(one(".note", box), made.note);
  }

  function tiles(list, from) {
    for (const made of list) {
      const tile = one(`[data-tile="${made.key}"]`, from);
      if (!tile) continue;
      tile.className = `tile ${made.tone}`;
      put(one("b", tile), made.value);
      put(one(".sub", tile), made.note);
    }
  }

  function state(made, from) {
    const box = one("[data-state]", from);
    if (!box) return;
    box.className = `state ${made.tone}`;
    put(one("strong", box), made.word);
    put(one("span", box), made.sentence);
  }

  function nav(list) {
    if (!changed("nav", list)) return;
    const here = main.dataset.events.split("/")[2];
    one("[data-nav]").replaceChildren(...list.map((item) => {
      const link = make("a", item.tone);
      link.href = `/s/${item.name}`;
      if (item.name === here) link.setAttribute("aria-current", "page");
      link.append(make("i", "dot"), item.label);
      return link;
    }));
  }

  // Charts.
  const plots = new Map();
  const percent = (u, values) => values.map((v) => `${(100 * v).toFixed(Math.abs(v) < 0.1 ? 1 : 0)}%`);
  const dated = (u, s) => (s === null ? "" : new Date(1000 * s).toISOString().slice(0, 16).replace("T", " ").replace(" 00:00", ""));
  function draw(box, made) {
    const colours = [colour("--agent"), colour("--other")];
    const write = (u, v) => (v === null || v === undefined ? "–" : made.percent ? `${(100 * v).toFixed(2)}%` : String(Number(v.toPrecision(5))));
    const axis = { stroke: colour("--muted"), grid: { stroke: colour("--grid"), width: 1 }, ticks: { show: false }, font: "11px system-ui" };
    const y = { ...axis, size: 54 };
    const few = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 4 });
    y.values = made.percent ? percent : (u, values) => values.map((v) => few.format(v));
    return new uPlot({
      width: Math.max(box.clientWidth, 200),
      height: Math.max(box.clientHeight - 30, 90),
      tzDate: (ts) => uPlot.tzDate(new Date(1e3 * ts), "Etc/UTC"),
      series: [
        { label: "time", value: dated },
        ...made.lines.map((line, i) => ({
          label: line.label, stroke: colours[i], width: i === 1 ? 1.25 : 1.6, value: write,
          points: { show: made.x.length < 2 }, fill: made.area ? `rgba(${colour("--fall")}, .18)` : undefined,
        })),
      ],
      axes: [axis, y],
      cursor: { drag: { x: true, y: false } },
      legend: { live: true },
    }, [made.x, ...made.lines.map((line) => line.y)], box);
  }
  function chart(key, made) {
    const box = one(`[data-chart="${key}"]`), known = plots.get(key);
    if (!made.x.length || !changed(`chart ${key}`, made)) return;
    if (known) {
      known.made = made;
      known.plot.setData([made.x, ...made.lines.map((line) => line.y)]);
    } else plots.set(key, { box, made, plot: draw(box, made) });
  }
  new ResizeObserver(() => {
    for (const { box, plot } of plots.values()) {
      if (box.clientWidth && box.clientWidth !== plot.width) plot.setSize({ width: box.clientWidth, height: plot.height });
    }
  }).observe(main);

  function halt(made) {
    one(".halt").hidden = made.on;
    one("[data-halted]").hidden = !made.on;
    put(one("[data-halt-reason]"), made.reason);
    put(one("[data-halt-command]"), made.command);
  }

  function cards(list) {
    const known = all("[data-card]").map((card) => card.dataset.card);
    if (JSON.stringify(known) !== JSON.stringify(list.map((card) => card.name))) return location.reload();
    for (const made of list) {
      const card = one(`[data-card="${made.name}"]`);
      state(made.state, card);
      tiles(made.tiles, card);
    }
  }

  // An event holds the parts that changed since the one before.
  function show(model) {
    if (model.nav) nav(model.nav);
    if (model.cards) cards(model.cards);
    if (model.state) state(model.state);
    if (model.tiles) tiles(model.tiles, main);
    for (const [key, made] of Object.entries(model.tables || {})) table(key, made);
    for (const [key, made] of Object.entries(model.charts || {})) chart(key, made);
    if (model.halt) halt(model.halt);
  }

  let source = null;
  function open() {
    if (source) source.close();
    source = new EventSource(main.dataset.events);
    source.onmessage = (event) => {
      one("[data-link]").hidden = true;
      show(JSON.parse(event.data));
      document.body.dataset.live = String(Number(document.body.dataset.live || 0) + 1);
    };
    source.onerror = () => { one("[data-link]").hidden = false; };
  }
  // A hidden page holds no connection: a browser has six for a host.
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) { if (source) source.close(); source = null; } else if (!source) open();
  });
  window.addEventListener("pagehide", () => { if (source) source.close(); source = null; });
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    for (const known of plots.values()) { known.plot.destroy(); known.plot = draw(known.box, known.made); }
  });
  open();
})();
