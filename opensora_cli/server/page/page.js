// The page keeps no state of its own: all that it shows comes from /v1/videos and /v1/events.
const find = (id) => document.getElementById(id);
const jobs = new Map();
const previews = new Map();
const PRESET_FIELDS = ["res", "aspect_ratio", "num_frames", "steps"];
let options = {};
let compared = [];
let references = [];
let planned = 0;
let order = []; // IDs of the waiting videos, also of those that are not shown
let loading = null;

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
  const usual = preset();
  if (usual !== options.presets[0]) settings.config = usual.name;
  for (const name of [...PRESET_FIELDS, "extend", "cond"]) {
    const value = find(name).value;
    if (value !== "" && value !== String(usual[name])) settings[name] = value;
  }
  if (!references.length) delete settings.cond;
  if (settings.extend === "0") delete settings.extend;
  if (find("turbo").checked) settings.turbo = true;
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
  if (!references.length) return call("POST", "/v1/videos", values);
  const form = new FormData();
  form.append("prompt", values.prompt);
  form.append("seed", values.seed);
  form.append("settings", JSON.stringify(values.settings));
  for (const file of references) form.append("input_reference", file);
  return call("POST", "/v1/videos", form);
}

async function showPlan() {
  const number = ++planned;
  const values = formValues();
  // A GIF usually moves.
  const isPicture = (file) => file.type.startsWith("image/") && file.type !== "image/gif";
  values.references = references.map((file) => (isPicture(file) ? "picture" : "video"));
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

function preset() {
  return options.presets[find("config").selectedIndex];
}

function fillPreset() {
  for (const name of PRESET_FIELDS) find(name).value = preset()[name];
}

function setReferences(files) {
  const most = find("cond").value ? options.modes[find("cond").value] : Math.max(...Object.values(options.modes));
  references = files.slice(-most);
  const shown = references.map((file) => {
    const button = Object.assign(document.createElement("button"), { type: "button", title: "Remove" });
    const media = document.createElement(file.type.startsWith("image/") ? "img" : "video");
    media.src = URL.createObjectURL(file);
    media.alt = file.name;
    button.append(media, `Remove ${file.name}`);
    button.addEventListener("click", () => setReferences(references.filter((each) => each !== file)));
    return button;
  });
  for (const media of find("references").querySelectorAll("img, video")) URL.revokeObjectURL(media.src);
  find("references").replaceChildren(...shown);
  find("reference").value = "";
  showPlan();
}

function fillForm() {
  const choose = (id, values) => find(id).replaceChildren(...values.map((value) => new Option(value, value)));
  choose("config", options.presets.map((each) => each.name));
  choose("res", options.resolutions);
  choose("aspect_ratio", options.aspect_ratios);
  choose("cond", ["", ...Object.keys(options.modes)]);
  find("cond").options[0].textContent = "as its kind asks for";
  find("num_frames").max = options.max_frames;
  find("model").textContent = options.model;
  fillPreset();
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
  return `${stage}${steps}${rest == null ? "" : `, about ${duration(rest)} left`}`;
}

function duration(seconds) {
  return seconds < 90 ? `${seconds} s` : `${Math.round(seconds / 60)} min`;
}

function render() {
  const all = [...jobs.values()];
  const waiting = all.filter((job) => ["queued", "in_progress"].includes(job.status));
  waiting.sort((a, b) => (a.place ?? 0) - (b.place ?? 0));
  sync(find("queue"), waiting, "job", showJob);
  const more = order.length - waiting.filter((job) => job.status === "queued").length;
  find("waiting").textContent = waiting.length ? (more > 0 ? `${more} more are waiting.` : "") : "Nothing is waiting.";
  const over = all.filter((job) => !waiting.includes(job));
  over.sort((a, b) => b.number - a.number);
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
  const focused = document.activeElement;
  for (const item of [...list.children]) if (!items.includes(item)) item.remove();
  items.forEach((item, place) => {
    if (list.children[place] !== item) list.insertBefore(item, list.children[place] ?? null);
  });
  if (list.contains(focused)) focused.focus(); // a moved element loses it
}

function showJob(item, job) {
  item.querySelector(".prompt").textContent = job.prompt;
  item.querySelector(".state").textContent = stateOf(job);
  const bar = item.querySelector("progress");
  bar.hidden = job.status === "queued";
  bar.value = job.progress;
  bar.setAttribute("aria-label", `Progress of ${job.prompt}`);
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
  const facts = { size: job.size, seed: job.seed, references: job.num_references, ...job.settings };
  item.querySelector("pre").textContent = JSON.stringify(facts, null, 1);
  const isDone = job.status === "completed";
  for (const name of ["extend", "last", "compare"]) item.querySelector(`[data-do=${name}]`).hidden = !isDone;
  const link = item.querySelector("a");
  link.hidden = !isDone;
  link.href = `/v1/videos/${job.id}/content`;
  const media = item.querySelector(".media");
  if (isDone && !media.firstChild) media.append(playUnderPointer(mediaOf(job)));
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
  }
  element.src = `/v1/videos/${job.id}/content`;
  return element;
}

