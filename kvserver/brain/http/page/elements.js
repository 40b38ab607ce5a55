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

/** Rows of texts; a cell may be [text, class]. Columns take the class of their head. */
function rows(id, table) {
  const body = $(id);
  const heads = body.parentNode.tHead.rows[0].cells;
  const row = (parent) => parent.insertRow();
  match(body, table, row, (line, cells) => {
    match(line, cells, () => line.insertCell(), (cell, content) => {
      const [text, className] = Array.isArray(content) ? content : [content, ""];
      cell.className = className || heads[cell.cellIndex].className;
      put(cell, text);
    });
  });
}

function showSection(id, more, isThere = true) {
  $(id).closest("section").hidden = !isThere;
  if ($(`${id}-more`)) put($(`${id}-more`), more);
}
