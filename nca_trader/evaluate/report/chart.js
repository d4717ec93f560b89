// Draws the price chart of a report, candles, indicators, trades and in-sample shading, and fills
// the table of trades. Their data is in the page.
"use strict";
nca.unpack("price-data").then((data) => {
  const box = document.getElementById("price-chart");
  const said = document.getElementById("price-said");
  const key = document.getElementById("price-key");
  const library = window.LightweightCharts;
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const chart = library.createChart(box, {
    autoSize: true,
    layout: { attributionLogo: true, background: { color: "transparent" }, fontSize: 12 },
    timeScale: { timeVisible: data.intraday, secondsVisible: false, minBarSpacing: 0.02 },
    crosshair: { mode: 0 },
    // The page scrolls with the wheel; the chart zooms with the wheel only while Ctrl is held.
    handleScale: { mouseWheel: false },
    handleScroll: { mouseWheel: false, vertTouchDrag: false },
  });
  const shade = chart.addSeries(library.AreaSeries, {
    priceScaleId: "shade", priceLineVisible: false, lastValueVisible: false, lineVisible: false,
    crosshairMarkerVisible: false, pointMarkersVisible: false,
    autoscaleInfoProvider: () => ({ priceRange: { minValue: 0, maxValue: 1 } }),
  });
  chart.priceScale("shade").applyOptions({ scaleMargins: { top: 0, bottom: 0 }, visible: false });
  const candles = chart.addSeries(library.CandlestickSeries, {
    borderVisible: false, priceLineVisible: false,
  });
  const line = (name, pane) => ({
    name,
    series: chart.addSeries(library.LineSeries, {
      lineWidth: 2, priceLineVisible: false, lastValueVisible: false, crosshairMarkerVisible: false,
    }, pane),
  });
  const lines = Object.keys(data.assets[0].indicators).map((name) => line(name, 0));
  const equity = Object.keys(data.equity).map((name) => line(name, 1));
  chart.panes()[0].setStretchFactor(3);
  const markers = library.createSeriesMarkers(candles, []);

  // Times are differences in the page.
  let now = 0;
  const times = data.times.map((step) => (now += step));
  const time = times.filter((_, row) => row % data.per_candle === 0);
  const candle = (row) => Math.floor(row / data.per_candle);
  const trades = data.entry.map((_, number) => number);
  const of = data.assets.map((_, number) => trades.filter((trade) => data.symbol[trade] === number));
  let asset = 0;

  const date = (seconds) => {
    const text = new Date(1000 * seconds).toISOString();
    return data.intraday ? text.slice(0, 16).replace("T", " ") : text.slice(0, 10);
  };
  const percent = (value) => value === null ? "n/a" : `${(100 * value).toFixed(2)}%`;
  const price = (value) => value === null ? "n/a" : value.toLocaleString("en", { maximumSignificantDigits: 6 });
  const side = (trade) => data.side[trade] > 0 ? "long" : "short";
  const won = (trade) => data.pnl[trade] > 0;

  // More arrows than this in sight would hide the prices.
  const MOST = 250;

  function inSight() {
    const range = chart.timeScale().getVisibleLogicalRange();
    if (!range) return of[asset];
    return of[asset].filter((trade) =>
      candle(data.entry[trade]) <= range.to && candle(data.exit[trade]) >= range.from);
  }

  function marks() {
    const found = [], shown = inSight();
    if (shown.length > MOST) return found;
    const [good, bad, ink] = ["--good", "--bad", "--ink"].map(colour);
    for (const trade of shown) {
      const [below, above] = data.side[trade] > 0 ? ["belowBar", "aboveBar"] : ["aboveBar", "belowBar"];
      found.push({
        time: time[candle(data.entry[trade])], position: below, color: ink, size: 0.8,
        shape: data.side[trade] > 0 ? "arrowUp" : "arrowDown",
      });
      if (!data.open[trade]) {
        found.push({
          time: time[candle(data.exit[trade])], position: above, size: 0.7,
          shape: won(trade) ? "circle" : "square", color: won(trade) ? good : bad,
        });
      }
    }
    return found.sort((a, b) => a.time - b.time);
  }

  function paint() {
    const grid = colour("--grid");
    chart.applyOptions({
      layout: { textColor: colour("--muted") },
      grid: { vertLines: { color: grid }, horzLines: { color: grid } },
      rightPriceScale: { borderColor: grid },
      timeScale: { borderColor: grid },
    });
    const rise = colour("--good"), fall = colour("--bad");
    candles.applyOptions({ upColor: rise, downColor: fall, wickUpColor: rise, wickDownColor: fall });
    key.replaceChildren();
    equity.forEach(({ series }, number) => {
      series.applyOptions({ color: colour(number ? "--baseline-0" : "--agent"), lineStyle: 2 * number });
    });
    lines.forEach(({ name, series }, number) => {
      series.applyOptions({ color: colour(`--line-${number % 3}`), lineStyle: number % 3 });
      const part = document.createElement("span");
      part.textContent = name;
      part.className = `line-${number % 3}`;
      key.append(part, " ");
    });
    shade.applyOptions({ topColor: colour("--shade"), bottomColor: colour("--shade") });
    shade.setData(time.slice(0, data.seen).map((at) => ({ time: at, value: 1 })));
    markers.setMarkers(marks());
  }

  function show(number) {
    asset = number;
    const own = data.assets[asset];
    const prices = own.close.filter((value) => value !== null);
    const typical = Math.abs(prices[prices.length - 1] || 1);
    const precision = Math.max(2, Math.min(8, 4 - Math.floor(Math.log10(typical))));
    candles.applyOptions({ priceFormat: { type: "price", precision, minMove: 10 ** -precision } });
    candles.setData(time.map((at, i) => own.close[i] === null ? { time: at } : {
      time: at, open: own.open[i], high: own.high[i], low: own.low[i], close: own.close[i],
    }));
    const points = (values) =>
      values.map((value, i) => value === null ? { time: time[i] } : { time: time[i], value });
    for (const { name, series } of lines) series.setData(points(own.indicators[name]));
    for (const { name, series } of equity) series.setData(points(data.equity[name]));
    paint();
    tell(null);
  }

  function tell(i) {
    const own = data.assets[asset];
    if (i === null) {
      const all = of[asset].length;
      const hidden = inSight().length > MOST ? `; zoom in until at most ${MOST} are in sight` : "";
      said.textContent = `${own.name}: ${all.toLocaleString("en")} ${all === 1 ? "trade" : "trades"}${hidden}`;
      return;
    }
    const texts = [`${own.name} ${date(time[i])}`];
    if (own.close[i] !== null) {
      texts.push(`open ${own.open[i]} high ${own.high[i]} low ${own.low[i]} close ${own.close[i]}`);
    }
    for (const { name } of lines) {
      if (own.indicators[name][i] !== null) texts.push(`${name} ${price(own.indicators[name][i])}`);
    }
    for (const { name } of equity) texts.push(`${name} ${price(data.equity[name][i])}`);
    if (i < data.seen) texts.push("in sample");
    for (const trade of inSight()) {
      if (candle(data.entry[trade]) === i) texts.push(`${side(trade)} from ${price(data.entry_price[trade])}`);
      if (candle(data.exit[trade]) === i && !data.open[trade]) {
        texts.push(`${side(trade)} left at ${price(data.exit_price[trade])} (${data.reasons[data.reason[trade]]}): ${percent(data.return[trade])}`);
      }
    }
    said.textContent = texts.join("; ");
  }

  const at = new Map(time.map((seconds, i) => [seconds, i]));
  chart.subscribeCrosshairMove((event) => {
    tell(event.time === undefined || !at.has(event.time) ? null : at.get(event.time));
  });

  let waiting = false;
  chart.timeScale().subscribeVisibleLogicalRangeChange(() => {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => {
      waiting = false;
      markers.setMarkers(marks());
      tell(null);
    });
  });

  // Until a reader moves it, the chart shows everything at whatever width the page gives it.
  let whole = true;
  const fit = () => { if (whole) chart.timeScale().fitContent(); };
  new ResizeObserver(() => requestAnimationFrame(fit)).observe(box);
  box.addEventListener("pointerdown", () => { whole = false; });

  function look(from, to) {
    whole = false;
    chart.timeScale().setVisibleLogicalRange({ from, to });
  }

  function zoom(share) {
    whole = share === 1;
    if (whole) return fit();
    look(time.length - 1 - share * time.length, time.length);
  }

  function scale(factor) {
    const range = chart.timeScale().getVisibleLogicalRange();
    if (!range) return;
    const middle = (range.from + range.to) / 2, half = factor * (range.to - range.from) / 2;
    look(middle - half, middle + half);
  }

  document.querySelectorAll("[data-zoom]").forEach((button) => {
    button.addEventListener("click", () => zoom(Number(button.dataset.zoom)));
  });
  document.querySelectorAll("[data-scale]").forEach((button) => {
    button.addEventListener("click", () => scale(Number(button.dataset.scale)));
  });
  const log = document.getElementById("price-log");
  log.addEventListener("click", () => {
    const on = log.getAttribute("aria-pressed") !== "true";
    log.setAttribute("aria-pressed", on);
    chart.priceScale("right").applyOptions({ mode: on ? 1 : 0 });
  });
  box.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    scale(event.deltaY > 0 ? 1.15 : 1 / 1.15);
  }, { passive: false });
  const choice = document.getElementById("price-asset");
  if (choice) choice.addEventListener("change", () => { show(Number(choice.value)); zoom(1); });
  document.getElementById("price-tools").hidden = false;
  for (const query of ["(prefers-color-scheme: dark)", "print"]) {
    window.matchMedia(query).addEventListener("change", paint);
  }
  window.addEventListener("beforeprint", paint);
  window.addEventListener("afterprint", paint);
  show(0);
  fit();

  function goTo(trade) {
    if (data.symbol[trade] >= data.assets.length) return;
    if (choice) choice.value = data.symbol[trade];
    show(data.symbol[trade]);
    const [from, to] = [data.entry[trade], data.exit[trade]].map(candle);
    const around = Math.max(20, to - from);
    look(from - around, to + around);
    box.scrollIntoView({ block: "center" });
  }

  const column = (name, key, value, text, more) =>
    ({ name, key, value, text: text || value, ...more });
  const sign = (trade) => data.pnl[trade] === 0 ? "" : won(trade) ? "▲ " : "▼ ";
  const gain = { look: (trade) => data.pnl[trade] === 0 ? "" : won(trade) ? "good" : "bad" };
  const ended = (trade) => data.open[trade] ? null : times[data.exit[trade]];
  const iso = (seconds) => seconds === null ? null : new Date(1000 * seconds).toISOString();
  if (trades.length) {
    nca.table(document.getElementById("trades"), [
      column("Asset", "symbol", (k) => data.symbols[data.symbol[k]]),
      column("Entry", "entry", (k) => times[data.entry[k]], (k) => date(times[data.entry[k]]),
        { raw: (k) => iso(times[data.entry[k]]) }),
      column("Exit", "exit", ended, (k) => data.open[k] ? "open" : date(ended(k)),
        { raw: (k) => iso(ended(k)) }),
      column("Return, of the notional", "return", (k) => data.return[k],
        (k) => sign(k) + percent(data.return[k]), gain),
      column("Profit, of the capital", "pnl", (k) => data.pnl[k], (k) => percent(data.pnl[k]), gain),
      column("Side", "side", side),
      column("Entry price", "entry_price", (k) => data.entry_price[k], (k) => price(data.entry_price[k])),
      column("Exit price", "exit_price", (k) => data.exit_price[k], (k) => price(data.exit_price[k])),
      column("Bars", "bars", (k) => data.bars[k]),
      column("Left by", "reason", (k) => data.reasons[data.reason[k]]),
    ], trades.length, "Trades; click one to see it on the chart", "trades.csv", goTo);
  }
});
