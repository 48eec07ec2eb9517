// The page keeps no state of its own: everything shown is the server's, told by /v1/videos and /v1/events.
const find = (id) => document.getElementById(id);
const jobs = new Map();
const previews = new Map();
let options = {};
let compared = [];
let reference = null;
let planned = 0;

async function call(method, path, body) {
  const init = { method };
  if (body instanceof FormData) {
    init.body = body;
  } else if (body !== undefined) {
    init.body = JSON.stringify(body);
    init.headers = { "content-type": "application/json" };
  }
  const answer = await fetch(path, init);
  if (answer.status === 401) location.assign("/login");
  const document = await answer.json();
  if (!answer.ok) throw new Error(document.error.message);
  return document;
}

// --- The form ---

function formValues() {
  const settings = {};
  for (const name of ["resolution", "aspect_ratio", "num_frames", "steps", "extend", "cond"]) {
    const value = find(name).value;
    if (value !== "") settings[name === "resolution" ? "res" : name] = value;
  }
  if (!reference) delete settings.cond;
  if (settings.extend === "0") delete settings.extend;
  for (const line of find("more").value.split("\n")) {
    const [key, ...value] = line.split("=");
    if (key.trim()) settings[key.trim()] = value.join("=").trim();
  }
  const values = { prompt: find("prompt").value, settings };
  if (find("seed").value !== "") values.seed = find("seed").value;
  return values;
}

async function submit(event) {
  event.preventDefault();
  find("problem").textContent = "";
  find("submit").disabled = true;
  try {
    const values = formValues();
    values.seed ??= Math.floor(Math.random() * 2 ** 31);
    await create(values);
  } catch (error) {
    find("problem").textContent = error.message;
  } finally {
    find("submit").disabled = false;
  }
}

async function create(values) {
  if (!reference) return call("POST", "/v1/videos", values);
  const form = new FormData();
  form.append("prompt", values.prompt);
  form.append("seed", values.seed);
  form.append("settings", JSON.stringify(values.settings));
  form.append("input_reference", reference, reference.name ?? "frame.png");
  return call("POST", "/v1/videos", form);
}

async function showPlan() {
  const number = ++planned;
  const values = formValues();
  delete values.settings.cond;
  if (!values.prompt.trim()) {
    find("plan").textContent = "";
    return;
  }
  let text;
  try {
    const { lines, notes } = await call("POST", "/v1/plan", values);
    text = [...notes, ...lines].join("\n");
    find("problem").textContent = "";
  } catch (error) {
    text = "";
    if (number === planned) find("problem").textContent = error.message;
  }
  // A later plan may have come first.
  if (number === planned) find("plan").textContent = text;
}

function setReference(file) {
  reference = file;
  find("clear").hidden = !file;
  const shown = find("reference_shown");
  if (shown.src) URL.revokeObjectURL(shown.src);
  shown.hidden = !file || !file.type.startsWith("image/");
  if (!shown.hidden) shown.src = URL.createObjectURL(file);
  if (!file) find("reference").value = "";
}

function fillForm() {
  const choose = (id, values, chosen) => {
    find(id).replaceChildren(...values.map((value) => new Option(value, value, value === chosen, value === chosen)));
  };
  choose("resolution", options.resolutions, options.resolution);
  choose("aspect_ratio", options.aspect_ratios, options.aspect_ratio);
  choose("cond", ["", ...options.modes], "");
  find("cond").options[0].textContent = "chosen by its kind";
  find("num_frames").value = options.num_frames;
  find("num_frames").max = options.max_frames;
  find("steps").value = options.steps;
  find("model").textContent = options.model;
  for (const text of options.examples) {
    const button = Object.assign(document.createElement("button"), { type: "button", textContent: text });
    button.addEventListener("click", () => {
      find("prompt").value = text;
      showPlan();
    });
    find("examples").append(button);
  }
}

// --- Queue and gallery ---

function stateOf(job) {
  if (job.status === "queued") return `waiting, place ${job.place ?? "?"}`;
  if (job.status === "failed") return `${job.error.message}${job.hint ? `: ${job.hint}` : ""}`;
  if (job.status === "cancelled") return "cancelled";
  if (job.status === "completed") return `${job.seconds} s, seed ${job.seed}`;
  const { stage, done, total, eta_s: rest } = job.stage;
  if (!stage) return "starting";
  const steps = total ? ` ${done} of ${total}` : "";
  return `${stage}${steps}${rest == null ? "" : `, about ${rest} s left`}`;
}

