// Showing texts. Nothing of what the server says becomes HTML: names of engines, devices and directories are somebody
// else's, so they are put in as text only, and the policy of the page sees to it. What is there already stays, so that
// selections and focus do.

const $ = (id) => document.getElementById(id);

function put(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

function shape(parent, name, attributes) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  parent.append(node);
  return node;
}

function element(parent, name, className) {
  const node = document.createElement(name);
  node.className = className;
  parent.append(node);
  return node;
}

/** As many children as there are items: what is there already stays, so that selection and focus do. */
function match(parent, items, make, show) {
  while (parent.children.length > items.length) parent.lastElementChild.remove();
  items.forEach((item, at) => show(parent.children[at] ?? make(parent), item));
}

/** A card with a table. # behind a column's head: numbers. "lately": over the span that was chosen. */
function section(parent, id, title, columns, folded = false) {
  const card = element($(parent), folded ? "details" : "section", "card");
  const head = element(folded ? element(card, "summary", "") : card, "h2", "");
  [head.id, head.textContent] = [`h-${id}`, title];
  element(card, "p", "").id = `${id}-more`;
  const scroll = element(card, "div", "scroll");
  scroll.tabIndex = 0;
  scroll.role = "region";
  for (const node of [card, scroll]) node.setAttribute("aria-labelledby", head.id);
  const table = element(scroll, "table", "");
  const heads = table.createTHead().insertRow();
  for (const column of columns) {
    const cell = element(heads, "th", column.endsWith("#") ? "n" : "wrap");
    cell.textContent = column.replace("#", "");
    if (column === "lately#") cell.dataset.span = "";
  }
  table.createTBody().id = id;
}

/** Rows of texts; a cell may be [text, class]. Columns take the class of their head. */
function rows(id, table) {
  const body = $(id);
  const heads = body.parentNode.tHead.rows[0].cells;
  const row = (parent) => parent.insertRow();
  match(body, table, row, (line, cells) => {
    match(line, cells, () => line.insertCell(), (cell, content) => {
      const [text, className] = Array.isArray(content) ? content : [content, ""];
      const head = heads[cell.cellIndex];
      cell.className = className || head.className;
      cell.dataset.head = head.textContent;
      put(cell, text);
    });
  });
}

function showSection(id, more, isThere = true) {
  $(id).closest("section").hidden = !isThere;
  put($(`${id}-more`), more);
}
