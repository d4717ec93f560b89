// Draws the price chart of a report: candles, trades, in-sample shading. Its data is in the page.
"use strict";
(function () {
  const data = JSON.parse(document.getElementById("price-data").textContent);
  const box = document.getElementById("price-chart");
  const said = document.getElementById("price-said");
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
  const markers = library.createSeriesMarkers(candles, []);
  let asset = data.assets[0];

  const date = (seconds) => {
    const text = new Date(1000 * seconds).toISOString();
    return data.intraday ? text.slice(0, 16).replace("T", " ") : text.slice(0, 10);
  };

  // More arrows than this in sight would hide the prices.
  const MOST = 250;

  function inSight() {
    const range = chart.timeScale().getVisibleLogicalRange();
    if (!range) return asset.trades;
    return asset.trades.filter(([entry, exit]) => entry <= range.to && (exit ?? entry) >= range.from);
  }

  function marks() {
    const found = [], trades = inSight();
    if (trades.length > MOST) return found;
    const up = colour("--long"), down = colour("--short");
    for (const [entry, exit, side] of trades) {
      const [below, above] = ["belowBar", "aboveBar"];
      found.push({
        time: asset.time[entry], position: side > 0 ? below : above,
        shape: side > 0 ? "arrowUp" : "arrowDown", color: side > 0 ? up : down,
      });
      if (exit !== null) {
        found.push({
          time: asset.time[exit], position: side > 0 ? above : below,
          shape: "circle", size: 0.6, color: side > 0 ? up : down,
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
    shade.applyOptions({ topColor: colour("--shade"), bottomColor: colour("--shade") });
    shade.setData(asset.time.slice(0, data.seen).map((time) => ({ time, value: 1 })));
    markers.setMarkers(marks());
  }

  function show(number) {
    asset = data.assets[number];
    const prices = asset.close.filter((price) => price !== null);
    const typical = Math.abs(prices[prices.length - 1] || 1);
    const precision = Math.max(2, Math.min(8, 4 - Math.floor(Math.log10(typical))));
    candles.applyOptions({ priceFormat: { type: "price", precision, minMove: 10 ** -precision } });
    candles.setData(asset.time.map((time, i) => asset.close[i] === null ? { time } : {
      time, open: asset.open[i], high: asset.high[i], low: asset.low[i], close: asset.close[i],
    }));
    paint();
    tell(null);
  }

  function tell(i) {
    if (i === null) {
      const shown = asset.trades.length, all = asset.count.toLocaleString("en");
      const last = shown < asset.count ? `the last ${shown.toLocaleString("en")} of ` : "";
      const hidden = inSight().length > MOST ? `; zoom in until at most ${MOST} are in sight` : "";
      said.textContent = `${asset.name}: ${last}${all} ${asset.count === 1 ? "trade" : "trades"}${hidden}`;
      return;
    }
    const texts = [`${asset.name} ${date(asset.time[i])}`];
    if (asset.close[i] !== null) {
      texts.push(`open ${asset.open[i]} high ${asset.high[i]} low ${asset.low[i]} close ${asset.close[i]}`);
    }
    if (i < data.seen) texts.push("in sample");
    for (const [entry, exit, side, bought, sold, gain, reason] of asset.trades) {
      const name = side > 0 ? "long" : "short";
      if (entry === i) texts.push(`${name} from ${bought}`);
      if (exit === i) texts.push(`${name} left at ${sold} (${reason}): ${gain}%`);
    }
    said.textContent = texts.join("; ");
  }

  const at = new Map();
  chart.subscribeCrosshairMove((event) => {
    if (at.owner !== asset) {
      at.clear();
      asset.time.forEach((time, i) => at.set(time, i));
      at.owner = asset;
    }
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

  function zoom(share) {
    whole = share === 1;
    if (whole) return fit();
    const last = asset.time.length - 1;
    chart.timeScale().setVisibleLogicalRange({ from: last - share * asset.time.length, to: last + 1 });
  }

  function scale(factor) {
    const range = chart.timeScale().getVisibleLogicalRange();
    if (!range) return;
    whole = false;
    const middle = (range.from + range.to) / 2, half = factor * (range.to - range.from) / 2;
    chart.timeScale().setVisibleLogicalRange({ from: middle - half, to: middle + half });
  }

  document.querySelectorAll("[data-zoom]").forEach((button) => {
    button.addEventListener("click", () => zoom(Number(button.dataset.zoom)));
  });
  document.querySelectorAll("[data-scale]").forEach((button) => {
    button.addEventListener("click", () => scale(Number(button.dataset.scale)));
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
})();