function render() {
  const all = [...jobs.values()];
  const waiting = all.filter((job) => ["queued", "in_progress"].includes(job.status));
  waiting.sort((a, b) => (a.place ?? 0) - (b.place ?? 0));
  sync(find("queue"), waiting, "job", showJob);
  find("idle").hidden = waiting.length > 0;
  const over = all.filter((job) => !waiting.includes(job));
  over.sort((a, b) => b.created_at - a.created_at || (a.id < b.id ? 1 : -1));
  sync(find("gallery"), over, "result", showResult);
}

// Keep elements of jobs that stay, so that a playing video and the focus are not lost.
function sync(list, shown, template, show) {
  const before = new Map([...list.children].map((item) => [item.dataset.id, item]));
  const items = shown.map((job) => {
    const item = before.get(job.id) ?? find(template).content.firstElementChild.cloneNode(true);
    item.dataset.id = job.id;
    show(item, job);
    return item;
  });
  for (const item of list.children) if (!items.includes(item)) item.remove();
  items.forEach((item, place) => {
    if (list.children[place] !== item) list.insertBefore(item, list.children[place] ?? null);
  });
}

function showJob(item, job) {
  item.querySelector(".prompt").textContent = job.prompt;
  item.querySelector(".state").textContent = stateOf(job);
  const bar = item.querySelector("progress");
  bar.hidden = job.status === "queued";
  bar.value = job.progress;
  bar.setAttribute("aria-label", `Progress of ${job.prompt}`);
  for (const button of item.querySelectorAll("[data-do=up], [data-do=down]")) button.hidden = job.status !== "queued";
  const picture = item.querySelector("img");
  picture.hidden = !previews.has(job.id);
  if (previews.has(job.id)) {
    const source = `/v1/videos/${job.id}/preview?n=${previews.get(job.id)}`;
    if (picture.getAttribute("src") !== source) picture.src = source;
  }
}

function showResult(item, job) {
  item.classList.toggle("failed", job.status === "failed");
  item.querySelector(".prompt").textContent = job.prompt;
  item.querySelector(".state").textContent = stateOf(job);
  item.querySelector("pre").textContent = `${JSON.stringify({ size: job.size, seed: job.seed, ...job.settings }, null, 1)}
${job.command}`;
  const isDone = job.status === "completed";
  for (const name of ["extend", "last", "compare"]) item.querySelector(`[data-do=${name}]`).hidden = !isDone;
  const link = item.querySelector("a");
  link.hidden = !isDone;
  link.href = `/v1/videos/${job.id}/content`;
  const media = item.querySelector(".media");
  if (isDone && !media.firstChild) media.append(mediaOf(job));
}

function mediaOf(job) {
  const isPicture = job.num_frames === 1;
  const element = document.createElement(isPicture ? "img" : "video");
  if (isPicture) {
    element.alt = job.prompt;
  } else {
    Object.assign(element, { loop: true, muted: true, controls: true, playsInline: true, preload: "none" });
    element.poster = `/v1/videos/${job.id}/content?variant=thumbnail`;
    element.setAttribute("aria-label", job.prompt);
    element.addEventListener("mouseenter", () => element.play().catch(() => {}));
    element.addEventListener("mouseleave", () => element.pause());
  }
  element.src = `/v1/videos/${job.id}/content`;
  return element;
}

// --- Actions ---

const actions = {
  async cancel(job) {
    await call("POST", `/v1/videos/${job.id}/cancel`);
  },
  async delete(job) {
    await call("DELETE", `/v1/videos/${job.id}`);
  },
  async up(job, item) {
    const before = item.previousElementSibling;
    if (before && jobs.get(before.dataset.id).status === "queued") {
      await call("POST", `/v1/videos/${job.id}/move`, { before: before.dataset.id });
    }
  },
  async down(job, item) {
    const after = item.nextElementSibling?.nextElementSibling;
    await call("POST", `/v1/videos/${job.id}/move`, { before: after?.dataset.id ?? null });
  },
  async again(job) {
    await call("POST", `/v1/videos/${job.id}/remix`, { prompt: job.prompt });
  },
  async seed(job) {
    const seed = Math.floor(Math.random() * 2 ** 31);
    await call("POST", `/v1/videos/${job.id}/remix`, { prompt: job.prompt, seed });
  },
  async extend(job) {
    const settings = { ...job.settings, extend: Number(job.settings.extend ?? 0) + 1 };
    await call("POST", `/v1/videos/${job.id}/remix`, { prompt: job.prompt, settings });
  },
  async last(job) {
    setReference(new File([await lastFrame(job)], "last_frame.png", { type: "image/png" }));
    find("prompt").value = job.prompt;
    find("prompt").focus();
  },
  async compare(job) {
    compared = [...compared.filter((each) => each.id !== job.id), job].slice(-2);
    find("pair").replaceChildren(...compared.map(mediaOf));
    find("compared").hidden = false;
  },
  async copy(job) {
    await navigator.clipboard.writeText(job.command);
  },
};

