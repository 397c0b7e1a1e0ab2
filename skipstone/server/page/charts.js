// Small pictures: bars, the map of what was read, a line over time.

/** The colour that a style property has now, light or dark. */
function colour(name) {
  const probe = document.createElement("i");
  probe.style.color = `var(${name})`;
  document.body.append(probe);
  const value = getComputedStyle(probe).color;
  probe.remove();
  return value;
}

/** A context whose unit is a pixel of the page. */
function prepare(canvas, height) {
  const width = canvas.clientWidth, scale = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  context.clearRect(0, 0, width, height);
  return [context, width];
}

function part(tag, className, text = "") {
  const element = document.createElement(tag);
  element.className = className;
  element.textContent = text;
  return element;
}

/** Rows of [name, share from 0 to 1, what to write behind it]. */
export function bars(element, rows, mono = false) {
  element.replaceChildren(...rows.flatMap(([name, share, value]) => {
    const track = part("div", "track"), fill = document.createElement("i");
    fill.style.width = `${(share * 100).toFixed(1)}%`;
    track.append(fill);
    const label = part("span", mono ? "name mono" : "name", name);
    label.title = name;
    return [label, track, part("span", "value", value)];
  }));
}

const ROW = 15, GAP = 4, LEFT = 56, FOOT = 18;

/**
 * What was read: a row for each group of heads of each sparse layer, a column for each unit of the context.
 * `layers`: as POST /trace gives them; `position`: of the token; `chosen`: the row that is shown in the text, or -1.
 */
export function map(canvas, layers, position, chosen) {
  const rows = mapRows(layers);
  const places = [];
  let top = 0;
  rows.forEach((row, i) => {
    if (i && rows[i - 1].layer !== row.layer) top += GAP;
    places.push(top);
    top += ROW;
  });
  const [context, width] = prepare(canvas, top + FOOT);
  const unit = layers[0]?.unit ?? 1, columns = Math.max(1, Math.ceil(position / unit)), cell = (width - LEFT) / columns;
  const ink = colour("--quiet"), full = colour("--cell"), back = colour("--cell-back"), accent = colour("--accent");
  context.font = "11px system-ui, sans-serif";
  rows.forEach((row, i) => {
    context.fillStyle = i === chosen ? accent : ink;
    context.textAlign = "left";
    context.textBaseline = "middle";
    context.fillText(row.label, 0, places[i] + ROW / 2);
    context.fillStyle = back;
    context.fillRect(LEFT, places[i], width - LEFT, ROW - 2);
    context.fillStyle = i === chosen ? accent : full;
    const space = cell > 4 ? 1 : 0;
    for (const one of row.selected) context.fillRect(LEFT + one * cell, places[i], Math.max(cell - space, 0.75), ROW - 2);
  });
  context.fillStyle = ink;
  context.textBaseline = "alphabetic";
  context.fillText("0", LEFT, top + 13);
  context.textAlign = "right";
  context.fillText(`position ${position}`, width, top + 13);
  return { rowAt: (y) => places.findIndex((place) => y >= place && y < place + ROW) };
}

/** A row for each group of each layer. */
export function mapRows(layers) {
  return layers.flatMap((layer) => layer.selected.map((selected, group) => ({
    layer: layer.layer, unit: layer.unit, selected,
    label: layer.selected.length > 1 ? `layer ${layer.layer}.${group}` : `layer ${layer.layer}`,
  })));
}

/** A filled line of values, the newest at the right. */
export function line(canvas, values, most) {
  const [context, width] = prepare(canvas, 52);
  const highest = Math.max(...values, 1), step = width / (most - 1), height = 50;
  context.strokeStyle = colour("--line");
  context.beginPath(); context.moveTo(0, height + 0.5); context.lineTo(width, height + 0.5); context.stroke();
  if (values.length < 2) return;
  const x = (i) => width - (values.length - 1 - i) * step, y = (value) => height - (value / highest) * (height - 14);
  context.beginPath();
  values.forEach((value, i) => (i ? context.lineTo(x(i), y(value)) : context.moveTo(x(i), y(value))));
  context.strokeStyle = colour("--cell");
  context.lineWidth = 1.5;
  context.stroke();
  context.lineTo(width, height); context.lineTo(x(0), height); context.closePath();
  context.globalAlpha = 0.15;
  context.fillStyle = colour("--cell");
  context.fill();
  context.globalAlpha = 1;
  context.fillStyle = colour("--quiet");
  context.font = "11px system-ui, sans-serif";
  context.fillText(`most: ${Math.round(highest)} tokens/s`, 2, 10);
}