function playUnderPointer(media) {
  if (!(media instanceof HTMLVideoElement)) return media;
  media.addEventListener("mouseenter", () => media.play().catch(() => {}));
  media.addEventListener("mouseleave", () => media.pause());
  return media;
}

// Let one video follow another one: its time, and whether it plays.
function follow(leader, other) {
  const align = () => {
    if (Math.abs(other.currentTime - leader.currentTime) > 0.06) other.currentTime = leader.currentTime;
  };
  for (const name of ["seeking", "timeupdate", "pause"]) leader.addEventListener(name, align);
  leader.addEventListener("play", () => other.play().catch(() => {}));
  leader.addEventListener("pause", () => other.pause());
}

// --- Actions ---

const actions = {
  async cancel(job) {
    await call("POST", `/v1/videos/${job.id}/cancel`);
  },
  async delete(job) {
    await call("DELETE", `/v1/videos/${job.id}`);
  },
  async again(job) {
    await call("POST", `/v1/videos/${job.id}/remix`, { prompt: job.prompt });
  },
  async seed(job) {
    const seed = Math.floor(Math.random() * 2 ** 31);
    await call("POST", `/v1/videos/${job.id}/remix`, { prompt: job.prompt, seed });
  },
  async extend(job) {
    const settings = { extend: Number(job.settings.extend ?? 0) + 1 };
    await call("POST", `/v1/videos/${job.id}/remix`, { prompt: job.prompt, settings });
  },
  async last(job) {
    find("prompt").value = job.prompt;
    setReferences([new File([await lastFrame(job)], "last_frame.png", { type: "image/png" })]);
    find("prompt").focus();
  },
  async compare(job) {
    compared = [...compared.filter((each) => each.id !== job.id), job].slice(-2);
    const media = compared.map(mediaOf);
    for (const each of media) each.preload = "auto";
    find("pair").replaceChildren(...media);
    const [leader, other] = find("pair").querySelectorAll("video");
    if (other) {
      follow(leader, other);
      other.controls = false;
    }
    find("compared").hidden = false;
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
  async queue({ queue, running }) {
    await loading;
    order = queue;
    const places = new Map(queue.map((id, place) => [id, place + 1]));
    for (const job of jobs.values()) job.place = places.get(job.id) ?? null;
    for (const id of [...running, ...queue.slice(0, 50)]) if (!jobs.has(id)) refresh(id);
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
    loading = load();
  });
  events.addEventListener("error", () => show(false));
}

let timer;
find("form").addEventListener("submit", submit);
find("form").addEventListener("input", () => {
  clearTimeout(timer);
  timer = setTimeout(showPlan, 400);
});
find("config").addEventListener("change", fillPreset);
find("reference").addEventListener("change", () => setReferences([...references, ...find("reference").files]));
find("cond").addEventListener("change", () => setReferences(references));
find("drop").addEventListener("dragover", (event) => {
  event.preventDefault();
  find("drop").classList.add("over");
});
find("drop").addEventListener("dragleave", () => find("drop").classList.remove("over"));
find("drop").addEventListener("drop", (event) => {
  event.preventDefault();
  find("drop").classList.remove("over");
  setReferences([...references, ...event.dataTransfer.files]);
});
find("queue").addEventListener("click", act);
find("gallery").addEventListener("click", act);
find("older").addEventListener("click", () => load(find("older").dataset.after));
find("close_pair").addEventListener("click", () => {
  compared = [];
  find("compared").hidden = true;
});
find("play_both").addEventListener("click", () => {
  const leader = find("pair").querySelector("video");
  if (leader?.paused) leader.play();
  else leader?.pause();
});

options = await call("GET", "/v1/options");
const [model] = (await call("GET", "/v1/models")).data;
find("turbo").parentElement.hidden = !model.turbo;
fillForm();
listen();
