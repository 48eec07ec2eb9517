// List the routes of openapi.json, without another host's programs.
const description = await (await fetch("/openapi.json")).json();
const list = document.getElementById("routes");

for (const [path, methods] of Object.entries(description.paths)) {
  for (const [method, route] of Object.entries(methods)) {
    const name = document.createElement("dt");
    const about = document.createElement("dd");
    const parameters = (route.parameters ?? []).map((each) => each.name).join(", ");
    name.textContent = `${method.toUpperCase()} ${path}`;
    about.textContent = `${route.description ?? route.summary}${parameters ? ` Parameters: ${parameters}.` : ""}`;
    list.append(name, about);
  }
}
