// The page: connects conversations, prompt, settings and panel.

import { ApiError } from "./api.js";
import { Composer } from "./chat/composer.js";
import { ConversationList } from "./chat/conversation_list.js";
import { Session } from "./chat/session.js";
import { Transcript } from "./chat/transcript.js";
import { $ } from "./dom.js";
import { Layout } from "./layout.js";
import { Inspector } from "./panel/inspector.js";
import { ServerView, startHealth } from "./panel/server.js";
import { SettingsForm } from "./panel/settings.js";
import { Tabs } from "./panel/tabs.js";
import { startTheme } from "./theme.js";

startTheme();

const server = new ServerView();
const tabs = new Tabs(watchServer);
let layout = null;
layout = new Layout(watchServer);

// Read the server's metrics only while they are shown.
function watchServer() {
  if (layout?.isOpen("panel") && tabs.selected === "server") server.start();
  else server.stop();
}

function openTab(name) {
  tabs.select(name);
  if (!layout.isOpen("panel")) layout.set("panel", true);
}

function showError(error) {
  $("error").textContent = error?.message ?? "";
  $("error").hidden = !error;
  if (error instanceof ApiError && error.status === 401) {
    openTab("settings");
    $("key").focus();
  }
}

const settings = new SettingsForm((values) => session.keepSettings(values));
const session = new Session(() => settings.read(), showError);
session.addEventListener("open", () => { settings.values = session.conversation.settings; });
session.addEventListener("list", keepAddress);
session.addEventListener("open", keepAddress);

// Keep the open conversation in the address, so that a reload shows it again.
function keepAddress() {
  const { id, messages } = session.conversation;
  history.replaceState(null, "", messages.length ? `#${id}` : location.pathname);
}

const inspector = new Inspector(() => openTab("output"));
const transcript = new Transcript(session, inspector);
new Composer(session, transcript, showError);

function createConversation() {
  showError(null);
  session.create(settings.lastUsed());
  layout.closeDrawer("list");
  $("prompt").focus();
}

new ConversationList(session, () => {
  showError(null);
  layout.closeDrawer("list");
}, createConversation);

$("show-tokens").addEventListener("change", () => {
  if ($("show-tokens").checked && layout.isOpen("panel")) tabs.select("output");
});
$("summary").addEventListener("click", () => {
  openTab("settings");
  $("system").focus();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !layout.closeAny()) session.stop();
  if (event.altKey && event.code === "KeyN") {
    event.preventDefault();
    createConversation();
  }
});

tabs.select("settings");
const address = location.hash.slice(1);
session.create(settings.lastUsed());
if (address) session.open(address).catch(showError);
startHealth();
