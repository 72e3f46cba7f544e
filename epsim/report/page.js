"use strict";
// Sorts tables and draws the heat maps. Nothing else on the page needs a script.
(() => {
  for (const table of document.querySelectorAll("table.sortable")) {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => head.querySelector("button").addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      heads.forEach((other) => other.setAttribute("aria-sort", "none"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const key = (row) => row.cells[column].dataset.value;
      const rows = [...table.tBodies[0].rows].sort((a, b) => {
        const [x, y] = [key(a), key(b)];
        // Rows without a value stay last in both directions.
        if (x === "" || y === "") return (x === "") - (y === "");
        const order = column ? Number(x) - Number(y) : x.localeCompare(y);
        return down ? -order : order;
      });
      table.tBodies[0].append(...rows);
    }));
  }

  const source = document.getElementById("heat-data");
  if (!source) return;
  const data = JSON.parse(source.textContent);
  const hue = (share) => {
    const at = 3 * Math.max(0, Math.min(255, Math.floor(share * 256)));
    return [data.colours[at], data.colours[at + 1], data.colours[at + 2]];
  };
  const layer = document.getElementById("heat-layer");
  const sides = [...document.querySelectorAll(".map")].map((map) => ({
    stack: map.querySelector("select"), canvas: map.querySelector("canvas"), cursor: map.querySelector(".cursor"),
    said: map.querySelector("output"), xs: map.querySelectorAll(".x span"), at: null,
  }));
  // [stretch][rank] of a stack, over all layers or of one.
  const values = (stack) => (layer.value === "" ? data.stacks[stack].steps : data.stacks[stack].layers[Number(layer.value)]);

  // The same scale for every stack, so that stacks can be compared.
  const range = () => {
    let [low, high] = [Infinity, -Infinity];
    data.stacks.forEach((_, stack) => (values(stack) || []).forEach((row) => row.forEach((v) => {
      if (v !== null) { low = Math.min(low, v); high = Math.max(high, v); }
    })));
    return low < high ? [low, high] : [low - 0.5, high + 0.5];
  };

  const draw = () => {
    const [low, high] = range();
    for (const side of sides) {
      const rows = values(Number(side.stack.value)) || [];
      const [width, height] = [rows.length || 1, rows.length ? rows[0].length : 1];
      side.canvas.width = width;
      side.canvas.height = height;
      const context = side.canvas.getContext("2d");
      const image = context.createImageData(width, height);
      rows.forEach((row, x) => row.forEach((v, y) => {
        if (v !== null) image.data.set([...hue((v - low) / (high - low)), 255], 4 * (y * width + x));
      }));
      context.putImageData(image, 0, 0);
      side.at = null;
      side.cursor.hidden = true;
      side.said.textContent = "";
    }
    const bar = document.getElementById("heat-bar").getContext("2d");
    for (let x = 0; x < 256; x++) {
      bar.fillStyle = `rgb(${hue(x / 256).join(",")})`;
      bar.fillRect(x, 0, 1, 1);
    }
    document.getElementById("heat-low").textContent = low.toFixed(2);
    document.getElementById("heat-high").textContent = high.toFixed(2);
  };

  const show = (side, x, y) => {
    const rows = values(Number(side.stack.value)) || [];
    if (!rows.length) return;
    x = Math.max(0, Math.min(rows.length - 1, x));
    y = Math.max(0, Math.min(rows[0].length - 1, y));
    side.at = [x, y];
    const first = Math.ceil((x * data.num_steps) / rows.length);
    const last = Math.ceil(((x + 1) * data.num_steps) / rows.length) - 1;
    const value = rows[x][y];
    const words = value === null ? "no tokens" : `${value.toFixed(3)} x the mean load`;
    const steps = last > first ? `steps ${first} to ${last}` : `step ${first}`;
    side.said.textContent = `${steps}, rank ${y}: ${words}`;
    Object.assign(side.cursor.style, {
      left: `${(100 * x) / rows.length}%`, top: `${(100 * y) / rows[0].length}%`,
      width: `max(5px, ${100 / rows.length}%)`, height: `max(5px, ${100 / rows[0].length}%)`,
    });
    side.cursor.hidden = false;
  };

  for (const side of sides) {
    side.stack.addEventListener("change", draw);
    side.canvas.addEventListener("pointermove", (event) => {
      const box = side.canvas.getBoundingClientRect();
      const x = Math.floor(((event.clientX - box.left) / box.width) * side.canvas.width);
      const y = Math.floor(((event.clientY - box.top) / box.height) * side.canvas.height);
      show(side, x, y);
    });
    side.canvas.addEventListener("focus", () => show(side, ...(side.at || [0, 0])));
    side.canvas.addEventListener("keydown", (event) => {
      const moves = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
      const move = moves[event.key];
      if (!move) return;
      event.preventDefault();
      const [x, y] = side.at || [0, 0];
      const far = event.shiftKey ? 10 : 1;
      show(side, x + far * move[0], y + far * move[1]);
    });
  }
  layer.addEventListener("change", draw);
  draw();
})();
