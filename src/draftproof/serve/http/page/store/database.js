// Conversations in this browser's IndexedDB. Nothing is stored on the server.

import { Conversation } from "./conversation.js";

const NAME = "draftproof";
const STORES = ["summaries", "conversations"];   // the list needs no messages

let opened = null;

function open() {
  opened ??= new Promise((resolve, reject) => {
    const request = indexedDB.open(NAME, 1);
    request.onupgradeneeded = () => STORES.forEach((store) => request.result.createObjectStore(store, { keyPath: "id" }));
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
  return opened;
}

// Run `work` in one transaction; return the result of the request that it returns.
async function transact(mode, work) {
  const database = await open();
  return new Promise((resolve, reject) => {
    const transaction = database.transaction(STORES, mode);
    const request = work(...STORES.map((name) => transaction.objectStore(name)));
    transaction.oncomplete = () => resolve(request?.result);
    transaction.onabort = () => reject(transaction.error);
  });
}

// Return {id, title, updated} of all conversations, newest first.
export async function listConversations() {
  const found = await transact("readonly", (summaries) => summaries.getAll());
  return found.sort((a, b) => b.updated - a.updated);
}

export async function loadConversation(id) {
  const data = await transact("readonly", (_, conversations) => conversations.get(id));
  return data ? Conversation.from(data) : null;
}

export function saveConversation(conversation) {
  const { id, title, updated } = conversation;
  return transact("readwrite", (summaries, conversations) => {
    summaries.put({ id, title, updated });
    conversations.put({ ...conversation });
  });
}

export function deleteConversation(id) {
  return transact("readwrite", (...stores) => stores.forEach((store) => store.delete(id)));
}