async function lastFrame(job) {
  const media = mediaOf(job);
  if (media instanceof HTMLVideoElement) {
    media.preload = "auto";
    await new Promise((done) => media.addEventListener("loadeddata", done, { once: true }));
    media.currentTime = Math.max(0, media.duration - 0.01);
    await new Promise((done) => media.addEventListener("seeked", done, { once: true }));
  } else {
    await media.decode();
  }
  const canvas = document.createElement("canvas");
  canvas.width = media.videoWidth ?? media.naturalWidth;
  canvas.height = media.videoHeight ?? media.naturalHeight;
  canvas.getContext("2d").drawImage(media, 0, 0);
  return new Promise((done) => canvas.toBlob(done, "image/png"));
}

async function act(event) {
  const button = event.target.closest("[data-do]");
  if (!button) return;
  const item = button.closest("[data-id]");
  find("problem").textContent = "";
  try {
    await actions[button.dataset.do](jobs.get(item.dataset.id), item);
  } catch (error) {
    find("problem").textContent = error.message;
  }
}

// --- What the server tells ---

async function load(after) {
  const page = await call("GET", `/v1/videos?limit=50${after ? `&after=${after}` : ""}`);
  for (const job of page.data) {
    jobs.set(job.id, job);
    if (job.preview) previews.set(job.id, 0);
  }
  find("older").hidden = !page.has_more;
  find("older").dataset.after = page.last_id ?? "";
  render();
}

async function refresh(id) {
  try {
    jobs.set(id, await call("GET", `/v1/videos/${id}`));
  } catch {
    jobs.delete(id);
  }
  render();
}

const heard = {
  state(job) {
    jobs.set(job.id, job);
    render();
  },
  deleted({ id }) {
    jobs.delete(id);
    render();
  },
  queue({ queue }) {
    for (const job of jobs.values()) job.place = queue.includes(job.id) ? queue.indexOf(job.id) + 1 : null;
    for (const id of queue) if (!jobs.has(id)) refresh(id);
    render();
  },
  progress({ id, progress }) {
    const job = jobs.get(id);
    if (!job) return;
    job.status = "in_progress";
    job.stage = progress;
    job.progress = Math.floor(progress.percent);
    render();
  },
  preview({ id }) {
    previews.set(id, (previews.get(id) ?? 0) + 1);
    render();
  },
};

function listen() {
  const events = new EventSource("/v1/events");
  for (const [name, hear] of Object.entries(heard)) {
    events.addEventListener(name, (event) => hear(JSON.parse(event.data)));
  }
  const show = (isOn) => {
    find("connection").textContent = isOn ? "connected" : "the server does not answer";
    find("connection").classList.toggle("on", isOn);
  };
  events.addEventListener("open", () => {
    show(true);
    jobs.clear();
    load();
  });
  events.addEventListener("error", () => show(false));
}

let timer;
find("form").addEventListener("submit", submit);
find("form").addEventListener("input", () => {
  clearTimeout(timer);
  timer = setTimeout(showPlan, 400);
});
find("reference").addEventListener("change", () => setReference(find("reference").files[0] ?? null));
find("clear").addEventListener("click", () => setReference(null));
find("drop").addEventListener("dragover", (event) => {
  event.preventDefault();
  find("drop").classList.add("over");
});
find("drop").addEventListener("dragleave", () => find("drop").classList.remove("over"));
find("drop").addEventListener("drop", (event) => {
  event.preventDefault();
  find("drop").classList.remove("over");
  if (event.dataTransfer.files[0]) setReference(event.dataTransfer.files[0]);
});
find("queue").addEventListener("click", act);
find("gallery").addEventListener("click", act);
find("older").addEventListener("click", () => load(find("older").dataset.after));
find("close_pair").addEventListener("click", () => {
  compared = [];
  find("compared").hidden = true;
});
find("play_both").addEventListener("click", () => {
  for (const media of find("pair").querySelectorAll("video")) {
    media.currentTime = 0;
    media.play();
  }
});

options = await call("GET", "/v1/options");
fillForm();
listen();
