// Unpacks the data of a page, and shows a table of many rows: sorted by a click on a header, a page
// at a time, and as CSV.
"use strict";
const nca = (function () {
  const ROWS = 15;

  async function unpack(id) {
    const text = document.getElementById(id).textContent;
    const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    return new Response(stream).json();
  }

  function make(tag, parent, text, attributes) {
    const element = document.createElement(tag);
    if (text !== undefined) element.textContent = text;
    for (const [name, value] of Object.entries(attributes || {})) element.setAttribute(name, value);
    return parent.appendChild(element);
  }

  // A cell that a spreadsheet would take for a formula stays text.
  const quoted = (value) => {
    const text = typeof value === "string" && /^[=+\-@\t]/.test(value) ? `'${value}` : `${value ?? ""}`;
    return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };

  function csv(columns, order) {
    const rows = [columns.map((column) => column.key)];
    for (const row of order) {
      rows.push(columns.map((column) => (column.raw || column.value)(row)));
    }
    return rows.map((row) => row.map(quoted).join(",")).join("\r\n") + "\r\n";
  }

  // columns: of each `key`, `name`, and functions of a row's number: `value` to sort by, `text` to
  // show, `raw` for the CSV, `look` for a class. picked: called with a row that was clicked.
  function table(box, columns, count, caption, file, picked) {
    let order = Array.from({ length: count }, (_, row) => row), first = 0;
    const sorted = { column: null, down: false };
    const tools = make("div", box, undefined, { class: "tools" });
    const back = make("button", tools, "Previous", { type: "button" });
    const next = make("button", tools, "Next", { type: "button" });
    const where = make("span", tools, "", { class: "note", "aria-live": "polite" });
    const save = make("button", tools, "Download CSV", { type: "button", "data-csv": file });
    const scroll = make("div", box, undefined, {
      class: "scroll", role: "region", tabindex: "0", "aria-label": caption,
    });
    const grid = make("table", scroll);
    make("caption", grid, caption);
    const head = make("tr", make("thead", grid)), body = make("tbody", grid);
    const heads = columns.map((column) => {
      const cell = make("th", head, undefined, { scope: "col" });
      make("button", cell, column.name, { type: "button", class: "sort" })
        .addEventListener("click", () => sort(column));
      return cell;
    });

    function sort(column) {
      sorted.down = sorted.column === column ? !sorted.down : false;
      sorted.column = column;
      const sign = sorted.down ? -1 : 1, values = order.map((row) => [column.value(row), row]);
      // A row without a value comes last in both directions, and equal rows keep their time order.
      values.sort(([a, i], [b, j]) => (a === null) - (b === null)
        || (a < b ? -sign : a > b ? sign : i - j));
      order = values.map(([, row]) => row);
      first = 0;
      show();
    }

    function show() {
      const last = Math.min(first + ROWS, count);
      body.replaceChildren();
      for (const row of order.slice(first, last)) {
        const line = make("tr", body);
        columns.forEach((column, number) => {
          const name = number ? "td" : "th";
          make(name, line, column.text(row), number ? {} : { scope: "row" })
            .className = column.look ? column.look(row) : "";
        });
        if (picked) line.addEventListener("click", () => picked(row));
      }
      columns.forEach((column, number) => {
        const way = sorted.down ? "descending" : "ascending";
        heads[number].setAttribute("aria-sort", sorted.column === column ? way : "none");
      });
      where.textContent = `${(first + 1).toLocaleString("en")} to ${last.toLocaleString("en")} of ${count.toLocaleString("en")}`;
      back.disabled = first === 0;
      next.disabled = last === count;
    }

    back.addEventListener("click", () => { first = Math.max(first - ROWS, 0); show(); });
    next.addEventListener("click", () => { first += ROWS; show(); });
    save.addEventListener("click", () => {
      const link = document.createElement("a");
      link.href = URL.createObjectURL(new Blob([csv(columns, order)], { type: "text/csv" }));
      link.download = file;
      link.click();
      setTimeout(() => URL.revokeObjectURL(link.href), 1000);
    });
    show();
  }

  return { unpack, table };
})();
